//! The double's state of the calling thread.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::nccl::group::Group;

/// State of one thread.
pub(crate) struct Thread {
    /// From 1, in the order of first calls.
    pub(crate) number: u64,
    /// Devices whose primary contexts were pushed or set; the last is current.
    pub(crate) contexts: Vec<Option<i32>>,
    /// 0 global, 1 thread-local, 2 relaxed.
    pub(crate) capture_mode: i32,
    /// Within a function of `cuLaunchHostFunc`.
    pub(crate) in_host_function: bool,
    pub(crate) group: Group,
}

thread_local! {
    static THREAD: RefCell<Thread> = {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        RefCell::new(Thread {
            number: NUMBER.fetch_add(1, Ordering::Relaxed) + 1,
            contexts: Vec::new(),
            capture_mode: 0,
            in_host_function: false,
            group: Group::default(),
        })
    };
}

/// Runs `body` on the calling thread's state.
pub(crate) fn with<T>(body: impl FnOnce(&mut Thread) -> T) -> T {
    THREAD.with(|thread| body(&mut thread.borrow_mut()))
}

pub(crate) fn number() -> u64 {
    with(|thread| thread.number)
}

/// The device whose context is current.
pub(crate) fn context() -> Option<i32> {
    with(|thread| thread.contexts.last().copied().flatten())
}

//! The shutdown of an engine, visible to all threads.

use std::sync::atomic::{AtomicBool, Ordering};

/// Progress of the shutdown.
#[derive(Default)]
pub(super) struct Shutdown {
    requested: AtomicBool,
    ended: AtomicBool,
}

impl Shutdown {
    /// Notes that this process asks to leave.
    pub(super) fn request(&self) {
        self.requested.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    /// Notes that the engine's thread has left its loop.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

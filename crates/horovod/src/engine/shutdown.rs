//! The end of an engine, as all threads see it.

use std::sync::atomic::{AtomicBool, Ordering};

/// How far it is.
#[derive(Default)]
pub(super) struct Shutdown {
    requested: AtomicBool,
    ended: AtomicBool,
}

impl Shutdown {
    /// This process wants to leave.
    pub(super) fn request(&self) {
        self.requested.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    /// The engine's thread has left its loop.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

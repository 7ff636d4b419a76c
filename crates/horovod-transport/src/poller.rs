//! The poller: one wait for a rank's notifier and all of its sockets.

use std::{
    io,
    sync::atomic::{AtomicBool, AtomicU8, Ordering},
    time::Duration,
};

use crate::platform::{Events, READABLE, Source, WRITABLE};

/// Readiness of the sources, updated by [`Self::pump`].
///
/// A link clears its bit *before* the system call that may find nothing: an event that comes in
/// between sets it again, so none is lost.
pub(crate) struct Poller {
    events: Events,
    sources: Vec<Source>,
    ready: Box<[AtomicU8]>,
    /// Something was noted since it was last asked; the kernel will not tell again.
    news: AtomicBool,
}

impl Poller {
    pub(crate) fn new(sources: Vec<Source>) -> io::Result<Self> {
        let events = Events::new(&sources)?;
        let start = |s: &Source| {
            AtomicU8::new(if s.is_notifier {
                0
            } else {
                READABLE | WRITABLE
            })
        };
        let ready = sources.iter().map(start).collect();
        Ok(Self {
            events,
            sources,
            ready,
            news: AtomicBool::new(false),
        })
    }

    /// Takes note of what happened; waits for something to happen, for at most `timeout`.
    pub(crate) fn pump(&self, timeout: Option<Duration>) {
        let known = |token: usize| self.ready[token].load(Ordering::Relaxed);
        self.events
            .wait(&self.sources, timeout, &known, |token, bits| {
                self.news.store(true, Ordering::Relaxed);
                if let Some(ready) = self.ready.get(token)
                    && !self.sources[token].is_notifier
                {
                    ready.fetch_or(bits, Ordering::AcqRel);
                }
            });
    }

    /// Whether any pump noted anything since the last call. A thread must call this before it sleeps, because another
    /// thread's pump may have taken the event that would have woken it.
    pub(crate) fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::Relaxed)
    }

    /// As [`Self::take_news`], for who only looks.
    pub(crate) fn has_news(&self) -> bool {
        self.news.load(Ordering::Relaxed)
    }

    /// Whether any of `bits` is set.
    pub(crate) fn is(&self, token: usize, bits: u8) -> bool {
        self.ready[token].load(Ordering::Acquire) & bits != 0
    }

    pub(crate) fn set(&self, token: usize, bits: u8) {
        self.ready[token].fetch_or(bits, Ordering::AcqRel);
    }

    pub(crate) fn clear(&self, token: usize, bits: u8) {
        self.ready[token].fetch_and(!bits, Ordering::AcqRel);
    }
}

//! Soft waits: they end early if the other ranks wait for an operation that this rank submits only after the wait.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::handles::{Handle, Wait, Waited, WaitedFor};
use super::{Engine, nanos};

/// How long a soft wait lasts, at first, before it is reported to rank 0. [`GRACE_LEAST`] applies after a wait that was
/// ended early. The time doubles up to [`GRACE_MOST`] with each wait that lasted longer because some rank was merely
/// slow.
const GRACE: Duration = Duration::from_millis(4);
const GRACE_LEAST: Duration = Duration::from_millis(1);
const GRACE_MOST: Duration = Duration::from_millis(64);

/// Outcome of a soft wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Softly {
    /// The operation has ended, or the handle is unknown; the result stays where it was.
    Ended,
    /// The time is over, but the operation has not ended.
    Pending,
    /// No rank can make progress before this rank does. The operation stays pending.
    LetGo(WaitedFor),
}

/// The soft waits of this rank, as far as the driver needs them.
#[derive(Debug)]
pub(super) struct SoftWaits {
    waiting: AtomicU32,
    /// When the soft waits under way began, in nanoseconds.
    since: AtomicU64,
    grace: AtomicU64,
}

impl SoftWaits {
    pub(super) fn new() -> Self {
        Self {
            waiting: AtomicU32::new(0),
            since: AtomicU64::new(0),
            grace: AtomicU64::new(nanos(GRACE)),
        }
    }

    fn begin(&self, now_ns: u64) {
        if self.waiting.fetch_add(1, Ordering::AcqRel) == 0 {
            self.since.store(now_ns, Ordering::Release);
        }
    }

    fn end(&self, now_ns: u64, let_go: bool) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        let grace = self.grace.load(Ordering::Relaxed);
        let waited = now_ns.saturating_sub(self.since.load(Ordering::Acquire));
        let next = if let_go {
            nanos(GRACE_LEAST)
        } else if waited > grace {
            (2 * grace).min(nanos(GRACE_MOST))
        } else {
            return;
        };
        self.grace.store(next, Ordering::Relaxed);
    }

    /// Returns when the soft waits under way began; `None` if there are none.
    pub(super) fn since(&self) -> Option<u64> {
        let any = self.waiting.load(Ordering::Acquire) > 0;
        any.then(|| self.since.load(Ordering::Acquire))
    }

    /// Returns when to report a wait to rank 0 that began at `since`.
    pub(super) fn due(&self, since: u64) -> u64 {
        since.saturating_add(self.grace.load(Ordering::Relaxed))
    }
}

/// A soft wait of this thread; it ends when this is dropped.
pub struct SoftWait<'a> {
    engine: &'a Engine,
    handle: Handle,
    let_go: bool,
}

impl Engine {
    /// Returns the first of these operations that has not ended.
    pub fn first_pending(&self, handles: &[u64]) -> Option<Handle> {
        let mut handles = handles.iter().copied().map(Handle);
        let table = self.shared.handles.lock();
        handles.find(|handle| table.is_pending(*handle))
    }

    /// Begins a soft wait for this operation. It ends early when all ranks that the operation lacks wait, perhaps
    /// through others, for an operation that this rank has not submitted. That state is proven, not guessed from the
    /// time.
    pub fn wait_softly(&self, handle: Handle) -> SoftWait<'_> {
        self.shared.callers.soft().begin(self.shared.now().0);
        SoftWait {
            engine: self,
            handle,
            let_go: false,
        }
    }
}

impl SoftWait<'_> {
    /// Waits at most `timeout`. The handle stays valid in every case.
    pub fn wait(&mut self, timeout: Duration) -> Softly {
        let shared = &self.engine.shared;
        if let Waited::Ended { result, kept } =
            self.engine.wait_as(self.handle, timeout, Wait::Soft)
        {
            let mut table = shared.handles.lock();
            table.put_back(self.handle, result, kept);
            return Softly::Ended;
        }
        let table = shared.handles.lock();
        if let Some(cause) = table.let_go(self.handle) {
            self.let_go = true;
            return Softly::LetGo(cause.clone());
        }
        if table.is_pending(self.handle) {
            Softly::Pending
        } else {
            Softly::Ended
        }
    }
}

impl Drop for SoftWait<'_> {
    fn drop(&mut self) {
        let shared = &self.engine.shared;
        // The order matters: a poll in between finds a wait that is over, never one that still lasts.
        shared.callers.waits_no_more();
        shared.handles.lock().keep(self.handle);
        shared.callers.soft().end(shared.now().0, self.let_go);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn slow_ranks_lengthen_the_grace_and_one_early_end_shortens_it() {
        let soft = SoftWaits::new();
        assert_eq!(soft.since(), None);
        soft.begin(5 * MS);
        assert_eq!((soft.since(), soft.due(5 * MS)), (Some(5 * MS), 9 * MS));
        soft.end(6 * MS, false);
        assert_eq!((soft.since(), soft.due(0)), (None, 4 * MS));
        for (waited, grace) in [(5, 8), (7, 8), (9, 16), (99, 32), (99, 64), (99, 64)] {
            soft.begin(0);
            soft.end(waited * MS, false);
            assert_eq!(soft.due(0), grace * MS);
        }
        soft.begin(0);
        soft.end(99 * MS, true);
        assert_eq!(soft.due(0), MS);
    }

    #[test]
    fn of_several_threads_the_first_counts() {
        let soft = SoftWaits::new();
        soft.begin(1);
        soft.begin(2);
        soft.end(3, false);
        assert_eq!(soft.since(), Some(1));
        soft.end(3, false);
        assert_eq!(soft.since(), None);
    }
}

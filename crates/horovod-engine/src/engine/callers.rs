//! The registry of calling threads and the operations for which they wait, which separates a stall from slowness.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Handle;
use super::soft::SoftWaits;

/// A wait in slices counts as one wait if the next slice begins within this time.
const BETWEEN_SLICES: Duration = Duration::from_secs(1);
/// Value of `left_at` while the thread is in the call that waits.
const INSIDE: u64 = u64::MAX;
/// Value of `waits_for` of a thread that waits for nothing.
const NOTHING: u64 = 0;

/// The threads that have called operations of one engine.
#[derive(Debug)]
pub(super) struct Callers {
    engine: u64,
    threads: Mutex<Vec<Arc<Caller>>>,
    submitted: AtomicU64,
    /// Threads of a framework call operations, too, or may do so.
    has_guests: AtomicBool,
    /// Soft waits of these threads; the driver reads them.
    soft: SoftWaits,
    /// Number of calls under way that are recorded in the timeline when they return.
    recorded: AtomicUsize,
}

#[derive(Debug, Default)]
struct Caller {
    /// A handle, or [`NOTHING`].
    waits_for: AtomicU64,
    /// The wait is soft: it may end before its operation.
    softly: AtomicBool,
    /// When the thread left the wait without a result, in nanoseconds; [`INSIDE`] while it waits.
    left_at: AtomicU64,
    gone: AtomicBool,
}

/// This thread's entries, one per engine that it has called.
struct Mine(Vec<(u64, Arc<Caller>)>);

impl Drop for Mine {
    fn drop(&mut self) {
        for (_, caller) in &self.0 {
            caller.gone.store(true, Ordering::Relaxed);
        }
    }
}

thread_local! {
    static MINE: RefCell<Mine> = const { RefCell::new(Mine(Vec::new())) };
    static IS_GUEST: Cell<bool> = const { Cell::new(false) };
}

static ENGINES: AtomicU64 = AtomicU64::new(0);

/// While this exists, calls of the thread count as a framework's, and the thread is not registered. A wait of a
/// framework's thread shows nothing about the script.
#[must_use = "the thread is a guest until this is dropped"]
pub(super) struct Guest {
    was_guest: bool,
}

impl Guest {
    pub(super) fn begin() -> Self {
        Self {
            was_guest: IS_GUEST.replace(true),
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        IS_GUEST.set(self.was_guest);
    }
}

/// State of the calling threads.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Waits {
    /// All registered threads wait, and there is at least one.
    pub(super) all: bool,
    /// A framework's threads, which are not registered, may compute what they submit next.
    pub(super) has_guests: bool,
    /// Operations for which the threads wait.
    pub(super) handles: Vec<Handle>,
    /// Operations for which threads wait softly.
    pub(super) soft: Vec<Handle>,
}

impl Callers {
    pub(super) fn new() -> Self {
        Self {
            engine: ENGINES.fetch_add(1, Ordering::Relaxed),
            threads: Mutex::default(),
            submitted: AtomicU64::new(0),
            has_guests: AtomicBool::new(false),
            soft: SoftWaits::new(),
            recorded: AtomicUsize::new(0),
        }
    }

    pub(super) fn soft(&self) -> &SoftWaits {
        &self.soft
    }

    /// Counts a call that begins, and that is recorded in the timeline when it returns.
    pub(super) fn recorded_call_begins(&self) {
        self.recorded.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts the end of a recorded call.
    pub(super) fn recorded_call_ends(&self) {
        self.recorded.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns whether recorded calls are under way.
    pub(super) fn has_recorded_calls(&self) -> bool {
        self.recorded.load(Ordering::SeqCst) > 0
    }

    /// Notes that threads of a framework may call from now on.
    pub(super) fn expect_guests(&self) {
        self.has_guests.store(true, Ordering::Relaxed);
    }

    /// Calls `then` with this thread's entry. Does nothing for a guest without an entry, or while the thread is being
    /// taken down.
    fn with_mine(&self, then: impl FnOnce(&Caller)) {
        if IS_GUEST.get() {
            self.expect_guests();
        }
        let _ = MINE.try_with(|mine| {
            let Ok(mut mine) = mine.try_borrow_mut() else {
                return;
            };
            if let Some((_, caller)) = mine.0.iter().find(|(engine, _)| *engine == self.engine) {
                then(caller);
                return;
            }
            if IS_GUEST.get() {
                return;
            }
            // Each init starts another engine. An entry to which only this thread refers belongs to an engine that has
            // ended.
            mine.0.retain(|(_, caller)| Arc::strong_count(caller) > 1);
            let caller = Arc::new(Caller::default());
            then(&caller);
            let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            threads.retain(|caller| !caller.gone.load(Ordering::Relaxed));
            threads.push(caller.clone());
            mine.0.push((self.engine, caller));
        });
    }

    /// Notes that this thread has submitted an operation.
    pub(super) fn submits(&self) {
        self.submitted.fetch_add(1, Ordering::Relaxed);
        self.with_mine(|caller| caller.waits_for.store(NOTHING, Ordering::Relaxed));
    }

    /// Notes that this thread begins to wait.
    pub(super) fn waits(&self, handle: Handle, softly: bool) {
        self.with_mine(|caller| {
            caller.softly.store(softly, Ordering::Relaxed);
            caller.left_at.store(INSIDE, Ordering::Relaxed);
            caller.waits_for.store(handle.0, Ordering::Relaxed);
        });
    }

    /// Notes that this thread's wait is over: it has a result, or never gets one.
    pub(super) fn waits_no_more(&self) {
        self.with_mine(|caller| caller.waits_for.store(NOTHING, Ordering::Relaxed));
    }

    /// Notes that this thread leaves the wait without a result, and may resume it.
    pub(super) fn pauses(&self, now_ns: u64) {
        self.with_mine(|caller| caller.left_at.store(now_ns, Ordering::Relaxed));
    }

    /// Returns the number of operations submitted so far.
    pub(super) fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::Relaxed)
    }

    pub(super) fn observe(&self, now_ns: u64) -> Waits {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let mut alive = 0;
        let (mut handles, mut soft) = (Vec::new(), Vec::new());
        for caller in threads.iter().filter(|c| !c.gone.load(Ordering::Relaxed)) {
            alive += 1;
            let handle = caller.waits_for.load(Ordering::Relaxed);
            let left_at = caller.left_at.load(Ordering::Relaxed);
            let recent = Duration::from_nanos(now_ns.saturating_sub(left_at)) < BETWEEN_SLICES;
            if handle != NOTHING && (left_at == INSIDE || recent) {
                handles.push(Handle(handle));
                if caller.softly.load(Ordering::Relaxed) {
                    soft.push(Handle(handle));
                }
            }
        }
        Waits {
            all: alive > 0 && handles.len() == alive,
            has_guests: self.has_guests.load(Ordering::Relaxed),
            handles,
            soft,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_thread_waits_from_the_call_on_until_it_has_a_result_or_does_something_else() {
        let callers = Callers::new();
        assert!(!callers.observe(0).all, "nobody has called");
        callers.submits();
        assert!(!callers.observe(0).all);
        callers.waits(Handle(7), true);
        let waits = callers.observe(50 * SECOND);
        assert!(waits.all && waits.handles == [Handle(7)] && waits.soft == [Handle(7)]);
        callers.pauses(50 * SECOND);
        assert!(callers.observe(50 * SECOND + 1).all, "between two slices");
        assert!(!callers.observe(52 * SECOND).all, "it has gone elsewhere");
        callers.waits(Handle(7), false);
        assert_eq!(callers.observe(53 * SECOND).soft, []);
        callers.waits_no_more();
        assert!(!callers.observe(53 * SECOND).all);
        assert_eq!(callers.submitted(), 1);
    }

    #[test]
    fn all_threads_count_until_they_end() {
        let callers = Callers::new();
        callers.waits(Handle(1), false);
        std::thread::scope(|s| {
            let other = s.spawn(|| {
                callers.submits();
                assert!(
                    !callers.observe(0).all,
                    "the other waits, this one does not"
                );
            });
            // The end of a scope does not wait for the destructors of thread-local values, a join does.
            other.join().unwrap();
        });
        assert!(callers.observe(0).all);
    }

    #[test]
    fn a_thread_of_a_framework_is_not_registered() {
        let callers = Callers::new();
        callers.submits();
        assert!(!callers.observe(0).has_guests);
        let callers = Callers::new();
        let guest = Guest::begin();
        callers.submits();
        callers.waits(Handle(1), false);
        let waits = callers.observe(0);
        assert!(!waits.all && waits.has_guests, "nobody is known");
        drop(guest);
        callers.submits();
        // A thread that has called outside of a guest call stays registered.
        let _guest = Guest::begin();
        callers.waits(Handle(2), false);
        assert!(callers.observe(0).all);
        assert_eq!(callers.submitted(), 2);
        assert!(callers.observe(0).has_guests, "they may come back");
    }

    #[test]
    fn engines_do_not_mix() {
        let (a, b) = (Callers::new(), Callers::new());
        a.waits(Handle(1), false);
        b.submits();
        assert!(a.observe(0).all && !b.observe(0).all);
    }
}

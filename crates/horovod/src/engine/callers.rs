//! The registry of calling threads, and what each waits for: so that a stall can be told from slowness.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Handle;
use super::soft::SoftWaits;

/// A wait in slices is still the same wait when the next slice begins within this time.
const BETWEEN_SLICES: Duration = Duration::from_secs(1);
/// The thread is in the call that waits.
const INSIDE: u64 = u64::MAX;
/// It waits for nothing.
const NOTHING: u64 = 0;

/// The threads that have called operations of one engine.
#[derive(Debug)]
pub(super) struct Callers {
    engine: u64,
    threads: Mutex<Vec<Arc<Caller>>>,
    submitted: AtomicU64,
    /// Threads of a framework call, too, or may.
    has_guests: AtomicBool,
    /// Soft waits of these threads; the driver reads them.
    soft: SoftWaits,
    /// Calls under way that will be in the timeline when they return.
    recorded: AtomicUsize,
}

#[derive(Debug, Default)]
struct Caller {
    /// A handle, or [`NOTHING`].
    waits_for: AtomicU64,
    /// The wait may be ended before its time.
    softly: AtomicBool,
    /// When it left the wait without a result, in nanoseconds; [`INSIDE`] while it has not.
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

/// While this exists, calls of the thread count as a framework's, and the thread is not registered. The place where a
/// framework's thread waits says nothing of the script.
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
    /// All of them wait, and there is at least one.
    pub(super) all: bool,
    /// A framework's threads, which nobody sees, may compute what they submit next.
    pub(super) has_guests: bool,
    /// For what.
    pub(super) handles: Vec<Handle>,
    /// Those of them that are waited for softly.
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

    /// A call begins that will be in the timeline when it returns.
    pub(super) fn recorded_call_begins(&self) {
        self.recorded.fetch_add(1, Ordering::SeqCst);
    }

    /// It has returned.
    pub(super) fn recorded_call_ends(&self) {
        self.recorded.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether such calls are under way.
    pub(super) fn has_recorded_calls(&self) -> bool {
        self.recorded.load(Ordering::SeqCst) > 0
    }

    /// Threads of a framework may call from now on.
    pub(super) fn expect_guests(&self) {
        self.has_guests.store(true, Ordering::Relaxed);
    }

    /// Run with this thread's entry; not at all while the thread is being taken down.
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
            // Engines come and go with each init; those that nobody else knows have ended.
            mine.0.retain(|(_, caller)| Arc::strong_count(caller) > 1);
            let caller = Arc::new(Caller::default());
            then(&caller);
            let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            threads.retain(|caller| !caller.gone.load(Ordering::Relaxed));
            threads.push(caller.clone());
            mine.0.push((self.engine, caller));
        });
    }

    /// This thread has submitted an operation.
    pub(super) fn submits(&self) {
        self.submitted.fetch_add(1, Ordering::Relaxed);
        self.with_mine(|caller| caller.waits_for.store(NOTHING, Ordering::Relaxed));
    }

    /// This thread begins to wait.
    pub(super) fn waits(&self, handle: Handle, softly: bool) {
        self.with_mine(|caller| {
            caller.softly.store(softly, Ordering::Relaxed);
            caller.left_at.store(INSIDE, Ordering::Relaxed);
            caller.waits_for.store(handle.0, Ordering::Relaxed);
        });
    }

    /// It has what it waited for, or never will.
    pub(super) fn waits_no_more(&self) {
        self.with_mine(|caller| caller.waits_for.store(NOTHING, Ordering::Relaxed));
    }

    /// It leaves the wait without a result, perhaps to come back.
    pub(super) fn pauses(&self, now_ns: u64) {
        self.with_mine(|caller| caller.left_at.store(now_ns, Ordering::Relaxed));
    }

    /// Operations submitted so far.
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
            // The end of a scope does not wait for what a thread drops last, this does.
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
        // One that has called for itself stays known.
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

//! Who drives: the engine's thread, or a thread that waits for a result and so saves two wake-ups.
//!
//! The driver stands behind a lock, the seat. A thread that blocks in [`Seat::wait`] takes the seat if it is free
//! and drives until its operation has ended; one that submits takes it for a glance, which sends what it has to
//! say. The engine's thread drives when nobody else does, but sleeps *without* the seat: whoever leaves the seat
//! last arms the doorbell first, and the engine's thread hears it.
//!
//! While calls come thick and fast even that costs too much: each message of a peer would wake the engine's thread
//! between two calls of this rank. So then it *ticks*: it sleeps by the clock, nobody arms the doorbell, and what
//! a burst of submissions left unsaid is said at the next wait, the next glance or the next tick.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use horovod_transport::Sleeper;

use super::driver::{Driver, Work};
use super::handles::{Handle, Waited};
use super::{LastWords, Shared};

/// How long the engine's thread sleeps between two looks while calls come thick and fast.
const TICK: Duration = Duration::from_micros(500);
/// Submissions within this time of the last glance wait for a wait, a tick, or the next glance.
const BURST_NS: u64 = 100_000;
/// The same where ranks outnumber cores: their calls take longer, and an engine's thread that wakes takes the core
/// from one of them.
const CROWDED_BURST_NS: u64 = 1_000_000;

/// The driver, and who may drive.
pub(super) struct Seat {
    shared: Arc<Shared>,
    /// `None` when the engine has ended.
    driver: Mutex<Option<Driver>>,
    sleeper: Sleeper,
    /// The engine's own thread.
    engine: OnceLock<Thread>,
    /// Calls come thick and fast: it shall sleep by the clock. Cleared only with the seat.
    burst: AtomicBool,
    /// It does sleep by the clock, and will take the seat before it listens to the doorbell again. What was
    /// asked for is not enough for others to leave the doorbell unarmed: somebody may have heard that call in
    /// its place.
    ticking: AtomicBool,
    /// A caller drives, perhaps for long.
    caller_drives: AtomicBool,
    /// Calls so far, to see whether any came.
    calls: AtomicU64,
    /// When a submission last was a glance.
    last_glance: AtomicU64,
    burst_ns: u64,
}

impl Seat {
    pub(super) fn new(driver: Driver, sleeper: Sleeper, shared: Arc<Shared>) -> Self {
        let burst_ns = if driver.is_crowded() {
            CROWDED_BURST_NS
        } else {
            BURST_NS
        };
        Self {
            burst_ns,
            shared,
            driver: Mutex::new(Some(driver)),
            sleeper,
            engine: OnceLock::new(),
            burst: AtomicBool::new(false),
            ticking: AtomicBool::new(false),
            caller_drives: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            last_glance: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Driver>> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The seat if it is free and the engine runs.
    fn take(&self) -> Option<MutexGuard<'_, Option<Driver>>> {
        let guard = match self.driver.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        guard.is_some().then_some(guard)
    }

    /// The engine's thread.
    pub(super) fn run(&self) {
        let last_words = LastWords(self.shared.clone());
        // Nobody else sets it.
        let _ = self.engine.set(thread::current());
        while let Some(nap) = self.work() {
            if !self.burst.load(Ordering::SeqCst) {
                self.sleeper.sleep(nap);
                if self.caller_drives.load(Ordering::SeqCst) {
                    // What woke this thread may have been meant for that one.
                    self.sleeper.wake();
                }
            }
            if self.burst.load(Ordering::SeqCst) {
                self.ticking.store(true, Ordering::SeqCst);
                self.tick();
                self.ticking.store(false, Ordering::SeqCst);
            }
        }
        let driver = self.lock().take();
        // Links close before anybody is told that the engine has ended.
        if let Some(driver) = driver {
            let ended = catch_unwind(AssertUnwindSafe(|| driver.end()));
            if ended.is_err() {
                tracing::error!("the engine's thread panicked while it took leave");
            }
        }
        drop(last_words);
    }

    /// One stretch of work of the engine's thread; how long it may sleep then, `None` at the end.
    fn work(&self) -> Option<Duration> {
        let mut seat = self.lock();
        let driver = seat.as_mut()?;
        self.shared.wanted.store(false, Ordering::SeqCst);
        self.burst.store(false, Ordering::SeqCst);
        let next = guarded(driver, Driver::work).unwrap_or(Work::Finished);
        drop(seat);
        self.shared.handles.seat_is_free();
        match next {
            Work::Sleep(nap) => Some(nap),
            Work::Finished => None,
        }
    }

    /// Sleep by the clock until the calls have become rare.
    fn tick(&self) {
        let mut seen = self.calls.load(Ordering::Relaxed);
        loop {
            thread::park_timeout(TICK);
            let calls = self.calls.load(Ordering::Relaxed);
            if calls == seen || self.shared.wanted() {
                return;
            }
            seen = calls;
            if let Some(mut seat) = self.take() {
                let leave = seat.as_mut().and_then(|driver| {
                    guarded(driver, |d| {
                        d.glance();
                        d.leave(true)
                    })
                });
                let job = seat.as_ref().is_some_and(Driver::has_job);
                drop(seat);
                self.shared.handles.seat_is_free();
                if leave.unwrap_or(true) || job {
                    return;
                }
            }
        }
    }

    /// Wait at most `timeout` and clear the handle when its operation has ended.
    pub(super) fn wait(&self, handle: Handle, timeout: Duration) -> Waited {
        let handles = &self.shared.handles;
        let mut deadline = None;
        loop {
            let mut table = handles.lock();
            if let Some(end) = table.take(handle) {
                return end;
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + timeout);
            // The lock is held so that nobody leaves the seat unheard in between.
            let seat = if self.shared.wanted() {
                None
            } else {
                self.take()
            };
            let Some(seat) = seat else {
                if !handles.sleep(table, deadline) {
                    return Waited::Pending;
                }
                continue;
            };
            drop(table);
            self.drive(seat, handle, deadline);
            if let Some(end) = handles.lock().take(handle) {
                return end;
            }
            if Instant::now() >= deadline {
                return Waited::Pending;
            }
        }
    }

    fn drive(&self, mut seat: MutexGuard<'_, Option<Driver>>, handle: Handle, deadline: Instant) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.caller_drives.store(true, Ordering::SeqCst);
        let done = || self.shared.handles.poll(handle) != Some(false);
        if let Some(driver) = seat.as_mut()
            && !done()
        {
            guarded(driver, |d| d.work_until(deadline, done));
        }
        self.caller_drives.store(false, Ordering::SeqCst);
        self.leave(seat);
    }

    /// Hand over to whoever comes next; nobody may, so the engine's thread must be able to hear.
    fn leave(&self, mut seat: MutexGuard<'_, Option<Driver>>) {
        let ticking = self.ticking.load(Ordering::SeqCst);
        let call = match seat.as_mut() {
            Some(driver) => guarded(driver, |d| d.leave(ticking)).unwrap_or(true),
            None => false,
        };
        if call {
            self.shared.wanted.store(true, Ordering::SeqCst);
        }
        drop(seat);
        self.shared.handles.seat_is_free();
        if call {
            self.call_engine();
        }
    }

    /// Make the engine's thread take the seat, wherever it sleeps and whoever has it.
    pub(super) fn call_engine(&self) {
        self.shared.wanted.store(true, Ordering::SeqCst);
        self.sleeper.wake();
        if let Some(engine) = self.engine.get() {
            engine.unpark();
        }
    }

    /// Something was submitted.
    pub(super) fn submitted(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let now = self.shared.now().0;
        let since = now.saturating_sub(self.last_glance.load(Ordering::Relaxed));
        if since < self.burst_ns && !self.shared.alone {
            self.burst.store(true, Ordering::SeqCst);
            // The engine's thread in its bed, or a caller that drives and sleeps.
            self.shared.doorbell.ring();
            return;
        }
        self.last_glance.store(now, Ordering::Relaxed);
        self.glance();
    }

    /// Let the driver say what there is to say, if nobody drives.
    pub(super) fn glance(&self) {
        match self.take() {
            Some(mut seat) => {
                if let Some(driver) = seat.as_mut() {
                    guarded(driver, Driver::glance);
                }
                self.leave(seat);
            }
            // Whoever has it sees what was published, or sleeps and hears the bell.
            None => self.shared.doorbell.ring(),
        }
    }
}

/// Run with the driver; `None` after a panic, which ends the engine.
fn guarded<T>(driver: &mut Driver, work: impl FnOnce(&mut Driver) -> T) -> Option<T> {
    let outcome = catch_unwind(AssertUnwindSafe(|| work(driver)));
    if outcome.is_err() {
        driver.break_down();
    }
    outcome.ok()
}

//! The driver lock and caller-driven progress: a thread that waits for a result makes progress itself, which saves two
//! wake-ups.
//!
//! The holder of the lock makes progress with the driver. A thread that blocks in [`DriverLock::wait`] takes the lock
//! if it is free and holds it until its operation has ended. A submitting thread takes the lock for one poll, which
//! sends the pending messages. The engine's thread makes progress when no other thread does, but sleeps *without* the
//! lock. The last holder arms the notifier before the release, and a notification wakes the engine's thread.
//!
//! With frequent calls an armed notifier is too expensive: each message of a peer would wake the engine's thread
//! between two calls of this rank. The engine's thread then *polls periodically*: it sleeps for a fixed time, and no
//! thread arms the notifier. Messages that a burst of submissions did not send are sent by the next wait, the next
//! submission after the burst, or the next periodic poll.
//!
//! `make test-loom` checks that no wake-up is lost. It runs this very file, around a driver of a few lines, in every
//! order that the engine's thread and one or two callers can take.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{OnceLock, PoisonError, TryLockError};
use std::time::Duration;

#[cfg(loom)]
use model::{
    Arc, AtomicBool, AtomicU8, Driver, EngineState, FinalNotification, Handle, Instant, Mutex,
    MutexGuard, NextWork, Ordering, Sleeper, Thread, Waited, fence, thread,
};
#[cfg(not(loom))]
use {
    super::driver::{Driver, NextWork},
    super::handles::{Handle, Waited},
    super::{EngineState, FinalNotification},
    horovod_transport::Sleeper,
    std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence},
    std::sync::{Arc, Mutex, MutexGuard},
    std::thread::{self, Thread},
    std::time::Instant,
};

#[cfg(loom)]
#[path = "driver_lock/model.rs"]
mod model;

/// Longest wait for a result: a clock cannot represent the end of every `Duration`.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// The callback thread polls at least so often.
const CALLBACKS_WAIT: Duration = Duration::from_secs(1);
/// Sleep of the engine's thread between two polls while calls are frequent.
const POLL_INTERVAL: Duration = Duration::from_micros(500);
/// Calls are dense if there are at least so many waits per [`POLL_INTERVAL`], or a caller has the lock at the end of a
/// sleep. The waiting threads then make all progress. A poll takes the core from one of them and delays its peers, so
/// each sleep is twice as long as the last, up to [`POLL_INTERVAL_MAX`].
const DENSE: u64 = 8;
const POLL_INTERVAL_MAX: Duration = Duration::from_millis(4);
/// A submission within this time of the last poll by a submission sends nothing: a wait or a later poll sends its
/// messages.
const BURST_NS: u64 = 100_000;
/// [`BURST_NS`] where ranks outnumber cores: calls take longer there, and an engine's thread that wakes takes the core
/// from a rank.
const OVERSUBSCRIBED_BURST_NS: u64 = 1_000_000;

/// State of the engine's own thread while other threads may hold the lock, and requests to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum ThreadState {
    /// The thread sleeps until a notification, or is about to. A thread that releases the lock must arm the notifier.
    AwaitsEvents,
    /// A request to poll periodically, because calls are frequent. The request alone does not allow other threads to
    /// leave the notifier unarmed: the wake-up may have reached another thread.
    ShallPoll,
    /// The thread sleeps by the clock, and takes the lock before it waits for a notification again.
    PollsPeriodically,
    /// The engine's thread must get the lock next: other threads release it, and do not take it.
    MustDrive,
}

/// A [`ThreadState`] that all threads share. Only the engine's thread sets it to `AwaitsEvents`.
pub(super) struct EngineThreadState(AtomicU8);

impl EngineThreadState {
    pub(super) fn new() -> Self {
        Self(AtomicU8::new(ThreadState::AwaitsEvents as u8))
    }

    /// Returns whether threads other than the engine's must release the driver lock, and not take it.
    pub(super) fn is_wanted(&self) -> bool {
        self.is(ThreadState::MustDrive)
    }

    fn is(&self, state: ThreadState) -> bool {
        self.0.load(Ordering::SeqCst) == state as u8
    }

    fn set(&self, state: ThreadState) {
        self.0.store(state as u8, Ordering::SeqCst);
    }

    /// Changes the state from `from` to `to`. Returns `false`, without a change, if it was not `from`.
    fn change(&self, from: ThreadState, to: ThreadState) -> bool {
        let changed =
            self.0
                .compare_exchange(from as u8, to as u8, Ordering::SeqCst, Ordering::SeqCst);
        changed.is_ok()
    }
}

/// The driver behind its lock, and the state that decides which thread takes it.
pub(super) struct DriverLock {
    shared: Arc<EngineState>,
    /// `None` after the engine has ended.
    driver: Mutex<Option<Driver>>,
    sleeper: Sleeper,
    /// The engine's own thread.
    engine: OnceLock<Thread>,
    /// A caller holds the lock, perhaps for long: a wake-up that reaches the engine's thread may be meant for that
    /// caller.
    caller_has_lock: AtomicBool,
    /// Number of calls so far; a change shows that calls were made.
    calls: AtomicU64,
    /// Number of calls so far that waited.
    waits: AtomicU64,
    /// Time of the last poll by a submission.
    last_poll: AtomicU64,
    burst_ns: u64,
}

impl DriverLock {
    pub(super) fn new(driver: Driver, sleeper: Sleeper, shared: Arc<EngineState>) -> Self {
        let burst_ns = if driver.is_oversubscribed() {
            OVERSUBSCRIBED_BURST_NS
        } else {
            BURST_NS
        };
        Self {
            burst_ns,
            shared,
            driver: Mutex::new(Some(driver)),
            sleeper,
            engine: OnceLock::new(),
            caller_has_lock: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            last_poll: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Driver>> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lock if it is free and the engine runs.
    fn take(&self) -> Option<MutexGuard<'_, Option<Driver>>> {
        let guard = match self.driver.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        guard.is_some().then_some(guard)
    }

    /// Runs the engine's thread until the engine ends.
    pub(super) fn run(&self) {
        let final_notification = FinalNotification(self.shared.clone());
        // No other place sets it.
        let _ = self.engine.set(thread::current());
        while let Some(nap) = self.work() {
            let state = &self.shared.engine_thread_state;
            if !state.is(ThreadState::ShallPoll) {
                self.sleeper.sleep(nap);
                // Pairs with the fence that a caller passes when it arms the notifier.
                fence(Ordering::SeqCst);
                if self.caller_has_lock.load(Ordering::SeqCst) {
                    self.sleeper.wake();
                }
            }
            if state.change(ThreadState::ShallPoll, ThreadState::PollsPeriodically) {
                self.poll_periodically();
            }
        }
        let driver = self.lock().take();
        // Links close before any caller can observe that the engine has ended.
        if let Some(driver) = driver {
            let ended = catch_unwind(AssertUnwindSafe(|| driver.end()));
            if ended.is_err() {
                tracing::error!("the engine's thread panicked while it took leave");
            }
        }
        drop(final_notification);
    }

    /// Works on the engine's thread until nothing can be done now. Returns how long the thread may sleep, `None` at the
    /// end.
    fn work(&self) -> Option<Duration> {
        let mut guard = self.lock();
        let driver = guard.as_mut()?;
        // Set under the lock: each later holder then arms the notifier before it releases the lock.
        self.shared
            .engine_thread_state
            .set(ThreadState::AwaitsEvents);
        let next = guarded(driver, Driver::work).unwrap_or(NextWork::Finished);
        drop(guard);
        self.shared.handles.driver_is_free();
        match next {
            NextWork::Sleep(nap) => Some(nap),
            NextWork::Finished => None,
        }
    }

    /// Sleeps by the clock until calls have become rare.
    fn poll_periodically(&self) {
        let mut seen = self.calls.load(Ordering::Relaxed);
        let mut waited = self.waits.load(Ordering::Relaxed);
        let mut nap = POLL_INTERVAL;
        loop {
            thread::park_timeout(nap);
            let calls = self.calls.load(Ordering::Relaxed);
            if calls == seen || self.shared.wanted() {
                return;
            }
            seen = calls;
            let waits = self.waits.load(Ordering::Relaxed);
            let driven = self.caller_has_lock.load(Ordering::Relaxed);
            nap = after(nap, waits.wrapping_sub(waited), driven);
            waited = waits;
            if let Some(mut guard) = self.take() {
                let leave = guard.as_mut().and_then(|driver| {
                    guarded(driver, |d| {
                        d.poll_once();
                        d.leave(true)
                    })
                });
                let task = guard.as_ref().is_some_and(Driver::has_task);
                drop(guard);
                self.shared.handles.driver_is_free();
                if leave.unwrap_or(true) || task {
                    return;
                }
            }
        }
    }

    /// Waits at most `timeout`, and clears the handle when its operation has ended. `is_announced`: the last submission
    /// of this thread is announced. Otherwise this wait announces it, as [`Self::submitted_by_waiter`] requires.
    pub(super) fn wait(&self, handle: Handle, timeout: Duration, mut is_announced: bool) -> Waited {
        let handles = &self.shared.handles;
        let mut deadline = None;
        loop {
            let mut table = handles.lock();
            if let Some(end) = table.take(handle) {
                return end;
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + timeout.min(WAIT_MAX));
            // The table stays locked, so that no release of the driver lock goes unnoticed in between.
            let guard = if self.shared.wanted() {
                None
            } else {
                self.take()
            };
            let Some(guard) = guard else {
                if !is_announced {
                    drop(table);
                    // The holder of the lock polls the submission, or sleeps and is woken.
                    self.shared.notifier.notify();
                    is_announced = true;
                } else if !handles.sleep(table, deadline) {
                    return Waited::Pending;
                }
                continue;
            };
            drop(table);
            is_announced = true;
            self.make_progress(guard, deadline, true, || !handles.is_awaited(handle));
            if let Some(end) = handles.lock().take(handle) {
                return end;
            }
            if Instant::now() >= deadline {
                return Waited::Pending;
            }
        }
    }

    /// Runs the callback thread. While it waits for a callback it makes progress like any caller, but never spins,
    /// because the application computes meanwhile.
    pub(super) fn run_callbacks(&self) {
        let handles = &self.shared.handles;
        while let Some(table) = handles.run_callbacks() {
            let deadline = Instant::now() + CALLBACKS_WAIT;
            let guard = if self.shared.wanted() {
                None
            } else {
                self.take()
            };
            match guard {
                None => drop(handles.sleep(table, deadline)),
                Some(guard) => {
                    drop(table);
                    self.make_progress(guard, deadline, false, || handles.has_callbacks());
                }
            }
        }
    }

    fn make_progress(
        &self,
        mut guard: MutexGuard<'_, Option<Driver>>,
        deadline: Instant,
        has_time: bool,
        done: impl Fn() -> bool,
    ) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.caller_has_lock.store(true, Ordering::SeqCst);
        if let Some(driver) = guard.as_mut()
            && !done()
        {
            guarded(driver, |d| d.work_until(deadline, has_time, &done));
        }
        self.caller_has_lock.store(false, Ordering::SeqCst);
        self.leave(guard);
    }

    /// Releases the lock. Perhaps no thread takes it next, so the engine's thread must be able to wake.
    fn leave(&self, mut guard: MutexGuard<'_, Option<Driver>>) {
        let polling = self
            .shared
            .engine_thread_state
            .is(ThreadState::PollsPeriodically);
        let call = match guard.as_mut() {
            Some(driver) => guarded(driver, |d| d.leave(polling)).unwrap_or(true),
            None => false,
        };
        if call {
            self.shared.engine_thread_state.set(ThreadState::MustDrive);
        }
        drop(guard);
        self.shared.handles.driver_is_free();
        if call {
            self.wake_engine();
        }
    }

    /// Makes the engine's thread take the lock, wherever that thread sleeps and whichever thread has the lock.
    pub(super) fn wake_engine(&self) {
        self.shared.engine_thread_state.set(ThreadState::MustDrive);
        self.sleeper.wake();
        if let Some(engine) = self.engine.get() {
            engine.unpark();
        }
    }

    /// Announces a submission, unless the engine's thread or a caller will do so soon.
    pub(super) fn submitted(&self) {
        if !self.submitted_by_waiter() {
            self.poll_once();
        }
    }

    /// Notes a submission of a thread that waits for it next. Returns whether the submission is announced. If not, that
    /// wait must announce it, which also runs the operation if the peers are ready. A poll that found the operation
    /// ready could only leave it to the engine's thread, which costs two wake-ups.
    pub(super) fn submitted_by_waiter(&self) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let now = self.shared.now().0;
        let since = now.saturating_sub(self.last_poll.load(Ordering::Relaxed));
        if since < self.burst_ns && !self.shared.alone {
            let state = &self.shared.engine_thread_state;
            state.change(ThreadState::AwaitsEvents, ThreadState::ShallPoll);
            // Wakes the engine's thread, or a caller that holds the lock and sleeps.
            self.shared.notifier.notify();
            return true;
        }
        self.last_poll.store(now, Ordering::Relaxed);
        false
    }

    /// Sends pending messages, if the lock is free.
    pub(super) fn poll_once(&self) {
        match self.take() {
            Some(mut guard) => {
                if let Some(driver) = guard.as_mut() {
                    guarded(driver, Driver::poll_once);
                }
                self.leave(guard);
            }
            // The holder of the lock polls the published data, or sleeps and is woken.
            None => self.shared.notifier.notify(),
        }
    }
}

/// Returns the next sleep of the engine's thread. There were so many `waits` during the last sleep `nap`; `driven`: a
/// caller held the lock at its end.
fn after(nap: Duration, waits: u64, driven: bool) -> Duration {
    let intervals = nap.as_nanos() / POLL_INTERVAL.as_nanos();
    if driven || u128::from(waits) >= u128::from(DENSE) * intervals {
        (2 * nap).min(POLL_INTERVAL_MAX)
    } else {
        POLL_INTERVAL
    }
}

/// Calls `work` with the driver. Returns `None` after a panic, which ends the engine.
fn guarded<T>(driver: &mut Driver, work: impl FnOnce(&mut Driver) -> T) -> Option<T> {
    let outcome = catch_unwind(AssertUnwindSafe(|| work(driver)));
    if outcome.is_err() {
        driver.break_down();
    }
    outcome.ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_engine_looks_less_often_while_callers_wait_all_the_time() {
        let mut naps = vec![POLL_INTERVAL];
        for (waits, driven) in [
            (DENSE, false),
            (2 * DENSE, false),
            (1, true),
            (8 * DENSE, false),
            (8 * DENSE - 1, false),
            (DENSE - 1, false),
        ] {
            naps.push(after(naps[naps.len() - 1], waits, driven));
        }
        assert_eq!(naps, [1, 2, 4, 8, 8, 1, 1].map(|n| n * POLL_INTERVAL));
        assert_eq!(naps[4], POLL_INTERVAL_MAX);
    }
}

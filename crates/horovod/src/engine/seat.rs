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
//!
//! That no wake-up is lost in this is checked by `make test-loom`, which runs this very file in every order that the
//! engine's thread and one or two callers can take, around a driver of a few lines.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{OnceLock, PoisonError, TryLockError};
use std::time::Duration;

#[cfg(loom)]
use model::{
    Arc, AtomicBool, AtomicU8, Driver, Handle, Instant, LastWords, Mutex, MutexGuard, Ordering,
    Shared, Sleeper, Thread, Waited, Work, fence, thread,
};
#[cfg(not(loom))]
use {
    super::driver::{Driver, Work},
    super::handles::{Handle, Waited},
    super::{LastWords, Shared},
    horovod_transport::Sleeper,
    std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence},
    std::sync::{Arc, Mutex, MutexGuard},
    std::thread::{self, Thread},
    std::time::Instant,
};

#[cfg(loom)]
#[path = "seat/model.rs"]
mod model;

/// A wait for a result ends after this at the latest: a clock cannot tell the end of any `Duration`.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// The callback thread looks up at least so often.
const CALLBACKS_WAIT: Duration = Duration::from_secs(1);
/// How long the engine's thread sleeps between two looks while calls come thick and fast.
const TICK: Duration = Duration::from_micros(500);
/// While there are at least so many waits in such a time, or a caller drives at its end, those who wait do all there is
/// to do. To look takes the core from one of them, and its peers run dry meanwhile: so it is done half as often each
/// time, down to the second figure.
const DENSE: u64 = 8;
const TICK_MAX: Duration = Duration::from_millis(4);
/// Submissions within this time of the last glance wait for a wait, a tick, or the next glance.
const BURST_NS: u64 = 100_000;
/// The same where ranks outnumber cores: their calls take longer, and an engine's thread that wakes takes the core
/// from one of them.
const CROWDED_BURST_NS: u64 = 1_000_000;

/// What the engine's own thread does when nobody drives, and what is asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Rest {
    /// It listens to the doorbell, or will: who leaves the seat must arm that.
    Listens,
    /// Calls come thick and fast: it shall sleep by the clock. What is asked for is not enough for others to leave
    /// the doorbell unarmed: somebody may have heard that call in its place.
    ShallTick,
    /// It sleeps by the clock, and will take the seat before it listens to the doorbell again.
    Ticks,
    /// It has to drive next: others leave the seat, and do not take it.
    Wanted,
}

/// A [`Rest`] that all threads see. It becomes `Listens` only by the engine's thread.
pub(super) struct EngineRest(AtomicU8);

impl EngineRest {
    pub(super) fn new() -> Self {
        Self(AtomicU8::new(Rest::Listens as u8))
    }

    /// Whether threads other than the engine's must leave the seat, and not take it.
    pub(super) fn is_wanted(&self) -> bool {
        self.is(Rest::Wanted)
    }

    fn is(&self, rest: Rest) -> bool {
        self.0.load(Ordering::SeqCst) == rest as u8
    }

    fn set(&self, rest: Rest) {
        self.0.store(rest as u8, Ordering::SeqCst);
    }

    /// Whether it was `from`, and now is `to`.
    fn change(&self, from: Rest, to: Rest) -> bool {
        let changed =
            self.0
                .compare_exchange(from as u8, to as u8, Ordering::SeqCst, Ordering::SeqCst);
        changed.is_ok()
    }
}

/// The driver, and who may drive.
pub(super) struct Seat {
    shared: Arc<Shared>,
    /// `None` when the engine has ended.
    driver: Mutex<Option<Driver>>,
    sleeper: Sleeper,
    /// The engine's own thread.
    engine: OnceLock<Thread>,
    /// A caller drives, perhaps for long: wake-ups that the engine's thread gets may be meant for it.
    caller_drives: AtomicBool,
    /// Calls so far, to see whether any came.
    calls: AtomicU64,
    /// Those of them that waited.
    waits: AtomicU64,
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
            caller_drives: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            waits: AtomicU64::new(0),
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
            let rest = &self.shared.engine_rest;
            if !rest.is(Rest::ShallTick) {
                self.sleeper.sleep(nap);
                // Pairs with the one that a caller passes when it arms the doorbell.
                fence(Ordering::SeqCst);
                if self.caller_drives.load(Ordering::SeqCst) {
                    self.sleeper.wake();
                }
            }
            if rest.change(Rest::ShallTick, Rest::Ticks) {
                self.tick();
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
        // With the seat: whoever leaves it sees what was true while he had it.
        self.shared.engine_rest.set(Rest::Listens);
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
        let mut waited = self.waits.load(Ordering::Relaxed);
        let mut nap = TICK;
        loop {
            thread::park_timeout(nap);
            let calls = self.calls.load(Ordering::Relaxed);
            if calls == seen || self.shared.wanted() {
                return;
            }
            seen = calls;
            let waits = self.waits.load(Ordering::Relaxed);
            let driven = self.caller_drives.load(Ordering::Relaxed);
            nap = after(nap, waits.wrapping_sub(waited), driven);
            waited = waits;
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
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + timeout.min(WAIT_MAX));
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
            self.drive(seat, deadline, true, || !handles.is_awaited(handle));
            if let Some(end) = handles.lock().take(handle) {
                return end;
            }
            if Instant::now() >= deadline {
                return Waited::Pending;
            }
        }
    }

    /// The callback thread: while it waits for something to call it drives, but for the time that it needs to
    /// look, for the process computes meanwhile.
    pub(super) fn run_callbacks(&self) {
        let handles = &self.shared.handles;
        while let Some(table) = handles.run_callbacks() {
            let deadline = Instant::now() + CALLBACKS_WAIT;
            let seat = if self.shared.wanted() {
                None
            } else {
                self.take()
            };
            match seat {
                None => drop(handles.sleep(table, deadline)),
                Some(seat) => {
                    drop(table);
                    self.drive(seat, deadline, false, || handles.has_callbacks());
                }
            }
        }
    }

    fn drive(
        &self,
        mut seat: MutexGuard<'_, Option<Driver>>,
        deadline: Instant,
        has_time: bool,
        done: impl Fn() -> bool,
    ) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.caller_drives.store(true, Ordering::SeqCst);
        if let Some(driver) = seat.as_mut()
            && !done()
        {
            guarded(driver, |d| d.work_until(deadline, has_time, &done));
        }
        self.caller_drives.store(false, Ordering::SeqCst);
        self.leave(seat);
    }

    /// Hand over to whoever comes next; nobody may, so the engine's thread must be able to hear.
    fn leave(&self, mut seat: MutexGuard<'_, Option<Driver>>) {
        let ticking = self.shared.engine_rest.is(Rest::Ticks);
        let call = match seat.as_mut() {
            Some(driver) => guarded(driver, |d| d.leave(ticking)).unwrap_or(true),
            None => false,
        };
        if call {
            self.shared.engine_rest.set(Rest::Wanted);
        }
        drop(seat);
        self.shared.handles.seat_is_free();
        if call {
            self.call_engine();
        }
    }

    /// Make the engine's thread take the seat, wherever it sleeps and whoever has it.
    pub(super) fn call_engine(&self) {
        self.shared.engine_rest.set(Rest::Wanted);
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
            let rest = &self.shared.engine_rest;
            rest.change(Rest::Listens, Rest::ShallTick);
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

/// How long the engine's thread sleeps after a nap in which there were so many waits, and at whose end a caller drove.
fn after(nap: Duration, waits: u64, driven: bool) -> Duration {
    let ticks = nap.as_nanos() / TICK.as_nanos();
    if driven || u128::from(waits) >= u128::from(DENSE) * ticks {
        (2 * nap).min(TICK_MAX)
    } else {
        TICK
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_engine_looks_less_often_while_callers_wait_all_the_time() {
        let mut naps = vec![TICK];
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
        assert_eq!(naps, [1, 2, 4, 8, 8, 1, 1].map(|n| n * TICK));
        assert_eq!(naps[4], TICK_MAX);
    }
}

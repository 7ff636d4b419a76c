//! A model of what the driver lock needs, small enough that loom can try every order of events: a driver, a notifier, a
//! peer.
//!
//! The peer answers each submission that the driver sends, and notifies if the notifier is armed; the driver completes
//! what was answered. Sleeps have no end here, so whatever would hang until some safety net is a deadlock to loom.
//! Times stand still: a wait is either without end or has to leave as soon as there is nothing to do.

pub(super) use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
pub(super) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use loom::sync::{Condvar, Mutex as Lock, MutexGuard as LockGuard};
use std::sync::{LockResult, TryLockError, TryLockResult};
use std::time::Duration;

use super::{DriverLock, EngineThreadState};

pub(super) type Handle = usize;

/// A moment: `true` for one that never comes.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub(crate) struct Instant(bool);

impl Instant {
    pub(super) fn now() -> Self {
        Self(false)
    }
}

impl std::ops::Add<Duration> for Instant {
    type Output = Self;
    fn add(self, time: Duration) -> Self {
        Self(!time.is_zero())
    }
}

/// The clock of the engine's thread: any time may pass while others do what they can.
pub(super) mod thread {
    pub(in super::super) struct Thread;

    impl Thread {
        pub(in super::super) fn unpark(&self) {}
    }

    pub(in super::super) fn current() -> Thread {
        Thread
    }

    pub(in super::super) fn park_timeout(_: std::time::Duration) {
        loom::thread::yield_now();
    }
}
pub(super) use thread::Thread;

/// The driver lock's mutex. Loom's own makes `try_lock` wait for a thread that comes in between, and so finds deadlocks
/// that there are not.
pub(super) struct Mutex<T> {
    taken: Lock<bool>,
    freed: Condvar,
    value: std::sync::Mutex<T>,
}

pub(super) struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    value: Option<std::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            taken: Lock::new(false),
            freed: Condvar::new(),
            value: std::sync::Mutex::new(value),
        }
    }

    pub(super) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let mut taken = self.taken.lock().unwrap();
        while *taken {
            taken = self.freed.wait(taken).unwrap();
        }
        Ok(self.take(&mut taken))
    }

    pub(super) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        let mut taken = self.taken.lock().unwrap();
        if *taken {
            return Err(TryLockError::WouldBlock);
        }
        Ok(self.take(&mut taken))
    }

    fn take(&self, taken: &mut bool) -> MutexGuard<'_, T> {
        *taken = true;
        MutexGuard {
            mutex: self,
            // Nobody else gets here.
            value: Some(self.value.lock().unwrap()),
        }
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        self.value = None;
        *self.mutex.taken.lock().unwrap() = false;
        self.mutex.freed.notify_one();
    }
}

impl<T> std::ops::Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value.as_ref().unwrap()
    }
}

impl<T> std::ops::DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().unwrap()
    }
}

/// The notifier: the word in the arena, and what the kernel does with a notification.
pub(super) struct Notifier {
    armed: AtomicU32,
    rung: Lock<bool>,
    changed: Condvar,
    /// A notification was received since somebody last asked.
    news: AtomicBool,
}

impl Notifier {
    fn new() -> Self {
        Self {
            armed: AtomicU32::new(0),
            rung: Lock::new(false),
            changed: Condvar::new(),
            news: AtomicBool::new(false),
        }
    }

    pub(super) fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) != 0 && self.armed.swap(0, Ordering::Acquire) != 0 {
            self.notify_always();
        }
    }

    fn notify_always(&self) {
        *self.rung.lock().unwrap() = true;
        // To one of those who sleep.
        self.changed.notify_one();
    }

    // Arming and disarming are plain stores in the transport. Loom knows that a store follows the store that a swap has
    // read, but not that it follows the swap. So a notification for an earlier operation could seem to undo a later
    // arming, which no processor may do. Swaps here put all of them in one order.

    fn arm(&self) {
        self.news.swap(false, Ordering::Relaxed);
        self.armed.swap(1, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    fn disarm(&self) {
        self.armed.swap(0, Ordering::Relaxed);
    }

    fn sleep(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.changed.wait(rung).unwrap();
        }
        *rung = false;
        self.news.store(true, Ordering::Relaxed);
    }
}

/// Where the engine's thread sleeps.
pub(crate) struct Sleeper(Arc<EngineState>);

impl Sleeper {
    pub(super) fn sleep(&self, _: Duration) {
        self.0.notifier.sleep();
    }

    pub(super) fn wake(&self) {
        self.0.notifier.notify_always();
    }
}

/// Outcome of a wait.
pub(crate) enum Waited {
    Pending,
    Ended,
}

/// Submissions end in their order, so a count says which have.
pub(super) struct Handles {
    table: Lock<Table>,
    changed: Condvar,
    callbacks_changed: Condvar,
    /// Somebody looks on until calls are made.
    called: Condvar,
}

pub(super) struct Table {
    ended: usize,
    waiters: usize,
    /// As the engine's: operations that will end with a call, calls that are due, and whether there is an end of them.
    awaited_callbacks: usize,
    due: usize,
    closed: bool,
    /// Calls that were made.
    made: usize,
}

impl Table {
    pub(super) fn take(&mut self, handle: Handle) -> Option<Waited> {
        (handle < self.ended).then_some(Waited::Ended)
    }
}

impl Handles {
    pub(super) fn lock(&self) -> LockGuard<'_, Table> {
        self.table.lock().unwrap()
    }

    pub(super) fn is_awaited(&self, handle: Handle) -> bool {
        handle >= self.lock().ended
    }

    pub(super) fn sleep(&self, mut table: LockGuard<'_, Table>, deadline: Instant) -> bool {
        if deadline <= Instant::now() {
            return false;
        }
        table.waiters += 1;
        table = self.changed.wait(table).unwrap();
        table.waiters -= 1;
        true
    }

    pub(super) fn driver_is_free(&self) {
        if self.lock().waiters > 0 {
            self.changed.notify_all();
        }
    }

    pub(super) fn has_callbacks(&self) -> bool {
        self.lock().due > 0
    }

    pub(super) fn run_callbacks(&self) -> Option<LockGuard<'_, Table>> {
        let mut table = self.lock();
        loop {
            if table.due > 0 {
                table.made += std::mem::take(&mut table.due);
                self.called.notify_all();
            } else if table.awaited_callbacks > 0 {
                return Some(table);
            } else if table.closed {
                return None;
            } else {
                table = self.callbacks_changed.wait(table).unwrap();
            }
        }
    }

    fn close(&self) {
        self.lock().closed = true;
        self.callbacks_changed.notify_all();
        self.changed.notify_all();
    }

    fn complete(&self, ended: usize) {
        let mut table = self.lock();
        table.ended = ended;
        let due = std::mem::take(&mut table.awaited_callbacks);
        table.due += due;
        if table.waiters > 0 {
            self.changed.notify_all();
        }
    }
}

/// As the engine's, and the link to the peer.
pub(crate) struct EngineState {
    pub(super) handles: Handles,
    pub(super) notifier: Notifier,
    pub(super) engine_thread_state: EngineThreadState,
    pub(super) alone: bool,
    shutdown_requested: AtomicBool,
    /// Every submission is one of a burst.
    burst: bool,
    /// Only the engine's thread may carry out answered submissions.
    for_engine: bool,
    submitted: AtomicUsize,
    sent: AtomicUsize,
    answered: AtomicUsize,
}

/// As in the protocol.
pub(super) struct Time(pub(super) u64);

impl EngineState {
    pub(super) fn wanted(&self) -> bool {
        self.engine_thread_state.is_wanted() || self.shutdown_requested.load(Ordering::Acquire)
    }

    pub(super) fn now(&self) -> Time {
        Time(if self.burst { 0 } else { super::BURST_NS })
    }
}

pub(crate) struct FinalNotification(
    #[expect(dead_code, reason = "as the engine's")] pub(super) Arc<EngineState>,
);

pub(crate) enum NextWork {
    Sleep(Duration),
    Finished,
}

/// The engine's driver in a few lines, with the same order of arming, looking and sleeping.
pub(crate) struct Driver {
    shared: Arc<EngineState>,
    /// Answered and not carried out yet.
    ready: usize,
    carried_out: usize,
}

impl Driver {
    fn progress(&mut self) -> bool {
        let shared = &self.shared;
        let submitted = shared.submitted.load(Ordering::SeqCst);
        let mut progress = false;
        if submitted > shared.sent.load(Ordering::Relaxed) {
            shared.sent.store(submitted, Ordering::SeqCst);
            progress = true;
        }
        let answered = shared.answered.load(Ordering::SeqCst);
        if answered > self.carried_out + self.ready {
            self.ready = answered - self.carried_out;
            progress = true;
        }
        progress
    }

    fn carry_out(&mut self) {
        self.carried_out += std::mem::take(&mut self.ready);
        self.shared.handles.complete(self.carried_out);
    }

    pub(super) fn work(&mut self) -> NextWork {
        let mut announced = false;
        loop {
            let progress = self.progress();
            if self.ready > 0 {
                self.shared.notifier.disarm();
                self.carry_out();
                announced = false;
                continue;
            }
            if self.shared.shutdown_requested.load(Ordering::Acquire) {
                return NextWork::Finished;
            }
            if announced && !progress && !self.shared.notifier.news.load(Ordering::Relaxed) {
                return NextWork::Sleep(Duration::MAX);
            }
            self.shared.notifier.arm();
            announced = true;
        }
    }

    pub(super) fn work_until(&mut self, deadline: Instant, _: bool, done: impl Fn() -> bool) {
        self.shared.notifier.disarm();
        let mut armed = false;
        loop {
            let progress = self.progress();
            if self.ready > 0 && !self.shared.for_engine {
                self.carry_out();
                if done() || Instant::now() >= deadline {
                    break;
                }
                armed = false;
                continue;
            }
            if self.ready > 0 || self.shared.wanted() {
                break;
            }
            if progress {
                if done() {
                    break;
                }
                // As the engine's, which counts its idle polls from anew: it arms again before it sleeps.
                armed = false;
                continue;
            }
            if Instant::now() >= deadline {
                break;
            }
            let notifier = &self.shared.notifier;
            if armed {
                if !notifier.news.swap(false, Ordering::Relaxed) {
                    notifier.sleep();
                }
                notifier.disarm();
            } else {
                notifier.arm();
            }
            armed = !armed;
        }
    }

    pub(super) fn poll_once(&mut self) {
        self.progress();
    }

    pub(super) fn leave(&mut self, polling: bool) -> bool {
        if !polling {
            loop {
                self.shared.notifier.arm();
                if !self.progress() && !self.shared.notifier.news.load(Ordering::Relaxed) {
                    break;
                }
            }
        }
        self.shared.wanted() || (self.has_task() && (!polling || self.shared.for_engine))
    }

    #[expect(clippy::unused_self, reason = "as the engine's")]
    pub(super) fn is_oversubscribed(&self) -> bool {
        false
    }

    pub(super) fn has_task(&self) -> bool {
        self.ready > 0
    }

    pub(super) fn break_down(&mut self) {
        // In a model a panic is loom's, about what it has found.
        std::process::abort();
    }

    pub(super) fn end(self) {}
}

/// Parameters of a model.
#[derive(Clone, Copy, Default)]
struct Case {
    burst: bool,
    for_engine: bool,
}

/// Threads of one rank, and its peer.
struct Setup {
    shared: Arc<EngineState>,
    driver_lock: Arc<DriverLock>,
    threads: Vec<loom::thread::JoinHandle<()>>,
}

impl Setup {
    /// A job in which so many operations will be submitted.
    fn start(case: Case, operations: usize) -> Self {
        let shared = Arc::new(EngineState {
            handles: Handles {
                table: Lock::new(Table {
                    ended: 0,
                    waiters: 0,
                    awaited_callbacks: 0,
                    due: 0,
                    closed: false,
                    made: 0,
                }),
                changed: Condvar::new(),
                callbacks_changed: Condvar::new(),
                called: Condvar::new(),
            },
            notifier: Notifier::new(),
            engine_thread_state: EngineThreadState::new(),
            alone: false,
            shutdown_requested: AtomicBool::new(false),
            burst: case.burst,
            for_engine: case.for_engine,
            submitted: AtomicUsize::new(0),
            sent: AtomicUsize::new(0),
            answered: AtomicUsize::new(0),
        });
        let driver = Driver {
            shared: shared.clone(),
            ready: 0,
            carried_out: 0,
        };
        let driver_lock = Arc::new(DriverLock::new(
            driver,
            Sleeper(shared.clone()),
            shared.clone(),
        ));
        let engine = loom::thread::spawn({
            let driver_lock = driver_lock.clone();
            move || driver_lock.run()
        });
        let peer = loom::thread::spawn({
            let shared = shared.clone();
            move || {
                let mut answered = 0;
                while answered < operations {
                    let sent = shared.sent.load(Ordering::SeqCst);
                    if sent == answered {
                        loom::thread::yield_now();
                        continue;
                    }
                    answered = sent;
                    shared.answered.store(answered, Ordering::SeqCst);
                    shared.notifier.notify();
                }
            }
        });
        Self {
            shared,
            driver_lock,
            threads: vec![engine, peer],
        }
    }

    fn submit(&self) -> Handle {
        let handle = self.shared.submitted.fetch_add(1, Ordering::SeqCst);
        self.driver_lock.submitted();
        handle
    }

    /// Wait without end.
    fn finish(&self, handle: Handle) {
        while !matches!(
            self.driver_lock.wait(handle, Duration::MAX, true),
            Waited::Ended
        ) {}
    }

    /// Wait, without the lock, for what others do.
    fn see_end(&self, handle: Handle) {
        let handles = &self.shared.handles;
        loop {
            let mut table = handles.lock();
            if table.take(handle).is_some() {
                return;
            }
            handles.sleep(table, Instant(true));
        }
    }

    /// With a callback thread: submit one that ends so, and look on until it is called.
    fn end_with_callback(&self) {
        let caller = loom::thread::spawn({
            let driver_lock = self.driver_lock.clone();
            move || driver_lock.run_callbacks()
        });
        let handles = &self.shared.handles;
        handles.lock().awaited_callbacks += 1;
        handles.callbacks_changed.notify_all();
        self.submit();
        let mut table = handles.lock();
        while table.made == 0 {
            table = handles.called.wait(table).unwrap();
        }
        drop(table);
        handles.close();
        caller.join().unwrap();
    }

    fn end(self) {
        self.shared
            .shutdown_requested
            .store(true, Ordering::Release);
        self.driver_lock.wake_engine();
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

/// In every order of events, up to so many preemptions; loom reports a deadlock if somebody sleeps for ever.
fn check(
    preemptions: usize,
    case: Case,
    body: impl Fn(&Setup) + Sync + Send + Copy + 'static,
    operations: usize,
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let setup = Setup::start(case, operations);
        body(&setup);
        setup.end();
    });
}

#[cfg(test)]
#[path = "model/tests.rs"]
mod tests;

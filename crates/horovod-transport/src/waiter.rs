//! The waiter of a rank: spins briefly, yields its core briefly, then sleeps until a notification or a socket event.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    core_migration::CoreMigration,
    platform,
    poller::Poller,
    shm::{arena::RankNotifier, notifier},
    wait_policy::{WaitConditions, WaitPolicy, WaitStep},
};

/// Wakes a rank from another thread of the same process.
#[derive(Clone)]
pub struct Notifier(RankNotifier);

impl Notifier {
    /// Wakes the rank if it sleeps. The caller must first publish the data that the rank shall find. Does nothing in a
    /// forked child.
    pub fn notify(&self) {
        self.0.notify();
    }
}

impl std::fmt::Debug for Notifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notifier(..)")
    }
}

/// Sleeps for a rank on a thread that does not own its [`Waiter`]. The waiter must be armed meanwhile.
///
/// The kernel gives each wake-up to the thread that began to sleep last. A thread that began earlier and is not in
/// charge of progress therefore takes no wake-up from the thread in charge. If such a thread receives a wake-up all the
/// same, it must pass the wake-up on by [`Self::wake`].
#[derive(Clone)]
pub struct Sleeper {
    notifier: RankNotifier,
    poller: Arc<Poller>,
}

impl Sleeper {
    /// Sleeps until a notifier or a socket wakes the thread, or until `max_sleep` has passed.
    pub fn sleep(&self, max_sleep: Duration) {
        self.poller.pump(Some(max_sleep));
    }

    /// Wakes the thread that sleeps now or that sleeps next, even if no sleep was announced.
    pub fn wake(&self) {
        self.notifier.notify_always();
    }
}

impl std::fmt::Debug for Sleeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sleeper(..)")
    }
}

/// One wait for all events of a rank: its notifier (used by peers of the host and by [`Notifier`]) and its sockets.
pub struct Waiter {
    notifier: RankNotifier,
    poller: Arc<Poller>,
    armed: bool,
    wait_policy: WaitPolicy,
    /// Whether progress may arrive over a socket. Steps that do not sleep must then poll the sockets, too.
    conditions: WaitConditions,
    core_migration: Option<CoreMigration>,
}

/// A rank without data sockets polls its few other sockets only at every so many steps, and only if that step yields
/// the core.
const POLL_EVERY: u32 = 32;

impl Waiter {
    pub(crate) fn new(
        notifier: RankNotifier,
        poller: Arc<Poller>,
        conditions: WaitConditions,
        core_migration: Option<CoreMigration>,
    ) -> Self {
        Self {
            notifier,
            poller,
            armed: false,
            wait_policy: WaitPolicy::new(conditions),
            conditions,
            core_migration,
        }
    }

    /// Returns whether the ranks of this host outnumber its cores.
    pub fn is_oversubscribed(&self) -> bool {
        self.conditions.oversubscribed
    }

    /// Returns a handle that wakes this rank from other threads.
    pub fn notifier(&self) -> Notifier {
        Notifier(self.notifier.clone())
    }

    /// Returns a handle with which another thread sleeps in place of this waiter.
    pub fn sleeper(&self) -> Sleeper {
        Sleeper {
            notifier: self.notifier.clone(),
            poller: self.poller.clone(),
        }
    }

    /// Sets the rounds for which [`Self::idle`] spins and then yields before it sleeps. The clock no longer matters
    /// then.
    pub fn set_wait_policy(&mut self, spins: u32, yields: u32) {
        self.wait_policy = WaitPolicy::of_rounds(spins, yields);
    }

    /// Sets whether the thread that waits next has no other work. A thread without other work waits by the clock before
    /// it sleeps: it yields where ranks outnumber cores, and else spins unless sockets must be polled. Initially true.
    /// Pass `false` if the application computes on other threads of this process: the thread then sleeps early.
    pub fn set_has_time(&mut self, has_time: bool) {
        self.wait_policy.set_has_time(has_time);
    }

    /// Performs one step of waiting, the `n`th since the last progress. The caller checks for work after each step.
    ///
    /// Steps with small `n` spin and steps with larger `n` yield the core ([`Self::stays_awake`]); the last ones sleep
    /// ([`Self::falls_asleep`]).
    pub fn idle(&mut self, n: u32, max_sleep: Option<Duration>) {
        if !self.stays_awake(n) {
            self.falls_asleep(n, max_sleep);
        }
    }

    /// Performs the `n`th step of [`Self::idle`] if this step spins or yields. Returns `false` if it is time to sleep.
    pub fn stays_awake(&mut self, n: u32) -> bool {
        let step = self.wait_policy.step(n, Instant::now);
        if step == WaitStep::Sleep {
            return false;
        }
        self.disarm();
        let yields_core = step == WaitStep::Yield;
        if self.conditions.has_sockets || (yields_core && n % POLL_EVERY == POLL_EVERY - 1) {
            self.poller.pump(Some(Duration::ZERO));
        } else if !yields_core {
            std::hint::spin_loop();
        }
        if yields_core {
            self.core_migration();
            self.wait_policy
                .yield_core(rustix::thread::sched_yield, Instant::now);
        }
        true
    }

    /// Performs the `n`th step of [`Self::idle`] if this step sleeps. The first call announces the sleep, so that the
    /// caller checks for work once more. The next call sleeps until a notifier or a socket wakes the thread, or until
    /// `max_sleep` has passed. Wake-ups can be spurious, but none is lost.
    pub fn falls_asleep(&mut self, n: u32, max_sleep: Option<Duration>) {
        if self.armed && n > 0 {
            if !self.poller.take_news() {
                self.poller.pump(max_sleep);
            }
            self.disarm();
        } else {
            self.arm();
        }
    }

    /// Moves this rank to another core if too many ranks wait on its present core.
    fn core_migration(&mut self) {
        let Some(core_migration) = &mut self.core_migration else {
            return;
        };
        if self.wait_policy.has_time()
            && !self.notifier.region.is_foreign()
            && let Some(core) = platform::current_core()
        {
            core_migration.before_yield(core);
        }
    }

    /// Announces a sleep of this thread or of another ([`Self::sleeper`]). The caller must check for work afterwards,
    /// and once more if [`Self::has_news`] is true then.
    pub fn arm(&mut self) {
        if !self.notifier.region.is_foreign() {
            // The caller's next check finds the events that were noted before this call.
            self.poller.take_news();
            notifier::arm(self.notifier.sleeping());
            self.armed = true;
        }
    }

    /// Returns whether a pump has noted an event since [`Self::arm`]. Such an event wakes no thread any more.
    pub fn has_news(&self) -> bool {
        self.poller.has_news()
    }

    /// Withdraws the announcement of a sleep, because a thread that is awake needs no notification.
    pub fn disarm(&mut self) {
        if self.armed && !self.notifier.region.is_foreign() {
            notifier::disarm(self.notifier.sleeping());
        }
        self.armed = false;
    }
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter")
            .field("armed", &self.armed)
            .finish_non_exhaustive()
    }
}

//! The waiter of a rank: spins a little, yields its core a little, then sleeps until its notifier or a socket wakes it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    core_migration::CoreMigration,
    platform,
    poller::Poller,
    shm::{arena::RankNotifier, notifier},
    wait_policy::{Step, WaitPolicy},
};

/// Wakes a rank from another thread of its process.
#[derive(Clone)]
pub struct Notifier(RankNotifier);

impl Notifier {
    /// Wakes the rank if it sleeps. Publish first what it should see. Does nothing in a forked
    /// child.
    pub fn notify(&self) {
        self.0.notify();
    }
}

impl std::fmt::Debug for Notifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notifier(..)")
    }
}

/// Sleeps for a rank on a thread that does not hold its [`Waiter`], which must be armed meanwhile.
///
/// A wake-up goes to the thread that came last, so one that sleeps here without being in charge does not take it
/// from one that is; should it get one all the same, it passes it on by [`Self::wake`].
#[derive(Clone)]
pub struct Sleeper {
    notifier: RankNotifier,
    poller: Arc<Poller>,
}

impl Sleeper {
    /// Sleeps until a notifier, a socket, or the end of `max_sleep`.
    pub fn sleep(&self, max_sleep: Duration) {
        self.poller.pump(Some(max_sleep));
    }

    /// Wakes whoever sleeps, now or next, whether it has said so or not.
    pub fn wake(&self) {
        self.notifier.notify_always();
    }
}

impl std::fmt::Debug for Sleeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sleeper(..)")
    }
}

/// One wait for everything that concerns a rank: its notifier (used by peers of the host and by
/// [`Notifier`]) and its sockets.
pub struct Waiter {
    notifier: RankNotifier,
    poller: Arc<Poller>,
    armed: bool,
    wait_policy: WaitPolicy,
    /// Progress may come over a socket, so waiting without sleeping must look there, too.
    has_sockets: bool,
    oversubscribed: bool,
    core_migration: Option<CoreMigration>,
}

/// How often a rank without data sockets looks at its few others while it gives way.
const POLL_EVERY: u32 = 32;

impl Waiter {
    pub(crate) fn new(
        notifier: RankNotifier,
        poller: Arc<Poller>,
        oversubscribed: bool,
        core_migration: Option<CoreMigration>,
        has_sockets: bool,
    ) -> Self {
        Self {
            notifier,
            poller,
            armed: false,
            wait_policy: WaitPolicy::new(oversubscribed, has_sockets),
            has_sockets,
            oversubscribed,
            core_migration,
        }
    }

    /// Whether the ranks of this host outnumber its cores.
    pub fn is_oversubscribed(&self) -> bool {
        self.oversubscribed
    }

    /// A handle that wakes this rank from other threads.
    pub fn notifier(&self) -> Notifier {
        Notifier(self.notifier.clone())
    }

    /// Where another thread sleeps in place of this waiter.
    pub fn sleeper(&self) -> Sleeper {
        Sleeper {
            notifier: self.notifier.clone(),
            poller: self.poller.clone(),
        }
    }

    /// Rounds that [`Self::idle`] spins and then gives way before it sleeps.
    pub fn set_wait_policy(&mut self, spins: u32, yields: u32) {
        self.wait_policy = WaitPolicy::of_rounds(spins, yields);
    }

    /// Whether the thread that waits next has nothing better to do than to give way to peers for a while, where
    /// ranks outnumber cores. So it is at first; a thread beside which its process computes should sleep.
    pub fn set_has_time(&mut self, has_time: bool) {
        self.wait_policy.set_has_time(has_time);
    }

    /// One step of waiting, the `n`th since the last progress: the caller checks for work after
    /// each.
    ///
    /// Small `n` spin, larger ones give way to other threads ([`Self::stays_awake`]), the last ones sleep
    /// ([`Self::falls_asleep`]).
    pub fn idle(&mut self, n: u32, max_sleep: Option<Duration>) {
        if !self.stays_awake(n) {
            self.falls_asleep(n, max_sleep);
        }
    }

    /// The `n`th step of [`Self::idle`] if it is one that spins or gives way. `false`: it is time to sleep.
    pub fn stays_awake(&mut self, n: u32) -> bool {
        let step = self.wait_policy.step(n, Instant::now);
        if step == Step::Sleep {
            return false;
        }
        self.disarm();
        let yields_core = step == Step::Yield;
        if self.has_sockets || (yields_core && n % POLL_EVERY == POLL_EVERY - 1) {
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

    /// The `n`th step of [`Self::idle`] where that sleeps: one call announces that this rank will, so that the caller
    /// checks once more; the next sleeps until a notifier, a socket, or the end of `max_sleep`. Wake-ups can be
    /// spurious, never lost.
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

    /// Moves this rank to another core if too many wait on its own.
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

    /// Announces a sleep, of this or another thread ([`Self::sleeper`]). The caller must look for work after
    /// this, and again if [`Self::has_news`] then.
    pub fn arm(&mut self) {
        if !self.notifier.region.is_foreign() {
            // Events noted until now are found by the caller's next check.
            self.poller.take_news();
            notifier::arm(self.notifier.sleeping());
            self.armed = true;
        }
    }

    /// Whether anything was noted since [`Self::arm`], which then wakes nobody any more.
    pub fn has_news(&self) -> bool {
        self.poller.has_news()
    }

    /// Takes back the announcement: who is awake needs no notification.
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

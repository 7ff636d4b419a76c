//! How a rank waits: spin a little, give way a little, then sleep until its doorbell or a socket.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    patience::{Patience, Step},
    platform,
    poller::Poller,
    shm::{arena::Bell, bell},
    spread::Spread,
};

/// Wakes a rank from another thread of its process.
#[derive(Clone)]
pub struct Doorbell(Bell);

impl Doorbell {
    /// Wakes the rank if it sleeps. Publish first what it should see. Does nothing in a forked
    /// child.
    pub fn ring(&self) {
        self.0.ring();
    }
}

impl std::fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Doorbell(..)")
    }
}

/// Sleeps for a rank on a thread that does not hold its [`Waiter`], which must be armed meanwhile.
///
/// A wake-up goes to the thread that came last, so one that sleeps here without being in charge does not take it
/// from one that is; should it get one all the same, it passes it on by [`Self::wake`].
#[derive(Clone)]
pub struct Sleeper {
    bell: Bell,
    poller: Arc<Poller>,
}

impl Sleeper {
    /// Sleeps until a doorbell, a socket, or the end of `max_sleep`.
    pub fn sleep(&self, max_sleep: Duration) {
        self.poller.pump(Some(max_sleep));
    }

    /// Wakes whoever sleeps, now or next, whether it has said so or not.
    pub fn wake(&self) {
        self.bell.ring_anyway();
    }
}

impl std::fmt::Debug for Sleeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sleeper(..)")
    }
}

/// One wait for everything that concerns a rank: its doorbell (rung by peers of the host and by
/// [`Doorbell`]) and its sockets.
pub struct Waiter {
    bell: Bell,
    poller: Arc<Poller>,
    armed: bool,
    patience: Patience,
    /// Progress may come over a socket, so waiting without sleeping must look there, too.
    has_sockets: bool,
    crowded: bool,
    spread: Option<Spread>,
}

/// How often a rank without data sockets looks at its few others while it gives way.
const GLANCE: u32 = 32;

impl Waiter {
    pub(crate) fn new(
        bell: Bell,
        poller: Arc<Poller>,
        crowded: bool,
        spread: Option<Spread>,
        has_sockets: bool,
    ) -> Self {
        Self {
            bell,
            poller,
            armed: false,
            patience: Patience::new(crowded, has_sockets),
            has_sockets,
            crowded,
            spread,
        }
    }

    /// Whether the ranks of this host outnumber its cores.
    pub fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// A handle that wakes this rank from other threads.
    pub fn doorbell(&self) -> Doorbell {
        Doorbell(self.bell.clone())
    }

    /// Where another thread sleeps in place of this waiter.
    pub fn sleeper(&self) -> Sleeper {
        Sleeper {
            bell: self.bell.clone(),
            poller: self.poller.clone(),
        }
    }

    /// Rounds that [`Self::idle`] spins and then gives way before it sleeps.
    pub fn set_patience(&mut self, spins: u32, yields: u32) {
        self.patience = Patience::of_rounds(spins, yields);
    }

    /// Whether the thread that waits next has nothing better to do than to give way to peers for a while, where
    /// ranks outnumber cores. So it is at first; a thread beside which its process computes should sleep.
    pub fn set_has_time(&mut self, has_time: bool) {
        self.patience.set_has_time(has_time);
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
        let step = self.patience.step(n, Instant::now);
        if step == Step::Sleep {
            return false;
        }
        self.disarm();
        let gives_way = step == Step::GiveWay;
        if self.has_sockets || (gives_way && n % GLANCE == GLANCE - 1) {
            self.poller.pump(Some(Duration::ZERO));
        } else if !gives_way {
            std::hint::spin_loop();
        }
        if gives_way {
            self.spread();
            self.patience
                .give_way(rustix::thread::sched_yield, Instant::now);
        }
        true
    }

    /// The `n`th step of [`Self::idle`] where that sleeps: one call announces that this rank will, so that the caller
    /// checks once more; the next sleeps until a doorbell, a socket, or the end of `max_sleep`. Wake-ups can be
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

    /// Helps to spread the ranks over the cores, by this one.
    fn spread(&mut self) {
        let Some(spread) = &mut self.spread else {
            return;
        };
        if self.patience.has_time()
            && !self.bell.region.is_foreign()
            && let Some(core) = platform::current_core()
        {
            spread.gives_way(core);
        }
    }

    /// Announces a sleep, of this or another thread ([`Self::sleeper`]). The caller must look for work after
    /// this, and again if [`Self::has_news`] then.
    pub fn arm(&mut self) {
        if !self.bell.region.is_foreign() {
            // What was noted until now the caller sees when it checks once more.
            self.poller.take_news();
            bell::arm(self.bell.sleeping());
            self.armed = true;
        }
    }

    /// Whether anything was noted since [`Self::arm`], which then wakes nobody any more.
    pub fn has_news(&self) -> bool {
        self.poller.has_news()
    }

    /// Takes back the announcement: who watches needs no bell.
    pub fn disarm(&mut self) {
        if self.armed && !self.bell.region.is_foreign() {
            bell::disarm(self.bell.sleeping());
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

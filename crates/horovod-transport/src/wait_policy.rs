//! The wait policy: when a rank that waits spins, yields its core or sleeps. Pure, time is passed in.

use std::time::{Duration, Instant};

/// Rounds of busy waiting before giving way, then before sleeping. A sleep and wake-up costs about
/// 2 us here, less than spinning in the way of the peer that is waited for.
const SPINS: u32 = 100;
/// A thread that has nothing better to do, on a core of its rank's, goes on spinning for this long. It costs as much if two
/// ranks that miss each other by less both sleep and have to be woken. Frameworks take 100 us and more from one operation to
/// the next, never equally long on all ranks.
const SPINNING: Duration = Duration::from_micros(100);
/// Spun in vain so often, with no answer in between, the peer needs this core or takes far longer. Now and then peers miss each
/// other by more than [`SPINNING`] whatever they do.
const SPINNING_IN_VAIN_MAX: u32 = 4;
/// Looks at the clock are this far apart.
const SPINS_PER_POLL: u32 = 16;
/// The same as [`SPINS`] where each round is a system call, because the answer may come over a socket.
const SOCKET_SPINS: u32 = 20;
/// Few: under load each may cost a whole time slice.
const YIELDS: u32 = 2;

/// How long a rank yields where ranks outnumber cores. The awaited peer mostly waits for the core: a yield hands the
/// core over in 2 us, while a sleep takes an event, a wake-up and often a wrong thread first.
const YIELDING: Duration = Duration::from_millis(1);
/// A thread that keeps the core for longer than this between two polls is computing, not waiting.
const SLICE: Duration = Duration::from_micros(500);
/// One loss in such a time is forgiven: the peer may have had work to do before its call.
const FORGIVEN_AFTER: Duration = Duration::from_millis(10);
/// Rather than lose slices to somebody who computes, or spin in vain, a rank goes to sleep at once for this long; twice as long each
/// time it loses some again soon after, up to the second figure.
const HOLDING_BACK: Duration = Duration::from_millis(20);
const HOLDING_BACK_MAX: Duration = Duration::from_millis(1280);

/// Action of a rank in one step of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitStep {
    Spin,
    Yield,
    Sleep,
}

/// The conditions under which a rank waits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WaitConditions {
    /// The ranks of this host outnumber its cores.
    pub(crate) oversubscribed: bool,
    /// Some of its links are sockets.
    pub(crate) has_sockets: bool,
}

/// Policy for the steps of a wait, which count from 0 since the rank's last progress.
#[derive(Debug)]
pub(crate) struct WaitPolicy {
    spins: u32,
    yields: u32,
    /// Where each rank has a core, and is notified without a system call.
    spinning: Option<Spinning>,
    /// Where ranks outnumber cores.
    oversubscription: Option<Oversubscription>,
}

/// Spinning by the clock.
#[derive(Debug)]
struct Spinning {
    /// The thread that waits has nothing else to do.
    has_time: bool,
    /// When this part of the wait began, and the wait's next step.
    began: Option<Instant>,
    next: u32,
    /// The first step of the wait that was no spin any more.
    ended: Option<u32>,
    /// How often it has spun in vain since an answer came while it did.
    in_vain: u32,
    holding_back: HoldOff,
}

/// Giving way by the clock.
#[derive(Debug)]
struct Oversubscription {
    /// The thread that waits has nothing else to do, nor has its process.
    has_time: bool,
    /// When the wait began, and its next step.
    began: Option<Instant>,
    next: u32,
    /// When the rank last read the clock: at the beginning, and whenever it had the core back. The work between two
    /// steps is short.
    read_clock_at: Option<Instant>,
    /// When it last had lost a time slice.
    lost: Option<Instant>,
    holding_back: HoldOff,
}

/// A time in which something is not tried again; the longer, the sooner it failed after the last one.
#[derive(Debug)]
pub(crate) struct HoldOff {
    until: Option<Instant>,
    length: Duration,
    first: Duration,
    longest: Duration,
}

impl HoldOff {
    pub(crate) fn new(first: Duration, longest: Duration) -> Self {
        Self {
            until: None,
            length: Duration::ZERO,
            first,
            longest,
        }
    }

    pub(crate) fn lasts(&self, now: impl FnOnce() -> Instant) -> bool {
        self.until.is_some_and(|until| now() < until)
    }

    pub(crate) fn begin(&mut self, now: Instant) {
        let again = self
            .until
            .is_some_and(|until| now.saturating_duration_since(until) < self.length);
        self.length = if again {
            (2 * self.length).min(self.longest)
        } else {
            self.first
        };
        self.until = Some(now + self.length);
    }
}

impl WaitPolicy {
    pub(crate) fn new(conditions: WaitConditions) -> Self {
        let WaitConditions {
            oversubscribed,
            has_sockets,
        } = conditions;
        // Where ranks outnumber cores, spinning takes the time from the one that is waited for.
        let spins = match (oversubscribed, has_sockets) {
            (true, _) => 0,
            (false, true) => SOCKET_SPINS,
            (false, false) => SPINS,
        };
        Self {
            spins,
            yields: YIELDS,
            spinning: (!oversubscribed && !has_sockets).then_some(Spinning {
                has_time: true,
                began: None,
                next: 0,
                ended: None,
                in_vain: 0,
                holding_back: HoldOff::new(HOLDING_BACK, HOLDING_BACK_MAX),
            }),
            oversubscription: oversubscribed.then_some(Oversubscription {
                has_time: true,
                began: None,
                next: 0,
                read_clock_at: None,
                lost: None,
                holding_back: HoldOff::new(HOLDING_BACK, HOLDING_BACK_MAX),
            }),
        }
    }

    /// So many rounds of either, whatever the clock says.
    pub(crate) fn of_rounds(spins: u32, yields: u32) -> Self {
        Self {
            spins,
            yields,
            spinning: None,
            oversubscription: None,
        }
    }

    /// Whether the thread that waits from now on has time to spin or to give way for long.
    pub(crate) fn set_has_time(&mut self, has_time: bool) {
        if let Some(spinning) = &mut self.spinning {
            spinning.has_time = has_time;
        }
        if let Some(oversubscription) = &mut self.oversubscription {
            oversubscription.has_time = has_time;
        }
    }

    /// Whether the thread that waits has time, as far as that matters.
    pub(crate) fn has_time(&self) -> bool {
        self.oversubscription
            .as_ref()
            .is_some_and(|oversubscription| oversubscription.has_time)
    }

    /// The action for step `n`. The clock is read only where it decides.
    pub(crate) fn step(&mut self, n: u32, now: impl Fn() -> Instant) -> WaitStep {
        if n < self.spins {
            return WaitStep::Spin;
        }
        let mut spun = self.spins;
        if let Some(spinning) = &mut self.spinning
            && spinning.has_time
        {
            match spinning.end(n, &now) {
                Some(end) => spun = end,
                None => return WaitStep::Spin,
            }
        }
        let few = n < spun.saturating_add(self.yields);
        let yields_core = match &mut self.oversubscription {
            Some(oversubscription) => oversubscription.lasts(n, now) || few,
            None => few,
        };
        if yields_core {
            WaitStep::Yield
        } else {
            WaitStep::Sleep
        }
    }

    /// Gives way by `give`, as [`Self::step`] said, and learns from how long that took.
    pub(crate) fn yield_core(&mut self, give: impl FnOnce(), now: impl Fn() -> Instant) {
        give();
        if let Some(oversubscription) = &mut self.oversubscription {
            oversubscription.is_back(now());
        }
    }
}

impl Spinning {
    /// The step with which it has ended, if it has by step `n`; a wait begins with a step that is no later than the one
    /// before.
    fn end(&mut self, n: u32, now: impl Fn() -> Instant) -> Option<u32> {
        let began = match self.began {
            Some(began) if n >= self.next => began,
            _ => {
                if self.ended.is_none() {
                    self.in_vain = 0;
                }
                let now = now();
                self.ended = self.holding_back.lasts(|| now).then_some(n);
                *self.began.insert(now)
            }
        };
        self.next = n.saturating_add(1);
        if self.ended.is_none() && n.is_multiple_of(SPINS_PER_POLL) {
            let now = now();
            if now.duration_since(began) >= SPINNING {
                self.ended = Some(n);
                self.in_vain += 1;
                if self.in_vain >= SPINNING_IN_VAIN_MAX {
                    self.in_vain = 0;
                    self.holding_back.begin(now);
                }
            }
        }
        self.ended
    }
}

impl Oversubscription {
    /// Whether it gives way for long at present.
    fn tries(&self, now: Instant) -> bool {
        self.has_time && !self.holding_back.lasts(|| now)
    }

    /// Whether step `n` may still give way for the sake of others; a wait begins with a step that is no later than the
    /// one before.
    fn lasts(&mut self, n: u32, now: impl Fn() -> Instant) -> bool {
        let (began, read_clock_at) = match (self.began, self.read_clock_at) {
            (Some(began), Some(read_clock_at)) if n >= self.next => (began, read_clock_at),
            _ => {
                let now = now();
                (*self.began.insert(now), *self.read_clock_at.insert(now))
            }
        };
        self.next = n.saturating_add(1);
        self.tries(read_clock_at) && read_clock_at.duration_since(began) < YIELDING
    }

    fn is_back(&mut self, after: Instant) {
        let Some(before) = self.read_clock_at.replace(after) else {
            return;
        };
        if after.duration_since(before) <= SLICE || !self.tries(before) {
            return;
        }
        let last = self.lost.replace(after);
        if last.is_some_and(|last| before.saturating_duration_since(last) < FORGIVEN_AFTER) {
            self.holding_back.begin(after);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Steps without progress until the wait sleeps; each that gives way takes so long.
    fn steps(wait_policy: &mut WaitPolicy, clock: &Cell<Instant>, each: Duration) -> u32 {
        let now = || clock.get();
        for n in 0.. {
            match wait_policy.step(n, now) {
                WaitStep::Spin => clock.set(clock.get() + each),
                WaitStep::Yield => {
                    wait_policy.yield_core(|| clock.set(clock.get() + each), now);
                }
                WaitStep::Sleep => return n,
            }
        }
        unreachable!()
    }

    const WITH_CORES: WaitConditions = WaitConditions {
        oversubscribed: false,
        has_sockets: false,
    };
    const OVERSUBSCRIBED: WaitConditions = WaitConditions {
        oversubscribed: true,
        ..WITH_CORES
    };
    const OVER_SOCKETS: WaitConditions = WaitConditions {
        has_sockets: true,
        ..WITH_CORES
    };

    const SHORT: Duration = Duration::from_micros(2);

    #[test]
    fn an_oversubscribed_rank_yields_for_a_time_in_each_wait() {
        let (clock, mut wait_policy) = (Cell::new(Instant::now()), WaitPolicy::new(OVERSUBSCRIBED));
        for _ in 0..3 {
            assert_eq!(steps(&mut wait_policy, &clock, SHORT), 500);
            clock.set(clock.get() + Duration::from_secs(1));
        }
    }

    #[test]
    fn a_thread_with_time_and_a_core_spins_for_a_time_in_each_wait() {
        let (clock, mut wait_policy) = (Cell::new(Instant::now()), WaitPolicy::new(WITH_CORES));
        let spins = (SPINS + 50).next_multiple_of(SPINS_PER_POLL);
        for _ in 0..3 {
            assert_eq!(steps(&mut wait_policy, &clock, SHORT), spins + YIELDS);
            let mut step = |n| wait_policy.step(n, || clock.get());
            assert_eq!(step(spins + YIELDS + 1), WaitStep::Sleep);
            clock.set(clock.get() + Duration::from_secs(1));
        }
        let mut over_sockets = WaitPolicy::new(OVER_SOCKETS);
        let rounds = steps(&mut over_sockets, &clock, SHORT);
        assert_eq!(rounds, SOCKET_SPINS + YIELDS);
    }

    #[test]
    fn who_spins_in_vain_again_and_again_sleeps_at_once_for_a_while() {
        let (clock, mut wait_policy) = (Cell::new(Instant::now()), WaitPolicy::new(WITH_CORES));
        let spins = (SPINS + 50).next_multiple_of(SPINS_PER_POLL);
        for _ in 0..SPINNING_IN_VAIN_MAX {
            assert_eq!(steps(&mut wait_policy, &clock, SHORT), spins + YIELDS);
        }
        assert_eq!(steps(&mut wait_policy, &clock, SHORT), SPINS + YIELDS);
        clock.set(clock.get() + HOLDING_BACK);
        assert_eq!(steps(&mut wait_policy, &clock, SHORT), spins + YIELDS);
    }

    #[test]
    fn an_answer_in_between_shows_that_spinning_is_worth_it() {
        let (clock, mut wait_policy) = (Cell::new(Instant::now()), WaitPolicy::new(WITH_CORES));
        let spins = (SPINS + 50).next_multiple_of(SPINS_PER_POLL);
        for round in 0..10 * SPINNING_IN_VAIN_MAX {
            if round % SPINNING_IN_VAIN_MAX == SPINNING_IN_VAIN_MAX - 1 {
                // The answer comes in the step after this one.
                assert_eq!(wait_policy.step(SPINS, || clock.get()), WaitStep::Spin);
                clock.set(clock.get() + SHORT);
            } else {
                assert_eq!(steps(&mut wait_policy, &clock, SHORT), spins + YIELDS);
            }
        }
    }

    #[test]
    fn a_wait_that_goes_on_after_a_sleep_does_not_begin_anew() {
        let (clock, mut wait_policy) = (Cell::new(Instant::now()), WaitPolicy::new(OVERSUBSCRIBED));
        let slept = steps(&mut wait_policy, &clock, SHORT);
        clock.set(clock.get() + Duration::from_secs(1));
        let mut step = |n| wait_policy.step(n, || clock.get());
        assert_eq!(step(slept + 1), WaitStep::Sleep);
        assert_eq!(step(0), WaitStep::Yield);
    }

    /// A wait begins, and a time slice is lost at once.
    fn lose(wait_policy: &mut WaitPolicy, clock: &Cell<Instant>) {
        assert_eq!(wait_policy.step(0, || clock.get()), WaitStep::Yield);
        wait_policy.yield_core(|| clock.set(clock.get() + 4 * SLICE), || clock.get());
    }

    #[test]
    fn who_loses_time_slices_soon_after_each_other_sleeps_at_once_for_a_while() {
        let (clock, mut wait_policy) = (Cell::new(Instant::now()), WaitPolicy::new(OVERSUBSCRIBED));
        lose(&mut wait_policy, &clock);
        clock.set(clock.get() + SHORT);
        assert_eq!(steps(&mut wait_policy, &clock, SHORT), 500);
        lose(&mut wait_policy, &clock);
        assert_eq!(steps(&mut wait_policy, &clock, SHORT), YIELDS);
        clock.set(clock.get() + HOLDING_BACK);
        assert_eq!(steps(&mut wait_policy, &clock, SHORT), 500);
    }

    #[test]
    fn a_slice_that_is_lost_now_and_then_is_bad_luck() {
        let (clock, mut wait_policy) = (Cell::new(Instant::now()), WaitPolicy::new(OVERSUBSCRIBED));
        for _ in 0..10 {
            lose(&mut wait_policy, &clock);
            assert_eq!(steps(&mut wait_policy, &clock, SHORT), 500);
            clock.set(clock.get() + FORGIVEN_AFTER);
        }
    }

    #[test]
    fn who_keeps_losing_time_slices_tries_less_and_less_often() {
        let (clock, mut wait_policy) = (Cell::new(Instant::now()), WaitPolicy::new(OVERSUBSCRIBED));
        let began = clock.get();
        let mut losses = 0;
        while clock.get() < began + 100 * HOLDING_BACK_MAX {
            let mut step = |n| wait_policy.step(n, || clock.get());
            if step(0) == WaitStep::Yield && step(YIELDS) == WaitStep::Yield {
                losses += 1;
                lose(&mut wait_policy, &clock);
            }
            clock.set(clock.get() + 50 * SHORT);
        }
        assert!((200..220).contains(&losses), "{losses}");
        clock.set(clock.get() + 3 * HOLDING_BACK_MAX);
        lose(&mut wait_policy, &clock);
        lose(&mut wait_policy, &clock);
        clock.set(clock.get() + HOLDING_BACK);
        assert_eq!(steps(&mut wait_policy, &clock, SHORT), 500);
    }

    #[test]
    fn who_has_no_time_or_a_core_for_itself_counts_rounds() {
        let clock = Cell::new(Instant::now());
        let mut hurried = WaitPolicy::new(OVERSUBSCRIBED);
        hurried.set_has_time(false);
        assert_eq!(steps(&mut hurried, &clock, SHORT), YIELDS);
        hurried.set_has_time(true);
        assert_eq!(steps(&mut hurried, &clock, SHORT), 500);
        let mut alone = WaitPolicy::new(WITH_CORES);
        alone.set_has_time(false);
        assert_eq!(steps(&mut alone, &clock, SHORT), SPINS + YIELDS);
        let mut policy = WaitPolicy::of_rounds(3, 4);
        assert_eq!(steps(&mut policy, &clock, SHORT), 7);
        let mut step = |n| policy.step(n, || clock.get());
        assert!(step(2) == WaitStep::Spin && step(3) == WaitStep::Yield);
    }
}

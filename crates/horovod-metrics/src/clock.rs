//! Attributes every moment of a rank to one of four states: a thread of the script waits for an operation or not, and an
//! operation is carried out or not. The four times add up to the time that has passed, whatever overlaps.
//!
//! One word holds the counts and the time of the last change. The thread that replaces the word owns the time since the
//! change before, and adds it to the state of that time: no moment is counted twice, and none is lost.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Time is counted in units of 1,024 ns.
const TICK_SHIFT: u32 = 10;
/// The word from its lowest bit: threads that wait, executions, time. The time wraps around after 78 hours; each report
/// changes the word.
const WAITING_BITS: u32 = 18;
const EXECUTING_BITS: u32 = 8;
const TIME_SHIFT: u32 = WAITING_BITS + EXECUTING_BITS;
const TIME_MASK: u64 = (1 << (u64::BITS - TIME_SHIFT)) - 1;
/// A thread that has read the time comes so late at most: 18 minutes.
const LATE_TICKS_MAX: u64 = 1 << 30;
const COUNTS_MASK: u64 = (1 << TIME_SHIFT) - 1;

/// An activity that several threads, or several operations, can be at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// A thread of the script waits for an operation, or an operation with a callback has not ended.
    Waiting,
    /// An operation is carried out.
    Executing,
}

impl Activity {
    fn unit(self) -> u64 {
        match self {
            Self::Waiting => 1,
            Self::Executing => 1 << WAITING_BITS,
        }
    }

    fn mask(self) -> u64 {
        match self {
            Self::Waiting => (1 << WAITING_BITS) - 1,
            Self::Executing => ((1 << EXECUTING_BITS) - 1) << WAITING_BITS,
        }
    }
}

/// The states by whether a thread waits (1) and whether an operation is carried out (2).
const STATES: usize = 4;

/// Times in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Times {
    /// No thread waits, and no operation is carried out.
    pub(crate) alone: u64,
    /// No thread waits; an operation is carried out.
    pub(crate) hidden: u64,
    /// A thread waits, and no operation is carried out.
    pub(crate) waiting: u64,
    /// A thread waits, and an operation is carried out.
    pub(crate) communicating: u64,
}

/// The times of one rank, from 0. Moments are nanoseconds since the engine started.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    word: AtomicU64,
    ticks: [AtomicU64; STATES],
}

impl Clock {
    /// One more is at this activity. `false`: there are too many, and this one is not counted.
    #[inline]
    pub(crate) fn begins(&self, activity: Activity, now: u64) -> bool {
        let is_full = |counts: u64| counts & activity.mask() == activity.mask();
        let before = self.change(now, |counts| {
            if is_full(counts) {
                counts
            } else {
                counts + activity.unit()
            }
        });
        !is_full(before)
    }

    /// One that was counted has ended.
    #[inline]
    pub(crate) fn ends(&self, activity: Activity, now: u64) {
        self.change(now, |counts| {
            if counts & activity.mask() == 0 {
                counts
            } else {
                counts - activity.unit()
            }
        });
    }

    /// The times until now. They never fall.
    pub(crate) fn read(&self, now: u64) -> Times {
        self.change(now, |counts| counts);
        let [alone, waiting, hidden, communicating] = self
            .ticks
            .each_ref()
            .map(|ticks| ticks.load(Relaxed) << TICK_SHIFT);
        Times {
            alone,
            hidden,
            waiting,
            communicating,
        }
    }

    /// Replaces the counts; returns the former ones.
    #[inline]
    fn change(&self, now: u64, counts: impl Fn(u64) -> u64) -> u64 {
        let now = (now >> TICK_SHIFT) & TIME_MASK;
        let mut before = self.word.load(Relaxed);
        loop {
            let since = before >> TIME_SHIFT;
            let passed = now.wrapping_sub(since) & TIME_MASK;
            // Another thread may have read the time later and come first.
            let (passed, at) = if passed > TIME_MASK - LATE_TICKS_MAX {
                (0, since)
            } else {
                (passed, now)
            };
            let former = before & COUNTS_MASK;
            let after = (at << TIME_SHIFT) | counts(former);
            let swapped = self
                .word
                .compare_exchange_weak(before, after, Relaxed, Relaxed);
            match swapped {
                Ok(_) => {
                    self.ticks[state(former)].fetch_add(passed, Relaxed);
                    return former;
                }
                Err(current) => before = current,
            }
        }
    }
}

fn state(counts: u64) -> usize {
    let is_at = |activity: Activity| usize::from(counts & activity.mask() != 0);
    is_at(Activity::Waiting) | (is_at(Activity::Executing) << 1)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use proptest::prelude::*;

    use super::Activity::{Executing, Waiting};
    use super::*;

    const TICK: u64 = 1 << TICK_SHIFT;

    /// Events at these ticks, then the times at `end`, in ticks.
    fn times(events: &[(u64, Activity, bool)], end: u64) -> [u64; 4] {
        let clock = Clock::default();
        for (at, activity, begins) in events {
            if *begins {
                assert!(clock.begins(*activity, at * TICK));
            } else {
                clock.ends(*activity, at * TICK);
            }
        }
        let t = clock.read(end * TICK);
        [t.alone, t.hidden, t.waiting, t.communicating].map(|ns| ns / TICK)
    }

    #[test]
    fn a_wait_is_split_into_waiting_for_ranks_and_communicating() {
        let events = [
            (10, Waiting, true),
            (16, Executing, true),
            (19, Executing, false),
            (20, Waiting, false),
        ];
        assert_eq!(times(&events, 100), [90, 0, 7, 3]);
    }

    #[test]
    fn an_execution_that_outlasts_slices_of_a_wait_is_communicating_in_all_of_them() {
        let events = [
            (0, Waiting, true),
            (1, Executing, true),
            (10, Waiting, false),
            (10, Waiting, true),
            (19, Executing, false),
            (20, Waiting, false),
        ];
        assert_eq!(times(&events, 20), [0, 0, 2, 18]);
    }

    #[test]
    fn an_execution_behind_the_scripts_back_is_hidden() {
        let events = [
            (1, Executing, true),
            (4, Waiting, true),
            (6, Executing, false),
            (6, Waiting, false),
        ];
        assert_eq!(times(&events, 10), [5, 3, 0, 2]);
    }

    #[test]
    fn threads_that_wait_at_once_wait_once_and_a_wait_that_goes_on_is_seen() {
        let events = [(0, Waiting, true), (1, Waiting, true), (2, Waiting, false)];
        assert_eq!(times(&events, 5), [0, 0, 5, 0]);
    }

    #[test]
    fn a_late_thread_with_an_early_time_takes_nothing_back() {
        let clock = Clock::default();
        assert!(clock.begins(Waiting, 10 * TICK));
        clock.read(20 * TICK);
        clock.ends(Waiting, 15 * TICK);
        let times = clock.read(30 * TICK);
        assert_eq!((times.waiting, times.alone), (10 * TICK, 20 * TICK));
    }

    #[test]
    fn the_time_wraps_around() {
        let wrap = (TIME_MASK + 1) * TICK;
        let clock = Clock::default();
        clock.read(wrap / 3);
        clock.read(2 * (wrap / 3));
        clock.read(wrap + 5 * TICK);
        assert_eq!(clock.read(wrap + 5 * TICK).alone, wrap + 5 * TICK);
    }

    #[test]
    fn too_many_are_not_counted_and_take_nobody_away() {
        let clock = Clock::default();
        for _ in 0..(1 << EXECUTING_BITS) - 1 {
            assert!(clock.begins(Executing, 0));
        }
        assert!(!clock.begins(Executing, 0));
        assert_eq!(clock.read(TICK).hidden, TICK);
    }

    /// Every thread's time stands still, so no time may be attributed to anything, wherever the threads meet.
    #[test]
    fn threads_that_begin_and_read_at_once_count_no_moment_that_has_passed_before() {
        const NOW: u64 = 1000 * TICK;
        for _ in 0..2000 {
            let clock = Clock::default();
            let arrived = AtomicUsize::new(0);
            let meet = || {
                arrived.fetch_add(1, Relaxed);
                while arrived.load(Relaxed) < 2 {
                    std::thread::yield_now();
                }
            };
            let times = std::thread::scope(|scope| {
                scope.spawn(|| {
                    meet();
                    clock.begins(Waiting, NOW);
                    clock.ends(Waiting, NOW);
                });
                meet();
                clock.read(NOW)
            });
            assert_eq!((times.waiting, times.communicating), (0, 0));
        }
    }

    proptest! {
        /// However activities overlap: the four times add up to the time that has passed.
        #[test]
        fn the_times_add_up(events in proptest::collection::vec((0..50_u64, any::<bool>(), any::<bool>()), 0..60)) {
            let clock = Clock::default();
            let mut now = 0;
            for (passed, waits, begins) in events {
                now += passed * TICK;
                let activity = if waits { Waiting } else { Executing };
                if begins {
                    clock.begins(activity, now);
                } else {
                    clock.ends(activity, now);
                }
            }
            let t = clock.read(now);
            prop_assert_eq!(t.alone + t.hidden + t.waiting + t.communicating, now);
        }
    }
}

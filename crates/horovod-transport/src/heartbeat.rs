//! The heartbeat: a state machine, without clock or sockets, that finds neighbours that have been silent for too long.
//!
//! Every rank sends a sign of life to each neighbour four times per timeout, and checks as often which neighbours sent
//! one. A neighbour that was silent for the whole timeout counts as lost. A rank that did not check in time, because
//! its process was stopped or its machine was suspended or overloaded, blames no neighbour for that time.

use horovod_protocol::Time;

/// Looks in a time-out: so many signs of life may be late or lost before one is missed.
const CHECKS: u64 = 4;

/// State of the heartbeat: when neighbours were last received from.
#[derive(Debug)]
pub(crate) struct Watch {
    timeout_ns: u64,
    /// The last look, and the next.
    checked: Time,
    due: Time,
    /// Somebody seemed silent at the last look: the next follows at once, after another look at the sockets.
    doubts: bool,
    /// When each neighbour was last known to speak; `None` for one that is watched no more.
    received: Vec<Option<Time>>,
}

/// Actions due after a check.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Check {
    /// Tell every neighbour that this rank lives.
    pub(crate) send: bool,
    /// Somebody seems silent: see what has arrived, and look again at once.
    pub(crate) again: bool,
    /// These did not speak: their number, and for how many nanoseconds.
    pub(crate) silent: Vec<(usize, u64)>,
}

impl Watch {
    /// Of `neighbours`, all of which have just spoken.
    pub(crate) fn new(timeout_ns: u64, neighbours: usize, now: Time) -> Self {
        let mut watch = Self {
            timeout_ns: timeout_ns.max(CHECKS),
            checked: now,
            due: now,
            doubts: false,
            received: vec![Some(now); neighbours],
        };
        watch.due = watch.next(now);
        watch
    }

    fn next(&self, now: Time) -> Time {
        Time(now.0.saturating_add(self.timeout_ns / CHECKS))
    }

    /// When [`Self::check`] has something to do; `None`: never again.
    pub(crate) fn due(&self) -> Option<Time> {
        self.received
            .iter()
            .any(Option::is_some)
            .then_some(self.due)
    }

    /// Nothing more is expected of this neighbour.
    pub(crate) fn forget(&mut self, neighbour: usize) {
        self.received[neighbour] = None;
    }

    /// Takes the time, and asks `received_from` whether a message of a neighbour came since the last check.
    pub(crate) fn check(
        &mut self,
        now: Time,
        mut received_from: impl FnMut(usize) -> bool,
    ) -> Check {
        let mut check = Check::default();
        if now < self.due {
            return check;
        }
        check.send = !self.doubts;
        let absent = now.0.saturating_sub(self.checked.0) > self.timeout_ns / 2;
        self.checked = now;
        let mut silent = Vec::new();
        for (neighbour, received) in self.received.iter_mut().enumerate() {
            let Some(received) = received else { continue };
            // Both must be asked: what was said before this look must not count for the next.
            if received_from(neighbour) | absent {
                *received = now;
            }
            let silence = now.0.saturating_sub(received.0);
            if silence >= self.timeout_ns {
                silent.push((neighbour, silence));
            }
        }
        check.again = !silent.is_empty() && !self.doubts;
        self.doubts = check.again;
        if check.again {
            self.due = now;
            return check;
        }
        self.due = self.next(now);
        for (neighbour, _) in &silent {
            self.forget(*neighbour);
        }
        check.silent = silent;
        check
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TIMEOUT: u64 = 400;

    fn watch(neighbours: usize) -> Watch {
        Watch::new(TIMEOUT, neighbours, Time(0))
    }

    /// Checks whenever a check is due until `end`; the neighbours that send are given by time. Returns each lost
    /// neighbour with its time.
    fn run(
        watch: &mut Watch,
        end: u64,
        received_from: impl Fn(u64, usize) -> bool,
    ) -> Vec<(u64, usize, u64)> {
        let mut given_up = Vec::new();
        while let Some(Time(now)) = watch.due().filter(|due| due.0 <= end) {
            let check = watch.check(Time(now), |neighbour| received_from(now, neighbour));
            given_up.extend(check.silent.iter().map(|(who, ns)| (now, *who, *ns)));
        }
        given_up
    }

    #[test]
    fn who_speaks_is_never_given_up_and_who_does_not_is_after_the_time_out() {
        assert_eq!(run(&mut watch(3), 100_000, |_, _| true), []);
        // One sign of life in a time-out is enough.
        let rarely = |now, _| now % 300 == 0;
        assert_eq!(run(&mut watch(2), 100_000, rarely), []);
        let never = |_, neighbour| neighbour != 1;
        assert_eq!(run(&mut watch(3), 100_000, never), [(400, 1, 400)]);
        let until = |now, neighbour| neighbour != 2 || now <= 1000;
        assert_eq!(run(&mut watch(3), 100_000, until), [(1400, 2, 400)]);
    }

    #[test]
    fn all_are_told_four_times_in_a_time_out() {
        let mut watch = watch(1);
        let mut spoken = 0;
        while let Some(now) = watch.due().filter(|due| due.0 <= 10 * TIMEOUT) {
            assert_eq!(
                watch.check(Time(now.0 - 1), |_| panic!("too early")),
                Check::default()
            );
            spoken += u64::from(watch.check(now, |_| true).send);
        }
        assert_eq!(spoken, 10 * CHECKS);
    }

    #[test]
    fn before_somebody_is_given_up_what_has_arrived_is_looked_at_once_more() {
        let mut watch = watch(2);
        for now in [100, 200, 300] {
            watch.check(Time(now), |neighbour| neighbour == 0);
        }
        let check = watch.check(Time(400), |neighbour| neighbour == 0);
        assert_eq!(
            (check.send, check.again, check.silent),
            (true, true, vec![])
        );
        // It had spoken after all.
        assert_eq!(watch.due(), Some(Time(400)));
        assert_eq!(
            watch.check(Time(401), |neighbour| neighbour == 1),
            Check::default()
        );
        assert_eq!(watch.due(), Some(Time(501)));
    }

    #[test]
    fn who_was_away_itself_blames_nobody_for_that_time() {
        let mut watch = watch(1);
        let check = watch.check(Time(5000), |_| false);
        assert_eq!(
            (check.send, check.again, check.silent),
            (true, false, vec![])
        );
        assert_eq!(run(&mut watch, 100_000, |_, _| false), [(5400, 0, 400)]);
    }

    #[test]
    fn who_has_left_is_not_expected_to_speak_and_alone_there_is_nothing_to_do() {
        let mut watch = watch(2);
        watch.forget(0);
        assert_eq!(run(&mut watch, 100_000, |_, _| false), [(400, 1, 400)]);
        assert_eq!(watch.due(), None);
        assert_eq!(super::Watch::new(TIMEOUT, 0, Time(0)).due(), None);
    }

    proptest! {
        /// Whatever the times of looks and signs of life: nobody is given up who spoke within the time-out, and
        /// who never speaks again is, unless the watcher itself is away again and again.
        #[test]
        fn only_the_silent_are_given_up(
            gaps in prop::collection::vec(1u64..150, 200),
            signs in prop::collection::btree_set(0u64..10_000, 0..60),
        ) {
            let mut watch = watch(1);
            let (mut now, mut before) = (0, 0);
            let mut given_up = None;
            for gap in gaps {
                now += gap;
                let received_from = signs.range(before + 1..=now).next_back();
                let due = watch.due().is_some_and(|due| due.0 <= now);
                let check = watch.check(Time(now), |_| received_from.is_some());
                if due {
                    before = now;
                }
                if let Some((_, silence)) = check.silent.first() {
                    let last = signs.range(..=now).next_back().copied().unwrap_or(0);
                    prop_assert!(now - last >= TIMEOUT && *silence >= TIMEOUT);
                    given_up = Some(now);
                    break;
                }
            }
            let longest = |until: u64| {
                let all = signs.range(..until).copied().chain([until]);
                all.scan(0, |last, at| Some(at - std::mem::replace(last, at))).max().unwrap_or(0)
            };
            // Looks are at most a quarter and one gap apart.
            prop_assert!(given_up.is_some() || longest(now) <= 2 * TIMEOUT + 300);
        }
    }
}

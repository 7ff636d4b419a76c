//! Members that a signal has stopped while a new round waits for them. Between two rounds no neighbour notices their
//! silence. A slow member still runs, so the driver asks the agents whether the members are stopped.

use std::time::Duration;

use super::driver::{Driver, WorkerPhase, WorkerProcess};
use super::events::{Action, Time, WorkerId};

/// Number of checks within the maximum silence; ranks send as many pings in that time.
const CHECKS: u32 = 4;

impl Driver {
    /// Sets how long a worker may be silent, as the ranks have it configured; `None`: no limit.
    pub fn expect_life_within(&mut self, limit: Option<Duration>) {
        self.silence_max = limit;
    }

    /// Requests checks of the awaited members at regular intervals.
    pub(super) fn check_members(&mut self, now: Time) {
        let inside = self.workers.iter().filter(|(_, w)| is_inside(w));
        let inside: Vec<WorkerId> = inside.map(|(id, _)| *id).collect();
        // A lone member has no neighbours to notice its silence, and a newcomer waits until members reach the next
        // round.
        let has_newcomer = self
            .workers
            .values()
            .any(|w| w.phase == WorkerPhase::Waiting);
        let is_watched = self.rounds > 0 && (inside.len() == 1 || has_newcomer);
        let Some(limit) = self
            .silence_max
            .filter(|_| (self.is_round_wanted() || is_watched) && !inside.is_empty())
        else {
            self.check_at = None;
            self.workers.values_mut().for_each(|w| w.seen_stopped = 0);
            return;
        };
        // Most members join before the first check is due, so that no check is needed.
        let at = *self.check_at.get_or_insert(now + limit / CHECKS);
        if at <= now {
            self.check_at = Some(now + limit / CHECKS);
            for id in inside {
                self.act(Action::CheckStopped(id));
            }
        }
    }

    /// Returns whether a new round waits for members.
    fn is_round_wanted(&self) -> bool {
        self.rounds > 0 && (self.waiting_since.is_some() || !self.is_up)
    }

    /// Handles the answer of a check. Elapsed time alone ends no worker: if the launcher was stopped as well, all
    /// processes may continue together.
    pub(super) fn on_stopped_state(&mut self, worker: WorkerId, is_stopped: bool) {
        let is_safe = self.is_state_elsewhere(worker);
        let name = self.name(worker);
        let Some(w) = self.workers.get_mut(&worker).filter(|w| is_inside(w)) else {
            return;
        };
        w.seen_stopped = if is_stopped { w.seen_stopped + 1 } else { 0 };
        let (seen, host) = (w.seen_stopped, w.host.clone());
        if seen == CHECKS && !is_safe {
            self.note(format!(
                "{name} has been stopped by a signal (its process is in state T) and alone holds the training state, so \
                 the job waits for it: `kill -CONT` with its process number on host {host} lets it go on, Ctrl-C here \
                 ends the job without that state"
            ));
        }
        if seen <= CHECKS || !is_safe || !self.is_round_wanted() {
            return;
        }
        if let Some(w) = self.workers.get_mut(&worker) {
            w.is_condemned = true;
        }
        let limit = self.silence_max.unwrap_or_default();
        self.note(format!(
            "{name} is wanted in a new round and has been stopped by a signal for {limit:?}; ending it"
        ));
        self.stop(worker);
    }

    /// Returns whether the training state would survive without this worker, in another worker that waits for a round
    /// or is joining one.
    fn is_state_elsewhere(&self, worker: WorkerId) -> bool {
        let has_come = |w: &WorkerProcess| w.phase == WorkerPhase::Waiting || !self.is_up;
        let mut others = self.workers.iter().filter(|(id, _)| **id != worker);
        !self.has_state || others.any(|(_, w)| w.holds() && w.seen_stopped == 0 && has_come(w))
    }
}

fn is_inside(w: &WorkerProcess) -> bool {
    w.phase == WorkerPhase::Member && !w.is_going
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::super::driver::tests::round_of_three;
    use super::super::events::Event;
    use super::*;
    use crate::frames::ExitStatus;
    use crate::report::Cause;

    const LIMIT: Duration = Duration::from_secs(40);

    const fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    fn join(driver: &mut Driver, now: Time, worker: WorkerId) {
        driver.handle(
            now,
            Event::Joined {
                worker,
                training_state: 1,
            },
        );
    }

    /// Lets this time pass; reports the workers for whom `is_stopped` holds as stopped. Returns the ended workers, and
    /// the number of questions.
    fn pass(
        driver: &mut Driver,
        seconds: Range<u64>,
        is_stopped: impl Fn(WorkerId) -> bool,
    ) -> (Vec<WorkerId>, usize) {
        let (mut ended, mut checks) = (Vec::new(), 0);
        let mut now = at(seconds.start);
        loop {
            while let Some(action) = driver.poll_action() {
                match action {
                    Action::Stop(worker) => ended.push(worker),
                    Action::CheckStopped(worker) => {
                        checks += 1;
                        let is_stopped = is_stopped(worker);
                        driver.handle(now, Event::StoppedState { worker, is_stopped });
                    }
                    _ => {}
                }
            }
            let next = driver.next_deadline().map(|due| due.max(now));
            match next.filter(|due| *due < at(seconds.end)) {
                Some(due) => now = due,
                None => return (ended, checks),
            }
            driver.handle_timeout(now);
        }
    }

    #[test]
    fn who_is_stopped_while_others_wait_is_ended_and_who_is_slow_is_not() {
        let mut driver = round_of_three();
        driver.expect_life_within(Some(LIMIT));
        // Nobody is asked about while the round is used.
        assert_eq!(pass(&mut driver, 10..1000, |_| true), (vec![], 0));
        join(&mut driver, at(1000), 0);
        // Found stopped four times; the fifth time the time-out has passed.
        let (ended, checks) = pass(&mut driver, 1000..1050, |worker| worker == 1);
        assert_eq!((ended, checks), (vec![], 8));
        let (ended, checks) = pass(&mut driver, 1050..1100, |worker| worker == 1);
        assert_eq!(ended, [1]);
        assert!(checks > 2, "the slow one is still looked at");
    }

    #[test]
    fn who_goes_on_between_two_looks_is_waited_for() {
        let mut driver = round_of_three();
        driver.expect_life_within(Some(LIMIT));
        join(&mut driver, at(1000), 0);
        for minute in 0..5 {
            let begin = 1000 + 60 * minute;
            let (ended, _) = pass(&mut driver, begin..begin + 30, |worker| worker == 1);
            assert_eq!(ended, [0; 0]);
            let (ended, checks) = pass(&mut driver, begin + 30..begin + 60, |_| false);
            assert_eq!(ended, [0; 0]);
            assert!(checks > 0);
        }
    }

    #[test]
    fn the_last_that_holds_the_state_is_not_ended() {
        let mut driver = round_of_three();
        driver.expect_life_within(Some(LIMIT));
        driver.handle(
            at(1000),
            Event::Joined {
                worker: 0,
                training_state: 0,
            },
        );
        let (ended, _) = pass(&mut driver, 1000..1300, |worker| worker > 0);
        assert_eq!(ended, [0; 0]);
        join(&mut driver, at(1300), 2);
        let (ended, _) = pass(&mut driver, 1300..1400, |worker| worker == 1);
        assert_eq!(ended, [1]);
    }

    #[test]
    fn the_user_is_told_that_the_last_that_holds_the_state_is_stopped() {
        let notes_with = |others: &[Event]| {
            let mut driver = round_of_three();
            driver.expect_life_within(Some(LIMIT));
            for event in others {
                driver.handle(at(1000), event.clone());
            }
            let mut notes = Vec::new();
            let mut now = at(1000);
            while now < at(1000) + LIMIT + LIMIT {
                while let Some(action) = driver.poll_action() {
                    match action {
                        Action::Note(text) if text.contains("alone holds the training state") => {
                            notes.push((now, text));
                        }
                        Action::CheckStopped(worker) => {
                            let is_stopped = true;
                            driver.handle(now, Event::StoppedState { worker, is_stopped });
                        }
                        Action::Stop(worker) => panic!("{worker} was ended"),
                        _ => {}
                    }
                }
                now += Duration::from_secs(1);
                driver.handle_timeout(now);
            }
            notes
        };
        // Two wait without it; or it is alone.
        let new = |worker| Event::Joined {
            worker,
            training_state: 0,
        };
        let signal = || Cause::Exit(ExitStatus::Signal(9));
        let exited = |worker| Event::Exited {
            worker,
            cause: signal(),
        };
        for others in [[new(0), new(1)], [exited(0), exited(1)]] {
            let notes = notes_with(&others);
            assert_eq!(notes.len(), 1, "{notes:?}");
            let (when, _) = &notes[0];
            assert!(*when <= at(1000) + LIMIT, "{when:?}");
        }
    }

    #[test]
    fn without_a_time_out_nobody_is_looked_at() {
        let mut driver = round_of_three();
        driver.expect_life_within(None);
        join(&mut driver, at(1000), 0);
        assert_eq!(pass(&mut driver, 1000..1500, |_| true), (vec![], 0));
    }

    #[test]
    fn who_is_stopped_while_a_round_is_set_up_is_ended() {
        let mut driver = round_of_three();
        driver.expect_life_within(Some(LIMIT));
        for worker in 0..3 {
            join(&mut driver, at(1000), worker);
        }
        let (ended, _) = pass(&mut driver, 1000..1100, |worker| worker == 2);
        assert_eq!(ended, [2]);
    }
}

//! Members of a round that their neighbours reported as silent. A stopped or disconnected member receives neither the
//! end of its round nor a request to end. It would block the other members.

use std::time::Duration;

use super::driver::{Driver, WorkerPhase, WorkerProcess};
use super::events::{Time, WorkerId};

/// How long a silent worker may take to show a sign of life. It may be slow, or the reporting members may be
/// disconnected instead.
const SILENT_GRACE: Duration = Duration::from_secs(3);
/// Interval between two checks whether a silent worker can be ended without a loss of the training state.
const RECHECK: Duration = Duration::from_secs(1);

impl Driver {
    pub(super) fn on_silent(&mut self, now: Time, worker: WorkerId, by: WorkerId) {
        // A worker that sends reports is alive.
        if let Some(w) = self.workers.get_mut(&by) {
            w.silent_until = None;
        }
        let (name, accuser) = (self.name(worker), self.name(by));
        let is_new = |w: &&mut WorkerProcess| is_inside(w) && w.silent_until.is_none();
        if let Some(w) = self.workers.get_mut(&worker).filter(is_new) {
            w.silent_until = Some(now + SILENT_GRACE);
            self.note(format!(
                "{name} does not answer {accuser}; it is ended unless it comes to the next round within {} s",
                SILENT_GRACE.as_secs()
            ));
        }
    }

    /// Stops the silent workers whose time is over, if a worker in the waiting set has the training state. Otherwise
    /// checks again later.
    pub(super) fn end_silent(&mut self, now: Time) {
        let is_due = |w: &WorkerProcess| is_inside(w) && w.silent_until.is_some_and(|at| at <= now);
        let due = self.workers.iter().filter(|(_, w)| is_due(w));
        let due: Vec<WorkerId> = due.map(|(id, _)| *id).collect();
        let waits = |w: &WorkerProcess| w.phase == WorkerPhase::Waiting && w.holds();
        let is_safe = !self.has_state || self.workers.values().any(waits);
        for id in due {
            let Some(w) = self.workers.get_mut(&id) else {
                continue;
            };
            if is_safe {
                w.is_condemned = true;
                self.stop(id);
            } else {
                w.silent_until = Some(now + RECHECK);
            }
        }
    }

    /// Returns when [`Self::end_silent`] must be called next.
    pub(super) fn silent_deadline(&self) -> Option<Time> {
        let silent = self.workers.values().filter(|w| is_inside(w));
        silent.filter_map(|w| w.silent_until).min()
    }
}

fn is_inside(w: &WorkerProcess) -> bool {
    w.phase == WorkerPhase::Member && !w.is_going
}

#[cfg(test)]
mod tests {
    use super::super::driver::tests::round_of_three;
    use super::super::events::{Action, Event};
    use super::*;

    const fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    fn stopped(driver: &mut Driver) -> Vec<WorkerId> {
        let actions = std::iter::from_fn(|| driver.poll_action());
        let stops = actions.filter_map(|action| match action {
            Action::Stop(worker) => Some(worker),
            _ => None,
        });
        stops.collect()
    }

    #[test]
    fn who_is_silent_is_ended_when_the_others_are_in_the_waiting_set() {
        let mut driver = round_of_three();
        driver.handle(at(10), Event::Silent { worker: 1, by: 0 });
        driver.handle(
            at(11),
            Event::Joined {
                worker: 0,
                training_state: 1,
            },
        );
        driver.handle(
            at(11),
            Event::Joined {
                worker: 2,
                training_state: 1,
            },
        );
        assert_eq!(stopped(&mut driver), [0; 0]);
        assert_eq!(driver.next_deadline(), Some(at(13)));
        driver.handle_timeout(at(13));
        assert_eq!(stopped(&mut driver), [1]);
    }

    #[test]
    fn who_joins_the_waiting_set_or_accuses_others_lives() {
        let mut driver = round_of_three();
        driver.handle(at(10), Event::Silent { worker: 1, by: 0 });
        driver.handle(
            at(11),
            Event::Joined {
                worker: 1,
                training_state: 1,
            },
        );
        driver.handle(at(12), Event::Silent { worker: 2, by: 0 });
        driver.handle(
            at(12),
            Event::Joined {
                worker: 0,
                training_state: 1,
            },
        );
        driver.handle(at(13), Event::Silent { worker: 0, by: 2 });
        driver.handle_timeout(at(60));
        assert_eq!(stopped(&mut driver), [0; 0]);
    }

    #[test]
    fn nobody_is_ended_while_no_other_that_holds_the_state_has_come_out_of_the_round() {
        let mut driver = round_of_three();
        driver.handle(at(10), Event::Silent { worker: 1, by: 0 });
        driver.handle(at(11), Event::Silent { worker: 0, by: 2 });
        driver.handle_timeout(at(20));
        assert_eq!(stopped(&mut driver), [0; 0]);
        assert_eq!(driver.next_deadline(), Some(at(21)));
        driver.handle(
            at(30),
            Event::Joined {
                worker: 2,
                training_state: 1,
            },
        );
        assert_eq!(stopped(&mut driver), [0, 1]);
    }
}

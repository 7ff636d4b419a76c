//! Messages to the user while a job waits for workers, or continues after a worker has ended with 0.

use std::time::Duration;

use super::driver::{Driver, Failed, Finished, WorkerPhase, WorkerProcess};
use super::events::{Ending, TOO_FEW, Time, WorkerId};
use super::hosts::Host;

/// Interval between two messages about the same wait.
const NEWS_INTERVAL: Duration = Duration::from_secs(10);
/// Workers that are done usually end within this time of each other. A worker that still runs later continues without
/// the first.
const TOGETHER: Duration = Duration::from_secs(5);

impl Driver {
    /// Returns when the next message to the user is due.
    pub(super) fn news_deadline(&self) -> Option<Time> {
        let waiting = self
            .waiting_since
            .map(|since| since.max(self.announced_waiting_at) + NEWS_INTERVAL);
        let finished = self.finished.as_ref().filter(|f| !f.is_announced);
        let finished = finished.map(|f| f.at + TOGETHER);
        [waiting, finished].into_iter().flatten().min()
    }

    /// Shows the reason of a long wait, and reports a worker that has ended early.
    pub(super) fn announce_waits(&mut self, now: Time) {
        if self
            .finished
            .as_ref()
            .is_some_and(|f| now >= f.at + TOGETHER)
        {
            self.announce_finished();
        }
        let Some(since) = self.waiting_since else {
            return;
        };
        if now < since.max(self.announced_waiting_at) + NEWS_INTERVAL {
            return;
        }
        self.announced_waiting_at = now;
        let left = (since + self.policy.wait_timeout).saturating_sub(now);
        self.note(format!(
            "waiting for {} s: {}; it is given up in {} s (--elastic-timeout)",
            now.saturating_sub(since).as_secs(),
            self.lack(),
            left.as_secs()
        ));
    }

    /// Records that a worker has ended with 0; the work then counts as done.
    pub(super) fn on_finished(&mut self, now: Time, name: &str) {
        self.is_finished = true;
        self.finished.get_or_insert(Finished {
            at: now,
            name: name.to_owned(),
            is_announced: false,
            went_on: None,
        });
    }

    fn announce_finished(&mut self) {
        let others = self.workers.iter();
        let others = others.filter(|(id, w)| self.counts(**id) && !w.is_going);
        let others = others.count();
        let Some(finished) = self.finished.as_mut().filter(|f| !f.is_announced) else {
            return;
        };
        finished.is_announced = true;
        let go_on = match others {
            0 => return,
            1 => "1 other goes on".to_owned(),
            n => format!("{n} others go on"),
        };
        let text = format!(
            "{} ended with 0 while {go_on}, so the work counts as done: nothing is started any more, \
             nobody is let in, and the others may become fewer than --min-np {}",
            finished.name, self.policy.min_np
        );
        self.note(text);
    }

    /// Records that the rest of a round continues in a new round after other members ended with 0.
    pub(super) fn go_on_without(&mut self, left: usize) {
        self.announce_finished();
        let min = self.policy.min_np;
        let Some(finished) = &mut self.finished else {
            return;
        };
        if left < min as usize {
            finished.went_on = Some(left);
            self.note(format!(
                "{left} left are fewer than --min-np {min}: whatever they do, the job will end with status {TOO_FEW}"
            ));
        }
    }

    /// Returns whether the job's end depends on this worker: a member of the last round, or any worker before the first
    /// round.
    fn counts(&self, id: WorkerId) -> bool {
        self.rounds == 0 || self.round.contains(&id)
    }

    /// Ends a job in which a worker has ended with 0, once no worker is left or none can continue.
    pub(super) fn end_finished(&mut self) {
        let mut left = self.workers.iter().filter(|(id, _)| self.counts(**id));
        let in_vain =
            |w: &WorkerProcess| self.rounds == 0 && w.phase == WorkerPhase::Waiting && !w.is_going;
        let name = self.finished.as_ref().map_or("", |f| f.name.as_str());
        let is_empty = left.clone().next().is_none();
        if !is_empty && left.all(|(_, w)| in_vain(w)) {
            let why = format!(
                "{name} ended with 0 before it was part of a round, so nothing is started any more, and the others wait \
                 in hvd.init() for a round that cannot be formed"
            );
            return self.end_short(why);
        }
        if !is_empty {
            return;
        }
        if let Some(failure) = self.round_failure.take() {
            let Failed { text, .. } = &failure;
            let why = format!("{text} when others of its round had finished already");
            return self.fail(Some(failure), why);
        }
        match self.finished.as_ref().and_then(|f| f.went_on) {
            None => self.end(Ending::Success),
            Some(left) => {
                let min = self.policy.min_np;
                let why = format!(
                    "{name} ended with 0 before the others, of which {left} went on, fewer than --min-np {min}"
                );
                self.end_short(why);
            }
        }
    }

    fn end_short(&mut self, why: String) {
        self.end(Ending::Failure {
            worker: None,
            code: TOO_FEW,
            why,
            is_state_lost: false,
        });
    }

    /// Returns the text of an error after a wait that was too long: missing workers or slots, and the hosts' states.
    pub(super) fn shortage(&self) -> String {
        format!(
            "no round could be formed within {} s (--elastic-timeout): {}",
            self.policy.wait_timeout.as_secs(),
            self.lack()
        )
    }

    /// Returns a text with the number of ready workers, and the missing ones with their reasons.
    fn lack(&self) -> String {
        let of = |phase: WorkerPhase| {
            let workers = self.workers.iter();
            workers.filter(move |(_, w)| w.phase == phase && w.stays())
        };
        let option = if self.rounds == 0 { "-np" } else { "--min-np" };
        let mut text = format!(
            "{} workers are needed ({option}), {} are ready",
            self.need(),
            of(WorkerPhase::Waiting).count()
        );
        let starting = of(WorkerPhase::Starting).count();
        if starting > 0 {
            text.push_str(&format!(", {starting} started but have not called init"));
        }
        let named = |(id, w): (&WorkerId, &WorkerProcess)| match w.seen_stopped {
            0 => self.name(*id),
            _ => format!("{} (stopped by a signal)", self.name(*id)),
        };
        let inside: Vec<String> = of(WorkerPhase::Member).map(named).collect();
        if !inside.is_empty() {
            let names = inside.join(", ");
            text.push_str(&format!(", not out of the last round: {names}"));
        }
        let hosts: Vec<String> = self.hosts.iter().map(Host::describe).collect();
        if !hosts.is_empty() {
            text.push_str(&format!("; hosts: {}", hosts.join(", ")));
        } else if self.knows_hosts {
            text.push_str("; no hosts are listed");
        } else if self.policy.has_fixed_hosts {
            text.push_str("; the hosts' names have not been resolved yet");
        } else {
            text.push_str("; the host discovery script has not ended yet");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::driver::tests::round_of_three;
    use crate::elastic::{Action, Cause, Event, Policy};
    use crate::frames::ExitStatus;

    const fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    /// Notes, and the end of the job.
    fn news(driver: &mut Driver) -> (Vec<String>, Option<Ending>) {
        let (mut notes, mut ending) = (Vec::new(), None);
        while let Some(action) = driver.poll_action() {
            match action {
                Action::Note(text) => notes.push(text),
                Action::End(how) => ending = Some(how),
                _ => {}
            }
        }
        (notes, ending)
    }

    /// Lets the time pass until then, as the launcher does.
    fn pass(driver: &mut Driver, until: Time) {
        while let Some(next) = driver.next_deadline().filter(|next| *next <= until) {
            driver.handle_timeout(next);
        }
    }

    fn left(worker: WorkerId) -> Event {
        let cause = Cause::Exit(ExitStatus::Code(0));
        Event::Exited { worker, cause }
    }

    #[test]
    fn who_leaves_early_is_named_and_the_others_go_on() {
        let mut driver = round_of_three();
        driver.handle(at(10), left(1));
        pass(&mut driver, at(14));
        assert_eq!(news(&mut driver), (vec![], None));
        pass(&mut driver, at(100));
        let (notes, ending) = news(&mut driver);
        assert_eq!((notes.len(), ending), (1, None), "{notes:?}");
        assert!(
            notes[0].starts_with("rank 1 on host h ended with 0 while 2 others go on"),
            "{notes:?}"
        );
        // They go on among themselves, no fewer than --min-np.
        for worker in [0, 2] {
            driver.handle(
                at(110),
                Event::Joined {
                    worker,
                    training_state: 2,
                },
            );
        }
        driver.handle(at(111), Event::Up);
        driver.handle(at(120), left(0));
        driver.handle(at(120), left(2));
        assert_eq!(news(&mut driver).1, Some(Ending::Success));
    }

    #[test]
    fn workers_that_end_together_are_no_news() {
        let mut driver = round_of_three();
        for worker in 0..3 {
            driver.handle(at(10 + u64::from(worker)), left(worker));
        }
        assert_eq!(news(&mut driver), (vec![], Some(Ending::Success)));
    }

    #[test]
    fn going_on_with_fewer_than_allowed_has_a_status_of_its_own() {
        let mut driver = round_of_three();
        driver.policy.min_np = 3;
        driver.handle(at(10), left(1));
        for worker in [0, 2] {
            driver.handle(
                at(11),
                Event::Joined {
                    worker,
                    training_state: 2,
                },
            );
        }
        let (notes, _) = news(&mut driver);
        let notes = notes.join("\n");
        assert!(
            notes.contains("2 left are fewer than --min-np 3"),
            "{notes}"
        );
        assert!(notes.contains("status 75"), "{notes}");
        driver.handle(at(12), Event::Up);
        driver.handle(at(20), left(0));
        driver.handle(at(20), left(2));
        let Some(Ending::Failure {
            worker, code, why, ..
        }) = news(&mut driver).1
        else {
            panic!("no failure");
        };
        assert_eq!((worker, code), (None, 75));
        assert!(
            why.contains("rank 1 on host h ended with 0") && why.contains("2 went on"),
            "{why}"
        );
    }

    fn policy() -> Policy {
        Policy {
            first_np: 2,
            min_np: 2,
            max_np: 2,
            wait_timeout: at(60),
            start_grace: Duration::ZERO,
            reset_limit: None,
            cooldown: None,
            slot_failures_max: 3,
            has_fixed_hosts: true,
        }
    }

    #[test]
    fn a_wait_is_told_every_10_seconds() {
        let mut driver = Driver::new(policy());
        driver.handle(at(0), Event::Hosts(vec![("h".into(), 2)]));
        driver.handle(at(0), Event::HostReady("h".into()));
        driver.handle(
            at(1),
            Event::Joined {
                worker: 0,
                training_state: 0,
            },
        );
        pass(&mut driver, at(25));
        let (notes, _) = news(&mut driver);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert_eq!(
            notes[0],
            "waiting for 10 s: 2 workers are needed (-np), 1 are ready, 1 started but have not called init; hosts: \
             h:2 (2 run); it is given up in 50 s (--elastic-timeout)"
        );
        driver.handle(
            at(26),
            Event::Joined {
                worker: 1,
                training_state: 0,
            },
        );
        driver.handle(at(26), Event::Up);
        pass(&mut driver, at(500));
        assert_eq!(news(&mut driver), (vec![], None));
        // A round is lost: who is out waits for who is not.
        driver.handle(
            at(500),
            Event::Joined {
                worker: 0,
                training_state: 2,
            },
        );
        pass(&mut driver, at(511));
        let (notes, _) = news(&mut driver);
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(
            notes[0].contains("not out of the last round: rank 1 on host h"),
            "{notes:?}"
        );
    }

    #[test]
    fn a_worker_that_leaves_before_the_first_round_leaves_nobody_waiting() {
        let mut driver = Driver::new(policy());
        driver.handle(at(0), Event::Hosts(vec![("h".into(), 2)]));
        driver.handle(at(0), Event::HostReady("h".into()));
        driver.handle(at(1), left(0));
        driver.handle(
            at(2),
            Event::Joined {
                worker: 1,
                training_state: 0,
            },
        );
        let Some(Ending::Failure { code, why, .. }) = news(&mut driver).1 else {
            panic!("no failure");
        };
        assert_eq!(code, 75);
        assert!(
            why.contains("ended with 0 before it was part of a round"),
            "{why}"
        );
    }
}

//! Rounds: when the next one forms and with which workers, the announcements of changes, and waits that have exceeded
//! their limit.

use std::collections::BTreeMap;

use super::assignment;
use super::driver::{Driver, NEWCOMER_WAIT, WorkerPhase, WorkerProcess};
use super::events::{Action, Time, WorkerId};
use super::hosts::Agent;

/// Kinds of announced changes, with the numbers that workers expect.
const REMOVED: u8 = 1;
const ADDED: u8 = 2;

impl Driver {
    pub(super) fn is_limit_reached(&self) -> bool {
        self.policy.reset_limit.is_some_and(|n| self.resets >= n)
    }

    pub(super) fn need(&self) -> u32 {
        match (self.is_finished, self.rounds) {
            (true, _) => 1,
            (false, 0) => self.policy.first_np,
            (false, _) => self.policy.min_np,
        }
    }

    /// Forms the next round, if the present one is over and enough workers wait.
    pub(super) fn form(&mut self, now: Time) {
        let is_inside = |w: &WorkerProcess| w.phase == WorkerPhase::Member;
        if self.workers.values().any(is_inside) {
            return;
        }
        // Missing workers would not be started any more, so the job fails at once.
        if !self.is_finished && self.is_limit_exceeded() {
            return self.fail_by_limit();
        }
        let Some(chosen) = self.choose() else {
            self.enough_since = None;
            return;
        };
        if self.rounds == 0 && !self.is_finished {
            let late = self
                .workers
                .values()
                .any(|w| w.phase == WorkerPhase::Starting && w.stays());
            let opening = self
                .hosts
                .iter()
                .any(|h| h.agent == Agent::Opening && h.listed > 0);
            let since = *self.enough_since.get_or_insert(now);
            if (late || opening) && now < since + self.policy.start_grace {
                return;
            }
        }
        if self.is_limit_exceeded() {
            return self.fail_by_limit();
        }
        if self.rounds > 0 && self.is_up {
            self.resets += 1;
        }
        self.begin_round(now, chosen);
    }

    /// Returns whether another round would exceed the reset limit.
    fn is_limit_exceeded(&self) -> bool {
        self.rounds > 0 && self.is_up && self.is_limit_reached()
    }

    fn fail_by_limit(&mut self) {
        let failure = self.round_failure.take().or(self.last_failure.take());
        let limit = self.resets;
        let why =
            format!("the members of the job changed once more than --reset-limit {limit} allows");
        self.fail(failure, why);
    }

    /// Returns the workers that would form a round now, in the order of ranks, or `None` if there are too few.
    pub(super) fn choose(&self) -> Option<Vec<WorkerId>> {
        let waits = |w: &WorkerProcess| w.phase == WorkerPhase::Waiting && !w.is_going;
        let was_in = |id: &WorkerId| self.round.contains(id);
        let mut chosen: Vec<WorkerId> = self
            .workers
            .iter()
            .filter(|(id, w)| {
                waits(w)
                    && if self.is_finished {
                        was_in(id)
                    } else {
                        w.stays()
                    }
            })
            .map(|(id, _)| *id)
            .collect();
        if chosen.len() < self.need() as usize {
            return None;
        }
        chosen.sort_by_key(|id| self.precedence(*id));
        chosen.truncate(self.policy.max_np as usize);
        if self.has_state && !chosen.iter().any(|id| self.workers[id].holds()) {
            // The last worker with the training state stays for one more round even if it must leave, to pass the state
            // on. If --max-np is 1, that round has two workers.
            let mut last = self.workers.iter().filter(|(_, w)| waits(w) && w.holds());
            let (last, _) = last.next()?;
            chosen.truncate((self.policy.max_np as usize - 1).max(1));
            chosen.push(*last);
        }
        Some(self.in_order(chosen))
    }

    /// Returns the sort key of a worker: first those with the training state, then the order of the last round, then
    /// newcomers by place.
    pub(super) fn precedence(&self, id: WorkerId) -> (bool, usize, usize, u32) {
        let w = &self.workers[&id];
        let before = self.round.iter().position(|m| *m == id);
        let host = self.hosts.iter().position(|h| h.name == w.host);
        let (last, far) = (usize::MAX, usize::MAX);
        (
            !w.holds(),
            before.unwrap_or(last),
            host.unwrap_or(far),
            w.local,
        )
    }

    /// Returns the machine of a worker, and its local rank there.
    fn place_of(&self, id: WorkerId) -> (&str, u32) {
        let w = &self.workers[&id];
        self.machines.place(&w.host, w.local)
    }

    /// Sorts workers so that the ranks of a machine are contiguous: machines by their first worker, then workers.
    pub(super) fn in_order(&self, mut chosen: Vec<WorkerId>) -> Vec<WorkerId> {
        let mut first = BTreeMap::new();
        for id in &chosen {
            let mine = self.precedence(*id);
            let best = first.entry(self.place_of(*id).0).or_insert(mine);
            *best = mine.min(*best);
        }
        chosen.sort_by_key(|id| (first[self.place_of(*id).0], self.precedence(*id)));
        chosen
    }

    pub(super) fn begin_round(&mut self, now: Time, chosen: Vec<WorkerId>) {
        let needs_sync = !chosen.iter().all(|id| self.workers[id].is_current());
        let places: Vec<(&str, u32)> = chosen.iter().map(|id| self.place_of(*id)).collect();
        let assignments = assignment::assign(&places, needs_sync);
        let assignments: Vec<_> = chosen.iter().copied().zip(assignments).collect();
        let mut dismissed = Vec::new();
        for (id, w) in &mut self.workers {
            if chosen.contains(id) {
                w.phase = WorkerPhase::Member;
                w.is_stale = false;
            } else if w.phase == WorkerPhase::Waiting && !w.is_going {
                // The other workers continue without this one, so its training state becomes outdated.
                w.is_stale = true;
                if w.leave_by.is_some() {
                    dismissed.push(*id);
                }
            }
        }
        for id in dismissed {
            self.dismiss(now, id, "its host or slot was removed");
        }
        if self.is_finished {
            self.go_on_without(chosen.len());
        }
        if self.rounds > 0 {
            let new = chosen.iter().filter(|id| !self.round.contains(id)).count();
            let mut text = format!("{} ranks go on", chosen.len());
            if chosen.len() == 1 {
                "1 rank goes on".clone_into(&mut text);
            }
            if new > 0 {
                text.push_str(&format!(", {new} of them new"));
            }
            self.note(text);
        }
        self.rounds += 1;
        self.round = chosen;
        self.is_up = false;
        self.announced.clear();
        self.round_failure = None;
        self.waiting_since = None;
        self.enough_since = None;
        self.newcomer_since = None;
        self.act(Action::Form(assignments));
    }

    /// Announces to a running round the workers that wait for it and the members that must leave it.
    pub(super) fn announce(&mut self, now: Time) {
        let is_inside = self
            .workers
            .values()
            .any(|w| w.phase == WorkerPhase::Member);
        if self.is_finished || self.rounds == 0 || !is_inside {
            self.newcomer_since = None;
            return;
        }
        let in_round = |id: &WorkerId| self.round.contains(id);
        let staying = self
            .workers
            .iter()
            .filter(|(id, w)| in_round(id) && w.stays());
        let has_room = (staying.count() as u32) < self.policy.max_np && !self.is_limit_reached();
        let unknown = |id: &WorkerId| !self.announced.contains(id);
        let newcomers: Vec<WorkerId> = self
            .workers
            .iter()
            .filter(|(id, w)| {
                !in_round(id) && w.phase == WorkerPhase::Waiting && w.stays() && unknown(id)
            })
            .map(|(id, _)| *id)
            .collect();
        let mut kind = 0;
        if newcomers.is_empty() || !has_room {
            self.newcomer_since = None;
        } else {
            let since = *self.newcomer_since.get_or_insert(now);
            let more = self
                .workers
                .values()
                .any(|w| w.phase == WorkerPhase::Starting && w.stays());
            if !more || now >= since + NEWCOMER_WAIT {
                kind |= ADDED;
                self.announced.extend(newcomers);
                self.newcomer_since = None;
            }
        }
        if self.has_other_holder() {
            let unknown = |id: &WorkerId| !self.announced.contains(id);
            let leaving: Vec<WorkerId> = self
                .workers
                .iter()
                .filter(|(id, w)| {
                    in_round(id) && w.leave_by.is_some() && !w.is_going && unknown(id)
                })
                .map(|(id, _)| *id)
                .collect();
            if !leaving.is_empty() {
                kind |= REMOVED;
                self.announced.extend(leaving);
            }
        }
        if kind != 0 {
            self.act(Action::Announce(kind));
        }
    }

    /// Ends waits that have exceeded the timeout: stops the members that hang, or fails the job.
    pub(super) fn end_waits(&mut self, now: Time) {
        let wait_timeout = self.policy.wait_timeout;
        if self
            .waiting_since
            .is_none_or(|since| now < since + wait_timeout)
        {
            return;
        }
        let hung: Vec<WorkerId> = self
            .workers
            .iter()
            .filter(|(_, w)| w.phase == WorkerPhase::Member && !w.is_going)
            .map(|(id, _)| *id)
            .collect();
        if hung.is_empty() && !self.workers.values().any(|w| w.is_condemned) {
            let failure = self.round_failure.take().or(self.last_failure.take());
            let why = self.shortage();
            return self.fail(failure, why);
        }
        // The waiting workers get the same time again. A worker is stopped at most once.
        self.waiting_since = Some(now);
        for id in hung {
            let name = self.name(id);
            self.note(format!(
                "{name} did not come to the new round within {} s; ending it",
                wait_timeout.as_secs()
            ));
            if let Some(w) = self.workers.get_mut(&id) {
                w.is_condemned = true;
            }
            self.stop(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::elastic::{Action, Driver, Event, Policy, WorkerId};

    /// Tells the driver, and returns the rounds and announcements that follow.
    fn feed(driver: &mut Driver, event: Event) -> (Vec<Vec<WorkerId>>, Vec<u8>) {
        driver.handle(Duration::from_secs(1), event);
        let (mut rounds, mut announced) = (Vec::new(), Vec::new());
        while let Some(action) = driver.poll_action() {
            match action {
                Action::Form(assignments) => {
                    rounds.push(assignments.iter().map(|(w, _)| *w).collect())
                }
                Action::Announce(kind) => announced.push(kind),
                _ => {}
            }
        }
        (rounds, announced)
    }

    fn joined(worker: WorkerId, training_state: u8) -> Event {
        Event::Joined {
            worker,
            training_state,
        }
    }

    #[test]
    fn the_state_moves_to_another_host_where_only_one_worker_is_allowed() {
        let mut driver = Driver::new(Policy {
            first_np: 1,
            min_np: 1,
            max_np: 1,
            wait_timeout: Duration::from_secs(600),
            start_grace: Duration::from_secs(30),
            reset_limit: None,
            cooldown: None,
            slot_failures_max: 3,
            has_fixed_hosts: false,
        });
        let d = &mut driver;
        feed(d, Event::Hosts(vec![("a".to_owned(), 1)]));
        feed(d, Event::HostReady("a".to_owned()));
        assert_eq!(feed(d, joined(0, 0)).0, [[0]]);
        feed(d, Event::Up);
        feed(
            d,
            Event::StateChanged {
                worker: 0,
                training_state: 2,
            },
        );
        // Its host goes, another one comes.
        feed(d, Event::Hosts(vec![("b".to_owned(), 1)]));
        feed(d, Event::HostReady("b".to_owned()));
        assert_eq!(feed(d, joined(1, 0)).1, [2]);
        // It hands over what it has, in a round with its successor, and leaves.
        assert_eq!(feed(d, joined(0, 2)).0, [[0, 1]]);
        feed(d, Event::Up);
        assert_eq!(
            feed(
                d,
                Event::StateChanged {
                    worker: 1,
                    training_state: 2
                }
            )
            .1,
            [1]
        );
        feed(d, joined(1, 2));
        assert_eq!(feed(d, joined(0, 2)).0, [[1]]);
    }
}

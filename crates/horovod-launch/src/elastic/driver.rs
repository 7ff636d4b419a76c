//! The elastic driver decides which workers take part and when. It is a state machine without I/O: events and the time
//! go in, actions come out.
//!
//! A *worker* is one process with a number that is never reused. It runs in a *slot*: a host's local index. A worker
//! starts, joins the waiting set of the rendezvous and becomes a *member* of a round; later it joins the waiting set
//! again or ends. A round is over when all its members have joined the waiting set again or have ended. The next round
//! is formed from the workers that wait at that time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::events::{Action, Ending, Event, Policy, Time, WorkerId};
use super::hosts::{AfterFailure, Agent, Host};
use super::machines::Machines;
use crate::report::Cause;

/// How long a newcomer waits before it is announced to the members, while other workers are about to join the waiting
/// set.
pub(super) const NEWCOMER_WAIT: Duration = Duration::from_secs(2);

/// The worker that ended first with 0.
#[derive(Clone, Debug)]
pub(super) struct Finished {
    pub(super) at: Time,
    /// Name of the worker in messages to the user.
    pub(super) name: String,
    /// Whether the user was informed.
    pub(super) is_announced: bool,
    /// Set if fewer than --min-np workers have continued: their number.
    pub(super) went_on: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkerPhase {
    Starting,
    Waiting,
    Member,
}

/// A process that has not ended.
#[derive(Clone, Debug)]
pub(super) struct WorkerProcess {
    pub(super) host: String,
    pub(super) local: u32,
    pub(super) phase: WorkerPhase,
    pub(super) training_state: u8,
    /// Whether this worker's training state is older than the state of the last round.
    pub(super) is_stale: bool,
    /// When this worker is stopped if it has not left before; set if its slot was removed.
    pub(super) leave_by: Option<Time>,
    /// Whether this worker was stopped or dismissed; the cause of its end does not matter then.
    pub(super) is_going: bool,
    /// When this worker is stopped if it has not ended before; set if it was dismissed.
    pub(super) stop_at: Option<Time>,
    /// When this worker is stopped if it shows no sign of life; set if its neighbours report it as silent.
    pub(super) silent_until: Option<Time>,
    /// How often in a row this worker was found stopped by a signal while a round waited for it.
    pub(super) seen_stopped: u32,
    /// Whether this worker was stopped because it hung or was silent.
    pub(super) is_condemned: bool,
}

impl WorkerProcess {
    pub(super) fn holds(&self) -> bool {
        self.training_state > 0 && !self.is_stale && !self.is_going
    }

    pub(super) fn is_current(&self) -> bool {
        self.training_state > 1 && !self.is_stale
    }

    pub(super) fn stays(&self) -> bool {
        self.leave_by.is_none() && !self.is_going
    }
}

/// A failure that decides the job's result.
#[derive(Clone, Debug)]
pub(super) struct Failed {
    pub(super) worker: WorkerId,
    pub(super) code: u8,
    pub(super) text: String,
}

/// The state of a job.
#[derive(Debug)]
pub struct Driver {
    pub(super) policy: Policy,
    pub(super) hosts: Vec<Host>,
    pub(super) machines: Machines,
    /// Whether a list of hosts was received, even an empty one.
    pub(super) knows_hosts: bool,
    pub(super) workers: BTreeMap<WorkerId, WorkerProcess>,
    pub(super) next_worker: WorkerId,
    /// Members of the last round formed, in the order of ranks, and (`rounds`) the number of rounds so far.
    pub(super) round: Vec<WorkerId>,
    pub(super) rounds: u32,
    pub(super) resets: u32,
    /// Whether the last round formed is established, see [`Event::Up`].
    pub(super) is_up: bool,
    /// Whether there were ever enough slots.
    pub(super) is_activated: bool,
    /// Whether any worker has ever had the training state.
    pub(super) has_state: bool,
    /// Since when a round is needed and cannot be formed.
    pub(super) waiting_since: Option<Time>,
    /// Since when the first round could be formed.
    pub(super) enough_since: Option<Time>,
    /// Since when newcomers wait for the present round.
    pub(super) newcomer_since: Option<Time>,
    /// How long a worker may be silent.
    pub(super) silence_max: Option<Duration>,
    /// When to check next whether the awaited members are stopped.
    pub(super) check_at: Option<Time>,
    /// Workers whose arrival or departure was announced to the present round.
    pub(super) announced: BTreeSet<WorkerId>,
    /// Whether a worker has ended with 0; the work then counts as done.
    pub(super) is_finished: bool,
    /// The worker that ended first with 0.
    pub(super) finished: Option<Finished>,
    /// When the user was last informed about the present wait.
    pub(super) announced_waiting_at: Time,
    /// First failure of a member of the present round, and (`last_failure`) the last failure of any worker.
    pub(super) round_failure: Option<Failed>,
    pub(super) last_failure: Option<Failed>,
    pub(super) is_over: bool,
    pub(super) actions: VecDeque<Action>,
}

impl Driver {
    /// Creates the driver of a job that has just begun.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            hosts: Vec::new(),
            machines: Machines::default(),
            knows_hosts: false,
            workers: BTreeMap::new(),
            next_worker: 0,
            round: Vec::new(),
            rounds: 0,
            resets: 0,
            is_up: false,
            is_activated: false,
            has_state: false,
            waiting_since: Some(Duration::ZERO),
            enough_since: None,
            newcomer_since: None,
            silence_max: None,
            check_at: None,
            announced: BTreeSet::new(),
            is_finished: false,
            finished: None,
            announced_waiting_at: Duration::ZERO,
            round_failure: None,
            last_failure: None,
            is_over: false,
            actions: VecDeque::new(),
        }
    }

    /// Handles an event.
    pub fn handle(&mut self, now: Time, event: Event) {
        if self.is_over {
            return;
        }
        match event {
            Event::Hosts(listed) => self.on_hosts(now, listed),
            Event::HostReady(name) => {
                if let Some(host) = self.host(&name) {
                    host.reached();
                }
            }
            Event::HostLost { host, why, code } => self.on_host_lost(now, &host, &why, code),
            Event::HostGone { host, why } => self.on_host_gone(now, &host, &why),
            Event::Joined {
                worker,
                training_state,
            } => self.on_joined(now, worker, training_state),
            Event::Away(worker) => {
                let was_member = self.round.contains(&worker);
                if let Some(w) = self.workers.get_mut(&worker) {
                    // The worker will join again or end; until then it has its previous phase.
                    w.phase = match was_member {
                        true => WorkerPhase::Member,
                        false => WorkerPhase::Starting,
                    };
                }
            }
            Event::StateChanged {
                worker,
                training_state,
            } => {
                // Also applies to a worker whose end was reported first.
                self.has_state |= training_state > 0;
                if let Some(w) = self.workers.get_mut(&worker) {
                    w.training_state = training_state;
                }
            }
            Event::Silent { worker, by } => self.on_silent(now, worker, by),
            Event::StoppedState { worker, is_stopped } => self.on_stopped_state(worker, is_stopped),
            Event::Up => self.is_up = true,
            Event::Exited { worker, cause } => self.on_exit(now, worker, &cause),
        }
        self.settle(now);
    }

    /// Performs what is due; must be called when the time of [`Driver::next_deadline`] has come.
    pub fn handle_timeout(&mut self, now: Time) {
        if !self.is_over {
            self.settle(now);
        }
    }

    /// Returns when to call [`Driver::handle_timeout`] at the latest.
    pub fn next_deadline(&self) -> Option<Time> {
        if self.is_over {
            return None;
        }
        let wait_timeout = self.policy.wait_timeout;
        let leaving = self.workers.values();
        let leaving = leaving.filter(|w| !w.is_going && w.phase == WorkerPhase::Member);
        let dismissed = self.workers.values().filter_map(|w| w.stop_at);
        self.hosts
            .iter()
            .filter_map(Host::next_change)
            .chain(leaving.filter_map(|w| w.leave_by))
            .chain(dismissed)
            .chain(self.silent_deadline())
            .chain(self.check_at)
            .chain(self.news_deadline())
            .chain(self.waiting_since.map(|at| at + wait_timeout))
            .chain(self.enough_since.map(|at| at + self.policy.start_grace))
            .chain(self.newcomer_since.map(|at| at + NEWCOMER_WAIT))
            .min()
    }

    /// Returns the next action. Must be called until it returns `None`.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns a worker's name for messages: its rank in the last round, or its place.
    pub fn name(&self, worker: WorkerId) -> String {
        let rank = self.round.iter().position(|w| *w == worker);
        match (rank, self.workers.get(&worker)) {
            (Some(rank), Some(w)) => format!("rank {rank} on host {}", w.host),
            (Some(rank), None) => format!("rank {rank}"),
            (None, Some(w)) => format!("a new worker on host {} (slot {})", w.host, w.local),
            (None, None) => "a worker".to_owned(),
        }
    }

    pub(super) fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    pub(super) fn note(&mut self, text: String) {
        self.act(Action::Note(text));
    }

    pub(super) fn host(&mut self, name: &str) -> Option<&mut Host> {
        self.hosts.iter_mut().find(|h| h.name == name)
    }

    pub(super) fn end(&mut self, ending: Ending) {
        self.is_over = true;
        self.act(Action::End(ending));
    }

    pub(super) fn fail(&mut self, failure: Option<Failed>, why: String) {
        self.end_for(failure, why, false);
    }

    fn end_for(&mut self, failure: Option<Failed>, why: String, is_state_lost: bool) {
        self.end(Ending::Failure {
            worker: failure.as_ref().map(|f| f.worker),
            code: failure.map_or(1, |f| f.code.max(1)),
            why,
            is_state_lost,
        });
    }

    pub(super) fn on_joined(&mut self, now: Time, worker: WorkerId, training_state: u8) {
        let is_member = self.round.contains(&worker);
        let Some(w) = self.workers.get_mut(&worker) else {
            let why = "its process is not one of the job".to_owned();
            self.act(Action::Dismiss(worker, why));
            return;
        };
        w.phase = WorkerPhase::Waiting;
        w.silent_until = None;
        w.seen_stopped = 0;
        w.training_state = training_state;
        self.has_state |= training_state > 0;
        if is_member {
            self.waiting_since.get_or_insert(now);
        }
    }

    pub(super) fn on_host_lost(&mut self, now: Time, name: &str, why: &str, code: u8) {
        let cooldown = self.policy.cooldown;
        let Some(host) = self.host(name) else { return };
        host.lose(now, why, cooldown);
        let until = host.ban_text(now);
        self.note(format!("host {name} is left alone {until}: {why}"));
        let here = self.workers_of(name);
        if here.is_empty() {
            self.last_failure = Some(Failed {
                worker: WorkerId::MAX,
                code,
                text: format!("host {name}: {why}"),
            });
        }
        for worker in here {
            self.on_exit(now, worker, &Cause::HostLost(why.to_owned()));
        }
    }

    pub(super) fn workers_of(&self, host: &str) -> Vec<WorkerId> {
        let here = self.workers.iter().filter(|(_, w)| w.host == host);
        here.map(|(id, _)| *id).collect()
    }

    pub(super) fn on_exit(&mut self, now: Time, worker: WorkerId, cause: &Cause) {
        let name = self.name(worker);
        let Some(w) = self.workers.remove(&worker) else {
            return;
        };
        let is_member = self.round.contains(&worker);
        if let Some(slot) = self
            .host(&w.host)
            .and_then(|h| h.slots.get_mut(w.local as usize))
        {
            slot.worker = None;
        }
        if cause.is_failure() {
            self.act(Action::AnnounceDeath {
                worker,
                cause: cause.text(),
            });
        }
        if w.is_going && !w.is_condemned {
            return;
        }
        if !cause.is_failure() {
            if is_member || self.rounds == 0 {
                self.on_finished(now, &name);
            } else if let Some(slot) = self
                .host(&w.host)
                .and_then(|h| h.slots.get_mut(w.local as usize))
            {
                // The worker ended because it has nothing to do; another worker in this slot would end in the same way.
                slot.is_retired = true;
            }
            return;
        }
        let failure = Failed {
            worker,
            code: cause.code(),
            text: format!("{name} {}", cause.text()),
        };
        if is_member || (self.rounds == 0 && self.is_finished) {
            self.round_failure.get_or_insert(failure.clone());
        }
        self.last_failure = Some(failure);
        if is_member && !self.is_finished {
            // The other members will notice the loss, unless they hang.
            self.waiting_since.get_or_insert(now);
        }
        let after = self.count_failure(now, &w, cause);
        let restarts = match after {
            Some((AfterFailure::Rests(_), text)) => text,
            _ if self.is_finished => "nothing is started any more".to_owned(),
            _ if self.rounds > 0 && self.is_limit_reached() => {
                "--reset-limit allows no other process".to_owned()
            }
            _ if w.leave_by.is_some() => "its slot was to be removed".to_owned(),
            Some((AfterFailure::StartsAgain { .. }, text)) => text,
            None => "its host is lost".to_owned(),
        };
        let was = match cause {
            Cause::Exit(crate::frames::ExitStatus::Code(_)) => "",
            _ => "was ",
        };
        self.note(format!("{name} {was}{}; {restarts}", cause.text()));
    }

    /// Performs everything that follows from the present state.
    pub(super) fn settle(&mut self, now: Time) {
        for host in &mut self.hosts {
            host.expire(now);
        }
        self.mark_leaving(now);
        self.shed_surplus(now);
        if self.is_finished {
            self.wind_down(now);
        }
        let due = |w: &WorkerProcess| w.stop_at.is_some_and(|at| at <= now);
        let late = self.workers.iter().filter(|(_, w)| due(w));
        let late: Vec<WorkerId> = late.map(|(id, _)| *id).collect();
        for id in late {
            self.stop(id);
        }
        self.end_silent(now);
        self.check_end();
        if self.is_over {
            return;
        }
        self.start_workers();
        self.close_hosts();
        self.form(now);
        if self.is_over {
            return;
        }
        self.announce(now);
        self.check_members(now);
        self.end_waits(now);
        if !self.is_over {
            self.announce_waits(now);
        }
    }

    pub(super) fn check_end(&mut self) {
        if self.is_finished {
            return self.end_finished();
        }
        if self.has_state && !self.workers.values().any(WorkerProcess::holds) {
            let failure = self.round_failure.take().or(self.last_failure.take());
            let first = failure
                .as_ref()
                .map_or_else(String::new, |f| format!(" (the first of them: {})", f.text));
            let why = format!(
                "every worker that held the training state has ended{first}: nothing is left to go on from"
            );
            return self.end_for(failure, why, true);
        }
        let none_left = self.workers.values().all(|w| w.is_going);
        let listed: Vec<&Host> = self.hosts.iter().filter(|h| h.listed > 0).collect();
        let all_unusable = listed.iter().all(|h| h.is_unusable_for_good())
            && (self.policy.has_fixed_hosts || !listed.is_empty());
        if none_left && all_unusable && !self.hosts.is_empty() {
            let failure = self.last_failure.take();
            let last = failure
                .as_ref()
                .map_or_else(String::new, |f| format!("; the last failure: {}", f.text));
            self.fail(
                failure,
                format!("no host is left that could run a worker{last}"),
            );
        }
    }

    /// Starts workers in free slots, in the order of hosts.
    pub(super) fn start_workers(&mut self) {
        let limit_reached = self.rounds > 0 && self.is_limit_reached();
        if self.is_finished || limit_reached {
            return;
        }
        if !self.is_activated {
            let usable: u64 = self.hosts.iter().map(Host::usable).sum();
            if usable < u64::from(self.policy.first_np) {
                return;
            }
            self.is_activated = true;
        }
        let mut there = self.workers.values().filter(|w| w.stays()).count() as u64;
        for host in &mut self.hosts {
            if !host.is_usable() {
                continue;
            }
            for (local, slot) in (0..host.listed).zip(&mut host.slots) {
                if !slot.is_free() || there >= u64::from(self.policy.max_np) {
                    continue;
                }
                there += 1;
                match host.agent {
                    Agent::Opening => {}
                    Agent::None => {
                        host.agent = Agent::Opening;
                        self.actions.push_back(Action::Open(host.name.clone()));
                    }
                    Agent::Ready => {
                        let worker = self.next_worker;
                        self.next_worker += 1;
                        slot.worker = Some(worker);
                        let new = WorkerProcess {
                            host: host.name.clone(),
                            local,
                            phase: WorkerPhase::Starting,
                            training_state: 0,
                            is_stale: false,
                            leave_by: None,
                            is_going: false,
                            stop_at: None,
                            silent_until: None,
                            seen_stopped: 0,
                            is_condemned: false,
                        };
                        self.workers.insert(worker, new);
                        self.actions.push_back(Action::Start {
                            worker,
                            host: host.name.clone(),
                            local,
                        });
                    }
                }
            }
        }
    }

    pub(super) fn close_hosts(&mut self) {
        let workers = &self.workers;
        for host in &mut self.hosts {
            let in_use = workers.values().any(|w| w.host == host.name);
            if host.listed == 0 && host.agent == Agent::Ready && !in_use {
                host.agent = Agent::None;
                self.actions.push_back(Action::Close(host.name.clone()));
            }
        }
        self.hosts.retain(|h| {
            h.listed > 0 || h.agent != Agent::None || workers.values().any(|w| w.host == h.name)
        });
        let hosts = &self.hosts;
        self.machines
            .retain(|name| hosts.iter().any(|h| h.name == name));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    /// A round of three workers that all hold the state, on one host.
    pub(in crate::elastic) fn round_of_three() -> Driver {
        let mut driver = Driver::new(Policy {
            first_np: 3,
            min_np: 1,
            max_np: 3,
            wait_timeout: Duration::from_secs(600),
            start_grace: Duration::ZERO,
            reset_limit: None,
            cooldown: None,
            slot_failures_max: 3,
            has_fixed_hosts: true,
        });
        driver.handle(at(0), Event::Hosts(vec![("h".into(), 3)]));
        driver.handle(at(0), Event::HostReady("h".into()));
        for worker in 0..3 {
            driver.handle(
                at(1),
                Event::Joined {
                    worker,
                    training_state: 0,
                },
            );
        }
        driver.handle(at(2), Event::Up);
        for worker in 0..3 {
            driver.handle(
                at(2),
                Event::StateChanged {
                    worker,
                    training_state: 2,
                },
            );
        }
        while driver.poll_action().is_some() {}
        driver
    }
}

//! Checks of what must hold in every job, at every event.

use std::collections::{BTreeMap, BTreeSet};

use horovod_launch::elastic::{Ending, WorkerId};
use horovod_transport::rendezvous::RankAssignment;

use super::process::{Process, ProcessStage};
use super::script::{Model, TrainingState};
use super::{HEARTBEAT_TIMEOUT, Happening, SECOND, World};
use crate::trace::Digest;

/// How long a newcomer may wait before all members know of it.
const SHUT_OUT_MAX: u64 = 10 * SECOND;
/// Commits that may be made after that without it.
const PASSED_BY_MAX: u32 = 3;

/// History of the run, as far as it decides which events are allowed.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) rounds: u64,
    pub(super) ranks_max: usize,
    pub(super) deaths: u64,
    /// Some process has done all of the work.
    pub(super) is_finishing: bool,
    started: BTreeSet<WorkerId>,
    /// Members of the last round formed, in the order of ranks.
    round: Vec<WorkerId>,
    had_state: bool,
    /// The newest generation of each process.
    generation_of: BTreeMap<WorkerId, u64>,
    /// The newest commit that some rank has come back from: then all ranks had made it.
    completed: Option<(u64, Model)>,
    commits: u64,
    /// Commits that were made while a worker had been in the waiting set for long.
    passed_by: BTreeMap<WorkerId, u32>,
    /// Workers that ended by themselves, though they held the state and had no error.
    gave_up: Vec<WorkerId>,
}

impl Ledger {
    pub(super) fn commits(&self) -> u64 {
        self.commits
    }
}

impl World {
    fn check(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.fail(what());
        }
    }

    /// A worker is started: its number is new, and there are not too many.
    pub(super) fn check_start(&mut self, worker: WorkerId, host: usize, local: u32) {
        let is_new = self.ledger.started.insert(worker);
        self.check(is_new, || format!("the number {worker} is used twice"));
        let stays = |(worker, (host, local)): &(&WorkerId, &(usize, u32))| {
            let host = &self.hosts[*host];
            !self.stopping.contains(worker) && host.is_listed && *local < host.slots
        };
        let running = self.known.iter().filter(stays).count() as u64 + 1;
        let most = u64::from(self.policy.max_np);
        self.check(running <= most, || {
            format!("worker {worker} is number {running} of at most {most}")
        });
        let is_taken = self.known.values().any(|place| *place == (host, local));
        self.check(!is_taken, || {
            format!("slot {local} of h{host} is given twice")
        });
    }

    fn holds(&self, worker: &WorkerId) -> bool {
        let process = self.processes.get(worker);
        process.is_some_and(|p| p.script.training_state > TrainingState::Nothing)
    }

    /// The driver forms a round.
    pub(super) fn check_round(&mut self, assignments: &[(WorkerId, RankAssignment)]) {
        let members: Vec<WorkerId> = assignments.iter().map(|(worker, _)| *worker).collect();
        self.log(format!("the launcher forms {members:?}"));
        let in_order = (0..)
            .zip(assignments)
            .all(|(rank, (_, assignment))| assignment.rank == rank);
        self.check(in_order, || "ranks are not in order".to_owned());
        let unique: BTreeSet<_> = members.iter().collect();
        self.check(unique.len() == members.len(), || {
            "a worker twice".to_owned()
        });
        let count = members.len() as u64;
        let leaves = |worker: &WorkerId| {
            let place = self.known.get(worker);
            place.is_some_and(|(host, local)| {
                let host = &self.hosts[*host];
                !host.is_listed || *local >= host.slots
            })
        };
        // One worker hands over to another in a round of both.
        let most = match self.policy.max_np {
            1 if members.iter().any(leaves) => 2,
            most => u64::from(most),
        };
        self.check(count <= most, || format!("{count} ranks of at most {most}"));
        let least = u64::from(match self.ledger.round.is_empty() {
            true => self.policy.first_np,
            false => self.policy.min_np,
        });
        let enough = count >= least || self.ledger.is_finishing;
        self.check(enough, || format!("{count} ranks of at least {least}"));
        // A member that is dead already, which the launcher does not know yet, may be what it counts on.
        let is_alive = |worker: &WorkerId| self.processes.contains_key(worker);
        let all_alive = members.iter().all(is_alive);
        let has_holder = members.iter().any(|worker| self.holds(worker));
        let had_state = self.ledger.had_state;
        self.check(has_holder || !all_alive || !had_state, || {
            "a round without the training state".to_owned()
        });
        let rank_0 = !has_holder || !all_alive || self.holds(&members[0]);
        self.check(rank_0, || "rank 0 does not hold the state".to_owned());
        let both = |worker: &&WorkerId| {
            self.ledger.round.contains(worker) && members.contains(worker) && self.holds(worker)
        };
        let before: Vec<&WorkerId> = self.ledger.round.iter().filter(both).collect();
        let after: Vec<&WorkerId> = members.iter().filter(both).collect();
        let keeps = before == after;
        self.check(keeps, || "survivors change their order".to_owned());
        self.ledger.round = members;
    }

    /// A worker is told of its round: all are told the same.
    pub(super) fn check_roster(
        &mut self,
        worker: WorkerId,
        generation: u64,
        members: &[(WorkerId, String)],
        rank: u32,
    ) {
        let is_mine = members
            .get(rank as usize)
            .is_some_and(|(known, _)| *known == worker);
        self.check(is_mine, || {
            format!("worker {worker} has rank {rank} of others")
        });
        let before = self.ledger.generation_of.insert(worker, generation);
        self.check(before.is_none_or(|before| before < generation), || {
            format!("worker {worker} is in generation {generation} after {before:?}")
        });
        if let Some(known) = self.generations.get(&generation) {
            let mut workers = members.iter().map(|(worker, _)| worker);
            let alike = known.members.iter().all(|m| workers.next() == Some(m));
            let alike = alike && workers.next().is_none();
            self.check(alike, || {
                format!("two memberships of generation {generation}")
            });
        }
    }

    /// All ranks of a generation carry out the same.
    pub(super) fn check_execution(&mut self, worker: WorkerId, generation: u64, digest: Digest) {
        let Some(common) = self.generations.get_mut(&generation) else {
            return;
        };
        let seq = digest.seq.0;
        let known = common.digests.entry(seq).or_insert_with(|| digest.clone());
        let alike = *known == digest;
        self.check(alike, || {
            format!("worker {worker} carries out something else as number {seq}")
        });
    }

    /// A rank has this model: all that have come as far in its generation have the same.
    pub(super) fn check_model(&mut self, worker: WorkerId, model: Model) {
        self.ledger.had_state = true;
        let process = self.processes.get(&worker);
        let Some(generation) = process
            .and_then(|p| p.engine.as_ref())
            .map(|e| e.roster.generation)
        else {
            return;
        };
        let Some(common) = self.generations.get_mut(&generation) else {
            return;
        };
        let known = *common.models.entry(model.steps).or_insert(model.hash);
        self.check(known == model.hash, || {
            format!(
                "generation {generation}, step {}: worker {worker} has another model",
                model.steps
            )
        });
    }

    /// From whom the state comes: one that holds the newest commit of those that are there.
    pub(super) fn check_root(
        &mut self,
        worker: WorkerId,
        root: usize,
        training_state: TrainingState,
        everyone: &[(bool, u64)],
    ) {
        let newest = everyone.iter().filter(|(holds, _)| *holds).map(|(_, c)| *c);
        let Some(newest) = newest.max() else {
            return;
        };
        let commits = everyone[root].1;
        self.check(
            training_state > TrainingState::Nothing && commits == newest,
            || format!("the state comes from rank {root}, which has commit {commits} of {newest}"),
        );
        self.check_agreement(worker, newest);
    }

    /// A generation goes on from this commit.
    pub(super) fn check_agreement(&mut self, worker: WorkerId, commits: u64) {
        let Some((completed, _)) = self.ledger.completed else {
            return;
        };
        let process = self.processes.get(&worker);
        let generation = process
            .and_then(|p| p.engine.as_ref())
            .map(|e| e.roster.generation);
        let newest = self.generations.keys().next_back().copied();
        if commits >= completed || generation != newest {
            return;
        }
        let mut holders = self.processes.iter().filter(|(id, p)| {
            let is_part = self.known.contains_key(id) && !self.stopping.contains(id);
            is_part
                && p.script.training_state > TrainingState::Nothing
                && p.script.commits >= completed
        });
        let holder = holders.next().map(|(id, _)| *id);
        self.check(holder.is_none(), || {
            format!(
                "commit {completed} is lost: the job goes on from {commits}, but {holder:?} has it"
            )
        });
        self.ledger.completed = None;
    }

    /// A rank has come back from a commit.
    pub(super) fn note_commit(&mut self, commits: u64, saved: Model) {
        match self.ledger.completed {
            Some((known, model)) if known == commits => {
                self.check(model == saved, || {
                    format!("commit {commits} is {model:?} and {saved:?}")
                });
            }
            Some((known, _)) if known > commits => {}
            _ => {
                self.ledger.completed = Some((commits, saved));
                self.ledger.commits += 1;
                self.check_waiting();
            }
        }
    }

    /// A worker in the waiting set is admitted while the others commit, if there is a place.
    fn check_waiting(&mut self) {
        let stays = |worker: &WorkerId| {
            let place = self.known.get(worker);
            let is_listed = |(host, local): &(usize, u32)| {
                let host = &self.hosts[*host];
                host.is_listed && *local < host.slots
            };
            place.is_some_and(is_listed) && !self.stopping.contains(worker)
        };
        let inside = self.ledger.round.iter().filter(|worker| stays(worker));
        let has_room = (inside.count() as u64) < u64::from(self.policy.max_np);
        if !has_room || self.policy.reset_limit.is_some() || self.ledger.is_finishing {
            return;
        }
        let waits_long = self.now.saturating_sub(SHUT_OUT_MAX + 20 * self.delay);
        let waits = |(worker, process): &(&WorkerId, &Process)| {
            let host = &self.hosts[process.host];
            let since = match process.stage {
                ProcessStage::AtRendezvous(since) => since,
                _ => return false,
            };
            since < waits_long && stays(worker) && !host.cut_in && !host.cut_out
        };
        let waiting = self.processes.iter().filter(waits);
        let waiting: Vec<WorkerId> = waiting.map(|(worker, _)| *worker).collect();
        for worker in waiting {
            let commits = self.ledger.passed_by.entry(worker).or_default();
            *commits += 1;
            let commits = *commits;
            self.check(commits <= PASSED_BY_MAX, || {
                format!("worker {worker} is not let in, {commits} commits long")
            });
        }
    }

    /// A process ends, or is about to be gone without a word.
    pub(super) fn check_end_of(&mut self, worker: WorkerId, status: i32) {
        self.ledger.deaths += 1;
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        let host = &self.hosts[process.host];
        let is_well = !host.cut_in && !host.cut_out && self.known.contains_key(&worker);
        if status == 1 && is_well && process.script.training_state > TrainingState::Nothing {
            self.ledger.gave_up.push(worker);
        }
        if let Some(engine) = &process.engine
            && !engine.dead
            && !engine.stopped
        {
            let generation = engine.roster.generation;
            let late = 2 * HEARTBEAT_TIMEOUT + 5 * SECOND + 20 * self.delay;
            self.after(late, Happening::MustKnow(worker, generation));
        }
    }

    /// Every member knows by now that this one is gone.
    pub(super) fn check_known(&mut self, dead: WorkerId, generation: u64) {
        let unaware = self.processes.iter().find(|(_, process)| {
            let host = &self.hosts[process.host];
            let is_cut = host.cut_in || host.cut_out;
            process.engine.as_ref().is_some_and(|engine| {
                let is_over = engine.dead || (engine.stopped && engine.is_idle());
                engine.roster.generation == generation && !is_over && !is_cut
            })
        });
        let unaware = unaware.map(|(worker, _)| *worker);
        self.check(unaware.is_none(), || {
            format!("{unaware:?} does not know that worker {dead} is gone")
        });
    }

    /// The job is over, or nothing happens any more.
    pub(super) fn check_ending(&mut self) {
        match self.ending.clone() {
            None => self.fail("nothing happens any more, but the job has not ended".to_owned()),
            Some(Ending::Success) => {
                let done = self.ledger.completed.map(|(_, model)| model.steps);
                let (is_finishing, steps) = (self.ledger.is_finishing, self.steps);
                self.check(is_finishing && done == Some(steps), || {
                    format!("a success with {done:?} of {steps} steps")
                });
            }
            Some(Ending::Failure {
                why, is_state_lost, ..
            }) => {
                self.check(!why.is_empty(), || "an end without a cause".to_owned());
                let gave_up = self.ledger.gave_up.clone();
                self.check(!is_state_lost || gave_up.is_empty(), || {
                    format!("the state is lost, and {gave_up:?} had it and gave up")
                });
            }
        }
    }
}

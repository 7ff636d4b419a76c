//! The common state of a generation's ranks, and the data plane's part: an operation's results arrive when all
//! its ranks have begun it, unless one of them died in the middle.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use horovod_launch::elastic::WorkerId;
use horovod_protocol::{Op, Rank, ReduceOp, Tree};

use super::{Happening, World};
use crate::trace::Digest;

/// Numbers by the name of the request they belong to.
type Numbers = BTreeMap<String, Vec<u64>>;

/// One execution, on all ranks.
#[derive(Debug, Default)]
pub(super) struct Running {
    begun: BTreeMap<WorkerId, Numbers>,
    done: BTreeSet<WorkerId>,
    /// A rank died in the middle, and the others miss something of it.
    broken: bool,
    results: BTreeMap<String, Rc<Vec<u64>>>,
}

#[derive(Debug)]
pub(super) struct Generation {
    pub(super) members: Rc<[WorkerId]>,
    pub(super) hosts: Rc<[usize]>,
    pub(super) tree: Rc<Tree>,
    running: BTreeMap<u64, Running>,
    pub(super) digests: BTreeMap<u64, Digest>,
    /// The model after so many steps.
    pub(super) models: BTreeMap<u64, u64>,
}

impl Generation {
    pub(super) fn new(members: Rc<[WorkerId]>, hosts: Rc<[usize]>, tree: Rc<Tree>) -> Self {
        Self {
            members,
            hosts,
            tree,
            running: BTreeMap::new(),
            digests: BTreeMap::new(),
            models: BTreeMap::new(),
        }
    }
}

fn combine(op: &Op, parts: &[&Vec<u64>]) -> Vec<u64> {
    let by_place = |f: fn(u64, u64) -> u64| {
        let mut all = parts[0].clone();
        for part in &parts[1..] {
            for (a, b) in all.iter_mut().zip(*part) {
                *a = f(*a, *b);
            }
        }
        all
    };
    match op {
        Op::Allreduce {
            op: ReduceOp::Max, ..
        } => by_place(u64::max),
        Op::Allreduce { .. } => by_place(u64::wrapping_add),
        Op::Allgather => parts.iter().flat_map(|part| part.iter().copied()).collect(),
        Op::Broadcast {
            root: Rank(root), ..
        } => parts[*root as usize].clone(),
        _ => Vec::new(),
    }
}

impl World {
    /// Begins the next execution of a rank, if it is free.
    pub(super) fn begin_next(&mut self, worker: WorkerId) {
        let Some(process) = self.processes.get_mut(&worker) else {
            return;
        };
        let Some(engine) = &mut process.engine else {
            return;
        };
        if engine.dead || engine.running.is_some() {
            return;
        }
        let Some(execution) = engine.ready.pop_front() else {
            return;
        };
        let generation = engine.roster.generation;
        let mine = execution.items.iter();
        let mine = mine.map(|item| {
            let name = item.name.to_string();
            let gives = engine.given.remove(&name).unwrap_or_default();
            (name, gives)
        });
        let mine: Numbers = mine.collect();
        let (seq, op) = (execution.seq.0, execution.op.clone());
        engine.running = Some(execution);
        let Some(common) = self.generations.get_mut(&generation) else {
            return;
        };
        let running = common.running.entry(seq).or_default();
        running.begun.insert(worker, mine);
        let all_have = running.begun.len() == common.members.len();
        if all_have {
            let names: Vec<String> = running.begun[&worker].keys().cloned().collect();
            for name in names {
                let parts: Vec<&Vec<u64>> = common
                    .members
                    .iter()
                    .map(|m| &running.begun[m][&name])
                    .collect();
                let result = combine(&op, &parts);
                running.results.insert(name, Rc::new(result));
            }
            for member in common.members.clone().iter() {
                let after = self.rng.below(2 * self.delay + 1);
                self.after(after, Happening::Carried(*member, generation, seq));
            }
        }
        self.fate_at(worker, "the beginning of an operation");
    }

    /// A rank has all that an execution brings it.
    pub(super) fn carried(&mut self, worker: WorkerId, generation: u64, seq: u64) {
        let Some(common) = self.generations.get(&generation) else {
            return;
        };
        let hosts = common.hosts.clone();
        let Some(running) = common.running.get(&seq) else {
            return;
        };
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        let Some(engine) = &process.engine else {
            return;
        };
        let is_current = engine.roster.generation == generation
            && !engine.dead
            && engine
                .running
                .as_ref()
                .is_some_and(|execution| execution.seq.0 == seq);
        if !is_current || running.broken {
            return;
        }
        let here = Some(process.host);
        let is_cut = self.hosts.iter().any(|host| host.cut_in || host.cut_out);
        if is_cut
            && !hosts
                .iter()
                .all(|h| self.is_open(Some(*h), here) && self.is_open(here, Some(*h)))
        {
            self.waiting_for_route.insert((worker, generation, seq));
            return;
        }
        let Some(common) = self.generations.get_mut(&generation) else {
            return;
        };
        let Some(running) = common.running.get_mut(&seq) else {
            return;
        };
        running.done.insert(worker);
        let results = running.results.clone();
        if running.done.len() == hosts.len() {
            common.running.remove(&seq);
        }
        if let Some(process) = self.processes.get_mut(&worker)
            && let Some(engine) = &mut process.engine
            && let Some(execution) = engine.running.take()
        {
            for item in &execution.items {
                if let Some(name) = item.entry.and_then(|entry| engine.open.remove(&entry)) {
                    let result = results.get(&name).cloned();
                    engine.ended.insert(name, result);
                }
            }
        }
        self.goes_after_end(worker);
        self.begin_next(worker);
    }

    /// Resumes the transfers that waited for a route between hosts.
    pub(super) fn resume(&mut self) {
        for (worker, generation, seq) in std::mem::take(&mut self.waiting_for_route) {
            let after = self.rng.below(self.delay + 1);
            self.after(after, Happening::Carried(worker, generation, seq));
        }
    }

    /// A rank leaves in the middle of what it carries out: the others have what they need of it, or not.
    pub(super) fn abandon(&mut self, worker: WorkerId) {
        let breaks = self.rng.chance(50);
        let Some(engine) = self
            .processes
            .get(&worker)
            .and_then(|process| process.engine.as_ref())
        else {
            return;
        };
        let generation = engine.roster.generation;
        if let Some(common) = self.generations.get_mut(&generation) {
            for running in common.running.values_mut() {
                let is_amid =
                    running.begun.contains_key(&worker) && !running.done.contains(&worker);
                running.broken |= is_amid && breaks;
            }
        }
    }
}

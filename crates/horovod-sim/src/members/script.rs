//! The training script under `hvd.elastic.run`: `python/horovod/common/elastic.py`, step by step, with a model that is a
//! hash of everything that was ever applied to it.

use std::rc::Rc;

use horovod_launch::elastic::WorkerId;
use horovod_protocol::{
    DType, Device, Op, ProcessSetId, Rank, ReduceOp, Request, Scale, TensorMeta,
};
use horovod_transport::testing::WorkerMessage;

use super::links::Message;
use super::{MS, World};

/// Gradients of a step.
const GRADIENTS: u64 = 3;
/// Failures in a row, with the same members and without a commit, after which the script gives up.
const FRUITLESS_MAX: u32 = 3;

/// A process's training state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TrainingState {
    #[default]
    Nothing = 0,
    Committed = 1,
    Live = 2,
}

impl TrainingState {
    fn of(number: u64) -> Self {
        match number {
            0 => Self::Nothing,
            1 => Self::Committed,
            _ => Self::Live,
        }
    }
}

/// The trained model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Model {
    pub(super) steps: u64,
    pub(super) hash: u64,
}

/// Present activity of the script.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Doing {
    #[default]
    Nothing,
    Computes,
    /// Waits for operations.
    Agrees,
    Syncs {
        root: usize,
        commits: u64,
    },
    Steps,
    Commits,
    Finishes,
    /// Leaves its generation for the next.
    Resets,
    /// The work is done.
    Ends,
}

#[derive(Debug, Default)]
pub(super) struct Script {
    doing: Doing,
    live: Model,
    saved: Model,
    pub(super) commits: u64,
    pub(super) training_state: TrainingState,
    sync_wanted: Option<bool>,
    seen: u64,
    commits_at_start: u64,
    members_changed: bool,
    fruitless: u32,
    size: usize,
    /// Of the operations asked for now.
    names: Vec<String>,
    /// Whether the engine refused a submission.
    refused: bool,
}

impl Script {
    /// Whether it waits for something of the engine.
    pub(super) fn waits(&self) -> bool {
        !matches!(self.doing, Doing::Nothing | Doing::Computes)
    }

    pub(super) fn describe(&self) -> String {
        let (doing, steps, commits) = (self.doing, self.live.steps, self.commits);
        format!(
            "{doing:?}, {:?}, step {steps}, commit {commits}",
            self.training_state
        )
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn allreduce(op: ReduceOp) -> Op {
    Op::Allreduce {
        op,
        scale: Scale::NONE,
    }
}

fn request(name: &str, op: Op, count: usize) -> Request {
    let tensor = TensorMeta::new(DType::I64, [count as u64]);
    Request {
        set: ProcessSetId::GLOBAL,
        name: name.to_owned(),
        tensors: match op {
            Op::Barrier => Vec::new(),
            _ => vec![tensor],
        },
        op,
        device: Device::Cpu,
    }
}

impl World {
    fn script(&mut self, worker: WorkerId) -> Option<&mut Script> {
        Some(&mut self.processes.get_mut(&worker)?.script)
    }

    /// Asks for operations and waits for them.
    fn ask(&mut self, worker: WorkerId, doing: Doing, wanted: Vec<(Request, Vec<u64>)>) {
        let names = wanted.iter().map(|(r, _)| r.name.clone()).collect();
        let mut refused = false;
        for (request, gives) in wanted {
            refused |= !self.submit(worker, &request, gives);
        }
        if let Some(script) = self.script(worker) {
            script.doing = doing;
            script.names = names;
            script.refused = refused;
        }
        self.pump(worker);
        self.goes_after(worker, 1000);
    }

    /// Result of the script's requests: nothing yet, an error, or the numbers.
    fn result(&mut self, worker: WorkerId) -> Option<Result<Vec<Rc<Vec<u64>>>, ()>> {
        let process = self.processes.get_mut(&worker)?;
        let engine = process.engine.as_mut()?;
        let names = &process.script.names;
        let failed = |name: &String| engine.ended.get(name).is_some_and(Option::is_none);
        if engine.dead || process.script.refused || names.iter().any(failed) {
            return Some(Err(()));
        }
        if !names.iter().all(|name| engine.ended.contains_key(name)) {
            return None;
        }
        let taken = names.iter().filter_map(|name| engine.ended.remove(name)?);
        Some(Ok(taken.collect()))
    }

    /// The process has become a member of a generation.
    pub(super) fn begin_generation(&mut self, worker: WorkerId) {
        let Some(script) = self.script(worker) else {
            return;
        };
        script.seen = 0;
        let wanted = *script.sync_wanted.get_or_insert(true);
        let mine = vec![
            1,
            script.training_state as u64,
            script.commits,
            u64::from(wanted),
        ];
        let request = request("elastic.agree", Op::Allgather, 4);
        self.ask(worker, Doing::Agrees, vec![(request, mine)]);
    }

    pub(super) fn script_goes_on(&mut self, worker: WorkerId) {
        let Some(script) = self.script(worker) else {
            return;
        };
        match script.doing {
            Doing::Nothing => {}
            Doing::Computes => self.step(worker),
            Doing::Resets | Doing::Ends => self.leave_if_stopped(worker),
            doing => match self.result(worker) {
                None => {}
                Some(Err(())) => self.internal_error(worker, doing),
                Some(Ok(numbers)) => self.done(worker, doing, &numbers),
            },
        }
    }

    fn done(&mut self, worker: WorkerId, doing: Doing, numbers: &[Rc<Vec<u64>>]) {
        match doing {
            Doing::Agrees => self.agreed(worker, &numbers[0]),
            Doing::Syncs { root, commits } => {
                let received = Model {
                    steps: numbers[0][0],
                    hash: numbers[0][1],
                };
                let _ = root;
                if let Some(script) = self.script(worker) {
                    script.live = received;
                    script.saved = received;
                    script.commits = commits + 1;
                }
                self.check_model(worker, received);
                self.begins_to_train(worker);
            }
            Doing::Steps => {
                let Some(script) = self.script(worker) else {
                    return;
                };
                for gradient in numbers {
                    script.live.hash = mix(script.live.hash, gradient[0]);
                }
                script.live.steps += 1;
                let live = script.live;
                self.check_model(worker, live);
                if live.steps.is_multiple_of(self.commit_every) || live.steps == self.steps {
                    self.commit(worker);
                } else {
                    self.computes(worker);
                }
            }
            Doing::Commits => self.committed(worker, &numbers[0]),
            Doing::Finishes => self.ends(worker),
            Doing::Nothing | Doing::Computes | Doing::Resets | Doing::Ends => {}
        }
    }

    /// `_agree_and_sync`.
    fn agreed(&mut self, worker: WorkerId, numbers: &[u64]) {
        let everyone: Vec<(TrainingState, u64, bool)> = numbers
            .chunks(4)
            .map(|entry| (TrainingState::of(entry[1]), entry[2], entry[3] != 0))
            .collect();
        let Some(script) = self.script(worker) else {
            return;
        };
        let has_new = everyone
            .iter()
            .any(|(training_state, ..)| *training_state == TrainingState::Nothing);
        script.members_changed = everyone.len() != script.size || has_new;
        script.size = everyone.len();
        let commits = script.commits;
        let alike = everyone.iter().all(|(training_state, theirs, wanted)| {
            *training_state == TrainingState::Live && *theirs == commits && !wanted
        });
        if alike {
            let live = script.live;
            self.check_agreement(worker, commits);
            self.check_model(worker, live);
            return self.begins_to_train(worker);
        }
        let key = |rank: &usize| {
            let (training_state, commits, _) = everyone[*rank];
            (
                training_state > TrainingState::Nothing,
                commits,
                training_state,
                std::cmp::Reverse(*rank),
            )
        };
        let root = (0..everyone.len()).max_by_key(key).unwrap_or(0);
        let commits = everyone[root].1;
        let live = script.live;
        self.check_root(worker, root, everyone[root].0, &everyone_holds(&everyone));
        let op = Op::Broadcast {
            root: Rank(root as u32),
        };
        let wanted = vec![(request("elastic.state", op, 2), vec![live.steps, live.hash])];
        self.fate_at(worker, "the sync");
        self.ask(worker, Doing::Syncs { root, commits }, wanted);
    }

    fn begins_to_train(&mut self, worker: WorkerId) {
        let Some(script) = self.script(worker) else {
            return;
        };
        script.sync_wanted = Some(false);
        script.commits_at_start = script.commits;
        self.hold(worker, TrainingState::Live);
        self.computes(worker);
    }

    fn hold(&mut self, worker: WorkerId, training_state: TrainingState) {
        if let Some(script) = self.script(worker) {
            script.training_state = training_state;
            self.send_to_rendezvous(worker, &WorkerMessage::StateChanged(training_state as u8));
        }
    }

    fn computes(&mut self, worker: WorkerId) {
        let after = self.between(self.compute / 2, self.compute * 3 / 2 + 1);
        if let Some(script) = self.script(worker) {
            script.doing = Doing::Computes;
            self.goes_after(worker, after);
        }
    }

    fn step(&mut self, worker: WorkerId) {
        let last = self.steps;
        let Some(process) = self.processes.get_mut(&worker) else {
            return;
        };
        let rank = process.engine.as_ref().map_or(0, |e| e.roster.rank);
        let live = process.script.live;
        if live.steps >= last {
            let wanted = vec![(request("elastic.done", Op::Barrier, 0), Vec::new())];
            self.fate_at(worker, "the last barrier");
            return self.ask(worker, Doing::Finishes, wanted);
        }
        let gradient = |n| mix(live.hash, u64::from(rank) << 8 | n);
        let mut order: Vec<u64> = (0..GRADIENTS).collect();
        self.rng.shuffle(&mut order);
        let wanted = order.into_iter().map(|n| {
            let request = request(&format!("gradient.{n}"), allreduce(ReduceOp::Sum), 1);
            (n, (request, vec![gradient(n)]))
        });
        let mut wanted: Vec<_> = wanted.collect();
        // They become ready in any order, but are applied in one.
        let mut names: Vec<String> = wanted.iter().map(|(_, (r, _))| r.name.clone()).collect();
        names.sort();
        let wanted = wanted.drain(..).map(|(_, item)| item).collect();
        self.ask(worker, Doing::Steps, wanted);
        if let Some(script) = self.script(worker) {
            script.names = names;
        }
    }

    /// `State.commit`.
    fn commit(&mut self, worker: WorkerId) {
        let Some(process) = self.processes.get_mut(&worker) else {
            return;
        };
        process.script.saved = process.script.live;
        process.script.commits += 1;
        let (version, kind) = process.updates;
        let mine = vec![version, 0, u64::from(kind & 1), u64::from(kind & 2)];
        self.fate_at(worker, "a commit");
        let request = request("elastic.host_updates", allreduce(ReduceOp::Max), 4);
        self.ask(worker, Doing::Commits, vec![(request, mine)]);
    }

    fn committed(&mut self, worker: WorkerId, numbers: &[u64]) {
        let Some(script) = self.script(worker) else {
            return;
        };
        let (commits, saved) = (script.commits, script.saved);
        let is_news = numbers[0] > script.seen;
        if is_news {
            script.seen = numbers[0];
            let (removed, added) = (numbers[2] != 0, numbers[3] != 0);
            script.sync_wanted = Some(!removed || added);
        }
        self.note_commit(commits, saved);
        if is_news {
            self.reset(worker);
        } else {
            self.computes(worker);
        }
    }

    /// `HorovodInternalError` in an operation.
    fn internal_error(&mut self, worker: WorkerId, doing: Doing) {
        let Some(script) = self.script(worker) else {
            return;
        };
        if doing != Doing::Finishes {
            if script.members_changed || script.commits != script.commits_at_start {
                script.fruitless = 0;
            } else {
                script.fruitless += 1;
                if script.fruitless >= FRUITLESS_MAX {
                    self.log(format!("worker {worker} gives up: the same failure again"));
                    return self.exit(worker, 1);
                }
            }
            script.live = script.saved;
            if script.training_state != TrainingState::Nothing {
                self.hold(worker, TrainingState::Committed);
            }
        }
        self.reset(worker);
    }

    /// Leaves the job to become a member of its next generation.
    fn reset(&mut self, worker: WorkerId) {
        self.stop_and(worker, Doing::Resets);
    }

    fn ends(&mut self, worker: WorkerId) {
        self.ledger.is_finishing = true;
        self.stop_and(worker, Doing::Ends);
    }

    fn stop_and(&mut self, worker: WorkerId, doing: Doing) {
        if let Some(script) = self.script(worker) {
            script.doing = doing;
        }
        self.fate_at(worker, "the stop");
        self.ask_to_stop(worker);
        let after = self.between(MS, 200 * MS);
        self.goes_after(worker, after);
    }

    fn leave_if_stopped(&mut self, worker: WorkerId) {
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        let doing = process.script.doing;
        let stopped = |e: &super::engine::Engine| e.dead || (e.stopped && e.is_idle());
        if !process.engine.as_ref().is_none_or(stopped) {
            return;
        }
        self.leave_generation(worker, &|| Message::Goodbye);
        match doing {
            Doing::Ends => self.exit(worker, 0),
            _ => {
                self.fate_at(worker, "the waiting set");
                self.dial(worker);
            }
        }
    }
}

fn everyone_holds(everyone: &[(TrainingState, u64, bool)]) -> Vec<(bool, u64)> {
    let holds = |(training_state, commits, _): &(TrainingState, u64, bool)| {
        (*training_state > TrainingState::Nothing, *commits)
    };
    everyone.iter().map(holds).collect()
}

//! A device on host memory, for tests: its executions end later, on another thread, in an order that depends on a seed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use horovod_protocol::{Completion, Device, EntryId, Op, ProcessSetId, Rank, Seq};
use horovod_sim::Rng;
use horovod_transport::{Aborted, Notifier};

use super::{Backend, Failure, InFlight, Members, Results, Start, Started, Surroundings};
use crate::engine::accelerator::Accelerator;
use crate::engine::handles::OpResult;
use crate::tensor::Tensor;

/// Kind of the device on which the double's tensors lie.
pub(super) const DOUBLE: Device = Device::Other(1);

/// Connection between the devices of a job, with the thread that moves their bytes.
pub(super) struct Fabric {
    state: Mutex<DoubleState>,
    changed: Condvar,
    /// Executions that were aborted before they had ended.
    pub(super) aborted: AtomicUsize,
    /// Executions that have ended; `overtaken` counts those that ended after a later one.
    pub(super) ended: AtomicUsize,
    pub(super) overtaken: AtomicUsize,
}

struct DoubleState {
    rng: Rng,
    /// Executions that have not ended, with the parts of the ranks that have started them.
    gathered: BTreeMap<(u32, Seq), Vec<Part>>,
    /// No execution ends for now.
    paused: bool,
    /// The execution of this rank after so many fails.
    fails: Option<(Rank, usize)>,
    last: Seq,
    closed: bool,
    /// Aborts have no effect.
    stubborn: bool,
}

/// Input of one rank to an execution.
struct Part {
    rank: Rank,
    members: usize,
    op: Op,
    /// By item and tensor; `None` where the rank has joined.
    tensors: Vec<Option<Vec<DoubleOperand>>>,
    entries: Vec<EntryId>,
    end: Arc<Mutex<Option<Result<Results, Failure>>>>,
    notifier: Notifier,
}

struct DoubleOperand {
    input: *const f32,
    output: *mut f32,
    elems: usize,
}

// SAFETY: only dereferenced while the engines keep the tensors for the execution.
unsafe impl Send for DoubleOperand {}

impl Fabric {
    pub(super) fn new(seed: u64) -> Arc<Self> {
        let fabric = Arc::new(Self {
            state: Mutex::new(DoubleState {
                rng: Rng::new(seed),
                gathered: BTreeMap::new(),
                paused: false,
                fails: None,
                last: Seq(0),
                closed: false,
                stubborn: false,
            }),
            changed: Condvar::new(),
            aborted: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            overtaken: AtomicUsize::new(0),
        });
        let worker = fabric.clone();
        std::thread::spawn(move || worker.run());
        fabric
    }

    fn lock(&self) -> MutexGuard<'_, DoubleState> {
        self.state.lock().unwrap()
    }

    /// With `paused`, executions start but none ends; without it they continue.
    pub(super) fn hold(&self, paused: bool) {
        self.lock().paused = paused;
        self.changed.notify_all();
    }

    /// Lets `after` executions of this rank succeed and the next one fail.
    pub(super) fn fail(&self, rank: Rank, after: usize) {
        self.lock().fails = Some((rank, after));
    }

    /// Makes aborts ineffective from here on.
    pub(super) fn ignore_aborts(&self) {
        self.lock().stubborn = true;
    }

    /// Waits until this rank has started `count` executions that have not ended.
    pub(super) fn await_started(&self, rank: Rank, count: usize) {
        let mut state = self.lock();
        let started = |state: &DoubleState| {
            let parts = state.gathered.values().flatten();
            parts.filter(|part| part.rank == rank).count()
        };
        while started(&state) < count {
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Ends the fabric's thread.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Makes the device of one rank, with this offer.
    pub(super) fn device(self: &Arc<Self>, offer: u8) -> Arc<dyn Accelerator> {
        let fabric = self.clone();
        Arc::new(DoubleDevice { offer, fabric })
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.closed {
            let complete = |(key, parts): (&(u32, Seq), &Vec<Part>)| {
                parts
                    .first()
                    .is_some_and(|p| p.members == parts.len())
                    .then_some(*key)
            };
            let mut ready: Vec<_> = state.gathered.iter().filter_map(complete).collect();
            ready.sort_by_key(|(_, seq)| *seq);
            if ready.is_empty() || state.paused {
                state = self.changed.wait(state).unwrap();
                continue;
            }
            // Sometimes more executions may start before one of them is picked to end.
            if state.rng.chance(60) {
                drop(state);
                std::thread::yield_now();
                state = self.lock();
                continue;
            }
            let key = *state.rng.pick(&ready);
            let parts = state.gathered.remove(&key).unwrap();
            self.end(&mut state, key.1, parts);
        }
    }

    fn end(&self, state: &mut DoubleState, seq: Seq, parts: Vec<Part>) {
        carry_out(&parts);
        self.ended.fetch_add(1, Ordering::SeqCst);
        self.overtaken
            .fetch_add(usize::from(seq < state.last), Ordering::SeqCst);
        state.last = state.last.max(seq);
        for part in parts {
            let fails = match &mut state.fails {
                Some((rank, after)) if *rank == part.rank => {
                    let fails = *after == 0;
                    *after = after.saturating_sub(1);
                    fails
                }
                _ => false,
            };
            let done = |id| (id, Ok(OpResult::plain(Completion::Done)));
            let end = if fails {
                Err(Failure::Local("the device has failed".into()))
            } else {
                Ok(part.entries.into_iter().map(done).collect())
            };
            *part.end.lock().unwrap() = Some(end);
            part.notifier.notify();
        }
    }
}

/// Runs sums and broadcasts, of `f32` only.
fn carry_out(parts: &[Part]) {
    let items = parts[0].tensors.len();
    for item in 0..items {
        let all = || {
            parts
                .iter()
                .filter_map(|p| Some((p.rank, p.tensors[item].as_ref()?)))
        };
        let Some((_, first)) = all().next() else {
            continue;
        };
        for tensor in 0..first.len() {
            for i in 0..first[tensor].elems {
                // SAFETY: the engines hold the tensors of executions that have not ended, and all have this length.
                let read = |tensors: &Vec<DoubleOperand>| unsafe { *tensors[tensor].input.add(i) };
                let value: f32 = match parts[0].op {
                    Op::Broadcast { root } => all()
                        .filter(|(r, _)| *r == root)
                        .map(|(_, t)| read(t))
                        .sum(),
                    _ => all().map(|(_, t)| read(t)).sum(),
                };
                for (_, tensors) in all() {
                    // SAFETY: as above.
                    unsafe { *tensors[tensor].output.add(i) = value };
                }
            }
        }
    }
}

struct DoubleDevice {
    offer: u8,
    fabric: Arc<Fabric>,
}

impl Accelerator for DoubleDevice {
    fn kind(&self) -> Device {
        DOUBLE
    }

    fn backend(self: Arc<Self>, surroundings: &Surroundings<'_>) -> Box<dyn Backend> {
        Box::new(Double {
            rank: surroundings.topology.rank,
            notifier: surroundings.notifier.clone(),
            offer: self.offer,
            fabric: self.fabric.clone(),
        })
    }
}

struct Double {
    rank: Rank,
    notifier: Notifier,
    offer: u8,
    fabric: Arc<Fabric>,
}

impl Backend for Double {
    fn name(&self) -> &'static str {
        "DOUBLE"
    }

    fn offer(&mut self, _: ProcessSetId, _: &[Rank]) -> Vec<u8> {
        vec![self.offer]
    }

    fn settle(&mut self, _: ProcessSetId, members: &Members<'_>) -> Result<(), String> {
        let mut others = members.ranks.iter().zip(members.offers);
        match others.find(|(_, offer)| **offer != members.offers[0]) {
            None => Ok(()),
            Some((rank, offer)) => Err(format!(
                "{} has version {}, {rank} has version {}",
                members.ranks[0], members.offers[0][0], offer[0]
            )),
        }
    }

    fn start(&mut self, start: Start<'_>) -> Result<Started, Failure> {
        let execution = start.execution;
        let operand = |tensor: &Tensor| DoubleOperand {
            input: tensor.input.cast(),
            output: tensor.output_ptr().unwrap().cast(),
            elems: tensor.bytes().unwrap() / 4,
        };
        let tensors = start.entries.iter();
        let tensors = tensors.map(|e| Some(e.as_ref()?.tensors.iter().map(operand).collect()));
        let end = Arc::new(Mutex::new(None));
        let part = Part {
            rank: self.rank,
            members: execution.members.len(),
            op: execution.op.clone(),
            tensors: tensors.collect(),
            entries: execution.items.iter().filter_map(|i| i.entry).collect(),
            end: end.clone(),
            notifier: self.notifier.clone(),
        };
        let key = (execution.set.0, execution.seq);
        let mut state = self.fabric.lock();
        state.gathered.entry(key).or_default().push(part);
        self.fabric.changed.notify_all();
        Ok(Started::InFlight(Box::new(Launched {
            key,
            rank: self.rank,
            end,
            fabric: self.fabric.clone(),
        })))
    }
}

struct Launched {
    key: (u32, Seq),
    rank: Rank,
    end: Arc<Mutex<Option<Result<Results, Failure>>>>,
    fabric: Arc<Fabric>,
}

impl InFlight for Launched {
    fn poll(&mut self) -> Option<Result<Results, Failure>> {
        self.end.lock().unwrap().take()
    }

    fn abort(&mut self, cause: &Aborted) {
        // Under this lock the fabric's thread is not in the middle of an execution.
        let mut state = self.fabric.lock();
        let stubborn = state.stubborn;
        let Some(parts) = state.gathered.get_mut(&self.key).filter(|_| !stubborn) else {
            return;
        };
        let before = parts.len();
        parts.retain(|part| part.rank != self.rank);
        if parts.len() < before {
            self.fabric.aborted.fetch_add(1, Ordering::SeqCst);
            *self.end.lock().unwrap() = Some(Err(Failure::Aborted(cause.clone())));
        }
    }
}

//! The worker, one rank's side of the negotiation: its pending requests, and the coordinator's decisions for it.

use crate::action::{ExecItem, Execution, WorkerAction};
use crate::error::{Leaving, OpError, StopReason, clip, listed};
use crate::limits::PENDING_MAX;
use crate::local;
use crate::lookup::{Lookup, Slab};
use crate::lost::PeerLost;
use crate::message::{SetKey, Slot, Submission, ToCoordinator};
use crate::outbox::Outbox;
use crate::signature::RequestSignature;
use crate::slots::SlotMap;
use crate::types::{EntryId, Generation, Op, OperationTag, ProcessSetId, Rank, Request, Seq};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

mod apply;

/// Maximum number of item lists kept for later executions. In a burst of calls that many executions may wait behind the
/// one that runs.
const SPARE_VECS_MAX: usize = 64;

/// Configuration of a worker.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Rank of this process.
    pub rank: Rank,
    /// Number of ranks in the job.
    pub size: u32,
    /// The current generation of the job.
    pub generation: Generation,
}

/// State machine of one rank.
#[derive(Debug)]
pub struct Worker {
    cfg: WorkerConfig,
    state: WorkerState,
    sets: BTreeMap<ProcessSetId, WorkerSet>,
    /// Maps each registration to the id of its set.
    ids: BTreeMap<SetKey, ProcessSetId>,
    entries: Slab<Entry>,
    slots: SlotMap<usize>,
    join: Option<EntryId>,
    pending: usize,
    /// Number of requests so far that were in the cache, and (`misses`) that were not.
    hits: u64,
    misses: u64,
    /// Sequence number of the last decision applied.
    last_seq: Option<Seq>,
    outbox: Outbox,
    actions: VecDeque<WorkerAction>,
    spare: Vec<Vec<ExecItem>>,
}

#[derive(Debug)]
enum WorkerState {
    Running,
    /// This rank has requested the shutdown. Decisions agreed before are still carried out.
    Asked(Leaving),
    /// The coordinator has announced the shutdown. The worker waits until all ranks have confirmed it.
    Stopping {
        by: Rank,
        why: StopReason,
    },
    /// Final state: no further requests or decisions are handled.
    Over(OpError),
}

#[derive(Debug)]
struct WorkerSet {
    key: SetKey,
    members: Arc<[Rank]>,
    names: Lookup<Arc<str>, usize>,
}

/// A name that is pending, cached or both.
#[derive(Debug)]
struct Entry {
    set: ProcessSetId,
    name: Arc<str>,
    cached: Option<Cached>,
    pending: Option<Pending>,
}

#[derive(Debug)]
struct Cached {
    slot: Slot,
    signature: Arc<RequestSignature>,
    /// Sequence number of the slot's last execution; `None` if a request has failed since. Equal on all members that
    /// have handled the same decisions.
    last: Option<Seq>,
}

impl Cached {
    fn tag(&self) -> Option<OperationTag> {
        OperationTag::new(self.slot.0, self.last?)
    }
}

#[derive(Debug)]
struct Pending {
    id: EntryId,
    signature: Arc<RequestSignature>,
}

/// Reason why a message of the coordinator violates the protocol.
type Violation = &'static str;

impl Worker {
    /// Creates a worker that has only the set of all ranks.
    pub fn new(cfg: WorkerConfig) -> Self {
        let global = WorkerSet {
            key: SetKey::GLOBAL,
            members: (0..cfg.size).map(Rank).collect(),
            names: Lookup::default(),
        };
        Self {
            outbox: Outbox::new(cfg.generation),
            cfg,
            state: WorkerState::Running,
            sets: BTreeMap::from([(ProcessSetId::GLOBAL, global)]),
            ids: BTreeMap::from([(SetKey::GLOBAL, ProcessSetId::GLOBAL)]),
            entries: Slab::default(),
            slots: SlotMap::default(),
            join: None,
            pending: 0,
            hits: 0,
            misses: 0,
            last_seq: None,
            actions: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// Queues a request. The request ends with a [`WorkerAction::Execute`] or [`WorkerAction::Complete`] with this
    /// `id`; then its name may be used again. Returns for a known request the tag that its execution will have if the
    /// request is not fused.
    ///
    /// # Errors
    /// Local mistakes, with Horovod's texts. Nothing is queued then.
    pub fn submit(&mut self, id: EntryId, req: &Request) -> Result<Option<OperationTag>, OpError> {
        let Some(set) = self.sets.get(&req.set) else {
            return Err(local::unknown_set(&req.op));
        };
        match &self.state {
            WorkerState::Running => {}
            WorkerState::Asked(why) => {
                return Err(OpError::Stopped {
                    by: self.cfg.rank,
                    why: StopReason::Left(*why),
                    pending: String::new(),
                });
            }
            WorkerState::Stopping { by, why }
            | WorkerState::Over(OpError::Stopped { by, why, .. }) => {
                return Err(OpError::Stopped {
                    by: *by,
                    why: why.clone(),
                    pending: listed(&[Arc::from(req.name.as_str())]),
                });
            }
            WorkerState::Over(error) => return Err(error.clone()),
        }
        local::check_call(req, self.cfg.rank, self.cfg.size, &set.members)?;
        if self.pending >= PENDING_MAX {
            return Err(OpError::invalid(format!(
                "{}: {PENDING_MAX} operations are pending already.",
                req.op.title()
            )));
        }
        if req.op == Op::Join {
            return self.submit_join(id, req).map(|()| None);
        }
        let index = set.names.get(req.name.as_str()).copied();
        match index.and_then(|i| Some((i, self.entries.get_mut(i)?))) {
            Some((
                _,
                Entry {
                    pending: Some(_), ..
                },
            )) => Err(duplicate_name(&req.name)),
            Some((_, entry)) if entry.hits(req) => {
                if req.op.has_own_rows() {
                    local::check_elements(req)?;
                }
                self.pending += 1;
                self.hits += 1;
                entry.submit_hit(id, req, &mut self.outbox);
                Ok(entry.cached.as_ref().and_then(Cached::tag))
            }
            Some((index, _)) => self.submit_new(id, req, Some(index)).map(|()| None),
            None => self.submit_new(id, req, None).map(|()| None),
        }
    }

    /// Returns the number of requests that are queued and not agreed on yet.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Returns the number of requests so far that were in the cache, and of those that were not.
    pub fn cache_use(&self) -> (u64, u64) {
        (self.hits, self.misses)
    }

    /// Returns the error that ended this worker, or `None` if it has not ended.
    pub fn ended(&self) -> Option<&OpError> {
        match &self.state {
            WorkerState::Over(error) => Some(error),
            _ => None,
        }
    }

    /// Handles the loss of a member: all pending and later requests fail with it. During a shutdown a faster rank that
    /// has exited also looks lost, so this only ends the wait.
    pub fn handle_peer_lost(&mut self, lost: PeerLost) {
        self.end(lost);
    }

    /// Handles a loss as [`Worker::handle_peer_lost`] does and also reports it to the coordinator, which informs all
    /// ranks of the cause. For losses that only this rank has noticed, including its own failure.
    pub fn report_lost(&mut self, lost: PeerLost) {
        let running = matches!(self.state, WorkerState::Running | WorkerState::Asked(_));
        self.end(lost.clone());
        if running {
            self.outbox.push(Submission::Lost(lost.clipped()), 1);
        }
    }

    /// Requests a shutdown of all ranks. Everything pending on any rank ends with the shutdown error that names this
    /// rank. [`WorkerAction::ShutDown`] follows once every rank has confirmed.
    pub fn shutdown(&mut self) {
        self.shutdown_because(Leaving::Asked);
    }

    /// Requests a shutdown as [`Worker::shutdown`] does, with a reason that is sent to the other ranks.
    pub fn shutdown_because(&mut self, why: Leaving) {
        if matches!(self.state, WorkerState::Running) {
            self.state = WorkerState::Asked(why);
            self.outbox.push(Submission::Shutdown(why), 1);
        }
    }

    /// Returns the next action. Must be called until it returns `None`, after every other method.
    pub fn poll_action(&mut self) -> Option<WorkerAction> {
        if let Some(message) = self.outbox.take() {
            return Some(WorkerAction::Send(message));
        }
        self.actions.pop_front()
    }

    /// Takes back a message that has been sent, so that the next one needs no allocation.
    pub fn recycle_message(&mut self, message: ToCoordinator) {
        self.outbox.recycle(message);
    }

    /// Takes back an execution that has been run, so that the next one needs no allocation.
    pub fn recycle(&mut self, execution: Execution) {
        let mut items = execution.items;
        items.clear();
        if self.spare.len() < SPARE_VECS_MAX {
            self.spare.push(items);
        }
    }

    /// Returns set and name of the request that is pending under this id and not agreed on yet.
    pub fn name_of(&self, id: EntryId) -> Option<(ProcessSetId, Arc<str>)> {
        let mut entries = self.entries.iter().map(|(_, entry)| entry);
        let entry = entries.find(|e| e.pending.as_ref().is_some_and(|p| p.id == id))?;
        Some((entry.set, entry.name.clone()))
    }

    /// Returns whether a request of this name is queued and not agreed on yet.
    pub fn is_pending(&self, set: ProcessSetId, name: &str) -> bool {
        let index = self.sets.get(&set).and_then(|set| set.names.get(name));
        let entry = index.and_then(|index| self.entries.get(*index));
        entry.is_some_and(|entry| entry.pending.is_some())
    }

    /// Returns the members of a set in ascending order, or `None` for an unknown set.
    pub fn members(&self, set: ProcessSetId) -> Option<&[Rank]> {
        self.sets.get(&set).map(|set| &*set.members)
    }

    /// Returns all sets with their members, by id.
    pub fn process_sets(&self) -> impl Iterator<Item = (ProcessSetId, &[Rank])> {
        self.sets.iter().map(|(id, set)| (*id, &*set.members))
    }

    fn submit_join(&mut self, id: EntryId, req: &Request) -> Result<(), OpError> {
        if self.join.is_some() {
            return Err(duplicate_name(&req.name));
        }
        self.join = Some(id);
        self.pending += 1;
        self.outbox.push(Submission::Join, 1);
        Ok(())
    }

    fn submit_new(
        &mut self,
        id: EntryId,
        req: &Request,
        index: Option<usize>,
    ) -> Result<(), OpError> {
        local::check_bounds(req)?;
        let Some(set) = self.sets.get_mut(&req.set) else {
            return Err(local::unknown_set(&req.op));
        };
        let bytes = local::encoded_bytes(req.name.len(), &req.tensors) + 5 * op_ranks(&req.op);
        let signature = Arc::new(RequestSignature {
            op: req.op.clone(),
            device: req.device,
            tensors: req.tensors.as_slice().into(),
        });
        let pending = Pending {
            id,
            signature: Arc::clone(&signature),
        };
        let name = match index.and_then(|i| self.entries.get_mut(i)) {
            Some(entry) => {
                entry.pending = Some(pending);
                Arc::clone(&entry.name)
            }
            None => {
                let name: Arc<str> = req.name.as_str().into();
                let index = self.entries.insert(Entry {
                    set: req.set,
                    name: Arc::clone(&name),
                    cached: None,
                    pending: Some(pending),
                });
                set.names.insert(Arc::clone(&name), index);
                name
            }
        };
        self.pending += 1;
        self.misses += 1;
        self.outbox.push(
            Submission::New {
                set: set.key,
                name,
                signature,
            },
            bytes,
        );
        Ok(())
    }
}

impl Entry {
    fn hits(&self, req: &Request) -> bool {
        self.cached
            .as_ref()
            .is_some_and(|c| c.signature.agrees_with(&req.op, req.device, &req.tensors))
    }

    fn submit_hit(&mut self, id: EntryId, req: &Request, outbox: &mut Outbox) {
        let Some(cached) = &self.cached else { return };
        let signature = if req.op.has_own_rows() && *cached.signature.tensors != *req.tensors {
            Arc::new(RequestSignature {
                op: req.op.clone(),
                device: req.device,
                tensors: req.tensors.as_slice().into(),
            })
        } else {
            Arc::clone(&cached.signature)
        };
        if signature.op == Op::Allgather {
            let first_dims: Vec<u64> = signature
                .tensors
                .iter()
                .map(|t| t.shape.first().copied().unwrap_or(0))
                .collect();
            let bytes = 16 + 10 * first_dims.len();
            outbox.push(
                Submission::GatherHit {
                    slot: cached.slot,
                    first_dims,
                },
                bytes,
            );
        } else {
            outbox.push_hit(cached.slot);
        }
        self.pending = Some(Pending { id, signature });
    }
}

fn duplicate_name(name: &str) -> OpError {
    OpError::DuplicateName {
        name: clip(name.to_owned()),
    }
}

fn op_ranks(op: &Op) -> usize {
    match op {
        Op::AddProcessSet { ranks } => ranks.len(),
        _ => 0,
    }
}

//! The backend, which moves the bytes of an execution: an interface, chosen by the kind of device that all ranks have
//! agreed on.
//!
//! Executions *start* in the one total order of the job, on every rank; they may end in any. The host's data plane
//! runs an execution to its end while it is started. A backend for a device only launches it: what it returns then is
//! polled, and aborted when the generation ends.

mod capabilities;
#[cfg(test)]
mod double;
mod gpu;
pub(super) mod host;
mod rows;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use horovod_gpu::{Executor, ExecutorProgress};
use horovod_protocol::{Device, EntryId, Execution, ProcessSetId, Rank, Shape};
use horovod_transport::{Aborted, Idle, Notifier, Topology};

use super::Entry;
use super::handles::OpResult;
use crate::buffer::{Buffer, BufferPool};
use crate::config::Config;
use crate::error::Error;

pub(super) use capabilities::Capabilities;
pub(super) use gpu::gpu_backends;
pub(super) use rows::share_of;

/// Bytes of an offer at most.
const OFFER_MAX: usize = 1 << 10;

/// Why an execution could not be carried out; each ends the generation, for the peers wait for this rank.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The generation was over already.
    Aborted(Aborted),
    /// A link broke under the collective.
    Link { rank: Rank, cause: String },
    /// The bytes received from this rank differ from those it sent.
    Altered { rank: Rank, what: Arc<str> },
    /// This rank cannot go on because of another one, whose own reason is better if it is told in time.
    Remote(String),
    /// This rank cannot go on: memory, an event that failed, an invariant.
    Local(String),
}

/// One per item that this rank submitted.
pub(crate) type Results = Vec<(EntryId, Result<OpResult, Error>)>;

/// For each item the memory and shape of each output that is allocated; where nothing is, an empty list.
pub(crate) type Outputs = Vec<Vec<Option<(Buffer, Shape)>>>;

/// One execution, the tensors of this rank, and what is needed to carry it out.
pub(crate) struct Start<'a> {
    pub(crate) execution: &'a Execution,
    /// By item; `None` where this rank has joined.
    pub(crate) entries: &'a [Option<Entry>],
    /// Memory for outputs that an allocator of the submission has given; by item, empty if there is none.
    pub(crate) outputs: &'a mut Outputs,
    /// Of an alltoall whose memory was asked for: rows from each member, by item.
    pub(crate) received: Vec<Vec<usize>>,
    /// Of an Adasum.
    pub(crate) adasum: AdasumScope,
    /// To be called whenever nothing can move. Its error is passed on; then the same execution may be started again.
    pub(crate) idle: &'a mut dyn Idle,
    pub(crate) pool: &'a Arc<BufferPool>,
    /// Whether somebody wants to know when a device carries it out: [`InFlight::stage`].
    pub(crate) timed: bool,
    /// Empty; filled by a backend that is done.
    pub(crate) results: &'a mut Results,
}

/// Operands of Adasum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdasumScope {
    /// The tensors of all ranks.
    Ranks,
    /// The averages inside the hosts.
    Hosts,
}

/// How an execution has started.
pub(crate) enum Started {
    /// It has ended; the results are where they belong.
    Done,
    /// It goes on by itself.
    InFlight(Box<dyn InFlight>),
}

/// Backend for executions on one kind of device.
pub(crate) trait Backend: Send {
    /// As in the timeline.
    fn name(&self) -> &'static str;

    /// This rank's offer to the other members of a set, sent once before the set's first execution on this device: at
    /// most [`OFFER_MAX`] bytes.
    fn offer(&mut self, set: ProcessSetId, members: &[Rank]) -> Vec<u8>;

    /// Concludes from the offers of all members. The conclusion must depend on nothing else, so that all conclude the
    /// same. An error is the result of every operation of the set on this device.
    fn settle(&mut self, set: ProcessSetId, members: &Members<'_>) -> Result<(), String>;

    /// Whether an execution goes through host memory: then [`Self::stage_in`], the host's backend and
    /// [`Self::stage_out`] carry it out in turn. It must follow from the execution and what was settled alone, so that
    /// all members do the same.
    fn is_staged(&self, _: &Execution) -> bool {
        false
    }

    /// Scope of an Adasum of tensors on this device; an error is the operation's result. The scope must depend on the
    /// execution and the settled conclusion alone.
    fn adasum(&self, _: &Execution) -> Result<AdasumScope, String> {
        Ok(AdasumScope::Ranks)
    }

    /// Begin to copy the tensors of an execution into host memory; if it is `timed`, there is [`StageIn::stage`]. The
    /// `outputs` are those of [`Self::stage_out`].
    fn stage_in(
        &mut self,
        execution: &Execution,
        _: &[Option<Entry>],
        _outputs: &Outputs,
        _timed: bool,
    ) -> Result<Box<dyn StageIn>, Failure> {
        Err(not_staged(execution))
    }

    /// Begin to copy the results, which are in host memory, to where they belong.
    fn stage_out(&mut self, staged: Staged<'_>) -> Result<Started, Failure> {
        Err(not_staged(staged.execution))
    }

    /// The set was removed: what was settled holds no longer, and executions of this id are another set's from here on.
    fn forget(&mut self, _: ProcessSetId) {}

    /// The engine ends; nothing is in flight. `orderly`: the other members end as well, and none was lost.
    fn close(&mut self, _orderly: bool) {}

    /// Begin. Where an item is `reordered`, what its `tensors` say was agreed on, and this rank's own tensors lie
    /// otherwise: only the host's backend meets that, for submissions refuse other orders on devices. The order
    /// of these calls is the same on all members of any set, and the bytes of all tensors are there.
    fn start(&mut self, start: Start<'_>) -> Result<Started, Failure>;
}

fn not_staged(execution: &Execution) -> Failure {
    let device = execution.device.name();
    Failure::Local(format!("the backend for a {device} stages nothing"))
}

/// Tensors of an execution on their way into host memory.
pub(crate) trait StageIn: Send {
    /// Entries of host memory in place of the execution's, once the bytes are there; why they never will be.
    fn poll(&mut self) -> Option<Result<Vec<Option<Entry>>, Failure>>;

    /// The device's stage, after the end of a timed execution.
    fn stage(&self) -> Option<DeviceStage> {
        None
    }
}

/// A part of an execution that a device carried out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceStage {
    pub(crate) name: &'static str,
    /// From when to when, by the host's clock, if that could be found out.
    pub(crate) times: Option<(Instant, Instant)>,
}

/// An execution whose results are in host memory.
pub(crate) struct Staged<'a> {
    pub(crate) execution: &'a Execution,
    /// As submitted; by item.
    pub(crate) entries: &'a [Option<Entry>],
    /// Entries from [`StageIn::poll`] in place of these, with the results where tensors have outputs.
    pub(crate) staged: Vec<Option<Entry>>,
    /// Memory on the device for outputs that are allocated late; as in [`Start`].
    pub(crate) outputs: &'a mut Outputs,
    /// Of the host's backend; taken.
    pub(crate) results: Results,
    /// As in [`Start`].
    pub(crate) timed: bool,
}

/// An execution that goes on by itself.
pub(crate) trait InFlight: Send {
    /// The results, once, as soon as what follows on the device may be put behind them: its tensors are still in use.
    /// Then those of the end are none. Only devices with an order of their own tell of it.
    fn launched(&mut self) -> Option<Results> {
        None
    }

    /// The failure, as soon as it is known: the tensors may still be in use, for long. Another thread that finds the
    /// failure notifies the engine.
    fn failing(&self) -> Option<Failure> {
        None
    }

    /// The end, if it has come: then the backend uses the tensors no more. An end after [`Self::abort`] comes within
    /// seconds; after a later one its tensors are never released. The thread that ends the work notifies the engine.
    fn poll(&mut self) -> Option<Result<Results, Failure>>;

    /// The device's stage, after the end of a timed execution.
    fn stage(&self) -> Option<DeviceStage> {
        None
    }

    /// The generation is over: end soon.
    fn abort(&mut self, cause: &Aborted);

    /// It has not ended so long after that, and is waited for no longer.
    fn give_up(&self, _after: Duration) {}
}

/// The members of a set and what each has offered.
pub(crate) struct Members<'a> {
    pub(crate) ranks: &'a [Rank],
    pub(crate) offers: &'a [Vec<u8>],
}

/// The GPU of this rank.
pub(crate) struct ChosenGpu {
    ordinal: AtomicI32,
    needs_events: AtomicBool,
    /// Once it has been given something.
    executor: OnceLock<Arc<Executor>>,
}

impl Default for ChosenGpu {
    fn default() -> Self {
        Self {
            ordinal: AtomicI32::new(-1),
            needs_events: AtomicBool::new(false),
            executor: OnceLock::new(),
        }
    }
}

impl ChosenGpu {
    /// From here on tensors must come with the event of their stream, without which nobody knows their GPU.
    pub(crate) fn demand_events(&self) {
        self.needs_events.store(true, Ordering::Release);
    }

    /// Whether they must.
    pub(crate) fn needs_events(&self) -> bool {
        self.needs_events.load(Ordering::Acquire)
    }

    /// The one that was chosen first: this, if none was.
    pub(crate) fn choose(&self, ordinal: i32) -> i32 {
        let (new, old) = (Ordering::AcqRel, Ordering::Acquire);
        let chosen = self.ordinal.compare_exchange(-1, ordinal, new, old);
        chosen.map_or_else(|before| before, |_| ordinal)
    }

    /// This carries out what is given to it.
    pub(crate) fn is_served_by(&self, executor: Arc<Executor>) {
        let _ = self.executor.set(executor); // there is one
    }

    /// How far it is, if it has been given anything.
    pub(crate) fn progress(&self) -> Option<ExecutorProgress> {
        self.executor.get().map(|executor| executor.progress())
    }

    /// Its number in this process, if one was chosen.
    pub(crate) fn get(&self) -> Option<i32> {
        Some(self.ordinal.load(Ordering::Acquire)).filter(|ordinal| *ordinal >= 0)
    }
}

/// Context for the creation of a backend.
pub(crate) struct Surroundings<'a> {
    pub(crate) config: &'a Config,
    pub(crate) gpu: Arc<ChosenGpu>,
    pub(crate) topology: &'a Topology,
    /// Notified when an execution has ended.
    pub(crate) notifier: Notifier,
}

/// A backend, and the kind of device that it serves.
pub(crate) type DeviceBackend = (Device, Box<dyn Backend>);

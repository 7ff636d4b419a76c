//! The backend, which moves the bytes of an execution: an interface, chosen by the kind of device that all ranks have
//! agreed on.
//!
//! Executions *start* in the one total order of the job, on every rank; they may end in any. The host's data plane
//! runs an execution to its end while it is started. A backend for a device only launches it: what it returns then is
//! polled, and aborted when the generation ends.

mod capabilities;
#[cfg(test)]
mod double;
pub(crate) mod gpu;
pub(super) mod host;
mod rows;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use horovod_protocol::{EntryId, Execution, ProcessSetId, Rank, Shape};
use horovod_transport::{Aborted, Idle, Notifier, Topology};

use super::Entry;
use super::accelerator::Accelerator;
use super::handles::OpResult;
use crate::buffer::{Buffer, BufferPool};
use crate::config::Config;
use crate::error::Error;

pub(super) use capabilities::Capabilities;
/// A framework's handle of a stream.
pub use horovod_gpu::RawStream;
pub(super) use rows::share_of;

/// Bytes of an offer at most.
const OFFER_MAX: usize = 1 << 10;

/// Why an execution could not be carried out; each ends the generation, for the peers wait for this rank.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The generation was over already.
    Aborted(Aborted),
    /// A link broke under the collective.
    Link {
        /// The rank at its other end.
        rank: Rank,
        /// The system's error.
        cause: String,
    },
    /// The bytes received from this rank differ from those it sent.
    Altered {
        /// The sender.
        rank: Rank,
        /// The text of the error.
        what: Arc<str>,
    },
    /// This rank cannot go on because of another one, whose own reason is better if it is told in time.
    Remote(String),
    /// This rank cannot go on: memory, an event that failed, an invariant.
    Local(String),
}

/// One per item that this rank submitted.
pub type Results = Vec<(EntryId, Result<OpResult, Error>)>;

/// For each item the memory and shape of each output that is allocated; where nothing is, an empty list.
pub type Outputs = Vec<Vec<Option<(Buffer, Shape)>>>;

/// One execution, the tensors of this rank, and what is needed to carry it out.
pub struct Start<'a> {
    /// The execution, as all members have it.
    pub execution: &'a Execution,
    /// By item; `None` where this rank has joined.
    pub entries: &'a [Option<Entry>],
    /// Memory for outputs that an allocator of the submission has given; by item, empty if there is none.
    pub outputs: &'a mut Outputs,
    /// Of an alltoall whose memory was asked for: rows from each member, by item.
    pub received: Vec<Vec<usize>>,
    /// Of an Adasum.
    pub adasum: AdasumScope,
    /// To be called whenever nothing can move. Its error is passed on; then the same execution may be started again.
    pub idle: &'a mut dyn Idle,
    /// Host memory for results.
    pub pool: &'a Arc<BufferPool>,
    /// Whether somebody wants to know when a device carries it out: [`InFlight::stage`].
    pub timed: bool,
    /// Empty; filled by a backend that is done.
    pub results: &'a mut Results,
}

/// Operands of Adasum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdasumScope {
    /// The tensors of all ranks.
    Ranks,
    /// The averages inside the hosts.
    Hosts,
}

/// How an execution on a device is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// By [`Backend::start`].
    Native,
    /// Through host memory, by [`Backend::stage_in`], the host's backend and [`Backend::stage_out`] in turn; an Adasum
    /// has these operands.
    Staged(AdasumScope),
    /// Not at all; why, as the operation's result.
    Refused(String),
}

/// How an execution has started.
pub enum Started {
    /// It has ended; the results are where they belong.
    Done,
    /// It goes on by itself.
    InFlight(Box<dyn InFlight>),
}

/// Backend for executions on one kind of device.
pub trait Backend: Send {
    /// As in the timeline.
    fn name(&self) -> &'static str;

    /// This rank's offer to the other members of a set, sent once before the set's first execution on this device: at
    /// most [`OFFER_MAX`] bytes.
    fn offer(&mut self, set: ProcessSetId, members: &[Rank]) -> Vec<u8>;

    /// Concludes from the offers of all members. The conclusion must depend on nothing else, so that all conclude the
    /// same. An error is the result of every operation of the set on this device.
    fn settle(&mut self, set: ProcessSetId, members: &Members<'_>) -> Result<(), String>;

    /// How an execution of a settled set is carried out. The route must follow from the execution and the settled
    /// conclusion alone, so that all members take the same.
    fn route(&self, _: &Execution) -> Route {
        Route::Native
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
    /// of these calls is the same on all members of any set, and the bytes of all tensors are there. A device's backend
    /// must not wait for peers here, because a thread that may leave its wait calls it.
    fn start(&mut self, start: Start<'_>) -> Result<Started, Failure>;
}

fn not_staged(execution: &Execution) -> Failure {
    let device = execution.device.name();
    Failure::Local(format!("the backend for a {device} stages nothing"))
}

/// Tensors of an execution on their way into host memory.
pub trait StageIn: Send {
    /// Entries of host memory in place of the execution's, once the bytes are there; why they never will be.
    fn poll(&mut self) -> Option<Result<Vec<Option<Entry>>, Failure>>;

    /// The device's stage, after the end of a timed execution.
    fn stage(&self) -> Option<DeviceStage> {
        None
    }
}

/// A part of an execution that a device carried out.
#[derive(Clone, Copy, Debug)]
pub struct DeviceStage {
    /// As in the timeline.
    pub name: &'static str,
    /// From when to when, by the host's clock, if that could be found out.
    pub times: Option<(Instant, Instant)>,
}

/// An execution whose results are in host memory.
pub struct Staged<'a> {
    /// As in [`Start`].
    pub execution: &'a Execution,
    /// As submitted; by item.
    pub entries: &'a [Option<Entry>],
    /// Entries from [`StageIn::poll`] in place of these, with the results where tensors have outputs.
    pub staged: Vec<Option<Entry>>,
    /// Memory on the device for outputs that are allocated late; as in [`Start`].
    pub outputs: &'a mut Outputs,
    /// Of the host's backend; taken.
    pub results: Results,
    /// As in [`Start`].
    pub timed: bool,
}

/// An execution that goes on by itself.
pub trait InFlight: Send {
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
pub struct Members<'a> {
    /// Ascending.
    pub ranks: &'a [Rank],
    /// In the same order.
    pub offers: &'a [Vec<u8>],
}

/// Context for the creation of a backend.
pub struct Surroundings<'a> {
    /// Settings of the engine.
    pub config: &'a Config,
    /// Ranks and their hosts.
    pub topology: &'a Topology,
    /// Notified when an execution has ended.
    pub notifier: Notifier,
}

/// The kinds of devices that this build serves.
pub(super) fn accelerators(config: &Config) -> Vec<Arc<dyn Accelerator>> {
    vec![Arc::new(gpu::ChosenGpu::new(config.gpu.timeout))]
}

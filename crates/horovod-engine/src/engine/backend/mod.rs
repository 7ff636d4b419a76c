//! The backends, which move the bytes of an execution, behind one interface. The kind of device on which all ranks have
//! agreed selects the backend.
//!
//! Executions *start* in the one total order of the job, on every rank, and may end in any order. The host's data plane
//! runs an execution to its end within the start. A device's backend only launches it and returns an [`InFlight`],
//! which is polled, and aborted when the generation ends.

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

/// Most bytes of an offer.
const OFFER_MAX: usize = 1 << 10;

/// Why an execution could not run. Each failure ends the generation, because the peers wait for this rank.
#[derive(Clone, Debug)]
pub enum Failure {
    /// The generation had ended already.
    Aborted(Aborted),
    /// A link failed during the collective.
    Link {
        /// The rank at the other end of the link.
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
    /// This rank cannot continue because of another rank, whose own report replaces this text if it arrives in time.
    Remote(String),
    /// This rank cannot continue: no memory, an event that failed, or a broken invariant.
    Local(String),
}

/// Results of the items that this rank submitted.
pub type Results = Vec<(EntryId, Result<OpResult, Error>)>;

/// Memory and shape of each output that is allocated, by item; an empty list for an item without such outputs.
pub type Outputs = Vec<Vec<Option<(Buffer, Shape)>>>;

/// One execution, the tensors of this rank, and the context in which it runs.
pub struct Start<'a> {
    /// The execution, the same on all members.
    pub execution: &'a Execution,
    /// Tensors of this rank, by item; `None` where this rank has joined.
    pub entries: &'a [Option<Entry>],
    /// Memory for outputs that the submission's allocator has returned, by item; empty without an allocator.
    pub outputs: &'a mut Outputs,
    /// Alltoall on a device: rows from each member, by item; empty otherwise.
    pub received: Vec<Vec<usize>>,
    /// Operands of an Adasum.
    pub adasum: AdasumScope,
    /// Called whenever nothing can move. Its error is returned; then the same execution may be started again.
    pub idle: &'a mut dyn Idle,
    /// Pool of host memory for results.
    pub pool: &'a Arc<BufferPool>,
    /// Whether the times of the work on a device are recorded: [`InFlight::stage`].
    pub timed: bool,
    /// Empty at the start; filled by a backend that returns [`Started::Done`].
    pub results: &'a mut Results,
}

/// Operands of Adasum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdasumScope {
    /// The tensors of all ranks.
    Ranks,
    /// The averages of the members of each host.
    Hosts,
}

/// How an execution on a device runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// On the device, by [`Backend::start`].
    Native,
    /// Through host memory, by [`Backend::stage_in`], the host's backend and [`Backend::stage_out`] in turn. The scope
    /// is for an Adasum.
    Staged(AdasumScope),
    /// Not at all; the text is the error of the operation.
    Refused(String),
}

/// State of an execution after its start.
pub enum Started {
    /// The execution has ended; the results are in the outputs.
    Done,
    /// The execution continues in the backend without the driver.
    InFlight(Box<dyn InFlight>),
}

/// Backend for executions on one kind of device.
pub trait Backend: Send {
    /// Returns the backend's name in the timeline.
    fn name(&self) -> &'static str;

    /// Returns this rank's offer to the other members of a set, at most [`OFFER_MAX`] bytes. It is sent once, before
    /// the set's first execution on this device.
    fn offer(&mut self, set: ProcessSetId, members: &[Rank]) -> Vec<u8>;

    /// Concludes from the offers of all members. The conclusion must depend on nothing else, so that all members reach
    /// the same one. An error is the result of every operation of the set on this device.
    fn settle(&mut self, set: ProcessSetId, members: &Members<'_>) -> Result<(), String>;

    /// Returns how an execution of a settled set runs. The route must depend on the execution and the settled
    /// conclusion alone, so that all members take the same one.
    fn route(&self, _: &Execution) -> Route {
        Route::Native
    }

    /// Starts to copy the tensors of an execution into host memory. If the execution is timed, [`StageIn::stage`]
    /// returns the times. The `outputs` are those of [`Self::stage_out`].
    fn stage_in(
        &mut self,
        execution: &Execution,
        _: &[Option<Entry>],
        _outputs: &Outputs,
        _timed: bool,
    ) -> Result<Box<dyn StageIn>, Failure> {
        Err(not_staged(execution))
    }

    /// Starts to copy the results from host memory to the outputs.
    fn stage_out(&mut self, staged: Staged<'_>) -> Result<Started, Failure> {
        Err(not_staged(staged.execution))
    }

    /// Forgets the conclusion of a removed set: later executions of this id belong to another set.
    fn forget(&mut self, _: ProcessSetId) {}

    /// Closes the backend when the engine ends and nothing is in flight. `orderly`: the other members end as well, and
    /// none was lost.
    fn close(&mut self, _orderly: bool) {}

    /// Starts an execution. The order of these calls is the same on all members of any set, and the data of all tensors
    /// is ready. A device's backend must not wait for peers here, because a thread that may leave its wait calls it.
    ///
    /// If an item is `reordered`, its `tensors` have the agreed order in memory, and this rank's own tensors have
    /// another one. Only the host's backend gets such items, because submissions refuse other orders on devices.
    fn start(&mut self, start: Start<'_>) -> Result<Started, Failure>;
}

fn not_staged(execution: &Execution) -> Failure {
    let device = execution.device.name();
    Failure::Local(format!("the backend for a {device} stages nothing"))
}

/// Tensors that are being copied into host memory.
pub trait StageIn: Send {
    /// Returns entries in host memory in place of the execution's, or an error, once the copies have ended.
    fn poll(&mut self) -> Option<Result<Vec<Option<Entry>>, Failure>>;

    /// Returns the device's stage, after the end of the copies of a timed execution.
    fn stage(&self) -> Option<DeviceStage> {
        None
    }
}

/// A part of an execution that a device ran.
#[derive(Clone, Copy, Debug)]
pub struct DeviceStage {
    /// Name of the part in the timeline.
    pub name: &'static str,
    /// Begin and end by the host's clock, if they could be measured.
    pub times: Option<(Instant, Instant)>,
}

/// An execution whose results are in host memory.
pub struct Staged<'a> {
    /// The execution, as in [`Start`].
    pub execution: &'a Execution,
    /// Tensors as submitted, by item.
    pub entries: &'a [Option<Entry>],
    /// Entries from [`StageIn::poll`] in place of the submitted ones, with the results where tensors have outputs.
    pub staged: Vec<Option<Entry>>,
    /// Memory on the device for outputs that are allocated late; as in [`Start`].
    pub outputs: &'a mut Outputs,
    /// Results of the host's backend.
    pub results: Results,
    /// Whether the times of the work on the device are recorded, as in [`Start`].
    pub timed: bool,
}

/// An execution that continues in the backend without the driver.
pub trait InFlight: Send {
    /// Returns the results, once, as soon as later work on the device may be ordered behind them; the tensors are still
    /// in use. [`Self::poll`] then returns no results. Only devices that order their work themselves implement this.
    fn launched(&mut self) -> Option<Results> {
        None
    }

    /// Returns the failure as soon as it is detected; the tensors may still be in use, for long. Another thread that
    /// detects the failure notifies the engine.
    fn failing(&self) -> Option<Failure> {
        None
    }

    /// Returns the end, once the backend no longer uses the tensors. After [`Self::abort`] the end follows within
    /// seconds; if it is later, the tensors are never released. The thread that ends the work notifies the engine.
    fn poll(&mut self) -> Option<Result<Results, Failure>>;

    /// Returns the device's stage, after the end of a timed execution.
    fn stage(&self) -> Option<DeviceStage> {
        None
    }

    /// Aborts the execution, because the generation is over: it must end soon.
    fn abort(&mut self, cause: &Aborted);

    /// Notes that the execution has not ended so long after the abort, and that the engine no longer waits for it.
    fn give_up(&self, _after: Duration) {}
}

/// The members of a set and their offers.
pub struct Members<'a> {
    /// Ranks of the members, ascending.
    pub ranks: &'a [Rank],
    /// Offers of the members, in the order of `ranks`.
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

/// Returns the accelerators that this build supports.
pub(super) fn accelerators(config: &Config) -> Vec<Arc<dyn Accelerator>> {
    vec![Arc::new(gpu::ChosenGpu::new(config.gpu.timeout))]
}

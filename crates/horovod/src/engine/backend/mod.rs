//! The backend, which moves the bytes of an execution: an interface, chosen by the kind of device that all ranks have
//! agreed on.
//!
//! Executions *start* in the one total order of the job, on every rank; they may end in any. The host's data plane
//! runs an execution to its end while it is started. A backend for a device only launches it: what it returns then is
//! polled, and aborted when the generation ends.

mod capabilities;
#[cfg(test)]
mod double;
pub(super) mod host;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use horovod_protocol::{Device, EntryId, Execution, ProcessSetId, Rank, Shape};
use horovod_transport::{Aborted, Idle, Notifier, Topology};

use super::Entry;
use super::handles::OpResult;
use crate::buffer::{Buffer, BufferPool};
use crate::error::Error;

pub(super) use capabilities::Capabilities;

/// Bytes of an offer at most.
const OFFER_MAX: usize = 1 << 10;

/// Why an execution could not be carried out; each ends the generation, for the peers wait for this rank.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The generation was over already.
    Aborted(Aborted),
    /// A link broke under the collective.
    Link { rank: Rank, cause: String },
    /// What came from this rank is not what it sent.
    Altered { rank: Rank, what: Arc<str> },
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
    /// To be called whenever nothing can move. Its error is passed on; then the same execution may be started again.
    pub(crate) idle: &'a mut dyn Idle,
    pub(crate) pool: &'a Arc<BufferPool>,
    /// Empty; filled by a backend that is done.
    pub(crate) results: &'a mut Results,
}

/// How an execution has started.
pub(crate) enum Started {
    /// It has ended; the results are where they belong.
    Done,
    /// It goes on by itself.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "so far only tests have a device")
    )]
    InFlight(Box<dyn InFlight>),
}

/// What moves the bytes of executions on one kind of device.
pub(crate) trait Backend: Send {
    /// As in the timeline.
    fn name(&self) -> &'static str;

    /// What this rank tells the other members of a set once, before its first execution on this device: at most
    /// [`OFFER_MAX`] bytes.
    fn offer(&mut self, set: ProcessSetId) -> Vec<u8>;

    /// What follows from the offers of all members. It must follow from nothing else, so that all conclude alike; an
    /// error is what every operation of the set on this device ends with.
    fn settle(&mut self, set: ProcessSetId, members: &Members<'_>) -> Result<(), String>;

    /// Begin. Where an item is `reordered`, what its `tensors` say was agreed on, and this rank's own tensors lie
    /// otherwise: only the host's backend meets that, for submissions refuse other orders on devices. The order of these calls is the same on all members of any set, and the bytes of all tensors are there.
    fn start(&mut self, start: Start<'_>) -> Result<Started, Failure>;
}

/// An execution that goes on by itself.
pub(crate) trait InFlight: Send {
    /// The end, if it has come: then nothing touches the tensors any more. An end after [`Self::abort`] comes within
    /// seconds; later its tensors are never given back. Whoever brings it about notifies.
    fn poll(&mut self) -> Option<Result<Results, Failure>>;

    /// The generation is over: end soon.
    fn abort(&mut self, cause: &Aborted);
}

/// The members of a set and what each has offered.
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "so far only tests have a device")
)]
pub(crate) struct Members<'a> {
    pub(crate) ranks: &'a [Rank],
    pub(crate) offers: &'a [Vec<u8>],
}

/// What a backend is made with.
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "so far only tests have a device")
)]
pub(crate) struct Surroundings<'a> {
    pub(crate) topology: &'a Topology,
    /// Notified when an execution has ended.
    pub(crate) notifier: Notifier,
}

/// A backend, and the kind of device that it serves.
pub(crate) type DeviceBackend = (Device, Box<dyn Backend>);

//! Actions that a worker wants its engine to carry out.

use crate::error::{OpError, StopReason};
use crate::lost::PeerLost;
use crate::message::ToCoordinator;
use crate::types::{Device, EntryId, Op, OperationTag, ProcessSetId, Rank, Seq, TensorMeta};
use std::sync::Arc;

/// Action for the engine; drain with [`crate::Worker::poll_action`].
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerAction {
    /// Send to the coordinator (also on rank 0, in order).
    Send(ToCoordinator),
    /// Run this; strictly in the order of these actions.
    Execute(Execution),
    /// From here on, between the executions before and after, the data plane uses these values.
    /// Every rank gets them at the same place of the order, also when it has joined.
    Tuned {
        /// Place in the job's one order; among the numbers of the executions.
        seq: Seq,
        /// As given to [`crate::Coordinator::announce_tuning`].
        values: Arc<[u64]>,
    },
    /// A process set was removed: no execution after this is of it, and its id may be another's. Every rank gets it at the
    /// same place of the order, member or not.
    SetRemoved(ProcessSetId),
    /// An operation ended without data.
    Complete(EntryId, Result<Completion, OpError>),
    /// All ranks have stopped (or are gone while stopping): links may be closed. The last action.
    ShutDown {
        /// The rank that asked for it or is to blame.
        by: Rank,
        /// Why.
        why: StopReason,
    },
    /// This generation is over: unwind running collectives and close. All pending operations
    /// have been completed with the error. The last action.
    Abort(PeerLost),
}

/// How an operation without data ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// A barrier.
    Done,
    /// All ranks joined.
    Joined {
        /// The one that joined last.
        last: Rank,
    },
    /// A process set was registered under this id.
    SetAdded(ProcessSetId),
    /// Whether there was a process set to remove.
    SetRemoved(bool),
}

/// Requests to run together.
#[derive(Clone, Debug, PartialEq)]
pub struct Execution {
    /// Place in the job's one order; grows strictly on every rank.
    pub seq: Seq,
    /// The process set.
    pub set: ProcessSetId,
    /// Its members, ascending.
    pub members: Arc<[Rank]>,
    /// The operation.
    pub op: Op,
    /// Where the tensors are.
    pub device: Device,
    /// Members that really contribute (have not joined).
    pub contributors: u32,
    /// In the same order on every member.
    pub items: Vec<ExecItem>,
    /// The tag that [`crate::Worker::submit`] returned on every member, if this is one known request and all
    /// contribute.
    pub tag: Option<OperationTag>,
}

/// One request of an execution.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecItem {
    /// This rank's submission; `None` if it has joined and contributes the identity.
    pub entry: Option<EntryId>,
    /// Full key.
    pub name: Arc<str>,
    /// As agreed; allgather and alltoall: this rank's own.
    pub tensors: Arc<[TensorMeta]>,
    /// Memory orders differ between the ranks, so row-major was agreed on, which is not what all of this rank's own
    /// tensors are in.
    pub reordered: bool,
    /// Allgather: rows as `[tensor][member]`; else empty.
    pub first_dims: Vec<Vec<u64>>,
}

//! The trace of a run: what happened, as the checkers see it.

use horovod_protocol::{
    Completion, Device, EntryId, Execution, Op, OpError, OperationTag, ProcessSetId, Rank, Seq,
    StallReport, TensorMeta,
};

/// Everything that happened, in order.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The events.
    pub events: Vec<Event>,
    /// Ranks that died.
    pub dead: Vec<Rank>,
    /// Ranks whose program had not come to its end when nothing could happen any more.
    pub stuck: Vec<Rank>,
    /// Order-sensitive hash of all bytes sent and their times.
    pub hash: u64,
    /// Messages sent.
    pub messages: u64,
    /// Messages that the coordinator got.
    pub root_messages: u64,
    /// How long the others have waited for each rank, where the coordinator knows it of a rank: at most until `end`.
    pub awaited: Vec<(Rank, u64)>,
    /// When the run ended.
    pub end: u64,
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A rank queued an item of a phase.
    Submitted {
        /// The rank.
        rank: Rank,
        /// Its entry.
        entry: EntryId,
        /// Phase and item of the plan.
        item: (usize, usize),
    },
    /// An entry ended.
    Ended {
        /// Whose.
        rank: Rank,
        /// Which.
        entry: EntryId,
        /// How.
        end: End,
    },
    /// A submission was refused on the spot.
    Refused {
        /// The rank.
        rank: Rank,
        /// Phase and item of the plan.
        item: (usize, usize),
        /// Why.
        error: OpError,
    },
    /// A rank was told to run something.
    Executed {
        /// The rank.
        rank: Rank,
        /// The execution.
        digest: Digest,
    },
    /// A rank received new values for its data plane.
    Tuned {
        /// The rank.
        rank: Rank,
        /// At which place of the order.
        seq: Seq,
        /// The values.
        values: Vec<u64>,
    },
    /// A join of this rank reached the coordinator.
    JoinArrived(Rank),
    /// The coordinator found stragglers.
    Stalled(StallReport),
    /// The state machines accused a rank of breaking the protocol.
    Accused(String),
    /// A rank was told that all have stopped.
    ShutDown(Rank),
}

/// How an entry ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// In the execution with this number, with so many contributors.
    Ran(Seq, u32),
    /// Without data.
    Completed(Result<Completion, OpError>),
}

/// Properties of an execution that must be equal on all members.
#[derive(Clone, Debug, PartialEq)]
pub struct Digest {
    /// Place in the order.
    pub seq: Seq,
    /// The process set.
    pub set: ProcessSetId,
    /// Its members.
    pub members: Vec<Rank>,
    /// The operation.
    pub op: Op,
    /// Where.
    pub device: Device,
    /// Number of ranks that contribute.
    pub contributors: u32,
    /// The requests.
    pub items: Vec<ItemDigest>,
    /// Its tag.
    pub tag: Option<OperationTag>,
}

/// One request of an execution.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemDigest {
    /// Its name.
    pub name: String,
    /// Tensors; without the rows where those are each rank's own.
    pub tensors: Vec<TensorMeta>,
    /// Rows of all members.
    pub first_dims: Vec<Vec<u64>>,
    /// Whether this rank contributes; this and the next may differ.
    pub present: bool,
    /// The tag that this rank got for it.
    pub tag: Option<OperationTag>,
}

impl Digest {
    /// The digest of an execution; `tags` are those that this rank got when it submitted.
    pub fn of(execution: &Execution, tags: impl Fn(EntryId) -> Option<OperationTag>) -> Self {
        let own_rows = matches!(execution.op, Op::Allgather | Op::Alltoall);
        let tensors = |tensors: &[TensorMeta]| -> Vec<TensorMeta> {
            let mut tensors = tensors.to_vec();
            if own_rows {
                tensors.iter_mut().for_each(|t| {
                    t.shape = t.shape.iter().skip(1).copied().collect();
                });
            }
            tensors
        };
        Self {
            seq: execution.seq,
            set: execution.set,
            members: execution.members.to_vec(),
            op: execution.op.clone(),
            device: execution.device,
            contributors: execution.contributors,
            items: execution
                .items
                .iter()
                .map(|item| ItemDigest {
                    name: item.name.to_string(),
                    tensors: tensors(&item.tensors),
                    first_dims: item.first_dims.clone(),
                    present: item.entry.is_some(),
                    tag: item.entry.and_then(&tags),
                })
                .collect(),
            tag: execution.tag,
        }
    }
}

//! The execution context of a collective: where it runs, with which peers, and how it is tuned.

use horovod_protocol::{OperationTag, Rank, Seq};
use horovod_settings as settings;
use horovod_transport::{Data, Idle};

use crate::layout::SetLayout;
use crate::scratch::Scratch;
use crate::select::AlgorithmOverride;

/// Everything one operation runs with.
pub struct Ctx<'a> {
    /// The links and the arena of this generation.
    pub data: &'a mut Data,
    /// How to wait.
    pub idle: &'a mut dyn Idle,
    /// Members of the process set, ascending.
    pub members: &'a [Rank],
    /// This rank's index in `members`.
    pub me: usize,
    /// The operation's place in the job's total order. Several calls may share one, if all members make
    /// the same ones in the same order.
    pub seq: Seq,
    /// Which members share a host.
    pub layout: &'a SetLayout,
    /// Sizes and overrides; the same on all members.
    pub tuning: &'a Tuning,
    /// Under which the members may have staged the operand of [`crate::allreduce`] beforehand; see
    /// [`crate::prestage`].
    pub tag: Option<OperationTag>,
    /// State kept from one operation to the next; one per generation.
    pub scratch: &'a mut Scratch,
}

/// Sizes at which algorithms change, and overrides. All members must use the same values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tuning {
    /// Most bytes that one rank stages for one peer in one step within a host.
    pub chunk_bytes: usize,
    /// Fewest bytes of such a step; smaller operations take fewer steps.
    pub chunk_min_bytes: usize,
    /// Up to this many bytes every rank of a host reduces everything itself: one hand-over, not two.
    pub direct_max_bytes: usize,
    /// Hosts exchange whole vectors if none gets more than this many bytes.
    pub exchange_max_bytes: usize,
    /// Most hosts of which each sends to each; more form a ring.
    pub pairwise_max_hosts: usize,
    /// Bytes received, or gathered from small tensors, at a time on a stream between two ranks.
    pub wire_chunk_bytes: usize,
    /// So much does not stay in the caches: results of at least this many bytes that land in fresh memory are
    /// written past them, and an allreduce inside a host reads and writes few streams at a time.
    pub stream_min_bytes: usize,
    /// From this many bytes a broadcast passes along a chain of hosts rather than down a tree.
    pub chain_min_bytes: usize,
    /// Use this algorithm for allreduce wherever it is possible.
    pub allreduce: Option<AlgorithmOverride>,
    /// Whether an allreduce between hosts adds up inside each host first.
    pub hierarchical_allreduce: bool,
    /// Whether an allgather between hosts gathers inside each host first.
    pub hierarchical_allgather: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            chunk_bytes: settings::CHUNK_BYTES.kind.default,
            chunk_min_bytes: 16 << 10,
            direct_max_bytes: settings::DIRECT_MAX_BYTES.kind.default,
            exchange_max_bytes: settings::EXCHANGE_MAX_BYTES.kind.default,
            pairwise_max_hosts: settings::PAIRWISE_MAX_HOSTS.kind.default,
            wire_chunk_bytes: settings::WIRE_CHUNK_BYTES.kind.default,
            stream_min_bytes: 16 << 20,
            chain_min_bytes: 256 << 10,
            allreduce: None,
            hierarchical_allreduce: settings::HIERARCHICAL_ALLREDUCE.kind.0,
            hierarchical_allgather: settings::HIERARCHICAL_ALLGATHER.kind.0,
        }
    }
}

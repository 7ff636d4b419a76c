//! The errors of collectives: why one did not finish.

use horovod_protocol::DType;
use horovod_transport::{Aborted, LinkError};

/// Why a collective did not finish. Whatever the cause, its generation is over.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The generation ended while this waited.
    #[error(transparent)]
    Aborted(#[from] Aborted),
    /// A connection failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The operation is not defined for the element type.
    #[error("Adasum is defined for floating-point tensors, not for {}", .0.name())]
    AdasumType(DType),
    /// The shared memory of this host is too small for its number of ranks.
    #[error("{have} bytes of shared staging memory are too few for {ranks} ranks on one host")]
    StagingTooSmall {
        /// Bytes of one rank's staging memory.
        have: usize,
        /// Ranks on this host.
        ranks: usize,
    },
    /// An operation has more steps than a flag can count.
    #[error("an operation of {steps} steps is too long; at most {max} are possible")]
    TooManySteps {
        /// Steps that the operation would need.
        steps: u64,
        /// The limit.
        max: u64,
    },
    /// A peer announced an alltoall block that cannot be.
    #[error("member {member} announced an alltoall block of {rows} rows")]
    BlockSize {
        /// Index of the peer in the process set.
        member: usize,
        /// Announced rows.
        rows: u64,
    },
    /// The output could not be allocated.
    #[error("cannot allocate the output: {0}")]
    Allocation(String),
}

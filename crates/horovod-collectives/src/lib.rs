//! Collective algorithms over links and kernels.
//!
//! Every function here is called by all members of a process set, in the same order, with arguments
//! that fit together; negotiation has made sure of that. Each is straight blocking code: whenever
//! nothing can move it calls [`horovod_transport::Idle::idle`], whose error ends it at once.
//!
//! After any error the generation is dead: some peers may be in the middle of the same operation, so neither the links
//! nor the arena can be used again, and outputs hold anything. The exception is an allreduce that [`may_pause`]. It has
//! then completed whole steps: each read its operands, wrote its part of staging memory or outputs, and published that
//! part once. Peers may read staged data at any time, so a staging slot is written again only in a step of its own. All
//! other operations (broadcast, allgather, alltoall, reduce-scatter, Adasum, barriers, and allreduces over links) wait
//! in the middle of streams, and run to their end.
//!
//! Results of one allreduce are bitwise identical on all members (between CPUs of different kinds:
//! save for the bits inside a NaN), and the same from run to run for the same layout, sizes and
//! [`Tuning`].
//!
//! Arithmetic runs in the default floating-point mode ([`horovod_kernels::DefaultMode`]); each function then restores
//! the mode of its thread.
//!
//! Deliberately absent: negotiation, settings, threads, sockets.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.

mod allgather;
mod allreduce;
mod alltoall;
mod barrier;
mod broadcast;
mod context;
mod error;
mod exchange;
mod layout;
mod local;
mod reduce_scatter;
mod scratch;
pub mod select;
mod slices;
mod stages;

pub use allgather::{GatherItem, allgather};
pub use allreduce::{
    HostGroups, Reduction, StagingContext, adasum_of_hosts, allreduce, may_pause, prestage,
};
pub use alltoall::{Incoming, Outgoing, exchange_rows, exchange_sizes};
pub use barrier::barrier;
pub use broadcast::{ByteSegment, broadcast};
pub use context::Ctx;
pub use error::CollectiveError;
pub use layout::SetLayout;
pub use reduce_scatter::{ScatterItem, reduce_scatter, scatter_rows};
pub use scratch::Scratch;
pub use select::Tuning;
pub use slices::Segment;
pub use stages::{StageTime, Stages};

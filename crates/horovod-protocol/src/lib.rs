//! Negotiation between ranks as pure state machines: events and the time go in, actions come out.
//!
//! Every rank has a [`Worker`]; rank 0 also has the job's only [`Coordinator`], which counts who is
//! ready, checks that the ranks agree, fuses, and gives everything one total order ([`Seq`]).
//! Call a `handle_*` method or a verb, then drain `poll_action`; feed all messages that are there
//! before draining, then they share a batch.
//!
//! Deliberately absent: sockets, clocks, threads, environment variables, floating-point decisions,
//! hash-ordered iteration and `unsafe`. Also absent: the data itself (splits of an alltoall and all
//! tensors travel elsewhere), host names, logging (reports are data), and any reaction to a lost
//! rank other than ending this generation.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.
#![forbid(unsafe_code)]

mod action;
mod aggregator;
mod cache;
mod coordinator;
mod error;
mod fusion;
mod groups;
mod join;
mod lateness;
mod limits;
mod local;
mod lookup;
mod lost;
mod memory_order;
mod message;
mod outbox;
mod process_sets;
mod rank_set;
mod readiness;
mod refusal;
mod shape;
mod signature;
mod slots;
mod stall;
mod tree;
mod types;
mod validation;
pub mod wire;
mod worker;

pub use action::{Completion, ExecItem, Execution, WorkerAction};
pub use aggregator::{Aggregator, AggregatorAction, AggregatorConfig};
pub use coordinator::{Coordinator, CoordinatorAction, CoordinatorConfig, StallConfig};
pub use error::{
    CACHE_EVICTION_TEXT, DUPLICATE_NAME_TEXT, EVEN_BATCHES, Leaving, OpError, OpErrorKind,
    SET_REMOVED_TEXT, SHUTDOWN_TEXT, StopReason, printable,
};
pub use lateness::{LATE_SETS_MAX, Lateness, SetLateness};
pub use limits::*;
pub use lost::{LossCause, PeerLost};
pub use memory_order::{MemoryOrder, ORDERED_DIMS_MAX};
pub use message::{Item, Response, SetKey, Slot, SlotRun, Submission, ToCoordinator, ToWorker};
pub use refusal::{Difference, Impossible, Mismatch, Refusal};
pub use shape::Shape;
pub use signature::RequestSignature;
pub use stall::{StallReport, StalledRequest};
pub use tree::Tree;
pub use types::*;
pub use wire::DecodeError;
pub use worker::{Worker, WorkerConfig};

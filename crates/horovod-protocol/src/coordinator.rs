//! The job's one arbiter: counts who is ready, checks agreement, fuses, orders and answers.

use crate::error::PeerLost;
use crate::message::{ToCoordinator, ToWorker};
use crate::stall::StallReport;
use crate::types::{Generation, ProcessSetId, Rank, Time};

/// All settings of the negotiation; they live only here, so ranks cannot differ in them.
#[derive(Clone, Debug)]
pub struct CoordinatorConfig {
    /// Ranks of the job.
    pub size: u32,
    /// This life of the job.
    pub generation: Generation,
    /// Bytes that one fused execution may have; 0 fuses only empty tensors.
    pub fusion_threshold_bytes: u64,
    /// Response cache entries per process set; 0 turns the cache off.
    pub cache_capacity: usize,
    /// How long a ready response may be held back to batch more; 0 never holds.
    pub batch_delay_ns: u64,
    /// Every call is a fusion batch of its own.
    pub disable_group_fusion: bool,
    /// When to report late ranks; `None` never does.
    pub stall: Option<StallConfig>,
}

/// When a request counts as stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StallConfig {
    /// Report after this long, and again every such period.
    pub warning_ns: u64,
    /// Shut the job down after this long; ignored when shorter than the warning time.
    pub shutdown_ns: Option<u64>,
}

impl CoordinatorConfig {
    /// Horovod's defaults for a job of this size.
    pub fn new(size: u32, generation: Generation) -> Self {
        Self {
            size,
            generation,
            fusion_threshold_bytes: 128 << 20,
            cache_capacity: 1024,
            batch_delay_ns: 0,
            disable_group_fusion: false,
            stall: Some(StallConfig {
                warning_ns: 60_000_000_000,
                shutdown_ns: None,
            }),
        }
    }
}

/// What the engine of rank 0 shall do; drain with [`Coordinator::poll_action`].
#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorAction {
    /// Send to this rank's worker (also rank 0's own, in order).
    Send(Rank, ToWorker),
    /// Log who is late: as a warning, or as an error when it shuts the job down.
    Stall(StallReport),
    /// The response cache of a set is too small (once per set); see [`crate::CACHE_EVICTION_TEXT`].
    CacheEvicts(ProcessSetId),
    /// A rank broke the protocol; the others are being told. The generation is over.
    Abort(PeerLost),
}

/// The job's coordinator.
#[derive(Debug)]
pub struct Coordinator {}

impl Coordinator {
    /// A coordinator that knows only the set of all ranks.
    pub fn new(_cfg: CoordinatorConfig) -> Self {
        Self {}
    }

    /// A rank said something. Impossible content ends the generation and names that rank.
    pub fn handle_message(&mut self, _now: Time, _from: Rank, _msg: ToCoordinator) {}

    /// A rank is gone: tells all others, then does nothing more.
    pub fn handle_peer_lost(&mut self, _now: Time, _lost: PeerLost) {}

    /// Time has passed; call at [`Coordinator::next_deadline`] at the latest.
    pub fn handle_timeout(&mut self, _now: Time) {}

    /// When to call [`Coordinator::handle_timeout`].
    pub fn next_deadline(&self) -> Option<Time> {
        None
    }

    /// What to do next; call until `None` after every other method.
    pub fn poll_action(&mut self) -> Option<CoordinatorAction> {
        None
    }
}

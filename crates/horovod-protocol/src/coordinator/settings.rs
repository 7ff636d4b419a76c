//! The settings of the negotiation, and their changes at run time.

use super::{Coordinator, CoordinatorPhase, Ready};
use crate::limits::TUNED_VALUES_MAX;
use crate::types::Generation;

/// All settings of the negotiation. Only the coordinator has them, so they cannot differ between ranks.
#[derive(Clone, Debug)]
pub struct CoordinatorConfig {
    /// Number of ranks in the job.
    pub size: u32,
    /// The current generation of the job.
    pub generation: Generation,
    /// Maximum bytes of one fused execution; 0 fuses only empty tensors.
    pub fusion_threshold_bytes: u64,
    /// Response cache entries per process set; 0 turns the cache off.
    pub cache_capacity: usize,
    /// Maximum delay of a ready response that waits for others to be batched with; 0 disables the delay.
    pub batch_delay_ns: u64,
    /// Whether each call is a fusion batch of its own.
    pub disable_group_fusion: bool,
    /// When to report late ranks; `None` disables the reports.
    pub stall: Option<StallConfig>,
}

/// When a request counts as stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StallConfig {
    /// A request is reported after this long, and again after every such period.
    pub warning_ns: u64,
    /// The job is shut down after this long; ignored if shorter than the warning time.
    pub shutdown_ns: Option<u64>,
}

impl CoordinatorConfig {
    /// Returns Horovod's defaults for a job of this size.
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

impl Coordinator {
    /// Sets the maximum bytes of a fused execution from now on.
    pub fn set_fusion_threshold(&mut self, bytes: u64) {
        self.cfg.fusion_threshold_bytes = bytes;
    }

    /// Sets the maximum delay of a ready response. It also applies to responses that are delayed already.
    pub fn set_batch_delay(&mut self, ns: u64) {
        self.cfg.batch_delay_ns = ns;
    }

    /// Sends new values for the data plane to every rank. Each rank receives them as [`crate::WorkerAction::Tuned`] at
    /// the same place of the order: after everything that is ready now, before everything that becomes ready later. Has
    /// no effect once the job is stopping.
    ///
    /// # Panics
    /// Panics with more than [`crate::TUNED_VALUES_MAX`] values, because ranks reject longer lists.
    pub fn announce_tuning(&mut self, values: &[u64]) {
        assert!(
            values.len() <= TUNED_VALUES_MAX,
            "{} tuned values",
            values.len()
        );
        if matches!(self.phase, CoordinatorPhase::Running) {
            self.urgent = true;
            self.push_ready(Ready::Tuned(values.into()));
        }
    }
}

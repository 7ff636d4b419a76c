//! The settings of the negotiation, and how they change while it runs.

use super::{Coordinator, Phase, Ready};
use crate::limits::TUNED_VALUES_MAX;
use crate::types::Generation;

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

impl Coordinator {
    /// From now on one fused execution may have so many bytes.
    pub fn set_fusion_threshold(&mut self, bytes: u64) {
        self.cfg.fusion_threshold_bytes = bytes;
    }

    /// From now on a ready response may be held back so long, also one that is held already.
    pub fn set_batch_delay(&mut self, ns: u64) {
        self.cfg.batch_delay_ns = ns;
    }

    /// Tells every rank new values for its data plane. Each gets them as [`crate::WorkerAction::Tuned`] at
    /// the same place of the order: after all that is ready by now, before all that becomes ready later.
    /// No effect once the job is stopping.
    ///
    /// # Panics
    /// With more than [`crate::TUNED_VALUES_MAX`] values, which nobody could decode.
    pub fn announce_tuning(&mut self, values: &[u64]) {
        assert!(
            values.len() <= TUNED_VALUES_MAX,
            "{} tuned values",
            values.len()
        );
        if matches!(self.phase, Phase::Running) {
            self.urgent = true;
            self.push_ready(Ready::Tuned(values.into()));
        }
    }
}

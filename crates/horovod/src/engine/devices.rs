//! The devices of this rank, as all threads see them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use horovod_protocol::Device;

use super::backend::ChosenGpu;

/// Which devices there are, and whether they are busy.
pub(super) struct Devices {
    /// Kinds of devices on which tensors may lie.
    kinds: Vec<Device>,
    gpu: Arc<ChosenGpu>,
    /// Executions on devices that have not ended, as whoever makes progress last saw it.
    in_flight: AtomicUsize,
}

impl Devices {
    pub(super) fn new(kinds: Vec<Device>, gpu: Arc<ChosenGpu>) -> Self {
        Self {
            kinds,
            gpu,
            in_flight: AtomicUsize::new(0),
        }
    }

    /// Whether tensors may lie on such a device.
    pub(super) fn has(&self, kind: Device) -> bool {
        self.kinds.contains(&kind)
    }

    pub(super) fn gpu(&self) -> &ChosenGpu {
        &self.gpu
    }

    /// So many executions on devices have not ended.
    pub(super) fn note_in_flight(&self, count: usize) {
        self.in_flight.store(count, Ordering::Release);
    }

    /// Whether all executions on devices have ended.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) == 0
    }
}

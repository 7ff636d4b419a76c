//! The GPU of this rank, as all threads see it: the submission that chooses it, and how far its work is.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use horovod_diagnosis::{DevicePhase, DeviceStanding, OnDevice};
use horovod_gpu::{Executor, WorkPhase};
use horovod_protocol::Device;

use super::super::{Backend, Surroundings};
use super::adapter::how_to_choose;
use super::{Gpu, ready_of};
use crate::engine::accelerator::Accelerator;
use crate::error::Error;
use crate::tensor::Tensor;

/// The GPU of this rank.
pub(crate) struct ChosenGpu {
    ordinal: AtomicI32,
    timeout: Option<Duration>,
    /// Once it has been given something.
    executor: OnceLock<Arc<Executor>>,
}

impl ChosenGpu {
    pub(crate) fn new(timeout: Option<Duration>) -> Self {
        Self {
            ordinal: AtomicI32::new(-1),
            timeout,
            executor: OnceLock::new(),
        }
    }

    /// The one that was chosen first: this, if none was.
    pub(super) fn choose(&self, ordinal: i32) -> i32 {
        let (new, old) = (Ordering::AcqRel, Ordering::Acquire);
        let chosen = self.ordinal.compare_exchange(-1, ordinal, new, old);
        chosen.map_or_else(|before| before, |_| ordinal)
    }

    /// This executor runs all work on it.
    pub(super) fn is_served_by(&self, executor: Arc<Executor>) {
        let _ = self.executor.set(executor); // there is one
    }
}

impl Accelerator for ChosenGpu {
    fn kind(&self) -> Device {
        Device::Gpu
    }

    /// A rank uses one GPU, which the first submission chooses.
    fn claim(&self, tensors: &[Tensor]) -> Result<(), Error> {
        let ready = |tensor: &Tensor| Some(tensor.placement().and_then(ready_of)?.ordinal());
        if tensors.iter().any(|tensor| ready(tensor).is_none()) {
            return Err(Error::Invalid(
                "the tensor lies on a GPU, but it is not told on which, nor when its data are ready; submit it through \
                 horovod.torch, or copy it to host memory first"
                    .into(),
            ));
        }
        let mut chosen = None;
        for ordinal in tensors.iter().filter_map(ready) {
            let before = *chosen.get_or_insert_with(|| self.choose(ordinal));
            if before != ordinal {
                return Err(Error::Invalid(format!(
                    "the tensor is on GPU {ordinal}, but this rank communicates from GPU {before}; each rank uses one: {}",
                    how_to_choose()
                )));
            }
        }
        Ok(())
    }

    fn ordinal(&self) -> Option<i32> {
        Some(self.ordinal.load(Ordering::Acquire)).filter(|ordinal| *ordinal >= 0)
    }

    fn standing(&self) -> Option<DeviceStanding> {
        let progress = self.executor.get()?.progress();
        let at = progress.oldest.map(|oldest| OnDevice {
            seq: oldest.seq,
            key: (oldest.set, Arc::clone(&oldest.title)),
            phase: match oldest.phase {
                WorkPhase::Launching => DevicePhase::Launching,
                WorkPhase::AwaitsEvents => DevicePhase::AwaitsInputs,
                WorkPhase::Runs => DevicePhase::Runs,
            },
            ms: u64::try_from(oldest.since.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
        let given = progress.last;
        Some(DeviceStanding { given, at })
    }

    fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    fn backend(self: Arc<Self>, surroundings: &Surroundings<'_>) -> Box<dyn Backend> {
        Box::new(Gpu::new(self, surroundings))
    }
}

//! GPUs as adapters see them: events at submission, ends that streams wait for, and what was found of CUDA and NCCL.

use std::sync::{Arc, OnceLock};

use horovod_gpu::{Event, Launch};
use horovod_protocol::Device;

use crate::config::GpuOperations;
use crate::error::Error;
use crate::tensor::Tensor;

pub use crate::engine::placement::LaunchEnd;

pub use horovod_gpu::set_search;
pub use horovod_gpu::{
    Found, GpuError, GpuLoss, NCCL_SHARES_GPUS_SINCE, RawStream, Search, Stack, choose_stack,
    find_driver, find_nccl, is_initialised, loss, stack,
};

/// NCCL's version code, which scripts are told: `None` where its library is not found, or operations are to go through
/// host memory. CUDA is not initialised.
pub fn nccl_version(operations: GpuOperations) -> Option<i32> {
    let is_wanted = operations.meant() != GpuOperations::Host;
    Some(is_wanted.then(find_nccl)?.ok()?.version)
}

static HOW_TO_CHOOSE: OnceLock<String> = OnceLock::new();

/// Sets the advice of an error about tensors on several GPUs: how a script chooses one with its framework. The first
/// framework of a process sets the advice.
pub fn set_how_to_choose(advice: String) {
    let _ = HOW_TO_CHOOSE.set(advice);
}

pub(super) fn how_to_choose() -> &'static str {
    let set = HOW_TO_CHOOSE.get().map(String::as_str);
    set.unwrap_or("let each process see one GPU only, by CUDA_VISIBLE_DEVICES")
}

/// The error of an operation on a stream that is being captured into a CUDA graph.
fn capturing() -> Error {
    Error::Capturing(
        "The current stream is being captured into a CUDA graph, and a graph can hold no operation of Horovod, for the \
         ranks agree on each while it runs. Capture forward and backward without communication \
         (optimizer.no_sync()), and reduce outside of the graph.",
    )
}

impl From<GpuError> for Error {
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::Invalid(_) => Self::Invalid(error.to_string()),
            GpuError::Capturing => capturing(),
            other => Self::Internal(other.to_string()),
        }
    }
}

/// Where a stream was when a tensor was submitted: its bytes are there once this has passed on the device.
#[derive(Debug)]
pub struct Ready {
    event: Arc<Event>,
}

impl Ready {
    /// An event of all work that is in the caller's stream now, for all tensors of one call.
    ///
    /// # Errors
    /// No driver, no such device, a forked child, or a stream that is being captured into a CUDA graph.
    pub fn record(ordinal: i32, stream: RawStream) -> Result<Arc<Self>, Error> {
        Self::on(horovod_gpu::driver()?.device(ordinal)?, stream)
    }

    /// The same on the device of the stream, of CUDA's; `ordinal` is its number where the stream is a default one.
    ///
    /// # Errors
    /// As above.
    pub fn record_on_its_device(stream: RawStream, ordinal: i32) -> Result<Arc<Self>, Error> {
        choose_stack(Stack::Cuda)?;
        Self::on(horovod_gpu::driver()?.device_of(stream, ordinal)?, stream)
    }

    fn on(device: &'static horovod_gpu::Device, stream: RawStream) -> Result<Arc<Self>, Error> {
        if device.is_capturing(stream)? {
            return Err(capturing());
        }
        let event = Arc::new(device.record(stream)?);
        Ok(Arc::new(Self { event }))
    }

    /// The device's number in this process.
    pub fn ordinal(&self) -> i32 {
        self.event.device().ordinal()
    }

    pub(crate) fn device(&self) -> &'static horovod_gpu::Device {
        self.event.device()
    }

    pub(crate) fn event(&self) -> Arc<Event> {
        self.event.clone()
    }
}

impl Tensor {
    /// In the memory of a GPU, with the event of its submission, which all tensors of a call share.
    ///
    /// # Safety
    /// The requirements of [`Self::new`] for the addresses hold on that GPU. The input counts as written once the event
    /// has passed, and the output as free to be written.
    #[must_use]
    pub unsafe fn on_gpu(self, ready: Arc<Ready>) -> Self {
        // SAFETY: the caller's promise.
        unsafe { self.on(Device::Gpu) }.placed(ready)
    }
}

/// Run what has a framework allocate memory of a GPU, on a thread of ours: with that GPU as the thread's current device, and
/// so that what other threads capture into CUDA graphs is left alone.
///
/// # Errors
/// No driver, no such device, or a forked child.
pub fn on_device<T>(ordinal: i32, body: impl FnOnce() -> T) -> Result<T, Error> {
    let device = horovod_gpu::driver()?.device(ordinal)?;
    Ok(device.entered_relaxed(|| Ok(body()))?)
}

/// A number in a GPU's memory, as it is when `ready` has passed, for which the host waits.
///
/// # Safety
/// The number lies at this address on the GPU of `ready`, and stays there unchanged until this returns.
pub unsafe fn read_number(at: *const i64, ready: &Ready) -> Result<i64, Error> {
    let at = at.expose_provenance() as u64;
    // SAFETY: the caller's promise.
    Ok(unsafe { ready.device().read_number(at, &ready.event)? })
}

/// An end that is an event of CUDA.
#[derive(Debug)]
pub(crate) struct EventEnd {
    pub(crate) event: Arc<Event>,
    pub(crate) launch: Launch,
}

impl LaunchEnd for EventEnd {
    fn ordinal(&self) -> i32 {
        self.event.device().ordinal()
    }

    fn order(&self, stream: RawStream) -> Result<(), Error> {
        // A wait for what is not part of a capture would end it with an error of CUDA's.
        if self.event.device().is_capturing(stream)? {
            return Err(capturing());
        }
        Ok(self.event.order(stream)?)
    }

    fn has_passed(&self) -> Result<bool, Error> {
        Ok(self.event.has_passed()?)
    }

    fn ended_well(&self) -> Option<bool> {
        self.launch.ended().map(|ended| ended.is_ok())
    }
}

//! Values that pass through the engine unread, between adapters and devices: where memory lies, and the end of a launch.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use horovod_gpu::RawStream;

use crate::error::Error;

/// Facts about a tensor's memory that only an adapter and a device use, such as the event of the caller's stream. An
/// adapter gives them to [`Tensor::placed`](crate::Tensor::placed). Only the
/// [`Accelerator`](super::accelerator::Accelerator) and its [`Backend`](super::backend::Backend) read them.
pub type Placement = Arc<dyn Any + Send + Sync>;

/// The end of an operation that was launched on a device.
pub trait LaunchEnd: Send + Sync + fmt::Debug {
    /// Returns the device's number in this process.
    fn ordinal(&self) -> i32;

    /// Makes a stream of the framework wait for this end; the host does not wait.
    ///
    /// # Errors
    /// An error of the device, or the stream is being captured into a graph.
    fn order(&self, stream: RawStream) -> Result<(), Error>;

    /// Returns whether the device has passed this end.
    ///
    /// # Errors
    /// An error of the device.
    fn has_passed(&self) -> Result<bool, Error>;

    /// Returns whether the operation has succeeded; `None` if it has not ended. After an abort the device may have
    /// passed the end without a result.
    fn ended_well(&self) -> Option<bool>;
}

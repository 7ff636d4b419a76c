//! Streams: a framework's, which are only waited for and recorded on, and our own.

use std::ffi::c_void;
use std::sync::Arc;

use crate::device::Device;
use crate::error::GpuError;
use crate::load::check_process;

/// A framework's `CUstream`. Null is the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(pub *mut c_void);

// SAFETY: a name for something of the driver's, whose functions may be called from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// A stream of our own. Clones are the same stream, which is destroyed after the last of them.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    raw: RawStream,
    device: &'static Device,
}

impl Stream {
    pub(crate) fn new(device: &'static Device, raw: RawStream) -> Self {
        Self(Arc::new(Inner { raw, device }))
    }

    /// Its handle.
    pub fn raw(&self) -> RawStream {
        self.0.raw
    }

    /// The device on which its work runs.
    pub fn device(&self) -> &'static Device {
        self.0.device
    }

    /// Whether all its work is done.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        let device = self.0.device;
        device.entered_relaxed(|| {
            // SAFETY: a stream that exists.
            let code = unsafe { (device.driver().table.stream_query)(self.0.raw.0) };
            device.driver().ready("cuStreamQuery", code)
        })
    }

    /// Blocks until all its work is done.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let device = self.0.device;
        device.entered_relaxed(|| {
            // SAFETY: a stream that exists.
            let code = unsafe { (device.driver().table.stream_synchronize)(self.0.raw.0) };
            device.driver().checked("cuStreamSynchronize", code)
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if check_process().is_err() {
            return;
        }
        let result = self.device.entered(|| {
            // SAFETY: ours, and this was the last that named it. Work in it goes on.
            let code = unsafe { (self.device.driver().table.stream_destroy)(self.raw.0) };
            self.device.driver().checked("cuStreamDestroy", code)
        });
        if let Err(error) = result {
            tracing::debug!(%error, "a stream was not destroyed");
        }
    }
}

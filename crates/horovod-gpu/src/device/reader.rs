//! Numbers in a device's memory, for which the host waits.

use std::sync::{Mutex, PoisonError};

use crate::device::Device;
use crate::device::event::Event;
use crate::device::memory::PinnedMemory;
use crate::device::stream::Stream;
use crate::error::GpuError;
use crate::load::check_process;

/// Reads one number at a time.
#[derive(Debug)]
struct Reader {
    stream: Stream,
    /// Pinned, as a copy to other memory waits within CUDA, where it may hold up calls of other threads.
    number: PinnedMemory,
}

/// Readers that nobody uses: as many as there were threads that read at a time. One for all would have a thread wait for
/// what another one waits for.
#[derive(Debug, Default)]
pub(crate) struct Readers(Mutex<Vec<Reader>>);

impl Reader {
    fn new(device: &'static Device) -> Result<Self, GpuError> {
        Ok(Self {
            stream: device.create_stream()?,
            number: device.allocate_pinned(size_of::<i64>())?,
        })
    }

    /// # Safety
    /// As [`Device::read_number`].
    unsafe fn read(&self, at: u64, ready: &Event) -> Result<i64, GpuError> {
        let device = ready.device();
        let number = self.number.as_mut_ptr();
        ready.order(self.stream.raw())?;
        // SAFETY: the caller's promise; this reader has its memory until the copy has ended.
        unsafe { device.copy_to_host(number, at, size_of::<i64>(), &self.stream)? };
        device.record(self.stream.raw())?.wait()?;
        // SAFETY: so many bytes, which nobody writes any more.
        Ok(unsafe { number.cast::<i64>().read() })
    }
}

impl Device {
    /// A number in its memory, as it is when `ready`, an event of this device, has passed; the host waits for that.
    ///
    /// # Safety
    /// The number lies at this address, and stays there unchanged until this returns.
    pub unsafe fn read_number(&'static self, at: u64, ready: &Event) -> Result<i64, GpuError> {
        check_process()?;
        let free = || {
            self.readers()
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let idle = free().pop();
        let reader = match idle {
            Some(reader) => reader,
            None => Reader::new(self)?,
        };
        // SAFETY: the caller's promise.
        let read = unsafe { reader.read(at, ready) };
        match &read {
            Ok(_) => free().push(reader),
            // Nobody knows whether the copy has ended.
            Err(_) => std::mem::forget(reader),
        }
        read
    }
}

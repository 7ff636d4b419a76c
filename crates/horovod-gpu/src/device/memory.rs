//! Memory of a device, pinned memory of the host, and copies between them in a stream's order.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

use crate::device::Device;
use crate::device::stream::Stream;
use crate::error::{GpuError, MemoryPlace, OUT_OF_MEMORY};
use crate::load::check_process;

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
const HOST_ALLOC_PORTABLE: u32 = 1;

/// Memory of a device, freed when dropped: allocated for a stream in the order of that stream, otherwise at once, after
/// the device has come to rest.
#[derive(Debug)]
pub struct DeviceMemory {
    address: u64,
    bytes: usize,
    device: &'static Device,
    stream: Option<Stream>,
}

impl DeviceMemory {
    /// Where it begins; at least 256-byte aligned.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it was asked for with a length of 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let result = self.device.entered_relaxed(|| {
            let driver = self.device.driver();
            // SAFETY: ours. Users in other streams have ordered their work before this call.
            let code = unsafe {
                match &self.stream {
                    Some(stream) => (driver.table.mem_free_async)(self.address, stream.raw().0),
                    None => (driver.table.mem_free)(self.address),
                }
            };
            driver.checked("cuMemFree", code)
        });
        if let Err(error) = result {
            tracing::debug!(%error, "device memory was not freed");
        }
    }
}

/// Memory of the host that the device reads and writes while the CPU does something else.
#[derive(Debug)]
pub struct PinnedMemory {
    start: NonNull<u8>,
    bytes: usize,
    device: &'static Device,
}

// SAFETY: plain memory of this process, owned by this.
unsafe impl Send for PinnedMemory {}
// SAFETY: a shared reference only tells where it is.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Where it begins.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it was asked for with a length of 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let result = self.device.entered_relaxed(|| {
            let driver = self.device.driver();
            // SAFETY: ours; the driver waits for copies that use it.
            let code = unsafe { (driver.table.mem_free_host)(self.start.as_ptr().cast()) };
            driver.checked("cuMemFreeHost", code)
        });
        if let Err(error) = result {
            tracing::debug!(%error, "pinned memory was not freed");
        }
    }
}

impl Device {
    /// Memory that no stream owns. The call may wait for the device: for set-up.
    pub fn allocate(&'static self, bytes: usize) -> Result<DeviceMemory, GpuError> {
        self.entered_relaxed(|| {
            let mut address = 0;
            // SAFETY: writes one address. A length of 0 is an error of the driver's.
            let code = unsafe { (self.driver().table.mem_alloc)(&raw mut address, bytes.max(1)) };
            self.allocated("cuMemAlloc", code, self.place(), bytes)?;
            Ok(DeviceMemory {
                address,
                bytes,
                device: self,
                stream: None,
            })
        })
    }

    /// Memory that is there for work that the stream gets from now on, and freed in its order; as [`Self::allocate`] on
    /// devices that cannot.
    pub fn allocate_on(
        &'static self,
        stream: &Stream,
        bytes: usize,
    ) -> Result<DeviceMemory, GpuError> {
        if !self.has_memory_pools() {
            return self.allocate(bytes);
        }
        self.entered(|| {
            let mut address = 0;
            // SAFETY: writes one address; the stream exists.
            let code = unsafe {
                (self.driver().table.mem_alloc_async)(
                    &raw mut address,
                    bytes.max(1),
                    stream.raw().0,
                )
            };
            self.allocated("cuMemAllocAsync", code, self.place(), bytes)?;
            Ok(DeviceMemory {
                address,
                bytes,
                device: self,
                stream: Some(stream.clone()),
            })
        })
    }

    /// Pinned memory of the host. The call may wait for the device: for set-up.
    pub fn allocate_pinned(&'static self, bytes: usize) -> Result<PinnedMemory, GpuError> {
        self.entered_relaxed(|| {
            let mut start: *mut c_void = null_mut();
            // SAFETY: writes one address.
            let code = unsafe {
                (self.driver().table.mem_host_alloc)(
                    &raw mut start,
                    bytes.max(1),
                    HOST_ALLOC_PORTABLE,
                )
            };
            self.allocated("cuMemHostAlloc", code, MemoryPlace::Pinned, bytes)?;
            let start = NonNull::new(start.cast())
                .ok_or_else(|| GpuError::Invalid("cuMemHostAlloc gave no memory".to_owned()))?;
            Ok(PinnedMemory {
                start,
                bytes,
                device: self,
            })
        })
    }

    fn place(&self) -> MemoryPlace {
        MemoryPlace::Device(self.ordinal())
    }

    /// Checks the result of an allocation. The error for exhausted memory has all details that are known.
    fn allocated(
        &'static self,
        call: &'static str,
        code: i32,
        place: MemoryPlace,
        bytes: usize,
    ) -> Result<(), GpuError> {
        match self.driver().checked(call, code) {
            Err(GpuError::Cuda { call, text, .. }) if code == OUT_OF_MEMORY => {
                let free = match place {
                    MemoryPlace::Device(_) => self.free_memory().ok(),
                    MemoryPlace::Pinned => None,
                };
                Err(GpuError::OutOfMemory {
                    call,
                    text,
                    place,
                    bytes,
                    free,
                })
            }
            result => result,
        }
    }

    /// Copies from the device in the stream's order.
    ///
    /// # Safety
    /// Both ranges are valid, and stay so and unused by others until the stream has passed the copy.
    pub unsafe fn copy_to_host(
        &'static self,
        dst: *mut u8,
        src: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        self.copied("cuMemcpyDtoHAsync", bytes, || {
            // SAFETY: the caller's promise.
            unsafe {
                (self.driver().table.memcpy_dtoh_async)(dst.cast(), src, bytes, stream.raw().0)
            }
        })
    }

    /// Copies to the device in the stream's order.
    ///
    /// # Safety
    /// As [`Self::copy_to_host`].
    pub unsafe fn copy_to_device(
        &'static self,
        dst: u64,
        src: *const u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        self.copied("cuMemcpyHtoDAsync", bytes, || {
            // SAFETY: the caller's promise.
            unsafe {
                (self.driver().table.memcpy_htod_async)(dst, src.cast(), bytes, stream.raw().0)
            }
        })
    }

    /// Copies within the device in the stream's order; the ranges do not overlap.
    ///
    /// # Safety
    /// As [`Self::copy_to_host`].
    pub unsafe fn copy_within(
        &'static self,
        dst: u64,
        src: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        self.copied("cuMemcpyDtoDAsync", bytes, || {
            // SAFETY: the caller's promise.
            unsafe { (self.driver().table.memcpy_dtod_async)(dst, src, bytes, stream.raw().0) }
        })
    }

    fn copied(
        &'static self,
        call: &'static str,
        bytes: usize,
        copy: impl FnOnce() -> i32,
    ) -> Result<(), GpuError> {
        check_process()?;
        if bytes == 0 {
            return Ok(());
        }
        self.entered(|| self.driver().checked(call, copy()))
    }
}

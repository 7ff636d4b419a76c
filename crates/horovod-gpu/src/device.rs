//! One GPU: what it is, its primary context, and what is made on it; and the list of those in use.

pub(crate) mod event;
pub(crate) mod kernels;
pub(crate) mod memory;
pub(crate) mod reader;
pub(crate) mod stream;

use std::ffi::{c_char, c_int, c_uint};
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock, PoisonError};

use self::event::{Event, EventPool, Timing};
use self::kernels::Kernels;
use self::reader::Readers;
use self::stream::{RawStream, Stream};
use crate::driver::{Driver, Handle};
use crate::error::GpuError;
use crate::hip;
use crate::load::{Stack, check_process};

// Attributes of a device (`CUdevice_attribute`).
const MULTIPROCESSOR_COUNT: c_int = 16;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MEMORY_POOLS_SUPPORTED: c_int = 115;
/// The same of AMD's GPUs.
const OF_ROCM: [(c_int, c_int); 4] = [
    (MULTIPROCESSOR_COUNT, hip::MULTIPROCESSOR_COUNT),
    (COMPUTE_CAPABILITY_MAJOR, hip::COMPUTE_CAPABILITY_MAJOR),
    (COMPUTE_CAPABILITY_MINOR, hip::COMPUTE_CAPABILITY_MINOR),
    (MEMORY_POOLS_SUPPORTED, hip::MEMORY_POOLS_SUPPORTED),
];

/// `CU_STREAM_NON_BLOCKING`: no implicit order with the legacy default stream, on which frameworks work.
const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls of this thread do not invalidate captures of others.
pub(crate) const CAPTURE_MODE_RELAXED: c_int = 2;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`: the legacy default stream, while one that it would wait for is captured.
const CAPTURE_IMPLICIT: c_int = 906;

/// `CU_STREAM_PER_THREAD`; smaller ones are null and `CU_STREAM_LEGACY`.
const GREATEST_DEFAULT_STREAM: usize = 2;

/// Devices that were asked for; they stay for the life of the process.
static DEVICES: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());

/// A GPU of this process, with its primary context.
pub struct Device {
    driver: &'static Driver,
    ordinal: i32,
    context: Handle,
    uuid: [u8; 16],
    compute_capability: (i32, i32),
    multiprocessors: i32,
    has_memory_pools: bool,
    name: String,
    events: EventPool,
    timed_events: EventPool,
    readers: Readers,
    kernels: OnceLock<Result<Kernels, GpuError>>,
}

// SAFETY: its context is a name that any thread may make current; the rest is plain data, or locked.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Driver {
    /// The device of this number, as frameworks number them too. Its primary context is retained at the first call and
    /// never released: it is the one that frameworks use.
    pub fn device(&'static self, ordinal: i32) -> Result<&'static Device, GpuError> {
        check_process()?;
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.iter().find(|device| device.ordinal() == ordinal) {
            return Ok(device);
        }
        let count = self.device_count()?;
        if !(0..count).contains(&ordinal) {
            return Err(GpuError::Invalid(format!(
                "there is no GPU {ordinal}: this process sees {count}, numbered from 0"
            )));
        }
        let device = Box::leak(Box::new(Device::open(self, ordinal)?));
        devices.push(device);
        Ok(device)
    }

    /// The device of a stream. `given` is its number where the stream is a default one, which there is on each device, or
    /// this driver does not tell: what else frameworks number may be other than CUDA's.
    pub fn device_of(
        &'static self,
        stream: RawStream,
        given: i32,
    ) -> Result<&'static Device, GpuError> {
        check_process()?;
        let is_default = stream.0.addr() <= GREATEST_DEFAULT_STREAM;
        let of_stream = if is_default {
            None
        } else {
            self.ordinal_of(stream)?
        };
        self.device(of_stream.unwrap_or(given))
    }

    fn ordinal_of(&self, stream: RawStream) -> Result<Option<i32>, GpuError> {
        let table = &self.table;
        let (Some(stream_get_ctx), Some(ctx_get_device)) =
            (table.stream_get_ctx, table.ctx_get_device)
        else {
            return Ok(None);
        };
        let mut context = null_mut();
        // SAFETY: a stream of the caller's, and a place for one handle.
        let code = unsafe { stream_get_ctx(stream.0, &raw mut context) };
        self.checked("cuStreamGetCtx", code)?;
        let known = {
            let devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
            devices
                .iter()
                .find(|device| device.has_context(context))
                .map(|device| device.ordinal())
        };
        if known.is_some() {
            return Ok(known);
        }
        let (mut before, mut device) = (null_mut(), 0);
        // SAFETY: places for a handle and a number; a context of a stream that exists, and then what was current.
        unsafe {
            let code = (table.ctx_get_current)(&raw mut before);
            self.checked("cuCtxGetCurrent", code)?;
            let code = (table.ctx_set_current)(context);
            self.checked("cuCtxSetCurrent", code)?;
            let got = ctx_get_device(&raw mut device);
            let code = (table.ctx_set_current)(before);
            self.checked("cuCtxGetDevice", got)?;
            self.checked("cuCtxSetCurrent", code)?;
        }
        for ordinal in 0..self.device_count()? {
            let mut at = -1;
            // SAFETY: writes one number.
            let code = unsafe { (table.device_get)(&raw mut at, ordinal) };
            self.checked("cuDeviceGet", code)?;
            if at == device {
                return Ok(Some(ordinal));
            }
        }
        Ok(None)
    }
}

impl Device {
    pub(crate) fn open(driver: &'static Driver, ordinal: i32) -> Result<Self, GpuError> {
        let table = &driver.table;
        let (mut device, mut uuid, mut context) = (0, [0; 16], null_mut());
        // SAFETY: each writes one value of the declared type.
        unsafe {
            let code = (table.device_get)(&raw mut device, ordinal);
            driver.checked("cuDeviceGet", code)?;
            let code = (table.device_get_uuid)(&raw mut uuid, device);
            driver.checked("cuDeviceGetUuid", code)?;
            let code = (table.device_primary_ctx_retain)(&raw mut context, device);
            driver.checked("cuDevicePrimaryCtxRetain", code)?;
        }
        if driver.stack() == Stack::Rocm {
            add_place(driver, device, &mut uuid);
        }
        let attribute = |attribute| {
            let of_rocm = OF_ROCM.iter().find(|(cuda, _)| *cuda == attribute);
            let attribute = match (driver.stack(), of_rocm) {
                (Stack::Rocm, Some((_, hip))) => *hip,
                _ => attribute,
            };
            let mut value = 0;
            // SAFETY: writes one integer.
            let code = unsafe { (table.device_get_attribute)(&raw mut value, attribute, device) };
            driver.checked("cuDeviceGetAttribute", code).map(|()| value)
        };
        Ok(Self {
            driver,
            ordinal,
            context,
            uuid,
            compute_capability: (
                attribute(COMPUTE_CAPABILITY_MAJOR)?,
                attribute(COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(MULTIPROCESSOR_COUNT)?,
            has_memory_pools: attribute(MEMORY_POOLS_SUPPORTED).unwrap_or(0) != 0,
            name: device_name(driver, device),
            events: EventPool::default(),
            timed_events: EventPool::default(),
            readers: Readers::default(),
            kernels: OnceLock::new(),
        })
    }

    /// Its number in this process.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    pub(crate) fn has_context(&self, context: Handle) -> bool {
        self.context == context
    }

    /// Identity of the GPU on its host, or of a part of one (MIG).
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Major and minor.
    pub fn compute_capability(&self) -> (i32, i32) {
        self.compute_capability
    }

    /// Streaming multiprocessors.
    pub fn multiprocessors(&self) -> i32 {
        self.multiprocessors
    }

    /// Its model, empty if the driver does not tell.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn readers(&self) -> &Readers {
        &self.readers
    }

    pub(crate) fn has_memory_pools(&self) -> bool {
        self.has_memory_pools
    }

    /// Makes the context current on this thread for good, and lets the thread call CUDA while others capture graphs.
    pub fn adopt_thread(&'static self) -> Result<(), GpuError> {
        check_process()?;
        self.set_current(self.context)?;
        self.exchange_capture_mode(CAPTURE_MODE_RELAXED).map(|_| ())
    }

    /// Runs `body` with the context current on this thread; what was current before is so again afterwards.
    pub fn entered<T>(
        &'static self,
        body: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        check_process()?;
        let mut before = null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (self.driver.table.ctx_get_current)(&raw mut before) };
        self.driver.checked("cuCtxGetCurrent", code)?;
        if before == self.context {
            return body();
        }
        self.set_current(self.context)?;
        let _restored = Restored {
            device: self,
            before,
        };
        body()
    }

    /// As [`Self::entered`], for calls that may synchronise, such as to ask for events or to allocate: in `body` they
    /// leave alone what this thread or another one captures into a CUDA graph, which they would end otherwise.
    pub fn entered_relaxed<T>(
        &'static self,
        body: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        self.entered(|| {
            let before = self.exchange_capture_mode(CAPTURE_MODE_RELAXED)?;
            let _restored = (before != CAPTURE_MODE_RELAXED).then_some(RestoredCaptureMode {
                device: self,
                before,
            });
            body()
        })
    }

    /// Sets the mode of this thread, and returns what it was.
    fn exchange_capture_mode(&self, mut mode: c_int) -> Result<c_int, GpuError> {
        // SAFETY: exchanges one integer.
        let code =
            unsafe { (self.driver.table.thread_exchange_stream_capture_mode)(&raw mut mode) };
        self.driver
            .checked("cuThreadExchangeStreamCaptureMode", code)?;
        Ok(mode)
    }

    fn set_current(&self, context: Handle) -> Result<(), GpuError> {
        // SAFETY: a context of this process, or none.
        let code = unsafe { (self.driver.table.ctx_set_current)(context) };
        self.driver.checked("cuCtxSetCurrent", code)
    }

    /// A stream without implicit order with others, of the greatest priority.
    pub fn create_stream(&'static self) -> Result<Stream, GpuError> {
        self.entered(|| {
            let table = &self.driver.table;
            let (mut least, mut greatest, mut stream) = (0, 0, null_mut());
            // SAFETY: writes two integers.
            let code =
                unsafe { (table.ctx_get_stream_priority_range)(&raw mut least, &raw mut greatest) };
            self.driver.checked("cuCtxGetStreamPriorityRange", code)?;
            // SAFETY: writes one handle.
            let code = unsafe {
                (table.stream_create_with_priority)(&raw mut stream, STREAM_NON_BLOCKING, greatest)
            };
            self.driver.checked("cuStreamCreateWithPriority", code)?;
            Ok(Stream::new(self, RawStream(stream)))
        })
    }

    /// An event after all work that is in the stream now.
    pub fn record(&'static self, stream: RawStream) -> Result<Event, GpuError> {
        Event::record(self, &self.events, Timing::Off, stream)
    }

    /// The same with a point in time, for [`Event::milliseconds_since`].
    pub fn record_timed(&'static self, stream: RawStream) -> Result<Event, GpuError> {
        Event::record(self, &self.timed_events, Timing::On, stream)
    }

    /// Whether work for the stream would go into a graph instead of running.
    pub fn is_capturing(&'static self, stream: RawStream) -> Result<bool, GpuError> {
        self.entered(|| {
            let mut status = 0;
            // SAFETY: a stream of the caller's, and a place for one integer.
            let code =
                unsafe { (self.driver.table.stream_is_capturing)(stream.0, &raw mut status) };
            if code == CAPTURE_IMPLICIT {
                return Ok(true);
            }
            self.driver.checked("cuStreamIsCapturing", code)?;
            Ok(status != 0)
        })
    }

    /// Free and all bytes of memory.
    pub fn free_memory(&'static self) -> Result<(usize, usize), GpuError> {
        let Some(mem_get_info) = self.driver.table.mem_get_info else {
            return Err(GpuError::Invalid(
                "this driver does not tell how much memory is free (it lacks cuMemGetInfo_v2)"
                    .to_owned(),
            ));
        };
        self.entered(|| {
            let (mut free, mut all) = (0, 0);
            // SAFETY: writes two sizes.
            let code = unsafe { mem_get_info(&raw mut free, &raw mut all) };
            self.driver.checked("cuMemGetInfo", code)?;
            Ok((free, all))
        })
    }

    /// Whether this device can do what NCCL has no operation for. CUDA's driver has a compiler in it; AMD's is a library of
    /// its own, which may be missing, so kernels are compiled here, before ranks agree on what they do.
    pub fn check_kernels(&'static self) -> Result<(), GpuError> {
        match self.driver.stack() {
            Stack::Cuda => Ok(()),
            Stack::Rocm => self.kernels().map(|_| ()),
        }
    }

    /// The kernels, which the first call loads: they are compiled, which takes a moment.
    pub fn kernels(&'static self) -> Result<&'static Kernels, GpuError> {
        check_process()?;
        let kernels = self.kernels.get_or_init(|| Kernels::load(self));
        kernels.as_ref().map_err(GpuError::clone)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.ordinal)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Makes the former context current again, also when a panic passes through.
struct Restored {
    device: &'static Device,
    before: Handle,
}

impl Drop for Restored {
    fn drop(&mut self) {
        if let Err(error) = self.device.set_current(self.before) {
            tracing::debug!(%error, "the former context is not current again");
        }
    }
}

/// Gives the thread its former capture mode again, in the same cases.
struct RestoredCaptureMode {
    device: &'static Device,
    before: c_int,
}

impl Drop for RestoredCaptureMode {
    fn drop(&mut self) {
        if let Err(error) = self.device.exchange_capture_mode(self.before) {
            tracing::debug!(%error, "the thread keeps another capture mode");
        }
    }
}

/// Makes out of what may be the same for all GPUs of a model, by where on its host a GPU is, what tells it apart.
fn add_place(driver: &Driver, device: c_int, uuid: &mut [u8; 16]) {
    let mut place = [0u8; 16];
    if let Some(get_pci_bus_id) = driver.table.device_get_pci_bus_id {
        // SAFETY: writes at most so many bytes, a NUL included.
        unsafe { get_pci_bus_id(place.as_mut_ptr().cast::<c_char>(), 16, device) };
    }
    for (byte, other) in uuid.iter_mut().zip(place) {
        *byte ^= other;
    }
}

fn device_name(driver: &Driver, device: c_int) -> String {
    let mut name = [0u8; 128];
    if let Some(device_get_name) = driver.table.device_get_name {
        // SAFETY: writes at most so many bytes, a NUL included.
        unsafe { device_get_name(name.as_mut_ptr().cast::<c_char>(), 127, device) };
    }
    let length = name.iter().position(|&byte| byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&name[..length]).into_owned()
}

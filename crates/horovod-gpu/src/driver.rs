//! CUDA's driver, or AMD's library that stands for it: its functions, and its errors as ours.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null;

use crate::error::GpuError;
use crate::hip::{self, HipTexts};
use crate::load::{Library, Stack, check_process, file_of, function_table};

/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`.
pub(crate) type Handle = *mut c_void;

function_table! {
    /// Functions of `libcuda.so.1`, by the names that mean the legacy default stream where a stream is null. All of
    /// them are in every driver since CUDA 12.0. Module `hip` has the names in AMD's library.
    struct DriverTable;
    required {
        init = c"cuInit"(c_uint);
        driver_get_version = c"cuDriverGetVersion"(*mut c_int);
        device_get = c"cuDeviceGet"(*mut c_int, c_int);
        device_get_count = c"cuDeviceGetCount"(*mut c_int);
        device_get_attribute = c"cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
        device_get_uuid = c"cuDeviceGetUuid_v2"(*mut [u8; 16], c_int);
        device_primary_ctx_retain = c"cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
        ctx_get_current = c"cuCtxGetCurrent"(*mut Handle);
        ctx_set_current = c"cuCtxSetCurrent"(Handle);
        ctx_get_stream_priority_range = c"cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int);
        stream_create_with_priority = c"cuStreamCreateWithPriority"(*mut Handle, c_uint, c_int);
        stream_destroy = c"cuStreamDestroy_v2"(Handle);
        stream_query = c"cuStreamQuery"(Handle);
        stream_synchronize = c"cuStreamSynchronize"(Handle);
        stream_wait_event = c"cuStreamWaitEvent"(Handle, Handle, c_uint);
        stream_is_capturing = c"cuStreamIsCapturing"(Handle, *mut c_int);
        thread_exchange_stream_capture_mode = c"cuThreadExchangeStreamCaptureMode"(*mut c_int);
        event_create = c"cuEventCreate"(*mut Handle, c_uint);
        event_record = c"cuEventRecord"(Handle, Handle);
        event_query = c"cuEventQuery"(Handle);
        event_synchronize = c"cuEventSynchronize"(Handle);
        event_elapsed_time = c"cuEventElapsedTime"(*mut f32, Handle, Handle);
        memcpy_dtod_async = c"cuMemcpyDtoDAsync_v2"(u64, u64, usize, Handle);
        memcpy_htod_async = c"cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle);
        memcpy_dtoh_async = c"cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, Handle);
        mem_alloc = c"cuMemAlloc_v2"(*mut u64, usize);
        mem_free = c"cuMemFree_v2"(u64);
        mem_alloc_async = c"cuMemAllocAsync"(*mut u64, usize, Handle);
        mem_free_async = c"cuMemFreeAsync"(u64, Handle);
        mem_host_alloc = c"cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
        mem_free_host = c"cuMemFreeHost"(*mut c_void);
        module_load_data = c"cuModuleLoadData"(*mut Handle, *const c_void);
        module_get_function = c"cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
        launch_kernel = c"cuLaunchKernel"(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
            *mut *mut c_void, *mut *mut c_void
        );
    }
    optional {
        device_get_name = c"cuDeviceGetName"(*mut c_char, c_int, c_int);
        device_get_pci_bus_id = c"cuDeviceGetPCIBusId"(*mut c_char, c_int, c_int);
        mem_get_info = c"cuMemGetInfo_v2"(*mut usize, *mut usize);
        stream_get_ctx = c"cuStreamGetCtx"(Handle, *mut Handle);
        ctx_get_device = c"cuCtxGetDevice"(*mut c_int);
    }
}

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `CUDA_ERROR_NOT_READY`.
pub(crate) const NOT_READY: c_int = 600;

function_table! {
    /// Names and texts of errors. AMD's library has these functions with another signature.
    struct CudaTexts;
    required {
        get_error_name = c"cuGetErrorName"(c_int, *mut *const c_char);
        get_error_string = c"cuGetErrorString"(c_int, *mut *const c_char);
    }
    optional {}
}

/// Functions that tell an error's name and text.
#[derive(Clone)]
enum Texts {
    Cuda(CudaTexts),
    Rocm(HipTexts),
}

/// The functions of one stack's library.
#[derive(Clone)]
pub(crate) struct DriverFunctions {
    pub(crate) stack: Stack,
    table: DriverTable,
    texts: Texts,
}

impl DriverFunctions {
    /// The functions of a library, its version and the address of one of its functions.
    pub(crate) fn of_library(
        stack: Stack,
        library: &Library,
    ) -> Result<(Self, i32, *const c_void), String> {
        let (table, texts) = match stack {
            Stack::Cuda => (
                DriverTable::read(library, Some)?,
                Texts::Cuda(CudaTexts::read(library, Some)?),
            ),
            Stack::Rocm => (
                DriverTable::read(library, hip::name_of)?,
                Texts::Rocm(HipTexts::read(library, Some)?),
            ),
        };
        let functions = Self {
            stack,
            table,
            texts,
        };
        let function = functions.table.driver_get_version as *const c_void;
        if stack == Stack::Rocm {
            let version = file_of(function).map_or(0, |file| hip::version_of(&file));
            return Ok((functions, version, function));
        }
        let mut version = 0;
        // SAFETY: needs no initialisation, writes one integer.
        let code = unsafe { (functions.table.driver_get_version)(&raw mut version) };
        if code != SUCCESS {
            let error = functions.error("cuDriverGetVersion", code);
            return Err(error.to_string());
        }
        Ok((functions, version, function))
    }

    /// The library's texts for a code.
    fn error(&self, call: &'static str, code: c_int) -> GpuError {
        crate::error::remember_if_sticky(code);
        let (mut name, mut text) = (null(), null());
        // SAFETY: places for two constant strings, which stay null for codes that this driver does not know; or
        // functions that return such.
        let texts = unsafe {
            match &self.texts {
                Texts::Cuda(texts) => {
                    (texts.get_error_name)(code, &raw mut name);
                    (texts.get_error_string)(code, &raw mut text);
                }
                Texts::Rocm(texts) => {
                    name = (texts.get_error_name)(code);
                    text = (texts.get_error_string)(code);
                }
            }
            [name, text].map(|text| {
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            })
        };
        let text = match texts {
            // Older ones of AMD's have no text but the name.
            [Some(name), Some(text)] if name == text => name,
            [Some(name), Some(text)] => format!("{name}: {text}"),
            [Some(one), None] | [None, Some(one)] => one,
            [None, None] => "an unknown error".to_owned(),
        };
        let call = match self.stack {
            Stack::Cuda => call,
            Stack::Rocm => hip::call_name(call),
        };
        GpuError::Cuda { call, code, text }
    }
}

/// The driver, initialised.
pub struct Driver {
    pub(crate) table: DriverTable,
    functions: DriverFunctions,
    version: i32,
}

impl Driver {
    pub(crate) fn initialise(functions: &DriverFunctions, version: i32) -> Result<Self, GpuError> {
        // SAFETY: no pointers; zero is the only value of its flags.
        let code = unsafe { (functions.table.init)(0) };
        if code != SUCCESS {
            return Err(functions.error("cuInit", code));
        }
        Ok(Self {
            table: functions.table.clone(),
            functions: functions.clone(),
            version,
        })
    }

    /// Whose library it is.
    pub fn stack(&self) -> Stack {
        self.functions.stack
    }

    /// The newest CUDA that the driver supports: 12080 is 12.8. Of ROCm, 70200000 is 7.2, and 0 is not known.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Devices that this process sees.
    pub fn device_count(&self) -> Result<i32, GpuError> {
        check_process()?;
        let mut count = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (self.table.device_get_count)(&raw mut count) };
        self.checked("cuDeviceGetCount", code)?;
        Ok(count)
    }

    pub(crate) fn error(&self, call: &'static str, code: c_int) -> GpuError {
        self.functions.error(call, code)
    }

    pub(crate) fn checked(&self, call: &'static str, code: c_int) -> Result<(), GpuError> {
        if code == SUCCESS {
            Ok(())
        } else {
            Err(self.error(call, code))
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

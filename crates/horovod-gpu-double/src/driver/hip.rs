//! HIP's functions (`libamdhip64.so`, `libhiprtc.so`): the driver's under other names, with HIP's signatures. Logs, counts
//! and faults know them by the names of CUDA's driver.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use super::context::*;
use super::memory::*;
use super::module::*;
use super::stream::*;
use crate::codes;
use crate::handles::Handle;
use crate::module::HIP_CODE;

/// HIP's version, of ROCm 7.2.
const VERSION: c_int = 70_226_015;

/// A function of CUDA's driver by the name, and with the argument types, that HIP has for it.
macro_rules! hip {
    ($($hip:ident($($argument:ident: $type:ty),*) = $cuda:ident($($value:expr),*);)*) => {
        $(
            #[doc = concat!("`", stringify!($hip), "`.")]
            #[unsafe(no_mangle)]
            #[allow(unused_unsafe, clippy::too_many_arguments, reason = "HIP's; some need no promise")]
            pub unsafe extern "C" fn $hip($($argument: $type),*) -> c_int {
                // SAFETY: the caller's promise.
                unsafe { $cuda($($value),*) }
            }
        )*
    };
}

hip! {
    hipInit(flags: c_uint) = cuInit(flags);
    hipGetDeviceCount(count: *mut c_int) = cuDeviceGetCount(count);
    hipDeviceGet(device: *mut c_int, ordinal: c_int) = cuDeviceGet(device, ordinal);
    hipDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) = cuDeviceGetUuid_v2(uuid, device);
    hipDeviceGetName(name: *mut c_char, length: c_int, device: c_int) = cuDeviceGetName(name, length, device);
    hipDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) = cuDevicePrimaryCtxRetain(context, device);
    hipCtxGetCurrent(context: *mut Handle) = cuCtxGetCurrent(context);
    hipCtxSetCurrent(context: Handle) = cuCtxSetCurrent(context);
    hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) = cuCtxGetStreamPriorityRange(least, greatest);
    hipStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, priority: c_int) = cuStreamCreateWithPriority(stream, flags, priority);
    hipStreamDestroy(stream: Handle) = cuStreamDestroy_v2(stream);
    hipStreamQuery(stream: Handle) = cuStreamQuery(stream);
    hipStreamSynchronize(stream: Handle) = cuStreamSynchronize(stream);
    hipStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) = cuStreamWaitEvent(stream, event, flags);
    hipStreamIsCapturing(stream: Handle, status: *mut c_int) = cuStreamIsCapturing(stream, status);
    hipThreadExchangeStreamCaptureMode(mode: *mut c_int) = cuThreadExchangeStreamCaptureMode(mode);
    hipEventCreateWithFlags(event: *mut Handle, flags: c_uint) = cuEventCreate(event, flags);
    hipEventRecord(event: Handle, stream: Handle) = cuEventRecord(event, stream);
    hipEventQuery(event: Handle) = cuEventQuery(event);
    hipEventSynchronize(event: Handle) = cuEventSynchronize(event);
    hipEventElapsedTime(milliseconds: *mut f32, start: Handle, stop: Handle) = cuEventElapsedTime(milliseconds, start, stop);
    hipMemcpyDtoDAsync(to: *mut c_void, from: *mut c_void, bytes: usize, stream: Handle) = cuMemcpyDtoDAsync_v2(to as u64, from as u64, bytes, stream);
    hipMemcpyHtoDAsync(to: *mut c_void, from: *const c_void, bytes: usize, stream: Handle) = cuMemcpyHtoDAsync_v2(to as u64, from, bytes, stream);
    hipMemcpyDtoHAsync(to: *mut c_void, from: *mut c_void, bytes: usize, stream: Handle) = cuMemcpyDtoHAsync_v2(to, from as u64, bytes, stream);
    hipMemGetInfo(free: *mut usize, total: *mut usize) = cuMemGetInfo_v2(free, total);
    hipMalloc(address: *mut *mut c_void, bytes: usize) = cuMemAlloc_v2(address.cast(), bytes);
    hipFree(address: *mut c_void) = cuMemFree_v2(address as u64);
    hipMallocAsync(address: *mut *mut c_void, bytes: usize, stream: Handle) = cuMemAllocAsync(address.cast(), bytes, stream);
    hipFreeAsync(address: *mut c_void, stream: Handle) = cuMemFreeAsync(address as u64, stream);
    hipHostMalloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint) = cuMemHostAlloc(memory, bytes, flags);
    hipHostFree(memory: *mut c_void) = cuMemFreeHost(memory);
    hipModuleLoadData(module: *mut Handle, image: *const c_void) = cuModuleLoadData(module, image);
    hipModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) = cuModuleGetFunction(function, module, name);
    hipModuleLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void
    ) = cuLaunchKernel(
        function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters, extra
    );
}

/// `hipDriverGetVersion`, which initialises the real library: who asks before `hipInit` takes the fork from data loaders.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDriverGetVersion(version: *mut c_int) -> c_int {
    let name = "hipDriverGetVersion";
    crate::call::driver(name, crate::call::Need::Nothing, format_args!(""), |call| {
        if !crate::call::is_initialised() {
            call.violation("initialisation", "hipDriverGetVersion before hipInit");
        }
        // SAFETY: the caller's promise.
        unsafe { crate::call::put(version, VERSION) }
    })
}

/// `hipDeviceGetAttribute`, whose attributes have numbers of their own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> c_int {
    let attribute = match attribute {
        23 => 75,
        61 => 76,
        63 => 16,
        88 => 115,
        _ => return codes::INVALID_VALUE,
    };
    // SAFETY: the caller's promise.
    unsafe { cuDeviceGetAttribute(value, attribute, device) }
}

/// `hipDeviceGetPCIBusId`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetPCIBusId(
    id: *mut c_char,
    length: c_int,
    device: c_int,
) -> c_int {
    let mut count = 0;
    // SAFETY: a place for one number.
    let code = unsafe { cuDeviceGetCount(&raw mut count) };
    let text = CString::new(format!("0000:{device:02x}:00.0")).unwrap_or_default();
    let text = text.as_bytes_with_nul();
    if code != codes::SUCCESS || !(0..count).contains(&device) || (length as usize) < text.len() {
        return codes::INVALID_VALUE;
    }
    // SAFETY: the caller's promise: `length` bytes.
    unsafe { id.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
    codes::SUCCESS
}

/// `hipGetErrorName`, which returns the text.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(code: c_int) -> *const c_char {
    let name = match code {
        0 => c"hipSuccess",
        1 => c"hipErrorInvalidValue",
        2 => c"hipErrorOutOfMemory",
        100 => c"hipErrorNoDevice",
        101 => c"hipErrorInvalidDevice",
        209 => c"hipErrorNoBinaryForGpu",
        600 => c"hipErrorNotReady",
        700 => c"hipErrorIllegalAddress",
        719 => c"hipErrorLaunchFailure",
        _ => c"hipErrorUnknown",
    };
    name.as_ptr()
}

/// `hipGetErrorString`, which returns the text.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(code: c_int) -> *const c_char {
    codes::texts(code).map_or(c"unknown error".as_ptr(), |(_, text)| text.as_ptr())
}

/// Programs of the compiler, by their handles less one; destroyed ones stay.
static PROGRAMS: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// `HIPRTC_ERROR_INVALID_PROGRAM`.
const INVALID_PROGRAM: c_int = 4;

/// Runs `body` on a program's source, with the NUL that ends it.
fn with_program(program: Handle, body: impl FnOnce(&[u8])) -> c_int {
    let programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = (program as usize).checked_sub(1);
    match found.and_then(|at| programs.get(at)) {
        Some(source) => {
            body(source);
            codes::SUCCESS
        }
        None => INVALID_PROGRAM,
    }
}

/// `hiprtcCreateProgram`, of one text without headers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcCreateProgram(
    program: *mut Handle,
    source: *const c_char,
    _name: *const c_char,
    _headers: c_int,
    _texts: *const *const c_char,
    _names: *const *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    let source = unsafe { CStr::from_ptr(source) };
    let code = [HIP_CODE.as_bytes(), source.to_bytes_with_nul()].concat();
    let mut programs = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    programs.push(code);
    // SAFETY: the caller's promise.
    unsafe { program.write(programs.len() as Handle) };
    codes::SUCCESS
}

/// `hiprtcCompileProgram`: its code is its text, which `hipModuleLoadData` looks at. `fail=hiprtcCompileProgram:K:CODE` has it
/// fail.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcCompileProgram(
    program: Handle,
    options: c_int,
    _texts: *const *const c_char,
) -> c_int {
    let found = with_program(program, |_| {});
    if found != codes::SUCCESS {
        return found;
    }
    let name = "hiprtcCompileProgram";
    let arguments = format_args!("{program:?} {options}");
    crate::call::driver(name, crate::call::Need::Nothing, arguments, |_| Ok(()))
}

/// `hiprtcGetCodeSize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetCodeSize(program: Handle, size: *mut usize) -> c_int {
    // SAFETY: the caller's promise.
    with_program(program, |code| unsafe { size.write(code.len()) })
}

/// `hiprtcGetCode`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetCode(program: Handle, to: *mut c_char) -> c_int {
    // SAFETY: the caller's promise: as many bytes as there are.
    with_program(program, |code| unsafe {
        to.copy_from_nonoverlapping(code.as_ptr().cast(), code.len());
    })
}

/// `hiprtcGetProgramLogSize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetProgramLogSize(program: Handle, size: *mut usize) -> c_int {
    // SAFETY: the caller's promise.
    with_program(program, |_| unsafe { size.write(1) })
}

/// `hiprtcGetProgramLog`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcGetProgramLog(program: Handle, to: *mut c_char) -> c_int {
    // SAFETY: the caller's promise.
    with_program(program, |_| unsafe { to.write(0) })
}

/// `hiprtcDestroyProgram`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hiprtcDestroyProgram(program: *mut Handle) -> c_int {
    // SAFETY: the caller's promise.
    with_program(unsafe { program.read() }, |_| {})
}

/// `hiprtcGetErrorString`.
#[unsafe(no_mangle)]
pub extern "C" fn hiprtcGetErrorString(code: c_int) -> *const c_char {
    match code {
        INVALID_PROGRAM => c"HIPRTC_ERROR_INVALID_PROGRAM".as_ptr(),
        _ => c"HIPRTC_ERROR_COMPILATION".as_ptr(),
    }
}

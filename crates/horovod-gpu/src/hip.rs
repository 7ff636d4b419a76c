//! AMD's GPUs: what HIP (`libamdhip64.so`) calls the functions of CUDA's driver, and where it differs.
//!
//! Compared with the headers of HIP 5.2.3 and with the declarations for 7.2.2; never run on a GPU of AMD's.
//!
//! | of CUDA's driver | of HIP | difference |
//! | --- | --- | --- |
//! | most functions | the same name with `hip` | none: arguments have the same sizes, flags and the codes that are looked at the same numbers |
//! | `cuDeviceGetCount`, `cuCtxGetStreamPriorityRange`, `cuEventCreate`, `cuMemAlloc`, `cuMemFree`, `cuMemAllocAsync`, `cuMemFreeAsync`, `cuMemHostAlloc`, `cuMemFreeHost`, `cuLaunchKernel` | `hipGetDeviceCount`, `hipDeviceGetStreamPriorityRange`, `hipEventCreateWithFlags`, `hipMalloc`, `hipFree`, `hipMallocAsync`, `hipFreeAsync`, `hipHostMalloc`, `hipHostFree`, `hipModuleLaunchKernel` | the name |
//! | addresses of a device's memory: `CUdeviceptr`, 64 bits | `void *` | none on 64-bit machines |
//! | `cuCtxGetCurrent`, `cuCtxSetCurrent` | the same, deprecated | a context is a device, and a thread has device 0 from the start |
//! | `cuGetErrorName(code, &text)`, `cuGetErrorString(code, &text)` | `hipGetErrorName(code)`, `hipGetErrorString(code)` | they return the text |
//! | `cuDeviceGetAttribute` | `hipDeviceGetAttribute` | the attributes' numbers |
//! | `cuDeviceGetUuid` | `hipDeviceGetUuid` | the same for all GPUs of models that have none, so where a GPU is counts, too |
//! | `cuModuleLoadData` takes PTX | `hipModuleLoadData` takes machine code | `hiprtc` compiles it |
//! | `cuDriverGetVersion` needs no `cuInit` | `hipDriverGetVersion` initialises the library | so it is not called |
//! | `cuStreamGetCtx` | | only compiled programs ask for it, which there are not for AMD's GPUs |

#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char, c_int};

use crate::load::function_table;

/// File names of the library: those of ROCm 7 and later, 6 and 5, and the name in PyTorch's wheels.
pub(crate) const HIP: [&str; 4] = [
    "libamdhip64.so.7",
    "libamdhip64.so.6",
    "libamdhip64.so.5",
    "libamdhip64.so",
];
/// File names of AMD's NCCL, in the same way.
pub(crate) const RCCL: [&str; 2] = ["librccl.so.1", "librccl.so"];

/// Numbers of `hipDeviceAttribute_t`.
pub(crate) const COMPUTE_CAPABILITY_MAJOR: c_int = 23;
pub(crate) const COMPUTE_CAPABILITY_MINOR: c_int = 61;
pub(crate) const MULTIPROCESSOR_COUNT: c_int = 63;
pub(crate) const MEMORY_POOLS_SUPPORTED: c_int = 88;

function_table! {
    /// Names and texts of errors.
    struct HipTexts;
    required {
        get_error_name = c"hipGetErrorName"(c_int) -> *const c_char;
        get_error_string = c"hipGetErrorString"(c_int) -> *const c_char;
    }
    optional {}
}

/// Names of CUDA's driver, and HIP's.
const NAMES: &[(&CStr, &CStr)] = &[
    (c"cuInit", c"hipInit"),
    (c"cuDriverGetVersion", c"hipDriverGetVersion"),
    (c"cuDeviceGet", c"hipDeviceGet"),
    (c"cuDeviceGetCount", c"hipGetDeviceCount"),
    (c"cuDeviceGetAttribute", c"hipDeviceGetAttribute"),
    (c"cuDeviceGetUuid_v2", c"hipDeviceGetUuid"),
    (c"cuDeviceGetName", c"hipDeviceGetName"),
    (c"cuDeviceGetPCIBusId", c"hipDeviceGetPCIBusId"),
    (c"cuDevicePrimaryCtxRetain", c"hipDevicePrimaryCtxRetain"),
    (c"cuCtxGetCurrent", c"hipCtxGetCurrent"),
    (c"cuCtxSetCurrent", c"hipCtxSetCurrent"),
    (
        c"cuCtxGetStreamPriorityRange",
        c"hipDeviceGetStreamPriorityRange",
    ),
    (
        c"cuStreamCreateWithPriority",
        c"hipStreamCreateWithPriority",
    ),
    (c"cuStreamDestroy_v2", c"hipStreamDestroy"),
    (c"cuStreamQuery", c"hipStreamQuery"),
    (c"cuStreamSynchronize", c"hipStreamSynchronize"),
    (c"cuStreamWaitEvent", c"hipStreamWaitEvent"),
    (c"cuStreamIsCapturing", c"hipStreamIsCapturing"),
    (
        c"cuThreadExchangeStreamCaptureMode",
        c"hipThreadExchangeStreamCaptureMode",
    ),
    (c"cuEventCreate", c"hipEventCreateWithFlags"),
    (c"cuEventRecord", c"hipEventRecord"),
    (c"cuEventQuery", c"hipEventQuery"),
    (c"cuEventSynchronize", c"hipEventSynchronize"),
    (c"cuEventElapsedTime", c"hipEventElapsedTime"),
    (c"cuMemcpyDtoDAsync_v2", c"hipMemcpyDtoDAsync"),
    (c"cuMemcpyHtoDAsync_v2", c"hipMemcpyHtoDAsync"),
    (c"cuMemcpyDtoHAsync_v2", c"hipMemcpyDtoHAsync"),
    (c"cuMemGetInfo_v2", c"hipMemGetInfo"),
    (c"cuMemAlloc_v2", c"hipMalloc"),
    (c"cuMemFree_v2", c"hipFree"),
    (c"cuMemAllocAsync", c"hipMallocAsync"),
    (c"cuMemFreeAsync", c"hipFreeAsync"),
    (c"cuMemHostAlloc", c"hipHostMalloc"),
    (c"cuMemFreeHost", c"hipHostFree"),
    (c"cuModuleLoadData", c"hipModuleLoadData"),
    (c"cuModuleGetFunction", c"hipModuleGetFunction"),
    (c"cuLaunchKernel", c"hipModuleLaunchKernel"),
];

/// ROCm's version, as the name of the library's file tells it: 70200000 is 7.2, and 0 is not known. To ask the library
/// itself would initialise it, and data loaders could not fork any more.
pub(crate) fn version_of(file: &str) -> i32 {
    let file = std::fs::canonicalize(file).unwrap_or_else(|_| file.into());
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let Some((_, numbers)) = name.split_once(".so.") else {
        return 0;
    };
    let mut numbers = numbers.split('.').map(|number| number.parse::<u8>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), minor) => {
            i32::from(major) * 10_000_000 + i32::from(minor.unwrap_or(0)) * 100_000
        }
        _ => 0,
    }
}

/// HIP's name of a function of CUDA's driver, if that function is used with HIP.
pub(crate) fn name_of(of_cuda: &CStr) -> Option<&'static CStr> {
    let found = NAMES.iter().find(|(cuda, _)| *cuda == of_cuda);
    found.map(|(_, hip)| *hip)
}

/// The same for error texts, where CUDA's names are without what tells their version.
pub(crate) fn call_name(of_cuda: &'static str) -> &'static str {
    let found = NAMES.iter().find(|(cuda, _)| {
        let cuda = cuda.to_bytes();
        cuda.strip_suffix(b"_v2").unwrap_or(cuda) == of_cuda.as_bytes()
    });
    found
        .and_then(|(_, hip)| hip.to_str().ok())
        .unwrap_or(of_cuda)
}

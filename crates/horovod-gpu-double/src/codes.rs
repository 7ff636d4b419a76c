//! Result codes of the driver, their names and texts.

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const INVALID_VALUE: i32 = 1;
/// Result of a call with memory that does not exist; the real driver would fail later, or not at all.
pub(crate) const ILLEGAL_ADDRESS_AT_CALL: i32 = INVALID_VALUE;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const INVALID_DEVICE: i32 = 101;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const NO_BINARY_FOR_GPU: i32 = 209;
pub(crate) const INVALID_PTX: i32 = 218;
pub(crate) const UNSUPPORTED_PTX_VERSION: i32 = 222;
pub(crate) const INVALID_HANDLE: i32 = 400;
pub(crate) const NOT_FOUND: i32 = 500;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const NOT_PERMITTED: i32 = 800;
pub(crate) const NOT_SUPPORTED: i32 = 801;
pub(crate) const CAPTURE_UNSUPPORTED: i32 = 900;
pub(crate) const CAPTURE_ISOLATION: i32 = 905;
pub(crate) const CAPTURE_IMPLICIT: i32 = 906;
pub(crate) const CAPTURED_EVENT: i32 = 907;

/// Code, name, text; texts end in NUL.
const TABLE: &[(i32, &std::ffi::CStr, &std::ffi::CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (
        34,
        c"CUDA_ERROR_STUB_LIBRARY",
        c"CUDA driver is a stub library",
    ),
    (
        46,
        c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        c"CUDA-capable device(s) is/are busy or unavailable",
    ),
    (
        100,
        c"CUDA_ERROR_NO_DEVICE",
        c"no CUDA-capable device is detected",
    ),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (
        200,
        c"CUDA_ERROR_INVALID_IMAGE",
        c"device kernel image is invalid",
    ),
    (
        201,
        c"CUDA_ERROR_INVALID_CONTEXT",
        c"invalid device context",
    ),
    (
        209,
        c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        c"no kernel image is available for execution on the device",
    ),
    (
        218,
        c"CUDA_ERROR_INVALID_PTX",
        c"a PTX JIT compilation failed",
    ),
    (
        222,
        c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        c"the provided PTX was compiled with an unsupported toolchain.",
    ),
    (
        400,
        c"CUDA_ERROR_INVALID_HANDLE",
        c"invalid resource handle",
    ),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (
        700,
        c"CUDA_ERROR_ILLEGAL_ADDRESS",
        c"an illegal memory access was encountered",
    ),
    (
        702,
        c"CUDA_ERROR_LAUNCH_TIMEOUT",
        c"the launch timed out and was terminated",
    ),
    (
        709,
        c"CUDA_ERROR_CONTEXT_IS_DESTROYED",
        c"context is destroyed",
    ),
    (710, c"CUDA_ERROR_ASSERT", c"device-side assert triggered"),
    (
        714,
        c"CUDA_ERROR_HARDWARE_STACK_ERROR",
        c"hardware stack error",
    ),
    (
        715,
        c"CUDA_ERROR_ILLEGAL_INSTRUCTION",
        c"an illegal instruction was encountered",
    ),
    (716, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
    (
        717,
        c"CUDA_ERROR_INVALID_ADDRESS_SPACE",
        c"operation not supported on global/shared address space",
    ),
    (718, c"CUDA_ERROR_INVALID_PC", c"invalid program counter"),
    (
        719,
        c"CUDA_ERROR_LAUNCH_FAILED",
        c"unspecified launch failure",
    ),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (
        802,
        c"CUDA_ERROR_SYSTEM_NOT_READY",
        c"system not yet initialized",
    ),
    (
        803,
        c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        c"system has unsupported display driver / cuda driver combination",
    ),
    (
        804,
        c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        c"forward compatibility was attempted on non supported HW",
    ),
    (
        900,
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
    (
        901,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (
        905,
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"dependency created on uncaptured work in another stream",
    ),
    (
        906,
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (
        907,
        c"CUDA_ERROR_CAPTURED_EVENT",
        c"operation not permitted on an event last recorded in a capturing stream",
    ),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

/// Name and text of a code.
pub(crate) fn texts(code: i32) -> Option<(&'static std::ffi::CStr, &'static std::ffi::CStr)> {
    let (_, name, text) = TABLE.iter().find(|(known, ..)| *known == code)?;
    Some((name, text))
}

/// After these the context is lost: every later call returns the same.
pub(crate) fn is_sticky(code: i32) -> bool {
    matches!(code, 700 | 702 | 710 | 714..=719)
}

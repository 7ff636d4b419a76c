//! The C interface of XLA's typed foreign functions, laid out by hand: `xla/ffi/api/c_api.h`, versions 0.1 to 0.4.
//!
//! Only what the handlers use is here. Structures grow at their ends and say their own size, so each is read after a
//! look at that ([`sized`]); functions stand in a table, of which only the first ones are known to be there.

use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;

/// Begins every structure.
#[repr(C)]
pub(super) struct Head {
    pub(super) struct_size: usize,
    pub(super) extension_start: *mut Extension,
}

impl Head {
    /// Of a structure of this type that is passed to XLA.
    pub(super) fn of<T>() -> Self {
        Self {
            struct_size: size_of::<T>(),
            extension_start: std::ptr::null_mut(),
        }
    }
}

/// Something that XLA asks for with a call.
#[repr(C)]
pub(super) struct Extension {
    pub(super) struct_size: usize,
    pub(super) kind: c_int,
    pub(super) next: *mut Extension,
}

/// The extension by which XLA asks what kind of handler this is; the only one.
pub(super) const METADATA: c_int = 1;

#[repr(C)]
pub(super) struct MetadataExtension {
    pub(super) base: Extension,
    pub(super) metadata: *mut Metadata,
}

#[repr(C)]
pub(super) struct Metadata {
    pub(super) struct_size: usize,
    pub(super) api_version: ApiVersion,
    pub(super) traits: u32,
}

#[repr(C)]
pub(super) struct ApiVersion {
    pub(super) head: Head,
    pub(super) major: c_int,
    pub(super) minor: c_int,
}

/// Stage in which the operation takes place.
pub(super) const EXECUTE: c_int = 3;

/// Argument types; results have the same.
pub(super) const BUFFER: c_int = 1;

pub(super) const SCALAR: c_int = 3;
pub(super) const STRING: c_int = 4;

#[repr(C)]
pub(super) struct CallFrame {
    pub(super) head: Head,
    pub(super) api: *const Api,
    pub(super) context: *mut c_void,
    pub(super) stage: c_int,
    pub(super) args: Values,
    pub(super) rets: Values,
    pub(super) attrs: Attrs,
    /// Out: what completes the call when it has returned. Not counted in `struct_size` by any version so far.
    pub(super) future: *mut Future,
}

/// Arguments, or results.
#[repr(C)]
pub(super) struct Values {
    pub(super) head: Head,
    pub(super) size: i64,
    pub(super) types: *const c_int,
    pub(super) values: *const *const c_void,
}

#[repr(C)]
pub(super) struct Attrs {
    pub(super) head: Head,
    pub(super) size: i64,
    pub(super) types: *const c_int,
    pub(super) names: *const *const ByteSpan,
    pub(super) values: *const *const c_void,
}

#[repr(C)]
pub(super) struct ByteSpan {
    pub(super) at: *const c_char,
    pub(super) len: usize,
}

#[repr(C)]
pub(super) struct Scalar {
    pub(super) dtype: c_int,
    pub(super) value: *const c_void,
}

#[repr(C)]
pub(super) struct Buffer {
    pub(super) head: Head,
    pub(super) dtype: c_int,
    pub(super) data: *mut c_void,
    pub(super) rank: i64,
    pub(super) dims: *const i64,
}

/// Owned by XLA.
pub(super) enum Future {}
/// Owned by whoever holds it, until it is given to XLA.
pub(super) enum Error {}

#[repr(C)]
pub(super) struct ErrorCreateArgs {
    pub(super) head: Head,
    pub(super) message: *const c_char,
    pub(super) code: c_int,
}

#[repr(C)]
pub(super) struct ErrorGetMessageArgs {
    pub(super) head: Head,
    pub(super) error: *mut Error,
    /// Out; lives as long as the error.
    pub(super) message: *const c_char,
    /// Out, from version 0.4 on, which writes it without a look at the size.
    pub(super) code: c_int,
}

#[repr(C)]
pub(super) struct ErrorDestroyArgs {
    pub(super) head: Head,
    pub(super) error: *mut Error,
}

#[repr(C)]
pub(super) struct FutureCreateArgs {
    pub(super) head: Head,
    pub(super) future: *mut Future,
}

#[repr(C)]
pub(super) struct FutureSetAvailableArgs {
    pub(super) head: Head,
    pub(super) future: *mut Future,
}

#[repr(C)]
pub(super) struct FutureSetErrorArgs {
    pub(super) head: Head,
    pub(super) future: *mut Future,
    pub(super) error: *mut Error,
}

#[repr(C)]
pub(super) struct RunIdGetArgs {
    pub(super) head: Head,
    pub(super) context: *mut c_void,
    /// Out.
    pub(super) run_id: i64,
}

#[repr(C)]
pub(super) struct StreamGetArgs {
    pub(super) head: Head,
    pub(super) context: *mut c_void,
    /// Out: on CUDA a `CUstream`.
    pub(super) stream: *mut c_void,
}

#[repr(C)]
pub(super) struct DeviceOrdinalGetArgs {
    pub(super) head: Head,
    pub(super) context: *mut c_void,
    /// Out.
    pub(super) device_ordinal: i32,
}

/// The table of functions, as far as it is used; XLA keeps it for as long as the process lives.
#[repr(C)]
pub(super) struct Api {
    pub(super) head: Head,
    pub(super) version: ApiVersion,
    internal: *const c_void,
    pub(super) error_create: unsafe extern "C" fn(*mut ErrorCreateArgs) -> *mut Error,
    pub(super) error_get_message: unsafe extern "C" fn(*mut ErrorGetMessageArgs),
    pub(super) error_destroy: unsafe extern "C" fn(*mut ErrorDestroyArgs),
    handler_register: *const c_void,
    pub(super) stream_get: unsafe extern "C" fn(*mut StreamGetArgs) -> *mut Error,
    type_register: *const c_void,
    execution_context_get: *const c_void,
    state_set: *const c_void,
    state_get: *const c_void,
    device_memory_allocate: *const c_void,
    device_memory_free: *const c_void,
    thread_pool_schedule: *const c_void,
    thread_pool_num_threads: *const c_void,
    pub(super) future_create: unsafe extern "C" fn(*mut FutureCreateArgs) -> *mut Error,
    pub(super) future_set_available:
        unsafe extern "C" fn(*mut FutureSetAvailableArgs) -> *mut Error,
    pub(super) future_set_error: unsafe extern "C" fn(*mut FutureSetErrorArgs) -> *mut Error,
    pub(super) run_id_get: unsafe extern "C" fn(*mut RunIdGetArgs) -> *mut Error,
    pub(super) device_ordinal_get: unsafe extern "C" fn(*mut DeviceOrdinalGetArgs) -> *mut Error,
}

/// Bytes of the table up to the functions of errors, without which nothing can be said.
pub(super) const API_WITH_ERRORS: usize =
    std::mem::offset_of!(Api, error_destroy) + size_of::<usize>();

/// Bytes of the table up to the functions of futures.
pub(super) const API_WITH_FUTURES: usize =
    std::mem::offset_of!(Api, future_set_error) + size_of::<usize>();
/// Bytes of the table up to `run_id_get`.
pub(super) const API_WITH_RUN_IDS: usize =
    std::mem::offset_of!(Api, run_id_get) + size_of::<usize>();
/// Bytes of the table up to `device_ordinal_get`, without which calls on GPUs are refused.
pub(super) const API_WITH_DEVICES: usize =
    std::mem::offset_of!(Api, device_ordinal_get) + size_of::<usize>();

/// A structure of XLA's, if it is as long as this type; else its size.
///
/// # Safety
/// `structure` is null or points to a structure that begins with its size and lives for `'a`.
pub(super) unsafe fn sized<'a, T>(structure: *const T, known: usize) -> Result<&'a T, usize> {
    if structure.is_null() {
        return Err(0);
    }
    // SAFETY: it begins with its size, as the caller promises.
    let size = unsafe { structure.cast::<usize>().read() };
    if size < known {
        return Err(size);
    }
    // SAFETY: so much is there.
    Ok(unsafe { &*structure })
}

// As a C compiler lays them out.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Extension>() == 24 && size_of::<ApiVersion>() == 24);
    assert!(size_of::<Values>() == 40 && size_of::<Attrs>() == 48 && size_of::<Buffer>() == 48);
    assert!(offset_of!(Metadata, traits) == 32);
    assert!(offset_of!(CallFrame, args) == 40 && offset_of!(CallFrame, future) == 168);
    assert!(offset_of!(Api, stream_get) == 80 && API_WITH_DEVICES == 192);
    assert!(API_WITH_ERRORS == 72 && offset_of!(Api, future_set_error) == 168);
};

//! Results as C reads them.

use std::ffi::{CString, c_char, c_void};

use horovod_engine::{Buffer, Completion, Error, OpResult, Shape};

use super::{HOROVOD_OK, guarded, status};

/// How an operation has ended; `horovod_result` of the header. It lives as long as the call of `done`.
pub(crate) struct HorovodResult {
    status: i32,
    error: CString,
    refused: bool,
    outputs: Vec<Option<Buffer>>,
    /// Of all outputs, also when their memory was taken.
    shapes: Vec<Shape>,
    received_splits: Vec<u64>,
    last_joined: i32,
}

/// An output that the core or the operation's allocator has allocated; `horovod_output` of the header.
#[repr(C)]
pub(crate) struct HorovodOutput {
    data: *mut c_void,
    bytes: usize,
    dims: *const u64,
    ndim: usize,
}

impl HorovodResult {
    pub(super) fn new(result: Result<OpResult, Error>) -> Self {
        match result {
            Ok(result) => Self {
                status: HOROVOD_OK,
                error: CString::default(),
                refused: false,
                shapes: (result.outputs.iter())
                    .map(|output| output.as_ref().map(|(_, shape)| shape.clone()))
                    .map(Option::unwrap_or_default)
                    .collect(),
                outputs: (result.outputs.into_iter())
                    .map(|output| output.map(|(buffer, _)| buffer))
                    .collect(),
                received_splits: result.received_splits.unwrap_or_default(),
                last_joined: match result.completion {
                    Completion::Joined { last } => i32::try_from(last.0).unwrap_or(-1),
                    _ => -1,
                },
            },
            Err(error) => {
                let text = error.to_string().replace('\0', " ");
                Self {
                    status: status(&error),
                    error: CString::new(text).unwrap_or_default(),
                    refused: matches!(error, Error::Refused(_)),
                    outputs: Vec::new(),
                    shapes: Vec::new(),
                    received_splits: Vec::new(),
                    last_joined: -1,
                }
            }
        }
    }
}

/// [`HOROVOD_OK`], or why it failed.
///
/// # Safety
/// `result` is that of a call of `done` that has not returned; so for all functions here.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_result_status(result: *const HorovodResult) -> i32 {
    // SAFETY: as the caller promises.
    unsafe { &*result }.status
}

/// The error's text; empty without one.
///
/// # Safety
/// As of [`horovod_result_status`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_result_error(
    result: *const HorovodResult,
) -> *const c_char {
    // SAFETY: as the caller promises.
    unsafe { &*result }.error.as_ptr()
}

/// 1 if the operation alone was refused, because the ranks disagree or ask for what cannot be done, and the job goes on; else
/// 0.
///
/// # Safety
/// As of [`horovod_result_status`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_result_refused(result: *const HorovodResult) -> i32 {
    // SAFETY: as the caller promises.
    i32::from(unsafe { &*result }.refused)
}

/// Describes output `index`; 0 if there is none that was allocated for it, else 1.
///
/// # Safety
/// As of [`horovod_result_status`]; `output` is writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_result_output(
    result: *const HorovodResult,
    index: usize,
    output: *mut HorovodOutput,
) -> i32 {
    // SAFETY: as the caller promises.
    let result = unsafe { &*result };
    let (Some(Some(buffer)), Some(shape)) = (result.outputs.get(index), result.shapes.get(index))
    else {
        return 0;
    };
    let described = HorovodOutput {
        data: buffer.as_mut_ptr().cast(),
        bytes: buffer.len(),
        dims: shape.as_ptr(),
        ndim: shape.len(),
    };
    // SAFETY: as the caller promises.
    unsafe { output.write(described) };
    1
}

/// Takes output `index` out of the result: its memory stays until [`horovod_buffer_free`]. Null if there is none, or it
/// was taken.
///
/// # Safety
/// As of [`horovod_result_status`], and nobody else uses the result at the same time.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_result_take(
    result: *mut HorovodResult,
    index: usize,
) -> *mut Buffer {
    // SAFETY: as the caller promises.
    let result = unsafe { &mut *result };
    let output = result.outputs.get_mut(index).and_then(Option::take);
    output.map_or(std::ptr::null_mut(), |buffer| {
        Box::into_raw(Box::new(buffer))
    })
}

/// Gives back the memory of an output.
///
/// # Safety
/// `buffer` comes from [`horovod_result_take`], or is null; it is given back once.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_buffer_free(buffer: *mut Buffer) {
    if !buffer.is_null() {
        // SAFETY: as the caller promises.
        guarded((), || drop(unsafe { Box::from_raw(buffer) }));
    }
}

/// Alltoall: the rows received from each member, and how many members; null for others.
///
/// # Safety
/// As of [`horovod_result_status`]; `count` is writable.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_result_received_splits(
    result: *const HorovodResult,
    count: *mut usize,
) -> *const u64 {
    // SAFETY: as the caller promises.
    let splits = unsafe { &(*result).received_splits };
    // SAFETY: as the caller promises.
    unsafe { count.write(splits.len()) };
    if splits.is_empty() {
        return std::ptr::null();
    }
    splits.as_ptr()
}

/// Join: the rank that joined last; -1 for others.
///
/// # Safety
/// As of [`horovod_result_status`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_result_last_joined(result: *const HorovodResult) -> i32 {
    // SAFETY: as the caller promises.
    unsafe { &*result }.last_joined
}

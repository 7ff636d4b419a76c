//! Operations as C describes them, and their submission.

use std::ffi::{CStr, c_char, c_void};
use std::mem::{align_of, size_of};
use std::slice;
use std::time::Duration;

use horovod_engine::{
    Allocator, Callback, DType, Device, Error, Op, Output, ProcessSetId, Scale, Submission, Tensor,
    TensorMeta,
};

use super::outcome::HorovodResult;
use crate::submit::{KINDS, operation_of};

use super::{HOROVOD_INTERNAL, HOROVOD_OK, guarded, status, wait_timeout};

/// One tensor; `horovod_tensor` of the header.
#[repr(C)]
pub(crate) struct HorovodTensor {
    /// Bytes of this structure as the caller knows it.
    struct_size: u32,
    dtype: u8,
    device: u8,
    input: *const c_void,
    /// Null: allocated when the size is known.
    output: *mut c_void,
    dims: *const u64,
    ndim: usize,
}

/// Called with the result, once.
type Done = unsafe extern "C" fn(context: *mut c_void, result: *mut HorovodResult);
/// Gives memory for an output; null if there is none.
type Allocate = unsafe extern "C" fn(
    context: *mut c_void,
    index: usize,
    dtype: u8,
    dims: *const u64,
    ndim: usize,
) -> *mut c_void;

/// One operation; `horovod_operation` of the header.
#[repr(C)]
pub(crate) struct HorovodOperation {
    /// Bytes of this structure as the caller knows it.
    struct_size: u32,
    kind: u8,
    reduce_op: u8,
    pub(super) process_set: u32,
    root: u32,
    /// First part of the name, as in `allreduce`; null: that of the kind.
    pub(super) prefix: *const c_char,
    /// Null or empty: numbered.
    pub(super) name: *const c_char,
    prescale: f64,
    postscale: f64,
    tensors: *const HorovodTensor,
    tensor_count: usize,
    /// Alltoall: rows for each member; null: as many for each.
    splits: *const i64,
    split_count: usize,
    done: Option<Done>,
    /// Null: the core allocates.
    allocate: Option<Allocate>,
    context: *mut c_void,
}

/// [`HorovodOperation`] with what was added later.
#[repr(C)]
struct WithWaiting {
    first: HorovodOperation,
    /// Not zero: the call may wait for the operation.
    may_wait: u8,
}

// The others are those of Python's calls.
const BARRIER: u8 = 5;
const JOIN: u8 = 6;

/// The caller's pointer, which only goes back to the caller.
#[derive(Clone, Copy)]
struct Context(*mut c_void);

// SAFETY: it is passed to functions that the header asks to be callable from any thread.
unsafe impl Send for Context {}

impl Context {
    /// A method, so that closures take the whole.
    fn get(self) -> *mut c_void {
        self.0
    }
}

/// Submits an operation. [`HOROVOD_OK`]: `done` will be called. Otherwise it will not, and why is written to `error` as
/// a C string, cut to its `length`.
///
/// # Safety
/// `operation` and all that it points to are as the header says; `error` is null or writable for `length` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_enqueue(
    operation: *const HorovodOperation,
    error: *mut c_char,
    length: usize,
) -> i32 {
    let outcome = guarded(
        Err((HOROVOD_INTERNAL, "the core panicked".to_owned())),
        // SAFETY: as the caller promises.
        || unsafe { enqueue(operation) }.map_err(|e| (status(&e), e.to_string())),
    );
    let Err((code, text)) = outcome else {
        return HOROVOD_OK;
    };
    if !error.is_null() && length > 0 {
        let text = text.as_bytes();
        let cut = text.len().min(length - 1);
        // SAFETY: the caller's buffer has this length.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), error.cast::<u8>(), cut);
            error.add(cut).write(0);
        }
    }
    code
}

unsafe fn enqueue(operation: *const HorovodOperation) -> Result<(), Error> {
    // SAFETY: as the caller promises; the size is that of the first version's at least.
    let (operation, later) = unsafe { (sized(operation)?, sized::<WithWaiting>(operation.cast())) };
    let may_wait = later.is_ok_and(|later| later.may_wait != 0);
    let engine = horovod_engine::engine()?;
    let Some(done) = operation.done else {
        return Err(invalid("horovod_operation.done is null"));
    };
    // SAFETY: as the header says, the lists are null or as long as their counts.
    let (tensors, splits) = unsafe {
        (
            tensors_of(operation.tensors, operation.tensor_count)?,
            list(operation.splits, operation.split_count),
        )
    };
    let op = op_of(operation)?;
    let has_tensors = !matches!(op, Op::Barrier | Op::Join);
    if has_tensors == tensors.is_empty() {
        return Err(invalid(format!(
            "kind {} with {} tensors",
            operation.kind,
            tensors.len()
        )));
    }
    // SAFETY: as the header says, tensors live until `done` is called.
    let tensors: Result<Vec<_>, _> = tensors
        .iter()
        .map(|t| unsafe { tensor_of(t, &op) })
        .collect();
    // SAFETY: C strings, as the header says.
    let (prefix, name) = unsafe { (text(operation.prefix)?, text(operation.name)?) };
    let of_kind;
    let prefix = match prefix {
        Some(prefix) => prefix,
        None => {
            of_kind = default_prefix(operation.kind);
            &of_kind
        }
    };
    let context = Context(operation.context);
    let callback: Callback = Box::new(move |result| {
        let mut result = HorovodResult::new(result);
        // SAFETY: the caller's function, with its own pointer, and a result that lives as long as the call.
        unsafe { done(context.get(), &raw mut result) }
    });
    let set = ProcessSetId(operation.process_set);
    let tensors = tensors?.into();
    // Another thread allocates outputs, so nothing would be saved where there is something to allocate.
    let wait_timeout = match operation.allocate {
        None if may_wait => wait_timeout(&tensors),
        _ => Duration::ZERO,
    };
    let mut submission = Submission::new(prefix, name, op, set, tensors)
        .with_splits(operation_splits(splits, operation.splits));
    if let Some(allocate) = operation.allocate {
        let allocator: Allocator = Box::new(move |index, dtype, dims: &[u64]| {
            let (at, ndim) = (dims.as_ptr(), dims.len());
            // SAFETY: the caller's function, with its own pointer and a list that lives as long as the call.
            let memory = unsafe { allocate(context.get(), index, dtype as u8, at, ndim) };
            if memory.is_null() && !dims.contains(&0) {
                return Err("the adapter has no memory for it".into());
            }
            Ok(memory.cast::<u8>().into())
        });
        // SAFETY: as the header says of `allocate`.
        submission = unsafe { submission.allocating(allocator) };
    }
    engine.as_guest(|engine| engine.submit_and_wait(submission, wait_timeout, callback))
}

fn operation_splits(splits: &[i64], given: *const i64) -> Option<Vec<i64>> {
    (!given.is_null()).then(|| splits.to_vec())
}

pub(super) fn op_of(operation: &HorovodOperation) -> Result<Op, Error> {
    let scale = Scale {
        pre: operation.prescale,
        post: operation.postscale,
    };
    match operation.kind {
        BARRIER => Ok(Op::Barrier),
        JOIN => Ok(Op::Join),
        kind => operation_of(kind, operation.reduce_op, scale, operation.root),
    }
}

fn default_prefix(kind: u8) -> String {
    match kind {
        BARRIER => "barrier".into(),
        JOIN => "join".into(),
        kind => KINDS
            .get(usize::from(kind))
            .map_or_else(String::new, |name| name.to_ascii_lowercase()),
    }
}

unsafe fn tensor_of(tensor: &HorovodTensor, op: &Op) -> Result<Tensor, Error> {
    let dtype = DType::from_code(tensor.dtype)
        .ok_or_else(|| invalid(format!("unknown dtype code {}", tensor.dtype)))?;
    let device = match tensor.device {
        0 => Device::Cpu,
        1 => Device::Gpu,
        other => return Err(invalid(format!("unknown device code {other}"))),
    };
    // SAFETY: null or as long as its count, as the header says.
    let dims = unsafe { list(tensor.dims, tensor.ndim) };
    let meta = TensorMeta::new(dtype, dims);
    let output = match op {
        Op::Allreduce { .. } | Op::Broadcast { .. } => Output::At(tensor.output.cast()),
        _ if tensor.output.is_null() => Output::Allocate,
        _ => {
            return Err(invalid(
                "the output of an allgather, alltoall or reducescatter is allocated when its size is known: \
                 horovod_tensor.output must be NULL",
            ));
        }
    };
    // SAFETY: as the header says of tensors.
    let tensor = unsafe { Tensor::new(meta, tensor.input.cast(), output).on(device) };
    if !tensor.has_memory() {
        let shape = &tensor.meta().shape;
        return Err(invalid(format!(
            "a tensor of shape {shape:?} has no memory"
        )));
    }
    Ok(tensor)
}

/// A structure of the caller's, which must not be of an older version than the first.
pub(super) unsafe fn sized<'a, T>(structure: *const T) -> Result<&'a T, Error> {
    if structure.is_null() {
        return Err(invalid("a structure is null"));
    }
    // SAFETY: its first field holds its size, as the caller promises.
    let given = unsafe { structure.cast::<u32>().read() } as usize;
    if given < size_of::<T>() {
        return Err(invalid(format!(
            "a structure of {given} bytes where version {} of this interface has {}: set struct_size to its sizeof",
            super::ABI_VERSION,
            size_of::<T>()
        )));
    }
    // SAFETY: so much is there.
    Ok(unsafe { &*structure })
}

/// The list's elements are as far apart as the caller's own version makes them.
unsafe fn tensors_of<'a>(
    first: *const HorovodTensor,
    count: usize,
) -> Result<Vec<&'a HorovodTensor>, Error> {
    if first.is_null() || count == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: as the caller promises, for the first.
    let size = unsafe { sized(first)? }.struct_size as usize;
    if !size.is_multiple_of(align_of::<HorovodTensor>()) {
        return Err(invalid(format!(
            "horovod_tensor.struct_size is {size}, which is no sizeof"
        )));
    }
    (0..count)
        // SAFETY: as the caller promises, for each.
        .map(|i| unsafe { sized(first.byte_add(i * size)) })
        .collect()
}

pub(super) unsafe fn list<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if first.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: as long as its count, as the caller promises.
    unsafe { slice::from_raw_parts(first, count) }
}

pub(super) unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>, Error> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: a C string, as the caller promises.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str().map_err(|_| invalid("a name is not UTF-8"))?;
    Ok(Some(text))
}

fn invalid(text: impl Into<String>) -> Error {
    Error::Invalid(text.into())
}

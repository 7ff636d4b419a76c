//! The core's C functions (`python/horovod/include/horovod.h`), found in the module `horovod._core` that Python loaded.

use std::ffi::{CStr, c_char, c_void};
use std::mem::size_of;
use std::path::PathBuf;

use crate::loaded_objects::{Library, own_path, paths, text};
use crate::operations::OperationCode;

/// The version of the header that this follows.
const ABI_VERSION: u32 = 1;

pub(crate) const OK: i32 = 0;
pub(crate) const INVALID: i32 = 1;
pub(crate) const NOT_INITIALIZED: i32 = 3;
pub(crate) const STALLED: i32 = 4;
pub(crate) const REPLICAS_DIFFER: i32 = 5;

/// How an operation has ended; only the core knows more.
#[repr(C)]
pub(crate) struct CoreResult {
    _private: [u8; 0],
}

/// One tensor; `horovod_tensor` of the header.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CoreTensor {
    struct_size: u32,
    dtype: u8,
    device: u8,
    input: *const c_void,
    output: *mut c_void,
    dims: *const u64,
    ndim: usize,
}

impl CoreTensor {
    /// In host memory; a null `output` is allocated late. The memory of both pointers has to outlive the submission.
    pub(crate) fn new(dtype: u8, dims: &[i64], input: *const c_void, output: *mut c_void) -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            dtype,
            device: 0,
            input,
            output,
            // TensorFlow's dimensions are never negative here.
            dims: dims.as_ptr().cast(),
            ndim: dims.len(),
        }
    }
}

type Done = unsafe extern "C" fn(context: *mut c_void, result: *mut CoreResult);
pub(crate) type Allocate = unsafe extern "C" fn(
    context: *mut c_void,
    index: usize,
    dtype: u8,
    dims: *const u64,
    ndim: usize,
) -> *mut c_void;

/// One operation; `horovod_operation` of the header.
#[repr(C)]
pub(crate) struct CoreOperation {
    struct_size: u32,
    kind: u8,
    reduce_op: u8,
    process_set: u32,
    root: u32,
    prefix: *const c_char,
    name: *const c_char,
    prescale: f64,
    postscale: f64,
    tensors: *const CoreTensor,
    tensor_count: usize,
    splits: *const i64,
    split_count: usize,
    done: Done,
    allocate: Option<Allocate>,
    context: *mut c_void,
    may_wait: u8,
}

/// An operation, apart from its tensors.
pub(crate) struct Described<'a> {
    pub(crate) kind: OperationCode,
    pub(crate) reduce_op: u8,
    pub(crate) process_set: u32,
    pub(crate) root: u32,
    pub(crate) name: &'a CStr,
    pub(crate) prescale: f64,
    pub(crate) postscale: f64,
    pub(crate) splits: Option<&'a [i64]>,
    /// Whether the thread that submits it may wait for it.
    pub(crate) may_wait: bool,
}

/// The looked-up functions.
pub(crate) struct CoreFunctions {
    enqueue: unsafe extern "C" fn(*const CoreOperation, *mut c_char, usize) -> i32,
    result_status: unsafe extern "C" fn(*const CoreResult) -> i32,
    result_error: unsafe extern "C" fn(*const CoreResult) -> *const c_char,
    result_refused: unsafe extern "C" fn(*const CoreResult) -> i32,
    result_received_splits: unsafe extern "C" fn(*const CoreResult, *mut usize) -> *const u64,
    result_last_joined: unsafe extern "C" fn(*const CoreResult) -> i32,
    rank: extern "C" fn() -> i32,
    size: extern "C" fn() -> i32,
    local_rank: extern "C" fn() -> i32,
    local_size: extern "C" fn() -> i32,
    process_set_rank: extern "C" fn(u32) -> i32,
    process_set_size: extern "C" fn(u32) -> i32,
}

/// First part of every name: operations of another framework in the same process have others.
const PREFIX: &CStr = c"tensorflow";

/// Longest text of a refusal.
const ERROR_BYTES: usize = 4096;

impl CoreFunctions {
    /// Looks them up.
    ///
    /// # Errors
    /// The core is not loaded, is of another version, or lacks a function.
    pub(crate) fn resolve() -> Result<Self, String> {
        let library = core_library().ok_or(
            "the module horovod._core is not loaded in this process; import horovod first",
        )?;
        /// # Safety
        /// As of [`Library::function`].
        unsafe fn find<F: Copy>(library: Library, name: &CStr) -> Result<F, String> {
            // SAFETY: as the caller promises.
            let function = unsafe { library.function(name) };
            function.ok_or_else(|| format!("horovod._core lacks {}", name.to_string_lossy()))
        }
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the field or variable has the type that the header declares.
                unsafe { find(library, $name)? }
            };
        }
        let version: extern "C" fn() -> u32 = function!(c"horovod_abi_version");
        if version() != ABI_VERSION {
            return Err(format!(
                "horovod._core speaks version {} of horovod.h, this library version {ABI_VERSION}; install horovod \
                 again",
                version()
            ));
        }
        Ok(Self {
            enqueue: function!(c"horovod_enqueue"),
            result_status: function!(c"horovod_result_status"),
            result_error: function!(c"horovod_result_error"),
            result_refused: function!(c"horovod_result_refused"),
            result_received_splits: function!(c"horovod_result_received_splits"),
            result_last_joined: function!(c"horovod_result_last_joined"),
            rank: function!(c"horovod_rank"),
            size: function!(c"horovod_size"),
            local_rank: function!(c"horovod_local_rank"),
            local_size: function!(c"horovod_local_size"),
            process_set_rank: function!(c"horovod_process_set_rank"),
            process_set_size: function!(c"horovod_process_set_size"),
        })
    }

    /// Submits an operation; `done` will be called unless there is an error: its status and text.
    ///
    /// # Safety
    /// The tensors' memory is as the header asks until `done` is called, and `context` is what `done` and `allocate`
    /// expect.
    pub(crate) unsafe fn enqueue(
        &self,
        described: &Described<'_>,
        tensors: &[CoreTensor],
        done: Done,
        allocate: Option<Allocate>,
        context: *mut c_void,
    ) -> Result<(), (i32, String)> {
        let splits = described.splits;
        let (prefix, name) = match described.kind {
            // One for all frameworks, numbered.
            OperationCode::Join => (std::ptr::null(), std::ptr::null()),
            _ => (PREFIX.as_ptr(), described.name.as_ptr()),
        };
        let operation = CoreOperation {
            struct_size: size_of::<CoreOperation>() as u32,
            kind: described.kind as u8,
            reduce_op: described.reduce_op,
            process_set: described.process_set,
            root: described.root,
            prefix,
            name,
            prescale: described.prescale,
            postscale: described.postscale,
            tensors: tensors.as_ptr(),
            tensor_count: tensors.len(),
            splits: splits.map_or(std::ptr::null(), <[i64]>::as_ptr),
            split_count: splits.map_or(0, <[i64]>::len),
            done,
            allocate,
            context,
            may_wait: u8::from(described.may_wait),
        };
        let mut error = [0 as c_char; ERROR_BYTES];
        // SAFETY: the structure follows the header; the rest as the caller promises.
        let status =
            unsafe { (self.enqueue)(&raw const operation, error.as_mut_ptr(), error.len()) };
        if status == OK {
            return Ok(());
        }
        // SAFETY: the core has written a C string.
        Err((status, unsafe { text(error.as_ptr()) }))
    }

    /// Reads how an operation has ended.
    ///
    /// # Safety
    /// `result` is that of a call of `done` that has not returned.
    pub(crate) unsafe fn outcome(&self, result: *mut CoreResult) -> OperationOutcome {
        // SAFETY: as the caller promises; so below.
        let status = unsafe { (self.result_status)(result) };
        if status != OK {
            return OperationOutcome::Failed {
                status,
                // SAFETY: a C string that lives as long as the result.
                text: unsafe { text((self.result_error)(result)) },
                // SAFETY: as above.
                refused: unsafe { (self.result_refused)(result) } != 0,
            };
        }
        let mut count = 0;
        // SAFETY: as above; `count` is writable.
        let first = unsafe { (self.result_received_splits)(result, &raw mut count) };
        let received = if first.is_null() {
            Vec::new()
        } else {
            // SAFETY: so many rows, which live as long as the result.
            unsafe { std::slice::from_raw_parts(first, count) }.to_vec()
        };
        OperationOutcome::Done {
            received,
            // SAFETY: as above.
            last_joined: unsafe { (self.result_last_joined)(result) },
        }
    }

    /// Rank in the job; -1 without one.
    pub(crate) fn rank(&self) -> i32 {
        (self.rank)()
    }

    /// Ranks of the job; -1 without one.
    pub(crate) fn size(&self) -> i32 {
        (self.size)()
    }

    /// Rank among those of this host; -1 without a job.
    pub(crate) fn local_rank(&self) -> i32 {
        (self.local_rank)()
    }

    /// Ranks on this host; -1 without a job.
    pub(crate) fn local_size(&self) -> i32 {
        (self.local_size)()
    }

    /// Place among the members of a process set; -1 outside of it.
    pub(crate) fn process_set_rank(&self, set: u32) -> i32 {
        (self.process_set_rank)(set)
    }

    /// Members of a process set; -1 if there is no such set.
    pub(crate) fn process_set_size(&self, set: u32) -> i32 {
        (self.process_set_size)(set)
    }
}

/// How an operation has ended.
pub(crate) enum OperationOutcome {
    Done {
        /// Alltoall: rows received from each member.
        received: Vec<u64>,
        last_joined: i32,
    },
    Failed {
        status: i32,
        text: String,
        /// The ranks were at odds with each other, and the job goes on.
        refused: bool,
    },
}

/// The library that is the module `horovod._core`: that of the package that this library lies in, if it is loaded.
fn core_library() -> Option<Library> {
    let package = own_path().and_then(|own| {
        let folder = own.canonicalize().ok()?;
        Some(folder.parent()?.parent()?.to_path_buf())
    });
    let is_core = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy());
        name.is_some_and(|name| name.starts_with("_core.") || name == "lib_core.so")
    };
    let mut candidates: Vec<_> = paths().into_iter().filter(is_core).collect();
    candidates.sort_by_key(|path| {
        let folder = path.canonicalize().ok();
        folder.as_deref().and_then(std::path::Path::parent) != package.as_deref()
    });
    candidates.into_iter().find_map(|path| {
        let library = Library::loaded(&path)?;
        library.symbol(c"horovod_abi_version").map(|_| library)
    })
}

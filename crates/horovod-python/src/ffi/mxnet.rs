//! Operations in MXNet's engine: each waits for its arrays there, runs in the core, and ends there when the core calls.
//!
//! Called by `python/horovod/mxnet/_engine.py` through ctypes. MXNet's functions are found in what Python has loaded.

mod library;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Arc;

use horovod_engine::{Op, Output, ProcessSetId, Submission, Tensor, Tensors};

use self::library::{Array, Handle, Library, OnComplete, c_string};
use super::guarded;
use super::operation::{HorovodOperation, list, op_of, sized, text};
use crate::plain::overlap;

/// `mxnet::Context`: the CPU, the first.
static CPU: [i32; 2] = [1, 0];
/// `FnProperty::kCPUPrioritized`: threads that obey priorities, and are not those that compute.
static PRIORITIZED: c_int = 3;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Hands an operation to the core, which ends it in MXNet's engine; an error has to end it otherwise.
type Submit = Box<dyn FnOnce(OnComplete) -> Result<(), String> + Send>;

/// Argument of the engine's function.
struct Pending {
    library: &'static Library,
    /// The engine's name of the operation, as long as that lives.
    name: CString,
    /// Taken when the function is called, which MXNet does not do when an input has an error.
    submit: Option<Submit>,
}

/// Why the last call on this thread returned -1.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn horovod_mxnet_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

/// 0, or -1 with a text in [`horovod_mxnet_last_error`].
fn answered(body: impl FnOnce() -> Result<(), String>) -> i32 {
    let Err(text) = guarded(Err("the core panicked".to_owned()), body) else {
        return 0;
    };
    LAST_ERROR.set(c_string(&text));
    -1
}

/// Looks MXNet's functions up in its library, which is loaded already.
///
/// # Safety
/// `path` is a C string.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_mxnet_load(path: *const c_char) -> i32 {
    // SAFETY: as the caller promises.
    answered(|| Library::load(unsafe { CStr::from_ptr(path) }))
}

/// Pushes an allreduce or a broadcast of `count` arrays into MXNet's engine and returns; `outputs` null: in place.
///
/// # Safety
/// Of `operation` what does not concern tensors is as the header says, and its names are given; the lists hold `count`
/// arrays of MXNet.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn horovod_mxnet_push(
    operation: *const HorovodOperation,
    inputs: *const Handle,
    outputs: *const Handle,
    count: usize,
    priority: c_int,
) -> i32 {
    answered(|| {
        let library = Library::get()?;
        // SAFETY: as the caller promises.
        let (operation, prefix, name, inputs, outputs) = unsafe {
            let operation = sized(operation).map_err(|e| e.to_string())?;
            (
                operation,
                text(operation.prefix).map_err(|e| e.to_string())?,
                text(operation.name).map_err(|e| e.to_string())?,
                arrays(library, list(inputs, count))?,
                arrays(library, list(outputs, count))?,
            )
        };
        let named = Named {
            prefix: prefix.unwrap_or_default().to_owned(),
            name: name.unwrap_or_default().to_owned(),
            set: ProcessSetId(operation.process_set),
        };
        let op = op_of(operation).map_err(|e| e.to_string())?;
        for input in &inputs {
            input.push_reorder();
        }
        let (first, second) = (distinct(&inputs), distinct(&outputs));
        let (read, written) = if outputs.is_empty() {
            (second, first)
        } else {
            (first, second)
        };
        let pending = Box::into_raw(Box::new(Pending {
            library,
            name: c_string(&format!("{}.{}", named.prefix, named.name)),
            submit: Some(Box::new(move |on_complete| {
                let end = move |error| on_complete.call(library, error);
                submit(&named, op, inputs, outputs, end)
            })),
        }));
        // SAFETY: the handles are the operation's own, no storage is listed twice, for the operation would wait for
        // itself; the box, and the name in it, live until `delete` gets it, also when MXNet refuses.
        library.checked(unsafe {
            (library.push)(
                run,
                pending,
                delete,
                &CPU,
                read.as_ptr(),
                read.len() as c_int,
                written.as_ptr(),
                written.len() as c_int,
                &PRIORITIZED,
                priority,
                (*pending).name.as_ptr(),
                false,
            )
        })
    })
}

unsafe fn arrays(library: &'static Library, handles: &[Handle]) -> Result<Vec<Array>, String> {
    (handles.iter())
        // SAFETY: an array of MXNet, as the caller promises.
        .map(|handle| unsafe { Array::share(library, *handle) })
        .collect()
}

/// One array of each storage: views of one array are one to MXNet's engine.
fn distinct(arrays: &[Array]) -> Vec<Handle> {
    let mut all: Vec<_> = (arrays.iter().map(|a| (a.storage(), a.handle))).collect();
    all.sort_unstable();
    all.dedup_by_key(|(storage, _)| *storage);
    all.into_iter().map(|(_, handle)| handle).collect()
}

/// The engine's function: all arrays are ready and, as far as they are written, nobody else's until `on_complete`.
unsafe extern "C" fn run(_: *mut c_void, on_complete: *const OnComplete, pending: *mut Pending) {
    // SAFETY: MXNet's object may be copied while this runs, and the box stays until the copy is called.
    let (on_complete, pending) = unsafe { (on_complete.read(), &mut *pending) };
    let library = pending.library;
    let outcome = guarded(Err("the core panicked".to_owned()), || {
        let submit = pending.submit.take().ok_or("called twice")?;
        submit(on_complete)
    });
    if let Err(text) = outcome {
        on_complete.call(library, Some(text));
    }
}

/// An operation is known by these.
struct Named {
    prefix: String,
    name: String,
    set: ProcessSetId,
}

/// Hands an operation to the core; `end` is called with why it failed, if it did.
fn submit(
    named: &Named,
    op: Op,
    inputs: Vec<Array>,
    outputs: Vec<Array>,
    end: impl FnOnce(Option<String>) + Send + 'static,
) -> Result<(), String> {
    let Named { prefix, name, set } = named;
    let engine = horovod_engine::engine().map_err(|e| e.to_string())?;
    let kept = Arc::new((inputs, outputs));
    let mut tensors = Vec::with_capacity(kept.0.len());
    for (i, input) in kept.0.iter().enumerate() {
        let from = input.address()?;
        let to = kept.1.get(i).map_or(Ok(from), Array::address)?;
        // SAFETY: MXNet leaves the arrays alone until the operation ends, and what is kept holds their memory.
        let tensor = unsafe { Tensor::new(input.meta.clone(), from, Output::At(to)) };
        if !tensor.has_memory() {
            return Err(format!("{:?}: an array has no memory", input.meta.shape));
        }
        tensors.push(tensor.kept_by(kept.clone()));
    }
    if kept.1.is_empty() && overlap(&tensors) {
        return Err("Arrays of a group share memory, so they cannot be reduced in place beside each other: pass a \
                    copy() of one, or use the form that returns new arrays.".into());
    }
    let submission = Submission::new(prefix, Some(name), op, *set, Tensors::from(tensors))
        .calling(Box::new(|result| end(result.err().map(|e| e.to_string()))));
    let submitted = engine.as_guest(|engine| engine.submit(submission));
    submitted.map(drop).map_err(|e| e.to_string())
}

/// Called when the operation has ended, or was skipped.
unsafe extern "C" fn delete(pending: *mut Pending) {
    // SAFETY: it comes from `Box::into_raw` and is given back once.
    guarded((), || drop(unsafe { Box::from_raw(pending) }));
}

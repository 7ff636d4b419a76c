//! GPUs as frameworks tell of them: the stream that a call is on, when its data are ready, memory for results; and the
//! libraries that were found for them.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, Once, PoisonError};

use horovod_engine::config::ProcessEnvironment;
use horovod_engine::gpu::{
    Found, GpuError, LaunchEnd, RawStream, Ready, Stack, choose_stack, on_device, stack,
};
use horovod_engine::{Allocated, Allocator, DType, Engine, Error, Leaving, StopReason, printable};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};

use crate::dlpack::{CUDA, Reader};
use crate::errors::{interrupt_or, operation_error};
use crate::exit::{attached, detached};
use crate::signals::{self, SIGNAL_SLICE};

/// `DLPackCurrentWorkStream`: kind and number of a device, and where to put the stream.
pub(crate) type CurrentStream = unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int;

/// Where a framework tells the current stream of each GPU.
#[derive(Clone)]
pub(crate) enum StreamSource {
    /// Its exchange table.
    Table(CurrentStream),
    /// A function of the adapter.
    Function(Arc<Py<PyAny>>),
}

impl StreamSource {
    /// The stream that this thread's work on a GPU goes to.
    pub(crate) fn current(&self, py: Python<'_>, ordinal: i32) -> PyResult<RawStream> {
        match self {
            Self::Table(ask) => {
                let mut stream = null_mut();
                // SAFETY: the table lives as long as the process; the interpreter lock is held; there is room for the
                // answer.
                let status = unsafe { ask(CUDA, ordinal, &raw mut stream) };
                if status != 0 {
                    return Err(PyErr::take(py).unwrap_or_else(|| {
                        PyRuntimeError::new_err(format!(
                            "the framework does not tell the current stream of cuda:{ordinal}"
                        ))
                    }));
                }
                Ok(RawStream(stream))
            }
            Self::Function(ask) => {
                let address: usize = ask.call1(py, (ordinal,))?.extract(py)?;
                Ok(RawStream(std::ptr::with_exposed_provenance_mut(address)))
            }
        }
    }
}

/// Note on a stream that the operands of an operation, of this kind and name, are ready when all that is on the stream
/// now has run.
pub(crate) fn record(
    py: Python<'_>,
    (kind, name): (&str, Option<&str>),
    ordinal: i32,
    stream: RawStream,
) -> PyResult<Arc<Ready>> {
    prepare(py);
    Ready::record(ordinal, stream).map_err(|error| match error {
        Error::Capturing(_) => {
            let dot = if name.is_some() { "." } else { "" };
            let name = printable(name.unwrap_or_default());
            PyRuntimeError::new_err(format!("{kind}{dot}{name}: {error}"))
        }
        other => operation_error(py, other),
    })
}

/// Have the current stream wait for the end of an operation; or the host, where that was asked for or nobody tells the
/// stream.
pub(crate) fn order(
    py: Python<'_>,
    end: &Arc<dyn LaunchEnd>,
    streams: Option<StreamSource>,
    engine: &Engine,
) -> PyResult<()> {
    if let Some(streams) = &streams {
        let stream = streams.current(py, end.ordinal())?;
        end.order(stream).map_err(|e| operation_error(py, e))?;
    }
    if streams.is_some() && engine.config().gpu.asynchronous {
        return Ok(());
    }
    let wait = || engine.wait_for_launch(&**end, SIGNAL_SLICE);
    while !detached(py, wait).map_err(|e| interrupt_or(py, operation_error(py, e)))? {
        signals::check(py)?;
    }
    Ok(())
}

fn stack_of(is_rocm: bool) -> Stack {
    if is_rocm { Stack::Rocm } else { Stack::Cuda }
}

/// The current streams of one type's framework.
#[pyclass(frozen, module = "horovod._core")]
pub(crate) struct Streams(pub(crate) StreamSource);

#[pymethods]
impl Streams {
    /// By the exchange table of tensors of this type; without one, and for AMD's GPUs, by `ask(ordinal)`, which returns
    /// the address: nobody has tried what the table tells there. Raises if other GPUs are used by this process.
    #[new]
    #[pyo3(signature = (class, ask, is_rocm = false))]
    fn new(class: &Bound<'_, PyType>, ask: Py<PyAny>, is_rocm: bool) -> PyResult<Self> {
        let stack = stack_of(is_rocm);
        choose_stack(stack).map_err(|e| PyRuntimeError::new_err(e.to_string()))?;
        let table = match stack {
            Stack::Cuda => Reader::of(class)?.and_then(Reader::streams),
            Stack::Rocm => None,
        };
        Ok(Self(
            table.unwrap_or_else(|| StreamSource::Function(Arc::new(ask))),
        ))
    }

    /// Address of the stream that this thread's work on a GPU goes to.
    fn current(&self, py: Python<'_>, ordinal: i32) -> PyResult<usize> {
        Ok(self.0.current(py, ordinal)?.0.expose_provenance())
    }
}

/// Memory for results, by tensor, once a framework has given it.
pub(crate) type Given = Arc<Mutex<Vec<Option<(Py<PyAny>, Vec<u64>)>>>>;

/// Allocator for the results of a submission: it calls the adapter's functions, one for each tensor. The second value
/// keeps the memory until a thread waits for the operation.
///
/// A function may run work on the submission's stream, which is the framework's own, to allocate memory. The
/// operation's writes come after that work.
pub(crate) fn allocating(
    functions: Vec<Py<PyAny>>,
    ordinal: i32,
    stream: RawStream,
) -> (Allocator, Given) {
    let given: Given = Arc::new(Mutex::new(functions.iter().map(|_| None).collect()));
    let kept = given.clone();
    let allocate = move |i: usize, _: DType, shape: &[u64]| {
        let allocated = attached(|py| -> PyResult<_> {
            let function = functions
                .get(i)
                .ok_or_else(|| PyRuntimeError::new_err("there is no allocator for it"))?;
            let wanted = PyTuple::new(py, shape)?;
            let (address, owner): (usize, Py<PyAny>) =
                on_device(ordinal, || function.call1(py, (wanted,)))
                    .map_err(|e| operation_error(py, e))??
                    .extract(py)?;
            let ready = Ready::record(ordinal, stream).map_err(|e| operation_error(py, e))?;
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(place) = kept.get_mut(i) {
                *place = Some((owner, shape.to_vec()));
            }
            Ok(Allocated {
                memory: std::ptr::with_exposed_provenance_mut(address),
                placement: Some(ready),
            })
        });
        allocated
            .ok_or_else(|| "the interpreter is ending".to_owned())?
            .map_err(|e| e.to_string())
    };
    (Box::new(allocate), given)
}

/// Tell the runtime, before it looks for the first time, in which folders of Python's packages NCCL, or what AMD's GPUs
/// need, may be.
fn prepare(py: Python<'_>) {
    static WARNED: Once = Once::new();
    if WARNED.is_completed() {
        return;
    }
    // Before the `Once`, which must not wait for the interpreter's lock.
    let folders = |function: &str| -> Vec<PathBuf> {
        let folders = py
            .import("horovod.common._gpu_libraries")
            .and_then(|module| module.call_method0(function))
            .and_then(|folders| folders.extract());
        folders.unwrap_or_else(|why| {
            tracing::warn!("the folders of Python's packages are not searched for NCCL: {why}");
            Vec::new()
        })
    };
    let (wheels, rocm) = (folders("wheel_folders"), folders("rocm_folders"));
    WARNED.call_once(|| {
        // A setting that cannot be read is said at init.
        if let Ok(search) = horovod_engine::config::gpu_search(&ProcessEnvironment, wheels, rocm) {
            horovod_engine::gpu::set_search(search);
        }
    });
}

/// Tell the runtime in which folders of packages NCCL may be, for those who submit without the interpreter later.
/// Nothing is looked for or loaded.
#[pyfunction]
pub(crate) fn prepare_gpus(py: Python<'_>) {
    prepare(py);
}

/// Say whose GPUs a framework is made for, before the first tensor on one, for ranks that never have any. Nothing is
/// opened, and nothing becomes of it where other GPUs are used already: a tensor's `Streams` will tell.
#[pyfunction]
pub(crate) fn prefer_gpus(is_rocm: bool) {
    let _ = choose_stack(stack_of(is_rocm));
}

/// Set the advice of errors about tensors on several GPUs: how a script chooses one with its framework.
#[pyfunction]
pub(crate) fn advise_one_gpu(advice: String) {
    horovod_engine::gpu::set_how_to_choose(advice);
}

/// The libraries for GPUs: for each where it is and its version, or why it cannot be used. "rocm" is there only where AMD's
/// GPUs are those of this process. CUDA is not initialised.
#[pyfunction]
pub(crate) fn gpu_libraries(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    prepare(py);
    let answer = PyDict::new(py);
    let tell = |name: &str, found: Result<Found, GpuError>| match found {
        Ok(found) => answer.set_item(name, (found.path, found.version)),
        Err(why) => answer.set_item(name, why.to_string()),
    };
    match stack() {
        Stack::Cuda => tell("cuda", horovod_engine::gpu::find_driver())?,
        Stack::Rocm => {
            answer.set_item("cuda", "the GPUs of this process are AMD's (ROCm)")?;
            tell("rocm", horovod_engine::gpu::find_driver())?;
        }
    }
    tell("nccl", horovod_engine::gpu::find_nccl())?;
    Ok(answer)
}

/// NCCL's version code; 0 where its library is not found, or operations on GPU tensors are to go through host memory.
#[pyfunction]
pub(crate) fn nccl_version(py: Python<'_>) -> i32 {
    prepare(py);
    let operations = match horovod_engine::engine() {
        Ok(engine) => engine.config().gpu.operations,
        // A setting that cannot be read is said at init.
        Err(_) => horovod_engine::config::gpu_operations(&ProcessEnvironment).unwrap_or_default(),
    };
    horovod_engine::gpu::nccl_version(operations).unwrap_or(0)
}

/// The first version of NCCL that allows several ranks on one GPU, as PyTorch tells versions.
pub(crate) fn nccl_shares_gpus_since() -> (i32, i32, i32) {
    let code = horovod_engine::gpu::NCCL_SHARES_GPUS_SINCE;
    (code / 10_000, code / 100 % 100, code % 100)
}

/// Why this process can never use its GPU again; `None`: it can, as far as is known.
#[pyfunction]
pub(crate) fn gpu_loss() -> Option<String> {
    horovod_engine::gpu::loss().map(|loss| loss.to_string())
}

/// Wait on the host until everything that was launched on GPUs has ended; raises what went wrong there.
#[pyfunction]
pub(crate) fn wait_for_devices(py: Python<'_>) -> PyResult<()> {
    if !horovod_engine::gpu::is_initialised() {
        return Ok(());
    }
    let Ok(engine) = horovod_engine::engine() else {
        return Ok(());
    };
    loop {
        match detached(py, || engine.wait_for_devices(SIGNAL_SLICE)) {
            Ok(true) => return Ok(()),
            Ok(false) => signals::check(py)?,
            // Nothing was in flight when the job ended.
            Err(Error::Stopped {
                why: StopReason::Left(Leaving::Asked | Leaving::Ended),
                ..
            }) => return Ok(()),
            Err(error) => return Err(interrupt_or(py, operation_error(py, error))),
        }
    }
}

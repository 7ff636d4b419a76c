//! Operations: tensor descriptions in, handles out. The wait for a handle releases the interpreter lock.

use std::sync::Arc;
use std::time::Duration;

use horovod_engine::gpu::RawStream;
use horovod_engine::{
    DType, Engine, Error, Handle, Op, Output, ProcessSetId, Rank, ReduceOp, Scale, Softly,
    Submission, Tensor, TensorMeta, Waited,
};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyTuple;

use crate::errors::{interrupt_or, operation_error};
use crate::exit::{detached, stay_if_leaving};
use crate::gpu::{Given, StreamSource, Streams, allocating, record};
use crate::plain::InPlace;
use crate::results::{is_lost, lost, outputs, outputs_on_gpu};
use crate::runtime::registered;
use crate::signals::{self, SIGNAL_SLICE};

/// Names of the operation kinds, indexed by code.
pub(crate) const KINDS: [&str; 5] = [
    "ALLREDUCE",
    "ALLGATHER",
    "BROADCAST",
    "ALLTOALL",
    "REDUCESCATTER",
];
pub(crate) const ALLREDUCE: u8 = 0;
const ALLGATHER: u8 = 1;
pub(crate) const BROADCAST: u8 = 2;
const ALLTOALL: u8 = 3;
const REDUCESCATTER: u8 = 4;

/// Input pointer, output pointer (0: allocate), dtype code, shape, owner.
type TensorArgs = (usize, usize, u8, Vec<u64>, Py<PyAny>);

/// Prefix, name and process set: an operation is known by them.
type KeyArgs = (PyBackedStr, Option<PyBackedStr>, Option<u32>);

/// The codes of the kind and of the operator, the factors before and after, the root, and the rows for each member.
type OperationArgs = (u8, u8, f64, f64, i64, Option<Vec<i64>>);

/// A GPU: the source of its framework's current stream, and its number. One function for each tensor allocates its
/// output, if that has no memory yet.
type GpuArgs = (Py<Streams>, i32, Option<Vec<Py<PyAny>>>);

/// A GPU and the stream of a call.
struct CallStream {
    streams: StreamSource,
    ordinal: i32,
    stream: RawStream,
}

impl CallStream {
    fn of(py: Python<'_>, streams: &Streams, ordinal: i32) -> PyResult<Self> {
        let streams = streams.0.clone();
        let stream = streams.current(py, ordinal)?;
        Ok(Self {
            streams,
            ordinal,
            stream,
        })
    }
}

/// Queue one operation and return its handle. `wait` later returns the value of `finish` for the outputs.
#[pyfunction]
#[pyo3(signature = (key, operation, tensors, finish=None, gpu=None))]
pub(crate) fn enqueue(
    py: Python<'_>,
    key: KeyArgs,
    operation: OperationArgs,
    tensors: Vec<TensorArgs>,
    finish: Option<Py<PyAny>>,
    gpu: Option<GpuArgs>,
) -> PyResult<u64> {
    stay_if_leaving(py);
    let engine = horovod_engine::engine().map_err(|e| operation_error(py, e))?;
    let (prefix, name, process_set) = &key;
    let (prefix, name) = (&**prefix, name.as_deref());
    let set = registered(*process_set)?;
    let (kind, op, prescale, postscale, root, splits) = operation;
    let op = op_from((kind, op, prescale, postscale, root))?;
    let (gpu, allocators) = gpu
        .map(|(streams, ordinal, allocators)| ((streams, ordinal), allocators))
        .unzip();
    let allocators = allocators.flatten();
    let place = gpu.map(|(streams, ordinal)| CallStream::of(py, streams.get(), ordinal));
    let place = place.transpose()?;
    // In this case the adapter has allocated the results.
    let is_scattered =
        matches!(op, Op::Reducescatter { .. }) && place.is_some() && allocators.is_none();
    let (allocator, given) = place
        .as_ref()
        .zip(allocators)
        .map(|(place, functions)| allocating(functions, place.ordinal, place.stream))
        .unzip();
    let needs_output = matches!(op, Op::Allreduce { .. } | Op::Broadcast { .. });
    let tensors = tensors
        .into_iter()
        .map(|(input, output, dtype, shape, owner)| {
            let dtype = DType::from_code(dtype)
                .ok_or_else(|| PyValueError::new_err(format!("unknown dtype code {dtype}")))?;
            let at = std::ptr::with_exposed_provenance_mut(output);
            let output = match output {
                // The engine refuses shapes that do not fit when it carries out the operation.
                _ if is_scattered => Output::Exactly {
                    at,
                    bytes: scattered_bytes(&engine, set, dtype, &shape).unwrap_or(0),
                },
                0 if !needs_output => Output::Allocate,
                // Tensors without elements may have a null pointer.
                _ => Output::At(at),
            };
            let meta = TensorMeta::new(dtype, shape);
            let input = std::ptr::with_exposed_provenance(input);
            // SAFETY: the adapter keeps the tensors at these addresses alive by their owner. hvd's documented contract
            // forbids any access to them before the handle has ended.
            let tensor = unsafe { Tensor::new(meta, input, output) };
            Ok(tensor.kept_by(Arc::new((owner, given.clone()))))
        })
        .collect::<PyResult<Vec<_>>>()?;
    for t in &tensors {
        if !t.has_memory() {
            return Err(PyValueError::new_err(format!(
                "a tensor of shape {:?} has no memory",
                t.meta().shape
            )));
        }
    }
    let Some(place) = place else {
        let kept = finish.map(|finish| Arc::new(Kept::Finish(finish)) as horovod_engine::Kept);
        let submission = Submission::new(prefix, name, op, set, tensors.into())
            .with_splits(splits)
            .keeping(kept);
        return submit(py, &engine, submission);
    };
    let ready = record(py, (prefix, name), place.ordinal, place.stream)?;
    let kept: horovod_engine::Kept = Arc::new(Kept::OnGpu(OnGpu {
        streams: place.streams,
        given,
        finish,
    }));
    let tensors: Vec<_> = tensors
        .into_iter()
        // SAFETY: the adapter guarantees that the memory belongs to that GPU.
        .map(|tensor| unsafe { tensor.on_gpu(ready.clone()) })
        .collect();
    let mut submission = Submission::new(prefix, name, op, set, tensors.into()).with_splits(splits);
    if let Some(allocator) = allocator {
        // SAFETY: the adapter's functions allocate new memory of that GPU, and the tensors' owners keep it alive.
        submission = unsafe { submission.allocating(allocator) };
    }
    submit(py, &engine, submission.keeping(Some(kept)))
}

/// Returns the bytes of this rank's result of a reducescatter, or `None` if it has no result or the number overflows.
fn scattered_bytes(
    engine: &Engine,
    set: ProcessSetId,
    dtype: DType,
    shape: &[u64],
) -> Option<usize> {
    let (rows, row) = shape.split_first()?;
    let rows = engine.scattered_rows(set, *rows)?;
    let elems = row.iter().try_fold(rows, |n, d| n.checked_mul(*d))?;
    usize::try_from(elems).ok()?.checked_mul(dtype.size())
}

/// Return the rows of dimension 0 that this rank receives of a reducescatter of `rows` rows. None if this rank is no
/// member of the set.
#[pyfunction]
pub(crate) fn scattered_rows(process_set: Option<u32>, rows: u64) -> Option<u64> {
    let engine = horovod_engine::engine().ok()?;
    engine.scattered_rows(ProcessSetId(process_set?), rows)
}

pub(crate) fn submit(py: Python<'_>, engine: &Engine, submission: Submission<'_>) -> PyResult<u64> {
    let handle = engine.submit(submission);
    handle.map(|h| h.0).map_err(|e| operation_error(py, e))
}

/// Submit an operation, wait for it and return its result.
pub(crate) fn submit_and_wait(
    py: Python<'_>,
    engine: &Engine,
    submission: Submission<'_>,
) -> PyResult<Py<PyAny>> {
    let begun = detached(py, || engine.submit_and_wait_for(submission, SIGNAL_SLICE));
    let (handle, waited) = begun.map_err(|e| operation_error(py, e))?;
    result_of(py, engine, handle, waited)
}

/// Returns the operation for the codes and numbers of a call from Python.
pub(crate) fn op_from((kind, op, pre, post, root): (u8, u8, f64, f64, i64)) -> PyResult<Op> {
    let root = match (kind, u32::try_from(root)) {
        (_, Ok(root)) => root,
        (BROADCAST, Err(_)) => {
            return Err(PyValueError::new_err(format!(
                "broadcast received invalid root rank {root} for provided process set: it is the rank in the \
                 whole job, from 0"
            )));
        }
        _ => 0,
    };
    operation_of(kind, op, Scale { pre, post }, root)
        .map_err(|e| PyValueError::new_err(e.to_string()))
}

/// Returns the operation for these codes; only operations with tensors have codes.
pub(crate) fn operation_of(kind: u8, op: u8, scale: Scale, root: u32) -> Result<Op, Error> {
    let reduction = || {
        ReduceOp::from_code(op)
            .ok_or_else(|| Error::Invalid(format!("Reduction op type {op} not supported.")))
    };
    Ok(match kind {
        ALLREDUCE => Op::Allreduce {
            op: reduction()?,
            scale,
        },
        ALLGATHER => Op::Allgather,
        BROADCAST => Op::Broadcast { root: Rank(root) },
        ALLTOALL => Op::Alltoall,
        REDUCESCATTER => Op::Reducescatter {
            op: reduction()?,
            scale,
        },
        _ => return Err(Error::Invalid(format!("unknown operation kind {kind}"))),
    })
}

/// Returns whether elements of this type can be combined by `op`. The adapters raise the error, in their framework's
/// terms.
pub(crate) fn has_meaning(op: ReduceOp, dtype: DType) -> bool {
    match op {
        ReduceOp::Average => dtype != DType::Bool,
        ReduceOp::Adasum => dtype.is_float(),
        _ => true,
    }
}

/// Objects that the engine keeps until the handle's result is fetched.
pub(crate) enum Kept {
    /// This tensor is the result.
    InPlace(InPlace),
    /// These tensors are the result, returned in the caller's container. Each part is a [`Kept::InPlace`].
    GroupInPlace(Py<PyTuple>, Vec<horovod_engine::Kept>),
    /// The result is the value of this function for the outputs.
    Finish(Py<PyAny>),
    /// The objects of an operation on a GPU.
    OnGpu(OnGpu),
}

/// Objects kept for an operation on a GPU.
pub(crate) struct OnGpu {
    streams: StreamSource,
    /// Results that were allocated during the operation, because their sizes were not known before.
    given: Option<Given>,
    finish: Option<Py<PyAny>>,
}

impl Kept {
    /// Returns the source of the framework's current streams.
    fn streams(&self) -> Option<StreamSource> {
        match self {
            Self::InPlace(in_place) => in_place.reader.streams(),
            Self::GroupInPlace(_, parts) => {
                let first = parts.first()?.downcast_ref::<Self>();
                first.and_then(Self::streams)
            }
            Self::Finish(_) => None,
            Self::OnGpu(on_gpu) => Some(on_gpu.streams.clone()),
        }
    }
}

/// Wait for the operation, clear its handle and return its result. None if the handle's result was already returned.
#[pyfunction]
pub(crate) fn wait(py: Python<'_>, handle: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    stay_if_leaving(py);
    let handle = match handle.extract::<u64>() {
        Ok(handle) => handle,
        // No handle has a number this large.
        Err(e) if e.is_instance_of::<PyOverflowError>(py) => return Ok(py.None()),
        Err(e) => return Err(e),
    };
    let Ok(engine) = horovod_engine::engine() else {
        return without_result(py, handle);
    };
    let handle = Handle(handle);
    let waited = engine.wait(handle, Duration::ZERO);
    result_of(py, &engine, handle, waited)
}

/// Returns the result of an operation; `waited` is its state so far. Blocks until the operation has ended.
fn result_of(
    py: Python<'_>,
    engine: &Engine,
    handle: Handle,
    mut waited: Waited,
) -> PyResult<Py<PyAny>> {
    let (result, kept) = loop {
        match waited {
            Waited::Unknown => return without_result(py, handle.0),
            Waited::Ended { result, kept } => {
                break (
                    result.map_err(|e| interrupt_or(py, operation_error(py, e)))?,
                    kept,
                );
            }
            Waited::Pending => signals::check(py)?,
        }
        waited = detached(py, || engine.wait(handle, SIGNAL_SLICE));
    };
    let kept = kept.as_ref().and_then(|kept| kept.downcast_ref());
    if let Some(end) = &result.end {
        crate::gpu::order(py, end, kept.and_then(Kept::streams), engine)?;
    }
    match kept {
        Some(Kept::InPlace(in_place)) => {
            in_place.check(py)?;
            Ok(in_place.tensor.clone_ref(py))
        }
        Some(Kept::GroupInPlace(tensors, parts)) => {
            for part in parts {
                if let Some(Kept::InPlace(in_place)) = part.downcast_ref() {
                    in_place.check(py)?;
                }
            }
            Ok(tensors.clone_ref(py).into_any())
        }
        Some(Kept::Finish(finish)) => finish.call1(py, (outputs(py, result)?,)),
        Some(Kept::OnGpu(on_gpu)) => {
            let outputs = match &on_gpu.given {
                Some(given) => outputs_on_gpu(py, result, given)?,
                // The outputs are in the caller's memory.
                None => py.None(),
            };
            match &on_gpu.finish {
                Some(finish) => finish.call1(py, (outputs,)),
                None => Ok(outputs),
            }
        }
        None => outputs(py, result),
    }
}

/// Returns the result of waiting for an unknown handle.
fn without_result(py: Python<'_>, handle: u64) -> PyResult<Py<PyAny>> {
    if is_lost(handle) {
        Err(lost(py, handle))
    } else {
        Ok(py.None())
    }
}

/// Wait until the operations of all `handles` have ended; the handles stay valid. Return early, with a rank and a name,
/// once the missing ranks in turn wait for an operation that this rank has not submitted.
#[pyfunction]
pub(crate) fn wait_softly(py: Python<'_>, handles: Vec<u64>) -> PyResult<Option<(u32, String)>> {
    // For a lost handle, `wait` raises the error later.
    let Ok(engine) = horovod_engine::engine() else {
        return Ok(None);
    };
    while let Some(handle) = engine.first_pending(&handles) {
        let mut wait = engine.wait_softly(handle);
        loop {
            match detached(py, || wait.wait(SIGNAL_SLICE)) {
                Softly::Ended => break,
                Softly::LetGo(cause) => return Ok(Some((cause.rank.0, cause.name.into()))),
                Softly::Pending => signals::check(py)?,
            }
        }
    }
    Ok(None)
}

//! Operations: tensor descriptions in, handles out, and the wait for a handle without the interpreter lock.

use std::sync::Arc;
use std::time::Duration;

use horovod::{
    DType, Error, Handle, Op, OpResult, Output, Rank, ReduceOp, Scale, Softly, Submission, Tensor,
    TensorMeta, Tensors, Waited,
};
use pyo3::exceptions::{PyOverflowError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use crate::dlpack::Reader;
use crate::errors::{interrupt_or, operation_error};
use crate::exit::{detached, stay_if_leaving};
use crate::results::{is_lost, lost, outputs};
use crate::runtime::registered;

/// Longest wait between two looks at whether a signal has arrived (Ctrl-C).
const SIGNAL_SLICE: Duration = Duration::from_millis(100);
/// What is said of a tensor whose memory is not where the operation wrote.
pub(crate) const MOVED: &str = "The tensor got other memory while an operation on it was in flight (tensor.data = ..., \
    tensor.set_(), tensor.resize_(), resize_() or share_memory_() of its storage), so the result is not in it. \
    Leave a tensor as it is until synchronize() has returned, or pass a clone() of it.";

/// Names of the kind codes, by code.
pub(crate) const KINDS: [&str; 5] = [
    "ALLREDUCE",
    "ALLGATHER",
    "BROADCAST",
    "ALLTOALL",
    "REDUCESCATTER",
];
const ALLREDUCE: u8 = 0;
const ALLGATHER: u8 = 1;
const BROADCAST: u8 = 2;
const ALLTOALL: u8 = 3;
const REDUCESCATTER: u8 = 4;

/// Input pointer, output pointer (0: allocate), dtype code, shape, owner.
type TensorArgs = (usize, usize, u8, Vec<u64>, Py<PyAny>);

/// Queue one operation and return its handle, for which `wait` will return what `finish` makes of the outputs.
#[pyfunction]
#[pyo3(signature = (kind, prefix, name, tensors, op, prescale, postscale, root, splits, process_set, grouped, finish=None))]
#[expect(
    clippy::too_many_arguments,
    reason = "one crossing per operation, no builder objects"
)]
pub(crate) fn enqueue(
    py: Python<'_>,
    kind: u8,
    prefix: &str,
    name: Option<&str>,
    tensors: Vec<TensorArgs>,
    op: u8,
    prescale: f64,
    postscale: f64,
    root: i64,
    splits: Option<Vec<i64>>,
    process_set: Option<u32>,
    grouped: bool,
    finish: Option<Py<PyAny>>,
) -> PyResult<u64> {
    stay_if_leaving(py);
    let engine = horovod::engine().map_err(|e| operation_error(py, e))?;
    let set = registered(process_set)?;
    let op = operation(kind, op, prescale, postscale, root)?;
    if tensors.is_empty() || (!grouped && tensors.len() != 1) {
        return Err(PyValueError::new_err(format!(
            "expected {}, got {} tensors",
            if grouped {
                "at least one tensor"
            } else {
                "one tensor"
            },
            tensors.len()
        )));
    }
    let needs_output = matches!(op, Op::Allreduce { .. } | Op::Broadcast { .. });
    let tensors = tensors
        .into_iter()
        .map(|(input, output, dtype, shape, owner)| {
            let dtype = DType::from_code(dtype)
                .ok_or_else(|| PyValueError::new_err(format!("unknown dtype code {dtype}")))?;
            let output = match output {
                0 if !needs_output => Output::Allocate,
                // Tensors without elements may have a null pointer.
                p => Output::At(std::ptr::with_exposed_provenance_mut(p)),
            };
            let meta = TensorMeta::new(dtype, shape);
            let input = std::ptr::with_exposed_provenance(input);
            // SAFETY: the addresses are of tensors that the adapter keeps alive by their owner, and that nobody is to
            // touch before the handle has ended, as hvd's users know.
            let tensor = unsafe { Tensor::new(meta, input, output) };
            Ok(tensor.kept_by(Arc::new(owner)))
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
    let kept = finish.map(|finish| Arc::new(Kept::Finish(finish)) as horovod::Kept);
    let submission = Submission::new(prefix, name, op, set, tensors.into())
        .with_splits(splits)
        .keeping(kept);
    engine
        .submit(submission)
        .map(|h| h.0)
        .map_err(|e| operation_error(py, e))
}

/// The operation that the codes and numbers of a call from Python mean.
fn operation(kind: u8, op: u8, pre: f64, post: f64, root: i64) -> PyResult<Op> {
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

/// The operation that these codes mean, of those that have tensors.
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

/// Whether elements of this type can be combined like that; the adapters say it in the framework's words.
fn has_meaning(op: ReduceOp, dtype: DType) -> bool {
    match op {
        ReduceOp::Average => dtype != DType::Bool,
        ReduceOp::Adasum => dtype.is_float(),
        _ => true,
    }
}

/// What the engine keeps for whoever waits.
enum Kept {
    /// The tensor is the result.
    InPlace(InPlace),
    /// These are, given back as what they came in; what each keeps is an [`Kept::InPlace`].
    GroupInPlace(Py<PyTuple>, Vec<horovod::Kept>),
    /// What this makes of the outputs is.
    Finish(Py<PyAny>),
}

/// A tensor that the operation works on in place.
struct InPlace {
    tensor: Py<PyAny>,
    /// Holds the memory: a script can give the tensor other memory while the operation is in flight.
    #[expect(dead_code, reason = "dropped with the rest, which is its purpose")]
    storage: Py<PyAny>,
    /// Where the result was written, if it has elements, and how to find out where the tensor's memory is.
    written: Option<(Reader, usize)>,
}

impl InPlace {
    /// That the result is where the tensor's memory is.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        if let Some((reader, at)) = &self.written
            && let Some(now) = reader.address(self.tensor.bind(py))
            && now.addr() != *at
        {
            return Err(PyRuntimeError::new_err(MOVED));
        }
        Ok(())
    }
}

/// Types of one framework whose tensors the core can read by itself.
#[pyclass(frozen, module = "horovod._core")]
pub(crate) struct PlainTensors {
    readers: Vec<(Py<PyType>, Reader)>,
    lazy: Py<PyAny>,
    storage: Py<PyAny>,
}

#[pymethods]
impl PlainTensors {
    /// `types` exactly, no subclasses; `lazy(tensor)` says of one with at most one element whether its memory does not
    /// hold the value as it is. `storage(tensor)` is what keeps a tensor's memory alive when the tensor itself is given
    /// other memory.
    #[new]
    fn new(types: Vec<Bound<'_, PyType>>, lazy: Py<PyAny>, storage: Py<PyAny>) -> PyResult<Self> {
        let mut readers = Vec::new();
        for class in types {
            if let Some(reader) = Reader::of(&class)? {
                readers.push((class.unbind(), reader));
            }
        }
        Ok(Self {
            readers,
            lazy,
            storage,
        })
    }

    /// Queue an allreduce or a broadcast of one tensor in place and return its handle.
    /// `None`: not such a tensor; nothing was queued.
    #[expect(
        clippy::too_many_arguments,
        reason = "one crossing per operation, no builder objects"
    )]
    fn enqueue(
        &self,
        tensor: &Bound<'_, PyAny>,
        kind: u8,
        prefix: &str,
        name: Option<&str>,
        op: u8,
        prescale: f64,
        postscale: f64,
        root: i64,
        process_set: Option<u32>,
    ) -> PyResult<Option<u64>> {
        let py = tensor.py();
        stay_if_leaving(py);
        let op = operation(kind, op, prescale, postscale, root)?;
        let Some((tensor, kept)) = self.read(tensor, &op)? else {
            return Ok(None);
        };
        let engine = horovod::engine().map_err(|e| operation_error(py, e))?;
        let set = registered(process_set)?;
        let submission = Submission::new(prefix, name, op, set, Tensors::One(tensor));
        let submission = submission.keeping(Some(kept));
        engine
            .submit(submission)
            .map(|h| Some(h.0))
            .map_err(|e| operation_error(py, e))
    }

    /// Queue allreduces in place that begin together, one per tensor and name, and return their handles. There are
    /// fewer where one is no such tensor, or was refused: neither that one nor any after it was queued.
    #[expect(
        clippy::too_many_arguments,
        reason = "one crossing for all operations, no builder objects"
    )]
    fn allreduce_together(
        &self,
        tensors: &Bound<'_, PyList>,
        prefix: &str,
        names: &Bound<'_, PyList>,
        op: u8,
        prescale: f64,
        postscale: f64,
        process_set: Option<u32>,
    ) -> PyResult<Vec<u64>> {
        let py = tensors.py();
        stay_if_leaving(py);
        let op = operation(0, op, prescale, postscale, -1)?;
        let set = registered(process_set)?;
        let engine = horovod::engine().map_err(|e| operation_error(py, e))?;
        let mut handles = Vec::with_capacity(tensors.len());
        engine.submit_together(|queue| {
            for (tensor, name) in tensors.iter().zip(names.iter()) {
                // Whoever queues it alone learns what is the matter.
                let (Ok(Some((tensor, kept))), Ok(name)) =
                    (self.read(&tensor, &op), name.extract())
                else {
                    break;
                };
                let tensor = Tensors::One(tensor);
                let submission = Submission::new(prefix, Some(name), op.clone(), set, tensor);
                let Ok(handle) = queue(submission.keeping(Some(kept))) else {
                    break;
                };
                handles.push(handle.0);
            }
        });
        Ok(handles)
    }

    /// Queue one grouped allreduce of tensors in place and return its handle. `None`: one of them is no such tensor, two
    /// share memory, or there are none; nothing was queued.
    #[expect(
        clippy::too_many_arguments,
        reason = "one crossing per operation, no builder objects"
    )]
    fn grouped_allreduce(
        &self,
        tensors: &Bound<'_, PyTuple>,
        prefix: &str,
        name: Option<&str>,
        op: u8,
        prescale: f64,
        postscale: f64,
        process_set: Option<u32>,
    ) -> PyResult<Option<u64>> {
        let py = tensors.py();
        stay_if_leaving(py);
        let op = operation(ALLREDUCE, op, prescale, postscale, -1)?;
        let mut members = Vec::with_capacity(tensors.len());
        let mut parts = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let Some((tensor, part)) = self.read(&tensor, &op)? else {
                return Ok(None);
            };
            members.push(tensor);
            parts.push(part);
        }
        if members.is_empty() || overlap(&members) {
            return Ok(None);
        }
        let engine = horovod::engine().map_err(|e| operation_error(py, e))?;
        let set = registered(process_set)?;
        let kept = Arc::new(Kept::GroupInPlace(tensors.clone().unbind(), parts));
        let submission = Submission::new(prefix, name, op, set, Tensors::Many(members));
        engine
            .submit(submission.keeping(Some(kept)))
            .map(|h| Some(h.0))
            .map_err(|e| operation_error(py, e))
    }
}

/// Whether some byte belongs to two of these.
pub(crate) fn overlap(tensors: &[Tensor]) -> bool {
    let mut spans: Vec<_> = tensors.iter().filter_map(Tensor::span).collect();
    spans.sort_unstable_by_key(|span| span.start);
    spans.windows(2).any(|pair| pair[1].start < pair[0].end)
}

impl PlainTensors {
    fn reader(&self, tensor: &Bound<'_, PyAny>) -> Option<Reader> {
        let class = tensor.get_type_ptr();
        let mut readers = self.readers.iter();
        readers
            .find(|r| r.0.as_ptr().cast() == class)
            .map(|(_, reader)| *reader)
    }

    /// The tensor as the engine sees it, to work on in place; `None` if it is not one that the core can read, or not
    /// one for this operation.
    fn read(
        &self,
        tensor: &Bound<'_, PyAny>,
        op: &Op,
    ) -> PyResult<Option<(Tensor, horovod::Kept)>> {
        let Some(reader) = self.reader(tensor) else {
            return Ok(None);
        };
        let Some((memory, meta)) = reader.read(tensor) else {
            return Ok(None);
        };
        let meaningful = match op {
            Op::Allreduce { op, .. } => has_meaning(*op, meta.dtype),
            Op::Broadcast { .. } => true,
            _ => false,
        };
        // To ask costs as much as all else here. Lazy is the imaginary half of what was conjugated, of which the
        // elements lie apart, but for a single one.
        let may_be_lazy = meta.elems().is_none_or(|n| n <= 1);
        if !meaningful
            || (may_be_lazy && self.lazy.bind(tensor.py()).call1((tensor,))?.is_truthy()?)
        {
            return Ok(None);
        }
        // Not the tensor: a script can give it other memory while the operation is in flight.
        let Ok(storage) = self.storage.bind(tensor.py()).call1((tensor,)) else {
            return Ok(None);
        };
        let is_empty = meta.shape.contains(&0);
        let kept = Arc::new(Kept::InPlace(InPlace {
            tensor: tensor.clone().unbind(),
            storage: storage.unbind(),
            written: (!is_empty).then(|| (reader, memory.addr())),
        }));
        // SAFETY: what is kept holds the memory, and hvd's users leave a tensor alone until its handle has ended.
        let tensor = unsafe { Tensor::new(meta, memory, Output::At(memory)) };
        Ok(Some((tensor.kept_by(kept.clone()), kept)))
    }
}

/// Wait for the operation, clear its handle and return its result. None for a handle that has given it already.
#[pyfunction]
pub(crate) fn wait(py: Python<'_>, handle: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    stay_if_leaving(py);
    let handle = match handle.extract::<u64>() {
        Ok(handle) => handle,
        // A number that no handle can have.
        Err(e) if e.is_instance_of::<PyOverflowError>(py) => return Ok(py.None()),
        Err(e) => return Err(e),
    };
    let Some((result, kept)) = ended(py, handle)? else {
        return if is_lost(handle) {
            Err(lost(py, handle))
        } else {
            Ok(py.None())
        };
    };
    match kept.as_ref().and_then(|kept| kept.downcast_ref()) {
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
        None => outputs(py, result),
    }
}

/// The end of an operation; `None` for a handle that nobody knows any more.
fn ended(py: Python<'_>, handle: u64) -> PyResult<Option<(OpResult, Option<horovod::Kept>)>> {
    let Ok(engine) = horovod::engine() else {
        return Ok(None);
    };
    let mut waited = engine.wait(Handle(handle), Duration::ZERO);
    loop {
        match waited {
            Waited::Unknown => return Ok(None),
            Waited::Ended { result, kept } => {
                let result = result.map_err(|e| interrupt_or(py, operation_error(py, e)))?;
                return Ok(Some((result, kept)));
            }
            Waited::Pending => py.check_signals()?,
        }
        waited = detached(py, || engine.wait(Handle(handle), SIGNAL_SLICE));
    }
}

/// Wait until the operations of all these handles have ended, which stay as they are; not longer than until the others
/// wait for what comes after this.
#[pyfunction]
pub(crate) fn wait_softly(py: Python<'_>, handles: Vec<u64>) -> PyResult<Option<(u32, String)>> {
    // Who waits for a handle that is gone hears of it when it asks for the result.
    let Ok(engine) = horovod::engine() else {
        return Ok(None);
    };
    while let Some(handle) = engine.first_pending(&handles) {
        let mut wait = engine.wait_softly(handle);
        loop {
            match detached(py, || wait.wait(SIGNAL_SLICE)) {
                Softly::Ended => break,
                Softly::LetGo(cause) => return Ok(Some((cause.rank.0, cause.name.into()))),
                Softly::Pending => py.check_signals()?,
            }
        }
    }
    Ok(None)
}

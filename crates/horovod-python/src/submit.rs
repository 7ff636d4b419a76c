//! Tensor descriptions in, handles out; waiting for them without the interpreter lock.

use std::time::Duration;

use horovod::{
    Completion, DType, Handle, Op, OpResult, Output, Rank, ReduceOp, Scale, Submission, Tensor,
    TensorMeta, Tensors, Waited,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};

use crate::buffer::Buffer;
use crate::dlpack::Reader;
use crate::errors::{interrupt_or, operation_error};
use crate::runtime::registered;

/// Names of the kind codes, by code.
pub(crate) const KINDS: [&str; 5] = [
    "ALLREDUCE",
    "ALLGATHER",
    "BROADCAST",
    "ALLTOALL",
    "REDUCESCATTER",
];

/// Longest wait between two looks at whether a signal has arrived (Ctrl-C).
const SIGNAL_SLICE: Duration = Duration::from_millis(100);

/// Input pointer, output pointer (0: allocate), dtype code, shape, owner.
type TensorArgs = (usize, usize, u8, Vec<u64>, Py<PyAny>);

/// Queue one operation and return its handle.
#[pyfunction]
#[pyo3(signature = (kind, prefix, name, tensors, op, prescale, postscale, root, splits, process_set, grouped))]
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
) -> PyResult<u64> {
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
            Ok(Tensor {
                meta: TensorMeta {
                    dtype,
                    shape: shape.into(),
                },
                input: std::ptr::with_exposed_provenance(input),
                output,
                ready: None,
                owner: Some(Box::new(owner)),
            })
        })
        .collect::<PyResult<Vec<_>>>()?;
    for t in &tensors {
        let missing = t.input.is_null() || matches!(t.output, Output::At(p) if p.is_null());
        if missing && t.bytes() != Some(0) {
            return Err(PyValueError::new_err(format!(
                "a tensor of shape {:?} has no memory",
                t.meta.shape
            )));
        }
    }
    let submission = Submission {
        prefix,
        name,
        op,
        set,
        tensors: tensors.into(),
        splits,
    };
    engine
        .submit(submission)
        .map(|h| h.0)
        .map_err(|e| operation_error(py, e))
}

/// The operation that the codes and numbers of a call mean.
fn operation(kind: u8, op: u8, pre: f64, post: f64, root: i64) -> PyResult<Op> {
    let reduction = || {
        ReduceOp::from_code(op)
            .ok_or_else(|| PyValueError::new_err(format!("Reduction op type {op} not supported.")))
    };
    let scale = Scale { pre, post };
    Ok(match kind {
        0 => Op::Allreduce {
            op: reduction()?,
            scale,
        },
        1 => Op::Allgather,
        2 => Op::Broadcast {
            root: Rank(u32::try_from(root).unwrap_or(u32::MAX)),
        },
        3 => Op::Alltoall,
        4 => Op::Reducescatter {
            op: reduction()?,
            scale,
        },
        _ => {
            return Err(PyValueError::new_err(format!(
                "unknown operation kind {kind}"
            )));
        }
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

/// Types of one framework whose tensors the core can read by itself.
#[pyclass(frozen, module = "horovod._core")]
pub(crate) struct PlainTensors {
    readers: Vec<(Py<PyType>, Reader)>,
    lazy: Py<PyAny>,
}

#[pymethods]
impl PlainTensors {
    /// `types` exactly, no subclasses; `lazy(tensor)` says of one with at most one element whether its memory does not
    /// hold the value as it is.
    #[new]
    fn new(types: Vec<Bound<'_, PyType>>, lazy: Py<PyAny>) -> PyResult<Self> {
        let mut readers = Vec::new();
        for class in types {
            if let Some(reader) = Reader::of(&class)? {
                readers.push((class.unbind(), reader));
            }
        }
        Ok(Self { readers, lazy })
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
        let op = operation(kind, op, prescale, postscale, root)?;
        let Some(tensor) = self.read(tensor, &op)? else {
            return Ok(None);
        };
        let engine = horovod::engine().map_err(|e| operation_error(py, e))?;
        let submission = Submission {
            prefix,
            name,
            op,
            set: registered(process_set)?,
            tensors: Tensors::One(tensor),
            splits: None,
        };
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
        let op = operation(0, op, prescale, postscale, -1)?;
        let set = registered(process_set)?;
        let engine = horovod::engine().map_err(|e| operation_error(py, e))?;
        let mut handles = Vec::with_capacity(tensors.len());
        engine.submit_together(|queue| {
            for (tensor, name) in tensors.iter().zip(names.iter()) {
                // Whoever queues it alone learns what is the matter.
                let (Ok(Some(tensor)), Ok(name)) = (self.read(&tensor, &op), name.extract()) else {
                    break;
                };
                let submission = Submission {
                    prefix,
                    name: Some(name),
                    op: op.clone(),
                    set,
                    tensors: Tensors::One(tensor),
                    splits: None,
                };
                let Ok(handle) = queue(submission) else { break };
                handles.push(handle.0);
            }
        });
        Ok(handles)
    }
}

impl PlainTensors {
    /// The tensor as the engine sees it, to work on in place; `None` if it is not one that the core can read, or not
    /// one for this operation.
    fn read(&self, tensor: &Bound<'_, PyAny>, op: &Op) -> PyResult<Option<Tensor>> {
        let class = tensor.get_type_ptr();
        let Some((_, reader)) = self.readers.iter().find(|r| r.0.as_ptr().cast() == class) else {
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
        Ok(Some(Tensor {
            meta,
            input: memory,
            output: Output::At(memory),
            ready: None,
            owner: Some(Box::new(tensor.clone().unbind())),
        }))
    }
}

fn unknown_handle(handle: u64) -> PyErr {
    PyValueError::new_err(format!(
        "Handle {handle} was not created or has been cleared."
    ))
}

/// Whether the operation has ended.
#[pyfunction]
pub(crate) fn poll(handle: u64) -> PyResult<bool> {
    let engine = horovod::engine().map_err(|_| unknown_handle(handle))?;
    engine
        .poll(Handle(handle))
        .ok_or_else(|| unknown_handle(handle))
}

/// Wait for the operation and clear its handle.
#[pyfunction]
pub(crate) fn wait(py: Python<'_>, handle: u64) -> PyResult<Py<PyAny>> {
    let engine = horovod::engine().map_err(|_| unknown_handle(handle))?;
    let mut waited = engine.wait(Handle(handle), Duration::ZERO);
    loop {
        match waited {
            Waited::Unknown => return Err(unknown_handle(handle)),
            Waited::Ended(Ok(result)) => return to_python(py, result),
            Waited::Ended(Err(e)) => return Err(interrupt_or(py, operation_error(py, e))),
            Waited::Pending => py.check_signals()?,
        }
        waited = py.detach(|| engine.wait(Handle(handle), SIGNAL_SLICE));
    }
}

fn to_python(py: Python<'_>, result: OpResult) -> PyResult<Py<PyAny>> {
    debug_assert!(matches!(result.completion, Completion::Done));
    if result.received_splits.is_none() && result.outputs.iter().all(Option::is_none) {
        return Ok(py.None());
    }
    let outputs = PyList::empty(py);
    for output in result.outputs {
        match output {
            None => outputs.append(py.None())?,
            Some((memory, shape)) => {
                let buffer = Bound::new(py, Buffer::new(memory)?)?;
                outputs.append((buffer, PyTuple::new(py, shape.iter())?))?;
            }
        }
    }
    match result.received_splits {
        None => Ok(outputs.into_any().unbind()),
        Some(splits) => Ok((outputs, splits).into_pyobject(py)?.into_any().unbind()),
    }
}

//! The results of operations, and handles whose results are lost.

use std::sync::{Mutex, PoisonError};

use horovod_engine::{Completion, Engine, Handle, OpResult};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::buffer::Buffer;
use crate::errors::not_initialized;
use crate::gpu::Given;

/// Handles of the last job that was left, of which nobody had taken the results; ascending.
static LOST: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Records the handles of a job that this process has just left.
pub(crate) fn lose(engine: &Engine) {
    *LOST.lock().unwrap_or_else(PoisonError::into_inner) = engine.handles();
}

pub(crate) fn is_lost(handle: u64) -> bool {
    let lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    lost.binary_search(&handle).is_ok()
}

/// Handles of the running job of which nobody has taken the results, ascending.
#[pyfunction]
pub(crate) fn handles() -> Vec<u64> {
    horovod_engine::engine().map_or_else(|_| Vec::new(), |engine| engine.handles())
}

/// Handles of operations that have not ended and end with a callback, ascending.
#[pyfunction]
pub(crate) fn called_back() -> Vec<u64> {
    horovod_engine::engine().map_or_else(|_| Vec::new(), |engine| engine.called_back())
}

/// Threads of a framework, which Python does not know, may call operations of the running job from now on.
#[pyfunction]
pub(crate) fn expect_guests() {
    if let Ok(engine) = horovod_engine::engine() {
        engine.expect_guests();
    }
}

/// Whether the operation has ended.
#[pyfunction]
pub(crate) fn poll(py: Python<'_>, handle: u64) -> PyResult<bool> {
    let engine = horovod_engine::engine().map_err(|_| {
        not_initialized(
            py,
            format!(
                "Handle {handle} is of no running job: hvd.shutdown() was called before the operation was waited \
                 for (or hvd.init() never was), and its result is lost."
            ),
        )
    })?;
    engine.poll(Handle(handle)).ok_or_else(|| {
        PyValueError::new_err(format!(
            "Handle {handle} was not created or has been cleared."
        ))
    })
}

pub(crate) fn lost(py: Python<'_>, handle: u64) -> PyErr {
    not_initialized(
        py,
        format!(
            "Handle {handle} is of a job that has ended: hvd.shutdown() was called before hvd.synchronize(), and \
             the result of the operation is lost."
        ),
    )
}

pub(crate) fn outputs(py: Python<'_>, result: OpResult) -> PyResult<Py<PyAny>> {
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
    with_splits(py, outputs, result.received_splits)
}

/// As `outputs`, of those whose memory a framework has given on a GPU: what keeps it alive instead of a buffer.
pub(crate) fn outputs_on_gpu(
    py: Python<'_>,
    result: OpResult,
    given: &Given,
) -> PyResult<Py<PyAny>> {
    let outputs = PyList::empty(py);
    // Left there, too: whoever drops the result before it is complete must not free the memory.
    let given = given.lock().unwrap_or_else(PoisonError::into_inner);
    for output in given.iter() {
        match output {
            None => outputs.append(py.None())?,
            Some((owner, shape)) => {
                outputs.append((owner.clone_ref(py), PyTuple::new(py, shape)?))?;
            }
        }
    }
    drop(given);
    with_splits(py, outputs, result.received_splits)
}

fn with_splits(
    py: Python<'_>,
    outputs: Bound<'_, PyList>,
    received: Option<Vec<u64>>,
) -> PyResult<Py<PyAny>> {
    match received {
        None => Ok(outputs.into_any().unbind()),
        Some(splits) => Ok((outputs, splits).into_pyobject(py)?.into_any().unbind()),
    }
}

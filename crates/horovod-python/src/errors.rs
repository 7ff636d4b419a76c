//! The one map from the runtime's errors to Python exceptions.

use horovod_engine::{Error, Refusal, StopReason, printable};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::memory::is_forked;

static INTERNAL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static REPLICAS_DIFFER: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static STALLED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static NOT_INITIALIZED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static REMOVED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static DUPLICATE_NAME: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Why there is no job for a child that was forked from one of its ranks.
const FORKED_TEXT: &str = "This process was forked from a rank of a running job and is not part of it: \
    rank(), size() and their kind answer here, operations do not work. Let the process that called hvd.init() do \
    them, and pass the results on (for example do not reduce in the workers of a DataLoader). A process that is to \
    use Horovod by itself is better started with the method \"spawn\" or \"forkserver\".";

/// Queries and lifecycle calls.
pub(crate) fn query_error(py: Python<'_>, e: Error) -> PyErr {
    match e {
        Error::Init(text) => mistake(&format!("Horovod initialization failed. {text}")),
        Error::Removed(text) => raise(py, &REMOVED, "WorkerRemovedError", text),
        other => operation_error(py, other),
    }
}

/// Operations: a caller's mistake is a `ValueError`.
pub(crate) fn operation_error(py: Python<'_>, e: Error) -> PyErr {
    let text = e.to_string();
    let error = match &e {
        Error::NotInitialized => not_initialized(py, text),
        // Not the kind of error after which an elastic job begins again.
        Error::Capturing(_) => PyRuntimeError::new_err(text),
        Error::DuplicateName { .. } => raise(py, &DUPLICATE_NAME, "DuplicateNameError", text),
        Error::Stopped {
            why: StopReason::Deadlock { .. },
            ..
        } => raise(py, &STALLED, "HorovodStalledError", text),
        Error::Stopped {
            why: StopReason::ReplicasDiffer { .. },
            ..
        } => raise(py, &REPLICAS_DIFFER, "ReplicasDifferError", text),
        other if other.is_invalid() => mistake(&text),
        _ => raise(py, &INTERNAL, "HorovodInternalError", text),
    };
    match set_fields(error.value(py), &e) {
        Ok(()) => error,
        Err(failure) => failure,
    }
}

/// Sets the attributes that `horovod.common.exceptions` declares from the error's data.
fn set_fields(raised: &Bound<'_, PyAny>, e: &Error) -> PyResult<()> {
    match e {
        Error::DuplicateName { name } => raised.setattr("tensor", name),
        Error::Stopped { by, .. } => raised.setattr("rank", by.0),
        Error::Lost(lost) => {
            if lost.is_rank() {
                raised.setattr("rank", lost.rank.0)?;
                raised.setattr("host", &lost.host)?;
            }
            raised.setattr("cause", lost.cause.to_string())
        }
        Error::Refused(refusal) => match &**refusal {
            Refusal::Mismatch(mismatch) => {
                let [first, second] = mismatch.sides().map(|(rank, sent)| (rank.0, sent));
                raised.setattr("tensor", &mismatch.tensor)?;
                raised.setattr("sides", (first, second))
            }
            Refusal::Impossible { tensor, .. } => raised.setattr("tensor", tensor),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Ctrl-C reaches all ranks: the first to leave ends the operations of the others. A rank whose own signal has
/// arrived by then shall see that, not an error that only follows from it.
pub(crate) fn interrupt_or(py: Python<'_>, error: PyErr) -> PyErr {
    py.check_signals().err().unwrap_or(error)
}

/// There is no job. One type for queries and operations: a `ValueError`, which users probe for, and a
/// `HorovodInternalError`.
pub(crate) fn not_initialized(py: Python<'_>, text: String) -> PyErr {
    let text = if is_forked() {
        FORKED_TEXT.to_owned()
    } else {
        text
    };
    raise(py, &NOT_INITIALIZED, "HorovodNotInitializedError", text)
}

fn mistake(text: &str) -> PyErr {
    PyValueError::new_err(printable(text).into_owned())
}

fn raise(py: Python<'_>, class: &PyOnceLock<Py<PyType>>, name: &str, text: String) -> PyErr {
    match class.import(py, "horovod.common.exceptions", name) {
        Ok(class) => PyErr::from_type(class.clone(), printable(&text).into_owned()),
        Err(e) => e,
    }
}

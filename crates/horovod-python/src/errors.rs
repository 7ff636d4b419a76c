//! The one map from the runtime's errors to Python exceptions.

use horovod::Error;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static INTERNAL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static STALLED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static REMOVED: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Queries and lifecycle calls: not initialised is a `ValueError`, which users probe for.
pub(crate) fn query_error(py: Python<'_>, e: Error) -> PyErr {
    match e {
        Error::NotInitialized | Error::Invalid(_) => PyValueError::new_err(e.to_string()),
        Error::Init(text) => {
            PyValueError::new_err(format!("Horovod initialization failed. {text}"))
        }
        Error::Removed(text) => raise(py, &REMOVED, "WorkerRemovedError", text),
        other => internal(py, other.to_string()),
    }
}

/// Operations: not initialised is a `HorovodInternalError`, a caller's mistake a `ValueError`.
pub(crate) fn operation_error(py: Python<'_>, e: Error) -> PyErr {
    match e {
        Error::Invalid(text) => PyValueError::new_err(text),
        Error::Stalled(text) => raise(py, &STALLED, "HorovodStalledError", text),
        other => internal(py, other.to_string()),
    }
}

/// Ctrl-C reaches all ranks: the first to leave ends the operations of the others. A rank whose own signal has
/// arrived by then shall see that, not an error that only follows from it.
pub(crate) fn interrupt_or(py: Python<'_>, error: PyErr) -> PyErr {
    py.check_signals().err().unwrap_or(error)
}

fn internal(py: Python<'_>, text: String) -> PyErr {
    raise(py, &INTERNAL, "HorovodInternalError", text)
}

fn raise(py: Python<'_>, class: &PyOnceLock<Py<PyType>>, name: &str, text: String) -> PyErr {
    match class.import(py, "horovod.common.exceptions", name) {
        Ok(class) => PyErr::from_type(class.clone(), text),
        Err(e) => e,
    }
}

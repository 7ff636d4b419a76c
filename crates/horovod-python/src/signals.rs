//! Python's signals during a wait in here.

use pyo3::exceptions::PySystemError;
use pyo3::{PyErr, PyResult, Python, ffi};
use std::time::Duration;

/// Longest wait between two checks for a signal (Ctrl-C).
pub(crate) const SIGNAL_SLICE: Duration = Duration::from_millis(100);

/// Run the handlers of signals that have arrived, and what else Python has put off for its main thread: that tells
/// others that handlers could run. Other threads do neither.
pub(crate) fn check(py: Python<'_>) -> PyResult<()> {
    py.check_signals()?;
    // SAFETY: `py` shows that this thread is attached to the interpreter, which is all that the function asks for.
    let failed = unsafe { ffi::Py_MakePendingCalls() } != 0;
    match failed.then(|| PyErr::take(py)) {
        None => Ok(()),
        Some(raised) => {
            Err(raised.unwrap_or_else(|| PySystemError::new_err("a pending call failed")))
        }
    }
}

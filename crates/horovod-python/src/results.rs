//! The results of handles, and the wait for them without the interpreter lock.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use horovod::{Completion, Engine, Handle, OpResult, Softly, Waited};
use pyo3::exceptions::{PyOverflowError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::buffer::Buffer;
use crate::dlpack::Reader;
use crate::errors::{interrupt_or, not_initialized, operation_error};
use crate::exit::detached;

/// What is said of a tensor whose memory is not where the operation wrote.
pub(crate) const MOVED: &str = "The tensor got other memory while an operation on it was in flight (tensor.data = ..., \
    tensor.set_(), tensor.resize_(), resize_() or share_memory_() of its storage), so the result is not in it. \
    Leave a tensor as it is until synchronize() has returned, or pass a clone() of it.";

/// Longest wait between two looks at whether a signal has arrived (Ctrl-C).
const SIGNAL_SLICE: Duration = Duration::from_millis(100);

/// Handles of the last job that was left, of which nobody had taken the results; ascending.
static LOST: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// What the engine keeps for whoever waits.
pub(crate) enum Kept {
    /// The tensor is the result.
    InPlace(InPlace),
    /// These are, given back as what they came in; what each keeps is an [`Kept::InPlace`].
    GroupInPlace(Py<PyTuple>, Vec<horovod::Kept>),
    /// What this makes of the outputs is.
    Finish(Py<PyAny>),
}

/// A tensor that the operation works on in place.
pub(crate) struct InPlace {
    pub(crate) tensor: Py<PyAny>,
    /// Holds the memory: a script can give the tensor other memory while the operation is in flight.
    #[expect(dead_code, reason = "dropped with the rest, which is its purpose")]
    pub(crate) storage: Py<PyAny>,
    /// Where the result was written, if it has elements, and how to find out where the tensor's memory is.
    pub(crate) written: Option<(Reader, usize)>,
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

/// What is left of a job that was just left.
pub(crate) fn lose(engine: &Engine) {
    *LOST.lock().unwrap_or_else(PoisonError::into_inner) = engine.handles();
}

fn is_lost(handle: u64) -> bool {
    let lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
    lost.binary_search(&handle).is_ok()
}

/// Handles of the running job of which nobody has taken the results, ascending.
#[pyfunction]
pub(crate) fn handles() -> Vec<u64> {
    horovod::engine().map_or_else(|_| Vec::new(), |engine| engine.handles())
}

/// Whether the operation has ended.
#[pyfunction]
pub(crate) fn poll(py: Python<'_>, handle: u64) -> PyResult<bool> {
    let engine = horovod::engine().map_err(|_| {
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

/// Wait for the operation, clear its handle and return its result. None for a handle that has given it already.
#[pyfunction]
pub(crate) fn wait(py: Python<'_>, handle: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
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

fn lost(py: Python<'_>, handle: u64) -> PyErr {
    not_initialized(
        py,
        format!(
            "Handle {handle} is of a job that has ended: hvd.shutdown() was called before hvd.synchronize(), and \
             the result of the operation is lost."
        ),
    )
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

fn outputs(py: Python<'_>, result: OpResult) -> PyResult<Py<PyAny>> {
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

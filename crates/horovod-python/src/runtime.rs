//! Lifecycle, queries, process sets, barrier and join.

use horovod::{Engine, Error, HeldState, ProcessSetId};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::errors::{interrupt_or, operation_error, query_error};

/// Dynamic sets may also be switched on by an argument of init.
static DYNAMIC: AtomicBool = AtomicBool::new(false);

fn engine(py: Python<'_>) -> PyResult<Arc<Engine>> {
    horovod::engine().map_err(|e| query_error(py, e))
}

/// Start the runtime; does nothing when it runs already.
#[pyfunction]
#[pyo3(signature = (ranks=None, dynamic_process_sets=false))]
pub(crate) fn init(
    py: Python<'_>,
    ranks: Option<Vec<i64>>,
    dynamic_process_sets: bool,
) -> PyResult<()> {
    start(py)?;
    let engine = engine(py)?;
    DYNAMIC.store(
        dynamic_process_sets || engine.config().dynamic_process_sets,
        Ordering::Relaxed,
    );
    if let Some(ranks) = ranks.filter(|r| !r.is_empty()) {
        let size = i64::from(engine.topology().size);
        if !ranks.iter().copied().eq(0..size) {
            return Err(PyValueError::new_err(format!(
                "init(comm={ranks:?}): only the list of all ranks, [0..{size}) in order, is supported; \
                 use process sets for subsets"
            )));
        }
    }
    Ok(())
}

/// Ctrl-C must work while other ranks are waited for.
fn start(py: Python<'_>) -> PyResult<()> {
    let raised = Arc::new(Mutex::new(None));
    let note = Arc::clone(&raised);
    let interrupt = horovod::Interrupt::new(move || {
        let Err(error) = Python::attach(|py| py.check_signals()) else {
            return false;
        };
        *note.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        true
    });
    let result = py.detach(|| horovod::init_interruptible(interrupt));
    let raised = raised.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (result, raised) {
        (Ok(()), None) => Ok(()),
        (_, Some(raised)) => Err(raised),
        (Err(e), None) => Err(query_error(py, e)),
    }
}

/// Stop the runtime, and with it the job.
#[pyfunction]
pub(crate) fn shutdown(py: Python<'_>) {
    py.detach(horovod::shutdown);
}

/// Whether init has succeeded and shutdown was not called since; false in a forked child.
#[pyfunction]
pub(crate) fn is_initialized() -> bool {
    horovod::is_initialized()
}

macro_rules! query {
    ($($(#[$doc:meta])* $name:ident -> $t:ty = |$e:ident| $value:expr;)*) => {$(
        $(#[$doc])*
        #[pyfunction]
        pub(crate) fn $name(py: Python<'_>) -> PyResult<$t> {
            let $e = engine(py)?;
            Ok($value)
        }
    )*};
}

query! {
    /// Rank of this process in the job.
    rank -> u32 = |e| e.topology().rank.0;
    /// Number of processes of the job.
    size -> u32 = |e| e.topology().size;
    /// Position among the processes of this host.
    local_rank -> u32 = |e| e.config().local_rank;
    /// Number of processes on this host.
    local_size -> u32 = |e| e.config().local_size;
    /// Position of this host among those that have this local rank.
    cross_rank -> u32 = |e| e.config().cross_rank;
    /// Number of hosts that have this local rank.
    cross_size -> u32 = |e| e.config().cross_size;
    /// Name of this host as the job knows it.
    hostname -> String = |e| e.config().hostname.clone();
    /// Whether all hosts have the same number of ranks.
    is_homogeneous -> bool = |e| homogeneous(&e);
    /// Whether process sets may be added and removed after init.
    dynamic_process_sets -> bool = |e| {
        let _running = e;
        DYNAMIC.load(Ordering::Relaxed)
    };
    /// Ids of the registered process sets, ascending.
    process_set_ids -> Vec<u32> = |e| e.process_set_ids().into_iter().map(|s| s.0).collect();
}

fn homogeneous(engine: &Engine) -> bool {
    let mut ranks_by_host = BTreeMap::new();
    for peer in &engine.topology().peers {
        *ranks_by_host.entry(&peer.hostname).or_insert(0) += 1;
    }
    let mut counts = ranks_by_host.into_values();
    let first = counts.next();
    counts.all(|c| Some(c) == first)
}

/// Whether the job may change its members: its launcher says so.
#[pyfunction]
pub(crate) fn is_elastic() -> bool {
    horovod::is_elastic()
}

/// Version and kind of the newest change of the job's members announced since the last init.
#[pyfunction]
pub(crate) fn host_updates(py: Python<'_>) -> PyResult<(u64, u8)> {
    Ok(engine(py)?.host_updates())
}

/// This process has the training state: it may be the one that others receive it from.
#[pyfunction]
#[pyo3(signature = (current=true))]
pub(crate) fn hold_state(current: bool) {
    horovod::hold_state(if current {
        HeldState::Current
    } else {
        HeldState::Committed
    });
}

/// Whether some rank of this round does not hold the state yet.
#[pyfunction]
pub(crate) fn needs_sync(py: Python<'_>) -> PyResult<bool> {
    Ok(engine(py)?.needs_sync())
}

/// Global ranks of a set, ascending.
#[pyfunction]
pub(crate) fn process_set_ranks(py: Python<'_>, process_set: u32) -> PyResult<Vec<u32>> {
    let members = engine(py)?
        .members(ProcessSetId(process_set))
        .ok_or_else(|| {
            PyValueError::new_err("Process set does not exist or has not been registered.")
        })?;
    Ok(members.into_iter().map(|r| r.0).collect())
}

/// What can end a blocking call: the operation's error or a signal's exception.
enum Stop {
    Failed(Error),
    Raised(PyErr),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Self::Failed(e)
    }
}

impl Stop {
    fn into_py(self, py: Python<'_>) -> PyErr {
        match self {
            Self::Failed(e) => interrupt_or(py, operation_error(py, e)),
            Self::Raised(e) => e,
        }
    }
}

fn look_for_signals() -> Result<(), Stop> {
    Python::attach(|py| py.check_signals()).map_err(Stop::Raised)
}

/// A `ProcessSet` has no id before it is registered and after it was removed.
pub(crate) fn registered(process_set: Option<u32>) -> PyResult<ProcessSetId> {
    process_set.map(ProcessSetId).ok_or_else(|| {
        PyTypeError::new_err(
            "This process set is not registered, or was removed: pass it to hvd.init(process_sets=[...]) \
             or to hvd.add_process_set() first.",
        )
    })
}

/// Register a set of ranks; every rank must make the same call.
#[pyfunction]
pub(crate) fn add_process_set(py: Python<'_>, ranks: Vec<u32>) -> PyResult<u32> {
    let engine = engine(py)?;
    py.detach(|| engine.add_process_set(&ranks, look_for_signals))
        .map(|id| id.0)
        .map_err(|e| e.into_py(py))
}

/// Remove a set; every rank must make the same call. False when there was none to remove.
#[pyfunction]
pub(crate) fn remove_process_set(py: Python<'_>, process_set: u32) -> PyResult<bool> {
    let engine = engine(py)?;
    py.detach(|| engine.remove_process_set(ProcessSetId(process_set), look_for_signals))
        .map_err(|e| e.into_py(py))
}

/// Wait for all members of the set.
#[pyfunction]
pub(crate) fn barrier(py: Python<'_>, process_set: Option<u32>) -> PyResult<()> {
    let engine = horovod::engine().map_err(|e| operation_error(py, e))?;
    let set = registered(process_set)?;
    py.detach(|| engine.barrier(set, look_for_signals))
        .map_err(|e| e.into_py(py))
}

/// Say that this rank has no more data; returns the rank that joined last when all have.
#[pyfunction]
pub(crate) fn join(py: Python<'_>) -> PyResult<u32> {
    let engine = horovod::engine().map_err(|e| operation_error(py, e))?;
    py.detach(|| engine.join(look_for_signals))
        .map(|r| r.0)
        .map_err(|e| e.into_py(py))
}

/// Record a timeline into this file; rank 0 decides for all ranks.
#[pyfunction]
pub(crate) fn start_timeline(py: Python<'_>, path: PathBuf, mark_cycles: bool) -> PyResult<()> {
    let engine = engine(py)?;
    py.detach(|| engine.start_timeline(&path, mark_cycles))
        .map_err(|e| query_error(py, e))
}

/// End the recording; false when nothing can have been recorded.
#[pyfunction]
pub(crate) fn stop_timeline(py: Python<'_>) -> PyResult<bool> {
    let engine = engine(py)?;
    Ok(py.detach(|| engine.stop_timeline()))
}

/// What carries the bytes on this machine.
#[pyfunction]
pub(crate) fn transports() -> BTreeMap<&'static str, &'static str> {
    horovod::transports().into_iter().collect()
}

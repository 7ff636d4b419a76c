//! Lifecycle, queries, process sets, barrier and join.

use horovod_engine::config::{self, Group, Launcher, Members, ProcessEnvironment};
use horovod_engine::{Engine, Error, Leaving, ProcessSetId, TrainingState};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::errors::{interrupt_or, operation_error, query_error};
use crate::exit::{self, detached};
use crate::launch::parsed_addresses;
use crate::memory;
use crate::results;
use crate::signals;

/// Dynamic sets may also be switched on by an argument of init.
static DYNAMIC: AtomicBool = AtomicBool::new(false);

fn engine(py: Python<'_>) -> PyResult<Arc<Engine>> {
    horovod_engine::engine().map_err(|e| query_error(py, e))
}

/// Rank, size, addresses of the rendezvous and key of one process of a group.
type GroupMember = (u32, u32, Vec<String>, String);

/// Start the runtime; does nothing when it runs already, nor in a child that was forked from a rank.
#[pyfunction]
#[pyo3(signature = (ranks=None, dynamic_process_sets=false, group=None))]
pub(crate) fn init(
    py: Python<'_>,
    ranks: Option<Vec<i64>>,
    dynamic_process_sets: bool,
    group: Option<GroupMember>,
) -> PyResult<()> {
    if memory::is_forked() {
        return Ok(());
    }
    exit::stays();
    let ranks = ranks.filter(|ranks| !ranks.is_empty());
    let members = match (group, &ranks) {
        (Some((rank, size, addresses, key)), _) => Members::Group(Group {
            rank,
            size,
            addresses: parsed_addresses(&addresses)?,
            key,
        }),
        (None, Some(ranks)) => Members::Listed(ranks.clone()),
        (None, None) => Members::All,
    };
    start(py, &members)?;
    let engine = engine(py)?;
    memory::remember(&engine);
    exit::has_rank(engine.topology().rank.0);
    DYNAMIC.store(
        dynamic_process_sets || engine.config().negotiation.dynamic_process_sets,
        Ordering::Relaxed,
    );
    // It may have been running already.
    match ranks {
        Some(ranks) if !engine.config().has_members(&ranks) => Err(PyValueError::new_err(format!(
            "init(comm={ranks:?}): Horovod is running already, with other ranks; call hvd.shutdown() first"
        ))),
        _ => Ok(()),
    }
}

/// Ctrl-C must work while other ranks are waited for.
fn start(py: Python<'_>, members: &Members) -> PyResult<()> {
    let raised = Arc::new(Mutex::new(None));
    let note = Arc::clone(&raised);
    let interrupt = horovod_engine::Interrupt::new(move || {
        let Some(checked) = exit::attached(signals::check) else {
            return true;
        };
        let Err(error) = checked else { return false };
        *note.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        true
    });
    let result = detached(py, || horovod_engine::init_members(members, interrupt));
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
    stop(py, Leaving::Asked);
}

/// As `shutdown`, for a script that a signal is about to end.
#[pyfunction]
pub(crate) fn leave_interrupted(py: Python<'_>) {
    stop(py, Leaving::Failed);
}

fn stop(py: Python<'_>, why: Leaving) {
    memory::forget();
    let engine = horovod_engine::engine();
    detached(py, || horovod_engine::shutdown_because(why));
    if let Ok(engine) = engine {
        results::lose(&engine);
    }
}

/// As `shutdown`, at the exit of the process, because of an error if `failed`: no other thread that waits in here
/// returns from now on.
#[pyfunction]
pub(crate) fn leave_at_exit(py: Python<'_>, failed: bool) {
    let ended = Instant::now();
    memory::forget();
    exit::leaves();
    let why = if failed {
        Leaving::Failed
    } else {
        Leaving::Ended
    };
    detached(py, || horovod_engine::shutdown_because(why));
    exit::report_if_late(ended, failed);
    if !failed && let Some(summary) = horovod_engine::take_summary() {
        // One write, so that the summary stays together where several processes share the standard error. A failed
        // script ends with its own traceback, which the launcher repeats.
        let _ = std::io::stderr().write_all(format!("horovod: {summary}\n").as_bytes());
    }
    // Apart from the above, whose own return counts.
    py.detach(exit::await_returning);
}

/// Whether init has succeeded and shutdown was not called since; a forked child says what its parent would have.
#[pyfunction]
pub(crate) fn is_initialized() -> bool {
    horovod_engine::is_initialized() || memory::is_forked()
}

macro_rules! query {
    ($($(#[$doc:meta])* $name:ident -> $t:ty = |$e:ident| $value:expr, $remembered:expr;)*) => {$(
        $(#[$doc])*
        #[pyfunction]
        pub(crate) fn $name(py: Python<'_>) -> PyResult<$t> {
            match horovod_engine::engine() {
                Ok($e) => Ok($value),
                Err(error) => remembered($remembered).ok_or_else(|| query_error(py, error)),
            }
        }
    )*};
}

/// Reads from the parent's identity, which a forked child has instead of an engine.
fn remembered<T>(read: impl FnOnce(&memory::Identity) -> Option<T>) -> Option<T> {
    memory::of_parent(read).flatten()
}

query! {
    /// Rank of this process in the job.
    rank -> u32 = |e| e.topology().rank.0, |m| Some(m.rank);
    /// Number of processes of the job.
    size -> u32 = |e| e.topology().size, |m| Some(m.size);
    /// Position among the processes of this host.
    local_rank -> u32 = |e| e.config().ranks.local_rank, |m| Some(m.local_rank);
    /// Number of processes on this host.
    local_size -> u32 = |e| e.config().ranks.local_size, |m| Some(m.local_size);
    /// Position of this host among those that have this local rank.
    cross_rank -> u32 = |e| e.config().ranks.cross_rank, |m| Some(m.cross_rank);
    /// Number of hosts that have this local rank.
    cross_size -> u32 = |e| e.config().ranks.cross_size, |m| Some(m.cross_size);
    /// Name of this host as the job knows it.
    hostname -> String = |e| e.config().ranks.hostname.clone(), |m| Some(m.hostname.clone());
    /// Whether all hosts have the same number of ranks.
    is_homogeneous -> bool = |e| memory::is_homogeneous(&e), |m| Some(m.is_homogeneous);
    /// Whether process sets may be added and removed after init.
    dynamic_process_sets -> bool = |e| {
        let _running = e;
        DYNAMIC.load(Ordering::Relaxed)
    }, |_| None;
    /// Steps between two comparisons of the replicas (0: none), and whether a difference is an error.
    consistency -> (u32, bool) = |e| {
        let settings = e.config().negotiation.consistency;
        (settings.every, settings.is_error)
    }, |_| None;
    /// For how many seconds the handler of SIGTERM or SIGALRM need not run; 0: however long.
    signal_grace -> f64 = |e| e.config().membership.signal_grace.as_secs_f64(), |_| Some(0.0);
    /// Ids of the registered process sets, ascending.
    process_set_ids -> Vec<u32> = |e| e.process_set_ids().into_iter().map(|s| s.0).collect(),
        |m| Some(m.process_sets.keys().copied().collect());
}

/// Name, rank, size, variable of the size and whether it starts MPI, of the launcher that started this process.
type LauncherFacts = (&'static str, u32, u32, &'static str, bool);

/// The launcher that started this process as one of several.
#[pyfunction]
pub(crate) fn launcher(py: Python<'_>) -> PyResult<Option<LauncherFacts>> {
    let found = Launcher::of_process(&ProcessEnvironment).map_err(|e| query_error(py, e))?;
    Ok(found.map(|l| (l.by, l.rank, l.size, l.size_variable, l.starts_mpi)))
}

/// Whether a launcher started this process as one of several that have no safe way to meet, and no setting says one.
#[pyfunction]
pub(crate) fn lacks_rendezvous() -> bool {
    horovod_engine::lacks_rendezvous(&ProcessEnvironment)
}

/// For a group that makes its own rendezvous: seconds that init may take, interfaces, the user's key, and what tells
/// hosts apart.
#[pyfunction]
pub(crate) fn group_settings(
    py: Python<'_>,
) -> PyResult<(f64, Vec<String>, Option<String>, String)> {
    let settings = config::GroupSettings::read(&ProcessEnvironment);
    let settings = settings.map_err(|e| query_error(py, e))?;
    Ok((
        settings.timeout.as_secs_f64(),
        settings.interfaces,
        settings.key,
        settings.host,
    ))
}

/// Whether JAX's programs on CPUs order operations in their inner functions: a setting says so.
#[pyfunction]
pub(crate) fn jax_ordered_calls(py: Python<'_>) -> PyResult<bool> {
    config::jax_ordered_calls(&ProcessEnvironment).map_err(|e| query_error(py, e))
}

/// Whether the job may change its members: its launcher says so.
#[pyfunction]
pub(crate) fn is_elastic() -> bool {
    horovod_engine::is_elastic()
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
    horovod_engine::hold_state(if current {
        TrainingState::Current
    } else {
        TrainingState::Committed
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
    let members = match horovod_engine::engine() {
        Ok(engine) => engine
            .members(ProcessSetId(process_set))
            .map(|members| members.into_iter().map(|rank| rank.0).collect()),
        Err(error) => {
            let of_parent = memory::of_parent(|m| m.process_sets.get(&process_set).cloned());
            of_parent.ok_or_else(|| query_error(py, error))?
        }
    };
    members.ok_or_else(|| {
        PyValueError::new_err("Process set does not exist or has not been registered.")
    })
}

/// Cause that ends a blocking call: the operation's error or a signal's exception.
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

fn check_signals() -> Result<(), Stop> {
    let checked = exit::attached(signals::check);
    // At the interpreter's end nobody waits for the result: the thread does not return.
    checked
        .ok_or(Stop::Failed(Error::Interrupted))?
        .map_err(Stop::Raised)
}

/// A `ProcessSet` has no id before it is registered and after it was removed.
pub(crate) fn registered(process_set: Option<u32>) -> PyResult<ProcessSetId> {
    process_set.map(ProcessSetId).ok_or_else(|| {
        PyValueError::new_err(
            "This process set is not registered, or was removed: pass it to hvd.init(process_sets=[...]) \
             or to hvd.add_process_set() first.",
        )
    })
}

/// The id of a set, for adapters that do not submit by this module's functions; the error of an unregistered one.
#[pyfunction]
pub(crate) fn registered_process_set(process_set: Option<u32>) -> PyResult<u32> {
    registered(process_set).map(|set| set.0)
}

/// Register a set of ranks; every rank must make the same call.
#[pyfunction]
pub(crate) fn add_process_set(py: Python<'_>, ranks: Vec<u32>) -> PyResult<u32> {
    let engine = engine(py)?;
    let id = detached(py, || engine.add_process_set(&ranks, check_signals))
        .map_err(|e| e.into_py(py))?;
    memory::remember(&engine);
    Ok(id.0)
}

/// Remove a set; every rank must make the same call. False when there was none to remove.
#[pyfunction]
pub(crate) fn remove_process_set(py: Python<'_>, process_set: u32) -> PyResult<bool> {
    let engine = engine(py)?;
    let set = ProcessSetId(process_set);
    let removed = detached(py, || engine.remove_process_set(set, check_signals))
        .map_err(|e| e.into_py(py))?;
    memory::remember(&engine);
    Ok(removed)
}

/// Wait for all members of the set.
#[pyfunction]
pub(crate) fn barrier(py: Python<'_>, process_set: Option<u32>) -> PyResult<()> {
    let engine = horovod_engine::engine().map_err(|e| operation_error(py, e))?;
    let set = registered(process_set)?;
    detached(py, || engine.barrier(set, check_signals)).map_err(|e| e.into_py(py))
}

/// Say that this rank has no more data; returns the rank that joined last when all have.
#[pyfunction]
pub(crate) fn join(py: Python<'_>) -> PyResult<u32> {
    let engine = horovod_engine::engine().map_err(|e| operation_error(py, e))?;
    detached(py, || engine.join(check_signals))
        .map(|r| r.0)
        .map_err(|e| e.into_py(py))
}

/// Record a timeline into this file; rank 0 decides for all ranks.
#[pyfunction]
pub(crate) fn start_timeline(py: Python<'_>, path: PathBuf, mark_cycles: bool) -> PyResult<()> {
    let engine = engine(py)?;
    detached(py, || engine.start_timeline(&path, mark_cycles)).map_err(|e| query_error(py, e))
}

/// End the recording; false when nothing can have been recorded.
#[pyfunction]
pub(crate) fn stop_timeline(py: Python<'_>) -> PyResult<bool> {
    let engine = engine(py)?;
    Ok(detached(py, || engine.stop_timeline()))
}

/// The figures of this rank, on rank 0 of all ranks, as a JSON document; None when nothing is measured.
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Option<String>> {
    let engine = engine(py)?;
    Ok(detached(py, || engine.stats().map(|stats| stats.to_json())))
}

/// The script has ended a step.
#[pyfunction]
pub(crate) fn mark_step(py: Python<'_>) -> PyResult<()> {
    engine(py)?.mark_step();
    Ok(())
}

/// The script has waited so many seconds for its input.
#[pyfunction]
pub(crate) fn mark_input(py: Python<'_>, seconds: f64) -> PyResult<()> {
    let lasted = std::time::Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default();
    engine(py)?.mark_input(lasted);
    Ok(())
}

/// Transports in use on this machine, by kind of link.
#[pyfunction]
pub(crate) fn transports() -> BTreeMap<&'static str, &'static str> {
    horovod_engine::transports().into_iter().collect()
}

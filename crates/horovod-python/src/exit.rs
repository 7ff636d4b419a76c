//! The interpreter's end: a thread that is still in a wait then must not come back to it.
//!
//! The shutdown at exit ends what other threads wait for. They would come back with an error, within the frames of the
//! framework's C++ code that called us; CPython unwinds a thread that asks for the interpreter's lock too late. Such
//! frames turn the unwinding into an abort of the process, after all work was done. So from the moment at which Python
//! calls its exit handlers, other threads that come out of a wait sleep until the process is gone.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The exit handlers are running, or have run.
static LEAVING: AtomicBool = AtomicBool::new(false);
/// The thread that runs them.
static LEAVER: Mutex<Option<ThreadId>> = Mutex::new(None);
/// Threads that have been let back to the interpreter and may not have its lock yet.
static RETURNING: AtomicUsize = AtomicUsize::new(0);
/// Threads that stay here until the process is gone, as Python numbers them.
static STAYING: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// The process that these are threads of: a forked child has none of them.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// The process, in the upper half, and its rank at the last init; zero before.
static RANK: AtomicU64 = AtomicU64::new(0);

/// A process that has not ended so long after its exit handlers ran reports it.
const LATE: Duration = Duration::from_secs(20);

/// A thread on its way back to the interpreter, until dropped.
struct Returning(());

impl Returning {
    /// `None`: the interpreter is ending, and not by this thread.
    fn begin() -> Option<Self> {
        RETURNING.fetch_add(1, Ordering::SeqCst);
        let returning = Self(());
        let may_return = !LEAVING.load(Ordering::SeqCst) || is_leaver();
        may_return.then_some(returning)
    }
}

impl Drop for Returning {
    fn drop(&mut self) {
        RETURNING.fetch_sub(1, Ordering::SeqCst);
    }
}

fn is_leaver() -> bool {
    *LEAVER.lock().unwrap_or_else(PoisonError::into_inner) == Some(thread::current().id())
}

/// Work without the interpreter's lock; does not return once the interpreter ends, but in the thread that ends it.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    let (result, returning) = py.detach(|| {
        let result = work();
        if let Some(returning) = Returning::begin() {
            return (result, returning);
        }
        // SAFETY: no preconditions.
        let own = unsafe { libc::pthread_self() };
        STAYING
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(own as u64);
        loop {
            if let Some(returning) = Returning::begin() {
                return (result, returning);
            }
            thread::park();
        }
    });
    drop(returning);
    result
}

/// Idents of the threads that have come out of a wait, or were about to begin one, and stay until the process is gone.
#[pyfunction]
pub(crate) fn staying_threads() -> Vec<u64> {
    STAYING
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}

/// Does not return once the interpreter ends, but in the thread that ends it. For calls that may answer without a wait.
#[inline]
pub(crate) fn stay_if_leaving(py: Python<'_>) {
    if LEAVING.load(Ordering::Relaxed) {
        stay(py);
    }
}

#[cold]
fn stay(py: Python<'_>) {
    detached(py, || ());
}

/// Run with the interpreter from amid such work; `None` once the interpreter ends.
pub(crate) fn attached<T>(call: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    let returning = Returning::begin()?;
    let result = Python::attach(|py| {
        drop(returning);
        call(py)
    });
    Some(result)
}

/// The runtime is started: the process is not ending, whatever ran its exit handlers.
pub(crate) fn stays() {
    let process = std::process::id();
    if PROCESS.swap(process, Ordering::SeqCst) != process {
        RETURNING.store(0, Ordering::SeqCst);
    }
    LEAVING.store(false, Ordering::SeqCst);
    STAYING
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clear();
}

/// This process has this rank, also after a shutdown.
pub(crate) fn has_rank(rank: u32) {
    let process = u64::from(std::process::id());
    RANK.store((process << 32) | u64::from(rank), Ordering::SeqCst);
}

/// The rank that this process has or had; a forked child has none.
fn last_rank() -> Option<u32> {
    let known = RANK.load(Ordering::SeqCst);
    (known >> 32 == u64::from(std::process::id())).then_some(known as u32)
}

/// The exit handlers have begun to run, in this thread: from now on no other comes back.
pub(crate) fn leaves() {
    *LEAVER.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current().id());
    LEAVING.store(true, Ordering::SeqCst);
}

/// Reports if this process does not end soon, though its script is over: the launcher waits for it. The thread uses no
/// Python: the interpreter itself may hang. Called once the job is left, which may itself take longer.
pub(crate) fn report_if_late(ended: Instant, failed: bool) {
    let Some(rank) = last_rank() else { return };
    let process = std::process::id();
    let how = if failed { " with an exception" } else { "" };
    let report = move || {
        thread::sleep(LATE);
        if LEAVING.load(Ordering::SeqCst) && std::process::id() == process {
            tracing::warn!(
                "the script of rank {rank} is over: it ended{how} {} s ago. But its process {process} has not ended, \
                 and the job waits for it. Something that Python or a framework does at exit does not return. In \
                 TensorFlow this is often a dataset made by `from_generator` that still asks for data. `py-spy dump \
                 --pid {process}` shows where the process is, and `kill {process}` ends it",
                ended.elapsed().as_secs()
            );
        }
    };
    // Without the thread nothing is reported, and the exit goes on.
    let _ = thread::Builder::new().name("hvd-late".into()).spawn(report);
}

/// Have the process end by then, with status 1, whatever keeps its threads: exit handlers of CUDA's, and what a script
/// does on its way out, wait for a GPU that does not come to rest.
#[pyfunction]
pub(crate) fn end_within(seconds: f64) -> PyResult<()> {
    let limit = Duration::try_from_secs_f64(seconds)
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let end = move || {
        thread::sleep(limit);
        tracing::error!("this process has not ended {seconds} s after its error, and is ended now");
        // SAFETY: ends the process without what else does, which is what it is stuck in.
        unsafe { libc::_exit(1) };
    };
    let thread = thread::Builder::new().name("hvd-end".into()).spawn(end);
    thread.map(|_| ()).map_err(|error| {
        PyRuntimeError::new_err(format!(
            "cannot start the thread that ends the process: {error}"
        ))
    })
}

/// Waits, without the interpreter's lock, for those that were let back before.
pub(crate) fn await_returning() {
    while PROCESS.load(Ordering::SeqCst) == std::process::id()
        && RETURNING.load(Ordering::SeqCst) > 0
    {
        thread::yield_now();
    }
}

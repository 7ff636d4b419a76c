//! C functions for adapter libraries that frameworks load: submit with a function to be called, results, queries.
//!
//! Their declarations, and what callers must know, stand in `python/horovod/include/horovod.h`, which the wheel holds.
//! Structures that callers fill begin with their own size, so that later versions can add fields; a function keeps its meaning as long
//! as [`horovod_abi_version`] stays. No panic crosses this boundary: it becomes [`HOROVOD_INTERNAL`].

mod mxnet;
mod operation;
mod outcome;
mod xla;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use horovod_engine::{Error, StopReason, Tensor, Tensors};

/// Raised when a function or a field changes its meaning.
const ABI_VERSION: u32 = 1;

const HOROVOD_OK: i32 = 0;
/// The arguments have no meaning.
const HOROVOD_INVALID: i32 = 1;
/// The operation failed on all ranks: a rank was lost, or the ranks disagree. Python's `HorovodInternalError`.
const HOROVOD_INTERNAL: i32 = 2;
/// There is no job.
const HOROVOD_NOT_INITIALIZED: i32 = 3;
/// The ranks wait for each other for ever. Python's `HorovodStalledError`.
const HOROVOD_STALLED: i32 = 4;
/// The ranks began to train with different parameters. Python's `ReplicasDifferError`.
const HOROVOD_REPLICAS_DIFFER: i32 = 5;

/// How long a thread of a framework waits itself for a small operation, where that may be.
const WAIT: Duration = Duration::from_millis(1);
/// It waits longer by this for so many bytes.
const WAIT_PER_MIB: Duration = Duration::from_millis(1);

/// How long it waits for an operation on these tensors.
fn wait_timeout(tensors: &Tensors) -> Duration {
    let bytes = tensors
        .iter()
        .filter_map(Tensor::bytes)
        .fold(0, usize::saturating_add);
    let mib = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
    WAIT.saturating_add(WAIT_PER_MIB.saturating_mul(mib))
}

fn status(error: &Error) -> i32 {
    match error {
        Error::NotInitialized => HOROVOD_NOT_INITIALIZED,
        Error::Stopped {
            why: StopReason::Deadlock { .. },
            ..
        } => HOROVOD_STALLED,
        Error::Stopped {
            why: StopReason::ReplicasDiffer { .. },
            ..
        } => HOROVOD_REPLICAS_DIFFER,
        other if other.is_invalid() => HOROVOD_INVALID,
        _ => HOROVOD_INTERNAL,
    }
}

/// Returns the result of `body`, or `otherwise` if `body` panics.
fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        tracing::error!("a C function of the core panicked; please report this with the log above");
        otherwise
    })
}

/// The version of this interface.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn horovod_abi_version() -> u32 {
    ABI_VERSION
}

/// A number of the running job; -1 without one.
fn query(number: impl FnOnce(&horovod_engine::Engine) -> usize) -> i32 {
    guarded(-1, || {
        let engine = horovod_engine::engine();
        engine.map_or(-1, |engine| i32::try_from(number(&engine)).unwrap_or(-1))
    })
}

/// Rank of this process; -1 without a job.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn horovod_rank() -> i32 {
    query(|engine| engine.topology().rank.index())
}

/// Ranks of the job; -1 without one.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn horovod_size() -> i32 {
    query(|engine| engine.topology().size as usize)
}

/// Number of this process among those of its host; -1 without a job.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn horovod_local_rank() -> i32 {
    query(|engine| engine.config().ranks.local_rank as usize)
}

/// Ranks on this host; -1 without a job.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn horovod_local_size() -> i32 {
    query(|engine| engine.config().ranks.local_size as usize)
}

/// Ranks of a process set; -1 without a job or such a set.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn horovod_process_set_size(set: u32) -> i32 {
    guarded(-1, || {
        let members = horovod_engine::engine().ok();
        let members = members.and_then(|engine| engine.members(horovod_engine::ProcessSetId(set)));
        members.map_or(-1, |members| i32::try_from(members.len()).unwrap_or(-1))
    })
}

/// Number of this process among those of a process set; -1 without a job or such a set, or outside of it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn horovod_process_set_rank(set: u32) -> i32 {
    guarded(-1, || {
        let Ok(engine) = horovod_engine::engine() else {
            return -1;
        };
        let members = engine.members(horovod_engine::ProcessSetId(set));
        let me = engine.topology().rank;
        let place = members.and_then(|members| members.iter().position(|rank| *rank == me));
        place.map_or(-1, |place| i32::try_from(place).unwrap_or(-1))
    })
}

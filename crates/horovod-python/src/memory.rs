//! A rank's knowledge of itself, kept for its forked children, which have no part in the job but may ask who they are.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use horovod_engine::Engine;

/// Only touched with the interpreter's lock, which whoever forks holds: so no other thread had it then.
static REMEMBERED: Mutex<Option<Identity>> = Mutex::new(None);

/// A rank of a running job.
pub(crate) struct Identity {
    process: u32,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) local_rank: u32,
    pub(crate) local_size: u32,
    pub(crate) cross_rank: u32,
    pub(crate) cross_size: u32,
    pub(crate) hostname: String,
    pub(crate) is_homogeneous: bool,
    /// Members of each process set.
    pub(crate) process_sets: BTreeMap<u32, Vec<u32>>,
}

fn lock() -> MutexGuard<'static, Option<Identity>> {
    REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The job runs, or its process sets have changed.
pub(crate) fn remember(engine: &Engine) {
    let (topology, config) = (engine.topology(), engine.config());
    let sets = engine.process_set_ids().into_iter().filter_map(|set| {
        let members = engine.members(set)?.into_iter().map(|rank| rank.0);
        Some((set.0, members.collect()))
    });
    *lock() = Some(Identity {
        process: std::process::id(),
        rank: topology.rank.0,
        size: topology.size,
        local_rank: config.ranks.local_rank,
        local_size: config.ranks.local_size,
        cross_rank: config.ranks.cross_rank,
        cross_size: config.ranks.cross_size,
        hostname: config.ranks.hostname.clone(),
        is_homogeneous: is_homogeneous(engine),
        process_sets: sets.collect(),
    });
}

/// Whether all hosts have the same number of ranks.
pub(crate) fn is_homogeneous(engine: &Engine) -> bool {
    let mut ranks_by_host = BTreeMap::new();
    for peer in &engine.topology().peers {
        *ranks_by_host.entry(&peer.hostname).or_insert(0) += 1;
    }
    let mut counts = ranks_by_host.into_values();
    let first = counts.next();
    counts.all(|count| Some(count) == first)
}

/// The job is left.
pub(crate) fn forget() {
    *lock() = None;
}

/// In a forked child: something of what its parent was when it forked.
pub(crate) fn of_parent<T>(read: impl FnOnce(&Identity) -> T) -> Option<T> {
    let remembered = lock();
    let identity = remembered.as_ref()?;
    (identity.process != std::process::id()).then(|| read(identity))
}

/// Whether this process was forked from a rank, and neither has forgotten it nor begun a job of its own.
pub(crate) fn is_forked() -> bool {
    !horovod_engine::is_initialized() && of_parent(|_| ()).is_some()
}

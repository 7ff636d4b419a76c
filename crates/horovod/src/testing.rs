//! Jobs whose ranks are threads of one process, for tests.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use horovod_engine::Engine;
use horovod_engine::config::Config;
use horovod_transport::{Mesh, testing};

use crate::communicator::Communicator;
use crate::error::Result;
use crate::guard;
use crate::process_set::ProcessSet;

/// Hard bound of every wait; only a hang reaches it.
pub const LIMIT: Duration = Duration::from_secs(240);

/// Runs `body` on every rank of a job. The results are in the order of the ranks.
///
/// # Panics
/// If a rank panics or hangs.
#[expect(clippy::expect_used, reason = "a test ends with it")]
pub fn on_ranks<T: Send + 'static>(
    size: usize,
    body: impl Fn(&Communicator) -> T + Send + Clone + 'static,
) -> Vec<T> {
    let (done, results) = mpsc::channel();
    // A rank alone needs no shared memory, so Miri can run it.
    let meshes = match size {
        1 => vec![Mesh::solo().expect("starts")],
        size => testing::cluster(size),
    };
    for (rank, mesh) in meshes.into_iter().enumerate() {
        let (body, done) = (body.clone(), done.clone());
        std::thread::spawn(move || {
            let engine = Arc::new(Engine::start(Config::solo(), mesh).expect("starts"));
            let hvd = Communicator::world(engine.clone());
            let result = catch_unwind(AssertUnwindSafe(|| body(&hvd)));
            // The barrier keeps a fast rank from ending the job under a slow one; it fails after the end of a job.
            let _ = hvd.barrier();
            engine.shutdown();
            let _ = done.send((rank, result));
        });
    }
    let mut all: Vec<_> = (0..size)
        .map(|_| results.recv_timeout(LIMIT).expect("a rank hangs"))
        .collect();
    all.sort_by_key(|(rank, _)| *rank);
    let results = all.into_iter();
    results
        .map(|(_, result)| result.unwrap_or_else(|panic| resume_unwind(panic)))
        .collect()
}

/// As [`Horovod::process_set`](crate::Horovod::process_set), which these ranks have no guard for.
///
/// # Errors
/// Those of `process_set`.
pub fn process_set(world: &Communicator, ranks: &[usize]) -> Result<ProcessSet> {
    ProcessSet::add(world, ranks)
}

/// As [`Horovod::join`](crate::Horovod::join), which these ranks have no guard for.
///
/// # Errors
/// Those of `join`.
pub fn join(world: &Communicator) -> Result<usize> {
    guard::join(world)
}

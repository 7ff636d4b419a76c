//! Ranks as threads of one process, each with an engine over real links.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use horovod_engine::config::Config;
use horovod_engine::{Engine, Error, ProcessSetId};
use horovod_transport::Mesh;

/// Hard bound of every wait; reached only when something hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

/// Run `body` on every rank, each on a thread of its own, named `caller-RANK`; the engines end in good order.
pub(crate) fn on_meshes<T: Send + 'static>(
    meshes: Vec<Mesh>,
    config: &Config,
    body: impl Fn(&Engine, usize) -> T + Send + Clone + 'static,
) -> Vec<T> {
    let n = meshes.len();
    let (done, results) = mpsc::channel();
    for (rank, mesh) in meshes.into_iter().enumerate() {
        let (body, done, config) = (body.clone(), done.clone(), config.clone());
        let caller = std::thread::Builder::new().name(format!("caller-{rank}"));
        let run = move || {
            let engine = Engine::start(config, mesh).expect("starts");
            let result = catch_unwind(AssertUnwindSafe(|| body(&engine, rank)));
            // The barrier keeps a fast rank from ending the job under a slow one; it fails after a lost rank.
            let _ = engine.barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()));
            engine.shutdown();
            let _ = done.send((rank, result)); // nobody listens any more after a failure
        };
        caller.spawn(run).expect("a thread");
    }
    let mut all: Vec<Option<T>> = (0..n).map(|_| None).collect();
    for _ in 0..n {
        let (rank, result) = results.recv_timeout(LIMIT).expect("a rank hangs");
        all[rank] = Some(result.unwrap_or_else(|_| panic!("rank {rank} panicked")));
    }
    all.into_iter().flatten().collect()
}

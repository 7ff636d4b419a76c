//! Ranks as threads of one process, each with an engine over real links and a GPU of the double.

use std::sync::mpsc;
use std::time::Duration;

use horovod_engine::config::Config;
use horovod_engine::gpu::RawStream;
use horovod_engine::{Engine, Error, OpResult, ProcessSetId, Submission, Waited};
use horovod_transport::testing;

use super::Double;

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// One rank: its engine, its GPU, and the stream on which its framework works.
pub(crate) struct OnRank<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) double: Double,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) stream: RawStream,
}

/// Run `body` on ranks, each with a GPU of its own.
pub(crate) fn on_ranks<T: Send + 'static>(
    double: Double,
    n: usize,
    config: impl Fn(&mut Config),
    body: impl Fn(&OnRank<'_>) -> T + Send + Clone + 'static,
) -> Vec<T> {
    on_hosts(double, &vec![0; n], config, body)
}

/// The same with each rank on the pretended host of this number.
pub(crate) fn on_hosts<T: Send + 'static>(
    double: Double,
    hosts: &[usize],
    config: impl Fn(&mut Config),
    body: impl Fn(&OnRank<'_>) -> T + Send + Clone + 'static,
) -> Vec<T> {
    let n = hosts.len();
    let (done, results) = mpsc::channel();
    for (rank, mut mesh) in testing::cluster_hosts(hosts).into_iter().enumerate() {
        let (body, done) = (body.clone(), done.clone());
        let mut own = Config::solo();
        config(&mut own);
        mesh.heartbeat = mesh.heartbeat.or(own.membership.heartbeat);
        std::thread::spawn(move || {
            let engine = Engine::start(own, mesh).expect("starts");
            let stream = double.stream(rank as i32);
            let result = body(&OnRank {
                engine: &engine,
                double,
                rank,
                size: n,
                stream,
            });
            let _ = engine.barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()));
            engine.shutdown();
            let _ = done.send((rank, result)); // nobody listens any more after a failure
        });
    }
    drop(done);
    let mut all: Vec<Option<T>> = (0..n).map(|_| None).collect();
    for _ in 0..n {
        let (rank, result) = results
            .recv_timeout(LIMIT)
            .expect("a rank hangs or panicked");
        all[rank] = Some(result);
    }
    all.into_iter().flatten().collect()
}

/// Submit and wait for the launch.
pub(crate) fn finish(engine: &Engine, submission: Submission<'_>) -> Result<OpResult, Error> {
    let handle = engine.submit(submission)?;
    match engine.wait(handle, LIMIT) {
        Waited::Ended { result, .. } => result,
        other => panic!("{other:?}"),
    }
}

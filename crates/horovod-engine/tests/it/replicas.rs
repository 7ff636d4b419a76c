//! Replicas compared at the start: what several engines in one process report.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::common::on_meshes;
use horovod_engine::config::Config;
use horovod_engine::{Engine, Error, ProcessSetId, Replica};
use horovod_settings::CheckReplicas;
use horovod_transport::testing;

/// So many operations no job makes before rank 0 has all reports.
const MANY: usize = 100_000;
const SET: ProcessSetId = ProcessSetId::GLOBAL;

fn replica(key: u64, sum: u64) -> Replica {
    Replica {
        key,
        names: vec!["w".into()],
        sums: vec![sum],
        advice: "Broadcast.".into(),
    }
}

fn barrier(engine: &Engine) -> Result<(), Error> {
    engine.barrier(SET, || Ok(()))
}

/// Runs on two ranks, which end with an error if replicas differ.
fn on_two_ranks<T: Send + 'static>(
    body: impl Fn(&Engine, usize) -> T + Send + Clone + 'static,
) -> Vec<T> {
    let mut config = Config::solo();
    config.negotiation.consistency.at_start = CheckReplicas::Error;
    on_meshes(testing::cluster(2), &config, body)
}

#[test]
fn a_first_report_after_a_join_is_compared_with_none_before_it() {
    let results = on_two_ranks(|engine, rank| {
        if rank == 0 {
            engine.report_replica(SET, replica(7, 1));
        }
        engine.join::<Error>(|| Ok(())).expect("joins");
        if rank == 1 {
            engine.report_replica(SET, replica(7, 2));
        }
        for _ in 0..10 {
            barrier(engine).expect("no difference");
        }
        // Of these each rank reports one.
        engine.report_replica(SET, replica(8, rank as u64));
        let failure = (0..MANY).find_map(|_| barrier(engine).err());
        failure.expect("a difference").to_string()
    });
    assert!(results.iter().all(|text| text.contains("'w' differs")));
}

#[test]
fn of_threads_that_report_the_same_first_one_reads() {
    let reads = on_two_ranks(|engine, rank| {
        let reads = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    engine.report_first_replica(SET, 7, || {
                        reads.fetch_add(1, Ordering::Relaxed);
                        replica(7, 1)
                    });
                });
            }
        });
        assert!(engine.has_reported(SET, 7), "rank {rank}");
        barrier(engine).expect("no difference");
        reads.into_inner()
    });
    assert_eq!(reads, [1, 1]);
}

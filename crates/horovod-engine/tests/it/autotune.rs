//! Autotuning with real ranks: settings change under a running job, results stay right.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use horovod_engine::config::{AutotuneSettings, Config};
use horovod_engine::{
    DType, Engine, Error, Op, Output, ProcessSetId, Rank, ReduceOp, Scale, Submission, Tensor,
    TensorMeta, Waited,
};
use horovod_transport::testing::Cluster;
use horovod_transport::{Mesh, testing};

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(240);
/// With one step per sample this is more than any search takes.
const STEPS: usize = 400;

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};

/// A log file that goes with the test.
struct Log(PathBuf);

impl Log {
    fn new(name: &str) -> Self {
        let name = format!("horovod-autotune-{}-{name}.csv", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    /// Column names and rows.
    fn read(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let text = std::fs::read_to_string(&self.0).expect("rank 0 wrote it");
        let mut rows = text
            .lines()
            .map(|line| line.split(',').map(str::to_owned).collect());
        (rows.next().expect("a header"), rows.collect())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn config(log: &Path, explicit: &[&'static str]) -> Config {
    let mut config = Config::solo();
    config.observers.autotune = Some(AutotuneSettings {
        log: Some(log.to_owned()),
        warmup_samples: 1,
        steps_per_sample: 1,
        bayes_opt_max_samples: 8,
        gaussian_process_noise: None,
        explicit: explicit.to_vec(),
    });
    config
}

/// A job on these meshes that reduces tensors of several sizes in each step and checks every sum.
fn train(
    meshes: Vec<Mesh>,
    config: &Config,
    names: impl Fn(usize, usize) -> Option<String> + Send + Clone + 'static,
) {
    let (done, results) = mpsc::channel();
    let n = meshes.len();
    for (rank, mesh) in meshes.into_iter().enumerate() {
        let (config, names, done) = (config.clone(), names.clone(), done.clone());
        std::thread::spawn(move || {
            let engine = Engine::start(config, mesh).expect("starts");
            let steps = || (0..STEPS).for_each(|s| step(&engine, (rank, n), s, |i| names(s, i)));
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(steps));
            let _ = engine.barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()));
            engine.shutdown();
            let _ = done.send(result.is_ok());
        });
    }
    for _ in 0..n {
        assert!(results.recv_timeout(LIMIT).expect("a rank hangs"));
    }
}

fn step(
    engine: &Engine,
    (rank, n): (usize, usize),
    step: usize,
    name: impl Fn(usize) -> Option<String>,
) {
    let mine = |rank: usize, i: usize| ((rank + 1) * (i + 1) + step % 7) as f32;
    let lengths = [1, 500, 3_000, 40_000, 200_000];
    let mut tensors: Vec<Vec<f32>> = (0..lengths.len())
        .map(|i| vec![mine(rank, i); lengths[i]])
        .collect();
    let handles: Vec<_> = tensors
        .iter_mut()
        .enumerate()
        .map(|(i, data)| {
            let p = data.as_mut_ptr().cast::<u8>();
            let tensor = {
                // SAFETY: the memory outlives the operation, and nobody else touches it.
                unsafe {
                    Tensor::new(
                        TensorMeta::new(DType::F32, [data.len() as u64]),
                        p,
                        Output::At(p),
                    )
                }
            };
            let name = name(i);
            engine
                .submit(Submission::new(
                    "test",
                    name.as_deref(),
                    SUM,
                    ProcessSetId::GLOBAL,
                    tensor.into(),
                ))
                .expect("accepted")
        })
        .collect();
    for handle in handles {
        match engine.wait(handle, LIMIT) {
            Waited::Ended { result, .. } => drop(result.expect("succeeds")),
            other => panic!("{other:?}"),
        }
    }
    for (i, data) in tensors.iter().enumerate() {
        let sum: f32 = (0..n).map(|r| mine(r, i)).sum();
        assert!(
            data.iter().all(|x| *x == sum),
            "step {step}, tensor {i}: expected {sum}"
        );
    }
}

fn same_names(_: usize, i: usize) -> Option<String> {
    Some(format!("gradient.{i}"))
}

/// Values tried for one parameter.
fn values<'a>(header: &[String], rows: &'a [Vec<String>], column: &str) -> BTreeSet<&'a str> {
    let index = header.iter().position(|name| name == column);
    let index = index.expect(column);
    rows.iter().map(|row| row[index].as_str()).collect()
}

#[test]
fn results_stay_right_while_settings_change_and_the_search_ends() {
    for n in [1, 2, 3] {
        let log = Log::new(&format!("search-{n}"));
        train(testing::cluster(n), &config(&log.0, &[]), same_names);
        let (header, rows) = log.read();
        assert_eq!(
            header[..7],
            [
                "hierarchical_allreduce",
                "hierarchical_allgather",
                "torus_allreduce",
                "cache_enabled",
                "cycle_time_ms",
                "tensor_fusion_threshold",
                "score"
            ]
        );
        assert!(rows.iter().all(|row| row.len() == header.len()));
        let settings = |row: &[String]| [&row[..6], &row[7..11]].concat();
        // The defaults come first, others after them, the best last.
        assert_eq!(rows[0][4..6], ["0", "128"]);
        assert!(rows.iter().any(|row| settings(row) != settings(&rows[0])));
        let phases: Vec<&str> = rows.iter().map(|row| row[11].as_str()).collect();
        assert_eq!(phases.iter().filter(|p| **p == "best").count(), 1);
        assert_eq!(phases.last(), Some(&"best"));
        assert!(
            rows.iter()
                .any(|row| settings(row) == settings(&rows[rows.len() - 1]))
        );
        assert!(
            rows.iter()
                .all(|row| row[6].parse::<f64>().is_ok_and(|score| score > 0.0))
        );
    }
}

#[test]
fn between_hosts_their_parameters_are_searched() {
    for (hosts, searched) in [
        (
            &[0, 0, 1][..],
            &["hierarchical_allreduce", "wire_chunk_bytes", "chunk_bytes"][..],
        ),
        (&[0, 1], &["exchange_max_bytes", "wire_chunk_bytes"]),
    ] {
        let log = Log::new(&format!("hosts-{}", hosts.len()));
        train(
            testing::cluster_hosts(hosts),
            &config(&log.0, &[]),
            same_names,
        );
        let (header, rows) = log.read();
        assert_eq!(rows.last().expect("rows")[11], "best");
        for column in searched {
            let tried = values(&header, &rows, column);
            assert!(tried.len() > 1, "{column} of {hosts:?}");
        }
        assert_eq!(values(&header, &rows, "direct_max_bytes").len(), 1);
    }
}

/// New values pass through aggregators, whose ranks apply them as well, and reach leaves later than rank 0's children.
#[test]
fn through_a_tree_every_rank_changes_at_the_same_place() {
    // On one host 3 and 4 speak through 1; on two hosts 4 and 5 through 3.
    for (hosts, inner, searched) in [
        (
            &[0, 0, 0, 0, 0][..],
            1,
            &["chunk_bytes", "direct_max_bytes"][..],
        ),
        (
            &[0, 0, 0, 1, 1, 1],
            3,
            &["hierarchical_allreduce", "wire_chunk_bytes", "chunk_bytes"],
        ),
    ] {
        let n = hosts.len();
        let meshes = Cluster::new(n).hosts(hosts).fan_out(2).build();
        assert!(meshes[0].tree.aggregates(Rank(inner)), "{hosts:?}");
        let log = Log::new(&format!("tree-{n}"));
        train(meshes, &config(&log.0, &[]), same_names);
        let (header, rows) = log.read();
        assert_eq!(rows.last().expect("rows")[11], "best", "{hosts:?}");
        for column in searched {
            assert!(
                values(&header, &rows, column).len() > 1,
                "{column} of {hosts:?}"
            );
        }
    }
}

#[test]
fn what_the_user_has_set_is_not_tuned() {
    let log = Log::new("fixed");
    let mut config = config(&log.0, &["HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"]);
    config.negotiation.fusion_threshold = 3 << 20;
    config.negotiation.cycle_time = Duration::from_micros(50);
    train(testing::cluster(2), &config, same_names);
    let (_, rows) = log.read();
    assert!(rows.len() > 2);
    assert!(
        rows.iter().all(|row| row[4] == "0.05" && row[5] == "3"),
        "{rows:?}"
    );
}

#[test]
fn names_that_never_repeat_are_left_alone() {
    let log = Log::new("once");
    train(testing::cluster(2), &config(&log.0, &[]), |step, i| {
        Some(format!("{step}.{i}"))
    });
    let (_, rows) = log.read();
    assert_eq!(rows, Vec::<Vec<String>>::new());
}

#[test]
fn a_new_generation_begins_anew() {
    let log = Log::new("again");
    let mut lengths = Vec::new();
    for _ in 0..2 {
        train(testing::cluster(2), &config(&log.0, &[]), same_names);
        let (_, rows) = log.read();
        assert_eq!(rows[0][4..6], ["0", "128"]);
        assert_eq!(rows.iter().filter(|row| row[11] == "best").count(), 1);
        lengths.push(rows.len());
    }
    assert!(lengths.iter().all(|rows| *rows > 2));
}

//! The timeline of several engines in one process, over real links, as a reader of the file sees it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::common::{LIMIT, on_meshes};
use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, Error, Handle, Op, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor,
    TensorMeta, Tensors, TimelineSetting, Waited,
};
use horovod_transport::{Mesh, testing};
use serde_json::Value;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("horovod-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // the next run has another name
    }
}

/// Run `body` on every rank, each on a thread of its own, with this setting; the engines end in good order.
fn on_ranks(
    meshes: Vec<Mesh>,
    setting: &TimelineSetting,
    body: impl Fn(&Engine, usize) + Send + Clone + 'static,
) {
    let mut config = Config::solo();
    config.observers.timeline = Some(setting.clone());
    on_meshes(meshes, &config, body);
}

fn sum(engine: &Engine, names: &[&str], len: usize) {
    let mut data = vec![vec![1.0f32; len]; names.len()];
    for handle in submit(engine, names, &mut data) {
        finish(engine, handle);
    }
}

fn finish(engine: &Engine, handle: Handle) {
    match engine.wait(handle, LIMIT) {
        Waited::Ended { result, .. } => drop(result.expect("is carried out")),
        other => panic!("{other:?}"),
    }
}

/// The data must live until all of them have ended.
fn submit(engine: &Engine, names: &[&str], data: &mut [Vec<f32>]) -> Vec<Handle> {
    names
        .iter()
        .zip(data)
        .map(|(name, data)| {
            let p = data.as_mut_ptr().cast::<u8>();
            let submission = Submission::new(
                "test",
                Some(name),
                Op::Allreduce {
                    op: ReduceOp::Sum,
                    scale: Scale::NONE,
                },
                ProcessSetId::GLOBAL,
                Tensors::One({
                    // SAFETY: the memory outlives the operation, and nobody else touches it.
                    unsafe {
                        Tensor::new(
                            TensorMeta::new(DType::F32, [data.len() as u64]),
                            p,
                            Output::At(p),
                        )
                    }
                }),
            );
            engine.submit(submission).expect("is queued")
        })
        .collect()
}

fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read(path).expect("a file");
    match serde_json::from_slice(&text) {
        Ok(Value::Array(events)) => events,
        other => panic!("{other:?}: {}", String::from_utf8_lossy(&text)),
    }
}

/// Events of this phase and name in the process with this name.
fn count(events: &[Value], process: &str, ph: &str, name: &str) -> usize {
    let pids: Vec<&Value> = events
        .iter()
        .filter(|e| e["name"] == "process_name")
        .filter(|e| {
            e["args"]["name"]
                .as_str()
                .is_some_and(|n| n.starts_with(process))
        })
        .map(|e| &e["pid"])
        .collect();
    events
        .iter()
        .filter(|e| pids.contains(&&e["pid"]) && e["ph"] == ph && e["name"] == name)
        .count()
}

#[test]
fn nothing_of_any_rank_is_lost_at_an_orderly_end() {
    for (n, shm) in [(1, true), (2, true), (3, false)] {
        let folder = Folder::new(&format!("end-{n}"));
        let path = folder.file("t.json");
        let meshes = testing::Cluster::new(n).shm(shm).build();
        on_ranks(meshes, &TimelineSetting::File(path.clone()), |engine, _| {
            for _ in 0..50 {
                sum(engine, &["a", "b\"\n\u{1f600}"], 1000);
            }
        });
        let events = read(&path);
        for name in ["test.a", "test.b\"\n\u{1f600}"] {
            assert_eq!(count(&events, name, "B", "NEGOTIATE_ALLREDUCE"), 50);
            assert_eq!(count(&events, name, "B", "ALLREDUCE"), 50);
            for rank in 0..n {
                // Ready on every rank, and submitted by its caller.
                assert_eq!(count(&events, name, "X", &rank.to_string()), 50);
                assert_eq!(count(&events, &format!("rank {rank} "), "i", name), 50);
            }
        }
        for rank in 0..n {
            let process = format!("rank {rank} ");
            let mut threads: Vec<&str> = events
                .iter()
                .filter(|e| e["name"] == "thread_name" && e["pid"] == 1_000_000_000 + rank)
                .filter_map(|e| e["args"]["name"].as_str())
                .collect();
            threads.sort_unstable();
            assert!(
                threads.contains(&format!("caller-{rank}").as_str()),
                "{threads:?}"
            );
            assert!(count(&events, &process, "X", "ALLREDUCE") >= 50);
            assert_eq!(count(&events, &process, "X", "BARRIER"), 1);
        }
        assert!(!events.iter().any(|e| e["name"] == "EVENTS_DROPPED"));
    }
}

#[test]
fn recording_starts_and_stops_on_all_ranks_when_rank_0_says_so() {
    let folder = Folder::new("dynamic");
    let [first, second] = ["first.json", "second.json"].map(|name| folder.file(name));
    let paths = (first.clone(), second.clone());
    let together = Arc::new(Barrier::new(2));
    on_ranks(
        testing::cluster(2),
        &TimelineSetting::Dynamic,
        move |engine, rank| {
            let only_on_0 = |act: &dyn Fn()| {
                together.wait();
                if rank == 0 {
                    act();
                }
                together.wait();
            };
            sum(engine, &["before"], 10);
            only_on_0(&|| engine.start_timeline(&paths.0, true).unwrap());
            sum(engine, &["one"], 10);
            only_on_0(&|| engine.start_timeline(&paths.0, true).unwrap());
            sum(engine, &["one"], 10);
            only_on_0(&|| assert!(engine.stop_timeline()));
            // All of it is there, while the job runs.
            let events = read(&paths.0);
            assert_eq!(count(&events, "test.one", "X", "1"), 2);
            sum(engine, &["between"], 10);
            only_on_0(&|| engine.start_timeline(&paths.1, false).unwrap());
            sum(engine, &["two"], 10);
            only_on_0(&|| assert!(engine.stop_timeline()));
            only_on_0(&|| assert!(!engine.stop_timeline()));
            sum(engine, &["after"], 10);
        },
    );
    let (first, second) = (read(&first), read(&second));
    assert_eq!(count(&first, "test.one", "B", "ALLREDUCE"), 2);
    assert_eq!(count(&second, "test.two", "B", "ALLREDUCE"), 1);
    assert!(first.iter().any(|e| e["name"] == "CYCLE_START"));
    assert!(!second.iter().any(|e| e["name"] == "CYCLE_START"));
    for absent in ["test.before", "test.between", "test.after"] {
        assert_eq!(count(&first, absent, "B", "ALLREDUCE"), 0);
        assert_eq!(count(&second, absent, "B", "ALLREDUCE"), 0);
    }
}

#[test]
fn only_what_is_waited_for_is_a_wait() {
    let folder = Folder::new("waits");
    let [over, late] = ["over.json", "late.json"].map(|name| folder.file(name));
    let paths = (over.clone(), late.clone());
    let together = Arc::new(Barrier::new(2));
    on_ranks(
        testing::cluster(2),
        &TimelineSetting::Dynamic,
        move |engine, rank| {
            let start = |path: &Path| {
                if rank == 0 {
                    engine.start_timeline(path, false).unwrap();
                }
                engine
                    .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()))
                    .unwrap();
            };
            let mut data = [vec![1.0; 10]];
            start(&paths.0);
            for handle in submit(engine, &["over"], &mut data) {
                while engine.poll(handle) == Some(false) {
                    std::thread::yield_now();
                }
                finish(engine, handle);
            }
            together.wait();
            start(&paths.1);
            if rank == 1 {
                together.wait();
            }
            for handle in submit(engine, &["late"], &mut data) {
                if rank == 0 {
                    let waited = engine.wait(handle, Duration::from_millis(1));
                    assert!(matches!(waited, Waited::Pending));
                    together.wait();
                }
                finish(engine, handle);
            }
        },
    );
    let waits = |path| count(&read(path), "rank 0 ", "X", "WAIT");
    assert_eq!(waits(&over), 0);
    assert!(waits(&late) >= 1);
}

#[test]
fn a_start_without_the_setting_is_refused() {
    let engine = Engine::start(Config::solo(), Mesh::solo().unwrap()).unwrap();
    let error = engine
        .start_timeline(Path::new("/tmp/x"), false)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage."
    );
    assert!(!engine.stop_timeline());
}

#[test]
fn a_disk_without_space_ends_the_recording_and_not_the_job() {
    let setting = TimelineSetting::File("/dev/full".into());
    on_ranks(testing::cluster(2), &setting, |engine, _| {
        for _ in 0..20 {
            sum(engine, &["a"], 1000);
        }
    });
}

#[test]
fn a_rank_that_vanishes_leaves_a_readable_file_with_what_was_known() {
    let folder = Folder::new("vanished");
    let path = folder.file("t.json");
    let mut config = Config::solo();
    config.observers.timeline = Some(TimelineSetting::File(path.clone()));
    let mut meshes = testing::cluster(2).into_iter();
    let (zero, one) = (meshes.next().unwrap(), meshes.next().unwrap());
    let other = {
        let config = config.clone();
        std::thread::spawn(move || {
            let engine = Engine::start(config, one).unwrap();
            sum(&engine, &["a"], 10);
            engine.shutdown();
        })
    };
    let engine = Engine::start(config, zero).unwrap();
    sum(&engine, &["a"], 10);
    other.join().unwrap();
    engine.shutdown();
    let events = read(&path);
    assert_eq!(count(&events, "test.a", "B", "ALLREDUCE"), 1);
}

//! The timeline of operations on GPU tensors: when the GPU, not the host, carried them out.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::gpu_double::ranks::{OnRank, finish, on_ranks};
use crate::gpu_double::{Memory, with_double};
use horovod_engine::config::{Config, GpuOperations};
use horovod_engine::gpu::Ready;
use horovod_engine::{
    DType, Op, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor, TensorMeta,
    TimelineSetting,
};
use serde_json::Value;

const ELEMS: u64 = 1000;
const RANKS: usize = 2;
/// The process of rank 0 in the file.
const RANK_PIDS: u64 = 1_000_000_000;

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};

struct TimelineFile(PathBuf);

impl TimelineFile {
    fn new(name: &str) -> Self {
        let name = format!("horovod-{}-{name}.json", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    fn read(&self) -> Events {
        let text = std::fs::read(&self.0).expect("a file");
        match serde_json::from_slice(&text) {
            Ok(Value::Array(events)) => Events(events),
            other => panic!("{other:?}: {}", String::from_utf8_lossy(&text)),
        }
    }
}

impl Drop for TimelineFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // the next run has another name
    }
}

struct Events(Vec<Value>);

/// A complete event of a rank.
#[derive(Debug)]
struct Span<'a> {
    name: &'a str,
    track: &'a str,
    /// In nanoseconds.
    begin: u64,
    end: u64,
    args: &'a Value,
}

impl Events {
    /// Spans on the tracks of a rank, by category; in the order of the file.
    fn of_rank(&self, rank: usize, category: &str) -> Vec<Span<'_>> {
        let pid = RANK_PIDS + rank as u64;
        let is_here = |event: &&Value| event["pid"] == pid;
        let named = self.0.iter().filter(is_here);
        let named: Vec<_> = named
            .filter(|event| event["name"] == "thread_name")
            .collect();
        let events = self.0.iter().filter(is_here);
        let events = events.filter(|event| event["ph"] == "X" && event["cat"] == category);
        let spans = events.map(|event| {
            let begin = nanos(&event["ts"]);
            let track = named.iter().find(|name| name["tid"] == event["tid"]);
            Span {
                name: event["name"].as_str().expect("a name"),
                track: track.map_or("", |name| name["args"]["name"].as_str().expect("a name")),
                begin,
                end: begin + nanos(&event["dur"]),
                args: &event["args"],
            }
        });
        spans.collect()
    }

    /// The execution of one tensor.
    fn operation(&self, rank: usize, tensor: &str) -> Span<'_> {
        let mut operations = self.of_rank(rank, "operation").into_iter();
        let is_it = |span: &Span<'_>| {
            let names = span.args["names"].as_str().expect("names");
            names.ends_with(tensor)
        };
        operations.find(is_it).expect("it was carried out")
    }

    /// Names of the parts of one tensor's life, as its own track shows them.
    fn life(&self, tensor: &str) -> Vec<&str> {
        let is_it = |event: &&Value| {
            let name = event["args"]["name"].as_str();
            event["name"] == "process_name" && name.is_some_and(|name| name.ends_with(tensor))
        };
        let pid = &self.0.iter().find(is_it).expect("its track")["pid"];
        let begins = self.0.iter().filter(|e| e["pid"] == *pid && e["ph"] == "B");
        begins.filter_map(|event| event["name"].as_str()).collect()
    }
}

/// The file counts microseconds, with three decimals.
fn nanos(micros: &Value) -> u64 {
    (micros.as_f64().expect("a time") * 1e3).round() as u64
}

fn recorded(config: &mut Config, file: &Path) {
    config.observers.timeline = Some(TimelineSetting::File(file.to_owned()));
}

fn ones(on: &OnRank<'_>) -> Arc<Memory> {
    let bytes: Vec<u8> = (0..ELEMS).flat_map(|_| 1.0f32.to_le_bytes()).collect();
    let memory = Memory::new(on.double, on.rank as i32, on.stream, bytes.len());
    memory.write(&bytes);
    memory
}

/// Sum in place on the GPU, until it is launched.
fn sum(on: &OnRank<'_>, name: &str, memory: &Arc<Memory>) {
    let ready = Ready::record(on.rank as i32, on.stream).expect("records");
    let tensor = memory.tensor(DType::F32, &[ELEMS], Some(memory), &ready);
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some(name), SUM, set, tensor.into());
    finish(on.engine, submission).expect("works");
}

/// Sum on the host.
fn sum_on_host(on: &OnRank<'_>, name: &str) {
    let mut data = vec![1.0f32; 10];
    let meta = TensorMeta::new(DType::F32, [10]);
    let at = data.as_mut_ptr().cast::<u8>();
    // SAFETY: it lives until the operation has ended.
    let tensor = unsafe { Tensor::new(meta, at, Output::At(at)) };
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some(name), SUM, set, tensor.into());
    finish(on.engine, submission).expect("works");
}

#[test]
fn an_operation_is_shown_when_the_gpu_carried_it_out() {
    let test = "an_operation_is_shown_when_the_gpu_carried_it_out";
    with_double(test, "devices=2", |double| {
        let file = TimelineFile::new(test);
        let path = file.0.clone();
        on_ranks(
            double,
            RANKS,
            |config| recorded(config, &path),
            |on| {
                let memory = ones(on);
                // Rank 0's GPU computes on, long after the operation was launched.
                let gate = (on.rank == 0).then(|| on.double.gate(on.stream));
                sum(on, "gated", &memory);
                sum_on_host(on, "meanwhile");
                if let Some(gate) = gate {
                    on.double.open(gate);
                }
                on.engine
                    .wait_for_devices(Duration::MAX)
                    .expect("nothing failed");
            },
        );
        let events = file.read();
        for rank in 0..RANKS {
            let track = format!("GPU {rank}");
            let stages = events.of_rank(rank, "stage");
            let on_gpu: Vec<_> = stages.iter().filter(|s| s.track == track).collect();
            let [stage] = &on_gpu[..] else {
                panic!("{stages:?}")
            };
            assert_eq!(stage.name, "NCCL_ALLREDUCE");
            let gated = events.operation(rank, "gated");
            assert_eq!(gated.track, track, "{gated:?}");
            assert_eq!(gated.args["algorithm"], "NCCL_ALLREDUCE");
            assert_eq!((gated.begin, gated.end), (stage.begin, stage.end));
            // It could not end before rank 0's GPU was let go on; there it could not even begin.
            let meanwhile = events.operation(rank, "meanwhile");
            assert_ne!(meanwhile.track, track);
            assert!(gated.end > meanwhile.begin, "{gated:?} {meanwhile:?}");
            if rank == 0 {
                assert!(gated.begin > meanwhile.end, "{gated:?} {meanwhile:?}");
            }
        }
        assert!(events.life("gated").contains(&"NCCL_ALLREDUCE"));
    });
}

#[test]
fn what_goes_through_host_memory_shows_its_copies_around_the_hosts_part() {
    let test = "what_goes_through_host_memory_shows_its_copies_around_the_hosts_part";
    with_double(test, "devices=2,delay=20", |double| {
        let file = TimelineFile::new(test);
        let path = file.0.clone();
        let config = |config: &mut Config| {
            recorded(config, &path);
            config.gpu.operations = GpuOperations::Host;
        };
        on_ranks(double, RANKS, config, |on| {
            let memory = ones(on);
            sum(on, "staged", &memory);
            on.engine
                .wait_for_devices(Duration::MAX)
                .expect("nothing failed");
        });
        let events = file.read();
        for rank in 0..RANKS {
            let stages = events.of_rank(rank, "stage");
            let names: Vec<_> = stages.iter().map(|stage| stage.name).collect();
            let [copy_in, on_host, .., copy_out] = &stages[..] else {
                panic!("{names:?}")
            };
            assert_eq!(copy_in.name, "MEMCPY_IN_HOST_BUFFER", "{names:?}");
            assert!(on_host.name.ends_with("_ALLREDUCE"), "{names:?}");
            assert_eq!(copy_out.name, "MEMCPY_OUT_HOST_BUFFER", "{names:?}");
            for pair in stages.windows(2) {
                assert!(pair[0].begin <= pair[1].begin, "{stages:?}");
            }
            assert!(copy_in.end <= on_host.begin && on_host.end <= copy_out.begin);
            let staged = events.operation(rank, "staged");
            assert_eq!(staged.args["algorithm"], on_host.name);
            assert_eq!((staged.begin, staged.end), (copy_in.begin, copy_out.end));
        }
        let life = events.life("staged");
        for part in ["MEMCPY_IN_HOST_BUFFER", "MEMCPY_OUT_HOST_BUFFER"] {
            assert!(life.contains(&part), "{life:?}");
        }
    });
}

#[test]
fn a_recorded_operation_costs_one_more_event_and_two_questions_for_its_time() {
    let test = "a_recorded_operation_costs_one_more_event_and_two_questions_for_its_time";
    const OPERATIONS: u64 = 20;
    with_double(test, "devices=2", |double| {
        let file = TimelineFile::new(test);
        let path = file.0.clone();
        on_ranks(
            double,
            RANKS,
            |config| recorded(config, &path),
            |on| {
                let memory = ones(on);
                for i in 0..OPERATIONS {
                    sum(on, &format!("sum{i}"), &memory);
                }
                on.engine
                    .wait_for_devices(Duration::MAX)
                    .expect("nothing failed");
            },
        );
        let all = OPERATIONS * RANKS as u64;
        assert_eq!(double.count("cuEventElapsedTime"), 2 * all);
        // At the submission, the begin and the end; and what the clocks are compared by.
        let compared = double.count("cuEventRecord") - 3 * all;
        assert!(compared >= 2, "{compared}");
        for call in ["cuEventSynchronize", "cuStreamSynchronize"] {
            assert_eq!(double.count(call), 0, "{call}");
        }
    });
}

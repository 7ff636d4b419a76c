//! Operations that do not end on GPUs: whose GPU holds up the others is told on every rank, and then ends the job, or not.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::gpu_double::ranks::{OnRank, finish, on_ranks};
use crate::gpu_double::{Memory, allocator, with_double};
use horovod_engine::config::{Config, GpuOperations};
use horovod_engine::gpu::Ready;
use horovod_engine::{DType, Error, Op, OpResult, ProcessSetId, ReduceOp, Scale, Submission};

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(120);
const ELEMS: u64 = 1000;

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};

fn ones(on: &OnRank<'_>) -> Arc<Memory> {
    let bytes: Vec<u8> = (0..ELEMS).flat_map(|_| 1.0f32.to_le_bytes()).collect();
    let memory = Memory::new(on.double, on.rank as i32, on.stream, bytes.len());
    memory.write(&bytes);
    memory
}

/// Sum in place, until it is launched.
fn sum(on: &OnRank<'_>, name: &str, memory: &Arc<Memory>) -> Result<OpResult, Error> {
    sum_in(on, ProcessSetId::GLOBAL, name, memory)
}

fn sum_in(
    on: &OnRank<'_>,
    set: ProcessSetId,
    name: &str,
    memory: &Arc<Memory>,
) -> Result<OpResult, Error> {
    let ready = Ready::record(on.rank as i32, on.stream)?;
    let tensor = memory.tensor(DType::F32, &[ELEMS], Some(memory), &ready);
    let submission = Submission::new("test", Some(name), SUM, set, tensor.into());
    finish(on.engine, submission)
}

fn ends_after_a_second(config: &mut Config) {
    config.gpu.timeout = Some(Duration::from_secs(1));
}

fn has_this_report(file: &Path, text: &str) -> bool {
    std::fs::read_to_string(file).is_ok_and(|report| report.contains(text))
}

#[test]
fn the_rank_whose_gpu_does_not_come_is_named_on_all_before_the_job_ends() {
    let test = "the_rank_whose_gpu_does_not_come_is_named_on_all_before_the_job_ends";
    with_double(test, "devices=3", |double| {
        let gate = Arc::new(AtomicU64::new(0));
        let errors = on_ranks(double, 3, ends_after_a_second, move |on| {
            let memory = ones(on);
            if on.rank == 1 {
                gate.store(on.double.gate(on.stream), Ordering::SeqCst);
            }
            let launched = sum(on, "gated", &memory).expect("is launched");
            let error = on.engine.wait_for_devices(Duration::MAX);
            // All have launched it long since; now what rank 1 has left on its GPU may end.
            on.double.open(gate.load(Ordering::SeqCst));
            drop(launched);
            error.expect_err("rank 1's GPU does not come").to_string()
        });
        for error in &errors {
            for part in [
                "though no rank is lost: test.gated has been on GPUs for",
                "HOROVOD_GPU_TIMEOUT",
                "rank 1 on ",
                "still computes what the script has put on it before",
            ] {
                assert!(error.contains(part), "{part}\nis not in\n{error}");
            }
            assert!(!error.contains("rank 2 on"), "{error}");
        }
    });
}

#[test]
fn an_earlier_operation_of_other_ranks_is_what_all_are_told_of() {
    let test = "an_earlier_operation_of_other_ranks_is_what_all_are_told_of";
    // Of all ranks, which are threads of one process: of ranks 1 and 2 alone.
    with_double(test, "devices=3,never=1", |double| {
        let config = |config: &mut Config| {
            ends_after_a_second(config);
            config.negotiation.dynamic_process_sets = true;
        };
        let errors = on_ranks(double, 3, config, |on| {
            let pair = [1, 2];
            let set = on.engine.add_process_set::<Error>(&pair, || Ok(()));
            let set = set.expect("is made");
            let (first, second) = (ones(on), ones(on));
            if on.rank > 0 {
                sum_in(on, set, "inner", &first).expect("is launched");
            }
            // All GPUs of the pair are at the other one; rank 0's is at this.
            on.engine
                .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()))
                .expect("all have come");
            let launched = sum(on, "outer", &second);
            let error = on.engine.wait_for_devices(Duration::MAX);
            drop(launched);
            error.expect_err("it never ends").to_string()
        });
        for error in &errors {
            assert!(error.contains("test.inner"), "{error}");
            assert!(error.contains("HOROVOD_GPU_TIMEOUT"), "{error}");
        }
    });
}

#[test]
fn a_launch_that_does_not_return_is_told_from_a_kernel_that_does_not_end() {
    let test = "a_launch_that_does_not_return_is_told_from_a_kernel_that_does_not_end";
    // NCCL never has the ranks connected.
    with_double(test, "devices=2,in_progress=1000000000", |double| {
        let errors = on_ranks(double, 2, ends_after_a_second, |on| {
            let memory = ones(on);
            let error = sum(on, "connects", &memory).expect_err("is never launched");
            error.to_string()
        });
        for error in &errors {
            for part in ["test.connects", "does not return", "HOROVOD_GPU_TIMEOUT"] {
                assert!(error.contains(part), "{part}\nis not in\n{error}");
            }
        }
    });
}

#[test]
fn without_a_timeout_it_is_told_and_goes_on_when_the_gpu_does() {
    let test = "without_a_timeout_it_is_told_and_goes_on_when_the_gpu_does";
    with_double(test, "devices=2", |double| {
        let name = format!("horovod-{}-{test}.txt", std::process::id());
        let file = std::env::temp_dir().join(name);
        let report = file.clone();
        let config = |config: &mut Config| {
            config.gpu.timeout = None;
            config.stalls.check = Some(Duration::from_secs(1));
            config.stalls.report = Some(file.clone());
        };
        let sums = on_ranks(double, 2, config, move |on| {
            let memory = ones(on);
            let gate = (on.rank == 1).then(|| on.double.gate(on.stream));
            let result = sum(on, "gated", &memory).expect("is launched");
            if let Some(gate) = gate {
                let deadline = Instant::now() + LIMIT;
                while !has_this_report(&report, "rank 1 on ") {
                    assert!(Instant::now() < deadline, "nothing is told");
                    std::thread::yield_now();
                }
                on.double.open(gate);
            }
            on.engine
                .wait_for_devices(Duration::MAX)
                .expect("it goes on");
            result
                .end
                .expect("launched")
                .order(on.stream)
                .expect("orders");
            let bytes = memory.read();
            f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        });
        let text = std::fs::read_to_string(&file).expect("a report");
        let _ = std::fs::remove_file(&file); // the next run has another name
        assert_eq!(sums, [2.0, 2.0]);
        for part in [
            "test.gated has been on GPUs for",
            "launched, runs: rank 0",
            "still computes what the script has put on it before: rank 1",
            "Busy GPU:",
        ] {
            assert!(text.contains(part), "{part}\nis not in\n{text}");
        }
        assert!(!text.contains("The job ends"), "{text}");
    });
}

#[test]
fn results_on_their_way_from_host_memory_are_aborted_with_the_generation() {
    let test = "results_on_their_way_from_host_memory_are_aborted_with_the_generation";
    with_double(test, "devices=2", |double| {
        let config = |config: &mut Config| config.gpu.operations = GpuOperations::Host;
        let ended = on_ranks(double, 2, config, |on| {
            let (memory, device) = (ones(on), on.rank as i32);
            // On rank 0 the result's memory is free only after a kernel of the script's: the copy to it waits.
            let busy = on.double.stream(device);
            let gate = (on.rank == 0).then(|| on.double.gate(busy));
            let ready = Ready::record(device, on.stream).expect("records");
            let tensor = memory.tensor(DType::F32, &[ELEMS], None, &ready);
            let set = ProcessSetId::GLOBAL;
            let submission =
                Submission::new("test", Some("gather"), Op::Allgather, set, tensor.into());
            let made = Arc::new(Mutex::new(Vec::new()));
            let allocator = allocator(on.double, device, busy, made.clone());
            // SAFETY: memory of the double, kept until the operation has ended.
            let submission = unsafe { submission.allocating(allocator) };
            let end = finish(on.engine, submission).expect("is launched").end;
            let Some(gate) = gate else {
                on.engine
                    .wait_for_devices(Duration::MAX)
                    .expect("ends here");
                on.engine.shutdown();
                return None;
            };
            let end = end.expect("is launched");
            let deadline = Instant::now() + LIMIT;
            // Asked only by an executor that was aborted.
            while on.double.count("cuStreamQuery") == 0 {
                assert!(Instant::now() < deadline, "it is not aborted");
                std::thread::yield_now();
            }
            on.double.open(gate);
            let waited = on.engine.wait_for_launch(&*end, LIMIT);
            waited.expect_err("rank 1 has left");
            end.ended_well()
        });
        assert_eq!(ended, [Some(false), None]);
    });
}

#[test]
fn a_wait_for_what_the_device_never_lets_go_of_ends_with_the_generation() {
    let test = "a_wait_for_what_the_device_never_lets_go_of_ends_with_the_generation";
    with_double(test, "devices=1", |double| {
        let errors = on_ranks(double, 1, ends_after_a_second, |on| {
            let memory = ones(on);
            // Never opened: an abort of NCCL's does not bring this GPU to rest.
            on.double.gate(on.stream);
            let result = sum(on, "never", &memory).expect("is launched");
            let end = result.end.expect("is launched");
            let waited = on.engine.wait_for_launch(&*end, LIMIT);
            assert_eq!(end.ended_well(), None, "nothing is known of its end");
            waited.expect_err("it never ends").to_string()
        });
        for part in ["HOROVOD_GPU_TIMEOUT", "this GPU still computes"] {
            assert!(errors[0].contains(part), "{errors:?}");
        }
    });
}

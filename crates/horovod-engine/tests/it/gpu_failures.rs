//! GPUs that fail, peers that never come, and what may not be done with a GPU tensor: errors on every rank, and no hang.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::gpu_double::ranks::{OnRank, finish, on_ranks};
use crate::gpu_double::{Memory, with_double};
use horovod_engine::config::{Config, GpuOperations};
use horovod_engine::gpu::Ready;
use horovod_engine::{
    DType, Device, Error, Handle, Op, OpResult, Output, ProcessSetId, Rank, ReduceOp, Scale,
    Submission, Tensor, TensorMeta, Waited,
};

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};
const ELEMS: u64 = 1000;

fn nothing(_: &mut Config) {}

/// A tensor of ones on this rank's GPU.
fn ones(on: &OnRank<'_>, device: i32) -> Arc<Memory> {
    let bytes: Vec<u8> = (0..ELEMS).flat_map(|_| 1.0f32.to_le_bytes()).collect();
    let memory = Memory::new(on.double, device, on.stream, bytes.len());
    memory.write(&bytes);
    memory
}

fn sum_of(on: &OnRank<'_>, name: &str, memory: &Arc<Memory>) -> Result<OpResult, Error> {
    let ready = Ready::record(on.rank as i32, on.stream)?;
    let tensor = memory.tensor(DType::F32, &[ELEMS], Some(memory), &ready);
    let set = ProcessSetId::GLOBAL;
    finish(
        on.engine,
        Submission::new("test", Some(name), SUM, set, tensor.into()),
    )
}

/// Sum in place; the sum, when the operation has ended on the device.
fn sum(on: &OnRank<'_>, name: &str) -> Result<f32, Error> {
    let memory = ones(on, on.rank as i32);
    let result = sum_of(on, name, &memory)?;
    let end = result.end.expect("it was launched");
    end.order(on.stream)?;
    // Of this operation alone: a wait for all devices would report what fails on another rank after it.
    on.engine.wait_for_launch(&*end, Duration::MAX)?;
    let bytes = memory.read();
    Ok(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// Sums until one fails, on every rank; the errors.
fn sums_until_an_error(
    test: &str,
    settings: &str,
    config: fn(&mut Config),
    expected: &'static str,
) {
    with_double(test, settings, |double| {
        let errors = on_ranks(double, 2, config, |on| {
            let failed = (0..50).find_map(|i| sum(on, &format!("sum{i}")).err());
            failed.expect("it fails").to_string()
        });
        assert!(
            errors.iter().any(|error| error.contains(expected)),
            "{errors:?}"
        );
        // Both ranks name the failed rank by its number, or the failed call if it was their own.
        let is_named = |error: &String| error.contains("rank ") || error.contains(expected);
        assert!(errors.iter().all(is_named), "{errors:?}");
    });
}

#[test]
fn a_failed_call_ends_the_generation_on_all_ranks() {
    sums_until_an_error(
        "a_failed_call_ends_the_generation_on_all_ranks",
        "devices=2,fail=ncclAllReduce:5:2",
        nothing,
        "ncclAllReduce",
    );
}

#[test]
fn an_error_after_the_launch_ends_the_generation_on_all_ranks() {
    sums_until_an_error(
        "an_error_after_the_launch_ends_the_generation_on_all_ranks",
        "devices=2,async=6:6,never=7",
        nothing,
        "NCCL",
    );
}

#[test]
fn a_lost_context_ends_the_generation_and_says_that_the_process_is_done() {
    sums_until_an_error(
        "a_lost_context_ends_the_generation_and_says_that_the_process_is_done",
        "devices=2,fail=cuEventQuery:9+:700",
        nothing,
        "cannot use the GPU any more",
    );
}

#[test]
fn what_never_ends_on_the_gpu_is_given_up_after_the_timeout() {
    sums_until_an_error(
        "what_never_ends_on_the_gpu_is_given_up_after_the_timeout",
        "devices=2,never=5",
        |config| config.gpu.timeout = Some(Duration::from_secs(1)),
        "launched, runs: ranks 0, 1",
    );
}

#[test]
fn a_wait_for_what_is_given_up_has_its_error() {
    with_double(
        "a_wait_for_what_is_given_up_has_its_error",
        // Of both ranks, which are threads of one process: one's second.
        "devices=2,never=3",
        |double| {
            let config = |config: &mut Config| config.gpu.timeout = Some(Duration::from_secs(1));
            let errors = on_ranks(double, 2, config, |on| {
                sum(on, "first").expect("it ends");
                let memory = ones(on, on.rank as i32);
                let result = sum_of(on, "never", &memory).expect("it is launched");
                let end = result.end.expect("it is launched");
                // After the abort the device has passed the end, with nothing in the memory.
                let waited = on.engine.wait_for_launch(&*end, Duration::MAX);
                waited.expect_err("it never ends").to_string()
            });
            let has_cause = |error: &String| error.contains("HOROVOD_GPU_TIMEOUT");
            assert!(errors.iter().any(has_cause), "{errors:?}");
        },
    );
}

#[test]
fn no_memory_for_a_stream_is_an_error_on_all_ranks() {
    sums_until_an_error(
        "no_memory_for_a_stream_is_an_error_on_all_ranks",
        "devices=2,fail=cuStreamCreateWithPriority:1:2",
        nothing,
        "cuStreamCreateWithPriority",
    );
}

#[test]
fn a_rank_that_leaves_amid_a_collective_frees_the_others() {
    let test = "a_rank_that_leaves_amid_a_collective_frees_the_others";
    with_double(test, "devices=3,never=1", |double| {
        // All are launched, one never begins; then a rank goes.
        let launched = Arc::new(AtomicUsize::new(0));
        let errors = on_ranks(double, 3, nothing, move |on| {
            let memory = ones(on, on.rank as i32);
            let result = sum_of(on, "sum", &memory).expect("is launched");
            launched.fetch_add(1, Ordering::SeqCst);
            while launched.load(Ordering::SeqCst) < 3 {
                std::thread::yield_now();
            }
            if on.rank == 2 {
                on.engine.shutdown();
                return String::new();
            }
            let error = on
                .engine
                .wait_for_devices(Duration::MAX)
                .expect_err("its peer is gone");
            drop(result);
            error.to_string()
        });
        assert!(
            errors[..2].iter().all(|error| error.contains("rank 2")),
            "{errors:?}"
        );
    });
}

/// Copies on this rank's GPU alone.
fn copy(on: &OnRank<'_>, set: ProcessSetId) -> Result<OpResult, Error> {
    let (from, to) = (ones(on, on.rank as i32), ones(on, on.rank as i32));
    let ready = Ready::record(on.rank as i32, on.stream)?;
    let tensor = from.tensor(DType::F32, &[ELEMS], Some(&to), &ready);
    let root = Rank(on.rank as u32);
    let op = Op::Broadcast { root };
    finish(
        on.engine,
        Submission::new("test", Some("copy"), op, set, tensor.into()),
    )
}

#[test]
fn the_others_hear_of_a_failure_while_the_abort_hangs_where_it_happened() {
    let test = "the_others_hear_of_a_failure_while_the_abort_hangs_where_it_happened";
    // Only rank 1 calls it.
    let settings = "devices=2,fail=cuMemcpyDtoDAsync_v2:1:2";
    with_double(test, settings, |double| {
        let gate = Arc::new(AtomicU64::new(0));
        let have_ended = Arc::new(AtomicUsize::new(0));
        let config = |config: &mut Config| config.negotiation.dynamic_process_sets = true;
        let errors = on_ranks(double, 2, config, move |on| {
            let set = on.engine.add_process_set::<Error>(&[1], || Ok(()));
            let set = set.expect("is made");
            sum(on, "first").expect("it ends");
            have_ended.fetch_add(1, Ordering::SeqCst);
            if on.rank == 1 {
                // The failure would abort rank 0's part of the first sum if that still ran.
                while have_ended.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
                // A kernel of the script's that does not end: NCCL frees memory, for which it waits for the device.
                let other = on.double.stream(1);
                gate.store(on.double.gate(other), Ordering::SeqCst);
                let error = copy(on, set).expect_err("its copy fails");
                return error.to_string();
            }
            let memory = ones(on, 0);
            let error = sum_of(on, "second", &memory)
                .and_then(|_| on.engine.wait_for_devices(Duration::MAX))
                .expect_err("rank 1 has failed");
            // Only now the abort on rank 1 can end.
            on.double.open(gate.load(Ordering::SeqCst));
            error.to_string()
        });
        for error in &errors {
            for part in ["rank 1", "cuMemcpyDtoDAsync"] {
                assert!(error.contains(part), "{part}\nis not in\n{error}");
            }
        }
    });
}

#[test]
fn a_rank_hears_of_its_own_failure_though_its_gpu_never_comes_to_rest() {
    let test = "a_rank_hears_of_its_own_failure_though_its_gpu_never_comes_to_rest";
    let settings = "devices=1,fail=cuMemcpyDtoDAsync_v2:1:2";
    with_double(test, settings, |double| {
        let errors = on_ranks(double, 1, nothing, |on| {
            // Never opened.
            on.double.gate(on.stream);
            let error = copy(on, ProcessSetId::GLOBAL).expect_err("it fails");
            error.to_string()
        });
        assert!(errors[0].contains("cuMemcpyDtoDAsync"), "{errors:?}");
        let loss = horovod_engine::gpu::loss().expect("only another process can use the GPU");
        let loss = loss.to_string();
        for part in [
            "GPU 0 has not come to rest",
            "after NCCL was aborted, with test.copy under way",
        ] {
            assert!(loss.contains(part), "{part}\nis not in\n{loss}");
        }
    });
}

#[test]
fn copies_to_the_host_that_fail_are_told_of_though_the_gpu_never_comes_to_rest() {
    let test = "copies_to_the_host_that_fail_are_told_of_though_the_gpu_never_comes_to_rest";
    let settings = "devices=2,fail=cuMemcpyDtoHAsync_v2:1:2";
    with_double(test, settings, |double| {
        let config = |config: &mut Config| config.gpu.operations = GpuOperations::Host;
        let errors = on_ranks(double, 2, config, |on| {
            // Never opened.
            on.double.gate(on.stream);
            let memory = ones(on, on.rank as i32);
            let error = sum_of(on, "sum", &memory).expect_err("it fails");
            std::mem::forget(memory); // nobody knows whether it is in use
            error.to_string()
        });
        for error in &errors {
            for part in ["rank ", "cuMemcpyDtoHAsync"] {
                assert!(error.contains(part), "{part}\nis not in\n{error}");
            }
        }
    });
}

/// Submits a sum on a rank whose GPU is at something that does not end, for which pinning memory waits; the gate that lets
/// it end.
fn submit_behind_a_gate(on: &OnRank<'_>, memory: &Arc<Memory>) -> Result<(u64, Handle), Error> {
    let gate = match on.rank {
        1 => on.double.gate(on.double.stream(1)),
        _ => 0,
    };
    let ready = Ready::record(on.rank as i32, on.stream)?;
    let tensor = memory.tensor(DType::F32, &[ELEMS], Some(memory), &ready);
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some("sum"), SUM, set, tensor.into());
    let handle = on.engine.submit(submission)?;
    // The only block of this process's that is not made at once is rank 1's.
    while on.double.count("cuMemHostAlloc") < 2 && on.engine.poll(handle) == Some(false) {
        std::thread::yield_now();
    }
    Ok((gate, handle))
}

fn ended(on: &OnRank<'_>, handle: Handle) -> Result<OpResult, Error> {
    match on.engine.wait(handle, Duration::MAX) {
        Waited::Ended { result, .. } => result,
        other => panic!("{other:?}"),
    }
}

fn through_host_memory(config: &mut Config) {
    config.gpu.operations = GpuOperations::Host;
    config.negotiation.dynamic_process_sets = true;
}

#[test]
fn ranks_negotiate_while_memory_is_pinned() {
    let test = "ranks_negotiate_while_memory_is_pinned";
    with_double(test, "devices=2,pinning_waits", |double| {
        on_ranks(double, 2, through_host_memory, |on| {
            let memory = ones(on, on.rank as i32);
            let (gate, handle) = submit_behind_a_gate(on, &memory).expect("is submitted");
            let set = on.engine.add_process_set::<Error>(&[0], || Ok(()));
            set.expect("is made though rank 1 has no pinned memory yet");
            on.double.open(gate);
            ended(on, handle).expect("works");
            on.engine.wait_for_devices(Duration::MAX).expect("works");
            assert_eq!(memory.read()[..4], 2.0f32.to_le_bytes());
        });
    });
}

#[test]
fn a_rank_gives_signs_of_life_while_memory_is_pinned() {
    let test = "a_rank_gives_signs_of_life_while_memory_is_pinned";
    with_double(test, "devices=2,pinning_waits", |double| {
        let config = |config: &mut Config| {
            through_host_memory(config);
            config.membership.heartbeat = Some(Duration::from_secs(1));
            // Of the two ends of this job the later one.
            config.gpu.timeout = Some(Duration::from_secs(4));
        };
        let errors = on_ranks(double, 2, config, |on| {
            let memory = ones(on, on.rank as i32);
            let (gate, handle) = submit_behind_a_gate(on, &memory).expect("is submitted");
            let error = ended(on, handle).expect_err("rank 1's memory never comes");
            on.double.open(gate);
            error.to_string()
        });
        for error in &errors {
            for part in [
                "HOROVOD_GPU_TIMEOUT",
                "test.sum",
                "rank 1 on ",
                "does not return",
            ] {
                assert!(error.contains(part), "{part}\nis not in\n{error}");
            }
        }
    });
}

#[test]
fn a_shutdown_does_not_wait_for_a_gpu_that_never_comes_to_rest() {
    let test = "a_shutdown_does_not_wait_for_a_gpu_that_never_comes_to_rest";
    with_double(test, "devices=2", |double| {
        let config = |config: &mut Config| config.gpu.operations = GpuOperations::Host;
        on_ranks(double, 2, config, |on| {
            assert_eq!(sum(on, "sum").expect("works"), 2.0);
            // A kernel of the script's, never opened: pinned memory is freed only when the device is at rest.
            on.double.gate(on.stream);
        });
        assert!(double.count("cuMemHostAlloc") > 0);
    });
}

#[test]
fn a_peer_that_is_lost_before_it_comes_to_a_communicator_is_named_and_a_new_generation_works() {
    let test =
        "a_peer_that_is_lost_before_it_comes_to_a_communicator_is_named_and_a_new_generation_works";
    // A version whose communicators are made by a call that blocks; nobody but the first comes there.
    let settings = "devices=2,nccl_version=22605,hang=ncclCommInitRankConfig:2";
    with_double(test, settings, |double| {
        let errors = on_ranks(double, 2, nothing, |on| {
            if on.rank == 0 {
                return sum(on, "sum").expect_err("rank 1 is lost").to_string();
            }
            let memory = ones(on, 1);
            let ready = Ready::record(1, on.stream).expect("records");
            let tensor = memory.tensor(DType::F32, &[ELEMS], Some(&memory), &ready);
            let set = ProcessSetId::GLOBAL;
            let submission = Submission::new("test", Some("sum"), SUM, set, tensor.into());
            let _ = on.engine.submit(submission).expect("is submitted");
            while on.double.count("ncclCommInitRankConfig") < 2 {
                std::thread::yield_now();
            }
            on.engine.shutdown();
            String::new()
        });
        assert!(errors[0].contains("rank 1"), "{errors:?}");
        // Two threads are in NCCL for as long as this process lives, which ends as ever.
        let sums = on_ranks(double, 2, nothing, |on| sum(on, "sum").expect("works"));
        assert_eq!(sums, [2.0, 2.0]);
    });
}

#[test]
fn a_new_generation_has_new_communicators() {
    with_double(
        "a_new_generation_has_new_communicators",
        "devices=2",
        |double| {
            for _ in 0..3 {
                let sums = on_ranks(double, 2, nothing, |on| sum(on, "sum").expect("works"));
                assert_eq!(sums, [2.0, 2.0]);
            }
            assert_eq!(double.count("ncclCommInitRankConfig"), 6);
            assert_eq!(double.count("ncclCommDestroy"), 6);
        },
    );
}

#[test]
fn a_step_records_one_event_per_call_and_never_waits_on_the_host() {
    let test = "a_step_records_one_event_per_call_and_never_waits_on_the_host";
    with_double(test, "devices=2", |double| {
        on_ranks(double, 2, nothing, |on| {
            sum(on, "first").expect("works");
        });
        let before = [
            "cuEventRecord",
            "cuEventSynchronize",
            "cuStreamSynchronize",
            "cuCtxSynchronize",
            "cuEventElapsedTime",
            "cuStreamCreateWithPriority",
        ]
        .map(|call| (call, double.count(call)));
        on_ranks(double, 2, nothing, |on| {
            let memory = ones(on, on.rank as i32);
            for i in 0..10 {
                let result = sum_of(on, &format!("sum{i}"), &memory).expect("works");
                result
                    .end
                    .expect("launched")
                    .order(on.stream)
                    .expect("orders");
            }
            on.engine
                .wait_for_devices(Duration::MAX)
                .expect("nothing failed");
        });
        let made = before.map(|(call, before)| double.count(call) - before);
        // One at the submission and one for the end, of 10 operations on 2 ranks. Nothing is timed.
        assert_eq!(made, [40, 0, 0, 0, 0, 2]);
    });
}

#[test]
fn a_stream_that_is_captured_is_refused_and_its_capture_goes_on() {
    let test = "a_stream_that_is_captured_is_refused_and_its_capture_goes_on";
    with_double(test, "devices=1", |double| {
        on_ranks(double, 1, nothing, |on| {
            let other = on.double.stream(0);
            on.double.capture(other, true);
            let error = Ready::record(0, other)
                .expect_err("is captured")
                .to_string();
            assert!(error.contains("captured into a CUDA graph"), "{error}");
            on.double.capture(other, false);
            assert_eq!(sum(on, "sum").expect("works"), 1.0);
        });
    });
}

#[test]
fn a_tensor_on_a_gpu_that_nobody_tells_of_is_refused_and_the_job_goes_on() {
    let test = "a_tensor_on_a_gpu_that_nobody_tells_of_is_refused_and_the_job_goes_on";
    with_double(test, "devices=1", |double| {
        on_ranks(double, 1, nothing, |on| {
            let at = std::ptr::without_provenance_mut::<u8>(4096);
            let meta = TensorMeta::new(DType::F32, [ELEMS]);
            // SAFETY: nobody follows the address, for it is refused.
            let tensor = unsafe { Tensor::new(meta, at, Output::At(at)).on(Device::Gpu) };
            let set = ProcessSetId::GLOBAL;
            let submission = Submission::new("test", None, SUM, set, tensor.into());
            let error = on.engine.submit(submission).expect_err("is refused");
            assert!(error.to_string().contains("not told on which"), "{error}");
            assert_eq!(sum(on, "sum").expect("works"), 1.0);
        });
    });
}

#[test]
fn a_rank_uses_one_gpu() {
    with_double("a_rank_uses_one_gpu", "devices=2", |double| {
        on_ranks(double, 1, nothing, |on| {
            assert_eq!(sum(on, "sum").expect("works"), 1.0);
            let stream = on.double.stream(1);
            let memory = Memory::new(on.double, 1, stream, 4);
            memory.write(&[0; 4]);
            let ready = Ready::record(1, stream).expect("records");
            let tensor = memory.tensor(DType::F32, &[1], Some(&memory), &ready);
            let set = ProcessSetId::GLOBAL;
            let submission = Submission::new("test", None, SUM, set, tensor.into());
            let error = on.engine.submit(submission).expect_err("another GPU");
            assert!(error.to_string().contains("is on GPU 1"), "{error}");
            assert!(error.to_string().contains("from GPU 0"), "{error}");
        });
    });
}

#[test]
fn a_host_tensor_here_and_a_gpu_tensor_there_is_an_error_that_names_both() {
    let test = "a_host_tensor_here_and_a_gpu_tensor_there_is_an_error_that_names_both";
    with_double(test, "devices=2", |double| {
        on_ranks(double, 2, nothing, |on| {
            let error = if on.rank == 0 {
                let memory = ones(on, 0);
                sum_of(on, "sum", &memory).expect_err("differs")
            } else {
                let mut data = vec![1.0f32; ELEMS as usize];
                let meta = TensorMeta::new(DType::F32, [ELEMS]);
                let at = data.as_mut_ptr().cast::<u8>();
                // SAFETY: it lives until the operation has ended.
                let tensor = unsafe { Tensor::new(meta, at, Output::At(at)) };
                let set = ProcessSetId::GLOBAL;
                let submission = Submission::new("test", Some("sum"), SUM, set, tensor.into());
                finish(on.engine, submission).expect_err("differs")
            };
            let error = error.to_string();
            assert!(error.contains("CPU") && error.contains("GPU"), "{error}");
            assert_eq!(sum(on, "again").expect("the job goes on"), 2.0);
        });
    });
}

#[test]
fn nccl_that_was_demanded_and_is_not_there_is_an_error_of_every_operation() {
    let test = "nccl_that_was_demanded_and_is_not_there_is_an_error_of_every_operation";
    // Both ranks have the only GPU.
    with_double(test, "devices=1", |double| {
        let demand = |config: &mut Config| config.gpu.operations = GpuOperations::Nccl;
        on_ranks(double, 2, demand, |on| {
            let stream = on.double.stream(0);
            for name in ["one", "two"] {
                let memory = Memory::new(on.double, 0, stream, 4 * ELEMS as usize);
                let ready = Ready::record(0, stream).expect("records");
                let tensor = memory.tensor(DType::F32, &[ELEMS], Some(&memory), &ready);
                let set = ProcessSetId::GLOBAL;
                let submission = Submission::new("test", Some(name), SUM, set, tensor.into());
                let error = finish(on.engine, submission).expect_err("one GPU");
                assert!(error.to_string().contains("are on the same GPU"), "{error}");
            }
        });
        assert_eq!(double.count("ncclCommInitRankConfig"), 0);
    });
}

#[test]
fn ranks_that_have_joined_stand_in_with_the_neutral_element() {
    let test = "ranks_that_have_joined_stand_in_with_the_neutral_element";
    with_double(test, "devices=3,delay=20", |double| {
        on_ranks(double, 3, nothing, |on| {
            assert_eq!(sum(on, "all").expect("works"), 3.0);
            if on.rank == 2 {
                on.engine.join::<Error>(|| Ok(())).expect("joins");
                return;
            }
            for (name, op, expected) in [
                ("sum", ReduceOp::Sum, 2.0),
                ("min", ReduceOp::Min, 1.0),
                ("product", ReduceOp::Product, 1.0),
            ] {
                // Large and small, together and alone.
                for count in [1, 3] {
                    let memories: Vec<_> = (0..count).map(|_| ones(on, on.rank as i32)).collect();
                    let ready = Ready::record(on.rank as i32, on.stream).expect("records");
                    let tensors: Vec<_> = memories
                        .iter()
                        .map(|m| m.tensor(DType::F32, &[ELEMS], Some(m), &ready))
                        .collect();
                    let scale = Scale::NONE;
                    let op = Op::Allreduce { op, scale };
                    let name = format!("{name}{count}");
                    let set = ProcessSetId::GLOBAL;
                    let submission = Submission::new("test", Some(&name), op, set, tensors.into());
                    let result = finish(on.engine, submission).expect("works");
                    result
                        .end
                        .expect("launched")
                        .order(on.stream)
                        .expect("orders");
                    for memory in memories {
                        let bytes = memory.read();
                        let first = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                        assert_eq!(first, expected, "{name}");
                    }
                }
            }
            on.engine.join::<Error>(|| Ok(())).expect("joins");
        });
    });
}

//! Process sets that come and go, with tensors on GPUs: their ids are used again, by other members.

use crate::gpu_double::ranks::{OnRank, finish, on_ranks};
use crate::gpu_double::{Memory, with_double};
use horovod_engine::config::GpuOperations;
use horovod_engine::gpu::Ready;
use horovod_engine::{DType, Error, Op, ProcessSetId, ReduceOp, Scale, Submission};

const RANKS: usize = 3;
/// Every rank is in some and not in others, and all sets have one id.
const SETS: [&[u32]; 5] = [&[1, 2], &[0, 1], &[1, 2], &[0, 2], &[1, 2]];

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};

/// The sum of one number of each member.
fn sum(on: &OnRank<'_>, set: ProcessSetId) -> f32 {
    let memory = Memory::new(on.double, on.rank as i32, on.stream, 4);
    memory.write(&(1.0 + on.rank as f32).to_le_bytes());
    let ready = Ready::record(on.rank as i32, on.stream).expect("is recorded");
    let tensor = memory.tensor(DType::F32, &[1], Some(&memory), &ready);
    let submission = Submission::new("test", Some("sum"), SUM, set, tensor.into());
    let result = finish(on.engine, submission).expect("succeeds");
    let end = result.end.as_ref().expect("it is launched");
    end.order(on.stream).expect("is ordered");
    f32::from_le_bytes(memory.read()[..].try_into().expect("four bytes"))
}

fn come_and_go(on: &OnRank<'_>) {
    let patient = || Ok::<(), Error>(());
    for ranks in SETS {
        let set = on.engine.add_process_set(ranks, patient).expect("added");
        assert_eq!(set, ProcessSetId(1), "the id is free again");
        if ranks.contains(&(on.rank as u32)) {
            let expected: u32 = ranks.iter().map(|rank| rank + 1).sum();
            assert_eq!(sum(on, set), expected as f32);
        }
        let removed = on.engine.remove_process_set(set, patient);
        assert!(removed.expect("there was one"));
    }
}

fn come_and_go_with(test: &str, operations: GpuOperations) {
    with_double(test, "devices=3,seed=5,delay=20,in_progress=2", |double| {
        let config = move |config: &mut horovod_engine::config::Config| {
            config.gpu.operations = operations;
        };
        on_ranks(double, RANKS, config, |on| {
            come_and_go(on);
            // Theirs are ended while the job goes on; if they were not, this would end by its limit.
            while on.double.live("communicators") > 0 {
                std::thread::yield_now();
            }
        });
        assert_eq!(double.count("ncclCommAbort"), 0);
        let made = double.count("ncclCommInitRankConfig");
        assert_eq!(made > 0, operations == GpuOperations::Nccl);
    });
}

#[test]
fn a_set_of_former_members_under_a_former_id_agrees_anew() {
    let test = "a_set_of_former_members_under_a_former_id_agrees_anew";
    come_and_go_with(test, GpuOperations::Nccl);
}

#[test]
fn so_it_does_through_host_memory() {
    come_and_go_with("so_it_does_through_host_memory", GpuOperations::Host);
}

/// Each rank has met the others of its sets in another order by number.
#[test]
fn communicators_of_several_sets_end_in_good_order_together() {
    let test = "communicators_of_several_sets_end_in_good_order_together";
    with_double(test, "devices=3,seed=5,in_progress=2", |double| {
        let config = |config: &mut horovod_engine::config::Config| {
            config.gpu.operations = GpuOperations::Nccl;
        };
        on_ranks(double, RANKS, config, |on| {
            let patient = || Ok::<(), Error>(());
            for ranks in [&[0, 1][..], &[1, 2], &[0, 2]] {
                let set = on.engine.add_process_set(ranks, patient).expect("added");
                if ranks.contains(&(on.rank as u32)) {
                    sum(on, set);
                }
            }
            sum(on, ProcessSetId::GLOBAL);
        });
        assert_eq!(double.count("ncclCommInitRankConfig"), 9);
        assert_eq!(double.count("ncclCommAbort"), 0);
        assert_eq!(double.count("ncclCommDestroy"), 9);
    });
}

#[test]
fn versions_that_might_block_keep_communicators_until_the_job_ends() {
    let test = "versions_that_might_block_keep_communicators_until_the_job_ends";
    for version in [21800, 22605] {
        let settings = format!("devices=3,nccl_version={version}");
        with_double(test, &settings, |double| {
            let config = |config: &mut horovod_engine::config::Config| {
                config.gpu.operations = GpuOperations::Nccl;
            };
            on_ranks(double, RANKS, config, |on| {
                come_and_go(on);
                assert_eq!(on.double.count("ncclCommFinalize"), 0);
                let patient = || Ok::<(), Error>(());
                on.engine
                    .barrier(ProcessSetId::GLOBAL, patient)
                    .expect("all");
            });
            assert_eq!(double.count("ncclCommAbort"), 0);
            assert_eq!(double.count("ncclCommDestroy"), 10);
        });
    }
}

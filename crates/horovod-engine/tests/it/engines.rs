//! Several engines in one process, over real links: what the callers of the runtime see.

use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use crate::common::{LIMIT, on_meshes};
use horovod_engine::config::{Config, JoinAverage};
use horovod_engine::{
    DType, Engine, Error, Handle, Op, OpResult, Output, ProcessSetId, Rank, ReadyEvent, ReduceOp,
    Scale, Shape, Submission, Tensor, TensorMeta, Waited,
};
use horovod_transport::testing;

/// Run `body` on every rank of a job of `n` ranks, each on a thread of its own.
fn on_ranks<T: Send + 'static>(
    n: usize,
    body: impl Fn(&Engine, usize) -> T + Send + Clone + 'static,
) -> Vec<T> {
    on_meshes(testing::cluster(n), &Config::solo(), body)
}

fn tensor(dtype: DType, shape: &[u64], input: *const u8, output: Output) -> Tensor {
    // SAFETY: the memory outlives the operation, and nobody else touches it.
    unsafe { Tensor::new(TensorMeta::new(dtype, shape), input, output) }
}

fn in_place(data: &mut [f32]) -> Tensor {
    let p = data.as_mut_ptr().cast::<u8>();
    tensor(DType::F32, &[data.len() as u64], p, Output::At(p))
}

fn submit(engine: &Engine, name: &str, op: Op, tensors: Vec<Tensor>) -> Result<Handle, Error> {
    engine.submit(Submission::new(
        "test",
        Some(name),
        op,
        ProcessSetId::GLOBAL,
        tensors.into(),
    ))
}

fn finish(engine: &Engine, handle: Handle) -> Result<OpResult, Error> {
    match engine.wait(handle, LIMIT) {
        Waited::Ended { result, .. } => result,
        other => panic!("{other:?}"),
    }
}

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};
const AVERAGE: Op = Op::Allreduce {
    op: ReduceOp::Average,
    scale: Scale::NONE,
};

#[test]
fn sums_and_averages_over_one_to_five_ranks() {
    for n in [1, 2, 3, 5] {
        let results = on_ranks(n, |engine, rank| {
            let mut sum = vec![rank as f32 + 1.0; 1000];
            let mut mean = sum.clone();
            let a = submit(engine, "a", SUM, vec![in_place(&mut sum)]).unwrap();
            let b = submit(engine, "b", AVERAGE, vec![in_place(&mut mean)]).unwrap();
            finish(engine, a).unwrap();
            finish(engine, b).unwrap();
            (sum[999], mean[0])
        });
        let total: f32 = (1..=n).map(|r| r as f32).sum();
        assert_eq!(results, vec![(total, total / n as f32); n]);
    }
}

/// It does not wait for the others; and what all callers only look at, the engine's own thread carries out.
#[test]
fn a_wait_of_no_length_only_looks() {
    let submitted = Arc::new(Barrier::new(2));
    let sums = on_ranks(2, move |engine, rank| {
        let mut data = vec![rank as f32 + 1.0; 1000];
        if rank == 1 {
            submitted.wait();
        }
        let handle = submit(engine, "a", SUM, vec![in_place(&mut data)]).unwrap();
        if rank == 0 {
            let checked = engine.wait(handle, Duration::ZERO);
            assert!(matches!(checked, Waited::Pending), "{checked:?}");
            submitted.wait();
        }
        let ended = loop {
            match engine.wait(handle, Duration::ZERO) {
                Waited::Pending => std::thread::yield_now(),
                ended => break ended,
            }
        };
        assert!(
            matches!(ended, Waited::Ended { result: Ok(_), .. }),
            "{ended:?}"
        );
        data[999]
    });
    assert_eq!(sums, [3.0, 3.0]);
}

#[test]
fn the_same_names_repeat_for_many_steps() {
    let results = on_ranks(3, |engine, rank| {
        let mut last = 0.0;
        for step in 0..50 {
            let mut tensors: Vec<Vec<f32>> = (0..20)
                .map(|i| vec![(rank + i + step) as f32; i * 7 + 1])
                .collect();
            let handles: Vec<_> = tensors
                .iter_mut()
                .enumerate()
                .map(|(i, t)| submit(engine, &format!("g{i}"), SUM, vec![in_place(t)]).unwrap())
                .collect();
            for h in handles {
                finish(engine, h).unwrap();
            }
            last = tensors[19][0];
        }
        last
    });
    assert_eq!(results, vec![(3 + 3 * (19 + 49)) as f32; 3]);
}

#[test]
fn gathers_uneven_rows_into_memory_of_the_engine() {
    let results = on_ranks(3, |engine, rank| {
        let rows = rank as u64; // rank 0 has none
        let data: Vec<i32> = vec![rank as i32; rank * 2];
        let t = tensor(
            DType::I32,
            &[rows, 2],
            data.as_ptr().cast(),
            Output::Allocate,
        );
        let h = submit(engine, "g", Op::Allgather, vec![t]).unwrap();
        let mut result = finish(engine, h).unwrap();
        let (buffer, shape) = result.outputs.remove(0).unwrap();
        let p = buffer.as_mut_ptr().cast::<i32>();
        // SAFETY: the operation has ended; the buffer holds shape[0] * shape[1] ints.
        let values = unsafe { std::slice::from_raw_parts(p, buffer.len() / 4) }.to_vec();
        (shape, values)
    });
    for r in results {
        assert_eq!(r, (Shape::from([3, 2]), vec![1, 1, 2, 2, 2, 2]));
    }
}

#[test]
fn a_mismatch_is_an_error_on_every_rank_and_the_job_goes_on() {
    let results = on_ranks(3, |engine, rank| {
        let mut data = vec![1.0f32; if rank == 2 { 4 } else { 5 }];
        let h = submit(engine, "m", SUM, vec![in_place(&mut data)]).unwrap();
        let error = finish(engine, h).unwrap_err();
        let mut after = vec![1.0f32; 3];
        let h = submit(engine, "m", SUM, vec![in_place(&mut after)]).unwrap();
        finish(engine, h).unwrap();
        (error, after[0])
    });
    for (error, after) in results {
        assert!(
            matches!(&error, Error::Refused(r) if r.to_string().contains("Mismatched ALLREDUCE tensor shapes")),
            "{error}"
        );
        assert_eq!(after, 3.0);
    }
}

#[test]
fn an_operand_of_an_operation_that_failed_is_not_that_of_the_next() {
    on_ranks(2, |engine, rank| {
        let sum_of = |value: usize| {
            let mut data = vec![value as f32; 4];
            let handle = submit(engine, "x", SUM, vec![in_place(&mut data)]).unwrap();
            finish(engine, handle).map(|_| data[0])
        };
        for round in 0..20 {
            for step in 0..3 {
                assert_eq!(
                    sum_of(round + step + rank).unwrap(),
                    (2 * (round + step) + 1) as f32
                );
            }
            // Known to one rank, which may have staged it, and wrong on the other.
            if rank == 0 {
                sum_of(1000).unwrap_err();
            } else {
                let mut data = vec![1.0f32; 5];
                let handle = submit(engine, "x", SUM, vec![in_place(&mut data)]).unwrap();
                finish(engine, handle).unwrap_err();
            }
            // Beside another, so that this time it is not pre-staged.
            let (mut other, mut data) = (vec![1.0f32; 4], vec![rank as f32 + 1.0; 4]);
            let y =
                (rank == 0).then(|| submit(engine, "y", SUM, vec![in_place(&mut other)]).unwrap());
            let x = submit(engine, "x", SUM, vec![in_place(&mut data)]).unwrap();
            finish(engine, x).unwrap();
            assert_eq!(data[0], 3.0);
            let y =
                y.unwrap_or_else(|| submit(engine, "y", SUM, vec![in_place(&mut other)]).unwrap());
            finish(engine, y).unwrap();
        }
    });
}

#[test]
fn a_duplicate_name_is_refused_and_leaves_nothing_behind() {
    on_ranks(2, |engine, rank| {
        let (mut a, mut b) = (vec![1.0f32; 8], vec![1.0f32; 8]);
        if rank == 0 {
            let h = submit(engine, "d", SUM, vec![in_place(&mut a)]).unwrap();
            let error = submit(engine, "d", SUM, vec![in_place(&mut b)]).unwrap_err();
            assert!(
                matches!(&error, Error::DuplicateName { name } if name == "test.d"),
                "{error}"
            );
            engine
                .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()))
                .unwrap();
            finish(engine, h).unwrap();
        } else {
            engine
                .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()))
                .unwrap();
            let h = submit(engine, "d", SUM, vec![in_place(&mut a)]).unwrap();
            finish(engine, h).unwrap();
        }
        assert_eq!(a[7], 2.0);
    });
}

#[test]
fn joined_ranks_contribute_the_identity_and_the_mean_is_over_all_members_or_the_others() {
    for (join_average, mean) in [
        (JoinAverage::Members, 2.0 / 3.0),
        (JoinAverage::Contributors, 1.0),
    ] {
        let mut config = Config::solo();
        config.algorithms.join_average = join_average;
        let results = on_meshes(
            testing::cluster(3),
            &config,
            reduced_while_rank_1_has_joined,
        );
        assert_eq!(results, [vec![mean, 7.0], vec![], vec![mean, 7.0]]);
    }
}

fn reduced_while_rank_1_has_joined(engine: &Engine, rank: usize) -> Vec<f32> {
    let mut out = Vec::new();
    if rank != 1 {
        let mut mean = vec![rank as f32; 5];
        let mut min = vec![rank as f32 + 7.0; 5];
        let op = Op::Allreduce {
            op: ReduceOp::Min,
            scale: Scale::NONE,
        };
        let a = submit(engine, "mean", AVERAGE, vec![in_place(&mut mean)]).expect("submitted");
        let b = submit(engine, "min", op, vec![in_place(&mut min)]).expect("submitted");
        // The others do not wait for rank 1: it never submits these.
        finish(engine, a).expect("ends well");
        finish(engine, b).expect("ends well");
        out = vec![mean[4], min[4]];
    }
    engine.join::<Error>(|| Ok(())).expect("ends well");
    out
}

#[test]
fn process_sets_overlap_and_run_in_any_order() {
    let results = on_ranks(3, |engine, rank| {
        let set = engine.add_process_set::<Error>(&[2, 1], || Ok(())).unwrap();
        assert_eq!(engine.members(set), Some(vec![Rank(1), Rank(2)]));
        let mut all = vec![1.0f32; 3];
        let mut some = vec![10.0f32; 3];
        let in_set = |engine: &Engine, some: &mut [f32]| {
            engine.submit(Submission::new(
                "test",
                Some("s"),
                SUM,
                set,
                in_place(some).into(),
            ))
        };
        let mut handles = Vec::new();
        if rank == 1 {
            handles.push(in_set(engine, &mut some).unwrap());
        }
        handles.push(submit(engine, "s", SUM, vec![in_place(&mut all)]).unwrap());
        if rank == 2 {
            handles.push(in_set(engine, &mut some).unwrap());
        }
        if rank == 0 {
            let e = in_set(engine, &mut some).unwrap_err();
            assert!(
                matches!(&e, Error::Invalid(t) if t.contains("not a member")),
                "{e}"
            );
        }
        for h in handles {
            finish(engine, h).unwrap();
        }
        assert!(engine.remove_process_set::<Error>(set, || Ok(())).unwrap());
        assert!(!engine.remove_process_set::<Error>(set, || Ok(())).unwrap());
        (all[0], some[0])
    });
    assert_eq!(results, [(3.0, 10.0), (3.0, 20.0), (3.0, 20.0)]);
}

#[test]
fn a_rank_that_shuts_down_ends_what_the_others_wait_for_and_is_named() {
    let results = on_ranks(3, |engine, rank| {
        if rank == 1 {
            engine.shutdown();
            return None;
        }
        let mut data = vec![1.0f32; 3];
        match submit(engine, "x", SUM, vec![in_place(&mut data)]) {
            Ok(h) => finish(engine, h).err(),
            Err(e) => Some(e),
        }
    });
    for r in [0, 2] {
        let text = results[r].as_ref().unwrap().to_string();
        assert!(
            text.starts_with("Horovod has been shut down") && text.contains("rank 1"),
            "{text}"
        );
    }
}

#[test]
fn a_rank_that_vanishes_is_named_to_all_others_in_pending_and_later_operations() {
    let mut meshes = testing::cluster(3);
    drop(meshes.pop()); // rank 2: its links close without a word
    let (done, results) = mpsc::channel();
    for mesh in meshes {
        let done = done.clone();
        std::thread::spawn(move || {
            let engine = Engine::start(Config::solo(), mesh).expect("starts");
            let mut data = vec![1.0f32; 3];
            let pending = submit(&engine, "x", SUM, vec![in_place(&mut data)])
                .and_then(|h| finish(&engine, h))
                .expect_err("rank 2 cannot have taken part");
            let later = submit(&engine, "y", SUM, vec![in_place(&mut data)])
                .expect_err("the generation is over");
            engine.shutdown();
            let _ = done.send((pending.to_string(), later.to_string()));
        });
    }
    for _ in 0..2 {
        let (pending, later) = results.recv_timeout(LIMIT).expect("a rank hangs");
        assert!(pending.contains("rank 2"), "{pending}");
        assert!(later.contains("rank 2"), "{later}");
    }
}

#[test]
fn a_reused_process_set_id_numbers_unnamed_operations_from_the_start() {
    on_ranks(3, |engine, rank| {
        let unnamed = |set| {
            let mut data = vec![1.0f32; 3];
            let h = engine.submit(Submission::new(
                "test",
                None,
                SUM,
                set,
                in_place(&mut data).into(),
            ));
            finish(engine, h.unwrap()).unwrap();
            assert_eq!(data[0], 2.0);
        };
        let first = engine.add_process_set::<Error>(&[0, 1], || Ok(())).unwrap();
        if rank < 2 {
            unnamed(first);
        }
        engine
            .remove_process_set::<Error>(first, || Ok(()))
            .unwrap();
        let second = engine.add_process_set::<Error>(&[1, 2], || Ok(())).unwrap();
        assert_eq!(first, second);
        if rank > 0 {
            unnamed(second);
        }
    });
}

struct Broken;

impl ReadyEvent for Broken {
    fn is_ready(&self) -> Result<bool, String> {
        Err("the device has failed".into())
    }
}

#[test]
fn a_rank_that_cannot_go_on_ends_the_job_for_all_and_is_named() {
    let (done, results) = mpsc::channel();
    for (rank, mesh) in testing::cluster(3).into_iter().enumerate() {
        let done = done.clone();
        std::thread::spawn(move || {
            let engine = Engine::start(Config::solo(), mesh).expect("starts");
            let mut data = vec![1.0f32; 3];
            let mut tensor = in_place(&mut data);
            if rank == 1 {
                tensor = tensor.ready_after(Some(Box::new(Broken)));
            }
            let error = submit(&engine, "x", SUM, vec![tensor])
                .and_then(|h| finish(&engine, h))
                .expect_err("rank 1 cannot take part");
            // The process of rank 1 lives on: nobody may depend on its end.
            let _ = done.send((error.to_string(), engine));
        });
    }
    let mut engines = Vec::new();
    for _ in 0..3 {
        let (error, engine) = results.recv_timeout(LIMIT).expect("a rank hangs");
        assert!(
            error.contains("rank 1") && error.contains("the device has failed"),
            "{error}"
        );
        engines.push(engine);
    }
}

/// Ready when the other end is dropped.
struct Later(mpsc::Receiver<()>);

impl ReadyEvent for Later {
    fn is_ready(&self) -> Result<bool, String> {
        Ok(matches!(self.0.try_recv(), Err(TryRecvError::Disconnected)))
    }
}

#[test]
fn a_caller_is_never_made_to_wait_for_the_event_of_a_tensor() {
    for n in [1, 2] {
        let results = on_ranks(n, |engine, _| {
            let (ready, event) = mpsc::channel();
            let mut data = vec![1.0f32; 3];
            let tensor = in_place(&mut data).ready_after(Some(Box::new(Later(event))));
            let handle = submit(engine, "late", SUM, vec![tensor]).unwrap();
            for _ in 0..3 {
                let waited = engine.wait(handle, Duration::from_millis(20));
                assert!(matches!(waited, Waited::Pending), "{waited:?}");
            }
            drop(ready);
            finish(engine, handle).unwrap();
            data[0]
        });
        assert_eq!(results, vec![n as f32; n]);
    }
}

#[test]
fn unnamed_calls_pair_up_again_after_a_join() {
    let results = on_ranks(2, |engine, rank| {
        let unnamed = |data: &mut [f32]| {
            let handle = engine
                .submit(Submission::new(
                    "test",
                    None,
                    SUM,
                    ProcessSetId::GLOBAL,
                    in_place(data).into(),
                ))
                .unwrap();
            finish(engine, handle).unwrap();
        };
        let mut data = vec![1.0f32; 3];
        // Rank 1 has more batches than rank 0.
        for _ in 0..=rank {
            unnamed(&mut data);
        }
        engine.join::<Error>(|| Ok(())).unwrap();
        data.fill(1.0);
        unnamed(&mut data);
        data[0]
    });
    assert_eq!(results, [2.0, 2.0]);
}

#[test]
fn a_rank_alone_on_its_host_sees_the_hosts_as_the_others_do() {
    // Long enough for the algorithms that differ between one host and several.
    let body = |engine: &Engine, rank: usize| {
        let mut data = vec![rank as f32; 100_003];
        let handle = submit(engine, "x", SUM, vec![in_place(&mut data)]).unwrap();
        finish(engine, handle).unwrap();
        data[100_002]
    };
    for hosts in [&[0, 0, 1][..], &[0, 1, 1, 1], &[0, 1, 2]] {
        let sum = (0..hosts.len()).sum::<usize>() as f32;
        let results = on_meshes(testing::cluster_hosts(hosts), &Config::solo(), body);
        assert!(results.iter().all(|r| *r == sum), "{hosts:?}: {results:?}");
    }
}

/// A bit that changes between two hosts ends the generation before anybody takes a wrong result for a right one, and
/// everybody is told the same: which connection it was, and that no rank is gone.
#[test]
fn data_that_changes_between_hosts_is_told_alike_and_blames_no_rank() {
    for (control, bit) in [(false, 8 * 70_000), (true, 8 * 64 + 3)] {
        for direction in [[0, 1], [1, 0], [2, 1]] {
            // Control links are those with rank 0 only.
            if control && direction == [2, 1] {
                continue;
            }
            let cluster = testing::Cluster::new(3).hosts(&[0, 1, 2]);
            let flip = testing::Flip {
                direction,
                control,
                bit,
            };
            let ends = on_meshes(
                cluster.flip(flip).build(),
                &Config::solo(),
                |engine, rank| {
                    let mut data = vec![rank as f32; 1_000_000];
                    loop {
                        let handle = submit(engine, "a", SUM, vec![in_place(&mut data)]);
                        if let Err(error) = handle.and_then(|handle| finish(engine, handle)) {
                            return error.to_string();
                        }
                        assert!(data.iter().all(|value| *value == 3.0));
                        data.fill(rank as f32);
                    }
                },
            );
            let [from, to] = direction;
            let text = format!(
                "though no rank is lost: what rank {from} on host{from} sent to rank {to} on host{to} was changed"
            );
            for end in &ends {
                assert!(
                    end.contains(&text),
                    "{direction:?}, control {control}: {ends:#?}"
                );
            }
        }
    }
}

#[test]
fn a_wait_may_be_as_long_as_can_be_said() {
    let results = on_ranks(2, |engine, rank| {
        let mut data = vec![rank as f32; 3];
        let handle = submit(engine, "x", SUM, vec![in_place(&mut data)]).unwrap();
        match engine.wait(handle, std::time::Duration::MAX) {
            Waited::Ended { result, .. } => result.map(|_| data[0]),
            other => panic!("{other:?}"),
        }
    });
    assert!(results.iter().all(|r| *r == Ok(1.0)), "{results:?}");
}

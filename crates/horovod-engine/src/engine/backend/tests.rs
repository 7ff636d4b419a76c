//! Jobs whose tensors lie on a device: with any order of ends, with failures, aborts and ranks that do not agree.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use horovod_protocol::{DType, Device, Op, ProcessSetId, Rank, ReduceOp, Scale, TensorMeta};
use horovod_sim::Rng;
use horovod_timeline::TimelineSetting;
use horovod_transport::testing;

use super::double::{DOUBLE, Fabric};
use crate::config::Config;
use crate::engine::{Engine, Handle, OpResult, Submission, Waited};
use crate::error::Error;
use crate::tensor::{Output, ReadyEvent, Tensor};

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(120);
const SEEDS: u64 = 24;

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};

/// Runs `body` on every rank, each on its own thread. The device of a rank has the offer that `offer` returns; `None`:
/// no device.
fn on_ranks<T: Send + 'static>(
    n: usize,
    fabric: &Arc<Fabric>,
    offer: impl Fn(usize) -> Option<u8>,
    body: impl Fn(&Engine, usize) -> T + Send + Clone + 'static,
) -> Vec<T> {
    let (done, results) = mpsc::channel();
    let together = Arc::new(Barrier::new(n));
    for (rank, mesh) in testing::cluster(n).into_iter().enumerate() {
        let (body, done, together) = (body.clone(), done.clone(), together.clone());
        let device = offer(rank).map(|offer| fabric.device(offer));
        std::thread::spawn(move || {
            let mut config = Config::solo();
            config.observers.timeline = Some(TimelineSetting::Dynamic);
            let devices = Vec::from_iter(device);
            let engine = Engine::start_with(config, mesh, devices).expect("starts");
            let result = body(&engine, rank);
            // No rank may detect a failure by the end of another rank's engine.
            together.wait();
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
    fabric.close();
    all.into_iter().flatten().collect()
}

fn tensor(data: &mut [f32], device: Device) -> Tensor {
    let meta = TensorMeta::new(DType::F32, [data.len() as u64]);
    let memory = data.as_mut_ptr().cast::<u8>();
    // SAFETY: the tests keep the memory until the operation has ended.
    unsafe { Tensor::new(meta, memory, Output::At(memory)).on(device) }
}

fn submission<'a>(name: &'a str, op: Op, data: &mut [Vec<f32>], device: Device) -> Submission<'a> {
    let tensors: Vec<_> = data.iter_mut().map(|d| tensor(d, device)).collect();
    Submission::new("test", Some(name), op, ProcessSetId::GLOBAL, tensors.into())
}

fn finish(engine: &Engine, handle: Handle) -> Result<OpResult, Error> {
    match engine.wait(handle, LIMIT) {
        Waited::Ended { result, .. } => result,
        other => panic!("{other:?}"),
    }
}

/// Operations of one round, the same on every rank; each rank submits them in its own order.
struct Round {
    names: Vec<String>,
    ops: Vec<Op>,
    devices: Vec<Device>,
    lengths: Vec<Vec<usize>>,
}

impl Round {
    fn random(rng: &mut Rng, ranks: usize, number: usize) -> Self {
        let count = 1 + rng.index(8);
        // Names are reused with other devices, which makes the ranks negotiate anew.
        let names = (0..count).map(|i| format!("{}", i + number % 2)).collect();
        let op = |rng: &mut Rng| match rng.below(3) {
            0 => Op::Broadcast {
                root: Rank(rng.below(ranks as u64) as u32),
            },
            _ => SUM,
        };
        let device = |rng: &mut Rng| match rng.chance(60) {
            true => DOUBLE,
            false => Device::Cpu,
        };
        let lengths = |rng: &mut Rng| (0..=rng.index(2)).map(|_| rng.index(300)).collect();
        Self {
            names,
            ops: (0..count).map(|_| op(rng)).collect(),
            devices: (0..count).map(|_| device(rng)).collect(),
            lengths: (0..count).map(|_| lengths(rng)).collect(),
        }
    }

    /// Returns a rank's input to an operation.
    fn value(rank: usize, i: usize) -> f32 {
        (1 + rank + 3 * i) as f32
    }

    fn expected(&self, ranks: usize, i: usize) -> f32 {
        match self.ops[i] {
            Op::Broadcast { root } => Self::value(root.index(), i),
            _ => (0..ranks).map(|rank| Self::value(rank, i)).sum(),
        }
    }
}

/// Runs one rank of [`results_follow_from_the_order_of_starts_alone`].
fn rounds(engine: &Engine, seed: u64, rank: usize, ranks: usize) {
    let mut shared = Rng::new(seed);
    let mut own = Rng::new(seed * 100 + rank as u64);
    for number in 0..6 {
        let round = Round::random(&mut shared, ranks, number);
        let mut data: Vec<Vec<Vec<f32>>> = (round.lengths.iter().enumerate())
            .map(|(i, lengths)| {
                let value = Round::value(rank, i);
                lengths.iter().map(|n| vec![value; *n]).collect()
            })
            .collect();
        let mut order: Vec<usize> = (0..round.names.len()).collect();
        own.shuffle(&mut order);
        let mut handles = Vec::new();
        let (call, calls) = mpsc::channel();
        let mut called = 0;
        for &i in &order {
            let (op, device) = (round.ops[i].clone(), round.devices[i]);
            let submission = submission(&round.names[i], op, &mut data[i], device);
            if own.chance(50) {
                let call = call.clone();
                called += 1;
                let callback = move |result: Result<_, Error>| {
                    // After a failure there is no receiver.
                    let _ = call.send(result.map(drop));
                };
                engine
                    .submit(submission.calling(Box::new(callback)))
                    .unwrap();
            } else {
                handles.push(engine.submit(submission).unwrap());
            }
        }
        own.shuffle(&mut handles);
        for handle in handles {
            finish(engine, handle).unwrap();
        }
        for _ in 0..called {
            calls.recv_timeout(LIMIT).expect("no call").unwrap();
        }
        for (i, tensors) in data.iter().enumerate() {
            let expected = round.expected(ranks, i);
            let all = tensors.iter().flatten();
            assert!(all.clone().all(|x| *x == expected), "{i}: {tensors:?}");
        }
    }
}

#[test]
fn results_follow_from_the_order_of_starts_alone() {
    let mut overtaken = 0;
    for seed in 0..SEEDS {
        let ranks = 1 + (seed % 4) as usize;
        let fabric = Fabric::new(seed);
        let body = move |engine: &Engine, rank: usize| rounds(engine, seed, rank, ranks);
        on_ranks(ranks, &fabric, |_| Some(1), body);
        overtaken += fabric.overtaken.load(Ordering::SeqCst);
    }
    assert!(overtaken > 0, "nothing has ended out of order");
}

#[test]
fn others_go_on_while_an_execution_is_in_flight() {
    let fabric = Fabric::new(1);
    fabric.hold(true);
    let kept_fabric = fabric.clone();
    let sums = on_ranks(
        3,
        &fabric,
        |_| Some(1),
        move |engine, rank| {
            let (mut slow, mut quick) = (vec![vec![1.0; 10]], vec![vec![2.0; 10]]);
            let first = engine
                .submit(submission("slow", SUM, &mut slow, DOUBLE))
                .unwrap();
            kept_fabric.await_started(Rank(rank as u32), 1);
            let second = engine
                .submit(submission("quick", SUM, &mut quick, Device::Cpu))
                .unwrap();
            finish(engine, second).unwrap();
            assert_eq!(engine.poll(first), Some(false));
            engine
                .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()))
                .unwrap();
            kept_fabric.hold(false);
            finish(engine, first).unwrap();
            (slow[0][0], quick[0][9])
        },
    );
    assert_eq!(sums, [(3.0, 6.0); 3]);
}

struct Broken;

impl ReadyEvent for Broken {
    fn is_ready(&self) -> Result<bool, String> {
        Err("an event has failed".into())
    }
}

#[test]
fn what_is_in_flight_when_the_generation_ends_is_aborted_and_names_the_cause() {
    for seed in 0..SEEDS {
        let ranks = 2 + (seed % 3) as usize;
        let fabric = Fabric::new(seed);
        fabric.hold(true);
        let kept_fabric = fabric.clone();
        let errors = on_ranks(
            ranks,
            &fabric,
            |_| Some(1),
            move |engine, rank| {
                let mut data = vec![vec![1.0; 100]];
                let mut other = vec![1.0; 100];
                let in_flight = engine
                    .submit(submission("d", SUM, &mut data, DOUBLE))
                    .unwrap();
                kept_fabric.await_started(Rank(rank as u32), 1);
                let mut last = tensor(&mut other, Device::Cpu);
                if rank == 1 {
                    last = last.ready_after(Some(Box::new(Broken)));
                }
                let set = ProcessSetId::GLOBAL;
                // The submission is refused, with the same cause, if a peer's report was faster.
                let handle = engine.submit(Submission::new("t", None, SUM, set, last.into()));
                let second = handle
                    .and_then(|handle| finish(engine, handle))
                    .unwrap_err();
                let first = finish(engine, in_flight).unwrap_err();
                // From here on no execution writes there.
                data[0].fill(0.0);
                [first.to_string(), second.to_string()]
            },
        );
        for text in errors.into_iter().flatten() {
            assert!(
                text.contains("rank 1") && text.contains("an event has failed"),
                "{text}"
            );
        }
        assert_eq!(fabric.aborted.load(Ordering::SeqCst), ranks);
        assert_eq!(fabric.ended.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn a_device_that_fails_ends_the_job_for_all_and_is_named() {
    for seed in 0..SEEDS {
        let ranks = 2 + (seed % 3) as usize;
        let culprit = Rank((seed % ranks as u64) as u32);
        let fabric = Fabric::new(seed);
        fabric.fail(culprit, seed as usize % 5);
        let errors = on_ranks(
            ranks,
            &fabric,
            |_| Some(1),
            move |engine, _| {
                let mut data = vec![vec![1.0; 50]];
                for _ in 0..8 {
                    // One at a time, because several may be fused into one execution.
                    let handle = engine.submit(submission("x", SUM, &mut data, DOUBLE));
                    if let Err(error) = handle.and_then(|handle| finish(engine, handle)) {
                        return error.to_string();
                    }
                }
                panic!("nothing has failed")
            },
        );
        for text in errors {
            assert!(text.contains(&culprit.to_string()), "{text}");
            assert!(text.contains("the device has failed"), "{text}");
        }
    }
}

#[test]
fn members_that_offer_different_things_all_hear_so_and_go_on() {
    let fabric = Fabric::new(1);
    let ends = on_ranks(
        3,
        &fabric,
        |rank| Some(1 + u8::from(rank == 2)),
        |engine, _| {
            let mut data = vec![vec![1.0; 5]];
            let mut texts = Vec::new();
            for name in ["a", "b"] {
                let handle = engine
                    .submit(submission(name, SUM, &mut data, DOUBLE))
                    .unwrap();
                texts.push(finish(engine, handle).unwrap_err().to_string());
            }
            let handle = engine
                .submit(submission("c", SUM, &mut data, Device::Cpu))
                .unwrap();
            finish(engine, handle).unwrap();
            (texts, data[0][0])
        },
    );
    let text = "rank 0 has version 1, rank 2 has version 2".to_owned();
    assert_eq!(ends, vec![(vec![text; 2], 3.0); 3]);
}

#[test]
fn a_rank_without_the_device_is_named_to_those_who_have_it() {
    let fabric = Fabric::new(1);
    let ends = on_ranks(
        2,
        &fabric,
        |rank| (rank == 0).then_some(1),
        |engine, rank| {
            if rank == 1 {
                let mut data = vec![vec![1.0; 5]];
                let refused = engine.submit(submission("a", SUM, &mut data, DOUBLE));
                let text = refused.unwrap_err().to_string();
                // A rank that has joined takes part with the neutral element, so it takes part in the exchange, too.
                engine.join::<Error>(|| Ok(())).unwrap();
                return text;
            }
            let mut data = vec![vec![1.0; 5]];
            let handle = engine
                .submit(submission("a", SUM, &mut data, DOUBLE))
                .unwrap();
            let text = finish(engine, handle).unwrap_err().to_string();
            engine.join::<Error>(|| Ok(())).unwrap();
            text
        },
    );
    assert!(
        ends[0].starts_with("rank 1 takes part in an operation on custom device tensors"),
        "{ends:?}"
    );
    assert!(
        ends[1].contains("the tensor lies on a custom device"),
        "{ends:?}"
    );
}

#[test]
fn a_joined_rank_takes_part_with_nothing() {
    let fabric = Fabric::new(1);
    let sums = on_ranks(
        3,
        &fabric,
        |_| Some(1),
        |engine, rank| {
            let mut data = vec![vec![1.0; 5]];
            if rank > 0 {
                let handle = engine
                    .submit(submission("a", SUM, &mut data, DOUBLE))
                    .unwrap();
                finish(engine, handle).unwrap();
            }
            engine.join::<Error>(|| Ok(())).unwrap();
            data[0][4]
        },
    );
    assert_eq!(sums, [1.0, 2.0, 2.0]);
}

#[test]
fn different_kinds_of_device_are_an_error_that_names_both_sides() {
    let fabric = Fabric::new(1);
    let texts = on_ranks(
        2,
        &fabric,
        |_| Some(1),
        |engine, rank| {
            let device = [Device::Cpu, DOUBLE][rank];
            let mut data = vec![vec![1.0; 5], vec![1.0; 5]];
            let handle = engine
                .submit(submission("a", SUM, &mut data, device))
                .unwrap();
            let apart = finish(engine, handle).unwrap_err().to_string();
            let (first, second) = data.split_at_mut(1);
            let group = vec![
                tensor(&mut first[0], Device::Cpu),
                tensor(&mut second[0], DOUBLE),
            ];
            let group = Submission::new("t", None, SUM, ProcessSetId::GLOBAL, group.into());
            (apart, engine.submit(group).unwrap_err().to_string())
        },
    );
    for (apart, group) in texts {
        assert!(
            apart.contains("specified device CPU, but another rank specified device custom device"),
            "{apart}"
        );
        assert!(
            group.contains("lie on a CPU and on a custom device"),
            "{group}"
        );
    }
}

#[test]
fn the_timeline_shows_which_backend_an_execution_ran_on() {
    let file = std::env::temp_dir().join(format!("horovod-{}-devices", std::process::id()));
    let fabric = Fabric::new(1);
    let path = file.clone();
    on_ranks(
        2,
        &fabric,
        |_| Some(1),
        move |engine, _| {
            engine.start_timeline(&path, false).unwrap();
            // From here on every rank records.
            engine
                .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()))
                .unwrap();
            for (name, device) in [("on_device", DOUBLE), ("on_host", Device::Cpu)] {
                let mut data = vec![vec![1.0; 5]];
                let handle = engine
                    .submit(submission(name, SUM, &mut data, device))
                    .unwrap();
                finish(engine, handle).unwrap();
            }
            engine.stop_timeline();
        },
    );
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(
        text.contains("test.on_device") && text.contains("test.on_host"),
        "{text}"
    );
    // Once on each rank, for the operation on the device.
    assert_eq!(
        text.matches(r#""name":"DOUBLE","cat":"stage""#).count(),
        2,
        "{text}"
    );
}

#[test]
fn a_device_that_never_ends_keeps_no_engine_and_is_called_back_by_nobody() {
    let fabric = Fabric::new(1);
    fabric.hold(true);
    fabric.ignore_aborts();
    let kept_fabric = fabric.clone();
    let called = Arc::new(Mutex::new(Vec::new()));
    let calls = called.clone();
    // Both ranks leave while the execution is in flight: the engines end, although its end cannot be reported.
    on_ranks(
        2,
        &fabric,
        |_| Some(1),
        move |engine, rank| {
            let data: &'static mut Vec<Vec<f32>> = Box::leak(Box::new(vec![vec![1.0; 5]]));
            let calls = calls.clone();
            let callback = move |result: Result<OpResult, Error>| {
                calls.lock().unwrap().push(result.is_ok());
            };
            let stuck = submission("stuck", SUM, data, DOUBLE);
            engine.submit(stuck.calling(Box::new(callback))).unwrap();
            kept_fabric.await_started(Rank(rank as u32), 1);
        },
    );
    assert!(called.lock().unwrap().is_empty());
}

#[test]
fn two_backends_for_one_kind_of_device_are_refused() {
    let fabric = Fabric::new(1);
    let twice = vec![fabric.device(1), fabric.device(1)];
    let mesh = testing::cluster(1).remove(0);
    let refused = Engine::start_with(Config::solo(), mesh, twice).map(drop);
    let text = refused.expect_err("there are two").to_string();
    assert!(
        text.contains("two backends") && text.contains("custom device"),
        "{text}"
    );
    fabric.close();
}

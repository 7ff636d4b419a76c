//! Many threads of each rank submit, poll and wait at random: whoever makes progress, nobody waits for ever and every
//! result is right.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, Error, Handle, Op, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor,
    TensorMeta, Waited,
};
use horovod_transport::{Mesh, testing};

/// Hard bound of the whole test; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(240);
const THREADS: usize = 4;
const STEPS: usize = 150;
/// From one element to several chunks of the pipeline inside a host.
const LENGTHS: [usize; 5] = [1, 7, 300, 5_000, 70_000];

/// Numbers that look random (xorshift), the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

fn submit(engine: &Engine, name: &str, data: &mut [f32]) -> Result<Handle, Error> {
    submit_scaled(engine, name, data, (ReduceOp::Sum, 1.0))
}

fn submit_scaled(
    engine: &Engine,
    name: &str,
    data: &mut [f32],
    (op, pre): (ReduceOp, f64),
) -> Result<Handle, Error> {
    let p = data.as_mut_ptr().cast::<u8>();
    let scale = Scale { pre, post: 1.0 };
    let op = Op::Allreduce { op, scale };
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
    engine.submit(Submission::new(
        "test",
        Some(name),
        op,
        ProcessSetId::GLOBAL,
        tensor.into(),
    ))
}

/// Wait in slices of random length, so that threads leave in the middle of an execution.
fn finish(engine: &Engine, handle: Handle, dice: &mut Dice) {
    loop {
        let slice = [0, 20, 300, 50_000][dice.below(4)];
        match engine.wait(handle, Duration::from_micros(slice)) {
            Waited::Ended { result, .. } => {
                result.expect("succeeds");
                return;
            }
            Waited::Pending => {}
            Waited::Unknown => panic!("{handle:?} vanished"),
        }
    }
}

/// One thread of a rank: the same names and lengths on every rank, everything else at random.
fn work(engine: &Engine, ranks: usize, rank: usize, thread: usize) {
    let mut shared = Dice(thread as u64 + 1);
    let mut own = Dice((rank * THREADS + thread) as u64 + 1000);
    for step in 0..STEPS {
        let mut tensors: Vec<Vec<f32>> = (0..=shared.below(4))
            .map(|i| vec![(rank + i + step) as f32; LENGTHS[shared.below(LENGTHS.len())]])
            .collect();
        let mut pending = Vec::new();
        for (i, tensor) in tensors.iter_mut().enumerate() {
            // Tensors that are scaled before they are combined must be scaled once, however often their thread suspends
            // the operation.
            let how = [(ReduceOp::Sum, 1.0), (ReduceOp::Max, 2.0)][i % 2];
            let name = format!("{thread}.{i}");
            let handle = submit_scaled(engine, &name, tensor, how).expect("is accepted");
            pending.push(handle);
        }
        while !pending.is_empty() {
            let handle = pending.swap_remove(own.below(pending.len()));
            if own.below(3) == 0 {
                assert!(engine.poll(handle).is_some());
            }
            finish(engine, handle, &mut own);
        }
        let of_ranks = ranks * (ranks - 1) / 2;
        for (i, tensor) in tensors.iter().enumerate() {
            let sum = (of_ranks + ranks * (i + step)) as f32;
            let twice_the_largest = (2 * (ranks - 1 + i + step)) as f32;
            let want = [sum, twice_the_largest][i % 2];
            assert!(
                tensor.iter().all(|x| *x == want),
                "step {step}, tensor {i}: {}, not {want}",
                tensor[0]
            );
        }
        if own.below(20) == 0 {
            thread::yield_now();
        }
    }
}

fn run(meshes: Vec<Mesh>) {
    let ranks = meshes.len();
    let (done, ended) = mpsc::channel();
    for (rank, mesh) in meshes.into_iter().enumerate() {
        let done = done.clone();
        thread::spawn(move || {
            let engine = Arc::new(Engine::start(Config::solo(), mesh).expect("starts"));
            let threads: Vec<_> = (0..THREADS)
                .map(|t| {
                    let engine = engine.clone();
                    thread::spawn(move || work(&engine, ranks, rank, t))
                })
                .collect();
            let good = threads.into_iter().all(|t| t.join().is_ok());
            let _ = engine.barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()));
            engine.shutdown();
            let _ = done.send(good); // nobody listens any more after a failure
        });
    }
    for _ in 0..ranks {
        assert!(ended.recv_timeout(LIMIT).expect("a rank hangs"));
    }
}

#[test]
fn on_one_host() {
    for ranks in [1, 2, 3] {
        run(testing::cluster(ranks));
    }
}

#[test]
fn on_two_hosts() {
    run(testing::cluster_hosts(&[0, 0, 1]));
}

#[test]
fn over_sockets_only() {
    run(testing::cluster_tcp(2));
}

#[test]
fn a_shutdown_ends_the_waits_of_all_threads() {
    let (done, ended) = mpsc::channel();
    for (rank, mesh) in testing::cluster(2).into_iter().enumerate() {
        let done = done.clone();
        thread::spawn(move || {
            let engine = Arc::new(Engine::start(Config::solo(), mesh).expect("starts"));
            let (waiting, waits) = mpsc::channel();
            let threads: Vec<_> = (0..THREADS)
                .map(|t| {
                    let (engine, waiting) = (engine.clone(), waiting.clone());
                    thread::spawn(move || {
                        let mut data = vec![1.0f32; 100];
                        // Only this rank asks for it.
                        let handle = submit(&engine, &format!("{rank}.{t}"), &mut data);
                        let _ = waiting.send(()); // the receiver lives until all have sent
                        match handle {
                            // The other rank was faster.
                            Err(_) => true,
                            Ok(handle) => {
                                matches!(
                                    engine.wait(handle, LIMIT),
                                    Waited::Ended { result: Err(_), .. }
                                )
                            }
                        }
                    })
                })
                .collect();
            for _ in 0..THREADS {
                waits.recv_timeout(LIMIT).expect("a thread hangs");
            }
            engine.shutdown();
            let _ = done.send(
                threads
                    .into_iter()
                    .all(|t| t.join().is_ok_and(|ended| ended)),
            );
        });
    }
    for _ in 0..2 {
        assert!(ended.recv_timeout(LIMIT).expect("a rank hangs"));
    }
}

#[test]
fn a_wait_ends_in_time_though_the_operations_of_others_never_stop() {
    let (done, results) = mpsc::channel();
    for (rank, mesh) in testing::cluster(2).into_iter().enumerate() {
        let done = done.clone();
        thread::spawn(move || {
            let engine = Engine::start(Config::solo(), mesh).expect("starts");
            let mut late = vec![1.0f32; 3];
            let waiting = AtomicBool::new(rank == 0);
            // Round and round until rank 0 says that its wait is over; it only looks, so the other thread makes
            // progress.
            let rounds = || {
                let mut go_on = vec![1.0f32];
                while go_on[0] > 0.0 {
                    go_on[0] = f32::from(u8::from(waiting.load(Ordering::SeqCst)));
                    let handle = submit(&engine, "round", &mut go_on).unwrap();
                    while rank == 0 && engine.poll(handle) == Some(false) {
                        thread::yield_now();
                    }
                    finish(&engine, handle, &mut Dice(9));
                }
            };
            if rank == 0 {
                thread::scope(|scope| {
                    scope.spawn(rounds);
                    // Nobody else asks for this before the waiting is over.
                    let handle = submit(&engine, "late", &mut late).unwrap();
                    let waited = engine.wait(handle, Duration::from_millis(20));
                    assert!(matches!(waited, Waited::Pending), "{waited:?}");
                    waiting.store(false, Ordering::SeqCst);
                    finish(&engine, handle, &mut Dice(7));
                });
            } else {
                rounds();
                let handle = submit(&engine, "late", &mut late).unwrap();
                finish(&engine, handle, &mut Dice(7));
            }
            let _ = engine.barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()));
            let _ = done.send(late);
        });
    }
    for _ in 0..2 {
        assert_eq!(results.recv_timeout(LIMIT).expect("a rank hangs"), [2.0; 3]);
    }
}

//! The queue and the way through the engine: submit, negotiate, run, complete. `cargo bench -p horovod-engine`
//!
//! `alone` is a job of one rank: what the queue, the engine's thread and completion cost. `pair` adds a second rank in
//! another thread of this process: what agreeing costs. Neither has an interpreter above it.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use divan::Bencher;
use divan::counter::ItemsCount;
use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, Error, Op, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor,
    TensorMeta, Waited,
};
use horovod_transport::{Mesh, testing};

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// Elements of one tensor: 1 KiB.
const ELEMENTS: usize = 256;
/// Operations that are submitted before the first is waited for.
const AT_ONCE: [usize; 3] = [1, 100, 1000];

fn main() {
    divan::main();
}

#[divan::bench(args = AT_ONCE)]
fn alone(bencher: Bencher<'_, '_>, at_once: usize) {
    let mesh = testing::cluster(1).into_iter().next();
    let mut rank = Rank::start(mesh.expect("one rank"), at_once);
    bencher
        .counter(ItemsCount::new(at_once))
        .bench_local(|| rank.reduce(0.0));
    rank.engine.shutdown();
}

#[divan::bench(args = AT_ONCE)]
fn pair(bencher: Bencher<'_, '_>, at_once: usize) {
    let mut meshes = testing::cluster(2).into_iter();
    let (mine, other) = (meshes.next(), meshes.next());
    let (ended, wait_for_end) = mpsc::channel();
    thread::spawn(move || {
        let mut rank = Rank::start(other.expect("two ranks"), at_once);
        // Takes part until it is told that there is nothing more.
        while rank.reduce(0.0) == 0.0 {}
        rank.leave();
        let _ = ended.send(());
    });
    let mut rank = Rank::start(mine.expect("two ranks"), at_once);
    bencher
        .counter(ItemsCount::new(at_once))
        .bench_local(|| rank.reduce(0.0));
    rank.reduce(1.0);
    rank.leave();
    wait_for_end.recv_timeout(LIMIT).expect("the other ends");
}

/// One rank and its tensors.
struct Rank {
    engine: Engine,
    tensors: Vec<(String, Vec<f32>)>,
}

impl Rank {
    fn start(mesh: Mesh, count: usize) -> Self {
        Self {
            engine: Engine::start(Config::solo(), mesh).expect("starts"),
            tensors: (0..count)
                .map(|i| (format!("gradient.{i}"), vec![0.0; ELEMENTS]))
                .collect(),
        }
    }

    /// Sum all tensors over the ranks, each with `value` in it; the sum.
    fn reduce(&mut self, value: f32) -> f32 {
        let handles: Vec<_> = self
            .tensors
            .iter_mut()
            .map(|(name, data)| {
                data[0] = value;
                let memory = data.as_mut_ptr().cast::<u8>();
                let tensor = {
                    // SAFETY: the memory outlives the operation, and nobody else touches it.
                    unsafe {
                        Tensor::new(
                            TensorMeta::new(DType::F32, [ELEMENTS as u64]),
                            memory,
                            Output::At(memory),
                        )
                    }
                };
                self.engine
                    .submit(Submission::new(
                        "bench",
                        Some(name),
                        Op::Allreduce {
                            op: ReduceOp::Sum,
                            scale: Scale::NONE,
                        },
                        ProcessSetId::GLOBAL,
                        tensor.into(),
                    ))
                    .expect("accepted")
            })
            .collect();
        for handle in handles {
            match self.engine.wait(handle, LIMIT) {
                Waited::Ended { result, .. } => drop(result.expect("succeeds")),
                other => panic!("{other:?}"),
            }
        }
        self.tensors[0].1[0]
    }

    /// End the job when the other rank does, too.
    fn leave(self) {
        let _ = self
            .engine
            .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()));
        self.engine.shutdown();
    }
}

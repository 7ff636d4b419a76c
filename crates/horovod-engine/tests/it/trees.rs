//! Engines that negotiate through a tree: all that works in a star, and who is blamed when a rank in it ends.

use std::sync::mpsc;
use std::time::Duration;

use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, Error, Handle, Op, Output, ProcessSetId, Rank, ReadyEvent, ReduceOp, Scale,
    Submission, Tensor, TensorMeta, Waited,
};
use horovod_transport::Mesh;
use horovod_transport::testing::Cluster;

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// Eight ranks on one host, each listening to two: 1 and 2 below 0; 3, 4 below 1; 5, 6 below 2; 7 below 3.
const RANKS: usize = 8;

fn tree() -> Vec<Mesh> {
    let meshes = Cluster::new(RANKS).staging(64 << 10).fan_out(2).build();
    assert!(
        [1, 2, 3]
            .iter()
            .all(|rank| meshes[0].tree.aggregates(Rank(*rank)))
    );
    meshes
}

fn submit_to(
    engine: &Engine,
    set: ProcessSetId,
    name: &str,
    data: &mut [f32],
    ready: Option<Box<dyn ReadyEvent>>,
) -> Result<Handle, Error> {
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
        .ready_after(ready)
    };
    engine.submit(Submission::new(
        "test",
        Some(name),
        Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale::NONE,
        },
        set,
        tensor.into(),
    ))
}

fn submit(engine: &Engine, name: &str, data: &mut [f32]) -> Result<Handle, Error> {
    submit_to(engine, ProcessSetId::GLOBAL, name, data, None)
}

fn finish(engine: &Engine, handle: Handle) -> Result<(), Error> {
    match engine.wait(handle, LIMIT) {
        Waited::Ended { result, .. } => result.map(drop),
        other => panic!("{other:?}"),
    }
}

/// Run `body` on a thread for each mesh; its results by rank. The engines live until all have ended.
fn on_meshes<T: Send + 'static>(
    meshes: Vec<Mesh>,
    body: impl Fn(&Engine, usize) -> T + Send + Clone + 'static,
) -> Vec<(usize, T)> {
    let n = meshes.len();
    let (done, results) = mpsc::channel();
    for mesh in meshes {
        let (body, done) = (body.clone(), done.clone());
        std::thread::spawn(move || {
            let rank = mesh.topology.rank.index();
            let engine = Engine::start(Config::solo(), mesh).expect("starts");
            let result = body(&engine, rank);
            let _ = done.send((rank, result, engine)); // nobody listens any more after a failure
        });
    }
    let mut all = Vec::new();
    let mut engines = Vec::new();
    for _ in 0..n {
        let (rank, result, engine) = results.recv_timeout(LIMIT).expect("a rank hangs");
        all.push((rank, result));
        engines.push(engine);
    }
    // All at once: each waits for the others.
    std::thread::scope(|s| {
        for engine in &engines {
            s.spawn(|| engine.shutdown());
        }
    });
    all.sort_by_key(|(rank, _)| *rank);
    all
}

#[test]
fn operations_sets_and_joins_work_as_in_a_star() {
    let two_hosts = Cluster::new(RANKS)
        .hosts(&[0, 0, 0, 0, 1, 1, 1, 1])
        .fan_out(2);
    for meshes in [tree(), two_hosts.build(), two_hosts.shm(false).build()] {
        on_meshes(meshes, |engine, rank| {
            let barrier = || {
                engine
                    .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()))
                    .unwrap()
            };
            for step in 0..30 {
                let mut tensors: Vec<Vec<f32>> = (0..10)
                    .map(|i| vec![(rank + i + step) as f32; i * 7 + 1])
                    .collect();
                let handles: Vec<_> = tensors
                    .iter_mut()
                    .enumerate()
                    .map(|(i, t)| submit(engine, &format!("g{i}"), t).unwrap())
                    .collect();
                for handle in handles {
                    finish(engine, handle).unwrap();
                }
                assert_eq!(tensors[9][0], (28 + 8 * (9 + step)) as f32);
            }
            // A set below one child, and one that is spread.
            for members in [&[3, 7][..], &[0, 4, 5, 7]] {
                let set = engine.add_process_set::<Error>(members, || Ok(())).unwrap();
                if members.contains(&(rank as u32)) {
                    for _ in 0..3 {
                        let mut data = [1.0];
                        let handle = submit_to(engine, set, "s", &mut data, None).unwrap();
                        finish(engine, handle).unwrap();
                        assert_eq!(data[0], members.len() as f32);
                    }
                }
                assert!(engine.remove_process_set::<Error>(set, || Ok(())).unwrap());
            }
            // One rank asks for a known name otherwise.
            let mut data = vec![1.0; if rank == 7 { 4 } else { 1 }];
            let handle = submit(engine, "g0", &mut data).unwrap();
            let error = finish(engine, handle).unwrap_err().to_string();
            assert!(error.contains("Mismatched ALLREDUCE"), "{error}");
            assert!(error.contains("rank 7"), "{error}");
            // A leaf and an inner rank run out of data.
            if rank != 2 && rank != 7 {
                for _ in 0..3 {
                    let mut data = [1.0];
                    let handle = submit(engine, "g0", &mut data).unwrap();
                    finish(engine, handle).unwrap();
                    assert_eq!(data[0], 6.0);
                }
            }
            engine.join::<Error>(|| Ok(())).unwrap();
            let mut data = [1.0];
            let handle = submit(engine, "g0", &mut data).unwrap();
            finish(engine, handle).unwrap();
            assert_eq!(data[0], 8.0);
            barrier();
        });
    }
}

#[test]
fn whoever_vanishes_is_named_with_its_host_on_every_other_rank() {
    // An inner rank whose children speak to nobody else; a rank below another; a leaf.
    for victim in [1, 3, 7] {
        let mut meshes = tree();
        drop(meshes.remove(victim)); // its links close without a word
        let results = on_meshes(meshes, |engine, _| {
            let mut data = [1.0];
            let pending = submit(engine, "x", &mut data).and_then(|h| finish(engine, h));
            let later = submit(engine, "y", &mut data).map(drop);
            [pending, later].map(|end| end.expect_err("one is missing").to_string())
        });
        assert_eq!(results.len(), RANKS - 1);
        for (rank, texts) in results {
            for text in texts {
                let named = text.contains(&format!("rank {victim} on host0: "));
                assert!(named, "{victim} vanished, {rank} says: {text}");
            }
        }
    }
}

struct Broken;

impl ReadyEvent for Broken {
    fn is_ready(&self) -> Result<bool, String> {
        Err("the device has failed".into())
    }
}

#[test]
fn a_rank_that_cannot_go_on_is_named_with_the_cause_everywhere() {
    // The processes live on: nobody may depend on their end.
    for culprit in [1, 7] {
        let results = on_meshes(tree(), move |engine, rank| {
            let mut data = [1.0];
            let ready = (rank == culprit).then(|| Box::new(Broken) as Box<dyn ReadyEvent>);
            submit_to(engine, ProcessSetId::GLOBAL, "x", &mut data, ready)
                .and_then(|handle| finish(engine, handle))
                .expect_err("one cannot take part")
                .to_string()
        });
        for (rank, text) in results {
            assert!(text.contains(&format!("rank {culprit}")), "{rank}: {text}");
            assert!(text.contains("the device has failed"), "{rank}: {text}");
        }
    }
}

#[test]
fn a_rank_that_shuts_down_ends_what_the_others_wait_for() {
    for leaver in [1, 7] {
        let results = on_meshes(tree(), move |engine, rank| {
            if rank == leaver {
                engine.shutdown();
                return None;
            }
            let mut data = [1.0];
            let end = submit(engine, "x", &mut data).and_then(|handle| finish(engine, handle));
            Some(end.expect_err("one has left").to_string())
        });
        for (_, text) in results.into_iter().filter_map(|(r, text)| Some((r, text?))) {
            assert!(text.starts_with("Horovod has been shut down"), "{text}");
            assert!(text.contains(&format!("rank {leaver}")), "{text}");
        }
    }
}

//! Ends that are calls, and outputs that a submission allocates: of several engines in one process.

use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, Error, Op, OpResult, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor,
    TensorMeta, Waited,
};
use horovod_transport::testing;

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(240);

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};

/// Run `body` on every rank, each on a thread of its own; `body` ends the engine.
fn on_ranks<T: Send + 'static>(
    n: usize,
    body: impl Fn(Engine, usize) -> T + Send + Clone + 'static,
) -> Vec<T> {
    let (done, results) = mpsc::channel();
    for (rank, mesh) in testing::cluster(n).into_iter().enumerate() {
        let (body, done) = (body.clone(), done.clone());
        std::thread::spawn(move || {
            let engine = Engine::start(Config::solo(), mesh).expect("starts");
            let _ = done.send((rank, body(engine, rank))); // nobody listens any more after a failure
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
    all.into_iter().flatten().collect()
}

/// One row of `f32`, that lives as long as the process.
fn row(value: f32, op: &Op) -> Tensor {
    let data: &'static mut [f32; 3] = Box::leak(Box::new([value; 3]));
    let memory = data.as_mut_ptr().cast::<u8>();
    let output = match op {
        Op::Allreduce { .. } => Output::At(memory),
        _ => Output::Allocate,
    };
    let meta = TensorMeta::new(DType::F32, [1, 3]);
    // SAFETY: nobody else knows the memory, which is never given back.
    unsafe { Tensor::new(meta, memory, output) }
}

/// Submit, and what it ends with, as a call says it.
fn call(
    engine: &Engine,
    op: Op,
    value: f32,
    allocator: Option<horovod_engine::Allocator>,
) -> Result<OpResult, Error> {
    let (end, ended) = mpsc::channel();
    let set = ProcessSetId::GLOBAL;
    let tensor = row(value, &op);
    let callback = move |result| {
        // Nobody listens any more after a failure.
        let _ = end.send(result);
    };
    let mut submission =
        Submission::new("test", None, op, set, tensor.into()).calling(Box::new(callback));
    if let Some(allocator) = allocator {
        // SAFETY: the allocators here leak what they give, or give nothing.
        submission = unsafe { submission.allocating(allocator) };
    }
    engine.submit(submission)?;
    ended.recv_timeout(LIMIT).expect("nobody is called")
}

fn leaking(slow: bool) -> horovod_engine::Allocator {
    Box::new(move |index, dtype, shape| {
        assert_eq!((index, dtype, shape.len()), (0, DType::F32, 2));
        if slow {
            // As one that waits for the interpreter: the engine's thread may fall asleep meanwhile.
            (0..1000).for_each(|_| std::thread::yield_now());
        }
        let elems = shape.iter().product::<u64>() as usize;
        let memory = Box::leak(vec![0.0f32; elems].into_boxed_slice());
        Ok(memory.as_mut_ptr().cast::<u8>().into())
    })
}

#[test]
fn outputs_lie_where_the_submission_allocated_them_also_where_others_do_not() {
    let results = on_ranks(3, |engine, rank| {
        let mut all = Vec::new();
        for slow in [false, true] {
            for op in [Op::Allgather, Op::Allgather] {
                // The others' outputs are the engine's.
                let allocator = (rank == 1).then(|| leaking(slow));
                let result = call(&engine, op, rank as f32, allocator).unwrap();
                let Some((memory, shape)) = &result.outputs[0] else {
                    panic!("no output");
                };
                // SAFETY: the result holds so many elements.
                let read = |i| unsafe { *memory.as_mut_ptr().cast::<f32>().add(i) };
                all.push((shape.to_vec(), read(0), read(8)));
            }
        }
        engine.shutdown();
        all
    });
    assert!(
        results
            .iter()
            .flatten()
            .all(|r| *r == (vec![3, 3], 0.0, 2.0)),
        "{results:?}"
    );
}

#[test]
fn a_result_without_memory_is_an_error_everywhere_and_never_lies_elsewhere() {
    for round in 0..20 {
        let texts = on_ranks(2, move |engine, rank| {
            let slow = round % 2 == 1;
            let none: horovod_engine::Allocator = Box::new(move |_, _, _| {
                (0..if slow { 1000 } else { 0 }).for_each(|_| std::thread::yield_now());
                Err("no memory is left".into())
            });
            let allocator = (rank == 0).then_some(none);
            let text = call(&engine, Op::Allgather, 1.0, allocator)
                .unwrap_err()
                .to_string();
            engine.shutdown();
            text
        });
        for text in texts {
            assert!(
                text.contains("rank 0") && text.contains("no memory is left"),
                "{text}"
            );
        }
    }
}

#[test]
fn an_allocator_that_panics_ends_the_job_with_an_error() {
    let texts = on_ranks(2, |engine, rank| {
        let panics: horovod_engine::Allocator = Box::new(|_, _, _| panic!("as some may"));
        let allocator = (rank == 0).then_some(panics);
        let text = call(&engine, Op::Allgather, 1.0, allocator)
            .unwrap_err()
            .to_string();
        engine.shutdown();
        text
    });
    assert!(
        texts.iter().all(|text| text.contains("panicked")),
        "{texts:?}"
    );
}

#[test]
fn an_allocator_is_not_asked_where_there_is_nothing_to_allocate() {
    let ends = on_ranks(2, |engine, _| {
        let asked: horovod_engine::Allocator = Box::new(|_, _, _| Err("it was asked".into()));
        let end = call(&engine, SUM, 1.0, Some(asked)).map(drop);
        engine.shutdown();
        end
    });
    assert_eq!(ends, [Ok(()), Ok(())]);
}

#[test]
fn a_function_that_submits_again_when_the_job_has_ended_is_refused_and_called_once() {
    let submitted = Arc::new(Barrier::new(2));
    let calls = on_ranks(2, move |engine, rank| {
        let engine = Arc::new(engine);
        let calls = Arc::new(Mutex::new(Vec::new()));
        // Rank 1 never takes part, and leaves when rank 0 has submitted.
        if rank == 0 {
            let (again, calls_seen) = (Arc::downgrade(&engine), calls.clone());
            let callback = move |result: Result<OpResult, Error>| {
                let engine = again.upgrade().expect("shutdown waits for its calls");
                let retry = Submission::new(
                    "again",
                    None,
                    SUM,
                    ProcessSetId::GLOBAL,
                    row(1.0, &SUM).into(),
                );
                let unheard = calls_seen.clone();
                let retry =
                    retry.calling(Box::new(move |_| unheard.lock().unwrap().push("called")));
                let refused = engine.submit(retry).is_err();
                calls_seen.lock().unwrap().push(match (result, refused) {
                    (Err(_), true) => "ended, and refused",
                    _ => "went on",
                });
            };
            let lone = Submission::new(
                "lone",
                None,
                SUM,
                ProcessSetId::GLOBAL,
                row(1.0, &SUM).into(),
            );
            engine.submit(lone.calling(Box::new(callback))).unwrap();
        }
        submitted.wait();
        engine.shutdown();
        calls.lock().unwrap().clone()
    });
    assert_eq!(calls, [vec!["ended, and refused"], vec![]]);
}

/// Submit a sum with a wait of at most `timeout`; the thread that is called with its end, later or before this returns.
fn call_after_wait(engine: &Engine, timeout: Duration) -> mpsc::Receiver<ThreadId> {
    let (end, ended) = mpsc::channel();
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("wait", None, SUM, set, row(1.0, &SUM).into());
    let callback = move |result: Result<OpResult, Error>| {
        assert!(result.is_ok());
        // Nobody listens any more after a failure.
        let _ = end.send(std::thread::current().id());
    };
    engine
        .submit_and_wait(submission, timeout, Box::new(callback))
        .expect("is accepted");
    ended
}

#[test]
fn who_waits_for_the_end_makes_the_call() {
    on_ranks(2, |engine, _| {
        for _ in 0..3 {
            let ended = call_after_wait(&engine, LIMIT);
            let called = ended.try_recv().expect("was called before");
            assert_eq!(called, std::thread::current().id());
        }
        engine.shutdown();
    });
}

/// Tells which thread is done with an operation's tensors.
struct SendsWhenDropped(mpsc::Sender<ThreadId>);

impl Drop for SendsWhenDropped {
    fn drop(&mut self) {
        // Nobody listens any more after a failure.
        let _ = self.0.send(std::thread::current().id());
    }
}

#[test]
fn who_comes_last_and_waits_carries_the_operation_out() {
    let (submitted, waited) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    on_ranks(2, move |engine, rank| {
        let mut by_caller = false;
        // Not in each round: the engine's thread may be about to read what the other rank has said.
        for _ in 0..200 {
            // Submissions of a burst are not polled for, whoever waits.
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(2) {
                std::thread::yield_now();
            }
            let (done, thread) = mpsc::channel();
            let owner = Arc::new(SendsWhenDropped(done));
            let tensors = row(1.0, &SUM).kept_by(owner).into();
            let submission = Submission::new("last", None, SUM, ProcessSetId::GLOBAL, tensors);
            if rank == 1 {
                let handle = engine.submit(submission).unwrap();
                submitted.wait();
                assert!(matches!(
                    engine.wait(handle, LIMIT),
                    Waited::Ended { result: Ok(_), .. }
                ));
            } else {
                submitted.wait();
                engine
                    .submit_and_wait(submission, LIMIT, Box::new(|result| drop(result.unwrap())))
                    .unwrap();
            }
            let thread = thread.recv_timeout(LIMIT).expect("it was let go of");
            by_caller |= thread == std::thread::current().id();
            waited.wait();
        }
        engine.shutdown();
        assert!(by_caller || rank == 1, "always by the engine's thread");
    });
}

#[test]
fn a_wait_that_is_over_leaves_the_call_to_the_callback_thread() {
    let returned = Arc::new(Barrier::new(2));
    on_ranks(2, move |engine, rank| {
        for timeout in [Duration::ZERO, Duration::from_millis(1)] {
            if rank == 1 {
                returned.wait();
            }
            let ended = call_after_wait(&engine, timeout);
            if rank == 0 {
                returned.wait();
                let called = ended.recv_timeout(LIMIT).expect("is called");
                assert_ne!(called, std::thread::current().id());
            } else {
                ended.recv_timeout(LIMIT).expect("is called");
            }
        }
        engine.shutdown();
    });
}

#[test]
fn amid_a_call_nobody_waits() {
    on_ranks(2, |engine, _| {
        let (engine, here) = (Arc::new(engine), std::thread::current().id());
        let (inner, ended) = mpsc::channel();
        let again = engine.clone();
        let callback = move |result: Result<OpResult, Error>| {
            assert!(result.is_ok());
            let _ = inner.send(call_after_wait(&again, LIMIT));
        };
        let set = ProcessSetId::GLOBAL;
        let outer = Submission::new("outer", None, SUM, set, row(1.0, &SUM).into());
        engine
            .submit_and_wait(outer, LIMIT, Box::new(callback))
            .unwrap();
        let inner = ended.try_recv().expect("was called before");
        assert_ne!(inner.recv_timeout(LIMIT).expect("is called"), here);
        engine.shutdown();
    });
}

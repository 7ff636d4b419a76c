//! Steps that repeat allocate nothing: from the submission of a known tensor, through negotiation and execution, to
//! the end of the wait. On all threads of both ranks, whose engines talk over real shared memory.
//!
//! New names in the negotiation allocate, and lists grow to the most entries that ever wait at a time, which depends on
//! the speed of the ranks. So the test searches for many steps in a row without any allocation. Not covered: operations
//! whose output the engine allocates (allgather, alltoall, reducescatter), barriers, and tensors without a name, which
//! are new to the negotiation each time.
//!
//! All threads of this binary are counted, so it holds one test only.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, Error, Handle, Op, Output, ProcessSetId, Rank, ReduceOp, Scale, Submission,
    Tensor, TensorMeta, Waited,
};
use horovod_transport::{Mesh, testing};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Hard bound of the whole test; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(240);
/// Steps in a row that must go without an allocation, and how many may come before them.
const QUIET_STEPS: usize = 100;
const STEPS_MAX: usize = 3000;

/// Tensors of one step.
const TENSORS: usize = 60;

/// One rank's tensors: of all sizes and two types, so that some are fused, some travel alone, and some operations are
/// carried out by the engine's thread.
struct Model {
    names: Vec<String>,
    gradients: Vec<Vec<f32>>,
    handles: Vec<Handle>,
}

impl Model {
    fn new() -> Self {
        let length = |i: usize| [1, 30, 300, 4_000, 40_000][i % 5];
        Self {
            names: (0..TENSORS).map(|i| format!("gradient.{i}")).collect(),
            gradients: (0..TENSORS).map(|i| vec![1.0; length(i)]).collect(),
            handles: Vec::with_capacity(TENSORS),
        }
    }

    fn step(&mut self, engine: &Engine) {
        for i in 0..TENSORS {
            let (name, data) = (&self.names[i], &mut self.gradients[i]);
            data.fill(1.0);
            let memory = data.as_mut_ptr().cast::<u8>();
            let (dtype, elements) = match i % 7 {
                // The same bytes, taken for integers.
                3 => (DType::I32, data.len()),
                _ => (DType::F32, data.len()),
            };
            let op = match i % 11 {
                10 => Op::Broadcast { root: Rank(1) },
                _ => Op::Allreduce {
                    op: ReduceOp::Max,
                    scale: Scale::NONE,
                },
            };
            let tensor = {
                // SAFETY: the memory outlives the operation, and nobody else touches it.
                unsafe {
                    Tensor::new(
                        TensorMeta::new(dtype, [1, elements as u64]),
                        memory,
                        Output::At(memory),
                    )
                }
            };
            let submission =
                Submission::new("test", Some(name), op, ProcessSetId::GLOBAL, tensor.into());
            let handle = engine.submit(submission).expect("is accepted");
            self.handles.push(handle);
            // Sometimes nothing else is under way.
            if i < 10 {
                self.finish(engine);
            }
        }
        self.finish(engine);
        assert!(self.gradients.iter().flatten().all(|x| *x == 1.0));
    }

    fn finish(&mut self, engine: &Engine) {
        for handle in self.handles.drain(..) {
            match engine.wait(handle, LIMIT) {
                Waited::Ended { result, .. } => drop(result.expect("succeeds")),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Allocations of all threads together in each step; one rank reads the count while the other does nothing.
struct Tally {
    together: Barrier,
    before: AtomicUsize,
    steps: Mutex<Vec<usize>>,
}

impl Tally {
    /// Run one step of a rank; whether there is to be another.
    fn step(&self, body: impl FnOnce()) -> bool {
        if self.together.wait().is_leader() {
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            self.before.store(before, Ordering::SeqCst);
        }
        self.together.wait();
        body();
        if self.together.wait().is_leader() {
            let count = ALLOCATIONS.load(Ordering::SeqCst) - self.before.load(Ordering::SeqCst);
            self.steps.lock().expect("nobody panicked").push(count);
        }
        self.together.wait();
        let steps = self.steps.lock().expect("nobody panicked");
        steps.len() < STEPS_MAX && !ends_quietly(&steps)
    }
}

fn ends_quietly(steps: &[usize]) -> bool {
    steps.len() >= QUIET_STEPS && steps[steps.len() - QUIET_STEPS..].iter().all(|n| *n == 0)
}

fn run(mesh: Mesh, tally: &Tally) {
    let engine = Engine::start(Config::solo(), mesh).expect("starts");
    let mut model = Model::new();
    while tally.step(|| model.step(&engine)) {}
    let _ = engine.barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()));
    engine.shutdown();
}

#[test]
fn a_steady_state_allocates_nothing() {
    let tally = Arc::new(Tally {
        together: Barrier::new(2),
        before: AtomicUsize::new(0),
        steps: Mutex::new(Vec::with_capacity(STEPS_MAX)),
    });
    let (done, ended) = mpsc::channel();
    for mesh in testing::cluster(2) {
        let (done, tally) = (done.clone(), tally.clone());
        thread::spawn(move || {
            run(mesh, &tally);
            let _ = done.send(()); // nobody listens any more after a failure
        });
    }
    for _ in 0..2 {
        ended.recv_timeout(LIMIT).expect("a rank hangs");
    }
    let steps = tally.steps.lock().unwrap();
    assert!(
        ends_quietly(&steps),
        "{STEPS_MAX} steps and never {QUIET_STEPS} in a row without an allocation; the last: {:?}",
        &steps[STEPS_MAX - 50..]
    );
}

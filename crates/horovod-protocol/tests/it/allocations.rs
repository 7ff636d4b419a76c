//! A steady step of known requests allocates nothing: not in the worker, the coordinator or the codec.

use horovod_protocol::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts what this thread allocates.
struct Counting;

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the rules of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` is from `System.alloc` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the rules of `realloc`; `ptr` is the system's.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const GENERATION: Generation = Generation(1);

/// Two ranks; rank 1's messages are encoded and decoded.
struct Job {
    workers: [Worker; 2],
    coordinator: Coordinator,
    requests: Vec<Request>,
    bytes: Vec<u8>,
    up: ToCoordinator,
    down: ToWorker,
    entry: u64,
}

impl Job {
    /// Each step reduces so many tensors and then meets at a barrier.
    fn new(tensors: u32) -> Self {
        let worker = |rank| {
            Worker::new(WorkerConfig {
                rank: Rank(rank),
                size: 2,
                generation: GENERATION,
            })
        };
        let request = |number| Request {
            set: ProcessSetId::GLOBAL,
            name: format!("allreduce.{number}"),
            op: Op::Allreduce {
                op: ReduceOp::Sum,
                scale: Scale::NONE,
            },
            device: Device::Cpu,
            tensors: vec![
                // Two types that take turns: what fuses is not what was asked for in a row.
                TensorMeta::new(
                    [DType::F32, DType::F32, DType::F16][number as usize % 3],
                    [4, 4],
                ),
            ],
        };
        let barrier = Request {
            set: ProcessSetId::GLOBAL,
            name: "barrier.noname".to_owned(),
            op: Op::Barrier,
            device: Device::Cpu,
            tensors: Vec::new(),
        };
        Self {
            workers: [worker(0), worker(1)],
            coordinator: Coordinator::new(CoordinatorConfig::new(2, GENERATION)),
            requests: (0..tensors).map(request).chain([barrier]).collect(),
            bytes: Vec::new(),
            up: ToCoordinator::empty(),
            down: ToWorker::empty(),
            entry: 0,
        }
    }

    fn step(&mut self) {
        for rank in 0..2 {
            let worker = &mut self.workers[rank];
            for request in &self.requests {
                self.entry += 1;
                let id = EntryId(self.entry);
                worker.submit(id, request).expect("valid");
            }
            while let Some(action) = worker.poll_action() {
                let WorkerAction::Send(message) = action else {
                    panic!("nothing is decided yet")
                };
                self.bytes.clear();
                message.encode(&mut self.bytes);
                self.up.decode_from(&self.bytes).expect("our own");
                let from = Rank(rank as u32);
                self.coordinator.handle_message(Time(0), from, &self.up);
                worker.recycle_message(message);
            }
        }
        let mut ran = 0;
        while let Some(action) = self.coordinator.poll_action() {
            let CoordinatorAction::Send(_, message) = action else {
                panic!("nothing else to do")
            };
            self.bytes.clear();
            message.encode(&mut self.bytes);
            self.down.decode_from(&self.bytes).expect("our own");
            for (worker, message) in self.workers.iter_mut().zip([&message, &self.down]) {
                worker.handle_message(message);
                while let Some(action) = worker.poll_action() {
                    match action {
                        WorkerAction::Execute(execution) => {
                            ran += execution.items.len();
                            worker.recycle(execution);
                        }
                        WorkerAction::Complete(_, Ok(Completion::Done)) => ran += 1,
                        _ => panic!("nothing else to do"),
                    }
                }
            }
            self.coordinator.recycle(message);
        }
        assert_eq!(ran, 2 * self.requests.len());
    }
}

#[test]
fn a_steady_step_allocates_nothing() {
    for tensors in [0, 1, 200, 1000] {
        let mut job = Job::new(tensors);
        for _ in 0..3 {
            job.step();
        }
        let before = ALLOCATIONS.with(Cell::get);
        for _ in 0..5 {
            job.step();
        }
        let allocated = ALLOCATIONS.with(Cell::get) - before;
        assert_eq!(allocated, 0, "{tensors} tensors");
    }
}

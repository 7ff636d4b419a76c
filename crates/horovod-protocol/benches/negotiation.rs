//! One round of negotiation, and its messages: `cargo bench -p horovod-protocol`.

use divan::{Bencher, black_box};
use horovod_protocol::*;

fn main() {
    divan::main();
}

const GENERATION: Generation = Generation(1);
const TENSORS: [u32; 3] = [1, 200, 1000];

fn request(number: u32) -> Request {
    Request {
        set: ProcessSetId::GLOBAL,
        name: format!("allreduce.module.layer{}.{number}.weight", number % 17),
        op: Op::Allreduce {
            op: ReduceOp::Average,
            scale: Scale::NONE,
        },
        device: Device::Cpu,
        tensors: vec![TensorMeta::new(DType::F32, [16, 16])],
    }
}

/// A star in which every request is known. All ranks say and hear the same: one worker stands for them.
struct Job {
    ranks: u32,
    requests: Vec<Request>,
    worker: Worker,
    coordinator: Coordinator,
    entry: u64,
}

impl Job {
    fn new(tensors: u32, ranks: u32) -> Self {
        Self::of((0..tensors).map(request).collect(), ranks)
    }

    fn of(requests: Vec<Request>, ranks: u32) -> Self {
        let mut job = Self {
            ranks,
            requests,
            worker: Worker::new(WorkerConfig {
                rank: Rank(ranks - 1),
                size: ranks,
                generation: GENERATION,
            }),
            coordinator: Coordinator::new(CoordinatorConfig::new(ranks, GENERATION)),
            entry: 0,
        };
        job.round();
        job
    }

    fn round(&mut self) {
        let message = self.submit();
        let decided = self.decide(&message);
        self.worker.recycle_message(message);
        self.run(&decided);
        self.coordinator.recycle(decided);
    }

    fn submit(&mut self) -> ToCoordinator {
        for request in &self.requests {
            self.entry += 1;
            let id = EntryId(self.entry);
            self.worker.submit(id, request).expect("valid");
        }
        match self.worker.poll_action() {
            Some(WorkerAction::Send(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    fn decide(&mut self, message: &ToCoordinator) -> ToWorker {
        for rank in (0..self.ranks).map(Rank) {
            self.coordinator.handle_message(Time(0), rank, message);
        }
        match self.coordinator.poll_action() {
            Some(CoordinatorAction::Send(_, message)) => message,
            other => panic!("{other:?}"),
        }
    }

    fn run(&mut self, decided: &ToWorker) {
        self.worker.handle_message(decided);
        while let Some(action) = self.worker.poll_action() {
            match action {
                WorkerAction::Execute(execution) => self.worker.recycle(execution),
                WorkerAction::Complete(_, Ok(Completion::Done)) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// One rank's whole share of a round: submit, the coordinator's part for all ranks, apply.
#[divan::bench(args = TENSORS, consts = [2, 64, 1024])]
fn known_round<const RANKS: u32>(bencher: Bencher<'_, '_>, tensors: u32) {
    let mut job = Job::new(tensors, RANKS);
    bencher.bench_local(|| job.round());
}

/// A round that is only a barrier.
#[divan::bench(consts = [2, 64, 1024])]
fn barrier<const RANKS: u32>(bencher: Bencher<'_, '_>) {
    let barrier = Request {
        name: "barrier.noname".to_owned(),
        op: Op::Barrier,
        tensors: Vec::new(),
        ..request(0)
    };
    let mut job = Job::of(vec![barrier], RANKS);
    bencher.bench_local(|| job.round());
}

/// The parts of such a round: what a rank says,
#[divan::bench(args = TENSORS, consts = [2, 64])]
fn submitting<const RANKS: u32>(bencher: Bencher<'_, '_>, tensors: u32) {
    let job = || Job::new(tensors, RANKS);
    bencher.with_inputs(job).bench_local_refs(Job::submit);
}

/// what the coordinator makes of it,
#[divan::bench(args = TENSORS, consts = [2, 64])]
fn deciding<const RANKS: u32>(bencher: Bencher<'_, '_>, tensors: u32) {
    let message = || {
        let mut job = Job::new(tensors, RANKS);
        let message = job.submit();
        (job, message)
    };
    let bench = bencher.with_inputs(message);
    bench.bench_local_refs(|(job, message)| job.decide(message));
}

/// and what the rank does then.
#[divan::bench(args = TENSORS, consts = [2, 64])]
fn carrying_out<const RANKS: u32>(bencher: Bencher<'_, '_>, tensors: u32) {
    let decided = || {
        let mut job = Job::new(tensors, RANKS);
        let message = job.submit();
        let decided = job.decide(&message);
        (job, decided)
    };
    let bench = bencher.with_inputs(decided);
    bench.bench_local_refs(|(job, decided)| job.run(decided));
}

/// The first round, in which every request travels in full.
#[divan::bench(args = TENSORS, consts = [2, 64])]
fn first_round<const RANKS: u32>(bencher: Bencher<'_, '_>, tensors: u32) {
    bencher.bench_local(|| Job::new(tensors, RANKS));
}

fn messages(tensors: u32, known: bool) -> (ToCoordinator, ToWorker) {
    let mut job = Job::new(tensors, 2);
    if !known {
        job = Job {
            coordinator: Coordinator::new(CoordinatorConfig::new(2, GENERATION)),
            worker: Worker::new(WorkerConfig {
                rank: Rank(1),
                size: 2,
                generation: GENERATION,
            }),
            ..job
        };
    }
    let message = job.submit();
    let decided = job.decide(&message);
    (message, decided)
}

#[divan::bench(args = TENSORS, consts = [true, false])]
fn encode_up<const KNOWN: bool>(bencher: Bencher<'_, '_>, tensors: u32) {
    let (message, _) = messages(tensors, KNOWN);
    let mut out = Vec::new();
    bencher.bench_local(|| {
        out.clear();
        black_box(&message).encode(&mut out);
    });
}

#[divan::bench(args = TENSORS, consts = [true, false])]
fn decode_up<const KNOWN: bool>(bencher: Bencher<'_, '_>, tensors: u32) {
    let mut bytes = Vec::new();
    messages(tensors, KNOWN).0.encode(&mut bytes);
    let mut message = ToCoordinator::empty();
    bencher.bench_local(|| message.decode_from(black_box(&bytes)));
}

#[divan::bench(args = TENSORS, consts = [true, false])]
fn encode_down<const KNOWN: bool>(bencher: Bencher<'_, '_>, tensors: u32) {
    let (_, message) = messages(tensors, KNOWN);
    let mut out = Vec::new();
    bencher.bench_local(|| {
        out.clear();
        black_box(&message).encode(&mut out);
    });
}

#[divan::bench(args = TENSORS, consts = [true, false])]
fn decode_down<const KNOWN: bool>(bencher: Bencher<'_, '_>, tensors: u32) {
    let mut bytes = Vec::new();
    messages(tensors, KNOWN).1.encode(&mut bytes);
    let mut message = ToWorker::empty();
    bencher.bench_local(|| message.decode_from(black_box(&bytes)));
}

//! Times one step of known tensors through worker and coordinator, messages encoded and decoded:
//! `cargo run --release -p horovod-protocol --example steady_state [tensors] [ranks]`.
#![expect(clippy::print_stdout, reason = "printing is what it is for")]

use horovod_protocol::*;
use std::time::{Duration, Instant};

const STEPS: usize = 200;
const GENERATION: Generation = Generation(1);

fn main() {
    let mut args = std::env::args()
        .skip(1)
        .filter_map(|arg| arg.parse::<u32>().ok());
    let tensors = args.next().unwrap_or(1000);
    let ranks = args.next().unwrap_or(2).max(1);
    let mut config = CoordinatorConfig::new(ranks, GENERATION);
    config.cache_capacity = tensors as usize;
    let mut coordinator = Coordinator::new(config);
    let worker = |rank| WorkerConfig {
        rank: Rank(rank),
        size: ranks,
        generation: GENERATION,
    };
    let mut workers: Vec<Worker> = (0..ranks).map(|rank| Worker::new(worker(rank))).collect();

    let requests: Vec<Request> = (0..tensors).map(request).collect();
    let mut steps: Vec<[Duration; 3]> = Vec::new();
    let mut bytes = [0; 2];
    for step in 0..STEPS {
        let mut spent = [Duration::ZERO; 3];
        bytes = [0; 2];
        for (rank, worker) in (0..).map(Rank).zip(&mut workers) {
            let start = Instant::now();
            for (id, request) in requests.iter().enumerate() {
                worker
                    .submit(Time(step as u64), EntryId(id as u64), request)
                    .expect("valid");
            }
            let mut messages = Vec::new();
            while let Some(action) = worker.poll_action() {
                if let WorkerAction::Send(message) = action {
                    let mut encoded = Vec::new();
                    message.encode(&mut encoded);
                    messages.push(encoded);
                }
            }
            spent[0] += start.elapsed();
            let start = Instant::now();
            for encoded in messages {
                bytes[0] += encoded.len();
                let message = ToCoordinator::decode(&encoded).expect("our own");
                coordinator.handle_message(Time(step as u64), rank, &message);
            }
            spent[1] += start.elapsed();
        }
        let start = Instant::now();
        let mut messages = Vec::new();
        while let Some(action) = coordinator.poll_action() {
            if let CoordinatorAction::Send(to, message) = action {
                let mut encoded = Vec::new();
                message.encode(&mut encoded);
                messages.extend(to.iter().map(|rank| (*rank, encoded.clone())));
            }
        }
        spent[1] += start.elapsed();
        let start = Instant::now();
        for (rank, encoded) in messages {
            bytes[1] += encoded.len();
            let message = ToWorker::decode(&encoded).expect("our own");
            let worker = &mut workers[rank.index()];
            worker.handle_message(Time(step as u64), &message);
            while let Some(action) = worker.poll_action() {
                assert!(matches!(action, WorkerAction::Execute(_)), "{action:?}");
            }
        }
        spent[2] += start.elapsed();
        steps.push(spent);
    }
    let median = |part: usize| {
        let mut times: Vec<Duration> = steps.iter().map(|step| step[part] / ranks).collect();
        times.sort_unstable();
        times[times.len() / 2]
    };
    println!("{tensors} known tensors, {ranks} ranks, median of {STEPS} steps, per rank:");
    println!(
        "  submit and send      {:>10.1?}  ({} bytes)",
        median(0),
        bytes[0] / ranks as usize
    );
    println!(
        "  coordinator's share  {:>10.1?}  ({} bytes)",
        median(1),
        bytes[1] / ranks as usize
    );
    println!("  receive and execute  {:>10.1?}", median(2));
}

fn request(number: u32) -> Request {
    Request {
        set: ProcessSetId::GLOBAL,
        name: format!("allreduce.module.layer{}.{number}.weight", number % 17),
        op: Op::Allreduce {
            op: ReduceOp::Average,
            scale: Scale::NONE,
        },
        device: Device::Cpu,
        tensors: vec![TensorMeta {
            dtype: DType::F32,
            shape: vec![16, 16],
        }],
    }
}

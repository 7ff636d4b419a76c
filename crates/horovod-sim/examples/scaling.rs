//! Cost of negotiation per step as the job grows: the real coordinator and aggregators of 2 to 16,384 ranks, in a star
//! and in a tree, and a cost model of the links between them.
//!
//! `cargo run --release -p horovod-sim --example scaling [tensors]` prints one JSON object a line; docs/scaling.md
//! defines the columns and lists the assumptions. One real worker represents all workers, which in a steady step send
//! and receive the same messages.
#![expect(clippy::print_stdout, reason = "printing is what it is for")]

use horovod_protocol::*;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const GENERATION: Generation = Generation(1);
const STEPS: usize = 15;
const RANKS_PER_HOST: u32 = 8;

/// The model of a link and of what a message costs the processor at either end, besides what is
/// measured here. Not measured; typical of a data centre's Ethernet and of a ring in shared memory.
mod model {
    /// From send to receive between hosts: kernel, network card, one switch, kernel, wake-up.
    pub(super) const HOST_TO_HOST_NS: f64 = 30_000.0;
    /// The same inside a host: a store, a wake-up.
    pub(super) const INSIDE_HOST_NS: f64 = 5_000.0;
    /// Nanoseconds per byte: 10 Gbit/s between hosts, 5 GB/s inside.
    pub(super) const HOST_TO_HOST_NS_PER_BYTE: f64 = 0.8;
    pub(super) const INSIDE_HOST_NS_PER_BYTE: f64 = 0.2;
    /// Processor time of sending or receiving one message: a system call and its share of TCP.
    pub(super) const MESSAGE_NS: f64 = 2_000.0;
}

fn main() {
    let tensors = std::env::args()
        .nth(1)
        .and_then(|arg| arg.parse().ok())
        .unwrap_or(200);
    for exponent in 1..=14 {
        let ranks = 1u32 << exponent;
        for (layout, fan_out) in [("star", u32::MAX), ("tree", 8), ("tree", 16), ("tree", 32)] {
            let hosts: Vec<u32> = (0..ranks).map(|rank| rank / RANKS_PER_HOST).collect();
            let tree = Tree::new(&hosts, fan_out);
            if layout == "tree" && tree == Tree::star(ranks) {
                // No extra hop where none is needed.
                continue;
            }
            let mut job = Job::new(tree, hosts, tensors);
            let first = job.step();
            job.samples.clear();
            for _ in 0..STEPS {
                job.step();
            }
            job.use_medians = true;
            let known = job.step();
            print_line(layout, fan_out, tensors, &job, &first, &known);
        }
    }
}

/// One node of the tree below rank 0.
struct Node {
    rank: Rank,
    depth: usize,
    aggregator: Aggregator,
}

struct Job {
    tree: Tree,
    hosts: Vec<u32>,
    tensors: u32,
    coordinator: Coordinator,
    /// By depth, deepest first.
    nodes: Vec<Node>,
    worker: Worker,
    entry: u64,
    /// Nanoseconds that each node took, on the way up and down: one of each per step.
    samples: BTreeMap<(Rank, bool), Vec<f64>>,
    /// Take the medians of these, because among thousands of nodes one is always interrupted.
    use_medians: bool,
}

/// Cost of one step.
#[derive(Default)]
struct StepCost {
    root_in: Traffic,
    root_out: Traffic,
    all: Traffic,
    root_cpu_ns: f64,
    /// The busiest aggregator's, on its way up or down.
    aggregator_cpu_ns: f64,
    latency_ns: f64,
}

#[derive(Clone, Copy, Default)]
struct Traffic {
    messages: u64,
    bytes: u64,
}

impl Traffic {
    fn add(&mut self, messages: u64, bytes: usize) {
        self.messages += messages;
        self.bytes += messages * bytes as u64;
    }
}

impl Job {
    fn new(tree: Tree, hosts: Vec<u32>, tensors: u32) -> Self {
        let size = tree.size();
        let mut nodes: Vec<Node> = (1..size)
            .map(Rank)
            .filter_map(|rank| {
                let config = AggregatorConfig {
                    rank,
                    generation: GENERATION,
                    hold_ns: u64::MAX,
                };
                let aggregator = Aggregator::new(config, &tree)?;
                let depth = std::iter::successors(Some(rank), |r| tree.parent(*r)).count() - 1;
                Some(Node {
                    rank,
                    depth,
                    aggregator,
                })
            })
            .collect();
        nodes.sort_by_key(|node| std::cmp::Reverse(node.depth));
        let config = CoordinatorConfig::new(size, GENERATION);
        Self {
            coordinator: Coordinator::with_tree(config, &tree),
            worker: Worker::new(WorkerConfig {
                rank: Rank(size - 1),
                size,
                generation: GENERATION,
            }),
            entry: 0,
            samples: BTreeMap::new(),
            use_medians: false,
            tree,
            hosts,
            tensors,
            nodes,
        }
    }

    /// Every rank asks for every gradient and is told to run them.
    fn step(&mut self) -> StepCost {
        let mut step = StepCost::default();
        for number in 0..self.tensors {
            self.entry += 1;
            let id = EntryId(self.entry);
            self.worker.submit(id, &gradient(number)).expect("valid");
        }
        let mut messages = Vec::new();
        while let Some(action) = self.worker.poll_action() {
            if let WorkerAction::Send(message) = action {
                messages.push(encoded(|out| message.encode(out)));
            }
        }
        let decided = self.up(&messages, &mut step);
        self.down(&decided, &mut step);
        for bytes in &decided {
            let message = ToWorker::decode(bytes).expect("our own");
            self.worker.handle_message(&message);
        }
        let mut ran = 0;
        while let Some(action) = self.worker.poll_action() {
            if let WorkerAction::Execute(execution) = action {
                ran += execution.items.len();
            }
        }
        assert_eq!(ran as u32, self.tensors, "every gradient ran");
        step
    }

    /// From the workers to the coordinator's decision, which is the same for all.
    fn up(&mut self, messages: &[Vec<u8>], step: &mut StepCost) -> Vec<Vec<u8>> {
        // Messages that a node sends up and their time, by rank.
        let mut sent: BTreeMap<Rank, (Vec<Vec<u8>>, f64)> = BTreeMap::new();
        for node in &mut self.nodes {
            let (inbox, ready) = inbox(&self.tree, &self.hosts, node.rank, &sent, messages, step);
            let start = Instant::now();
            for (from, bytes) in &inbox {
                let message = ToCoordinator::decode(bytes).expect("our own");
                node.aggregator.handle_up(Time(0), *from, &message);
            }
            let mut out = Vec::new();
            while let Some(action) = node.aggregator.poll_action() {
                match action {
                    AggregatorAction::Up(message) => out.push(encoded(|o| message.encode(o))),
                    other => panic!("{other:?}"),
                }
            }
            let cpu = start.elapsed();
            let cpu = usual(&mut self.samples, self.use_medians, (node.rank, true), cpu);
            step.aggregator_cpu_ns = step.aggregator_cpu_ns.max(cpu);
            let at = ready + cpu + model::MESSAGE_NS * out.len() as f64;
            sent.insert(node.rank, (out, at));
        }
        let before = step.all;
        let (inbox, ready) = inbox(&self.tree, &self.hosts, Rank(0), &sent, messages, step);
        step.root_in = Traffic {
            messages: step.all.messages - before.messages,
            bytes: step.all.bytes - before.bytes,
        };
        let start = Instant::now();
        for (from, bytes) in &inbox {
            let message = ToCoordinator::decode(bytes).expect("our own");
            self.coordinator.handle_message(Time(0), *from, &message);
        }
        let mut decided = Vec::new();
        while let Some(action) = self.coordinator.poll_action() {
            if let CoordinatorAction::Send(to, message) = action {
                assert_eq!(to.len(), 1 + self.tree.children(Rank(0)).len());
                decided.push(encoded(|out| message.encode(out)));
            }
        }
        let cpu = start.elapsed();
        step.root_cpu_ns = usual(&mut self.samples, self.use_medians, (Rank(0), true), cpu);
        step.latency_ns = ready + step.root_cpu_ns;
        decided
    }

    /// From the decision to the last worker.
    fn down(&mut self, decided: &[Vec<u8>], step: &mut StepCost) {
        let mut done: BTreeMap<Rank, f64> = BTreeMap::new();
        let mut latest = 0f64;
        let mut send = |rank: Rank, children: &[Rank], at: f64, step: &mut StepCost| {
            let mut at = at;
            let mut received = Vec::new();
            for child in children {
                for bytes in decided {
                    at += model::MESSAGE_NS;
                    step.all.add(1, bytes.len());
                }
                let bytes = decided.iter().map(Vec::len).sum();
                received.push((*child, at + travel(&self.hosts, rank, *child, bytes)));
            }
            for (child, at) in received {
                latest = latest.max(at + model::MESSAGE_NS);
                done.insert(child, at + model::MESSAGE_NS);
            }
        };
        let before = step.all;
        send(Rank(0), self.tree.children(Rank(0)), step.latency_ns, step);
        step.root_out = Traffic {
            messages: step.all.messages - before.messages,
            bytes: step.all.bytes - before.bytes,
        };
        let mut times = Vec::new();
        for node in self.nodes.iter_mut().rev() {
            let start = Instant::now();
            for bytes in decided {
                let message = ToWorker::decode(bytes).expect("our own");
                node.aggregator.handle_down(Time(0), &message);
            }
            while let Some(action) = node.aggregator.poll_action() {
                match action {
                    AggregatorAction::Down(to, message) => {
                        assert_eq!(to.len(), 1 + self.tree.children(node.rank).len());
                        let passed_on = encoded(|out| message.encode(out));
                        assert!(decided.contains(&passed_on), "all hear the same");
                    }
                    other => panic!("{other:?}"),
                }
            }
            times.push((node.rank, start.elapsed()));
        }
        for (rank, cpu) in times {
            let cpu = usual(&mut self.samples, self.use_medians, (rank, false), cpu);
            step.aggregator_cpu_ns = step.aggregator_cpu_ns.max(cpu);
            let mut at = done[&rank] + cpu;
            for child in self.tree.children(rank) {
                for bytes in decided {
                    at += model::MESSAGE_NS;
                    step.all.add(1, bytes.len());
                }
                let bytes = decided.iter().map(Vec::len).sum();
                let received = at + travel(&self.hosts, rank, *child, bytes) + model::MESSAGE_NS;
                latest = latest.max(received);
                done.insert(*child, received);
            }
        }
        step.latency_ns = latest;
    }
}

/// Messages to a node from its own worker and its children, and the time when it has received all of them.
fn inbox(
    tree: &Tree,
    hosts: &[u32],
    node: Rank,
    sent: &BTreeMap<Rank, (Vec<Vec<u8>>, f64)>,
    messages: &[Vec<u8>],
    step: &mut StepCost,
) -> (Vec<(Rank, Vec<u8>)>, f64) {
    let mut inbox: Vec<(Rank, Vec<u8>)> =
        messages.iter().map(|bytes| (node, bytes.clone())).collect();
    let (mut latest, mut busy) = (0f64, 0f64);
    for child in tree.children(node) {
        let (messages, at) = match sent.get(child) {
            Some((messages, at)) => (&messages[..], *at),
            None => (messages, model::MESSAGE_NS),
        };
        let bytes = messages.iter().map(Vec::len).sum();
        latest = latest.max(at + travel(hosts, *child, node, bytes));
        for bytes in messages {
            busy += model::MESSAGE_NS;
            step.all.add(1, bytes.len());
            inbox.push((*child, bytes.clone()));
        }
    }
    // All arrive at about the same time; then they are received one after the other.
    (inbox, latest + busy)
}

fn travel(hosts: &[u32], from: Rank, to: Rank, bytes: usize) -> f64 {
    if hosts[from.index()] == hosts[to.index()] {
        model::INSIDE_HOST_NS + bytes as f64 * model::INSIDE_HOST_NS_PER_BYTE
    } else {
        model::HOST_TO_HOST_NS + bytes as f64 * model::HOST_TO_HOST_NS_PER_BYTE
    }
}

fn encoded(encode: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    encode(&mut out);
    out
}

/// Notes what a node took; returns that, or its median so far.
fn usual(
    samples: &mut BTreeMap<(Rank, bool), Vec<f64>>,
    median: bool,
    node: (Rank, bool),
    took: Duration,
) -> f64 {
    let took = took.as_nanos() as f64;
    let all = samples.entry(node).or_default();
    all.push(took);
    if !median {
        return took;
    }
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn print_line(
    layout: &str,
    fan_out: u32,
    tensors: u32,
    job: &Job,
    first: &StepCost,
    known: &StepCost,
) {
    let (fan_out, variant) = match layout {
        "star" => (0, "star".to_owned()),
        _ => (fan_out, format!("tree, {fan_out} each")),
    };
    println!(
        "{{\"ranks\": {}, \"variant\": \"{variant}\", \"layout\": \"{layout}\", \"fan_out\": {fan_out}, \"tensors\": {tensors}, \
         \"ranks_per_host\": {RANKS_PER_HOST}, \"aggregators\": {}, \"depth\": {}, \
         \"root_messages_in\": {}, \"root_messages_out\": {}, \"root_bytes_in\": {}, \
         \"root_bytes_out\": {}, \"total_messages\": {}, \"total_bytes\": {}, \"root_cpu_us\": {:.2}, \
         \"aggregator_cpu_us\": {:.2}, \"modelled_step_us\": {:.1}, \"first_root_cpu_us\": {:.1}, \
         \"first_root_bytes_in\": {}, \"first_total_bytes\": {}}}",
        job.tree.size(),
        job.nodes.len(),
        1 + job.nodes.first().map_or(0, |node| node.depth),
        known.root_in.messages,
        known.root_out.messages,
        known.root_in.bytes,
        known.root_out.bytes,
        known.all.messages,
        known.all.bytes,
        known.root_cpu_ns / 1e3,
        known.aggregator_cpu_ns / 1e3,
        known.latency_ns / 1e3,
        first.root_cpu_ns / 1e3,
        first.root_in.bytes,
        first.all.bytes,
    );
}

fn gradient(number: u32) -> Request {
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

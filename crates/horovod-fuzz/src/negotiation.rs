//! Whole jobs of the negotiation: what the ranks ask for, in which order their messages arrive, and what happens
//! when one of them says what it never should.
//!
//! Always: nothing panics, no submission ends twice, numbers of executions grow. While all ranks are honest: nobody is
//! accused, the ranks run the same things, and every submission has an end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use arbitrary::{Arbitrary, Unstructured};
use horovod_protocol::{
    Aggregator, AggregatorAction, AggregatorConfig, Coordinator, CoordinatorAction,
    CoordinatorConfig, DType, Device, EntryId, Execution, Generation, LossCause, MemoryOrder, Op,
    PeerLost, ProcessSetId, Rank, ReduceOp, Request, Scale, Seq, StallConfig, TensorMeta, Time,
    ToCoordinator, ToWorker, Tree, Worker, WorkerAction, WorkerConfig,
};

const GENERATION: Generation = Generation(7);
/// Steps of one run: enough to fill and empty a cache.
const STEPS_MAX: usize = 400;
/// Messages until the job must have come to rest.
const DELIVERIES_MAX: usize = 100_000;
const MS: u64 = 1_000_000;

#[derive(Debug, Arbitrary)]
struct Setup {
    size: u8,
    hosts: [u8; 8],
    fan_out: u8,
    cache: u8,
    threshold: u16,
    delay_ms: u8,
    no_group_fusion: bool,
    stall: Option<bool>,
}

#[derive(Debug, Arbitrary)]
enum FuzzStep {
    Submit(u8, Wanted),
    /// Every rank asks for the same.
    All(Wanted),
    Deliver(u8),
    DeliverAll,
    Pass(u16),
    Tune(u8),
    Threshold(u16),
    Shutdown(u8),
    Die(u8),
    /// The message that a link delivers next comes twice.
    Twice(u8),
    /// A rank says this to the one it speaks through.
    Up(u8, Vec<u8>),
    /// The coordinator, or an aggregator, says this to a rank.
    Down(u8, u8, Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct Wanted {
    name: u8,
    set: u8,
    what: u8,
    detail: u8,
    shape: u8,
    tensors: u8,
}

impl Wanted {
    fn request(&self) -> Request {
        let detail = self.detail;
        let reduction = ReduceOp::from_code(detail % 6).unwrap_or(ReduceOp::Sum);
        let scale = Scale {
            pre: f64::from(detail / 128 + 1),
            post: 1.0,
        };
        let mut tensors = usize::from(self.tensors % 3 + 1);
        let op = match self.what % 11 {
            0..=2 => Op::Allreduce {
                op: reduction,
                scale,
            },
            3 | 4 => Op::Allgather,
            5 => Op::Broadcast {
                root: Rank(u32::from(detail % 8)),
            },
            6 => Op::Alltoall,
            7 => Op::Reducescatter {
                op: reduction,
                scale,
            },
            8 if detail < 128 => Op::Barrier,
            8 => Op::Join,
            9 => Op::AddProcessSet {
                ranks: (0..8)
                    .filter(|bit| detail >> bit & 1 == 1)
                    .map(Rank)
                    .collect(),
            },
            _ => Op::RemoveProcessSet {
                set: ProcessSetId(u32::from(detail % 4)),
            },
        };
        if self.what % 11 >= 8 {
            tensors = 0;
        }
        let dtype = DType::ALL[usize::from(self.shape % 13)];
        let shape = [u64::from(self.shape / 13), u64::from(detail / 32)];
        let order =
            if matches!(op, Op::Allreduce { .. } | Op::Broadcast { .. }) && self.tensors >= 128 {
                MemoryOrder::of(&shape, &[1, shape[0] as i64]).unwrap_or_default()
            } else {
                MemoryOrder::ROW_MAJOR
            };
        let tensor = TensorMeta::new(dtype, shape).in_order(order);
        Request {
            set: ProcessSetId(u32::from(self.set % 4)),
            name: format!("t{}", self.name % 12),
            op,
            device: Device::Cpu,
            tensors: vec![tensor; tensors],
        }
    }
}

struct Node {
    worker: Worker,
    aggregator: Option<Aggregator>,
    alive: bool,
    over: bool,
    open: BTreeSet<EntryId>,
    last: Option<Seq>,
}

/// Down or up, from, to.
type Link = (bool, Rank, Rank);
/// Values that must be equal on every member of an execution.
type Common = (ProcessSetId, Vec<Rank>, Op, u32, Vec<String>);

struct Job {
    tree: Tree,
    now: u64,
    nodes: Vec<Node>,
    coordinator: Coordinator,
    links: BTreeMap<Link, VecDeque<Vec<u8>>>,
    ran: BTreeMap<Seq, Common>,
    entries: u64,
    honest: bool,
}

/// A job, as a fuzzer's bytes describe it.
pub(crate) fn steps(bytes: &[u8]) {
    let mut input = Unstructured::new(bytes);
    let Ok(setup) = Setup::arbitrary(&mut input) else {
        return;
    };
    let mut job = Job::new(&setup);
    for _ in 0..STEPS_MAX {
        if input.is_empty() {
            break;
        }
        let Ok(step) = FuzzStep::arbitrary(&mut input) else {
            break;
        };
        job.step(step);
    }
    job.finish();
}

impl Job {
    fn new(setup: &Setup) -> Self {
        let size = u32::from(setup.size % 8) + 1;
        let hosts: Vec<u32> = setup.hosts[..size as usize]
            .iter()
            .map(|host| u32::from(host % 4))
            .collect();
        let tree = Tree::new(&hosts, u32::from(setup.fan_out % 4));
        let mut config = CoordinatorConfig::new(size, GENERATION);
        config.fusion_threshold_bytes = u64::from(setup.threshold);
        config.cache_capacity = usize::from(setup.cache % 9);
        config.batch_delay_ns = u64::from(setup.delay_ms % 4) * MS;
        config.disable_group_fusion = setup.no_group_fusion;
        config.stall = setup.stall.map(|shutdown| StallConfig {
            warning_ns: 1000 * MS,
            shutdown_ns: shutdown.then_some(3000 * MS),
        });
        let node = |rank| Node {
            worker: Worker::new(WorkerConfig {
                rank,
                size,
                generation: GENERATION,
            }),
            aggregator: Aggregator::new(
                AggregatorConfig {
                    rank,
                    generation: GENERATION,
                    hold_ns: 100 * MS,
                },
                &tree,
            ),
            alive: true,
            over: false,
            open: BTreeSet::new(),
            last: None,
        };
        Self {
            now: 0,
            nodes: (0..size).map(Rank).map(node).collect(),
            coordinator: Coordinator::with_tree(config, &tree),
            tree,
            links: BTreeMap::new(),
            ran: BTreeMap::new(),
            entries: 0,
            honest: true,
        }
    }

    fn rank(&self, number: u8) -> Rank {
        Rank(u32::from(number) % self.nodes.len() as u32)
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.nodes.len() as u32).map(Rank)
    }

    fn step(&mut self, step: FuzzStep) {
        match step {
            FuzzStep::Submit(rank, wanted) => self.submit(self.rank(rank), &wanted.request()),
            FuzzStep::All(wanted) => {
                let request = wanted.request();
                self.ranks().for_each(|rank| self.submit(rank, &request));
            }
            FuzzStep::Deliver(which) => self.deliver_one(usize::from(which)),
            FuzzStep::DeliverAll => self.deliver_all(),
            FuzzStep::Pass(ms) => self.pass(u64::from(ms) * MS),
            FuzzStep::Tune(value) => {
                self.coordinator
                    .announce_tuning(&vec![u64::from(value); usize::from(value) % 65]);
                self.drain_coordinator();
            }
            FuzzStep::Threshold(bytes) => self.coordinator.set_fusion_threshold(u64::from(bytes)),
            FuzzStep::Shutdown(rank) => self.shut_down(self.rank(rank)),
            FuzzStep::Die(rank) => self.die(self.rank(rank)),
            FuzzStep::Twice(which) => {
                self.honest = false;
                let nth = self.waiting(usize::from(which));
                if let Some(queue) = nth.and_then(|link| self.links.get_mut(&link))
                    && let Some(message) = queue.front().cloned()
                {
                    queue.push_front(message);
                }
                self.deliver_one(usize::from(which));
            }
            FuzzStep::Up(from, bytes) => {
                self.honest = false;
                let from = self.rank(from);
                let to = self.above(from);
                if let Ok(mut message) = ToCoordinator::decode(&bytes) {
                    message.generation = GENERATION;
                    self.arrive_up(from, to, &message);
                }
            }
            FuzzStep::Down(from, to, bytes) => {
                self.honest = false;
                let (from, to) = (self.rank(from), self.rank(to));
                if let Ok(mut message) = ToWorker::decode(&bytes) {
                    message.generation = GENERATION;
                    self.arrive_down(from, to, &message);
                }
            }
        }
    }

    fn submit(&mut self, rank: Rank, request: &Request) {
        let node = &mut self.nodes[rank.index()];
        if !node.alive || node.over {
            return;
        }
        let entry = EntryId(self.entries);
        self.entries += 1;
        if node.worker.submit(entry, request).is_ok() {
            node.open.insert(entry);
        }
        self.drain_worker(rank);
    }

    fn shut_down(&mut self, rank: Rank) {
        let node = &mut self.nodes[rank.index()];
        if node.alive && !node.over {
            node.worker.shutdown();
            self.drain_worker(rank);
        }
    }

    /// Its neighbours in the tree notice, and rank 0; the others are told.
    fn die(&mut self, dead: Rank) {
        if !self.nodes[dead.index()].alive {
            return;
        }
        self.nodes[dead.index()].alive = false;
        let lost = PeerLost {
            rank: dead,
            host: "h".into(),
            cause: LossCause::Ended("killed by signal 9".into()),
        };
        for rank in self.ranks() {
            let linked =
                self.tree.parent(rank) == Some(dead) || self.tree.parent(dead) == Some(rank);
            if !self.nodes[rank.index()].alive || !(linked || rank == Rank(0) || dead == Rank(0)) {
                continue;
            }
            let now = Time(self.now);
            if rank == Rank(0) {
                self.coordinator.handle_peer_lost(now, lost.clone());
                self.drain_coordinator();
            }
            if let Some(aggregator) = &mut self.nodes[rank.index()].aggregator {
                aggregator.handle_peer_lost(now, &lost);
                self.drain_aggregator(rank);
            }
            self.nodes[rank.index()]
                .worker
                .handle_peer_lost(lost.clone());
            self.drain_worker(rank);
        }
    }

    fn pass(&mut self, ns: u64) {
        self.now += ns;
        self.ring();
    }

    /// Calls whoever wanted to be called by now.
    fn ring(&mut self) {
        let now = Time(self.now);
        if self.nodes[0].alive && self.coordinator.next_deadline().is_some_and(|at| at <= now) {
            self.coordinator.handle_timeout(now);
            self.drain_coordinator();
        }
        for rank in self.ranks() {
            let node = &mut self.nodes[rank.index()];
            if let Some(aggregator) = node.aggregator.as_mut().filter(|_| node.alive)
                && aggregator.next_deadline().is_some_and(|at| at <= now)
            {
                aggregator.handle_timeout(now);
                self.drain_aggregator(rank);
            }
        }
    }

    fn next_deadline(&self) -> Option<Time> {
        let root = self
            .coordinator
            .next_deadline()
            .filter(|_| self.nodes[0].alive);
        let others = self.nodes.iter().filter(|node| node.alive);
        others
            .filter_map(|node| node.aggregator.as_ref()?.next_deadline())
            .chain(root)
            .min()
    }

    /// The `nth` link, wrapped, that has something to deliver.
    fn waiting(&self, nth: usize) -> Option<Link> {
        let links = self.links.iter().filter(|(_, queue)| !queue.is_empty());
        let links: Vec<Link> = links.map(|(link, _)| *link).collect();
        (!links.is_empty()).then(|| links[nth % links.len()])
    }

    fn deliver_one(&mut self, nth: usize) {
        let Some(link) = self.waiting(nth) else {
            return;
        };
        let Some(bytes) = self.links.get_mut(&link).and_then(VecDeque::pop_front) else {
            return;
        };
        let (down, from, to) = link;
        if down {
            let message = ToWorker::decode(&bytes).expect("written by a state machine");
            self.arrive_down(from, to, &message);
        } else {
            let message = ToCoordinator::decode(&bytes).expect("written by a state machine");
            self.arrive_up(from, to, &message);
        }
    }

    fn deliver_all(&mut self) {
        for _ in 0..DELIVERIES_MAX {
            if self.waiting(0).is_none() {
                return;
            }
            self.deliver_one(0);
        }
        panic!("messages without end");
    }

    /// Whom a rank's worker speaks to.
    fn above(&self, rank: Rank) -> Rank {
        match self.tree.parent(rank) {
            Some(parent) if self.nodes[rank.index()].aggregator.is_none() => parent,
            _ => rank,
        }
    }

    fn arrive_up(&mut self, from: Rank, to: Rank, message: &ToCoordinator) {
        let node = &mut self.nodes[to.index()];
        if !node.alive {
            return;
        }
        if let Some(aggregator) = &mut node.aggregator {
            aggregator.handle_up(Time(self.now), from, message);
            self.drain_aggregator(to);
        } else if to == Rank(0) {
            self.coordinator
                .handle_message(Time(self.now), from, message);
            self.drain_coordinator();
        }
    }

    fn arrive_down(&mut self, from: Rank, to: Rank, message: &ToWorker) {
        let node = &mut self.nodes[to.index()];
        if !node.alive {
            return;
        }
        match node.aggregator.as_mut().filter(|_| from != to) {
            Some(aggregator) => {
                aggregator.handle_down(Time(self.now), message);
                self.drain_aggregator(to);
            }
            None => {
                node.worker.handle_message(message);
                self.drain_worker(to);
            }
        }
    }

    fn send_up(&mut self, from: Rank, to: Rank, message: &ToCoordinator) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        let link = self.links.entry((false, from, to)).or_default();
        link.push_back(bytes);
    }

    fn send_down(&mut self, from: Rank, to: &[Rank], message: &ToWorker) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        for to in to {
            let link = self.links.entry((true, from, *to)).or_default();
            link.push_back(bytes.clone());
        }
    }

    fn drain_coordinator(&mut self) {
        while let Some(action) = self.coordinator.poll_action() {
            match action {
                CoordinatorAction::Send(to, message) => self.send_down(Rank(0), &to, &message),
                CoordinatorAction::Stall(report) => assert!(!report.to_string().is_empty()),
                CoordinatorAction::CacheEvicts(_) => {}
                CoordinatorAction::Abort(lost) => assert!(!self.honest, "{lost}"),
            }
        }
    }

    fn drain_aggregator(&mut self, rank: Rank) {
        while let Some(aggregator) = &mut self.nodes[rank.index()].aggregator
            && let Some(action) = aggregator.poll_action()
        {
            match action {
                AggregatorAction::Up(message) => {
                    let parent = self.tree.parent(rank).expect("rank 0 has no aggregator");
                    self.send_up(rank, parent, &message);
                }
                AggregatorAction::Down(to, message) => self.send_down(rank, &to, &message),
                AggregatorAction::Abort(lost) => assert!(!self.honest, "{lost}"),
            }
        }
    }

    fn drain_worker(&mut self, rank: Rank) {
        while let Some(action) = self.nodes[rank.index()].worker.poll_action() {
            match action {
                WorkerAction::Send(message) => self.send_up(rank, self.above(rank), &message),
                WorkerAction::Execute(execution) => self.executed(rank, &execution),
                WorkerAction::Tuned { seq, .. } => self.ordered(rank, seq),
                WorkerAction::SetRemoved(_) => {}
                WorkerAction::Complete(entry, _) => self.ended(rank, entry),
                WorkerAction::ShutDown { .. } => self.nodes[rank.index()].over = true,
                WorkerAction::Abort(lost) => {
                    let accused = matches!(lost.cause, LossCause::BrokeProtocol(_));
                    assert!(!(self.honest && accused), "{lost}");
                    self.nodes[rank.index()].over = true;
                }
            }
        }
    }

    fn ordered(&mut self, rank: Rank, seq: Seq) {
        let before = self.nodes[rank.index()].last.replace(seq);
        assert!(before < Some(seq), "{rank}: {seq:?} after {before:?}");
    }

    fn ended(&mut self, rank: Rank, entry: EntryId) {
        let was_open = self.nodes[rank.index()].open.remove(&entry);
        assert!(was_open, "{rank} ended {entry:?} twice or unasked");
    }

    fn executed(&mut self, rank: Rank, execution: &Execution) {
        self.ordered(rank, execution.seq);
        for entry in execution.items.iter().filter_map(|item| item.entry) {
            self.ended(rank, entry);
        }
        if !self.honest {
            return;
        }
        assert!(execution.members.contains(&rank));
        let common = (
            execution.set,
            execution.members.to_vec(),
            execution.op.clone(),
            execution.contributors,
            execution.items.iter().map(|i| i.name.to_string()).collect(),
        );
        let first = self
            .ran
            .entry(execution.seq)
            .or_insert_with(|| common.clone());
        assert_eq!(*first, common, "{rank} runs something else");
    }

    fn finish(mut self) {
        self.deliver_all();
        self.ranks().for_each(|rank| self.shut_down(rank));
        self.deliver_all();
        // Deliver the messages that were held back for a while.
        for _ in 0..1000 {
            if self
                .nodes
                .iter()
                .filter(|node| node.alive)
                .all(|node| node.over)
            {
                break;
            }
            let Some(at) = self.next_deadline() else {
                break;
            };
            self.now = self.now.max(at.0);
            self.ring();
            self.deliver_all();
        }
        if !self.honest {
            return;
        }
        for (rank, node) in self.nodes.iter().enumerate().filter(|(_, n)| n.alive) {
            assert!(node.over, "rank {rank} waits for ever");
            assert!(
                node.open.is_empty(),
                "rank {rank} never ended {:?}",
                node.open
            );
        }
    }
}

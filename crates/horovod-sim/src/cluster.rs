//! The simulated cluster that runs a plan: real state machines, ordered links with random delays, a virtual clock.

use crate::plan::{Delays, Ending, SimulationPlan};
use crate::rng::Rng;
use crate::trace::{Digest, End, Event, Trace};
use horovod_protocol::{
    Aggregator, AggregatorAction, AggregatorConfig, Coordinator, CoordinatorAction, EntryId,
    LossCause, OperationTag, PeerLost, Rank, Submission, Time, ToCoordinator, ToWorker, Tree,
    Worker, WorkerAction, WorkerConfig,
};
use std::collections::BTreeMap;

/// A run that takes longer than this (virtual nanoseconds) hangs.
const TIME_MAX: u64 = 1 << 40;

/// Runs `plan` in a star; `rng` decides delays and interleavings.
pub fn run_plan(plan: &SimulationPlan, rng: &mut Rng) -> Trace {
    run_plan_in(plan, &Tree::star(plan.size), rng)
}

/// Runs `plan` with these control links.
pub fn run_plan_in(plan: &SimulationPlan, tree: &Tree, rng: &mut Rng) -> Trace {
    let mut cluster = Cluster::new(plan, tree, rng);
    cluster.run();
    cluster.trace
}

enum Happening {
    Step(Rank),
    Up {
        to: Rank,
        from: Rank,
        bytes: Vec<u8>,
    },
    Down {
        to: Rank,
        from: Rank,
        bytes: Vec<u8>,
    },
    PollCoordinator,
    PollAggregator(Rank),
    Timer,
    AggregatorTimer(Rank),
    Kill(Rank),
    Tune(u64),
    Learns(Rank, PeerLost),
}

struct Node {
    worker: Worker,
    aggregator: Option<Aggregator>,
    timer_at: Option<u64>,
    alive: bool,
    over: bool,
    stopping: bool,
    phase: usize,
    step: usize,
    open: BTreeMap<EntryId, Option<OperationTag>>,
    next_entry: u64,
}

struct Cluster<'a> {
    plan: &'a SimulationPlan,
    tree: &'a Tree,
    /// When the last message on a link arrives, by direction, sender and receiver.
    link_at: BTreeMap<(bool, Rank, Rank), u64>,
    rng: &'a mut Rng,
    now: u64,
    count: u64,
    queue: BTreeMap<(u64, u64), Happening>,
    nodes: Vec<Node>,
    coordinator: Coordinator,
    timer_at: Option<u64>,
    trace: Trace,
}

impl<'a> Cluster<'a> {
    fn new(plan: &'a SimulationPlan, tree: &'a Tree, rng: &'a mut Rng) -> Self {
        let generation = plan.coordinator.generation;
        let aggregator = |rank| AggregatorConfig {
            rank,
            generation,
            hold_ns: 30 * plan.delays.typical + 1000,
        };
        let aggregator = |rank| {
            let mut aggregator = Aggregator::new(aggregator(rank), tree);
            if let Some(aggregator) = aggregator.as_mut().filter(|_| plan.counts_lateness) {
                aggregator.count_lateness();
            }
            aggregator
        };
        let mut coordinator = Coordinator::with_tree(plan.coordinator.clone(), tree);
        if plan.counts_lateness {
            coordinator.count_lateness();
        }
        let node = |rank| Node {
            worker: Worker::new(WorkerConfig {
                rank: Rank(rank),
                size: plan.size,
                generation,
            }),
            aggregator: aggregator(Rank(rank)),
            timer_at: None,
            alive: true,
            over: false,
            stopping: false,
            phase: 0,
            step: 0,
            open: BTreeMap::new(),
            next_entry: 0,
        };
        Self {
            plan,
            tree,
            link_at: BTreeMap::new(),
            rng,
            now: 0,
            count: 0,
            queue: BTreeMap::new(),
            nodes: (0..plan.size).map(node).collect(),
            coordinator,
            timer_at: None,
            trace: Trace::default(),
        }
    }

    fn run(&mut self) {
        for rank in 0..self.plan.size {
            let delay = self.delay(Rank(rank));
            self.after(delay, Happening::Step(Rank(rank)));
        }
        if let Ending::Kill { rank, at } = self.plan.ending {
            self.after(at, Happening::Kill(rank));
        }
        for (number, at) in (0..).zip(&self.plan.tunings) {
            self.after(*at, Happening::Tune(number));
        }
        while let Some(((at, _), happening)) = self.queue.pop_first() {
            if at > TIME_MAX || self.nodes.iter().all(|node| node.over || !node.alive) {
                break;
            }
            self.now = at;
            self.happen(happening);
        }
        for (rank, node) in (0..).map(Rank).zip(&self.nodes) {
            if node.alive && !node.over {
                self.trace.stuck.push(rank);
            }
            // An aggregator's link is late for several ranks at once.
            if node.aggregator.is_none() {
                let late = self.coordinator.lateness(rank);
                let awaited = late.iter().map(|of| of.lateness.awaited_ns).sum();
                self.trace.awaited.push((rank, awaited));
            }
        }
        self.trace.end = self.now;
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Step(rank) => self.step(rank),
            Happening::Up { to, from, bytes } => self.arrive_up(to, from, &bytes),
            Happening::Down { to, from, bytes } => self.arrive_down(to, from, &bytes),
            Happening::PollCoordinator => self.drain_coordinator(),
            Happening::PollAggregator(rank) => self.drain_aggregator(rank),
            Happening::AggregatorTimer(rank) => {
                let now = Time(self.now);
                let node = &mut self.nodes[rank.index()];
                node.timer_at = None;
                if let Some(aggregator) = node.aggregator.as_mut().filter(|_| node.alive) {
                    aggregator.handle_timeout(now);
                    self.drain_aggregator(rank);
                }
            }
            Happening::Timer => {
                self.timer_at = None;
                if self.nodes[0].alive {
                    self.coordinator.handle_timeout(Time(self.now));
                    self.drain_coordinator();
                }
            }
            Happening::Kill(rank) => self.kill(rank),
            Happening::Tune(number) => {
                if self.nodes[0].alive {
                    self.coordinator.set_fusion_threshold(64 << number);
                    self.coordinator.set_batch_delay(100 * number);
                    self.coordinator.announce_tuning(&[number, 7]);
                    self.drain_coordinator();
                }
            }
            Happening::Learns(rank, lost) => {
                if self.nodes[rank.index()].alive {
                    if rank == Rank(0) {
                        self.coordinator
                            .handle_peer_lost(Time(self.now), lost.clone());
                        self.drain_coordinator();
                    }
                    if let Some(aggregator) = &mut self.nodes[rank.index()].aggregator {
                        aggregator.handle_peer_lost(Time(self.now), &lost);
                        self.drain_aggregator(rank);
                    }
                    self.nodes[rank.index()].worker.handle_peer_lost(lost);
                    self.drain_worker(rank);
                }
            }
        }
    }

    fn arrive_up(&mut self, to: Rank, from: Rank, bytes: &[u8]) {
        if !self.nodes[to.index()].alive {
            return;
        }
        let message = match ToCoordinator::decode(bytes) {
            Ok(message) => message,
            Err(error) => return self.trace.events.push(Event::Accused(error.to_string())),
        };
        let now = Time(self.now);
        // Sometimes more messages get in before the receiver acts.
        let later = self.rng.chance(30);
        if let Some(aggregator) = &mut self.nodes[to.index()].aggregator {
            aggregator.handle_up(now, from, &message);
            if later {
                return self.after(self.plan.delays.typical, Happening::PollAggregator(to));
            }
            return self.drain_aggregator(to);
        }
        for item in &message.items {
            let (ranks, item) = match item {
                Submission::Of { ranks, item, .. } => (&ranks[..], &**item),
                item => (&[from][..], item),
            };
            if *item == Submission::Join {
                let joined = ranks.iter().copied().map(Event::JoinArrived);
                self.trace.events.extend(joined);
            }
        }
        self.trace.root_messages += 1;
        // A driver reads its clock once a poll, so what arrives meanwhile has one time.
        let batch_time = Time(self.now - self.now % self.plan.delays.typical.max(1));
        self.coordinator.handle_message(batch_time, from, &message);
        if later {
            self.after(self.plan.delays.typical, Happening::PollCoordinator);
        } else {
            self.drain_coordinator();
        }
    }

    fn arrive_down(&mut self, to: Rank, from: Rank, bytes: &[u8]) {
        let now = Time(self.now);
        let node = &mut self.nodes[to.index()];
        if !node.alive {
            return;
        }
        let message = match ToWorker::decode(bytes) {
            Ok(message) => message,
            Err(error) => return self.trace.events.push(Event::Accused(error.to_string())),
        };
        match node.aggregator.as_mut().filter(|_| from != to) {
            Some(aggregator) => {
                aggregator.handle_down(now, &message);
                self.drain_aggregator(to);
            }
            None => {
                node.worker.handle_message(&message);
                self.drain_worker(to);
            }
        }
    }

    fn drain_aggregator(&mut self, rank: Rank) {
        if !self.nodes[rank.index()].alive {
            return;
        }
        while let Some(aggregator) = &mut self.nodes[rank.index()].aggregator
            && let Some(action) = aggregator.poll_action()
        {
            let mut bytes = Vec::new();
            match action {
                AggregatorAction::Up(message) => {
                    message.encode(&mut bytes);
                    if let Some(parent) = self.tree.parent(rank) {
                        self.send_up(parent, rank, bytes);
                    }
                }
                AggregatorAction::Down(to, message) => {
                    message.encode(&mut bytes);
                    for to in to.iter() {
                        self.send_down(*to, rank, bytes.clone());
                    }
                }
                AggregatorAction::Abort(lost) => {
                    self.trace.events.push(Event::Accused(lost.to_string()));
                }
            }
        }
        let node = &mut self.nodes[rank.index()];
        if let Some(Time(deadline)) = node.aggregator.as_ref().and_then(Aggregator::next_deadline)
            && node.timer_at.is_none_or(|at| deadline < at)
        {
            node.timer_at = Some(deadline);
            let at = deadline.max(self.now);
            self.at(at, Happening::AggregatorTimer(rank));
        }
    }

    fn kill(&mut self, rank: Rank) {
        if self.nodes[rank.index()].over {
            return;
        }
        self.nodes[rank.index()].alive = false;
        self.trace.dead.push(rank);
        let lost = PeerLost {
            rank,
            host: "h1".into(),
            cause: LossCause::Ended("killed by signal 9".into()),
        };
        // Only some notice by themselves, unless the coordinator died; the others are told.
        for other in (0..self.plan.size).map(Rank) {
            let linked =
                self.tree.parent(other) == Some(rank) || self.tree.parent(rank) == Some(other);
            if other == Rank(0) || rank == Rank(0) || self.rng.chance(50) || linked {
                let delay = self.delay(other);
                self.after(delay, Happening::Learns(other, lost.clone()));
            }
        }
    }

    fn step(&mut self, rank: Rank) {
        let node = &mut self.nodes[rank.index()];
        if !node.alive || node.over {
            return;
        }
        let Some(phase) = self.plan.phases.get(node.phase) else {
            return;
        };
        let steps = &phase.steps[rank.index()];
        let burst = 1 + self.rng.index(steps.len().max(1));
        for (item, request) in steps.iter().skip(node.step).take(burst) {
            node.step += 1;
            let entry = EntryId(node.next_entry);
            node.next_entry += 1;
            let item = (node.phase, *item);
            match node.worker.submit(entry, request) {
                Ok(tag) => {
                    node.open.insert(entry, tag);
                    self.trace
                        .events
                        .push(Event::Submitted { rank, entry, item });
                }
                Err(error) => self.trace.events.push(Event::Refused { rank, item, error }),
            }
        }
        if node.step < steps.len() {
            let delay = self.delay(rank);
            self.after(delay, Happening::Step(rank));
        }
        self.drain_worker(rank);
    }

    /// Goes on with the program once everything of the phase has ended.
    fn advance(&mut self, rank: Rank) {
        let node = &mut self.nodes[rank.index()];
        let Some(phase) = self.plan.phases.get(node.phase) else {
            return;
        };
        let submitted = node.step == phase.steps[rank.index()].len();
        let last = node.phase + 1 == self.plan.phases.len();
        if let (true, true, Ending::Shutdown { callers }) = (submitted, last, &self.plan.ending)
            && callers.contains(&rank)
            && !node.stopping
            && (node.open.is_empty() || self.plan.stops_amid)
        {
            node.stopping = true;
            node.worker.shutdown();
            return self.drain_worker(rank);
        }
        if submitted && node.open.is_empty() && !last {
            node.phase += 1;
            node.step = 0;
            let delay = self.delay(rank);
            self.after(delay, Happening::Step(rank));
        }
        if let (Ending::Kill { .. }, true, true) = (&self.plan.ending, submitted, last) {
            // Nobody calls shutdown in these plans; who has finished is done if the kill came late.
            let node = &mut self.nodes[rank.index()];
            node.over |= node.open.is_empty();
        }
    }

    fn drain_worker(&mut self, rank: Rank) {
        let before = self.nodes[rank.index()].phase;
        while let Some(action) = self.nodes[rank.index()].worker.poll_action() {
            self.act(rank, action);
        }
        let node = &self.nodes[rank.index()];
        if node.alive && !node.over && node.phase == before {
            self.advance(rank);
        }
    }

    fn act(&mut self, rank: Rank, action: WorkerAction) {
        match action {
            WorkerAction::Send(message) => {
                let mut bytes = Vec::new();
                message.encode(&mut bytes);
                let to = match self.tree.parent(rank) {
                    Some(parent) if self.nodes[rank.index()].aggregator.is_none() => parent,
                    _ => rank,
                };
                self.send_up(to, rank, bytes);
            }
            WorkerAction::Execute(execution) => {
                let open = &self.nodes[rank.index()].open;
                let digest = Digest::of(&execution, |entry| *open.get(&entry)?);
                self.trace.events.push(Event::Executed { rank, digest });
                for item in &execution.items {
                    if let Some(entry) = item.entry {
                        let end = End::Ran(execution.seq, execution.contributors);
                        self.ended(rank, entry, end);
                    }
                }
            }
            WorkerAction::Tuned { seq, values } => {
                let values = values.to_vec();
                self.trace.events.push(Event::Tuned { rank, seq, values });
            }
            WorkerAction::SetRemoved(_) => {}
            WorkerAction::Complete(entry, result) => {
                self.ended(rank, entry, End::Completed(result));
            }
            WorkerAction::ShutDown { .. } => {
                self.trace.events.push(Event::ShutDown(rank));
                self.nodes[rank.index()].over = true;
            }
            WorkerAction::Abort(lost) => {
                if matches!(lost.cause, LossCause::BrokeProtocol(_)) {
                    self.trace.events.push(Event::Accused(lost.to_string()));
                }
                self.nodes[rank.index()].over = true;
            }
        }
    }

    fn ended(&mut self, rank: Rank, entry: EntryId, end: End) {
        self.nodes[rank.index()].open.remove(&entry);
        self.trace.events.push(Event::Ended { rank, entry, end });
    }

    fn drain_coordinator(&mut self) {
        if !self.nodes[0].alive {
            return;
        }
        while let Some(action) = self.coordinator.poll_action() {
            match action {
                CoordinatorAction::Send(to, message) => {
                    let mut bytes = Vec::new();
                    message.encode(&mut bytes);
                    for to in to.iter() {
                        self.send_down(*to, Rank(0), bytes.clone());
                    }
                }
                CoordinatorAction::Stall(report) => {
                    self.trace.events.push(Event::Stalled(report));
                }
                CoordinatorAction::CacheEvicts(_) => {}
                CoordinatorAction::Abort(lost) => {
                    self.trace.events.push(Event::Accused(lost.to_string()));
                }
            }
        }
        if let Some(Time(deadline)) = self.coordinator.next_deadline()
            && self.timer_at.is_none_or(|at| deadline < at)
        {
            self.timer_at = Some(deadline);
            self.at(deadline.max(self.now), Happening::Timer);
        }
    }

    fn send_up(&mut self, to: Rank, from: Rank, bytes: Vec<u8>) {
        let at = self.link_time(false, from, to, from, &bytes);
        self.at(at, Happening::Up { to, from, bytes });
    }

    fn send_down(&mut self, to: Rank, from: Rank, bytes: Vec<u8>) {
        let at = self.link_time(true, from, to, to, &bytes);
        self.at(at, Happening::Down { to, from, bytes });
    }

    /// When a message arrives that is sent now: after a delay, in order.
    fn link_time(&mut self, down: bool, from: Rank, to: Rank, slow: Rank, bytes: &[u8]) -> u64 {
        let at = self.now + self.delay(slow);
        let last = self.link_at.entry((down, from, to)).or_default();
        *last = at.max(*last);
        let at = *last;
        self.note_bytes(slow, at, bytes);
        at
    }

    fn delay(&mut self, rank: Rank) -> u64 {
        let Delays { typical, slow_rank } = self.plan.delays;
        let factor = if slow_rank == Some(rank) { 20 } else { 1 };
        self.rng.below(typical * factor + 1)
    }

    fn after(&mut self, delay: u64, happening: Happening) {
        self.at(self.now + delay, happening);
    }

    fn at(&mut self, at: u64, happening: Happening) {
        self.count += 1;
        self.queue.insert((at, self.count), happening);
    }

    fn note_bytes(&mut self, rank: Rank, at: u64, bytes: &[u8]) {
        self.trace.messages += 1;
        for word in [u64::from(rank.0), at]
            .into_iter()
            .chain(bytes.iter().map(|b| u64::from(*b)))
        {
            self.trace.hash = (self.trace.hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

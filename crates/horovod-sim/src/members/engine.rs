//! A member's engine: the real worker, coordinator and aggregator of one generation, and what
//! `crates/horovod-engine/src/engine/driver/pump.rs` does about lost peers.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use horovod_launch::elastic::WorkerId;
use horovod_protocol::{
    Aggregator, AggregatorAction, AggregatorConfig, Coordinator, CoordinatorAction,
    CoordinatorConfig, EntryId, Execution, Generation, LossCause, PeerLost, Rank, Request, Time,
    ToCoordinator, ToWorker, Worker, WorkerAction, WorkerConfig,
};

use super::links::{LinkId, Message, Route};
use super::process::{ProcessStage, Roster};
use super::{Happening, MS, World};
use crate::trace::Digest;

/// How long the launcher may take to say why a peer is lost.
const CAUSE_GRACE: u64 = 300 * MS;

#[derive(Debug)]
enum Node {
    Root(Box<Coordinator>),
    Inner(Box<Aggregator>),
    Leaf,
}

/// Message or abort that a node requests.
enum NodeAction {
    Up(ToCoordinator),
    Down(Vec<Rank>, ToWorker),
    Abort(PeerLost),
}

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) roster: Roster,
    worker: Worker,
    node: Node,
    timer_at: Option<u64>,
    pub(super) ready: VecDeque<Execution>,
    pub(super) running: Option<Execution>,
    /// The generation is over.
    pub(super) dead: bool,
    /// All have agreed to stop.
    pub(super) stopped: bool,
    suspect: Option<Rank>,
    /// Submitted requests, by entry.
    pub(super) open: BTreeMap<EntryId, String>,
    next_entry: u64,
    /// Results of requests; `None` is an error.
    pub(super) ended: BTreeMap<String, Option<Rc<Vec<u64>>>>,
    /// This rank's inputs, by name.
    pub(super) given: BTreeMap<String, Vec<u64>>,
}

impl Engine {
    fn new(roster: &Roster) -> Self {
        let (rank, size) = (Rank(roster.rank), roster.members.len() as u32);
        let generation = Generation(roster.generation);
        // Each rank has its own setting, which may differ from the others'.
        let counts_lateness = (roster.generation + u64::from(roster.rank)).is_multiple_of(2);
        let node = if rank == Rank(0) {
            let config = CoordinatorConfig::new(size, generation);
            let mut coordinator = Coordinator::with_tree(config, &roster.tree);
            if counts_lateness {
                coordinator.count_lateness();
            }
            Node::Root(Box::new(coordinator))
        } else {
            let config = AggregatorConfig {
                rank,
                generation,
                hold_ns: 100 * MS,
            };
            Aggregator::new(config, &roster.tree).map_or(Node::Leaf, |mut aggregator| {
                if counts_lateness {
                    aggregator.count_lateness();
                }
                Node::Inner(Box::new(aggregator))
            })
        };
        Self {
            roster: roster.clone(),
            worker: Worker::new(WorkerConfig {
                rank,
                size,
                generation,
            }),
            node,
            timer_at: None,
            ready: VecDeque::new(),
            running: None,
            dead: false,
            stopped: false,
            suspect: None,
            open: BTreeMap::new(),
            next_entry: 0,
            ended: BTreeMap::new(),
            given: BTreeMap::new(),
        }
    }

    fn rank(&self) -> Rank {
        Rank(self.roster.rank)
    }

    /// Nothing that was agreed on before the stop is left to do.
    pub(super) fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.running.is_none()
    }

    fn parent(&self) -> Option<Rank> {
        self.roster.tree.parent(self.rank())
    }

    /// The ranks that this one has control links to.
    pub(super) fn neighbours(&self) -> Vec<Rank> {
        let children = self.roster.tree.children(self.rank());
        let parent = self.parent();
        let all = parent.into_iter().chain(children.iter().copied());
        all.filter(|rank| *rank != self.rank()).collect()
    }

    fn rank_of(&self, worker: WorkerId) -> Option<Rank> {
        let at = self.roster.members.iter().position(|m| *m == worker)?;
        Some(Rank(at as u32))
    }

    fn lost(&self, rank: Rank) -> PeerLost {
        PeerLost {
            rank,
            host: "h".into(),
            cause: LossCause::Ended("gone".into()),
        }
    }

    fn handle(&mut self, now: Time, from: Rank, bytes: &[u8]) -> Result<(), String> {
        if self.parent() == Some(from) {
            let message = ToWorker::decode(bytes).map_err(|e| e.to_string())?;
            match &mut self.node {
                Node::Inner(aggregator) => aggregator.handle_down(now, &message),
                Node::Root(_) | Node::Leaf => self.worker.handle_message(&message),
            }
        } else {
            let message = ToCoordinator::decode(bytes).map_err(|e| e.to_string())?;
            self.handle_from_child(now, from, &message);
        }
        Ok(())
    }

    fn handle_from_child(&mut self, now: Time, from: Rank, message: &ToCoordinator) {
        match &mut self.node {
            Node::Root(coordinator) => coordinator.handle_message(now, from, message),
            Node::Inner(aggregator) => aggregator.handle_up(now, from, message),
            Node::Leaf => {}
        }
    }

    fn poll_node(&mut self) -> Option<NodeAction> {
        match &mut self.node {
            Node::Leaf => None,
            Node::Root(coordinator) => loop {
                match coordinator.poll_action()? {
                    CoordinatorAction::Send(to, message) => {
                        return Some(NodeAction::Down(to.to_vec(), message));
                    }
                    CoordinatorAction::Abort(lost) => return Some(NodeAction::Abort(lost)),
                    CoordinatorAction::Stall(_) | CoordinatorAction::CacheEvicts(_) => {}
                }
            },
            Node::Inner(aggregator) => Some(match aggregator.poll_action()? {
                AggregatorAction::Up(message) => NodeAction::Up(message),
                AggregatorAction::Down(to, message) => NodeAction::Down(to.to_vec(), message),
                AggregatorAction::Abort(lost) => NodeAction::Abort(lost),
            }),
        }
    }

    /// Gives the machines a message of another generation: they must not care.
    fn is_moved_by_stale(&mut self, now: Time, bytes: &[u8]) -> bool {
        let from = self.neighbours().first().copied().unwrap_or(Rank(0));
        if let Ok(message) = ToWorker::decode(bytes) {
            if let Node::Inner(aggregator) = &mut self.node {
                aggregator.handle_down(now, &message);
            }
            self.worker.handle_message(&message);
        }
        if let Ok(message) = ToCoordinator::decode(bytes) {
            self.handle_from_child(now, from, &message);
        }
        self.worker.poll_action().is_some() || self.poll_node().is_some()
    }
}

impl World {
    pub(super) fn become_member(&mut self, worker: WorkerId, roster: &Roster) {
        if let Some(process) = self.processes.get_mut(&worker) {
            process.engine = Some(Engine::new(roster));
            process.stage = ProcessStage::Member;
        }
        self.ledger.ranks_max = self.ledger.ranks_max.max(roster.members.len());
        self.begin_generation(worker);
    }

    fn engine(&mut self, worker: WorkerId) -> Option<&mut Engine> {
        self.processes.get_mut(&worker)?.engine.as_mut()
    }

    /// A message came over a control link. `Err`: the receiver has the round's roster, but its engine is not up yet.
    pub(super) fn arrive_at_engine(
        &mut self,
        generation: u64,
        from: WorkerId,
        to: WorkerId,
        message: Message,
    ) -> Result<(), Message> {
        let now = Time(self.now);
        let tries_stale = self.rng.chance(30);
        let Some(process) = self.processes.get_mut(&to) else {
            return Ok(());
        };
        let is_coming = process
            .roster
            .as_ref()
            .is_some_and(|r| r.generation == generation);
        let Some(engine) = &mut process.engine else {
            return if is_coming { Err(message) } else { Ok(()) };
        };
        if engine.roster.generation != generation {
            if let Message::Bytes(bytes) = &message
                && tries_stale
                && !engine.dead
                && engine.is_moved_by_stale(now, bytes)
            {
                self.fail(format!(
                    "worker {to} takes a message of generation {generation} for one of its own"
                ));
            }
            return Ok(());
        }
        let Some(rank) = engine.rank_of(from) else {
            return Ok(());
        };
        match message {
            Message::Bytes(bytes) if !engine.dead => {
                if let Err(why) = engine.handle(now, rank, &bytes) {
                    self.fail(format!("worker {to} cannot read what {from} said: {why}"));
                }
                self.pump(to);
            }
            Message::Goodbye | Message::Closed => self.note_lost(to, rank),
            _ => {}
        }
        Ok(())
    }

    /// A link has ended.
    pub(super) fn note_lost(&mut self, worker: WorkerId, rank: Rank) {
        let Some(engine) = self.engine(worker) else {
            return;
        };
        if engine.dead || engine.suspect.is_some() || (engine.stopped && engine.is_idle()) {
            return;
        }
        engine.suspect = Some(rank);
        let generation = engine.roster.generation;
        self.after(CAUSE_GRACE, Happening::Grace(worker, generation));
    }

    pub(super) fn grace_is_over(&mut self, worker: WorkerId, generation: u64) {
        if let Some(engine) = self.engine(worker)
            && engine.roster.generation == generation
            && !(engine.stopped && engine.is_idle())
            && let Some(rank) = engine.suspect
        {
            let lost = engine.lost(rank);
            self.end_generation(worker, &lost);
        }
    }

    /// The launcher knows of a death in this rank's round.
    pub(super) fn on_death(&mut self, worker: WorkerId, rank: u32) {
        if let Some(engine) = self.engine(worker)
            && !(engine.stopped && engine.is_idle())
        {
            let lost = engine.lost(Rank(rank));
            self.end_generation(worker, &lost);
        }
    }

    fn end_generation(&mut self, worker: WorkerId, lost: &PeerLost) {
        let now = Time(self.now);
        let Some(engine) = self.engine(worker) else {
            return;
        };
        if engine.dead {
            return;
        }
        engine.dead = true;
        match &mut engine.node {
            Node::Root(coordinator) => coordinator.handle_peer_lost(now, lost.clone()),
            Node::Inner(aggregator) => aggregator.handle_peer_lost(now, lost),
            Node::Leaf => {}
        }
        engine.worker.report_lost(lost.clone());
        engine.ready.clear();
        engine.running = None;
        let leaves_cleanly = engine.parent().is_some();
        let generation = engine.roster.generation;
        self.pump(worker);
        if leaves_cleanly {
            self.send_to_neighbours(worker, &|| Message::Goodbye);
        }
        self.log(format!(
            "worker {worker} leaves generation {generation}: {} is lost",
            lost.rank
        ));
        self.goes_after_end(worker);
    }

    fn send_to_neighbours(&mut self, worker: WorkerId, what: &dyn Fn() -> Message) {
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        let Some(engine) = &process.engine else {
            return;
        };
        let here = process.host;
        let roster = engine.roster.clone();
        for rank in engine.neighbours() {
            let to = roster.members[rank.index()];
            let link = LinkId::Control {
                generation: roster.generation,
                from: worker,
                to,
            };
            let route = Route {
                from: Some(here),
                to: Some(roster.hosts[rank.index()]),
            };
            self.send(link, route, what());
        }
    }

    /// The engine ends, in whatever way.
    pub(super) fn leave_generation(&mut self, worker: WorkerId, farewell: &dyn Fn() -> Message) {
        self.send_to_neighbours(worker, farewell);
        self.abandon(worker);
        if let Some(process) = self.processes.get_mut(&worker) {
            process.engine = None;
        }
    }

    /// Carries out what the machines ask for until they are quiet.
    pub(super) fn pump(&mut self, worker: WorkerId) {
        loop {
            let Some(engine) = self.engine(worker) else {
                return;
            };
            if let Some(action) = engine.worker.poll_action() {
                self.worker_wants(worker, action);
                continue;
            }
            let Some(action) = engine.poll_node() else {
                break;
            };
            let me = engine.rank();
            match action {
                NodeAction::Up(message) => self.send_up(worker, &message),
                NodeAction::Down(to, message) => {
                    let mut bytes = Vec::new();
                    message.encode(&mut bytes);
                    for rank in to {
                        if rank != me {
                            self.send_frame(worker, rank, bytes.clone());
                        } else if let Some(engine) = self.engine(worker) {
                            engine.worker.handle_message(&message);
                        }
                    }
                }
                NodeAction::Abort(lost) => self.accuse(worker, &lost),
            }
        }
        self.begin_next(worker);
        let now = self.now;
        let Some(engine) = self.engine(worker) else {
            return;
        };
        let deadline = match &engine.node {
            Node::Root(coordinator) => coordinator.next_deadline(),
            Node::Inner(aggregator) => aggregator.next_deadline(),
            Node::Leaf => None,
        };
        let generation = engine.roster.generation;
        if let Some(Time(at)) = deadline.filter(|_| !engine.dead)
            && engine.timer_at.is_none_or(|known| at < known)
        {
            engine.timer_at = Some(at);
            self.at(at.max(now + 1), Happening::NodeTimer(worker, generation));
        }
    }

    pub(super) fn node_timer(&mut self, worker: WorkerId, generation: u64) {
        let now = Time(self.now);
        if let Some(engine) = self.engine(worker)
            && engine.roster.generation == generation
        {
            engine.timer_at = None;
            match &mut engine.node {
                Node::Root(coordinator) => coordinator.handle_timeout(now),
                Node::Inner(aggregator) => aggregator.handle_timeout(now),
                Node::Leaf => {}
            }
            self.pump(worker);
        }
    }

    /// A machine that ends the generation by itself has seen somebody break the protocol: nobody here does.
    fn accuse(&mut self, worker: WorkerId, lost: &PeerLost) {
        if matches!(lost.cause, LossCause::BrokeProtocol(_)) {
            self.fail(format!("worker {worker}: {lost}"));
        }
        self.end_generation(worker, lost);
    }

    fn send_up(&mut self, worker: WorkerId, message: &ToCoordinator) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        if let Some(engine) = self.engine(worker)
            && let Some(parent) = engine.parent()
        {
            self.send_frame(worker, parent, bytes);
        }
    }

    fn send_frame(&mut self, worker: WorkerId, to: Rank, bytes: Vec<u8>) {
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        let Some(engine) = &process.engine else {
            return;
        };
        let roster = &engine.roster;
        let link = LinkId::Control {
            generation: roster.generation,
            from: worker,
            to: roster.members[to.index()],
        };
        let route = Route {
            from: Some(process.host),
            to: Some(roster.hosts[to.index()]),
        };
        self.send(link, route, Message::Bytes(bytes));
    }

    fn worker_wants(&mut self, worker: WorkerId, action: WorkerAction) {
        let now = Time(self.now);
        let Some(engine) = self.engine(worker) else {
            return;
        };
        match action {
            WorkerAction::Send(message) => match engine.node {
                Node::Leaf => self.send_up(worker, &message),
                Node::Root(_) | Node::Inner(_) => {
                    let me = engine.rank();
                    engine.handle_from_child(now, me, &message);
                }
            },
            WorkerAction::Execute(execution) => {
                let generation = engine.roster.generation;
                let is_dead = engine.dead;
                self.check_execution(worker, generation, Digest::of(&execution, |_| None));
                if let Some(engine) = self.engine(worker).filter(|_| !is_dead) {
                    engine.ready.push_back(execution);
                }
            }
            WorkerAction::Complete(entry, result) => {
                if let Some(name) = engine.open.remove(&entry) {
                    let end = result.is_ok().then(|| Rc::new(Vec::new()));
                    engine.ended.insert(name, end);
                    self.goes_after_end(worker);
                }
            }
            WorkerAction::Tuned { .. } | WorkerAction::SetRemoved(_) => {}
            WorkerAction::ShutDown { .. } => {
                engine.stopped = true;
                self.goes_after_end(worker);
            }
            WorkerAction::Abort(lost) => self.accuse(worker, &lost),
        }
    }

    /// Something that the script may wait for has ended.
    pub(super) fn goes_after_end(&mut self, worker: WorkerId) {
        if self
            .processes
            .get(&worker)
            .is_some_and(|p| p.script.waits())
        {
            self.goes_after(worker, 1000);
        }
    }

    /// Asks for an operation; false if the engine refuses.
    pub(super) fn submit(&mut self, worker: WorkerId, request: &Request, gives: Vec<u64>) -> bool {
        let Some(engine) = self.engine(worker) else {
            return false;
        };
        if engine.dead {
            return false;
        }
        let entry = EntryId(engine.next_entry);
        engine.next_entry += 1;
        if engine.worker.submit(entry, request).is_err() {
            return false;
        }
        engine.open.insert(entry, request.name.clone());
        engine.given.insert(request.name.clone(), gives);
        true
    }

    /// `hvd.shutdown()`: the stop that all agree to.
    pub(super) fn ask_to_stop(&mut self, worker: WorkerId) {
        if let Some(engine) = self.engine(worker)
            && !engine.dead
        {
            engine.worker.shutdown();
            self.pump(worker);
        }
    }
}

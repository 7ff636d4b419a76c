//! The driver of a rank: who holds it makes progress on the negotiation and runs what was agreed on, in order.
//!
//! Here stand the ways in which a thread makes progress, and the negotiation as far as nothing is unusual: what this
//! rank's worker has to say goes to the coordinator, and what that has decided to the workers. Executions are in
//! `execution`, what else the control plane has to do in `pump`, the end of a generation in `ending`.

mod ending;
mod execution;
mod flights;
mod inspect;
mod node;
mod pump;
mod replicas;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use horovod_protocol::{
    AggregatorAction, CACHE_EVICTION_TEXT, Completion, CoordinatorAction, DecodeError, EntryId,
    Leaving, LossCause, PeerLost, Rank, StopReason, Time, ToCoordinator, WorkerAction,
};
use horovod_transport::{ControlEvent, Mesh};

use execution::{ExecutionTask, Front};
use node::{Node, NodeAction, unheard};
use pump::{ControlPlane, Moment, Pump};

use super::backend::host::Host;
use super::backend::{Capabilities, DeviceBackend, Results};
use super::handles::{Handle, OpResult};
use super::{EngineState, Entry, TOLD, nanos};
use crate::buffer::BufferPool;
use crate::config::Config;
use crate::error::Error;

/// How long an ending engine tries to send what is queued.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// Executions that may wait for the one that runs.
const READY_MAX: usize = 1 << 16;

/// Polls without a sleep after which the clock is asked whether the neighbours have been silent for too long.
const POLLS_PER_SILENCE_CHECK: u32 = 64;

/// Between two looks at what cannot begin yet: doubled with each, and at most.
const EVENT_NAP: Duration = Duration::from_micros(10);
const EVENT_NAP_MAX: Duration = Duration::from_millis(1);

/// Everything that it takes to make progress on this rank; one thread at a time has it.
pub(super) struct Driver {
    pump: Pump,
    host: Host,
    devices: Vec<DeviceBackend>,
    capabilities: Capabilities,
    pool: Arc<BufferPool>,
    /// Where the next results are put together.
    results: Results,
    /// Where the next job puts its tensors.
    spare: Vec<Option<Entry>>,
    /// The submission whose operand was pre-staged last.
    staged: Option<EntryId>,
    /// Begun, and broken off by a thread that had to leave, or waiting for memory; goes on before anything else.
    parked: Option<ExecutionTask>,
    /// A panic has passed through.
    broken: bool,
    /// When the engine's thread will look around even if nothing wakes it; as [`Time`].
    ///
    /// [`Time`]: horovod_protocol::Time
    engine_looks_at: u64,
    /// How often the next execution was not found ready in a row.
    looks_in_vain: u32,
}

/// How the engine's thread goes on.
pub(super) enum Work {
    /// Nothing to do until something happens or this time has passed.
    Sleep(Duration),
    /// The engine has ended.
    Finished,
}

impl Driver {
    pub(super) fn new(
        config: &Config,
        mesh: Mesh,
        devices: Vec<DeviceBackend>,
        shared: Arc<EngineState>,
    ) -> Self {
        let Mesh {
            topology,
            tree,
            control,
            data,
            mut waiter,
            heartbeat,
            settings: _,
            assignment: _,
        } = mesh;
        // Beside the engine's thread its process computes.
        waiter.set_has_time(false);
        let host = Host::new(config, data, &topology);
        let plane = ControlPlane {
            topology,
            tree,
            control,
            heartbeat,
            waiter,
        };
        Self {
            host,
            devices,
            capabilities: Capabilities::default(),
            pool: Arc::default(),
            results: Results::new(),
            spare: Vec::new(),
            staged: None,
            pump: Pump::new(config, plane, shared),
            parked: None,
            broken: false,
            engine_looks_at: 0,
            looks_in_vain: 0,
        }
    }

    /// Whether ranks outnumber the cores of this host.
    pub(super) fn is_oversubscribed(&self) -> bool {
        self.pump.waiter.is_oversubscribed()
    }

    /// As the engine's own thread: carry out everything, until nothing is left that could be done now.
    pub(super) fn work(&mut self) -> Work {
        let mut announced = false;
        loop {
            if self.broken {
                return Work::Finished;
            }
            self.prestage();
            let progress = self.pump.progress();
            let front = self.front();
            if matches!(front, Front::Runs | Front::Fails(_))
                && let Some(task) = self.next_task()
            {
                self.pump.waiter.disarm();
                match front {
                    Front::Fails(failure) => self.give_up(task, failure),
                    _ => self.carry_out(task),
                }
                announced = false;
                continue;
            }
            if self.pump.finished() {
                return Work::Finished;
            }
            if announced && !progress && !self.pump.waiter.has_news() {
                let limit = self.sleep_limit();
                self.engine_looks_at = self.pump.shared.now().0.saturating_add(nanos(limit));
                return Work::Sleep(limit);
            }
            self.pump.waiter.arm();
            announced = true;
        }
    }

    /// As a thread that waits until `done`, at most until `deadline`: carry out what may pause. It `has_time` if nobody
    /// needs its core.
    pub(super) fn work_until(
        &mut self,
        deadline: Instant,
        has_time: bool,
        done: impl Fn() -> bool,
    ) {
        self.pump.waiter.disarm();
        self.pump.leave_by = Some(deadline);
        self.pump.waiter.set_has_time(has_time);
        self.prestage();
        let mut spins = 0;
        loop {
            let progress = self.pump.progress();
            let front = self.front();
            if matches!(front, Front::Runs) && self.next_may_pause() {
                let Some(task) = self.next_task() else { break };
                self.carry_out(task);
                spins = 0;
                // Broken off, or the work of others never ends: this thread has to leave.
                if self.parked.is_some() || done() || Instant::now() >= deadline {
                    break;
                }
                continue;
            }
            let is_for_engine = matches!(front, Front::Runs | Front::Fails(_));
            let is_over = self.pump.dead.is_some() && self.pump.flights.is_empty();
            if is_for_engine || is_over || self.pump.shared.wanted() {
                break;
            }
            if progress {
                spins = 0;
                if done() {
                    break;
                }
                continue;
            }
            if !self.pump.waiter.stays_awake(spins) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let sleep = left.min(self.sleep_limit());
                self.pump.waiter.falls_asleep(spins, Some(sleep));
            }
            spins = spins.saturating_add(1);
        }
        self.pump.leave_by = None;
        self.pump.waiter.set_has_time(false);
    }

    /// Say and hear what can be said and heard now. In a job of one rank, also carry out what is small: there
    /// is nobody to wait for.
    pub(super) fn poll_once(&mut self) {
        self.prestage();
        self.pump.progress();
        while self.pump.shared.alone && matches!(self.front(), Front::Runs) && self.next_is_small()
        {
            let Some(task) = self.next_task() else { break };
            self.carry_out(task);
        }
    }

    /// What a thread does before it leaves the driver to itself; whether the engine's thread must come now.
    /// With `polling`, that thread looks again soon of its own accord.
    pub(super) fn leave(&mut self, polling: bool) -> bool {
        if !polling {
            loop {
                self.pump.waiter.arm();
                if !self.pump.progress() && !self.pump.waiter.has_news() {
                    break;
                }
            }
        }
        if self.broken || self.parked.is_some() || self.pump.shared.wanted() {
            return true;
        }
        match self.front() {
            Front::Nothing => {}
            Front::Runs => return !polling || !self.next_may_pause(),
            // Nobody else looks whether it can begin.
            Front::Waits | Front::Fails(_) => return true,
        }
        !polling
            && self
                .pump
                .deadline()
                .is_some_and(|at| at < self.engine_looks_at)
    }

    pub(super) fn has_task(&self) -> bool {
        self.parked.is_some() || !self.pump.ready.is_empty()
    }

    /// A bug of ours has shown itself: must not leave the callers waiting, nor the peers.
    pub(super) fn break_down(&mut self) {
        self.pump.running = None;
        self.parked = None;
        self.broken = true;
    }

    /// The end: tell the peers, close the links.
    pub(super) fn end(mut self) {
        if self.broken {
            self.pump.end_generation(&PeerLost {
                rank: self.pump.topology.rank,
                host: self.pump.host_of(self.pump.topology.rank),
                cause: LossCause::CannotGoOn(
                    "the engine panicked; please report this with the log above".into(),
                ),
            });
        }
        self.pump.await_flights();
        let orderly = self.pump.dead.is_none() && !self.broken;
        for (_, backend) in &mut self.devices {
            backend.close(orderly);
        }
        if orderly && matches!(self.pump.left, Some(Leaving::Asked | Leaving::Ended)) {
            self.host.ended_well();
        }
        // A script that has called shutdown may be about to fail.
        if orderly && self.pump.left == Some(Leaving::Ended) {
            self.pump.inspection.ended_well();
        }
        self.pump.control.goodbye(GOODBYE_TIMEOUT);
        self.pump.recording.close();
    }

    /// How long a thread may sleep if nothing wakes it. Nothing tells of an event that has passed, so what is next and
    /// cannot begin is looked at by the clock, less often each time.
    fn sleep_limit(&mut self) -> Duration {
        let limit = self.pump.sleep_limit();
        if self.looks_in_vain == 0 {
            return limit;
        }
        let doublings = self.looks_in_vain.min(16);
        limit.min((EVENT_NAP * (1 << doublings)).min(EVENT_NAP_MAX))
    }
}

impl Pump {
    /// One look at everything that may have happened. `true`: something did.
    pub(super) fn progress(&mut self) -> bool {
        let mut progress = false;
        self.moment = Moment::default();
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_SILENCE_CHECK) {
            // A thread that goes from one collective to the next never asks for its sleep.
            self.look_after_neighbours(self.shared.now());
        }
        if self.dead.is_none() {
            while let Some(event) = self.control.poll() {
                progress = true;
                match event {
                    ControlEvent::Frame { from, bytes } => self.handle_frame(from, bytes),
                    event => self.handle_control(event),
                }
                if self.dead.is_some() {
                    break;
                }
            }
            self.settle_lost_peer();
            let mut time = None;
            let deadline = self.node.next_deadline();
            if deadline.is_some() || self.inspection.looks() {
                let now = *time.insert(self.moment.of(&self.shared));
                if deadline.is_some_and(|deadline| deadline <= now) {
                    self.node.handle_timeout(now);
                    progress = true;
                }
            }
            progress |= self.dead.is_none() && self.inspect(time);
        } else {
            // What was said last may still wait for space; news no longer matter.
            while self.control.poll().is_some() {}
        }
        if self.shared.held.load(Ordering::Acquire) != TOLD {
            let held = self.shared.held.swap(TOLD, Ordering::AcqRel);
            self.control.tell_held(held);
        }
        progress |= self.end_flights();
        progress |= self.relay.carry(&mut self.control);
        progress |= self.send_replica_reports();
        progress |= self.recording.send_queued(&self.relay, &mut self.control);
        progress |= self.drain_actions();
        if progress {
            self.inspection.has_news();
        }
        progress
    }

    fn handle_frame(&mut self, from: Rank, bytes: Vec<u8>) {
        let heard = self.hear(from, &bytes);
        self.control.give_back(bytes);
        if let Err(e) = heard {
            let cause = LossCause::Unreadable(e.to_string());
            self.end_generation(&PeerLost {
                rank: from,
                host: self.host_of(from),
                cause,
            });
        }
    }

    fn hear(&mut self, from: Rank, bytes: &[u8]) -> Result<(), DecodeError> {
        let is_from_above = self.parent() == Some(from);
        let now = || self.moment.of(&self.shared);
        if is_from_above {
            let message = &mut self.heard_from_above;
            message.decode_with(bytes, &mut self.spare_responses)?;
            if !self.node.hear_from_above(now, message) {
                self.shared.lock().worker.handle_message(message);
            }
        } else {
            let message = &mut self.heard_from_below;
            message.decode_from(bytes)?;
            self.node.hear_from_below(now, from, message);
        }
        Ok(())
    }

    /// Carry out what the state machines ask for until they are quiet.
    pub(super) fn drain_actions(&mut self) -> bool {
        let mut progress = false;
        loop {
            let mut state = self.shared.lock();
            let action = state.poll_action();
            self.has_ready_events = state.with_event > 0;
            drop(state);
            if let Some(action) = action {
                progress = true;
                self.worker_action(action);
                continue;
            }
            let Some(action) = self.node.poll_action() else {
                return progress;
            };
            progress = true;
            self.node_action(action);
        }
    }

    fn worker_action(&mut self, action: WorkerAction) {
        match action {
            WorkerAction::Send(message) => {
                let now = || self.moment.of(&self.shared);
                let me = self.topology.rank;
                if !self.node.hear_from_below(now, me, &message) {
                    self.send_up(&message);
                }
                self.shared.lock().worker.recycle_message(message);
            }
            // Its tensors are let go of, or will be, and whoever waits for it hears why the generation has ended.
            WorkerAction::Execute(_) if self.dead.is_some() => {}
            WorkerAction::Execute(execution) => {
                self.recording.ordered(&execution);
                self.ready.push_back(execution);
                debug_assert!(
                    self.ready.len() <= READY_MAX,
                    "the worker bounds pending entries"
                );
            }
            WorkerAction::Complete(id, result) => {
                let mut state = self.shared.lock();
                let entry = state.remove(id);
                match result {
                    // Ids are reused: what a former set counted is not known to all new members.
                    Ok(Completion::SetAdded(set)) => {
                        state.unnamed.remove(&set);
                    }
                    // The ranks that joined early have issued fewer calls: count anew from where all are.
                    Ok(Completion::Joined { .. }) => state.unnamed.clear(),
                    _ => {}
                }
                drop(state);
                self.recording.ended_without_data(&result, entry.as_ref());
                // An owner may run foreign code: not under our lock.
                drop(entry);
                let result = result.map(OpResult::plain).map_err(Error::from);
                self.shared.handles.complete([(Handle(id.0), result)]);
            }
            WorkerAction::SetRemoved(set) => {
                let after = self.ready.back().map(|execution| execution.seq);
                self.removed_sets.push_back((after, set));
            }
            WorkerAction::Tuned { seq, values } => self.announced.push_back((seq, values)),
            WorkerAction::ShutDown { why, .. } => {
                self.stopped = true;
                self.left = match why {
                    StopReason::Left(why) => Some(why),
                    _ => None,
                };
            }
            WorkerAction::Abort(lost) => self.end_generation(&lost),
        }
    }

    fn node_action(&mut self, action: NodeAction) {
        match action {
            NodeAction::Up(message) => self.send_up(&message),
            NodeAction::Down(to, message) => {
                self.frame.clear();
                for rank in to.iter() {
                    if *rank == self.topology.rank {
                        if matches!(self.node, Node::Root(_)) {
                            self.recording.cycle();
                        }
                        self.shared.lock().worker.handle_message(&message);
                    } else {
                        if self.frame.is_empty() {
                            message.encode(&mut self.frame);
                        }
                        self.send_frame(*rank);
                    }
                }
                if let Some(coordinator) = self.node.coordinator() {
                    coordinator.recycle(message);
                }
            }
            NodeAction::Stall(report) => {
                self.recording.stalled(&report);
                let unheard = unheard(&report, &self.tree);
                if report.shutdown {
                    tracing::error!("{report}{unheard}");
                } else {
                    tracing::warn!("{report}{unheard}");
                }
            }
            NodeAction::CacheEvicts(set) => {
                tracing::warn!(
                    "{CACHE_EVICTION_TEXT} Process set {}: raise HOROVOD_CACHE_CAPACITY if the names of its \
                     tensors repeat.",
                    set.0
                );
            }
            NodeAction::Abort(lost) => self.end_generation(&lost),
        }
    }

    fn send_up(&mut self, message: &ToCoordinator) {
        if let Some(parent) = self.parent() {
            self.frame.clear();
            message.encode(&mut self.frame);
            self.send_frame(parent);
        }
    }

    fn send_frame(&mut self, to: Rank) {
        if let Err(e) = self.control.send(to, &self.frame) {
            self.note_lost(to, LossCause::Connection(e.to_string()), false);
        }
    }
}

impl Node {
    /// A child or this rank's worker said something to the coordinator. `false` at a leaf, which only passes it on.
    pub(super) fn hear_from_below(
        &mut self,
        now: impl FnOnce() -> Time,
        from: Rank,
        message: &ToCoordinator,
    ) -> bool {
        match self {
            Self::Root(coordinator) => coordinator.handle_message(now(), from, message),
            Self::Inner(aggregator) => aggregator.handle_up(now(), from, message),
            Self::Leaf => return false,
        }
        true
    }

    pub(super) fn poll_action(&mut self) -> Option<NodeAction> {
        match self {
            Self::Root(coordinator) => Some(match coordinator.poll_action()? {
                CoordinatorAction::Send(to, message) => NodeAction::Down(to, message),
                CoordinatorAction::Stall(report) => NodeAction::Stall(report),
                CoordinatorAction::CacheEvicts(set) => NodeAction::CacheEvicts(set),
                CoordinatorAction::Abort(lost) => NodeAction::Abort(lost),
            }),
            Self::Inner(aggregator) => Some(match aggregator.poll_action()? {
                AggregatorAction::Up(message) => NodeAction::Up(message),
                AggregatorAction::Down(to, message) => NodeAction::Down(to, message),
                AggregatorAction::Abort(lost) => NodeAction::Abort(lost),
            }),
            Self::Leaf => None,
        }
    }
}

#[cfg(test)]
mod tests;

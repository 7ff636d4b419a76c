//! The driver of a rank: the thread that holds it makes progress on the negotiation and runs what was agreed on, in
//! order.
//!
//! This file has the ways in which a thread makes progress, and the usual part of the negotiation. The driver passes
//! messages of this rank's worker to the coordinator, and the coordinator's decisions to the workers. The order of
//! executions is in `execution`, the states of one execution are in `advance`. Other work of the control plane is in
//! `pump`, the end of a generation in `ending`. The driver's state belongs to parts with private fields. `links` owns
//! the neighbours, `membership` the lost members and the end of the generation. `queue` owns the total order,
//! `on_device` the executions on devices.

mod advance;
mod ending;
mod execution;
mod inspect;
mod links;
mod measuring;
mod membership;
mod node;
mod on_device;
mod pump;
mod queue;
mod replicas;

use std::sync::Arc;
use std::time::{Duration, Instant};

use horovod_protocol::{
    AggregatorAction, CACHE_EVICTION_TEXT, Completion, CoordinatorAction, DecodeError, EntryId,
    Leaving, LossCause, PeerLost, Rank, Time, ToCoordinator, WorkerAction,
};
use horovod_transport::{ControlEvent, Mesh};

use advance::ExecutionTask;
use execution::NextExecution;
use links::ControlPlane;
use node::{Node, NodeAction, unheard};
use pump::Pump;

use super::accelerator::DeviceBackend;
use super::backend::host::Host;
use super::backend::{Capabilities, Results};
use super::handles::{Handle, OpResult};
use super::{EngineState, Entry, nanos};
use crate::buffer::BufferPool;
use crate::config::Config;
use crate::error::Error;

/// How long an ending engine tries to send queued messages.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// First sleep between two polls of an execution that cannot begin yet; it doubles up to [`EVENT_NAP_MAX`].
const EVENT_NAP: Duration = Duration::from_micros(10);
const EVENT_NAP_MAX: Duration = Duration::from_millis(1);

/// State that is needed to make progress on this rank; one thread at a time has it.
pub(super) struct Driver {
    pump: Pump,
    host: Host,
    devices: Vec<DeviceBackend>,
    capabilities: Capabilities,
    pool: Arc<BufferPool>,
    /// Memory in which the next results are collected.
    results: Results,
    /// Memory for the tensors of the next execution.
    spare: Vec<Option<Entry>>,
    /// The submission whose operand was pre-staged last.
    staged: Option<EntryId>,
    /// An execution that was suspended, by a thread that had to leave or because it waits; it is resumed before any
    /// other work.
    suspended: Option<ExecutionTask>,
    /// The driver has panicked.
    broken: bool,
    /// When the engine's thread polls even if nothing wakes it; as [`Time`].
    ///
    /// [`Time`]: horovod_protocol::Time
    engine_polls_at: u64,
    /// Number of polls in a row that found the next execution not ready.
    idle_polls: u32,
}

/// Result of the work of the engine's thread.
pub(super) enum NextWork {
    /// Nothing is left to do until an event, or until this time has passed.
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
        // The engine thread must not take CPU time from the application.
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
            suspended: None,
            broken: false,
            engine_polls_at: 0,
            idle_polls: 0,
        }
    }

    /// Returns whether ranks outnumber the cores of this host.
    pub(super) fn is_oversubscribed(&self) -> bool {
        self.pump.links.is_oversubscribed()
    }

    /// Works as the engine's own thread, until nothing is left that could be done now.
    pub(super) fn work(&mut self) -> NextWork {
        let mut announced = false;
        loop {
            if self.broken {
                return NextWork::Finished;
            }
            self.prestage();
            let progress = self.pump.progress();
            let next_execution = self.next_execution();
            if matches!(
                next_execution,
                NextExecution::Runs | NextExecution::Fails(_)
            ) && let Some(task) = self.next_task()
            {
                self.pump.links.waiter().disarm();
                match next_execution {
                    NextExecution::Fails(failure) => self.give_up(task, failure),
                    _ => self.carry_out(task),
                }
                announced = false;
                continue;
            }
            if self.pump.finished() {
                return NextWork::Finished;
            }
            if announced && !progress && !self.pump.links.waiter().has_news() {
                let limit = self.sleep_limit();
                self.engine_polls_at = self.pump.shared.now().0.saturating_add(nanos(limit));
                return NextWork::Sleep(limit);
            }
            self.pump.links.waiter().arm();
            announced = true;
        }
    }

    /// Works as a thread that waits, until `done` or `deadline`; runs only executions that can be suspended.
    /// `has_time`: no other thread needs the core.
    pub(super) fn work_until(
        &mut self,
        deadline: Instant,
        has_time: bool,
        done: impl Fn() -> bool,
    ) {
        self.pump.links.waiter().disarm();
        self.pump.interruption.allow(deadline);
        self.pump.links.waiter().set_has_time(has_time);
        self.prestage();
        let mut spins = 0;
        loop {
            let progress = self.pump.progress();
            let next_execution = self.next_execution();
            if matches!(next_execution, NextExecution::Runs) && self.next_may_pause() {
                let Some(task) = self.next_task() else { break };
                self.carry_out(task);
                spins = 0;
                // The task was suspended, or the work for others would never end: this thread has to leave.
                if self.suspended.is_some() || done() || Instant::now() >= deadline {
                    break;
                }
                continue;
            }
            let is_for_engine = matches!(
                next_execution,
                NextExecution::Runs | NextExecution::Fails(_)
            );
            let is_over = self.pump.membership.is_over() && self.pump.on_device.is_empty();
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
            if !self.pump.links.waiter().stays_awake(spins) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let sleep = left.min(self.sleep_limit());
                self.pump.links.waiter().falls_asleep(spins, Some(sleep));
            }
            spins = spins.saturating_add(1);
        }
        self.pump.interruption.forbid();
        self.pump.links.waiter().set_has_time(false);
    }

    /// Sends and receives what is possible now. In a job of one rank, also carries out small executions, because there
    /// is no peer to wait for.
    pub(super) fn poll_once(&mut self) {
        self.prestage();
        self.pump.progress();
        while self.pump.shared.alone
            && matches!(self.next_execution(), NextExecution::Runs)
            && self.next_is_small()
        {
            let Some(task) = self.next_task() else { break };
            self.carry_out(task);
        }
    }

    /// Prepares the release of the driver lock; returns whether the engine's thread must take over now. With `polling`,
    /// that thread polls again soon on its own.
    pub(super) fn leave(&mut self, polling: bool) -> bool {
        if !polling {
            loop {
                self.pump.links.waiter().arm();
                if !self.pump.progress() && !self.pump.links.waiter().has_news() {
                    break;
                }
            }
        }
        if self.broken || self.suspended.is_some() || self.pump.shared.wanted() {
            return true;
        }
        match self.next_execution() {
            NextExecution::Nothing => {}
            NextExecution::Runs => return !polling || !self.next_may_pause(),
            // No other thread polls whether it can begin.
            NextExecution::Waits | NextExecution::Fails(_) => return true,
        }
        !polling
            && self
                .pump
                .deadline()
                .is_some_and(|at| at < self.engine_polls_at)
    }

    pub(super) fn has_task(&self) -> bool {
        self.suspended.is_some() || !self.pump.queue.is_empty()
    }

    /// Marks the driver as broken after a panic, so that neither callers nor peers wait for ever.
    pub(super) fn break_down(&mut self) {
        self.pump.queue.ended();
        self.suspended = None;
        self.broken = true;
    }

    /// Ends the driver: notifies the peers and closes the links.
    pub(super) fn end(mut self) {
        if self.broken {
            self.pump.end_generation(&PeerLost {
                rank: self.pump.links.me(),
                host: self.pump.links.host_of(self.pump.links.me()),
                cause: LossCause::CannotGoOn(
                    "the engine panicked; please report this with the log above".into(),
                ),
            });
        }
        self.pump.await_on_device();
        self.pump.take_last_figures();
        let orderly = !self.pump.membership.is_over() && !self.broken;
        for (_, backend) in &mut self.devices {
            backend.close(orderly);
        }
        if orderly
            && matches!(
                self.pump.membership.left(),
                Some(Leaving::Asked | Leaving::Ended)
            )
        {
            self.host.ended_well();
        }
        // A script that has called `shutdown` may still fail, so its report is kept.
        if orderly && self.pump.membership.left() == Some(Leaving::Ended) {
            self.pump.inspection.ended_well();
        }
        self.pump.links.goodbye(GOODBYE_TIMEOUT);
        self.pump.recording.close();
    }

    /// Returns how long a thread may sleep if nothing wakes it. A ready event does not wake the thread, so an execution
    /// that cannot begin is polled by the clock, less often each time.
    fn sleep_limit(&mut self) -> Duration {
        let limit = self.pump.sleep_limit();
        if self.idle_polls == 0 {
            return limit;
        }
        let doublings = self.idle_polls.min(16);
        limit.min((EVENT_NAP * (1 << doublings)).min(EVENT_NAP_MAX))
    }
}

impl Pump {
    /// Polls every source of events once. Returns whether there was progress.
    pub(super) fn progress(&mut self) -> bool {
        let mut progress = false;
        if self.cached_time.begin() {
            // A thread that runs one collective after the other never reaches the check before a sleep.
            self.check_neighbours(self.shared.now());
        }
        if !self.membership.is_over() {
            while let Some(event) = self.links.poll() {
                progress = true;
                match event {
                    ControlEvent::Frame { from, bytes } => self.handle_frame(from, bytes),
                    event => self.handle_control(event),
                }
                if self.membership.is_over() {
                    break;
                }
            }
            self.settle_lost_peer();
            let mut time = None;
            let deadline = self.node.next_deadline();
            if deadline.is_some() || self.inspection.polls() {
                let now = *time.insert(self.cached_time.of(&self.shared));
                if deadline.is_some_and(|deadline| deadline <= now) {
                    self.node.handle_timeout(now);
                    progress = true;
                }
            }
            progress |= !self.membership.is_over() && self.inspect(time);
        } else {
            // The last messages may still wait for space in a socket; received events no longer matter.
            while self.links.poll().is_some() {}
        }
        if let Some(state) = self.shared.round.take_state() {
            self.links.send_training_state(state);
        }
        progress |= self.complete_on_device();
        progress |= self.links.carry();
        progress |= self.send_replica_reports();
        let (relay, control) = self.links.out_of_band();
        progress |= self.recording.send_queued(relay, control);
        progress |= self.drain_actions();
        if progress {
            self.inspection.has_news();
        }
        progress
    }

    fn handle_frame(&mut self, from: Rank, bytes: Vec<u8>) {
        let handled = self.handle_message(from, &bytes);
        self.links.give_back(bytes);
        if let Err(e) = handled {
            let cause = LossCause::Unreadable(e.to_string());
            self.end_generation(&PeerLost {
                rank: from,
                host: self.links.host_of(from),
                cause,
            });
        }
    }

    fn handle_message(&mut self, from: Rank, bytes: &[u8]) -> Result<(), DecodeError> {
        let is_from_above = self.links.parent() == Some(from);
        let now = || self.cached_time.of(&self.shared);
        if is_from_above {
            let message = self.links.read_from_above(bytes)?;
            if !self.node.handle_from_parent(now, message) {
                self.shared.lock().worker.handle_message(message);
            }
        } else {
            let message = self.links.read_from_below(bytes)?;
            self.node.handle_from_child(now, from, message);
        }
        Ok(())
    }

    /// Performs the actions of the state machines until there are none left. Returns whether there were any.
    pub(super) fn drain_actions(&mut self) -> bool {
        let mut progress = false;
        loop {
            let mut state = self.shared.lock();
            let action = state.poll_action();
            self.queue.note_ready_events(state.with_event > 0);
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
                let now = || self.cached_time.of(&self.shared);
                let me = self.links.me();
                if !self.node.handle_from_child(now, me, &message) {
                    self.send_up(&message);
                }
                self.shared.lock().worker.recycle_message(message);
            }
            // Not queued: its tensors are released or will be, and its handle completes with the generation's error.
            WorkerAction::Execute(_) if self.membership.is_over() => {}
            WorkerAction::Execute(execution) => {
                self.recording.ordered(&execution);
                self.queue.push(execution);
            }
            WorkerAction::Complete(id, result) => {
                let mut state = self.shared.lock();
                let entry = state.remove(id);
                match result {
                    // Set ids are reused, and new members do not have the count of a former set with this id.
                    Ok(Completion::SetAdded(set)) => {
                        state.unnamed.remove(&set);
                    }
                    // Ranks that joined early have issued fewer calls, so all ranks restart their counts.
                    Ok(Completion::Joined { .. }) => state.unnamed.clear(),
                    _ => {}
                }
                drop(state);
                self.recording.ended_without_data(&result, entry.as_ref());
                if let (Some(metrics), true) = (&self.shared.observers.metrics, result.is_ok()) {
                    metrics.counters.control_ends();
                }
                // An owner may run foreign code, so it is dropped outside of our lock.
                drop(entry);
                let result = result.map(OpResult::plain).map_err(Error::from);
                self.shared.handles.complete([(Handle(id.0), result)]);
            }
            WorkerAction::SetRemoved(set) => self.queue.set_removed(set),
            WorkerAction::Tuned { seq, values } => self.queue.announce(seq, values),
            WorkerAction::ShutDown { why, .. } => self.membership.stop(why),
            WorkerAction::Abort(lost) => self.end_generation(&lost),
        }
    }

    fn node_action(&mut self, action: NodeAction) {
        match action {
            NodeAction::Up(message) => self.send_up(&message),
            NodeAction::Down(to, message) => {
                self.links.new_frame();
                for rank in to.iter() {
                    if *rank == self.links.me() {
                        if matches!(self.node, Node::Root(_)) {
                            self.recording.cycle();
                        }
                        self.shared.lock().worker.handle_message(&message);
                    } else {
                        self.send(*rank, |frame| message.encode(frame));
                    }
                }
                if let Some(coordinator) = self.node.coordinator() {
                    coordinator.recycle(message);
                }
            }
            NodeAction::Stall(report) => {
                self.recording.stalled(&report);
                if let Some(metrics) = &self.shared.observers.metrics {
                    metrics.counters.stalled();
                }
                let unheard = unheard(&report, self.links.tree());
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
        if let Some(parent) = self.links.parent() {
            self.send_last_figures(message);
            self.links.new_frame();
            self.send(parent, |frame| message.encode(frame));
        }
    }

    fn send(&mut self, to: Rank, encode: impl FnOnce(&mut Vec<u8>)) {
        if let Err(e) = self.links.send(to, encode) {
            self.note_lost(to, LossCause::Connection(e.to_string()));
        }
    }
}

impl Node {
    /// Passes a message of a child, or of this rank's worker, to the coordinator or aggregator. Returns `false` at a
    /// leaf, which only forwards the message.
    pub(super) fn handle_from_child(
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

//! The control plane of a rank beside the negotiation: reports of lost ranks, deadlines, how long a thread may sleep,
//! and the progress made while a collective waits.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use horovod_diagnosis::replicas;
use horovod_protocol::{LossCause, PeerLost, Rank, Time};
use horovod_transport::{Aborted, ControlEvent, Idle};

use super::links::{ControlPlane, Links};
use super::membership::Membership;
use super::node::Node;
use super::on_device::DeviceExecutions;
use super::queue::ExecutionQueue;
use super::replicas::ReplicaCheck;
use crate::config::Config;
use crate::engine::inspection::Inspection;
use crate::engine::recording::Recording;
use crate::engine::{EngineState, nanos};

/// Kind of a change of members in which a host was added; workers use the same number.
const HOSTS_ADDED: u8 = 2;
/// Longest sleep without a poll. It is only a safety net: events end a sleep at once.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// After so many polls without a sleep the clock is read, to check whether neighbours were silent for too long.
const POLLS_PER_SILENCE_CHECK: u32 = 64;

/// Memory that is reused from one report to the next.
#[derive(Default)]
pub(super) struct Measuring {
    /// The last message; the next one is built in its memory.
    pub(super) message: Vec<u8>,
}

/// The control plane: makes progress while a collective waits for its peers. Each field owns one part of the state. The
/// methods here and in the other files of the driver need several of these parts.
pub(super) struct Pump {
    pub(super) shared: Arc<EngineState>,
    pub(super) links: Links,
    pub(super) node: Node,
    pub(super) measuring: Measuring,
    pub(super) membership: Membership,
    pub(super) queue: ExecutionQueue,
    /// Executions that continue in a backend without the driver.
    pub(super) on_device: DeviceExecutions,
    pub(super) recording: Recording,
    pub(super) inspection: Inspection,
    pub(super) replica_check: ReplicaCheck,
    pub(super) interruption: Interruption,
    pub(super) cached_time: CachedTime,
}

/// The time of one poll, read at its first use.
#[derive(Default)]
pub(super) struct CachedTime {
    time: Cell<Option<Time>>,
    polls: u32,
}

impl CachedTime {
    /// Begins another poll. Returns whether it is time to check the neighbours, too.
    pub(super) fn begin(&mut self) -> bool {
        self.time.set(None);
        self.polls = self.polls.wrapping_add(1);
        self.polls.is_multiple_of(POLLS_PER_SILENCE_CHECK)
    }

    pub(super) fn of(&self, shared: &EngineState) -> Time {
        let now = self.time.get().unwrap_or_else(|| shared.now());
        self.time.set(Some(now));
        now
    }
}

/// Interruption of a collective on a thread that must be able to leave.
#[derive(Default)]
pub(super) struct Interruption {
    /// Deadline by which the thread has to leave, also in the middle of a collective.
    by: Option<Instant>,
    /// The thread has left in the middle of a collective.
    happened: bool,
}

impl Interruption {
    /// Allows interruptions: the thread that makes progress has to leave at `by`.
    pub(super) fn allow(&mut self, by: Instant) {
        self.by = Some(by);
    }

    /// Forbids interruptions: the thread that had to leave has stopped making progress.
    pub(super) fn forbid(&mut self) {
        self.by = None;
    }

    /// Returns whether a collective was interrupted since the last call.
    pub(super) fn take(&mut self) -> bool {
        std::mem::take(&mut self.happened)
    }

    /// Returns how long the thread may stay, or `None` if it does not have to leave.
    fn left(&self) -> Option<Duration> {
        let left = |by: Instant| by.saturating_duration_since(Instant::now());
        self.by.map(left)
    }
}

impl Pump {
    pub(super) fn new(config: &Config, plane: ControlPlane, shared: Arc<EngineState>) -> Self {
        let topology = &plane.topology;
        let mut node = Node::new(config, topology, &plane.tree);
        if shared.observers.metrics.is_some() {
            node.count_lateness();
        }
        Self {
            node,
            measuring: Measuring::default(),
            membership: Membership::default(),
            queue: ExecutionQueue::default(),
            on_device: DeviceExecutions::default(),
            recording: Recording::new(shared.observers.timeline.clone()),
            inspection: Inspection::new(config, shared.accelerators.timeout(), topology),
            replica_check: ReplicaCheck::new(config.negotiation.consistency.at_start),
            interruption: Interruption::default(),
            cached_time: CachedTime::default(),
            links: Links::new(plane, shared.now()),
            shared,
        }
    }

    /// Handles an event that is not a message of the negotiation.
    pub(super) fn handle_control(&mut self, event: ControlEvent) {
        match event {
            ControlEvent::OutOfBand { from, bytes } => {
                self.handle_out_of_band(from, &bytes);
                self.links.give_back(bytes);
            }
            ControlEvent::Lost(lost) => {
                self.recording.gone(lost.rank);
                self.nothing_more_from(lost.rank);
                self.note_lost(lost.rank, lost.cause);
            }
            // To leave is in order after a shutdown on which all ranks agreed. Then the loss is not noted; out-of-band
            // messages that the rank forwarded may still be on their way.
            ControlEvent::Left { rank } => {
                self.nothing_more_from(rank);
                self.note_lost(rank, LossCause::Left);
            }
            ControlEvent::Altered { rank, what } => {
                self.recording.gone(rank);
                self.nothing_more_from(rank);
                if self.needs(rank) {
                    self.end_for_altered(rank, &what);
                }
            }
            ControlEvent::Silent { rank, silence } => {
                self.recording.gone(rank);
                self.nothing_more_from(rank);
                self.give_up_silent(rank, silence);
            }
            ControlEvent::Notice(notice) => {
                if self.needs(notice.rank) {
                    self.end_generation(&notice);
                }
            }
            ControlEvent::HostsUpdated { version, kind } => {
                self.shared.round.update_hosts(|_| version, kind);
            }
            // Without the connection this process would receive no further changes, and the launcher would not notice.
            // The next round makes a new connection. If the launcher has ended, it will soon end this process, too.
            ControlEvent::LauncherLost { cause } if self.shared.round.is_elastic() => {
                tracing::warn!(
                    "lost the connection to the launcher, asking for a new round: {cause}"
                );
                self.shared
                    .round
                    .update_hosts(|version| version + 1, HOSTS_ADDED);
            }
            other => tracing::debug!("unexpected event of the control plane: {other:?}"),
        }
    }

    /// Handles a message that is not part of the negotiation.
    fn handle_out_of_band(&mut self, neighbour: Rank, bytes: &[u8]) {
        let executes = self.executes();
        let received = self.links.receive(neighbour, bytes);
        let Some(received) = received else { return };
        if Inspection::is_meant(&received) {
            self.inspection.handle(&received, &self.shared, executes);
        } else if horovod_metrics::is_message(received.message) {
            self.take_figures(&received);
        } else if replicas::is_message(received.message) {
            self.handle_replica(&received);
        } else {
            self.recording.take(&received);
        }
    }

    /// Notes that a neighbour forwards nothing more.
    fn nothing_more_from(&mut self, neighbour: Rank) {
        for rank in self.links.gone(neighbour) {
            self.recording.gone(rank);
        }
    }

    /// Returns whether the timeline's events have arrived, including those that this rank forwards. Before all
    /// ranks have agreed to stop, the result is `true`.
    fn is_recording_settled(&mut self) -> bool {
        if !self.membership.has_stopped() {
            return true;
        }
        let relayed = self.links.is_settled();
        self.recording.is_settled() && relayed
    }

    /// Returns when something is due that no event announces. The caller must have polled just before.
    pub(super) fn deadline(&self) -> Option<u64> {
        let ends = self.membership.suspected().map(|(_, deadline)| deadline);
        let ends = ends
            .into_iter()
            .chain(self.membership.shutdown_deadline())
            .min();
        let ends = ends.map(|at| nanos(at.saturating_duration_since(self.shared.started)));
        let ours = self.timer(|| self.cached_time.of(&self.shared));
        let ours = ours.map(|at| at.0);
        ours.into_iter().chain(ends).min()
    }

    /// Returns the next deadline of the node and the inspection, or `None` after the end of the generation.
    fn timer(&self, now: impl FnOnce() -> Time) -> Option<Time> {
        if self.membership.is_over() {
            return None;
        }
        let inspection = self.inspection.deadline(now);
        let inspection = inspection.filter(|_| !self.membership.has_stopped());
        self.node
            .next_deadline()
            .into_iter()
            .chain(inspection)
            .min()
    }

    /// Returns how long a thread may sleep if no event wakes it. Threads call this before every sleep, so it also
    /// checks which neighbours are silent.
    pub(super) fn sleep_limit(&mut self) -> Duration {
        let now = self.shared.now();
        if self.check_neighbours(now) {
            return Duration::ZERO;
        }
        let mut limit = SLEEP_MAX;
        let polls = self
            .links
            .heartbeat_due()
            .filter(|_| !self.membership.is_over());
        if let Some(at) = polls.into_iter().chain(self.timer(|| now)).min() {
            limit = limit.min(Duration::from_nanos(at.0.saturating_sub(now.0)));
        }
        if !self.membership.is_over()
            && !self.membership.has_stopped()
            && !self.executes()
            && let Some(at) = self.inspection.soft_deadline(&self.shared, now)
        {
            limit = limit.min(Duration::from_nanos(at.0.saturating_sub(now.0)));
        }
        if let Some((_, deadline)) = self.membership.suspected() {
            limit = limit.min(deadline.saturating_duration_since(Instant::now()));
        }
        if let Some(deadline) = self.membership.shutdown_deadline()
            && (!self.carries_out() || !self.membership.has_stopped())
        {
            limit = limit.min(deadline.saturating_duration_since(Instant::now()));
        }
        limit
    }

    /// If it is time, sends a heartbeat to the neighbours and checks theirs, polls the devices and sends figures.
    /// Returns whether there may be an event.
    pub(super) fn check_neighbours(&mut self, now: Time) -> bool {
        !self.membership.is_over()
            && (self.links.check_neighbours(now) | self.watch_devices(now) | self.send_figures(now))
    }

    /// Returns whether the thread may end: this process has asked to leave, and the peers have been notified or cannot
    /// be.
    pub(super) fn finished(&mut self) -> bool {
        let overdue = self.shutdown_overdue();
        // Events that a caller has yet to record must still be sent.
        let stopped = self.membership.has_stopped();
        let telling = stopped && self.shared.callers.has_recorded_calls();
        let unsent = self.links.has_unsent()
            || telling
            || self.shared.replicas.has_queued()
            || !self.is_recording_settled();
        if overdue && !self.on_device.is_empty() {
            self.end_overdue();
        }
        // Executions that were agreed before the stop still run.
        let unsent = unsent || self.queue.is_running() || !self.queue.is_empty();
        self.on_device.is_empty()
            && self.shared.shutdown.is_requested()
            && (self.membership.is_over() || (stopped && !unsent) || overdue)
    }

    /// Returns whether this process has asked to leave and the time that it gives the others is over.
    fn shutdown_overdue(&mut self) -> bool {
        self.shared.shutdown.is_requested() && self.membership.is_overdue()
    }
}

impl Pump {
    /// Ends the generation because the time that this leaving process gives the others is over.
    fn end_overdue(&mut self) {
        let rank = self.links.me();
        self.end_generation(&PeerLost {
            rank,
            host: self.links.host_of(rank),
            cause: LossCause::CannotGoOn("left because not all ranks answered its shutdown".into()),
        });
    }
}

impl Idle for Pump {
    fn idle(&mut self, spins: u32) -> Result<(), Aborted> {
        let progress = self.progress();
        // A peer that is stuck neither answers the shutdown nor continues the collective.
        if !self.membership.has_stopped() && self.shutdown_overdue() {
            self.end_overdue();
        }
        if let Some(error) = self.membership.cause() {
            return Err(Aborted(error.to_string().into()));
        }
        if progress {
            return Ok(());
        }
        if !self.links.waiter().stays_awake(spins) {
            let mut sleep = self.sleep_limit();
            if let Some(left) = self.interruption.left() {
                if left.is_zero() || self.shared.wanted() {
                    self.interruption.happened = true;
                    return Err(Aborted("its thread had to leave".into()));
                }
                sleep = sleep.min(left);
            }
            self.links.waiter().falls_asleep(spins, Some(sleep));
        }
        Ok(())
    }
}

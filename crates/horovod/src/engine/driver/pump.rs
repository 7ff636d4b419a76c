//! The control plane of a rank beside the negotiation: news of who is gone, deadlines, how long a thread may sleep, and
//! what goes on while a collective waits.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use horovod_protocol::{
    Execution, Leaving, LossCause, PeerLost, ProcessSetId, Rank, Response, Seq, Time,
    ToCoordinator, ToWorker, Tree,
};
use horovod_transport::{Aborted, Control, ControlEvent, Idle, Topology, Waiter};

use super::ending::Suspect;
use super::flights::Flights;
use super::inspect::Runs;
use super::node::Node;
use super::replicas::ReplicaCheck;
use crate::config::Config;
use crate::engine::backend::host::Announced;
use crate::engine::inspection::Inspection;
use crate::engine::recording::Recording;
use crate::engine::relay::Relay;
use crate::engine::{EngineState, SHUTDOWN_GRACE, nanos};
use crate::error::Error;
use crate::replicas;

/// The kind of a change of members in which somebody comes, as workers know it.
const HOSTS_ADDED: u8 = 2;
/// Longest sleep without looking around; only a safety net, events end a sleep at once.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// The control plane: what makes progress while a collective waits for its peers.
pub(super) struct Pump {
    pub(super) shared: Arc<EngineState>,
    pub(super) control: Control,
    pub(super) waiter: Waiter,
    pub(super) topology: Topology,
    pub(super) tree: Tree,
    pub(super) node: Node,
    pub(super) ready: VecDeque<Execution>,
    /// Tensors of these, or of what is still negotiated, have a ready event.
    pub(super) has_ready_events: bool,
    pub(super) announced: Announced,
    /// Process sets that were removed, each after this execution, if that has not begun.
    pub(super) removed_sets: VecDeque<(Option<Seq>, ProcessSetId)>,
    /// A peer that is gone, until the launcher's word or the deadline.
    pub(super) lost: Option<Suspect>,
    /// The generation is over; why.
    pub(super) dead: Option<Error>,
    /// All ranks have agreed to stop.
    pub(super) stopped: bool,
    /// Because a rank has left; why the first of them did.
    pub(super) left: Option<Leaving>,
    /// Members of the execution that was started and has not ended.
    pub(super) running: Option<Arc<[Rank]>>,
    /// Executions that go on by themselves.
    pub(super) flights: Flights,
    pub(super) shutdown_deadline: Option<Instant>,
    /// The thread in charge has to leave by then, also in the middle of a collective.
    pub(super) leave_by: Option<Instant>,
    /// It did leave in the middle of one.
    pub(super) broken_off: bool,
    pub(super) frame: Vec<u8>,
    /// The last messages; the next are read into their memory.
    pub(super) heard_from_below: ToCoordinator,
    pub(super) heard_from_above: ToWorker,
    pub(super) spare_responses: Vec<Arc<Response>>,
    pub(super) recording: Recording,
    pub(super) relay: Relay,
    pub(super) inspection: Inspection,
    pub(super) replica_check: ReplicaCheck,
    /// The collective that runs now, for reports of stalls.
    pub(super) runs: Option<Runs>,
    /// How long a neighbour may be silent; `None`: for ever.
    pub(super) heartbeat: Option<Duration>,
    pub(super) polls: u32,
    pub(super) moment: Moment,
}

/// The time of one look at everything, read when it is first asked for.
#[derive(Default)]
pub(super) struct Moment(Cell<Option<Time>>);

impl Moment {
    pub(super) fn of(&self, shared: &EngineState) -> Time {
        let now = self.0.get().unwrap_or_else(|| shared.now());
        self.0.set(Some(now));
        now
    }
}

/// What the pump needs of the mesh: all but the links for data.
pub(super) struct ControlPlane {
    /// Who there is, and where.
    pub(super) topology: Topology,
    /// Who talks to whom in the negotiation.
    pub(super) tree: Tree,
    /// The links along that tree.
    pub(super) control: Control,
    /// How long one of them may be silent; `None`: for ever.
    pub(super) heartbeat: Option<Duration>,
    /// Where to wait for all of them.
    pub(super) waiter: Waiter,
}

impl Pump {
    pub(super) fn new(config: &Config, plane: ControlPlane, shared: Arc<EngineState>) -> Self {
        let ControlPlane {
            topology,
            tree,
            mut control,
            heartbeat,
            waiter,
        } = plane;
        let node = Node::new(config, &topology, &tree);
        if let Some(timeout) = heartbeat {
            control.watch(timeout, shared.now());
        }
        Self {
            heartbeat,
            polls: 0,
            moment: Moment::default(),
            recording: Recording::new(shared.timeline.clone()),
            relay: Relay::new(topology.rank, tree.clone()),
            inspection: Inspection::new(config, &topology),
            replica_check: ReplicaCheck::new(config.consistency.at_start),
            runs: None,
            shared,
            control,
            waiter,
            topology,
            tree,
            node,
            ready: VecDeque::new(),
            has_ready_events: false,
            announced: Announced::new(),
            removed_sets: VecDeque::new(),
            lost: None,
            dead: None,
            stopped: false,
            left: None,
            running: None,
            flights: Flights::default(),
            shutdown_deadline: None,
            leave_by: None,
            broken_off: false,
            frame: Vec::new(),
            heard_from_below: ToCoordinator::empty(),
            heard_from_above: ToWorker::empty(),
            spare_responses: Vec::new(),
        }
    }

    /// Anything but a message of the negotiation.
    pub(super) fn handle_control(&mut self, event: ControlEvent) {
        match event {
            ControlEvent::OutOfBand { from, bytes } => {
                self.handle_out_of_band(from, &bytes);
                self.control.give_back(bytes);
            }
            ControlEvent::Lost(lost) => {
                self.recording.gone(lost.rank);
                self.nothing_more_from(lost.rank);
                self.note_lost(lost.rank, lost.cause, false);
            }
            // Good order is to leave after a shutdown that all agreed to; then this does nothing but that what
            // the rank has told may still be on its way, unless it told it here.
            ControlEvent::Left { rank } => {
                self.nothing_more_from(rank);
                self.note_lost(rank, LossCause::Left, true);
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
                self.shared.update_hosts(|_| version, kind);
            }
            // It would never hear of changes again, and the launcher nothing of it: in the next round it has a new
            // connection. If the launcher is gone, this process will soon be, too.
            ControlEvent::LauncherLost { cause } if self.shared.is_elastic => {
                tracing::warn!(
                    "lost the connection to the launcher, asking for a new round: {cause}"
                );
                self.shared.update_hosts(|version| version + 1, HOSTS_ADDED);
            }
            other => tracing::debug!("unexpected event of the control plane: {other:?}"),
        }
    }

    /// A message that is no part of the negotiation.
    fn handle_out_of_band(&mut self, neighbour: Rank, bytes: &[u8]) {
        let executes = self.executes();
        let received = self.relay.receive(&mut self.control, neighbour, bytes);
        let Some(received) = received else { return };
        if Inspection::is_meant(&received) {
            self.inspection.hears(&received, &self.shared, executes);
        } else if replicas::is_message(received.message) {
            self.hear_replica(&received);
        } else {
            self.recording.hears(&received);
        }
    }

    /// A neighbour passes nothing on any more.
    fn nothing_more_from(&mut self, neighbour: Rank) {
        for rank in self.relay.gone(neighbour) {
            self.recording.gone(rank);
        }
    }

    /// Whether the timeline's events are where they belong, also those that pass through here.
    fn is_recording_settled(&mut self) -> bool {
        if !self.stopped {
            return true;
        }
        let relayed = self.relay.is_settled();
        self.recording.is_settled() && relayed
    }

    pub(super) fn parent(&self) -> Option<Rank> {
        self.tree.parent(self.topology.rank)
    }

    /// When something is to be done that no event announces. For who has just looked at everything.
    pub(super) fn deadline(&self) -> Option<u64> {
        let ends = self.lost.iter().map(|suspect| suspect.deadline);
        let ends = ends.chain(self.shutdown_deadline).min();
        let ends = ends.map(|at| nanos(at.saturating_duration_since(self.shared.started)));
        let ours = self.timer(|| self.moment.of(&self.shared));
        let ours = ours.map(|at| at.0);
        ours.into_iter().chain(ends).min()
    }

    /// The same, of the state machines: none any more when the generation is over.
    fn timer(&self, now: impl FnOnce() -> Time) -> Option<Time> {
        if self.dead.is_some() {
            return None;
        }
        let inspection = self.inspection.deadline(now).filter(|_| !self.stopped);
        self.node
            .next_deadline()
            .into_iter()
            .chain(inspection)
            .min()
    }

    /// How long a thread may sleep if nothing wakes it. It is asked before every sleep, so here is also found out who
    /// is silent.
    pub(super) fn sleep_limit(&mut self) -> Duration {
        let now = self.shared.now();
        if self.look_after_neighbours(now) {
            return Duration::ZERO;
        }
        let mut limit = SLEEP_MAX;
        let looks = self.control.look_due().filter(|_| self.dead.is_none());
        if let Some(at) = looks.into_iter().chain(self.timer(|| now)).min() {
            limit = limit.min(Duration::from_nanos(at.0.saturating_sub(now.0)));
        }
        if self.dead.is_none()
            && !self.stopped
            && !self.executes()
            && let Some(at) = self.inspection.soft_deadline(&self.shared, now)
        {
            limit = limit.min(Duration::from_nanos(at.0.saturating_sub(now.0)));
        }
        if let Some(suspect) = &self.lost {
            limit = limit.min(suspect.deadline.saturating_duration_since(Instant::now()));
        }
        if let Some(deadline) = self.shutdown_deadline
            && (!self.carries_out() || !self.stopped)
        {
            limit = limit.min(deadline.saturating_duration_since(Instant::now()));
        }
        limit
    }

    /// Tells the neighbours that this rank lives and sees whether they do, if it is time. `true`: there may be news.
    pub(super) fn look_after_neighbours(&mut self, now: Time) -> bool {
        self.dead.is_none() && (self.control.look_after(now) | self.watch_gpus(now))
    }

    /// Whether the thread may end: this process asked for it and the peers know, or cannot be told.
    pub(super) fn finished(&mut self) -> bool {
        let overdue = self.shutdown_overdue();
        // What a caller still has to tell of itself must not come too late.
        let telling = self.stopped && self.shared.recorded_calls.load(Ordering::SeqCst) > 0;
        let unsent = self.control.has_unsent()
            || telling
            || self.shared.replicas.has_queued()
            || !self.is_recording_settled();
        if overdue && !self.flights.is_empty() {
            self.end_overdue();
        }
        // What was agreed before the stop is carried out.
        let unsent = unsent || self.running.is_some() || !self.ready.is_empty();
        self.flights.is_empty()
            && self.shared.shutdown_requested.load(Ordering::Acquire)
            && (self.dead.is_some() || (self.stopped && !unsent) || overdue)
    }

    /// Whether this process has asked to leave and the time that it gives the others is over.
    fn shutdown_overdue(&mut self) -> bool {
        if !self.shared.shutdown_requested.load(Ordering::Acquire) {
            return false;
        }
        let now = Instant::now();
        now >= *self.shutdown_deadline.get_or_insert(now + SHUTDOWN_GRACE)
    }
}

impl Pump {
    /// This process has asked to leave, and the time that it gives the others is over.
    fn end_overdue(&mut self) {
        let rank = self.topology.rank;
        self.end_generation(&PeerLost {
            rank,
            host: self.host_of(rank),
            cause: LossCause::CannotGoOn("left because not all ranks answered its shutdown".into()),
        });
    }
}

impl Idle for Pump {
    fn idle(&mut self, spins: u32) -> Result<(), Aborted> {
        let progress = self.progress();
        // A peer that is stuck neither answers the shutdown nor goes on with the collective.
        if !self.stopped && self.shutdown_overdue() {
            self.end_overdue();
        }
        if let Some(error) = &self.dead {
            return Err(Aborted(error.to_string().into()));
        }
        if progress {
            return Ok(());
        }
        if !self.waiter.stays_awake(spins) {
            let mut sleep = self.sleep_limit();
            if let Some(leave_by) = self.leave_by {
                let left = leave_by.saturating_duration_since(Instant::now());
                if left.is_zero() || self.shared.wanted() {
                    self.broken_off = true;
                    return Err(Aborted("its thread had to leave".into()));
                }
                sleep = sleep.min(left);
            }
            self.waiter.falls_asleep(spins, Some(sleep));
        }
        Ok(())
    }
}

//! The driver's part of measuring a job: begin and end of executions, and the reports to the parent in the tree.

use horovod_metrics::{
    DriverFigures, FoundLateness, Link, MeasuredOperation, Metrics, OperationKind, Round,
};
use horovod_protocol::{
    Device, Execution, Rank, SetKey, SetLateness, StalledRequest, Submission, Time, ToCoordinator,
};

use super::node::Node;
use super::pump::Pump;
use crate::engine::backend::host::bytes_of_all;
use crate::engine::relay::OutOfBandMessage;

/// An operation that some ranks began so long ago is reported with the ranks that have not begun it.
const HANG_NS: u64 = 2_000_000_000;

impl Pump {
    /// Starts the measurement of an execution; returns `None` if the job is not measured.
    pub(super) fn measure_begin(&self) -> Option<MeasuredOperation> {
        self.shared
            .observers
            .metrics
            .as_ref()
            .map(Metrics::execution)
    }

    /// Counts an execution that has ended without an error.
    pub(super) fn measure_end(&self, execution: &Execution) {
        let Some(metrics) = &self.shared.observers.metrics else {
            return;
        };
        let link = match execution.device {
            Device::Cpu => metrics.link(&execution.members),
            _ => Link::Device,
        };
        metrics.counters.executed(
            OperationKind::of(&execution.op),
            link,
            execution.items.len(),
            bytes_of_all(execution),
        );
    }

    /// Sends the periodic report, if it is time. Returns whether something was sent.
    pub(super) fn send_figures(&mut self, now: Time) -> bool {
        let metrics = self.shared.observers.metrics.as_ref();
        metrics.is_some_and(|metrics| metrics.is_due(now.0)) && self.report_figures(Round::Periodic)
    }

    /// Sends the last figures before a message after which this rank may receive and send nothing more.
    pub(super) fn send_last_figures(&mut self, message: &ToCoordinator) {
        if self.shared.observers.metrics.is_some()
            && matches!(
                message.items.last(),
                Some(Submission::ShutdownAck | Submission::Shutdown(_))
            )
        {
            self.report_figures(Round::Last);
        }
    }

    /// Adds this rank's figures to the report, without sending it.
    pub(super) fn take_last_figures(&mut self) {
        let Some(metrics) = self.shared.observers.metrics.clone() else {
            return;
        };
        let now = metrics.now();
        let incomplete = self.incomplete(Time(now));
        metrics.report(now, self.driver_figures(incomplete));
    }

    /// On rank 0: returns the operations for which some ranks have been missing for longer than [`HANG_NS`].
    fn incomplete(&mut self, now: Time) -> Vec<StalledRequest> {
        match (self.node.coordinator(), now.0.checked_sub(HANG_NS)) {
            (Some(coordinator), Some(before)) => coordinator.late(now, Time(before)),
            _ => Vec::new(),
        }
    }

    fn driver_figures(&self, incomplete: Vec<StalledRequest>) -> DriverFigures {
        let state = self.shared.lock();
        let (cache_hits, cache_misses) = state.worker.cache_use();
        DriverFigures {
            queued: state.worker.pending(),
            cache_hits,
            cache_misses,
            lateness: self.node.lateness(self.links.me()),
            incomplete,
        }
    }

    fn report_figures(&mut self, round: Round) -> bool {
        self.take_last_figures();
        self.pass_on_figures(round)
    }

    fn pass_on_figures(&mut self, round: Round) -> bool {
        let (Some(metrics), Some(parent)) = (&self.shared.observers.metrics, self.links.parent())
        else {
            return false;
        };
        let mut message = std::mem::take(&mut self.measuring.message);
        metrics.write_message(&mut message, round);
        let sent = self.send_to_parent(parent, &message);
        self.measuring.message = message;
        sent
    }

    fn send_to_parent(&mut self, parent: Rank, message: &[u8]) -> bool {
        let (relay, control) = self.links.out_of_band();
        // If this report cannot be sent now, the next one includes its figures. The driver detects a lost peer
        // elsewhere.
        matches!(relay.send(control, parent, message), Ok(true))
    }

    /// Adds the figures that a child in the tree has sent.
    pub(super) fn take_figures(&mut self, received: &OutOfBandMessage<'_>) {
        let from = received.from;
        if self.links.tree().parent(from) != Some(self.links.me()) {
            return;
        }
        // Each rank has its own setting, so a child may measure while this rank does not. This rank then forwards the
        // report.
        let Some(metrics) = &self.shared.observers.metrics else {
            if let Some(parent) = self.links.parent() {
                self.send_to_parent(parent, received.message);
            }
            return;
        };
        let found = FoundLateness {
            child: from,
            of_child: self.node.lateness(from),
            compared: self.node.compared_sets(),
            behind: |rank| self.node.lateness_behind(rank),
        };
        match metrics.take_message(received.message, &found) {
            Ok(true) => {
                self.pass_on_figures(Round::Last);
            }
            Ok(false) => {}
            Err(e) => tracing::warn!("{from} sent unreadable figures: {e}"),
        }
    }
}

impl Node {
    pub(super) fn count_lateness(&mut self) {
        match self {
            Self::Root(coordinator) => coordinator.count_lateness(),
            Self::Inner(aggregator) => aggregator.count_lateness(),
            Self::Leaf => {}
        }
    }

    fn lateness_behind(&self, rank: Rank) -> Vec<SetLateness> {
        match self {
            Self::Root(coordinator) => coordinator.lateness_behind(rank),
            Self::Inner(_) | Self::Leaf => Vec::new(),
        }
    }

    fn compared_sets(&self) -> Vec<SetKey> {
        match self {
            Self::Root(coordinator) => coordinator.compared_sets(),
            Self::Inner(aggregator) => aggregator.compared_sets(),
            Self::Leaf => Vec::new(),
        }
    }

    fn lateness(&self, child: Rank) -> Vec<SetLateness> {
        match self {
            Self::Root(coordinator) => coordinator.lateness(child),
            Self::Inner(aggregator) => aggregator.lateness(child),
            Self::Leaf => Vec::new(),
        }
    }
}

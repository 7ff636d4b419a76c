//! The driver's part of measuring a job: when executions begin and end, and the reports to the parent in the tree.

use horovod_metrics::{Begun, DriverFigures, Kind, Link, Round};
use horovod_protocol::{Device, Execution, Lateness, Rank, Submission, Time, ToCoordinator};

use super::node::Node;
use super::pump::Pump;
use crate::engine::Entry;
use crate::engine::backend::host::bytes_of_all;
use crate::engine::relay::OutOfBandMessage;

/// Memory that stays from one report to the next.
#[derive(Default)]
pub(super) struct Measuring {
    /// The last message; the next is put together in its memory.
    message: Vec<u8>,
}

impl Pump {
    /// An execution of these operations begins.
    pub(super) fn measure_begin(&self, entries: &[Option<Entry>]) -> Option<Begun> {
        let metrics = self.shared.metrics.as_ref()?;
        let called_back = entries.iter().flatten().filter_map(|e| e.called_back);
        let called_back = called_back.map(|submitted| submitted.0).min();
        Some(
            metrics
                .counters
                .execution_begins(metrics.now(), called_back),
        )
    }

    /// It has ended well.
    pub(super) fn measure_end(&self, begun: Option<Begun>, execution: &Execution) {
        let (Some(begun), Some(metrics)) = (begun, &self.shared.metrics) else {
            return;
        };
        let link = match execution.device {
            Device::Cpu => metrics.link(&execution.members),
            _ => Link::Device,
        };
        metrics.counters.execution_ends(
            begun,
            metrics.now(),
            Kind::of(&execution.op),
            link,
            execution.items.len(),
            bytes_of_all(execution),
        );
    }

    /// Sends the report of a second, if it is time. `true`: something was sent.
    pub(super) fn send_figures(&mut self, now: Time) -> bool {
        let metrics = self.shared.metrics.as_ref();
        metrics.is_some_and(|metrics| metrics.is_due(now.0)) && self.report_figures(Round::Periodic)
    }

    /// Before the message after which this rank may hear nothing more, and be heard no more.
    pub(super) fn send_last_figures(&mut self, message: &ToCoordinator) {
        if self.shared.metrics.is_some()
            && matches!(
                message.items.last(),
                Some(Submission::ShutdownAck | Submission::Shutdown(_))
            )
        {
            self.report_figures(Round::Last);
        }
    }

    /// Nothing more is carried out here.
    pub(super) fn take_last_figures(&self) {
        if let Some(metrics) = &self.shared.metrics {
            metrics.report(metrics.now(), self.driver_figures());
        }
    }

    fn driver_figures(&self) -> DriverFigures {
        let state = self.shared.lock();
        let (cache_hits, cache_misses) = state.worker.cache_use();
        DriverFigures {
            queued: state.worker.pending(),
            cache_hits,
            cache_misses,
            lateness: self.node.lateness(self.links.me()),
        }
    }

    fn report_figures(&mut self, round: Round) -> bool {
        self.take_last_figures();
        self.pass_on_figures(round)
    }

    fn pass_on_figures(&mut self, round: Round) -> bool {
        let (Some(metrics), Some(parent)) = (&self.shared.metrics, self.links.parent()) else {
            return false;
        };
        let mut message = std::mem::take(&mut self.measuring.message);
        metrics.write_message(&mut message, round);
        let (relay, control) = self.links.out_of_band();
        // Where it cannot be sent now, the next one says the same. The driver notices a lost peer elsewhere.
        let sent = relay.send(control, parent, &message);
        self.measuring.message = message;
        matches!(sent, Ok(true))
    }

    /// A neighbour reports.
    pub(super) fn take_figures(&mut self, received: &OutOfBandMessage<'_>) {
        let from = received.from;
        let is_child = self.links.tree().parent(from) == Some(self.links.me());
        // A rank may measure where another does not: each has its own setting.
        let Some(metrics) = self.shared.metrics.as_ref().filter(|_| is_child) else {
            return;
        };
        let behind = |rank| self.node.lateness_behind(rank);
        match metrics.take_message(received.message, self.node.lateness(from), behind) {
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

    fn lateness_behind(&self, rank: Rank) -> Lateness {
        match self {
            Self::Root(coordinator) => coordinator.lateness_behind(rank),
            Self::Inner(_) | Self::Leaf => Lateness::default(),
        }
    }

    fn lateness(&self, child: Rank) -> Lateness {
        match self {
            Self::Root(coordinator) => coordinator.lateness(child),
            Self::Inner(aggregator) => aggregator.lateness(child),
            Self::Leaf => Lateness::default(),
        }
    }
}

//! This rank's place in the negotiation's tree: the coordinator at its root, an aggregator where other ranks send
//! through this rank, nothing at a leaf.

use std::sync::Arc;
use std::time::Duration;

use horovod_protocol::{
    Aggregator, AggregatorConfig, Coordinator, CoordinatorConfig, PeerLost, ProcessSetId, Rank,
    StallConfig, StallReport, Time, ToCoordinator, ToWorker, Tree,
};
use horovod_transport::Topology;

use crate::config::Config;
use crate::engine::nanos;

/// An aggregator may hold back a request that only some ranks below it have announced for so long. Each level delays
/// the report of stragglers by this time. The time is far below any warning time, and seldom passes if ranks run in
/// step.
const HOLD: Duration = Duration::from_millis(100);

/// This rank's node in the control tree, between the workers and the coordinator.
pub(super) enum Node {
    Root(Box<Coordinator>),
    Inner(Box<Aggregator>),
    Leaf,
}

/// An action of the node for the engine.
pub(super) enum NodeAction {
    /// Send to the parent.
    Up(ToCoordinator),
    /// Send to these children; this rank may be among them, for its own worker.
    Down(Arc<[Rank]>, ToWorker),
    /// Report the ranks that are late.
    Stall(StallReport),
    /// Warn that the response cache of this set is too small.
    CacheEvicts(ProcessSetId),
    /// End the generation.
    Abort(PeerLost),
}

impl Node {
    pub(super) fn new(config: &Config, topology: &Topology, tree: &Tree) -> Self {
        let (rank, generation) = (topology.rank, topology.generation);
        if rank == Rank(0) {
            let config = CoordinatorConfig {
                size: topology.size,
                generation,
                fusion_threshold_bytes: config.negotiation.fusion_threshold,
                cache_capacity: config.negotiation.cache_capacity,
                batch_delay_ns: nanos(config.negotiation.cycle_time),
                disable_group_fusion: config.negotiation.disable_group_fusion,
                stall: config.stalls.check.map(|warning| StallConfig {
                    warning_ns: nanos(warning),
                    shutdown_ns: config.stalls.shutdown.map(nanos),
                }),
            };
            return Self::Root(Box::new(Coordinator::with_tree(config, tree)));
        }
        let config = AggregatorConfig {
            rank,
            generation,
            hold_ns: nanos(HOLD),
        };
        let aggregator = Aggregator::new(config, tree);
        aggregator.map_or(Self::Leaf, |aggregator| Self::Inner(Box::new(aggregator)))
    }

    pub(super) fn coordinator(&mut self) -> Option<&mut Coordinator> {
        match self {
            Self::Root(coordinator) => Some(coordinator),
            Self::Inner(_) | Self::Leaf => None,
        }
    }

    /// Handles a message of the parent to the workers. Returns whether an aggregator took it; otherwise it is for this
    /// rank's own worker, unchanged.
    pub(super) fn handle_from_parent(
        &mut self,
        now: impl FnOnce() -> Time,
        message: &ToWorker,
    ) -> bool {
        match self {
            Self::Inner(aggregator) => aggregator.handle_down(now(), message),
            Self::Root(_) | Self::Leaf => return false,
        }
        true
    }

    pub(super) fn lose_peer(&mut self, now: Time, lost: &PeerLost) {
        match self {
            Self::Root(coordinator) => coordinator.handle_peer_lost(now, lost.clone()),
            Self::Inner(aggregator) => aggregator.handle_peer_lost(now, lost),
            Self::Leaf => {}
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        match self {
            Self::Root(coordinator) => coordinator.next_deadline(),
            Self::Inner(aggregator) => aggregator.next_deadline(),
            Self::Leaf => None,
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        match self {
            Self::Root(coordinator) => coordinator.handle_timeout(now),
            Self::Inner(aggregator) => aggregator.handle_timeout(now),
            Self::Leaf => {}
        }
    }
}

/// Returns a sentence for each rank that is silent together with all ranks behind it, which cannot send either. The
/// stall report does not separate that rank from those behind it. The text is empty in most cases.
pub(super) fn unheard(report: &StallReport, tree: &Tree) -> String {
    let mut text = String::new();
    let Some(first) = report.stalled.first() else {
        return text;
    };
    let missing_everywhere = |rank: &Rank| {
        let mut requests = report.stalled.iter();
        requests.all(|request| !request.waiting.contains(rank))
    };
    for silent in first.missing.iter().filter(|rank| tree.aggregates(**rank)) {
        let behind: Vec<Rank> = (silent.0 + 1..tree.size())
            .map(Rank)
            .filter(|rank| tree.child_towards(*silent, *rank).is_some())
            .collect();
        if missing_everywhere(silent) && behind.iter().all(missing_everywhere) {
            let behind: Vec<String> = behind.iter().map(ToString::to_string).collect();
            text += &format!(
                "\nWhat {} said comes through {silent}: if that process is stopped, look there first.",
                behind.join(", ")
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use horovod_protocol::StalledRequest;

    use super::*;

    #[test]
    fn a_report_says_whom_a_silent_rank_hides() {
        let tree = Tree::new(&[0; 6], 2); // 1 and 2 below 0; 3 and 4 below 1; 5 below 2
        let report = |waiting: &[u32], missing: &[u32]| {
            let ranks = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect();
            StallReport {
                warning_ns: 1,
                shutdown_ns: None,
                shutdown: false,
                stalled: vec![StalledRequest {
                    set: ProcessSetId::GLOBAL,
                    name: "x".into(),
                    waiting: ranks(waiting),
                    missing: ranks(missing),
                    waited_ns: 2,
                }],
            }
        };
        let text = unheard(&report(&[0, 2, 5], &[1, 3, 4]), &tree);
        assert_eq!(
            text,
            "\nWhat rank 3, rank 4 said comes through rank 1: if that process is stopped, look there first."
        );
        assert_eq!(unheard(&report(&[0, 2, 4, 5], &[1, 3]), &tree), "");
        assert_eq!(unheard(&report(&[0, 1, 2, 5], &[3, 4]), &tree), "");
        assert_eq!(unheard(&report(&[0, 2], &[1]), &Tree::star(3)), "");
    }
}

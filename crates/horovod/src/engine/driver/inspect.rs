//! The control plane's search for the reason of a stall.

use std::collections::VecDeque;
use std::sync::Arc;

use horovod_protocol::{
    Execution, LossCause, PeerLost, ProcessSetId, Rank, StalledRequest, StopReason, Time,
};

use super::flights::Flights;
use super::pump::Pump;
use crate::engine::inspection::{Deadlock, GpuNews, InHand, Surroundings};
use crate::hang::Key;

/// A collective on its way.
pub(super) struct Runs {
    /// Since when, as [`horovod_protocol::Time`]; only rank 0 reads the clock for it.
    since: u64,
    set: ProcessSetId,
    name: Arc<str>,
    members: Arc<[Rank]>,
}

/// Names of operations that all ranks have agreed on and that have not ended; of a fused collective that runs, the first.
fn names_in_hand(runs: Option<&Runs>, flights: &Flights, ready: &VecDeque<Execution>) -> Vec<Key> {
    let runs = runs.map(|runs| (runs.set.0, runs.name.clone()));
    let later = flights.executions().chain(ready);
    let later = later.flat_map(|execution| {
        let items = execution.items.iter();
        items.map(|item| (execution.set.0, item.name.clone()))
    });
    runs.into_iter().chain(later).collect()
}

impl Pump {
    /// A collective begins; it may be broken off and taken up again.
    pub(super) fn begins(&mut self, execution: &Execution) {
        let leads = self.inspection.leads();
        self.runs = execution.items.first().map(|item| Runs {
            since: if leads { self.shared.now().0 } else { 0 },
            set: execution.set,
            name: item.name.clone(),
            members: execution.members.clone(),
        });
    }

    /// Look at what GPUs are at. `true`: something is to be said, or was done about it.
    pub(super) fn watch_gpus(&mut self, now: Time) -> bool {
        let surroundings = Surroundings {
            stopped: self.stopped,
            executes: self.executes(),
        };
        let (shared, size) = (&self.shared, self.topology.size);
        match self.inspection.watch_gpus(now, shared, size, surroundings) {
            GpuNews::None => return false,
            GpuNews::Said => {}
            GpuNews::Stuck(stuck) => {
                if let Some(why) = self.inspection.tell_of_gpus(&stuck, &self.topology) {
                    self.end_for_gpu(why);
                }
            }
            GpuNews::GiveUp(why) => {
                tracing::error!("{why}");
                self.end_for_gpu(why);
            }
        }
        true
    }

    /// An operation does not end on GPUs, and its time is over.
    fn end_for_gpu(&mut self, why: String) {
        let rank = self.topology.rank;
        self.end_generation(&PeerLost {
            rank,
            host: self.host_of(rank),
            cause: LossCause::Stuck(why),
        });
    }

    /// Whether an execution was started and has not ended.
    pub(super) fn carries_out(&self) -> bool {
        self.running.is_some() || !self.flights.is_empty()
    }

    /// The same, or it is about to be.
    pub(super) fn executes(&self) -> bool {
        self.carries_out() || !self.ready.is_empty()
    }

    /// Ask, answer and tell. `true`: something was sent. The time is given on rank 0, which has it at hand.
    pub(super) fn inspect(&mut self, now: Option<Time>) -> bool {
        if self.stopped || !self.inspection.is_due(now, &self.shared) {
            return false;
        }
        let now = self.shared.now();
        let me = self.topology.rank;
        let leads = self.inspection.leads();
        let running = self.runs.as_ref().filter(|_| leads);
        let running = running.map(|runs| StalledRequest {
            set: runs.set,
            name: runs.name.clone(),
            waiting: vec![me],
            missing: runs
                .members
                .iter()
                .copied()
                .filter(|rank| *rank != me)
                .collect(),
            waited_ns: now.0.saturating_sub(runs.since),
        });
        let (sent, found) = self.inspection.poll(
            now,
            self.node.coordinator(),
            &self.shared,
            &self.relay,
            &mut self.control,
            InHand {
                running,
                names: &|| names_in_hand(self.runs.as_ref(), &self.flights, &self.ready),
            },
        );
        let Some(found) = found else { return sent };
        let told = self
            .inspection
            .tell(&found, &self.topology, &self.tree, self.heartbeat);
        if let Some(Deadlock { by, summary }) = told
            && let Some(coordinator) = self.node.coordinator()
        {
            coordinator.give_up(now, by, StopReason::Deadlock { report: summary });
        }
        true
    }
}

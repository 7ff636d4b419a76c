//! The end of a job: an orderly shutdown on all ranks, or an end by the loss of a rank.

use super::{Coordinator, CoordinatorAction, CoordinatorPhase};
use crate::error::StopReason;
use crate::lost::PeerLost;
use crate::message::{Response, ToWorker};
use crate::rank_set::RankSet;
use crate::types::{Rank, Time};
use std::sync::Arc;

impl Coordinator {
    /// Handles the loss of a rank: informs all other ranks, then ends the coordinator.
    pub fn handle_peer_lost(&mut self, now: Time, lost: PeerLost) {
        self.now = self.now.max(now);
        self.end(&lost, Some(lost.rank));
    }

    /// Shuts the job down because it cannot or must not continue. `by` is the rank to blame.
    pub fn give_up(&mut self, now: Time, by: Rank, why: StopReason) {
        self.now = self.now.max(now);
        if matches!(self.phase, CoordinatorPhase::Running) {
            self.stop(by, why.clipped());
        }
    }

    /// Shuts all ranks down. Operations agreed before are still carried out.
    pub(super) fn stop(&mut self, by: Rank, why: StopReason) {
        self.answer(Arc::clone(&self.everybody), Response::Shutdown { by, why });
        self.phase = CoordinatorPhase::Stopping(RankSet::default());
    }

    /// Ends the generation and informs every rank except the lost one.
    pub(super) fn end(&mut self, lost: &PeerLost, except: Option<Rank>) {
        if matches!(self.phase, CoordinatorPhase::Over) {
            return;
        }
        self.phase = CoordinatorPhase::Over;
        self.ready.clear();
        let response = Arc::new(Response::Lost(lost.clone().clipped()));
        let links = &self.sets.links;
        let to = (0..links.len())
            .map(|link| links.get(link).rank)
            .filter(|rank| Some(*rank) != except)
            .collect();
        let message = ToWorker {
            generation: self.cfg.generation,
            mark: self.cache.mark(),
            responses: vec![response],
            evicted: Vec::new(),
        };
        self.actions.push_back(CoordinatorAction::Send(to, message));
    }
}

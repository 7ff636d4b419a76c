//! The round of an elastic job that this engine takes part in: news of its launcher, and the training state held here.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use horovod_protocol::Generation;
use horovod_transport::rendezvous::RankAssignment;

/// There is nothing to send.
const SENT: u8 = u8::MAX;
/// Before it no rank has trained.
const FIRST_GENERATION: Generation = Generation(1);

/// State of the round; a job that is not elastic has only one.
pub(super) struct Round {
    /// The launcher may change the members of the job.
    is_elastic: bool,
    /// Whether some rank came to this round without the current training state.
    needs_sync: bool,
    /// Workers that begin their script are in one round with others that have trained.
    has_newcomers: bool,
    /// Newest change of members announced by the launcher, and the kinds of all.
    host_updates: Mutex<(u64, u8)>,
    /// Training state of this process, for the launcher; [`SENT`] once it has been sent.
    state: AtomicU8,
}

impl Round {
    /// The round of this generation, with the place that the launcher of an elastic job gave to this process.
    pub(super) fn new(generation: Generation, assignment: Option<&RankAssignment>) -> Self {
        let needs_sync = assignment.is_none_or(|assignment| assignment.needs_sync);
        Self {
            is_elastic: assignment.is_some(),
            needs_sync,
            has_newcomers: assignment.is_some() && needs_sync && generation > FIRST_GENERATION,
            host_updates: Mutex::new((0, 0)),
            state: AtomicU8::new(SENT),
        }
    }

    pub(super) fn is_elastic(&self) -> bool {
        self.is_elastic
    }

    pub(super) fn needs_sync(&self) -> bool {
        self.needs_sync
    }

    pub(super) fn has_newcomers(&self) -> bool {
        self.has_newcomers
    }

    /// Takes down a change of the job's members.
    pub(super) fn update_hosts(&self, version: impl Fn(u64) -> u64, kind: u8) {
        let updates = self.host_updates.lock();
        let mut updates = updates.unwrap_or_else(PoisonError::into_inner);
        *updates = (version(updates.0), updates.1 | kind);
    }

    /// Version of the newest change, and the kinds of all.
    pub(super) fn host_updates(&self) -> (u64, u8) {
        let updates = self.host_updates.lock();
        *updates.unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the training state of this process, for the launcher.
    pub(super) fn hold(&self, state: u8) {
        self.state.store(state, Ordering::Release);
    }

    /// The training state that the launcher has not heard of, once.
    #[inline]
    pub(super) fn take_state(&self) -> Option<u8> {
        if self.state.load(Ordering::Acquire) == SENT {
            return None;
        }
        Some(self.state.swap(SENT, Ordering::AcqRel))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_later_round_of_an_elastic_job_has_newcomers() {
        let assignment = |needs_sync| RankAssignment {
            needs_sync,
            ..RankAssignment::default()
        };
        let has = |generation, assignment: Option<RankAssignment>| {
            Round::new(Generation(generation), assignment.as_ref()).has_newcomers()
        };
        assert!(has(2, Some(assignment(true))));
        assert!(!has(2, Some(assignment(false))));
        assert!(!has(1, Some(assignment(true))));
        assert!(!has(2, None));
    }
}

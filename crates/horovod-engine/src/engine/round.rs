//! The round of an elastic job in which this engine takes part: the launcher's changes, and this process's training
//! state.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use horovod_protocol::Generation;
use horovod_transport::rendezvous::RankAssignment;

/// Value of `state` while there is nothing to send.
const SENT: u8 = u8::MAX;
/// Before this generation no rank has trained.
const FIRST_GENERATION: Generation = Generation(1);

/// State of the round; a job that is not elastic has only one.
pub(super) struct Round {
    /// The launcher may change the members of the job.
    is_elastic: bool,
    /// Some rank joined this round without the current training state.
    needs_sync: bool,
    /// Workers that begin their script are in one round with others that have trained.
    has_newcomers: bool,
    /// Version of the newest change of members that the launcher has announced, and the kinds of all changes.
    host_updates: Mutex<(u64, u8)>,
    /// Training state of this process, for the launcher; [`SENT`] once it was sent.
    state: AtomicU8,
}

impl Round {
    /// Makes the round of this generation, with the place that the launcher of an elastic job gave to this process.
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

    /// Notes a change of the job's members.
    pub(super) fn update_hosts(&self, version: impl Fn(u64) -> u64, kind: u8) {
        let updates = self.host_updates.lock();
        let mut updates = updates.unwrap_or_else(PoisonError::into_inner);
        *updates = (version(updates.0), updates.1 | kind);
    }

    /// Returns the version of the newest change, and the kinds of all changes.
    pub(super) fn host_updates(&self) -> (u64, u8) {
        let updates = self.host_updates.lock();
        *updates.unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the training state of this process, to be sent to the launcher.
    pub(super) fn hold(&self, state: u8) {
        self.state.store(state, Ordering::Release);
    }

    /// Returns, once, the training state that was not sent to the launcher yet.
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

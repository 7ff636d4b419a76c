//! The engine's part in the comparison of replicas: queues this rank's reports until the driver sends them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use horovod_diagnosis::replicas::{Numbers, Replica, Report};
use horovod_protocol::{ProcessSetId, Rank};
use horovod_settings::CheckReplicas;

use super::Engine;

/// At most so many reports of this rank wait to be sent; more are dropped.
const QUEUED_MAX: usize = 4096;

/// The reports of one rank and generation.
#[derive(Debug, Default)]
pub(super) struct ReplicaReports {
    has_queued: AtomicBool,
    state: Mutex<ReplicaState>,
}

#[derive(Debug, Default)]
struct ReplicaState {
    numbers: Numbers,
    queued: VecDeque<Report>,
}

impl ReplicaReports {
    pub(super) fn has_queued(&self) -> bool {
        self.has_queued.load(Ordering::Acquire)
    }

    /// Takes the report to send next.
    pub(super) fn take(&self) -> Option<Report> {
        let mut state = self.lock();
        let report = state.queued.pop_front();
        self.has_queued
            .store(!state.queued.is_empty(), Ordering::Release);
        report
    }

    /// Puts back a report that could not be sent yet.
    pub(super) fn put_back(&self, report: Report) {
        self.lock().queued.push_front(report);
        self.has_queued.store(true, Ordering::Release);
    }

    fn add(&self, report: Report) {
        let mut state = self.lock();
        if state.queued.len() < QUEUED_MAX {
            state.queued.push_back(report);
            self.has_queued.store(true, Ordering::Release);
        }
    }

    /// Notes that all ranks have joined.
    pub(super) fn note_joined(&self) {
        self.lock().numbers.note_joined();
    }

    fn lock(&self) -> MutexGuard<'_, ReplicaState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// Returns whether parameters of an optimizer on this set must be reported before its first update.
    pub fn checks_replicas(&self, set: ProcessSetId) -> bool {
        self.config.negotiation.consistency.at_start != CheckReplicas::Off
            && self
                .members_beside(set)
                .is_some_and(|members| members.len() > 1)
    }

    /// Returns whether this rank has reported parameters of this key in this generation.
    pub fn has_reported(&self, set: ProcessSetId, key: u64) -> bool {
        self.shared.replicas.lock().numbers.has(set, key)
    }

    /// Reports the parameters of an optimizer to rank 0, which compares the reports of all members when the last has
    /// arrived. Returns at once. A difference is logged as a warning, or ends the job.
    pub fn report_replica(&self, set: ProcessSetId, replica: Replica) {
        let number = self.shared.replicas.lock().numbers.take(set, replica.key);
        if let Some(number) = number {
            self.send_replica(set, number, replica);
        }
    }

    /// As [`Engine::report_replica`], but only for the first report of this key by this rank in this generation, over
    /// all threads. Calls `read` only in this case.
    pub fn report_first_replica(
        &self,
        set: ProcessSetId,
        key: u64,
        read: impl FnOnce() -> Replica,
    ) {
        let mut state = self.shared.replicas.lock();
        let is_first = !state.numbers.has(set, key);
        let number = is_first.then(|| state.numbers.take(set, key)).flatten();
        drop(state);
        if let Some(number) = number {
            self.send_replica(set, number, read());
        }
    }

    fn send_replica(&self, set: ProcessSetId, number: u64, replica: Replica) {
        let Some(members) = self.members_beside(set) else {
            return;
        };
        let has_names = members.first() == Some(&self.topology.rank);
        let report = Report::new(set, number, replica, has_names);
        self.shared.replicas.add(report);
        self.driver_lock.poll_once();
        // The thread that makes progress may have polled the reports before.
        self.shared.notifier.notify();
    }

    /// Returns the members of a set, if this rank is one of them.
    fn members_beside(&self, set: ProcessSetId) -> Option<Vec<Rank>> {
        let members = self.members(set)?;
        members.contains(&self.topology.rank).then_some(members)
    }
}

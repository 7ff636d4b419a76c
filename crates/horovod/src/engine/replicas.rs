//! The engine's part in the comparison of replicas: reports of this rank wait here until the driver sends them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use horovod_diagnosis::replicas::{Numbers, Replica, Report};
use horovod_protocol::{ProcessSetId, Rank};
use horovod_settings::CheckReplicas;

use super::Engine;

/// Reports of this rank that wait to be sent; more are dropped.
const QUEUED_MAX: usize = 4096;

/// The reports of one rank and generation.
#[derive(Debug, Default)]
pub(super) struct ReplicaReports {
    has_queued: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    numbers: Numbers,
    queued: VecDeque<Report>,
}

impl ReplicaReports {
    pub(super) fn has_queued(&self) -> bool {
        self.has_queued.load(Ordering::Acquire)
    }

    /// The report to send next.
    pub(super) fn take(&self) -> Option<Report> {
        let mut state = self.lock();
        let report = state.queued.pop_front();
        self.has_queued
            .store(!state.queued.is_empty(), Ordering::Release);
        report
    }

    /// A report could not be sent yet.
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

    /// All ranks have joined.
    pub(super) fn note_joined(&self) {
        self.lock().numbers.note_joined();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// Whether parameters of an optimizer on this set are to be reported before its first update.
    pub fn checks_replicas(&self, set: ProcessSetId) -> bool {
        self.config.consistency.at_start != CheckReplicas::Off
            && self
                .members_beside(set)
                .is_some_and(|members| members.len() > 1)
    }

    /// Whether this rank has reported parameters of this key in this generation.
    pub fn has_reported(&self, set: ProcessSetId, key: u64) -> bool {
        self.shared.replicas.lock().numbers.has(set, key)
    }

    /// Report the parameters of an optimizer to rank 0, which compares those of all members when the last has reported.
    /// Returns at once. A difference is a warning, or ends the job.
    pub fn report_replica(&self, set: ProcessSetId, replica: Replica) {
        let number = self.shared.replicas.lock().numbers.take(set, replica.key);
        if let Some(number) = number {
            self.send_replica(set, number, replica);
        }
    }

    /// As [`Engine::report_replica`], but only if this rank has not reported parameters of this key in this generation, nor
    /// another thread is about to. Only then they are read.
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
        // The thread that makes progress may have looked before.
        self.shared.notifier.notify();
    }

    /// Members of a set in which this rank is one.
    fn members_beside(&self, set: ProcessSetId) -> Option<Vec<Rank>> {
        let members = self.members(set)?;
        members.contains(&self.topology.rank).then_some(members)
    }
}

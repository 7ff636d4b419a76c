//! Executions that the ranks have agreed on, in their total order, and changes that hold from a place in that order on.

use std::collections::VecDeque;
use std::sync::Arc;

use horovod_diagnosis::Key;
use horovod_protocol::{Execution, ProcessSetId, Rank, Seq, StalledRequest, Time};

use crate::engine::backend::host::Announced;

/// Executions that may wait for the one that runs.
const READY_MAX: usize = 1 << 16;

/// The total order, as far as this rank has not carried it out.
#[derive(Default)]
pub(super) struct ExecutionQueue {
    ready: VecDeque<Execution>,
    /// Tensors of these, or of what is still negotiated, have a ready event.
    has_ready_events: bool,
    announced: Announced,
    /// Process sets that were removed, each after this execution, if that has not begun.
    removed_sets: VecDeque<(Option<Seq>, ProcessSetId)>,
    /// Members of the execution that was started and has not ended.
    running: Option<Arc<[Rank]>>,
    /// The collective that runs now, for reports of stalls.
    runs: Option<Runs>,
}

/// A collective on its way.
struct Runs {
    /// Since when, as [`Time`]; only rank 0 reads the clock for it.
    since: u64,
    set: ProcessSetId,
    name: Arc<str>,
    members: Arc<[Rank]>,
}

impl ExecutionQueue {
    // -- what waits

    pub(super) fn push(&mut self, execution: Execution) {
        self.ready.push_back(execution);
        debug_assert!(
            self.ready.len() <= READY_MAX,
            "the worker bounds pending entries"
        );
    }

    pub(super) fn front(&self) -> Option<&Execution> {
        self.ready.front()
    }

    pub(super) fn pop(&mut self) -> Option<Execution> {
        self.ready.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Drops all waiting executions.
    pub(super) fn clear(&mut self) {
        self.ready.clear();
    }

    /// Whether tensors of what waits, or of what is still negotiated, have a ready event.
    pub(super) fn has_ready_events(&self) -> bool {
        self.has_ready_events
    }

    pub(super) fn note_ready_events(&mut self, has_some: bool) {
        self.has_ready_events = has_some;
    }

    // -- what holds from a place in the order on

    /// Numbers that are in force from the execution `seq` on.
    pub(super) fn announce(&mut self, seq: Seq, values: Arc<[u64]>) {
        self.announced.push_back((seq, values));
    }

    /// Numbers that are not in force yet.
    pub(super) fn announced(&mut self) -> &mut Announced {
        &mut self.announced
    }

    /// The next execution, and numbers that are not in force yet.
    pub(super) fn next_with_numbers(&mut self) -> Option<(&Execution, &mut Announced)> {
        Some((self.ready.front()?, &mut self.announced))
    }

    /// This set is removed, after all that waits now.
    pub(super) fn set_removed(&mut self, set: ProcessSetId) {
        let after = self.ready.back().map(|execution| execution.seq);
        self.removed_sets.push_back((after, set));
    }

    /// A set that was removed before what is next.
    pub(super) fn next_removed_set(&mut self) -> Option<ProcessSetId> {
        let (after, set) = *self.removed_sets.front()?;
        let next = self.ready.front().map(|execution| execution.seq);
        if after.is_some_and(|after| next.is_some_and(|next| next <= after)) {
            return None;
        }
        self.removed_sets.pop_front();
        Some(set)
    }

    // -- what is carried out

    /// A collective is taken out of the queue; it may be broken off and taken up again.
    pub(super) fn begins(&mut self, execution: &Execution, since: Time) {
        self.runs = execution.items.first().map(|item| Runs {
            since: since.0,
            set: execution.set,
            name: item.name.clone(),
            members: execution.members.clone(),
        });
    }

    /// The execution of these ranks is carried out.
    pub(super) fn runs(&mut self, members: Arc<[Rank]>) {
        self.running = Some(members);
    }

    /// It has ended, or goes on by itself.
    pub(super) fn ended(&mut self) {
        self.running = None;
        self.runs = None;
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Whether `rank` is a member of an execution that waits or runs.
    pub(super) fn needs(&self, rank: Rank) -> bool {
        let ready = self.ready.iter().map(|execution| &execution.members);
        let mut all = self.running.iter().chain(ready);
        all.any(|members| members.contains(&rank))
    }

    // -- for reports of stalls

    /// The collective that runs now, for which rank `me` waits for the others.
    pub(super) fn stalled(&self, me: Rank, now: Time) -> Option<StalledRequest> {
        let runs = self.runs.as_ref()?;
        let others = runs.members.iter().copied().filter(|rank| *rank != me);
        Some(StalledRequest {
            set: runs.set,
            name: runs.name.clone(),
            waiting: vec![me],
            missing: others.collect(),
            waited_ns: now.0.saturating_sub(runs.since),
        })
    }

    /// Names of operations that all ranks have agreed on and that have not ended, with those of `on_device`; of a fused
    /// collective that runs, the first.
    pub(super) fn names<'a>(&'a self, on_device: impl Iterator<Item = &'a Execution>) -> Vec<Key> {
        let runs = self.runs.as_ref();
        let runs = runs.map(|runs| (runs.set.0, runs.name.clone()));
        let later = on_device.chain(&self.ready);
        let later = later.flat_map(|execution| {
            let items = execution.items.iter();
            items.map(|item| (execution.set.0, item.name.clone()))
        });
        runs.into_iter().chain(later).collect()
    }
}

//! Executions that the ranks have agreed on, in their total order, and changes that take effect at a place in that
//! order.

use std::collections::VecDeque;
use std::sync::Arc;

use horovod_diagnosis::Key;
use horovod_protocol::{Execution, ProcessSetId, Rank, Seq, StalledRequest, Time};

use crate::engine::backend::host::Announced;

/// At most so many executions wait behind the one that runs.
const READY_MAX: usize = 1 << 16;

/// The part of the total order that this rank has not run yet.
#[derive(Default)]
pub(super) struct ExecutionQueue {
    ready: VecDeque<Execution>,
    /// Some tensors of queued or still negotiated operations have a ready event.
    has_ready_events: bool,
    announced: Announced,
    /// Process sets that were removed, each with the last execution before its removal; `None` if none waited.
    removed_sets: VecDeque<(Option<Seq>, ProcessSetId)>,
    /// Members of the execution that was started and has not ended.
    running: Option<Arc<[Rank]>>,
    /// The collective that runs now, for reports of stalls.
    runs: Option<Runs>,
}

/// A collective that runs.
struct Runs {
    /// Start of the collective, as [`Time`]; only rank 0 reads the clock for it.
    since: u64,
    set: ProcessSetId,
    name: Arc<str>,
    members: Arc<[Rank]>,
}

impl ExecutionQueue {
    // -- executions that wait

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

    /// Returns whether tensors of queued or still negotiated operations have a ready event.
    pub(super) fn has_ready_events(&self) -> bool {
        self.has_ready_events
    }

    pub(super) fn note_ready_events(&mut self, has_some: bool) {
        self.has_ready_events = has_some;
    }

    // -- changes that take effect at a place in the order

    /// Queues tuned values that apply to executions after `seq`.
    pub(super) fn announce(&mut self, seq: Seq, values: Arc<[u64]>) {
        self.announced.push_back((seq, values));
    }

    /// Returns the tuned values that do not apply yet.
    pub(super) fn announced(&mut self) -> &mut Announced {
        &mut self.announced
    }

    /// Returns the next execution, and the tuned values that do not apply yet.
    pub(super) fn next_with_numbers(&mut self) -> Option<(&Execution, &mut Announced)> {
        Some((self.ready.front()?, &mut self.announced))
    }

    /// Notes that this set is removed after all executions that wait now.
    pub(super) fn set_removed(&mut self, set: ProcessSetId) {
        let after = self.ready.back().map(|execution| execution.seq);
        self.removed_sets.push_back((after, set));
    }

    /// Returns a set whose removal precedes the next execution in the order.
    pub(super) fn next_removed_set(&mut self) -> Option<ProcessSetId> {
        let (after, set) = *self.removed_sets.front()?;
        let next = self.ready.front().map(|execution| execution.seq);
        if after.is_some_and(|after| next.is_some_and(|next| next <= after)) {
            return None;
        }
        self.removed_sets.pop_front();
        Some(set)
    }

    // -- the execution that runs

    /// Notes that a collective was taken out of the queue; it may be suspended and resumed.
    pub(super) fn begins(&mut self, execution: &Execution, since: Time) {
        self.runs = execution.items.first().map(|item| Runs {
            since: since.0,
            set: execution.set,
            name: item.name.clone(),
            members: execution.members.clone(),
        });
    }

    /// Notes that an execution of these ranks runs.
    pub(super) fn runs(&mut self, members: Arc<[Rank]>) {
        self.running = Some(members);
    }

    /// Notes that the running execution has ended, or continues in a backend without the driver.
    pub(super) fn ended(&mut self) {
        self.running = None;
        self.runs = None;
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Returns whether `rank` is a member of an execution that waits or runs.
    pub(super) fn needs(&self, rank: Rank) -> bool {
        let ready = self.ready.iter().map(|execution| &execution.members);
        let mut all = self.running.iter().chain(ready);
        all.any(|members| members.contains(&rank))
    }

    // -- for reports of stalls

    /// Returns the collective that runs now, in which rank `me` waits for the others.
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

    /// Returns the names of operations that all ranks have agreed on and that have not ended, including those of
    /// `on_device`. Of a fused collective that runs, only the first name is returned.
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

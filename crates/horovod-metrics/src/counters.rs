//! The counters of one rank. Threads of the script and the holder of the driver lock add to them, with relaxed atomics:
//! no lock, no allocation.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use crate::figures::{ByKind, RankFigures};
use crate::kinds::{KINDS, Kind, LINKS, Link};

/// The counters. Moments are nanoseconds since the engine started.
#[derive(Debug, Default)]
pub struct Counters {
    operations: [[AtomicU64; LINKS]; KINDS],
    bytes: [[AtomicU64; LINKS]; KINDS],
    collectives: AtomicU64,
    carrying_out: AtomicU64,
    /// Up to here, time was attributed to some execution: on a device, several are on their way at once.
    carried_out_until: AtomicU64,
    /// Threads that wait, and since when at least one does.
    waiters: AtomicUsize,
    waits_since: AtomicU64,
    /// Time in which at least one thread waited; the part of it in which an operation was carried out.
    waited: AtomicU64,
    waited_carrying_out: AtomicU64,
    /// Time in which an operation with a callback waited for other ranks, or was carried out.
    called_back_waiting: AtomicU64,
    called_back_carrying_out: AtomicU64,
    /// Up to here, time was attributed to an operation with a callback.
    called_back_until: AtomicU64,
    stalls: AtomicU64,
    steps: AtomicU64,
    input: AtomicU64,
}

/// An execution on its way.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    at: u64,
    is_called_back: bool,
}

impl Counters {
    /// A thread begins to wait for an operation.
    #[inline]
    pub fn wait_begins(&self, now: u64) {
        if self.waiters.fetch_add(1, Relaxed) == 0 {
            self.waits_since.store(now, Relaxed);
        }
    }

    /// It waits no longer.
    #[inline]
    pub fn wait_ends(&self, now: u64) {
        if self.waiters.fetch_sub(1, Relaxed) == 1 {
            let since = self.waits_since.load(Relaxed);
            self.waited.fetch_add(now.saturating_sub(since), Relaxed);
        }
    }

    /// An execution begins. `called_back`: when the first of its operations with a callback was submitted.
    #[inline]
    pub fn execution_begins(&self, now: u64, called_back: Option<u64>) -> Begun {
        if let Some(submitted) = called_back {
            let from = submitted.max(self.called_back_until.load(Relaxed));
            let waited = now.saturating_sub(from);
            self.called_back_waiting.fetch_add(waited, Relaxed);
        }
        Begun {
            at: now,
            is_called_back: called_back.is_some(),
        }
    }

    /// It has ended, and moved so many bytes of so many operations.
    #[inline]
    pub fn execution_ends(
        &self,
        begun: Begun,
        now: u64,
        kind: Kind,
        link: Link,
        operations: usize,
        bytes: usize,
    ) {
        let (kind, link) = (kind as usize, link as usize);
        self.operations[kind][link].fetch_add(operations as u64, Relaxed);
        self.bytes[kind][link].fetch_add(bytes as u64, Relaxed);
        self.collectives.fetch_add(1, Relaxed);
        let begin = begun.at.max(self.carried_out_until.load(Relaxed));
        self.carried_out_until.store(now, Relaxed);
        let lasted = now.saturating_sub(begin);
        self.carrying_out.fetch_add(lasted, Relaxed);
        if begun.is_called_back {
            self.called_back_carrying_out.fetch_add(lasted, Relaxed);
            self.called_back_until.store(now, Relaxed);
        } else if self.waiters.load(Relaxed) > 0 {
            let from = begin.max(self.waits_since.load(Relaxed));
            let overlap = now.saturating_sub(from);
            self.waited_carrying_out.fetch_add(overlap, Relaxed);
        }
    }

    /// An operation without data has ended.
    pub fn control_ends(&self) {
        self.operations[Kind::Control as usize][Link::Host as usize].fetch_add(1, Relaxed);
    }

    /// Some ranks are late.
    pub fn stalled(&self) {
        self.stalls.fetch_add(1, Relaxed);
    }

    /// The script has ended a step.
    pub fn step_ends(&self) {
        self.steps.fetch_add(1, Relaxed);
    }

    /// The script has waited for its input for so long.
    pub fn input_took(&self, nanos: u64) {
        self.input.fetch_add(nanos, Relaxed);
    }

    /// The counts at this moment; the other figures are not known here.
    pub fn read(&self, now: u64) -> (RankFigures, ByKind, ByKind) {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        // A wait that goes on counts as far as it has come.
        let current = if self.waiters.load(Relaxed) > 0 {
            now.saturating_sub(get(&self.waits_since))
        } else {
            0
        };
        let waited = get(&self.waited) + current;
        let carrying_out = get(&self.waited_carrying_out).min(waited);
        let communicating = carrying_out + get(&self.called_back_carrying_out);
        let waiting = waited - carrying_out + get(&self.called_back_waiting);
        let figures = RankFigures {
            elapsed: now,
            waiting: waiting.min(now),
            communicating: communicating.min(now.saturating_sub(waiting)),
            computing: now.saturating_sub(waiting + communicating),
            carrying_out: get(&self.carrying_out),
            collectives: get(&self.collectives),
            stalls: get(&self.stalls),
            steps: get(&self.steps),
            input: get(&self.input),
            ..RankFigures::default()
        };
        let by_kind = |table: &[[AtomicU64; LINKS]; KINDS]| {
            table.each_ref().map(|row| row.each_ref().map(get))
        };
        (figures, by_kind(&self.operations), by_kind(&self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_split_into_waiting_for_ranks_and_communicating() {
        let counters = Counters::default();
        counters.wait_begins(100);
        let begun = counters.execution_begins(160, None);
        counters.execution_ends(begun, 190, Kind::Allreduce, Link::Host, 3, 48);
        counters.wait_ends(200);
        let (figures, operations, bytes) = counters.read(1000);
        assert_eq!((figures.waiting, figures.communicating), (70, 30));
        assert_eq!((figures.computing, figures.carrying_out), (900, 30));
        assert_eq!((operations[0][0], bytes[0][0]), (3, 48));
        assert_eq!(figures.collectives, 1);
    }

    #[test]
    fn an_execution_behind_the_scripts_back_counts_as_computing() {
        let counters = Counters::default();
        let begun = counters.execution_begins(10, None);
        counters.execution_ends(begun, 60, Kind::Broadcast, Link::Network, 1, 8);
        let (figures, ..) = counters.read(100);
        assert_eq!((figures.waiting, figures.communicating), (0, 0));
        assert_eq!((figures.computing, figures.carrying_out), (100, 50));
    }

    #[test]
    fn the_part_of_an_execution_before_a_wait_is_hidden() {
        let counters = Counters::default();
        let begun = counters.execution_begins(10, None);
        counters.wait_begins(40);
        counters.execution_ends(begun, 60, Kind::Allreduce, Link::Host, 1, 8);
        counters.wait_ends(60);
        assert_eq!(counters.read(60).0.communicating, 20);
    }

    #[test]
    fn two_threads_that_wait_at_once_wait_once() {
        let counters = Counters::default();
        counters.wait_begins(0);
        counters.wait_begins(10);
        counters.wait_ends(20);
        counters.wait_ends(30);
        assert_eq!(counters.read(30).0.waiting, 30);
    }

    #[test]
    fn a_wait_that_goes_on_is_seen() {
        let counters = Counters::default();
        counters.wait_begins(10);
        assert_eq!(counters.read(50).0.waiting, 40);
    }

    #[test]
    fn operations_with_callbacks_wait_from_their_submission_and_no_moment_counts_twice() {
        let counters = Counters::default();
        for (begin, end) in [(50, 60), (60, 80)] {
            let begun = counters.execution_begins(begin, Some(20));
            counters.execution_ends(begun, end, Kind::Allreduce, Link::Host, 1, 8);
        }
        let figures = counters.read(100).0;
        assert_eq!((figures.waiting, figures.communicating), (30, 30));
    }
}

//! The counters of one rank. Threads of the script and the holder of the driver lock add to them, with relaxed atomics:
//! no lock, no allocation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::clock::Clock;
use crate::figures::{ByKind, RankFigures};
use crate::kinds::{KINDS, LINKS, Link, OperationKind};

/// The counters.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) clock: Clock,
    operations: [[AtomicU64; LINKS]; KINDS],
    bytes: [[AtomicU64; LINKS]; KINDS],
    collectives: AtomicU64,
    stalls: AtomicU64,
    steps: AtomicU64,
    input: AtomicU64,
}

impl Counters {
    /// An execution has ended well, and moved so many bytes of so many operations.
    #[inline]
    pub fn executed(&self, kind: OperationKind, link: Link, operations: usize, bytes: usize) {
        let (kind, link) = (kind as usize, link as usize);
        self.operations[kind][link].fetch_add(operations as u64, Relaxed);
        self.bytes[kind][link].fetch_add(bytes as u64, Relaxed);
        self.collectives.fetch_add(1, Relaxed);
    }

    /// An operation without data has ended.
    pub fn control_ends(&self) {
        self.operations[OperationKind::Control as usize][Link::Host as usize].fetch_add(1, Relaxed);
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

    /// The counts at this moment, in nanoseconds since the engine started; the other figures are not known here.
    pub fn read(&self, now: u64) -> (RankFigures, ByKind, ByKind) {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let times = self.clock.read(now);
        let computing = times.alone + times.hidden;
        let figures = RankFigures {
            // The sum, so that the three times always add up to it.
            elapsed: computing + times.communicating + times.waiting,
            waiting: times.waiting,
            communicating: times.communicating,
            computing,
            carrying_out: times.hidden + times.communicating,
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
    use crate::clock::Activity;

    #[test]
    fn an_execution_counts_its_operations_and_bytes() {
        let counters = Counters::default();
        counters.executed(OperationKind::Allreduce, Link::Host, 3, 48);
        let (figures, operations, bytes) = counters.read(0);
        assert_eq!((operations[0][0], bytes[0][0]), (3, 48));
        assert_eq!(figures.collectives, 1);
    }

    #[test]
    fn the_three_times_add_up_to_the_time_since_init() {
        const MS: u64 = 1 << 20;
        let counters = Counters::default();
        let clock = &counters.clock;
        // An operation with a callback, submitted at 10, and a thread that waits from 20, for another one.
        clock.begins(Activity::Waiting, 10 * MS);
        clock.begins(Activity::Waiting, 20 * MS);
        clock.begins(Activity::Executing, 30 * MS);
        clock.begins(Activity::Executing, 35 * MS);
        clock.ends(Activity::Executing, 40 * MS);
        clock.ends(Activity::Waiting, 40 * MS);
        clock.ends(Activity::Waiting, 50 * MS);
        let figures = counters.read(100 * MS).0;
        let times = (figures.computing, figures.communicating, figures.waiting);
        assert_eq!(times, (60 * MS, 20 * MS, 20 * MS));
        assert_eq!(figures.elapsed, 100 * MS);
        assert_eq!(figures.carrying_out, 70 * MS);
    }
}

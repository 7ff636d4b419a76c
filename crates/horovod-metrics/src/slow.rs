//! Which rank makes the others wait, step after step, and the likely cause.
//!
//! Rank 0 keeps the figures of the last seconds. They cover twenty steps and at least ten seconds, or thirty seconds
//! where the script marks no steps. A rank is named if it explains at least 80 % of the time that the other ranks lose
//! by waiting, and if it delays them in each fifth of this window. So one long step, as for a checkpoint, names no
//! rank. Two ranks of one host that are late together hide each other: then the host is named.

mod cause;
mod judge;

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use crate::figures::{HostFigures, RankFigures};

pub use cause::Cause;

const SECOND_NS: u64 = 1_000_000_000;
/// Steps over which ranks are compared, where the script marks its steps.
const STEPS: u64 = 20;
/// Least time over which ranks are compared. Reports of two ranks are up to a second apart; over ten seconds this is
/// little.
const LEAST_NS: u64 = 10 * SECOND_NS;
/// Time over which ranks are compared where the script marks no steps.
const UNMARKED_NS: u64 = 30 * SECOND_NS;
/// Samples that are kept. Where they do not cover enough steps, every second one is dropped, and half as many are taken
/// from then on.
const SAMPLES_MAX: usize = 64;
/// Findings in a row after which a rank is named, and samples in a row without it after which it is not named any more.
const TIMES: u32 = 5;

/// A rank, or all ranks of a host, for which the other ranks wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Slow {
    /// One rank, or all ranks of the host, ascending.
    pub ranks: Vec<u32>,
    /// The name of their host.
    pub host: Arc<str>,
    /// Share of their time that the other ranks lose by waiting, from 0 to 1.
    pub lost: f64,
    /// Share of this loss that these ranks explain, from 0 to 1.
    pub explained: f64,
    /// Steps that were compared; 0 if the script marks none.
    pub steps: u64,
    /// The likely cause.
    pub cause: Cause,
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.ranks {
            [rank] => write!(f, "rank {rank} on {} is slow", self.host)?,
            all => write!(f, "the {} ranks on {} are slow", all.len(), self.host)?,
        }
        let lost = cause::percent(self.lost);
        write!(f, ": the others lose {lost} of their time by waiting")?;
        if self.steps > 0 {
            write!(f, ", over the last {} steps", self.steps)?;
        }
        write!(f, ". Likely cause: {}", self.cause)
    }
}

/// The figures of a rank at one moment, as far as they are compared.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) rank: u32,
    pub(crate) host: u32,
    pub(crate) hostname: Arc<str>,
    pub(crate) figures: RankFigures,
    /// Only of the first rank of each host.
    pub(crate) of_host: Option<HostFigures>,
}

/// All ranks at one moment, by rank.
pub(crate) type Sample = Vec<Row>;

/// The samples of one generation of the job, and the rank that they name.
#[derive(Debug, Default)]
pub(crate) struct SlowRanks {
    samples: VecDeque<Sample>,
    /// Calls of `observe` for each kept sample, of which the last is kept; 0 means 1.
    calls_per_sample: u32,
    calls: u32,
    named: Option<Slow>,
    /// Samples in a row that did not find the named ranks.
    misses: u32,
    /// Other ranks than the named ones, and how many times in a row they were found.
    candidate: Option<(Vec<u32>, u32)>,
    reported: BTreeSet<Vec<u32>>,
}

impl SlowRanks {
    /// Takes the figures of all ranks; rank 0 calls this once a second. Returns ranks that are named for the first time.
    pub(crate) fn observe(&mut self, sample: Sample) -> Option<&Slow> {
        self.calls += 1;
        if self.calls < self.calls_per_sample {
            return None;
        }
        self.calls = 0;
        self.samples.push_back(sample);
        self.thin_out();
        let found = self.slowest();
        let is_of_named = |slow: &Slow| self.named.as_ref().is_some_and(|n| n.ranks == slow.ranks);
        if found.as_ref().is_some_and(is_of_named) {
            (self.named, self.misses, self.candidate) = (found, 0, None);
            return None;
        }
        self.misses = self.misses.saturating_add(1);
        if self.misses >= TIMES {
            self.named = None;
        }
        let former = self.candidate.take();
        let slow = found?;
        let times = former.filter(|(ranks, _)| *ranks == slow.ranks);
        let times = times.map_or(1, |(_, times)| times + 1);
        if times < TIMES {
            self.candidate = Some((slow.ranks, times));
            return None;
        }
        let is_new = self.reported.insert(slow.ranks.clone());
        self.misses = 0;
        let named = &*self.named.insert(slow);
        is_new.then_some(named)
    }

    pub(crate) fn named(&self) -> Option<&Slow> {
        self.named.as_ref()
    }

    fn slowest(&mut self) -> Option<Slow> {
        let first = self.first()?;
        if self.samples.len() - first <= judge::PARTS {
            // Steps were so rare that few samples were kept, and are not any more.
            self.calls_per_sample = 1;
            return None;
        }
        let samples: Vec<&Sample> = self.samples.range(first..).collect();
        judge::slowest(&samples)
    }

    /// Returns the index of the latest sample from which on the time is long enough.
    fn first(&self) -> Option<usize> {
        let last = self.samples.back()?;
        let is_enough = |sample: &Sample| {
            let (lasts, steps) = between(sample, last)?;
            let is_marked = last.iter().all(|row| row.figures.steps > 0);
            Some(if is_marked {
                steps >= STEPS && lasts >= LEAST_NS
            } else {
                lasts >= UNMARKED_NS
            })
        };
        self.samples
            .iter()
            .rposition(|sample| is_enough(sample).unwrap_or(false))
    }

    /// Keeps the number of samples bounded.
    fn thin_out(&mut self) {
        if self.samples.len() <= SAMPLES_MAX {
            return;
        }
        // With one sample less the time is still long enough.
        if self.first().is_some_and(|first| first > 0) {
            self.samples.pop_front();
            return;
        }
        let mut index = 0;
        self.samples.retain(|_| {
            index += 1;
            index % 2 == 1
        });
        self.calls_per_sample = self.calls_per_sample.max(1) * 2;
    }
}

/// Returns the least time and the least number of steps of a rank between two samples; `None` if they have different
/// ranks.
fn between(before: &Sample, after: &Sample) -> Option<(u64, u64)> {
    let is_same =
        before.len() == after.len() && before.iter().zip(after).all(|(b, a)| b.rank == a.rank);
    if !is_same {
        return None;
    }
    let least = |get: fn(&RankFigures) -> u64| {
        let all = before.iter().zip(after);
        all.map(|(b, a)| get(&a.figures).saturating_sub(get(&b.figures)))
            .min()
    };
    Some((least(|f| f.elapsed)?, least(|f| f.steps)?))
}

#[cfg(test)]
mod tests;

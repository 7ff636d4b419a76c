//! The comparison of ranks: which rank or host explains the time that the others lose.

use super::cause::Cause;
use super::{Row, Sample, Slow, between};
use crate::figures::RankFigures;

/// The others must lose at least this share of their time.
const LOST_MIN: f64 = 0.05;
/// A rank must explain at least this share of the loss.
const EXPLAINED_MIN: f64 = 0.8;
/// Parts of the time; in each of them the others must lose something by the same rank.
const PARTS: usize = 5;
/// In each part the others must lose at least this share of the mean loss.
const PART_LOST_MIN: f64 = 0.3;
/// In each part the rank must explain at least this share of the loss. A part has few steps, and reports of two ranks
/// are up to a second apart.
const PART_EXPLAINED_MIN: f64 = 0.7;
/// Messages are late if they are the last ones in this share of the operations, of which there must be enough.
const LAST_MIN: f64 = 0.9;
const OPERATIONS_MIN: u64 = 20;

/// The change of the figures of all ranks between two samples.
pub(super) struct Change<'a> {
    before: &'a Sample,
    after: &'a Sample,
}

impl<'a> Change<'a> {
    pub(super) fn new(before: &'a Sample, after: &'a Sample) -> Self {
        Self { before, after }
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = (&'a Row, &'a Row)> {
        self.before.iter().zip(self.after)
    }

    /// The mean share of their time that some ranks have spent so; `None`: no such rank.
    pub(super) fn share(
        &self,
        is_one: impl Fn(&Row) -> bool,
        get: fn(&RankFigures) -> u64,
    ) -> Option<f64> {
        let (mut sum, mut ranks) = (0.0, 0);
        for (before, after) in self.rows().filter(|(_, after)| is_one(after)) {
            sum += share(before, after, get)?;
            ranks += 1;
        }
        (ranks > 0).then(|| sum / f64::from(ranks))
    }
}

fn share(before: &Row, after: &Row, get: fn(&RankFigures) -> u64) -> Option<f64> {
    let change = |get: fn(&RankFigures) -> u64| {
        get(&after.figures).saturating_sub(get(&before.figures)) as f64
    };
    let elapsed = change(|f| f.elapsed);
    (elapsed > 0.0).then(|| (change(get) / elapsed).min(1.0))
}

/// Ranks that may be slow together.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Suspect {
    Rank(u32),
    /// All ranks of a host, by its number.
    Host(u32),
}

impl Suspect {
    pub(super) fn includes(self, row: &Row) -> bool {
        match self {
            Self::Rank(rank) => row.rank == rank,
            Self::Host(host) => row.host == host,
        }
    }

    /// Returns the share of their time that the other ranks lose by waiting, and the part of it that the suspect
    /// explains by such a delay. `None`: there are no others.
    fn loss(self, change: &Change<'_>, delay: Delay) -> Option<(f64, f64)> {
        let lost = change.share(|row| !self.includes(row), |f| f.waiting)?;
        let awaited = change.share(|row| self.includes(row), |f| f.awaited)?;
        let explained = match (delay, self) {
            (Delay::OfItsBegin, Self::Rank(_)) => awaited.min(lost - self.waiting(change)?),
            // Ranks of a host that are late together hide each other: none of them is awaited alone.
            (Delay::OfItsBegin, Self::Host(_)) => lost - self.waiting(change)?,
            (Delay::OfItsMessages, _) => awaited * self.ranks(change) as f64,
        };
        Some((lost, explained.clamp(0.0, lost)))
    }

    fn waiting(self, change: &Change<'_>) -> Option<f64> {
        change.share(|row| self.includes(row), |f| f.waiting)
    }

    fn ranks(self, change: &Change<'_>) -> usize {
        change.rows().filter(|(_, row)| self.includes(row)).count()
    }

    /// Returns whether the messages of the suspect were nearly always the last. By chance they are that as often as its
    /// ranks are many.
    fn is_nearly_always_last(self, change: &Change<'_>) -> bool {
        let last = |is_one: &dyn Fn(&Row) -> bool| {
            let rows = change.rows().filter(|(_, row)| is_one(row));
            let last = rows.map(|(b, a)| a.figures.last.saturating_sub(b.figures.last));
            last.sum::<u64>()
        };
        let (own, all) = (last(&|row| self.includes(row)), last(&|_| true));
        let is_half_at_most = 2 * self.ranks(change) <= change.after.len();
        is_half_at_most && all >= OPERATIONS_MIN && own as f64 >= LAST_MIN * all as f64
    }
}

/// How a suspect delays the others.
#[derive(Clone, Copy)]
enum Delay {
    /// It begins its operations later. So it waits less than the others.
    OfItsBegin,
    /// It begins them with the others, but its messages arrive later. So it waits as long as the others or longer.
    OfItsMessages,
}

/// Returns the rank or the host for which the others wait in these samples, of which the first is the oldest.
pub(super) fn slowest(samples: &[&Sample]) -> Option<Slow> {
    let [first, .., last] = samples else {
        return None;
    };
    let (_, steps) = between(first, last)?;
    let whole = Change::new(first, last);
    let begins = suspects(&whole).map(|suspect| (suspect, Delay::OfItsBegin));
    let arrives = suspects(&whole).filter(|suspect| suspect.is_nearly_always_last(&whole));
    let arrives = arrives.map(|suspect| (suspect, Delay::OfItsMessages));
    let (suspect, delay, lost, explained) =
        begins.chain(arrives).find_map(|(suspect, delay)| {
            let (lost, explained) = suspect.loss(&whole, delay)?;
            let is_it = lost >= LOST_MIN && explained >= EXPLAINED_MIN * lost;
            is_it.then_some((suspect, delay, lost, explained))
        })?;
    let parts = samples.len().saturating_sub(1).min(PARTS);
    let sample = |part: usize| samples[part * (samples.len() - 1) / parts];
    let is_steady = (0..parts).all(|part| {
        let change = Change::new(sample(part), sample(part + 1));
        suspect
            .loss(&change, delay)
            .is_some_and(|(part_lost, part_explained)| {
                part_lost >= PART_LOST_MIN * lost
                    && part_explained >= PART_EXPLAINED_MIN * part_lost
            })
    });
    if !is_steady || parts < PARTS {
        return None;
    }
    let rows = || last.iter().filter(|row| suspect.includes(row));
    Some(Slow {
        ranks: rows().map(|row| row.rank).collect(),
        host: rows().next()?.hostname.clone(),
        lost,
        explained: explained / lost,
        steps,
        cause: Cause::of(suspect, &whole, explained)?,
    })
}

/// The rank that was awaited longest, then each host that has several ranks and is not the only one.
fn suspects(change: &Change<'_>) -> impl Iterator<Item = Suspect> {
    let awaited =
        |(before, after): &(&Row, &Row)| share(before, after, |f| f.awaited).unwrap_or(0.0);
    let rank = change
        .rows()
        .max_by(|a, b| awaited(a).total_cmp(&awaited(b)));
    let rank = rank.map(|(_, row)| Suspect::Rank(row.rank));
    let mut hosts: Vec<u32> = change.rows().map(|(_, row)| row.host).collect();
    hosts.sort_unstable();
    let hosts: Vec<&[u32]> = hosts.chunk_by(|a, b| a == b).collect();
    let several = hosts.len() > 1;
    let hosts = hosts.iter().filter(|ranks| several && ranks.len() > 1);
    let hosts: Vec<Suspect> = hosts.map(|ranks| Suspect::Host(ranks[0])).collect();
    rank.into_iter().chain(hosts)
}

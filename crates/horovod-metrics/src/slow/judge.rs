//! The comparison of ranks: which rank or host explains the time that the others lose.

use std::collections::BTreeMap;

use super::cause::Cause;
use super::{Row, Sample, Slow, between};
use crate::figures::RankFigures;

/// The others must lose at least this share of their time.
const LOST_MIN: f64 = 0.05;
/// A rank must explain at least this share of the loss.
const EXPLAINED_MIN: f64 = 0.8;
/// Parts of the window; in each of them the others must lose something by the same rank.
pub(super) const PARTS: usize = 5;
/// In each part the others must lose at least this share of the mean loss.
const PART_LOST_MIN: f64 = 0.3;
/// In each part the rank must explain at least this share of the loss. A part has few steps, and reports of two ranks
/// are up to a second apart.
const PART_EXPLAINED_MIN: f64 = 0.7;
/// Messages are late if they are the last ones in this share of the operations, of which there must be enough.
const LAST_MIN: f64 = 0.9;
/// Messages are also late if they cause this share of the time for which all ranks are awaited. A network that delays a
/// rank's results, too, lets other ranks be the last ones now and then, for short times.
const AWAITED_MIN: f64 = 0.85;
const OPERATIONS_MIN: u64 = 20;

/// The change of the figures of all ranks between two samples.
pub(super) struct Change<'a> {
    before: &'a Sample,
    after: &'a Sample,
    hosts: BTreeMap<u32, RanksOfHost>,
}

/// The ranks of a host together.
#[derive(Default)]
struct RanksOfHost {
    ranks: usize,
    /// Sum over the ranks of the share of their time that they have waited.
    waiting: f64,
    /// Operations that one of the ranks was the last to begin.
    last: u64,
    /// Sum over the ranks of the share of the time for which they were awaited.
    awaited: f64,
}

impl RanksOfHost {
    fn mean_waiting(&self) -> f64 {
        self.waiting / self.ranks as f64
    }
}

impl<'a> Change<'a> {
    /// `None`: a rank has no new figures.
    fn new(before: &'a Sample, after: &'a Sample) -> Option<Self> {
        let mut hosts: BTreeMap<u32, RanksOfHost> = BTreeMap::new();
        for (b, a) in before.iter().zip(after) {
            let of = hosts.entry(a.host).or_default();
            of.ranks += 1;
            of.waiting += share(b, a, |f| f.waiting)?;
            let last = a.figures.last.saturating_sub(b.figures.last);
            of.last = of.last.saturating_add(last);
            of.awaited += share(b, a, |f| f.awaited)?;
        }
        Some(Self {
            before,
            after,
            hosts,
        })
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = (&'a Row, &'a Row)> {
        self.before.iter().zip(self.after)
    }

    /// Returns the mean share of their time by which the counter `get` of some ranks grew; `None`: no such rank.
    pub(super) fn share(
        &self,
        belongs: impl Fn(&Row) -> bool,
        get: fn(&RankFigures) -> u64,
    ) -> Option<f64> {
        let (mut sum, mut ranks) = (0.0, 0);
        for (before, after) in self.rows().filter(|(_, after)| belongs(after)) {
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

/// How a suspect delays the others.
#[derive(Clone, Copy)]
enum Lateness {
    /// It begins its operations later. So it waits less than the others.
    OfItsBegin,
    /// It begins them with the others, but its messages arrive later. So it waits as long as the others or longer.
    OfItsMessages,
}

impl Suspect {
    pub(super) fn includes(self, row: &Row) -> bool {
        match self {
            Self::Rank(rank) => row.rank == rank,
            Self::Host(host) => row.host == host,
        }
    }

    /// Returns the share of their time that the other ranks lose by waiting, and the part of it that the suspect
    /// explains by its lateness. `None`: there are no others.
    fn loss_and_explained(self, change: &Change<'_>, lateness: Lateness) -> Option<(f64, f64)> {
        let lost = change.share(|row| !self.includes(row), |f| f.waiting)?;
        let awaited = || change.share(|row| self.includes(row), |f| f.awaited);
        let waiting = change.share(|row| self.includes(row), |f| f.waiting)?;
        let explained = match (lateness, self) {
            (Lateness::OfItsBegin, Self::Rank(_)) => awaited()?.min(lost - waiting),
            // Ranks of a host that are late together hide each other: none of them is awaited alone. Two hosts that are
            // late together hide each other, too.
            (Lateness::OfItsBegin, Self::Host(host)) => {
                let others = change.hosts.iter().filter(|(of, _)| **of != host);
                others.map(|(_, of)| of.mean_waiting()).fold(1.0, f64::min) - waiting
            }
            (Lateness::OfItsMessages, _) => awaited()? * self.ranks(change) as f64,
        };
        Some((lost, explained.clamp(0.0, lost)))
    }

    fn ranks(self, change: &Change<'_>) -> usize {
        change.rows().filter(|(_, row)| self.includes(row)).count()
    }

    /// Returns whether the messages of the suspect were nearly always the last, or whether it is the only one that is
    /// awaited although it begins with the others. By chance, half of all ranks are last in half of the operations.
    fn is_nearly_always_last(self, change: &Change<'_>) -> bool {
        let own = change.rows().filter(|(_, row)| self.includes(row));
        let own = own.map(|(b, a)| a.figures.last.saturating_sub(b.figures.last));
        let own = own.fold(0, u64::saturating_add);
        let all = change
            .hosts
            .values()
            .map(|of| of.last)
            .fold(0, u64::saturating_add);
        let is_half_at_most = 2 * self.ranks(change) <= change.after.len();
        let own_awaited = change.share(|row| self.includes(row), |f| f.awaited);
        let own_awaited = own_awaited.unwrap_or(0.0) * self.ranks(change) as f64;
        let awaited: f64 = change.hosts.values().map(|of| of.awaited).sum();
        let waiting =
            |of_suspect: bool| change.share(|row| self.includes(row) == of_suspect, |f| f.waiting);
        // A rank that begins later than the others waits for less time.
        let begins_with_the_others = waiting(true) >= waiting(false);
        let is_awaited_alone = begins_with_the_others && own_awaited >= AWAITED_MIN * awaited;
        let is_last = own as f64 >= LAST_MIN * all as f64 || is_awaited_alone;
        is_half_at_most && all >= OPERATIONS_MIN && is_last
    }
}

/// Returns the rank or the host for which the others wait in these samples, of which the first is the oldest. There must
/// be more samples than [`PARTS`].
pub(super) fn slowest(samples: &[&Sample]) -> Option<Slow> {
    let [first, .., last] = samples else {
        return None;
    };
    let (_, steps) = between(first, last)?;
    let whole = Change::new(first, last)?;
    let sample = |part: usize| samples[part * (samples.len() - 1) / PARTS];
    let parts = (0..PARTS).map(|part| Change::new(sample(part), sample(part + 1)));
    let parts: Vec<Change<'_>> = parts.collect::<Option<_>>()?;
    let (suspect, lost, explained) = suspects(&whole).find_map(|(suspect, lateness)| {
        let (lost, explained) = suspect.loss_and_explained(&whole, lateness)?;
        let explains_the_loss = lost >= LOST_MIN && explained >= EXPLAINED_MIN * lost;
        let is_steady = |part: &Change<'_>| {
            let of_part = suspect.loss_and_explained(part, lateness);
            of_part.is_some_and(|(part_lost, part_explained)| {
                part_lost >= PART_LOST_MIN * lost
                    && part_explained >= PART_EXPLAINED_MIN * part_lost
            })
        };
        let is_found = explains_the_loss && parts.iter().all(is_steady);
        is_found.then_some((suspect, lost, explained))
    })?;
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

/// Returns the ranks that are compared. A host is first: in a tree of control links, the time for which its ranks were
/// awaited together may be divided among them by chance.
fn suspects(change: &Change<'_>) -> impl Iterator<Item = (Suspect, Lateness)> {
    let several = || {
        let hosts = change.hosts.iter();
        hosts.filter(|(_, of)| change.hosts.len() > 1 && of.ranks > 1)
    };
    let most = |get: fn(&RankFigures) -> u64| {
        let grown = |(before, after): &(&Row, &Row)| share(before, after, get).unwrap_or(0.0);
        let rows = change.rows().max_by(|a, b| grown(a).total_cmp(&grown(b)));
        rows.map(|(_, row)| Suspect::Rank(row.rank))
    };
    let host = |(host, _): (&u32, &RanksOfHost)| Suspect::Host(*host);
    let least_waiting =
        several().min_by(|(_, a), (_, b)| a.mean_waiting().total_cmp(&b.mean_waiting()));
    let begins = [least_waiting.map(host), most(|f| f.awaited)];
    let messages = [
        several().max_by_key(|(_, of)| of.last).map(host),
        most(|f| f.last),
    ];
    let messages = messages.into_iter().flatten();
    let messages: Vec<Suspect> = messages
        .filter(|suspect| suspect.is_nearly_always_last(change))
        .collect();
    let begins = begins
        .into_iter()
        .flatten()
        .map(|of| (of, Lateness::OfItsBegin));
    begins.chain(messages.into_iter().map(|of| (of, Lateness::OfItsMessages)))
}

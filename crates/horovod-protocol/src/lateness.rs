//! For how long each link alone kept a request from being ready. Counted only after `count_lateness`.

use crate::types::{Rank, Time};
use std::collections::BTreeMap;

/// The lateness of one link, since it was first counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lateness {
    /// Nanoseconds in which a request waited for this link alone. Where several requests waited at once, the time counts
    /// once.
    pub awaited_ns: u64,
    /// Messages of this link that made a request ready.
    pub last: u64,
}

impl Lateness {
    fn add(&mut self, awaited_ns: u64) {
        self.awaited_ns += awaited_ns;
        self.last += 1;
    }
}

/// The lateness of all links.
#[derive(Debug, Default)]
pub(crate) struct LinkLateness {
    links: Vec<Lateness>,
    /// Of ranks behind a link that passes on requests by rank: an aggregator does so where a rank below it is late.
    ranks: BTreeMap<Rank, Lateness>,
    /// Up to here, time was attributed.
    until: Time,
}

impl LinkLateness {
    pub(crate) fn new(links: usize) -> Self {
        Self {
            links: vec![Lateness::default(); links],
            ranks: BTreeMap::new(),
            until: Time(0),
        }
    }

    /// A message of this link makes something ready for which the others have waited since `alone`.
    pub(crate) fn completes(&mut self, now: Time, link: usize, alone: Time) {
        let awaited_ns = self.until_now(now, alone);
        if let Some(lateness) = self.links.get_mut(link) {
            lateness.add(awaited_ns);
        }
    }

    /// As [`Self::completes`], where the rank behind a link is known.
    pub(crate) fn completes_by(&mut self, now: Time, rank: Rank, alone: Time) {
        let awaited_ns = self.until_now(now, alone);
        self.ranks.entry(rank).or_default().add(awaited_ns);
    }

    fn until_now(&mut self, now: Time, alone: Time) -> u64 {
        let from = alone.max(self.until);
        self.until = self.until.max(now);
        now.0.saturating_sub(from.0)
    }

    /// Of a rank behind a link; beside what the link as a whole has.
    pub(crate) fn of_rank(&self, rank: Rank) -> Lateness {
        self.ranks.get(&rank).copied().unwrap_or_default()
    }

    pub(crate) fn of(&self, link: usize) -> Lateness {
        self.links.get(link).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_for_which_several_requests_waited_counts_once() {
        let mut late = LinkLateness::new(2);
        late.completes(Time(10), 1, Time(4));
        late.completes(Time(12), 1, Time(5));
        late.completes(Time(20), 0, Time(18));
        assert_eq!(
            late.of(1),
            Lateness {
                awaited_ns: 8,
                last: 2
            }
        );
        assert_eq!(
            late.of(0),
            Lateness {
                awaited_ns: 2,
                last: 1
            }
        );
        assert_eq!(late.of(7), Lateness::default());
        late.completes_by(Time(30), Rank(5), Time(19));
        assert_eq!(
            late.of_rank(Rank(5)).awaited_ns,
            10,
            "until 20 it was counted"
        );
    }
}

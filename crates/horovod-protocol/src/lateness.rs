//! For how long each link alone kept requests from being ready, by process set. Counted only after `count_lateness`.
//!
//! By set, because a node of the tree compares only those links that lead to members of one set. A set
//! whose members are all behind one link says nothing here; the node behind that link counts it.

use crate::message::SetKey;
use crate::types::{Rank, Time};
use std::collections::BTreeMap;

/// Lateness since it was first counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lateness {
    /// Nanoseconds in which a request waited for this link alone. Where several requests of a set waited at once, the
    /// time counts once. For a link that is one rank it counts once over all sets.
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

/// The lateness of one link, or rank, in one process set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetLateness {
    /// The process set.
    pub set: SetKey,
    /// Its lateness there.
    pub lateness: Lateness,
}

/// Sets that are told apart for each link; the others count as one.
pub const LATE_SETS_MAX: usize = 8;
/// The key under which sets are counted that are too many.
const OTHERS: SetKey = SetKey(u64::MAX);

/// The sender of a message that made a request ready, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Latest {
    /// A link that is one rank, so one moment counts once in all sets.
    Link(usize),
    /// Some of the ranks behind a link. They may be late at once, each in a set of its own.
    Subtree(usize),
    /// A rank behind a link.
    Behind(Rank),
}

/// The lateness of all links.
#[derive(Debug, Default)]
pub(crate) struct LinkLateness {
    links: Vec<LateLink>,
    /// Of ranks behind a link that passes on requests by rank: an aggregator does so where a rank below it is late.
    ranks: BTreeMap<Rank, LateLink>,
}

#[derive(Debug, Default)]
struct LateLink {
    sets: Vec<LateSet>,
    /// Up to here, time was attributed in some set.
    until: Time,
}

#[derive(Debug)]
struct LateSet {
    late: SetLateness,
    /// Up to here, time was attributed in this set.
    until: Time,
}

impl LinkLateness {
    pub(crate) fn new(links: usize) -> Self {
        Self {
            links: (0..links).map(|_| LateLink::default()).collect(),
            ranks: BTreeMap::new(),
        }
    }

    /// A message makes something of a set ready for which all others have waited since `alone`.
    pub(crate) fn completes(&mut self, now: Time, set: SetKey, latest: Latest, alone: Time) {
        let link = match latest {
            Latest::Link(link) | Latest::Subtree(link) => self.links.get_mut(link),
            Latest::Behind(rank) => Some(self.ranks.entry(rank).or_default()),
        };
        let Some(link) = link else { return };
        let is_subtree = matches!(latest, Latest::Subtree(_));
        let at = link.place_of(set);
        let of = &mut link.sets[at];
        let until = if is_subtree {
            &mut of.until
        } else {
            &mut link.until
        };
        let from = alone.max(*until);
        *until = (*until).max(now);
        of.late.lateness.add(now.0.saturating_sub(from.0));
    }

    /// Of a rank behind a link; beside what the link as a whole has.
    pub(crate) fn of_rank(&self, rank: Rank) -> Vec<SetLateness> {
        self.ranks.get(&rank).map_or_else(Vec::new, LateLink::all)
    }

    pub(crate) fn of(&self, link: usize) -> Vec<SetLateness> {
        self.links.get(link).map_or_else(Vec::new, LateLink::all)
    }

    /// The sets in which links were compared with each other here.
    pub(crate) fn compared(&self) -> Vec<SetKey> {
        let sets = self.links.iter().flat_map(|link| &link.sets);
        let mut sets: Vec<SetKey> = sets.map(|of| of.late.set).collect();
        sets.sort_unstable();
        sets.dedup();
        sets
    }
}

impl LateLink {
    /// The place of a set, which is made where there is none.
    fn place_of(&mut self, set: SetKey) -> usize {
        if let Some(at) = self.find(set) {
            return at;
        }
        let set = if self.sets.len() < LATE_SETS_MAX - 1 {
            set
        } else {
            OTHERS
        };
        if let Some(at) = self.find(set) {
            return at;
        }
        let lateness = Lateness::default();
        self.sets.push(LateSet {
            late: SetLateness { set, lateness },
            until: Time(0),
        });
        self.sets.len() - 1
    }

    fn find(&self, set: SetKey) -> Option<usize> {
        self.sets.iter().position(|of| of.late.set == set)
    }

    fn all(&self) -> Vec<SetLateness> {
        self.sets.iter().map(|of| of.late).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SetKey = SetKey(0);
    const B: SetKey = SetKey(7);

    fn late(set: SetKey, awaited_ns: u64, last: u64) -> SetLateness {
        let lateness = Lateness { awaited_ns, last };
        SetLateness { set, lateness }
    }

    #[test]
    fn time_for_which_several_requests_waited_counts_once() {
        let mut found = LinkLateness::new(2);
        found.completes(Time(10), A, Latest::Link(1), Time(4));
        found.completes(Time(12), A, Latest::Link(1), Time(5));
        found.completes(Time(20), A, Latest::Link(0), Time(18));
        assert_eq!(found.of(1), [late(A, 8, 2)]);
        assert_eq!(found.of(0), [late(A, 2, 1)]);
        assert_eq!(found.of(7), []);
        found.completes(Time(30), A, Latest::Behind(Rank(5)), Time(19));
        assert_eq!(found.of_rank(Rank(5)), [late(A, 11, 1)]);
    }

    #[test]
    fn two_sets_that_wait_at_once_for_different_ranks_hide_neither() {
        let mut found = LinkLateness::new(4);
        found.completes(Time(10), A, Latest::Link(1), Time(0));
        found.completes(Time(11), B, Latest::Link(3), Time(0));
        assert_eq!(found.of(1), [late(A, 10, 1)]);
        assert_eq!(found.of(3), [late(B, 11, 1)]);
        assert_eq!(found.compared(), [A, B]);
    }

    #[test]
    fn two_sets_that_wait_at_once_for_one_rank_count_once_but_not_for_a_subtree() {
        let mut found = LinkLateness::new(4);
        found.completes(Time(10), A, Latest::Link(1), Time(0));
        found.completes(Time(11), B, Latest::Link(1), Time(0));
        assert_eq!(found.of(1), [late(A, 10, 1), late(B, 1, 1)]);
        found.completes(Time(10), A, Latest::Subtree(2), Time(0));
        found.completes(Time(11), B, Latest::Subtree(2), Time(0));
        assert_eq!(found.of(2), [late(A, 10, 1), late(B, 11, 1)]);
    }

    #[test]
    fn sets_that_are_too_many_count_as_one() {
        let mut found = LinkLateness::new(1);
        for set in 0..20 {
            let now = Time(10 * (set + 1));
            found.completes(now, SetKey(set), Latest::Link(0), Time(10 * set));
        }
        let sets = found.of(0);
        assert_eq!(sets.len(), LATE_SETS_MAX);
        let awaited: u64 = sets.iter().map(|of| of.lateness.awaited_ns).sum();
        assert_eq!(awaited, 200);
        assert_eq!(sets[7], late(OTHERS, 130, 13));
    }
}

//! Joins: which ranks have no more data, and who came last.

use crate::rank_set::RankSet;
use crate::types::Rank;

#[derive(Debug, Default)]
pub(crate) struct Joins {
    joined: RankSet,
    last: Option<Rank>,
}

impl Joins {
    /// `false` if the rank had joined before.
    pub(crate) fn add(&mut self, rank: Rank) -> bool {
        // By arrival and not by the clock, which many events share: a rank may have joined because it was told that
        // another had.
        self.last = Some(rank);
        self.joined.insert(rank)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.joined.is_empty()
    }

    pub(crate) fn contains(&self, rank: Rank) -> bool {
        self.joined.contains(rank)
    }

    /// Members that are excused: joined, and without a request of their own among `arrived`.
    pub(crate) fn absent_count(&self, members: &RankSet, arrived: &RankSet) -> usize {
        self.joined
            .iter()
            .filter(|r| members.contains(*r) && !arrived.contains(*r))
            .count()
    }

    /// Once all `size` ranks have joined: the last one; and everybody may start again.
    pub(crate) fn finish(&mut self, size: u32) -> Option<Rank> {
        if self.joined.len() < size as usize {
            return None;
        }
        self.joined.clear();
        self.last.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_to_arrive_is_last() {
        let mut joins = Joins::default();
        assert!(joins.add(Rank(2)) && !joins.add(Rank(2)));
        joins.add(Rank(1));
        assert_eq!(joins.finish(3), None);
        joins.add(Rank(0));
        assert_eq!(joins.finish(3), Some(Rank(0)));
        assert!(joins.is_empty() && joins.finish(3).is_none());
    }

    #[test]
    fn only_joined_members_without_a_request_are_excused() {
        let mut joins = Joins::default();
        for rank in [1, 2, 7] {
            joins.add(Rank(rank));
        }
        let members = [0, 1, 2].map(Rank).into_iter().collect();
        let arrived = [0, 2].map(Rank).into_iter().collect();
        assert_eq!(joins.absent_count(&members, &arrived), 1);
    }
}

//! Registered process sets as the coordinator sees them: registrations, ids and their reuse.

use crate::limits::PROCESS_SETS_MAX;
use crate::lookup::Lookup;
use crate::message::SetKey;
use crate::rank_set::RankSet;
use crate::refusal::Refusal;
use crate::tree::{Links, position};
use crate::types::{ProcessSetId, Rank};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct SetTable {
    sets: BTreeMap<SetKey, RegisteredSet>,
    ids: BTreeMap<ProcessSetId, SetKey>,
    next_key: u64,
    next_id: u32,
    /// Reused first in, first out. Messages carry the [`SetKey`], so reuse cannot confuse.
    free_ids: VecDeque<ProcessSetId>,
    /// The coordinator's links, to know which of them lead to a set.
    pub(crate) links: Links,
}

#[derive(Debug)]
pub(crate) struct RegisteredSet {
    pub(crate) id: ProcessSetId,
    pub(crate) members: Arc<[Rank]>,
    pub(crate) bits: RankSet,
    /// Links that lead to members, ascending.
    pub(crate) to: Arc<[u32]>,
    /// Names that are pending or cached.
    pub(crate) names: Lookup<Arc<str>, usize>,
}

impl SetTable {
    pub(crate) fn new(size: u32, links: Links) -> Self {
        let mut table = Self {
            sets: BTreeMap::new(),
            ids: BTreeMap::new(),
            next_key: 0,
            next_id: 0,
            free_ids: VecDeque::new(),
            links,
        };
        table.insert((0..size).map(Rank).collect());
        table
    }

    /// All links.
    pub(crate) fn everybody(&self) -> Arc<[u32]> {
        self.sets
            .get(&SetKey::GLOBAL)
            .map_or_else(|| [].into(), |set| Arc::clone(&set.to))
    }

    pub(crate) fn get(&self, key: SetKey) -> Option<&RegisteredSet> {
        self.sets.get(&key)
    }

    pub(crate) fn get_mut(&mut self, key: SetKey) -> Option<&mut RegisteredSet> {
        self.sets.get_mut(&key)
    }

    /// Whether there has ever been such a registration.
    pub(crate) fn existed(&self, key: SetKey) -> bool {
        key.0 < self.next_key
    }

    /// Registers a set of ascending ranks, unless there is one of the same ranks.
    pub(crate) fn add(
        &mut self,
        ranks: &[Rank],
    ) -> Result<(SetKey, ProcessSetId, Arc<[Rank]>), Refusal> {
        if self.sets.values().any(|set| *set.members == *ranks) {
            let ranks = ranks.to_vec();
            return Err(Refusal::DuplicateSet { ranks });
        }
        if self.sets.len() >= PROCESS_SETS_MAX {
            return Err(Refusal::TooManySets);
        }
        let members: Arc<[Rank]> = ranks.into();
        let (key, id) = self.insert(Arc::clone(&members));
        Ok((key, id, members))
    }

    /// Ends a registration; `None` for the global set and unknown ids.
    pub(crate) fn remove(&mut self, id: ProcessSetId) -> Option<(SetKey, RegisteredSet)> {
        if id == ProcessSetId::GLOBAL {
            return None;
        }
        let key = self.ids.remove(&id)?;
        self.free_ids.push_back(id);
        Some((key, self.sets.remove(&key)?))
    }

    fn insert(&mut self, members: Arc<[Rank]>) -> (SetKey, ProcessSetId) {
        let key = SetKey(self.next_key);
        self.next_key += 1;
        let id = self.free_ids.pop_front().unwrap_or_else(|| {
            self.next_id += 1;
            ProcessSetId(self.next_id - 1)
        });
        let bits: RankSet = members.iter().copied().collect();
        let to = self.links.to(&bits).into();
        self.sets.insert(
            key,
            RegisteredSet {
                id,
                members,
                bits,
                to,
                names: Lookup::default(),
            },
        );
        self.ids.insert(id, key);
        (key, id)
    }
}

impl RegisteredSet {
    /// The place of a link among those that lead to members.
    pub(crate) fn position(&self, link: usize) -> Option<usize> {
        position(&self.to, link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    fn table(size: u32) -> SetTable {
        SetTable::new(size, Links::of(&Tree::star(size), Rank(0)))
    }

    fn add(table: &mut SetTable, ranks: &[u32]) -> Result<(u64, u32), Refusal> {
        let ranks: Vec<Rank> = ranks.iter().map(|r| Rank(*r)).collect();
        table.add(&ranks).map(|(key, id, _)| (key.0, id.0))
    }

    #[test]
    fn ids_count_up_and_freed_ones_return_in_order_under_new_registrations() {
        let mut table = table(4);
        assert_eq!(add(&mut table, &[0]), Ok((1, 1)));
        assert_eq!(add(&mut table, &[1]), Ok((2, 2)));
        assert_eq!(add(&mut table, &[2]), Ok((3, 3)));
        assert!(table.remove(ProcessSetId(2)).is_some() && table.remove(ProcessSetId(1)).is_some());
        assert_eq!(add(&mut table, &[1]), Ok((4, 2)));
        assert_eq!(add(&mut table, &[0]), Ok((5, 1)));
        assert_eq!(add(&mut table, &[0, 1]), Ok((6, 4)));
        assert!(table.get(SetKey(2)).is_none() && table.existed(SetKey(2)));
        assert!(!table.existed(SetKey(7)));
    }

    #[test]
    fn equal_sets_are_refused_and_the_global_one_stays() {
        let mut table = table(2);
        let error = add(&mut table, &[0, 1]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Attempted to add a duplicate process set: [0, 1]"
        );
        assert!(table.remove(ProcessSetId::GLOBAL).is_none());
        assert!(table.remove(ProcessSetId(9)).is_none());
    }
}

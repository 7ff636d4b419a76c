//! The response cache: agreed requests under slots that are never reused.
//!
//! The coordinator alone decides what is cached and evicted (what nobody has used for long, per set);
//! workers mirror it. A hit may be on its way while its slot is evicted, so evicted content is kept
//! until every member has confirmed the eviction.

use crate::fusion::FusionKey;
use crate::limits::{CACHE_CAPACITY_MAX, RETIRED_SLOTS_MAX};
use crate::lookup::Lookup;
use crate::message::{SetKey, Slot, SlotRun};
use crate::signature::RequestSignature;
use crate::slots::{BLOCK_SLOTS, SlotMap};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Cache {
    capacity: usize,
    next_block: u64,
    /// The next slot of each set; a block has slots of one set only.
    next_slot: BTreeMap<SetKey, u64>,
    clock: u64,
    lines: SlotMap<Line>,
    /// Per set, by last use when last looked at; the truth is in the line.
    by_use: BTreeMap<SetKey, BTreeSet<(u64, Slot)>>,
    warned: BTreeSet<SetKey>,
    retired: Lookup<Slot, Retired>,
    retired_count: usize,
    confirmations: VecDeque<Confirmation>,
    /// Evictions not yet announced.
    unannounced: Vec<Confirmation>,
    mark: u64,
    seen: Vec<u64>,
}

/// A live entry.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) set: SetKey,
    /// The coordinator's entry of that name.
    pub(crate) entry: usize,
    pub(crate) signature: Arc<RequestSignature>,
    pub(crate) fusion: Option<FusionKey>,
    /// Bytes of the tensors on one rank.
    pub(crate) bytes: u64,
    used: u64,
    /// Its place in the order of use.
    noted: u64,
}

/// An evicted entry that hits may still mean.
#[derive(Debug)]
pub(crate) struct Retired {
    pub(crate) set: SetKey,
    pub(crate) name: Arc<str>,
    pub(crate) signature: Arc<RequestSignature>,
}

/// Slots that can be forgotten once all members have seen the mark.
#[derive(Debug)]
struct Confirmation {
    mark: u64,
    members: Arc<[u32]>,
    /// How many of the members are known to have confirmed.
    confirmed: usize,
    slots: Vec<Slot>,
    /// Whether the members must be told; a removed set takes its slots along.
    announce: bool,
}

/// Whether a set's cache has room for one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Free,
    /// After this slot has been evicted, which nobody has used for long.
    Instead(Slot),
    /// All entries are in use. Further names are negotiated in full each time, and the present ones stay. Evicting the
    /// least recently used would leave no hits at all to a job that cycles through more names than there are entries.
    None {
        /// For the first time, and that is worth a warning.
        first: bool,
    },
}

/// An entry makes room when it was not used while this many times the capacity were.
const IDLE_CAPACITIES: u64 = 4;

impl Cache {
    pub(crate) fn new(capacity: usize, links: usize) -> Self {
        Self {
            capacity: capacity.min(CACHE_CAPACITY_MAX),
            next_block: 0,
            next_slot: BTreeMap::new(),
            clock: 0,
            lines: SlotMap::default(),
            by_use: BTreeMap::new(),
            warned: BTreeSet::new(),
            retired: Lookup::default(),
            retired_count: 0,
            confirmations: VecDeque::new(),
            unannounced: Vec::new(),
            mark: 0,
            seen: vec![0; links],
        }
    }

    pub(crate) fn line(&self, slot: Slot) -> Option<&Line> {
        self.lines.get(slot)
    }

    pub(crate) fn retired(&self, slot: Slot) -> Option<&Retired> {
        self.retired.get(&slot)
    }

    /// Notes that a slot was used in a step.
    pub(crate) fn touch(&mut self, slot: Slot) -> Option<&Line> {
        self.clock += 1;
        let line = self.lines.get_mut(slot)?;
        line.used = self.clock;
        Some(line)
    }

    /// Whether there is room for one more entry of a set.
    pub(crate) fn space_for(&mut self, set: SetKey) -> Space {
        if self.capacity == 0 || self.retired_count >= RETIRED_SLOTS_MAX {
            return Space::None { first: false };
        }
        let full = |slots: &BTreeSet<_>| slots.len() >= self.capacity;
        if !self.by_use.get(&set).is_some_and(full) {
            return Space::Free;
        }
        self.clock += 1;
        let idle_max = self.capacity as u64 * IDLE_CAPACITIES;
        let victim = self.least_recently_used(set);
        let idle = victim.and_then(|slot| Some(self.clock - self.lines.get(slot)?.used));
        match victim {
            Some(slot) if idle.is_some_and(|idle| idle > idle_max) => Space::Instead(slot),
            _ => Space::None {
                first: self.warned.insert(set),
            },
        }
    }

    /// Caches agreed content; there must be [`Space`].
    pub(crate) fn insert(
        &mut self,
        set: SetKey,
        entry: usize,
        signature: &Arc<RequestSignature>,
        bytes: u64,
    ) -> Slot {
        let next = self.next_slot.entry(set).or_default();
        if next.is_multiple_of(BLOCK_SLOTS) {
            *next = self.next_block * BLOCK_SLOTS;
            self.next_block += 1;
        }
        let slot = Slot(*next);
        *next += 1;
        self.clock += 1;
        let used = self.clock;
        self.by_use.entry(set).or_default().insert((used, slot));
        let fusion = FusionKey::of(set, signature);
        let signature = Arc::clone(signature);
        self.lines.insert(
            slot,
            Line {
                set,
                entry,
                signature,
                fusion,
                bytes,
                used,
                noted: used,
            },
        );
        slot
    }

    /// Evicts one slot; hits on their way still resolve.
    pub(crate) fn retire(&mut self, slot: Slot, members: &Arc<[u32]>, name: &Arc<str>) {
        let Some(line) = self.lines.remove(slot) else {
            return;
        };
        if let Some(slots) = self.by_use.get_mut(&line.set) {
            slots.remove(&(line.noted, slot));
        }
        self.keep(slot, line, name);
        match self
            .unannounced
            .iter_mut()
            .find(|c| c.announce && Arc::ptr_eq(&c.members, members))
        {
            Some(confirmation) => confirmation.slots.push(slot),
            None => self.unannounced.push(Confirmation {
                mark: 0,
                members: Arc::clone(members),
                confirmed: 0,
                slots: vec![slot],
                announce: true,
            }),
        }
    }

    /// The set is gone and takes its slots along; `name_of` as in [`Cache::insert`].
    pub(crate) fn remove_set(
        &mut self,
        set: SetKey,
        members: &Arc<[u32]>,
        name_of: impl Fn(usize) -> Option<Arc<str>>,
    ) {
        self.warned.remove(&set);
        self.next_slot.remove(&set);
        let mut slots = Vec::new();
        for (_, slot) in self.by_use.remove(&set).unwrap_or_default() {
            if let Some(line) = self.lines.remove(slot)
                && let Some(name) = name_of(line.entry)
            {
                self.keep(slot, line, &name);
                slots.push(slot);
            }
        }
        let members = Arc::clone(members);
        self.unannounced.push(Confirmation {
            mark: 0,
            members,
            confirmed: 0,
            slots,
            announce: false,
        });
    }

    /// Evictions to announce now, per set, in runs. They count as announced from here on, under
    /// [`Cache::mark`].
    pub(crate) fn announce(&mut self) -> Vec<(Arc<[u32]>, Vec<SlotRun>)> {
        if self.unannounced.is_empty() {
            return Vec::new();
        }
        self.mark += 1;
        let mut announced = Vec::new();
        for mut confirmation in std::mem::take(&mut self.unannounced) {
            if confirmation.announce {
                announced.push((
                    Arc::clone(&confirmation.members),
                    runs(&mut confirmation.slots),
                ));
            }
            confirmation.mark = self.mark;
            self.confirmations.push_back(confirmation);
        }
        announced
    }

    /// Number of the last announcement.
    pub(crate) fn mark(&self) -> u64 {
        self.mark
    }

    /// The ranks of a link know of everything up to `mark`; `false` if that has not been announced yet.
    pub(crate) fn confirm(&mut self, link: usize, mark: u64) -> bool {
        let Some(seen) = self.seen.get_mut(link) else {
            return false;
        };
        if mark <= *seen {
            return true;
        }
        *seen = mark;
        while let Some(oldest) = self.confirmations.front_mut() {
            while oldest
                .members
                .get(oldest.confirmed)
                .is_some_and(|m| self.seen[*m as usize] >= oldest.mark)
            {
                oldest.confirmed += 1;
            }
            if oldest.confirmed < oldest.members.len() {
                break;
            }
            for slot in std::mem::take(&mut oldest.slots) {
                self.retired_count -= usize::from(self.retired.remove(&slot).is_some());
            }
            self.confirmations.pop_front();
        }
        mark <= self.mark
    }

    fn keep(&mut self, slot: Slot, line: Line, name: &Arc<str>) {
        let retired = Retired {
            set: line.set,
            name: Arc::clone(name),
            signature: line.signature,
        };
        self.retired.insert(slot, retired);
        self.retired_count += 1;
    }

    /// Uses are noted in the lines only; the order is brought up to date where it matters.
    fn least_recently_used(&mut self, set: SetKey) -> Option<Slot> {
        let slots = self.by_use.get_mut(&set)?;
        loop {
            let (noted, slot) = slots.pop_first()?;
            let line = self.lines.get_mut(slot)?;
            line.noted = line.used;
            slots.insert((line.noted, slot));
            if noted == line.used {
                return Some(slot);
            }
        }
    }
}

fn runs(slots: &mut [Slot]) -> Vec<SlotRun> {
    slots.sort_unstable();
    let mut runs: Vec<SlotRun> = Vec::new();
    for slot in slots {
        if !runs.last_mut().is_some_and(|run| run.extend(*slot)) {
            runs.push(SlotRun {
                first: *slot,
                len: 1,
            });
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Device, Op};

    fn cache(capacity: usize) -> (Cache, Arc<[u32]>) {
        (Cache::new(capacity, 2), [0, 1].into())
    }

    /// Asks for room and takes it.
    fn insert(cache: &mut Cache, members: &Arc<[u32]>, entry: usize) -> (Space, Option<Slot>) {
        let signature = Arc::new(RequestSignature {
            op: Op::Alltoall,
            device: Device::Cpu,
            tensors: [].into(),
        });
        let room = cache.space_for(SetKey::GLOBAL);
        if let Space::Instead(victim) = room {
            let name = cache.line(victim).expect("in use").entry.to_string();
            cache.retire(victim, members, &name.into());
        }
        let cached = !matches!(room, Space::None { .. });
        let slot = cached.then(|| cache.insert(SetKey::GLOBAL, entry, &signature, 0));
        (room, slot)
    }

    fn insert_at_last(cache: &mut Cache, members: &Arc<[u32]>, entry: usize) -> Slot {
        (0..100)
            .find_map(|_| insert(cache, members, entry).1)
            .expect("room")
    }

    #[test]
    fn what_was_not_used_for_long_makes_room_and_slots_are_never_reused() {
        let (mut cache, members) = cache(2);
        for entry in 0..2 {
            assert!(insert(&mut cache, &members, entry).1.is_some());
        }
        let mut refused = Vec::new();
        let slot = loop {
            cache.touch(Slot(0));
            match insert(&mut cache, &members, 2) {
                (Space::None { first }, None) => refused.push(first),
                (Space::Instead(Slot(1)), Some(slot)) => break slot,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(slot, Slot(2));
        assert_eq!(refused, [true, false, false, false], "warned once");
        let announced = cache.announce();
        assert_eq!(
            announced[0].1,
            [SlotRun {
                first: Slot(1),
                len: 1
            }]
        );
    }

    #[test]
    fn going_round_more_names_than_there_is_room_for_keeps_hits() {
        let (mut cache, members) = cache(10);
        let mut slots: Vec<Option<Slot>> = vec![None; 15];
        for round in 0..20 {
            let mut hits = 0;
            for (entry, slot) in slots.iter_mut().enumerate() {
                match slot {
                    Some(slot) if cache.touch(*slot).is_some() => hits += 1,
                    _ => *slot = insert(&mut cache, &members, entry).1,
                }
            }
            assert!(round == 0 || hits == 10, "round {round}: {hits}");
        }
    }

    #[test]
    fn evicted_signatures_resolve_until_every_member_has_confirmed() {
        let (mut cache, members) = cache(1);
        insert(&mut cache, &members, 7);
        insert_at_last(&mut cache, &members, 8);
        assert!(cache.line(Slot(0)).is_none());
        cache.announce();
        assert_eq!(cache.retired(Slot(0)).map(|r| &*r.name), Some("7"));
        assert!(cache.confirm(1, 1));
        assert!(cache.retired(Slot(0)).is_some());
        assert!(cache.confirm(0, 1));
        assert!(cache.retired(Slot(0)).is_none() && cache.retired_count == 0);
        assert!(!cache.confirm(0, 2), "confirmed what was never announced");
    }

    #[test]
    fn stops_caching_rather_than_keep_unconfirmed_evictions_without_bound() {
        let (mut cache, members) = cache(1);
        let cached = (0..20 * RETIRED_SLOTS_MAX)
            .filter(|entry| {
                let (_, slot) = insert(&mut cache, &members, *entry);
                cache.announce();
                slot.is_some()
            })
            .count();
        assert_eq!(cached, RETIRED_SLOTS_MAX + 1);
        let mark = cache.mark();
        cache.confirm(0, mark);
        cache.confirm(1, mark);
        insert_at_last(&mut cache, &members, 0);
    }

    #[test]
    fn a_removed_set_keeps_its_slots_for_late_hits_without_announcing_them() {
        let (mut cache, members) = cache(4);
        insert(&mut cache, &members, 0);
        cache.remove_set(SetKey::GLOBAL, &members, |_| Some("x".into()));
        assert!(cache.announce().is_empty());
        assert!(cache.retired(Slot(0)).is_some());
        cache.confirm(0, 1);
        cache.confirm(1, 1);
        assert!(cache.retired(Slot(0)).is_none());
    }

    #[test]
    fn capacity_zero_turns_it_off() {
        let (mut cache, members) = cache(0);
        assert_eq!(
            insert(&mut cache, &members, 0),
            (Space::None { first: false }, None)
        );
    }
}

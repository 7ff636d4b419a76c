//! The arrival of requests that are not simply counted: new requests, retired slots, rows, requests that aggregators
//! forward, joins. Each of these requests is pending by rank.

use super::{Coordinator, Entry, Pending, Violation, latest};
use crate::lateness::Latest;
use crate::limits::PENDING_MAX;
use crate::message::{Response, SetKey, Slot, Submission};
use crate::process_sets::RegisteredSet;
use crate::rank_set::RankSet;
use crate::signature::RequestSignature;
use crate::slots::slots_of;
use crate::tree::Links;
use crate::types::{Op, Rank, Time};
use std::sync::Arc;

pub(super) const FOREIGN: Violation = "used a foreign process set";
pub(super) const NOT_IN_USE: Violation = "used a slot that is not in use";
pub(super) const TWICE: Violation = "used a name that it has pending already";

/// The ranks for which a link sends.
pub(super) enum Who {
    /// One rank, which sends only for itself.
    Rank(Rank),
    /// Every member below this link.
    Link(usize),
    /// These ranks, and those of `members` that are in the request's set.
    Some { ranks: RankSet, members: RankSet },
}

impl Who {
    /// Returns the rank if an aggregator sends for exactly one.
    fn only(&self) -> Option<Rank> {
        match self {
            Self::Some { ranks, members } if ranks.len() == 1 && members.is_empty() => {
                ranks.iter().next()
            }
            _ => None,
        }
    }

    /// Returns the members of `set` for which the link sends, or `None` if it sends for a rank outside the set. Never
    /// empty.
    fn of(&self, set: &RegisteredSet, links: &Links) -> Option<RankSet> {
        let ranks = match self {
            Self::Rank(rank) => [*rank].into_iter().collect(),
            Self::Link(link) => links.get(*link).below.as_ref()?.common(&set.bits),
            Self::Some { ranks, members } => {
                if !ranks.is_within(&set.bits) {
                    return None;
                }
                let mut all = members.common(&set.bits);
                all.unite(ranks);
                all
            }
        };
        (!ranks.is_empty()).then_some(ranks)
    }
}

impl Coordinator {
    pub(super) fn asked_or_gathered(
        &mut self,
        link: usize,
        who: &Who,
        item: &Submission,
    ) -> Result<(), Violation> {
        match item {
            Submission::GatherHit { slot, first_dims } => {
                self.hit(link, who, *slot, Some(first_dims))
            }
            Submission::New {
                set,
                name,
                signature,
            } => self.asked(link, who, *set, name, Arc::clone(signature)),
            Submission::ShutdownAck => Err("confirmed a shutdown that was not announced"),
            _ => Err("said what only a rank can say, for others"),
        }
    }

    /// Returns the ranks that an aggregator names. An aggregator may name only ranks below itself.
    pub(super) fn named(
        &self,
        link: usize,
        ranks: &[Rank],
        subtrees: &[Rank],
    ) -> Result<Who, Violation> {
        const STRANGERS: Violation = "spoke for ranks that do not speak through it";
        let (Some(tree), Some(below)) = (&self.tree, &self.sets.links.get(link).below) else {
            return Err(STRANGERS);
        };
        if ranks
            .iter()
            .chain(subtrees)
            .any(|rank| !below.contains(*rank))
        {
            return Err(STRANGERS);
        }
        let mut members = RankSet::default();
        let apart = subtrees.iter().all(|top| members.unite(&tree.below(*top)));
        let ranks_set: RankSet = ranks.iter().copied().collect();
        if !apart || ranks_set.len() != ranks.len() || members.meets(&ranks_set) {
            return Err(TWICE);
        }
        Ok(Who::Some {
            ranks: ranks_set,
            members,
        })
    }

    pub(super) fn joined(&mut self, rank: Rank) -> Result<(), Violation> {
        if self.joins.is_empty() {
            // Known requests may now be complete without all their links, so each becomes pending by rank.
            self.pend_waiting(|_| true);
        }
        if !self.joins.add(rank) {
            return Err("joined twice");
        }
        self.release_after_join();
        Ok(())
    }

    pub(super) fn hit(
        &mut self,
        link: usize,
        who: &Who,
        slot: Slot,
        rows: Option<&Vec<u64>>,
    ) -> Result<(), Violation> {
        let (entry, signature) = if let Some(line) = self.cache.touch(slot) {
            (line.entry, Arc::clone(&line.signature))
        } else {
            let retired = self.cache.retired(slot).ok_or(NOT_IN_USE)?;
            if self.sets.get(retired.set).is_none() {
                // The set was removed while this message was in transit.
                return Ok(());
            }
            let (set, name) = (retired.set, Arc::clone(&retired.name));
            let signature = Arc::clone(&retired.signature);
            (self.entry_of(set, &name)?, signature)
        };
        if (signature.op == Op::Allgather) != rows.is_some()
            || rows.is_some_and(|rows| rows.len() != signature.tensors.len())
        {
            return Err("used a slot with the wrong number of rows");
        }
        self.arrive(link, who, entry, signature, rows.cloned())
    }

    fn asked(
        &mut self,
        link: usize,
        who: &Who,
        set: SetKey,
        name: &Arc<str>,
        signature: Arc<RequestSignature>,
    ) -> Result<(), Violation> {
        if self.sets.get(set).is_none() {
            // The rank sent this before it received the removal, or the set never existed.
            return if self.sets.existed(set) {
                Ok(())
            } else {
                Err("used an unknown process set")
            };
        }
        match &signature.op {
            Op::Join => return Err("sent a join in place of a request"),
            Op::AddProcessSet { ranks } => {
                let ascending = ranks.windows(2).all(|pair| pair[0] < pair[1]);
                if !ascending || ranks.last().is_none_or(|last| last.0 >= self.cfg.size) {
                    return Err("asked for an impossible process set");
                }
            }
            _ => {}
        }
        let rows = (signature.op == Op::Allgather).then(|| {
            signature
                .tensors
                .iter()
                .map(|t| t.shape.first().copied().unwrap_or(0))
                .collect()
        });
        let entry = self.entry_of(set, name)?;
        self.arrive(link, who, entry, signature, rows)
    }

    fn entry_of(&mut self, set: SetKey, name: &Arc<str>) -> Result<usize, Violation> {
        let names = &mut self
            .sets
            .get_mut(set)
            .ok_or("used an unknown process set")?
            .names;
        if let Some(index) = names.get(&**name) {
            return Ok(*index);
        }
        let name = Arc::clone(name);
        let entry = Entry {
            set,
            name: Arc::clone(&name),
            cached: None,
            pending: None,
        };
        let index = self.entries.insert(entry);
        names.insert(name, index);
        Ok(index)
    }

    fn arrive(
        &mut self,
        link: usize,
        who: &Who,
        index: usize,
        signature: Arc<RequestSignature>,
        rows: Option<Vec<u64>>,
    ) -> Result<(), Violation> {
        if self.outstanding[link] >= PENDING_MAX {
            return Err("has too many requests pending");
        }
        self.pend(index);
        let entry = self.entries.get_mut(index).ok_or(NOT_IN_USE)?;
        let set = self
            .sets
            .get(entry.set)
            .ok_or("used an unknown process set")?;
        if let Who::Rank(rank) = who
            && !set.bits.contains(*rank)
        {
            return Err(FOREIGN);
        }
        let pending = entry.pending.get_or_insert_with(|| {
            self.arrivals += 1;
            self.outstanding[link] += 1;
            Pending {
                arrived: self.spare.pop().unwrap_or_default(),
                starter: link,
                since: self.now,
                alone: None,
                report_at: self.stall.started(self.now),
                order: self.arrivals,
                signature: Arc::clone(&signature),
                others: Vec::new(),
                rows: Vec::new(),
            }
        });
        let differs =
            !Arc::ptr_eq(&pending.signature, &signature) && !pending.signature.agrees(&signature);
        match who {
            Who::Rank(rank) if !differs => {
                if !pending.arrived.insert(*rank) {
                    return Err(TWICE);
                }
                pending.rows.extend(rows.map(|rows| (*rank, rows)));
            }
            _ => {
                let ranks = who.of(set, &self.sets.links).ok_or(FOREIGN)?;
                if !pending.arrived.unite(&ranks) {
                    return Err(TWICE);
                }
                if let Some(rows) = rows {
                    pending
                        .rows
                        .extend(ranks.iter().map(|rank| (rank, rows.clone())));
                }
                if differs {
                    pending.others.push((ranks, signature));
                }
            }
        }
        let absent = if self.joins.is_empty() {
            0
        } else {
            self.joins.absent_count(&set.bits, &pending.arrived)
        };
        let missing = set
            .members
            .len()
            .saturating_sub(pending.arrived.len() + absent);
        if missing == 1 {
            pending.alone = Some(self.now);
        }
        let alone = pending.alone;
        if missing == 0 {
            if let (Some(late), Some(alone)) = (&mut self.lateness, alone) {
                let latest = match who.only() {
                    Some(rank) => Latest::Behind(rank),
                    None => latest(self.sets.links.get(link), link, &set.bits),
                };
                late.completes(self.now, entry.set, latest, alone);
            }
            self.complete(index);
        }
        Ok(())
    }

    /// Makes a known request pending by rank instead of counted by link. The ranks that have already requested it count
    /// as arrived.
    fn pend(&mut self, index: usize) {
        let Some(Entry {
            set,
            cached: Some(slot),
            pending: vacant @ None,
            ..
        }) = self.entries.get_mut(index)
        else {
            return;
        };
        let (Some((block, bit)), Some(line)) = (self.readiness.find(*slot), self.cache.line(*slot))
        else {
            return;
        };
        let (since, alone) = (block.since(bit), block.alone(bit));
        let ranks = block.open(bit);
        let (Some(set), Some(first)) = (self.sets.get(*set), ranks.first()) else {
            return;
        };
        let mut arrived = self.spare.pop().unwrap_or_default();
        for position in &ranks {
            let link = self.sets.links.get(set.to[*position] as usize);
            match &link.below {
                None => {
                    arrived.insert(link.rank);
                }
                Some(below) => {
                    arrived.unite(&below.common(&set.bits));
                }
            }
        }
        let starter = set.to[*first] as usize;
        self.arrivals += 1;
        self.outstanding[starter] += 1;
        *vacant = Some(Pending {
            arrived,
            starter,
            since,
            alone,
            report_at: self.stall.report_at(since),
            order: self.arrivals,
            signature: Arc::clone(&line.signature),
            others: Vec::new(),
            rows: Vec::new(),
        });
    }

    /// Makes known requests pending by rank if they have waited since a time that `chosen` accepts.
    pub(super) fn pend_waiting(&mut self, chosen: impl Fn(Time) -> bool) {
        let mut waiting: Vec<(Time, Slot)> = Vec::new();
        for block in self.readiness.waiting() {
            for slot in slots_of(block.number, block.waiting_slots()) {
                let since = block.since((slot.0 % 64) as u32);
                if chosen(since) {
                    waiting.push((since, slot));
                }
            }
        }
        waiting.sort_unstable();
        for (_, slot) in waiting {
            if let Some(entry) = self.cache.line(slot).map(|line| line.entry) {
                self.pend(entry);
            }
        }
    }

    /// Makes the request of a slot pending by rank before the slot is evicted.
    pub(super) fn pend_slot(&mut self, slot: Slot) {
        let waits = self
            .readiness
            .find(slot)
            .is_some_and(|(block, bit)| block.waits(bit));
        if waits && let Some(entry) = self.cache.line(slot).map(|line| line.entry) {
            self.pend(entry);
        }
    }

    /// Completes the requests that waited only for a rank that has joined, in the order of arrival.
    fn release_after_join(&mut self) {
        let mut released: Vec<(u64, usize)> = self
            .entries
            .iter()
            .filter_map(|(index, entry)| {
                let pending = entry.pending.as_ref()?;
                let set = self.sets.get(entry.set)?;
                let absent = self.joins.absent_count(&set.bits, &pending.arrived);
                (pending.arrived.len() + absent == set.members.len())
                    .then_some((pending.order, index))
            })
            .collect();
        released.sort_unstable();
        for (_, index) in released {
            // An earlier request of this loop may have removed the process set.
            if self
                .entries
                .get(index)
                .is_some_and(|entry| entry.pending.is_some())
            {
                self.complete(index);
            }
        }
        if let Some(last) = self.joins.finish(self.cfg.size) {
            self.answer(Arc::clone(&self.everybody), Response::Joined { last });
        }
    }
}

//! Late requests, which some members have asked for and others have not, looked at from outside.

use super::{Coordinator, Entry, Phase};
use crate::join::Joins;
use crate::lookup::Slab;
use crate::process_sets::SetTable;
use crate::rank_set::RankSet;
use crate::stall::{StalledRequest, Waiting};
use crate::types::{Rank, Time};

impl Coordinator {
    /// Requests that some members have asked for since `before` or earlier while others have not, by set and name.
    pub fn late(&mut self, now: Time, before: Time) -> Vec<StalledRequest> {
        let late = self.incomplete(now, before);
        late.into_iter().map(|(_, request)| request).collect()
    }

    /// The same, each with a number that no other request has or will have, also not a later one of the same name.
    pub fn incomplete(&mut self, now: Time, before: Time) -> Vec<(u64, StalledRequest)> {
        self.now = self.now.max(now);
        if !matches!(self.phase, Phase::Running) {
            return Vec::new();
        }
        self.pend_waiting(|since| since <= before);
        let waiting = waiting(&mut self.entries, &self.sets, &self.joins);
        let late = waiting.filter(|(_, request)| request.since <= before);
        let mut late: Vec<_> = late
            .map(|(order, request)| (order, request.describe(self.now)))
            .collect();
        late.sort_by(|(_, a), (_, b)| (a.set, &a.name).cmp(&(b.set, &b.name)));
        late
    }

    /// Whether something may wait for any of these ranks: a look that changes nothing. What an aggregator holds back
    /// counts as missing.
    pub fn lacks_any(&mut self, ranks: impl IntoIterator<Item = Rank>) -> bool {
        let ranks: RankSet = ranks.into_iter().collect();
        if !matches!(self.phase, Phase::Running) {
            return false;
        }
        let (sets, joins) = (&self.sets, &self.joins);
        let by_slot = self.readiness.waiting().any(|block| {
            sets.get(block.set).is_some_and(|set| {
                set.to.iter().enumerate().any(|(position, link)| {
                    let link = sets.links.get(*link as usize);
                    let is_meant = match &link.below {
                        None => ranks.contains(link.rank),
                        Some(below) => below.common(&set.bits).meets(&ranks),
                    };
                    is_meant && block.missing(position) != 0
                })
            })
        });
        by_slot
            || waiting(&mut self.entries, sets, joins).any(|(_, request)| {
                let mut missing = request.missing();
                missing.any(|rank| ranks.contains(rank))
            })
    }
}

/// What is kept rank by rank of this, in no order, with the number of each request.
pub(super) fn waiting<'a>(
    entries: &'a mut Slab<Entry>,
    sets: &'a SetTable,
    joins: &'a Joins,
) -> impl Iterator<Item = (u64, Waiting<'a>)> {
    entries.iter_mut().filter_map(move |(_, entry)| {
        let pending = entry.pending.as_mut()?;
        let set = sets.get(entry.set)?;
        Some((
            pending.order,
            Waiting {
                set: set.id,
                name: &entry.name,
                members: &set.members,
                arrived: &pending.arrived,
                joins,
                since: pending.since,
                report_at: &mut pending.report_at,
            },
        ))
    })
}

//! Late requests, which some members have sent and others have not: their reports, and queries about them.

use super::{Coordinator, CoordinatorAction, CoordinatorPhase, Entry};
use crate::error::StopReason;
use crate::join::Joins;
use crate::lookup::Slab;
use crate::process_sets::SetTable;
use crate::rank_set::RankSet;
use crate::slots::slots_of;
use crate::stall::{StallReport, StalledRequest, WaitingRequest};
use crate::types::{Rank, Time};

impl Coordinator {
    /// Handles the passage of time. Must be called at [`Coordinator::next_deadline`] at the latest.
    pub fn handle_timeout(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.check_stalls();
    }

    pub(super) fn check_stalls(&mut self) {
        if !matches!(self.phase, CoordinatorPhase::Running) || !self.stall.due(self.now) {
            return;
        }
        let next = self.pend_late();
        let report = self.stall_report();
        self.stall.check_by(next);
        let Some(report) = report else { return };
        let culprit = report.shutdown.then(|| report.worst()).flatten();
        let blame = culprit.map(|(rank, request)| (rank, request.name.to_string()));
        self.actions.push_back(CoordinatorAction::Stall(report));
        if let Some((rank, tensor)) = blame {
            self.stop(rank, StopReason::Stalled { tensor });
        }
    }

    fn stall_report(&mut self) -> Option<StallReport> {
        let waiting = waiting(&mut self.entries, &self.sets, &self.joins);
        self.stall
            .inspect(self.now, waiting.map(|(_, request)| request))
    }

    /// Makes requests that have waited too long pending by rank, so that they are reported. Returns when the next one
    /// is due.
    fn pend_late(&mut self) -> Option<Time> {
        let (now, stall) = (self.now, self.stall.clone());
        self.pend_waiting(|since| now >= stall.report_at(since));
        self.readiness
            .waiting()
            .flat_map(|block| {
                let times: Vec<Time> = slots_of(block.number, block.waiting_slots())
                    .map(|slot| block.since((slot.0 % 64) as u32))
                    .collect();
                times
            })
            .min()
            .map(|since| stall.report_at(since))
    }

    /// Returns the requests that some members sent at `before` or earlier while others have not, sorted by set and
    /// name.
    pub fn late(&mut self, now: Time, before: Time) -> Vec<StalledRequest> {
        let late = self.incomplete(now, before);
        late.into_iter().map(|(_, request)| request).collect()
    }

    /// Returns the requests of [`Self::late`], each with a unique number. No other request ever gets this number, not
    /// even a later one of the same name.
    pub fn incomplete(&mut self, now: Time, before: Time) -> Vec<(u64, StalledRequest)> {
        self.now = self.now.max(now);
        if !matches!(self.phase, CoordinatorPhase::Running) {
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

    /// Returns whether a request may wait for any of `ranks`, without a change of state. Arrivals that an aggregator
    /// has not forwarded yet count as missing.
    pub fn lacks_any(&mut self, ranks: impl IntoIterator<Item = Rank>) -> bool {
        let ranks: RankSet = ranks.into_iter().collect();
        if !matches!(self.phase, CoordinatorPhase::Running) {
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

/// Returns pending requests with their arrived ranks and their numbers, in no particular order.
pub(super) fn waiting<'a>(
    entries: &'a mut Slab<Entry>,
    sets: &'a SetTable,
    joins: &'a Joins,
) -> impl Iterator<Item = (u64, WaitingRequest<'a>)> {
    entries.iter_mut().filter_map(move |(_, entry)| {
        let pending = entry.pending.as_mut()?;
        let set = sets.get(entry.set)?;
        Some((
            pending.order,
            WaitingRequest {
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

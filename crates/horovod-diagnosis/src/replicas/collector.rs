//! Rank 0's collection of reports: keeps each until all members of the process set have reported, then compares.

use std::collections::{BTreeMap, BTreeSet};

use horovod_protocol::{ProcessSetId, Rank};

use super::message::Report;
use super::words::{Finding, Side};

/// Comparisons that wait for reports; reports that would begin another one are dropped.
const PENDING_MAX: usize = 1024;
/// Different replicas of one comparison that are kept; of further ones only the ranks.
const VARIANTS_MAX: usize = 64;
/// Checksums that are kept, of all comparisons; the same limits apply beyond it.
const KEPT_SUMS_MAX: usize = 1 << 22;

/// The reports of one generation that wait for others.
#[derive(Debug, Default)]
pub struct Collector {
    pending: BTreeMap<(ProcessSetId, u64, u64), Pending>,
    kept: usize,
}

#[derive(Debug, Default)]
struct Pending {
    reported: BTreeSet<Rank>,
    names: Vec<String>,
    advice: String,
    total: u64,
    variants: Vec<Variant>,
    /// Ranks whose replica is none of the variants.
    others: Vec<Rank>,
}

/// A replica, and the ranks that hold it.
#[derive(Debug)]
struct Variant {
    sums: Vec<u64>,
    ranks: Vec<Rank>,
}

impl Collector {
    /// Take a report of a rank. The difference, if this was the last report of its comparison and there is one.
    pub fn add(&mut self, from: Rank, report: Report, members: &[Rank]) -> Option<Finding> {
        if members.binary_search(&from).is_err() {
            tracing::debug!("{from} reported the parameters of a process set it is no member of");
            return None;
        }
        let (set, at) = (report.set, (report.set, report.key, report.number));
        if self.pending.len() >= PENDING_MAX && !self.pending.contains_key(&at) {
            tracing::debug!("too many comparisons of parameters wait: a report is dropped");
            return None;
        }
        let pending = self.pending.entry(at).or_default();
        self.kept += pending.add(from, report, KEPT_SUMS_MAX.saturating_sub(self.kept));
        if pending.reported.len() < members.len() {
            return None;
        }
        let pending = self.pending.remove(&at)?;
        self.kept -= pending.kept();
        pending.finding(set)
    }
}

impl Pending {
    /// Takes a report; how many checksums are kept of it.
    fn add(&mut self, from: Rank, report: Report, room: usize) -> usize {
        let first = self.variants.first();
        let fits = first.is_none_or(|first| first.sums.len() == report.sums.len());
        if !fits || !self.reported.insert(from) {
            tracing::debug!("{from} reported its parameters twice, or another number of them");
            return 0;
        }
        self.total = report.total;
        if !report.names.is_empty() {
            self.names = report.names;
            self.advice = report.advice;
        }
        if let Some(same) = self.variants.iter_mut().find(|v| v.sums == report.sums) {
            same.ranks.push(from);
            return 0;
        }
        let kept = report.sums.len();
        // The first one is always kept, or nothing could be compared.
        if !self.variants.is_empty() && (self.variants.len() >= VARIANTS_MAX || kept > room) {
            self.others.push(from);
            return 0;
        }
        self.variants.push(Variant {
            sums: report.sums,
            ranks: vec![from],
        });
        kept
    }

    fn kept(&self) -> usize {
        self.variants.iter().map(|v| v.sums.len()).sum()
    }

    fn finding(mut self, set: ProcessSetId) -> Option<Finding> {
        if self.variants.len() < 2 {
            return None;
        }
        let names = std::mem::take(&mut self.names);
        let differing = names.into_iter().enumerate().filter_map(|(index, name)| {
            let sides = self.sides(index);
            (sides.len() > 1).then_some((name, sides))
        });
        let differing: Vec<_> = differing.collect();
        self.others.sort_unstable();
        Some(Finding {
            set,
            total: self.total,
            differing,
            others: self.others,
            advice: self.advice,
        })
    }

    /// The ranks that hold the same parameter of this number, the most first.
    fn sides(&self, index: usize) -> Vec<Side> {
        let mut sides: BTreeMap<Option<u64>, Side> = BTreeMap::new();
        for variant in &self.variants {
            let side = sides.entry(variant.sums.get(index).copied()).or_default();
            side.extend(&variant.ranks);
        }
        let mut sides: Vec<Side> = sides.into_values().collect();
        sides.iter_mut().for_each(|side| side.sort_unstable());
        sides.sort_by_key(|side| (std::cmp::Reverse(side.len()), side.first().copied()));
        sides
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Numbers, Replica};
    use super::*;

    /// The reports of ranks that each have counted their own.
    #[derive(Default)]
    struct Ranks(BTreeMap<u32, Numbers>);

    impl Ranks {
        fn report(&mut self, rank: u32, set: u32, key: u64, sums: &[u64]) -> Report {
            let replica = Replica {
                key,
                names: (0..sums.len()).map(|i| format!("w{i}")).collect(),
                sums: sums.to_vec(),
                advice: "Broadcast.".into(),
            };
            let numbers = self.0.entry(rank).or_default();
            let number = numbers.take(ProcessSetId(set), key).expect("few reports");
            Report::new(ProcessSetId(set), number, replica, rank == 0)
        }
    }

    fn members(size: u32) -> Vec<Rank> {
        (0..size).map(Rank).collect()
    }

    #[test]
    fn a_rank_that_differs_is_found_when_all_have_reported_in_any_order() {
        let (mut ranks, mut collector) = (Ranks::default(), Collector::default());
        let all = members(3);
        for (rank, sums) in [(2, [1, 2]), (1, [1, 9])] {
            let report = ranks.report(rank, 0, 7, &sums);
            assert_eq!(collector.add(Rank(rank), report, &all), None);
        }
        let report = ranks.report(0, 0, 7, &[1, 2]);
        let found = collector.add(Rank(0), report, &all).expect("a difference");
        let sides = vec![vec![Rank(0), Rank(2)], vec![Rank(1)]];
        assert_eq!(found.differing, [("w1".to_owned(), sides)]);
        assert_eq!((found.total, collector.kept), (2, 0));
        assert!(collector.pending.is_empty());
    }

    #[test]
    fn equal_ranks_are_no_finding_and_leave_nothing() {
        let (mut ranks, mut collector) = (Ranks::default(), Collector::default());
        for rank in 0..3 {
            let report = ranks.report(rank, 0, 7, &[1, 2]);
            assert_eq!(collector.add(Rank(rank), report, &members(3)), None);
        }
        assert_eq!((collector.pending.len(), collector.kept), (0, 0));
    }

    #[test]
    fn without_a_members_report_nothing_is_concluded() {
        let (mut ranks, mut collector) = (Ranks::default(), Collector::default());
        let set = [Rank(1), Rank(2)];
        for (rank, key) in [(1, 7), (0, 7), (2, 8), (1, 7)] {
            let report = ranks.report(rank, 5, key, &[u64::from(rank)]);
            assert_eq!(collector.add(Rank(rank), report, &set), None);
        }
        // Rank 2 reports once where rank 1 has twice: the first two are compared.
        let report = ranks.report(2, 5, 7, &[2]);
        assert!(collector.add(Rank(2), report, &set).is_some());
        assert_eq!(collector.pending.len(), 2);
    }

    #[test]
    fn a_first_report_after_a_join_is_not_compared_with_those_before_it() {
        let (mut ranks, mut collector) = (Ranks::default(), Collector::default());
        let report = ranks.report(0, 0, 7, &[1]);
        assert_eq!(collector.add(Rank(0), report, &members(2)), None);
        for rank in 0..2 {
            ranks.0.entry(rank).or_default().note_joined();
        }
        // Rank 1 takes its first step, with parameters that rank 0 has trained.
        let report = ranks.report(1, 0, 7, &[2]);
        assert_eq!(collector.add(Rank(1), report, &members(2)), None);
    }

    #[test]
    fn models_made_after_a_join_are_compared_though_a_rank_has_reported_fewer_before() {
        let (mut ranks, mut collector) = (Ranks::default(), Collector::default());
        let report = ranks.report(0, 0, 7, &[1]);
        assert_eq!(collector.add(Rank(0), report, &members(2)), None);
        for rank in 0..2 {
            ranks.0.entry(rank).or_default().note_joined();
            let report = ranks.report(rank, 0, 7, &[3 + u64::from(rank)]);
            let found = collector.add(Rank(rank), report, &members(2));
            assert_eq!(found.is_some(), rank == 1);
        }
    }

    #[test]
    fn a_second_report_of_one_number_does_not_count() {
        let (mut ranks, mut collector) = (Ranks::default(), Collector::default());
        let report = ranks.report(1, 0, 7, &[1]);
        for _ in 0..2 {
            let found = collector.add(Rank(1), report.clone(), &members(2));
            assert_eq!(found, None);
        }
        let longer = Ranks::default().report(0, 0, 7, &[1, 2]);
        assert_eq!(collector.add(Rank(0), longer, &members(2)), None);
        let report = ranks.report(0, 0, 7, &[1]);
        assert_eq!(collector.add(Rank(0), report, &members(2)), None);
        assert!(collector.pending.is_empty());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut collector = Collector::default();
        for key in 0..2 * PENDING_MAX as u64 {
            let report = Ranks::default().report(0, 0, key, &[1]);
            assert_eq!(collector.add(Rank(0), report, &members(2)), None);
        }
        assert_eq!(collector.pending.len(), PENDING_MAX);
        let (size, mut collector) = (2 * VARIANTS_MAX as u32, Collector::default());
        let mut found = None;
        for rank in 0..size {
            let report = Ranks::default().report(rank, 0, 7, &[u64::from(rank)]);
            found = collector.add(Rank(rank), report, &members(size));
        }
        let found = found.expect("a difference");
        assert_eq!(found.others.len(), VARIANTS_MAX);
        assert_eq!(found.differing[0].1.len(), VARIANTS_MAX);
    }
}

//! Messages of reports, and the division of lateness.

use proptest::prelude::*;

use super::*;
use crate::figures::{HostFigures, RankFigures};

const ALL: SetKey = SetKey(0);
const INNER: SetKey = SetKey(5);

fn of(set: SetKey, awaited_ns: u64, last: u64) -> SetLateness {
    let lateness = Lateness { awaited_ns, last };
    SetLateness { set, lateness }
}

fn report(rank: u32, late: &[SetLateness]) -> Report {
    let figures = RankFigures {
        waiting: 7,
        ..RankFigures::default()
    };
    Report {
        rank,
        figures,
        late: late.to_vec(),
        ..Report::default()
    }
}

/// The message of a rank that has these reports.
fn message(reports: &[Report]) -> Vec<u8> {
    let mut below = LatestReports::new(9);
    reports.iter().for_each(|report| below.put(report.clone()));
    let mut bytes = Vec::new();
    below.write(&mut bytes, Round::Periodic);
    bytes
}

/// Ranks with awaited time and count at the parent, which has found so much of the child (rank 2).
fn taken(
    bytes: &[u8],
    of_child: &[SetLateness],
    compared: &[SetKey],
    behind: impl Fn(Rank) -> Vec<SetLateness>,
) -> Vec<(u32, u64, u64)> {
    let mut reports = LatestReports::new(9);
    let found = FoundLateness {
        child: Rank(2),
        of_child: of_child.to_vec(),
        compared: compared.to_vec(),
        behind,
    };
    reports.take(bytes, &found).expect("readable");
    let figures = |l: &Latest| {
        let figures = &l.report.figures;
        (l.report.rank, figures.awaited, figures.last)
    };
    reports.latest().map(figures).collect()
}

fn nothing(_: Rank) -> Vec<SetLateness> {
    Vec::new()
}

#[test]
fn lateness_that_is_known_of_a_rank_is_added() {
    let bytes = message(&[report(2, &[]), report(3, &[])]);
    let behind = |rank: Rank| match rank {
        Rank(3) => vec![of(ALL, 500, 2)],
        _ => Vec::new(),
    };
    assert_eq!(taken(&bytes, &[], &[], behind), [(2, 0, 0), (3, 500, 2)]);
}

#[test]
fn reports_travel_whole() {
    let mut with_host = report(2, &[of(ALL, 30, 3), of(INNER, 7, u64::MAX - 3)]);
    with_host.operations[0][1] = 5;
    with_host.bytes[3][2] = u64::MAX;
    with_host.host = Some(HostFigures {
        steal: 9,
        ..HostFigures::default()
    });
    let mut reports = LatestReports::new(4);
    reports.put(report(0, &[]));
    reports.put(with_host.clone());
    let mut bytes = Vec::new();
    reports.write(&mut bytes, Round::Last);
    assert!(is_message(&bytes));
    let (round, mut reports) = decode(&bytes, 4).expect("readable");
    assert_eq!(round, Round::Last);
    for report in &mut reports {
        report.age = Duration::ZERO;
    }
    with_host.sum_late();
    assert_eq!(reports, [report(0, &[]), with_host]);
}

#[test]
fn a_report_is_as_old_at_rank_0_as_at_all_ranks_in_between_together() {
    const AGE: Duration = Duration::from_secs(1000);
    let mut old = report(3, &[]);
    old.age = AGE;
    let bytes = message(&[report(2, &[]), old]);
    let (_, reports) = decode(&bytes, 9).expect("readable");
    assert!(reports[0].age < AGE && reports[1].age >= AGE, "{reports:?}");
    let mut bytes_above = Vec::new();
    let mut above = LatestReports::new(9);
    let found = FoundLateness {
        child: Rank(2),
        of_child: Vec::new(),
        compared: Vec::new(),
        behind: nothing,
    };
    above.take(&bytes, &found).expect("readable");
    assert!(above.latest().nth(1).is_some_and(|l| l.age() >= AGE));
    above.write(&mut bytes_above, Round::Periodic);
    let (_, again) = decode(&bytes_above, 9).expect("readable");
    assert!(again[1].age >= reports[1].age, "{again:?}");
}

#[test]
fn the_lateness_of_a_subtree_is_divided_among_its_ranks() {
    let bytes = message(&[
        report(2, &[of(ALL, 300, 30)]),
        report(3, &[of(ALL, 100, 10)]),
    ]);
    let found = taken(&bytes, &[of(ALL, 40, 8)], &[ALL], nothing);
    assert_eq!(found, [(2, 30, 6), (3, 10, 2)]);
}

#[test]
fn a_child_that_was_never_the_last_has_no_lateness() {
    let bytes = message(&[report(2, &[]), report(3, &[of(ALL, 100, 10)])]);
    let found = taken(&bytes, &[], &[ALL], nothing);
    assert_eq!(found, [(2, 0, 0), (3, 0, 0)]);
}

/// Nobody above compares the members of such a set with each other, so nobody above may scale what was found.
#[test]
fn lateness_in_a_set_whose_members_are_all_below_one_child_stays() {
    let bytes = message(&[
        report(2, &[of(ALL, 300, 30)]),
        report(3, &[of(ALL, 100, 10), of(INNER, 500, 5)]),
    ]);
    let found = taken(&bytes, &[of(ALL, 40, 8)], &[ALL], nothing);
    assert_eq!(found, [(2, 30, 6), (3, 510, 7)]);
}

#[test]
fn each_set_is_divided_for_itself() {
    let bytes = message(&[
        report(2, &[of(ALL, 100, 1), of(INNER, 0, 0)]),
        report(3, &[of(ALL, 0, 0), of(INNER, 100, 1)]),
    ]);
    let of_child = [of(ALL, 10, 2), of(INNER, 30, 4)];
    let found = taken(&bytes, &of_child, &[ALL, INNER], nothing);
    assert_eq!(found, [(2, 10, 2), (3, 30, 4)]);
}

#[test]
fn a_child_without_ranks_below_has_all_of_its_lateness() {
    let bytes = message(&[report(2, &[])]);
    let found = taken(&bytes, &[of(ALL, 40, 8)], &[ALL], nothing);
    assert_eq!(found, [(2, 40, 8)]);
}

/// Rank 2 does not measure, and has passed on what rank 3 has sent.
#[test]
fn the_lateness_of_a_child_that_does_not_measure_is_not_that_of_a_rank_below() {
    let bytes = message(&[report(3, &[])]);
    let found = taken(&bytes, &[of(ALL, 40, 8)], &[ALL], nothing);
    assert_eq!(found, [(3, 0, 0)]);
}

#[test]
fn counters_never_fall_and_gauges_may() {
    let mut reports = LatestReports::new(1);
    let mut first = report(0, &[of(ALL, 5, 1)]);
    first.figures.memory = 100;
    reports.put(first);
    reports.put(report(0, &[of(ALL, 3, 1)]));
    let figures = &reports.latest().next().expect("it is there").report.figures;
    assert_eq!((figures.awaited, figures.memory), (5, 0));
}

#[test]
fn a_rank_that_the_job_does_not_have_is_refused() {
    assert!(decode(&message(&[report(8, &[])]), 8).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() { *first = REPORTS; }
        if let Ok((_, reports)) = decode(&bytes, 8) {
            prop_assert!(reports.iter().all(|report| report.rank < 8));
        }
    }
}

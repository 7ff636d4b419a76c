//! The device watch and its inquiry on histories made up here.

use super::*;
use crate::DeviceStanding;

fn at(seq: u64, phase: DevicePhase, ms: u64) -> OnDevice {
    OnDevice {
        seq,
        key: (0, format!("op{seq}").as_str().into()),
        phase,
        ms,
    }
}

fn complaint(seq: u64, ends: bool) -> Complaint {
    Complaint {
        seq,
        key: (0, format!("op{seq}").as_str().into()),
        ms: 1000,
        ends,
    }
}

fn standing(given: u64, at: Option<OnDevice>) -> Standing {
    Standing {
        device: Some(DeviceStanding {
            given: Some(given),
            at,
        }),
        ..Standing::default()
    }
}

fn tells(watched: Option<Watched>) -> Option<(u64, bool)> {
    match watched {
        Some(Watched::Tell(complaint)) => Some((complaint.seq, complaint.ends)),
        None => None,
        Some(Watched::GiveUp(text)) => panic!("{text}"),
    }
}

#[test]
fn a_rank_tells_in_time_again_ever_less_often_and_once_more_before_the_end() {
    let mut watch = DeviceWatch::new(Some(10_000), Some(600_000));
    let mut reported = Vec::new();
    for now in (0..599_000).step_by(1000) {
        let at = at(7, DevicePhase::Runs, now);
        reported.extend(tells(watch.check(now, Some(&at), false)).map(|(_, ends)| (now, ends)));
    }
    assert_eq!(
        reported,
        [
            (10_000, false),
            (70_000, false),
            (190_000, false),
            (430_000, false)
        ]
    );
    let mut check = |now| watch.check(now, Some(&at(7, DevicePhase::Runs, now)), false);
    assert_eq!(tells(check(600_000)), Some((7, true)));
    assert_eq!(tells(check(600_000 + GRACE_MS - 1)), None);
    let Some(Watched::GiveUp(text)) = check(600_000 + GRACE_MS) else {
        panic!("rank 0 did nothing")
    };
    assert!(text.contains("op7 has been on the GPU for 610 s"), "{text}");
}

#[test]
fn parts_of_one_operation_have_a_time_each() {
    let mut watch = DeviceWatch::new(None, Some(1000));
    let copies_in = at(7, DevicePhase::AwaitsInputs, 1000);
    assert_eq!(
        tells(watch.check(0, Some(&copies_in), false)),
        Some((7, true))
    );
    let copies_out = at(7, DevicePhase::Runs, 1);
    assert_eq!(tells(watch.check(GRACE_MS, Some(&copies_out), false)), None);
    assert_eq!(
        tells(watch.check(2 * GRACE_MS, Some(&copies_out), false)),
        None
    );
}

#[test]
fn what_ends_in_time_is_forgotten() {
    let mut watch = DeviceWatch::new(None, Some(1000));
    assert_eq!(
        tells(watch.check(0, Some(&at(1, DevicePhase::Runs, 1000)), false)),
        Some((1, true))
    );
    assert_eq!(tells(watch.check(1, None, false)), None);
    assert_eq!(
        tells(watch.check(2, Some(&at(2, DevicePhase::Runs, 1)), false)),
        None
    );
    assert_eq!(
        tells(watch.check(9000, Some(&at(2, DevicePhase::Runs, 999)), false)),
        None
    );
    assert_eq!(
        tells(watch.check(9001, Some(&at(2, DevicePhase::Runs, 1000)), false)),
        Some((2, true))
    );
}

#[test]
fn a_time_of_zero_never_ends_anything_and_one_who_is_alone_asks_nobody() {
    let mut watch = DeviceWatch::new(Some(1000), None);
    let forever = at(1, DevicePhase::Runs, u64::MAX);
    assert_eq!(
        tells(watch.check(u64::MAX - 1, Some(&forever), true)),
        Some((1, false))
    );
    let mut watch = DeviceWatch::new(None, Some(1000));
    let stuck = watch.check(5, Some(&at(1, DevicePhase::AwaitsInputs, 1000)), true);
    assert!(matches!(stuck, Some(Watched::GiveUp(_))));
}

fn asked(inquiry: &mut DeviceInquiry, now: u64, size: u32) -> (u64, Vec<Rank>) {
    match inquiry.poll(now, |_| (0..size).map(Rank).collect()) {
        Some(DeviceStep::Ask { question, ranks }) => (question, ranks),
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_rank_is_where_its_answer_says() {
    let mut inquiry = DeviceInquiry::default();
    inquiry.complain(0, Rank(1), complaint(7, false));
    // Of another rank, about the same.
    inquiry.complain(0, Rank(2), complaint(7, false));
    let (question, ranks) = asked(&mut inquiry, 0, 8);
    assert_eq!(ranks.len(), 8);
    inquiry.complain(1, Rank(2), complaint(7, true));
    let answers = [
        standing(9, Some(at(8, DevicePhase::Runs, 1))),
        standing(9, Some(at(7, DevicePhase::Runs, 1))),
        standing(7, Some(at(7, DevicePhase::AwaitsInputs, 1))),
        standing(7, Some(at(7, DevicePhase::Launching, 1))),
        standing(9, Some(at(3, DevicePhase::Runs, 1))),
        standing(6, None),
        Standing {
            executes: true,
            ..standing(7, None)
        },
    ];
    for (rank, answer) in answers.iter().enumerate() {
        inquiry.answered(question - 1, Rank(rank as u32), &Standing::default());
        inquiry.answered(question, Rank(rank as u32), answer);
    }
    assert_eq!(
        inquiry.poll(1999, |_| Vec::new()),
        None,
        "rank 7 may still answer"
    );
    let Some(DeviceStep::Report(found)) = inquiry.poll(2000, |_| Vec::new()) else {
        panic!("it was to answer in time")
    };
    let places: Vec<_> = found.ranks.iter().map(|rank| rank.place.clone()).collect();
    assert_eq!(
        places,
        [
            DeviceProgress::Ended,
            DeviceProgress::Runs,
            DeviceProgress::AwaitsInputs,
            DeviceProgress::Launching,
            DeviceProgress::Behind((0, "op3".into()), DevicePhase::Runs),
            DeviceProgress::NotLaunched,
            DeviceProgress::OnHost,
            DeviceProgress::Silent,
        ]
    );
    assert!(found.complaint.ends);
    assert_eq!(found.culprits().count(), 5);
}

#[test]
fn what_has_ended_meanwhile_is_no_news_and_what_is_known_neither() {
    let mut inquiry = DeviceInquiry::default();
    inquiry.complain(0, Rank(0), complaint(7, false));
    let (question, _) = asked(&mut inquiry, 0, 1);
    inquiry.answered(
        question,
        Rank(0),
        &standing(9, Some(at(8, DevicePhase::Runs, 1))),
    );
    assert_eq!(inquiry.poll(1, |_| Vec::new()), None);
    inquiry.complain(2, Rank(0), complaint(8, false));
    let (question, _) = asked(&mut inquiry, 2, 1);
    inquiry.answered(
        question,
        Rank(0),
        &standing(9, Some(at(8, DevicePhase::Runs, 1))),
    );
    assert!(matches!(
        inquiry.poll(3, |_| Vec::new()),
        Some(DeviceStep::Report(_))
    ));
    inquiry.complain(4, Rank(1), complaint(8, false));
    assert_eq!(inquiry.poll(5, |_| Vec::new()), None);
    inquiry.complain(6, Rank(1), complaint(8, true));
    assert_eq!(
        asked(&mut inquiry, 7, 1).1,
        [Rank(1), Rank(0)],
        "its end is new"
    );
}

#[test]
fn where_all_gpus_compute_nobody_waits_but_there_is_an_end_to_it() {
    for ends in [false, true] {
        let mut inquiry = DeviceInquiry::default();
        inquiry.complain(0, Rank(0), complaint(7, ends));
        let (question, ranks) = asked(&mut inquiry, 0, 2);
        for rank in ranks {
            let computes = standing(7, Some(at(7, DevicePhase::AwaitsInputs, 1)));
            inquiry.answered(question, rank, &computes);
        }
        assert_eq!(inquiry.poll(1, |_| Vec::new()).is_some(), ends);
    }
}

#[test]
fn what_comes_first_in_the_order_is_asked_about_and_of_many_only_some() {
    let mut inquiry = DeviceInquiry::default();
    inquiry.complain(0, Rank(500), complaint(9, false));
    inquiry.complain(0, Rank(600), complaint(8, false));
    inquiry.complain(0, Rank(700), complaint(10, false));
    let (question, ranks) = asked(&mut inquiry, 0, 1000);
    assert_eq!((ranks.len(), ranks[0]), (ASKED_MAX, Rank(600)));
    inquiry.answered(
        question,
        Rank(600),
        &standing(8, Some(at(8, DevicePhase::Runs, 1))),
    );
    let Some(DeviceStep::Report(found)) = inquiry.poll(9000, |_| Vec::new()) else {
        panic!("no report")
    };
    assert_eq!((found.complaint.seq, found.unasked), (8, 1000 - ASKED_MAX));
}

//! Bugs put into traces on purpose: the checkers must see each of them.

use horovod_protocol::{Completion, OpError, Rank, Seq};
use horovod_sim::{
    End, Ending, Event, Expected, Limits, Rng, SimulationPlan, Trace, check, run_plan,
};

/// A good run with several ranks, executions and mistakes.
fn good_run() -> (SimulationPlan, Trace) {
    for seed in 0.. {
        let mut rng = Rng::new(seed);
        let plan = SimulationPlan::random(&mut rng, &Limits::default());
        let fails = |e: &Expected| matches!(e, Expected::Fail { .. });
        let joins = |e: &Expected| *e == Expected::Joined;
        let has = |f: &dyn Fn(&Expected) -> bool| {
            plan.phases.iter().any(|phase| phase.expected.iter().any(f))
        };
        let ends_well = matches!(plan.ending, Ending::Shutdown { .. }) && !plan.stops_amid;
        if plan.size < 3 || !ends_well || !has(&fails) || !has(&joins) {
            continue;
        }
        let trace = run_plan(&plan, &mut rng);
        let runs = trace
            .events
            .iter()
            .filter(|e| matches!(e, Event::Executed { .. }))
            .count();
        if runs >= 12 {
            assert_eq!(check(&plan, &trace), Ok(()), "seed {seed}");
            return (plan, trace);
        }
    }
    unreachable!("seeds do not end")
}

/// Corrupts the first event that `corrupt` accepts and expects a complaint with `text`.
#[track_caller]
fn caught(text: &str, mut corrupt: impl FnMut(&mut Vec<Event>, usize) -> bool) {
    let (plan, mut trace) = good_run();
    let mut at = 0;
    while !corrupt(&mut trace.events, at) {
        at += 1;
        assert!(at < trace.events.len(), "nothing to corrupt");
    }
    let failure = check(&plan, &trace).expect_err("the bug was missed");
    assert!(failure.to_string().contains(text), "{failure}");
}

#[test]
fn a_lost_end_is_seen() {
    caught("never ended", |events, at| {
        matches!(events[at], Event::Ended { .. })
            .then(|| events.remove(at))
            .is_some()
    });
}

#[test]
fn a_double_end_is_seen() {
    caught("twice", |events, at| {
        let copy = events[at].clone();
        matches!(copy, Event::Ended { .. })
            .then(|| events.insert(at, copy))
            .is_some()
    });
}

#[test]
fn a_swapped_order_on_one_rank_is_seen() {
    caught("out of order", |events, at| {
        let Event::Executed { rank, digest } = &mut events[at] else {
            return false;
        };
        if *rank != Rank(1) || digest.seq == Seq(0) {
            return false;
        }
        digest.seq = Seq(0);
        events
            .iter()
            .take(at)
            .any(|e| matches!(e, Event::Executed { rank: Rank(1), .. }))
    });
}

#[test]
fn a_different_signature_on_one_rank_is_seen() {
    caught("ran different things", |events, at| {
        let Event::Executed { digest, .. } = &mut events[at] else {
            return false;
        };
        if digest.members.len() < 2 {
            return false;
        }
        digest.items[0].name.push('!');
        true
    });
}

#[test]
fn a_member_that_is_left_out_is_seen() {
    caught("ran only on", |events, at| {
        let Event::Executed { digest, .. } = &events[at] else {
            return false;
        };
        (digest.members.len() > 1)
            .then(|| events.remove(at))
            .is_some()
    });
}

#[test]
fn a_wrong_count_of_contributors_is_seen() {
    caught("present", |events, at| {
        let Event::Executed { digest, .. } = &mut events[at] else {
            return false;
        };
        digest.items[0].present = !digest.items[0].present;
        true
    });
}

#[test]
fn a_mismatch_that_passes_is_seen() {
    caught("instead of Fail", |events, at| {
        let Event::Ended { end, .. } = &mut events[at] else {
            return false;
        };
        let failed = matches!(end, End::Completed(Err(_)));
        if failed {
            *end = End::Ran(Seq(0), 1);
        }
        failed
    });
}

#[test]
fn an_error_without_a_mismatch_is_seen() {
    caught("instead of Run", |events, at| {
        let Event::Ended { end, .. } = &mut events[at] else {
            return false;
        };
        let ran = matches!(end, End::Ran(..));
        if ran {
            *end = End::Completed(Err(OpError::SetRemoved));
        }
        ran
    });
}

#[test]
fn a_wrong_last_rank_is_seen() {
    caught("joined last", |events, at| {
        let Event::Ended {
            end: End::Completed(Ok(Completion::Joined { last })),
            ..
        } = &mut events[at]
        else {
            return false;
        };
        *last = Rank(last.0 + 1);
        true
    });
}

#[test]
fn a_hang_is_seen() {
    let (plan, mut trace) = good_run();
    trace.stuck.push(Rank(2));
    let failure = check(&plan, &trace).expect_err("the hang was missed");
    assert!(failure.to_string().contains("hang"), "{failure}");
}

#[test]
fn a_rank_that_is_never_shut_down_is_seen() {
    caught("were shut down", |events, at| {
        matches!(events[at], Event::ShutDown(_))
            .then(|| events.remove(at))
            .is_some()
    });
}

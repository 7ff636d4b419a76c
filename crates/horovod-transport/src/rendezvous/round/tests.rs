//! One rendezvous of fixed members, step by step.

use std::time::Duration;

use super::*;
use crate::unreached::Goal;

fn member(pid: u32) -> MemberEntry {
    MemberEntry {
        identity: "x".into(),
        hostname: "h1".into(),
        pid,
        shm: true,
    }
}

/// Only rank 0's counts: here its process 2's.
fn registration(pid: u32) -> Registration {
    let common = Common {
        connections: pid as u8,
        fan_out: pid,
        heartbeat: None,
        checksums: pid.is_multiple_of(2),
        settings: vec![pid as u8],
    };
    Registration {
        member: member(pid),
        common,
    }
}

fn rounds(size: u32) -> (FixedRounds, Instant) {
    (
        FixedRounds::new(size, String::new()),
        Instant::now() + Duration::from_secs(10),
    )
}

#[test]
fn a_round_goes_from_hello_to_up_and_a_second_one_is_the_next_generation() {
    let (mut m, by) = rounds(2);
    for generation in 1..=2 {
        let client = generation * 10;
        assert_eq!(m.hello(client + 1, 1, 2, registration(1), by), []);
        let roster = m.hello(client, 0, 2, registration(2), by);
        assert_eq!(roster.len(), 2);
        for action in roster {
            match action {
                Do::Send(
                    _,
                    ToClient::Roster {
                        generation: g,
                        members,
                        common,
                        assignment: None,
                    },
                ) => {
                    assert_eq!((g, members[1].pid), (generation, 1));
                    assert_eq!((common.connections, common.fan_out), (2, 2));
                    assert_eq!(common.settings, [2]);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(m.ready(client, Where::default()), []);
        let done = m.ready(client + 1, Where::default());
        assert_eq!(done.last(), Some(&Do::Up(generation)));
    }
}

fn report(rank: u32) -> Unreached {
    let goal = Goal::Peer {
        rank: Rank(0),
        host: "h1".into(),
    };
    Unreached::new(Rank(rank), "h2", &[], vec![(goal, Vec::new())])
}

fn aborted(todo: &[Do]) -> Vec<ClientId> {
    let aborted = todo.iter().filter_map(|item| match item {
        Do::Dismiss(client, ToClient::Aborted { .. })
        | Do::Send(client, ToClient::Aborted { .. }) => Some(*client),
        _ => None,
    });
    aborted.collect()
}

#[test]
fn one_cause_reaches_those_that_wait_now_or_come_later_once() {
    let (mut m, by) = rounds(3);
    let now = Instant::now();
    m.hello(10, 0, 3, registration(2), by);
    m.unreached_by_agent(report(2), now);
    assert!(m.deadline().is_some_and(|at| at <= now + COLLECT));
    assert_eq!(aborted(&m.timeout(now)), []);
    assert_eq!(aborted(&m.timeout(now + COLLECT)), [10]);
    // Rank 1 comes late; again, all may.
    assert_eq!(aborted(&m.hello(11, 1, 3, registration(3), by)), [11]);
    for rank in 0..2 {
        assert_eq!(
            m.hello(u64::from(20 + rank), rank, 3, registration(rank), by),
            []
        );
    }
    assert_eq!(m.hello(22, 2, 3, registration(2), by).len(), 3);
}

#[test]
fn a_rank_that_tells_late_hears_the_cause_that_the_others_have() {
    let (mut m, by) = rounds(4);
    let now = Instant::now();
    m.hello(10, 0, 4, registration(2), by);
    assert_eq!(m.unreached_by_agent(report(2), now), []);
    let settled = m.timeout(now + COLLECT);
    let Some(Do::Report(first)) = settled.get(1) else {
        panic!("{settled:?}");
    };
    let again = m.unreached_by_agent(report(3), now + COLLECT);
    assert_eq!(again, [Do::Report(first.clone())]);
    assert_eq!(m.deadline(), None);
    // Once; then it tries anew.
    assert_eq!(m.unreached_by_agent(report(3), now), []);
    assert!(m.deadline().is_some());
}

#[test]
fn a_rank_that_cannot_make_its_links_and_tells_so_late_starts_no_second_cause() {
    let (mut m, by) = rounds(2);
    let now = Instant::now();
    for rank in 0..2 {
        m.hello(u64::from(10 + rank), rank, 2, registration(rank), by);
    }
    m.ready(10, Where::default());
    m.ready(11, Where::default());
    m.unreached(11, report(1), now);
    assert_eq!(aborted(&m.timeout(now + COLLECT)), [10, 11]);
    m.unreached(10, report(0), now + COLLECT);
    assert_eq!(m.deadline(), None);
}

#[test]
fn when_all_are_accounted_for_nothing_is_waited_for() {
    let (mut m, by) = rounds(2);
    let now = Instant::now();
    m.hello(10, 0, 2, registration(2), by);
    m.unreached_by_agent(report(1), now);
    assert_eq!(aborted(&m.timeout(now)), [10]);
}

#[test]
fn a_copy_of_a_rank_that_is_here_cannot_end_the_job() {
    let (mut m, by) = rounds(2);
    let now = Instant::now();
    m.hello(10, 0, 2, registration(2), by);
    m.unreached_by_agent(report(0), now);
    assert_eq!(m.timeout(now + COLLECT), []);
    m.hello(11, 1, 2, registration(3), by);
    m.unreached_by_agent(report(1), now);
    m.ready(10, Where::default());
    m.ready(11, Where::default());
    m.unreached_by_agent(report(1), now);
    assert_eq!(m.timeout(now + COLLECT), []);
    // The rank itself can: its links are not made yet. The first one has its own already, and learns of a loss.
    m.unreached(11, report(1), now);
    let todo = m.timeout(now + COLLECT);
    assert_eq!(aborted(&todo), [10, 11]);
    let lost = todo.iter().find_map(|item| match item {
        Do::Send(
            10,
            ToClient::PeerDied {
                rank: 1,
                host,
                cause,
            },
        ) => Some((host, cause)),
        _ => None,
    });
    let (host, cause) = lost.expect("the first one is told of a loss");
    // Its error begins with rank and host.
    assert_eq!(host, "h2");
    assert!(
        cause.starts_with("cannot connect to rank 0 on h1 (tried "),
        "{cause}"
    );
    // Once it has left, what the agent tells is true again.
    m.gone(11, "closed");
    m.unreached_by_agent(report(1), now);
    assert!(m.deadline().is_some());
}

#[test]
fn refusals_say_what_is_wrong() {
    let (mut m, by) = rounds(2);
    let mut refused =
        |client, rank, size| match m.hello(client, rank, size, registration(7), by).pop() {
            Some(Do::Dismiss(c, ToClient::Refused { text })) if c == client => text,
            other => panic!("{other:?}"),
        };
    assert!(refused(1, 0, 3).contains("3 ranks, this one has 2"));
    assert!(refused(1, 2, 2).contains("no rank 2"));
    assert_eq!(m.hello(1, 1, 2, registration(7), by), []);
    match m.hello(2, 1, 2, registration(8), by).pop() {
        Some(Do::Dismiss(2, ToClient::Refused { text })) => {
            assert!(text.contains("process 7 on h1"), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_waits_too_long_learns_who_is_missing() {
    let (mut m, by) = rounds(4);
    m.hello(1, 1, 4, registration(1), by);
    assert_eq!(m.timeout(by - Duration::from_secs(1)), []);
    assert_eq!(m.deadline(), Some(by));
    let missing = ToClient::Missing {
        ranks: vec![0, 2, 3],
    };
    assert_eq!(m.timeout(by), [Do::Dismiss(1, missing)]);
    assert_eq!(m.deadline(), None);
}

#[test]
fn a_rank_lost_while_setting_up_ends_the_round_for_all() {
    let (mut m, by) = rounds(2);
    m.hello(1, 0, 2, registration(1), by);
    m.hello(2, 1, 2, registration(2), by);
    let todo = m.gone(2, "it closed the connection");
    let text = "rank 1 on h1: it closed the connection".to_owned();
    assert_eq!(todo[0], Do::Failed(text.clone()));
    assert_eq!(todo[1..], [Do::Dismiss(1, ToClient::Aborted { text })]);
    // The next round can start from scratch.
    assert_eq!(m.hello(3, 0, 2, registration(1), by), []);
    assert_eq!(m.hello(4, 1, 2, registration(2), by).len(), 2);
}

#[test]
fn ranks_do_not_wait_for_one_whose_process_has_ended() {
    let (mut m, by) = rounds(3);
    let vain = |client, text: &str| {
        let text = text.to_owned();
        [
            Do::Failed(text.clone()),
            Do::Report(ServerEvent::Absent(vec![Rank(1)])),
            Do::Dismiss(client, ToClient::Aborted { text }),
        ]
    };
    let text = "rank 1 on h1 exited with code 0 without calling hvd.init()";
    m.hello(1, 0, 3, registration(1), by);
    assert_eq!(m.ended(1, "h1".to_owned()), vain(1, text));
    // Also if they come later.
    assert_eq!(m.hello(2, 2, 3, registration(2), by), vain(2, text));
    // After a round others wait only if they begin again.
    let (mut m, by) = rounds(2);
    m.hello(1, 0, 2, registration(1), by);
    m.hello(2, 1, 2, registration(2), by);
    m.ready(1, Where::default());
    m.ready(2, Where::default());
    assert_eq!(m.ended(1, "h1".to_owned()), []);
    let again = format!("{text} again");
    assert_eq!(m.hello(3, 0, 2, registration(3), by), vain(3, &again));
}

#[test]
fn a_rank_that_left_before_the_others_came_may_come_again() {
    let (mut m, by) = rounds(2);
    m.hello(1, 0, 2, registration(1), by);
    assert_eq!(m.gone(1, "closed"), []);
    assert_eq!(m.hello(2, 0, 2, registration(2), by), []);
}

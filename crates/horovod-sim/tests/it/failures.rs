//! Stories of trouble: local mistakes, stragglers, shutdown, lost ranks, ranks that keep no rules.

use crate::job::*;
use horovod_protocol::*;

#[test]
fn local_mistakes_have_horovods_texts_and_queue_nothing() {
    let mut job = Job::new(2);
    let other = job.add_set(&[1]);
    let nowhere = ProcessSetId(9);
    let root = |root| Op::Broadcast { root: Rank(root) };
    let scatter = |op| Op::Reducescatter {
        op,
        scale: Scale::NONE,
    };
    let invalid = OpErrorKind::InvalidArgument;
    for (request, kind, text) in [
        (
            on(nowhere, data("x", Op::Allgather, &[1])),
            invalid,
            "Allgather: Process set provided does not exist, or has not been registered.",
        ),
        (
            on(other, data("x", Op::Alltoall, &[1])),
            invalid,
            "Alltoall: Rank 0 is not a member of the provided process set.",
        ),
        (
            on(other, barrier()),
            invalid,
            "Barrier: Rank 0 is not a member of the provided process set.",
        ),
        (
            data("x", root(2), &[1]),
            invalid,
            "broadcast received invalid root rank 2 for provided process set",
        ),
        (
            on(other, data("x", root(1), &[1])),
            invalid,
            "broadcast received invalid root rank 1 for provided process set",
        ),
        (
            data("x", scatter(ReduceOp::Max), &[1]),
            OpErrorKind::Aborted,
            "Reducescatter currently only supports AVERAGE and SUM.",
        ),
        (
            data("x", scatter(ReduceOp::Sum), &[]),
            invalid,
            "Reducescatter does not support scalar inputs",
        ),
        (
            on(other, join()),
            invalid,
            "Join: only possible on the global process set.",
        ),
        (
            sum("x", &[1 << 40, 1 << 40]),
            invalid,
            "Allreduce: a tensor of shape [1099511627776, 1099511627776] is larger than the \
             address space.",
        ),
        (
            sum(&"x".repeat(NAME_BYTES_MAX + 1), &[1]),
            invalid,
            "Allreduce: length of the tensor name in bytes is 4097, at most 4096 allowed.",
        ),
    ] {
        let error = job.try_submit(0, request).unwrap_err();
        assert_eq!((error.kind(), &*error.to_string()), (kind, text));
    }
    job.drain();
    assert!(job.up.iter().all(|link| link.is_empty()));
}

fn stalling(shutdown_ns: Option<u64>) -> CoordinatorConfig {
    let mut config = CoordinatorConfig::new(4, GENERATION);
    config.stall = Some(StallConfig {
        warning_ns: 2_000_000_000,
        shutdown_ns,
    });
    config
}

#[test]
fn names_the_missing_ranks_after_the_stall_time_but_not_the_joined() {
    let mut job = Job::with(stalling(None));
    job.submit(3, join());
    for name in ["b", "a"] {
        job.submit(0, sum(name, &[1]));
    }
    job.submit(2, sum("a", &[1]));
    job.settle();
    assert_eq!(job.coordinator.next_deadline(), Some(Time(2_000_000_000)));
    job.wait_until(1_999_999_999);
    assert!(job.notes.is_empty());
    job.wait_until(2_000_000_000);
    let [CoordinatorAction::Stall(report)] = &job.notes[..] else {
        panic!("{:?}", job.notes)
    };
    let missing: Vec<_> = report
        .stalled
        .iter()
        .map(|s| (&*s.name, &s.missing[..]))
        .collect();
    assert_eq!(
        missing,
        [("a", &[Rank(1)][..]), ("b", &[Rank(1), Rank(2)][..])]
    );
    let text = report.to_string();
    assert!(text.starts_with(
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of \
         ranks and are waiting for remainder of ranks for more than 2 seconds."
    ));
    assert!(
        text.ends_with("\nMissing ranks:\n1: [a, b]\n2: [b]"),
        "{text}"
    );
    job.wait_until(3_999_999_999);
    assert_eq!(job.notes.len(), 1, "once per period");
    job.wait_until(4_000_000_000);
    assert_eq!(job.notes.len(), 2);
}

#[test]
fn a_long_stall_shuts_the_job_down_and_says_so() {
    let mut job = Job::with(stalling(Some(5_000_000_000)));
    let id = job.submit(0, sum("x", &[1]));
    job.settle();
    job.wait_until(2_000_000_000);
    job.wait_until(5_000_000_000);
    let Some(CoordinatorAction::Stall(report)) = job.notes.last() else {
        panic!()
    };
    assert!(report.shutdown);
    let text = report.to_string();
    assert!(text.contains("\n1!: [x]\n2!: [x]\n3!: [x]\n"), "{text}");
    assert!(
        text.ends_with("is stalled for longer than 5 seconds. Will shutdown."),
        "{text}"
    );
    let error = job.error(0, id);
    assert_eq!(error.kind(), OpErrorKind::Shutdown);
    assert!(
        error
            .to_string()
            .contains("rank 1 was stalled: x waited for it too long."),
        "{error}"
    );
    for rank in 0..4 {
        assert!(matches!(
            job.done[rank].last(),
            Some(WorkerAction::ShutDown { by: Rank(1), .. })
        ));
    }
}

#[test]
fn what_is_late_is_listed_and_giving_up_ends_everything_with_its_own_kind_of_error() {
    let mut job = Job::new(3);
    // Once for all, so that the next round is counted by its slots alone.
    job.submit_all(&sum("a", &[1]));
    job.settle();
    let a = job.submit(0, sum("a", &[1]));
    let b = job.submit(1, sum("b", &[1]));
    job.settle();
    // Before and after they are kept rank by rank.
    for _ in 0..2 {
        for (ranks, lacks) in [
            (&[0][..], true),
            (&[1], true),
            (&[2, 7], true),
            (&[7], false),
            (&[], false),
        ] {
            let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
            assert_eq!(job.coordinator.lacks_any(ranks.clone()), lacks, "{ranks:?}");
        }
        assert_eq!(job.coordinator.late(Time(0), Time(0)).len(), 2);
    }
    assert!(job.workers[0].is_pending(ProcessSetId::GLOBAL, "a"));
    assert!(!job.workers[1].is_pending(ProcessSetId::GLOBAL, "a"));
    let late = job.coordinator.late(Time(7), Time(0));
    let late: Vec<_> = late
        .iter()
        .map(|r| (&*r.name, r.waiting.clone(), r.missing.clone(), r.waited_ns))
        .collect();
    assert_eq!(
        late,
        [
            ("a", vec![Rank(0)], vec![Rank(1), Rank(2)], 7),
            ("b", vec![Rank(1)], vec![Rank(0), Rank(2)], 7)
        ]
    );
    let why = StopReason::Deadlock {
        report: "a circle".into(),
    };
    job.coordinator.give_up(Time(7), Rank(1), why);
    job.settle();
    for (rank, id) in [(0, a), (1, b)] {
        let error = job.error(rank, id);
        assert_eq!(
            (error.kind(), &*error.to_string()),
            (OpErrorKind::Stalled, "a circle")
        );
    }
    let refused = job.try_submit(2, sum("c", &[1])).unwrap_err();
    assert_eq!(refused.kind(), OpErrorKind::Stalled);
    assert_eq!(job.coordinator.late(Time(9), Time(9)), []);
}

#[test]
fn a_later_request_of_the_same_name_is_another() {
    let mut job = Job::new(2);
    let numbers: Vec<u64> = (0..3)
        .map(|_| {
            job.submit(0, sum("a", &[1]));
            job.settle();
            let before = job.coordinator.incomplete(Time(0), Time(0));
            assert_eq!(job.coordinator.incomplete(Time(0), Time(0)), before);
            job.submit(1, sum("a", &[1]));
            job.settle();
            assert!(!job.coordinator.lacks_any([Rank(0), Rank(1)]));
            before[0].0
        })
        .collect();
    assert!(numbers[0] < numbers[1] && numbers[1] < numbers[2]);
}

#[test]
fn a_shutdown_time_below_the_warning_time_is_ignored() {
    let mut job = Job::with(stalling(Some(1_000_000_000)));
    job.submit(0, sum("x", &[1]));
    job.settle();
    job.wait_until(60_000_000_000);
    let Some(CoordinatorAction::Stall(report)) = job.notes.last() else {
        panic!()
    };
    assert!(!report.shutdown);
}

#[test]
fn a_shutdown_ends_what_waits_names_its_rank_and_keeps_what_was_agreed() {
    let mut job = Job::new(3);
    job.submit_all(&sum("agreed", &[1]));
    let waiting = job.submit(0, sum("waiting", &[1]));
    let joined = job.submit(0, join());
    job.workers[2].shutdown();
    let refused = job.try_submit(2, sum("late", &[1])).unwrap_err();
    assert_eq!(refused.kind(), OpErrorKind::Shutdown);
    job.settle();
    for rank in 0..3 {
        assert_eq!(job.ran(rank), [["agreed"]]);
        let last = job.done[rank].last();
        assert!(
            matches!(last, Some(WorkerAction::ShutDown { by: Rank(2), .. })),
            "{last:?}"
        );
    }
    for id in [waiting, joined] {
        let error = job.error(0, id);
        assert_eq!(error.kind(), OpErrorKind::Shutdown);
        assert!(
            error.to_string().starts_with(SHUTDOWN_TEXT)
                && error.to_string().contains(": rank 2 called hvd.shutdown()")
                && error.to_string().contains("(this rank: waiting)"),
            "{error}"
        );
    }
    let late = job.try_submit(1, sum("late", &[1])).unwrap_err();
    assert_eq!(late.kind(), OpErrorKind::Shutdown);
    assert!(late.to_string().contains("(this rank: late)"), "{late}");
}

#[test]
fn a_script_that_has_ended_is_told_with_the_operations_of_the_others() {
    let mut job = Job::new(2);
    let waiting: Vec<EntryId> = (0..5)
        .map(|i| job.submit(1, sum(&format!("validation.{i}"), &[1])))
        .collect();
    job.workers[0].shutdown_because(Leaving::Ended);
    job.settle();
    let error = job.error(1, waiting[0]).to_string();
    let named = "(this rank: validation.0, validation.1, validation.2 and 2 more)";
    assert!(error.contains(named), "{error}");
}

#[test]
fn no_rank_leaves_before_all_know_of_the_shutdown() {
    let mut job = Job::new(2);
    job.workers[1].shutdown();
    job.deliver_up(1);
    job.deliver_down(1);
    job.deliver_up(1);
    job.deliver_down(1);
    assert!(job.done[1].is_empty(), "rank 0 has not been told yet");
    job.settle();
    assert!(matches!(job.done[1][..], [WorkerAction::ShutDown { .. }]));
}

#[test]
fn a_rank_that_is_gone_while_stopping_only_ends_the_wait() {
    let mut job = Job::new(2);
    let waiting = job.submit(0, sum("x", &[1]));
    job.workers[0].shutdown();
    job.deliver_up(0);
    job.deliver_down(0);
    let lost = PeerLost {
        rank: Rank(1),
        host: "h".into(),
        cause: LossCause::Ended("closed".into()),
    };
    job.workers[0].handle_peer_lost(lost);
    job.drain();
    assert_eq!(job.error(0, waiting).kind(), OpErrorKind::Shutdown);
    assert!(matches!(
        job.done[0].last(),
        Some(WorkerAction::ShutDown { by: Rank(0), .. })
    ));
}

#[test]
fn a_lost_rank_fails_everything_everywhere_with_its_name_host_and_cause() {
    let mut job = Job::new(3);
    let ids: Vec<_> = (0..2)
        .map(|rank| job.submit(rank, sum("x", &[1])))
        .collect();
    job.settle();
    let lost = PeerLost {
        rank: Rank(2),
        host: "h1".into(),
        cause: LossCause::Ended("killed by signal 9".into()),
    };
    job.coordinator.handle_peer_lost(Time(0), lost);
    job.settle();
    for (rank, id) in ids.into_iter().enumerate() {
        let error = job.error(rank, id);
        assert_eq!(error.kind(), OpErrorKind::PeerLost);
        assert!(
            error
                .to_string()
                .ends_with("rank 2 on h1: killed by signal 9"),
            "{error}"
        );
        assert!(matches!(
            job.done[rank].last(),
            Some(WorkerAction::Abort(_))
        ));
        assert_eq!(job.try_submit(rank, sum("y", &[1])).unwrap_err(), error);
    }
    assert!(job.done[2].is_empty());
}

#[test]
fn messages_of_another_generation_are_ignored() {
    let mut job = Job::new(1);
    let old = ToCoordinator {
        generation: Generation(2),
        seen: 0,
        items: vec![Submission::Shutdown(Leaving::Asked)],
    };
    job.coordinator.handle_message(Time(0), Rank(0), &old);
    job.settle();
    assert!(job.done[0].is_empty() && job.notes.is_empty());
}

#[test]
fn a_rank_that_breaks_the_rules_ends_the_generation_under_its_name() {
    let run = |first, len| {
        Submission::Hits(SlotRun {
            first: Slot(first),
            len,
        })
    };
    let gather = Submission::GatherHit {
        slot: Slot(0),
        first_dims: vec![1],
    };
    let add = |ranks: &[u32]| Op::AddProcessSet {
        ranks: ranks.iter().map(|r| Rank(*r)).collect(),
    };
    let cases: Vec<(ToCoordinator, &str)> = vec![
        (rogue(vec![run(5, 1)]), "a slot that is not in use"),
        (
            rogue(vec![run(u64::MAX, u32::MAX)]),
            "a slot that is not in use",
        ),
        (rogue(vec![run(0, 2)]), "a slot that is not in use"),
        (
            rogue(vec![run(0, 1), run(0, 1)]),
            "a name that it has pending already",
        ),
        (rogue(vec![gather]), "wrong number of rows"),
        (
            rogue(vec![new(7, "x", Op::Barrier)]),
            "an unknown process set",
        ),
        (
            rogue(vec![new(1, "x", Op::Barrier)]),
            "a foreign process set",
        ),
        (
            rogue(vec![new(0, "x", Op::Join)]),
            "a join in place of a request",
        ),
        (
            rogue(vec![new(0, "x", add(&[]))]),
            "an impossible process set",
        ),
        (
            rogue(vec![new(0, "x", add(&[1, 0]))]),
            "an impossible process set",
        ),
        (
            rogue(vec![new(0, "x", add(&[0, 2]))]),
            "an impossible process set",
        ),
        (
            rogue(vec![Submission::Join, Submission::Join]),
            "joined twice",
        ),
        (rogue(vec![Submission::ShutdownAck]), "was not announced"),
        (
            ToCoordinator {
                seen: 9,
                ..rogue(vec![])
            },
            "an eviction that was not announced",
        ),
    ];
    for (message, text) in cases {
        let mut job = Job::new(2);
        job.add_set(&[0]);
        job.submit_all(&sum("x", &[1]));
        job.settle();
        let id = job.submit(0, sum("y", &[1]));
        job.settle();
        job.coordinator.handle_message(Time(0), Rank(1), &message);
        job.settle();
        let [CoordinatorAction::Abort(lost)] = &job.notes[..] else {
            panic!("{message:?}: {:?}", job.notes)
        };
        assert_eq!(lost.rank, Rank(1));
        assert!(lost.cause.to_string().contains(text), "{message:?}: {lost}");
        assert_eq!(job.error(0, id).kind(), OpErrorKind::PeerLost);
    }
}

#[test]
fn an_impossible_order_of_the_coordinator_ends_the_generation() {
    let execute = |set, items| Response::Execute {
        seq: Seq(0),
        set: SetKey(set),
        op: Op::Allgather,
        device: Device::Cpu,
        absent: [].into(),
        items,
    };
    let slots = Item::Slots(SlotRun {
        first: Slot(0),
        len: u32::MAX,
    });
    let item = |rows: &[u64]| Item::New {
        name: "x".into(),
        tensors: data("x", Op::Allgather, &[1]).tensors.into(),
        slot: None,
        first_dims: rows.to_vec(),
    };
    let barrier = Response::Execute {
        seq: Seq(0),
        set: SetKey(0),
        op: Op::Barrier,
        device: Device::Cpu,
        absent: [].into(),
        items: vec![item(&[])],
    };
    let set_added = |key, ranks: &[u32]| Response::SetAdded {
        name: "x".into(),
        key: SetKey(key),
        id: ProcessSetId(1),
        ranks: ranks.iter().map(|r| Rank(*r)).collect(),
    };
    for response in [
        execute(0, vec![slots]),
        barrier,
        execute(4, vec![]),
        execute(0, vec![item(&[1])]),
        execute(0, vec![item(&[1, 2]), item(&[1, 2])]),
        Response::Joined { last: Rank(0) },
        Response::Stopped,
        set_added(0, &[0]),
        set_added(1, &[0, 5]),
        set_added(1, &[]),
        Response::SetRemoved {
            name: "x".into(),
            key: Some(SetKey(0)),
        },
        Response::SetRemoved {
            name: "x".into(),
            key: Some(SetKey(8)),
        },
    ] {
        let mut job = Job::new(2);
        let id = job.submit(1, data("x", Op::Allgather, &[1]));
        let message = ToWorker {
            generation: GENERATION,
            mark: 0,
            responses: vec![response.clone().into()],
            evicted: Vec::new(),
        };
        job.workers[1].handle_message(&message);
        job.drain();
        let Some(WorkerAction::Abort(lost)) = job.done[1].last() else {
            panic!("{response:?}: {:?}", job.done[1])
        };
        assert_eq!(lost.rank, Rank(0), "{response:?}");
        let ended = job.completion(1, id).is_some() || !job.executions(1).is_empty();
        let half_run = matches!(&response, Response::Execute { items, .. } if items.len() == 2);
        assert!(ended || half_run, "{response:?}: {:?}", job.done[1]);
    }
}

//! Stories of ordinary work: agreement, order, fusion, cache, groups, joins, process sets.

use crate::job::*;
use horovod_protocol::*;

#[test]
fn a_tensor_runs_on_every_rank_once_the_last_has_asked() {
    let mut job = Job::new(3);
    let first = job.submit(0, sum("x", &[2]));
    job.submit(1, sum("x", &[2]));
    job.settle();
    assert!(job.executions(0).is_empty());
    job.submit(2, sum("x", &[2]));
    job.settle();
    let execution = job.execution_of(0, first);
    assert_eq!(
        (execution.contributors, &*execution.members),
        (3, &[0, 1, 2].map(Rank)[..])
    );
    assert!((1..3).all(|rank| job.executions(rank)[0].seq == Seq(0)));
}

#[test]
fn a_mismatch_reaches_every_rank_even_the_latecomer_and_the_job_goes_on() {
    let mut job = Job::new(3);
    let ids = [job.submit(0, sum("x", &[2])), job.submit(1, sum("x", &[3]))];
    job.settle();
    assert_eq!(job.completion(0, ids[0]), None);
    let late = job.submit(2, sum("x", &[2]));
    job.settle();
    for (rank, id) in [(0, ids[0]), (1, ids[1]), (2, late)] {
        let error = job.error(rank, id);
        assert_eq!(error.kind(), OpErrorKind::Precondition);
        assert!(
            error
                .to_string()
                .starts_with("Mismatched ALLREDUCE tensor shapes: "),
            "{error}"
        );
    }
    let ids = job.submit_all(&sum("x", &[2]));
    job.settle();
    assert_eq!(job.execution_of(2, ids[2]).contributors, 3);
}

#[test]
fn a_name_is_free_again_once_it_has_run() {
    let mut job = Job::new(1);
    job.submit(0, sum("x", &[2]));
    let error = job.try_submit(0, sum("x", &[2])).unwrap_err();
    assert_eq!(error.kind(), OpErrorKind::InvalidArgument);
    assert!(error.to_string().starts_with(DUPLICATE_NAME_TEXT));
    job.settle();
    job.submit(0, sum("x", &[2]));
    job.settle();
    assert_eq!(job.executions(0).len(), 2);
}

#[test]
fn a_thousand_known_tensors_are_one_small_message_each_way() {
    let mut job = Job::new(2);
    for round in 0..2 {
        for rank in 0..2 {
            for tensor in 0..1000 {
                job.submit(
                    rank,
                    sum(&format!("allreduce.layer{tensor}.weight"), &[256]),
                );
            }
        }
        job.drain();
        let mut bytes = Vec::new();
        job.up[1]
            .iter()
            .for_each(|message| message.encode(&mut bytes));
        if round == 1 {
            assert_eq!(job.up[1].len(), 1);
            assert!(bytes.len() < 16, "{} bytes up", bytes.len());
            job.deliver_up(0);
            job.deliver_up(1);
            assert_eq!(job.down[1].len(), 1);
            bytes.clear();
            job.down[1][0].encode(&mut bytes);
            assert!(bytes.len() < 32, "{} bytes down", bytes.len());
        }
        job.settle();
        assert_eq!(job.executions(1)[round].items.len(), 1000);
    }
}

/// The longest names, of which a message holds about a thousand.
#[test]
fn decisions_that_do_not_fit_one_message_all_arrive() {
    let mut job = Job::new(2);
    let count = BATCH_BYTES_MAX / NAME_BYTES_MAX + 10;
    for number in 0..count {
        job.submit_all(&sum(&format!("{number:0>NAME_BYTES_MAX$}"), &[1]));
    }
    job.deliver_up(0);
    job.deliver_up(1);
    assert!(job.down[1].len() > 1);
    job.settle();
    for rank in 0..2 {
        let executions = job.executions(rank);
        let items = executions.iter().map(|execution| execution.items.len());
        assert_eq!(items.sum::<usize>(), count);
    }
}

#[test]
fn the_order_is_the_same_on_all_ranks_whatever_they_asked_first() {
    let mut config = CoordinatorConfig::new(2, GENERATION);
    config.fusion_threshold_bytes = 0;
    let mut job = Job::with(config);
    for name in ["a", "b", "c"] {
        job.submit(0, sum(name, &[1]));
    }
    for name in ["c", "a", "b"] {
        job.submit(1, sum(name, &[1]));
    }
    job.settle();
    assert_eq!(job.ran(0), [["c"], ["a"], ["b"]]);
    assert_eq!(job.ran(1), job.ran(0));
}

#[test]
fn groups_run_whole_and_alone_when_group_fusion_is_off() {
    let group = Request {
        tensors: vec![TensorMeta::new(DType::F32, [2]); 3],
        ..sum("g", &[2])
    };
    let ran = |disable_group_fusion| {
        let mut config = CoordinatorConfig::new(2, GENERATION);
        config.disable_group_fusion = disable_group_fusion;
        let mut job = Job::with(config);
        job.submit_all(&group);
        job.submit_all(&sum("x", &[2]));
        job.settle();
        assert_eq!(job.executions(0)[0].items[0].tensors.len(), 3);
        job.ran(0)
    };
    assert_eq!(ran(false), [["g", "x"]]);
    assert_eq!(ran(true), [["g"], ["x"]]);
}

#[test]
fn an_allgather_announces_the_rows_of_all_members_in_their_order() {
    let mut job = Job::new(3);
    for round in 0..2u64 {
        for rank in [2, 0, 1] {
            job.submit(rank, data("x", Op::Allgather, &[rank as u64 + round, 4]));
        }
        job.settle();
        for rank in 0..3 {
            let item = &job.executions(rank)[round as usize].items[0];
            assert_eq!(item.first_dims, [[round, round + 1, round + 2]]);
            assert_eq!(
                item.tensors[0].shape,
                [rank as u64 + round, 4],
                "its own rows"
            );
        }
    }
}

#[test]
fn ready_tensors_are_held_back_no_longer_than_allowed() {
    let mut config = CoordinatorConfig::new(1, GENERATION);
    config.batch_delay_ns = 100;
    config.stall = None;
    let mut job = Job::with(config);
    job.now = 10;
    job.submit(0, sum("a", &[1]));
    job.settle();
    assert_eq!(job.coordinator.next_deadline(), Some(Time(110)));
    job.now = 50;
    job.submit(0, sum("b", &[1]));
    job.settle();
    assert!(job.ran(0).is_empty());
    job.wait_until(110);
    assert_eq!(job.ran(0), [["a", "b"]]);
    assert_eq!(job.coordinator.next_deadline(), None);
    // Nobody waits for more at a barrier, be it new or known.
    for _ in 0..2 {
        let id = job.submit(0, barrier());
        job.settle();
        assert_eq!(job.completion(0, id), Some(Ok(Completion::Done)));
    }
}

/// With room for one name only: `y` is agreed and evicts `x`, but rank 1 has not heard of it.
fn evicted_unheard() -> Job {
    let mut config = CoordinatorConfig::new(2, GENERATION);
    config.cache_capacity = 1;
    let mut job = Job::with(config);
    job.submit_all(&sum("x", &[2]));
    job.settle();
    // Until nobody has used `x` for long.
    for _ in 0..4 {
        job.submit_all(&sum("y", &[2]));
        job.settle();
    }
    job.submit_all(&sum("y", &[2]));
    job.deliver_up(0);
    job.deliver_up(1);
    job.deliver_down(0);
    assert!(
        job.notes
            .contains(&CoordinatorAction::CacheEvicts(ProcessSetId::GLOBAL))
    );
    job
}

#[test]
fn a_hit_on_its_way_while_its_slot_is_evicted_still_counts() {
    for stale_first in [true, false] {
        let mut job = evicted_unheard();
        let stale = job.submit(1, sum("x", &[2]));
        let fresh = job.submit(0, sum("x", &[2]));
        job.drain();
        assert!(
            matches!(job.up[1][0].items[..], [Submission::Hits(_)]),
            "{:?}",
            job.up[1]
        );
        let last = job.up[0].back().expect("sent");
        assert!(
            matches!(last.items[..], [Submission::New { .. }]),
            "{last:?}"
        );
        job.deliver_up(usize::from(stale_first));
        job.settle();
        assert_eq!(
            job.execution_of(1, stale).seq,
            job.execution_of(0, fresh).seq
        );
        assert_eq!(job.notes.len(), 1, "{:?}", job.notes);
    }
}

#[test]
fn a_hit_that_goes_out_together_with_the_news_of_its_eviction_still_counts() {
    let mut job = evicted_unheard();
    let stale = EntryId(100);
    job.workers[1]
        .submit(stale, &sum("x", &[2]))
        .expect("valid");
    // Not polled in between, as an engine that is told meanwhile.
    for message in std::mem::take(&mut job.down[1]) {
        job.workers[1].handle_message(&message);
    }
    let fresh = job.submit(0, sum("x", &[2]));
    job.settle();
    assert_eq!(
        job.execution_of(1, stale).seq,
        job.execution_of(0, fresh).seq
    );
    assert_eq!(job.notes.len(), 1, "{:?}", job.notes);
}

#[test]
fn a_stale_hit_is_compared_by_its_signature() {
    let mut job = evicted_unheard();
    let stale = job.submit(1, sum("x", &[2]));
    job.submit(0, sum("x", &[3]));
    job.settle();
    let error = job.error(1, stale);
    assert!(
        error
            .to_string()
            .starts_with("Mismatched ALLREDUCE tensor shapes"),
        "{error}"
    );
}

#[test]
fn a_joined_rank_contributes_the_identity_and_earlier_requests_of_its_own() {
    let mut job = Job::new(3);
    let early = job.submit(2, sum("early", &[1]));
    let joined = job.submit(2, join());
    job.settle();
    for rank in 0..2 {
        job.submit(rank, sum("early", &[1]));
        job.submit(rank, sum("late", &[5]));
    }
    job.settle();
    assert_eq!(job.execution_of(2, early).contributors, 3);
    let late = job.executions(2)[1];
    assert_eq!((late.contributors, late.items[0].entry), (2, None));
    assert_eq!(late.items[0].tensors[0].shape, [5]);
    job.now = 7;
    job.submit(1, join());
    job.settle();
    assert_eq!(job.completion(2, joined), None);
    job.now = 9;
    job.submit(0, join());
    job.settle();
    assert_eq!(
        job.completion(2, joined),
        Some(Ok(Completion::Joined { last: Rank(0) }))
    );
}

#[test]
fn the_last_of_those_that_join_within_one_moment_is_the_last_to_arrive() {
    for order in [[2, 0, 1], [2, 1, 0], [0, 1, 2]] {
        let mut job = Job::new(3);
        let ids = job.submit_all(&join());
        for rank in order {
            job.deliver_up(rank);
        }
        job.settle();
        let last = Rank(order[2] as u32);
        assert_eq!(
            job.completion(0, ids[0]),
            Some(Ok(Completion::Joined { last })),
            "{order:?}"
        );
    }
}

#[test]
fn who_joins_because_the_other_has_joined_is_the_last_also_within_one_moment() {
    let mut job = Job::new(2);
    job.submit(1, join());
    job.deliver_up(1);
    // Refused at once because rank 1 has joined; the clock has not been read again.
    let refused = job.submit(0, data("gathered", Op::Allgather, &[1]));
    job.deliver_up(0);
    job.deliver_down(0);
    assert!(job.error(0, refused).to_string().contains("Join"));
    let joined = job.submit(0, join());
    job.settle();
    assert_eq!(
        job.completion(0, joined),
        Some(Ok(Completion::Joined { last: Rank(0) }))
    );
}

#[test]
fn a_request_after_the_join_is_not_taken_for_the_round_it_missed() {
    let mut job = Job::new(2);
    job.submit(1, join());
    job.settle();
    // Both on their way at the same time: the run without rank 1, and rank 1's own request.
    job.submit(0, sum("x", &[1]));
    job.deliver_up(0);
    let own = job.submit(1, sum("x", &[1]));
    job.drain();
    job.settle();
    assert_eq!(job.executions(1).len(), 1);
    assert_eq!(job.executions(1)[0].items[0].entry, None);
    let other = job.submit(0, sum("x", &[1]));
    job.settle();
    assert_eq!(job.execution_of(1, own).seq, job.execution_of(0, other).seq);
}

#[test]
fn what_a_joined_rank_cannot_do_fails_on_the_others_and_barriers_pass() {
    for barriers_before in [0, 1, 2] {
        let mut job = Job::new(3);
        for _ in 0..barriers_before {
            job.submit_all(&barrier());
            job.settle();
        }
        joined_rank_and_what_it_cannot_do(&mut job);
    }
}

fn joined_rank_and_what_it_cannot_do(job: &mut Job) {
    let done_before = job.done[1].len();
    job.submit(1, join());
    job.settle();
    let ops = [
        (
            "Allgather is not supported with Join at this time. Specify",
            Op::Allgather,
        ),
        (
            "Alltoall is not supported with Join at this time.",
            Op::Alltoall,
        ),
        (
            "Broadcast is not supported with Join at this time.",
            Op::Broadcast { root: Rank(0) },
        ),
        (
            "Reducescatter is not supported with Join at this time.",
            Op::Reducescatter {
                op: ReduceOp::Sum,
                scale: Scale::NONE,
            },
        ),
    ];
    for (text, op) in ops {
        let ids = [0, 2].map(|rank| (rank, job.submit(rank, data("x", op.clone(), &[2]))));
        job.settle();
        for (rank, id) in ids {
            let error = job.error(rank, id);
            assert!(error.to_string().starts_with(text), "{error}");
            assert_eq!(error.kind(), OpErrorKind::Precondition);
        }
    }
    let ids = [0, 2].map(|rank| (rank, job.submit(rank, barrier())));
    job.settle();
    for (rank, id) in ids {
        assert_eq!(job.completion(rank, id), Some(Ok(Completion::Done)));
    }
    assert!(
        job.done[1].len() == done_before,
        "the joined rank is not concerned: {:?}",
        job.done[1]
    );
}

#[test]
fn a_set_serves_its_members_only() {
    let mut job = Job::new(3);
    let set = job.add_set(&[0, 2]);
    assert_eq!(set, ProcessSetId(1));
    assert_eq!(job.workers[1].members(set), Some(&[Rank(0), Rank(2)][..]));
    let error = job.try_submit(1, on(set, sum("x", &[1]))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Allreduce: Rank 1 is not a member of the provided process set."
    );
    for rank in [0, 2] {
        job.submit(rank, on(set, sum("x", &[1])));
    }
    job.settle();
    assert_eq!(&*job.executions(2)[0].members, [Rank(0), Rank(2)]);
    assert!(job.executions(1).is_empty());
}

#[test]
fn what_waits_on_a_removed_set_is_aborted_and_its_id_can_be_reused_at_once() {
    let mut job = Job::new(2);
    job.add_set(&[0]);
    let both = job.submit_all(&plain(
        "add",
        Op::AddProcessSet {
            ranks: vec![Rank(1)],
        },
    ));
    job.settle();
    let second = ProcessSetId(2);
    assert_eq!(
        job.completion(1, both[1]),
        Some(Ok(Completion::SetAdded(second)))
    );
    // Cached on rank 1's set, so that the late request is a hit on a slot of a dead set.
    job.submit(1, on(second, sum("x", &[1])));
    job.settle();
    job.submit_all(&plain("remove", Op::RemoveProcessSet { set: second }));
    job.drain();
    job.deliver_up(0);
    job.deliver_up(1);
    let late = job.submit(1, on(second, sum("x", &[1])));
    let unknown = job.submit(1, on(second, sum("y", &[1])));
    job.settle();
    for id in [late, unknown] {
        let error = job.error(1, id);
        assert_eq!(
            (error.kind(), &*error.to_string()),
            (OpErrorKind::Aborted, SET_REMOVED_TEXT)
        );
    }
    assert!(job.notes.is_empty(), "{:?}", job.notes);
    assert_eq!(job.add_set(&[1]), second);
    assert!(
        job.executions(1).len() == 1,
        "nothing of the old set runs on the new one"
    );
}

#[test]
fn sets_must_agree_be_new_and_be_possible() {
    let mut job = Job::new(2);
    let add = |ranks: &[u32]| {
        plain(
            "add",
            Op::AddProcessSet {
                ranks: ranks.iter().map(|r| Rank(*r)).collect(),
            },
        )
    };
    for (ranks, text) in [
        (
            &[0, 0][..],
            "Tried to register process set with duplicate rank: 0",
        ),
        (&[2], "Tried to register process set with invalid rank: 2"),
        (&[], "Tried to register process set without ranks"),
    ] {
        let error = job.try_submit(0, add(ranks)).unwrap_err();
        assert_eq!(
            (error.kind(), &*error.to_string()),
            (OpErrorKind::InvalidArgument, text)
        );
    }
    let ids = [job.submit(0, add(&[0])), job.submit(1, add(&[1]))];
    job.settle();
    for (rank, id) in ids.into_iter().enumerate() {
        let error = job.error(rank, id);
        let text = "Attempted to register process set with mismatching values on different ranks";
        assert!(error.to_string().starts_with(text), "{error}");
    }
    let ids = job.submit_all(&add(&[0, 1]));
    job.settle();
    let error = job.error(1, ids[1]);
    assert_eq!(
        error.to_string(),
        "Attempted to add a duplicate process set: [0, 1]"
    );
    let ids = job.submit_all(&plain(
        "rm",
        Op::RemoveProcessSet {
            set: ProcessSetId::GLOBAL,
        },
    ));
    job.settle();
    assert_eq!(
        job.completion(0, ids[0]),
        Some(Ok(Completion::SetRemoved(false)))
    );
}

#[test]
fn tuned_values_have_the_same_place_on_all_ranks_also_joined_ones_and_strangers_to_the_set() {
    let mut job = Job::new(3);
    let pair = job.add_set(&[0, 1]);
    job.submit(2, join());
    for rank in 0..2 {
        job.submit(rank, sum("before", &[1]));
        job.submit(rank, on(pair, sum("pair", &[1])));
    }
    job.deliver_up(2);
    for rank in 0..2 {
        let ready = std::mem::take(&mut job.up[rank]);
        job.drain();
        let sent = ready.into_iter().chain(std::mem::take(&mut job.up[rank]));
        for message in sent {
            job.coordinator
                .handle_message(Time(0), Rank(rank as u32), &message);
        }
    }
    job.coordinator.announce_tuning(&[5, 6]);
    job.settle();
    job.submit(0, sum("after", &[1]));
    job.submit(1, sum("after", &[1]));
    job.settle();
    let order = |rank: usize| -> Vec<String> {
        let mut order = Vec::new();
        for action in &job.done[rank] {
            match action {
                WorkerAction::Execute(e) => order.push(format!("{} {}", e.seq.0, e.items[0].name)),
                WorkerAction::Tuned { seq, values } => order.push(format!("{} {values:?}", seq.0)),
                _ => {}
            }
        }
        order
    };
    let all = ["0 before", "1 pair", "2 [5, 6]", "3 after"];
    assert_eq!(
        (order(0), order(1)),
        (
            all.map(String::from).to_vec(),
            all.map(String::from).to_vec()
        )
    );
    assert_eq!(order(2), ["0 before", "2 [5, 6]", "3 after"]);
}

#[test]
fn the_fusion_threshold_and_the_batch_delay_change_while_running() {
    let mut job = Job::new(2);
    let both = |job: &mut Job| {
        for name in ["a", "b"] {
            job.submit_all(&sum(name, &[2]));
        }
        job.settle();
    };
    both(&mut job);
    job.coordinator.set_fusion_threshold(8);
    both(&mut job);
    assert_eq!(job.ran(1), [vec!["a", "b"], vec!["a"], vec!["b"]]);
    job.coordinator.set_batch_delay(100);
    both(&mut job);
    assert_eq!(job.ran(1).len(), 3, "held back");
    job.wait_until(100);
    assert_eq!(job.ran(1).len(), 5);
}

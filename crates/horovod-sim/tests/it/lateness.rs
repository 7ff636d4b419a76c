//! How late each rank is: counted by process set, and without any effect on the negotiation.

use crate::job::*;
use horovod_protocol::*;
use horovod_sim::{Limits, Rng, SimulationPlan, Trace, run_plan_in};

#[test]
fn counting_changes_nothing() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let mut plan = SimulationPlan::random(&mut rng, &Limits::default());
        let hosts: Vec<u32> = (0..plan.size).map(|rank| rank / 2).collect();
        let tree = Tree::new(&hosts, 2);
        let mut run = |counts_lateness| {
            plan.counts_lateness = counts_lateness;
            run_plan_in(&plan, &tree, &mut rng.clone())
        };
        let alike = |trace: Trace| (trace.hash, trace.messages, trace.events);
        assert_eq!(alike(run(false)), alike(run(true)), "seed {seed}");
    }
}

#[test]
fn two_process_sets_that_wait_at_once_hide_neither_of_their_last_ranks() {
    let mut job = Job::new(4);
    job.coordinator.count_lateness();
    let sets = [job.add_set(&[0, 1]), job.add_set(&[2, 3])];
    let awaited = |job: &Job, rank| {
        let late = job.coordinator.lateness(Rank(rank));
        late.iter().map(|of| of.lateness.awaited_ns).sum::<u64>()
    };
    // At first the requests are new, then they are known.
    for round in 1..3 {
        let begin = job.now + 100;
        job.now = begin;
        for (set, early) in sets.into_iter().zip([0, 2]) {
            job.submit(early, on(set, sum("x", &[1])));
            job.settle();
        }
        for (set, late) in sets.into_iter().zip([1, 3]) {
            job.now += 10;
            job.submit(late, on(set, sum("x", &[1])));
            job.settle();
        }
        let found: Vec<u64> = (0..4).map(|rank| awaited(&job, rank)).collect();
        assert_eq!(found, [0, 10 * round, 0, 20 * round]);
    }
}

/// A view of a hang pends what waits, by rank.
#[test]
fn a_request_that_was_looked_at_while_it_waited_counts_all_the_same() {
    let mut job = Job::new(3);
    job.coordinator.count_lateness();
    job.submit_all(&sum("x", &[1]));
    job.settle();
    job.now = 100;
    for rank in [0, 2] {
        job.submit(rank, sum("x", &[1]));
        job.settle();
    }
    job.now = 5000;
    let late = job.coordinator.late(Time(5000), Time(4000));
    assert_eq!(late[0].missing, [Rank(1)]);
    job.now = 6000;
    job.submit(1, sum("x", &[1]));
    job.settle();
    let late = job.coordinator.lateness(Rank(1));
    assert_eq!(late[0].lateness.awaited_ns, 5900);
}

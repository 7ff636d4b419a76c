//! Whole elastic jobs: what must always hold holds for every seed.

use std::ops::Range;

use crate::seeds::seeds;
use horovod_sim::{JobLimits, JobResult, run_job_seed};

/// Runs these seeds; the first failure is shown with its story.
fn check(seeds: impl Iterator<Item = u64>, limits: &JobLimits) -> Vec<JobResult> {
    let run = |seed| run_job_seed(seed, limits).unwrap_or_else(|failure| panic!("{failure}"));
    seeds.map(run).collect()
}

#[test]
fn small_jobs_keep_every_promise() {
    let outcomes = check(seeds(600, 1), &JobLimits::default());
    // A simulation in which nothing succeeds, or nothing happens, would prove nothing.
    let runs = outcomes.len();
    let successes = outcomes.iter().filter(|o| o.is_success).count();
    let rounds: u64 = outcomes.iter().map(|o| o.rounds).sum();
    let commits: u64 = outcomes.iter().map(|o| o.commits).sum();
    println!("{runs} jobs, {successes} successes, {rounds} rounds, {commits} commits");
    assert!(successes > runs / 3, "{successes} of {runs} succeed");
    assert!(successes < runs, "none fails");
    assert!(rounds > 2 * runs as u64, "{rounds} rounds");
}

#[test]
fn jobs_of_some_dozens_of_ranks_keep_every_promise() {
    let limits = JobLimits {
        hosts_max: 12,
        slots_max: 8,
        steps_max: 20,
        is_full: false,
        faults_max: 20,
    };
    check(seeds(600, 10).map(|n| n + (1 << 32)), &limits);
}

fn check_full(hosts_max: u32, seeds: Range<u64>) {
    let limits = JobLimits {
        hosts_max,
        slots_max: 8,
        steps_max: 8,
        is_full: true,
        faults_max: 20,
    };
    let outcomes = check(seeds.map(|n| n + (2 << 32)), &limits);
    let ranks = 8 * hosts_max as usize;
    assert!(outcomes.iter().any(|o| o.ranks_max == ranks));
}

#[test]
fn jobs_of_128_ranks_keep_every_promise() {
    check_full(16, seeds(600, 100));
}

#[test]
#[ignore = "takes minutes where it is not optimised; `make test-all` runs it"]
fn jobs_of_512_ranks_keep_every_promise() {
    check_full(64, seeds(3000, 500));
}

#[test]
fn the_same_seed_gives_the_same_job() {
    for seed in 0..30 {
        let run = || run_job_seed(seed, &JobLimits::default()).map_err(|f| f.to_string());
        assert_eq!(run(), run(), "seed {seed}");
    }
}

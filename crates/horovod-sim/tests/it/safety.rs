//! Random runs: what must always hold holds for every seed; past failures run first.

use crate::seeds::seeds;
use horovod_sim::{Failure, Limits, Trace, run_seed, run_seed_in_tree};

/// Seeds that once failed, or that reach something special; never removed.
const CORPUS: &str = include_str!("../corpus/seeds.txt");

/// Runs seeds; up to five failures are shown, each with the seed that repeats it.
fn check(seeds: impl Iterator<Item = u64>, limits: &Limits) {
    check_with(run_seed, seeds, limits);
}

type Run = fn(u64, &Limits) -> Result<Trace, Failure>;

fn check_with(run: Run, seeds: impl Iterator<Item = u64>, limits: &Limits) {
    let failures: Vec<String> = seeds
        .filter_map(|seed| run(seed, limits).err())
        .map(|failure| failure.to_string())
        .take(5)
        .collect();
    assert!(
        failures.is_empty(),
        "with {limits:?}:\n{}",
        failures.join("\n")
    );
}

#[test]
fn past_seeds_still_pass() {
    let seeds = CORPUS.lines().filter(|line| !line.starts_with('#'));
    check(
        seeds.filter_map(|line| line.trim().parse().ok()),
        &Limits::default(),
    );
}

#[test]
fn small_clusters_keep_every_promise() {
    check(seeds(2000, 1), &Limits::default());
}

#[test]
fn middling_clusters_keep_every_promise() {
    let limits = Limits {
        ranks_max: 40,
        phases_max: 6,
        items_max: 30,
    };
    check(seeds(400, 1).map(|n| n + (1 << 32)), &limits);
}

#[test]
fn clusters_of_up_to_512_ranks_keep_every_promise() {
    let limits = Limits {
        ranks_max: 512,
        phases_max: 3,
        items_max: 10,
    };
    check(seeds(400, 20).map(|n| n + (2 << 32)), &limits);
}

#[test]
fn trees_keep_every_promise_and_end_everything_as_stars_do() {
    let limits = Limits {
        ranks_max: 16,
        ..Limits::default()
    };
    check_with(
        run_seed_in_tree,
        seeds(2000, 1).map(|n| n + (3 << 32)),
        &limits,
    );
}

#[test]
fn deep_trees_keep_every_promise() {
    let limits = Limits {
        ranks_max: 200,
        phases_max: 4,
        items_max: 12,
    };
    check_with(
        run_seed_in_tree,
        seeds(400, 4).map(|n| n + (4 << 32)),
        &limits,
    );
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    for seed in 0..50 {
        let run = || run_seed(seed, &Limits::default()).map(|t| (t.hash, t.messages, t.events));
        assert_eq!(run(), run(), "seed {seed}");
        let run =
            || run_seed_in_tree(seed, &Limits::default()).map(|t| (t.hash, t.messages, t.events));
        assert_eq!(run(), run(), "seed {seed} in a tree");
    }
}

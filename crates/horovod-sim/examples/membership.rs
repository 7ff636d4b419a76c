//! Runs many elastic jobs and says how they went: `cargo run --release -p horovod-sim --example membership -- 0 100000`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use horovod_sim::{JobLimits, run_job_seed};

fn main() -> ExitCode {
    let numbers: Vec<u64> = std::env::args().skip(1).flat_map(|n| n.parse()).collect();
    let (first, count) = match numbers[..] {
        [first, count] => (first, count),
        [count] => (0, count),
        _ => (0, 10_000),
    };
    let limits = JobLimits::default();
    let (mut successes, mut rounds, mut deaths, mut commits, mut messages) = (0, 0, 0, 0, 0);
    let mut broken: BTreeMap<String, (u64, String)> = BTreeMap::new();
    for seed in first..first + count {
        match run_job_seed(seed, &limits) {
            Ok(outcome) => {
                successes += u64::from(outcome.is_success);
                rounds += outcome.rounds;
                deaths += outcome.deaths;
                commits += outcome.commits;
                messages += outcome.messages;
            }
            Err(failure) => {
                let text = failure.to_string();
                let kind = text.lines().next().unwrap_or_default();
                let kind = kind.split(": ").nth(2).unwrap_or(kind);
                let kind: String = kind.chars().filter(|c| !c.is_ascii_digit()).collect();
                broken.entry(kind).or_insert((0, text)).0 += 1;
            }
        }
    }
    let summary = format!(
        "{count} jobs: {successes} successes, {rounds} rounds, {deaths} deaths, {commits} commits, {messages} messages"
    );
    report(&summary);
    for (count, text) in broken.values() {
        report(&format!("\n{count} times:\n{text}"));
    }
    if broken.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[expect(clippy::print_stdout, reason = "what it is for")]
fn report(text: &str) {
    println!("{text}");
}

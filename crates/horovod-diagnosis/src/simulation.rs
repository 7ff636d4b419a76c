//! Whole jobs on a virtual clock, with rank 0's diagnosis of them: none that can go on is ended, each circle is found in
//! time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use horovod_protocol::{ProcessSetId, Rank, StalledRequest};
use proptest::prelude::*;

use super::leader::{Leader, LeaderStep};
use super::{Key, Late, NAMES_MAX, Seen, Standing};

/// Names of operations; more than one answer holds.
const NAMES: u8 = NAMES_MAX as u8 + 8;
/// `HOROVOD_STALL_DIAGNOSIS_SECONDS` by default.
const AFTER_MS: u64 = 10_000;
/// A circle ends its job within this time.
const FOUND_WITHIN_MS: u64 = 15_000;
const STEP_MS: u64 = 50;

/// The next action of a rank.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// Submit an operation that ends with a callback.
    Submit(u8),
    /// Submit so many, as after a backward pass.
    SubmitMany(u8),
    /// Use so many hundredths of a core, or wait so long for one.
    Compute { ms: u64, percent: u64 },
    /// Wait, on a thread that nobody sees, until all that was submitted has ended.
    Await,
    /// Have a thread that nobody sees compute, which then submits an operation, and go on meanwhile.
    Start { ms: u64, percent: u64, name: u8 },
    /// Submit an operation and wait for it, where this is seen.
    Wait(u8),
}

/// A framework's thread that computes.
#[derive(Debug)]
struct Unseen {
    until: u64,
    percent: u64,
    name: u8,
}

#[derive(Debug, Default)]
struct SimulatedRank {
    /// In reverse.
    acts: Vec<Act>,
    computes_until: u64,
    percent: u64,
    awaits: bool,
    unseen: Vec<Unseen>,
    waits_for: Option<u8>,
    pending: BTreeSet<u8>,
    submitted: u64,
    runnable_us: u64,
}

impl SimulatedRank {
    fn submit(&mut self, name: u8) {
        self.submitted += u64::from(self.pending.insert(name % NAMES));
    }

    fn run(&mut self, now: u64) {
        let mut percent = if now < self.computes_until {
            self.percent
        } else {
            0
        };
        for done in self.unseen.extract_if(.., |unseen| unseen.until <= now) {
            self.submitted += u64::from(self.pending.insert(done.name));
        }
        percent += self.unseen.iter().map(|u| u.percent).sum::<u64>();
        // Threads that wait wake up now and then.
        self.runnable_us += (percent * 10 + 1) * STEP_MS;
        self.awaits &= !self.pending.is_empty();
        self.waits_for = self.waits_for.filter(|name| self.pending.contains(name));
        while now >= self.computes_until && !self.waits() {
            match self.acts.pop() {
                Some(Act::Submit(name)) => self.submit(name),
                Some(Act::SubmitMany(count)) => (0..count).for_each(|name| self.submit(name)),
                Some(Act::Compute { ms, percent }) => {
                    (self.computes_until, self.percent) = (now + ms, percent);
                }
                Some(Act::Await) => self.awaits = !self.pending.is_empty(),
                Some(Act::Start { ms, percent, name }) => self.unseen.push(Unseen {
                    until: now + ms,
                    percent,
                    name: name % NAMES,
                }),
                Some(Act::Wait(name)) => {
                    self.submit(name);
                    self.waits_for = Some(name % NAMES);
                }
                None => return,
            }
        }
    }

    /// Whether its main thread waits.
    fn waits(&self) -> bool {
        let has = |name: u8| self.pending.contains(&name);
        self.awaits || self.waits_for.is_some_and(has)
    }

    fn is_over(&self, now: u64) -> bool {
        self.acts.is_empty()
            && now >= self.computes_until
            && !self.waits()
            && self.unseen.is_empty()
    }

    fn standing(&self) -> Standing {
        let keys = self.pending.iter().map(|name| key(*name));
        let waits_for = self.waits_for.filter(|name| self.pending.contains(name));
        let seen = Seen {
            all_wait: waits_for.is_some(),
            has_guests: true,
            has_callbacks: self.pending.len() > waits_for.iter().len(),
        };
        Standing {
            submitted: self.submitted,
            runnable_ms: self.runnable_us / 1000,
            blocked: seen.blocked(),
            waits_if_idle: seen.waits_if_idle(),
            waits_for: keys.collect(),
            ..Standing::default()
        }
        .bounded()
    }
}

fn key(name: u8) -> Key {
    (0, Arc::from(name.to_string()))
}

struct Job {
    ranks: Vec<SimulatedRank>,
    /// Since when an operation is pending on some rank.
    since: BTreeMap<u8, u64>,
    now: u64,
}

impl Job {
    fn run(&mut self) {
        for rank in &mut self.ranks {
            rank.run(self.now);
        }
        let ranks = &mut self.ranks;
        for name in 0..NAMES {
            let has = |rank: &&SimulatedRank| rank.pending.contains(&name);
            match ranks.iter().filter(has).count() {
                0 => {}
                all if all == ranks.len() => {
                    self.since.remove(&name);
                    for rank in ranks.iter_mut() {
                        rank.pending.remove(&name);
                    }
                }
                _ => {
                    self.since.entry(name).or_insert(self.now);
                }
            }
        }
        self.now += STEP_MS;
    }

    /// Whether an operation can never end: of what is pending, that is what remains when all has ended for which the ranks
    /// that lack it may still come.
    fn is_stuck(&self) -> bool {
        let mut stuck: BTreeSet<u8> = self.since.keys().copied().collect();
        loop {
            let waits = |rank: &SimulatedRank| {
                rank.waits() && !rank.pending.is_empty() && rank.unseen.is_empty()
            };
            let comes = |rank: &SimulatedRank| !(waits(rank) && rank.pending.is_subset(&stuck));
            let ends = |name: &&u8| {
                let mut ranks = self.ranks.iter();
                ranks.all(|rank| rank.pending.contains(*name) || comes(rank))
            };
            let Some(name) = stuck.iter().find(ends).copied() else {
                return !stuck.is_empty();
            };
            stuck.remove(&name);
        }
    }

    fn late(&self, before: u64) -> Late {
        let late = self.since.iter().filter(|(_, since)| **since <= before);
        let who = |name: u8, asks: bool| -> Vec<Rank> {
            let ranks = (0..).zip(&self.ranks);
            let ranks = ranks.filter(|(_, rank)| rank.pending.contains(&name) == asks);
            ranks.map(|(number, _)| Rank(number)).collect()
        };
        let request = |(name, since): (&u8, &u64)| StalledRequest {
            set: ProcessSetId(0),
            name: key(*name).1,
            waiting: who(*name, true),
            missing: who(*name, false),
            waited_ns: (self.now - since) * 1_000_000,
        };
        Late {
            requests: late.map(request).collect(),
            running: None,
        }
    }
}

/// Runs a job until one of its ranks is through, or until it is found to be in a circle; whether it was.
fn is_found_in_a_circle(scripts: &[Vec<Act>]) -> bool {
    let of = |acts: &Vec<Act>| SimulatedRank {
        acts: acts.iter().rev().copied().collect(),
        ..SimulatedRank::default()
    };
    let mut job = Job {
        ranks: scripts.iter().map(of).collect(),
        since: BTreeMap::new(),
        now: 0,
    };
    let mut leader = Leader::new(AFTER_MS);
    let mut stuck_since = None;
    while !job.ranks.iter().any(|rank| rank.is_over(job.now)) {
        job.run();
        let now = job.now;
        if job.is_stuck() {
            let since = *stuck_since.get_or_insert(now);
            let waited = now - since;
            assert!(waited <= FOUND_WITHIN_MS, "a circle since {since} ms");
        }
        match leader.poll(now, |before| job.late(before)) {
            Some(LeaderStep::Ask { question, ranks }) => {
                for rank in ranks {
                    leader.answered(question, rank, job.ranks[rank.index()].standing());
                }
            }
            Some(LeaderStep::Report(diagnosis)) if !diagnosis.deadlocked.is_empty() => {
                assert!(job.is_stuck(), "at {now} ms the job could go on");
                return true;
            }
            _ => {}
        }
    }
    false
}

#[test]
fn a_rank_that_computes_for_minutes_is_never_taken_for_one_that_waits() {
    for percent in [6, 20, 100] {
        let compute = Act::Compute {
            ms: 300_000,
            percent,
        };
        let [a, b] = [Act::Submit(0), Act::Submit(1)];
        let crossed = [
            vec![a, compute, b, Act::Await],
            vec![b, compute, a, Act::Await],
        ];
        assert!(!is_found_in_a_circle(&crossed));
        let diverged = [vec![a, compute, Act::Await], vec![b, Act::Await]];
        assert!(is_found_in_a_circle(&diverged), "once it has computed");
    }
}

#[test]
fn a_rank_with_a_thread_that_computes_unseen_is_never_taken_for_one_that_waits() {
    let straggles = |percent| Act::Start {
        ms: 300_000,
        percent,
        name: 0,
    };
    for percent in [6, 20, 100] {
        // The main thread of rank 0 waits for what its framework has submitted, that of rank 1 is one call ahead.
        let slow = [
            vec![Act::Submit(0), Act::Await, Act::Wait(1)],
            vec![straggles(percent), Act::Wait(1)],
        ];
        assert!(!is_found_in_a_circle(&slow));
    }
    // One batch less: rank 1 averages metrics, and has no thread that would send gradients.
    let uneven = [vec![Act::Submit(0), Act::Await], vec![Act::Wait(1)]];
    assert!(is_found_in_a_circle(&uneven));
}

#[test]
fn threads_that_read_files_for_some_seconds_are_waited_for() {
    for ms in [3000, 6000, 9000] {
        let reads = Act::Compute { ms, percent: 0 };
        let of = |first, second| vec![Act::Submit(first), reads, Act::Submit(second), Act::Await];
        assert!(!is_found_in_a_circle(&[of(0, 1), of(1, 0)]));
    }
}

#[test]
fn a_circle_of_more_operations_than_an_answer_holds_is_found() {
    let all = [Act::SubmitMany(NAMES - 1), Act::Await];
    let other = [Act::Submit(NAMES - 1), Act::Await];
    assert!(is_found_in_a_circle(&[all.to_vec(), other.to_vec()]));
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0u8..4).prop_map(Act::Submit),
        1 => (1u8..NAMES).prop_map(Act::SubmitMany),
        2 => (0u64..40_000, 6u64..=100).prop_map(|(ms, percent)| Act::Compute { ms, percent }),
        2 => Just(Act::Await),
        1 => (0u64..40_000, 6u64..=100, 0u8..4)
            .prop_map(|(ms, percent, name)| Act::Start { ms, percent, name }),
        2 => (0u8..4).prop_map(Act::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_job_that_can_go_on_is_ended_and_each_circle_is_found(
        scripts in prop::collection::vec(prop::collection::vec(act(), 1..10), 2..5),
    ) {
        is_found_in_a_circle(&scripts);
    }
}

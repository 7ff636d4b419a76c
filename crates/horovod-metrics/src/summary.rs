//! The summary, a line at the end of a job: sums over the rounds in which a process was rank 0.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::Arc;

use crate::amounts::{counted, in_bytes};
use crate::slow::Slow;
use crate::snapshot::Snapshot;

const SECOND_NS: u64 = 1_000_000_000;
/// A rank is named from this share of the time on, in percent.
const NAMED_PERCENT: u64 = 1;

/// A rank, and the name of its host.
type RankOnHost = (u32, Arc<str>);

/// Sums over rounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    rounds: u64,
    restarts: u64,
    /// Of the last round.
    size: u32,
    /// Ranks that have reported, and their hosts.
    rows: usize,
    hosts: usize,
    /// Time of the rounds, as their slowest rank measured it.
    elapsed_ns: u64,
    /// Of the rank that counted most in each round.
    steps: u64,
    collectives: u64,
    /// Sums over the ranks.
    computing_ns: u64,
    communicating_ns: u64,
    waiting_ns: u64,
    awaited_ns: BTreeMap<RankOnHost, u64>,
    peak_memory: Option<(u64, RankOnHost)>,
    /// The slow rank at the end of the last round.
    slow: Option<Slow>,
}

impl Summary {
    /// Adds the last figures of a round, which its rank 0 has taken.
    pub fn add(&mut self, round: &Snapshot) {
        let figures = || round.ranks.iter().map(|row| &row.report.figures);
        self.rounds += 1;
        self.restarts = round.restarts;
        self.size = round.size;
        self.slow.clone_from(&round.slow);
        self.rows = round.ranks.len();
        let mut names: Vec<&str> = round.ranks.iter().map(|row| &*row.hostname).collect();
        names.sort_unstable();
        names.dedup();
        self.hosts = names.len();
        self.elapsed_ns += figures().map(|f| f.elapsed).max().unwrap_or(0);
        self.steps += figures().map(|f| f.steps).max().unwrap_or(0);
        self.collectives += figures().map(|f| f.collectives).max().unwrap_or(0);
        for row in &round.ranks {
            let f = &row.report.figures;
            self.computing_ns += f.computing;
            self.communicating_ns += f.communicating;
            self.waiting_ns += f.waiting;
            let place = (row.report.rank, row.hostname.clone());
            let peak = self.peak_memory.as_ref().map_or(0, |(bytes, _)| *bytes);
            if f.peak_memory > peak {
                self.peak_memory = Some((f.peak_memory, place.clone()));
            }
            *self.awaited_ns.entry(place).or_default() += f.awaited;
        }
    }

    /// Whether the job ran for at least this time, and its ranks exchanged data.
    #[must_use]
    pub fn is_noteworthy(&self, least: std::time::Duration) -> bool {
        self.collectives > 0 && u128::from(self.elapsed_ns) >= least.as_nanos()
    }

    fn write_to(&self, out: &mut String) -> fmt::Result {
        let amount = match self.steps {
            0 => counted(self.collectives, "collective"),
            steps => counted(steps, "step"),
        };
        let all = self.computing_ns + self.communicating_ns + self.waiting_ns;
        write!(
            out,
            "{} on {} ran {amount} in {}: {} % computing, {} % communicating, {} % waiting for other ranks.",
            counted(self.rows as u64, "rank"),
            counted(self.hosts as u64, "host"),
            lasting(self.elapsed_ns),
            percent(self.computing_ns, all),
            percent(self.communicating_ns, all),
            percent(self.waiting_ns, all),
        )?;
        let slowest = self.awaited_ns.iter().max_by_key(|(_, awaited)| **awaited);
        if let Some(((rank, host), awaited)) = slowest {
            let share = percent(*awaited, self.elapsed_ns);
            if share >= NAMED_PERCENT {
                let awaited = lasting(*awaited);
                write!(
                    out,
                    " The others waited longest for rank {rank} on {host}: {awaited} ({share} %)."
                )?;
            }
        }
        if let Some(slow) = &self.slow {
            write!(out, " At the end, {slow}")?;
        }
        match self.restarts {
            0 => write!(out, " No restarts.")?,
            some => write!(out, " {}.", counted(some, "restart"))?,
        }
        if let Some((bytes, (rank, host))) = &self.peak_memory {
            let peak = in_bytes(*bytes);
            write!(out, " Peak memory {peak}, of rank {rank} on {host}.")?;
        }
        if self.rows as u64 != u64::from(self.size) {
            write!(out, " Figures of {} of {} ranks.", self.rows, self.size)?;
        }
        if self.rounds <= self.restarts {
            let (seen, all) = (self.rounds, self.restarts + 1);
            write!(out, " The figures are those of {seen} of {all} rounds.")?;
        }
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.write_to(&mut text)?;
        f.write_str(&text)
    }
}

/// Rounded, so that the shares of a whole seldom miss 100.
fn percent(part: u64, of: u64) -> u64 {
    let of = u128::from(of.max(1));
    ((u128::from(part) * 100 + of / 2) / of) as u64
}

/// A time as people say it.
fn lasting(nanos: u64) -> String {
    let seconds = nanos / SECOND_NS;
    match seconds {
        0..100 => format!("{:.1} s", nanos as f64 / SECOND_NS as f64),
        100..6000 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::figures::{RankFigures, Report};
    use crate::snapshot::RankRow;

    /// A round of ranks with these names of hosts, each 100 s long; the last rank is awaited.
    fn round(hosts: &[&str], restarts: u64, steps: u64) -> Snapshot {
        let last = hosts.len() - 1;
        let row = |(rank, host): (usize, &&str)| RankRow {
            hostname: Arc::from(*host),
            age: Duration::ZERO,
            report: Report {
                rank: rank as u32,
                figures: RankFigures {
                    elapsed: 100 * SECOND_NS,
                    computing: 70 * SECOND_NS,
                    communicating: 10 * SECOND_NS,
                    waiting: 20 * SECOND_NS,
                    awaited: if rank == last { 25 * SECOND_NS } else { 0 },
                    steps,
                    collectives: 640,
                    peak_memory: (rank as u64 + 1) << 30,
                    ..RankFigures::default()
                },
                ..Report::default()
            },
        };
        let rows = hosts.iter().enumerate().map(row).collect();
        Snapshot::new(0, hosts.len() as u32, restarts, rows, Vec::new())
    }

    fn text(rounds: &[Snapshot]) -> String {
        let mut summary = Summary::default();
        rounds.iter().for_each(|round| summary.add(round));
        summary.to_string()
    }

    #[test]
    fn one_line_names_shares_the_slowest_rank_and_the_most_memory() {
        assert_eq!(
            text(&[round(&["a", "a", "b"], 0, 1200)]),
            "3 ranks on 2 hosts ran 1200 steps in 1 min 40 s: 70 % computing, 10 % communicating, 20 % waiting for \
             other ranks. The others waited longest for rank 2 on b: 25.0 s (25 %). No restarts. Peak memory 3.0 GiB, \
             of rank 2 on b."
        );
    }

    #[test]
    fn a_rank_that_was_slow_at_the_end_is_named() {
        let slow = Slow {
            ranks: vec![1],
            host: "b".into(),
            lost: 0.2,
            explained: 1.0,
            steps: 20,
            cause: crate::Cause::Unknown,
        };
        let last = Snapshot {
            slow: Some(slow),
            ..round(&["a", "b"], 0, 10)
        };
        let text = text(&[last]);
        let words = " At the end, rank 1 on b is slow: the others lose 20 % of their time by waiting, over the last 20 steps. \
                     Likely cause: unknown. Computing takes no longer there. No restarts.";
        assert!(text.contains(words), "{text}");
    }

    #[test]
    fn without_marks_of_steps_the_collectives_are_counted() {
        let text = text(&[round(&["a"], 0, 0)]);
        assert!(
            text.starts_with("1 rank on 1 host ran 640 collectives in "),
            "{text}"
        );
    }

    #[test]
    fn rounds_of_an_elastic_job_are_added() {
        let all = text(&[round(&["a", "b"], 0, 10), round(&["a"], 1, 5)]);
        assert!(
            all.starts_with("1 rank on 1 host ran 15 steps in 3 min 20 s: "),
            "{all}"
        );
        assert!(
            all.contains(" 1 restart. ") && !all.contains("rounds"),
            "{all}"
        );
        let late = text(&[round(&["a"], 4, 5)]);
        assert!(
            late.ends_with(" The figures are those of 1 of 5 rounds."),
            "{late}"
        );
    }

    #[test]
    fn ranks_that_have_not_reported_are_told_apart() {
        let mut round = round(&["a", "a", "b"], 0, 1);
        round.ranks.pop();
        let text = text(&[round]);
        assert!(text.starts_with("2 ranks on 1 host ran "), "{text}");
        assert!(text.ends_with(" Figures of 2 of 3 ranks."), "{text}");
    }

    #[test]
    fn a_rank_that_was_hardly_awaited_is_not_named() {
        let mut round = round(&["a", "b"], 0, 1);
        round.ranks[1].report.figures.awaited = SECOND_NS / 10;
        assert!(!text(&[round]).contains("longest"));
    }

    #[test]
    fn a_moment_and_a_job_without_collectives_are_not_noteworthy() {
        let mut round = round(&["a"], 0, 1);
        let is_noteworthy = |round: &Snapshot, least| {
            let mut summary = Summary::default();
            summary.add(round);
            summary.is_noteworthy(Duration::from_secs(least))
        };
        assert!(is_noteworthy(&round, 100));
        assert!(!is_noteworthy(&round, 101));
        round.ranks[0].report.figures.collectives = 0;
        assert!(!is_noteworthy(&round, 100));
    }

    #[test]
    fn times_are_as_short_as_people_say_them() {
        for (seconds, expected) in [
            (9, "9.0 s"),
            (725, "12 min 5 s"),
            (3 * 3600 + 720, "3 h 12 min"),
        ] {
            assert_eq!(lasting(seconds * SECOND_NS), expected);
        }
    }
}

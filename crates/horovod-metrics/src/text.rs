//! The figures as a table for a terminal.

use std::fmt::Write;
use std::time::Duration;

use crate::figures::{RankFigures, Unit, in_unit};
use crate::snapshot::{RankRow, Snapshot};

/// Ranks that are listed; of more, those for which the others have waited longest.
const RANKS_MAX: usize = 64;
/// Ranks that a line names.
const NAMED_MAX: usize = 8;
/// A report of this age is old: a rank reports once a second.
const OLD: Duration = Duration::from_secs(5);

impl Snapshot {
    /// The job in a few lines, then a line for each rank.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        // A String takes everything.
        let _ = self.write_text(&mut out);
        out
    }

    fn write_text(&self, out: &mut String) -> std::fmt::Result {
        let reported = self.ranks.len();
        write!(out, "{} ranks", self.size)?;
        if reported < self.size as usize {
            write!(out, " ({reported} have reported)")?;
        }
        let longest = self
            .ranks
            .iter()
            .map(|row| row.report.figures.elapsed)
            .max();
        writeln!(
            out,
            ", {} s since init, {} restarts",
            seconds(longest.unwrap_or(0)),
            self.restarts
        )?;
        self.write_hangs(out)?;
        if let Some(slow) = &self.slow {
            writeln!(out, "{slow}")?;
        }
        if let Some((row, share)) = self.latest_rank() {
            writeln!(
                out,
                "the others waited longest for rank {} on {}: {} s, {share} % of the time",
                row.report.rank,
                row.hostname,
                seconds(row.report.figures.awaited)
            )?;
        }
        writeln!(
            out,
            "{:>6} {:>9} {:>9} {:>9} {:>9} {:>10} {:>9}  host",
            "rank", "comput.", "commun.", "waiting", "awaited", "operations", "memory"
        )?;
        let mut rows: Vec<&RankRow> = self.ranks.iter().collect();
        if rows.len() > RANKS_MAX {
            rows.sort_by_key(|row| std::cmp::Reverse(row.report.figures.awaited));
            rows.truncate(RANKS_MAX);
            rows.sort_by_key(|row| row.report.rank);
        }
        for row in &rows {
            let (report, f) = (&row.report, &row.report.figures);
            let share = |part| format!("{} %", percent(part, f));
            let all = report.operations.iter().flatten();
            let operations = all.fold(0_u64, |sum, of_kind| sum.saturating_add(*of_kind));
            writeln!(
                out,
                "{:>6} {:>9} {:>9} {:>9} {:>9} {:>10} {:>5} MiB  {}",
                report.rank,
                share(f.computing),
                share(f.communicating),
                share(f.waiting),
                share(f.awaited),
                operations,
                f.memory >> 20,
                row.hostname
            )?;
        }
        if rows.len() < reported {
            writeln!(
                out,
                "and {} ranks that were awaited less",
                reported - rows.len()
            )?;
        }
        Ok(())
    }

    /// The ranks that others wait for now, and the ranks that do not report.
    fn write_hangs(&self, out: &mut String) -> std::fmt::Result {
        for hang in &self.hangs {
            let names = hang.missing.iter().map(|(rank, host)| (*rank, &**host));
            write!(
                out,
                "for {:.1} s waiting for {} to begin {:?}",
                hang.lasts.as_secs_f64(),
                named(names),
                hang.operation
            )?;
            match hang.operations {
                1 => writeln!(out)?,
                more => writeln!(out, " and {} others", more - 1)?,
            }
        }
        let silent: Vec<&RankRow> = self.ranks.iter().filter(|row| row.age > OLD).collect();
        if let Some(longest) = silent.iter().map(|row| row.age).max() {
            let names = silent.iter().map(|row| (row.report.rank, &*row.hostname));
            let longest = longest.as_secs_f64();
            writeln!(out, "for {longest:.1} s no report of {}", named(names))?;
        }
        Ok(())
    }

    /// The rank for which the others have waited longest, and for which share of the time; `None`: not noticeably.
    fn latest_rank(&self) -> Option<(&RankRow, u64)> {
        let row = self
            .ranks
            .iter()
            .max_by_key(|row| row.report.figures.awaited)?;
        let share = percent(row.report.figures.awaited, &row.report.figures);
        (share > 0).then_some((row, share))
    }
}

/// Some ranks and their hosts.
fn named<'a>(ranks: impl ExactSizeIterator<Item = (u32, &'a str)>) -> String {
    let more = ranks.len().saturating_sub(NAMED_MAX);
    let names: Vec<String> = ranks
        .take(NAMED_MAX)
        .map(|(rank, host)| format!("rank {rank} on {host}"))
        .collect();
    let mut text = names.join(", ");
    if more > 0 {
        // A String takes everything.
        let _ = write!(text, " and {more} more");
    }
    text
}

fn percent(part: u64, of: &RankFigures) -> u64 {
    (u128::from(part) * 100 / u128::from(of.elapsed.max(1))) as u64
}

fn seconds(nanos: u64) -> String {
    format!("{:.1}", in_unit(Unit::Seconds, nanos))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::figures::Report;

    fn snapshot(ranks: u32) -> Snapshot {
        let row = |rank| {
            let figures = RankFigures {
                elapsed: 10_000_000_000,
                waiting: 2_000_000_000,
                computing: 8_000_000_000,
                awaited: u64::from(rank) * 10_000_000,
                memory: 50 << 20,
                ..RankFigures::default()
            };
            RankRow {
                hostname: Arc::from("a"),
                age: Duration::ZERO,
                report: Report {
                    rank,
                    figures,
                    ..Report::default()
                },
            }
        };
        Snapshot::new(0, ranks, 1, (0..ranks).map(row).collect(), Vec::new())
    }

    #[test]
    fn a_line_for_each_rank_and_the_latest_one_named() {
        let text = snapshot(21).to_text();
        assert!(
            text.starts_with("21 ranks, 10.0 s since init, 1 restarts\n"),
            "{text}"
        );
        let named = "the others waited longest for rank 20 on a: 0.2 s, 2 % of the time";
        assert!(text.lines().any(|line| line == named), "{text}");
        assert_eq!(text.lines().count(), 3 + 21);
        assert!(
            text.contains("    20      80 %       0 %      20 %       2 %          0    50 MiB  a"),
            "{text}"
        );
    }

    #[test]
    fn of_many_ranks_those_that_were_awaited() {
        let text = snapshot(100).to_text();
        assert!(
            text.ends_with("and 36 ranks that were awaited less\n"),
            "{text}"
        );
        assert!(
            text.contains("\n    99 ") && !text.contains("\n    35 "),
            "{text}"
        );
    }

    #[test]
    fn a_hang_names_the_ranks_that_are_waited_for() {
        let mut snapshot = snapshot(2);
        snapshot.hangs = vec![crate::Hang {
            missing: (1..12).map(|rank| (rank, "b".into())).collect(),
            waiting: vec![0],
            set: 0,
            lasts: Duration::from_millis(12_340),
            operation: "grad/7".into(),
            operations: 3,
        }];
        snapshot.ranks[1].age = Duration::from_secs(61);
        let text = snapshot.to_text();
        let line = text.lines().nth(1).expect("a second line");
        assert!(
            line.starts_with("for 12.3 s waiting for rank 1 on b, rank 2 on b, ")
                && line.ends_with("rank 8 on b and 3 more to begin \"grad/7\" and 2 others"),
            "{text}"
        );
        assert!(
            text.contains("\nfor 61.0 s no report of rank 1 on a\n"),
            "{text}"
        );
    }

    #[test]
    fn a_slow_rank_is_named_with_the_likely_cause() {
        let slow = crate::Slow {
            ranks: vec![1],
            host: "a".into(),
            lost: 0.21,
            explained: 0.9,
            steps: 20,
            cause: crate::Cause::Steal(0.3),
        };
        let text = Snapshot {
            slow: Some(slow),
            ..snapshot(2)
        }
        .to_text();
        let line = "rank 1 on a is slow: the others lose 21 % of their time by waiting, over the last 20 steps. Likely \
                    cause: other virtual machines. The hypervisor takes 30 % of the processors of the host.";
        assert!(text.lines().any(|l| l == line), "{text}");
    }

    #[test]
    fn nobody_is_named_where_nobody_waited() {
        assert!(!snapshot(2).to_text().contains("longest"));
    }
}

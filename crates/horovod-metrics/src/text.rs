//! The figures as a table for a terminal.

use std::fmt::Write;

use crate::figures::{RankFigures, Unit, in_unit};
use crate::snapshot::{RankRow, Snapshot};

/// Ranks that are listed; of more, those for which the others have waited longest.
const RANKS_MAX: usize = 64;

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
            let operations: u64 = report.operations.iter().flatten().sum();
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

fn percent(part: u64, of: &RankFigures) -> u64 {
    (u128::from(part) * 100 / u128::from(of.elapsed.max(1))) as u64
}

fn seconds(nanos: u64) -> String {
    format!("{:.1}", in_unit(Unit::Seconds, nanos))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

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
        Snapshot::new(0, ranks, 1, (0..ranks).map(row).collect())
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
    fn nobody_is_named_where_nobody_waited() {
        assert!(!snapshot(2).to_text().contains("longest"));
    }
}

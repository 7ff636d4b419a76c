//! The figures that rank 0 answers with, and the rates between two answers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Deserialize;

/// Time over which rates are taken; the page of a job takes the same.
pub(super) const WINDOW: Duration = Duration::from_secs(5);

/// The part of the document of `hvd.stats()` that the view shows.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Document {
    pub(super) size: u32,
    pub(super) restarts: u64,
    pub(super) ranks: Vec<Figures>,
    pub(super) waiting_for: Vec<Hang>,
    pub(super) slow: Option<Slow>,
}

/// One rank.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Figures {
    pub(super) rank: u32,
    pub(super) host: String,
    pub(super) age_seconds: f64,
    pub(super) elapsed_seconds: f64,
    pub(super) waiting_seconds: f64,
    pub(super) communicating_seconds: f64,
    pub(super) awaited_seconds: f64,
    pub(super) collectives: u64,
    pub(super) steps: u64,
    pub(super) stalls: u64,
    pub(super) memory_bytes: u64,
}

/// Ranks that others wait for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Hang {
    /// The ranks that have not begun the operation.
    pub(super) ranks: Vec<u32>,
    /// The ranks that have, and wait.
    pub(super) waiting: Vec<u32>,
    pub(super) seconds: f64,
    pub(super) operation: String,
    pub(super) operations: u64,
}

/// A rank, or the ranks of a host, for which the others wait step after step.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Slow {
    pub(super) text: String,
}

/// Shares of the last seconds, from 0 to 1, and rates per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    pub(super) computing: f64,
    pub(super) communicating: f64,
    pub(super) waiting: f64,
    pub(super) awaited: f64,
    pub(super) steps: f64,
    pub(super) collectives: f64,
}

/// One rank as it is shown.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) figures: Figures,
    pub(super) rates: Rates,
}

/// Answers of the last seconds.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Oldest first; the first is at least [`WINDOW`] old, if there was one then.
    answers: Vec<(Instant, Document)>,
}

impl History {
    /// Takes an answer. After a restart, from which on the ranks count anew, the former ones are dropped.
    pub(super) fn add(&mut self, at: Instant, document: Document) {
        let is_restarted = self
            .answers
            .last()
            .is_some_and(|(_, last)| last.restarts != document.restarts);
        if is_restarted {
            self.answers.clear();
        }
        self.answers.push((at, document));
        while self
            .answers
            .get(1)
            .is_some_and(|(second, _)| at.duration_since(*second) >= WINDOW)
        {
            self.answers.remove(0);
        }
    }

    pub(super) fn latest(&self) -> Option<&Document> {
        self.answers.last().map(|(_, document)| document)
    }

    /// The ranks, with rates since the oldest answer.
    pub(super) fn rows(&self) -> Vec<Row> {
        let Some((_, oldest)) = self.answers.first() else {
            return Vec::new();
        };
        let before: BTreeMap<u32, &Figures> = oldest.ranks.iter().map(|f| (f.rank, f)).collect();
        let latest = self
            .latest()
            .into_iter()
            .flat_map(|document| &document.ranks);
        latest
            .map(|now| Row {
                rates: match self.answers.len() {
                    // The first answer: rates since the rank began.
                    1 => rates(&Figures::default(), now),
                    _ => before
                        .get(&now.rank)
                        .map_or_else(Rates::default, |before| rates(before, now)),
                },
                figures: now.clone(),
            })
            .collect()
    }
}

/// By the rank's own clock, so that a late report does not count as idle time.
fn rates(before: &Figures, now: &Figures) -> Rates {
    let seconds = now.elapsed_seconds - before.elapsed_seconds;
    if seconds <= 0.0 {
        return Rates::default();
    }
    let share = |get: fn(&Figures) -> f64| ((get(now) - get(before)) / seconds).clamp(0.0, 1.0);
    let rate = |get: fn(&Figures) -> u64| get(now).saturating_sub(get(before)) as f64 / seconds;
    let waiting = share(|f| f.waiting_seconds);
    let communicating = share(|f| f.communicating_seconds).min(1.0 - waiting);
    Rates {
        computing: 1.0 - waiting - communicating,
        communicating,
        waiting,
        awaited: share(|f| f.awaited_seconds),
        steps: rate(|f| f.steps),
        collectives: rate(|f| f.collectives),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(elapsed: f64, waiting: f64, restarts: u64) -> Document {
        Document {
            size: 1,
            restarts,
            ranks: vec![Figures {
                elapsed_seconds: elapsed,
                waiting_seconds: waiting,
                steps: elapsed as u64,
                ..Figures::default()
            }],
            ..Document::default()
        }
    }

    #[test]
    fn rates_are_those_of_the_last_seconds() {
        let (mut history, start) = (History::default(), Instant::now());
        for second in 0..20 {
            let waiting = if second < 10 {
                0.0
            } else {
                f64::from(second - 10) / 2.0
            };
            let at = start + Duration::from_secs(second as u64);
            history.add(at, document(f64::from(second) + 1.0, waiting, 0));
        }
        let rates = history.rows()[0].rates;
        assert!((rates.waiting - 0.5).abs() < 1e-9, "{rates:?}");
        assert!((rates.computing - 0.5).abs() < 1e-9, "{rates:?}");
        assert!((rates.steps - 1.0).abs() < 1e-9, "{rates:?}");
    }

    #[test]
    fn a_restart_begins_anew() {
        let (mut history, start) = (History::default(), Instant::now());
        history.add(start, document(100.0, 90.0, 0));
        history.add(start + WINDOW, document(10.0, 1.0, 1));
        let rates = history.rows()[0].rates;
        assert!((rates.waiting - 0.1).abs() < 1e-9, "{rates:?}");
    }

    #[test]
    fn the_document_of_rank_0_is_read_also_with_more_keys_than_are_shown() {
        let text = r#"{"rank": 0, "size": 2, "restarts": 1, "hosts": [], "ranks": [{"rank": 1, "host": "a",
            "age_seconds": 0.5, "elapsed_seconds": 2.0, "stalls": 3, "operations": {}}], "waiting_for":
            [{"ranks": [1], "waiting": [0], "seconds": 2.5, "operation": "x", "operations": 1, "process_set": 0}]}"#;
        let document: Document = serde_json::from_str(text).expect("a document");
        assert_eq!((document.size, document.ranks[0].stalls), (2, 3));
        assert_eq!(document.waiting_for[0].waiting, [0]);
    }
}

//! The figures of the job at one moment, as they are shown: the document of `hvd.stats()`, which the page shows, too.

use std::sync::Arc;
use std::time::Duration;

use crate::figures::{ByKind, Figure, HOST_FIGURES, HostFigures, RANK_FIGURES, Report, Unit};
use crate::hang::Hang;
use crate::json::Json;
use crate::kinds::{Link, OperationKind};

/// One rank.
#[derive(Clone, Debug)]
pub struct RankRow {
    /// The name of its host.
    pub hostname: Arc<str>,
    /// Time since its report arrived.
    pub age: Duration,
    /// Its figures.
    pub report: Report,
}

/// One host.
#[derive(Clone, Debug)]
pub struct HostRow {
    /// Its name.
    pub hostname: Arc<str>,
    /// Its figures.
    pub figures: HostFigures,
}

/// The job.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The rank that was asked.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Restarts of an elastic job.
    pub restarts: u64,
    /// Ranks that have reported, in ascending order: on rank 0 all, elsewhere only the one that was asked.
    pub ranks: Vec<RankRow>,
    /// Hosts of these, in the order of their first ranks.
    pub hosts: Vec<HostRow>,
    /// On rank 0: ranks that others wait for now, and have waited for a while.
    pub hangs: Vec<Hang>,
}

impl Snapshot {
    pub(crate) fn new(
        rank: u32,
        size: u32,
        restarts: u64,
        ranks: Vec<RankRow>,
        hangs: Vec<Hang>,
    ) -> Self {
        let host = |row: &RankRow| {
            Some(HostRow {
                hostname: row.hostname.clone(),
                figures: row.report.host.clone()?,
            })
        };
        Self {
            rank,
            size,
            restarts,
            hosts: ranks.iter().filter_map(host).collect(),
            ranks,
            hangs,
        }
    }

    /// The document: an object with the keys `rank`, `size`, `restarts`, `ranks`, `hosts` and `waiting_for`.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = Json::default();
        json.object(|json| {
            json.key("rank").whole(u64::from(self.rank));
            json.key("size").whole(u64::from(self.size));
            json.key("restarts").whole(self.restarts);
            json.key("ranks").list(|json| {
                self.ranks.iter().for_each(|row| rank_json(json, row));
            });
            json.key("hosts").list(|json| {
                for row in &self.hosts {
                    json.object(|json| {
                        json.key("host").string(&row.hostname);
                        figures_json(json, HOST_FIGURES, &row.figures);
                    });
                }
            });
            json.key("waiting_for").list(|json| {
                self.hangs.iter().for_each(|hang| hang_json(json, hang));
            });
        });
        json.finish()
    }
}

fn hang_json(json: &mut Json, hang: &Hang) {
    json.object(|json| {
        json.key("ranks").list(|json| {
            for (rank, _) in &hang.missing {
                json.whole(u64::from(*rank));
            }
        });
        json.key("seconds").number(hang.lasts.as_secs_f64());
        json.key("operation").string(&hang.operation);
        json.key("operations").whole(hang.operations as u64);
        json.key("process_set").whole(u64::from(hang.set));
    });
}

fn rank_json(json: &mut Json, row: &RankRow) {
    let report = &row.report;
    json.object(|json| {
        json.key("rank").whole(u64::from(report.rank));
        json.key("host").string(&row.hostname);
        json.key("age_seconds").number(row.age.as_secs_f64());
        figures_json(json, RANK_FIGURES, &report.figures);
        by_kind_json(json.key("operations"), &report.operations);
        by_kind_json(json.key("bytes"), &report.bytes);
    });
}

fn figures_json<T>(json: &mut Json, table: &[Figure<T>], of: &T) {
    for figure in table {
        json.key(figure.key);
        match figure.unit {
            Unit::Seconds => json.number(figure.value(of)),
            Unit::Count | Unit::Bytes => json.whole((figure.get)(of)),
        }
    }
}

/// Only what is not zero.
fn by_kind_json(json: &mut Json, table: &ByKind) {
    json.object(|json| {
        for kind in OperationKind::ALL {
            let row = &table[kind as usize];
            if row.iter().all(|n| *n == 0) {
                continue;
            }
            json.key(kind.name()).object(|json| {
                for link in Link::ALL {
                    let n = row[link as usize];
                    if n > 0 {
                        json.key(link.name()).whole(n);
                    }
                }
            });
        }
    });
}

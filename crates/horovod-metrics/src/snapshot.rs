//! The figures of the job at one moment, as they are shown: the document of `hvd.stats()`, which the page shows, too.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::figures::{ByKind, Figure, HOST_FIGURES, HostFigures, RANK_FIGURES, Report, Unit};
use crate::hang::Hang;
use crate::kinds::{Link, OperationKind};
use crate::slow::Slow;

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
    /// On rank 0: the rank or the host for which the others wait step after step.
    pub slow: Option<Slow>,
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
            slow: None,
        }
    }

    /// The document: an object with the keys `rank`, `size`, `restarts`, `ranks`, `hosts`, `waiting_for` and `slow`.
    #[must_use]
    pub fn to_json(&self) -> String {
        let hosts = self.hosts.iter().map(|row| {
            let mut host = json!({"host": &*row.hostname});
            add_figures(&mut host, HOST_FIGURES, &row.figures);
            host
        });
        let document = json!({
            "rank": self.rank,
            "size": self.size,
            "restarts": self.restarts,
            "ranks": self.ranks.iter().map(rank_json).collect::<Value>(),
            "hosts": hosts.collect::<Value>(),
            "waiting_for": self.hangs.iter().map(hang_json).collect::<Value>(),
            "slow": self.slow.as_ref().map(slow_json),
        });
        document.to_string()
    }
}

fn hang_json(hang: &Hang) -> Value {
    let ranks = hang.missing.iter().map(|(rank, _)| *rank);
    json!({
        "ranks": ranks.collect::<Value>(),
        "waiting": &hang.waiting,
        "seconds": hang.lasts.as_secs_f64(),
        "operation": hang.operation,
        "operations": hang.operations,
        "process_set": hang.set,
    })
}

fn slow_json(slow: &Slow) -> Value {
    json!({
        "ranks": &slow.ranks,
        "host": &*slow.host,
        "lost": slow.lost,
        "explained": slow.explained,
        "steps": slow.steps,
        "cause": slow.cause.name(),
        "text": slow.to_string(),
    })
}

fn rank_json(row: &RankRow) -> Value {
    let report = &row.report;
    let mut rank = json!({
        "rank": report.rank,
        "host": &*row.hostname,
        "age_seconds": row.age.as_secs_f64(),
    });
    add_figures(&mut rank, RANK_FIGURES, &report.figures);
    rank["operations"] = by_kind_json(&report.operations);
    rank["bytes"] = by_kind_json(&report.bytes);
    rank
}

fn add_figures<T>(object: &mut Value, table: &[Figure<T>], of: &T) {
    for figure in table {
        object[figure.key] = match figure.unit {
            Unit::Seconds => figure.value(of).into(),
            Unit::Count | Unit::Bytes => (figure.get)(of).into(),
        };
    }
}

/// Only what is not zero.
fn by_kind_json(table: &ByKind) -> Value {
    let mut kinds = json!({});
    for kind in OperationKind::ALL {
        for link in Link::ALL {
            let n = table[kind as usize][link as usize];
            if n > 0 {
                kinds[kind.name()][link.name()] = n.into();
            }
        }
    }
    kinds
}

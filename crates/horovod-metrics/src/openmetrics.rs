//! The figures as text for Prometheus: OpenMetrics for who asks, and the older text format for node_exporter's files.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, prometheus_text, text};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit as OpenUnit};

use crate::figures::{ByKind, Course, Figure, HOST_FIGURES, RANK_FIGURES, Unit};
use crate::kinds::{Link, OperationKind};
use crate::snapshot::Snapshot;

/// The media type of the OpenMetrics text.
pub(crate) const OPENMETRICS_TYPE: &str =
    "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The OpenMetrics text.
pub(crate) fn openmetrics(snapshot: Snapshot) -> String {
    let mut out = String::new();
    // A String takes everything.
    let _ = text::encode(&mut out, &registry(snapshot));
    out
}

/// The text format of Prometheus before OpenMetrics, which node_exporter's textfile collector reads.
pub(crate) fn prometheus(snapshot: Snapshot) -> String {
    let mut out = String::new();
    let _ = prometheus_text::encode(&mut out, &registry(snapshot));
    out
}

fn registry(snapshot: Snapshot) -> Registry {
    let mut registry = Registry::with_prefix("horovod");
    registry.register_collector(Box::new(snapshot));
    registry
}

type Labels = Vec<(&'static str, String)>;

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        let size = f64::from(self.size);
        one(
            e,
            "ranks",
            "ranks of the job",
            (Course::Gauge, Unit::Count),
            size,
        )?;
        let restarts = self.restarts as f64;
        let help = "restarts of an elastic job";
        one(
            e,
            "restarts",
            help,
            (Course::Counter, Unit::Count),
            restarts,
        )?;
        let age = "time since the rank's last report";
        let ages = self
            .ranks
            .iter()
            .map(|row| (row.labels(), row.age.as_secs_f64()));
        family(e, "report_age", age, (Course::Gauge, Unit::Seconds), ages)?;
        for figure in RANK_FIGURES {
            let of = self
                .ranks
                .iter()
                .map(|row| (row.labels(), figure.value(&row.report.figures)));
            family(
                e,
                stem(figure),
                figure.help,
                (figure.course, figure.unit),
                of,
            )?;
        }
        let operations =
            "operations, each tensor or group, by kind and by the widest link that they cross";
        self.by_kind(e, ("operations", operations, Unit::Count), |row| {
            &row.report.operations
        })?;
        let bytes = "bytes of the rank's tensors, by kind of operation and by the widest link that they cross";
        self.by_kind(e, ("operation", bytes, Unit::Bytes), |row| {
            &row.report.bytes
        })?;
        let lost =
            "share of their time that the other ranks lose by waiting for a slow rank, from 0 to 1";
        let slow = self.slow.iter().flat_map(|slow| {
            slow.ranks.iter().map(move |rank| {
                let labels = vec![("rank", rank.to_string()), ("host", slow.host.to_string())];
                (labels, slow.lost)
            })
        });
        family(
            e,
            "slow_rank_lost_ratio",
            lost,
            (Course::Gauge, Unit::Count),
            slow,
        )?;
        for figure in HOST_FIGURES {
            let of = self.hosts.iter().map(|row| {
                let labels = vec![("host", row.hostname.to_string())];
                (labels, figure.value(&row.figures))
            });
            let name = format!("host_{}", stem(figure));
            family(e, &name, figure.help, (figure.course, figure.unit), of)?;
        }
        Ok(())
    }
}

impl crate::snapshot::RankRow {
    fn labels(&self) -> Labels {
        let rank = self.report.rank.to_string();
        vec![("rank", rank), ("host", self.hostname.to_string())]
    }
}

impl Snapshot {
    fn by_kind(
        &self,
        e: &mut DescriptorEncoder<'_>,
        (name, help, unit): (&str, &str, Unit),
        table: fn(&crate::snapshot::RankRow) -> &ByKind,
    ) -> fmt::Result {
        let all = self.ranks.iter().flat_map(|row| {
            OperationKind::ALL.into_iter().flat_map(move |kind| {
                Link::ALL.into_iter().filter_map(move |link| {
                    let n = table(row)[kind as usize][link as usize];
                    let mut labels = row.labels();
                    labels.push(("kind", kind.name().to_owned()));
                    labels.push(("link", link.name().to_owned()));
                    (n > 0).then_some((labels, n as f64))
                })
            })
        });
        family(e, name, help, (Course::Counter, unit), all)
    }
}

/// The key without the unit, which the encoder adds.
fn stem<T>(figure: &Figure<T>) -> &'static str {
    let unit = match figure.unit {
        Unit::Count => "",
        Unit::Seconds => "_seconds",
        Unit::Bytes => "_bytes",
    };
    figure.key.strip_suffix(unit).unwrap_or(figure.key)
}

fn one(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    kind: (Course, Unit),
    value: f64,
) -> fmt::Result {
    family(e, name, help, kind, [(Labels::new(), value)].into_iter())
}

fn family(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    (course, unit): (Course, Unit),
    values: impl Iterator<Item = (Labels, f64)>,
) -> fmt::Result {
    let unit = match unit {
        Unit::Count => None,
        Unit::Seconds => Some(OpenUnit::Seconds),
        Unit::Bytes => Some(OpenUnit::Bytes),
    };
    let kind = match course {
        Course::Counter => ConstCounter::new(0.0).metric_type(),
        Course::Gauge => ConstGauge::new(0.0).metric_type(),
    };
    let mut encoder = e.encode_descriptor(name, help, unit.as_ref(), kind)?;
    for (labels, value) in values {
        let encoder = encoder.encode_family(&labels)?;
        match course {
            Course::Counter => ConstCounter::new(value).encode(encoder)?,
            Course::Gauge => ConstGauge::new(value).encode(encoder)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::figures::{HostFigures, RankFigures, Report};
    use crate::snapshot::RankRow;

    fn snapshot() -> Snapshot {
        let mut report = Report {
            rank: 3,
            figures: RankFigures {
                waiting: 1_500_000_000,
                memory: 4096,
                last: 7,
                ..RankFigures::default()
            },
            host: Some(HostFigures {
                steal: 2_000_000_000,
                ..HostFigures::default()
            }),
            ..Report::default()
        };
        report.operations[OperationKind::Allreduce as usize][Link::Network as usize] = 9;
        report.bytes[OperationKind::Allreduce as usize][Link::Network as usize] = 72;
        let row = RankRow {
            hostname: Arc::from("a\"b\\c"),
            age: Duration::from_millis(250),
            report,
        };
        Snapshot::new(0, 4, 2, vec![row], Vec::new())
    }

    #[test]
    fn names_types_and_units_follow_the_conventions() {
        let text = openmetrics(snapshot());
        let labels = r#"rank="3",host="a\"b\\c""#;
        for line in [
            "# TYPE horovod_waiting_seconds counter".to_owned(),
            "# UNIT horovod_waiting_seconds seconds".to_owned(),
            format!("horovod_waiting_seconds_total{{{labels}}} 1.5"),
            format!("horovod_memory_bytes{{{labels}}} 4096.0"),
            format!("horovod_came_last_total{{{labels}}} 7.0"),
            format!(r#"horovod_operations_total{{{labels},kind="allreduce",link="network"}} 9.0"#),
            format!(
                r#"horovod_operation_bytes_total{{{labels},kind="allreduce",link="network"}} 72.0"#
            ),
            format!("horovod_report_age_seconds{{{labels}}} 0.25"),
            r#"horovod_host_steal_seconds_total{host="a\"b\\c"} 2.0"#.to_owned(),
            "horovod_ranks 4.0".to_owned(),
            "horovod_restarts_total 2.0".to_owned(),
        ] {
            assert!(
                text.lines().any(|l| l == line),
                "no line {line}\nin\n{text}"
            );
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn the_file_of_node_exporter_has_the_older_format() {
        let text = prometheus(snapshot());
        assert!(
            text.contains("# TYPE horovod_waiting_seconds_total counter\n"),
            "{text}"
        );
        assert!(
            !text.contains("# EOF") && !text.contains("# UNIT"),
            "{text}"
        );
    }
}

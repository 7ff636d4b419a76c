//! Reports of several ranks, from counters to the document.

use horovod_protocol::{Lateness, ProcessSetId, SetKey};
use horovod_transport::testing::Cluster;

use super::*;

/// A rank on each of these hosts.
fn metrics(hosts: &[usize]) -> Vec<Metrics> {
    let meshes = Cluster::new(hosts.len()).hosts(hosts).build();
    let topologies = meshes.iter().map(|mesh| mesh.topology.clone());
    topologies
        .map(|t| Metrics::new(&t, Instant::now()))
        .collect()
}

fn late(awaited_ns: u64, last: u64) -> Vec<SetLateness> {
    let set = SetKey(0);
    let lateness = Lateness { awaited_ns, last };
    vec![SetLateness { set, lateness }]
}

fn from_driver(awaited_ns: u64) -> DriverFigures {
    DriverFigures {
        queued: 2,
        cache_hits: 30,
        cache_misses: 4,
        lateness: late(awaited_ns, 1),
        incomplete: Vec::new(),
    }
}

fn found(child: Rank, of_child: Vec<SetLateness>) -> FoundLateness<fn(Rank) -> Vec<SetLateness>> {
    FoundLateness {
        child,
        of_child,
        compared: vec![SetKey(0)],
        behind: |_| Vec::new(),
    }
}

#[test]
fn rank_0_shows_all_ranks_and_others_show_themselves() {
    let all = metrics(&[0, 0, 1]);
    let mut bytes = Vec::new();
    // No rank is awaited for longer than the job has run.
    let now = 6_000_000_000;
    for metrics in &all[1..] {
        metrics.report(now, from_driver(0));
        metrics.write_message(&mut bytes, Round::Periodic);
        let found = found(metrics.me, late(9_000_000_000, 6));
        assert_eq!(all[0].take_message(&bytes, &found), Ok(false));
    }
    all[0].report(now, from_driver(1_000_000_000));
    let document: serde_json::Value =
        serde_json::from_str(&all[0].snapshot().to_json()).expect("a JSON document");
    let ranks = document["ranks"].as_array().expect("a list");
    let awaited: Vec<_> = ranks
        .iter()
        .map(|r| r["awaited_seconds"].as_f64())
        .collect();
    let elapsed = ranks[1]["elapsed_seconds"].as_f64();
    assert!(elapsed.is_some_and(|elapsed| elapsed > 5.9));
    assert_eq!(awaited, [Some(1.0), elapsed, elapsed]);
    assert_eq!(ranks[1]["cache_hits"], 30);
    assert_eq!(ranks[2]["came_last"], 6);
    // The first rank of each host reads the host's figures.
    assert_eq!(document["hosts"].as_array().map(Vec::len), Some(2));
    let own = all[1].snapshot();
    assert_eq!(own.ranks.len(), 1);
    assert_eq!(own.ranks[0].report.rank, 1);
}

#[test]
fn a_report_is_due_once_a_second() {
    let all = metrics(&[0]);
    assert!(all[0].is_due(0));
    all[0].report(10, DriverFigures::default());
    assert!(!all[0].is_due(REPORT_PERIOD_NS));
    assert!(all[0].is_due(10 + REPORT_PERIOD_NS));
}

#[test]
fn last_reports_from_below_are_passed_on_once_this_rank_has_sent_its_last() {
    let all = metrics(&[0, 0]);
    let mut bytes = Vec::new();
    all[1].report(1, DriverFigures::default());
    all[1].write_message(&mut bytes, Round::Last);
    let taken = all[0].take_message(&bytes, &found(Rank(1), Vec::new()));
    assert_eq!(taken, Ok(false), "this rank will report again");
    all[0].write_message(&mut Vec::new(), Round::Last);
    let taken = all[0].take_message(&bytes, &found(Rank(1), Vec::new()));
    assert_eq!(taken, Ok(true));
}

#[test]
fn the_link_is_that_of_the_members() {
    let all = metrics(&[0, 0, 1]);
    assert_eq!(all[0].link(&[Rank(0), Rank(1)]), Link::Host);
    assert_eq!(all[0].link(&[Rank(1), Rank(2)]), Link::Network);
}

#[test]
fn the_document_names_only_kinds_that_have_run() {
    let all = metrics(&[0]);
    all[0]
        .counters
        .executed(OperationKind::Alltoall, Link::Host, 2, 64);
    let document: serde_json::Value =
        serde_json::from_str(&all[0].snapshot().to_json()).expect("a JSON document");
    let rank = &document["ranks"][0];
    assert_eq!(
        rank["operations"],
        serde_json::json!({"alltoall": {"host": 2}})
    );
    assert_eq!(rank["bytes"], serde_json::json!({"alltoall": {"host": 64}}));
}

#[test]
fn the_documentation_explains_every_figure() {
    // Without the marks of code.
    let page = include_str!(concat!("../../../docs/", "watching.md")).replace('`', "");
    let ranks = RANK_FIGURES.iter().map(|f| (f.key, f.help));
    for (key, help) in ranks.chain(HOST_FIGURES.iter().map(|f| (f.key, f.help))) {
        let row = format!("| {key} | {help} |");
        assert!(
            page.lines().any(|line| line == row),
            "the page on watching a job lacks: {row}"
        );
    }
}

#[test]
fn the_document_names_the_ranks_that_are_waited_for() {
    let all = metrics(&[0, 0]);
    let incomplete = vec![StalledRequest {
        set: ProcessSetId(0),
        name: "grad/7".into(),
        waiting: vec![Rank(0)],
        missing: vec![Rank(1)],
        waited_ns: 3_000_000_000,
    }];
    let figures = DriverFigures {
        incomplete,
        ..DriverFigures::default()
    };
    all[0].report(1, figures);
    let document: serde_json::Value =
        serde_json::from_str(&all[0].snapshot().to_json()).expect("a JSON document");
    let hang = &document["waiting_for"][0];
    assert_eq!(hang["ranks"], serde_json::json!([1]));
    assert_eq!(
        (&hang["operation"], &hang["operations"]),
        (&"grad/7".into(), &1.into())
    );
    assert!(hang["seconds"].as_f64().is_some_and(|s| s >= 3.0), "{hang}");
    all[0].report(2, DriverFigures::default());
    assert!(all[0].snapshot().hangs.is_empty());
}

#[test]
fn waits_and_executions_count_until_they_are_dropped() {
    let metrics = Arc::new(metrics(&[0]).remove(0));
    let is_counted = |metrics: &Metrics| {
        let times = metrics.counters.clock.read(metrics.now() + (1 << 30));
        (times.waiting > 0, times.communicating > 0)
    };
    let wait = metrics.call();
    let execution = metrics.execution();
    drop(wait);
    drop(execution);
    let fresh = Metrics::new(&Cluster::new(1).build().remove(0).topology, Instant::now());
    assert_eq!(is_counted(&fresh), (false, false));
    let wait = fresh.wait();
    assert!(is_counted(&fresh).0);
    drop(wait);
    let before = metrics.counters.clock.read(metrics.now());
    let after = metrics.counters.clock.read(metrics.now() + (1 << 30));
    assert_eq!(before.waiting, after.waiting, "nothing waits any more");
    assert_eq!(before.communicating, after.communicating);
}

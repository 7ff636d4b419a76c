//! Tests of the tracks that a reader of the file finds.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::Value;

use super::super::report::{Item, ReportedResult};
use super::super::temporary::TempFile;
use super::*;

fn cast(size: u32) -> Cast {
    let member = |rank| Member {
        hostname: format!("host\"{rank}").into(),
        pid: 100 + rank,
    };
    Cast {
        ranks: (0..size).map(member).collect(),
        epoch_micros: 1_700_000_000_000_000,
    }
}

fn read(file: &TempFile) -> Vec<Value> {
    let text = std::fs::read(file.path()).unwrap();
    match serde_json::from_slice(&text) {
        Ok(Value::Array(events)) => events,
        other => panic!("{other:?}"),
    }
}

/// `rank`'s report of an allreduce of these tensors that ran at `at`.
fn report(seq: u64, names: &[&str], ready: u64, at: u64, describes: bool) -> Report {
    let item = |name: &&str| Item {
        name: Text::Shared((*name).into()),
        submitted: Some(Stamp {
            at: ready,
            thread: 11,
        }),
        result: describes.then_some(ReportedResult {
            dtype: Text::Static("float32"),
            shape: Text::Static("[2, 3]"),
            bytes: 24,
        }),
    };
    let stage = |name, begin, end| StageReport {
        name: Text::Static(name),
        begin,
        end,
    };
    Report {
        seq,
        set: ProcessSetId::GLOBAL,
        members: None,
        op: Text::Static("ALLREDUCE"),
        thread: 12,
        scheduled: at,
        begin: at + 5_000,
        end: at + 50_000,
        bytes: 24 * names.len() as u64,
        stages: vec![
            stage("HIERARCHICAL_ALLREDUCE", at + 6_000, at + 49_000),
            stage("REDUCE_INSIDE_HOST", at + 6_000, at + 20_000),
            stage("REDUCE_ACROSS_HOSTS", at + 20_000, at + 40_000),
        ],
        items: names.iter().map(item).collect(),
    }
}

fn pid_of(events: &[Value], name: &str) -> u64 {
    let found = events
        .iter()
        .find(|e| e["name"] == "process_name" && e["args"]["name"] == name);
    found.unwrap_or_else(|| panic!("no track {name}"))["pid"]
        .as_u64()
        .unwrap()
}

/// Spans on the track of a tensor, in the order of the file.
fn on_track(events: &[Value], name: &str) -> Vec<(String, String, f64)> {
    let pid = pid_of(events, name);
    events
        .iter()
        .filter(|e| e["pid"] == pid && e["ph"] != "M")
        .map(|e| {
            (
                e["ph"].as_str().unwrap().to_owned(),
                e["name"].as_str().unwrap_or("").to_owned(),
                e["ts"].as_f64().unwrap(),
            )
        })
        .collect()
}

#[test]
fn a_tensors_track_shows_its_life_as_horovod_writes_it() {
    let file = TempFile::new();
    let mut layout = Layout::create(file.path(), cast(2)).unwrap();
    let mine = report(1, &["grad"], 40_000, 100_000, true);
    let other = report(1, &["grad"], 70_000, 101_000, false);
    layout.event(Rank(0), Event::Report(mine), 0).unwrap();
    layout
        .event(Rank(1), Event::Report(other), -10_000)
        .unwrap();
    layout.close().unwrap();

    let events = read(&file);
    assert_eq!(
        events[0],
        serde_json::json!({"name": "process_name", "ph": "M", "pid": 0,
            "args": {"start_time_since_epoch_in_micros": 1_700_000_000_000_000_u64}})
    );
    assert_eq!(events[1]["name"], "process_sort_index");
    let want: Vec<(&str, &str, f64)> = vec![
        ("B", "NEGOTIATE_ALLREDUCE", 40.0),
        ("X", "0", 40.0),
        ("X", "1", 60.0),
        ("E", "", 100.0),
        ("B", "ALLREDUCE", 100.0),
        ("B", "QUEUE", 100.0),
        ("E", "", 105.0),
        ("B", "HIERARCHICAL_ALLREDUCE", 106.0),
        ("B", "REDUCE_INSIDE_HOST", 106.0),
        ("E", "", 120.0),
        ("B", "REDUCE_ACROSS_HOSTS", 120.0),
        ("E", "", 140.0),
        ("E", "", 149.0),
        ("E", "", 150.0),
    ];
    let want: Vec<_> = want
        .into_iter()
        .map(|(p, n, t)| (p.to_owned(), n.to_owned(), t))
        .collect();
    assert_eq!(on_track(&events, "grad"), want);
    let pid = pid_of(&events, "grad");
    let last = events
        .iter()
        .rfind(|e| e["pid"] == pid && e["ph"] == "E")
        .unwrap();
    assert_eq!(
        last["args"],
        serde_json::json!({"dtype": "float32", "shape": "[2, 3]", "bytes": 24,
            "algorithm": "HIERARCHICAL_ALLREDUCE", "fused_tensors": 1, "seq": 1})
    );
}

#[test]
fn every_rank_has_a_process_with_its_threads() {
    let file = TempFile::new();
    let mut layout = Layout::create(file.path(), cast(3)).unwrap();
    for rank in 0..3 {
        let event = Event::Report(report(1, &["a", "b"], 10, 100, rank == 0));
        layout.thread(Rank(rank), 12, "horovod-engine").unwrap();
        layout.thread(Rank(rank), 12, "horovod-engine").unwrap();
        layout.event(Rank(rank), event, 0).unwrap();
    }
    layout.close().unwrap();

    let events = read(&file);
    for rank in 0..3 {
        let pid = pid_of(&events, &format!("rank {rank} on host\"{rank}"));
        let of = |ph: &str, name: &str| {
            let same = |e: &&Value| e["pid"] == pid && e["ph"] == ph && e["name"] == name;
            events.iter().filter(same).count()
        };
        assert_eq!(of("M", "thread_name"), 1);
        assert_eq!(of("X", "ALLREDUCE"), 1);
        assert_eq!(of("i", "a"), 1);
        let operation = events
            .iter()
            .find(|e| e["pid"] == pid && e["name"] == "ALLREDUCE")
            .unwrap();
        assert_eq!(operation["args"]["tensors"], 2);
        assert_eq!(operation["args"]["bytes"], 48);
        assert_eq!(operation["args"]["names"], "a, b");
    }
}

#[test]
fn what_some_ranks_never_tell_is_written_at_the_end() {
    let file = TempFile::new();
    let mut layout = Layout::create(file.path(), cast(2)).unwrap();
    let event = Event::Report(report(1, &["grad"], 10, 100, true));
    layout.event(Rank(0), event, 0).unwrap();
    layout.flush().unwrap();
    let shown = |events: &[Value]| events.iter().any(|e| e["name"] == "NEGOTIATE_ALLREDUCE");
    assert!(!shown(&read(&file)));
    layout.close().unwrap();
    assert!(shown(&read(&file)));
}

#[test]
fn what_waits_for_others_is_bounded() {
    let file = TempFile::new();
    let mut layout = Layout::create(file.path(), cast(2)).unwrap();
    let names: Vec<String> = (0..4096).map(|i| format!("t{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for seq in 0..=(WAITING_ITEMS_MAX / 4096) as u64 {
        let event = Event::Report(report(seq, &names, 10, 100 * seq, true));
        layout.event(Rank(0), event, 0).unwrap();
        assert!(layout.waiting_items <= WAITING_ITEMS_MAX);
    }
    assert!(!layout.waiting.contains_key(&0));
    assert!(layout.waiting.contains_key(&1));
}

#[test]
fn a_set_without_rank_0_has_tracks_of_its_own() {
    let file = TempFile::new();
    let mut layout = Layout::create(file.path(), cast(3)).unwrap();
    for rank in [1, 2] {
        let mut part = report(1, &["grad"], 10_000 * u64::from(rank), 100_000, rank == 1);
        part.set = ProcessSetId(7);
        part.members = Some([Rank(1), Rank(2)].into());
        layout.event(Rank(rank), Event::Report(part), 0).unwrap();
    }
    let mut global = report(2, &["grad"], 1, 2, true);
    global.members = Some([Rank(0)].into());
    layout.event(Rank(0), Event::Report(global), 0).unwrap();
    layout.close().unwrap();

    let events = read(&file);
    let track = on_track(&events, "grad (process set 7)");
    // By their numbers in the set.
    assert_eq!(track[1].1, "0");
    assert_eq!(track[2].1, "1");
    assert_ne!(
        pid_of(&events, "grad"),
        pid_of(&events, "grad (process set 7)")
    );
}

#[test]
fn dropped_events_cycles_and_clocks_are_told() {
    let file = TempFile::new();
    let mut layout = Layout::create(file.path(), cast(2)).unwrap();
    layout.dropped(Rank(1), 42, 5_000).unwrap();
    layout.cycle(7_000).unwrap();
    layout.clock(Rank(1), -3, 900).unwrap();
    layout.close().unwrap();
    let events = read(&file);
    let named = |name: &str| events.iter().find(|e| e["name"] == name).unwrap();
    assert_eq!(named("EVENTS_DROPPED")["args"]["count"], 42);
    assert_eq!(
        *named("CYCLE_START"),
        serde_json::json!({"ph": "i", "name": "CYCLE_START", "ts": 7.0, "s": "g"})
    );
    assert_eq!(named("clock_of_rank")["args"]["error_at_most_ns"], 900);
}

proptest! {
    /// Whatever the clocks say: per track, beginnings and ends match, and times do not go back.
    #[test]
    fn tracks_of_tensors_nest_whatever_the_clocks_say(
        runs in proptest::collection::vec((0u64..300_000, 0u64..300_000, 0u64..300_000, -100_000i64..100_000), 1..20),
    ) {
        let file = TempFile::new();
        let mut layout = Layout::create(file.path(), cast(2)).unwrap();
        for (seq, (ready, other, at, shift)) in runs.into_iter().enumerate() {
            let seq = seq as u64;
            let mine = report(seq, &["x\n\"", "y"], ready, at, true);
            let other = report(seq, &["x\n\"", "y"], other, at, false);
            layout.event(Rank(1), Event::Report(other), shift).unwrap();
            layout.event(Rank(0), Event::Report(mine), 0).unwrap();
        }
        layout.close().unwrap();
        let mut open: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        let mut last: BTreeMap<u64, f64> = BTreeMap::new();
        for event in read(&file) {
            let Some(pid) = event["pid"].as_u64().filter(|p| (1..RANK_PIDS).contains(p)) else { continue };
            let Some(ts) = event["ts"].as_f64() else { continue };
            let before = last.insert(pid, ts).unwrap_or(0.0);
            prop_assert!(ts >= before, "{event}: after {before}");
            match event["ph"].as_str() {
                Some("B") => open.entry(pid).or_default().push(ts),
                Some("E") => prop_assert!(open.entry(pid).or_default().pop().is_some()),
                _ => {}
            }
        }
        prop_assert!(open.values().all(Vec::is_empty));
    }
}

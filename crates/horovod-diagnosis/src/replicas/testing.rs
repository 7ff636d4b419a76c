//! Reports of parameters in which other ranks say anything, for fuzzing.

use horovod_protocol::{ProcessSetId, Rank};

use super::{Collector, PARAMETER_NAME_MAX, Report, SUMS_MAX, is_message};
use crate::testing::prefixed;

const SIZE: u32 = 4;
/// More than any text about so few ranks.
const TEXT_BYTES_MAX: usize = 1 << 16;

/// Reports of ranks in turns, each with its length in front: they are bounded, survive being written and read again, and
/// whatever they say becomes a bounded text.
///
/// # Panics
/// If not.
pub fn replica_report(bytes: &[u8]) {
    let members: Vec<Rank> = (0..SIZE).map(Rank).collect();
    let mut collector = Collector::default();
    let mut plan = bytes;
    for from in members.iter().cycle() {
        let [length, rest @ ..] = plan else { return };
        let (message, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        plan = rest;
        let Ok(report) = Report::decode(message) else {
            continue;
        };
        assert!(is_message(message));
        assert_eq!(Report::decode(&report.encode()), Ok(report.clone()));
        assert!(report.sums.len() <= SUMS_MAX && report.names.len() <= report.sums.len());
        assert!(report.names.iter().all(|n| n.len() <= PARAMETER_NAME_MAX));
        if let Some(finding) = collector.add(*from, report, &members) {
            assert!(finding.by().0 < SIZE);
            assert!(finding.text().len() < TEXT_BYTES_MAX);
        }
    }
}

/// Valid inputs of [`replica_report`]: all ranks hold the same, one differs, others have more parameters.
pub fn replica_report_seeds() -> Vec<Vec<u8>> {
    let report = |sums: &[u64], has_names: bool| Report {
        set: ProcessSetId::GLOBAL,
        key: 7,
        number: 2,
        total: sums.len() as u64,
        sums: sums.to_vec(),
        names: match has_names {
            true => sums.iter().map(|sum| format!("w{sum}")).collect(),
            false => Vec::new(),
        },
        advice: "Broadcast(…)".into(),
    };
    let differs: [&[u64]; 3] = [&[1, 2], &[1, 3], &[1, 2, 3]];
    let seed = |other: &&[u64]| {
        let of_rank = |rank| report(if rank == 2 { other } else { &[1, 2] }, rank == 0);
        let messages = (0..SIZE).map(|rank| of_rank(rank).encode());
        messages.flat_map(prefixed).collect()
    };
    differs.iter().map(seed).collect()
}

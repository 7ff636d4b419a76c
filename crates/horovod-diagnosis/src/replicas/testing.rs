//! Reports of parameters in which other ranks say anything, for fuzzing.

use horovod_protocol::Rank;

use super::{Collector, PARAMETER_NAME_MAX, Report, SUMS_MAX, is_message};

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

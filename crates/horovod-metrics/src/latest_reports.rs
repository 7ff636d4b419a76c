//! The latest reports of this rank and of those that report through it, and the messages in which they travel.

use std::time::Instant;

use horovod_protocol::wire::{Reader, Writer};
use horovod_protocol::{DecodeError, Lateness, Rank};

use crate::figures::{RankFigures, Report};

/// The first byte of a message with reports; no other out-of-band message begins with it.
const REPORTS: u8 = 0xC0;
/// Reports of one message, which then fits a frame of the control plane.
const REPORTS_MAX: usize = 16 << 10;
const _: () = assert!(REPORTS_MAX * Report::BYTES_MAX + 16 < horovod_protocol::MESSAGE_BYTES_MAX);

/// Whether this out-of-band message carries reports.
#[must_use]
pub fn is_message(bytes: &[u8]) -> bool {
    bytes.first() == Some(&REPORTS)
}

/// Whether a rank reports again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// In a second.
    Periodic,
    /// Never: it leaves the job.
    Last,
}

/// The report of a rank, with the time of its arrival here.
#[derive(Clone, Debug)]
pub(crate) struct Latest {
    /// The report.
    pub(crate) report: Report,
    /// The arrival.
    pub(crate) at: Instant,
}

/// The latest reports.
#[derive(Debug)]
pub(crate) struct LatestReports {
    /// By rank; of this rank and those below it.
    latest: Vec<Option<Latest>>,
    /// This rank reports no more, so what comes is passed on at once.
    is_closing: bool,
}

impl LatestReports {
    /// For a job of so many ranks.
    pub(crate) fn new(size: u32) -> Self {
        Self {
            latest: vec![None; size as usize],
            is_closing: false,
        }
    }

    /// All reports, by rank.
    pub(crate) fn latest(&self) -> impl Iterator<Item = &Latest> {
        self.latest.iter().flatten()
    }

    pub(crate) fn close(&mut self) {
        self.is_closing = true;
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing
    }

    /// Puts a report in the place of its rank's last one.
    pub(crate) fn put(&mut self, mut report: Report) {
        let at = Instant::now();
        let Some(place) = self.latest.get_mut(report.rank as usize) else {
            return;
        };
        if let Some(before) = place {
            let former = &before.report;
            report.figures.keep_from_falling(&former.figures);
            if let (Some(host), Some(former)) = (&mut report.host, &former.host) {
                host.keep_from_falling(former);
            }
        }
        *place = Some(Latest { report, at });
    }

    /// A child's message. The lateness that the child has found of the ranks below it is scaled to the lateness that
    /// this rank has found of the child as a whole. `behind` is what it knows of single ranks besides.
    pub(crate) fn take(
        &mut self,
        bytes: &[u8],
        child: Lateness,
        behind: impl Fn(Rank) -> Lateness,
    ) -> Result<Round, DecodeError> {
        let (round, mut reports) = decode(bytes, self.latest.len() as u32)?;
        attribute(&mut reports, child.awaited_ns, child.last);
        for report in &mut reports {
            let known = behind(Rank(report.rank));
            report.figures.awaited += known.awaited_ns;
            report.figures.last += known.last;
        }
        reports.into_iter().for_each(|report| self.put(report));
        Ok(round)
    }

    /// The message for the parent, in the memory of `out`.
    pub(crate) fn write(&self, out: &mut Vec<u8>, round: Round) {
        out.clear();
        let count = self.latest().count().min(REPORTS_MAX);
        let mut w = Writer::new(out);
        w.u8(REPORTS);
        w.u8(u8::from(round == Round::Last));
        w.varint(count as u64);
        for latest in self.latest().take(count) {
            latest.report.write(&mut w);
        }
    }
}

/// Divides the lateness of a child among the ranks that speak through it, in the proportion that they have found.
fn attribute(reports: &mut [Report], awaited_ns: u64, last: u64) {
    let sum = |get: fn(&RankFigures) -> u64, reports: &[Report]| -> u64 {
        let all = reports.iter().map(|report| get(&report.figures));
        all.fold(0, u64::saturating_add)
    };
    let of = |part: u64, all: u64, whole: u64| {
        u64::try_from(u128::from(part) * u128::from(whole) / u128::from(all.max(1)))
            .unwrap_or(u64::MAX)
    };
    let awaited = sum(|f| f.awaited, reports);
    let lasts = sum(|f| f.last, reports);
    for report in &mut *reports {
        let figures = &mut report.figures;
        figures.awaited = of(figures.awaited, awaited, awaited_ns);
        figures.last = of(figures.last, lasts, last);
    }
    if let [one] = reports {
        one.figures.awaited = awaited_ns;
        one.figures.last = last;
    }
}

/// The reports of a message.
pub(crate) fn decode(bytes: &[u8], size: u32) -> Result<(Round, Vec<Report>), DecodeError> {
    let mut r = Reader::new(bytes);
    let tag = r.u8("kind of message")?;
    if tag != REPORTS {
        return Err(DecodeError::BadValue {
            what: "kind of message",
            value: u64::from(tag),
        });
    }
    let round = match r.u8("round")? {
        0 => Round::Periodic,
        1 => Round::Last,
        value => {
            return Err(DecodeError::BadValue {
                what: "round",
                value: u64::from(value),
            });
        }
    };
    let count = r.count(REPORTS_MAX, 1, "reports")?;
    let mut reports = Vec::new();
    for _ in 0..count {
        reports.push(Report::read(&mut r, size)?);
    }
    r.finish()?;
    Ok((round, reports))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::figures::HostFigures;

    fn report(rank: u32, awaited: u64) -> Report {
        let figures = RankFigures {
            awaited,
            last: awaited / 10,
            waiting: 7,
            ..RankFigures::default()
        };
        Report {
            rank,
            figures,
            ..Report::default()
        }
    }

    fn late(awaited_ns: u64, last: u64) -> Lateness {
        Lateness { awaited_ns, last }
    }

    #[test]
    fn what_is_known_of_a_rank_is_added() {
        let mut below = LatestReports::new(4);
        below.put(report(2, 0));
        below.put(report(3, 0));
        let mut bytes = Vec::new();
        below.write(&mut bytes, Round::Periodic);
        let mut reports = LatestReports::new(4);
        let behind = |rank: Rank| {
            if rank == Rank(3) {
                late(500, 2)
            } else {
                late(0, 0)
            }
        };
        reports.take(&bytes, late(0, 0), behind).expect("readable");
        let awaited: Vec<_> = reports.latest().map(|l| l.report.figures.awaited).collect();
        assert_eq!(awaited, [0, 500]);
    }

    #[test]
    fn reports_travel_whole() {
        let mut reports = LatestReports::new(4);
        let mut with_host = report(2, 30);
        with_host.operations[0][1] = 5;
        with_host.bytes[3][2] = u64::MAX;
        with_host.host = Some(HostFigures {
            steal: 9,
            ..HostFigures::default()
        });
        reports.put(report(0, 0));
        reports.put(with_host.clone());
        let mut bytes = Vec::new();
        reports.write(&mut bytes, Round::Last);
        assert!(is_message(&bytes));
        let (round, reports) = decode(&bytes, 4).expect("readable");
        assert_eq!(round, Round::Last);
        assert_eq!(reports, [report(0, 0), with_host]);
    }

    #[test]
    fn the_lateness_of_a_subtree_is_divided_among_its_ranks() {
        let mut below = LatestReports::new(4);
        below.put(report(2, 300));
        below.put(report(3, 100));
        let mut bytes = Vec::new();
        below.write(&mut bytes, Round::Periodic);
        let mut reports = LatestReports::new(4);
        reports
            .take(&bytes, late(40, 8), |_| Lateness::default())
            .expect("readable");
        let found: Vec<_> = reports
            .latest()
            .map(|l| {
                (
                    l.report.rank,
                    l.report.figures.awaited,
                    l.report.figures.last,
                )
            })
            .collect();
        assert_eq!(found, [(2, 30, 6), (3, 10, 2)]);
    }

    #[test]
    fn a_child_without_ranks_below_has_all_of_its_lateness() {
        let mut below = LatestReports::new(2);
        below.put(report(1, 0));
        let mut bytes = Vec::new();
        below.write(&mut bytes, Round::Periodic);
        let mut reports = LatestReports::new(2);
        reports
            .take(&bytes, late(40, 8), |_| Lateness::default())
            .expect("readable");
        let figures = &reports.latest().next().expect("it is there").report.figures;
        assert_eq!((figures.awaited, figures.last, figures.waiting), (40, 8, 7));
    }

    #[test]
    fn counters_never_fall_and_gauges_may() {
        let mut reports = LatestReports::new(1);
        let mut first = report(0, 5);
        first.figures.memory = 100;
        reports.put(first);
        reports.put(report(0, 3));
        let figures = &reports.latest().next().expect("it is there").report.figures;
        assert_eq!((figures.awaited, figures.memory), (5, 0));
    }

    #[test]
    fn a_rank_that_the_job_does_not_have_is_refused() {
        let mut reports = LatestReports::new(9);
        reports.put(report(8, 0));
        let mut bytes = Vec::new();
        reports.write(&mut bytes, Round::Periodic);
        assert!(decode(&bytes, 8).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() { *first = REPORTS; }
            if let Ok((_, reports)) = decode(&bytes, 8) {
                prop_assert!(reports.iter().all(|report| report.rank < 8));
            }
        }
    }
}

//! The latest reports of this rank and of those that report through it, and the messages in which they travel.

use std::time::{Duration, Instant};

use horovod_protocol::wire::{Reader, Writer};
use horovod_protocol::{DecodeError, Lateness, Rank, SetKey, SetLateness};

use crate::figures::Report;

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

/// The lateness that a node of the tree has found of one of its children.
#[derive(Debug)]
pub struct FoundLateness<F> {
    /// The child.
    pub child: Rank,
    /// Of the child as a whole.
    pub of_child: Vec<SetLateness>,
    /// The sets in which the node has compared its children.
    pub compared: Vec<SetKey>,
    /// Of a rank behind the child, beside `of_child`.
    pub behind: F,
}

/// The report of a rank, with the time of its arrival here.
#[derive(Clone, Debug)]
pub(crate) struct Latest {
    /// The report.
    pub(crate) report: Report,
    /// The arrival.
    at: Instant,
}

impl Latest {
    /// Time since the rank has taken the report, as far as it was at a rank.
    pub(crate) fn age(&self) -> Duration {
        self.report.age.saturating_add(self.at.elapsed())
    }
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
        report.sum_late();
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

    /// A child's message. The child has found the lateness of each rank below it; this rank has found that of the child
    /// as a whole. In each process set in which this rank has compared its children, the former is scaled to the
    /// latter. All members of the other sets are behind that child, so what it has found stays.
    pub(crate) fn take<F: Fn(Rank) -> Vec<SetLateness>>(
        &mut self,
        bytes: &[u8],
        found: &FoundLateness<F>,
    ) -> Result<Round, DecodeError> {
        let (round, mut reports) = decode(bytes, self.latest.len() as u32)?;
        // A child that does not measure passes on what others have sent, and has found nothing to compare.
        if reports.iter().any(|report| report.rank == found.child.0) {
            for set in &found.compared {
                let of_child = found.of_child.iter().find(|of| of.set == *set);
                let whole = of_child.map_or_else(Lateness::default, |of| of.lateness);
                attribute(&mut reports, *set, whole);
            }
        }
        for report in &mut reports {
            report.add_late(&(found.behind)(Rank(report.rank)));
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
            latest.report.write(latest.age(), &mut w);
        }
    }
}

/// Divides the lateness of a child in a set among the ranks that speak through it, in the proportion that they have found.
fn attribute(reports: &mut [Report], set: SetKey, whole: Lateness) {
    if let [one] = reports {
        one.late.retain(|of| of.set != set);
        one.add_late(&[SetLateness {
            set,
            lateness: whole,
        }]);
        return;
    }
    let parts = || {
        reports
            .iter()
            .flat_map(|r| &r.late)
            .filter(|of| of.set == set)
    };
    let sum = |get: fn(&Lateness) -> u64| {
        let all = parts().map(|of| get(&of.lateness));
        all.fold(0, u64::saturating_add)
    };
    let (awaited, last) = (sum(|l| l.awaited_ns), sum(|l| l.last));
    let share = |part: u64, all: u64, whole: u64| {
        u64::try_from(u128::from(part) * u128::from(whole) / u128::from(all.max(1)))
            .unwrap_or(u64::MAX)
    };
    let parts = reports.iter_mut().flat_map(|r| &mut r.late);
    for of in parts.filter(|of| of.set == set) {
        let lateness = &mut of.lateness;
        lateness.awaited_ns = share(lateness.awaited_ns, awaited, whole.awaited_ns);
        lateness.last = share(lateness.last, last, whole.last);
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
mod tests;

//! Whether the ranks begin to train with the same parameters: what each reports, once per optimizer and generation, and
//! what rank 0 finds in the reports.
//!
//! A report is an out-of-band message to rank 0. No rank waits for another: a comparison to which a rank never reports,
//! because that rank has joined or has another optimizer, is never concluded.

mod collector;
#[cfg(feature = "testing")]
pub(crate) mod harness;
mod message;
mod words;

use std::collections::BTreeMap;

use horovod_protocol::ProcessSetId;

pub(crate) use collector::Collector;
pub(crate) use message::{Report, is_message};
pub(crate) use words::Finding;

/// Parameters with a checksum of their own; the last checksum of a report is that of all further ones.
pub(crate) const SUMS_MAX: usize = 4096;
/// Bytes of the name of a parameter; more are cut.
pub(crate) const PARAMETER_NAME_MAX: usize = 256;
/// Bytes of the advice; more are cut.
pub(crate) const ADVICE_MAX: usize = 512;
/// Optimizers of a generation that are reported.
const OPTIMIZERS_MAX: usize = 4096;

/// What a rank holds of the parameters of one optimizer. All ranks list the same parameters in the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replica {
    /// A digest of names, shapes and types: reports with the same one are compared.
    pub key: u64,
    /// One for each checksum.
    pub names: Vec<String>,
    /// Of each parameter.
    pub sums: Vec<u64>,
    /// How to make the ranks equal.
    pub advice: String,
}

/// Counts the reports of this rank: those of the same number are compared.
#[derive(Debug, Default)]
pub(crate) struct Numbers(BTreeMap<(ProcessSetId, u64), u32>);

impl Numbers {
    /// Whether there was a report.
    pub(crate) fn has(&self, set: ProcessSetId, key: u64) -> bool {
        self.0.contains_key(&(set, key))
    }

    /// The report of a replica; `None` if this rank has reported too many. Names and advice are said by one rank of the
    /// set.
    pub(crate) fn report(
        &mut self,
        set: ProcessSetId,
        replica: Replica,
        says_names: bool,
    ) -> Option<Report> {
        let key = (set, replica.key);
        if self.0.len() >= OPTIMIZERS_MAX && !self.0.contains_key(&key) {
            return None;
        }
        let number = self.0.entry(key).or_default();
        let report = Report::new(set, *number, replica, says_names);
        *number += 1;
        Some(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_numbered_by_set_and_key_and_bounded() {
        let mut numbers = Numbers::default();
        let mut number = |set, key| {
            let replica = Replica {
                key,
                ..Replica::default()
            };
            let report = numbers.report(ProcessSetId(set), replica, false);
            report.map(|report| report.number)
        };
        let said = [number(0, 7), number(0, 7), number(1, 7), number(0, 8)];
        assert_eq!(said, [Some(0), Some(1), Some(0), Some(0)]);
        for key in 0..OPTIMIZERS_MAX as u64 {
            number(2, key);
        }
        assert_eq!((number(3, 1), number(0, 7)), (None, Some(2)));
    }
}

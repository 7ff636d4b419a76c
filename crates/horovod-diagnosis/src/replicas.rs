//! Whether the ranks begin to train with the same parameters: what each reports, once per optimizer and generation, and
//! what rank 0 finds in the reports.
//!
//! A report is an out-of-band message to rank 0. No rank waits for another: a comparison to which a rank never reports,
//! because that rank has joined or has another optimizer, is never concluded.

mod collector;
mod message;
#[cfg(feature = "testing")]
pub(crate) mod testing;
mod words;

use std::collections::BTreeMap;

use horovod_protocol::ProcessSetId;

pub use collector::Collector;
pub use message::{Report, is_message};
pub use words::Finding;

/// Parameters with a checksum of their own; the last checksum of a report is that of all further ones.
pub(crate) const SUMS_MAX: usize = 4096;
/// Bytes of the name of a parameter; more are cut.
pub(crate) const PARAMETER_NAME_MAX: usize = 256;
/// Bytes of the advice; more are cut.
pub(crate) const ADVICE_MAX: usize = 512;
/// Optimizers of a generation that are reported.
const OPTIMIZERS_MAX: usize = 4096;

/// Checksums of the parameters of one optimizer on one rank. All ranks list the same parameters in the same order.
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
pub struct Numbers {
    next: BTreeMap<(ProcessSetId, u64), u64>,
    /// The least number of a report from now on.
    least: u64,
}

impl Numbers {
    /// Whether a report of this key has a number.
    pub fn has(&self, set: ProcessSetId, key: u64) -> bool {
        self.next.contains_key(&(set, key))
    }

    /// The number of a report of this key; `None` if this rank has reported too many keys.
    pub fn take(&mut self, set: ProcessSetId, key: u64) -> Option<u64> {
        if self.next.len() >= OPTIMIZERS_MAX && !self.has(set, key) {
            return None;
        }
        let next = self.next.entry((set, key)).or_default();
        let number = self.least.max(*next);
        *next = number + 1;
        Some(number)
    }

    /// All ranks have joined. Ranks that joined early may lack reports, so all count from a new number on: a rank's first
    /// report after the join is not compared with one that other ranks made before it.
    pub fn note_joined(&mut self) {
        self.least += 1 << 32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_numbered_by_set_and_key_and_bounded() {
        let mut numbers = Numbers::default();
        let mut number = |set, key| numbers.take(ProcessSetId(set), key);
        let numbers = [number(0, 7), number(0, 7), number(1, 7), number(0, 8)];
        assert_eq!(numbers, [Some(0), Some(1), Some(0), Some(0)]);
        for key in 0..OPTIMIZERS_MAX as u64 {
            number(2, key);
        }
        assert_eq!((number(3, 1), number(0, 7)), (None, Some(2)));
    }

    #[test]
    fn after_a_join_numbers_are_those_of_a_rank_that_has_not_reported() {
        let (mut reported, mut joined_early) = (Numbers::default(), Numbers::default());
        let before = [0; 3].map(|_| reported.take(ProcessSetId(0), 7));
        for numbers in [&mut reported, &mut joined_early] {
            numbers.note_joined();
        }
        for _ in 0..2 {
            let number = joined_early.take(ProcessSetId(0), 7);
            assert!(!before.contains(&number));
            assert_eq!(reported.take(ProcessSetId(0), 7), number);
        }
    }
}

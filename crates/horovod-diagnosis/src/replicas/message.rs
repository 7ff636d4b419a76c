//! A report as an out-of-band message of the control plane; every length is bounded.

use horovod_protocol::wire::{Reader, Writer, cut_at};
use horovod_protocol::{DecodeError, ProcessSetId};

use super::{ADVICE_MAX, PARAMETER_NAME_MAX, Replica, SUMS_MAX};

/// First byte, which no other out-of-band message has.
const REPORT: u8 = 0xB0;
/// Odd, as that of checksums.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// One rank's checksums of its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The process set whose members are compared.
    pub set: ProcessSetId,
    pub(crate) key: u64,
    /// Reports of the same set, key and number are compared.
    pub(crate) number: u64,
    /// How many parameters there are.
    pub(crate) total: u64,
    pub(crate) sums: Vec<u64>,
    /// One for each checksum, or none: another rank says them.
    pub(crate) names: Vec<String>,
    pub(crate) advice: String,
}

/// Whether these bytes are meant to be a [`Report`].
pub fn is_message(bytes: &[u8]) -> bool {
    bytes.first() == Some(&REPORT)
}

impl Report {
    /// Names and advice are said by one rank of the set.
    pub fn new(set: ProcessSetId, number: u64, replica: Replica, has_names: bool) -> Self {
        let Replica {
            key,
            mut names,
            mut sums,
            mut advice,
        } = replica;
        let total = sums.len() as u64;
        if sums.len() > SUMS_MAX {
            let rest = sums.split_off(SUMS_MAX - 1);
            sums.push(rest.into_iter().fold(0, |all, sum| {
                (all ^ sum).wrapping_mul(FACTOR).rotate_left(32)
            }));
        }
        names.truncate(sums.len());
        if names.len() < sums.len() || !has_names {
            names.clear();
            advice.clear();
        }
        for name in &mut names {
            name.truncate(cut_at(name, PARAMETER_NAME_MAX).len());
        }
        advice.truncate(cut_at(&advice, ADVICE_MAX).len());
        Self {
            set,
            key,
            number,
            total,
            sums,
            names,
            advice,
        }
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let w = &mut Writer::new(&mut out);
        w.u8(REPORT);
        w.varint(u64::from(self.set.0));
        w.u64(self.key);
        w.varint(self.number);
        w.varint(self.total);
        w.varint(self.sums.len() as u64);
        self.sums.iter().for_each(|sum| w.u64(*sum));
        w.varint(self.names.len() as u64);
        self.names.iter().for_each(|name| w.str(name));
        w.str(&self.advice);
        out
    }

    /// From bytes of another rank.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let kind = r.u8("report of a replica")?;
        if kind != REPORT {
            return Err(DecodeError::BadValue {
                what: "report of a replica",
                value: u64::from(kind),
            });
        }
        let set = ProcessSetId(r.varint_u32("process set")?);
        let key = r.u64("digest of names")?;
        let number = r.varint("number of the report")?;
        let total = r.varint("number of parameters")?;
        let mut sums = Vec::new();
        for _ in 0..r.count(SUMS_MAX, size_of::<u64>(), "checksums")? {
            sums.push(r.u64("checksum")?);
        }
        let mut names = Vec::new();
        for _ in 0..r.count(SUMS_MAX, 1, "names")? {
            names.push(r.str(PARAMETER_NAME_MAX, "name")?.to_owned());
        }
        if !names.is_empty() && names.len() != sums.len() {
            return Err(DecodeError::BadValue {
                what: "number of names",
                value: names.len() as u64,
            });
        }
        let advice = r.str(ADVICE_MAX, "advice")?.to_owned();
        r.finish()?;
        Ok(Self {
            set,
            key,
            number,
            total,
            sums,
            names,
            advice,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn replica(sums: Vec<u64>) -> Replica {
        Replica {
            key: 9,
            names: (0..sums.len()).map(|i| format!("w{i}")).collect(),
            sums,
            advice: "broadcast".into(),
        }
    }

    proptest! {
        #[test]
        fn what_is_reported_is_received(
            sums in prop::collection::vec(any::<u64>(), 0..20),
            (set, number, has_names) in (any::<u32>(), any::<u64>(), any::<bool>()),
        ) {
            let report = Report::new(ProcessSetId(set), number, replica(sums), has_names);
            let bytes = report.encode();
            prop_assert!(is_message(&bytes));
            prop_assert_eq!(Report::decode(&bytes).unwrap(), report);
        }

        #[test]
        fn garbage_is_an_error_and_no_panic(mut bytes in prop::collection::vec(any::<u8>(), 1..200)) {
            bytes[0] = REPORT;
            let _ = Report::decode(&bytes);
        }
    }

    #[test]
    fn what_is_too_long_is_cut_and_the_last_checksum_is_that_of_all_others() {
        let report = |changed: Option<usize>| {
            let mut sums: Vec<u64> = (0..2 * SUMS_MAX as u64).collect();
            if let Some(index) = changed {
                sums[index] ^= 1;
            }
            let mut replica = replica(sums);
            replica.names[0] = "ä".repeat(PARAMETER_NAME_MAX);
            replica.advice = "x".repeat(2 * ADVICE_MAX);
            let bytes = Report::new(ProcessSetId(0), 0, replica, true).encode();
            Report::decode(&bytes).unwrap()
        };
        let equal = report(None);
        assert_eq!((equal.sums.len(), equal.names.len()), (SUMS_MAX, SUMS_MAX));
        assert_eq!(equal.total, 2 * SUMS_MAX as u64);
        assert_eq!(equal.names[0].len(), PARAMETER_NAME_MAX);
        for changed in [SUMS_MAX - 1, SUMS_MAX, 2 * SUMS_MAX - 1] {
            let other = report(Some(changed));
            assert_eq!(other.sums[..SUMS_MAX - 1], equal.sums[..SUMS_MAX - 1]);
            assert_ne!(other.sums[SUMS_MAX - 1], equal.sums[SUMS_MAX - 1]);
        }
    }
}

//! A report as an out-of-band message of the control plane; every length is bounded.

use horovod_protocol::wire::cut_at;
use horovod_protocol::{DecodeError, ProcessSetId};
use horovod_transport::compact;
use serde::{Deserialize, Deserializer, Serialize};

use super::{ADVICE_MAX, PARAMETER_NAME_MAX, Replica, SUMS_MAX};

/// First byte, which no other out-of-band message has.
const REPORT: u8 = 0xB0;
/// Odd, as that of checksums.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// One rank's checksums of its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The process set whose members are compared.
    #[serde(with = "compact::SetNumber")]
    pub set: ProcessSetId,
    pub(crate) key: u64,
    /// Reports of the same set, key and number are compared.
    pub(crate) number: u64,
    /// How many parameters there are.
    pub(crate) total: u64,
    #[serde(deserialize_with = "compact::list::<SUMS_MAX, _, _>")]
    pub(crate) sums: Vec<u64>,
    /// One for each checksum, or none: another rank says them.
    #[serde(deserialize_with = "get_names")]
    pub(crate) names: Vec<String>,
    #[serde(deserialize_with = "compact::text::<ADVICE_MAX, _>")]
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
        let mut out = vec![REPORT];
        compact::encode(self, &mut out);
        out
    }

    /// From bytes of another rank.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let [REPORT, report @ ..] = bytes else {
            return Err(DecodeError::Malformed);
        };
        let report: Self = compact::decode(report)?;
        if !report.names.is_empty() && report.names.len() != report.sums.len() {
            return Err(DecodeError::BadValue {
                what: "number of names",
                value: report.names.len() as u64,
            });
        }
        Ok(report)
    }
}

fn get_names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let names = compact::List::<compact::Text<PARAMETER_NAME_MAX>, SUMS_MAX>::deserialize(from)?;
    Ok(names.0.into_iter().map(|name| name.0).collect())
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

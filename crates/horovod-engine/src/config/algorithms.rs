//! The settings of the data plane: which algorithms run and with what sizes. They must be equal on all
//! ranks, so rank 0's are given to all while they connect.

use horovod_collectives::{
    Tuning,
    select::{Across, AlgorithmOverride},
};
use horovod_settings::{self as settings, Algorithm, Declaration, JoinAverage, Whole};

use super::Environment;
use crate::error::Error;

/// Settings of the data plane at the start of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Algorithms {
    /// Choices and sizes.
    pub tuning: Tuning,
    /// TCP connections for data between two ranks.
    pub connections: u8,
    /// By what `Average` divides while ranks have joined.
    pub join_average: JoinAverage,
}

/// A number that all ranks must have equal, and its place.
struct Number {
    /// Its setting; `None`: it has none.
    setting: Option<&'static Declaration<Whole<usize>>>,
    place: fn(&mut Tuning) -> &mut usize,
}

const fn set_by(
    setting: &'static Declaration<Whole<usize>>,
    place: fn(&mut Tuning) -> &mut usize,
) -> Number {
    let setting = Some(setting);
    Number { setting, place }
}

const fn fixed(place: fn(&mut Tuning) -> &mut usize) -> Number {
    let setting = None;
    Number { setting, place }
}

/// In the order in which rank 0 tells them.
static NUMBERS: [Number; 7] = [
    set_by(&settings::CHUNK_BYTES, |t| &mut t.chunk_bytes),
    set_by(&settings::WIRE_CHUNK_BYTES, |t| &mut t.wire_chunk_bytes),
    set_by(&settings::DIRECT_MAX_BYTES, |t| &mut t.direct_max_bytes),
    set_by(&settings::EXCHANGE_MAX_BYTES, |t| &mut t.exchange_max_bytes),
    set_by(&settings::PAIRWISE_MAX_HOSTS, |t| &mut t.pairwise_max_hosts),
    fixed(|t| &mut t.chunk_min_bytes),
    fixed(|t| &mut t.chain_min_bytes),
];

impl Algorithms {
    pub(super) fn read(env: &dyn Environment) -> Result<Self, Error> {
        let mut tuning = Tuning::default();
        tuning.allreduce = forced(settings::ALLREDUCE_ALGORITHM.read(env)?);
        tuning.hierarchical_allreduce =
            settings::HIERARCHICAL_ALLREDUCE.read(env)? || settings::TORUS_ALLREDUCE.read(env)?;
        tuning.hierarchical_allgather = settings::HIERARCHICAL_ALLGATHER.read(env)?;
        for number in &NUMBERS {
            if let Some(setting) = number.setting {
                *(number.place)(&mut tuning) = setting.read(env)?;
            }
        }
        Ok(Self {
            tuning,
            connections: settings::CONNECTIONS_PER_PEER.read(env)?,
            join_average: settings::JOIN_AVERAGE.read(env)?,
        })
    }

    /// Values that must be equal on all ranks, as bytes for [`Self::adopt`].
    pub(crate) fn common(&self) -> Vec<u8> {
        let mut tuning = self.tuning.clone();
        let forced = ALGORITHMS
            .iter()
            .position(|(_, known)| forced(*known) == tuning.allreduce)
            .unwrap_or(0);
        let mut numbers: Vec<usize> = NUMBERS.iter().map(|n| *(n.place)(&mut tuning)).collect();
        numbers.extend([
            forced,
            usize::from(tuning.hierarchical_allreduce),
            usize::from(tuning.hierarchical_allgather),
            usize::from(self.join_average == JoinAverage::Contributors),
        ]);
        let bytes = numbers.iter().flat_map(|n| (*n as u64).to_le_bytes());
        bytes.collect()
    }

    /// Takes over what rank 0 has; nothing when there is no rank 0 but this one.
    pub(crate) fn adopt(&mut self, common: &[u8]) -> Result<(), Error> {
        if common.is_empty() {
            return Ok(());
        }
        let numbers: Vec<usize> = common
            .chunks_exact(8)
            .filter_map(|bytes| bytes.try_into().ok().map(u64::from_le_bytes))
            .filter_map(|number| usize::try_from(number).ok())
            .collect();
        let split = numbers.split_at_checked(NUMBERS.len());
        let Some((
            sizes,
            &[
                ref index,
                hierarchical_allreduce,
                hierarchical_allgather,
                contributors,
            ],
        )) = split
        else {
            return Err(Error::Init(format!(
                "rank 0 sent {} bytes of settings: is it the same version?",
                common.len()
            )));
        };
        let mut tuning = self.tuning.clone();
        for (number, size) in NUMBERS.iter().zip(sizes) {
            if let Some(refused) = number
                .setting
                .and_then(|setting| setting.parse(&size.to_string()).err())
            {
                return Err(Error::Init(format!(
                    "rank 0 sent {refused}; is it the same version?"
                )));
            }
            *(number.place)(&mut tuning) = *size;
        }
        tuning.allreduce = ALGORITHMS.get(*index).and_then(|(_, known)| forced(*known));
        tuning.hierarchical_allreduce = hierarchical_allreduce != 0;
        tuning.hierarchical_allgather = hierarchical_allgather != 0;
        self.tuning = tuning;
        self.join_average = if contributors == 0 {
            JoinAverage::Members
        } else {
            JoinAverage::Contributors
        };
        Ok(())
    }

    /// An algorithm that cannot run on so many hosts is a mistake of the user's.
    pub(crate) fn check(&self, hosts: usize) -> Result<(), Error> {
        if self.tuning.allreduce == Some(AlgorithmOverride::Staged) && hosts > 1 {
            return Err(Error::Init(format!(
                "{}=staged needs all ranks on one host that share memory, but there are {hosts} groups of them: \
                 choose {}",
                settings::ALLREDUCE_ALGORITHM.name,
                across_hosts()
            )));
        }
        Ok(())
    }
}

/// In the order in which rank 0 tells its choice, by a number.
static ALGORITHMS: &[(&str, Algorithm)] = settings::ALLREDUCE_ALGORITHM.kind.words;

/// The data plane's override for the setting.
fn forced(algorithm: Algorithm) -> Option<AlgorithmOverride> {
    match algorithm {
        Algorithm::Auto => None,
        Algorithm::Staged => Some(AlgorithmOverride::Staged),
        Algorithm::Exchange => Some(AlgorithmOverride::Across(Across::Exchange)),
        Algorithm::Pairwise => Some(AlgorithmOverride::Across(Across::Pairwise)),
        Algorithm::Ring => Some(AlgorithmOverride::Across(Across::Ring)),
    }
}

/// The words for what runs on any number of hosts, for an error.
fn across_hosts() -> String {
    let known = ALGORITHMS
        .iter()
        .filter(|(_, known)| *known != Algorithm::Staged);
    let words: Vec<&str> = known.map(|(word, _)| *word).collect();
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::{SETTINGS, tests::Map};
    use super::*;

    fn read(vars: &[(&'static str, &'static str)]) -> Result<Algorithms, Error> {
        Algorithms::read(&Map(vars.to_vec()))
    }

    #[test]
    fn the_table_shows_the_real_defaults() {
        let rows = SETTINGS.iter();
        let shown: Vec<_> = rows.map(|row| (row.name, row.default)).collect();
        assert_eq!(read(&shown).unwrap(), read(&[]).unwrap());
        assert_eq!(read(&[]).unwrap().tuning, Tuning::default());
    }

    #[test]
    fn an_unknown_algorithm_is_refused_with_the_choices() {
        let e = read(&[("HOROVOD_ALLREDUCE_ALGORITHM", "tree")]).unwrap_err();
        let text = e.to_string();
        for word in ["tree", "auto", "staged", "exchange", "pairwise", "ring"] {
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn an_impossible_algorithm_is_refused_with_the_choices() {
        let staged = read(&[("HOROVOD_ALLREDUCE_ALGORITHM", "staged")]).unwrap();
        staged.check(1).unwrap();
        let text = staged.check(2).unwrap_err().to_string();
        assert!(
            text.contains("staged") && text.contains("pairwise"),
            "{text}"
        );
        read(&[("HOROVOD_ALLREDUCE_ALGORITHM", "Ring")])
            .unwrap()
            .check(2)
            .unwrap();
    }

    #[test]
    fn averages_count_all_members_unless_told_otherwise() {
        let set = |value| read(&[("HOROVOD_JOIN_AVERAGE", value)]);
        assert_eq!(read(&[]).unwrap().join_average, JoinAverage::Members);
        assert_eq!(set("members").unwrap().join_average, JoinAverage::Members);
        let text = set("some").unwrap_err().to_string();
        assert!(
            text.contains("HOROVOD_JOIN_AVERAGE") && text.contains("contributors"),
            "{text}"
        );
    }

    #[test]
    fn numbers_have_limits() {
        for (name, value) in [
            ("HOROVOD_CONNECTIONS_PER_PEER", "17"),
            ("HOROVOD_CONNECTIONS_PER_PEER", "0"),
            ("HOROVOD_CHUNK_BYTES", "12"),
        ] {
            let text = read(&[(name, value)]).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains(value), "{text}");
        }
    }

    #[test]
    fn either_switch_asks_for_what_this_has_of_both() {
        let on = |vars: &[_]| read(vars).unwrap().tuning.hierarchical_allreduce;
        let off = ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0");
        assert!(on(&[]) && !on(&[off]));
        assert!(on(&[off, ("HOROVOD_TORUS_ALLREDUCE", "1")]));
    }

    #[test]
    fn every_rank_gets_what_rank_0_has() {
        let rank_0 = read(&[
            ("HOROVOD_ALLREDUCE_ALGORITHM", "ring"),
            ("HOROVOD_WIRE_CHUNK_BYTES", "4096"),
            ("HOROVOD_CHUNK_BYTES", "4097"),
            ("HOROVOD_DIRECT_MAX_BYTES", "4098"),
            ("HOROVOD_EXCHANGE_MAX_BYTES", "4099"),
            ("HOROVOD_PAIRWISE_MAX_HOSTS", "3"),
            ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
            ("HOROVOD_HIERARCHICAL_ALLGATHER", "0"),
            ("HOROVOD_JOIN_AVERAGE", "Contributors"),
        ])
        .unwrap();
        let mut other = read(&[("HOROVOD_CHUNK_BYTES", "8192")]).unwrap();
        other.adopt(&rank_0.common()).unwrap();
        assert_eq!(other.tuning, rank_0.tuning);
        assert_eq!(other.join_average, JoinAverage::Contributors);
        assert_eq!(
            other.tuning.allreduce,
            Some(AlgorithmOverride::Across(Across::Ring))
        );
        other.adopt(&[]).unwrap();
        assert_eq!(other.tuning, rank_0.tuning);
        assert!(other.adopt(&[1, 2, 3]).is_err());
    }

    #[test]
    fn sizes_that_nobody_could_set_are_not_taken_over() {
        let mut ours = read(&[]).unwrap();
        let mut theirs = ours.clone();
        theirs.tuning.chunk_bytes = 0;
        let text = ours.adopt(&theirs.common()).unwrap_err().to_string();
        assert!(text.contains("HOROVOD_CHUNK_BYTES=0"), "{text}");
        assert_eq!(ours, read(&[]).unwrap());
    }
}

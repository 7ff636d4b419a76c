//! The settings of the data plane: which algorithms run and with what sizes. They must be equal on all
//! ranks, so rank 0's are given to all while they connect.

use horovod_collectives::{Tuning, select::Wish};
use horovod_transport::CONNECTIONS_MAX;

use super::reader::Reader;
use crate::error::Error;

/// Most of any of the sizes.
const SIZE_MAX: usize = 1 << 30;

/// What the data plane runs with when the job begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Algorithms {
    /// Choices and sizes.
    pub tuning: Tuning,
    /// TCP connections for data between two ranks.
    pub connections: u8,
    /// By what `Average` divides while ranks have joined.
    pub join_average: JoinAverage,
}

/// By what `Average` divides while ranks have joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JoinAverage {
    /// By all members, so that every sample keeps its weight.
    #[default]
    Members,
    /// By those that contribute, so that the scale stays that of the data.
    Contributors,
}

/// A number that all ranks must have equal, and its place.
struct Number {
    /// What sets it, and the least that may be; `None`: nothing does.
    setting: Option<(&'static str, usize)>,
    place: fn(&mut Tuning) -> &mut usize,
}

const fn set_by(name: &'static str, least: usize, place: fn(&mut Tuning) -> &mut usize) -> Number {
    let setting = Some((name, least));
    Number { setting, place }
}

const fn fixed(place: fn(&mut Tuning) -> &mut usize) -> Number {
    let setting = None;
    Number { setting, place }
}

/// In the order in which rank 0 tells them.
const NUMBERS: [Number; 7] = [
    set_by("HOROVOD_CHUNK_BYTES", 1 << 10, |t| &mut t.chunk_bytes),
    set_by("HOROVOD_WIRE_CHUNK_BYTES", 1 << 10, |t| {
        &mut t.wire_chunk_bytes
    }),
    set_by("HOROVOD_DIRECT_MAX_BYTES", 0, |t| &mut t.direct_max_bytes),
    set_by("HOROVOD_EXCHANGE_MAX_BYTES", 0, |t| {
        &mut t.exchange_max_bytes
    }),
    set_by("HOROVOD_PAIRWISE_MAX_HOSTS", 1, |t| {
        &mut t.pairwise_max_hosts
    }),
    fixed(|t| &mut t.chunk_min_bytes),
    fixed(|t| &mut t.chain_min_bytes),
];

impl Algorithms {
    pub(super) fn read(r: &Reader<'_>) -> Result<Self, Error> {
        let mut tuning = Tuning::default();
        tuning.allreduce = wish(r)?;
        tuning.hierarchical_allreduce = r.flag("HOROVOD_HIERARCHICAL_ALLREDUCE", true)?
            || r.flag("HOROVOD_TORUS_ALLREDUCE", false)?;
        tuning.hierarchical_allgather = r.flag("HOROVOD_HIERARCHICAL_ALLGATHER", true)?;
        for number in &NUMBERS {
            if let Some((name, least)) = number.setting {
                let size = (number.place)(&mut tuning);
                *size = between(r, name, *size, least, SIZE_MAX)?;
            }
        }
        let most = usize::from(CONNECTIONS_MAX);
        let connections = between(r, "HOROVOD_CONNECTIONS_PER_PEER", 1, 1, most)?;
        Ok(Self {
            tuning,
            connections: u8::try_from(connections).unwrap_or(CONNECTIONS_MAX),
            join_average: join_average(r)?,
        })
    }

    /// What the ranks must have equal, as bytes for [`Self::adopt`].
    pub(crate) fn common(&self) -> Vec<u8> {
        let mut tuning = self.tuning.clone();
        let wish = Wish::NAMES
            .iter()
            .position(|(_, wish)| tuning.allreduce == Some(*wish))
            .map_or(0, |index| index + 1);
        let mut numbers: Vec<usize> = NUMBERS.iter().map(|n| *(n.place)(&mut tuning)).collect();
        numbers.extend([
            wish,
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
                wish,
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
            if let Some((name, least)) = number.setting
                && !(least..=SIZE_MAX).contains(size)
            {
                return Err(Error::Init(format!(
                    "rank 0 sent {name}={size}: expected {least} to {SIZE_MAX}; is it the same version?"
                )));
            }
            *(number.place)(&mut tuning) = *size;
        }
        tuning.allreduce = wish
            .checked_sub(1)
            .and_then(|index| Wish::NAMES.get(index))
            .map(|(_, wish)| *wish);
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
        if self.tuning.allreduce == Some(Wish::Staged) && hosts > 1 {
            return Err(Error::Init(format!(
                "HOROVOD_ALLREDUCE_ALGORITHM=staged needs all ranks on one host that share memory, but there \
                 are {hosts} groups of them: choose {}",
                names(|wish| wish != Wish::Staged)
            )));
        }
        Ok(())
    }
}

fn wish(r: &Reader<'_>) -> Result<Option<Wish>, Error> {
    let Some(text) = r.text("HOROVOD_ALLREDUCE_ALGORITHM") else {
        return Ok(None);
    };
    let name = text.trim().to_ascii_lowercase();
    let known = Wish::NAMES.iter().find(|(known, _)| *known == name);
    match known {
        Some((_, wish)) => Ok(Some(*wish)),
        None if name == "auto" => Ok(None),
        None => Err(Error::Init(format!(
            "HOROVOD_ALLREDUCE_ALGORITHM={text:?}: expected {}",
            names(|_| true)
        ))),
    }
}

fn join_average(r: &Reader<'_>) -> Result<JoinAverage, Error> {
    const NAME: &str = "HOROVOD_JOIN_AVERAGE";
    let text = r.text(NAME).unwrap_or_default();
    match text.trim().to_ascii_lowercase().as_str() {
        "" | "members" => Ok(JoinAverage::Members),
        "contributors" => Ok(JoinAverage::Contributors),
        _ => Err(Error::Init(format!(
            "{NAME}={text:?}: expected members or contributors"
        ))),
    }
}

/// The names of those algorithms and of automatic choice, for an error.
fn names(of: impl Fn(Wish) -> bool) -> String {
    let names = Wish::NAMES.iter().filter(|(_, wish)| of(*wish));
    let names: Vec<&str> = names.map(|(name, _)| *name).collect();
    format!("auto, {}", names.join(", "))
}

fn between(
    r: &Reader<'_>,
    name: &str,
    default: usize,
    least: usize,
    most: usize,
) -> Result<usize, Error> {
    let value = r.number(name, default)?;
    if (least..=most).contains(&value) {
        Ok(value)
    } else {
        Err(Error::Init(format!(
            "{name}={value}: expected {least} to {most}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use horovod_collectives::select::Across;

    use super::super::{SETTINGS, tests::Map};
    use super::*;

    fn read(vars: &[(&'static str, &'static str)]) -> Result<Algorithms, Error> {
        Algorithms::read(&Reader {
            env: &Map(vars.to_vec()),
        })
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
        assert_eq!(other.tuning.allreduce, Some(Wish::Across(Across::Ring)));
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

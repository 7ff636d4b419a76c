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
}

impl Algorithms {
    pub(super) fn read(r: &Reader<'_>) -> Result<Self, Error> {
        let mut tuning = Tuning::default();
        tuning.allreduce = wish(r)?;
        tuning.hierarchical_allreduce = r.flag("HOROVOD_HIERARCHICAL_ALLREDUCE", true)?
            || r.flag("HOROVOD_TORUS_ALLREDUCE", false)?;
        tuning.hierarchical_allgather = r.flag("HOROVOD_HIERARCHICAL_ALLGATHER", true)?;
        for (name, least, size) in limited(&mut tuning) {
            *size = between(r, name, *size, least, SIZE_MAX)?;
        }
        let most = usize::from(CONNECTIONS_MAX);
        let connections = between(r, "HOROVOD_CONNECTIONS_PER_PEER", 1, 1, most)?;
        Ok(Self {
            tuning,
            connections: u8::try_from(connections).unwrap_or(CONNECTIONS_MAX),
        })
    }

    /// What the ranks must have equal, as bytes for [`Self::adopt`].
    pub(crate) fn common(&self) -> Vec<u8> {
        let Tuning {
            chunk_bytes,
            chunk_min_bytes,
            direct_max_bytes,
            exchange_max_bytes,
            pairwise_max_hosts,
            wire_chunk_bytes,
            chain_min_bytes,
            allreduce,
            hierarchical_allreduce,
            hierarchical_allgather,
            ..
        } = self.tuning;
        let wish = Wish::NAMES
            .iter()
            .position(|(_, wish)| allreduce == Some(*wish))
            .map_or(0, |index| index + 1);
        let numbers = [
            chunk_bytes,
            chunk_min_bytes,
            direct_max_bytes,
            exchange_max_bytes,
            pairwise_max_hosts,
            wire_chunk_bytes,
            chain_min_bytes,
            wish,
            usize::from(hierarchical_allreduce),
            usize::from(hierarchical_allgather),
        ];
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
        let &[
            chunk_bytes,
            chunk_min_bytes,
            direct_max_bytes,
            exchange_max_bytes,
            pairwise_max_hosts,
            wire_chunk_bytes,
            chain_min_bytes,
            wish,
            hierarchical_allreduce,
            hierarchical_allgather,
        ] = &numbers[..]
        else {
            return Err(Error::Init(format!(
                "rank 0 sent {} bytes of settings: is it the same version?",
                common.len()
            )));
        };
        let mut tuning = self.tuning.clone();
        tuning.chunk_bytes = chunk_bytes;
        tuning.chunk_min_bytes = chunk_min_bytes;
        tuning.direct_max_bytes = direct_max_bytes;
        tuning.exchange_max_bytes = exchange_max_bytes;
        tuning.pairwise_max_hosts = pairwise_max_hosts;
        tuning.wire_chunk_bytes = wire_chunk_bytes;
        tuning.chain_min_bytes = chain_min_bytes;
        tuning.allreduce = wish
            .checked_sub(1)
            .and_then(|index| Wish::NAMES.get(index))
            .map(|(_, wish)| *wish);
        tuning.hierarchical_allreduce = hierarchical_allreduce != 0;
        tuning.hierarchical_allgather = hierarchical_allgather != 0;
        for (name, least, size) in limited(&mut tuning) {
            if !(least..=SIZE_MAX).contains(size) {
                return Err(Error::Init(format!(
                    "rank 0 sent {name}={size}: expected {least} to {SIZE_MAX}; is it the same version?"
                )));
            }
        }
        self.tuning = tuning;
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

/// The sizes that have limits: their names, the least value, and where they are.
fn limited(tuning: &mut Tuning) -> [(&'static str, usize, &mut usize); 5] {
    [
        ("HOROVOD_CHUNK_BYTES", 1 << 10, &mut tuning.chunk_bytes),
        (
            "HOROVOD_WIRE_CHUNK_BYTES",
            1 << 10,
            &mut tuning.wire_chunk_bytes,
        ),
        ("HOROVOD_DIRECT_MAX_BYTES", 0, &mut tuning.direct_max_bytes),
        (
            "HOROVOD_EXCHANGE_MAX_BYTES",
            0,
            &mut tuning.exchange_max_bytes,
        ),
        (
            "HOROVOD_PAIRWISE_MAX_HOSTS",
            1,
            &mut tuning.pairwise_max_hosts,
        ),
    ]
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
        ])
        .unwrap();
        let mut other = read(&[("HOROVOD_CHUNK_BYTES", "8192")]).unwrap();
        other.adopt(&rank_0.common()).unwrap();
        assert_eq!(other.tuning, rank_0.tuning);
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

//! Sets of ranks that have operations of their own.
#![forbid(unsafe_code)]

use std::sync::Arc;

use horovod_engine::{self as engine, Engine, ProcessSetId};

use crate::communicator::Communicator;
use crate::error::{Error, Result};

/// Some ranks of the job: made by [`Horovod::process_set`](crate::Horovod::process_set) on all of them, also on those
/// that are no members.
#[derive(Debug)]
pub struct ProcessSet {
    world: Communicator,
    id: ProcessSetId,
    members: Arc<[usize]>,
    communicator: Option<Communicator>,
}

impl ProcessSet {
    pub(crate) fn add(world: &Communicator, ranks: &[usize]) -> Result<Self> {
        world.may_wait()?;
        let mut members = ranks.to_vec();
        members.sort_unstable();
        let has_twins = members.windows(2).any(|pair| pair[0] == pair[1]);
        if has_twins || members.last().is_none_or(|last| *last >= world.size()) {
            return Err(Error::invalid(format!(
                "a process set of the ranks {ranks:?} was asked for; expected are different ranks below {}, at least one",
                world.size()
            )));
        }
        let numbers = members
            .iter()
            .map(|rank| u32::try_from(*rank).unwrap_or(u32::MAX));
        let numbers: Vec<u32> = numbers.collect();
        let engine: &Arc<Engine> = &world.engine;
        let id = engine.add_process_set::<engine::Error>(&numbers, || Ok(()));
        let id = id.map_err(|error| Error::on(engine, error))?;
        let members: Arc<[usize]> = members.into();
        Ok(Self {
            world: world.clone(),
            id,
            communicator: Communicator::of(engine, id, &members),
            members,
        })
    }

    /// The members, ascending.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// The operations among the members; `None` on a rank that is none of them.
    pub fn communicator(&self) -> Option<&Communicator> {
        self.communicator.as_ref()
    }

    /// Removes the set. Every rank of the job must make the same call, after the last operation of the set: one that is
    /// still under way ends with [`Error::SetRemoved`]. A set that is dropped stays, and a job has at most 4,095 of them.
    ///
    /// # Errors
    /// Those of [`Communicator`].
    pub fn remove(self) -> Result<()> {
        self.world.may_wait()?;
        let engine = &self.world.engine;
        let removed = engine.remove_process_set::<engine::Error>(self.id, || Ok(()));
        removed.map(drop).map_err(|error| Error::on(engine, error))
    }
}

//! The key-value store of the launcher that started this process, by which ranks exchange short texts before they know
//! each other's addresses.
//!
//! [`find`] recognises two interfaces by variables of the launcher. PMI-1 is lines of text on an inherited descriptor:
//! MPICH, Intel MPI, `srun --mpi=pmi2`. PMIx is a C library, which is looked up at run time: Open MPI 4, `srun --mpi=pmix`.
//! All processes of the launcher's job call [`Store::fence`] equally often. Values cross the launcher's network in
//! clear, so no secret may be among them.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.

mod ancestors;
mod pmi1;
mod pmix;
mod step;

pub use ancestors::{Ancestor, ancestors};
use horovod_settings::Environment;
pub use step::OwnStep;

/// A store's refusal, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{by}: {why}")]
pub struct StoreError {
    /// The interface and how it was found, such as `PMI-1 (PMI_FD=9)`.
    pub by: String,
    /// The cause.
    pub why: String,
}

/// Texts of all processes of the launcher's job, by key. Key and value have no space and no line end.
///
/// A call may wait for the launcher without end; call it on a thread that can be left to itself.
pub trait Store {
    /// Makes a text of this process known to all, from the next fence on.
    ///
    /// # Errors
    /// The launcher refuses or does not answer.
    fn put(&mut self, key: &str, value: &str) -> Result<(), StoreError>;

    /// Waits until all processes have called it as often as this one.
    ///
    /// # Errors
    /// As for [`Self::put`].
    fn fence(&mut self) -> Result<(), StoreError>;

    /// The text that process `rank` put before the last fence.
    ///
    /// # Errors
    /// As for [`Self::put`]; that process has put no such text.
    fn get(&mut self, rank: u32, key: &str) -> Result<String, StoreError>;
}

/// A launcher's store that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The descriptor of PMI-1, from `PMI_FD`.
    Pmi1(i32),
    /// PMIx.
    Pmix {
        /// The launcher's name of the job.
        namespace: String,
        /// This process.
        rank: u32,
    },
}

/// The store that the launcher's variables describe.
///
/// That of Open MPI 5 is left alone: a process can initialise its MPI later only if PMIx was finalized before, and then
/// PMIx 5.0.11 frees memory twice when the process exits.
pub fn find(env: &dyn Environment) -> Option<Found> {
    let number = |name| env.get(name)?.trim().parse().ok();
    if let Some(descriptor) = number("PMI_FD") {
        return Some(Found::Pmi1(descriptor));
    }
    let is_served = (env.names().iter()).any(|name| name.starts_with("PMIX_SERVER_URI"));
    let is_open_mpi_5 = env.get("OMPI_VERSION").is_some();
    if !is_served || is_open_mpi_5 {
        return None;
    }
    Some(Found::Pmix {
        namespace: env.get("PMIX_NAMESPACE")?,
        rank: u32::try_from(number("PMIX_RANK")?).ok()?,
    })
}

impl Found {
    /// Connects to the launcher.
    ///
    /// # Errors
    /// The descriptor or the library cannot be used, or the launcher refuses.
    pub fn open(&self) -> Result<Box<dyn Store>, StoreError> {
        match self {
            Self::Pmi1(descriptor) => Ok(Box::new(pmi1::Pmi1::open(*descriptor)?)),
            Self::Pmix { namespace, rank } => Ok(Box::new(pmix::Pmix::open(namespace, *rank)?)),
        }
    }
}

#[cfg(test)]
mod tests;

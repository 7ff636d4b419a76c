//! The start of this process's part in a job, and its end: the guard.
#![forbid(unsafe_code)]

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

use horovod_engine::{self as engine, Leaving};

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::process_set::ProcessSet;

/// A guard lives, or is being made.
static IS_GUARDED: AtomicBool = AtomicBool::new(false);

/// Ends the claim on [`IS_GUARDED`] when dropped.
struct Claim(());

impl Claim {
    fn take() -> Result<Self> {
        match IS_GUARDED.swap(true, Ordering::AcqRel) {
            true => Err(Error::AlreadyInitialized),
            false => Ok(Self(())),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        IS_GUARDED.store(false, Ordering::Release);
    }
}

/// This process as a part of its job, and the [`Communicator`] of all its ranks.
///
/// When it is dropped the process leaves the job. Operations of other ranks that still need this one then end with
/// [`Error::Left`], which names it. If it is dropped by a panic, they read that the program of this rank has failed, and
/// the launcher blames this rank and shows its message. A guard that is never dropped (`std::mem::forget`,
/// `std::process::exit`) leaves the job with its process: the others then end with [`Error::Lost`].
#[must_use = "the process leaves the job when this is dropped"]
pub struct Horovod {
    world: Communicator,
    _claim: Claim,
}

/// Joins the job that the environment describes: `horovodrun` sets it, and so do the batch systems that it knows.
/// Without any the job is this process alone.
///
/// Every rank must call it; it returns when all have. After the guard was dropped it may be called again.
///
/// # Errors
/// - [`Error::AlreadyInitialized`] while a guard of an earlier call lives;
/// - [`Error::Init`] if the other ranks cannot be reached in time, or a `HOROVOD_` setting has no meaning;
/// - [`Error::InCallback`] in a waker.
///
/// ```
/// # fn main() -> horovod::Result<()> {
/// let hvd = horovod::init()?;
/// println!("rank {} of {}", hvd.rank(), hvd.size());
/// # Ok(()) }
/// ```
pub fn init() -> Result<Horovod> {
    if engine::in_callback() {
        return Err(Error::InCallback);
    }
    let claim = Claim::take()?;
    let engine = engine::init().and_then(|()| engine::engine());
    let engine = engine.map_err(|error| Error::of(None, error))?;
    Ok(Horovod {
        world: Communicator::world(engine),
        _claim: claim,
    })
}

impl Horovod {
    /// The place of this process among those of its host, from 0.
    pub fn local_rank(&self) -> usize {
        self.world.engine.config().ranks.local_rank as usize
    }

    /// The number of ranks on this host.
    pub fn local_size(&self) -> usize {
        self.world.engine.config().ranks.local_size as usize
    }

    /// The place of this host among those that have a rank of the same [`local_rank`](Self::local_rank), from 0.
    pub fn cross_rank(&self) -> usize {
        self.world.engine.config().ranks.cross_rank as usize
    }

    /// The number of hosts that have a rank of the same [`local_rank`](Self::local_rank).
    pub fn cross_size(&self) -> usize {
        self.world.engine.config().ranks.cross_size as usize
    }

    /// Says that this rank has no more data, and waits until all ranks have said so. Meanwhile it takes part in
    /// allreduces of the others, with zeros for sums and means. Returns the rank that came last.
    ///
    /// # Errors
    /// Those of [`Communicator`]. Operations other than allreduce and barrier end with [`Error::Refused`] on the others
    /// while a rank waits here.
    pub fn join(&self) -> Result<usize> {
        join(&self.world)
    }

    /// Makes a process set of these ranks, in whatever order. Every rank of the job must make the same call.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a list that is empty, or has a rank twice or one that is not in the job;
    /// [`Error::Refused`] if there is a set of the same ranks; those of [`Communicator`].
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// use horovod::ReduceOp::Sum;
    ///
    /// let hvd = horovod::init()?;
    /// if hvd.size() >= 4 {
    ///     let pair = hvd.process_set(&[0, 2])?;
    ///     if let Some(pair) = pair.communicator() {
    ///         assert_eq!(pair.allreduce(&[1], Sum)?, [2]);
    ///     }
    ///     pair.remove()?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn process_set(&self, ranks: &[usize]) -> Result<ProcessSet> {
        ProcessSet::add(&self.world, ranks)
    }
}

pub(crate) fn join(world: &Communicator) -> Result<usize> {
    world.may_wait()?;
    let engine = &world.engine;
    let last = engine.join::<engine::Error>(|| Ok(()));
    last.map(|rank| rank.index())
        .map_err(|error| Error::on(engine, error))
}

impl Deref for Horovod {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.world
    }
}

impl Drop for Horovod {
    fn drop(&mut self) {
        let why = match std::thread::panicking() {
            true => Leaving::Failed,
            false => Leaving::Ended,
        };
        engine::shutdown_because(why);
    }
}

impl std::fmt::Debug for Horovod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Horovod")
            .field("rank", &self.world.rank())
            .field("size", &self.world.size())
            .finish_non_exhaustive()
    }
}

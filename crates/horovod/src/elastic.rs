//! Training that goes on when ranks are lost, come or go: the loop, and the state that it keeps.
#![forbid(unsafe_code)]

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use horovod_engine::{self as engine, Leaving, TrainingState};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::ReduceOp::Max;
use crate::error::{Error, Result};
use crate::framework::broadcast_bytes;
use crate::guard::{self, Horovod};

/// `run` gives up after this many losses of one rank without a commit: the next attempt would end in the same way.
const LOSSES_MAX: u64 = 3;

/// Calls of [`run`] that this process has begun.
static RUNS: AtomicU64 = AtomicU64::new(0);

/// Training state that is saved, restored and sent to new ranks: every type that serde can write and read, such as
/// a struct of weights and the number of the step. For another type, implement the two functions.
///
/// Fields with `#[serde(skip)]` are not sent: restored ranks get their default, and the root keeps its value.
pub trait Checkpoint {
    /// The state as bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be written.
    fn save(&self) -> Result<Vec<u8>>;

    /// Takes over what [`save`](Self::save) has written, on this or another rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be read.
    fn restore(&mut self, saved: &[u8]) -> Result<()>;
}

impl<T: Serialize + DeserializeOwned> Checkpoint for T {
    fn save(&self) -> Result<Vec<u8>> {
        postcard::to_allocvec(self)
            .map_err(|error| Error::invalid(format!("the elastic state cannot be saved: {error}")))
    }

    fn restore(&mut self, saved: &[u8]) -> Result<()> {
        let unreadable = |why: &str| {
            Error::invalid(format!(
                "the elastic state cannot be read: {why}; use the same types on all ranks, whose form does not depend \
                 on their contents"
            ))
        };
        let (restored, rest) =
            postcard::take_from_bytes(saved).map_err(|error| unreadable(&error.to_string()))?;
        if !rest.is_empty() {
            return Err(unreadable(&format!("{} bytes are left over", rest.len())));
        }
        *self = restored;
        Ok(())
    }
}

/// One generation of an elastic job: the members from one change to the next. It dereferences to the [`Horovod`] of
/// these members.
pub struct Job<'run, S> {
    hvd: Horovod,
    progress: &'run Mutex<Progress>,
    state: std::marker::PhantomData<fn(&S)>,
}

/// All that outlives a generation.
#[derive(Default)]
struct Progress {
    /// Number of this call of [`run`] in its process.
    run: u64,
    /// The last commit.
    saved: Vec<u8>,
    commits: u64,
    commits_at_start: u64,
    standing: TrainingState,
    wants_sync: bool,
    /// The newest change of members that was acted upon in this generation.
    seen: u64,
    /// A commit has returned [`Error::MembersChange`].
    is_interrupted: bool,
    /// Losses of each rank since the last commit.
    losses: Vec<u64>,
}

impl Progress {
    fn hold(&mut self, standing: TrainingState) {
        self.standing = standing;
        engine::hold_state(standing);
    }
}

impl<S> Deref for Job<'_, S> {
    type Target = Horovod;

    fn deref(&self) -> &Horovod {
        &self.hvd
    }
}

impl<S> std::fmt::Debug for Job<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Job").field(&self.hvd).finish()
    }
}

impl<S: Checkpoint> Job<'_, S> {
    /// Saves the state, to which this rank returns when another is lost, and then does
    /// [`check_members`](Self::check_members). All ranks must commit equally often.
    ///
    /// # Errors
    /// Those of [`Checkpoint::save`] and `check_members`.
    pub fn commit(&self, state: &S) -> Result<()> {
        let saved = state.save()?;
        {
            let mut progress = self.progress();
            progress.saved = saved;
            progress.commits += 1;
        }
        self.check_members()
    }

    /// Ends this generation, in the same call of all ranks, if the launcher wants to add or remove members. All ranks
    /// must call it equally often; it takes some microseconds.
    ///
    /// # Errors
    /// [`Error::MembersChange`], which the function must return: [`run`] then calls it again with the new members. Those
    /// of [`Communicator`](crate::Communicator).
    pub fn check_members(&self) -> Result<()> {
        if !engine::is_elastic() {
            return Ok(());
        }
        let (newest, kind) = self.hvd.engine.host_updates();
        let (is_removal, is_addition) = (u64::from(kind & 1), u64::from(kind & 2));
        // Ranks hear of a change at different times.
        let hvd = self.hvd.named("elastic.members");
        let agreed = hvd.allreduce(&[newest, is_removal, is_addition], Max)?;
        let mut progress = self.progress();
        if agreed[0] <= progress.seen {
            return Ok(());
        }
        progress.seen = agreed[0];
        progress.is_interrupted = true;
        // Ranks that stay have the same state.
        progress.wants_sync = agreed[1] == 0 || agreed[2] != 0;
        Err(Error::MembersChange)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives all ranks the newest state, unless they have it.
    fn sync(&self, state: &mut S) -> Result<()> {
        let entry = {
            let mut progress = self.progress();
            if progress.commits != progress.commits_at_start {
                progress.losses.clear();
            }
            // A smaller generation keeps the counts of the others, which may come back.
            let ranks = progress.losses.len().max(self.size());
            progress.losses.resize(ranks, 0);
            progress.seen = 0;
            progress.is_interrupted = false;
            let standing = progress.standing as u64;
            let own = [progress.commits, standing, u64::from(progress.wants_sync)];
            [&[progress.run], &own[..], &progress.losses[..self.size()]].concat()
        };
        let all = self.named("elastic.agree").allgather(&entry, 1)?;
        let all: Vec<&[u64]> = all.chunks(entry.len()).collect();
        check_runs(&all)?;
        let all: Vec<&[u64]> = all.iter().map(|entry| &entry[1..]).collect();
        let newest = all.iter().map(|entry| entry[0]).max().unwrap_or(0);
        let of_newest = all.iter().filter(|entry| entry[0] == newest);
        let losses = (0..self.size()).map(|rank| {
            let counts = of_newest.clone().map(|entry| entry[3 + rank]);
            counts.max().unwrap_or_default()
        });
        let current = TrainingState::Current as u64;
        let is_same = all.iter().all(|entry| entry[..3] == [newest, current, 0]);
        let root = root(&all);
        {
            let mut progress = self.progress();
            if progress.commits != newest {
                // They include losses before that commit.
                progress.losses.fill(0);
            }
            for (count, agreed) in progress.losses.iter_mut().zip(losses) {
                *count = agreed;
            }
        }
        if !is_same {
            let saved = self.broadcast_state(state, root)?;
            let mut progress = self.progress();
            progress.saved = saved;
            progress.commits = all[root][0] + 1;
        }
        let mut progress = self.progress();
        progress.wants_sync = false;
        progress.commits_at_start = progress.commits;
        progress.hold(TrainingState::Current);
        Ok(())
    }

    /// Counts the loss; whether another attempt may help.
    fn may_go_on_after(&self, loss: &Error) -> bool {
        let (Error::Lost { rank, .. } | Error::Left { rank, .. }) = loss else {
            return false;
        };
        let mut progress = self.progress();
        if progress.commits != progress.commits_at_start {
            progress.losses.fill(0);
            // Each commit counts once.
            progress.commits_at_start = progress.commits;
        }
        let Some(losses) = progress.losses.get_mut(*rank) else {
            return false;
        };
        *losses += 1;
        *losses < LOSSES_MAX
    }

    fn back_to_commit(&self, state: &mut S, loss: &Error) -> Result<()> {
        tracing::warn!("elastic training goes back to the last commit on {self:?}: {loss}");
        let mut progress = self.progress();
        state.restore(&progress.saved)?;
        if progress.standing != TrainingState::Nothing {
            progress.hold(TrainingState::Committed);
        }
        Ok(())
    }

    fn broadcast_state(&self, state: &mut S, root: usize) -> Result<Vec<u8>> {
        let is_root = self.rank() == root;
        let own = if is_root { state.save()? } else { Vec::new() };
        let saved = broadcast_bytes(&self.named("elastic.state"), own, root)?;
        if !is_root {
            state.restore(&saved)?;
        }
        Ok(saved)
    }
}

/// An error on all ranks if they are in different calls of [`run`], of which each may have another state and function.
fn check_runs(all: &[&[u64]]) -> Result<()> {
    let first = all.first().map_or(0, |entry| entry[0]);
    let Some(rank) = all.iter().position(|entry| entry[0] != first) else {
        return Ok(());
    };
    Err(Error::invalid(format!(
        "ranks are in different calls of elastic::run: rank 0 in number {first}, rank {rank} in number {}. A new rank \
         begins with the first call, where the others no longer are: use one call per program, and keep in its state \
         how far it has come",
        all[rank][0]
    )))
}

/// The rank with the newest commit that has trained; among those one with a current state, then the lowest.
fn root(all: &[&[u64]]) -> usize {
    let nothing = TrainingState::Nothing as u64;
    let worth = |rank: &usize| {
        let (commits, standing) = (all[*rank][0], all[*rank][1]);
        (
            standing != nothing,
            commits,
            standing,
            std::cmp::Reverse(*rank),
        )
    };
    (0..all.len()).max_by_key(worth).unwrap_or(0)
}

/// Calls `body` in each generation of an elastic job, until it has returned on all ranks; its last result.
///
/// It joins the job, so the program must not hold a guard of [`init`](crate::init). Before each call of `body` all
/// ranks have the same state. After a rank was lost that is the state of the last [`commit`](Job::commit); after members
/// were added or removed it is the current one. So `body` has to go on from the place that the state says.
///
/// Returns `None` if the launcher has removed this process from the job; the program then ends, with success.
/// In a job whose members cannot change, `body` is called once. Use one call of `run` per program: a new rank begins with
/// the first.
///
/// # Errors
/// - an error of `body`, unless another rank was lost meanwhile or `body` was interrupted by [`Error::MembersChange`];
/// - an error of another rank, when the same rank was lost 3 times without a commit in between;
/// - those of [`init`](crate::init) and of [`Checkpoint`].
///
/// ```
/// use horovod::ReduceOp::Average;
/// use horovod::elastic;
///
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Training {
///     step: usize,
///     weights: Vec<f32>,
/// }
///
/// fn main() -> horovod::Result<()> {
///     let mut training = Training { step: 0, weights: vec![0.0; 10] };
///     elastic::run(&mut training, |job, training| {
///         while training.step < 100 {
///             let mut gradient = vec![1.0f32; 10]; // of this rank's part of the batch
///             job.allreduce_in_place(&mut gradient, Average)?;
///             for (weight, gradient) in training.weights.iter_mut().zip(&gradient) {
///                 *weight -= 0.1 * gradient;
///             }
///             training.step += 1;
///             job.commit(training)?;
///         }
///         horovod::Result::Ok(())
///     })?;
///     assert_eq!(training.step, 100);
///     Ok(())
/// }
/// ```
pub fn run<S: Checkpoint, R, E: From<Error>>(
    state: &mut S,
    mut body: impl FnMut(&Job<'_, S>, &mut S) -> std::result::Result<R, E>,
) -> std::result::Result<Option<R>, E> {
    let progress = Mutex::new(Progress {
        run: RUNS.fetch_add(1, Ordering::Relaxed) + 1,
        saved: state.save()?,
        wants_sync: true,
        ..Progress::default()
    });
    loop {
        let hvd = match guard::init() {
            Ok(hvd) => hvd,
            Err(Error::Removed { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let job = Job {
            hvd,
            progress: &progress,
            state: std::marker::PhantomData,
        };
        match generation(&job, state, &mut body)? {
            Some(result) => return Ok(Some(result)),
            // No rank has failed.
            None => engine::shutdown_because(Leaving::Asked),
        }
    }
}

/// Calls `body` in one generation; `None` if another one follows.
fn generation<S: Checkpoint, R, E: From<Error>>(
    job: &Job<'_, S>,
    state: &mut S,
    body: &mut impl FnMut(&Job<'_, S>, &mut S) -> std::result::Result<R, E>,
) -> std::result::Result<Option<R>, E> {
    if let Err(error) = job.sync(state) {
        let Some(loss) = lost(job) else {
            return Err(error.into());
        };
        job.back_to_commit(state, &loss)?;
        return Ok(None);
    }
    let error = match body(job, state) {
        Ok(result) => return Ok(all_are_done(job)?.then_some(result)),
        Err(error) => error,
    };
    if job.progress().is_interrupted {
        tracing::warn!("elastic training is interrupted on {job:?}: members are added or removed");
        return Ok(None);
    }
    match lost(job) {
        Some(loss) if job.may_go_on_after(&loss) => {
            job.back_to_commit(state, &loss)?;
            Ok(None)
        }
        _ => Err(error),
    }
}

/// The error with which this generation has ended, if another one may follow.
fn lost<S>(job: &Job<'_, S>) -> Option<Error> {
    if !engine::is_elastic() {
        return None;
    }
    // There is no device to wait for: this only asks.
    let cause = job.hvd.engine.wait_for_devices(Duration::ZERO).err()?;
    let cause = Error::on(&job.hvd.engine, cause);
    matches!(cause, Error::Lost { .. } | Error::Left { .. }).then_some(cause)
}

/// Waits for all ranks: one that goes back to its last commit needs the others again. `false` if a rank was lost.
fn all_are_done<S>(job: &Job<'_, S>) -> Result<bool> {
    if !engine::is_elastic() {
        return Ok(true);
    }
    match job.barrier() {
        Ok(()) => Ok(true),
        Err(_) if lost(job).is_some() => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::{Checkpoint, Error, Result, check_runs, root, run};

    #[test]
    fn a_rank_alone_trains_once_and_an_error_of_the_function_is_that_of_the_run() {
        let mut steps = 1u32;
        let ended = run(&mut steps, |job, steps| {
            *steps += 1;
            job.commit(steps)?;
            Result::Ok(job.size())
        });
        assert_eq!((ended, steps), (Ok(Some(1)), 2));
        let ended = run(&mut steps, |_, _| -> Result<()> {
            Err(Error::invalid("of the function"))
        });
        assert_eq!(ended, Err(Error::invalid("of the function")));
    }

    #[test]
    fn a_state_is_restored_and_bytes_of_another_one_are_an_error() {
        let mut state = (7u64, vec![f32::NAN, -0.0], String::from("name"));
        let saved = state.save().unwrap();
        state = (0, Vec::new(), String::new());
        state.restore(&saved).unwrap();
        assert_eq!(
            (state.0, state.1[0].is_nan(), state.2.as_str()),
            (7, true, "name")
        );
        assert!(state.1[1].is_sign_negative());
        let error = state.restore(&saved[..3]).unwrap_err();
        assert!(error.is_mistake(), "{error}");
        let longer = [&saved[..], &[1, 2]].concat();
        let error = state.restore(&longer).unwrap_err();
        assert!(
            error.to_string().contains("2 bytes are left over"),
            "{error}"
        );
    }

    #[test]
    fn ranks_in_different_calls_are_an_error_that_names_one() {
        assert!(check_runs(&[&[1, 9], &[1, 7]]).is_ok());
        let error = check_runs(&[&[2, 9], &[2, 7], &[1, 0]]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("rank 0 in number 2, rank 2 in number 1"),
            "{error}"
        );
    }

    #[test]
    fn the_newest_state_that_was_trained_wins_then_the_lowest_rank() {
        let (nothing, committed, current) = (0, 1, 2);
        for (all, expected) in [
            ([[0, nothing], [0, nothing], [0, nothing]], 0),
            ([[9, nothing], [1, committed], [1, committed]], 1),
            ([[3, committed], [4, committed], [4, committed]], 1),
            ([[4, committed], [4, committed], [4, current]], 2),
        ] {
            let all: Vec<&[u64]> = all.iter().map(|entry| &entry[..]).collect();
            assert_eq!(root(&all), expected, "{all:?}");
        }
    }
}

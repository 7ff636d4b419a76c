//! The executor's interface, which starts and ends the workers of an elastic job: who decides knows nothing of how.
//!
//! `horovodrun` does it through agents (`agents`); an executor that has processes of its own does it by its own means.

use super::events::{Cause, WorkerId};
use crate::frames::Variables;

/// Starts and ends workers as [`Supervisor`](super::Supervisor) says. None of these calls may wait: what comes of them is told
/// to the supervisor when it is known.
pub trait Executor {
    /// Make it possible to start workers on this host. Where that takes time,
    /// [`Supervisor::host_ready`](super::Supervisor::host_ready) or
    /// [`Supervisor::host_lost`](super::Supervisor::host_lost) follows; `Err` says why it cannot be.
    fn open(&mut self, host: &str) -> Result<Opened, String>;

    /// No worker will be started on this host any more; those that run there may go on.
    fn close(&mut self, host: &str);

    /// Start a worker. When it has ended, however it did, [`Supervisor::ended`](super::Supervisor::ended) follows; `Err` is
    /// such an end.
    fn start(&mut self, worker: &NewWorker<'_>) -> Result<(), Cause>;

    /// End this worker, which need not be able to hear: ask it first, kill it soon.
    fn end(&mut self, worker: WorkerId);

    /// Find out whether a signal has stopped this worker, whose own process number is `pid`, and pass the answer to
    /// [`Supervisor::stopped_state`](super::Supervisor::stopped_state). An executor that cannot find out does nothing:
    /// the worker then counts as running.
    fn check_stopped(&mut self, worker: WorkerId, pid: u32) {
        let _ = (worker, pid);
    }

    /// The job is over: end everything that still runs; if it has succeeded, workers are about to end by themselves.
    fn finish(&mut self, has_succeeded: bool);

    /// Something that the user, or whoever watches, may want to know.
    fn notify(&mut self, news: News<'_>) {
        let _ = news;
    }
}

/// Whether a host can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// From now on.
    Ready,
    /// Not yet.
    Opening,
}

/// A worker that is to be started.
#[derive(Debug)]
pub struct NewWorker<'a> {
    /// Its number.
    pub worker: WorkerId,
    /// Its host.
    pub host: &'a str,
    /// Its place there, which no other worker has at the same time.
    pub local_rank: u32,
    /// The rank that it will perhaps have: that of the worker before it in this place, or one that is free.
    pub rank: u32,
    /// Environment of every worker of the job.
    pub of_job: &'a Variables,
    /// Additional environment of this worker.
    pub of_worker: Variables,
}

impl NewWorker<'_> {
    /// All of its environment that is about the job, for who starts it with nothing else in it but what is the user's.
    pub fn environment(&self) -> Variables {
        self.of_job.iter().chain(&self.of_worker).cloned().collect()
    }
}

/// Message of [`Executor::notify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum News<'a> {
    /// In words, for the user.
    Words(&'a str),
    /// A worker is known as this rank from now on.
    Rank(WorkerId, u32),
    /// These have met and train together, in the order of their ranks.
    Round {
        /// The round's number.
        number: u64,
        /// Its members.
        workers: &'a [WorkerId],
    },
    /// Those who were to be a round did not meet; why.
    NoRound(&'a str),
}

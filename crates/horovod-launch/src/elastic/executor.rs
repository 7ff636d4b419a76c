//! The executor's interface, which starts and ends the workers of an elastic job. The driver decides without knowledge
//! of the means.
//!
//! `horovodrun` uses agents (`agents`); an executor with its own kind of process implements this interface itself.

use super::events::{Cause, WorkerId};
use crate::frames::Variables;

/// Starts and ends workers as [`Supervisor`](super::Supervisor) requests. No call may block: later results are passed
/// to the supervisor by its methods.
pub trait Executor {
    /// Make it possible to start workers on this host. If that takes time, call
    /// [`Supervisor::host_ready`](super::Supervisor::host_ready) or
    /// [`Supervisor::host_lost`](super::Supervisor::host_lost) later. An `Err` has the reason why the host cannot be
    /// used.
    fn open(&mut self, host: &str) -> Result<Opened, String>;

    /// Close this host: no more workers will be started there. Workers that run there may continue.
    fn close(&mut self, host: &str);

    /// Start a worker. After any end of the worker, call [`Supervisor::ended`](super::Supervisor::ended). An `Err`
    /// counts as such an end.
    fn start(&mut self, worker: &NewWorker<'_>) -> Result<(), Cause>;

    /// End this worker, even if it does not react: request its end first, kill it soon after.
    fn end(&mut self, worker: WorkerId);

    /// Find out whether a signal has stopped this worker, whose own process number is `pid`. Pass the answer to
    /// [`Supervisor::stopped_state`](super::Supervisor::stopped_state). An executor that cannot find out does nothing:
    /// the worker then counts as running.
    fn check_stopped(&mut self, worker: WorkerId, pid: u32) {
        let _ = (worker, pid);
    }

    /// End everything that still runs, because the job is over. After a success the workers are about to end without a
    /// request.
    fn finish(&mut self, has_succeeded: bool);

    /// Receives news for the user or for a monitor.
    fn notify(&mut self, news: News<'_>) {
        let _ = news;
    }
}

/// Whether a host can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The host can be used from now on.
    Ready,
    /// The host cannot be used yet.
    Opening,
}

/// A worker that is to be started.
#[derive(Debug)]
pub struct NewWorker<'a> {
    /// Its number.
    pub worker: WorkerId,
    /// Host on which it runs.
    pub host: &'a str,
    /// Its slot on the host, which no other worker has at the same time.
    pub local_rank: u32,
    /// Its expected rank: that of the previous worker in this slot, or a free one.
    pub rank: u32,
    /// Environment of every worker of the job.
    pub of_job: &'a Variables,
    /// Additional environment of this worker.
    pub of_worker: Variables,
}

impl NewWorker<'_> {
    /// Returns the worker's whole environment as far as it concerns the job. For executors whose processes otherwise
    /// have only the user's environment.
    pub fn environment(&self) -> Variables {
        self.of_job.iter().chain(&self.of_worker).cloned().collect()
    }
}

/// Message of [`Executor::notify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum News<'a> {
    /// Text for the user.
    Words(&'a str),
    /// A worker has this rank from now on.
    Rank(WorkerId, u32),
    /// A round is established; its members train together, in the order of their ranks.
    Round {
        /// The round's number.
        number: u64,
        /// Its members.
        workers: &'a [WorkerId],
    },
    /// A round could not be established, for this reason.
    NoRound(&'a str),
}

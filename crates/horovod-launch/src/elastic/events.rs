//! Events that the elastic driver is told, and actions that it wants done.

use std::time::Duration;

use horovod_transport::rendezvous::RankAssignment;

pub use crate::report::Cause;

/// Number of a process; never used twice in a job.
pub type WorkerId = u32;
/// Since the job's start.
pub type Time = Duration;

/// The exit code of a job that fewer than `min_np` workers have brought to its end, because another had ended with 0.
pub(super) const TOO_FEW: u8 = 75;

/// Limits of the job.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Slots needed before anything is started, and workers for the first round.
    pub first_np: u32,
    /// Workers needed for every later round.
    pub min_np: u32,
    /// Most workers.
    pub max_np: u32,
    /// How long to wait: for enough workers, for members to come out of a round that is over for another, for a
    /// worker that shall be removed to come to its next commit.
    pub wait_timeout: Duration,
    /// How long the first round waits for those beyond `first_np`.
    pub start_grace: Duration,
    /// Most rounds after the first.
    pub reset_limit: Option<u32>,
    /// How long a failed host is left alone: the first time, and at most. `None`: for good, unless it was merely lost.
    pub cooldown: Option<(Duration, Duration)>,
    /// Failures of one slot within a minute after which it rests.
    pub slot_failures_max: u32,
    /// The list of hosts will never change.
    pub has_fixed_hosts: bool,
}

/// An event for the driver.
#[derive(Clone, Debug)]
pub enum Event {
    /// The hosts and slots that there are now.
    Hosts(Vec<(String, u32)>),
    /// Workers can be started there.
    HostReady(String),
    /// Nothing runs there any more, and cannot for now.
    HostLost {
        /// The host.
        host: String,
        /// Cause, for people.
        why: String,
        /// The exit code that follows from it.
        code: u8,
    },
    /// Nothing runs there any more, and it is not listed any more; what comes in its place is another host.
    HostGone {
        /// The host.
        host: String,
        /// Cause, for people.
        why: String,
    },
    /// A worker has joined the waiting set.
    Joined {
        /// Which.
        worker: WorkerId,
        /// Its training state: 0 for none, 1 for its last commit, 2 for the same state as all others of its round.
        training_state: u8,
    },
    /// It does not wait any more.
    Away(WorkerId),
    /// The training state of a member has changed.
    StateChanged {
        /// Which.
        worker: WorkerId,
        /// As in `Joined`.
        training_state: u8,
    },
    /// A member of the last round says that another does not answer.
    Silent {
        /// The silent worker.
        worker: WorkerId,
        /// The reporting worker.
        by: WorkerId,
    },
    /// The answer to [`Action::CheckStopped`].
    StoppedState {
        /// Of whom.
        worker: WorkerId,
        /// A signal has stopped its process, and none has let it go on.
        is_stopped: bool,
    },
    /// The last round formed has come to stand.
    Up,
    /// A worker's process ended.
    Exited {
        /// Which.
        worker: WorkerId,
        /// How.
        cause: Cause,
    },
}

/// An action of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make it possible to start workers on this host.
    Open(String),
    /// No worker will be started there.
    Close(String),
    /// Start a worker.
    Start {
        /// Its number.
        worker: WorkerId,
        /// Where.
        host: String,
        /// In which slot of the host.
        local: u32,
    },
    /// End a worker.
    Stop(WorkerId),
    /// Find out whether a worker is stopped.
    CheckStopped(WorkerId),
    /// Tell the others of its round that it is dead.
    AnnounceDeath {
        /// Which.
        worker: WorkerId,
        /// How it died.
        cause: String,
    },
    /// Let these workers be a round.
    Form(Vec<(WorkerId, RankAssignment)>),
    /// Tell the members of the round that the members change.
    Announce(u8),
    /// Send a worker that waits away for good.
    Dismiss(WorkerId, String),
    /// Tell the user.
    Note(String),
    /// The job is over; ends everything that runs.
    End(Ending),
}

/// How the job went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All workers of the last round ended with 0.
    Success,
    /// Why not, and the worker to blame if there is one.
    Failure {
        /// The worker to blame.
        worker: Option<WorkerId>,
        /// The exit code.
        code: u8,
        /// For people.
        why: String,
        /// Whether it is because every worker that held the training state has ended.
        is_state_lost: bool,
    },
}

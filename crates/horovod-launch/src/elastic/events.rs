//! Events for the elastic driver, and actions that it requests.

use std::time::Duration;

use horovod_transport::rendezvous::RankAssignment;

pub use crate::report::Cause;

/// Number of a process; never reused in a job.
pub type WorkerId = u32;
/// Time since the job's start.
pub type Time = Duration;

/// Exit code of a job that fewer than `min_np` workers have finished, because another worker had ended with 0 before.
pub(super) const TOO_FEW: u8 = 75;

/// Limits of the job.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Slots needed before any worker is started, and workers needed for the first round.
    pub first_np: u32,
    /// Workers needed for every later round.
    pub min_np: u32,
    /// Maximum number of workers.
    pub max_np: u32,
    /// Limit of three waits: for enough workers, for members to leave a finished round, and for a worker to be removed
    /// to reach its next commit.
    pub wait_timeout: Duration,
    /// How long the first round waits for workers beyond `first_np`.
    pub start_grace: Duration,
    /// Maximum number of rounds after the first.
    pub reset_limit: Option<u32>,
    /// How long a failed host is not used: the first time, and at most. `None`: permanently, unless the host was merely
    /// lost.
    pub cooldown: Option<(Duration, Duration)>,
    /// Number of failures within a minute after which a slot rests.
    pub slot_failures_max: u32,
    /// Whether the list of hosts will never change.
    pub has_fixed_hosts: bool,
}

/// An event for the driver.
#[derive(Clone, Debug)]
pub enum Event {
    /// The list of hosts and their slots has changed; these are all hosts.
    Hosts(Vec<(String, u32)>),
    /// Workers can be started on this host.
    HostReady(String),
    /// A host was lost: no worker runs there any more, and none can be started for now.
    HostLost {
        /// The host.
        host: String,
        /// Cause, as text for the user.
        why: String,
        /// The job's exit code if this loss ends the job.
        code: u8,
    },
    /// A host was lost and is not listed any more. A host that replaces it counts as another host.
    HostGone {
        /// The host.
        host: String,
        /// Cause, as text for the user.
        why: String,
    },
    /// A worker has joined the waiting set.
    Joined {
        /// The worker.
        worker: WorkerId,
        /// Its training state: 0 for none, 1 for its last commit, 2 for the same state as all others of its round.
        training_state: u8,
    },
    /// This worker has left the waiting set.
    Away(WorkerId),
    /// The training state of a member has changed.
    StateChanged {
        /// The worker.
        worker: WorkerId,
        /// Its training state, as in [`Event::Joined`].
        training_state: u8,
    },
    /// A member of the last round reports that another does not answer.
    Silent {
        /// The silent worker.
        worker: WorkerId,
        /// The reporting worker.
        by: WorkerId,
    },
    /// The answer to [`Action::CheckStopped`].
    StoppedState {
        /// The worker.
        worker: WorkerId,
        /// Whether a signal has stopped its process and no signal has continued it since.
        is_stopped: bool,
    },
    /// The last round formed is established: its members have each other's addresses.
    Up,
    /// A worker's process ended.
    Exited {
        /// The worker.
        worker: WorkerId,
        /// Cause of its end.
        cause: Cause,
    },
}

/// An action of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make it possible to start workers on this host.
    Open(String),
    /// Close a host: no more workers will be started there.
    Close(String),
    /// Start a worker.
    Start {
        /// Its number.
        worker: WorkerId,
        /// Its host.
        host: String,
        /// Its slot on the host.
        local: u32,
    },
    /// End a worker.
    Stop(WorkerId),
    /// Find out whether a worker is stopped.
    CheckStopped(WorkerId),
    /// Inform the other members of its round that a worker is dead.
    AnnounceDeath {
        /// The worker.
        worker: WorkerId,
        /// Cause of its death.
        cause: String,
    },
    /// Form a round of these workers.
    Form(Vec<(WorkerId, RankAssignment)>),
    /// Inform the members of the round that the members change; the number is the kind of change.
    Announce(u8),
    /// Dismiss a waiting worker permanently, for the given reason.
    Dismiss(WorkerId, String),
    /// Show a text to the user.
    Note(String),
    /// End the job and everything that runs.
    End(Ending),
}

/// Result of the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All workers of the last round ended with 0.
    Success,
    /// The job failed.
    Failure {
        /// The worker to blame.
        worker: Option<WorkerId>,
        /// The exit code.
        code: u8,
        /// Reason, as text for the user.
        why: String,
        /// Whether the job failed because every worker with the training state has ended.
        is_state_lost: bool,
    },
}

//! The configuration of a rendezvous server, and the events it reports.

use std::{net::IpAddr, time::Duration};

use horovod_protocol::{Generation, Rank};

use super::messages::RANKS_MAX;
use crate::JobKey;
use crate::ports::Ports;

/// Configuration of a rendezvous server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Addresses to listen on. `0.0.0.0` and `::` mean all; a job on one host needs only loopback.
    pub bind: Vec<IpAddr>,
    /// The port on each of them.
    pub ports: Ports,
    /// The job's key.
    pub key: JobKey,
    /// The number of ranks; of an elastic job the largest that is possible.
    pub size: u32,
    /// Whether the members change from round to round, and the launcher says who they are.
    pub elastic: bool,
    /// The command that checks the network between the hosts of this job; empty: it is made of the hosts' names.
    pub check: String,
}

impl ServerConfig {
    /// A server for `size` ranks on these addresses, on a port of the system's choice.
    pub fn new(bind: Vec<IpAddr>, key: JobKey, size: u32) -> Self {
        Self {
            bind,
            ports: Ports::Any,
            key,
            size,
            elastic: false,
            check: String::new(),
        }
    }

    /// A server for an elastic job.
    pub fn elastic(bind: Vec<IpAddr>, key: JobKey) -> Self {
        Self {
            elastic: true,
            ..Self::new(bind, key, RANKS_MAX as u32)
        }
    }
}

/// Event at the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerEvent {
    /// A rank registered.
    Registered {
        /// The rank.
        rank: Rank,
        /// Its host.
        hostname: String,
        /// Its process.
        pid: u32,
    },
    /// All ranks have met.
    Up(Generation),
    /// A round failed; the ranks know.
    Failed(String),
    /// A registered rank closed its connection.
    Left(Rank),
    /// The processes of these ranks have exited with code 0 while other ranks waited for them at the rendezvous. The
    /// ranks that waited got an error.
    Absent(Vec<Rank>),
    /// Ranks cannot connect to the rendezvous or to each other: what all ranks fail with.
    Unreachable(String),
    /// A worker of an elastic job waits for the next round; what it holds of the training state.
    Joined {
        /// The worker.
        worker: u32,
        /// 0 nothing, 1 that of its last commit, 2 the same as all others of its round.
        training_state: u8,
        /// Its process, as it calls itself.
        pid: u32,
        /// How long it allows others to be silent.
        heartbeat: Option<Duration>,
    },
    /// A worker of an elastic job does not wait any more.
    Away {
        /// The worker.
        worker: u32,
    },
    /// The training state that a worker of an elastic job has changed.
    StateChanged {
        /// The worker.
        worker: u32,
        /// As in `Joined`.
        training_state: u8,
    },
    /// A rank gives another up for its silence: its process or its host stands still, or they cannot reach each
    /// other. Both are ranks, and in an elastic job workers.
    Silent {
        /// The silent rank.
        who: u32,
        /// The reporting rank.
        by: u32,
    },
}

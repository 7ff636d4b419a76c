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
    /// The port on each address.
    pub ports: Ports,
    /// The job's key.
    pub key: JobKey,
    /// Number of ranks; for an elastic job the largest possible number.
    pub size: u32,
    /// Whether the members change from round to round and are chosen by the launcher.
    pub elastic: bool,
    /// The command that checks the network between the hosts of this job; if empty, it is built from the host names.
    pub check: String,
}

impl ServerConfig {
    /// Returns the configuration for `size` ranks on these addresses, with a port that the system chooses.
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

    /// Returns the configuration for an elastic job.
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
        /// Its process number.
        pid: u32,
    },
    /// A round is established: all its ranks have registered, and the table of their addresses was sent.
    Up(Generation),
    /// A round could not be established; its ranks were informed of this cause.
    Failed(String),
    /// A registered rank closed its connection.
    Left(Rank),
    /// The processes of these ranks have exited with code 0 while other ranks waited for them at the rendezvous. The
    /// waiting ranks received an error.
    Absent(Vec<Rank>),
    /// Ranks cannot connect to the rendezvous or to each other. All ranks fail with this text.
    Unreachable(String),
    /// A worker of an elastic job waits for the next round.
    Joined {
        /// The worker.
        worker: u32,
        /// Its training state: 0 for none, 1 for its last commit, 2 for the same state as all others of its round.
        training_state: u8,
        /// Its own process number.
        pid: u32,
        /// How long it allows its peers to be silent.
        heartbeat: Option<Duration>,
    },
    /// A worker of an elastic job has left the waiting set.
    Away {
        /// The worker.
        worker: u32,
    },
    /// The training state of a worker of an elastic job has changed.
    StateChanged {
        /// The worker.
        worker: u32,
        /// Its training state, as in [`ServerEvent::Joined`].
        training_state: u8,
    },
    /// A rank reports another as silent. The silent process or its host has stopped, or the two cannot reach each
    /// other. Both are ranks; in an elastic job they are workers.
    Silent {
        /// The silent rank.
        who: u32,
        /// The reporting rank.
        by: u32,
    },
}

//! The configuration of a connection attempt, and its errors.

use std::{fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use horovod_protocol::Rank;
#[cfg(doc)]
use horovod_protocol::Tree;
use horovod_settings as settings;
use rustix::io::Errno;

use crate::JobKey;
use crate::congestion::Congestion;
use crate::ports::Ports;

/// Maximum number of TCP data connections between two ranks.
pub const CONNECTIONS_MAX: u8 = settings::CONNECTIONS_PER_PEER.kind.most;

/// Default of [`MeshConfig::fan_out`]: close to the best value at any number of ranks (docs/scaling.md).
pub const FAN_OUT: u32 = settings::CONTROL_FAN_OUT.kind.default;

/// The addresses of the rendezvous, and its key.
#[derive(Clone, Debug)]
pub struct RendezvousPlace {
    /// All addresses are tried.
    pub addresses: Vec<SocketAddr>,
    /// The job's key.
    pub key: JobKey,
}

/// Default of [`MeshConfig::heartbeat`]: much longer than the delays of a loaded machine or of a busy local network.
pub const HEARTBEAT: Duration =
    Duration::from_secs(settings::HEARTBEAT_TIMEOUT_SECONDS.kind.default as u64);

type Find = dyn Fn() -> Result<RendezvousPlace, String> + Send + Sync;

/// Returns the place of the rendezvous. The transport calls it repeatedly until the rendezvous answers there, because
/// rank 0 may not have started yet.
#[derive(Clone)]
pub struct Finder(Arc<Find>);

impl Finder {
    /// Wraps a function; its error describes what is still missing.
    pub fn new(find: impl Fn() -> Result<RendezvousPlace, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(find))
    }

    pub(crate) fn find(&self) -> Result<RendezvousPlace, String> {
        (self.0)()
    }
}

impl fmt::Debug for Finder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Finder(..)")
    }
}

/// Polled several times a second: whether the caller wants to abort.
#[derive(Clone)]
pub struct Interrupt(Arc<dyn Fn() -> bool + Send + Sync>);

impl Interrupt {
    /// Wraps a function that returns whether the caller wants to abort.
    pub fn new(wants_to_leave: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(wants_to_leave))
    }

    /// Returns whether the caller wants to abort.
    pub fn wants_to_leave(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupt(..)")
    }
}

/// Configuration of one rank that joins a job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MeshConfig {
    /// This rank.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
    /// The job's key.
    pub key: JobKey,
    /// Addresses of the rendezvous; all are tried.
    pub rendezvous: Vec<SocketAddr>,
    /// Replaces `rendezvous` and `key` when these are not known from the start.
    pub finder: Option<Finder>,
    /// Where to report to this host's agent that the launcher cannot be reached ([`crate::unreached::post`]).
    pub post: Option<String>,
    /// How the caller aborts; `None`: only `timeout` ends the attempt.
    pub interrupt: Option<Interrupt>,
    /// This host's name, for messages and as part of its identity; empty: ask the system.
    pub hostname: String,
    /// Network interfaces (names or addresses) for links between hosts; empty: all.
    pub interfaces: Vec<String>,
    /// The ports on which this rank listens for other ranks.
    pub ports: Ports,
    /// Time limit of the whole attempt.
    pub timeout: Duration,
    /// Whether ranks of one host share memory; off: TCP between all. A host's ranks share memory only if all of them
    /// have this on.
    pub shm: bool,
    /// Bytes of each rank's staging area in shared memory (the first rank of a host decides).
    pub staging: usize,
    /// TCP connections between two ranks for data, 1 to [`CONNECTIONS_MAX`] (rank 0 decides).
    pub connections: u8,
    /// Congestion control for this rank's data over TCP.
    pub congestion: Congestion,
    /// Maximum number of ranks that send control messages to one rank, see [`Tree::new`] (rank 0 decides).
    pub fan_out: u32,
    /// How long a rank may be silent before its neighbours report it as lost, and how long a TCP connection may stall
    /// before the system ends it. `None`: no limit for ranks, the system's limits for connections (rank 0 decides).
    pub heartbeat: Option<Duration>,
    /// Arbitrary bytes, up to 4 KiB, that must be equal on all ranks for the layers above. All ranks receive rank 0's
    /// bytes as [`crate::Mesh::settings`].
    pub settings: Vec<u8>,
    /// Whether unencrypted data between hosts has checksums (rank 0 decides).
    pub checksums: bool,
    /// Whether TCP data links are encrypted (the connecting side, the higher rank, decides). The registration is always
    /// encrypted.
    pub encrypt: bool,
    /// Identity of this process in an elastic job, where rank and size follow from the round.
    pub elastic: Option<Membership>,
}

/// Identity of a process of an elastic job. The launcher assigns it a place in each round.
#[derive(Clone, Copy, Debug)]
pub struct Membership {
    /// The number that the launcher gave this process.
    pub worker: u32,
    /// Training state of this worker: 0 for none, 1 for its last commit, 2 for the same state as all others of its last
    /// round.
    pub training_state: u8,
    /// How long to wait for the next round; the launcher answers earlier.
    pub wait_timeout: Duration,
}

impl MeshConfig {
    /// Returns the defaults: shared memory with 8 MiB of staging per rank, all interfaces, no encryption but checksums
    /// after the handshake, 30 s for the whole attempt, [`HEARTBEAT`].
    pub fn new(rank: Rank, size: u32, key: JobKey, rendezvous: Vec<SocketAddr>) -> Self {
        Self {
            rank,
            size,
            key,
            rendezvous,
            finder: None,
            post: None,
            interrupt: None,
            hostname: String::new(),
            interfaces: Vec::new(),
            ports: Ports::Any,
            timeout: Duration::from_secs(30),
            shm: true,
            staging: 8 << 20,
            connections: 1,
            congestion: Congestion::Auto,
            fan_out: FAN_OUT,
            heartbeat: Some(HEARTBEAT),
            settings: Vec::new(),
            checksums: true,
            encrypt: false,
            elastic: None,
        }
    }
}

/// Reason why a rank could not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No candidate address led to the rendezvous.
    #[error("{rank} cannot register with the rendezvous within {}: {}", secs(*.waited), tried.join("; "))]
    Rendezvous {
        /// This rank.
        rank: Rank,
        /// Time that the rank spent on the attempt.
        waited: Duration,
        /// Each address with its error.
        tried: Vec<String>,
    },
    /// The caller aborted.
    #[error("{rank} was interrupted while it joined the job")]
    Interrupted {
        /// This rank.
        rank: Rank,
    },
    /// The rendezvous refuses this rank.
    #[error("the rendezvous refuses {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: Rank,
        /// The reason.
        reason: String,
    },
    /// Other ranks never registered.
    #[error(
        "{} of {size} ranks did not register within {}: {}. A rank that cannot connect says in its own output what it \
         tried; one that says nothing has not called hvd.init() yet",
        missing.len(), secs(*.waited), list(missing)
    )]
    Missing {
        /// The missing ranks.
        missing: Vec<Rank>,
        /// Number of ranks of the job.
        size: u32,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// The launcher has removed this process from its elastic job.
    #[error("this process is no longer part of the job: {0}")]
    Removed(String),
    /// Another rank could not join, or died meanwhile.
    #[error("the job could not be set up: {0}")]
    Aborted(String),
    /// The connection to the rendezvous ended before the job was set up.
    #[error("{rank} lost the rendezvous while the job was set up: {cause}")]
    RendezvousLost {
        /// This rank.
        rank: Rank,
        /// The cause.
        cause: String,
    },
    /// Some links could not be established in time.
    #[error("{rank} on {host} could not connect within {}: {}", secs(*.waited), links.join("; "))]
    Links {
        /// This rank.
        rank: Rank,
        /// Its host.
        host: String,
        /// Time that the rank spent on the attempt.
        waited: Duration,
        /// Each missing link: its purpose, both ends and the errors.
        links: Vec<String>,
    },
    /// The shared memory for the ranks of this host failed.
    #[error(
        "{rank} on {host} cannot share memory (switch it off to use TCP instead): {source}{}",
        remedy(source)
    )]
    SharedMemory {
        /// This rank.
        rank: Rank,
        /// Its host.
        host: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// Another error of the operating system.
    #[error("{rank}: {what}: {source}{}", remedy(source))]
    System {
        /// This rank.
        rank: Rank,
        /// The attempted call.
        what: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
}

fn secs(time: Duration) -> String {
    format!("{:.0} s", time.as_secs_f64().ceil())
}

/// Returns advice to the user, for errors with one usual cause.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE) => {
            "; this process may open no more files and sockets: raise the limit (`ulimit -n 4096`), or look for what \
             leaves files open"
        }
        _ => "",
    }
}

/// Returns a list of ranks as text: `ranks 1, 3`.
pub(crate) fn list(ranks: &[Rank]) -> String {
    const SHOWN: usize = 16;
    let names: Vec<String> = ranks.iter().take(SHOWN).map(|r| r.0.to_string()).collect();
    let rest = ranks.len().saturating_sub(SHOWN);
    let more = if rest > 0 {
        format!(" and {rest} more")
    } else {
        String::new()
    };
    format!(
        "rank{} {}{more}",
        if ranks.len() == 1 { "" } else { "s" },
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_name_who_and_how_long() {
        let waited = Duration::from_millis(29_999);
        let missing = vec![Rank(1), Rank(3)];
        let error = ConnectError::Missing {
            missing,
            size: 4,
            waited,
        };
        assert_eq!(
            error.to_string(),
            "2 of 4 ranks did not register within 30 s: ranks 1, 3. A rank that cannot connect says in its own output \
             what it tried; one that says nothing has not called hvd.init() yet"
        );
        let missing = (0..20).map(Rank).collect();
        let text = ConnectError::Missing {
            missing,
            size: 40,
            waited,
        }
        .to_string();
        assert!(text.contains("14, 15 and 4 more."), "{text}");
    }

    #[test]
    fn too_many_open_files_come_with_the_remedy() {
        let of = |errno: Errno| {
            let error = ConnectError::System {
                rank: Rank(1),
                what: "cannot connect to the rendezvous",
                source: errno.into(),
            };
            error.to_string()
        };
        let text = of(Errno::MFILE);
        assert!(text.contains("Too many open files"), "{text}");
        assert!(text.contains("`ulimit -n 4096`"), "{text}");
        assert!(!of(Errno::ACCESS).contains("ulimit"));
    }
}

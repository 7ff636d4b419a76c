//! The configuration of connecting, and the errors it can end with.

use std::{fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use horovod_protocol::Rank;
#[cfg(doc)]
use horovod_protocol::Tree;
use horovod_settings as settings;
use rustix::io::Errno;

use crate::JobKey;
use crate::ports::Ports;

/// Most TCP connections for data between two ranks.
pub const CONNECTIONS_MAX: u8 = settings::CONNECTIONS_PER_PEER.kind.most;

/// Default of [`MeshConfig::fan_out`]: about the best at any number of ranks (docs/scaling.md).
pub const FAN_OUT: u32 = settings::CONTROL_FAN_OUT.kind.default;

/// Where the rendezvous is, and the key that it has.
#[derive(Clone, Debug)]
pub struct Place {
    /// Addresses; all are tried.
    pub addresses: Vec<SocketAddr>,
    /// The job's key.
    pub key: JobKey,
}

/// Default of [`MeshConfig::heartbeat`]: long against what a loaded machine or a busy network of one building takes.
pub const HEARTBEAT: Duration =
    Duration::from_secs(settings::HEARTBEAT_TIMEOUT_SECONDS.kind.default as u64);

/// Which congestion control the system uses for the data that this rank sends over TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// The system's choice, but cubic instead of bbr where the way is short (docs/algorithms.md).
    #[default]
    Auto,
    /// The system's choice.
    System,
    /// The one of this name (`net.ipv4.tcp_allowed_congestion_control`).
    Named(String),
}

impl Congestion {
    /// From `auto`, `system` or a name.
    pub fn from_setting(text: &str) -> Self {
        match text.trim().to_ascii_lowercase().as_str() {
            "auto" => Self::Auto,
            "system" => Self::System,
            name => Self::Named(name.into()),
        }
    }
}

type Find = dyn Fn() -> Result<Place, String> + Send + Sync;

/// Asked again and again where the rendezvous is, until it answers there: rank 0 may not have started yet.
#[derive(Clone)]
pub struct Finder(Arc<Find>);

impl Finder {
    /// From a function; its error says what is still missing.
    pub fn new(find: impl Fn() -> Result<Place, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(find))
    }

    pub(crate) fn find(&self) -> Result<Place, String> {
        (self.0)()
    }
}

impl fmt::Debug for Finder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Finder(..)")
    }
}

/// Asked several times a second whether to give up.
#[derive(Clone)]
pub struct Interrupt(Arc<dyn Fn() -> bool + Send + Sync>);

impl Interrupt {
    /// From a function that says whether the caller wants to leave.
    pub fn new(wants_to_leave: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(wants_to_leave))
    }

    /// Whether the caller wants to leave.
    pub fn wants_to_leave(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupt(..)")
    }
}

/// How one rank joins a job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MeshConfig {
    /// This rank.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
    /// The job's key.
    pub key: JobKey,
    /// Where the rendezvous may be reached; all are tried.
    pub rendezvous: Vec<SocketAddr>,
    /// Instead of `rendezvous` and `key`, when these are not known from the start.
    pub finder: Option<Finder>,
    /// Where to tell the agent of this host that the launcher cannot be reached ([`crate::unreached::post`]).
    pub post: Option<String>,
    /// How the caller breaks off; `None`: not before `timeout`.
    pub interrupt: Option<Interrupt>,
    /// This host's name, for people and as part of its identity; empty: ask the system.
    pub hostname: String,
    /// Network interfaces (names or addresses) for links between hosts; empty: all.
    pub interfaces: Vec<String>,
    /// The ports on which it listens for other ranks.
    pub ports: Ports,
    /// Limit for everything together.
    pub timeout: Duration,
    /// Whether ranks of one host share memory; off: TCP between all. A host's ranks share memory
    /// only if all of them have this on.
    pub shm: bool,
    /// Bytes of each rank's staging area in shared memory (the first rank of a host decides).
    pub staging: usize,
    /// TCP connections between two ranks for data, 1 to [`CONNECTIONS_MAX`] (rank 0 decides).
    pub connections: u8,
    /// How TCP sends this rank's data.
    pub congestion: Congestion,
    /// Ranks that one of them listens to for control, see [`Tree::new`] (rank 0 decides).
    pub fan_out: u32,
    /// How long a rank may say nothing before its neighbours give it up, and a connection may stand still before
    /// the system does; `None`: for ever, and as the system is set up (rank 0 decides).
    pub heartbeat: Option<Duration>,
    /// Anything, up to 4 KiB, that the layers above want to be equal everywhere: all ranks get what
    /// rank 0 has here, as [`crate::Mesh::settings`].
    pub settings: Vec<u8>,
    /// Whether what travels between hosts in clear has checksums (rank 0 decides).
    pub checksums: bool,
    /// Whether TCP data links are encrypted (the connecting side, the higher rank, decides).
    /// Registration always is.
    pub encrypt: bool,
    /// In an elastic job: who this process is. Rank and size come from the round then.
    pub elastic: Option<Membership>,
}

/// A process of an elastic job, whose launcher gives it a place in each round.
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
    /// The defaults: shared memory with 8 MiB of staging per rank, all interfaces, no encryption
    /// but checksums after the handshake, 30 s for everything, [`HEARTBEAT`].
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

/// Why a rank could not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No candidate address led to the rendezvous.
    #[error("{rank} cannot register with the rendezvous within {}: {}", secs(*.waited), tried.join("; "))]
    Rendezvous {
        /// This rank.
        rank: Rank,
        /// How long it tried.
        waited: Duration,
        /// Each address and what happened there.
        tried: Vec<String>,
    },
    /// The caller wanted to leave.
    #[error("{rank} was interrupted while it joined the job")]
    Interrupted {
        /// This rank.
        rank: Rank,
    },
    /// The rendezvous does not want this rank.
    #[error("the rendezvous refuses {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// Other ranks never registered.
    #[error(
        "{} of {size} ranks did not register within {}: {}. A rank that cannot connect says in its own output what it \
         tried; one that says nothing has not called hvd.init() yet",
        missing.len(), secs(*.waited), list(missing)
    )]
    Missing {
        /// Those ranks.
        missing: Vec<Rank>,
        /// Number of ranks of the job.
        size: u32,
        /// How long this rank waited.
        waited: Duration,
    },
    /// This process is not wanted in its elastic job any more.
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
        /// Why.
        cause: String,
    },
    /// Some links could not be made in time.
    #[error("{rank} on {host} could not connect within {}: {}", secs(*.waited), links.join("; "))]
    Links {
        /// This rank.
        rank: Rank,
        /// Its host.
        host: String,
        /// How long it tried.
        waited: Duration,
        /// Each missing link: which, from where to where, and why not.
        links: Vec<String>,
    },
    /// The memory for the ranks of this host.
    #[error("{rank} on {host} cannot share memory (switch it off to use TCP instead): {source}")]
    SharedMemory {
        /// This rank.
        rank: Rank,
        /// Its host.
        host: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// Something else that the operating system refused.
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

/// Advice to the user, for errors with one usual cause.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::MFILE) => {
            "; this process may open no more files and sockets: raise the limit (`ulimit -n 4096`), or look for what \
             leaves files open"
        }
        _ => "",
    }
}

/// `ranks 1, 3`.
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

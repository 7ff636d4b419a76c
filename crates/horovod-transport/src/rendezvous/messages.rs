//! Messages between rendezvous and ranks. Every length is bounded.

use std::net::SocketAddr;
use std::time::Duration;

use horovod_protocol::{DecodeError, wire::cut_at};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{compact, unreached::Unreached};

/// Longest message to the server, in bytes.
pub(crate) const TO_SERVER_MAX: usize = 64 << 10;
/// Longest message to a client, in bytes.
pub(crate) const TO_CLIENT_MAX: usize = 64 << 20;
/// Longest text, in bytes.
const TEXT_MAX: usize = 8 << 10;
/// Maximum number of addresses of one rank.
const ADDRESSES_MAX: usize = 64;
/// Maximum number of ranks of a job.
pub(super) const RANKS_MAX: usize = 1 << 16;
/// Longest settings of a job, in bytes.
const SETTINGS_MAX: usize = 4 << 10;

/// Settings that must be equal on all ranks: every rank sends its own, and rank 0's apply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Common {
    /// Number of TCP data connections between two ranks.
    pub(crate) connections: u8,
    /// Maximum number of ranks that send control messages to one rank, see `Tree`.
    pub(crate) fan_out: u32,
    /// How long a rank or a connection may be silent, in whole milliseconds; `None`: no limit.
    #[serde(serialize_with = "put_millis", deserialize_with = "get_millis")]
    pub(crate) heartbeat: Option<Duration>,
    /// Whether unencrypted data between hosts has checksums.
    pub(crate) checksums: bool,
    /// Settings of the layers above, opaque here.
    #[serde(
        serialize_with = "put_settings",
        deserialize_with = "compact::bytes::<SETTINGS_MAX, _>"
    )]
    pub(crate) settings: Vec<u8>,
}

/// Entry of one rank in the roster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberEntry {
    #[serde(
        serialize_with = "compact::put_text::<TEXT_MAX, _>",
        deserialize_with = "compact::text::<TEXT_MAX, _>"
    )]
    pub(crate) identity: String,
    #[serde(
        serialize_with = "compact::put_text::<TEXT_MAX, _>",
        deserialize_with = "compact::text::<TEXT_MAX, _>"
    )]
    pub(crate) hostname: String,
    pub(crate) pid: u32,
    pub(crate) shm: bool,
}

/// A rank's message when it registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    /// The rank's roster entry.
    pub(crate) member: MemberEntry,
    /// The common settings of the job, if the rank becomes rank 0.
    pub(crate) common: Common,
}

/// A rank's place in a round of an elastic job, assigned by the launcher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAssignment {
    /// Position in the round.
    pub rank: u32,
    /// The slot of its host in which the process was started. It never changes.
    pub local_rank: u32,
    /// Number of ranks on its host in this round.
    pub local_size: u32,
    /// Position of its host among the hosts that have this local rank.
    pub cross_rank: u32,
    /// Number of hosts that have this local rank.
    pub cross_size: u32,
    /// Whether any rank of the round lacks the current training state.
    pub needs_sync: bool,
}

/// Addresses of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Where {
    /// TCP candidates; empty if the rank waits for no peer over TCP.
    #[serde(
        serialize_with = "compact::put_list::<ADDRESSES_MAX, _, _>",
        deserialize_with = "compact::list::<ADDRESSES_MAX, _, _>"
    )]
    pub(crate) addresses: Vec<SocketAddr>,
    /// The local socket, if the rank is the first of its host and others share memory with it.
    pub(crate) local: Option<String>,
}

/// Message from a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToServer {
    Hello {
        rank: u32,
        size: u32,
        wait_timeout_ms: u64,
        member: MemberEntry,
        common: Common,
    },
    Ready(Where),
    Failed {
        #[serde(
            serialize_with = "compact::put_text::<TEXT_MAX, _>",
            deserialize_with = "compact::text::<TEXT_MAX, _>"
        )]
        text: String,
    },
    /// In an elastic job: this worker requests a place in the next round.
    Join {
        worker: u32,
        training_state: u8,
        /// How long the members of a round may take to be ready.
        timeout_ms: u64,
        member: MemberEntry,
        common: Common,
    },
    /// In an elastic job: the training state of this worker has changed.
    StateChanged {
        training_state: u8,
    },
    /// A neighbour was silent for longer than the heartbeat timeout, so this rank reports it.
    Silent {
        rank: u32,
    },
    /// This rank cannot connect to others.
    Unreached(Unreached),
}

/// Message to a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToClient {
    Roster {
        generation: u64,
        #[serde(deserialize_with = "compact::list::<RANKS_MAX, _, _>")]
        members: Vec<MemberEntry>,
        common: Common,
        /// The rank's place; only in an elastic job.
        assignment: Option<RankAssignment>,
    },
    Table {
        #[serde(deserialize_with = "compact::list::<RANKS_MAX, _, _>")]
        places: Vec<Where>,
    },
    Missing {
        #[serde(deserialize_with = "compact::list::<RANKS_MAX, _, _>")]
        ranks: Vec<u32>,
    },
    Refused {
        #[serde(
            serialize_with = "compact::put_text::<TEXT_MAX, _>",
            deserialize_with = "compact::text::<TEXT_MAX, _>"
        )]
        text: String,
    },
    Aborted {
        #[serde(
            serialize_with = "compact::put_text::<TEXT_MAX, _>",
            deserialize_with = "compact::text::<TEXT_MAX, _>"
        )]
        text: String,
    },
    PeerDied {
        rank: u32,
        #[serde(
            serialize_with = "compact::put_text::<TEXT_MAX, _>",
            deserialize_with = "compact::text::<TEXT_MAX, _>"
        )]
        host: String,
        #[serde(
            serialize_with = "compact::put_text::<TEXT_MAX, _>",
            deserialize_with = "compact::text::<TEXT_MAX, _>"
        )]
        cause: String,
    },
    /// The members of the job change: kind 1 if a member is removed, 2 if one is added, 3 if both.
    HostsUpdated { version: u64, kind: u8 },
    /// This worker was removed from the job.
    Removed {
        #[serde(
            serialize_with = "compact::put_text::<TEXT_MAX, _>",
            deserialize_with = "compact::text::<TEXT_MAX, _>"
        )]
        text: String,
    },
}

pub(super) fn cut(text: &str) -> &str {
    cut_at(text, TEXT_MAX)
}

/// Writes a duration in milliseconds; 0 means no limit.
fn put_millis<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    let millis = time.map_or(0, |time| time.as_millis().max(1));
    u64::try_from(millis).unwrap_or(u64::MAX).serialize(to)
}

fn get_millis<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let millis = Some(u64::deserialize(from)?).filter(|millis| *millis > 0);
    Ok(millis.map(Duration::from_millis))
}

fn put_settings<S: Serializer>(settings: &[u8], to: S) -> Result<S::Ok, S::Error> {
    compact::put_bytes(&settings[..settings.len().min(SETTINGS_MAX)], to)
}

impl ToServer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        compact::encode(self, &mut out);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        compact::decode(bytes)
    }
}

impl ToClient {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        compact::encode(self, &mut out);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        compact::decode(bytes)
    }
}

#[cfg(any(test, feature = "testing"))]
pub(crate) mod samples;
#[cfg(test)]
mod tests;

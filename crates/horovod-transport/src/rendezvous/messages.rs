//! Messages between rendezvous and ranks; every length is bounded.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use horovod_protocol::{
    DecodeError,
    wire::{Reader, Writer, cut_at},
};

use crate::unreached::Unreached;

/// Longest message to the server, in bytes.
pub(crate) const TO_SERVER_MAX: usize = 64 << 10;
/// Longest message to a client, in bytes.
pub(crate) const TO_CLIENT_MAX: usize = 64 << 20;
/// Longest text, in bytes.
const TEXT_MAX: usize = 8 << 10;
/// Most addresses of one rank.
const ADDRESSES_MAX: usize = 64;
/// Most ranks of a job.
pub(super) const RANKS_MAX: usize = 1 << 16;
/// Longest settings of a job, in bytes.
const SETTINGS_MAX: usize = 4 << 10;

/// Settings that must be equal on all ranks: every rank sends its own, rank 0's count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Common {
    /// TCP connections for data between two ranks.
    pub(crate) connections: u8,
    /// Ranks that one of them listens to, see `Tree`.
    pub(crate) fan_out: u32,
    /// How long a rank or a connection may be silent, in whole milliseconds; `None`: for ever.
    pub(crate) heartbeat: Option<Duration>,
    /// Whether what travels between hosts in clear has checksums.
    pub(crate) checksums: bool,
    /// Settings of the layers above, opaque here.
    pub(crate) settings: Vec<u8>,
}

/// Entry of one rank in the roster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberEntry {
    pub(crate) identity: String,
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

/// A rank's place in a round of an elastic job, where its launcher gives the numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankAssignment {
    /// Position in the round.
    pub rank: u32,
    /// The slot of its host that the process was started in; it keeps it.
    pub local_rank: u32,
    /// Ranks on its host in this round.
    pub local_size: u32,
    /// Position of its host among the hosts that have this local rank.
    pub cross_rank: u32,
    /// Number of such hosts.
    pub cross_size: u32,
    /// Whether some rank of the round does not hold the current training state.
    pub needs_sync: bool,
}

/// Where a rank can be reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Where {
    /// TCP candidates; empty if it waits for nobody there.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The local socket, if it is the first of its host and others share memory with it.
    pub(crate) local: Option<String>,
}

/// From a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
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
        text: String,
    },
    /// In an elastic job: this worker would be part of the next round.
    Join {
        worker: u32,
        training_state: u8,
        /// How long all members of a round may take to be ready.
        timeout_ms: u64,
        member: MemberEntry,
        common: Common,
    },
    /// In an elastic job: what this worker holds of the training state.
    StateChanged {
        training_state: u8,
    },
    /// A neighbour has said nothing for so long that this rank gives it up.
    Silent {
        rank: u32,
    },
    /// This rank cannot connect to others.
    Unreached(Unreached),
}

/// To a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToClient {
    Roster {
        generation: u64,
        members: Vec<MemberEntry>,
        common: Common,
        /// In an elastic job.
        assignment: Option<RankAssignment>,
    },
    Table {
        places: Vec<Where>,
    },
    Missing {
        ranks: Vec<u32>,
    },
    Refused {
        text: String,
    },
    Aborted {
        text: String,
    },
    PeerDied {
        rank: u32,
        host: String,
        cause: String,
    },
    /// The members of the job change: kind 1 if somebody is removed, 2 if added, 3 if both.
    HostsUpdated {
        version: u64,
        kind: u8,
    },
    /// This worker is not part of the job any more.
    Removed {
        text: String,
    },
}

pub(super) fn cut(text: &str) -> &str {
    cut_at(text, TEXT_MAX)
}

pub(crate) fn write_address(w: &mut Writer<'_>, address: &SocketAddr) {
    match address.ip() {
        IpAddr::V4(ip) => {
            w.u8(4);
            w.raw(&ip.octets());
        }
        IpAddr::V6(ip) => {
            w.u8(6);
            w.raw(&ip.octets());
        }
    }
    w.varint(u64::from(address.port()));
}

pub(crate) fn read_address(r: &mut Reader<'_>) -> Result<SocketAddr, DecodeError> {
    let ip = match r.u8("address family")? {
        4 => IpAddr::from(r.array::<4>("address")?),
        6 => IpAddr::from(r.array::<16>("address")?),
        other => {
            return Err(DecodeError::BadValue {
                what: "address family",
                value: u64::from(other),
            });
        }
    };
    let port = r.varint("port")?;
    let port = u16::try_from(port).map_err(|_| DecodeError::BadValue {
        what: "port",
        value: port,
    })?;
    Ok(SocketAddr::new(ip, port))
}

fn write_member(w: &mut Writer<'_>, member: &MemberEntry) {
    w.str(cut(&member.identity));
    w.str(cut(&member.hostname));
    w.varint(u64::from(member.pid));
    w.u8(u8::from(member.shm));
}

fn read_member(r: &mut Reader<'_>) -> Result<MemberEntry, DecodeError> {
    Ok(MemberEntry {
        identity: r.str(TEXT_MAX, "host identity")?.to_owned(),
        hostname: r.str(TEXT_MAX, "host name")?.to_owned(),
        pid: r.varint_u32("process id")?,
        shm: r.u8("shared memory")? != 0,
    })
}

fn write_common(w: &mut Writer<'_>, common: &Common) {
    w.u8(common.connections);
    w.varint(u64::from(common.fan_out));
    let heartbeat_ms = common.heartbeat.map_or(0, |time| time.as_millis().max(1));
    w.varint(u64::try_from(heartbeat_ms).unwrap_or(u64::MAX));
    w.u8(u8::from(common.checksums));
    w.bytes(&common.settings[..common.settings.len().min(SETTINGS_MAX)]);
}

fn read_common(r: &mut Reader<'_>) -> Result<Common, DecodeError> {
    Ok(Common {
        connections: r.u8("connections")?,
        fan_out: r.varint_u32("fan-out")?,
        heartbeat: Some(r.varint("heartbeat")?)
            .filter(|ms| *ms > 0)
            .map(Duration::from_millis),
        checksums: r.u8("checksums")? != 0,
        settings: r.bytes(SETTINGS_MAX, "settings")?.to_vec(),
    })
}

fn write_place(w: &mut Writer<'_>, place: &Where) {
    let addresses = &place.addresses[..place.addresses.len().min(ADDRESSES_MAX)];
    w.varint(addresses.len() as u64);
    for address in addresses {
        write_address(w, address);
    }
    w.str(place.local.as_deref().unwrap_or(""));
}

fn read_place(r: &mut Reader<'_>) -> Result<Where, DecodeError> {
    let count = r.count(ADDRESSES_MAX, 6, "addresses")?;
    let addresses = (0..count)
        .map(|_| read_address(r))
        .collect::<Result<_, _>>()?;
    let local = r.str(TEXT_MAX, "local socket")?;
    let local = (!local.is_empty()).then(|| local.to_owned());
    Ok(Where { addresses, local })
}

fn write_assignment(w: &mut Writer<'_>, assignment: &RankAssignment) {
    for number in [
        assignment.rank,
        assignment.local_rank,
        assignment.local_size,
        assignment.cross_rank,
        assignment.cross_size,
    ] {
        w.varint(u64::from(number));
    }
    w.u8(u8::from(assignment.needs_sync));
}

fn read_assignment(r: &mut Reader<'_>) -> Result<RankAssignment, DecodeError> {
    Ok(RankAssignment {
        rank: r.varint_u32("rank")?,
        local_rank: r.varint_u32("local rank")?,
        local_size: r.varint_u32("local size")?,
        cross_rank: r.varint_u32("cross rank")?,
        cross_size: r.varint_u32("cross size")?,
        needs_sync: r.u8("needs sync")? != 0,
    })
}

fn text(r: &mut Reader<'_>) -> Result<String, DecodeError> {
    Ok(r.str(TEXT_MAX, "text")?.to_owned())
}

impl ToServer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let w = &mut Writer::new(&mut out);
        match self {
            Self::Hello {
                rank,
                size,
                wait_timeout_ms,
                member,
                common,
            } => {
                w.u8(0);
                w.varint(u64::from(*rank));
                w.varint(u64::from(*size));
                w.varint(*wait_timeout_ms);
                write_member(w, member);
                write_common(w, common);
            }
            Self::Ready(place) => {
                w.u8(1);
                write_place(w, place);
            }
            Self::Failed { text } => {
                w.u8(2);
                w.str(cut(text));
            }
            Self::Join {
                worker,
                training_state,
                timeout_ms,
                member,
                common,
            } => {
                w.u8(3);
                w.varint(u64::from(*worker));
                w.u8(*training_state);
                w.varint(*timeout_ms);
                write_member(w, member);
                write_common(w, common);
            }
            Self::StateChanged { training_state } => {
                w.u8(4);
                w.u8(*training_state);
            }
            Self::Silent { rank } => {
                w.u8(5);
                w.varint(u64::from(*rank));
            }
            Self::Unreached(report) => {
                w.u8(6);
                report.put(w);
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut Reader::new(bytes);
        let message = match r.u8("message")? {
            0 => Self::Hello {
                rank: r.varint_u32("rank")?,
                size: r.varint_u32("size")?,
                wait_timeout_ms: r.varint("time limit")?,
                member: read_member(r)?,
                common: read_common(r)?,
            },
            1 => Self::Ready(read_place(r)?),
            2 => Self::Failed { text: text(r)? },
            3 => Self::Join {
                worker: r.varint_u32("worker")?,
                training_state: r.u8("held")?,
                timeout_ms: r.varint("timeout")?,
                member: read_member(r)?,
                common: read_common(r)?,
            },
            4 => Self::StateChanged {
                training_state: r.u8("held")?,
            },
            5 => Self::Silent {
                rank: r.varint_u32("rank")?,
            },
            6 => Self::Unreached(Unreached::get(r)?),
            tag => {
                return Err(DecodeError::BadValue {
                    what: "message",
                    value: u64::from(tag),
                });
            }
        };
        r.clone().finish()?;
        Ok(message)
    }
}

impl ToClient {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let w = &mut Writer::new(&mut out);
        match self {
            Self::Roster {
                generation,
                members,
                common,
                assignment,
            } => {
                w.u8(0);
                w.u64(*generation);
                w.varint(members.len() as u64);
                for member in members {
                    write_member(w, member);
                }
                write_common(w, common);
                w.u8(u8::from(assignment.is_some()));
                if let Some(assignment) = assignment {
                    write_assignment(w, assignment);
                }
            }
            Self::Table { places } => {
                w.u8(1);
                w.varint(places.len() as u64);
                for place in places {
                    write_place(w, place);
                }
            }
            Self::Missing { ranks } => {
                w.u8(2);
                w.varint(ranks.len() as u64);
                for rank in ranks {
                    w.varint(u64::from(*rank));
                }
            }
            Self::Refused { text } => {
                w.u8(3);
                w.str(cut(text));
            }
            Self::Aborted { text } => {
                w.u8(4);
                w.str(cut(text));
            }
            Self::PeerDied { rank, host, cause } => {
                w.u8(5);
                w.varint(u64::from(*rank));
                w.str(cut(host));
                w.str(cut(cause));
            }
            Self::HostsUpdated { version, kind } => {
                w.u8(6);
                w.varint(*version);
                w.u8(*kind);
            }
            Self::Removed { text } => {
                w.u8(7);
                w.str(cut(text));
            }
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut Reader::new(bytes);
        let message = match r.u8("message")? {
            0 => {
                let generation = r.u64("generation")?;
                let count = r.count(RANKS_MAX, 4, "members")?;
                let members = (0..count)
                    .map(|_| read_member(r))
                    .collect::<Result<_, _>>()?;
                Self::Roster {
                    generation,
                    members,
                    common: read_common(r)?,
                    assignment: (r.u8("rank assignment")? != 0)
                        .then(|| read_assignment(r))
                        .transpose()?,
                }
            }
            1 => {
                let count = r.count(RANKS_MAX, 2, "places")?;
                let places = (0..count)
                    .map(|_| read_place(r))
                    .collect::<Result<_, _>>()?;
                Self::Table { places }
            }
            2 => {
                let count = r.count(RANKS_MAX, 1, "ranks")?;
                let ranks = (0..count)
                    .map(|_| r.varint_u32("rank"))
                    .collect::<Result<_, _>>()?;
                Self::Missing { ranks }
            }
            3 => Self::Refused { text: text(r)? },
            4 => Self::Aborted { text: text(r)? },
            5 => Self::PeerDied {
                rank: r.varint_u32("rank")?,
                host: text(r)?,
                cause: text(r)?,
            },
            6 => Self::HostsUpdated {
                version: r.varint("version")?,
                kind: r.u8("kind")?,
            },
            7 => Self::Removed { text: text(r)? },
            tag => {
                return Err(DecodeError::BadValue {
                    what: "message",
                    value: u64::from(tag),
                });
            }
        };
        r.clone().finish()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests;

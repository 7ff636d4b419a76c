//! What rendezvous and ranks say to each other; every length is bounded.

use std::net::{IpAddr, SocketAddr};

use horovod_protocol::{
    DecodeError,
    wire::{Reader, Writer},
};

/// Longest message to the server, in bytes.
pub(crate) const TO_SERVER_MAX: usize = 64 << 10;
/// Longest message to a client, in bytes.
pub(crate) const TO_CLIENT_MAX: usize = 64 << 20;
/// Longest text, in bytes.
const TEXT_MAX: usize = 8 << 10;
/// Most addresses of one rank.
const ADDRESSES_MAX: usize = 64;
/// Most ranks of a job.
const RANKS_MAX: usize = 1 << 16;
/// Longest settings of a job, in bytes.
const SETTINGS_MAX: usize = 4 << 10;

/// What must be equal on all ranks: every rank says what it would have, rank 0's counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Common {
    /// TCP connections for data between two ranks.
    pub(crate) connections: u8,
    /// Ranks that one of them listens to, see `Tree`.
    pub(crate) fan_out: u32,
    /// What the layers above agree on; only they know what it means.
    pub(crate) settings: Vec<u8>,
}

/// What the roster says of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberEntry {
    pub(crate) identity: String,
    pub(crate) hostname: String,
    pub(crate) pid: u32,
    pub(crate) shm: bool,
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
        patience_ms: u64,
        member: MemberEntry,
        common: Common,
    },
    Ready(Where),
    Failed {
        text: String,
    },
}

/// To a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToClient {
    Roster {
        generation: u64,
        members: Vec<MemberEntry>,
        common: Common,
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
}

/// At most `max` bytes of a text, cut at a character.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn write_address(w: &mut Writer<'_>, address: &SocketAddr) {
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

fn read_address(r: &mut Reader<'_>) -> Result<SocketAddr, DecodeError> {
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
    w.bytes(&common.settings[..common.settings.len().min(SETTINGS_MAX)]);
}

fn read_common(r: &mut Reader<'_>) -> Result<Common, DecodeError> {
    Ok(Common {
        connections: r.u8("connections")?,
        fan_out: r.varint_u32("fan-out")?,
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
                patience_ms,
                member,
                common,
            } => {
                w.u8(0);
                w.varint(u64::from(*rank));
                w.varint(u64::from(*size));
                w.varint(*patience_ms);
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
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut Reader::new(bytes);
        let message = match r.u8("message")? {
            0 => Self::Hello {
                rank: r.varint_u32("rank")?,
                size: r.varint_u32("size")?,
                patience_ms: r.varint("patience")?,
                member: read_member(r)?,
                common: read_common(r)?,
            },
            1 => Self::Ready(read_place(r)?),
            2 => Self::Failed { text: text(r)? },
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
            } => {
                w.u8(0);
                w.u64(*generation);
                w.varint(members.len() as u64);
                for member in members {
                    write_member(w, member);
                }
                write_common(w, common);
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn member() -> MemberEntry {
        MemberEntry {
            identity: "boot|h1".into(),
            hostname: "h1".into(),
            pid: 77,
            shm: true,
        }
    }

    fn common() -> Common {
        Common {
            connections: 4,
            fan_out: 300,
            settings: vec![1, 2, 255],
        }
    }

    fn place() -> Where {
        Where {
            addresses: vec![
                "10.0.0.1:80".parse().unwrap(),
                "[::1]:65535".parse().unwrap(),
            ],
            local: Some("horovod-1".into()),
        }
    }

    #[test]
    fn every_message_survives_the_wire() {
        for message in [
            ToServer::Hello {
                rank: 3,
                size: 4,
                patience_ms: 30_000,
                member: member(),
                common: common(),
            },
            ToServer::Ready(place()),
            ToServer::Ready(Where::default()),
            ToServer::Failed {
                text: "no memory".into(),
            },
        ] {
            assert_eq!(ToServer::decode(&message.encode()), Ok(message));
        }
        for message in [
            ToClient::Roster {
                generation: 9,
                members: vec![member(), member()],
                common: common(),
            },
            ToClient::Table {
                places: vec![place(), Where::default()],
            },
            ToClient::Missing {
                ranks: vec![1, 300],
            },
            ToClient::Refused { text: "no".into() },
            ToClient::Aborted { text: "no".into() },
            ToClient::PeerDied {
                rank: 2,
                host: "h".into(),
                cause: "signal 9".into(),
            },
        ] {
            assert_eq!(ToClient::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let text = "é".repeat(TEXT_MAX);
        let sent = ToServer::Failed { text }.encode();
        let Ok(ToServer::Failed { text }) = ToServer::decode(&sent) else {
            panic!("refused")
        };
        assert_eq!(text.len(), TEXT_MAX);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = ToServer::decode(&bytes);
            let _ = ToClient::decode(&bytes);
        }
    }
}

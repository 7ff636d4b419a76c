//! The report of a rank that cannot reach others: every address that it tried, and the result.
//!
//! Ranks that cannot connect know what they tried. Ranks that wait for them do not know it. So the former tell the
//! rendezvous. If they cannot reach the rendezvous itself, they tell the agent of their host ([`post`]). One text is made
//! of all that is told ([`cause`]), and every rank fails with that text.

mod cause;
pub mod post;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use horovod_protocol::{
    DecodeError, Rank,
    wire::{Reader, Writer, cut_at},
};

pub(crate) use self::cause::cause;
use crate::{
    platform::net,
    probe::Obstacle,
    rendezvous::{read_address, write_address},
};

/// Most that one rank tells of: ranks or servers that it cannot reach.
const GOALS_MAX: usize = 16;
/// Most addresses of one of them.
const TRIED_MAX: usize = 64;
/// Time limit of a rank for the one cause that is made of the reports of several ranks.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Longest text, in bytes.
const TEXT_MAX: usize = 1 << 10;

/// One address, and the result of the attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tried {
    pub(crate) at: SocketAddr,
    pub(crate) why: Obstacle,
    /// The host that tried it has this very address.
    pub(crate) is_own: bool,
}

/// Whom a rank wants to reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// The launcher, which serves the rendezvous.
    Launcher,
    /// Rank 0, which serves the rendezvous.
    RankZero,
    /// Another rank.
    Peer { rank: Rank, host: String },
}

/// The vain attempts of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreached {
    /// The rank that tried.
    pub(crate) rank: Rank,
    /// Its host.
    pub(crate) host: String,
    /// The network interfaces that the user named; empty: none.
    pub(crate) interfaces: String,
    pub(crate) goals: Vec<(Goal, Vec<Tried>)>,
}

impl Unreached {
    /// The rank that tried.
    pub fn rank(&self) -> u32 {
        self.rank.0
    }

    pub(crate) fn new(
        rank: Rank,
        host: &str,
        interfaces: &[String],
        goals: Vec<(Goal, Vec<(SocketAddr, Obstacle)>)>,
    ) -> Self {
        let own: Vec<IpAddr> = net::interfaces()
            .unwrap_or_default()
            .into_iter()
            .map(|interface| interface.address)
            .filter(|address| !address.is_loopback())
            .collect();
        let of_one = |(at, why): (SocketAddr, Obstacle)| Tried {
            at,
            why,
            is_own: own.contains(&at.ip()),
        };
        let goals = goals.into_iter().take(GOALS_MAX);
        Self {
            rank,
            host: host.to_owned(),
            interfaces: interfaces.join(","),
            goals: goals
                .map(|(goal, tried)| {
                    (
                        goal,
                        tried.into_iter().take(TRIED_MAX).map(of_one).collect(),
                    )
                })
                .collect(),
        }
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.put(&mut Writer::new(&mut out));
        out
    }

    /// From the bytes of [`Self::encode`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut Reader::new(bytes);
        let report = Self::get(r)?;
        r.clone().finish()?;
        Ok(report)
    }

    pub(crate) fn put(&self, w: &mut Writer<'_>) {
        w.varint(u64::from(self.rank.0));
        put_text(w, &self.host);
        put_text(w, &self.interfaces);
        w.varint(self.goals.len() as u64);
        for (goal, tried) in &self.goals {
            match goal {
                Goal::Launcher => w.u8(0),
                Goal::RankZero => w.u8(1),
                Goal::Peer { rank, host } => {
                    w.u8(2);
                    w.varint(u64::from(rank.0));
                    put_text(w, host);
                }
            }
            w.varint(tried.len() as u64);
            for one in tried {
                write_address(w, &one.at);
                one.why.put(w);
                w.u8(u8::from(one.is_own));
            }
        }
    }

    pub(crate) fn get(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let rank = Rank(r.varint_u32("rank")?);
        let (host, interfaces) = (text(r)?, text(r)?);
        let count = r.count(GOALS_MAX, 2, "goals")?;
        let goals = (0..count).map(|_| {
            let goal = match r.u8("goal")? {
                0 => Goal::Launcher,
                1 => Goal::RankZero,
                2 => Goal::Peer {
                    rank: Rank(r.varint_u32("rank")?),
                    host: text(r)?,
                },
                other => return Err(bad("goal", other)),
            };
            let count = r.count(TRIED_MAX, 8, "addresses")?;
            let tried = (0..count).map(|_| {
                Ok(Tried {
                    at: read_address(r)?,
                    why: Obstacle::get(r)?,
                    is_own: r.u8("own address")? != 0,
                })
            });
            Ok((goal, tried.collect::<Result<_, _>>()?))
        });
        Ok(Self {
            rank,
            host,
            interfaces,
            goals: goals.collect::<Result<_, _>>()?,
        })
    }
}

fn bad(what: &'static str, value: u8) -> DecodeError {
    let value = u64::from(value);
    DecodeError::BadValue { what, value }
}

fn put_text(w: &mut Writer<'_>, text: &str) {
    w.str(cut_at(text, TEXT_MAX));
}

fn text(r: &mut Reader<'_>) -> Result<String, DecodeError> {
    Ok(r.str(TEXT_MAX, "text")?.to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn report(rank: u32, goal: Goal, tried: &[(&str, Obstacle)]) -> Unreached {
        let tried = tried.iter().map(|(at, why)| Tried {
            at: at.parse().unwrap(),
            why: why.clone(),
            is_own: false,
        });
        Unreached {
            rank: Rank(rank),
            host: "host-b".into(),
            interfaces: String::new(),
            goals: vec![(goal, tried.collect())],
        }
    }

    #[test]
    fn what_is_told_survives_the_wire_and_garbage_does_not() {
        let peer = Goal::Peer {
            rank: Rank(70_000),
            host: "host-a".into(),
        };
        for goal in [Goal::Launcher, Goal::RankZero, peer] {
            let report = report(
                3,
                goal,
                &[
                    ("10.0.0.1:80", Obstacle::Silence),
                    ("[fd12::1]:65535", Obstacle::Refused),
                    ("10.0.0.1:81", Obstacle::NoRoute),
                    ("10.0.0.1:82", Obstacle::Handshake("x".into())),
                    ("10.0.0.1:83", Obstacle::Broken("y".into())),
                    ("10.0.0.1:84", Obstacle::Other("z".into())),
                ],
            );
            let bytes = report.encode();
            assert_eq!(Unreached::decode(&bytes), Ok(report));
            for end in 0..bytes.len() {
                assert!(Unreached::decode(&bytes[..end]).is_err());
            }
        }
    }

    #[test]
    fn an_address_of_this_host_is_marked() {
        let at = "203.0.113.5:1".parse().unwrap();
        let goals = vec![(Goal::Launcher, vec![(at, Obstacle::Refused)])];
        let report = Unreached::new(Rank(1), "h", &["lo".into()], goals);
        assert!(!report.goals[0].1[0].is_own);
        let interfaces = net::interfaces().unwrap();
        let mut own = interfaces.iter().filter(|i| !i.address.is_loopback());
        // A machine without a network has none to mark.
        if let Some(own) = own.next() {
            let goals = vec![(
                Goal::Launcher,
                vec![(SocketAddr::new(own.address, 1), Obstacle::Refused)],
            )];
            assert!(Unreached::new(Rank(1), "h", &[], goals).goals[0].1[0].is_own);
        }
    }
}

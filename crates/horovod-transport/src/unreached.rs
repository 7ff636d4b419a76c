//! The report of a rank that cannot reach others: every address that it tried, and the result.
//!
//! Ranks that cannot connect know what they tried. Ranks that wait for them do not know it. So the former tell the
//! rendezvous. If they cannot reach the rendezvous itself, they tell the agent of their host ([`post`]). One text is made
//! of all that is told ([`cause`]), and every rank fails with that text.

mod cause;
pub mod post;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use horovod_protocol::{DecodeError, Rank};
use serde::{Deserialize, Serialize};

pub(crate) use self::cause::cause;
use crate::{compact, platform::net, probe::Obstacle};

/// Most that one rank tells of: ranks or servers that it cannot reach.
const GOALS_MAX: usize = 16;
/// Most addresses of one of them.
const TRIED_MAX: usize = 64;
/// Time limit of a rank for the one cause that is made of the reports of several ranks.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Longest text, in bytes.
const TEXT_MAX: usize = 1 << 10;

/// One address, and the result of the attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tried {
    pub(crate) at: SocketAddr,
    pub(crate) why: Obstacle,
    /// The host that tried it has this very address.
    pub(crate) is_own: bool,
}

/// Whom a rank wants to reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Goal {
    /// The launcher, which serves the rendezvous.
    Launcher,
    /// Rank 0, which serves the rendezvous.
    RankZero,
    /// Another rank.
    Peer {
        #[serde(with = "compact::RankNumber")]
        rank: Rank,
        #[serde(
            serialize_with = "compact::put_text::<TEXT_MAX, _>",
            deserialize_with = "compact::text::<TEXT_MAX, _>"
        )]
        host: String,
    },
}

/// The vain attempts of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unreached {
    /// The rank that tried.
    #[serde(with = "compact::RankNumber")]
    pub(crate) rank: Rank,
    /// Its host.
    #[serde(
        serialize_with = "compact::put_text::<TEXT_MAX, _>",
        deserialize_with = "compact::text::<TEXT_MAX, _>"
    )]
    pub(crate) host: String,
    /// The network interfaces that the user named; empty: none.
    #[serde(
        serialize_with = "compact::put_text::<TEXT_MAX, _>",
        deserialize_with = "compact::text::<TEXT_MAX, _>"
    )]
    pub(crate) interfaces: String,
    #[serde(deserialize_with = "compact::list::<GOALS_MAX, _, _>")]
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
        compact::encode(self, &mut out);
        out
    }

    /// From the bytes of [`Self::encode`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        compact::decode(bytes)
    }
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

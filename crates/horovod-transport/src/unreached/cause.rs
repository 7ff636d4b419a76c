//! The text that every rank of the job fails with: which ranks cannot reach which, what they tried, what is likely
//! wrong, and the command that checks it.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use horovod_protocol::{Rank, wire::cut_at};

use super::{Goal, Tried, Unreached};
use crate::{mesh::list, probe::Obstacle};

/// Addresses that one part of the text names.
const SHOWN: usize = 16;
/// Longest part of the text that lists attempts, in bytes: what is likely wrong and the command follow it, and the whole
/// must not be cut.
const FACTS_MAX: usize = 5 << 10;
/// Longest command, in bytes.
const COMMAND_MAX: usize = 1 << 10;

/// Ranks of one host that cannot reach the same goals.
struct Group<'a> {
    ranks: BTreeSet<Rank>,
    host: &'a str,
    goal: &'a Goal,
    /// Where the goals are ranks.
    peers: BTreeSet<Rank>,
    tried: Vec<&'a Tried>,
}

/// One text of what several ranks told. `check` is the command that checks the network of this job; if it is empty or
/// very long, the command is made of the hosts that are told of.
pub(crate) fn cause(reports: &[Unreached], check: &str) -> String {
    let groups = groups(reports);
    let facts: Vec<String> = groups.iter().map(Group::text).collect();
    let facts = facts.join("; ");
    let (facts, more) = match cut_at(&facts, FACTS_MAX) {
        part if part.len() < facts.len() => (part, " ..."),
        whole => (whole, ""),
    };
    let interfaces = reports.iter().map(|one| &*one.interfaces);
    let interfaces = interfaces.max().unwrap_or_default();
    let check = match check {
        check if check.is_empty() || check.len() > COMMAND_MAX => command(&groups),
        check => check.to_owned(),
    };
    format!(
        "{facts}{more}. {} `{check}` checks the network and says what to allow",
        likely(&groups, interfaces)
    )
}

fn groups(reports: &[Unreached]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for one in reports {
        for (goal, tried) in &one.goals {
            let place = groups
                .iter()
                .position(|group| group.host == one.host && is_same_place(group.goal, goal));
            let place = place.unwrap_or_else(|| {
                groups.push(Group {
                    ranks: BTreeSet::new(),
                    host: &one.host,
                    goal,
                    peers: BTreeSet::new(),
                    tried: Vec::new(),
                });
                groups.len() - 1
            });
            let group = &mut groups[place];
            group.ranks.insert(one.rank);
            if let Goal::Peer { rank, .. } = goal {
                group.peers.insert(*rank);
            }
            for attempt in tried {
                if !group.tried.iter().any(|known| known.at == attempt.at) {
                    group.tried.push(attempt);
                }
            }
        }
    }
    groups
}

fn is_same_place(one: &Goal, other: &Goal) -> bool {
    match (one, other) {
        (Goal::Peer { host, .. }, Goal::Peer { host: other, .. }) => host == other,
        (one, other) => one == other,
    }
}

impl Group<'_> {
    /// The ranks and their goal are neighbours: this host's addresses are the right ones.
    fn is_on_one_host(&self) -> bool {
        matches!(self.goal, Goal::Peer { host, .. } if host == self.host)
    }

    fn text(&self) -> String {
        let ranks: Vec<Rank> = self.ranks.iter().copied().collect();
        let whom = match self.goal {
            Goal::Launcher => "the launcher, where all ranks meet".to_owned(),
            Goal::RankZero => "rank 0, where all ranks meet".to_owned(),
            Goal::Peer { host, .. } => {
                let peers: Vec<Rank> = self.peers.iter().copied().collect();
                format!("{} on {host}", list(&peers))
            }
        };
        let shown = self.tried.iter().take(SHOWN);
        let mut tried: Vec<String> = shown.map(|tried| tried.text()).collect();
        if self.tried.len() > SHOWN {
            tried.push(format!("and {} more", self.tried.len() - SHOWN));
        }
        if tried.is_empty() {
            tried.push("no address".into());
        }
        format!(
            "{} on {} cannot connect to {whom} (tried {})",
            list(&ranks),
            self.host,
            tried.join(", ")
        )
    }
}

impl Tried {
    fn text(&self) -> String {
        let own = match self.is_own {
            true => ", an address of this host itself",
            false => "",
        };
        format!("{}: {}{own}", self.at, self.why)
    }
}

/// The most likely cause. Addresses that the other host has, too, say nothing of the network, unless there is no
/// other address.
fn likely(groups: &[Group<'_>], interfaces: &str) -> String {
    let (own, others): (Vec<_>, Vec<_>) = groups
        .iter()
        .flat_map(|group| {
            group
                .tried
                .iter()
                .map(|tried| (tried, !group.is_on_one_host()))
        })
        .partition(|(tried, leads_away)| tried.is_own && *leads_away);
    let named = match interfaces {
        "" => String::new(),
        names => format!(
            ", or --network-interfaces (HOROVOD_GLOO_IFACE) names {names}, which does not lead to the other host: \
             leave it out"
        ),
    };
    if let (Some((own, _)), true) = (own.first(), others.is_empty()) {
        return format!(
            "Two hosts have the address {} (as docker0 and virbr0 do on every host), so it does not lead from one \
             to the other{named}.",
            own.at.ip()
        );
    }
    let any = |is: fn(&Obstacle) -> bool| others.iter().any(|(one, _)| is(&one.why));
    let why = if any(|why| matches!(why, Obstacle::Silence)) {
        "A firewall on one of the hosts or between them drops the packets, or the answers find no way back"
    } else if any(|why| matches!(why, Obstacle::Handshake(_))) {
        "Another job or program answers there: two hosts have the same address, or the key was copied from another job"
    } else if any(|why| matches!(why, Obstacle::Broken(_))) {
        "The process that listens there is stopped, overloaded or about to end, or a proxy answers in its place"
    } else if any(|why| matches!(why, Obstacle::Refused)) {
        "A firewall on one of the hosts or between them rejects the connections, or nobody listens there"
    } else {
        "No route leads to the other host, or a firewall rejects the packets"
    };
    format!("{why}{named}.")
}

/// The command where no launcher knows a better one.
fn command(groups: &[Group<'_>]) -> String {
    let mut hosts: Vec<String> = Vec::new();
    let mut length = 0;
    let mut add = |host: String| {
        if !hosts.contains(&host) && length + host.len() < COMMAND_MAX {
            length += host.len() + 1;
            hosts.push(host);
        }
    };
    for group in groups {
        match group.goal {
            Goal::Peer { host, .. } => add(host.clone()),
            _ => group
                .tried
                .iter()
                .filter(|one| !one.is_own)
                .take(1)
                .for_each(|one| add(bare(one.at))),
        }
        add(group.host.to_owned());
    }
    format!("horovodrun --doctor -H {}", hosts.join(","))
}

fn bare(at: SocketAddr) -> String {
    match at {
        SocketAddr::V4(at) => at.ip().to_string(),
        SocketAddr::V6(at) => format!("[{}]", at.ip()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;

    fn peer(rank: u32) -> Goal {
        Goal::Peer {
            rank: Rank(rank),
            host: "host-a".into(),
        }
    }

    #[test]
    fn one_text_names_all_ranks_addresses_causes_and_the_check() {
        let tried = [
            ("10.0.0.1:80", Obstacle::Silence),
            ("[fd12::1]:81", Obstacle::NoRoute),
        ];
        let all = [
            report(3, Goal::Launcher, &tried),
            report(2, Goal::Launcher, &tried),
        ];
        assert_eq!(
            cause(&all, "horovodrun --doctor -H a,b"),
            "ranks 2, 3 on host-b cannot connect to the launcher, where all ranks meet (tried 10.0.0.1:80: no answer \
             in time, [fd12::1]:81: no route to host). A firewall on one of the hosts or between them drops the \
             packets, or the answers find no way back. `horovodrun --doctor -H a,b` checks the network and says what to allow"
        );
        let all = [
            report(2, peer(0), &[("10.0.0.1:80", Obstacle::Refused)]),
            report(2, peer(1), &[("10.0.0.1:81", Obstacle::Refused)]),
        ];
        let text = cause(&all, "");
        assert!(
            text.starts_with(
                "rank 2 on host-b cannot connect to ranks 0, 1 on host-a (tried 10.0.0.1:80: connection refused, \
                 10.0.0.1:81: connection refused). A firewall on one of the hosts or between them rejects"
            ),
            "{text}"
        );
        assert!(
            text.contains("`horovodrun --doctor -H host-a,host-b`"),
            "{text}"
        );
    }

    #[test]
    fn an_address_that_every_host_has_does_not_hide_the_firewall() {
        let tried = [
            ("10.0.0.1:80", Obstacle::Silence),
            ("172.17.0.1:80", Obstacle::Refused),
        ];
        for first in [0, 1] {
            let mut one = report(2, peer(0), &tried);
            one.goals[0].1[1].is_own = true;
            one.goals[0].1.swap(0, first);
            let text = cause(&[one], "");
            assert!(
                text.contains("A firewall on one of the hosts or between them drops"),
                "{text}"
            );
            assert!(!text.contains("Two hosts"), "{text}");
        }
        // Ranks of one host without shared memory: its addresses are right.
        let mut one = report(2, peer(0), &tried[1..]);
        one.goals[0].1[0].is_own = true;
        one.host = "host-a".into();
        let text = cause(&[one], "");
        assert!(text.contains("rejects the connections"), "{text}");
    }

    #[test]
    fn a_large_job_gets_the_likely_cause_and_the_command_as_well() {
        let tried = [("10.0.0.1:80", Obstacle::Silence)];
        let all: Vec<_> = (0..1000)
            .map(|rank| {
                let mut one = report(rank, Goal::Launcher, &tried);
                one.host = format!("a-host-with-a-long-name-{rank}");
                one
            })
            .collect();
        let check = format!("horovodrun --doctor -H {}", "host,".repeat(1000));
        for check in ["", &check] {
            let text = cause(&all, check);
            assert!(text.len() < 8 << 10, "{}", text.len());
            assert!(text.contains("drops the packets"), "{text}");
            assert!(
                text.contains(" `horovodrun --doctor -H 10.0.0.1,a-host-with-a-long-name-0,"),
                "{text}"
            );
            assert!(
                text.ends_with("` checks the network and says what to allow"),
                "{text}"
            );
        }
    }

    #[test]
    fn the_likely_cause_follows_from_what_came_back() {
        let of = |obstacle: Obstacle, is_own: bool, interfaces: &str| {
            let mut one = report(2, Goal::RankZero, &[("172.17.0.1:80", obstacle)]);
            one.interfaces = interfaces.into();
            one.goals[0].1[0].is_own = is_own;
            cause(&[one], "")
        };
        let text = of(Obstacle::Refused, true, "docker0");
        assert!(
            text.contains("Two hosts have the address 172.17.0.1"),
            "{text}"
        );
        assert!(
            text.contains("names docker0, which does not lead"),
            "{text}"
        );
        assert!(
            text.contains("connection refused, an address of this host itself"),
            "{text}"
        );
        let text = of(Obstacle::Handshake("the job keys differ".into()), false, "");
        assert!(
            text.contains("somebody else answers: the job keys differ"),
            "{text}"
        );
        assert!(
            text.contains("Another job or program answers there"),
            "{text}"
        );
        let text = of(Obstacle::Broken("it closed".into()), false, "");
        assert!(text.contains("is stopped, overloaded"), "{text}");
        let text = of(
            Obstacle::Other("Permission denied (os error 13)".into()),
            false,
            "",
        );
        assert!(text.contains("No route leads"), "{text}");
        assert!(
            text.contains("`horovodrun --doctor -H 172.17.0.1,host-b`"),
            "{text}"
        );
        assert!(!text.contains("HOROVOD_GLOO_IFACE"), "{text}");
        let text = of(Obstacle::NoRoute, false, "eth7");
        assert!(text.contains("names eth7"), "{text}");
    }
}

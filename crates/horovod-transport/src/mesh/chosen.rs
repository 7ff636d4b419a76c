//! Which addresses and interfaces connect this rank with others, as lines of the log at level DEBUG.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use horovod_protocol::Rank;
use tracing::Level;

use super::Parts;
use crate::platform::net::{self, Interface};

/// Ranks or addresses that one line names.
const NAMED_MAX: usize = 8;

/// Logs where this rank waits for connections of other ranks, and why there.
pub(super) fn log_listeners(at: &[SocketAddr], named: &[String], several_hosts: bool) {
    tracing::debug!(
        "other ranks connect to {}: {}",
        listed(at.iter().map(ToString::to_string)),
        reason(named, several_hosts)
    );
}

/// Logs the interfaces of the connections for data between ranks that do not share memory, and the ranks that do.
pub(super) fn log_links(parts: &Parts, mates: &[Rank]) {
    if !tracing::enabled!(Level::DEBUG) {
        return;
    }
    if mates.len() > 1 {
        let ranks = mates.iter().map(|rank| rank.0.to_string());
        tracing::debug!("ranks {} share memory", listed(ranks));
    }
    let mut ways: BTreeMap<Option<IpAddr>, BTreeSet<Rank>> = BTreeMap::new();
    for (peer, _, stream) in &parts.data {
        let way = ways.entry(net::local_ip(stream.fd())).or_default();
        way.insert(*peer);
    }
    let known = net::interfaces().unwrap_or_default();
    for (from, peers) in ways {
        let lanes = parts
            .data
            .iter()
            .filter(|(rank, ..)| peers.first() == Some(rank));
        let ranks = peers.iter().map(|rank| rank.0.to_string());
        tracing::debug!(
            "data for ranks {} goes out through {}, over {} connections to each",
            listed(ranks),
            through(from, &known),
            lanes.count()
        );
    }
}

fn reason(named: &[String], several_hosts: bool) -> String {
    match (named, several_hosts) {
        ([], true) => "all interfaces, because the ranks are on several hosts".to_owned(),
        ([], false) => "the loopback, because all ranks are on this host".to_owned(),
        (named, _) => format!("the interfaces that were named, {}", named.join(", ")),
    }
}

/// An address of this host with the name of its interface.
fn through(address: Option<IpAddr>, known: &[Interface]) -> String {
    let Some(address) = address else {
        return "an unknown address".to_owned();
    };
    match known.iter().find(|interface| interface.address == address) {
        Some(interface) => format!("{} ({address})", interface.name),
        None => address.to_string(),
    }
}

fn listed(all: impl ExactSizeIterator<Item = String>) -> String {
    let more = all.len().saturating_sub(NAMED_MAX);
    let mut text = all.take(NAMED_MAX).collect::<Vec<_>>().join(", ");
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_with_its_interface() {
        let known = [Interface {
            name: "eth0".into(),
            address: [10, 0, 0, 1].into(),
        }];
        assert_eq!(
            through(Some([10, 0, 0, 1].into()), &known),
            "eth0 (10.0.0.1)"
        );
        assert_eq!(through(Some([10, 0, 0, 2].into()), &known), "10.0.0.2");
    }

    #[test]
    fn of_many_the_first_are_named() {
        let text = listed(
            (0..10)
                .map(|n: u32| n.to_string())
                .collect::<Vec<_>>()
                .into_iter(),
        );
        assert_eq!(text, "0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
    }

    #[test]
    fn the_reason_follows_from_setting_and_hosts() {
        assert!(reason(&["eth1".into()], true).ends_with("named, eth1"));
        assert!(reason(&[], true).starts_with("all interfaces"));
        assert!(reason(&[], false).starts_with("the loopback"));
    }
}

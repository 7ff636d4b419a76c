//! Probes over the loopback: what they measure, and what they say when there is nothing to measure.

use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

use super::*;
use crate::Ports;
use crate::testing::Refusing;

const WITHIN: Duration = Duration::from_secs(240);
/// How long to wait for what does not come.
const IN_VAIN: Duration = Duration::from_millis(500);
const WINDOW: Duration = Duration::from_millis(20);

fn prober(key: &JobKey, encrypt: bool) -> Prober {
    let key = key.clone();
    Prober {
        key,
        me: 1,
        encrypt,
    }
}

#[test]
fn measures_both_directions_and_the_way_back_plain_and_encrypted() {
    let key = JobKey::random().unwrap();
    let server = Server::start(&[Ipv4Addr::LOCALHOST.into()], Ports::Any, key.clone(), 0).unwrap();
    let (name, at) = server.addrs()[0].clone();
    assert_eq!(name, "lo");
    for encrypt in [false, true] {
        let prober = prober(&key, encrypt);
        let reached = prober.reach(&[(0, at), (0, at)], WITHIN);
        for one in reached {
            assert_eq!(one.unwrap().local, IpAddr::from(Ipv4Addr::LOCALHOST));
        }
        assert!(prober.round_trip(0, at, WINDOW).unwrap() > Duration::ZERO);
        assert!(prober.push(0, at, WINDOW).unwrap() > 1e3);
        assert!(prober.pull(0, at, WINDOW).unwrap() > 1e3);
    }
}

#[test]
fn gives_the_reason() {
    let key = JobKey::random().unwrap();
    let server = Server::start(&[Ipv4Addr::LOCALHOST.into()], Ports::Any, key.clone(), 0).unwrap();
    let at = server.addrs()[0].1;
    let prober = prober(&key, false);
    let refusing = Refusing::new();
    let found = prober.reach(&[(0, refusing.at), (7, at), (0, at)], WITHIN);
    assert_eq!(found[0], Err(Obstacle::Refused));
    assert!(matches!(found[1], Err(Obstacle::Handshake(_))), "{found:?}");
    assert!(found[2].is_ok(), "{found:?}");
}

#[test]
fn who_says_nothing_is_given_up_in_time() {
    let prober = prober(&JobKey::random().unwrap(), false);
    // Takes the connection and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let nowhere = SocketAddr::new(Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1).into(), 9);
    let targets = [(0, silent.local_addr().unwrap()), (0, nowhere)];
    let found = prober.reach(&targets, IN_VAIN);
    assert!(matches!(found[0], Err(Obstacle::Handshake(_))), "{found:?}");
    assert!(found[1].is_err(), "{found:?}");
}

#[test]
fn whoever_has_another_key_is_not_served() {
    let key = JobKey::random().unwrap();
    let server = Server::start(&[Ipv4Addr::LOCALHOST.into()], Ports::Any, key, 0).unwrap();
    let stranger = prober(&JobKey::random().unwrap(), false);
    let found = stranger.reach(&[(0, server.addrs()[0].1)], WITHIN);
    let Err(Obstacle::Handshake(why)) = &found[0] else {
        panic!("{found:?}");
    };
    assert!(why.contains("keys differ"), "{why}");
}

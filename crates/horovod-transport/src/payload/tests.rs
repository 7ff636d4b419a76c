//! Payloads over real sockets: whole, refused, interrupted.

use std::net::Ipv4Addr;

use super::*;

fn server(payload: Vec<u8>) -> (Server, JobKey) {
    let key = JobKey::random().unwrap();
    let bind = [IpAddr::from(Ipv4Addr::LOCALHOST)];
    (
        Server::start(&bind, Ports::Any, key.clone(), payload).unwrap(),
        key,
    )
}

fn client(server: &Server, key: &JobKey, rank: u32) -> PayloadClient {
    PayloadClient {
        rank,
        addresses: server.addrs().to_vec(),
        key: key.clone(),
        wait_timeout: Duration::from_secs(240),
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

#[test]
fn every_rank_fetches_the_same_and_brings_its_own() {
    for len in [0, 1, PIECE, 5 * PIECE + 7] {
        let (server, key) = server(pattern(len));
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let client = client(&server, &key, rank);
                scope.spawn(move || {
                    assert!(client.fetch(&mut || true).unwrap() == pattern(len));
                    let own = vec![rank as u8; len];
                    client.deliver(&own, &mut || true).unwrap();
                });
            }
        });
        let mut ranks = Vec::new();
        while let Some((rank, bytes)) = server.wait(Duration::ZERO) {
            assert!(bytes == vec![rank as u8; len]);
            ranks.push(rank);
        }
        ranks.sort_unstable();
        assert_eq!(ranks, [0, 1, 2, 3]);
    }
}

#[test]
fn who_asks_later_gets_what_was_published_since() {
    let (server, key) = server(pattern(10));
    let client = client(&server, &key, 0);
    assert_eq!(client.fetch(&mut || true).unwrap(), pattern(10));
    server.publish(pattern(3 * PIECE));
    assert!(client.fetch(&mut || true).unwrap() == pattern(3 * PIECE));
}

#[test]
fn a_stranger_gets_and_brings_nothing() {
    let (server, key) = server(pattern(10));
    let wrong = client(&server, &JobKey::random().unwrap(), 0);
    assert!(matches!(
        wrong.fetch(&mut || true),
        Err(PayloadError::Unreachable { .. })
    ));
    assert!(wrong.deliver(b"x", &mut || true).is_err());
    client(&server, &key, 1)
        .deliver(b"y", &mut || true)
        .unwrap();
    assert_eq!(server.wait(Duration::ZERO), Some((1, b"y".to_vec())));
    assert_eq!(server.wait(Duration::ZERO), None);
}

#[test]
fn a_caller_that_must_leave_does() {
    let silent = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let client = PayloadClient {
        rank: 0,
        addresses: vec![silent.local_addr().unwrap()],
        key: JobKey::random().unwrap(),
        wait_timeout: Duration::from_secs(3600),
    };
    let mut asked = 0;
    let result = client.fetch(&mut || {
        asked += 1;
        asked < 3
    });
    assert!(matches!(result, Err(PayloadError::Interrupted)));
}

#[test]
fn lengths_are_checked_before_memory_is_taken() {
    assert!(length_of(&u64::MAX.to_le_bytes()).is_err());
    assert!(length_of(&[1, 2]).is_err());
    let mut bytes = Vec::new();
    assert!(add(&mut bytes, &[1, 2], 1).is_err());
    assert!(add(&mut bytes, &[], 1).is_err());
    assert!(bytes.is_empty());
}

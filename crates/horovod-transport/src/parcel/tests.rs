//! Parcels over real sockets: whole, refused, interrupted.

use std::net::Ipv4Addr;

use super::*;

fn server(parcel: Vec<u8>) -> (Server, JobKey) {
    let key = JobKey::random().unwrap();
    let bind = [IpAddr::from(Ipv4Addr::LOCALHOST)];
    (Server::start(&bind, key.clone(), parcel).unwrap(), key)
}

fn courier(server: &Server, key: &JobKey, rank: u32) -> Courier {
    Courier {
        rank,
        addresses: server.addrs().to_vec(),
        key: key.clone(),
        patience: Duration::from_secs(240),
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
                let courier = courier(&server, &key, rank);
                scope.spawn(move || {
                    assert!(courier.fetch(&mut || true).unwrap() == pattern(len));
                    let own = vec![rank as u8; len];
                    courier.deliver(&own, &mut || true).unwrap();
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
fn a_stranger_gets_and_brings_nothing() {
    let (server, key) = server(pattern(10));
    let wrong = courier(&server, &JobKey::random().unwrap(), 0);
    assert!(matches!(
        wrong.fetch(&mut || true),
        Err(ParcelError::Unreachable { .. })
    ));
    assert!(wrong.deliver(b"x", &mut || true).is_err());
    courier(&server, &key, 1)
        .deliver(b"y", &mut || true)
        .unwrap();
    assert_eq!(server.wait(Duration::ZERO), Some((1, b"y".to_vec())));
    assert_eq!(server.wait(Duration::ZERO), None);
}

#[test]
fn a_caller_that_must_leave_does() {
    let silent = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let courier = Courier {
        rank: 0,
        addresses: vec![silent.local_addr().unwrap()],
        key: JobKey::random().unwrap(),
        patience: Duration::from_secs(3600),
    };
    let mut asked = 0;
    let result = courier.fetch(&mut || {
        asked += 1;
        asked < 3
    });
    assert!(matches!(result, Err(ParcelError::Interrupted)));
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

//! Bits that change on the way between two hosts: seen at the receiver, whatever they are part of.
#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]

use std::time::{Duration, Instant};

use crate::common::{Rig, TIMEOUT, pattern, rigs};
use horovod_protocol::Rank;
use horovod_transport::{
    ControlEvent, LinkError,
    testing::{Cluster, Flip},
};

/// Bytes of a record's head, and most bytes after it.
const HEAD: u64 = 64;
const RECORD: u64 = HEAD + 64 + (128 << 10);

fn in_data(bit: u64) -> Flip {
    Flip {
        direction: [0, 1],
        control: false,
        bit,
    }
}

fn in_control(bit: u64) -> Flip {
    Flip {
        control: true,
        ..in_data(bit)
    }
}

fn flipped(connections: u8, checksums: bool, flip: Flip) -> Vec<Rig> {
    let cluster = Cluster::new(2).hosts(&[0, 1]).connections(connections);
    rigs(cluster.checksums(checksums).flip(flip).build())
}

/// Sends `bytes` from rank 0 to rank 1: what arrives, and how it ends.
fn transfer(rigs: &mut [Rig], bytes: &[u8]) -> (Vec<u8>, Option<LinkError>) {
    let [from, to] = rigs else {
        panic!("two ranks")
    };
    let (mut sent, mut came, mut fault) = (0, vec![0; bytes.len()], None);
    let mut have = 0;
    let deadline = Instant::now() + TIMEOUT;
    while fault.is_none() && have < bytes.len() {
        assert!(
            Instant::now() < deadline,
            "{have} bytes came of {}, {sent} sent",
            bytes.len()
        );
        // Both ends are on this thread, so none may sleep long.
        for rig in [&mut *from, &mut *to] {
            rig.waiter.idle(u32::MAX, Some(Duration::from_micros(100)));
        }
        sent += from.data.link(Rank(1)).try_send(&bytes[sent..]).unwrap();
        match to.data.link(Rank(0)).try_recv(&mut came[have..]) {
            Ok(n) => have += n,
            Err(e) => fault = Some(e),
        }
    }
    came.truncate(have);
    (came, fault)
}

#[test]
fn a_bit_of_data_that_changes_is_seen_before_all_has_come() {
    let small = [
        0,            // the record's length
        8 * 3 + 7,    // which becomes enormous
        8 * 4 + 3,    // the checksum of its bytes
        8 * 30,       // what fills its head
        8 * HEAD - 1, // the head's own checksum
        8 * HEAD,     // its bytes
        8 * HEAD + 77,
        8 * HEAD + 79,
    ];
    let large = [
        8 * HEAD, // with several connections, a stripe's number
        8 * RECORD / 2,
        8 * RECORD + 5,
        8 * (RECORD + HEAD) + 3,
        16 * RECORD + 999,
    ];
    for connections in [1, 3] {
        for (bits, len) in [(&small[..], 10), (&large[..], 2_000_000)] {
            for &bit in bits {
                let sent = pattern(len, 7);
                let mut rigs = flipped(connections, true, in_data(bit));
                let (came, fault) = transfer(&mut rigs, &sent);
                let what = format!("bit {bit} of {len} bytes over {connections}: {fault:?}");
                assert!(
                    matches!(fault, Some(LinkError::Altered { rank: Rank(0), .. })),
                    "{what}"
                );
                assert!(came.len() < len, "{what}: all {len} came");
                // It stays like that.
                let again = rigs[1].data.link(Rank(0)).try_recv(&mut [0; 9]);
                assert_eq!(again.err(), fault, "{what}");
            }
        }
    }
}

#[test]
fn without_checksums_nobody_sees_it() {
    let sent = pattern(1_000_000, 3);
    let (came, fault) = transfer(&mut flipped(1, false, in_data(4_000_001)), &sent);
    assert_eq!(fault, None);
    assert_eq!(came[500_000], sent[500_000] ^ 2);
}

#[test]
fn nothing_is_seen_where_nothing_changes() {
    for connections in [1, 3] {
        let sent = pattern(3_000_000, 9);
        let mut rigs = flipped(connections, true, in_data(u64::MAX));
        assert!(transfer(&mut rigs, &sent) == (sent, None));
    }
}

#[test]
fn a_bit_of_control_that_changes_ends_receiving_but_not_sending() {
    for bit in [0, 8 * 5, 8 * HEAD + 1, 8 * (HEAD + 20)] {
        let mut rigs = flipped(1, true, in_control(bit));
        rigs[0].control.send(Rank(1), &[b'x'; 30]).unwrap();
        match rigs[1].event() {
            ControlEvent::Altered { rank, what } => {
                assert_eq!(rank, Rank(0), "bit {bit}: {what}");
            }
            other => panic!("bit {bit}: {other:?}"),
        }
        // This rank's message about the fault arrives.
        rigs[1]
            .control
            .send(Rank(0), b"you sent something else")
            .unwrap();
        let received = (Rank(1), b"you sent something else".to_vec());
        assert_eq!(rigs[0].frame(), received, "bit {bit}");
    }
}

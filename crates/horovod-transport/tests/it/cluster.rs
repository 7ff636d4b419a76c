//! Ranks as threads over all kinds of links: control, data, arena, notifiers, goodbyes and deaths.
#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]

use std::time::Duration;

use crate::common::{Rig, TIMEOUT, on_all, pattern, rigs};
use horovod_protocol::{Rank, Time};
use horovod_transport::{ControlEvent, LinkError, Mesh, testing};

/// Every kind of cluster that the layers above are tested on.
fn kinds(n: usize) -> Vec<(&'static str, Vec<Mesh>)> {
    let two_hosts: Vec<usize> = (0..n).map(|r| r * 2 / n).collect();
    let scattered: Vec<usize> = (0..n).map(|r| r % 2).collect();
    vec![
        ("shm", testing::cluster(n)),
        ("tcp", testing::cluster_tcp(n)),
        ("two hosts", testing::cluster_hosts(&two_hosts)),
        (
            "ranks dealt to two hosts",
            testing::cluster_hosts(&scattered),
        ),
        (
            "drip",
            testing::Cluster::new(n).hosts(&two_hosts).drip(3).build(),
        ),
    ]
}

#[test]
fn control_frames_reach_rank_0_and_come_back_in_order() {
    for n in [2, 3, 4, 7, 16] {
        for (kind, meshes) in kinds(n) {
            on_all(kind, meshes, |rig| {
                const ROUNDS: u8 = 20;
                if rig.rank() == Rank(0) {
                    for _ in 0..usize::from(ROUNDS) * (n - 1) {
                        let (from, bytes) = rig.frame();
                        rig.control.send(from, &bytes).unwrap();
                    }
                } else {
                    for round in 0..ROUNDS {
                        let frame = pattern(usize::from(round) * 911, round);
                        rig.control.send(Rank(0), &frame).unwrap();
                        assert_eq!(rig.frame(), (Rank(0), frame));
                    }
                }
            });
        }
    }
}

#[test]
fn frames_larger_than_any_ring_or_socket_buffer_pass() {
    for (kind, meshes) in kinds(3) {
        on_all(kind, meshes, |rig| {
            let frame = pattern(9 << 20, rig.rank().0 as u8);
            if rig.rank() == Rank(0) {
                for _ in 0..2 {
                    let (from, bytes) = rig.frame();
                    assert!(
                        bytes == pattern(9 << 20, from.0 as u8),
                        "{from} sent other bytes"
                    );
                    rig.control.send(from, b"thanks").unwrap();
                }
            } else {
                rig.control.send(Rank(0), &frame).unwrap();
                assert_eq!(rig.frame().1, b"thanks");
            }
        });
    }
}

#[test]
fn all_pairs_exchange_data_of_all_sizes() {
    for n in [2, 3, 4, 7] {
        for (kind, meshes) in kinds(n) {
            let large = if kind == "drip" { 5_000 } else { 3_000_000 };
            on_all(kind, meshes, |rig| {
                for len in [0, 1, 7, 4096, large] {
                    rig.exchange(len);
                }
            });
        }
    }
}

#[test]
fn sixteen_ranks_exchange_data() {
    for (kind, meshes) in kinds(16) {
        on_all(kind, meshes, |rig| {
            rig.exchange(if kind == "drip" { 100 } else { 10_000 })
        });
    }
}

#[test]
fn a_sleeping_rank_is_woken_by_a_flag() {
    for (kind, meshes) in kinds(4) {
        on_all(kind, meshes, |rig| {
            // No spinning: every wait goes through arm, re-check and sleep.
            rig.waiter.set_wait_policy(0, 0);
            let Some(arena) = rig.data.arena().cloned() else {
                return;
            };
            let others: Vec<usize> = (0..arena.members().len()).collect();
            for round in 1..=200 {
                arena.publish(0, round, &others);
                for other in 0..arena.members().len() {
                    rig.until(|_| arena.peek(other, 0) >= round);
                }
            }
        });
    }
}

#[test]
fn staging_is_shared_and_aligned() {
    on_all(
        "shm",
        testing::Cluster::new(3).staging(5000).build(),
        |rig| {
            let arena = rig.data.arena().cloned().unwrap();
            assert_eq!(arena.staging_len(), 8192);
            assert_eq!(arena.members(), [Rank(0), Rank(1), Rank(2)]);
            let me = arena.me();
            assert_eq!(arena.local(rig.rank()), Some(me));
            // SAFETY: my own area, which the others read only after the flag.
            unsafe {
                arena
                    .staging(me)
                    .write_bytes(me as u8 + 1, arena.staging_len())
            };
            arena.publish(3, 1, &[0, 1, 2]);
            for other in 0..3 {
                rig.until(|_| arena.peek(other, 3) == 1);
                assert_eq!(arena.staging(other).align_offset(4096), 0);
                for at in [0, 8191] {
                    // SAFETY: inside the area, and stable since the flag.
                    let byte = unsafe { arena.staging(other).add(at).read() };
                    assert_eq!(byte, other as u8 + 1);
                }
            }
        },
    );
}

#[test]
fn a_notifier_wakes_from_another_thread() {
    for (kind, meshes) in kinds(2) {
        on_all(kind, meshes, |rig| {
            rig.waiter.set_wait_policy(0, 0);
            let notifier = rig.waiter.notifier();
            let flag = std::sync::atomic::AtomicU32::new(0);
            std::thread::scope(|s| {
                s.spawn(|| {
                    for _ in 0..100 {
                        flag.fetch_add(1, std::sync::atomic::Ordering::Release);
                        notifier.notify();
                    }
                });
                rig.until(|_| flag.load(std::sync::atomic::Ordering::Acquire) == 100);
            });
        });
    }
}

#[test]
fn a_vanished_peer_is_reported_once_after_its_last_frame() {
    for (kind, meshes) in kinds(4) {
        let mut rigs = rigs(meshes);
        let mut gone = rigs.remove(1);
        gone.control.send(Rank(0), b"last words").unwrap();
        drop(gone);
        let zero = &mut rigs[0];
        assert_eq!(zero.frame(), (Rank(1), b"last words".to_vec()), "{kind}");
        match zero.event() {
            ControlEvent::Lost(lost) => {
                assert_eq!(lost.rank, Rank(1), "{kind}");
                assert!(
                    lost.host.starts_with("host") && !lost.cause.to_string().is_empty(),
                    "{lost:?}"
                );
            }
            other => panic!("{kind}: {other:?}"),
        }
        for _ in 0..300 {
            assert_eq!(zero.control.poll(), None, "{kind}: told twice");
        }
    }
}

#[test]
fn rank_0_is_missed_by_everybody() {
    for (kind, meshes) in kinds(4) {
        let mut rigs = rigs(meshes);
        drop(rigs.remove(0));
        for rig in &mut rigs {
            match rig.event() {
                ControlEvent::Lost(lost) => assert_eq!(lost.rank, Rank(0), "{kind}"),
                other => panic!("{kind}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_goodbye_is_no_loss() {
    for (kind, meshes) in kinds(4) {
        let mut rigs = rigs(meshes);
        let mut leaver = rigs.remove(3);
        leaver.control.send(Rank(0), b"done").unwrap();
        assert!(leaver.control.goodbye(TIMEOUT), "{kind}");
        drop(leaver);
        let zero = &mut rigs[0];
        assert_eq!(zero.frame(), (Rank(3), b"done".to_vec()), "{kind}");
        assert_eq!(zero.event(), ControlEvent::Left { rank: Rank(3) }, "{kind}");
        for _ in 0..300 {
            assert_eq!(zero.control.poll(), None, "{kind}: told twice");
        }
    }
}

#[test]
fn data_links_to_a_dead_host_say_who_where_and_why() {
    let mut rigs = rigs(testing::cluster_tcp(3));
    drop(rigs.remove(2));
    let rig = &mut rigs[1];
    let mut error = None;
    rig.until(|rig| match rig.data.link(Rank(2)).try_recv(&mut [0; 8]) {
        Ok(n) => {
            assert_eq!(n, 0);
            false
        }
        Err(e) => {
            error = Some(e);
            true
        }
    });
    match error.unwrap() {
        LinkError::Lost { rank, host, cause } => {
            assert_eq!((rank, &*host), (Rank(2), "host0"));
            assert!(!cause.is_empty());
        }
        other => panic!("{other}"),
    }
    // The cause stays the same however often one asks, in both directions.
    assert!(rig.data.link(Rank(2)).try_send(b"x").is_err());
    assert!(rig.data.link(Rank(2)).try_recv(&mut [0; 8]).is_err());
}

#[test]
fn what_cannot_be_sent_is_an_error_and_not_a_wait() {
    let mut rigs = rigs(testing::cluster(3));
    let control = &mut rigs[1].control;
    assert_eq!(
        control.send(Rank(2), b"x"),
        Err(LinkError::NoLink { rank: Rank(2) })
    );
    assert_eq!(
        control.send(Rank(1), b"x"),
        Err(LinkError::NoLink { rank: Rank(1) })
    );
    assert_eq!(
        control.send(Rank(9), b"x"),
        Err(LinkError::NoLink { rank: Rank(9) })
    );
    let long = vec![0; horovod_transport::CONTROL_FRAME_MAX + 1];
    assert!(matches!(
        control.send(Rank(0), &long),
        Err(LinkError::FrameTooLong { .. })
    ));
    // Rank 0 does not read: the queue fills up to its limit and not beyond.
    let full = (0..10).find_map(|_| control.send(Rank(0), &long[1..]).err());
    assert!(
        matches!(full, Some(LinkError::Stuffed { rank: Rank(0), .. })),
        "{full:?}"
    );
}

#[test]
fn a_sleep_ends_by_itself_when_asked_to() {
    for (kind, meshes) in kinds(2) {
        for rig in &mut rigs(meshes) {
            rig.waiter.set_wait_policy(0, 0);
            for n in 0..10 {
                rig.waiter.idle(n, Some(Duration::from_millis(1)));
            }
            assert_eq!(rig.control.poll(), None, "{kind}");
        }
    }
}

#[test]
fn alone_there_is_nothing_to_hear() {
    let mut mesh = Mesh::solo().unwrap();
    assert_eq!((mesh.topology.size, mesh.topology.rank), (1, Rank(0)));
    assert!(mesh.data.arena().is_none());
    assert_eq!(mesh.control.poll(), None);
    mesh.waiter.set_wait_policy(0, 0);
    let mut rig = Rig::new(mesh);
    let notifier = rig.waiter.notifier();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            done.store(true, std::sync::atomic::Ordering::Release);
            notifier.notify();
        });
        rig.until(|_| done.load(std::sync::atomic::Ordering::Acquire));
    });
}

#[test]
fn who_looks_after_its_neighbours_is_heard_by_them_and_who_does_not_is_given_up() {
    const QUARTER: u64 = 1_000_000_000;
    for (kind, mut meshes) in kinds(3) {
        for mesh in &mut meshes {
            mesh.control
                .watch(Duration::from_nanos(4 * QUARTER), Time(0));
        }
        // The time is only said, so whatever has been sent must have arrived: look until it has.
        let settle = |mesh: &mut Mesh| {
            for n in 0..3 {
                mesh.waiter.idle(n, Some(Duration::from_millis(1)));
                if let Some(event) = mesh.control.poll() {
                    assert!(
                        matches!(event, ControlEvent::Silent { .. }),
                        "{kind}: {event:?}"
                    );
                    return Some(event);
                }
            }
            None
        };
        let mut given_up = Vec::new();
        for quarter in 1..=8 {
            // Rank 1 has stopped.
            for rank in [0, 2] {
                let mesh = &mut meshes[rank];
                let now = Time(quarter * QUARTER);
                assert!(
                    mesh.control.look_due().is_some_and(|due| due <= now),
                    "{kind}"
                );
                while mesh.control.look_after(now) {
                    if let Some(event) = settle(mesh) {
                        given_up.push((quarter, rank, event));
                    }
                }
            }
            for rank in [0, 2] {
                assert_eq!(settle(&mut meshes[rank]), None, "{kind}");
            }
        }
        let silence = Duration::from_nanos(4 * QUARTER);
        let silent = ControlEvent::Silent {
            rank: Rank(1),
            silence,
        };
        // Control links go between rank 0 and the others.
        assert_eq!(given_up, [(4, 0, silent)], "{kind}");
    }
}

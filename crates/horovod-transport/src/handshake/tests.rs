//! Both ends of the handshake, in order and not.

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::*;
use crate::tcp::stream::StreamError;

fn pair() -> (Arc<Fd>, Arc<Fd>) {
    let ((), mut fds) = Fd::open_all(|| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map(|(a, b)| ((), vec![a, b]))
    })
    .unwrap();
    (Arc::new(fds.remove(0)), Arc::new(fds.remove(0)))
}

const BINDING: Binding = Binding {
    purpose: Purpose::Data,
    lane: 0,
    sealed: false,
    generation: 7,
    from: 3,
    to: 1,
};

fn key(digit: &str) -> JobKey {
    JobKey::from_hex(&digit.repeat(64)).unwrap()
}

type ShakeOutcome = (
    Result<Stream, HandshakeError>,
    Result<(Binding, Stream), HandshakeError>,
);

/// Runs both ends in turn until each has an outcome.
fn shake(ours: &JobKey, binding: Binding, theirs: &JobKey, expected: Binding) -> ShakeOutcome {
    let (a, b) = pair();
    let mut initiator = Initiator::new(a, ours, binding).unwrap();
    let mut responder = Responder::new(b);
    let (mut left, mut right) = (None, None);
    for _ in 0..10 {
        if left.is_none() {
            left = initiator.step().transpose();
        }
        if right.is_none() {
            right = responder.step(theirs, |b| *b == expected).transpose();
        }
    }
    (
        left.expect("the initiator waits"),
        right.unwrap_or(Err(HandshakeError::Closed)),
    )
}

fn talk(a: &mut Stream, b: &mut Stream) {
    let sent: Vec<u8> = (0..40_000u32).map(|i| i as u8).collect();
    let (mut at, mut got) = (0, Vec::new());
    for _ in 0..1000 {
        at += a.try_send(&sent[at..]).unwrap();
        let mut buf = [0; 999];
        while let Got::Bytes(n) = b.try_recv(&mut buf).unwrap() {
            got.extend_from_slice(&buf[..n]);
        }
    }
    assert!(got == sent);
}

#[test]
fn equal_keys_and_bindings_make_a_stream_plain_or_sealed() {
    for sealed in [false, true] {
        let binding = Binding { sealed, ..BINDING };
        let (left, right) = shake(&key("a"), binding, &key("a"), binding);
        let (bound, mut right) = right.unwrap();
        assert_eq!(bound, binding);
        let mut left = left.unwrap();
        talk(&mut left, &mut right);
        talk(&mut right, &mut left);
    }
}

#[test]
fn sealed_bytes_are_not_readable_and_not_changeable() {
    let binding = Binding {
        sealed: true,
        ..BINDING
    };
    let (left, right) = shake(&key("a"), binding, &key("a"), binding);
    let (mut left, (_, mut right)) = (left.unwrap(), right.unwrap());
    assert_eq!(left.try_send(b"secret secret").unwrap(), 13);
    let mut wire = [0; 100];
    let Got::Bytes(n) = recv(right.fd(), &mut wire).unwrap() else {
        panic!("nothing came")
    };
    assert!(!wire.windows(6).any(|w| w == b"secret"));
    wire[n - 1] ^= 1;
    // Put the changed record back in its place.
    assert_eq!(send(left.fd(), &wire[..n]).unwrap(), n);
    assert!(matches!(
        right.try_recv(&mut [0; 50]),
        Err(StreamError::Sealed)
    ));
}

#[test]
fn another_key_is_refused_and_both_sides_know() {
    let (left, right) = shake(&key("a"), BINDING, &key("b"), BINDING);
    assert!(matches!(left, Err(HandshakeError::Key)));
    assert!(matches!(right, Err(HandshakeError::Key)));
}

#[test]
fn another_purpose_generation_or_rank_is_refused() {
    for other in [
        Binding {
            purpose: Purpose::Control,
            ..BINDING
        },
        Binding {
            generation: 6,
            ..BINDING
        },
        Binding { lane: 1, ..BINDING },
        Binding { from: 2, ..BINDING },
        Binding { to: 0, ..BINDING },
    ] {
        let (left, right) = shake(&key("a"), other, &key("a"), BINDING);
        assert!(matches!(left, Err(HandshakeError::Unexpected)), "{other:?}");
        assert!(
            matches!(right, Err(HandshakeError::Unexpected)),
            "{other:?}"
        );
    }
}

#[test]
fn changed_clear_fields_do_not_verify() {
    // Somebody on the way turns rank 3 into rank 2, whom the responder expects as well.
    let (a, b) = pair();
    let mut initiator = Initiator::new(a, &key("a"), BINDING).unwrap();
    initiator.out.bytes[PREFIX + 10] = 2;
    assert!(initiator.step().unwrap().is_none());
    let mut responder = Responder::new(b);
    assert!(matches!(
        responder.step(&key("a"), |_| true),
        Err(HandshakeError::Key)
    ));
}

#[test]
fn a_recorded_handshake_gets_nobody_in() {
    // Record what a true initiator says...
    let (a, tap) = pair();
    let mut initiator = Initiator::new(a, &key("a"), BINDING).unwrap();
    assert!(initiator.step().unwrap().is_none());
    let mut hello = [0; HELLO];
    assert_eq!(recv(&tap, &mut hello).unwrap(), Got::Bytes(HELLO));
    // ... including its confirmation of a true answer.
    let (c, d) = pair();
    send(&c, &hello).unwrap();
    let mut responder = Responder::new(d);
    assert!(responder.step(&key("a"), |_| true).unwrap().is_none());
    let mut reply = [0; REPLY];
    assert_eq!(recv(&c, &mut reply).unwrap(), Got::Bytes(REPLY));
    send(&tap, &reply).unwrap();
    assert!(initiator.step().unwrap().is_some());
    let mut confirm = [0; CONFIRM];
    assert_eq!(recv(&tap, &mut confirm).unwrap(), Got::Bytes(CONFIRM));
    // Played again, the first message is answered, but with another ephemeral key: the recorded
    // confirmation does not fit.
    let (e, f) = pair();
    send(&e, &hello).unwrap();
    send(&e, &confirm).unwrap();
    let mut responder = Responder::new(f);
    assert!(matches!(
        responder.step(&key("a"), |_| true),
        Err(HandshakeError::Key)
    ));
}

#[test]
fn a_reflected_message_gets_nobody_in() {
    let (a, tap) = pair();
    let mut initiator = Initiator::new(a, &key("a"), BINDING).unwrap();
    assert!(initiator.step().unwrap().is_none());
    let mut hello = [0; HELLO];
    assert_eq!(recv(&tap, &mut hello).unwrap(), Got::Bytes(HELLO));
    send(&tap, &hello[..REPLY]).unwrap();
    assert!(initiator.step().is_err());
}

#[test]
fn one_byte_at_a_time_is_enough() {
    let (a, left_tap) = pair();
    let (right_tap, b) = pair();
    let mut initiator = Initiator::new(a, &key("a"), BINDING).unwrap();
    let mut responder = Responder::new(b);
    let (mut left, mut right) = (None, None);
    for _ in 0..1000 {
        if left.is_none() {
            left = initiator.step().unwrap();
        }
        if right.is_none() {
            right = responder.step(&key("a"), |_| true).unwrap();
        }
        for (from, to) in [(&left_tap, &right_tap), (&right_tap, &left_tap)] {
            let mut byte = [0];
            if recv(from, &mut byte).unwrap() == Got::Bytes(1) {
                assert_eq!(send(to, &byte).unwrap(), 1);
            }
        }
    }
    assert!(left.is_some() && right.is_some());
}

#[test]
fn garbage_is_noticed_at_its_first_byte() {
    for good in 0..MAGIC.len() {
        let (a, b) = pair();
        let mut responder = Responder::new(b);
        send(&a, &MAGIC[..good]).unwrap();
        assert!(responder.step(&key("a"), |_| true).unwrap().is_none());
        send(&a, b"\0").unwrap();
        let result = responder.step(&key("a"), |_| true);
        assert!(matches!(result, Err(HandshakeError::Stranger)));
        let mut initiator_end = Fill::<REPLY>::new();
        assert!(!initiator_end.read(&a).unwrap(), "a stranger got an answer");
    }
}

#[test]
fn another_version_is_named_to_both() {
    let (a, b) = pair();
    let mut initiator = Initiator::new(a, &key("a"), BINDING).unwrap();
    initiator.out.bytes[MAGIC.len()] = 9;
    assert!(initiator.step().unwrap().is_none());
    let mut responder = Responder::new(b);
    let refused = responder.step(&key("a"), |_| true);
    assert!(matches!(
        refused,
        Err(HandshakeError::Version { theirs: 9 })
    ));
    assert!(matches!(
        initiator.step(),
        Err(HandshakeError::Version { .. })
    ));
}

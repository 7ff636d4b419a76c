//! Parsers of bytes from the network, for fuzzing: any bytes may be given to these, and a broken promise panics.

use std::sync::Arc;

pub use crate::payload::harness::payloads;
pub use crate::rendezvous::harness::rendezvous_server;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::{
    JobKey,
    framing::{FrameQueue, FrameReader, Incoming},
    handshake::{Binding, HandshakeError, Initiator, Purpose, Responder},
    platform::fd::Fd,
    rendezvous::{ToClient, ToServer, samples},
    tcp::stream::{Got, Stream, recv, send},
};

/// Longest frame in [`framing`]: small, so that short inputs get beyond it.
const FRAME_MAX: usize = 1000;
/// More than any message of the handshake.
const MESSAGE_MAX: usize = 256;

const BINDING: Binding = Binding {
    purpose: Purpose::Control,
    lane: 0,
    sealed: true,
    generation: 7,
    from: 3,
    to: 1,
};

/// Two ends of a local connection.
pub(crate) fn pair() -> (Arc<Fd>, Arc<Fd>) {
    let ((), mut fds) = Fd::open_all(|| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map(|(a, b)| ((), vec![a, b]))
    })
    .expect("a socket pair");
    (Arc::new(fds.remove(0)), Arc::new(fds.remove(0)))
}

fn key() -> JobKey {
    JobKey::from_hex(&"5a".repeat(32)).expect("a key")
}

fn take(from: &Fd) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buf = [0; MESSAGE_MAX];
    while let Ok(Got::Bytes(n)) = recv(from, &mut buf) {
        all.extend_from_slice(&buf[..n]);
    }
    all
}

/// Simulates an attacker in the middle of a connection: flips bits of a message, truncates, extends or replaces it.
fn tamper(message: &mut Vec<u8>, plan: &mut &[u8]) {
    let [what, at, value, rest @ ..] = *plan else {
        return;
    };
    *plan = rest;
    let at = usize::from(*at);
    match what % 5 {
        0 => {}
        1 => {
            if let Some(byte) = message.get_mut(at) {
                *byte ^= value;
            }
        }
        2 => message.truncate(at),
        3 => message.insert(at.min(message.len()), *value),
        _ => {
            let n = rest.len().min(at);
            *message = rest[..n].to_vec();
            *plan = &rest[n..];
        }
    }
}

/// Two ends with somebody between them, whose plan the bytes are. The first byte chooses between the
/// handshake and, if it is 0, an encrypted stream after it.
pub fn handshake(bytes: &[u8]) {
    match bytes {
        [] => {}
        [0, plan @ ..] => sealed(plan),
        [_, plan @ ..] => shake(plan),
    }
}

/// A side that ends as authenticated has received exactly the bytes that the other side sent.
fn shake(mut plan: &[u8]) {
    let (left, left_tap) = pair();
    let (right, right_tap) = pair();
    let mut initiator = Initiator::new(left, &key(), BINDING).expect("a key");
    let mut responder = Responder::new(right);
    assert!(matches!(initiator.step(), Ok(None)));

    let hello = take(&left_tap);
    let mut received = hello.clone();
    tamper(&mut received, &mut plan);
    let _ = send(&right_tap, &received);
    let mut right = responder.step(&key(), |_| true);
    let reply = take(&right_tap);
    let mut answer = reply.clone();
    tamper(&mut answer, &mut plan);
    let _ = send(&left_tap, &answer);
    let left = initiator.step();
    let confirm = take(&left_tap);
    let mut last = confirm.clone();
    tamper(&mut last, &mut plan);
    let _ = send(&right_tap, &last);
    if let Ok(None) = right {
        right = responder.step(&key(), |_| true);
    }

    // Bytes after a message do not belong to that message.
    let intact = |received: &[u8], sent: &[u8]| !sent.is_empty() && received.starts_with(sent);
    let answered = intact(&received, &hello) && intact(&answer, &reply);
    let confirmed = intact(&[received, last].concat(), &[hello, confirm].concat());
    assert_eq!(matches!(left, Ok(Some(_))), answered, "the initiator");
    match right {
        Ok(Some((binding, _))) => {
            assert_eq!(binding, BINDING);
            assert!(answered && confirmed, "a made-up initiator");
        }
        Ok(None) | Err(_) => assert!(!(answered && confirmed), "a true initiator refused"),
    }
}

fn streams() -> (Stream, Stream) {
    let (left, right) = pair();
    let mut initiator = Initiator::new(left, &key(), BINDING).expect("a key");
    let mut responder = Responder::new(right);
    assert!(matches!(initiator.step(), Ok(None)));
    assert!(matches!(responder.step(&key(), |_| true), Ok(None)));
    let left: Result<_, HandshakeError> = initiator.step();
    let right = responder.step(&key(), |_| true);
    let (Ok(Some(left)), Ok(Some((_, right)))) = (left, right) else {
        panic!("both hold the key");
    };
    (left, right)
}

/// An encrypted stream whose records are changed on the way: what comes out is what was sent, from
/// its beginning, and after the first change nothing.
fn sealed(bytes: &[u8]) {
    let (count, mut plan) = match bytes {
        [count, rest @ ..] => (usize::from(count % 8) + 1, rest),
        [] => return,
    };
    let (mut left, mut right) = streams();
    let sent: Vec<u8> = (0..count * 40).map(|i| i as u8).collect();
    let mut changed = false;
    for piece in sent.chunks(40) {
        assert_eq!(left.try_send(piece).ok(), Some(piece.len()));
        let mut record = take(right.fd());
        let original = record.clone();
        tamper(&mut record, &mut plan);
        changed |= record != original;
        // Put back in the place of the record that was taken out.
        let _ = send(left.fd(), &record);
    }
    let mut got = Vec::new();
    let mut buf = [0; 99];
    let error = loop {
        match right.try_recv(&mut buf) {
            Ok(Got::Bytes(n)) => got.extend_from_slice(&buf[..n]),
            Ok(Got::Nothing | Got::End) => break false,
            Err(_) => break true,
        }
    };
    assert!(sent.starts_with(&got), "made-up bytes came out");
    assert!(
        changed || (got == sent && !error),
        "honest bytes were refused"
    );
}

/// A stream of frames in pieces, whose length the first byte tells: the same frames come out as from
/// the whole, written again they are the bytes they were read from, and the buffer stays bounded.
pub fn framing(bytes: &[u8]) {
    let [piece, stream @ ..] = bytes else { return };
    let mut apart = FrameReader::new(FRAME_MAX);
    let mut queue = FrameQueue::default();
    let mut refused = false;
    'all: for part in stream.chunks(usize::from(*piece) + 1) {
        apart.space()[..part.len()].copy_from_slice(part);
        apart.filled(part.len());
        loop {
            match apart.pop(&mut Vec::new()) {
                Ok(None) => break,
                Ok(Some(Incoming::Frame(frame))) => queue.push(&frame),
                Ok(Some(Incoming::OutOfBand(frame))) => queue.push_out_of_band([&frame, &[]]),
                Ok(Some(Incoming::Goodbye)) => queue.push_goodbye(),
                Err(too_long) => {
                    assert!(too_long.0 > FRAME_MAX);
                    refused = true;
                    break 'all;
                }
            }
        }
    }
    let mut written = Vec::new();
    let flushed = queue.flush(|bytes| {
        written.extend_from_slice(bytes);
        Ok::<_, ()>(bytes.len())
    });
    assert_eq!(flushed, Ok(true));
    assert!(stream.starts_with(&written));
    assert!(refused || stream.len() - written.len() < FRAME_MAX + 4);
}

/// A message to the rendezvous (first byte 0) or from it.
pub fn rendezvous(bytes: &[u8]) {
    match bytes {
        [0, rest @ ..] => {
            if let Ok(message) = ToServer::decode(rest) {
                assert_eq!(ToServer::decode(&message.encode()), Ok(message));
            }
        }
        [_, rest @ ..] => {
            if let Ok(message) = ToClient::decode(rest) {
                assert_eq!(ToClient::decode(&message.encode()), Ok(message));
            }
        }
        [] => {}
    }
}

/// Valid inputs of [`rendezvous`], one for each kind of message.
pub fn rendezvous_seeds() -> Vec<Vec<u8>> {
    let to_server = samples::to_server().into_iter();
    let to_server = to_server.map(|message| [&[0], &message.encode()[..]].concat());
    let to_client = samples::to_client().into_iter();
    to_server
        .chain(to_client.map(|message| [&[1], &message.encode()[..]].concat()))
        .collect()
}

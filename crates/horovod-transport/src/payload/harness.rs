//! Both ends of a payload's transfer, of which the other says anything, for fuzzing.

use std::{sync::Arc, time::Duration};

use super::{Admitted, DELIVER, Errand, FETCH, Inbox, PIECE, PayloadClient, ServerState, TAKEN};
use crate::{
    JobKey,
    frame_stream::FrameStream,
    framing::{FrameReader, Incoming},
    platform::{self, fd::Fd},
    tcp::stream::{Got, Stream, recv, send},
    testing::parsers::pair,
};

/// A stream of frames to the server (first byte 0) or to a rank that fetches (1) or delivers: what arrives is what
/// was announced, once; all else ends the connection. The second byte says how long the pieces are.
pub fn payloads(bytes: &[u8]) {
    match bytes {
        [0, piece, stream @ ..] => server(usize::from(*piece) + 1, stream),
        [1, stream @ ..] => fetching(stream),
        [_, stream @ ..] => delivering(stream),
        [] => {}
    }
}

/// The frames that stand in a stream, as far as they are whole and of a kind that belongs there.
fn frames(stream: &[u8]) -> Vec<Vec<u8>> {
    let mut reader = FrameReader::new(PIECE);
    let mut frames = Vec::new();
    for part in stream.chunks(100) {
        reader.space()[..part.len()].copy_from_slice(part);
        reader.filled(part.len());
        while let Ok(Some(Incoming::Frame(frame))) = reader.pop(&mut Vec::new()) {
            frames.push(frame);
        }
    }
    frames
}

/// A payload's header and pieces: what it brings, if it is whole, and how many of the pieces that takes.
fn whole(header: &[u8], pieces: &[Vec<u8>]) -> Option<(Vec<u8>, usize)> {
    let wanted = u64::from_le_bytes(header.try_into().ok()?);
    let (mut bytes, mut needed) = (Vec::new(), 0);
    for piece in pieces {
        if bytes.len() as u64 >= wanted || piece.is_empty() {
            break;
        }
        bytes.extend_from_slice(piece);
        needed += 1;
    }
    (bytes.len() as u64 == wanted).then_some((bytes, needed))
}

fn wire(fd: Arc<Fd>) -> FrameStream {
    FrameStream::new(Stream::authenticated(fd, None), PIECE)
}

fn server(piece: usize, stream: &[u8]) {
    let (ours, theirs) = pair();
    let (_notified_fd, notifier) = platform::notifier().expect("a notifier");
    let state = ServerState::new(Inbox::default(), notifier);
    let payload: Arc<[u8]> = (0..300_u16).map(|n| n as u8).collect();
    let mut client = Admitted {
        wire: wire(ours),
        rank: 3,
        known: Errand::Unknown,
    };
    for part in stream.chunks(piece) {
        assert_eq!(send(&theirs, part).ok(), Some(part.len()));
        if !matches!(client.serve(&payload, &state), Ok(true)) {
            break;
        }
    }
    let mut reply = Vec::new();
    let mut buf = [0; 1000];
    while let Ok(Got::Bytes(n)) = recv(&theirs, &mut buf) {
        reply.extend_from_slice(&buf[..n]);
    }
    let sent = frames(stream);
    let arrived: Vec<_> = state.lock().drain(..).collect();
    match sent.split_first() {
        Some((first, pieces)) if first.first() == Some(&DELIVER) => {
            assert!(arrived.len() <= 1, "one payload arrived twice");
            for (rank, bytes) in arrived {
                let (expected, needed) = whole(&first[1..], pieces).expect("it is whole");
                assert_eq!((rank, bytes), (3, expected));
                // A client that sends more may get no reply.
                let read: usize = sent.iter().map(|frame| 4 + frame.len()).sum();
                let sends_more = pieces.len() > needed || read < stream.len();
                let taken: &[&[u8]] = &[&[TAKEN]];
                assert!(frames(&reply) == taken || (reply.is_empty() && sends_more));
            }
        }
        first => {
            assert!(arrived.is_empty(), "a payload out of nothing");
            if first.is_some_and(|(first, rest)| *first == [FETCH] && rest.is_empty())
                && let [header, pieces @ ..] = &frames(&reply)[..]
            {
                assert_eq!(
                    whole(header, pieces).map(|(bytes, _)| bytes),
                    Some(payload.to_vec())
                );
            }
        }
    }
}

/// Says all of this to a rank, and that nothing follows.
fn sent(stream: &[u8]) -> (FrameStream, Arc<Fd>) {
    let (ours, theirs) = pair();
    let mut queue: &[u8] = stream;
    while !queue.is_empty() {
        match send(&theirs, queue) {
            Ok(n) if n > 0 => queue = &queue[n..],
            _ => break,
        }
    }
    let fd = theirs.get().expect("open");
    rustix::net::shutdown(fd, rustix::net::Shutdown::Write).expect("a connected socket");
    (wire(ours), theirs)
}

fn client() -> PayloadClient {
    PayloadClient {
        rank: 3,
        addresses: Vec::new(),
        key: JobKey::from_hex(&"5a".repeat(32)).expect("a key"),
        wait_timeout: Duration::ZERO,
    }
}

fn fetching(stream: &[u8]) {
    let (wire, _theirs) = sent(stream);
    let fetched = client().fetch_over(wire, &mut || true);
    let frames = frames(stream);
    let expected = frames.split_first();
    let expected = expected.and_then(|(header, pieces)| whole(header, pieces));
    assert_eq!(fetched.ok(), expected.map(|(bytes, _)| bytes));
}

fn delivering(stream: &[u8]) {
    let (wire, _theirs) = sent(stream);
    let delivered = client().deliver_over(wire, b"a payload", &mut || true);
    let first = frames(stream).into_iter().next();
    assert_eq!(delivered.is_ok(), first.as_deref() == Some(&[TAKEN]));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::FrameQueue;

    fn stream(frames: &[&[u8]]) -> Vec<u8> {
        let mut queue = FrameQueue::default();
        frames.iter().for_each(|frame| queue.push(frame));
        let mut bytes = Vec::new();
        let flushed = queue.flush(|b| {
            bytes.extend_from_slice(b);
            Ok::<_, ()>(b.len())
        });
        assert_eq!(flushed, Ok(true));
        bytes
    }

    #[test]
    fn honest_ends_keep_the_promise() {
        let header = [&[DELIVER][..], &5_u64.to_le_bytes()].concat();
        for piece in [0, 3, 255] {
            let honest = stream(&[&header, b"ab", b"cde"]);
            payloads(&[&[0, piece][..], &honest].concat());
            payloads(&[&[0, piece][..], &stream(&[&[FETCH]])].concat());
        }
        payloads(&[&[1][..], &stream(&[&header[1..], b"ab", b"cde"])].concat());
        payloads(&[&[2][..], &stream(&[&[TAKEN]])].concat());
    }
}

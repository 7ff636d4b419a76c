//! Authenticated streams that are registered with a rank's poller, and the link made of them.

use std::sync::Arc;

use super::stream::{Got, Stream};
use crate::{
    link::{Link, LinkError, PeerName},
    poller::{HANGUP, Poller, READABLE, WRITABLE},
};

/// After so many bytes received a stream that took nothing more is tried again. The system reports room only
/// when a third of its buffer is free; over a link with delay that third is missing in flight. As much has
/// usually left this end meanwhile, so that what then fits is worth a call.
const TRY_AGAIN_AFTER: usize = 128 << 10;

/// A stream that makes a system call only when there is a reason to: the poller has seen one, or much has come
/// the other way.
pub(crate) struct PolledStream {
    stream: Stream,
    poller: Arc<Poller>,
    token: usize,
    /// Bytes received since the last try to send.
    received: usize,
    /// Set for good when the stream has ended.
    ended: Option<Arc<str>>,
}

impl PolledStream {
    pub(crate) fn new(stream: Stream, poller: Arc<Poller>, token: usize) -> Self {
        Self {
            stream,
            poller,
            token,
            received: 0,
            ended: None,
        }
    }

    fn end(&mut self, cause: &str) -> Arc<str> {
        let cause: Arc<str> = cause.into();
        self.ended = Some(cause.clone());
        cause
    }

    /// As [`Link::try_send`]; the error is the cause of the end, the same for ever after.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> Result<usize, Arc<str>> {
        if let Some(cause) = &self.ended {
            return Err(cause.clone());
        }
        let reason = self.received >= TRY_AGAIN_AFTER || self.poller.is(self.token, WRITABLE);
        if bytes.is_empty() || !reason {
            return Ok(0);
        }
        self.received = 0;
        self.poller.clear(self.token, WRITABLE);
        match self.stream.try_send(bytes) {
            Ok(0) => Ok(0),
            Ok(n) => {
                // What took a part is full, and room makes a new event.
                if n == bytes.len() || self.stream.is_sealed() {
                    self.poller.set(self.token, WRITABLE);
                }
                Ok(n)
            }
            Err(e) => Err(self.end(&e.to_string())),
        }
    }

    /// As [`Link::try_recv`]; the error is the cause of the end, the same for ever after.
    pub(crate) fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, Arc<str>> {
        if let Some(cause) = &self.ended {
            return Err(cause.clone());
        }
        let nothing_new = !self.stream.has_buffered() && !self.poller.is(self.token, READABLE);
        if buf.is_empty() || nothing_new {
            return Ok(0);
        }
        self.poller.clear(self.token, READABLE);
        match self.stream.try_recv(buf) {
            Ok(Got::Nothing) => Ok(0),
            Ok(Got::Bytes(n)) => {
                self.received += n;
                // A read that could not fill the buffer has emptied the socket, and more data makes
                // a new event; unless the end is near, which makes none.
                let emptied = n < buf.len() && !self.stream.is_sealed();
                if !emptied || self.poller.is(self.token, HANGUP) {
                    self.poller.set(self.token, READABLE);
                }
                Ok(n)
            }
            Ok(Got::End) => Err(self.end("the connection was closed")),
            Err(e) => Err(self.end(&e.to_string())),
        }
    }
}

/// Bytes that go over one of several connections before the next has its turn. All of a small message
/// takes one, and each connection's buffers hold much more.
const STRIPE: usize = 128 << 10;

/// One direction of a link: which connection has its turn, and how much of its stripe is left.
struct Turn {
    stream: usize,
    left: usize,
}

impl Turn {
    const FIRST: Self = Self {
        stream: 0,
        left: STRIPE,
    };

    fn advance(&mut self, bytes: usize, streams: usize) {
        self.left -= bytes;
        if self.left == 0 {
            self.stream = (self.stream + 1) % streams;
            self.left = STRIPE;
        }
    }
}

/// A byte stream to another rank: over one connection, or in stripes over several.
pub(crate) struct StreamLink {
    peer: PeerName,
    streams: Vec<PolledStream>,
    sending: Turn,
    receiving: Turn,
}

impl StreamLink {
    /// Both ends give the connections, at least one, in the same order.
    pub(crate) fn new(peer: PeerName, streams: Vec<PolledStream>) -> Self {
        debug_assert!(!streams.is_empty(), "a link without a connection");
        Self {
            peer,
            streams,
            sending: Turn::FIRST,
            receiving: Turn::FIRST,
        }
    }
}

impl Link for StreamLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, LinkError> {
        let lost = |cause| self.peer.lost(cause);
        if let [only] = &mut self.streams[..] {
            return only.try_send(bytes).map_err(lost);
        }
        let mut sent = 0;
        while sent < bytes.len() {
            let turn = &mut self.sending;
            let stripe = &bytes[sent..bytes.len().min(sent + turn.left)];
            let n = self.streams[turn.stream].try_send(stripe).map_err(lost)?;
            turn.advance(n, self.streams.len());
            sent += n;
            if n < stripe.len() {
                break;
            }
        }
        Ok(sent)
    }

    fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, LinkError> {
        let lost = |cause| self.peer.lost(cause);
        if let [only] = &mut self.streams[..] {
            return only.try_recv(buf).map_err(lost);
        }
        let mut received = 0;
        while received < buf.len() {
            let turn = &mut self.receiving;
            let end = buf.len().min(received + turn.left);
            let stripe = &mut buf[received..end];
            let n = self.streams[turn.stream].try_recv(stripe).map_err(lost)?;
            turn.advance(n, self.streams.len());
            received += n;
            if n < stripe.len() {
                break;
            }
        }
        Ok(received)
    }
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::{platform::fd::Fd, poller::Source};

    /// Both ends of a connection, each with a poller of its own.
    fn pair() -> [PolledStream; 2] {
        let ((), fds) = Fd::open_all(|| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .map(|(a, b)| ((), vec![a, b]))
        })
        .unwrap();
        let mut ends = fds.into_iter().map(|fd| {
            let fd = Arc::new(fd);
            let source = Source {
                fd: fd.clone(),
                is_bell: false,
            };
            let poller = Arc::new(Poller::new(vec![source]).unwrap());
            PolledStream::new(Stream::authenticated(fd, None), poller, 0)
        });
        [ends.next().unwrap(), ends.next().unwrap()]
    }

    fn fill(stream: &mut PolledStream) {
        while stream.try_send(&[7; 32 << 10]).unwrap() > 0 {}
    }

    #[test]
    fn what_comes_in_is_a_reason_to_try_to_send_before_the_system_reports_room() {
        let [mut one, mut other] = pair();
        fill(&mut one);
        let mut buf = vec![0; 64 << 10];
        // Some room, but not so much that the system would report it.
        assert!(other.try_recv(&mut buf[..32 << 10]).unwrap() > 0);
        one.poller.pump(Some(Duration::ZERO));
        assert!(!one.poller.is(0, WRITABLE), "the system reports the room");
        assert_eq!(one.try_send(&buf).unwrap(), 0);
        let mut came = 0;
        while came < TRY_AGAIN_AFTER {
            other.poller.pump(Some(Duration::ZERO));
            assert!(other.try_send(&buf[..32 << 10]).unwrap() > 0);
            one.poller.pump(Some(Duration::ZERO));
            assert!(!one.poller.is(0, WRITABLE), "the system reports the room");
            came += one.try_recv(&mut buf).unwrap();
        }
        assert!(one.try_send(&buf).unwrap() > 0);
        // Without room it is tried once, and then not again before as much has come.
        fill(&mut one);
        assert_eq!((one.try_send(&buf).unwrap(), one.received), (0, 0));
    }

    #[test]
    fn the_end_of_room_is_told_as_an_event() {
        let [mut one, mut other] = pair();
        fill(&mut one);
        let mut buf = vec![0; 1 << 20];
        while other.try_recv(&mut buf).unwrap() > 0 {
            other.poller.pump(Some(Duration::ZERO));
        }
        one.poller.pump(Some(Duration::ZERO));
        assert!(one.try_send(&buf).unwrap() > 0);
    }
}

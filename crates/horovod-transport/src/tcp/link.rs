//! Authenticated streams that are registered with a rank's poller, and the link made of them.

use std::sync::Arc;

use rustix::io::Errno;

use super::stream::{Got, Stream, StreamError};
use super::stripes::Stripes;
use crate::{
    link::{Link, LinkError, PeerName},
    platform::data_socket,
    platform::{HANGUP, READABLE, WRITABLE},
    poller::Poller,
};

/// After so many bytes received a stream that took nothing more is tried again. The system reports room only
/// when a third of its buffer is free; over a link with delay that third is missing in flight. As much has
/// usually left this end meanwhile, so that what then fits is worth a call.
const TRY_AGAIN_AFTER: usize = 128 << 10;

/// Why nothing more can be received.
#[derive(Debug)]
pub(super) enum Fault {
    Lost(Arc<str>),
    /// The received bytes differ from those sent, though the connection works.
    Altered(Arc<str>),
    Corrupt(&'static str),
}

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
    /// Set for good when what came is not what was sent. The other direction may still work, and is what the peer
    /// can be told by.
    altered: Option<Arc<str>>,
    /// It has ended because the peer closed it, after everything that it had sent.
    closed: bool,
}

impl PolledStream {
    pub(crate) fn new(stream: Stream, poller: Arc<Poller>, token: usize) -> Self {
        Self {
            stream,
            poller,
            token,
            received: 0,
            ended: None,
            altered: None,
            closed: false,
        }
    }

    /// Whether there is a reason to try to send.
    pub(super) fn may_take(&self) -> bool {
        self.ended.is_some()
            || self.received >= TRY_AGAIN_AFTER
            || self.poller.is(self.token, WRITABLE)
    }

    /// Whether bytes that were offered have to be offered again, even if none was taken.
    pub(super) fn is_bound_by_offers(&self) -> bool {
        self.stream.is_bound_by_offers()
    }

    /// Whether the peer closed the stream after everything that it had sent.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    fn end(&mut self, cause: &str) -> Arc<str> {
        let cause: Arc<str> = cause.into();
        self.ended = Some(cause.clone());
        cause
    }

    /// As [`Link::try_send`]; the error is the cause of the end, the same for ever after.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> Result<usize, Arc<str>> {
        self.try_send_both(&[], bytes)
    }

    /// As [`Self::try_send`] of `head` and then `bytes`, without a packet for the head alone.
    pub(super) fn try_send_both(&mut self, head: &[u8], bytes: &[u8]) -> Result<usize, Arc<str>> {
        if let Some(cause) = &self.ended {
            return Err(cause.clone());
        }
        let all = head.len() + bytes.len();
        if all == 0 || !self.may_take() {
            return Ok(0);
        }
        self.received = 0;
        self.poller.clear(self.token, WRITABLE);
        match self.stream.try_send_both(head, bytes) {
            Ok(0) => Ok(0),
            Ok(n) => {
                // A partial write means a full buffer; free space in the buffer makes a new event.
                if n == all || self.stream.is_sealed() {
                    self.poller.set(self.token, WRITABLE);
                }
                Ok(n)
            }
            Err(e) => Err(self.end(&self.explain(&e))),
        }
    }

    /// The kernel's error. If it gave up the connection for want of an answer, also its path MTU where only small packets
    /// passed.
    fn explain(&self, error: &StreamError) -> String {
        let timed_out = Some(Errno::TIMEDOUT.raw_os_error());
        let hint = match error {
            StreamError::Io(io) if io.raw_os_error() == timed_out => {
                data_socket::path_mtu_hint(self.stream.fd())
            }
            _ => None,
        };
        hint.map_or_else(|| error.to_string(), |hint| format!("{error}: {hint}"))
    }

    /// As [`Link::try_recv`]; the error is the cause of the end, the same for ever after.
    pub(super) fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, Fault> {
        if let Some(what) = &self.altered {
            return Err(Fault::Altered(what.clone()));
        }
        if let Some(cause) = &self.ended {
            return Err(Fault::Lost(cause.clone()));
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
            Ok(Got::End) => {
                self.closed = true;
                Err(Fault::Lost(self.end("the connection was closed")))
            }
            Err(e) if e.is_alteration() => {
                let what: Arc<str> = e.to_string().into();
                self.altered = Some(what.clone());
                Err(Fault::Altered(what))
            }
            Err(e) => Err(Fault::Lost(self.end(&self.explain(&e)))),
        }
    }
}

/// A byte stream to another rank: over one connection, or in stripes over several.
pub(crate) struct StreamLink {
    peer: PeerName,
    streams: Streams,
}

enum Streams {
    One(PolledStream),
    Several(Stripes),
}

impl StreamLink {
    /// Both ends give as many connections, at least one.
    pub(crate) fn new(peer: PeerName, mut streams: Vec<PolledStream>) -> Self {
        debug_assert!(!streams.is_empty(), "a link without a connection");
        let streams = match streams.pop() {
            Some(only) if streams.is_empty() => Streams::One(only),
            last => {
                streams.extend(last);
                Streams::Several(Stripes::new(streams))
            }
        };
        Self { peer, streams }
    }
}

impl Link for StreamLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, LinkError> {
        let sent = match &mut self.streams {
            Streams::One(only) => only.try_send(bytes),
            Streams::Several(stripes) => stripes.try_send(bytes),
        };
        sent.map_err(|cause| self.peer.lost(cause))
    }

    fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, LinkError> {
        match &mut self.streams {
            Streams::One(only) => only.try_recv(buf),
            Streams::Several(stripes) => stripes.try_recv(buf),
        }
        .map_err(|fault| match fault {
            Fault::Lost(cause) => self.peer.lost(cause),
            Fault::Altered(what) => self.peer.altered(what),
            Fault::Corrupt(what) => self.peer.corrupt(what),
        })
    }
}

#[cfg(target_os = "linux")]
#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::platform::{Source, fd::Fd};

    /// Both ends of a connection, each with a poller of its own.
    fn pair() -> [PolledStream; 2] {
        sockets().map(|fd| polled(Stream::authenticated(fd, None)))
    }

    pub(in crate::tcp) fn sockets() -> [Arc<Fd>; 2] {
        let ((), fds) = Fd::open_all(|| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .map(|(a, b)| ((), vec![a, b]))
        })
        .unwrap();
        <[Fd; 2]>::try_from(fds).unwrap().map(Arc::new)
    }

    pub(in crate::tcp) fn polled(stream: Stream) -> PolledStream {
        let source = Source {
            fd: stream.fd().clone(),
            is_notifier: false,
        };
        let poller = Arc::new(Poller::new(vec![source]).unwrap());
        PolledStream::new(stream, poller, 0)
    }

    /// Takes note of what has happened to it.
    pub(in crate::tcp) fn pump(stream: &PolledStream) {
        stream.poller.pump(Some(Duration::ZERO));
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

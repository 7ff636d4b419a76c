//! Authenticated streams that are registered with a rank's poller, and the link made of them.

use std::sync::Arc;

use super::stream::{Got, Stream};
use crate::{
    link::{Link, LinkError, PeerName},
    poller::{HANGUP, Poller, READABLE, WRITABLE},
};

/// A stream that makes a system call only when the poller has seen a reason to.
pub(crate) struct PolledStream {
    stream: Stream,
    poller: Arc<Poller>,
    token: usize,
    /// Set for good when the stream has ended.
    ended: Option<Arc<str>>,
}

impl PolledStream {
    pub(crate) fn new(stream: Stream, poller: Arc<Poller>, token: usize) -> Self {
        Self {
            stream,
            poller,
            token,
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
        if bytes.is_empty() || !self.poller.is(self.token, WRITABLE) {
            return Ok(0);
        }
        self.poller.clear(self.token, WRITABLE);
        match self.stream.try_send(bytes) {
            Ok(0) => Ok(0),
            Ok(n) => {
                self.poller.set(self.token, WRITABLE);
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

//! An authenticated stream that is registered with a rank's poller, and the link made of it.

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

/// A stream to another rank.
pub(crate) struct StreamLink {
    peer: PeerName,
    stream: PolledStream,
}

impl StreamLink {
    pub(crate) fn new(peer: PeerName, stream: PolledStream) -> Self {
        Self { peer, stream }
    }
}

impl Link for StreamLink {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, LinkError> {
        self.stream
            .try_send(bytes)
            .map_err(|cause| self.peer.lost(cause))
    }

    fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, LinkError> {
        self.stream
            .try_recv(buf)
            .map_err(|cause| self.peer.lost(cause))
    }
}

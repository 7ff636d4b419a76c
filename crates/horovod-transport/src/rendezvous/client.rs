//! A rank's end of its connection to the rendezvous.

use horovod_protocol::{PeerLost, Rank};

use super::messages::{TO_CLIENT_MAX, ToClient, ToServer};
use crate::{
    framing::{FrameQueue, FrameReader, Incoming},
    platform::fd::Fd,
    tcp::stream::{Got, Stream},
};

/// The connection, and what is under way on it.
pub(crate) struct Client {
    stream: Stream,
    reader: FrameReader,
    queue: FrameQueue,
}

impl Client {
    pub(crate) fn new(stream: Stream) -> Self {
        Self {
            stream,
            reader: FrameReader::new(TO_CLIENT_MAX),
            queue: FrameQueue::default(),
        }
    }

    pub(crate) fn fd(&self) -> &std::sync::Arc<Fd> {
        self.stream.fd()
    }

    pub(crate) fn wants_write(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Queues a message and sends what goes at once.
    pub(crate) fn send(&mut self, message: &ToServer) -> Result<(), String> {
        self.queue.push(&message.encode());
        self.flush()
    }

    pub(crate) fn flush(&mut self) -> Result<(), String> {
        let stream = &mut self.stream;
        self.queue
            .flush(|b| stream.try_send(b))
            .map(|_| ())
            .map_err(|e| e.to_string())
    }

    /// The next message that is there.
    pub(crate) fn next(&mut self) -> Result<Option<ToClient>, String> {
        loop {
            match self
                .reader
                .pop()
                .map_err(|e| format!("a message of {} bytes", e.0))?
            {
                Some(Incoming::Frame(bytes)) => {
                    return ToClient::decode(&bytes)
                        .map(Some)
                        .map_err(|e| e.to_string());
                }
                Some(Incoming::Aside(_)) => return Err("a message of an unknown kind".into()),
                Some(Incoming::Goodbye) => return Err("it has ended".into()),
                None => {}
            }
            match self
                .stream
                .try_recv(self.reader.space())
                .map_err(|e| e.to_string())?
            {
                Got::Bytes(n) => self.reader.filled(n),
                Got::Nothing => return Ok(None),
                Got::End => return Err("it closed the connection".into()),
            }
        }
    }

    /// The next notice of a death, once the mesh stands.
    pub(crate) fn next_notice(&mut self) -> Result<Option<PeerLost>, String> {
        while let Some(message) = self.next()? {
            if let ToClient::PeerDied { rank, host, cause } = message {
                return Ok(Some(PeerLost {
                    rank: Rank(rank),
                    host,
                    cause,
                }));
            }
        }
        Ok(None)
    }
}

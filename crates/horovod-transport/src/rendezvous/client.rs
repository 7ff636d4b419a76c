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
    /// Newest version and all kinds of changes that were announced and not asked for yet.
    updates: Option<(u64, u8)>,
}

/// What a launcher tells while a job runs.
#[derive(Debug)]
pub(crate) enum Notice {
    /// A rank died.
    Died(PeerLost),
    /// The members of the job change.
    HostsUpdated { version: u64, kind: u8 },
}

impl Client {
    pub(crate) fn new(stream: Stream) -> Self {
        Self {
            stream,
            reader: FrameReader::new(TO_CLIENT_MAX),
            queue: FrameQueue::default(),
            updates: None,
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

    /// The next message that is there. Announcements of changes are kept for [`Self::next_notice`]: they may
    /// come while the links are still being made.
    pub(crate) fn next(&mut self) -> Result<Option<ToClient>, String> {
        loop {
            match self.next_message()? {
                Some(ToClient::HostsUpdated { version, kind }) => {
                    let kinds = self.updates.map_or(0, |(_, kinds)| kinds);
                    self.updates = Some((version, kinds | kind));
                }
                other => return Ok(other),
            }
        }
    }

    fn next_message(&mut self) -> Result<Option<ToClient>, String> {
        loop {
            match self
                .reader
                .pop(&mut Vec::new())
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

    /// The next thing told, once the mesh stands.
    pub(crate) fn next_notice(&mut self) -> Result<Option<Notice>, String> {
        while let Some(message) = self.next()? {
            if let ToClient::PeerDied { rank, host, cause } = message {
                return Ok(Some(Notice::Died(PeerLost {
                    rank: Rank(rank),
                    host,
                    cause,
                })));
            }
        }
        let updates = self.updates.take();
        Ok(updates.map(|(version, kind)| Notice::HostsUpdated { version, kind }))
    }
}

//! A rank's end of its connection to the rendezvous.

use horovod_protocol::{LossCause, PeerLost, Rank};

use super::messages::{TO_CLIENT_MAX, ToClient, ToServer};
use crate::{frame_stream::FrameStream, platform::fd::Fd, tcp::stream::Stream};

/// The connection, and its pending announcements.
pub(crate) struct Client {
    wire: FrameStream,
    /// The newest version, and all kinds of changes that were announced and not fetched yet.
    updates: Option<(u64, u8)>,
}

/// Message from the launcher while a job runs.
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
            wire: FrameStream::new(stream, TO_CLIENT_MAX),
            updates: None,
        }
    }

    pub(crate) fn fd(&self) -> &std::sync::Arc<Fd> {
        self.wire.fd()
    }

    pub(crate) fn wants_write(&self) -> bool {
        self.wire.unsent() > 0
    }

    /// Queues a message and sends as much as the socket accepts.
    pub(crate) fn send(&mut self, message: &ToServer) -> Result<(), String> {
        self.wire.push(&message.encode());
        self.flush()
    }

    pub(crate) fn flush(&mut self) -> Result<(), String> {
        self.wire.flush().map(|_| ())
    }

    /// Returns the next message that has arrived. Announcements of changes are kept for [`Self::next_notice`], because
    /// they may arrive while the links are still being established.
    pub(crate) fn next(&mut self) -> Result<Option<ToClient>, String> {
        loop {
            let Some(frame) = self.wire.next()? else {
                return Ok(None);
            };
            match ToClient::decode(&frame).map_err(|e| e.to_string())? {
                ToClient::HostsUpdated { version, kind } => {
                    let kinds = self.updates.map_or(0, |(_, kinds)| kinds);
                    self.updates = Some((version, kinds | kind));
                }
                message => return Ok(Some(message)),
            }
        }
    }

    /// Returns the next notice for an established mesh.
    pub(crate) fn next_notice(&mut self) -> Result<Option<Notice>, String> {
        while let Some(message) = self.next()? {
            if let ToClient::PeerDied { rank, host, cause } = message {
                return Ok(Some(Notice::Died(PeerLost {
                    rank: Rank(rank),
                    host,
                    cause: LossCause::Ended(cause),
                })));
            }
        }
        let updates = self.updates.take();
        Ok(updates.map(|(version, kind)| Notice::HostsUpdated { version, kind }))
    }
}

//! The interface of links to the layers above: non-blocking bytes, typed errors, and how to wait.

use std::sync::Arc;

use horovod_protocol::Rank;

/// An ordered, reliable, non-blocking byte stream to one peer.
pub trait Link: Send {
    /// Takes as many leading bytes as fit now; 0 means that nothing fits.
    ///
    /// After a 0 the next call must offer the same bytes again (and may append more): an encrypted
    /// link may already have sealed them.
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, LinkError>;

    /// Fills a prefix of `buf` with what has arrived; 0 means that nothing has.
    fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, LinkError>;
}

/// Why a link cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The peer is gone: end of stream, reset, or another error of the operating system.
    #[error("lost {rank} on {host}: {cause}")]
    Lost {
        /// Whom.
        rank: Rank,
        /// Where it ran.
        host: Arc<str>,
        /// The operating system's error.
        cause: Arc<str>,
    },
    /// The peer sent what no correct peer sends.
    #[error("{rank} on {host} broke the protocol: {what}")]
    Corrupt {
        /// The peer.
        rank: Rank,
        /// Where it runs.
        host: Arc<str>,
        /// The violation.
        what: &'static str,
    },
    /// The received bytes differ from those the peer sent, though the connection works: a network card, cable or switch
    /// between the ranks is at fault, and neither rank.
    #[error("what came from {rank} on {host} was changed on the way: {what}")]
    Altered {
        /// The sender.
        rank: Rank,
        /// Where it runs.
        host: Arc<str>,
        /// How that was seen.
        what: Arc<str>,
    },
    /// The peer does not read; its queue of unsent frames reached its limit.
    #[error(
        "{rank} on {host} does not read: {queued} bytes are queued for it, at most {limit} may"
    )]
    Stuffed {
        /// The peer.
        rank: Rank,
        /// Where it runs.
        host: Arc<str>,
        /// Bytes waiting, the refused frame included.
        queued: usize,
        /// The limit.
        limit: usize,
    },
    /// The frame is longer than any receiver accepts.
    #[error("a frame of {len} bytes for {rank} is over the limit of {limit}")]
    FrameTooLong {
        /// For whom.
        rank: Rank,
        /// Its length.
        len: usize,
        /// The limit.
        limit: usize,
    },
    /// There is no such link; control frames go between rank 0 and the others only.
    #[error("there is no link of this kind to {rank}")]
    NoLink {
        /// Whom.
        rank: Rank,
    },
}

impl LinkError {
    /// The rank at the other end.
    pub fn rank(&self) -> Rank {
        match self {
            Self::Lost { rank, .. }
            | Self::Corrupt { rank, .. }
            | Self::Altered { rank, .. }
            | Self::Stuffed { rank, .. }
            | Self::FrameTooLong { rank, .. }
            | Self::NoLink { rank } => *rank,
        }
    }
}

/// How an algorithm waits when none of its links makes progress.
pub trait Idle {
    /// Called over and over while nothing moves; `spins` counts from 0 since the last progress.
    /// Returning does not mean that anything arrived: check again.
    fn idle(&mut self, spins: u32) -> Result<(), Aborted>;
}

/// The generation has ended; unwind at once. Holds the cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Aborted(pub Arc<str>);

/// The name that a link's errors carry.
#[derive(Clone, Debug)]
pub(crate) struct PeerName {
    pub(crate) rank: Rank,
    pub(crate) host: Arc<str>,
}

impl PeerName {
    pub(crate) fn lost(&self, cause: impl Into<Arc<str>>) -> LinkError {
        LinkError::Lost {
            rank: self.rank,
            host: self.host.clone(),
            cause: cause.into(),
        }
    }

    pub(crate) fn altered(&self, what: Arc<str>) -> LinkError {
        LinkError::Altered {
            rank: self.rank,
            host: self.host.clone(),
            what,
        }
    }

    pub(crate) fn corrupt(&self, what: &'static str) -> LinkError {
        LinkError::Corrupt {
            rank: self.rank,
            host: self.host.clone(),
            what,
        }
    }
}

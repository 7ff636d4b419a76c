//! Why an operation ended without a result, and the texts users know from Horovod.

use crate::limits::{NAME_BYTES_MAX, TEXT_BYTES_MAX};
use crate::types::Rank;

/// The causes that a caller can tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum OpErrorKind {
    /// This rank's call was wrong; nothing was sent.
    InvalidArgument,
    /// The ranks disagree with each other.
    Precondition,
    /// The operation cannot be carried out any more, e.g. its process set is gone.
    Aborted,
    /// The job has been shut down.
    Shutdown,
    /// A member of the job was lost; this generation is over.
    PeerLost,
    /// The ranks wait for each other in a circle: none of them can ever go on.
    Stalled,
}

/// One failed operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct OpError {
    /// The cause.
    pub kind: OpErrorKind,
    /// Text for the user.
    pub message: String,
}

impl OpError {
    /// An error of `kind`; overlong text is cut so that it always fits into a message.
    pub fn new(kind: OpErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: clip(message.into()),
        }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(OpErrorKind::InvalidArgument, message)
    }

    pub(crate) fn precondition(message: impl Into<String>) -> Self {
        Self::new(OpErrorKind::Precondition, message)
    }

    pub(crate) fn shutdown(reason: &str) -> Self {
        Self::new(OpErrorKind::Shutdown, format!("{SHUTDOWN_TEXT} {reason}"))
    }
}

/// A rank that is gone (or broke the protocol), and how that was noticed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rank}{}: {cause}", on_host(host))]
pub struct PeerLost {
    /// The rank.
    pub rank: Rank,
    /// Its host; empty where the state machines, which know no hosts, found the fault themselves.
    pub host: String,
    /// What happened.
    pub cause: String,
}

impl PeerLost {
    /// The error that every pending and later operation ends with.
    pub fn to_error(&self) -> OpError {
        OpError::new(
            OpErrorKind::PeerLost,
            format!("Horovod lost a member of the job: {self}"),
        )
    }

    /// Texts cut so that they always fit into a message.
    pub(crate) fn clipped(mut self) -> Self {
        self.cause = clip(self.cause);
        if self.host.len() > NAME_BYTES_MAX {
            self.host.clear();
        }
        self
    }

    pub(crate) fn broke_protocol(rank: Rank, what: impl std::fmt::Display) -> Self {
        Self {
            rank,
            host: String::new(),
            cause: format!("broke the protocol: {what}"),
        }
    }
}

fn on_host(host: &str) -> String {
    if host.is_empty() {
        String::new()
    } else {
        format!(" on {host}")
    }
}

/// How every error after a shutdown begins.
pub const SHUTDOWN_TEXT: &str = "Horovod has been shut down. This was caused by an exception on \
     one of the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the \
     ranks finished execution.";

/// How the error for a name that is still pending begins.
pub const DUPLICATE_NAME_TEXT: &str = "Requested to allreduce, allgather, or broadcast a tensor \
     with the same name as another tensor that is currently being processed.";

/// The error of operations pending on a process set that was removed.
pub const SET_REMOVED_TEXT: &str = "Process set has been removed";

/// How the notice begins that the response cache is too small.
pub const CACHE_EVICTION_TEXT: &str =
    "A response has been evicted from cache which may indicate reduced performance.";

/// Who wanted the shutdown, as it follows [`SHUTDOWN_TEXT`].
pub(crate) fn asked_by(rank: Rank) -> String {
    format!("It was requested by {rank}.")
}

/// Cuts text to [`TEXT_BYTES_MAX`].
pub(crate) fn clip(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        let mut end = TEXT_BYTES_MAX;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_peer_is_named_with_host_and_cause() {
        let lost = PeerLost {
            rank: Rank(2),
            host: "h1".into(),
            cause: "killed by signal 9".into(),
        };
        assert_eq!(
            lost.to_error().message,
            "Horovod lost a member of the job: rank 2 on h1: killed by signal 9"
        );
        assert_eq!(
            PeerLost {
                host: String::new(),
                ..lost
            }
            .to_string(),
            "rank 2: killed by signal 9"
        );
    }

    #[test]
    fn overlong_text_is_cut_at_a_character() {
        let text = "ä".repeat(TEXT_BYTES_MAX);
        let error = OpError::new(OpErrorKind::Aborted, format!("x{text}"));
        assert!(error.message.len() <= TEXT_BYTES_MAX && error.message.ends_with('ä'));
    }
}

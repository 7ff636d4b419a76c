//! Errors of operations as data, with the texts that users know from Horovod.

use crate::limits::TEXT_BYTES_MAX;
use crate::lost::PeerLost;
use crate::refusal::Refusal;
use crate::types::Rank;
use crate::wire::cut_at;
use std::borrow::Cow;
use std::sync::Arc;

/// Groups of causes.
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

/// One failed operation. Its `Display` is the text for users.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// Another mistake in this rank's arguments, in words.
    #[error("{0}")]
    Invalid(String),
    /// The call names a process set that is not registered.
    #[error("{operation}: Process set provided does not exist, or has not been registered.")]
    UnknownSet {
        /// The call, as users write it.
        operation: &'static str,
    },
    /// This rank still has an operation of this name under way.
    #[error("{DUPLICATE_NAME_TEXT} (tensor {})", printable_name(name))]
    DuplicateName {
        /// Full key.
        name: String,
    },
    /// A reduce-scatter by anything but average or sum.
    #[error("Reducescatter currently only supports AVERAGE and SUM.")]
    UnsupportedReduction,
    /// The coordinator refused what the ranks asked for; all members get this.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// The process set was removed while this waited.
    #[error("{SET_REMOVED_TEXT}")]
    SetRemoved,
    /// The job has stopped in good order.
    #[error("{}", why.text(*by, pending))]
    Stopped {
        /// The rank that asked for it or is to blame.
        by: Rank,
        /// Why.
        why: StopReason,
        /// This rank's operations that cannot be carried out any more, as text for the user; empty if it had none.
        pending: String,
    },
    /// A member of the job was lost; this generation is over.
    #[error("{}", .0.text())]
    Lost(Box<PeerLost>),
}

impl OpError {
    /// The group of causes that it belongs to.
    pub fn kind(&self) -> OpErrorKind {
        match self {
            Self::Invalid(_) | Self::UnknownSet { .. } | Self::DuplicateName { .. } => {
                OpErrorKind::InvalidArgument
            }
            Self::Refused(refusal) if refusal.is_mistake() => OpErrorKind::InvalidArgument,
            Self::Refused(_) => OpErrorKind::Precondition,
            Self::UnsupportedReduction | Self::SetRemoved => OpErrorKind::Aborted,
            Self::Stopped {
                why: StopReason::Deadlock { .. },
                ..
            } => OpErrorKind::Stalled,
            Self::Stopped { .. } => OpErrorKind::Shutdown,
            Self::Lost(_) => OpErrorKind::PeerLost,
        }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(clip(message.into()))
    }
}

impl From<Refusal> for OpError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(Box::new(refusal))
    }
}

/// Why a job stops in good order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// A rank asked for it.
    Left(Leaving),
    /// A rank kept the others waiting for longer than the user allows.
    Stalled {
        /// Full key of what they waited for.
        tensor: String,
    },
    /// The ranks wait for each other in a circle.
    Deadlock {
        /// Which rank waits for which tensors, for the user.
        report: String,
    },
    /// The ranks began to train with different parameters, and `HOROVOD_CHECK_REPLICAS` is `error`.
    ReplicasDiffer {
        /// The differing parameters and ranks, as text for the user.
        report: String,
    },
}

impl StopReason {
    /// The error text for users; `by` asked for the shutdown or is to blame, `pending` is what this rank had to do.
    fn text(&self, by: Rank, pending: &str) -> String {
        match self {
            Self::Left(why) => format!("{SHUTDOWN_TEXT}: {}", left_by(by, *why, pending)),
            Self::Stalled { tensor } => format!(
                "{SHUTDOWN_TEXT}: {by} was stalled: {} waited for it too long.",
                printable_name(tensor)
            ),
            Self::Deadlock { report } | Self::ReplicasDiffer { report } => report.clone(),
        }
    }

    /// Bytes of what has no bound of its own.
    pub(crate) fn wire_bytes(&self) -> usize {
        match self {
            Self::Left(_) => 0,
            Self::Stalled { tensor: text }
            | Self::Deadlock { report: text }
            | Self::ReplicasDiffer { report: text } => text.len(),
        }
    }

    /// Cuts its text to the bound of messages.
    pub(crate) fn clipped(self) -> Self {
        match self {
            Self::Left(_) => self,
            Self::Stalled { tensor } => Self::Stalled {
                tensor: clip(tensor),
            },
            Self::Deadlock { report } => Self::Deadlock {
                report: clip(report),
            },
            Self::ReplicasDiffer { report } => Self::ReplicasDiffer {
                report: clip(report),
            },
        }
    }
}

/// How every error after a shutdown begins.
pub const SHUTDOWN_TEXT: &str = "Horovod has been shut down";
/// Cure where ranks have different numbers of batches, as a part of a sentence. Keras's functions have no `join`.
pub const EVEN_BATCHES: &str = "give all ranks the same number of batches (in Keras: steps_per_epoch), or let every rank \
     call hvd.join() after its last batch (not in Keras)";

/// Why a rank asks all others to stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Leaving {
    /// It was told to.
    #[default]
    Asked,
    /// Its program has come to its end.
    Ended,
    /// Its program has ended because of an error.
    Failed,
}

/// How the error for a name that is still pending begins.
pub const DUPLICATE_NAME_TEXT: &str = "Requested to allreduce, allgather, or broadcast a tensor \
     with the same name as another tensor that is currently being processed.";

/// The error of operations pending on a process set that was removed.
pub const SET_REMOVED_TEXT: &str = "Process set has been removed";

/// How the notice begins that the response cache is too small.
pub const CACHE_EVICTION_TEXT: &str =
    "A response has been evicted from cache which may indicate reduced performance.";

/// Names listed in an error.
const NAMES_LISTED_MAX: usize = 3;

/// The names of operations as text for the user: the first few, and how many more there are.
pub(crate) fn listed(names: &[Arc<str>]) -> String {
    let shown: Vec<_> = names
        .iter()
        .take(NAMES_LISTED_MAX)
        .map(|name| printable_name(name))
        .collect();
    match names.len().saturating_sub(NAMES_LISTED_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Text after [`SHUTDOWN_TEXT`]: the rank that asked for the shutdown, its reason, and what this rank had to do.
fn left_by(rank: Rank, why: Leaving, pending: &str) -> String {
    let here = match pending {
        "" => String::new(),
        names => format!(" (this rank: {names})"),
    };
    match why {
        Leaving::Asked => format!(
            "{rank} called hvd.shutdown(). Operations that other ranks still had to do{here} cannot be carried out."
        ),
        Leaving::Ended => format!(
            "the script of {rank} has ended while other ranks still had operations to do{here}. If it only had fewer \
             batches than the others, {EVEN_BATCHES}. If only some ranks call these operations, as after \
             `if hvd.rank() == 0`, let all ranks do so."
        ),
        Leaving::Failed => {
            format!(
                "the script of {rank} has ended with an exception; look at what it has printed. Operations that \
                 other ranks still had to do{here} cannot be carried out."
            )
        }
    }
}

/// The text with control characters shown as escapes, as a terminal may take them for commands; line breaks stay.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c.is_control() && c != '\n' && c != '\t')
}

/// A name from outside as it is shown within a line of text.
pub(crate) fn printable_name(name: &str) -> Cow<'_, str> {
    escaped(name, char::is_control)
}

fn escaped(text: &str, unfit: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&unfit) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if unfit(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Cuts text to [`TEXT_BYTES_MAX`].
pub(crate) fn clip(mut text: String) -> String {
    text.truncate(cut_at(&text, TEXT_BYTES_MAX).len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_as_escapes() {
        assert_eq!(
            printable("a\u{1b}[31mb\rc\u{9b}d\n\te \u{e4}"),
            "a\\u{1b}[31mb\\rc\\u{9b}d\n\te \u{e4}"
        );
        assert!(matches!(printable("plain\n"), Cow::Borrowed(_)));
        assert_eq!(printable_name("a\nb"), "a\\nb");
    }

    #[test]
    fn overlong_text_is_cut_at_a_character() {
        let text = "ä".repeat(TEXT_BYTES_MAX);
        let error = OpError::invalid(format!("x{text}")).to_string();
        assert!(error.len() <= TEXT_BYTES_MAX && error.ends_with('ä'));
    }
}

//! The public error of the runtime.

use horovod_protocol::{OpError, OpErrorKind, PeerLost, Rank, Refusal, StopReason};

/// Error of an operation or of init, as data; users read its `Display`. The bindings map it to Python exceptions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call that needs `init` came before it, or after `shutdown`.
    #[error("Horovod has not been initialized; use hvd.init().")]
    NotInitialized,
    /// Init could not bring the job up.
    #[error("{0}")]
    Init(String),
    /// This process is no longer wanted in its elastic job, and shall end.
    #[error("{0}")]
    Removed(String),
    /// The caller of init wanted to leave before the job was up.
    #[error("interrupted while joining the job")]
    Interrupted,
    /// The caller's arguments are wrong; nothing was sent.
    #[error("{0}")]
    Invalid(String),
    /// This rank still has an operation of this name under way; nothing was sent.
    #[error("{}", OpError::DuplicateName { name: name.clone() })]
    DuplicateName {
        /// Full key, e.g. `allreduce.fc1.weight`.
        name: String,
    },
    /// The ranks disagree, or agree on what cannot be done. All members get this, and the job goes on.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// The process set of the operation was removed while it waited.
    #[error("{}", OpError::SetRemoved)]
    SetRemoved,
    /// This process has left the job.
    #[error("Horovod has been shut down.")]
    Closed,
    /// The job has stopped in good order, or because its ranks wait for each other in a circle.
    #[error("{}", OpError::Stopped { by: *by, why: why.clone(), pending: pending.clone() })]
    Stopped {
        /// The rank that asked for it or is to blame.
        by: Rank,
        /// Why.
        why: StopReason,
        /// This rank's operations that cannot be carried out any more, as text for the user; empty if it had none.
        pending: String,
    },
    /// A rank was lost, or data are altered on the way to one: this generation is over.
    #[error("{}", OpError::Lost(.0.clone()))]
    Lost(Box<PeerLost>),
    /// The caller's stream is being captured into a graph, which can hold none of our operations; nothing was sent.
    #[error("{0}")]
    Capturing(&'static str),
    /// Horovod itself cannot do what it should.
    #[error("{0}")]
    Internal(String),
}

impl Error {
    /// Whether the arguments of the call were wrong, rather than something having failed.
    pub fn is_invalid(&self) -> bool {
        match self {
            Self::Invalid(_) | Self::DuplicateName { .. } => true,
            Self::Refused(refusal) => refusal.is_mistake(),
            _ => false,
        }
    }
}

impl From<horovod_settings::Refused> for Error {
    fn from(refused: horovod_settings::Refused) -> Self {
        Self::Init(refused.to_string())
    }
}

impl From<horovod_scheduler::NoJob> for Error {
    fn from(no_job: horovod_scheduler::NoJob) -> Self {
        Self::Init(no_job.to_string())
    }
}

impl From<OpError> for Error {
    fn from(error: OpError) -> Self {
        match error {
            OpError::DuplicateName { name } => Self::DuplicateName { name },
            OpError::Refused(refusal) => Self::Refused(refusal),
            OpError::SetRemoved => Self::SetRemoved,
            OpError::Stopped { by, why, pending } => Self::Stopped { by, why, pending },
            OpError::Lost(lost) => Self::Lost(lost),
            mistake if mistake.kind() == OpErrorKind::InvalidArgument => {
                Self::Invalid(mistake.to_string())
            }
            other => Self::Internal(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use horovod_protocol::LossCause;

    use super::*;

    #[test]
    fn every_error_says_what_the_negotiation_said() {
        let lost = PeerLost {
            rank: Rank(1),
            host: "h".into(),
            cause: LossCause::Left,
        };
        let by = Rank(2);
        for error in [
            OpError::Invalid("wrong".into()),
            OpError::UnknownSet {
                operation: "Barrier",
            },
            OpError::DuplicateName { name: "x".into() },
            OpError::UnsupportedReduction,
            OpError::Refused(Box::new(Refusal::TooManySets)),
            OpError::SetRemoved,
            OpError::Stopped {
                by,
                why: StopReason::Deadlock {
                    report: "circle".into(),
                },
                pending: String::new(),
            },
            OpError::Stopped {
                by,
                why: StopReason::Left(horovod_protocol::Leaving::Ended),
                pending: "validation".into(),
            },
            OpError::Lost(Box::new(lost)),
        ] {
            let public = Error::from(error.clone());
            assert_eq!(public.to_string(), error.to_string());
            let mistake = error.kind() == OpErrorKind::InvalidArgument;
            assert_eq!(public.is_invalid(), mistake, "{error:?}");
        }
    }
}

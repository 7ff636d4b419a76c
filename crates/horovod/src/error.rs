//! The one error of this crate, as data; its text is made here.
#![forbid(unsafe_code)]

use std::fmt;

use horovod_engine::{self as engine, Difference, Impossible, Leaving, Refusal, StopReason};

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of an operation or of [`init`](crate::init).
///
/// Both `Display` and `Debug` print a sentence, so `fn main() -> horovod::Result<()>` shows a readable one.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// `init` was called while a guard of an earlier call lives.
    AlreadyInitialized,
    /// The job could not be started.
    Init {
        /// The cause, as text for the user.
        cause: String,
    },
    /// The launcher of an elastic job has removed this process from it.
    Removed {
        /// The cause, as text for the user.
        cause: String,
    },
    /// Members of an elastic job are to be added or removed. The function that [`elastic::run`](crate::elastic::run) has
    /// called returns this error, and is called again.
    MembersChange,
    /// The arguments of this call have no meaning; nothing was sent.
    Invalid {
        /// The mistake, as text for the user.
        mistake: String,
    },
    /// This rank still has an operation of this name under way; nothing was sent.
    NameInUse {
        /// The kind of operation and the name, such as `allreduce.gradient`.
        name: String,
    },
    /// A call that waits was made in a function that an operation's end has called, such as a waker.
    InCallback,
    /// Two ranks asked for different things under one name. All members get this, and the job goes on.
    Disagreement {
        /// The kind of operation and the name.
        name: String,
        /// Both ranks of the job, with what each passed, such as `shape [4]`.
        sides: [(usize, String); 2],
    },
    /// All ranks asked for the same, which cannot be done. All members get this, and the job goes on.
    Refused {
        /// The reason, as text for the user.
        reason: String,
    },
    /// The process set of the operation was removed.
    SetRemoved,
    /// This process has left the job: the guard was dropped, or a scope has panicked.
    Closed,
    /// A rank left the job while this one still had something to do with it.
    Left {
        /// The rank of the job.
        rank: usize,
        /// Whether it left because its program had failed.
        failed: bool,
    },
    /// The job was stopped for a rank that kept the others waiting, or for ranks that waited for each other.
    Stalled {
        /// The rank of the job that is to blame, or that found it.
        rank: usize,
        /// The details, as text for the user.
        report: String,
    },
    /// A rank was lost: its process or its host ended, or cannot be reached.
    Lost {
        /// The rank of the job.
        rank: usize,
        /// Its host; empty if that is not known.
        host: String,
        /// The cause, as text for the user.
        cause: String,
    },
    /// This crate cannot do what it should.
    Internal {
        /// The details.
        cause: String,
    },
}

impl Error {
    /// Whether the call itself or the program is wrong, rather than something outside having failed: the job goes on.
    pub fn is_mistake(&self) -> bool {
        matches!(
            self,
            Self::AlreadyInitialized
                | Self::Invalid { .. }
                | Self::NameInUse { .. }
                | Self::InCallback
                | Self::Disagreement { .. }
                | Self::Refused { .. }
                | Self::SetRemoved
                | Self::Closed
        )
    }

    /// Whether another rank has ended the operations of this job: it was lost, has left or has stalled. Outside of
    /// [`elastic::run`](crate::elastic::run) the job is then over.
    pub fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::Lost { .. } | Self::Left { .. } | Self::Stalled { .. }
        )
    }

    pub(crate) fn invalid(mistake: impl Into<String>) -> Self {
        Self::Invalid {
            mistake: mistake.into(),
        }
    }

    pub(crate) fn internal(cause: impl Into<String>) -> Self {
        Self::Internal {
            cause: cause.into(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AlreadyInitialized => f.write_str(
                "horovod::init was called while a guard of an earlier call lives; pass that guard on, or drop it first",
            ),
            Self::Init { cause } => write!(f, "the job could not be started: {cause}"),
            Self::Removed { cause } => f.write_str(cause),
            Self::MembersChange => f.write_str(
                "members of the job are to be added or removed; return this error from the function that \
                 horovod::elastic::run has called",
            ),
            Self::Invalid { mistake } => f.write_str(mistake),
            Self::NameInUse { name } => write!(
                f,
                "this rank still has an operation named {name:?} under way; give each of them another name, or wait \
                 for the first"
            ),
            Self::InCallback => f.write_str(
                "a call that waits was made in a waker, on the thread on which all operations of this process end; \
                 let the waker only wake a task, and call on another thread",
            ),
            Self::Disagreement { name, sides } => {
                let [(first, wanted), (second, other)] = sides;
                write!(
                    f,
                    "the ranks disagree about {name:?}: rank {first} passed {wanted}, rank {second} passed {other}"
                )
            }
            Self::Refused { reason } => f.write_str(reason),
            Self::SetRemoved => f.write_str(
                "the process set of this operation was removed; use it only until `ProcessSet::remove`",
            ),
            Self::Closed => f.write_str(
                "this process has left the job: the guard that horovod::init returned was dropped; keep it until the \
                 last call",
            ),
            // The launcher knows ranks that only noticed another's end by the first words of the next three texts.
            Self::Left { rank, failed: true } => write!(
                f,
                "Horovod has been shut down: the program of rank {rank} has failed; look at its output"
            ),
            Self::Left {
                rank,
                failed: false,
            } => write!(
                f,
                "Horovod has been shut down: rank {rank} has left the job while this rank still had operations to do; \
                 let all ranks make the same calls, or let each call `join` after its last one"
            ),
            Self::Stalled { report, .. } => write!(f, "Horovod has been shut down: {report}"),
            Self::Lost { rank, host, cause } => {
                write!(f, "Horovod lost a member of the job: rank {rank}")?;
                if !host.is_empty() {
                    write!(f, " on host {host}")?;
                }
                write!(f, ": {cause}")
            }
            Self::Internal { cause } => write!(f, "internal error: {cause}"),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

impl Error {
    /// The error of the engine of the rank `own`; `None` before the rank is known.
    pub(crate) fn of(own: Option<usize>, error: engine::Error) -> Self {
        match error {
            engine::Error::NotInitialized | engine::Error::Closed => Self::Closed,
            engine::Error::Init(cause) => Self::Init { cause },
            engine::Error::Removed(cause) => Self::Removed { cause },
            engine::Error::Invalid(mistake) => Self::Invalid { mistake },
            engine::Error::DuplicateName { name } => Self::NameInUse { name },
            engine::Error::Refused(refusal) => refused(&refusal),
            engine::Error::SetRemoved => Self::SetRemoved,
            engine::Error::Stopped {
                by,
                why: StopReason::Left(_),
                ..
            } if Some(by.index()) == own => Self::Closed,
            engine::Error::Stopped { by, why, .. } => stopped(by.index(), why),
            engine::Error::Lost(lost) => Self::Lost {
                rank: lost.rank.index(),
                host: lost.host,
                cause: lost.cause.to_string(),
            },
            other => Self::internal(other.to_string()),
        }
    }

    /// The error of this engine.
    pub(crate) fn on(engine: &engine::Engine, error: engine::Error) -> Self {
        Self::of(Some(engine.topology().rank.index()), error)
    }
}

/// The first words of a side of a disagreement; some sides are words already.
fn noun(difference: &Difference) -> &'static str {
    match difference {
        Difference::Shapes { .. } => "shape ",
        Difference::DataTypes(_) => "elements of type ",
        Difference::Operations(_) => "operation ",
        Difference::Reductions(_) => "op ",
        Difference::Factors(_) => "factors ",
        Difference::Roots(_) => "root ",
        Difference::NewSets(_) => "ranks ",
        _ => "",
    }
}

fn refused(refusal: &Refusal) -> Error {
    match refusal {
        Refusal::Mismatch(mismatch) => Error::Disagreement {
            name: mismatch.tensor.clone(),
            sides: mismatch.sides().map(|(rank, passed)| {
                (
                    rank.index(),
                    format!("{}{passed}", noun(&mismatch.difference)),
                )
            }),
        },
        Refusal::Impossible {
            tensor,
            why: Impossible::Joined { .. },
        } => Error::Refused {
            reason: format!(
                "{tensor:?} cannot be carried out while a rank waits in `join`: that rank can take part in allreduces \
                 and barriers only"
            ),
        },
        Refusal::DuplicateSet { .. } => Error::Refused {
            reason: "there is a process set of the same ranks already; use that one".into(),
        },
        other => Error::Refused {
            reason: other.to_string(),
        },
    }
}

fn stopped(rank: usize, why: StopReason) -> Error {
    match why {
        StopReason::Left(leaving) => Error::Left {
            rank,
            failed: leaving == Leaving::Failed,
        },
        StopReason::Stalled { tensor } => Error::Stalled {
            rank,
            report: format!(
                "the others waited too long for rank {rank}, which did not submit {tensor:?}"
            ),
        },
        StopReason::Deadlock { report } | StopReason::ReplicasDiffer { report } => {
            Error::Stalled { rank, report }
        }
        other => Error::internal(format!("rank {rank} stopped the job: {other:?}")),
    }
}

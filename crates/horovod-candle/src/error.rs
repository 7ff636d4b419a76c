//! The errors of this crate; their text is made here.

use std::fmt;

use horovod::framework;

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of a call of this crate. `Display` and `Debug` print a sentence.
#[non_exhaustive]
pub enum Error {
    /// An operation between the ranks has failed.
    Horovod(horovod::Error),
    /// A computation of candle has failed on this rank.
    Candle(candle_core::Error),
    /// Two ranks have different parameters, or different settings of the optimizer. All ranks get this, and the job
    /// goes on.
    Differ {
        /// Both ranks of the job, with the first parameter or setting that differs; `None` on a rank that has none of that
        /// name.
        sides: [(usize, Option<String>); 2],
    },
    /// A rank could not take part in a call of all ranks: its arguments have no meaning, or a computation of candle has
    /// failed on it. All ranks get this before a parameter or gradient was sent, and the job goes on.
    OfRank {
        /// The rank of the job.
        rank: usize,
        /// The cause, as text for the user.
        cause: String,
    },
    /// The arguments of this call have no meaning; no parameter or gradient was sent.
    Invalid {
        /// The mistake, as text for the user.
        mistake: String,
    },
}

impl Error {
    pub(crate) fn invalid(mistake: impl Into<String>) -> Self {
        Self::Invalid {
            mistake: mistake.into(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Horovod(error) => error.fmt(f),
            Self::Candle(error) => error.fmt(f),
            Self::Differ { sides } => f.write_str(&framework::difference_text(sides)),
            Self::OfRank { rank, cause } => f.write_str(&framework::mistake_text(*rank, cause)),
            Self::Invalid { mistake } => f.write_str(mistake),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // The text of these is that of this error already.
            Self::Horovod(error) => error.source(),
            Self::Candle(error) => error.source(),
            Self::Differ { .. } | Self::OfRank { .. } | Self::Invalid { .. } => None,
        }
    }
}

impl From<horovod::Error> for Error {
    fn from(error: horovod::Error) -> Self {
        Self::Horovod(error)
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Candle(error)
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            // Without a backtrace, which would change the first words of the text.
            error => Self::Wrapped(Box::new(error)),
        }
    }
}

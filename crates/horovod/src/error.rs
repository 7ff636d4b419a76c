//! The public error of the runtime.

/// What an operation or init can end with; the bindings map each variant to one Python exception.
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
    /// The ranks wait for each other and none can ever go on; the text is the whole report.
    #[error("{0}")]
    Stalled(String),
    /// The collective failed on all its members: ranks disagree, a peer was lost, the job was shut down.
    #[error("{0}")]
    Internal(String),
}

//! Reasons for which nothing was started.

use std::io;

use crate::hosts;
use crate::rendezvous::RendezvousError;

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error(transparent)]
    Hosts(#[from] hosts::HostsError),
    /// An option names what is not there.
    #[error("{0}")]
    Wrong(String),
    #[error("{0}")]
    Other(String),
    #[error("{what}: {error}")]
    Cannot { what: String, error: io::Error },
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<RendezvousError> for LaunchError {
    fn from(error: RendezvousError) -> Self {
        match error {
            RendezvousError::Interfaces(error) => {
                Self::Wrong(format!("--network-interfaces: {error}"))
            }
            RendezvousError::Ports(error) => Self::Wrong(error.to_string()),
            RendezvousError::Key(error) => Self::Io(error),
            error => Self::Other(error.to_string()),
        }
    }
}

impl LaunchError {
    /// Whether the call is to blame, as by a wrong option.
    pub(crate) fn is_wrong_call(&self) -> bool {
        matches!(self, Self::Hosts(_) | Self::Wrong(_))
    }

    /// Whether this process may not open as many files as it needs.
    pub(crate) fn is_out_of_files(&self) -> bool {
        let most = Some(rustix::io::Errno::MFILE.raw_os_error());
        matches!(self, Self::Io(error) | Self::Cannot { error, .. } if error.raw_os_error() == most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_files_are_told_from_other_errors() {
        let of = |errno: rustix::io::Errno| LaunchError::Cannot {
            what: "ssh for host h cannot be started".to_owned(),
            error: errno.into(),
        };
        let full = of(rustix::io::Errno::MFILE);
        assert!(full.is_out_of_files());
        assert!(
            full.to_string()
                .starts_with("ssh for host h cannot be started: Too many")
        );
        assert!(!of(rustix::io::Errno::NOENT).is_out_of_files());
        assert!(!LaunchError::Other(full.to_string()).is_out_of_files());
    }
}

//! The loss of a rank, or of the connection to it, as data.

use crate::error::clip;
use crate::limits::NAME_BYTES_MAX;
use crate::types::Rank;
use std::fmt;

/// A rank that is gone (or broke the protocol), and how that was noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerLost {
    /// The rank; where data were altered on the way ([`LossCause::Altered`]) the one that received them.
    pub rank: Rank,
    /// Its host; empty where the state machines, which know no hosts, found the fault themselves.
    pub host: String,
    /// The cause.
    pub cause: LossCause,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossCause {
    /// The launcher tells how its process ended.
    Ended(String),
    /// Its connection was closed or failed.
    Connection(String),
    /// It took leave while the job was running.
    Left,
    /// It gave no sign of life.
    Silent {
        /// For so long.
        seconds: u64,
    },
    /// It said of itself that it cannot go on.
    CannotGoOn(String),
    /// A device does not end an operation, as was found out by the rank that is named: no rank is lost.
    Stuck(String),
    /// It said what nobody may say.
    BrokeProtocol(String),
    /// It sent bytes that are no message.
    Unreadable(String),
    /// The received bytes differ from those sent. Both ranks live and neither is to blame: no rank is lost.
    Altered {
        /// The sender.
        from: Rank,
        /// Its host.
        from_host: String,
        /// The check that failed.
        what: String,
    },
}

impl PeerLost {
    /// Whether a rank is gone; else only the connection between two is at fault.
    pub fn is_rank(&self) -> bool {
        !matches!(self.cause, LossCause::Altered { .. } | LossCause::Stuck(_))
    }

    /// The text of the error that every pending and later operation ends with.
    pub(crate) fn text(&self) -> String {
        let what = if self.is_rank() {
            "Horovod lost a member of the job"
        } else {
            "Horovod cannot go on, though no rank is lost"
        };
        format!("{what}: {self}")
    }

    /// Texts cut so that they always fit into a message.
    pub(crate) fn clipped(mut self) -> Self {
        clip_host(&mut self.host);
        match &mut self.cause {
            LossCause::Left | LossCause::Silent { .. } => {}
            LossCause::Ended(text)
            | LossCause::Connection(text)
            | LossCause::CannotGoOn(text)
            | LossCause::Stuck(text)
            | LossCause::BrokeProtocol(text)
            | LossCause::Unreadable(text) => *text = clip(std::mem::take(text)),
            LossCause::Altered {
                from_host, what, ..
            } => {
                clip_host(from_host);
                *what = clip(std::mem::take(what));
            }
        }
        self
    }

    pub(crate) fn broke_protocol(rank: Rank, what: impl fmt::Display) -> Self {
        Self {
            rank,
            host: String::new(),
            cause: LossCause::BrokeProtocol(what.to_string()),
        }
    }
}

impl fmt::Display for PeerLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, host) = (self.rank, OnHost(&self.host));
        match &self.cause {
            LossCause::Altered {
                from,
                from_host,
                what,
            } => write!(
                f,
                "what {from}{} sent to {rank}{host} was changed on the way ({what}). Both run on; something between \
                 them changes data: a network card, a cable, a switch",
                OnHost(from_host)
            ),
            LossCause::Stuck(what) => f.write_str(what),
            cause => write!(f, "{rank}{host}: {cause}"),
        }
    }
}

impl fmt::Display for LossCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(text)
            | Self::Connection(text)
            | Self::CannotGoOn(text)
            | Self::Stuck(text) => f.write_str(text),
            Self::Left => f.write_str("left while the job was running"),
            Self::Silent { seconds } => write!(
                f,
                "it did not answer for {seconds} s (heartbeat time-out, HOROVOD_HEARTBEAT_TIMEOUT_SECONDS); its \
                 process may be stopped, its machine overloaded or unreachable"
            ),
            Self::BrokeProtocol(what) => write!(f, "broke the protocol: {what}"),
            Self::Unreadable(what) => write!(f, "sent a message that cannot be read: {what}"),
            Self::Altered { from, what, .. } => {
                write!(f, "what {from} sent was changed on the way ({what})")
            }
        }
    }
}

struct OnHost<'a>(&'a str);

impl fmt::Display for OnHost<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        write!(f, " on {}", self.0)
    }
}

fn clip_host(host: &mut String) {
    if host.len() > NAME_BYTES_MAX {
        host.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpError;

    #[test]
    fn a_lost_peer_is_named_with_host_and_cause() {
        let lost = PeerLost {
            rank: Rank(2),
            host: "h1".into(),
            cause: LossCause::Ended("killed by signal 9".into()),
        };
        assert_eq!(
            OpError::Lost(Box::new(lost.clone())).to_string(),
            "Horovod lost a member of the job: rank 2 on h1: killed by signal 9"
        );
        let nowhere = PeerLost {
            host: String::new(),
            ..lost
        };
        assert_eq!(nowhere.to_string(), "rank 2: killed by signal 9");
    }

    #[test]
    fn who_finds_out_that_a_device_is_stuck_is_not_lost() {
        let stuck = PeerLost {
            rank: Rank(0),
            host: "a".into(),
            cause: LossCause::Stuck("grad has been on GPUs for 600 s".into()),
        };
        assert!(!stuck.is_rank());
        assert_eq!(
            OpError::Lost(Box::new(stuck)).to_string(),
            "Horovod cannot go on, though no rank is lost: grad has been on GPUs for 600 s"
        );
    }

    #[test]
    fn of_altered_data_both_ends_are_named_and_none_is_lost() {
        let altered = PeerLost {
            rank: Rank(0),
            host: "a".into(),
            cause: LossCause::Altered {
                from: Rank(1),
                from_host: "b".into(),
                what: "checksum".into(),
            },
        };
        assert!(!altered.is_rank());
        assert_eq!(
            OpError::Lost(Box::new(altered)).to_string(),
            "Horovod cannot go on, though no rank is lost: what rank 1 on b sent to rank 0 on a was changed on the \
             way (checksum). Both run on; something between them changes data: a network card, a cable, a switch"
        );
    }
}

//! The dialogue of a joining rank with the rendezvous.

use std::time::{Duration, Instant};

use horovod_protocol::{Generation, Rank};

use super::{CONNECTIONS_MAX, ConnectError, connect::Joining, register::wait_for};
use crate::{
    platform::identity,
    rendezvous::{Common, MemberEntry, RankAssignment, ToClient, ToServer, Where},
    unreached::{ANSWER_WITHIN, Unreached, cause},
};

/// Percentage of the timeout after which the rendezvous reports the missing ranks, so that the report arrives before
/// this rank gives up.
const ANSWER_AFTER_PERCENT: u32 = 90;

/// Members of a generation and their common settings.
pub(super) struct Roster {
    pub(super) generation: Generation,
    pub(super) members: Vec<MemberEntry>,
    pub(super) common: Common,
    pub(super) assignment: Option<RankAssignment>,
}

impl Joining {
    pub(super) fn hello(&mut self) -> Result<(), ConnectError> {
        if let Some(elastic) = self.config.elastic {
            self.deadline = self.started + elastic.wait_timeout;
        }
        let config = &self.config;
        let left = self.deadline.saturating_duration_since(Instant::now());
        let wait_timeout = left * ANSWER_AFTER_PERCENT / 100;
        let member = MemberEntry {
            identity: identity::host_identity(&config.hostname),
            hostname: config.hostname.clone(),
            pid: std::process::id(),
            shm: config.shm,
        };
        let common = Common {
            connections: config.connections.clamp(1, CONNECTIONS_MAX),
            fan_out: config.fan_out,
            heartbeat: config.heartbeat,
            checksums: config.checksums,
            settings: config.settings.clone(),
        };
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let hello = match config.elastic {
            Some(elastic) => ToServer::Join {
                worker: elastic.worker,
                training_state: elastic.training_state,
                timeout_ms: ms(config.timeout),
                member,
                common,
            },
            None => ToServer::Hello {
                rank: config.rank.0,
                size: config.size,
                wait_timeout_ms: ms(wait_timeout),
                member,
                common,
            },
        };
        self.send(&hello)
    }

    pub(super) fn send(&mut self, message: &ToServer) -> Result<(), ConnectError> {
        self.client.send(message).map_err(|cause| self.lost(cause))
    }

    pub(super) fn lost(&self, cause: String) -> ConnectError {
        ConnectError::RendezvousLost {
            rank: self.config.rank,
            cause,
        }
    }

    /// Returns the next message of the rendezvous. Messages that end the attempt become errors.
    pub(super) fn message(&mut self) -> Result<Option<ToClient>, ConnectError> {
        self.client.flush().map_err(|cause| self.lost(cause))?;
        let rank = self.config.rank;
        match self.client.next().map_err(|cause| self.lost(cause))? {
            Some(ToClient::Refused { text }) => Err(ConnectError::Refused { rank, reason: text }),
            Some(ToClient::Removed { text }) => Err(ConnectError::Removed(text)),
            Some(ToClient::Aborted { text }) => Err(ConnectError::Aborted(text)),
            Some(ToClient::PeerDied { rank, host, cause }) => Err(ConnectError::Aborted(format!(
                "{} on {host}: {cause}",
                Rank(rank)
            ))),
            Some(ToClient::Missing { ranks }) => Err(ConnectError::Missing {
                missing: ranks.into_iter().map(Rank).collect(),
                size: self.config.size,
                waited: self.started.elapsed(),
            }),
            other => Ok(other),
        }
    }

    /// Reports the ranks that this rank cannot reach. Returns the cause that the rendezvous determines from all
    /// reports, or else this rank's own.
    pub(super) fn report_unreached(&mut self, report: Unreached) -> ConnectError {
        let own = cause(std::slice::from_ref(&report), "");
        self.deadline = self.deadline.min(Instant::now() + ANSWER_WITHIN);
        if let Err(error) = self.send(&ToServer::Unreached(report)) {
            tracing::debug!("{error}");
            return ConnectError::Aborted(own);
        }
        loop {
            match self.wait_message() {
                Ok(_) => {}
                Err(ConnectError::RendezvousLost { .. }) => return ConnectError::Aborted(own),
                Err(error) => return error,
            }
        }
    }

    pub(super) fn wait_message(&mut self) -> Result<ToClient, ConnectError> {
        loop {
            if let Some(message) = self.message()? {
                return Ok(message);
            }
            if Instant::now() >= self.deadline {
                return Err(self.lost("it did not answer in time".into()));
            }
            let wait = [(&**self.client.fd(), self.client.wants_write())];
            wait_for(&self.config, wait.into_iter(), Some(self.deadline))?;
        }
    }

    pub(super) fn roster(&mut self) -> Result<Roster, ConnectError> {
        match self.wait_message()? {
            ToClient::Roster {
                generation,
                members,
                common,
                assignment,
            } => {
                let size = members.len();
                if let (Some(assignment), Some(_)) = (assignment, self.config.elastic) {
                    self.config.rank = Rank(assignment.rank);
                    self.config.size = u32::try_from(size).unwrap_or(u32::MAX);
                    self.deadline = Instant::now() + self.config.timeout;
                }
                if size != self.config.size as usize || self.config.rank.index() >= size {
                    return Err(self.lost("it sent no proper roster".into()));
                }
                Ok(Roster {
                    generation: Generation(generation),
                    members,
                    common,
                    assignment,
                })
            }
            _ => Err(self.lost("it sent no proper roster".into())),
        }
    }

    pub(super) fn table(&mut self) -> Result<Vec<Where>, ConnectError> {
        match self.wait_message()? {
            ToClient::Table { places } if places.len() == self.config.size as usize => Ok(places),
            _ => Err(self.lost("it sent no proper table".into())),
        }
    }
}

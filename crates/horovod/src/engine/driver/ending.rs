//! The end of a generation: who is gone and why, who is told, what every handle gets.

use std::time::{Duration, Instant};

use horovod_protocol::{LossCause, PeerLost, Rank};
use horovod_transport::Aborted;

use super::pump::Pump;
use crate::engine::SHUTDOWN_GRACE;
use crate::engine::backend::Failure;
use crate::error::Error;

/// How long a closed connection waits for the launcher to say why the process ended.
const CAUSE_GRACE: Duration = Duration::from_millis(300);
/// How long a failure that another rank is to blame for waits for that rank's name. Only its neighbours have links to it:
/// they see these close, which may be after the failure here, give the launcher [`CAUSE_GRACE`], and tell the others then.
/// Who waited no longer than they do would blame itself, and so would all who hear of it first. Nothing is lost by the wait,
/// for what failed has ended the work of all.
const BLAME_GRACE: Duration = Duration::from_secs(2);

/// A peer that is gone, while the reason may still come.
pub(super) struct Suspect {
    pub(super) lost: PeerLost,
    /// It said goodbye; then it may itself only follow another's end.
    pub(super) said_goodbye: bool,
    pub(super) deadline: Instant,
}

impl Pump {
    /// A neighbour has said nothing for too long; the launcher must know, for such a process does not end by itself.
    pub(super) fn give_up_silent(&mut self, rank: Rank, silence: Duration) {
        if self.needs(rank) {
            self.control.tell_silent(rank);
        }
        let cause = LossCause::Silent {
            seconds: silence.as_secs_f64().round() as u64,
        };
        self.note_lost(rank, cause, false);
    }

    /// What came from a rank is not what it sent. Both ends live and say the same: neither is to blame.
    pub(super) fn end_for_altered(&mut self, from: Rank, what: &str) {
        let me = self.topology.rank;
        let altered = PeerLost {
            rank: me,
            host: self.host_of(me),
            cause: LossCause::Altered {
                from,
                from_host: self.host_of(from),
                what: what.to_owned(),
            },
        };
        tracing::error!("{altered}");
        self.end_generation(&altered);
    }

    /// A link closed. After a shutdown that is how peers leave, unless something of ours still runs.
    pub(super) fn note_lost(&mut self, rank: Rank, cause: LossCause, said_goodbye: bool) {
        if self.dead.is_some() || !self.needs(rank) {
            return;
        }
        let lost = PeerLost {
            rank,
            host: self.host_of(rank),
            cause,
        };
        if let Some(suspect) = &mut self.lost {
            // Who left may have left because of who died, whose end is only seen later.
            if suspect.said_goodbye && !said_goodbye && suspect.lost.rank != rank {
                suspect.lost = lost;
                suspect.said_goodbye = false;
            }
            return;
        }
        let grace = if self.stopped {
            SHUTDOWN_GRACE
        } else {
            CAUSE_GRACE
        };
        self.lost = Some(Suspect {
            lost,
            said_goodbye,
            deadline: Instant::now() + grace,
        });
    }

    /// Whether this rank's end matters: always while the job runs, then only for what was agreed before the stop.
    pub(super) fn needs(&self, rank: Rank) -> bool {
        let ready = self.ready.iter().map(|e| &e.members);
        !self.stopped
            || self.flights.need(rank)
            || self
                .running
                .iter()
                .chain(ready)
                .any(|members| members.contains(&rank))
    }

    pub(super) fn host_of(&self, rank: Rank) -> String {
        self.topology
            .peers
            .get(rank.index())
            .map(|p| p.hostname.to_string())
            .unwrap_or_default()
    }

    /// A lost peer ends the generation when the launcher has had its time to say why.
    pub(super) fn settle_lost_peer(&mut self) {
        let Some(suspect) = &self.lost else { return };
        if !self.needs(suspect.lost.rank) {
            self.lost = None;
        } else if Instant::now() >= suspect.deadline {
            let lost = suspect.lost.clone();
            self.end_generation(&lost);
        }
    }

    /// Everything pending and later fails with this cause. Each rank tells those it has control links to why, and
    /// so it goes round; any but rank 0 then takes leave, which ends the generation for who has not heard it.
    pub(super) fn end_generation(&mut self, lost: &PeerLost) {
        if self.dead.is_some() {
            return;
        }
        // The state machines know no hosts.
        let lost = &if lost.host.is_empty() {
            PeerLost {
                host: self.host_of(lost.rank),
                ..lost.clone()
            }
        } else {
            lost.clone()
        };
        let now = self.shared.now();
        let error = Error::Lost(Box::new(lost.clone()));
        self.flights.abort(&Aborted(error.to_string().into()));
        self.dead = Some(error.clone());
        self.node.lose_peer(now, lost);
        self.shared.lock().worker.report_lost(lost.clone());
        self.lost = None;
        self.ready.clear();
        self.drain_actions();
        if self.parent().is_some() {
            self.control.goodbye(Duration::ZERO);
        }
        let entries = self.shared.lock().remove_all();
        drop(entries);
        // What is carried out has to let go of its tensors first.
        self.fail_unused(&error);
        tracing::debug!("generation ended: {lost}");
    }

    /// Map the failure of a running collective to the error of its handles, ending the generation if it stands.
    pub(super) fn failure(&mut self, failure: Failure) -> Error {
        match failure {
            Failure::Aborted(cause) => {
                let error = self.dead.clone();
                error.unwrap_or_else(|| Error::Internal(cause.0.to_string()))
            }
            Failure::Link { rank, cause } => {
                let host = self.host_of(rank);
                let cause = LossCause::Connection(cause);
                let lost = PeerLost { rank, host, cause };
                self.await_cause(&lost);
                self.dead.clone().unwrap_or(Error::Lost(Box::new(lost)))
            }
            Failure::Altered { rank, what } => {
                self.end_for_altered(rank, &what);
                let error = self.dead.clone();
                error.unwrap_or_else(|| Error::Internal(what.to_string()))
            }
            Failure::Remote(text) => {
                self.await_end();
                match self.dead.clone() {
                    Some(error) => error,
                    // Nobody has seen a rank end: a network that only NCCL uses, or a host that is silent and not yet
                    // given up.
                    None => self.failure(Failure::Local(text)),
                }
            }
            Failure::Local(text) => {
                let rank = self.topology.rank;
                let lost = PeerLost {
                    rank,
                    host: self.host_of(rank),
                    cause: LossCause::CannotGoOn(text),
                };
                if self.dead.is_none() {
                    tracing::error!("this rank cannot go on: {}", lost.cause);
                }
                self.end_generation(&lost);
                Error::Lost(Box::new(lost))
            }
        }
    }

    /// Give the rank that is to blame, or its neighbours, their time to say why.
    fn await_end(&mut self) {
        let deadline = Instant::now() + BLAME_GRACE;
        let mut spins = 0;
        while self.dead.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if !self.progress() {
                let sleep = self.sleep_limit().min(left);
                self.waiter.idle(spins, Some(sleep));
                spins += 1;
            }
        }
    }

    /// Give the launcher its time to say why the peer of a broken link has ended.
    fn await_cause(&mut self, lost: &PeerLost) {
        self.note_lost(lost.rank, lost.cause.clone(), false);
        if let Some(suspect) = &mut self.lost {
            suspect.deadline = suspect.deadline.min(Instant::now() + CAUSE_GRACE);
        }
        let mut spins = 0;
        while self.dead.is_none() {
            let progress = self.progress();
            if self.lost.is_none() {
                // Nobody is suspected any more, yet the link is broken; no effect if the end has come.
                self.end_generation(lost);
            } else if !progress {
                let sleep = self.sleep_limit();
                self.waiter.idle(spins, Some(sleep));
                spins += 1;
            }
        }
    }
}

//! The end of a generation: who is gone and why, who is told, what every handle gets.

use std::time::{Duration, Instant};

use horovod_protocol::{LossCause, PeerLost, Rank};
use horovod_transport::Aborted;

use super::membership::CAUSE_GRACE;
use super::pump::Pump;
use crate::engine::backend::Failure;
use crate::error::Error;

/// Time that a failure caused by another rank waits for that rank's name. Only the failed rank's neighbours have links
/// to it. They see these links close, perhaps after the failure here, give the launcher [`CAUSE_GRACE`], and then send
/// the name. With a shorter grace period this rank would report itself as lost, and its peers would repeat that report.
/// The wait costs nothing: the failure has ended all work.
const BLAME_GRACE: Duration = Duration::from_secs(2);

impl Pump {
    /// A neighbour has said nothing for too long; the launcher must know, for such a process does not end by itself.
    pub(super) fn give_up_silent(&mut self, rank: Rank, silence: Duration) {
        if self.needs(rank) {
            self.links.report_silent(rank);
        }
        let cause = LossCause::Silent {
            seconds: silence.as_secs_f64().round() as u64,
        };
        self.note_lost(rank, cause);
    }

    /// The bytes received from a rank differ from those it sent. Both ranks live and report the same: neither is to
    /// blame.
    pub(super) fn end_for_altered(&mut self, from: Rank, what: &str) {
        let me = self.links.me();
        let altered = PeerLost {
            rank: me,
            host: self.links.host_of(me),
            cause: LossCause::Altered {
                from,
                from_host: self.links.host_of(from),
                what: what.to_owned(),
            },
        };
        tracing::error!("{altered}");
        self.end_generation(&altered);
    }

    /// A link closed. After a shutdown that is how peers leave, unless something of ours still runs.
    pub(super) fn note_lost(&mut self, rank: Rank, cause: LossCause) {
        if self.membership.is_over() || !self.needs(rank) {
            return;
        }
        let lost = PeerLost {
            rank,
            host: self.links.host_of(rank),
            cause,
        };
        self.membership.suspect(lost);
    }

    /// Whether this rank's end matters: always while the job runs, then only for what was agreed before the stop.
    pub(super) fn needs(&self, rank: Rank) -> bool {
        !self.membership.has_stopped() || self.on_device.need(rank) || self.queue.needs(rank)
    }

    /// A lost peer ends the generation when the launcher has had its time to say why.
    pub(super) fn settle_lost_peer(&mut self) {
        let Some((lost, deadline)) = self.membership.suspected() else {
            return;
        };
        if !self.needs(lost.rank) {
            self.membership.acquit();
        } else if Instant::now() >= deadline {
            let lost = lost.clone();
            self.end_generation(&lost);
        }
    }

    /// Everything pending and later fails with this cause. Each rank tells those it has control links to why, and
    /// so it goes round; any but rank 0 then takes leave, which ends the generation for who has not heard it.
    pub(super) fn end_generation(&mut self, lost: &PeerLost) {
        if self.membership.is_over() {
            return;
        }
        // The state machines know no hosts.
        let lost = &if lost.host.is_empty() {
            PeerLost {
                host: self.links.host_of(lost.rank),
                ..lost.clone()
            }
        } else {
            lost.clone()
        };
        let now = self.shared.now();
        let error = Error::Lost(Box::new(lost.clone()));
        self.on_device.abort(&Aborted(error.to_string().into()));
        self.membership.end(error.clone());
        self.node.lose_peer(now, lost);
        self.shared.lock().worker.report_lost(lost.clone());
        self.queue.clear();
        self.drain_actions();
        if self.links.parent().is_some() {
            self.links.goodbye(Duration::ZERO);
        }
        let entries = self.shared.lock().remove_all();
        drop(entries);
        // The running execution must release its tensors first.
        self.fail_unused(&error);
        tracing::debug!("generation ended: {lost}");
    }

    /// Map the failure of a running collective to the error of its handles, ending the generation if it stands.
    pub(super) fn failure(&mut self, failure: Failure) -> Error {
        match failure {
            Failure::Aborted(cause) => {
                let error = self.membership.cause().cloned();
                error.unwrap_or_else(|| Error::Internal(cause.0.to_string()))
            }
            Failure::Link { rank, cause } => {
                let host = self.links.host_of(rank);
                let cause = LossCause::Connection(cause);
                let lost = PeerLost { rank, host, cause };
                self.await_cause(&lost);
                self.membership
                    .cause()
                    .cloned()
                    .unwrap_or(Error::Lost(Box::new(lost)))
            }
            Failure::Altered { rank, what } => {
                self.end_for_altered(rank, &what);
                let error = self.membership.cause().cloned();
                error.unwrap_or_else(|| Error::Internal(what.to_string()))
            }
            Failure::Remote(text) => {
                self.await_end();
                match self.membership.cause().cloned() {
                    Some(error) => error,
                    // Nobody has seen a rank end: a network that only devices use, or a host that is silent and not yet
                    // given up.
                    None => self.failure(Failure::Local(text)),
                }
            }
            Failure::Local(text) => {
                let rank = self.links.me();
                let lost = PeerLost {
                    rank,
                    host: self.links.host_of(rank),
                    cause: LossCause::CannotGoOn(text),
                };
                if !self.membership.is_over() {
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
        while !self.membership.is_over() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if !self.progress() {
                let sleep = self.sleep_limit().min(left);
                self.links.waiter().idle(spins, Some(sleep));
                spins += 1;
            }
        }
    }

    /// Give the launcher its time to say why the peer of a broken link has ended.
    fn await_cause(&mut self, lost: &PeerLost) {
        self.note_lost(lost.rank, lost.cause.clone());
        self.membership.hurry(CAUSE_GRACE);
        let mut spins = 0;
        while !self.membership.is_over() {
            let progress = self.progress();
            if self.membership.suspected().is_none() {
                // Nobody is suspected any more, yet the link is broken; no effect if the end has come.
                self.end_generation(lost);
            } else if !progress {
                let sleep = self.sleep_limit();
                self.links.waiter().idle(spins, Some(sleep));
                spins += 1;
            }
        }
    }
}

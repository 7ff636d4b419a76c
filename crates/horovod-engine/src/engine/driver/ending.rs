//! The end of a generation: which rank was lost and why, which ranks are notified, and the result of every handle.

use std::time::{Duration, Instant};

use horovod_protocol::{LossCause, PeerLost, Rank};
use horovod_transport::Aborted;

use super::membership::CAUSE_GRACE;
use super::pump::Pump;
use crate::engine::backend::Failure;
use crate::error::Error;

/// After a failure that another rank caused, this rank waits so long for the report that names that rank. Only the
/// failed rank's neighbours have links to it. They detect that these links close, perhaps after the failure here, wait
/// [`CAUSE_GRACE`] for the launcher, and then send the report. With a shorter grace period this rank would report
/// itself as lost, and its peers would repeat that report. The wait costs nothing: the failure has ended all work.
const BLAME_GRACE: Duration = Duration::from_secs(2);

impl Pump {
    /// Suspects a neighbour that was silent for too long. If the rank is still needed, also reports it to the launcher,
    /// which must end such a process.
    pub(super) fn give_up_silent(&mut self, rank: Rank, silence: Duration) {
        if self.needs(rank) {
            self.links.report_silent(rank);
        }
        let cause = LossCause::Silent {
            seconds: silence.as_secs_f64().round() as u64,
        };
        self.note_lost(rank, cause);
    }

    /// Ends the generation because the bytes received from a rank differ from those it sent. Both ranks are alive and
    /// report the same cause: neither is to blame.
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

    /// Suspects the rank of a closed link. After a shutdown peers close their links, so the rank is suspected only if
    /// an execution of this rank still needs it.
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

    /// Returns whether the loss of `rank` matters. While the job runs it always does; after the stop, only if the rank
    /// is a member of an execution that has not ended.
    pub(super) fn needs(&self, rank: Rank) -> bool {
        !self.membership.has_stopped() || self.on_device.need(rank) || self.queue.needs(rank)
    }

    /// Ends the generation for the suspected peer when the launcher's time to report the cause is over. Acquits the
    /// peer if no execution needs it.
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

    /// Ends the generation: everything pending and every later operation fails with this cause. Each rank sends the
    /// cause along its control links, so that it reaches all ranks. Every rank except rank 0 then sends a goodbye,
    /// which ends the generation also for neighbours that have not received the cause.
    pub(super) fn end_generation(&mut self, lost: &PeerLost) {
        if self.membership.is_over() {
            return;
        }
        // The state machines do not have the names of hosts.
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

    /// Maps the failure of a running collective to the error of its handles. Ends the generation, unless it has ended
    /// already.
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
                    // No rank has detected a loss: the failure is in a network that only devices use, or on a host that
                    // is silent but whose timeout has not passed.
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

    /// Waits at most [`BLAME_GRACE`] until the failed rank or its neighbours report the cause.
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

    /// Waits at most [`CAUSE_GRACE`] until the launcher reports why the peer of a broken link has ended, then ends the
    /// generation.
    fn await_cause(&mut self, lost: &PeerLost) {
        self.note_lost(lost.rank, lost.cause.clone());
        self.membership.hurry(CAUSE_GRACE);
        let mut spins = 0;
        while !self.membership.is_over() {
            let progress = self.progress();
            if self.membership.suspected().is_none() {
                // The suspicion was withdrawn, yet the link is broken. This has no effect if the generation has ended.
                self.end_generation(lost);
            } else if !progress {
                let sleep = self.sleep_limit();
                self.links.waiter().idle(spins, Some(sleep));
                spins += 1;
            }
        }
    }
}

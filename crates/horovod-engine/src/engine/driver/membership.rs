//! The members of a generation, as far as this rank depends on them: suspicion of a lost peer, agreement to stop, end
//! of the generation.

use std::time::{Duration, Instant};

use horovod_protocol::{Leaving, LossCause, PeerLost, StopReason};

use crate::engine::SHUTDOWN_GRACE;
use crate::error::Error;

/// After a connection closes, the launcher has so long to report why the process ended.
pub(super) const CAUSE_GRACE: Duration = Duration::from_millis(300);

/// Members that are lost, and the end of the generation.
#[derive(Default)]
pub(super) struct Membership {
    /// A peer that seems lost, until the launcher reports the cause or the deadline passes.
    suspect: Option<Suspect>,
    /// Why the generation is over; `None` while it runs.
    dead: Option<Error>,
    /// All ranks have agreed to stop.
    stopped: bool,
    /// If all ranks stop because a rank has left: why the first of them left.
    left: Option<Leaving>,
    /// When this process, which has asked to leave, stops waiting for the others.
    shutdown_deadline: Option<Instant>,
}

/// A peer that seems lost, until `deadline` without the launcher's report.
struct Suspect {
    lost: PeerLost,
    deadline: Instant,
}

impl Membership {
    /// Returns whether the generation is over.
    pub(super) fn is_over(&self) -> bool {
        self.dead.is_some()
    }

    /// Returns why the generation is over.
    pub(super) fn cause(&self) -> Option<&Error> {
        self.dead.as_ref()
    }

    /// Ends the generation with this cause and clears the suspicion.
    pub(super) fn end(&mut self, cause: Error) {
        self.dead = Some(cause);
        self.suspect = None;
    }

    /// Returns whether all ranks have agreed to stop.
    pub(super) fn has_stopped(&self) -> bool {
        self.stopped
    }

    /// Notes that all ranks have agreed to stop, and why.
    pub(super) fn stop(&mut self, why: StopReason) {
        self.stopped = true;
        self.left = match why {
            StopReason::Left(why) => Some(why),
            _ => None,
        };
    }

    /// If all ranks stop because a rank has left: returns why the first of them left.
    pub(super) fn left(&self) -> Option<Leaving> {
        self.left
    }

    /// Suspects this peer. The suspicion ends the generation when the launcher's time to report the cause is over.
    pub(super) fn suspect(&mut self, lost: PeerLost) {
        if let Some(suspect) = &mut self.suspect {
            // A peer that left cleanly may have left because another peer died. The death can be observed later.
            let left = |lost: &PeerLost| matches!(lost.cause, LossCause::Left);
            if left(&suspect.lost) && !left(&lost) && suspect.lost.rank != lost.rank {
                suspect.lost = lost;
            }
            return;
        }
        let grace = if self.stopped {
            SHUTDOWN_GRACE
        } else {
            CAUSE_GRACE
        };
        self.suspect = Some(Suspect {
            lost,
            deadline: Instant::now() + grace,
        });
    }

    /// Returns the suspected peer, and the deadline of the launcher's report.
    pub(super) fn suspected(&self) -> Option<(&PeerLost, Instant)> {
        let suspect = self.suspect.as_ref();
        suspect.map(|suspect| (&suspect.lost, suspect.deadline))
    }

    /// Clears the suspicion, because no execution needs the peer.
    pub(super) fn acquit(&mut self) {
        self.suspect = None;
    }

    /// Shortens the launcher's time to at most `grace` from now.
    pub(super) fn hurry(&mut self, grace: Duration) {
        if let Some(suspect) = &mut self.suspect {
            suspect.deadline = suspect.deadline.min(Instant::now() + grace);
        }
    }

    /// Returns when this process, which has asked to leave, stops waiting for the others.
    pub(super) fn shutdown_deadline(&self) -> Option<Instant> {
        self.shutdown_deadline
    }

    /// Returns whether the time that this leaving process gives the others is over. The first call starts that time.
    pub(super) fn is_overdue(&mut self) -> bool {
        let now = Instant::now();
        now >= *self.shutdown_deadline.get_or_insert(now + SHUTDOWN_GRACE)
    }

    /// Ends the time that a leaving process gives the others.
    #[cfg(test)]
    pub(super) fn expire_shutdown(&mut self) {
        self.shutdown_deadline = Some(Instant::now());
    }
}

//! The members of a generation, as far as this rank depends on them: who is suspected to be gone, whether all have agreed
//! to stop, why the generation is over.

use std::time::{Duration, Instant};

use horovod_protocol::{Leaving, LossCause, PeerLost, StopReason};

use crate::engine::SHUTDOWN_GRACE;
use crate::error::Error;

/// How long a closed connection waits for the launcher to say why the process ended.
pub(super) const CAUSE_GRACE: Duration = Duration::from_millis(300);

/// Members that are lost, and the end of the generation.
#[derive(Default)]
pub(super) struct Membership {
    /// A peer that is gone, until the launcher's word or the deadline.
    suspect: Option<Suspect>,
    /// The generation is over; why.
    dead: Option<Error>,
    /// All ranks have agreed to stop.
    stopped: bool,
    /// Because a rank has left; why the first of them did.
    left: Option<Leaving>,
    /// When this process, which has asked to leave, waits for the others no longer.
    shutdown_deadline: Option<Instant>,
}

/// A peer that is gone, while the reason may still come.
struct Suspect {
    lost: PeerLost,
    deadline: Instant,
}

impl Membership {
    /// Whether the generation is over.
    pub(super) fn is_over(&self) -> bool {
        self.dead.is_some()
    }

    /// Why the generation is over.
    pub(super) fn cause(&self) -> Option<&Error> {
        self.dead.as_ref()
    }

    /// The generation is over; nobody is suspected any more.
    pub(super) fn end(&mut self, cause: Error) {
        self.dead = Some(cause);
        self.suspect = None;
    }

    /// Whether all ranks have agreed to stop.
    pub(super) fn has_stopped(&self) -> bool {
        self.stopped
    }

    /// All ranks have agreed to stop.
    pub(super) fn stop(&mut self, why: StopReason) {
        self.stopped = true;
        self.left = match why {
            StopReason::Left(why) => Some(why),
            _ => None,
        };
    }

    /// If all stop because a rank has left: why the first of them did.
    pub(super) fn left(&self) -> Option<Leaving> {
        self.left
    }

    /// This peer is gone, and ends the generation when the launcher has had its time to say why.
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

    /// Which peer is gone, and until when the launcher may say why.
    pub(super) fn suspected(&self) -> Option<(&PeerLost, Instant)> {
        let suspect = self.suspect.as_ref();
        suspect.map(|suspect| (&suspect.lost, suspect.deadline))
    }

    /// Nobody needs the peer that is gone.
    pub(super) fn acquit(&mut self) {
        self.suspect = None;
    }

    /// The launcher has no more time than this.
    pub(super) fn hurry(&mut self, grace: Duration) {
        if let Some(suspect) = &mut self.suspect {
            suspect.deadline = suspect.deadline.min(Instant::now() + grace);
        }
    }

    /// When this process, which has asked to leave, waits for the others no longer.
    pub(super) fn shutdown_deadline(&self) -> Option<Instant> {
        self.shutdown_deadline
    }

    /// This process has asked to leave; whether the time that it gives the others is over.
    pub(super) fn is_overdue(&mut self) -> bool {
        let now = Instant::now();
        now >= *self.shutdown_deadline.get_or_insert(now + SHUTDOWN_GRACE)
    }

    /// As if that time were over.
    #[cfg(test)]
    pub(super) fn expire_shutdown(&mut self) {
        self.shutdown_deadline = Some(Instant::now());
    }
}

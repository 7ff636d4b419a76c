//! Workers that must leave: their slots were removed, there are too many of them, or the work is done.

use std::collections::BTreeMap;
use std::time::Duration;

use super::driver::{Driver, WorkerPhase};
use super::events::{Action, Time, WorkerId};

/// How long a dismissed worker may take to end before it is stopped.
const DISMISSED_GRACE: Duration = Duration::from_secs(30);

impl Driver {
    /// Dismisses a worker from the waiting set.
    pub(super) fn dismiss(&mut self, now: Time, worker: WorkerId, why: &str) {
        if let Some(w) = self.workers.get_mut(&worker) {
            w.is_going = true;
            w.stop_at = Some(now + DISMISSED_GRACE);
        }
        self.act(Action::Dismiss(worker, why.to_owned()));
    }

    pub(super) fn stop(&mut self, worker: WorkerId) {
        if let Some(w) = self.workers.get_mut(&worker) {
            w.is_going = true;
            w.stop_at = None;
        }
        self.act(Action::Stop(worker));
    }

    /// Marks workers whose slots were removed, and ends those whose time is over. A worker whose slot is listed again
    /// stays.
    pub(super) fn mark_leaving(&mut self, now: Time) {
        let wait_timeout = self.policy.wait_timeout;
        let listed: BTreeMap<&str, u32> = self
            .hosts
            .iter()
            .map(|host| (host.name.as_str(), host.listed))
            .collect();
        for w in self.workers.values_mut() {
            if w.local < listed.get(w.host.as_str()).copied().unwrap_or(0) {
                w.leave_by = None;
            } else {
                w.leave_by.get_or_insert(now + wait_timeout);
            }
        }
        let ids: Vec<WorkerId> = self.workers.keys().copied().collect();
        for id in ids {
            let is_new = !self.round.contains(&id);
            let Some(w) = self.workers.get_mut(&id) else {
                continue;
            };
            let Some(leave_by) = w.leave_by.filter(|_| !w.is_going) else {
                continue;
            };
            // A worker that was never part of a round leaves at once; a member leaves when its time is over.
            let is_due = w.phase == WorkerPhase::Member && now >= leave_by;
            if is_new && w.phase == WorkerPhase::Starting {
                self.stop(id);
            } else if is_new && w.phase == WorkerPhase::Waiting && !w.holds() {
                self.dismiss(
                    now,
                    id,
                    "its slot was removed before it was part of a round",
                );
            } else if is_due && !self.has_other_holder() {
                // The last worker with the training state must not be ended.
                if let Some(w) = self.workers.get_mut(&id) {
                    w.leave_by = Some(now + wait_timeout);
                }
            } else if is_due {
                let name = self.name(id);
                self.note(format!(
                    "{name} shall be removed and did not come to a commit within {} s; ending it",
                    wait_timeout.as_secs()
                ));
                self.stop(id);
            }
        }
    }

    /// Ends workers beyond --max-np. There are such workers if removed slots are listed again after other slots were
    /// filled instead.
    pub(super) fn shed_surplus(&mut self, now: Time) {
        let stays = self.workers.iter().filter(|(_, w)| w.stays());
        let mut staying: Vec<WorkerId> = stays.map(|(id, _)| *id).collect();
        let over = staying.len().saturating_sub(self.policy.max_np as usize);
        if over == 0 {
            return;
        }
        staying.retain(|id| !self.round.contains(id));
        staying.sort_by_key(|id| self.precedence(*id));
        for id in staying.into_iter().rev().take(over) {
            match self.workers[&id].phase {
                WorkerPhase::Waiting => {
                    self.dismiss(now, id, "there are as many as --max-np allows")
                }
                _ => self.stop(id),
            }
        }
    }

    /// Returns whether the training state would survive if all workers that must leave left now.
    pub(super) fn has_other_holder(&self) -> bool {
        !self.has_state || self.workers.values().any(|w| w.holds() && w.stays())
    }

    /// Ends the newcomers, because the work is done.
    pub(super) fn wind_down(&mut self, now: Time) {
        let newcomers: Vec<(WorkerId, WorkerPhase)> = self
            .workers
            .iter()
            .filter(|(id, w)| self.rounds > 0 && !self.round.contains(id) && !w.is_going)
            .map(|(id, w)| (*id, w.phase))
            .collect();
        for (id, phase) in newcomers {
            match phase {
                WorkerPhase::Waiting => self.dismiss(now, id, "the job has finished"),
                _ => self.stop(id),
            }
        }
    }
}

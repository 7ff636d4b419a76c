//! The control plane's search for the reason of a stall.

use horovod_protocol::{Execution, LossCause, PeerLost, StopReason, Time};

use super::pump::Pump;
use crate::engine::inspection::{Deadlock, DeviceNews, InHand, Surroundings};

impl Pump {
    /// Notes that a collective begins; it may be suspended and resumed.
    pub(super) fn begins(&mut self, execution: &Execution) {
        let leads = self.inspection.leads();
        let since = if leads { self.shared.now() } else { Time(0) };
        self.queue.begins(execution, since);
    }

    /// Polls the work on devices. Returns whether there is something to send or the job ends.
    pub(super) fn watch_devices(&mut self, now: Time) -> bool {
        let surroundings = Surroundings {
            stopped: self.membership.has_stopped(),
            executes: self.executes(),
        };
        let (shared, size) = (&self.shared, self.links.topology().size);
        match self
            .inspection
            .watch_devices(now, shared, size, surroundings)
        {
            DeviceNews::None => return false,
            DeviceNews::Reported => {}
            DeviceNews::Stuck(stuck) => {
                if let Some(why) = self
                    .inspection
                    .report_devices(&stuck, self.links.topology())
                {
                    self.end_for_device(why);
                }
            }
            DeviceNews::GiveUp(why) => {
                tracing::error!("{why}");
                self.end_for_device(why);
            }
        }
        true
    }

    /// Ends the generation because an operation did not end on a device within its time limit.
    fn end_for_device(&mut self, why: String) {
        let rank = self.links.me();
        self.end_generation(&PeerLost {
            rank,
            host: self.links.host_of(rank),
            cause: LossCause::Stuck(why),
        });
    }

    /// Returns whether an execution was started and has not ended.
    pub(super) fn carries_out(&self) -> bool {
        self.queue.is_running() || !self.on_device.is_empty()
    }

    /// Returns whether an execution waits in the queue, or was started and has not ended.
    pub(super) fn executes(&self) -> bool {
        self.carries_out() || !self.queue.is_empty()
    }

    /// Sends questions, answers and reports of the inspection. Returns whether something was sent or found. `now` is
    /// given only where the caller has read the clock.
    pub(super) fn inspect(&mut self, now: Option<Time>) -> bool {
        if self.membership.has_stopped() || !self.inspection.is_due(now, &self.shared) {
            return false;
        }
        let now = self.shared.now();
        let leads = self.inspection.leads();
        let running = leads.then(|| self.queue.stalled(self.links.me(), now));
        let found = self.inspection.poll(
            now,
            self.node.coordinator(),
            &self.shared,
            InHand {
                running: running.flatten(),
                names: &|| self.queue.names(self.on_device.executions()),
            },
        );
        let (relay, control) = self.links.out_of_band();
        let sent = self.inspection.send_outbox(relay, control);
        let Some(found) = found else { return sent };
        let links = &self.links;
        let verdict = self.inspection.tell(
            &found,
            links.topology(),
            links.tree(),
            links.heartbeat(),
            self.shared.round.has_newcomers(),
        );
        if let Some(Deadlock { by, summary }) = verdict
            && let Some(coordinator) = self.node.coordinator()
        {
            coordinator.give_up(now, by, StopReason::Deadlock { report: summary });
        }
        true
    }
}

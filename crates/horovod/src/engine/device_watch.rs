//! The engine's watch over operations on devices that do not end: the work on this rank's devices, the ranks that rank 0
//! asks, and when the job has to end.

use std::time::Duration;

use horovod_diagnosis::{Complaint, DeviceInquiry, DeviceStep, DeviceWatch, Standing, Watched};
use horovod_protocol::{ProcessSetId, Rank, Time};
use horovod_transport::Topology;

use super::EngineState;

const NS_PER_MS: u64 = 1_000_000;

/// Device watch of one rank, and on rank 0 the inquiry about all.
pub(super) struct DeviceMonitor {
    watch: DeviceWatch,
    /// On rank 0 of several.
    inquiry: Option<DeviceInquiry>,
}

impl DeviceMonitor {
    /// `report` is how long work may take before it is reported, `end` before it ends the job.
    pub(super) fn new(
        report: Option<Duration>,
        end: Option<Duration>,
        topology: &Topology,
    ) -> Self {
        let ms = |after: Duration| u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
        let leads = topology.rank == Rank(0) && topology.size > 1;
        Self {
            watch: DeviceWatch::new(report.map(ms), end.map(ms)),
            inquiry: leads.then(DeviceInquiry::default),
        }
    }

    /// Polls the work on this rank's devices. `is_alone`: nobody else can say more about it.
    pub(super) fn check(
        &mut self,
        now: Time,
        shared: &EngineState,
        is_alone: bool,
    ) -> Option<Watched> {
        let at = shared.accelerators.standing()?.at;
        self.watch.check(now.0 / NS_PER_MS, at.as_ref(), is_alone)
    }

    /// Some rank's device does not end something; only rank 0 gets this.
    pub(super) fn complain(&mut self, now: Time, from: Rank, complaint: Complaint) {
        if let Some(inquiry) = &mut self.inquiry {
            inquiry.complain(now.0 / NS_PER_MS, from, complaint);
        }
    }

    pub(super) fn answered(&mut self, question: u64, from: Rank, standing: &Standing) {
        if let Some(inquiry) = &mut self.inquiry {
            inquiry.answered(question, from, standing);
        }
    }

    /// Makes progress on rank 0.
    pub(super) fn poll(
        &mut self,
        now: Time,
        shared: &EngineState,
        size: u32,
    ) -> Option<DeviceStep> {
        let members = |set| {
            let state = shared.lock();
            let members = state
                .worker
                .members(ProcessSetId(set))
                .map(<[Rank]>::to_vec);
            // The members of a set that was removed meanwhile are among all.
            members.unwrap_or_else(|| (0..size).map(Rank).collect())
        };
        self.inquiry.as_mut()?.poll(now.0 / NS_PER_MS, members)
    }
}

//! The engine's watch over operations on devices that do not end: the work on this rank's devices, rank 0's questions
//! to other ranks, and when the job has to end.

use std::time::Duration;

use horovod_diagnosis::{Complaint, DeviceInquiry, DeviceStep, DeviceWatch, Standing, Watched};
use horovod_protocol::{ProcessSetId, Rank, Time};
use horovod_transport::Topology;

use super::EngineState;

const NS_PER_MS: u64 = 1_000_000;

/// Device watch of one rank; on rank 0 also the inquiry about all ranks.
pub(super) struct DeviceMonitor {
    watch: DeviceWatch,
    /// Only on rank 0 of a job with several ranks.
    inquiry: Option<DeviceInquiry>,
}

impl DeviceMonitor {
    /// `report` is how long work may take before it is reported, `end` how long before it ends the job.
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

    /// Polls the work on this rank's devices. `is_alone`: no other rank can report more about it.
    pub(super) fn check(
        &mut self,
        now: Time,
        shared: &EngineState,
        is_alone: bool,
    ) -> Option<Watched> {
        let at = shared.accelerators.standing()?.at;
        self.watch.check(now.0 / NS_PER_MS, at.as_ref(), is_alone)
    }

    /// Handles the report of a rank whose device does not end an operation; only rank 0 receives these reports.
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

    /// Polls the inquiry and returns its next step; `None` on ranks other than 0.
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
            // The set may have been removed meanwhile: its members are among all ranks.
            members.unwrap_or_else(|| (0..size).map(Rank).collect())
        };
        self.inquiry.as_mut()?.poll(now.0 / NS_PER_MS, members)
    }
}

//! The engine's watch over operations on GPUs that do not end: what this rank's GPU is at, whom rank 0 asks, when the job
//! has to end.

use std::sync::Arc;
use std::time::Duration;

use horovod_diagnosis::{
    Complaint, DeviceInquiry, DeviceStanding, DeviceStep, DeviceWatch, OnDevice, Phase, Standing,
    Watched,
};
use horovod_gpu::Phase as WorkPhase;
use horovod_protocol::{ProcessSetId, Rank, Time};
use horovod_transport::Topology;

use super::EngineState;
use crate::config::Config;

const NS_PER_MS: u64 = 1_000_000;

/// GPU watch of one rank, and on rank 0 the inquiry about all.
pub(super) struct GpuWatch {
    watch: DeviceWatch,
    /// On rank 0 of several.
    inquiry: Option<DeviceInquiry>,
}

impl GpuWatch {
    pub(super) fn new(config: &Config, topology: &Topology) -> Self {
        let ms = |after: Duration| u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
        let leads = topology.rank == Rank(0) && topology.size > 1;
        Self {
            watch: DeviceWatch::new(config.stall_check.map(ms), config.gpu.timeout.map(ms)),
            inquiry: leads.then(DeviceInquiry::default),
        }
    }

    /// Look at what this rank's GPU is at. `is_alone`: nobody else can say more about it.
    pub(super) fn look(
        &mut self,
        now: Time,
        shared: &EngineState,
        is_alone: bool,
    ) -> Option<Watched> {
        let at = device_standing(shared)?.at;
        self.watch.check(now.0 / NS_PER_MS, at.as_ref(), is_alone)
    }

    /// Some rank's GPU does not end something; only rank 0 is told.
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
            // A set that was removed meanwhile: whoever was in it, is among all.
            members.unwrap_or_else(|| (0..size).map(Rank).collect())
        };
        self.inquiry.as_mut()?.poll(now.0 / NS_PER_MS, members)
    }
}

/// Where this rank's GPU stands; `None` before it is given anything.
pub(super) fn device_standing(shared: &EngineState) -> Option<DeviceStanding> {
    let progress = shared.devices.gpu().progress()?;
    let at = progress.oldest.map(|oldest| OnDevice {
        seq: oldest.seq,
        key: (oldest.set, Arc::clone(&oldest.title)),
        phase: match oldest.phase {
            WorkPhase::Launching => Phase::Launching,
            WorkPhase::AwaitsEvents => Phase::AwaitsInputs,
            WorkPhase::Runs => Phase::Runs,
        },
        ms: u64::try_from(oldest.since.elapsed().as_millis()).unwrap_or(u64::MAX),
    });
    let given = progress.last;
    Some(DeviceStanding { given, at })
}

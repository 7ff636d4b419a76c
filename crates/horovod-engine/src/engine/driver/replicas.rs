//! The control plane's comparison of replicas: sends this rank's reports; on rank 0 collects the reports of all ranks.

use horovod_diagnosis::replicas::{Collector, Finding, Report};
use horovod_protocol::{Rank, StopReason};
use horovod_settings::CheckReplicas;

use super::pump::Pump;
use crate::engine::relay::OutOfBandMessage;

const COORDINATOR: Rank = Rank(0);

/// Sends the reports of this rank; on rank 0 compares the reports of all ranks.
pub(super) struct ReplicaCheck {
    action: CheckReplicas,
    collector: Collector,
    /// A difference was found; only the first one is reported.
    has_found: bool,
}

impl ReplicaCheck {
    pub(super) fn new(action: CheckReplicas) -> Self {
        Self {
            action,
            collector: Collector::default(),
            has_found: false,
        }
    }
}

impl Pump {
    /// Sends this rank's queued reports, unless more important messages wait. Returns whether something was sent.
    pub(super) fn send_replica_reports(&mut self) -> bool {
        let mut sent = false;
        while self.shared.replicas.has_queued()
            && let Some(report) = self.shared.replicas.take()
        {
            if self.links.me() == COORDINATOR {
                self.collect(COORDINATOR, report);
                sent = true;
                continue;
            }
            let bytes = report.encode();
            let (relay, control) = self.links.out_of_band();
            match relay.send(control, COORDINATOR, &bytes) {
                Ok(true) => sent = true,
                Ok(false) => {
                    self.shared.replicas.put_back(report);
                    break;
                }
                // The loss of a rank is detected elsewhere.
                Err(e) => tracing::debug!("report of parameters: {e}"),
            }
        }
        sent
    }

    /// Handles the report of another rank.
    pub(super) fn handle_replica(&mut self, received: &OutOfBandMessage<'_>) {
        match Report::decode(received.message) {
            Ok(report) if self.links.me() == COORDINATOR => self.collect(received.from, report),
            Ok(_) => tracing::debug!("{} reported its parameters, not to rank 0", received.from),
            Err(e) => tracing::warn!("{} sent an unreadable report: {e}", received.from),
        }
    }

    fn collect(&mut self, from: Rank, report: Report) {
        let check = &mut self.replica_check;
        if check.has_found || check.action == CheckReplicas::Off || self.membership.is_over() {
            return;
        }
        let state = self.shared.lock();
        let members = state.worker.members(report.set).map(<[Rank]>::to_vec);
        drop(state);
        // The set was removed meanwhile.
        let Some(members) = members else { return };
        if let Some(finding) = check.collector.add(from, report, &members) {
            check.has_found = true;
            self.conclude(&finding);
        }
    }

    fn conclude(&mut self, finding: &Finding) {
        let report = finding.text();
        if self.replica_check.action != CheckReplicas::Error {
            tracing::warn!("{report}");
            return;
        }
        tracing::error!("{report}");
        let now = self.shared.now();
        if let Some(coordinator) = self.node.coordinator() {
            coordinator.give_up(now, finding.by(), StopReason::ReplicasDiffer { report });
        }
    }
}

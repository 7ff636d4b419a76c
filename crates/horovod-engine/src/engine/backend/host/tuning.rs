//! The data plane's tuning in force, and on rank 0 the search that changes it.

use std::collections::VecDeque;
use std::sync::Arc;

use horovod_autotune::{Autotuner, Parameter, Values};
use horovod_collectives::{SetLayout, Tuning};
use horovod_protocol::{Coordinator, Execution, Rank, Seq, Time};
use horovod_transport::Topology;

use crate::config::{Config, JoinAverage};

/// Numbers that rank 0 has announced, each to be in force from its place in the order on.
pub(in crate::engine) type Announced = VecDeque<(Seq, Arc<[u64]>)>;

/// The data plane's numbers in force.
pub(super) struct Tuned {
    pub(super) tuning: Tuning,
    pub(super) join_average: JoinAverage,
    /// Only on rank 0, only while it has something to try.
    autotuner: Option<Box<Autotuner>>,
}

impl Tuned {
    pub(super) fn new(config: &Config, topology: &Topology) -> Self {
        let tuning = config.algorithms.tuning.clone();
        let settings = config
            .observers
            .autotune
            .as_ref()
            .filter(|_| topology.rank == Rank(0));
        let autotuner = settings.map(|settings| {
            let mut tunable = acting_in(topology, &tuning);
            let by_user = |name: &'static str| settings.explicit.contains(&name);
            let acting = tunable.len();
            tunable.retain(|parameter| !parameter.variables().into_iter().any(by_user));
            tracing::debug!(
                "tuner: tries {tunable:?}; {} others are set by the user",
                acting - tunable.len()
            );
            let begin = in_force(config, &tuning);
            let cache = config.negotiation.cache_capacity > 0;
            Box::new(Autotuner::new(settings, begin, &tunable, cache))
        });
        Self {
            tuning,
            join_average: config.algorithms.join_average,
            autotuner,
        }
    }

    /// An execution has ended on this rank. May lead to an announcement, which comes back to [`Self::catch_up`]
    /// on every rank; what only the coordinator needs changes at once.
    pub(super) fn observe(
        &mut self,
        now: impl FnOnce() -> Time,
        execution: &Execution,
        coordinator: Option<&mut Coordinator>,
    ) {
        if let Some(tuner) = &mut self.autotuner
            && let Some(values) = tuner.observe(now(), execution)
            && let Some(coordinator) = coordinator
        {
            coordinator.set_fusion_threshold(values.get(Parameter::FusionThreshold));
            coordinator.set_batch_delay(values.get(Parameter::CycleTime).saturating_mul(1000));
            coordinator.announce_tuning(values.as_slice());
        }
    }

    /// Puts the values in force that were announced before this place in the order.
    pub(super) fn catch_up(&mut self, announced: &mut Announced, next: Seq) {
        while announced.front().is_some_and(|(place, _)| *place < next) {
            if let Some((_, values)) = announced.pop_front() {
                self.apply(&values);
            }
        }
    }

    /// Prints a warning if the job, which has ended well, was too short for tuning.
    pub(super) fn ended_well(&self) {
        let unfinished = self.autotuner.as_ref().and_then(|tuner| tuner.unfinished());
        if let Some(unfinished) = unfinished {
            tracing::warn!("Autotuner: {unfinished}");
        }
    }

    fn apply(&mut self, values: &[u64]) {
        let Some(values) = Values::from_slice(values) else {
            // All ranks received the same values, so all print this and keep the old ones.
            tracing::error!("rank 0 announced {} tuned values", values.len());
            return;
        };
        let bytes = |parameter| usize::try_from(values.get(parameter)).unwrap_or(usize::MAX);
        let tuning = &mut self.tuning;
        tuning.chunk_bytes = bytes(Parameter::Chunk);
        tuning.direct_max_bytes = bytes(Parameter::DirectMax);
        tuning.exchange_max_bytes = bytes(Parameter::ExchangeMax);
        tuning.wire_chunk_bytes = bytes(Parameter::WireChunk);
        tuning.hierarchical_allreduce = values.get(Parameter::Hierarchical) != 0;
        if let Some(tuner) = &mut self.autotuner {
            tuner.applied();
            if tuner.is_finished() {
                self.autotuner = None;
            }
        }
    }
}

/// The values that a job begins with.
fn in_force(config: &Config, tuning: &Tuning) -> Values {
    Values::new(|parameter| match parameter {
        Parameter::FusionThreshold => config.negotiation.fusion_threshold,
        Parameter::CycleTime => {
            u64::try_from(config.negotiation.cycle_time.as_micros()).unwrap_or(u64::MAX)
        }
        Parameter::Chunk => tuning.chunk_bytes as u64,
        Parameter::DirectMax => tuning.direct_max_bytes as u64,
        Parameter::ExchangeMax => tuning.exchange_max_bytes as u64,
        Parameter::WireChunk => tuning.wire_chunk_bytes as u64,
        Parameter::Hierarchical => u64::from(tuning.hierarchical_allreduce),
    })
}

/// The parameters that make a difference among these ranks.
fn acting_in(topology: &Topology, tuning: &Tuning) -> Vec<Parameter> {
    let everybody: Vec<Rank> = topology.peers.iter().map(|p| p.rank).collect();
    let hosts = SetLayout::new(topology, &everybody).hosts();
    let mut acting = vec![Parameter::FusionThreshold, Parameter::CycleTime];
    if hosts < everybody.len() {
        acting.push(Parameter::Chunk);
    }
    // An algorithm that the user has named runs at every size.
    let by_size = tuning.allreduce.is_none();
    if hosts == 1 {
        acting.extend(by_size.then_some(Parameter::DirectMax));
    } else {
        acting.extend(by_size.then_some(Parameter::ExchangeMax));
        acting.push(Parameter::WireChunk);
        if hosts < everybody.len() {
            acting.push(Parameter::Hierarchical);
        }
    }
    acting
}

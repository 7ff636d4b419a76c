//! The plan of a run: what its ranks will ask for, made from a seed, and how each of it must end.

use crate::rng::Rng;
use horovod_protocol::{
    CoordinatorConfig, Generation, OpErrorKind, ProcessSetId, Rank, Request, StallConfig,
};

mod phases;
mod requests;
use phases::Maker;

/// A whole run.
#[derive(Clone, Debug)]
pub struct SimulationPlan {
    /// Ranks.
    pub size: u32,
    /// Settings of the coordinator.
    pub coordinator: CoordinatorConfig,
    /// How slow the links are.
    pub delays: Delays,
    /// A rank enters the next phase when everything it asked for in the last has ended.
    pub phases: Vec<RequestPhase>,
    /// The fault or shutdown at the end, or in between.
    pub ending: Ending,
    /// Whether the last phase cannot end but by the shutdown.
    pub stops_amid: bool,
    /// Whether the nodes of the tree count how late each rank is, as where a job is measured.
    pub counts_lateness: bool,
    /// When the coordinator's settings change and new values for the data plane are announced.
    pub tunings: Vec<u64>,
}

/// Links and steps take up to `typical` nanoseconds, twenty times that at one slow rank.
#[derive(Clone, Copy, Debug)]
pub struct Delays {
    /// The usual bound.
    pub typical: u64,
    /// The laggard.
    pub slow_rank: Option<Rank>,
}

/// Requests that the ranks make in any order among each other.
#[derive(Clone, Debug, Default)]
pub struct RequestPhase {
    /// Per rank: item number and request, in order.
    pub steps: Vec<Vec<(usize, Request)>>,
    /// Per item: how it ends on every rank that asks for it.
    pub expected: Vec<Expected>,
}

/// How a request ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// It runs.
    Run {
        /// With so many contributors.
        contributors: u32,
    },
    /// It fails.
    Fail {
        /// For this reason.
        kind: OpErrorKind,
        /// With a text that contains this.
        text: String,
    },
    /// A barrier is passed.
    Done,
    /// Everybody joined.
    Joined,
    /// A set is registered under this id.
    SetAdded(ProcessSetId),
    /// A set is removed, or was not there.
    SetRemoved(bool),
}

/// End of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// These ranks call shutdown after their last phase.
    Shutdown {
        /// The calling ranks.
        callers: Vec<Rank>,
    },
    /// A rank dies, unless it finishes before.
    Kill {
        /// The rank.
        rank: Rank,
        /// When.
        at: u64,
    },
}

/// How large plans get.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most ranks.
    pub ranks_max: u32,
    /// Most phases.
    pub phases_max: usize,
    /// Most items of a phase.
    pub items_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            ranks_max: 8,
            phases_max: 8,
            items_max: 12,
        }
    }
}

impl SimulationPlan {
    /// The plan that `rng` decides.
    pub fn random(rng: &mut Rng, limits: &Limits) -> Self {
        let size = 1 + rng.below(u64::from(limits.ranks_max)) as u32;
        let mut coordinator = CoordinatorConfig::new(size, Generation(rng.below(3)));
        coordinator.cache_capacity = *rng.pick(&[0, 1, 2, 5, 1024]);
        coordinator.fusion_threshold_bytes = *rng.pick(&[0, 64, 4096, 128 << 20]);
        coordinator.batch_delay_ns = *rng.pick(&[0, 0, 0, 500, 100_000]);
        coordinator.disable_group_fusion = rng.chance(10);
        let typical = *rng.pick(&[0, 1, 100, 10_000]);
        let stall = StallConfig {
            warning_ns: 5 * typical + 1,
            shutdown_ns: None,
        };
        coordinator.stall = rng.chance(50).then_some(stall);
        let slow_rank = rng
            .chance(30)
            .then(|| Rank(rng.below(u64::from(size)) as u32));
        let delays = Delays { typical, slow_rank };

        let mut maker = Maker::new(size, limits.items_max);
        let count = 1 + rng.index(limits.phases_max);
        let mut phases: Vec<RequestPhase> = (0..count).map(|_| maker.any_phase(rng)).collect();
        let ending = Self::random_ending(rng, size, typical * 6 * count as u64);
        let stops_amid = matches!(ending, Ending::Shutdown { .. }) && size > 1 && rng.chance(40);
        // Everybody gets this far before anybody stops.
        phases.push(maker.common_phase(rng));
        if stops_amid {
            phases.push(maker.unfinished_phase(rng));
        }
        // From a copy, so that seeds keep meaning what they meant.
        let mut side_rng = rng.clone();
        let tunings = (0..side_rng.index(4))
            .map(|_| side_rng.below(typical * 6 * count as u64 + 1))
            .collect();
        // From another copy, for the same reason.
        let mut side_rng = rng.clone();
        side_rng.next_u64();
        let counts_lateness = side_rng.chance(50);
        Self {
            size,
            coordinator,
            delays,
            phases,
            ending,
            stops_amid,
            counts_lateness,
            tunings,
        }
    }

    fn random_ending(rng: &mut Rng, size: u32, duration: u64) -> Ending {
        if size > 1 && rng.chance(25) {
            let rank = Rank(rng.below(u64::from(size)) as u32);
            return Ending::Kill {
                rank,
                at: rng.below(duration + 1),
            };
        }
        let mut callers: Vec<Rank> = (0..size).map(Rank).filter(|_| rng.chance(40)).collect();
        if callers.is_empty() {
            callers.push(Rank(rng.below(u64::from(size)) as u32));
        }
        Ending::Shutdown { callers }
    }
}

//! Whole elastic jobs in virtual time: the launcher's real driver, the real rendezvous and the real negotiation of every
//! generation, with processes that crash and are started again, hosts that come, go and are cut off.
//!
//! Modelled here are the network, the agents, the data plane (results arrive when all have begun), and what the engine
//! does about a lost peer. The training loop (`script`) follows `python/horovod/common/elastic.py`.

mod checks;
mod data;
mod engine;
mod faults;
mod launcher;
mod links;
mod process;
mod script;
mod world;

use crate::checkers::Failure;

pub use world::JobResult;

/// How large jobs get.
#[derive(Clone, Copy, Debug)]
pub struct JobLimits {
    /// Most hosts.
    pub hosts_max: u32,
    /// Most slots of a host.
    pub slots_max: u32,
    /// Steps of training.
    pub steps_max: u64,
    /// Whether there are as many hosts and slots as there may be.
    pub is_full: bool,
    /// Most faults; what happens besides them does not depend on it.
    pub faults_max: u64,
}

impl Default for JobLimits {
    fn default() -> Self {
        Self {
            hosts_max: 4,
            slots_max: 3,
            steps_max: 40,
            is_full: false,
            faults_max: 12,
        }
    }
}

/// Runs the job of `seed` to its end and checks everything at every event.
///
/// # Errors
/// The first broken promise with the seed, the fewest faults that lead to it, and what happened.
pub fn run_job_seed(seed: u64, limits: &JobLimits) -> Result<JobResult, Failure> {
    let failure = match world::run(seed, limits) {
        Ok(outcome) => return Ok(outcome),
        Err(failure) => failure,
    };
    // The story with the fewest faults is the easiest to read.
    let fewer = (0..limits.faults_max).find_map(|faults_max| {
        let limits = JobLimits {
            faults_max,
            ..*limits
        };
        world::run(seed, &limits).err()
    });
    Err(fewer.unwrap_or(failure).with_seed(seed))
}

//! A seeded cluster of the real state machines on one thread: a virtual clock, links
//! with random delays, programs with mistakes, joins, process sets, deaths and shutdowns, and
//! checkers of what must always hold. For development only.
//!
//! [`run_job_seed`] runs whole elastic jobs besides: the launcher's driver, the rendezvous and the negotiation of one
//! generation after the other, while processes crash and are started again and hosts are cut off.
//!
//! One integer decides everything: [`run_seed`] with the seed of a failure repeats it exactly.
//!
//! Deliberately absent: lost or reordered messages within a link (links are reliable and ordered;
//! a broken one ends the generation), tensors, and real time.
#![forbid(unsafe_code)]

mod checkers;
mod cluster;
mod members;
mod plan;
mod rng;
mod trace;

pub use checkers::{Failure, check, check_alike};
pub use cluster::{run_plan, run_plan_in};
use horovod_protocol::Tree;
pub use members::{JobLimits, JobResult, run_job_seed};
pub use plan::{Delays, Ending, Expected, Limits, RequestPhase, SimulationPlan};
pub use rng::Rng;
pub use trace::{Digest, End, Event, ItemDigest, Trace};

/// Makes the plan of `seed`, runs it and checks everything.
///
/// # Errors
/// The first broken promise, with the seed.
pub fn run_seed(seed: u64, limits: &Limits) -> Result<Trace, Failure> {
    let mut rng = Rng::new(seed);
    let plan = SimulationPlan::random(&mut rng, limits);
    let trace = run_plan(&plan, &mut rng);
    match check(&plan, &trace) {
        Ok(()) => Ok(trace),
        Err(failure) => Err(failure.with_seed(seed)),
    }
}

/// As [`run_seed`], but the ranks speak to the coordinator through a tree that the seed decides; and
/// everything must end as it does in a star.
///
/// # Errors
/// The first broken promise, with the seed.
pub fn run_seed_in_tree(seed: u64, limits: &Limits) -> Result<Trace, Failure> {
    let mut rng = Rng::new(seed);
    let plan = SimulationPlan::random(&mut rng, limits);
    let mut side_rng = rng.clone();
    let hosts: Vec<u32> = match side_rng.below(3) {
        0 => (0..plan.size).collect(),
        1 => (0..plan.size).map(|rank| rank / 3).collect(),
        _ => (0..plan.size)
            .map(|_| side_rng.below(u64::from(plan.size)) as u32)
            .collect(),
    };
    let tree = Tree::new(&hosts, 2 + side_rng.below(3) as u32);
    let star = run_plan(&plan, &mut rng.clone());
    let trace = run_plan_in(&plan, &tree, &mut rng);
    match check(&plan, &trace).and_then(|()| check_alike(&plan, &star, &trace)) {
        Ok(()) => Ok(trace),
        Err(failure) => Err(failure.with_seed(seed)),
    }
}

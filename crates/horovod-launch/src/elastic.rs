//! Elastic jobs: members come and go while the job runs.
//!
//! `driver` decides, without I/O (with `hosts`, `rounds`, `leaving`, `silent`, `stopped` and `seats`); `discovery` asks
//! which hosts there are; `job` tells what happens, `acting` carries out.

mod acting;
mod discovery;
mod driver;
mod events;
mod hosts;
mod job;
mod leaving;
mod rounds;
mod seats;
mod silent;
#[cfg(test)]
mod simulation;
mod start;
mod stopped;

pub use driver::Driver;
pub use events::{Action, Cause, Ending, Event, Policy, Time, WorkerId};
pub(crate) use start::run;

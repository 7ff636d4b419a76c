//! Elastic jobs: members come and go while the job runs.
//!
//! `driver` decides, without I/O (with `hosts`, `rounds`, `leaving`, `silent`, `stopped`, `assignment` and `waiting`).
//! [`Supervisor`] connects it with the rendezvous and with what starts and ends workers, which is an [`Executor`]:
//! `horovodrun` has `agents` for it, and `job` is its loop, which hears them, signals and `discovery`. Others bring
//! their own executor, and tell by calls which hosts there are and who has ended.

mod agents;
mod assignment;
mod dialed;
mod discovery;
mod driver;
mod events;
mod executor;
mod hosts;
mod job;
mod leaving;
mod machines;
mod rounds;
mod silent;
#[cfg(test)]
mod simulation;
mod start;
mod stopped;
mod supervisor;
mod waiting;

pub use driver::Driver;
pub use events::{Action, Cause, Ending, Event, Policy, Time, WorkerId};
pub use executor::{Executor, NewWorker, News, Opened};
pub(crate) use start::run;
pub use supervisor::Supervisor;

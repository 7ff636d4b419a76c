//! Checks before a start: the hosts of a job and the network between them, the command, what an installation can do.
//!
//! An examination has two sides. The launcher's (`visit`) asks the agents of all hosts; each agent's (`examiner`) looks
//! at its own host (`gather`) and, with the others, at the network, over the transport's probes. How questions and
//! answers travel is the launcher's. The result is a `chart` of plain data, from which `findings` are concluded;
//! `render` shows both. Everything together takes at most 15 s.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.
#![forbid(unsafe_code)]

mod chart;
mod check_build;
mod examiner;
mod facts;
mod findings;
mod gather;
mod preflight;
mod render;
mod talk;
mod tournament;
mod visit;

/// Items of one list in a question or an answer.
const LIST_MAX: usize = 1 << 16;

pub use chart::{Chart, JobPlan, Patient};
pub use check_build::{BuildReport, check_build};
pub use examiner::Examiner;
pub use gather::{AgentEnvironment, Variables, output_of};
pub use preflight::{Missing, check_command, check_timeline};
pub use render::{Form, Report};
pub use talk::{Answer, Question};
pub use visit::{Agents, Job, News, examine};

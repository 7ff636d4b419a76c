//! Changes to the settings by an elastic job.

use std::time::Duration;

use horovod_settings as settings;
use horovod_transport::rendezvous::RankAssignment;

use super::{Config, Environment};
use crate::error::Error;

impl Config {
    /// In an elastic job the numbers come with each round.
    pub(crate) fn take_assignment(&mut self, assignment: &RankAssignment, size: u32) {
        self.ranks.rank = assignment.rank;
        self.ranks.size = size;
        self.ranks.local_rank = assignment.local_rank;
        self.ranks.local_size = assignment.local_size;
        self.ranks.cross_rank = assignment.cross_rank;
        self.ranks.cross_size = assignment.cross_size;
    }
}

/// How long the launcher of an elastic job waits for its processes.
pub(super) fn timeout(env: &dyn Environment) -> Result<Duration, Error> {
    let seconds = settings::ELASTIC_TIMEOUT.read(env)?;
    Ok(Duration::from_secs(seconds.max(1)))
}

/// Whether this process belongs to an elastic job, which can be asked before init.
pub fn is_elastic(env: &dyn Environment) -> bool {
    settings::ELASTIC.read_or_default(env)
}

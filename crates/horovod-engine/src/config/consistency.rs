//! Settings of the comparison of replicas: how often, and what happens if they differ.

use horovod_settings::{self as settings, CheckReplicas, ConsistencyAction};

use super::Environment;
use crate::error::Error;

/// Settings of the divergence watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsistencySettings {
    /// Steps between two comparisons; 0: none.
    pub every: u32,
    /// Whether a difference is an error; else a warning.
    pub is_error: bool,
    /// The consequence if ranks begin to train with different parameters.
    pub at_start: CheckReplicas,
}

impl ConsistencySettings {
    pub(super) fn read(env: &dyn Environment) -> Result<Self, Error> {
        Ok(Self {
            every: settings::CHECK_CONSISTENCY.read(env)?,
            is_error: settings::CONSISTENCY_ACTION.read(env)? == ConsistencyAction::Error,
            at_start: settings::CHECK_REPLICAS.read(env)?,
        })
    }
}

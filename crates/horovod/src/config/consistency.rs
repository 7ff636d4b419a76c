//! Settings of the comparison of replicas: how often, and what happens if they differ.

use horovod_settings::{self as settings, ConsistencyAction};

use super::Environment;
use crate::error::Error;

/// Settings of the divergence watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsistencySettings {
    /// Steps between two comparisons; 0: none.
    pub every: u32,
    /// Whether a difference is an error; else a warning.
    pub is_error: bool,
}

impl ConsistencySettings {
    pub(super) fn read(env: &dyn Environment) -> Result<Self, Error> {
        Ok(Self {
            every: settings::CHECK_CONSISTENCY.read(env)?,
            is_error: settings::CONSISTENCY_ACTION.read(env)? == ConsistencyAction::Error,
        })
    }
}

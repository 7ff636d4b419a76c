//! How often replicas are compared, and what happens if they differ.

use super::reader::Reader;
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
    pub(super) fn read(r: &Reader<'_>) -> Result<Self, Error> {
        const ACTION: &str = "HOROVOD_CONSISTENCY_ACTION";
        let is_error = match r.text(ACTION).as_deref().map(str::trim) {
            None | Some("warn") => false,
            Some("error") => true,
            Some(other) => {
                return Err(Error::Init(format!(
                    "{ACTION}={other:?}: expected warn or error"
                )));
            }
        };
        Ok(Self {
            every: r.number("HOROVOD_CHECK_CONSISTENCY", 0)?,
            is_error,
        })
    }
}

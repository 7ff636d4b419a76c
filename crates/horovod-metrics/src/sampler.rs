//! Reads a host's figures once a second, on the first rank of each host, in a thread of its own. On a host with many
//! processors the system may take a millisecond for its tables, and the driver must not wait for it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::figures::HostFigures;
use crate::periodic::Periodic;
use crate::{host, lock};

/// Time between two readings.
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Sampler {
    latest: Arc<Mutex<HostFigures>>,
    _thread: Option<Periodic>,
}

impl Sampler {
    /// Reads the figures, then goes on in a thread of its own.
    pub(crate) fn start() -> Self {
        let latest = Arc::new(Mutex::new(host::read_host()));
        let written = latest.clone();
        let thread = Periodic::start("hvd-host-figures", PERIOD, move || {
            let figures = host::read_host();
            *lock(&written) = figures;
        });
        let thread = thread.inspect_err(|e| {
            tracing::warn!("the figures of this host stay as they are: cannot start a thread: {e}");
        });
        Self {
            latest,
            _thread: thread.ok(),
        }
    }

    pub(crate) fn latest(&self) -> HostFigures {
        lock(&self.latest).clone()
    }
}

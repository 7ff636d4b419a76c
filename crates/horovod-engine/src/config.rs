//! Runtime configuration from the `HOROVOD_*` settings. `horovod-settings` declares them, with defaults and limits.

mod algorithms;
mod consistency;
mod elastic;
mod groups;
mod log;
mod members;
mod metrics;

use std::time::Duration;

pub use horovod_autotune::AutotuneSettings;
use horovod_settings::{self as settings, Decimal, Declaration};
pub use horovod_settings::{
    Environment, JoinAverage, ProcessEnvironment, SETTINGS, Setting, SummaryWhen, nearest_setting,
    unknown_settings,
};
use horovod_transport::Ports;

pub use horovod_scheduler::Started;
use horovod_scheduler::detect;

pub use crate::bootstrap::Settings as BootstrapSettings;
pub use crate::engine::backend::gpu::settings::{
    GpuOperations, GpuSettings, operations as gpu_operations, search as gpu_search,
};
use crate::error::Error;
pub use algorithms::Algorithms;
pub use consistency::ConsistencySettings;
pub use elastic::is_elastic;
pub use groups::{
    LinkSettings, MembershipSettings, NegotiationSettings, ObserverSettings, RankSettings,
    StallSettings, StartSettings,
};
pub use log::LogSettings;
pub use members::{Group, GroupSettings, Launcher, Members};

/// Whether JAX's programs on CPUs order operations in their inner functions, which can be asked before init.
pub fn jax_ordered_calls(env: &dyn Environment) -> Result<bool, Error> {
    Ok(settings::JAX_ORDERED_CALLS.read(env)?)
}

/// Where listeners of this process look for ports.
pub fn ports(env: &dyn Environment) -> Result<Ports, Error> {
    Ok(Ports::within(settings::PORT_RANGE.read(env)?))
}

/// Variables with the number of threads of libraries of linear algebra.
const THREADS: &[&str] = &["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"];

fn seconds(setting: &Declaration<Decimal>, env: &dyn Environment) -> Result<Duration, Error> {
    Ok(Duration::from_secs_f64(setting.read(env)?))
}

/// Largest staging area of a rank that may be asked for.
pub const SHM_BYTES_PER_RANK_MAX: usize = settings::SHM_BYTES_PER_RANK.kind.most;

/// Settings of one generation, read once at init and passed down.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the type of each field documents its group")]
pub struct Config {
    pub ranks: RankSettings,
    pub start: StartSettings,
    pub membership: MembershipSettings,
    pub negotiation: NegotiationSettings,
    pub stalls: StallSettings,
    pub links: LinkSettings,
    pub observers: ObserverSettings,
    pub algorithms: Algorithms,
    pub gpu: GpuSettings,
    /// The environment sets the number of threads of numeric libraries.
    pub threads_set: bool,
}

impl Config {
    /// Read and check all settings; the error names the variable, the value and what is accepted.
    pub fn from_environment(env: &dyn Environment) -> Result<Self, Error> {
        let started = detect(env)?;
        Ok(Self {
            ranks: RankSettings::read(env, started.as_ref())?,
            start: StartSettings::read(env, started)?,
            membership: MembershipSettings::read(env)?,
            negotiation: NegotiationSettings::read(env)?,
            stalls: StallSettings::read(env)?,
            links: LinkSettings::read(env)?,
            observers: ObserverSettings::read(env)?,
            algorithms: Algorithms::read(env)?,
            gpu: GpuSettings::read(env)?,
            threads_set: THREADS
                .iter()
                .any(|name| settings::text_of(env, name).is_some()),
        })
    }

    /// A single process, defaults everywhere; for tests and the Rust API.
    pub fn solo() -> Self {
        struct Empty;
        impl Environment for Empty {
            fn get(&self, _: &str) -> Option<String> {
                None
            }
            fn names(&self) -> Vec<String> {
                Vec::new()
            }
        }
        match Self::from_environment(&Empty) {
            Ok(config) => config,
            Err(e) => unreachable!("the defaults are valid: {e}"),
        }
    }
}

fn system_hostname() -> String {
    // Miri's `uname` fills only a part of the memory that rustix takes as filled.
    if cfg!(miri) {
        return "miri".to_owned();
    }
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests;

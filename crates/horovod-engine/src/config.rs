//! Runtime configuration from the `HOROVOD_*` settings. `horovod-settings` declares them, with defaults and limits.

mod algorithms;
mod consistency;
mod elastic;
mod log;
mod members;
mod metrics;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use horovod_autotune::AutotuneSettings;
use horovod_metrics::PublishSettings;
use horovod_settings::{self as settings, Decimal, Declaration};
pub use horovod_settings::{
    Environment, JoinAverage, ProcessEnvironment, SETTINGS, Setting, SummaryWhen, nearest_setting,
    unknown_settings,
};
use horovod_timeline::TimelineSetting;
use horovod_transport::{Congestion, Ports};

pub use horovod_scheduler::Started;
use horovod_scheduler::{detect, job_array};

pub use crate::bootstrap::Settings as BootstrapSettings;
pub use crate::engine::backend::gpu::settings::{
    GpuOperations, GpuSettings, operations as gpu_operations, search as gpu_search,
};
use crate::error::Error;
pub use algorithms::Algorithms;
pub use consistency::ConsistencySettings;
pub use elastic::is_elastic;
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

fn heartbeat(env: &dyn Environment) -> Result<Option<Duration>, Error> {
    let seconds = settings::HEARTBEAT_TIMEOUT_SECONDS.read(env)?;
    Ok((seconds > 0.0).then(|| Duration::from_secs_f64(seconds)))
}

fn seconds(setting: &Declaration<Decimal>, env: &dyn Environment) -> Result<Duration, Error> {
    Ok(Duration::from_secs_f64(setting.read(env)?))
}

/// Largest staging area of a rank that may be asked for.
pub const SHM_BYTES_PER_RANK_MAX: usize = settings::SHM_BYTES_PER_RANK.kind.most;

/// Settings of one generation, read once at init and passed down.
#[derive(Clone, Debug)]
#[expect(
    missing_docs,
    reason = "each field is the setting of the same name in SETTINGS"
)]
pub struct Config {
    pub rank: u32,
    pub size: u32,
    pub local_rank: u32,
    pub local_size: u32,
    pub cross_rank: u32,
    pub cross_size: u32,
    pub hostname: String,
    pub rendezvous: Vec<SocketAddr>,
    pub agent_socket: Option<String>,
    pub elastic: bool,
    pub worker: u32,
    pub elastic_timeout: Duration,
    pub job_key: Option<String>,
    /// How to meet without a launcher.
    pub bootstrap: BootstrapSettings,
    /// The scheduler that started this process as one of several, if it was none of ours.
    pub started: Option<Started>,
    /// The key-value store of that scheduler.
    pub store: Option<horovod_pmi::Found>,
    /// Hint for an error of init, where ranks were given by hand in an element of a job array.
    pub job_array: Option<String>,
    /// The launcher's ranks that form the job, where the script lists some of them or another order.
    pub listed: Option<Vec<i64>>,
    /// Local and cross ranks follow from the processes that meet, also where there is a rendezvous.
    pub places_follow: bool,
    /// How many threads libraries use is told by the environment.
    pub threads_set: bool,
    pub interfaces: Vec<String>,
    pub ports: Ports,
    pub connect_timeout: Duration,
    pub fusion_threshold: u64,
    pub cycle_time: Duration,
    pub cache_capacity: usize,
    pub disable_group_fusion: bool,
    pub stall_check: Option<Duration>,
    pub stall_shutdown: Option<Duration>,
    /// `None`: never.
    pub stall_diagnosis: Option<Duration>,
    pub stall_report: Option<PathBuf>,
    pub deadlock_error: bool,
    /// How long the handler of a signal that may only announce an end need not run; zero: however long.
    pub signal_grace: Duration,
    pub consistency: ConsistencySettings,
    pub dynamic_process_sets: bool,
    pub shm: bool,
    pub shm_bytes_per_rank: usize,
    pub congestion: Congestion,
    pub control_fan_out: u32,
    /// `None`: never.
    pub heartbeat: Option<Duration>,
    pub encrypt: bool,
    pub checksums: bool,
    pub metrics: bool,
    pub publish: PublishSettings,
    pub summary: SummaryWhen,
    pub timeline: Option<TimelineSetting>,
    pub timeline_mark_cycles: bool,
    pub algorithms: Algorithms,
    pub gpu: GpuSettings,
    /// `None`: off.
    pub autotune: Option<AutotuneSettings>,
}

/// The store of the launcher that started this process, if it knows the process under the same rank.
fn store_of(started: &Started, env: &dyn Environment) -> Option<horovod_pmi::Found> {
    let found = horovod_pmi::find(env)?;
    let is_same = match &found {
        horovod_pmi::Found::Pmi1(_) => true,
        horovod_pmi::Found::Pmix { rank, .. } => *rank == started.rank,
    };
    (started.starts_mpi && is_same).then_some(found)
}

impl Config {
    /// Read and check all settings; the error names the variable, the value and what is accepted.
    pub fn from_environment(env: &dyn Environment) -> Result<Self, Error> {
        let started = detect(env)?;
        let (rank, size) = match &started {
            Some(started) => (started.rank, started.size),
            None => (settings::RANK.read(env)?, settings::SIZE.read(env)?),
        };
        if size == 0 || rank >= size {
            return Err(Error::Init(format!(
                "HOROVOD_RANK={rank} and HOROVOD_SIZE={size}: the rank must be below the size{}",
                job_array(env).unwrap_or_default()
            )));
        }
        let stall_warning = seconds(&settings::STALL_CHECK_TIME_SECONDS, env)?;
        let stall_shutdown = seconds(&settings::STALL_SHUTDOWN_TIME_SECONDS, env)?;
        let stall_shutdown = if stall_shutdown.is_zero() {
            None
        } else if stall_shutdown < stall_warning {
            tracing::warn!(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is less than HOROVOD_STALL_CHECK_TIME_SECONDS, will not shutdown."
            );
            None
        } else {
            Some(stall_shutdown)
        };
        let is_stall_checked = !settings::STALL_CHECK_DISABLE.read(env)?;
        let diagnosis = seconds(&settings::STALL_DIAGNOSIS_SECONDS, env)?;
        let shm_bytes_per_rank = settings::SHM_BYTES_PER_RANK.read(env)?;
        if size > 1
            && settings::SIZE.is_set(env)
            && started.is_none()
            && !settings::RANK.is_set(env)
        {
            return Err(Error::Init(format!(
                "HOROVOD_SIZE={size} is set but HOROVOD_RANK is not: every process needs a rank of its own{}",
                job_array(env).unwrap_or_default()
            )));
        }
        Ok(Self {
            rank,
            size,
            local_rank: settings::LOCAL_RANK.read(env)?,
            local_size: settings::LOCAL_SIZE.read(env)?,
            cross_rank: settings::CROSS_RANK.read(env)?,
            cross_size: settings::CROSS_SIZE.read(env)?,
            hostname: settings::HOSTNAME
                .read(env)?
                .unwrap_or_else(system_hostname),
            rendezvous: settings::RENDEZVOUS.read(env)?,
            agent_socket: settings::AGENT_SOCKET.read(env)?,
            elastic: settings::ELASTIC.read(env)?,
            worker: settings::ELASTIC_WORKER.read(env)?.unwrap_or_default(),
            elastic_timeout: elastic::timeout(env)?,
            job_key: settings::JOB_KEY.read(env)?,
            bootstrap: BootstrapSettings {
                rank0_address: settings::RANK0_ADDRESS.read(env)?,
                directory: settings::RENDEZVOUS_DIR.read(env)?.map(PathBuf::from),
                key_file: settings::JOB_KEY_FILE.read(env)?.map(PathBuf::from),
                unauthenticated: settings::UNAUTHENTICATED_JOB.read(env)?,
                temporary: settings::text_of(env, "TMPDIR")
                    .map_or_else(|| "/tmp".into(), PathBuf::from),
            },
            job_array: match &started {
                None if settings::RANK.is_set(env) && !settings::RENDEZVOUS.is_set(env) => {
                    job_array(env)
                }
                _ => None,
            },
            store: started.as_ref().and_then(|started| store_of(started, env)),
            started,
            listed: None,
            places_follow: false,
            threads_set: THREADS
                .iter()
                .any(|name| settings::text_of(env, name).is_some()),
            interfaces: settings::GLOO_IFACE.read(env)?,
            ports: ports(env)?,
            connect_timeout: seconds(&settings::GLOO_TIMEOUT_SECONDS, env)?
                .max(Duration::from_secs(1)),
            fusion_threshold: settings::FUSION_THRESHOLD.read(env)?,
            cycle_time: Duration::from_secs_f64(
                settings::CYCLE_TIME.read(env)?.min(10_000.0) / 1e3,
            ),
            cache_capacity: settings::CACHE_CAPACITY.read(env)?,
            disable_group_fusion: settings::DISABLE_GROUP_FUSION.read(env)?,
            stall_check: (is_stall_checked && !stall_warning.is_zero()).then_some(stall_warning),
            stall_shutdown,
            stall_diagnosis: (is_stall_checked && !diagnosis.is_zero()).then_some(diagnosis),
            stall_report: settings::STALL_REPORT.read(env)?.map(PathBuf::from),
            deadlock_error: settings::DEADLOCK_ERROR.read(env)?,
            signal_grace: seconds(&settings::SIGNAL_GRACE_SECONDS, env)?,
            consistency: ConsistencySettings::read(env)?,
            dynamic_process_sets: settings::DYNAMIC_PROCESS_SETS.read(env)?,
            shm: settings::SHM.read(env)?,
            shm_bytes_per_rank,
            congestion: Congestion::from_setting(&settings::TCP_CONGESTION.read(env)?),
            control_fan_out: settings::CONTROL_FAN_OUT.read(env)?,
            heartbeat: heartbeat(env)?,
            encrypt: settings::ENCRYPT.read(env)?,
            checksums: settings::DATA_CHECKSUM.read(env)?,
            metrics: metrics::is_on(env)?,
            publish: metrics::publish(env)?,
            summary: settings::SUMMARY.read(env)?,
            timeline: settings::TIMELINE
                .read(env)?
                .map(|value| match value.as_str() {
                    "DYNAMIC" => TimelineSetting::Dynamic,
                    path => TimelineSetting::File(path.into()),
                }),
            timeline_mark_cycles: settings::TIMELINE_MARK_CYCLES.read(env)?,
            algorithms: Algorithms::read(env)?,
            gpu: GpuSettings::read(env)?,
            autotune: AutotuneSettings::from_environment(env)?,
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

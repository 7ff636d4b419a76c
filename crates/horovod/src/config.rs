//! What the `HOROVOD_*` settings of the runtime say; the only reader of the environment.

mod algorithms;
mod autotune;
mod consistency;
mod elastic;
mod hints;
mod log;
mod reader;
mod scheduler;
mod table;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use horovod_transport::Congestion;

pub use crate::bootstrap::Settings as MeetingSettings;
use crate::error::Error;
use crate::timeline::TimelineSetting;
pub use algorithms::{Algorithms, JoinAverage};
pub use autotune::AutotuneSettings;
pub use consistency::ConsistencySettings;
pub use elastic::is_elastic;
pub use log::LogSettings;
use reader::Reader;
pub use scheduler::Started;
pub use table::{SETTINGS, Setting, unknown_settings};

/// What tells libraries of linear algebra how many threads to use.
const THREADS: &[&str] = &["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"];

fn fan_out(r: &Reader<'_>) -> Result<u32, Error> {
    const NAME: &str = "HOROVOD_CONTROL_FAN_OUT";
    let fan_out = r.number(NAME, horovod_transport::FAN_OUT)?;
    if (2..=1 << 16).contains(&fan_out) {
        Ok(fan_out)
    } else {
        Err(Error::Init(format!(
            "{NAME}={fan_out}: expected 2 to 65536"
        )))
    }
}

fn heartbeat(r: &Reader<'_>) -> Result<Option<Duration>, Error> {
    const NAME: &str = "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS";
    let seconds = r.not_negative(NAME, horovod_transport::HEARTBEAT.as_secs_f64())?;
    if seconds == 0.0 {
        return Ok(None);
    }
    if (1.0..=86_400.0).contains(&seconds) {
        Ok(Some(Duration::from_secs_f64(seconds)))
    } else {
        Err(Error::Init(format!(
            "{NAME}={seconds}: expected 1 to 86400, or 0 for never"
        )))
    }
}

/// Largest staging area of a rank that may be asked for.
pub const SHM_BYTES_PER_RANK_MAX: usize = 64 << 20;

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
    pub elastic: bool,
    pub worker: u32,
    pub elastic_timeout: Duration,
    pub job_key: Option<String>,
    /// How to meet without a launcher.
    pub meeting: MeetingSettings,
    /// The scheduler that started this process as one of several, if it was none of ours.
    pub started: Option<Started>,
    /// How many threads libraries use is told by the environment.
    pub threads_set: bool,
    pub interfaces: Vec<String>,
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
    pub timeline: Option<TimelineSetting>,
    pub timeline_mark_cycles: bool,
    pub algorithms: Algorithms,
    /// `None`: off.
    pub autotune: Option<AutotuneSettings>,
}

/// How the variables are looked up; tests pass a map.
pub trait Environment {
    /// Value of one variable, `None` when unset.
    fn get(&self, name: &str) -> Option<String>;
    /// Names of all variables.
    fn names(&self) -> Vec<String>;
}

/// The environment of this process.
#[derive(Clone, Copy, Debug)]
pub struct ProcessEnvironment;

impl Environment for ProcessEnvironment {
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that reads settings"
    )]
    fn get(&self, name: &str) -> Option<String> {
        std::env::var_os(name).map(|v| v.to_string_lossy().into_owned())
    }

    fn names(&self) -> Vec<String> {
        std::env::vars_os()
            .map(|(k, _)| k.to_string_lossy().into_owned())
            .collect()
    }
}

impl Config {
    /// Read and check all settings; the error names the variable, the value and what is accepted.
    pub fn from_environment(env: &dyn Environment) -> Result<Self, Error> {
        let r = Reader { env };
        let started = scheduler::detect(&r)?;
        let (rank, size) = match &started {
            Some(started) => (started.rank, started.size),
            None => (
                r.number("HOROVOD_RANK", 0u32)?,
                r.number("HOROVOD_SIZE", 1u32)?,
            ),
        };
        if size == 0 || rank >= size {
            return Err(Error::Init(format!(
                "HOROVOD_RANK={rank} and HOROVOD_SIZE={size}: the rank must be below the size"
            )));
        }
        let stall_warning =
            Duration::from_secs_f64(r.not_negative("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)?);
        let stall_shutdown =
            Duration::from_secs_f64(r.not_negative("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)?);
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
        let is_stall_checked = !r.flag("HOROVOD_STALL_CHECK_DISABLE", false)?;
        let diagnosis =
            Duration::from_secs_f64(r.not_negative("HOROVOD_STALL_DIAGNOSIS_SECONDS", 10.0)?);
        let shm_bytes_per_rank = r.number("HOROVOD_SHM_BYTES_PER_RANK", 8usize << 20)?;
        if !(4096..=SHM_BYTES_PER_RANK_MAX).contains(&shm_bytes_per_rank) {
            return Err(Error::Init(format!(
                "HOROVOD_SHM_BYTES_PER_RANK={shm_bytes_per_rank}: expected 4096 to {SHM_BYTES_PER_RANK_MAX}"
            )));
        }
        if size > 1
            && r.text("HOROVOD_SIZE").is_some()
            && started.is_none()
            && r.text("HOROVOD_RANK").is_none()
        {
            return Err(Error::Init(format!(
                "HOROVOD_SIZE={size} is set but HOROVOD_RANK is not: every process needs a rank of its own"
            )));
        }
        Ok(Self {
            rank,
            size,
            local_rank: r.number("HOROVOD_LOCAL_RANK", 0)?,
            local_size: r.number("HOROVOD_LOCAL_SIZE", 1)?,
            cross_rank: r.number("HOROVOD_CROSS_RANK", 0)?,
            cross_size: r.number("HOROVOD_CROSS_SIZE", 1)?,
            hostname: r.text("HOROVOD_HOSTNAME").unwrap_or_else(system_hostname),
            rendezvous: r.addresses("HOROVOD_RENDEZVOUS")?,
            elastic: r.flag("HOROVOD_ELASTIC", false)?,
            worker: r.number("HOROVOD_ELASTIC_WORKER", 0u32)?,
            elastic_timeout: elastic::timeout(&r)?,
            job_key: r.text("HOROVOD_JOB_KEY"),
            meeting: MeetingSettings {
                rank0_address: r.text("HOROVOD_RANK0_ADDRESS"),
                directory: r.text("HOROVOD_RENDEZVOUS_DIR").map(PathBuf::from),
                key_file: r.text("HOROVOD_JOB_KEY_FILE").map(PathBuf::from),
                unauthenticated: r.text("HOROVOD_UNAUTHENTICATED_JOB"),
                temporary: r
                    .text("TMPDIR")
                    .map_or_else(|| "/tmp".into(), PathBuf::from),
            },
            started,
            threads_set: THREADS.iter().any(|name| r.text(name).is_some()),
            interfaces: r.list("HOROVOD_GLOO_IFACE"),
            connect_timeout: Duration::from_secs_f64(
                r.not_negative("HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0)?
                    .max(1.0),
            ),
            fusion_threshold: r.number("HOROVOD_FUSION_THRESHOLD", 128u64 << 20)?,
            cycle_time: Duration::from_secs_f64(
                r.not_negative("HOROVOD_CYCLE_TIME", 0.0)?.min(10_000.0) / 1e3,
            ),
            cache_capacity: r.number("HOROVOD_CACHE_CAPACITY", 1024usize)?,
            disable_group_fusion: r.flag("HOROVOD_DISABLE_GROUP_FUSION", false)?,
            stall_check: (is_stall_checked && !stall_warning.is_zero()).then_some(stall_warning),
            stall_shutdown,
            stall_diagnosis: (is_stall_checked && !diagnosis.is_zero()).then_some(diagnosis),
            stall_report: r.text("HOROVOD_STALL_REPORT").map(PathBuf::from),
            deadlock_error: r.flag("HOROVOD_DEADLOCK_ERROR", true)?,
            consistency: ConsistencySettings::read(&r)?,
            dynamic_process_sets: r.flag("HOROVOD_DYNAMIC_PROCESS_SETS", false)?,
            shm: r.flag("HOROVOD_SHM", true)?,
            shm_bytes_per_rank,
            congestion: r
                .text("HOROVOD_TCP_CONGESTION")
                .map_or(Congestion::Auto, |text| Congestion::from_setting(&text)),
            control_fan_out: fan_out(&r)?,
            heartbeat: heartbeat(&r)?,
            encrypt: r.flag("HOROVOD_ENCRYPT", false)?,
            checksums: r.flag("HOROVOD_DATA_CHECKSUM", true)?,
            timeline: r.text("HOROVOD_TIMELINE").map(|v| match v.as_str() {
                "DYNAMIC" => TimelineSetting::Dynamic,
                path => TimelineSetting::File(path.into()),
            }),
            timeline_mark_cycles: r.flag("HOROVOD_TIMELINE_MARK_CYCLES", false)?,
            algorithms: Algorithms::read(&r)?,
            autotune: AutotuneSettings::from_environment(&r)?,
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
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests;

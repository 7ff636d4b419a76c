//! Every `HOROVOD_*` setting of the runtime in one table; the only reader of the environment.

mod algorithms;
mod autotune;
mod elastic;
mod log;
mod reader;
mod scheduler;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use crate::bootstrap::Settings as MeetingSettings;
use crate::error::Error;
use crate::timeline::TimelineSetting;
pub use algorithms::Algorithms;
pub use autotune::AutotuneSettings;
pub use elastic::is_elastic;
pub use log::LogSettings;
use reader::Reader;
pub use scheduler::Started;

/// One line of the settings table: what `docs/settings.md` and the "unknown setting" warning are made from.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Environment variable.
    pub name: &'static str,
    /// Default as shown to users.
    pub default: &'static str,
    /// What it does, one line, units included.
    pub doc: &'static str,
}

/// All settings the runtime reads. Identity and rendezvous are set by the launcher.
pub const SETTINGS: &[Setting] = &[
    s(
        "HOROVOD_RANK",
        "0",
        "rank of this process; set by the launcher",
    ),
    s(
        "HOROVOD_SIZE",
        "1",
        "number of processes; set by the launcher",
    ),
    s(
        "HOROVOD_LOCAL_RANK",
        "0",
        "position among the processes of this host; set by the launcher",
    ),
    s(
        "HOROVOD_LOCAL_SIZE",
        "1",
        "processes on this host; set by the launcher",
    ),
    s(
        "HOROVOD_CROSS_RANK",
        "0",
        "position of this host among those that have this local rank; set by the launcher",
    ),
    s(
        "HOROVOD_CROSS_SIZE",
        "1",
        "number of hosts that have this local rank; set by the launcher",
    ),
    s(
        "HOROVOD_HOSTNAME",
        "the system's",
        "name of this host in messages; set by the launcher",
    ),
    s(
        "HOROVOD_RENDEZVOUS",
        "none",
        "addresses of the launcher's rendezvous, `ip:port[,ip:port...]`; none means a single process",
    ),
    s(
        "HOROVOD_JOB_KEY",
        "none",
        "64 hex digits that authenticate every connection of the job",
    ),
    s(
        "HOROVOD_JOB_KEY_FILE",
        "none",
        "file with the 64 hex digits instead; not for jobs of horovodrun",
    ),
    s(
        "HOROVOD_RANK0_ADDRESS",
        "what the scheduler says",
        "host:port where rank 0 listens for the others; not for jobs of horovodrun",
    ),
    s(
        "HOROVOD_RENDEZVOUS_DIR",
        "none",
        "folder that all ranks share, where rank 0 leaves its address and a key; not for jobs of horovodrun",
    ),
    s(
        "HOROVOD_UNAUTHENTICATED_JOB",
        "none",
        "a sentence that turns authentication off, see running.md; not for jobs of horovodrun",
    ),
    s(
        "HOROVOD_GLOO_IFACE",
        "all",
        "comma list of network interfaces to listen on and connect from between hosts",
    ),
    s(
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "30",
        "seconds that init waits for the other ranks and their connections",
    ),
    s(
        "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS",
        "30",
        "seconds without a word after which a rank, or a connection, is given up and the job ends with an error; 0 means never; rank 0's value counts",
    ),
    s(
        "HOROVOD_FUSION_THRESHOLD",
        "134217728",
        "bytes of tensors that run as one collective; 0 disables fusion; rank 0's value counts",
    ),
    s(
        "HOROVOD_CYCLE_TIME",
        "0",
        "milliseconds that the coordinator may hold back a response to batch more tensors; rank 0's value counts",
    ),
    s(
        "HOROVOD_CACHE_CAPACITY",
        "1024",
        "entries of the response cache; 0 disables it; rank 0's value counts",
    ),
    s(
        "HOROVOD_DISABLE_GROUP_FUSION",
        "0",
        "1 keeps every grouped operation in a collective of its own; rank 0's value counts",
    ),
    s(
        "HOROVOD_STALL_CHECK_DISABLE",
        "0",
        "1 turns the warnings about missing ranks off; rank 0's value counts",
    ),
    s(
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "60",
        "seconds after which a tensor that some ranks have not submitted is reported",
    ),
    s(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        "0",
        "seconds after which such a tensor ends the job; 0 means never",
    ),
    s(
        "HOROVOD_STALL_DIAGNOSIS_SECONDS",
        "10",
        "seconds of standstill after which rank 0 asks all concerned where they stand and reports; 0 means never",
    ),
    s(
        "HOROVOD_STALL_REPORT",
        "a new temporary file",
        "file to which rank 0 appends reports of standstills",
    ),
    s(
        "HOROVOD_DEADLOCK_ERROR",
        "1",
        "0 only reports when ranks wait for each other in a circle, instead of ending the job with an error",
    ),
    s(
        "HOROVOD_DYNAMIC_PROCESS_SETS",
        "0",
        "1 allows add_process_set and remove_process_set after init",
    ),
    s(
        "HOROVOD_SHM",
        "1",
        "0 makes ranks of one host talk over TCP instead of shared memory",
    ),
    s(
        "HOROVOD_SHM_BYTES_PER_RANK",
        "8388608",
        "bytes of shared staging memory of each rank, at most 67108864",
    ),
    s(
        "HOROVOD_ALLREDUCE_ALGORITHM",
        "auto",
        "auto, staged (one host), exchange, pairwise or ring; see algorithms.md; rank 0's value counts",
    ),
    s(
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "1",
        "0 lets every rank of every host take part between hosts; rank 0's value counts",
    ),
    s(
        "HOROVOD_TORUS_ALLREDUCE",
        "0",
        "1 is the same as HOROVOD_HIERARCHICAL_ALLREDUCE=1; rank 0's value counts",
    ),
    s(
        "HOROVOD_HIERARCHICAL_ALLGATHER",
        "1",
        "0 lets every rank of every host take part between hosts; rank 0's value counts",
    ),
    s(
        "HOROVOD_CHUNK_BYTES",
        "65536",
        "bytes that one rank stages for another at a time inside a host; rank 0's value counts",
    ),
    s(
        "HOROVOD_WIRE_CHUNK_BYTES",
        "131072",
        "bytes that pass between two hosts at a time; rank 0's value counts",
    ),
    s(
        "HOROVOD_DIRECT_MAX_BYTES",
        "8192",
        "largest allreduce inside a host that every rank does by itself; rank 0's value counts",
    ),
    s(
        "HOROVOD_EXCHANGE_MAX_BYTES",
        "65536",
        "bytes that a host may receive in an allreduce by exchange; rank 0's value counts",
    ),
    s(
        "HOROVOD_PAIRWISE_MAX_HOSTS",
        "64",
        "hosts that send to each other in an allreduce; more form a ring; rank 0's value counts",
    ),
    s(
        "HOROVOD_CONNECTIONS_PER_PEER",
        "1",
        "TCP connections for data between two ranks, 1 to 16; rank 0's value counts",
    ),
    s(
        "HOROVOD_CONTROL_FAN_OUT",
        "16",
        "ranks of its host, and as many of others, that a rank listens to in the negotiation, 2 to 65536; larger jobs negotiate through a tree; see scaling.md; rank 0's value counts",
    ),
    s(
        "HOROVOD_ENCRYPT",
        "0",
        "1 encrypts the data that travels between hosts",
    ),
    s(
        "HOROVOD_AUTOTUNE",
        "0",
        "1 tries settings out while the job runs and keeps what is clearly faster; rank 0's value counts",
    ),
    s(
        "HOROVOD_AUTOTUNE_LOG",
        "none",
        "file that rank 0 writes its scores to, as CSV",
    ),
    s(
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        "3",
        "rounds of five samples that autotuning throws away at the start",
    ),
    s(
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        "10",
        "training steps that autotuning measures at a time, at least 1",
    ),
    s(
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "20",
        "settings that autotuning tries, beside those it begins with",
    ),
    s(
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "measured",
        "noise of autotuning's scores as a share of their spread, 0 to 1",
    ),
    s(
        "HOROVOD_LOG_LEVEL",
        "WARNING",
        "trace, debug, info, warning, error or fatal; unknown means warning",
    ),
    s(
        "HOROVOD_LOG_HIDE_TIME",
        "0",
        "1 leaves the time out of log lines",
    ),
    s(
        "HOROVOD_TIMELINE",
        "none",
        "file that rank 0 writes a timeline of all ranks to; DYNAMIC: only between start_timeline and stop_timeline",
    ),
    s(
        "HOROVOD_TIMELINE_MARK_CYCLES",
        "0",
        "1 marks each batch of answers of the coordinator in the timeline",
    ),
    s(
        "HOROVOD_ELASTIC",
        "0",
        "set to 1 by the launcher of an elastic job",
    ),
    s(
        "HOROVOD_ELASTIC_WORKER",
        "none",
        "number of this process in an elastic job; set by the launcher",
    ),
    s(
        "HOROVOD_ELASTIC_TIMEOUT",
        "600",
        "seconds that an elastic job waits for enough processes, and for those that do not come out of a lost round",
    ),
    s(
        "HOROVOD_ELASTIC_SLOT_FAILURES",
        "3",
        "failures of one slot within a minute after which horovodrun leaves it alone for a while",
    ),
];

/// Names that other programs of the family or the original read: known, so not worth a warning.
const KNOWN_ELSEWHERE: &[&str] = &[
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_START_TIMEOUT",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_THREAD_AFFINITY",
];

/// Prefixes of build-time variables of the original: harmless here, and said so nowhere.
const KNOWN_PREFIXES: &[&str] = &[
    "HOROVOD_WITH_",
    "HOROVOD_WITHOUT_",
    "HOROVOD_GPU",
    "HOROVOD_ALLOW_",
    "HOROVOD_CUDA_",
    "HOROVOD_ROCM_",
    "HOROVOD_NCCL_",
    "HOROVOD_NVTX_",
    "HOROVOD_BUILD_",
    "HOROVOD_CMAKE",
    "HOROVOD_DEBUG",
    "HOROVOD_SKIP_",
    "HOROVOD_LOCAL_VERSION",
    "HOROVOD_SPARK_",
    "HOROVOD_MPI_",
];

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

const fn s(name: &'static str, default: &'static str, doc: &'static str) -> Setting {
    Setting { name, default, doc }
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
    pub dynamic_process_sets: bool,
    pub shm: bool,
    pub shm_bytes_per_rank: usize,
    pub control_fan_out: u32,
    /// `None`: never.
    pub heartbeat: Option<Duration>,
    pub encrypt: bool,
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
            dynamic_process_sets: r.flag("HOROVOD_DYNAMIC_PROCESS_SETS", false)?,
            shm: r.flag("HOROVOD_SHM", true)?,
            shm_bytes_per_rank,
            control_fan_out: fan_out(&r)?,
            heartbeat: heartbeat(&r)?,
            encrypt: r.flag("HOROVOD_ENCRYPT", false)?,
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

/// Names of set `HOROVOD_*` variables that nothing reads: most often a misspelling.
pub fn unknown_settings(env: &dyn Environment) -> Vec<String> {
    let mut names: Vec<String> = env
        .names()
        .into_iter()
        .filter(|n| n.starts_with("HOROVOD_"))
        .filter(|n| !SETTINGS.iter().any(|s| s.name == n))
        .filter(|n| !KNOWN_ELSEWHERE.contains(&n.as_str()))
        .filter(|n| !KNOWN_PREFIXES.iter().any(|p| n.starts_with(p)))
        .collect();
    names.sort();
    names
}

fn system_hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests;

//! Groups of settings: what a rank knows about itself, the start, members, negotiation, stalls, links and observers.
#![expect(
    missing_docs,
    reason = "each field is the setting of the same name in SETTINGS"
)]

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use horovod_autotune::AutotuneSettings;
use horovod_metrics::PublishSettings;
use horovod_scheduler::{Started, job_array};
use horovod_settings::{self as settings, Environment, SummaryWhen};
use horovod_timeline::TimelineSetting;
use horovod_transport::{Congestion, Ports};

use super::{
    BootstrapSettings, ConsistencySettings, elastic, metrics, ports, seconds, system_hostname,
};
use crate::error::Error;

const DRIVER_ADDRESS: &str = "HOROVOD_GLOO_RENDEZVOUS_ADDR";
const DRIVER_PORT: &str = "HOROVOD_GLOO_RENDEZVOUS_PORT";

/// Which rank this process is, of how many, and where the ranks are.
#[derive(Clone, Debug)]
pub struct RankSettings {
    pub rank: u32,
    pub size: u32,
    pub local_rank: u32,
    pub local_size: u32,
    pub cross_rank: u32,
    pub cross_size: u32,
    pub hostname: String,
    /// The launcher's ranks that the script lists in `init(comm=[...])`, in its order; `None`: all of them.
    pub listed: Option<Vec<i64>>,
    /// Local and cross ranks are computed from the hosts of the connected processes, even with a rendezvous.
    pub places_follow: bool,
}

/// How the ranks of a job find each other.
#[derive(Clone, Debug)]
pub struct StartSettings {
    pub rendezvous: Vec<SocketAddr>,
    pub agent_socket: Option<String>,
    pub job_key: Option<String>,
    /// How to meet without a launcher.
    pub bootstrap: BootstrapSettings,
    /// The key-value store of the scheduler in `started`.
    pub store: Option<horovod_pmi::Found>,
    /// Hint for an error of init, where ranks were given by hand in an element of a job array.
    pub job_array: Option<String>,
    /// The scheduler that started this process as one of several, if it was none of ours.
    pub started: Option<Started>,
    pub interfaces: Vec<String>,
    pub ports: Ports,
    pub connect_timeout: Duration,
}

/// Changes of members, and how the loss of one is found.
#[derive(Clone, Debug)]
pub struct MembershipSettings {
    pub elastic: bool,
    pub worker: u32,
    pub elastic_timeout: Duration,
    /// `None`: never.
    pub heartbeat: Option<Duration>,
    /// How long the handler of a signal that may only announce an end need not run; zero: however long.
    pub signal_grace: Duration,
}

/// Rules by which the ranks agree on operations.
#[derive(Clone, Debug)]
pub struct NegotiationSettings {
    pub fusion_threshold: u64,
    pub cycle_time: Duration,
    pub cache_capacity: usize,
    pub disable_group_fusion: bool,
    pub dynamic_process_sets: bool,
    pub consistency: ConsistencySettings,
    pub control_fan_out: u32,
}

/// When a stall is reported, and what it ends.
#[derive(Clone, Debug)]
pub struct StallSettings {
    pub check: Option<Duration>,
    pub shutdown: Option<Duration>,
    /// `None`: never.
    pub diagnosis: Option<Duration>,
    pub report: Option<PathBuf>,
    pub deadlock_error: bool,
}

/// Shared memory and connections.
#[derive(Clone, Debug)]
pub struct LinkSettings {
    pub shm: bool,
    pub shm_bytes_per_rank: usize,
    pub congestion: Congestion,
    pub encrypt: bool,
    pub checksums: bool,
}

/// Figures, the timeline and tuning.
#[derive(Clone, Debug)]
pub struct ObserverSettings {
    pub metrics: bool,
    pub publish: PublishSettings,
    pub summary: SummaryWhen,
    pub timeline: Option<TimelineSetting>,
    pub timeline_mark_cycles: bool,
    /// `None`: off.
    pub autotune: Option<AutotuneSettings>,
}

fn heartbeat(env: &dyn Environment) -> Result<Option<Duration>, Error> {
    let seconds = settings::HEARTBEAT_TIMEOUT_SECONDS.read(env)?;
    Ok((seconds > 0.0).then(|| Duration::from_secs_f64(seconds)))
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

impl RankSettings {
    pub(super) fn read(env: &dyn Environment, started: Option<&Started>) -> Result<Self, Error> {
        let (rank, size) = match started {
            Some(started) => (started.rank, started.size),
            None => (settings::RANK.read(env)?, settings::SIZE.read(env)?),
        };
        if size == 0 || rank >= size {
            return Err(Error::Init(format!(
                "HOROVOD_RANK={rank} and HOROVOD_SIZE={size}: the rank must be below the size{}",
                job_array(env).unwrap_or_default()
            )));
        }
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
            listed: None,
            places_follow: false,
        })
    }
}

/// The rendezvous of a driver that was written for Horovod 0.28, which gives ranks its address; the user gives the key.
fn served_by_a_driver(env: &dyn Environment) -> Result<Vec<SocketAddr>, Error> {
    let has_key = settings::JOB_KEY.is_set(env) || settings::JOB_KEY_FILE.is_set(env);
    let has_another = settings::RANK0_ADDRESS.is_set(env) || settings::RENDEZVOUS_DIR.is_set(env);
    let place = [DRIVER_ADDRESS, DRIVER_PORT].map(|name| settings::text_of(env, name));
    let [Some(host), Some(port)] = place else {
        return Ok(Vec::new());
    };
    if !has_key || has_another || !settings::RANK.is_set(env) {
        return Ok(Vec::new());
    }
    let found = port
        .trim()
        .parse()
        .map_err(|_| "the port is not a number up to 65535".to_owned())
        .and_then(|port: u16| {
            let found = (host.trim(), port).to_socket_addrs();
            found.map_err(|e| e.to_string())
        });
    found.map(Iterator::collect).map_err(|why| {
        Error::Init(format!(
            "{DRIVER_ADDRESS}={host:?} and {DRIVER_PORT}={port:?}, where a driver serves the rendezvous: {why}; \
             set both to what the driver prints, or neither"
        ))
    })
}

impl StartSettings {
    pub(super) fn read(env: &dyn Environment, started: Option<Started>) -> Result<Self, Error> {
        Ok(Self {
            rendezvous: match settings::RENDEZVOUS.read(env)? {
                none if none.is_empty() => served_by_a_driver(env)?,
                addresses => addresses,
            },
            agent_socket: settings::AGENT_SOCKET.read(env)?,
            job_key: settings::JOB_KEY.read(env)?,
            bootstrap: BootstrapSettings {
                rank0_address: settings::RANK0_ADDRESS.read(env)?,
                directory: settings::RENDEZVOUS_DIR.read(env)?.map(PathBuf::from),
                key_file: settings::JOB_KEY_FILE.read(env)?.map(PathBuf::from),
                unauthenticated: settings::UNAUTHENTICATED_JOB.read(env)?,
                temporary: settings::text_of(env, "TMPDIR")
                    .map_or_else(|| "/tmp".into(), PathBuf::from),
            },
            store: started.as_ref().and_then(|started| store_of(started, env)),
            job_array: match &started {
                None if settings::RANK.is_set(env) && !settings::RENDEZVOUS.is_set(env) => {
                    job_array(env)
                }
                _ => None,
            },
            started,
            interfaces: settings::GLOO_IFACE.read(env)?,
            ports: ports(env)?,
            connect_timeout: seconds(&settings::GLOO_TIMEOUT_SECONDS, env)?
                .max(Duration::from_secs(1)),
        })
    }
}

impl MembershipSettings {
    pub(super) fn read(env: &dyn Environment) -> Result<Self, Error> {
        Ok(Self {
            elastic: settings::ELASTIC.read(env)?,
            worker: settings::ELASTIC_WORKER.read(env)?.unwrap_or_default(),
            elastic_timeout: elastic::timeout(env)?,
            heartbeat: heartbeat(env)?,
            signal_grace: seconds(&settings::SIGNAL_GRACE_SECONDS, env)?,
        })
    }
}

impl NegotiationSettings {
    pub(super) fn read(env: &dyn Environment) -> Result<Self, Error> {
        Ok(Self {
            fusion_threshold: settings::FUSION_THRESHOLD.read(env)?,
            cycle_time: Duration::from_secs_f64(
                settings::CYCLE_TIME.read(env)?.min(10_000.0) / 1e3,
            ),
            cache_capacity: settings::CACHE_CAPACITY.read(env)?,
            disable_group_fusion: settings::DISABLE_GROUP_FUSION.read(env)?,
            dynamic_process_sets: settings::DYNAMIC_PROCESS_SETS.read(env)?,
            consistency: ConsistencySettings::read(env)?,
            control_fan_out: settings::CONTROL_FAN_OUT.read(env)?,
        })
    }
}

impl StallSettings {
    pub(super) fn read(env: &dyn Environment) -> Result<Self, Error> {
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
        Ok(Self {
            check: (is_stall_checked && !stall_warning.is_zero()).then_some(stall_warning),
            shutdown: stall_shutdown,
            diagnosis: (is_stall_checked && !diagnosis.is_zero()).then_some(diagnosis),
            report: settings::STALL_REPORT.read(env)?.map(PathBuf::from),
            deadlock_error: settings::DEADLOCK_ERROR.read(env)?,
        })
    }
}

impl LinkSettings {
    pub(super) fn read(env: &dyn Environment) -> Result<Self, Error> {
        Ok(Self {
            shm: settings::SHM.read(env)?,
            shm_bytes_per_rank: settings::SHM_BYTES_PER_RANK.read(env)?,
            congestion: Congestion::from_setting(&settings::TCP_CONGESTION.read(env)?),
            encrypt: settings::ENCRYPT.read(env)?,
            checksums: settings::DATA_CHECKSUM.read(env)?,
        })
    }
}

impl ObserverSettings {
    pub(super) fn read(env: &dyn Environment) -> Result<Self, Error> {
        Ok(Self {
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
            autotune: AutotuneSettings::from_environment(env)?,
        })
    }
}

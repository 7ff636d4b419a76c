//! The one reader of the environment: the launcher's own settings, and what the ranks get.

mod mpi;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use horovod_settings::{
    self as settings, Declaration, Environment, Number, ProcessEnvironment, Whole,
};

use horovod_transport::{JobKey, Ports};

use self::mpi::AGENTS_ADDRESSES;
pub(crate) use self::mpi::{
    OF_AGENTS, RANKS_OF_MPI, agent_of_mpi, controller_is_mpi, forwarded_to_mpi, is_in_lsf,
    of_agents, rank_of_mpi,
};
use crate::frames::Variables;
use crate::hosts::{Host, HostSlot};

/// Set by a launcher for its own job; never handed down from an outer one.
pub(crate) const IDENTITY: &[&str] = &[
    settings::RANK.name,
    settings::SIZE.name,
    settings::LOCAL_RANK.name,
    LOCAL_SIZE,
    settings::CROSS_RANK.name,
    settings::CROSS_SIZE.name,
    settings::HOSTNAME.name,
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    settings::RENDEZVOUS.name,
    settings::AGENT_SOCKET.name,
    settings::JOB_KEY.name,
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    settings::ELASTIC.name,
    settings::ELASTIC_WORKER.name,
    "_HOROVOD_SECRET_KEY",
    PARENT_WATCH,
    EVENTS,
    AGENTS_KEY,
    AGENTS_ADDRESSES,
    AGENTS_PYTHON,
    AGENTS_HOST,
];
/// Where rank 0 serves the rendezvous of a job that has no launcher.
pub(crate) const RANK0_ADDRESS: &str = settings::RANK0_ADDRESS.name;
/// Ranks on a rank's host.
pub(crate) const LOCAL_SIZE: &str = settings::LOCAL_SIZE.name;
/// Descriptor of a pipe that closes when the program that started this launcher has ended.
const PARENT_WATCH: &str = "HOROVODRUN_PARENT_WATCH_FD";
/// Descriptor to which the launcher writes events, for the program that started the launcher.
const EVENTS: &str = "HOROVODRUN_EVENTS_FD";
/// The key that agents which dial must have.
const AGENTS_KEY: &str = "HOROVODRUN_AGENTS_KEY";
/// Version of Python that they must have.
const AGENTS_PYTHON: &str = "HOROVODRUN_AGENTS_PYTHON";
/// Set to [`THIS_HOST`] where every agent that dials runs on this host.
const AGENTS_HOST: &str = "HOROVODRUN_AGENTS_HOST";
const THIS_HOST: &str = "this";
/// Prefix of variables that are set for the ranks without the prefix, whatever their executor sets.
const ON_TOP_PREFIX: &str = "HOROVODRUN_SET_";
/// Descriptor through which an agent has the launcher's standard input.
pub(crate) const STDIN: &str = "HOROVODRUN_STDIN_FD";

/// True of this machine, this login or this terminal only; not for other hosts.
const OF_THIS_HOST: &[&str] = &[
    "_",
    "COLUMNS",
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "HOST",
    "HOSTNAME",
    "LINES",
    "OLDPWD",
    "PWD",
    "SHLVL",
    "STY",
    "TMUX",
    "TMUX_PANE",
    "WAYLAND_DISPLAY",
    "WINDOWID",
    "XAUTHORITY",
];
const OF_THIS_HOST_PREFIXES: &[&str] = &["BASH_FUNC_", "SSH_", "XDG_", "VSCODE_"];

/// Seconds from `HOROVOD_START_TIMEOUT`; 0 and nonsense count as not set.
pub(crate) fn start_timeout() -> Option<u32> {
    seconds("HOROVOD_START_TIMEOUT").filter(|seconds| *seconds > 0)
}

/// Seconds from `HOROVOD_TERMINATE_TIMEOUT`; nonsense counts as not set.
pub(crate) fn terminate_timeout() -> Option<u32> {
    seconds("HOROVOD_TERMINATE_TIMEOUT")
}

#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
fn seconds(name: &str) -> Option<u32> {
    std::env::var(name).ok()?.trim().parse().ok()
}

/// The heartbeat's time-out in whole seconds, rounded up, as the ranks understand it: the default if it is nonsense, which
/// the ranks refuse; `None` if nobody is to be given up.
pub(crate) fn heartbeat_s() -> Option<u32> {
    heartbeat_of(&ProcessEnvironment)
}

fn heartbeat_of(env: &dyn Environment) -> Option<u32> {
    let seconds = settings::HEARTBEAT_TIMEOUT_SECONDS.read_or_default(env);
    // At most a day.
    (seconds > 0.0).then_some(seconds.ceil() as u32)
}

/// Where listeners look for ports.
pub(crate) fn ports() -> Result<Ports, settings::Refused> {
    Ok(Ports::within(
        settings::PORT_RANGE.read(&ProcessEnvironment)?,
    ))
}

/// `HOROVOD_LOG_LEVEL`, empty if it is not set.
pub(crate) fn log_level() -> String {
    settings::text_of(&ProcessEnvironment, settings::LOG_LEVEL.name).unwrap_or_default()
}

/// Whether the terminal cannot move its cursor.
pub(crate) fn is_dumb_terminal() -> bool {
    settings::text_of(&ProcessEnvironment, "TERM").is_some_and(|name| name == "dumb")
}

/// Whether the user has not turned colours off (https://no-color.org).
pub(crate) fn wants_colours() -> bool {
    settings::text_of(&ProcessEnvironment, "NO_COLOR").is_none()
}

/// See [`crate::parent_watch`].
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn parent_watch() -> Option<u32> {
    std::env::var(PARENT_WATCH).ok()?.parse().ok()
}

/// See [`crate::dialed`].
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn agents_key() -> Option<String> {
    std::env::var(AGENTS_KEY).ok()
}

/// The key of agents on other hosts, that the user has made; the error never repeats it.
pub(crate) fn user_key() -> Result<JobKey, String> {
    let text = |name| settings::text_of(&ProcessEnvironment, name);
    let (key, file) = (settings::JOB_KEY.name, settings::JOB_KEY_FILE.name);
    if let Some(digits) = text(key) {
        return JobKey::from_hex(digits.trim())
            .ok_or_else(|| format!("{key} is not 64 hex digits (`openssl rand -hex 32`)"));
    }
    let path = text(file).ok_or_else(|| {
        format!(
            "neither {file} nor {key} is set: set {file} to a file with 64 hex digits (`openssl rand -hex 32`), the \
             same on all hosts"
        )
    })?;
    JobKey::from_file(Path::new(&path)).map_err(|why| format!("{file}={path}: {why}"))
}

/// See [`crate::dialed`].
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn agents_python() -> Option<String> {
    std::env::var(AGENTS_PYTHON).ok()
}

/// Whether every agent that dials runs on this host.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn agents_are_on_this_host() -> bool {
    std::env::var(AGENTS_HOST).is_ok_and(|text| text == THIS_HOST)
}

/// Variables with the highest precedence in the ranks of agents that dial.
pub(crate) fn on_top() -> Variables {
    let named = |(name, value): (OsString, OsString)| {
        let name = name.as_bytes().strip_prefix(ON_TOP_PREFIX.as_bytes())?;
        Some((OsStr::from_bytes(name).to_owned(), value))
    };
    std::env::vars_os().filter_map(named).collect()
}

/// See [`crate::events`].
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn events() -> Option<u32> {
    std::env::var(EVENTS).ok()?.parse().ok()
}

/// See [`crate::stdin`].
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn lent_stdin() -> Option<u32> {
    std::env::var(STDIN).ok()?.parse().ok()
}

/// The hostfile that Kubeflow's MPI operator leaves in its launcher's pod for `mpirun`.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn default_hostfile() -> Option<std::path::PathBuf> {
    std::env::var_os("OMPI_MCA_orte_default_hostfile").map(Into::into)
}

/// Files of settings that count where neither the command line nor `--config-file` nor a variable says anything: the
/// user's, which counts more, and the system's.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn config_files() -> Vec<std::path::PathBuf> {
    let folder = |name| std::env::var_os(name).map(std::path::PathBuf::from);
    let of_user = folder("XDG_CONFIG_HOME")
        .filter(|folder| folder.is_absolute())
        .or_else(|| Some(folder("HOME")?.join(".config")));
    let system = std::path::PathBuf::from("/etc");
    of_user
        .into_iter()
        .chain([system])
        .map(|folder| folder.join("horovod/config.yaml"))
        .collect()
}

/// Whether a variable is set, for settings that files give defaults for.
pub(crate) fn is_set(name: &str) -> bool {
    settings::text_of(&ProcessEnvironment, name).is_some()
}

/// Settings of the ranks by which the doctor judges hosts.
pub(crate) struct DataPlane {
    /// Bytes of shared memory of each rank.
    pub(crate) staging: u64,
    /// TCP connections between two ranks.
    pub(crate) connections: u32,
    /// First and last port on which ranks listen; `None`: any.
    pub(crate) ports: Option<(u16, u16)>,
    /// Data between hosts is encrypted.
    pub(crate) encrypt: bool,
}

/// From the launcher's environment, as ranks get it.
pub(crate) fn of_data_plane() -> DataPlane {
    let env = &ProcessEnvironment;
    DataPlane {
        staging: settings::SHM_BYTES_PER_RANK.read_or_default(env) as u64,
        connections: settings::CONNECTIONS_PER_PEER.read_or_default(env).into(),
        ports: settings::PORT_RANGE.read_or_default(env),
        encrypt: settings::ENCRYPT.read_or_default(env),
    }
}

/// A number of the launcher's own; 0, nonsense and what is too large count as not set.
fn positive<T: Number>(setting: &Declaration<Whole<T>>) -> u32 {
    let number = |value: T| {
        value
            .try_into()
            .ok()
            .and_then(|n: u64| u32::try_from(n).ok())
    };
    number(setting.read_or_default(&ProcessEnvironment))
        .filter(|n| *n > 0)
        .or_else(|| number(setting.kind.default))
        .unwrap_or(u32::MAX)
}

/// Seconds to wait for enough processes of an elastic job.
pub(crate) fn elastic_timeout() -> u32 {
    positive(&settings::ELASTIC_TIMEOUT)
}

/// Failures of one slot within a minute after which it rests.
pub(crate) fn elastic_slot_failures() -> u32 {
    positive(&settings::ELASTIC_SLOT_FAILURES)
}

/// Variables that steer the original's build and are set; here there is nothing to build.
pub(crate) fn build_variables() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut names: Vec<String> = names
        .filter(|name| settings::steers_a_build(name))
        .collect();
    names.sort();
    names
}

/// Where programs are searched.
#[expect(
    clippy::disallowed_methods,
    reason = "this is the launcher's environment module"
)]
pub(crate) fn path() -> OsString {
    std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into())
}

/// This machine's own name.
pub(crate) fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// The launcher's environment as ranks get it: everything on this host; elsewhere without what is true only
/// here, the choice of GPUs included.
pub(crate) fn forwarded(to_this_host: bool) -> Variables {
    std::env::vars_os()
        .filter(|(name, _)| is_forwarded(name, to_this_host))
        .collect()
}

fn is_forwarded(name: &OsStr, to_this_host: bool) -> bool {
    let bytes = name.as_bytes();
    if IDENTITY.iter().any(|own| own.as_bytes() == bytes)
        || bytes.starts_with(ON_TOP_PREFIX.as_bytes())
    {
        return false;
    }
    to_this_host
        || !(OF_THIS_HOST.iter().any(|own| own.as_bytes() == bytes)
            || OF_THIS_HOST_PREFIXES
                .iter()
                .any(|start| bytes.starts_with(start.as_bytes()))
            || name.to_string_lossy().contains("CUDA_VISIBLE_DEVICES"))
}

/// An agent's own environment, without its ssh session, overlaid with the launcher's.
pub(crate) fn lay_over_own(forwarded: &Variables) -> Variables {
    let own = std::env::vars_os()
        .filter(|(name, _)| !name.as_bytes().starts_with(b"SSH_") && is_forwarded(name, true));
    own.chain(forwarded.iter().cloned()).collect()
}

/// The launcher's environment, overlaid with an agent's own.
pub(crate) fn lay_own_over(mut forwarded: Variables) -> Variables {
    forwarded.extend(std::env::vars_os().filter(|(name, _)| is_forwarded(name, true)));
    forwarded
}

/// The settings that reach the ranks: the details of autotuning only when it is on.
fn acting<'a>(
    knobs: &'a [(&'static str, String)],
    autotune: bool,
) -> impl Iterator<Item = &'a (&'static str, String)> {
    let setting = knobs
        .iter()
        .find(|(name, _)| *name == settings::AUTOTUNE.name);
    let autotune = setting.map_or(autotune, |(_, value)| value == "1");
    let detail = |name: &str| name.starts_with("HOROVOD_AUTOTUNE_");
    knobs
        .iter()
        .filter(move |(name, _)| autotune || !detail(name))
}

/// Environment of every rank of the job; wins over forwarded variables.
pub(crate) fn of_job(
    rendezvous: &[std::net::SocketAddr],
    key: &str,
    interfaces: &[String],
    knobs: &[(&'static str, String)],
) -> Variables {
    let mut variables: Variables = Vec::new();
    let mut set = |name: &str, value: String| variables.push((name.into(), value.into()));
    let is_autotuned = settings::AUTOTUNE.read_or_default(&ProcessEnvironment);
    for (name, value) in acting(knobs, is_autotuned) {
        set(name, value.clone());
    }
    let candidates: Vec<String> = rendezvous.iter().map(ToString::to_string).collect();
    set(settings::RENDEZVOUS.name, candidates.join(","));
    // Programs that look at Horovod's own names find the first candidate there.
    let first = rendezvous.first();
    let first = first.map(|first| (first.ip().to_string(), first.port()));
    variables.extend(of_any_job(first, key, interfaces));
    variables
}

/// The same for a job without a launcher, whose rank 0 serves the rendezvous at this address and port.
pub(crate) fn of_job_at_rank_0(
    address: &str,
    port: u16,
    key: &str,
    interfaces: &[String],
) -> Variables {
    let bare = address.trim_start_matches('[').trim_end_matches(']');
    let place = match bare.contains(':') {
        true => format!("[{bare}]:{port}"),
        false => format!("{bare}:{port}"),
    };
    let mut variables: Variables = vec![(RANK0_ADDRESS.into(), place.into())];
    variables.extend(of_any_job(Some((bare.to_owned(), port)), key, interfaces));
    variables
}

fn of_any_job(first: Option<(String, u16)>, key: &str, interfaces: &[String]) -> Variables {
    let mut variables: Variables = Vec::new();
    let mut set = |name: &str, value: &str| variables.push((name.into(), value.into()));
    set("PYTHONUNBUFFERED", "1");
    set("HOROVOD_CONTROLLER", "gloo");
    set("HOROVOD_CPU_OPERATIONS", "gloo");
    set(settings::JOB_KEY.name, key);
    if let Some((address, port)) = first {
        set("HOROVOD_GLOO_RENDEZVOUS_ADDR", &address);
        set("HOROVOD_GLOO_RENDEZVOUS_PORT", &port.to_string());
    }
    if !interfaces.is_empty() {
        set(settings::GLOO_IFACE.name, &interfaces.join(","));
        set("NCCL_SOCKET_IFNAME", &interfaces.join(","));
    }
    variables
}

/// Environment of a worker of an elastic job. Its place is a guess, valid until init: each round gives the real one.
pub(crate) fn of_worker(
    host: &Host,
    worker: u32,
    local_rank: u32,
    rank: u32,
    size: u32,
    timeout_s: u64,
) -> Variables {
    let slot = HostSlot {
        rank,
        size: size.max(rank + 1),
        local_rank,
        local_size: host.slots.max(local_rank + 1),
        cross_rank: 0,
        cross_size: 1,
    };
    let mut variables = of_rank(host, slot);
    for (name, value) in [
        (settings::ELASTIC.name, "1".to_owned()),
        (settings::ELASTIC_WORKER.name, worker.to_string()),
        (settings::ELASTIC_TIMEOUT.name, timeout_s.to_string()),
    ] {
        variables.push((name.into(), value.into()));
    }
    variables
}

/// Where a rank tells its agent that it cannot reach the launcher.
pub(crate) fn of_post(name: &str) -> (OsString, OsString) {
    (settings::AGENT_SOCKET.name.into(), name.into())
}

/// Environment of this rank alone.
pub(crate) fn of_rank(host: &Host, slot: HostSlot) -> Variables {
    let numbers = [
        (settings::RANK.name, slot.rank),
        (settings::SIZE.name, slot.size),
        (settings::LOCAL_RANK.name, slot.local_rank),
        (LOCAL_SIZE, slot.local_size),
        (settings::CROSS_RANK.name, slot.cross_rank),
        (settings::CROSS_SIZE.name, slot.cross_size),
    ];
    let mut variables: Variables = numbers
        .iter()
        .map(|(name, value)| ((*name).into(), value.to_string().into()))
        .collect();
    variables.push((settings::HOSTNAME.name.into(), host.address().into()));
    variables
}

#[cfg(test)]
mod tests;

//! Jobs that `horovodrun` did not start: rank 0 serves the rendezvous in its own process, and all agree on where
//! it is and on the job's key.
//!
//! Nothing is guessed about trust. The key comes from the user, from a secret that the scheduler gives to this
//! job's ranks only, or through a file that only this user can read; without any of these init refuses.

mod file;
#[cfg(feature = "testing")]
pub(crate) mod harness;
mod launchers_store;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use horovod_transport::rendezvous::{Server, ServerConfig};
use horovod_transport::{
    Finder, Interrupt, JobKey, Ports, RendezvousPlace, loopback, resolve_interfaces,
};

use crate::config::{Config, Environment};
use crate::error::Error;

/// Exact value that [`Settings::unauthenticated`] must have.
const OPT_OUT: &str = "anybody-who-reaches-my-ports-may-join";
/// Constant that extends a scheduler's 128-bit secret to a key.
const SECRET_LABEL: &str = "686f726f766f642d72733a6a6f622d31";

/// The settings about all this.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `host:port` where rank 0 listens.
    pub rank0_address: Option<String>,
    /// A folder that all ranks see and only this user can write to.
    pub directory: Option<PathBuf>,
    /// A file with the key.
    pub key_file: Option<PathBuf>,
    /// The explicit wish to have no authentication.
    pub unauthenticated: Option<String>,
    /// Where this host's private files go.
    pub temporary: PathBuf,
}

/// How the ranks find rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Locator {
    /// It listens there.
    Address { host: String, port: u16 },
    /// It says so in a file, which also carries the key.
    File { path: PathBuf, on_this_host: bool },
    /// It says so in the launcher's key-value store, which also carries the key.
    Store(horovod_pmi::Found),
}

/// How this job meets.
#[derive(Debug)]
struct RendezvousPlan {
    locator: Locator,
    /// `None`: rank 0 makes one and leaves it in the file.
    key: Option<JobKey>,
    size: u32,
}

/// State kept between two inits of one process.
#[derive(Debug)]
pub(crate) struct Standing {
    locator: Locator,
    size: u32,
    /// Rank 0's.
    server: Option<Server>,
    /// Where they met last.
    last: Arc<Mutex<Option<RendezvousPlace>>>,
    has_met: bool,
}

/// How to reach the rendezvous; for rank 0 it runs from now on.
pub(crate) enum Rendezvous {
    /// Rank 0 listens there.
    Known(RendezvousPlace),
    /// Rank 0 is somewhere else.
    Sought(Finder),
}

impl Rendezvous {
    /// The place, if it is known; what finds it, if not.
    pub(crate) fn split(self) -> Result<(RendezvousPlace, Option<Finder>), Error> {
        match self {
            Self::Known(place) => Ok((place, None)),
            Self::Sought(finder) => {
                // Nobody has this key; the finder brings the right one.
                let key = JobKey::random().map_err(|e| Error::Init(e.to_string()))?;
                let addresses = Vec::new();
                Ok((RendezvousPlace { addresses, key }, Some(finder)))
            }
        }
    }
}

/// Prepares the rendezvous of a job without a launcher.
pub(crate) fn prepare(
    config: &Config,
    standing: &mut Option<Standing>,
    interrupt: Option<&Interrupt>,
) -> Result<Rendezvous, Error> {
    let plan = plan(config)?;
    // A process that was rank 0 of another list of ranks must not dial its own server.
    let is_same = |s: &Standing| {
        s.locator == plan.locator
            && s.size == plan.size
            && (config.ranks.rank == 0 || s.server.is_none())
    };
    if !standing.as_ref().is_some_and(is_same) {
        *standing = None;
    }
    if let Locator::Store(store) = &plan.locator {
        let place = over_store(&store.clone(), config, plan, standing, interrupt)?;
        return Ok(Rendezvous::Known(place));
    }
    if config.ranks.rank == 0 {
        return serve(config, plan, standing).map(Rendezvous::Known);
    }
    let kept = standing.get_or_insert_with(|| Standing {
        locator: plan.locator.clone(),
        size: plan.size,
        server: None,
        last: Arc::default(),
        has_met: false,
    });
    Ok(Rendezvous::Sought(finder(plan, Arc::clone(&kept.last))))
}

/// After an attempt to meet. When all have met nobody will look for the file any more; when they never have, the next
/// attempt begins anew, with another key.
pub(crate) fn settle(standing: &mut Option<Standing>, has_met: bool) {
    let Some(kept) = standing else { return };
    if let (Locator::File { path, .. }, Some(_)) = (&kept.locator, &kept.server)
        && (has_met || !kept.has_met)
    {
        file::remove(path);
    }
    kept.has_met |= has_met;
    if !kept.has_met {
        *standing = None;
    }
}

/// Rank 0's place by the launcher's store; what the ranks agreed on before, where they have met.
fn over_store(
    store: &horovod_pmi::Found,
    config: &Config,
    plan: RendezvousPlan,
    standing: &mut Option<Standing>,
    interrupt: Option<&Interrupt>,
) -> Result<RendezvousPlace, Error> {
    let known = standing.as_ref().filter(|kept| kept.has_met);
    let last = known.and_then(|kept| {
        kept.last
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    });
    if let Some(place) = last {
        return Ok(place);
    }
    let users_key = plan.key.clone();
    let (locator, size) = (plan.locator.clone(), plan.size);
    let offer = (config.ranks.rank == 0)
        .then(|| serve(config, plan, standing).map_err(|error| error.to_string()));
    let met = launchers_store::meet(store, config, users_key, offer, interrupt);
    if met.is_err() {
        // The next attempt begins anew: with another key, and a server of that key.
        settle(standing, false);
    }
    let place = met?;
    if config.ranks.rank != 0 {
        *standing = Some(Standing {
            locator,
            size,
            server: None,
            last: Arc::new(Mutex::new(Some(place.clone()))),
            has_met: false,
        });
    }
    Ok(place)
}

fn serve(
    config: &Config,
    plan: RendezvousPlan,
    standing: &mut Option<Standing>,
) -> Result<RendezvousPlace, Error> {
    let init = Error::Init;
    if let Some(Standing {
        server: Some(_),
        last,
        ..
    }) = standing
        && let Some(place) = last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    {
        return Ok(place);
    }
    let key = match plan.key {
        Some(key) => key,
        None => JobKey::random().map_err(|e| init(format!("no random numbers for a key: {e}")))?,
    };
    let (bind, ports) = listening_places(config, &plan.locator)?;
    let mut wanted = ServerConfig::new(bind, key.clone(), config.ranks.size);
    wanted.ports = ports;
    let server = Server::start(wanted).map_err(|e| {
        init(format!(
            "rank 0 cannot listen where the other ranks look for it: {e}; \
             HOROVOD_RANK0_ADDRESS=host:port names another place"
        ))
    })?;
    let mut addresses = server.addrs().to_vec();
    if let Locator::File { path, on_this_host } = &plan.locator {
        if !on_this_host {
            // To another host the loopback is itself.
            addresses.retain(|at| !at.ip().is_loopback());
        }
        file::write(path, *on_this_host, &addresses, &key).map_err(init)?;
        addresses = server.addrs().to_vec();
    }
    let place = RendezvousPlace { addresses, key };
    *standing = Some(Standing {
        locator: plan.locator,
        size: plan.size,
        server: Some(server),
        last: Arc::new(Mutex::new(Some(place.clone()))),
        has_met: false,
    });
    Ok(place)
}

/// The addresses and ports on which rank 0 listens.
fn listening_places(config: &Config, locator: &Locator) -> Result<(Vec<IpAddr>, Ports), Error> {
    let init = Error::Init;
    let interfaces = resolve_interfaces(&config.start.interfaces)
        .map_err(|e| init(format!("HOROVOD_GLOO_IFACE: {e}")))?;
    let ports = match locator {
        Locator::File {
            on_this_host: true, ..
        } => {
            let here =
                loopback().map_err(|e| init(format!("the loopback interface is down: {e}")))?;
            return Ok((vec![here], config.start.ports));
        }
        Locator::Address { port, .. } => Ports::One(*port),
        Locator::File { .. } | Locator::Store(_) => config.start.ports,
    };
    let all = vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let bind = if interfaces.is_empty() {
        all
    } else {
        interfaces
    };
    Ok((bind, ports))
}

fn finder(plan: RendezvousPlan, last: Arc<Mutex<Option<RendezvousPlace>>>) -> Finder {
    Finder::new(move || {
        let found = match &plan.locator {
            Locator::File { path, .. } => {
                file::read(path).map(|(addresses, key)| RendezvousPlace {
                    addresses,
                    key: plan.key.clone().unwrap_or(key),
                })
            }
            Locator::Address { host, port } => {
                let key = plan.key.clone().ok_or("there is no key")?;
                resolve(host, *port).map(|addresses| RendezvousPlace { addresses, key })
            }
            Locator::Store(_) => Err("the launcher's store is asked once".to_owned()),
        };
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        match found {
            Ok(place) => {
                *last = Some(place.clone());
                Ok(place)
            }
            // Rank 0 has removed its file after the first rendezvous, and is still there.
            Err(why) => last.clone().ok_or(why),
        }
    })
}

fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    match (host, port).to_socket_addrs() {
        Ok(found) => Ok(found.collect()),
        Err(e) => Err(format!(
            "the name {host} of rank 0's host does not resolve: {e}"
        )),
    }
}

/// Decides how to meet; the error says what to set. The launcher's store comes last, for it has other readers.
fn plan(config: &Config) -> Result<RendezvousPlan, Error> {
    let settings = &config.start.bootstrap;
    let is_named = settings.rank0_address.is_some() || settings.directory.is_some();
    plan_without_store(config).or_else(|error| match &config.start.store {
        // Its fences wait for all of the launcher's ranks.
        Some(store) if config.ranks.listed.is_none() && !is_named => Ok(RendezvousPlan {
            locator: Locator::Store(store.clone()),
            key: user_key(config)?,
            size: config.ranks.size,
        }),
        _ => Err(error),
    })
}

fn plan_without_store(config: &Config) -> Result<RendezvousPlan, Error> {
    let settings = &config.start.bootstrap;
    let started = config.start.started.as_ref();
    let user_key = user_key(config)?;
    let key = || -> Result<Option<JobKey>, Error> {
        if user_key.is_some() {
            return Ok(user_key.clone());
        }
        let secret = started
            .and_then(|s| s.secret.as_deref())
            .and_then(of_secret);
        Ok(secret.or(no_key(settings)?))
    };
    let with = |locator, key| RendezvousPlan {
        locator,
        key,
        size: config.ranks.size,
    };
    // The address and the scheduler's variables name the host of the launcher's rank 0.
    let listed = config.ranks.listed.as_deref();
    let begins_with_0 = listed.is_none_or(|ranks| ranks[0] == 0);
    if let Some(text) = &settings.rank0_address {
        if !begins_with_0 {
            return Err(Error::Init(format!(
                "init(comm={:?}): HOROVOD_RANK0_ADDRESS={text} names the launcher's rank 0, which is not the first of \
                 this list: set HOROVOD_RENDEZVOUS_DIR (a folder that all ranks share) instead",
                listed.unwrap_or_default()
            )));
        }
        let (host, port) = host_and_port(text)?;
        let Some(key) = key()? else {
            return Err(Error::Init(format!(
                "HOROVOD_RANK0_ADDRESS={text} says where the ranks meet, but they have no common key: {}",
                how_to_give_a_key()
            )));
        };
        return Ok(with(Locator::Address { host, port }, Some(key)));
    }
    if let Some(directory) = &settings.directory {
        let path = directory.join(file_name(config).unwrap_or_else(|| {
            let (size, mark) = (config.ranks.size, list_mark(config));
            format!("horovod-rendezvous-{size}{mark}")
        }));
        let locator = Locator::File {
            path,
            on_this_host: false,
        };
        return Ok(with(locator, user_key));
    }
    if let Some(started) = started {
        if started.one_host
            && let Some(name) = file_name(config)
        {
            let locator = Locator::File {
                path: private_folder(&settings.temporary).join(name),
                on_this_host: true,
            };
            return Ok(with(locator, user_key));
        }
        if let Some((host, port)) = started.rank0.clone()
            && begins_with_0
            && let Some(key) = key()?
        {
            return Ok(with(Locator::Address { host, port }, Some(key)));
        }
    }
    Err(Error::Init(cannot_meet(config)))
}

/// Whether the processes of a launcher's job have no safe way to meet here, and no setting says one. Then something else
/// that connects them already may help.
pub fn lacks_rendezvous(env: &dyn Environment) -> bool {
    // A wrong setting is an error of init.
    Config::from_environment(env).is_ok_and(|config| {
        let settings = &config.start.bootstrap;
        let is_named = settings.rank0_address.is_some() || settings.directory.is_some();
        let is_met_elsewhere = config.ranks.size == 1 || !config.start.rendezvous.is_empty();
        !is_named
            && !is_met_elsewhere
            && user_key(&config).is_ok()
            && plan_without_store(&config).is_err()
    })
}

/// Error text with the settings that the user must make.
fn cannot_meet(config: &Config) -> String {
    let by = config
        .start
        .started
        .as_ref()
        .map_or("no launcher", |s| s.by);
    let knows_rank0 = config
        .start
        .started
        .as_ref()
        .is_some_and(|s| s.rank0.is_some());
    let has_secret = config
        .start
        .started
        .as_ref()
        .and_then(|s| s.secret.as_deref())
        .and_then(of_secret)
        .is_some();
    let address = if knows_rank0 {
        String::new()
    } else {
        "HOROVOD_RANK0_ADDRESS=host:port (where rank 0 can listen)".to_owned()
    };
    let key = if has_secret {
        String::new()
    } else {
        how_to_give_a_key()
    };
    let without_settings = match &config.start.started {
        Some(started) if started.by == "Slurm" => {
            "Under `srun --mpi=pmix` or `--mpi=pmi2` nothing has to be set (`srun --mpi=list` lists what there is). "
        }
        Some(started) if started.starts_mpi => {
            "Where MPI connects them, import mpi4py.MPI before hvd.init(): then nothing has to be set. "
        }
        _ => "",
    };
    let and = if address.is_empty() || key.is_empty() {
        ""
    } else {
        ", and "
    };
    format!(
        "this is rank {} of {} started by {by}, and the ranks cannot find each other safely: set, on all of them, \
         either HOROVOD_RENDEZVOUS_DIR to a folder that all hosts share (rank 0 leaves its address and a fresh key \
         in a file there that only you can read), or {address}{and}{key}. {without_settings}`horovodrun` needs none of this. \
         HOROVOD_SIZE=1 makes every process train alone",
        config.ranks.rank, config.ranks.size
    )
}

fn how_to_give_a_key() -> String {
    "HOROVOD_JOB_KEY to 64 hex digits (`openssl rand -hex 32`), or HOROVOD_JOB_KEY_FILE to a file that holds them"
        .to_owned()
}

pub(crate) fn user_key(config: &Config) -> Result<Option<JobKey>, Error> {
    if let Some(text) = &config.start.job_key {
        return parse_key(text, "HOROVOD_JOB_KEY").map(Some);
    }
    let Some(path) = &config.start.bootstrap.key_file else {
        return Ok(None);
    };
    JobKey::from_file(path)
        .map(Some)
        .map_err(|why| Error::Init(format!("HOROVOD_JOB_KEY_FILE={}: {why}", path.display())))
}

/// Reads the key; the error does not repeat it.
pub(crate) fn parse_key(text: &str, what: &str) -> Result<JobKey, Error> {
    JobKey::from_hex(text.trim()).ok_or_else(|| {
        Error::Init(format!(
            "{what} is not 64 hex digits (`openssl rand -hex 32`)"
        ))
    })
}

/// The key that follows from a scheduler's secret; `None` if it is too short to be one.
fn of_secret(text: &str) -> Option<JobKey> {
    let digits: String = text
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(32)
        .collect();
    JobKey::from_hex(&format!("{digits}{SECRET_LABEL}"))
}

fn no_key(settings: &Settings) -> Result<Option<JobKey>, Error> {
    match settings.unauthenticated.as_deref() {
        None => Ok(None),
        Some(OPT_OUT) => {
            tracing::warn!(
                "HOROVOD_UNAUTHENTICATED_JOB is set: whoever reaches the ports of this job can join it, read its \
                 tensors and run code in its processes"
            );
            // A key that everybody knows.
            Ok(JobKey::from_hex(&"00".repeat(32)))
        }
        Some(other) => Err(Error::Init(format!(
            "HOROVOD_UNAUTHENTICATED_JOB={other:?}: to run without any authentication it must be {OPT_OUT:?}"
        ))),
    }
}

fn host_and_port(text: &str) -> Result<(String, u16), Error> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let port = port.parse().ok().filter(|port| *port > 0)?;
        (!host.is_empty()).then(|| (host.to_owned(), port))
    });
    parts.ok_or_else(|| {
        Error::Init(format!(
            "HOROVOD_RANK0_ADDRESS={text}: expected host:port, such as train-0.train:29600"
        ))
    })
}

/// A name that only this job has, on this host or in this folder; `None` if nothing tells jobs apart.
fn file_name(config: &Config) -> Option<String> {
    let started = config.start.started.as_ref()?;
    let mut parts = started.job.clone();
    parts.extend(started.ancestor.and_then(file::ancestor));
    if parts.is_empty() {
        return None;
    }
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = parts.join("_").chars().map(plain).take(150).collect();
    let by: String = started
        .by
        .chars()
        .filter(char::is_ascii_alphabetic)
        .take(12)
        .collect();
    let mark = list_mark(config);
    Some(format!("horovod-{by}-{name}-{}{mark}", config.ranks.size))
}

/// Tells jobs of one launcher apart that consist of different lists of its ranks: FNV-1a of the list.
fn list_mark(config: &Config) -> String {
    let Some(ranks) = &config.ranks.listed else {
        return String::new();
    };
    let bytes = ranks.iter().flat_map(|rank| rank.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("-of-{hash:016x}")
}

/// This user's own, made by rank 0.
fn private_folder(temporary: &Path) -> PathBuf {
    temporary.join(format!("horovod-{}", rustix::process::geteuid().as_raw()))
}

#[cfg(test)]
mod tests;

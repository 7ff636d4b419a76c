//! The one runtime of a process: init, re-init, shutdown; inert in forked children.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use horovod_collectives::SetLayout;
use horovod_metrics::Summary;
use horovod_pmi::OwnStep;
use horovod_protocol::{Leaving, Rank};
use horovod_transport::{
    ConnectError, Interrupt, Membership, Mesh, MeshConfig, RendezvousPlace, Topology, fork_epoch,
};

use crate::bootstrap::{self, Standing};
use crate::config::{self, Config, Members, ProcessEnvironment, SummaryWhen};
use crate::engine::{Engine, in_callback};
use crate::error::Error;
use crate::threads;

/// A job that was shorter is not summed up, unless the user has asked for it.
const SUMMARY_AFTER: Duration = Duration::from_secs(10);

/// Training state of a process of an elastic job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TrainingState {
    /// It has just been started.
    #[default]
    Nothing,
    /// That of its last commit; the other ranks' may be another one.
    Committed,
    /// The same as all other ranks of its round.
    Current,
}

/// State of one process. A forked child never touches its parent's (whose lock may be held by a thread
/// that does not exist in the child) but gets its own, empty one behind it.
#[derive(Default)]
struct Runtime {
    epoch: u32,
    /// Held for the long part of a start or a stop, so that there is one at a time.
    changing: Mutex<()>,
    /// The thread that starts the runtime: it may run code of the user meanwhile, a signal's handler.
    starter: Mutex<Option<ThreadId>>,
    /// That code has called `shutdown`.
    given_up: AtomicBool,
    /// Held for a moment only: queries must not wait for a start, they may come with the interpreter's lock.
    engine: Mutex<Option<Arc<Engine>>>,
    training_state: Mutex<TrainingState>,
    /// Figures of the rounds in which this process was rank 0; `None` if it is another rank now, or nothing is printed.
    summary: Mutex<Option<(Summary, SummaryWhen)>>,
    /// Of a job without a launcher; kept from one init to the next.
    standing: Mutex<Option<Standing>>,
    child: OnceLock<Box<Runtime>>,
}

impl Runtime {
    fn new() -> Self {
        Self {
            epoch: fork_epoch(),
            ..Self::default()
        }
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` where waiting would never end: a function that is called with a result, while another thread waits for all
    /// such calls to end.
    fn changing_unless_in_callback(&self) -> Option<MutexGuard<'_, ()>> {
        match self.changing.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) if in_callback() => None,
            Err(TryLockError::WouldBlock) => Some(self.changing()),
        }
    }

    fn starter(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.starter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the calling thread is amid `init`.
    fn is_starting_here(&self) -> bool {
        *self.starter() == Some(thread::current().id())
    }

    fn summary(&self) -> MutexGuard<'_, Option<(Summary, SummaryWhen)>> {
        self.summary.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Engine>>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A start under way; its end when dropped.
struct Starting<'a>(&'a Runtime);

impl<'a> Starting<'a> {
    fn begin(runtime: &'a Runtime) -> Self {
        runtime.given_up.store(false, Ordering::Relaxed);
        *runtime.starter() = Some(thread::current().id());
        Self(runtime)
    }

    /// An error once `shutdown` was called by code that this thread ran meanwhile.
    fn still_wanted(&self) -> Result<(), Error> {
        if !self.0.given_up.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(Error::Init(
            "hvd.shutdown() was called, by a signal handler, while hvd.init() was still connecting to the other \
             processes: init was given up. It may be called again."
                .into(),
        ))
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        *self.0.starter() = None;
    }
}

static RUNTIME: OnceLock<Runtime> = OnceLock::new();

fn runtime() -> &'static Runtime {
    let epoch = fork_epoch();
    let mut r = RUNTIME.get_or_init(Runtime::new);
    while r.epoch != epoch {
        r = r.child.get_or_init(|| Box::new(Runtime::new()));
    }
    r
}

/// Start the runtime with the settings of the environment; does nothing when it runs already.
/// Every rank of the job must call it; bounded by `HOROVOD_GLOO_TIMEOUT_SECONDS`.
pub fn init() -> Result<(), Error> {
    start(&Members::All, None)
}

/// As [`init`]; ends with [`Error::Interrupted`] as soon as the caller wants to leave.
pub fn init_interruptible(interrupt: Interrupt) -> Result<(), Error> {
    start(&Members::All, Some(interrupt))
}

/// As [`init_interruptible`], with the processes that the caller names: only they have to call it.
pub fn init_members(members: &Members, interrupt: Interrupt) -> Result<(), Error> {
    start(members, Some(interrupt))
}

fn start(members: &Members, interrupt: Option<Interrupt>) -> Result<(), Error> {
    if is_initialized() {
        return Ok(());
    }
    for name in config::unknown_settings(&ProcessEnvironment) {
        let meant = config::nearest_setting(&name);
        let meant = meant.map(|meant| format!(" (did you mean {meant}?)"));
        tracing::warn!(
            "{name} is set, but there is no setting of that name{}",
            meant.unwrap_or_default()
        );
    }
    let env = OwnStep::of(&ProcessEnvironment);
    start_with(Config::of_members(&env, members)?, interrupt)
}

/// As [`init`], with settings made by the caller.
pub fn init_with(config: Config) -> Result<(), Error> {
    start_with(config, None)
}

fn start_with(mut config: Config, interrupt: Option<Interrupt>) -> Result<(), Error> {
    let runtime = runtime();
    if runtime.is_starting_here() {
        return Err(Error::Init(
            "hvd.init() was called by a signal handler while hvd.init() was under way in the same thread: a \
             handler may call hvd.shutdown(), which gives the init up, or raise an exception."
                .into(),
        ));
    }
    let Some(_changing) = runtime.changing_unless_in_callback() else {
        return Err(Error::Init(
            "hvd.init() was called by a function that was called with a result, while hvd.shutdown() waits for its end"
                .into(),
        ));
    };
    if runtime.lock().is_some() {
        return Ok(());
    }
    let starting = Starting::begin(runtime);
    let interrupt = interrupt.map(|interrupt| {
        Interrupt::new(move || {
            interrupt.wants_to_leave() || runtime.given_up.load(Ordering::Relaxed)
        })
    });
    let training_state = *runtime
        .training_state
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let met = connect(&mut config, interrupt, &runtime.standing, training_state);
    starting.still_wanted()?;
    let mesh = met.map_err(|error| match (error, &config.start.job_array) {
        (Error::Init(text), Some(hint)) => Error::Init(format!("{text}{hint}")),
        (error, _) => error,
    })?;
    if let Some(assignment) = &mesh.assignment {
        config.take_assignment(assignment, mesh.topology.size);
    }
    config.algorithms.adopt(&mesh.settings)?;
    config.algorithms.check(memory_groups(&mesh.topology))?;
    let engine = Arc::new(Engine::start(config, mesh)?);
    *runtime.lock() = Some(engine);
    Ok(())
}

fn connect(
    config: &mut Config,
    interrupt: Option<Interrupt>,
    standing: &Mutex<Option<Standing>>,
    training_state: TrainingState,
) -> Result<Mesh, Error> {
    let has_launcher = !config.start.rendezvous.is_empty();
    if !has_launcher && config.ranks.size == 1 {
        return Mesh::solo().map_err(|e| Error::Init(e.to_string()));
    }
    let mut standing = standing.lock().unwrap_or_else(PoisonError::into_inner);
    let (place, finder) = if has_launcher {
        (launchers_place(config)?, None)
    } else {
        bootstrap::prepare(config, &mut standing, interrupt.as_ref())?.split()?
    };
    let mut mesh = MeshConfig::new(
        Rank(config.ranks.rank),
        config.ranks.size,
        place.key,
        place.addresses,
    );
    mesh.finder = finder;
    mesh.post.clone_from(&config.start.agent_socket);
    mesh.interrupt = interrupt;
    mesh.hostname = config.ranks.hostname.clone();
    mesh.interfaces = config.start.interfaces.clone();
    mesh.ports = config.start.ports;
    mesh.timeout = config.start.connect_timeout;
    mesh.shm = config.links.shm;
    mesh.staging = config.links.shm_bytes_per_rank;
    mesh.encrypt = config.links.encrypt;
    mesh.checksums = config.links.checksums;
    mesh.connections = config.algorithms.connections;
    mesh.congestion = config.links.congestion.clone();
    mesh.fan_out = config.negotiation.control_fan_out;
    mesh.heartbeat = config.membership.heartbeat;
    mesh.settings = config.algorithms.common();
    mesh.elastic = (has_launcher && config.membership.elastic).then_some(Membership {
        worker: config.membership.worker,
        training_state: training_state as u8,
        // The launcher gives up earlier; it may wait once more for who hangs in the former round.
        wait_timeout: 2 * config.membership.elastic_timeout + config.start.connect_timeout,
    });
    let met = horovod_transport::connect(&mesh);
    if !has_launcher {
        bootstrap::settle(&mut standing, met.is_ok());
    }
    let mesh = met.map_err(|error| match error {
        ConnectError::Interrupted { .. } => Error::Interrupted,
        ConnectError::Removed(_) => Error::Removed(error.to_string()),
        error => Error::Init(error.to_string()),
    })?;
    if !has_launcher || config.ranks.places_follow {
        // Schedulers tell this each in its own way, or not at all; who met knows it.
        let topology = &mesh.topology;
        (config.ranks.local_rank, config.ranks.local_size) =
            (topology.local_rank(), topology.local_size());
        (config.ranks.cross_rank, config.ranks.cross_size) =
            (topology.cross_rank(), topology.cross_size());
        if !config.threads_set {
            threads::advise(config.ranks.local_rank, config.ranks.local_size);
        }
    }
    Ok(mesh)
}

fn launchers_place(config: &Config) -> Result<RendezvousPlace, Error> {
    let Some(key) = bootstrap::user_key(config)? else {
        return Err(Error::Init(
            "HOROVOD_RENDEZVOUS is set but HOROVOD_JOB_KEY is not: start the job with horovodrun"
                .into(),
        ));
    };
    Ok(RendezvousPlace {
        addresses: config.start.rendezvous.clone(),
        key,
    })
}

/// How many groups of ranks share memory.
fn memory_groups(topology: &Topology) -> usize {
    let everyone: Vec<Rank> = topology.peers.iter().map(|peer| peer.rank).collect();
    SetLayout::new(topology, &everyone).hosts()
}

/// Whether init has succeeded and this process has not shut down since. Stays true after another rank
/// has ended the job. False in a forked child.
pub fn is_initialized() -> bool {
    runtime().lock().is_some()
}

/// Whether the launcher may change the members of this process's job; also before init.
pub fn is_elastic() -> bool {
    config::is_elastic(&ProcessEnvironment)
}

/// Tells what this process has of the training state, now and for later rounds of an elastic job.
pub fn hold_state(training_state: TrainingState) {
    let runtime = runtime();
    *runtime
        .training_state
        .lock()
        .unwrap_or_else(PoisonError::into_inner) = training_state;
    if let Some(engine) = runtime.lock().clone() {
        engine.hold_state(training_state);
    }
}

/// The running engine.
pub fn engine() -> Result<Arc<Engine>, Error> {
    runtime().lock().clone().ok_or(Error::NotInitialized)
}

/// The running engine, if that can be told without waiting; for log lines, which are also written during init.
pub fn try_engine() -> Option<Arc<Engine>> {
    runtime()
        .engine
        .try_lock()
        .ok()
        .and_then(|slot| slot.clone())
}

/// Transports of this machine: name and mechanism.
pub fn transports() -> Vec<(&'static str, &'static str)> {
    vec![
        ("shm", horovod_transport::MECHANISMS.shared_memory),
        (
            "tcp",
            "authenticated by Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s",
        ),
    ]
}

/// Stop the runtime of this process, and with it the job: operations that other ranks still wait for end
/// with an error that names this rank. Init may be called again afterwards. Called by the very thread that is amid
/// init (in a signal handler) it makes that init give up.
pub fn shutdown() {
    shutdown_because(Leaving::Asked);
}

/// As [`shutdown`], with the reason that other ranks are told.
pub fn shutdown_because(why: Leaving) {
    let runtime = runtime();
    if runtime.is_starting_here() {
        runtime.given_up.store(true, Ordering::Relaxed);
        return;
    }
    let Some(_changing) = runtime.changing_unless_in_callback() else {
        return;
    };
    let engine = runtime.lock().take();
    if let Some(engine) = engine {
        engine.shutdown_because(why);
        sum_up(&engine, &mut runtime.summary());
    }
}

/// Adds the last figures of an engine that has ended.
fn sum_up(engine: &Engine, so_far: &mut Option<(Summary, SummaryWhen)>) {
    let when = engine.config().observers.summary;
    let is_wanted = when != SummaryWhen::Never && engine.topology().rank == Rank(0);
    let last = engine.stats().filter(|_| is_wanted);
    *so_far = last.map(|round| {
        let mut summary = so_far
            .take()
            .map(|(summary, _)| summary)
            .unwrap_or_default();
        summary.add(&round);
        (summary, when)
    });
}

/// Takes the summary of the job, at the end of a process that was rank 0; `None` if there is nothing to say.
pub fn take_summary() -> Option<String> {
    let (summary, when) = runtime().summary().take()?;
    let is_always = when == SummaryWhen::Always;
    (is_always || summary.is_noteworthy(SUMMARY_AFTER)).then(|| summary.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_shutdown_and_init_again_in_one_process() {
        assert!(matches!(engine().map(|_| ()), Err(Error::NotInitialized)));
        for _ in 0..2 {
            init_with(Config::solo()).unwrap();
            init_with(Config::solo()).unwrap();
            assert!(is_initialized());
            assert_eq!(engine().unwrap().topology().size, 1);
            shutdown();
            assert!(!is_initialized());
            shutdown();
        }
    }
}

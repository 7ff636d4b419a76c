//! The engine of one generation: accepts submissions from any thread, negotiates with the peers, runs and completes.

pub(crate) mod accelerator;
mod allocation;
pub(crate) mod backend;
mod by_number;
mod callback_thread;
mod callers;
mod calls;
mod choices;
mod device_watch;
mod driver;
mod driver_lock;
mod handles;
mod inspection;
pub(crate) mod placement;
mod recording;
mod relay;
mod replicas;
mod round;
mod shutdown;
mod soft;
mod standing;
mod submit;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use horovod_metrics::{MeasuredOperation, Metrics, Publisher, Snapshot};
use horovod_protocol::{
    Device, EntryId, ExecItem, Leaving, Op, OperationTag, ProcessSetId, Rank, Request, Time,
    Worker, WorkerAction, WorkerConfig,
};
use horovod_timeline::{Stamp, Timeline, TimelineSetting};
use horovod_transport::{Mesh, Notifier, Topology};

use accelerator::{Accelerator, Accelerators};
use backend::Surroundings;
use by_number::ByNumber;
use callback_thread::CallbackThread;
use placement::LaunchEnd;

use crate::config::Config;
use crate::error::Error;
use crate::tensor::{Tensor, Tensors};

pub use allocation::{Allocated, Allocator};
pub use handles::{Callback, Handle, Kept, OpResult, Waited, WaitedFor, in_callback};
pub use soft::{SoftWait, Softly};
pub use submit::Submission;

/// How long `shutdown` waits until the other ranks have received it, before it closes the links.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// How long a wait for a device polls without a sleep, since most operations are short.
const DEVICE_SPIN: Duration = Duration::from_micros(50);
/// First sleep between two polls of a device, after that time; it doubles up to [`DEVICE_NAP_MAX`].
const DEVICE_NAP: Duration = Duration::from_micros(20);
const DEVICE_NAP_MAX: Duration = Duration::from_millis(1);

/// Error text of Horovod.
const NO_TIMELINE_TEXT: &str = "Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.";

/// A running engine. Shared by all frameworks of the process.
pub struct Engine {
    shared: Arc<EngineState>,
    driver_lock: Arc<driver_lock::DriverLock>,
    topology: Topology,
    config: Config,
    thread: Mutex<Option<JoinHandle<()>>>,
    callback_thread: CallbackThread,
    /// Publishes the job's figures, on rank 0.
    publisher: Mutex<Option<Publisher>>,
}

/// State that all threads access without the driver lock.
pub(crate) struct EngineState {
    state: Mutex<Negotiation>,
    handles: handles::Handles,
    notifier: Notifier,
    started: Instant,
    /// This is the only rank of the job.
    alone: bool,
    accelerators: Accelerators,
    engine_thread_state: driver_lock::EngineThreadState,
    shutdown: shutdown::Shutdown,
    round: round::Round,
    callers: callers::Callers,
    replicas: replicas::ReplicaReports,
    observers: Observers,
}

/// The trace and the figures of the job.
struct Observers {
    timeline: Arc<Timeline>,
    /// `None` if the job is not measured.
    metrics: Option<Arc<Metrics>>,
}

/// A call whose end is still to be recorded; the timeline stays open until then.
struct RecordedCall<'a>(&'a EngineState);

impl<'a> RecordedCall<'a> {
    fn begin(shared: &'a EngineState) -> Self {
        shared.callers.recorded_call_begins();
        Self(shared)
    }
}

impl Drop for RecordedCall<'_> {
    fn drop(&mut self) {
        self.0.callers.recorded_call_ends();
        self.0.notifier.notify();
    }
}

/// The negotiation state machine and the tensors that wait for it.
pub(crate) struct Negotiation {
    worker: Worker,
    /// Tensors of pending submissions, by [`EntryId`].
    entries: ByNumber<Entry>,
    /// Number of entries that have a ready event.
    with_event: usize,
    /// Numbers of calls without a name, by process set and prefix.
    unnamed: BTreeMap<ProcessSetId, Vec<(Box<str>, u64)>>,
    /// The last request; the next one is built in its memory. While [`Self::prestageable`] is set, it is that request.
    request: Request,
    /// A cached request that was not announced yet, if it is the only one.
    prestageable: Option<(EntryId, OperationTag)>,
}

impl Negotiation {
    fn new(worker: Worker) -> Self {
        Self {
            worker,
            entries: ByNumber::default(),
            with_event: 0,
            unnamed: BTreeMap::new(),
            request: Request {
                set: ProcessSetId::GLOBAL,
                name: String::new(),
                op: Op::Barrier,
                device: Device::Cpu,
                tensors: Vec::new(),
            },
            prestageable: None,
        }
    }

    fn poll_action(&mut self) -> Option<WorkerAction> {
        let action = self.worker.poll_action();
        if let Some(WorkerAction::Send(_)) = action {
            self.prestageable = None;
        }
        action
    }

    fn insert(&mut self, id: EntryId, entry: Entry) {
        self.with_event += usize::from(entry.has_event());
        self.entries.insert(id.0, entry);
    }

    fn remove(&mut self, id: EntryId) -> Option<Entry> {
        let entry = self.entries.remove(&id.0)?;
        if self.with_event > 0 {
            self.with_event -= usize::from(entry.has_event());
        }
        Some(entry)
    }

    fn remove_all(&mut self) -> ByNumber<Entry> {
        self.with_event = 0;
        std::mem::take(&mut self.entries)
    }

    /// Returns whether the data of all these tensors is ready, or why it never will be.
    fn poll_events(&mut self, items: &[ExecItem]) -> Result<bool, String> {
        for id in items.iter().filter_map(|item| item.entry) {
            if self.with_event == 0 {
                break;
            }
            let Some(entry) = self.entries.get_mut(&id.0).filter(|e| e.has_event()) else {
                continue;
            };
            if !entry.poll_events()? {
                return Ok(false);
            }
            self.with_event -= 1;
        }
        Ok(true)
    }
}

/// One pending submission.
pub struct Entry {
    tensors: Tensors,
    /// Alltoall: rows for each member.
    splits: Option<Vec<u64>>,
    submitted: Option<Stamp>,
    /// Allocator of the outputs; `None`: the engine allocates them.
    allocator: Option<Allocator>,
    /// Measures the wait of the framework, if the operation ends with a callback and the job is measured.
    _called_back: Option<MeasuredOperation>,
}

impl Entry {
    /// Returns the tensors, in the order of the submission.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn has_event(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.ready.is_some())
    }

    /// Returns whether the tensors' data is ready, or why it never will be.
    fn poll_events(&mut self) -> Result<bool, String> {
        for tensor in self.tensors.iter_mut() {
            if let Some(event) = &tensor.ready {
                if !event.is_ready()? {
                    return Ok(false);
                }
                tensor.ready = None;
            }
        }
        Ok(true)
    }
}

impl EngineState {
    fn new(config: &Config, mesh: &Mesh, accelerators: Accelerators) -> Self {
        let worker = Worker::new(WorkerConfig {
            rank: mesh.topology.rank,
            size: mesh.topology.size,
            generation: mesh.topology.generation,
        });
        let started = Instant::now();
        let timeline = Timeline::new(
            config.observers.timeline.as_ref(),
            config.observers.timeline_mark_cycles,
            &mesh.topology,
            started,
            mesh.waiter.notifier(),
        );
        Self {
            state: Mutex::new(Negotiation::new(worker)),
            handles: handles::Handles::default(),
            notifier: mesh.waiter.notifier(),
            started,
            alone: mesh.topology.size == 1,
            accelerators,
            engine_thread_state: driver_lock::EngineThreadState::new(),
            shutdown: shutdown::Shutdown::default(),
            round: round::Round::new(mesh.topology.generation, mesh.assignment.as_ref()),
            callers: callers::Callers::new(),
            replicas: replicas::ReplicaReports::default(),
            observers: Observers {
                timeline: Arc::new(timeline),
                metrics: config
                    .observers
                    .metrics
                    .then(|| Arc::new(Metrics::new(&mesh.topology, started))),
            },
        }
    }

    fn lock(&self) -> MutexGuard<'_, Negotiation> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether threads other than the engine's must release the driver lock, and not take it.
    fn wanted(&self) -> bool {
        self.engine_thread_state.is_wanted() || self.shutdown.is_requested()
    }

    fn now(&self) -> Time {
        Time(nanos(self.started.elapsed()))
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// Ends everything that still waits when the engine thread ends, in whatever way it ends.
struct FinalNotification(Arc<EngineState>);

impl Drop for FinalNotification {
    fn drop(&mut self) {
        let (hits, misses) = {
            let mut state = self.0.lock();
            let cache_use = state.worker.cache_use();
            // From here on no operation is accepted, because no thread would run it.
            state.worker.shutdown();
            cache_use
        };
        tracing::debug!("cache: {hits} operations were known, {misses} were described");
        self.0.shutdown.end();
        self.0.handles.fail_pending(&Error::Closed, |_| false);
        self.0.handles.close();
    }
}

impl Engine {
    /// Starts the engine on a connected mesh.
    pub fn start(config: Config, mesh: Mesh) -> Result<Self, Error> {
        let accelerators = backend::accelerators(&config);
        Self::start_with(config, mesh, accelerators)
    }

    /// As [`Self::start`], with these kinds of devices beside the host.
    ///
    /// # Errors
    /// Two accelerators serve one kind of device, or a thread cannot be started.
    pub fn start_with(
        config: Config,
        mesh: Mesh,
        accelerators: Vec<Arc<dyn Accelerator>>,
    ) -> Result<Self, Error> {
        let topology = mesh.topology.clone();
        let accelerators = Accelerators::new(accelerators)?;
        let backends = accelerators.backends(&Surroundings {
            config: &config,
            topology: &topology,
            notifier: mesh.waiter.notifier(),
        });
        choices::log(&config, &topology);
        let shared = Arc::new(EngineState::new(&config, &mesh, accelerators));
        if let Some(TimelineSetting::File(path)) = &config.observers.timeline {
            let mark_cycles = config.observers.timeline_mark_cycles;
            // The recording can start, because the setting arms the timeline.
            let _ = shared.observers.timeline.start(path, mark_cycles);
        }
        let metrics = shared.observers.metrics.as_ref();
        let publisher = metrics.filter(|_| topology.rank == Rank(0));
        let publisher = publisher.map(|metrics| {
            let tracer = Arc::new(recording::Traced(shared.observers.timeline.clone()));
            Publisher::start(&config.observers.publish, metrics, tracer)
        });
        let sleeper = mesh.waiter.sleeper();
        let driver = driver::Driver::new(&config, mesh, backends, shared.clone());
        let driver_lock = Arc::new(driver_lock::DriverLock::new(
            driver,
            sleeper,
            shared.clone(),
        ));
        let thread = std::thread::Builder::new()
            .name("horovod-engine".into())
            .spawn({
                let driver_lock = driver_lock.clone();
                move || driver_lock.run()
            })
            .map_err(|e| Error::Init(format!("cannot start the engine thread: {e}")))?;
        Ok(Self {
            shared,
            driver_lock,
            topology,
            config,
            thread: Mutex::new(Some(thread)),
            callback_thread: CallbackThread::default(),
            publisher: Mutex::new(publisher),
        })
    }

    /// Starts the callback thread, unless it was started before.
    fn start_callback_thread(&self) -> Result<(), Error> {
        if self.callback_thread.was_started() {
            return Ok(());
        }
        let driver_lock = self.driver_lock.clone();
        self.callback_thread
            .start(move || driver_lock.run_callbacks())
    }

    /// Returns the settings with which this engine was started.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the ranks and their hosts.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the version of the newest change of members that the launcher has announced in this round, and its kind;
    /// (0, 0) if none. The kind is the OR of 1 (removed) and 2 (added) over all announcements.
    pub fn host_updates(&self) -> (u64, u8) {
        self.shared.round.host_updates()
    }

    /// Returns whether some rank did not have the current training state when this round was formed.
    pub fn needs_sync(&self) -> bool {
        self.shared.round.needs_sync()
    }

    /// Reports to the launcher which training state this process has.
    pub(crate) fn hold_state(&self, state: crate::init::TrainingState) {
        self.shared.round.hold(state as u8);
        self.shared.notifier.notify();
    }

    /// Returns the handles of operations without a callback whose results no thread has taken, ascending.
    pub fn handles(&self) -> Vec<u64> {
        self.shared.handles.all()
    }

    /// Returns the handles of operations that have not ended and end with a callback, ascending.
    pub fn called_back(&self) -> Vec<u64> {
        let called_back = self.shared.handles.called_back();
        called_back.into_iter().map(|handle| handle.0).collect()
    }

    /// Notes that threads of a framework may compute and then call, as of [`Engine::as_guest`]. From then on stall
    /// reports count this rank as waiting only if it is idle, however its other threads wait.
    pub fn expect_guests(&self) {
        self.shared.callers.expect_guests();
    }

    /// Returns whether the operation of this handle has ended; `None` for an unknown or cleared handle.
    pub fn poll(&self, handle: Handle) -> Option<bool> {
        let ended = self.shared.handles.poll(handle);
        if ended == Some(false) {
            self.driver_lock.poll_once();
        }
        ended
    }

    /// Waits on the host until nothing is in flight on a device; operations that have not been launched are ignored.
    /// Returns `false` after `timeout`. Failures on a device after the end of their handle are reported here.
    ///
    /// # Errors
    /// The generation has ended; the error is the cause.
    pub fn wait_for_devices(&self, timeout: Duration) -> Result<bool, Error> {
        self.wait_on_host(timeout, || self.shared.accelerators.is_idle())
    }

    /// Waits on the host until an operation that was launched on a device has ended. Returns `false` after `timeout`.
    ///
    /// # Errors
    /// The operation has failed; the error is the cause of the generation's end.
    pub fn wait_for_launch(&self, end: &dyn LaunchEnd, timeout: Duration) -> Result<bool, Error> {
        let waited = self.wait_on_host(timeout, || {
            // The cause follows a failure. An execution that a device never completes is given up, and then no longer
            // in flight.
            let is_given_up = || self.shared.lock().worker.ended().is_some();
            end.ended_well() == Some(true) || self.shared.accelerators.is_idle() && is_given_up()
        });
        match end.ended_well() {
            // The operation ended before the failure of the generation.
            Some(true) => Ok(true),
            _ => waited,
        }
    }

    fn wait_on_host(&self, timeout: Duration, is_over: impl Fn() -> bool) -> Result<bool, Error> {
        let since = Instant::now();
        let mut nap = DEVICE_NAP;
        while !is_over() && !self.has_ended() {
            if since.elapsed() >= timeout {
                return Ok(false);
            }
            self.driver_lock.poll_once();
            if since.elapsed() < DEVICE_SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(nap);
                nap = (nap * 2).min(DEVICE_NAP_MAX);
            }
        }
        match self.shared.lock().worker.ended() {
            Some(error) => Err(error.clone().into()),
            None => Ok(true),
        }
    }

    /// Records a timeline of all ranks into this file, which is emptied first. Rank 0 decides for all: on other ranks
    /// nothing happens. A file that cannot be written causes an error in the log, not here.
    pub fn start_timeline(&self, path: &Path, mark_cycles: bool) -> Result<(), Error> {
        self.shared
            .observers
            .timeline
            .start(path, mark_cycles)
            .map_err(|_| Error::Invalid(NO_TIMELINE_TEXT.into()))
    }

    /// Ends the recording; on rank 0 the file then has everything recorded. Returns `false` if there was no recording.
    pub fn stop_timeline(&self) -> bool {
        self.shared.observers.timeline.stop()
    }

    /// Returns the figures of this rank, on rank 0 of all ranks; `None` if the job is not measured.
    pub fn stats(&self) -> Option<Snapshot> {
        let metrics = self.shared.observers.metrics.as_ref();
        metrics.map(|metrics| metrics.snapshot())
    }

    /// Counts a step that the script has ended.
    pub fn mark_step(&self) {
        if let Some(metrics) = &self.shared.observers.metrics {
            metrics.counters.step_ends();
        }
    }

    /// Adds the time that the script has waited for its input.
    pub fn mark_input(&self, lasted: Duration) {
        if let Some(metrics) = &self.shared.observers.metrics {
            metrics.counters.input_took(nanos(lasted));
        }
    }

    /// Returns the members of a set in ascending order; `None` if the set is not registered.
    pub fn members(&self, set: ProcessSetId) -> Option<Vec<Rank>> {
        self.shared.lock().worker.members(set).map(<[Rank]>::to_vec)
    }

    /// Returns how many rows of dimension 0 this rank receives in a reducescatter of `rows` among the members of a set.
    /// Returns `None` if this rank is not a member, or the set is not registered.
    pub fn scattered_rows(&self, set: ProcessSetId, rows: u64) -> Option<u64> {
        let state = self.shared.lock();
        let members = state.worker.members(set)?;
        let me = members.binary_search(&self.topology.rank).ok()?;
        let rows = usize::try_from(rows).ok()?;
        Some(backend::share_of(rows, me, members.len()) as u64)
    }

    /// Returns the ids of all registered sets, ascending.
    pub fn process_set_ids(&self) -> Vec<ProcessSetId> {
        self.shared
            .lock()
            .worker
            .process_sets()
            .map(|(id, _)| id)
            .collect()
    }

    /// Asks all ranks to stop, waits until they have received the request, ends the threads and closes the links.
    /// Operations that are still pending end with the shutdown error. May be called more than once.
    pub fn shutdown(&self) {
        self.shutdown_because(Leaving::Asked);
    }

    /// As [`Engine::shutdown`], with the reason that is sent to the other ranks.
    pub fn shutdown_because(&self, why: Leaving) {
        self.shared.lock().worker.shutdown_because(why);
        self.shared.shutdown.request();
        self.driver_lock.wake_engine();
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the engine thread ended by a panic");
        }
        // The callback thread ends only after the engine thread.
        self.callback_thread.join();
        let publisher = self.publisher.lock();
        publisher.unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Returns whether the engine's thread has left its loop.
    pub fn has_ended(&self) -> bool {
        self.shared.shutdown.has_ended()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

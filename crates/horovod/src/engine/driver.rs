//! The driver of a rank: makes progress on the control plane, runs executions in order, ends the generation when it
//! must.

mod ending;
mod flights;
mod inspect;
mod node;
mod pump;

use std::sync::Arc;
use std::time::{Duration, Instant};

use horovod_protocol::{Device, EntryId, Execution, LossCause, PeerLost};
use horovod_transport::{Aborted, Mesh};

use flights::Flight;
use pump::{ControlPlane, Pump};

use super::allocation::Allocation;
use super::backend::host::{Host, Operand, bytes_of_all};
use super::backend::{
    Backend, Capabilities, DeviceBackend, Failure, Outputs, Results, Start, Started,
};
use super::recording::{By, Recorded};
use super::{EngineState, Entry, nanos};
use crate::config::Config;
use crate::error::Error;

/// How long an ending engine tries to send what is queued.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes that the only rank of a job handles at most while it submits.
const ALONE_AT_ONCE_MAX: usize = 1 << 20;

/// Between two looks at what cannot begin yet: doubled with each, and at most.
const EVENT_NAP: Duration = Duration::from_micros(10);
const EVENT_NAP_MAX: Duration = Duration::from_millis(1);

/// Everything that it takes to make progress on this rank; one thread at a time has it.
pub(super) struct Driver {
    pump: Pump,
    host: Host,
    devices: Vec<DeviceBackend>,
    capabilities: Capabilities,
    /// Where the next results are put together.
    results: Results,
    /// Where the next job puts its tensors.
    spare: Vec<Option<Entry>>,
    /// The submission whose operand was pre-staged last.
    staged: Option<EntryId>,
    /// Begun, and broken off by a thread that had to leave, or waiting for memory; goes on before anything else.
    parked: Option<ExecutionTask>,
    /// A panic has passed through.
    broken: bool,
    /// When the engine's thread will look around even if nothing wakes it; as [`Time`].
    ///
    /// [`Time`]: horovod_protocol::Time
    engine_looks_at: u64,
    /// How often the next execution was not found ready in a row.
    looks_in_vain: u32,
}

/// One execution and the tensors of this rank.
struct ExecutionTask {
    execution: Execution,
    entries: Vec<Option<Entry>>,
    recorded: Option<Box<Recorded>>,
    memory: OutputMemory,
}

/// What became of the question for memory for outputs.
enum OutputMemory {
    NotAsked,
    Asked(Arc<Allocation>),
    Came(Outputs),
    /// There is none; why.
    Refused(String),
}

impl ExecutionTask {
    fn wants_memory(&self) -> bool {
        let mut entries = self.entries.iter().flatten();
        entries.any(|entry| entry.allocator.is_some())
    }
}

/// What is next in the total order.
enum Front {
    Nothing,
    /// It cannot begin yet: bytes of a tensor, or memory, are not there.
    Waits,
    /// It can be carried out now.
    Runs,
    /// It never can; why.
    Fails(String),
}

/// How the engine's thread goes on.
pub(super) enum Work {
    /// Nothing to do until something happens or this time has passed.
    Sleep(Duration),
    /// The engine has ended.
    Finished,
}

impl Driver {
    pub(super) fn new(
        config: &Config,
        mesh: Mesh,
        devices: Vec<DeviceBackend>,
        shared: Arc<EngineState>,
    ) -> Self {
        let Mesh {
            topology,
            tree,
            control,
            data,
            mut waiter,
            heartbeat,
            settings: _,
            assignment: _,
        } = mesh;
        // Beside the engine's thread its process computes.
        waiter.set_has_time(false);
        let host = Host::new(config, data, &topology);
        let plane = ControlPlane {
            topology,
            tree,
            control,
            heartbeat,
            waiter,
        };
        Self {
            host,
            devices,
            capabilities: Capabilities::default(),
            results: Results::new(),
            spare: Vec::new(),
            staged: None,
            pump: Pump::new(config, plane, shared),
            parked: None,
            broken: false,
            engine_looks_at: 0,
            looks_in_vain: 0,
        }
    }

    /// Whether ranks outnumber the cores of this host.
    pub(super) fn is_oversubscribed(&self) -> bool {
        self.pump.waiter.is_oversubscribed()
    }

    /// As the engine's own thread: carry out everything, until nothing is left that could be done now.
    pub(super) fn work(&mut self) -> Work {
        let mut announced = false;
        loop {
            if self.broken {
                return Work::Finished;
            }
            self.prestage();
            let progress = self.pump.progress();
            let front = self.front();
            if matches!(front, Front::Runs | Front::Fails(_))
                && let Some(task) = self.next_task()
            {
                self.pump.waiter.disarm();
                match front {
                    Front::Fails(cause) => self.give_up(task, Failure::Local(cause)),
                    _ => self.carry_out(task),
                }
                announced = false;
                continue;
            }
            if self.pump.finished() {
                return Work::Finished;
            }
            if announced && !progress && !self.pump.waiter.has_news() {
                let limit = self.sleep_limit();
                self.engine_looks_at = self.pump.shared.now().0.saturating_add(nanos(limit));
                return Work::Sleep(limit);
            }
            self.pump.waiter.arm();
            announced = true;
        }
    }

    /// As a thread that waits until `done`, at most until `deadline`: carry out what may pause. It `has_time` if nobody
    /// needs its core.
    pub(super) fn work_until(
        &mut self,
        deadline: Instant,
        has_time: bool,
        done: impl Fn() -> bool,
    ) {
        self.pump.waiter.disarm();
        self.pump.leave_by = Some(deadline);
        self.pump.waiter.set_has_time(has_time);
        self.prestage();
        let mut spins = 0;
        loop {
            let progress = self.pump.progress();
            let front = self.front();
            if matches!(front, Front::Runs) && self.next_may_pause() {
                let Some(task) = self.next_task() else { break };
                self.carry_out(task);
                spins = 0;
                // Broken off, or the work of others never ends: this thread has to leave.
                if self.parked.is_some() || done() || Instant::now() >= deadline {
                    break;
                }
                continue;
            }
            let is_for_engine = matches!(front, Front::Runs | Front::Fails(_));
            let is_over = self.pump.dead.is_some() && self.pump.flights.is_empty();
            if is_for_engine || is_over || self.pump.shared.wanted() {
                break;
            }
            if progress {
                spins = 0;
                if done() {
                    break;
                }
                continue;
            }
            if !self.pump.waiter.stays_awake(spins) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let sleep = left.min(self.sleep_limit());
                self.pump.waiter.falls_asleep(spins, Some(sleep));
            }
            spins = spins.saturating_add(1);
        }
        self.pump.leave_by = None;
        self.pump.waiter.set_has_time(false);
    }

    /// Say and hear what can be said and heard now. In a job of one rank, also carry out what is small: there
    /// is nobody to wait for.
    pub(super) fn poll_once(&mut self) {
        self.prestage();
        self.pump.progress();
        while self.pump.shared.alone && matches!(self.front(), Front::Runs) && self.next_is_small()
        {
            let Some(task) = self.next_task() else { break };
            self.carry_out(task);
            self.pump.progress();
        }
    }

    /// If a known request is about to be told of, and the only one: put its operand where the peers will look for it
    /// when it is decided to run it.
    fn prestage(&mut self) {
        let mut state = self.pump.shared.lock();
        let Some((id, tag)) = state.prestageable.take() else {
            return;
        };
        let (request, worker) = (&state.request, &state.worker);
        let before = self.staged.filter(|id| state.entries.contains_key(&id.0));
        let (Some(entry), Some(members), Device::Cpu, None) = (
            state.entries.get(&id.0),
            worker.members(request.set),
            request.device,
            before,
        ) else {
            return;
        };
        let ([tensor], false) = (&*entry.tensors, entry.has_event()) else {
            return;
        };
        let staged = self.host.prestage(&Operand {
            set: request.set,
            members,
            op: &request.op,
            tensor,
            tag,
            oversubscribed: self.pump.waiter.is_oversubscribed(),
        });
        if staged {
            self.staged = Some(id);
        }
    }

    /// What a thread does before it leaves the driver to itself; whether the engine's thread must come now.
    /// With `polling`, that thread looks again soon of its own accord.
    pub(super) fn leave(&mut self, polling: bool) -> bool {
        if !polling {
            loop {
                self.pump.waiter.arm();
                if !self.pump.progress() && !self.pump.waiter.has_news() {
                    break;
                }
            }
        }
        if self.broken || self.parked.is_some() || self.pump.shared.wanted() {
            return true;
        }
        match self.front() {
            Front::Nothing => {}
            Front::Runs => return !polling || !self.next_may_pause(),
            // Nobody else looks whether it can begin.
            Front::Waits | Front::Fails(_) => return true,
        }
        !polling
            && self
                .pump
                .deadline()
                .is_some_and(|at| at < self.engine_looks_at)
    }

    /// A bug of ours has shown itself: must not leave the callers waiting, nor the peers.
    pub(super) fn break_down(&mut self) {
        self.pump.running = None;
        self.parked = None;
        self.broken = true;
    }

    /// The end: tell the peers, close the links.
    pub(super) fn end(mut self) {
        if self.broken {
            self.pump.end_generation(&PeerLost {
                rank: self.pump.topology.rank,
                host: self.pump.host_of(self.pump.topology.rank),
                cause: LossCause::CannotGoOn(
                    "the engine panicked; please report this with the log above".into(),
                ),
            });
        }
        self.pump.await_flights();
        self.pump.control.goodbye(GOODBYE_TIMEOUT);
        self.pump.recording.close();
    }

    pub(super) fn has_task(&self) -> bool {
        self.parked.is_some() || !self.pump.ready.is_empty()
    }

    fn next(&self) -> Option<&Execution> {
        let parked = self.parked.as_ref().map(|task| &task.execution);
        parked.or(self.pump.ready.front())
    }

    fn next_is_small(&self) -> bool {
        self.next()
            .is_some_and(|e| bytes_of_all(e) <= ALONE_AT_ONCE_MAX)
    }

    /// Look whether what is next can begin.
    fn front(&mut self) -> Front {
        let front = self.look_at_front();
        self.looks_in_vain = match front {
            Front::Waits => self.looks_in_vain.saturating_add(1),
            _ => 0,
        };
        front
    }

    fn look_at_front(&mut self) -> Front {
        if let Some(task) = &mut self.parked {
            if let OutputMemory::Asked(allocation) = &task.memory
                && let Some(outcome) = allocation.poll()
            {
                task.memory = match outcome {
                    Ok(outputs) => OutputMemory::Came(outputs),
                    Err(why) => OutputMemory::Refused(why),
                };
            }
            return match &task.memory {
                // What has no future ends.
                OutputMemory::Asked(_) if self.pump.dead.is_none() => Front::Waits,
                OutputMemory::Refused(why) => Front::Fails(why.clone()),
                _ => Front::Runs,
            };
        }
        let Some(execution) = self.pump.ready.front() else {
            return Front::Nothing;
        };
        if self.pump.flights.is_full() {
            return Front::Waits;
        }
        if !self.pump.awaits_events {
            return Front::Runs;
        }
        match self.pump.shared.lock().poll_events(&execution.items) {
            Ok(true) => Front::Runs,
            Ok(false) => Front::Waits,
            Err(cause) => Front::Fails(cause),
        }
    }

    /// How long a thread may sleep if nothing wakes it. Nothing tells of an event that has passed, so what is next and
    /// cannot begin is looked at by the clock, less often each time.
    fn sleep_limit(&mut self) -> Duration {
        let limit = self.pump.sleep_limit();
        if self.looks_in_vain == 0 {
            return limit;
        }
        let doublings = self.looks_in_vain.min(16);
        limit.min((EVENT_NAP * (1 << doublings)).min(EVENT_NAP_MAX))
    }

    /// Whether a thread may carry out what is next that must be able to leave.
    fn next_may_pause(&mut self) -> bool {
        if let Some(task) = &self.parked {
            // What has waited for memory runs to its end.
            return matches!(task.memory, OutputMemory::NotAsked);
        }
        let Some(execution) = self.pump.ready.front() else {
            return false;
        };
        if execution.device != Device::Cpu {
            // It is only launched, but for the first one of a set, before which all members talk.
            return self.capabilities.of(execution).is_some();
        }
        self.host.catch_up(&mut self.pump.announced, execution.seq);
        self.host.may_pause(execution)
    }

    fn next_task(&mut self) -> Option<ExecutionTask> {
        if self.parked.is_some() {
            return self.parked.take();
        }
        let execution = self.pump.ready.pop_front()?;
        self.host.catch_up(&mut self.pump.announced, execution.seq);
        let mut entries = std::mem::take(&mut self.spare);
        self.pump.take_entries(&execution, &mut entries);
        let stages = self.host.stages();
        let recorded = self.pump.recording.begins(&execution, &entries, stages);
        self.pump.begins(&execution);
        Some(ExecutionTask {
            execution,
            entries,
            recorded,
            memory: OutputMemory::NotAsked,
        })
    }

    fn carry_out(&mut self, mut task: ExecutionTask) {
        self.pump.running = Some(task.execution.members.clone());
        let result = self.start(&mut task);
        if std::mem::take(&mut self.pump.broken_off) && result.is_err() {
            self.host.rewind();
            self.parked = Some(task);
            return;
        }
        match result {
            Ok(Outcome::Ended) => self.complete(task),
            Ok(Outcome::Asked(allocation)) => {
                task.memory = OutputMemory::Asked(allocation);
                self.parked = Some(task);
            }
            Ok(Outcome::InFlight(execution, backend)) => {
                self.pump.running = None;
                let runs = self.pump.runs.take();
                let flight = Flight {
                    task,
                    execution,
                    backend,
                    runs,
                };
                self.pump.flights.push(flight);
            }
            Err(failure) => self.give_up(task, failure),
        }
    }

    fn start(&mut self, task: &mut ExecutionTask) -> Result<Outcome, Failure> {
        if let Some(error) = &self.pump.dead {
            return Err(Failure::Aborted(Aborted(error.to_string().into())));
        }
        self.results.clear();
        let execution = &task.execution;
        let mut devices = self.devices.iter_mut();
        let device = devices.find(|(device, _)| *device == execution.device);
        let mut device = device.map(|(_, backend)| backend);
        if execution.device != Device::Cpu {
            let (capabilities, host) = (&mut self.capabilities, &mut self.host);
            if capabilities.of(execution).is_none() {
                capabilities.conclude(execution, host, device.as_deref_mut(), &mut self.pump)?;
            }
            if let Some(Err(why)) = capabilities.of(execution) {
                let refused = execution.items.iter().filter_map(|item| item.entry);
                let refused = refused.map(|id| (id, Err(Error::Invalid(why.clone()))));
                self.results.extend(refused);
                return Ok(Outcome::Ended);
            }
        }
        let wants_memory = task.wants_memory();
        let pool = self.pump.shared.pool.clone();
        let mut none = Outputs::new();
        let mut start = Start {
            execution,
            entries: &task.entries,
            outputs: match &mut task.memory {
                OutputMemory::Came(outputs) => outputs,
                _ => &mut none,
            },
            idle: &mut self.pump,
            pool: &pool,
            results: &mut self.results,
        };
        if wants_memory {
            let shapes = self.host.output_shapes(&mut start)?;
            let notifier = self.pump.shared.notifier.clone();
            let (allocation, call) = Allocation::of(&mut task.entries, shapes, notifier);
            self.pump.shared.handles.enqueue_callback(call);
            return Ok(Outcome::Asked(allocation));
        }
        let backend: &mut dyn Backend = match device {
            Some(backend) => backend.as_mut(),
            None => &mut self.host,
        };
        let name = backend.name();
        Ok(match backend.start(start)? {
            Started::Done => Outcome::Ended,
            Started::InFlight(execution) => Outcome::InFlight(execution, name),
        })
    }

    fn complete(&mut self, mut task: ExecutionTask) {
        self.let_go(&mut task);
        self.pump.running = None;
        self.pump.runs = None;
        if task.execution.device == Device::Cpu {
            let now = || self.pump.shared.now();
            let coordinator = self.pump.node.coordinator();
            self.host.observe(now, &task.execution, coordinator);
        }
        let by = By::Host(self.host.stages());
        self.pump.complete(task, &mut self.results, by);
    }

    fn give_up(&mut self, mut task: ExecutionTask, failure: Failure) {
        self.let_go(&mut task);
        let error = self.pump.failure(failure);
        self.pump.running = None;
        self.pump.runs = None;
        // Nothing of it touches the tensors any more.
        self.pump.fail_unused(&error);
    }

    /// Before anybody hears of the end: the owners may give back memory that is waited for.
    fn let_go(&mut self, task: &mut ExecutionTask) {
        task.entries.clear();
        self.spare = std::mem::take(&mut task.entries);
    }
}

/// How far a start has come.
enum Outcome {
    /// To the end: the results are in the driver's list.
    Ended,
    /// Memory was asked for.
    Asked(Arc<Allocation>),
    /// It goes on by itself, in a backend of this name.
    InFlight(Box<dyn super::backend::InFlight>, &'static str),
}

#[cfg(test)]
mod tests;

//! Executions, carried out in the order that was agreed on: what is next, whether it can begin, how it runs and ends.

use std::sync::Arc;

use horovod_metrics::MeasuredOperation;
use horovod_protocol::{Device, Execution, Op, Shape};
use horovod_transport::Aborted;

use super::Driver;
use super::on_device::DeviceExecution;
use super::pump::Pump;
use crate::engine::Entry;
use crate::engine::allocation::Allocation;
use crate::engine::backend::host::{Operand, bytes_of_all};
use crate::engine::backend::{
    AdasumScope, Backend, Failure, InFlight, Outputs, Results, Route, StageIn, Staged, Start,
    Started,
};
use crate::engine::handles::Handle;
use crate::engine::recording::{By, Recorded, output_shapes};
use crate::error::Error;

/// Bytes that the only rank of a job handles at most while it submits.
const ALONE_AT_ONCE_MAX: usize = 1 << 20;

/// One execution and the tensors of this rank.
pub(super) struct ExecutionTask {
    pub(super) execution: Execution,
    pub(super) entries: Vec<Option<Entry>>,
    pub(super) recorded: Option<Box<Recorded>>,
    /// If it is measured.
    pub(super) measured: Option<MeasuredOperation>,
    pub(super) memory: OutputMemory,
    pub(super) staging: Staging,
    /// As in [`Start`].
    pub(super) received: Vec<Vec<usize>>,
}

/// State of the request for output memory.
pub(super) enum OutputMemory {
    NotAsked,
    Asked(Arc<Allocation>),
    Came(Outputs),
    /// There is none; why.
    Refused(String),
}

impl OutputMemory {
    /// The memory that came, else `none`.
    fn outputs<'a>(&'a mut self, none: &'a mut Outputs) -> &'a mut Outputs {
        match self {
            Self::Came(outputs) => outputs,
            _ => none,
        }
    }
}

/// How far the tensors of an execution that goes through host memory have come there.
pub(super) enum Staging {
    NotBegun,
    Copies(Box<dyn StageIn>),
    /// Entries with the copies in place of the tensors.
    Ended(Vec<Option<Entry>>),
    Failed(Failure),
}

impl ExecutionTask {
    /// Shapes of its outputs, if they are recorded.
    pub(super) fn output_shapes(&self, results: &Results) -> Vec<Vec<Shape>> {
        match self.recorded {
            Some(_) => output_shapes(&self.execution, results),
            None => Vec::new(),
        }
    }

    /// Whether it can go on, if it waits for something.
    fn poll(&mut self, is_dead: bool) -> NextExecution {
        if let OutputMemory::Asked(allocation) = &self.memory
            && let Some(outcome) = allocation.poll()
        {
            self.memory = match outcome {
                Ok(outputs) => OutputMemory::Came(outputs),
                Err(why) => OutputMemory::Refused(why),
            };
        }
        // Never start an execution of a generation that is ending: its tensors are about to be released.
        if let Staging::Copies(copies) = &mut self.staging
            && !is_dead
            && let Some(outcome) = copies.poll()
        {
            if let (Some(recorded), Some(stage)) = (&mut self.recorded, copies.stage()) {
                recorded.on_device(stage);
            }
            self.staging = match outcome {
                Ok(entries) => Staging::Ended(entries),
                Err(why) => Staging::Failed(why),
            };
        }
        match (&self.memory, &self.staging) {
            (OutputMemory::Refused(why), _) => NextExecution::Fails(Failure::Local(why.clone())),
            (_, Staging::Failed(failure)) => NextExecution::Fails(failure.clone()),
            // An execution of a generation that is ending is not waited for.
            (OutputMemory::Asked(_), _) | (_, Staging::Copies(_)) if !is_dead => {
                NextExecution::Waits
            }
            _ => NextExecution::Runs,
        }
    }

    fn wants_memory(&self) -> bool {
        let mut entries = self.entries.iter().flatten();
        entries.any(|entry| entry.allocator.is_some())
    }
}

/// State of the next execution in the total order.
pub(super) enum NextExecution {
    Nothing,
    /// It cannot begin yet: bytes of a tensor, or memory, are not there.
    Waits,
    /// It can be carried out now.
    Runs,
    /// It never can; why.
    Fails(Failure),
}

impl Driver {
    /// Look whether what is next can begin.
    pub(super) fn next_execution(&mut self) -> NextExecution {
        let next_execution = self.poll_next();
        self.idle_polls = match next_execution {
            NextExecution::Waits => self.idle_polls.saturating_add(1),
            _ => 0,
        };
        next_execution
    }

    fn poll_next(&mut self) -> NextExecution {
        if let Some(task) = &mut self.suspended {
            return task.poll(self.pump.membership.is_over());
        }
        self.forget_removed_sets();
        let Some(execution) = self.pump.queue.front() else {
            return NextExecution::Nothing;
        };
        if self.pump.on_device.is_full() {
            return NextExecution::Waits;
        }
        if !self.pump.queue.has_ready_events() {
            return NextExecution::Runs;
        }
        match self.pump.shared.lock().poll_events(&execution.items) {
            Ok(true) => NextExecution::Runs,
            Ok(false) => NextExecution::Waits,
            Err(cause) => NextExecution::Fails(Failure::Local(cause)),
        }
    }

    /// Forgets the agreement of a removed set's members, at the removal's place in the order. That place is the same on
    /// every rank: later members under the set's id are others, or agree anew.
    fn forget_removed_sets(&mut self) {
        while let Some(set) = self.pump.queue.next_removed_set() {
            self.capabilities.forget(set);
            for (_, backend) in &mut self.devices {
                backend.forget(set);
            }
        }
    }

    /// Whether a thread may carry out what is next that must be able to leave.
    pub(super) fn next_may_pause(&mut self) -> bool {
        if let Some(task) = &self.suspended {
            // An execution that has waited for memory, or for copies of its tensors, runs to its end.
            return matches!(task.memory, OutputMemory::NotAsked)
                && matches!(task.staging, Staging::NotBegun);
        }
        let Some((execution, announced)) = self.pump.queue.next_with_numbers() else {
            return false;
        };
        if execution.device != Device::Cpu {
            // It is only launched, except where the members first exchange bytes through the host, which must run to
            // its end: before the first one of a set, and before each alltoall (how many rows come).
            let mut devices = self.devices.iter();
            let backend = devices.find(|(device, _)| *device == execution.device);
            return !matches!(execution.op, Op::Alltoall)
                && self.capabilities.of(execution).is_some()
                && !backend.is_some_and(|(_, b)| matches!(b.route(execution), Route::Staged(_)));
        }
        self.host.catch_up(announced, execution.seq);
        self.host.may_pause(execution)
    }

    pub(super) fn next_task(&mut self) -> Option<ExecutionTask> {
        if self.suspended.is_some() {
            return self.suspended.take();
        }
        let execution = self.pump.queue.pop()?;
        self.host
            .catch_up(self.pump.queue.announced(), execution.seq);
        let mut entries = std::mem::take(&mut self.spare);
        self.pump.take_entries(&execution, &mut entries);
        let stages = self.host.stages();
        let recorded = self.pump.recording.begins(&execution, &entries, stages);
        self.pump.begins(&execution);
        let measured = self.pump.measure_begin();
        Some(ExecutionTask {
            execution,
            entries,
            recorded,
            measured,
            memory: OutputMemory::NotAsked,
            staging: Staging::NotBegun,
            received: Vec::new(),
        })
    }

    pub(super) fn carry_out(&mut self, mut task: ExecutionTask) {
        self.pump.queue.runs(task.execution.members.clone());
        let result = self.start(&mut task);
        if self.pump.interruption.take() && result.is_err() {
            self.host.rewind();
            self.suspended = Some(task);
            return;
        }
        match result {
            Ok(Outcome::Ended) => self.complete(task),
            Ok(Outcome::Asked(allocation)) => {
                task.memory = OutputMemory::Asked(allocation);
                self.suspended = Some(task);
            }
            Ok(Outcome::Copies(copies)) => {
                task.staging = Staging::Copies(copies);
                self.suspended = Some(task);
            }
            Ok(Outcome::InFlight(execution, backend)) => {
                self.pump.queue.ended();
                let launched = DeviceExecution {
                    task,
                    execution,
                    backend,
                    output_shapes: None,
                };
                self.pump.on_device.push(launched);
                self.pump.publish_in_flight();
            }
            Err(failure) => self.give_up(task, failure),
        }
    }

    fn start(&mut self, task: &mut ExecutionTask) -> Result<Outcome, Failure> {
        if let Some(error) = self.pump.membership.cause() {
            return Err(Failure::Aborted(Aborted(error.to_string().into())));
        }
        self.results.clear();
        let mut devices = self.devices.iter();
        let device = devices.position(|(device, _)| *device == task.execution.device);
        match (self.settle(task, device)?, device) {
            (Route::Refused(why), _) => {
                let items = task.execution.items.iter();
                let refused = items.filter_map(|item| item.entry);
                let refused = refused.map(|id| (id, Err(Error::Invalid(why.clone()))));
                self.results.extend(refused);
                Ok(Outcome::Ended)
            }
            (Route::Staged(_), Some(_)) if task.wants_memory() => self.ask_for_memory(task, false),
            (Route::Staged(adasum), Some(device)) => self.start_staged(task, device, adasum),
            _ if task.wants_memory() => self.ask_for_memory(task, device.is_some()),
            _ => self.start_on(task, device),
        }
    }

    /// Has the members of a set agree once on how they use a device. Returns the route of this execution.
    fn settle(&mut self, task: &ExecutionTask, device: Option<usize>) -> Result<Route, Failure> {
        let execution = &task.execution;
        if execution.device == Device::Cpu {
            return Ok(Route::Native);
        }
        let mut backend = device.map(|device| &mut self.devices[device].1);
        let (capabilities, host) = (&mut self.capabilities, &mut self.host);
        if capabilities.of(execution).is_none() {
            capabilities.conclude(execution, host, backend.as_deref_mut(), &mut self.pump)?;
            // Its exchange is no part of the operation.
            host.stages().record(task.recorded.is_some());
        }
        Ok(match (capabilities.of(execution), backend) {
            (Some(Err(why)), _) => Route::Refused(why.clone()),
            (_, Some(backend)) => backend.route(execution),
            (_, None) => Route::Native,
        })
    }

    /// Through host memory: copies to there, the host's backend, copies back.
    fn start_staged(
        &mut self,
        task: &mut ExecutionTask,
        device: usize,
        adasum: AdasumScope,
    ) -> Result<Outcome, Failure> {
        let (execution, timed) = (&task.execution, task.recorded.is_some());
        let backend = &mut self.devices[device].1;
        let mut none = Outputs::new();
        let outputs = task.memory.outputs(&mut none);
        let Staging::Ended(staged) = std::mem::replace(&mut task.staging, Staging::NotBegun) else {
            return Ok(Outcome::Copies(backend.stage_in(
                execution,
                &task.entries,
                outputs,
                timed,
            )?));
        };
        self.host.start(Start {
            execution,
            entries: &staged,
            outputs: &mut Outputs::new(),
            received: Vec::new(),
            adasum,
            idle: &mut self.pump,
            pool: &self.pool,
            timed: false,
            results: &mut self.results,
        })?;
        if let Some(recorded) = &mut task.recorded {
            recorded.on_host(self.host.stages().recorded());
        }
        let started = backend.stage_out(Staged {
            execution,
            entries: &task.entries,
            staged,
            outputs,
            results: std::mem::take(&mut self.results),
            timed,
        })?;
        Ok(Outcome::of(started, backend.name()))
    }

    /// Asks the owner of its tensors for the memory of outputs whose size is known now. `is_elsewhere`: a device carries it
    /// out.
    fn ask_for_memory(
        &mut self,
        task: &mut ExecutionTask,
        is_elsewhere: bool,
    ) -> Result<Outcome, Failure> {
        let mut none = Outputs::new();
        let mut start = Start {
            execution: &task.execution,
            entries: &task.entries,
            outputs: task.memory.outputs(&mut none),
            received: std::mem::take(&mut task.received),
            adasum: AdasumScope::Ranks,
            idle: &mut self.pump,
            pool: &self.pool,
            timed: task.recorded.is_some(),
            results: &mut self.results,
        };
        let shapes = match task.execution.op {
            Op::Alltoall if is_elsewhere => {
                let received = self.host.received_elsewhere(&mut start)?;
                task.received = received.rows;
                received.shapes
            }
            _ => self.host.output_shapes(&mut start)?,
        };
        let notifier = self.pump.shared.notifier.clone();
        let (allocation, call) = Allocation::of(&mut task.entries, shapes, notifier);
        self.pump.shared.handles.enqueue_callback(call);
        Ok(Outcome::Asked(allocation))
    }

    /// In one go: by the host, or by a device.
    fn start_on(
        &mut self,
        task: &mut ExecutionTask,
        device: Option<usize>,
    ) -> Result<Outcome, Failure> {
        let mut none = Outputs::new();
        let mut start = Start {
            execution: &task.execution,
            entries: &task.entries,
            outputs: task.memory.outputs(&mut none),
            received: std::mem::take(&mut task.received),
            adasum: AdasumScope::Ranks,
            idle: &mut self.pump,
            pool: &self.pool,
            timed: task.recorded.is_some(),
            results: &mut self.results,
        };
        let is_alltoall = matches!(task.execution.op, Op::Alltoall);
        if device.is_some() && is_alltoall && start.received.is_empty() {
            start.received = self.host.received_elsewhere(&mut start)?.rows;
        }
        let backend: &mut dyn Backend = match device {
            Some(device) => self.devices[device].1.as_mut(),
            None => &mut self.host,
        };
        let name = backend.name();
        Ok(Outcome::of(backend.start(start)?, name))
    }

    fn complete(&mut self, mut task: ExecutionTask) {
        self.let_go(&mut task);
        self.pump.queue.ended();
        if task.execution.device == Device::Cpu {
            let now = || self.pump.shared.now();
            let coordinator = self.pump.node.coordinator();
            self.host.observe(now, &task.execution, coordinator);
        }
        let by = By::Host(self.host.stages());
        let shapes = task.output_shapes(&self.results);
        self.pump.complete(task, &mut self.results, shapes, by);
    }

    pub(super) fn give_up(&mut self, mut task: ExecutionTask, failure: Failure) {
        self.let_go(&mut task);
        let error = self.pump.failure(failure);
        self.pump.queue.ended();
        // Nothing of it touches the tensors any more.
        self.pump.fail_unused(&error);
    }

    /// Before anybody hears of the end: the owners may give back memory that is waited for.
    fn let_go(&mut self, task: &mut ExecutionTask) {
        task.entries.clear();
        self.spare = std::mem::take(&mut task.entries);
    }

    fn next(&self) -> Option<&Execution> {
        let suspended = self.suspended.as_ref().map(|task| &task.execution);
        suspended.or(self.pump.queue.front())
    }

    pub(super) fn next_is_small(&self) -> bool {
        self.next()
            .is_some_and(|e| bytes_of_all(e) <= ALONE_AT_ONCE_MAX)
    }

    /// If a known request is about to be told of, and the only one: put its operand where the peers will look for it
    /// when it is decided to run it.
    pub(super) fn prestage(&mut self) {
        if self.pump.shared.alone {
            return;
        }
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
            oversubscribed: self.pump.links.is_oversubscribed(),
        });
        if staged {
            self.staged = Some(id);
        }
    }
}

impl Pump {
    /// Tensors of the execution's items that this rank submitted, in item order.
    fn take_entries(&mut self, execution: &Execution, entries: &mut Vec<Option<Entry>>) {
        let mut state = self.shared.lock();
        let ids = execution.items.iter().map(|item| item.entry);
        entries.extend(ids.map(|id| state.remove(id?)));
    }

    /// It has ended, and its tensors are let go of.
    pub(super) fn complete(
        &mut self,
        task: ExecutionTask,
        results: &mut Results,
        output_shapes: Vec<Vec<Shape>>,
        by: By<'_>,
    ) {
        let ExecutionTask {
            execution,
            recorded,
            measured,
            ..
        } = task;
        drop(measured);
        self.measure_end(&execution);
        let now = || self.shared.now();
        // First: who learns of the end may stop the recording.
        self.recording
            .ends(recorded, now, &execution, output_shapes, by);
        let results = results.drain(..);
        self.shared
            .handles
            .complete(results.map(|(id, result)| (Handle(id.0), result)));
        self.shared.lock().worker.recycle(execution);
    }

    /// Every handle ends with this but those of executions that may still touch their tensors.
    pub(super) fn fail_unused(&self, error: &Error) {
        if !self.queue.is_running() {
            let in_use = |handle| self.on_device.uses(handle);
            self.shared.handles.fail_pending(error, in_use);
        }
    }
}

/// How far a start has come.
enum Outcome {
    /// To the end: the results are in the driver's list.
    Ended,
    /// Memory was asked for.
    Asked(Arc<Allocation>),
    /// Its tensors are copied into host memory.
    Copies(Box<dyn StageIn>),
    /// It goes on by itself, in a backend of this name.
    InFlight(Box<dyn InFlight>, &'static str),
}

impl Outcome {
    fn of(started: Started, backend: &'static str) -> Self {
        match started {
            Started::Done => Self::Ended,
            Started::InFlight(execution) => Self::InFlight(execution, backend),
        }
    }
}

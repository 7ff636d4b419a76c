//! Executions, carried out in the order that was agreed on: what is next, whether it can begin, how it runs and ends.

use std::sync::Arc;

use horovod_protocol::{Device, Execution, Op, ReduceOp, Shape};
use horovod_transport::Aborted;

use super::Driver;
use super::flights::Flight;
use super::pump::Pump;
use crate::engine::Entry;
use crate::engine::allocation::Allocation;
use crate::engine::backend::host::{Operand, bytes_of_all};
use crate::engine::backend::{
    AdasumScope, Backend, Failure, InFlight, Outputs, Results, StageIn, Staged, Start, Started,
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
    pub(super) memory: OutputMemory,
    pub(super) staging: Staging,
    /// As in [`Start`].
    pub(super) received: Vec<Vec<usize>>,
}

/// What became of the question for memory for outputs.
pub(super) enum OutputMemory {
    NotAsked,
    Asked(Arc<Allocation>),
    Came(Outputs),
    /// There is none; why.
    Refused(String),
}

/// How far the tensors of an execution that goes through host memory have come there.
pub(super) enum Staging {
    NotBegun,
    Copies(Box<dyn StageIn>),
    /// What stands for the entries.
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
    fn look(&mut self, is_dead: bool) -> Front {
        if let OutputMemory::Asked(allocation) = &self.memory
            && let Some(outcome) = allocation.poll()
        {
            self.memory = match outcome {
                Ok(outputs) => OutputMemory::Came(outputs),
                Err(why) => OutputMemory::Refused(why),
            };
        }
        // What has no future must not begin to read tensors that are given back soon.
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
            (OutputMemory::Refused(why), _) => Front::Fails(Failure::Local(why.clone())),
            (_, Staging::Failed(failure)) => Front::Fails(failure.clone()),
            // What has no future ends.
            (OutputMemory::Asked(_), _) | (_, Staging::Copies(_)) if !is_dead => Front::Waits,
            _ => Front::Runs,
        }
    }

    fn wants_memory(&self) -> bool {
        let mut entries = self.entries.iter().flatten();
        entries.any(|entry| entry.allocator.is_some())
    }
}

/// What is next in the total order.
pub(super) enum Front {
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
    pub(super) fn front(&mut self) -> Front {
        let front = self.look_at_front();
        self.looks_in_vain = match front {
            Front::Waits => self.looks_in_vain.saturating_add(1),
            _ => 0,
        };
        front
    }

    fn look_at_front(&mut self) -> Front {
        if let Some(task) = &mut self.parked {
            return task.look(self.pump.dead.is_some());
        }
        self.forget_removed_sets();
        let Some(execution) = self.pump.ready.front() else {
            return Front::Nothing;
        };
        if self.pump.flights.is_full() {
            return Front::Waits;
        }
        if !self.pump.has_ready_events {
            return Front::Runs;
        }
        match self.pump.shared.lock().poll_events(&execution.items) {
            Ok(true) => Front::Runs,
            Ok(false) => Front::Waits,
            Err(cause) => Front::Fails(Failure::Local(cause)),
        }
    }

    /// What the members of a removed set have agreed on ends at its place in the order: on every rank, for those who come
    /// under its id are others, or agree anew.
    fn forget_removed_sets(&mut self) {
        while let Some((after, set)) = self.pump.removed_sets.front() {
            let next = self.pump.ready.front().map(|execution| execution.seq);
            if after.is_some_and(|after| next.is_some_and(|next| next <= after)) {
                return;
            }
            self.capabilities.forget(*set);
            for (_, backend) in &mut self.devices {
                backend.forget(*set);
            }
            self.pump.removed_sets.pop_front();
        }
    }

    /// Whether a thread may carry out what is next that must be able to leave.
    pub(super) fn next_may_pause(&mut self) -> bool {
        if let Some(task) = &self.parked {
            // What has waited for memory, or for copies of its tensors, runs to its end.
            return matches!(task.memory, OutputMemory::NotAsked)
                && matches!(task.staging, Staging::NotBegun);
        }
        let Some(execution) = self.pump.ready.front() else {
            return false;
        };
        if execution.device != Device::Cpu {
            // It is only launched, but for the first one of a set, before which all members talk.
            let mut devices = self.devices.iter();
            let backend = devices.find(|(device, _)| *device == execution.device);
            return self.capabilities.of(execution).is_some()
                && !backend.is_some_and(|(_, backend)| backend.is_staged(execution));
        }
        self.host.catch_up(&mut self.pump.announced, execution.seq);
        self.host.may_pause(execution)
    }

    pub(super) fn next_task(&mut self) -> Option<ExecutionTask> {
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
            staging: Staging::NotBegun,
            received: Vec::new(),
        })
    }

    pub(super) fn carry_out(&mut self, mut task: ExecutionTask) {
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
            Ok(Outcome::Copies(copies)) => {
                task.staging = Staging::Copies(copies);
                self.parked = Some(task);
            }
            Ok(Outcome::InFlight(execution, backend)) => {
                self.pump.running = None;
                self.pump.runs = None;
                let flight = Flight {
                    task,
                    execution,
                    backend,
                    output_shapes: None,
                };
                self.pump.flights.push(flight);
                self.pump.tell_in_flight();
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
        let mut adasum = AdasumScope::Ranks;
        if execution.device != Device::Cpu {
            let (capabilities, host) = (&mut self.capabilities, &mut self.host);
            if capabilities.of(execution).is_none() {
                capabilities.conclude(execution, host, device.as_deref_mut(), &mut self.pump)?;
                // Its exchange is no part of the operation.
                host.stages().record(task.recorded.is_some());
            }
            let settled = capabilities.of(execution).cloned().unwrap_or(Ok(()));
            let scope = settled.and_then(|()| match (&execution.op, device.as_deref()) {
                (Op::Allreduce { op, .. }, Some(backend)) if *op == ReduceOp::Adasum => {
                    backend.adasum(execution)
                }
                _ => Ok(AdasumScope::Ranks),
            });
            match scope {
                Ok(scope) => adasum = scope,
                Err(why) => {
                    let refused = execution.items.iter().filter_map(|item| item.entry);
                    let refused = refused.map(|id| (id, Err(Error::Invalid(why.clone()))));
                    self.results.extend(refused);
                    return Ok(Outcome::Ended);
                }
            }
        }
        let wants_memory = task.wants_memory();
        let timed = task.recorded.is_some();
        let mut none = Outputs::new();
        let outputs = match &mut task.memory {
            OutputMemory::Came(outputs) => outputs,
            _ => &mut none,
        };
        if let Some(backend) = device
            .as_deref_mut()
            .filter(|b| b.is_staged(execution) && !wants_memory)
        {
            let Staging::Ended(staged) = std::mem::replace(&mut task.staging, Staging::NotBegun)
            else {
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
            let name = backend.name();
            return Ok(
                match backend.stage_out(Staged {
                    execution,
                    entries: &task.entries,
                    staged,
                    outputs,
                    results: std::mem::take(&mut self.results),
                    timed,
                })? {
                    Started::Done => Outcome::Ended,
                    Started::InFlight(execution) => Outcome::InFlight(execution, name),
                },
            );
        }
        let mut start = Start {
            execution,
            entries: &task.entries,
            outputs,
            received: std::mem::take(&mut task.received),
            adasum,
            idle: &mut self.pump,
            pool: &self.pool,
            timed,
            results: &mut self.results,
        };
        let is_elsewhere = device
            .as_deref()
            .is_some_and(|backend| !backend.is_staged(execution));
        if wants_memory {
            let shapes = match execution.op {
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
            return Ok(Outcome::Asked(allocation));
        }
        if is_elsewhere && matches!(execution.op, Op::Alltoall) && start.received.is_empty() {
            start.received = self.host.received_elsewhere(&mut start)?.rows;
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
        let shapes = task.output_shapes(&self.results);
        self.pump.complete(task, &mut self.results, shapes, by);
    }

    pub(super) fn give_up(&mut self, mut task: ExecutionTask, failure: Failure) {
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

    fn next(&self) -> Option<&Execution> {
        let parked = self.parked.as_ref().map(|task| &task.execution);
        parked.or(self.pump.ready.front())
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
            oversubscribed: self.pump.waiter.is_oversubscribed(),
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
            ..
        } = task;
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
        if self.running.is_none() {
            let in_use = |handle| self.flights.uses(handle);
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

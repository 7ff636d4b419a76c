//! The states of an execution, and the advance from each to the next.

use std::sync::Arc;

use horovod_metrics::MeasuredOperation;
use horovod_protocol::{Device, Execution, Op, Shape};
use horovod_transport::{Aborted, Idle};

use super::Driver;
use crate::buffer::BufferPool;
use crate::engine::Entry;
use crate::engine::allocation::Allocation;
use crate::engine::backend::{
    AdasumScope, Backend, Failure, InFlight, Outputs, Results, Route, StageIn, Staged, Start,
    Started,
};
use crate::engine::recording::{Recorded, output_shapes};
use crate::error::Error;

/// One execution and the tensors of this rank.
pub(super) struct ExecutionTask {
    pub(super) execution: Execution,
    pub(super) entries: Vec<Option<Entry>>,
    pub(super) recorded: Option<Box<Recorded>>,
    /// Measurement of the execution; `None` if the job is not measured.
    pub(super) measured: Option<MeasuredOperation>,
    /// Memory for the outputs, as in [`Start`]; empty until an allocator has returned it.
    pub(super) outputs: Outputs,
    /// Rows that this rank receives in an alltoall, as in [`Start`].
    pub(super) received: Vec<Vec<usize>>,
    pub(super) state: ExecutionState,
}

/// State of an execution that has begun; the variants are in the order in which the states occur. The last step
/// completes the execution, or leaves it in flight in a backend.
pub(super) enum ExecutionState {
    /// The members agree on the use of the device, and exchange how many rows each receives.
    Agree,
    /// The owner of the tensors allocates outputs.
    Allocate(ExecutionPath, Arc<Allocation>),
    /// A device copies the tensors into host memory.
    StageIn(StagingIn),
    /// A backend of the host or of a device runs the execution. The entries are the copies in host memory, which exist
    /// only on the path [`ExecutionPath::ThroughHost`].
    Run(ExecutionPath, Vec<Option<Entry>>),
    /// The device with this index copies the results from these entries to the outputs.
    StageOut(usize, Vec<Option<Entry>>),
}

/// The path on which all members run an execution. The `usize` is an index into the driver's devices.
#[derive(Clone, Copy)]
pub(super) enum ExecutionPath {
    OnHost,
    OnDevice(usize),
    /// The device copies the tensors to host memory, the host's backend runs, and the device copies the results back.
    ThroughHost(usize, AdasumScope),
}

/// Tensors on their way into host memory.
pub(super) struct StagingIn {
    pub(super) path: ExecutionPath,
    pub(super) copies: Box<dyn StageIn>,
    /// Result of the copies, once a poll has returned it.
    pub(super) outcome: Option<Result<Vec<Option<Entry>>, Failure>>,
}

/// Result of one step of an execution.
pub(super) enum Advance {
    /// The task is in its next state, whose step can be taken now.
    Continues,
    /// The task is in a state that waits for the owner of the tensors, or for a device.
    Waits,
    /// The execution has ended; its results are in the driver's list.
    Done,
    /// The execution continues in the backend of this name, without the driver.
    InFlight(Box<dyn InFlight>, &'static str),
}

impl Advance {
    fn of(started: Started, backend: &'static str) -> Self {
        match started {
            Started::Done => Self::Done,
            Started::InFlight(execution) => Self::InFlight(execution, backend),
        }
    }
}

impl ExecutionTask {
    /// Returns the shapes of the execution's outputs; empty if the execution is not recorded.
    pub(super) fn output_shapes(&self, results: &Results) -> Vec<Vec<Shape>> {
        match self.recorded {
            Some(_) => output_shapes(&self.execution, results),
            None => Vec::new(),
        }
    }

    /// Polls the work for which the state waits. Returns whether the next step can be taken.
    pub(super) fn poll(&mut self) -> bool {
        match &mut self.state {
            ExecutionState::Allocate(_, allocation) => allocation.has_ended(),
            ExecutionState::StageIn(staging) => {
                if staging.outcome.is_none() {
                    staging.outcome = staging.copies.poll();
                    let stage = staging.outcome.as_ref().and(staging.copies.stage());
                    if let (Some(recorded), Some(stage)) = (&mut self.recorded, stage) {
                        recorded.on_device(stage);
                    }
                }
                staging.outcome.is_some()
            }
            _ => true,
        }
    }

    /// Returns whether the execution can be suspended in its current state, and resumed without loss. An execution that
    /// has waited for outputs, or for copies of its tensors, cannot be suspended.
    pub(super) fn may_pause(&self) -> bool {
        let path = match self.state {
            ExecutionState::Run(path, _) => path,
            _ => return false,
        };
        !matches!(path, ExecutionPath::ThroughHost(..)) && self.outputs.is_empty()
    }

    fn wants_memory(&self) -> bool {
        let mut entries = self.entries.iter().flatten();
        entries.any(|entry| entry.allocator.is_some())
    }

    fn start<'a>(
        &'a mut self,
        idle: &'a mut dyn Idle,
        pool: &'a Arc<BufferPool>,
        results: &'a mut Results,
    ) -> Start<'a> {
        Start {
            execution: &self.execution,
            entries: &self.entries,
            outputs: &mut self.outputs,
            received: std::mem::take(&mut self.received),
            adasum: AdasumScope::Ranks,
            idle,
            pool,
            timed: self.recorded.is_some(),
            results,
        }
    }
}

impl Driver {
    /// Takes the step that follows from the state of `task`. After an interruption the same step can be taken again if
    /// the task [may pause](ExecutionTask::may_pause).
    pub(super) fn advance(&mut self, task: &mut ExecutionTask) -> Result<Advance, Failure> {
        if let Some(error) = self.pump.membership.cause() {
            return Err(Failure::Aborted(Aborted(error.to_string().into())));
        }
        match &mut task.state {
            ExecutionState::Agree => self.agree(task),
            ExecutionState::Allocate(path, allocation) => {
                let Some(outcome) = allocation.take() else {
                    return Ok(Advance::Waits);
                };
                let path = *path;
                task.outputs = outcome.map_err(Failure::Local)?;
                self.stage_in(task, path)
            }
            ExecutionState::StageIn(staging) => {
                let Some(outcome) = staging.outcome.take() else {
                    return Ok(Advance::Waits);
                };
                task.state = ExecutionState::Run(staging.path, outcome?);
                Ok(Advance::Continues)
            }
            ExecutionState::Run(ExecutionPath::ThroughHost(device, adasum), staged) => {
                let (device, adasum, staged) = (*device, *adasum, std::mem::take(staged));
                self.run_staged(task, adasum, &staged)?;
                task.state = ExecutionState::StageOut(device, staged);
                Ok(Advance::Continues)
            }
            ExecutionState::Run(path, _) => {
                let backend: &mut dyn Backend = match *path {
                    ExecutionPath::OnDevice(device) => self.devices[device].1.as_mut(),
                    _ => &mut self.host,
                };
                let name = backend.name();
                let start = task.start(&mut self.pump, &self.pool, &mut self.results);
                Ok(Advance::of(backend.start(start)?, name))
            }
            ExecutionState::StageOut(device, staged) => {
                let (device, staged) = (*device, std::mem::take(staged));
                self.stage_out(task, device, staged)
            }
        }
    }

    fn agree(&mut self, task: &mut ExecutionTask) -> Result<Advance, Failure> {
        let mut devices = self.devices.iter();
        let device = devices.position(|(device, _)| *device == task.execution.device);
        let path = match (self.settle(task, device)?, device) {
            (Route::Refused(why), _) => {
                let items = task.execution.items.iter();
                let refused = items.filter_map(|item| item.entry);
                let refused = refused.map(|id| (id, Err(Error::Invalid(why.clone()))));
                self.results.extend(refused);
                return Ok(Advance::Done);
            }
            (_, None) => ExecutionPath::OnHost,
            (Route::Native, Some(device)) => ExecutionPath::OnDevice(device),
            (Route::Staged(adasum), Some(device)) => ExecutionPath::ThroughHost(device, adasum),
        };
        let wants_memory = task.wants_memory();
        let mut start = task.start(&mut self.pump, &self.pool, &mut self.results);
        let shapes = match (path, &start.execution.op) {
            (ExecutionPath::OnDevice(_), Op::Alltoall) => {
                let received = self.host.received_elsewhere(&mut start)?;
                task.received = received.rows;
                received.shapes
            }
            _ if wants_memory => self.host.output_shapes(&mut start)?,
            _ => Vec::new(),
        };
        if !wants_memory {
            return self.stage_in(task, path);
        }
        let notifier = self.pump.shared.notifier.clone();
        let (allocation, call) = Allocation::of(&mut task.entries, shapes, notifier);
        self.pump.shared.handles.enqueue_callback(call);
        task.state = ExecutionState::Allocate(path, allocation);
        Ok(Advance::Waits)
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
            // The exchange of capabilities is not part of the operation: record its stages anew.
            host.stages().record(task.recorded.is_some());
        }
        Ok(match (capabilities.of(execution), backend) {
            (Some(Err(why)), _) => Route::Refused(why.clone()),
            (_, Some(backend)) => backend.route(execution),
            (_, None) => Route::Native,
        })
    }

    /// Starts the copies into host memory if the path leads through the host.
    fn stage_in(
        &mut self,
        task: &mut ExecutionTask,
        path: ExecutionPath,
    ) -> Result<Advance, Failure> {
        let ExecutionPath::ThroughHost(device, _) = path else {
            task.state = ExecutionState::Run(path, Vec::new());
            return Ok(Advance::Continues);
        };
        let (execution, timed) = (&task.execution, task.recorded.is_some());
        let backend = &mut self.devices[device].1;
        let copies = backend.stage_in(execution, &task.entries, &task.outputs, timed)?;
        let outcome = None;
        task.state = ExecutionState::StageIn(StagingIn {
            path,
            copies,
            outcome,
        });
        Ok(Advance::Waits)
    }

    /// Carries out an execution of a device's tensors on their copies in host memory.
    fn run_staged(
        &mut self,
        task: &mut ExecutionTask,
        adasum: AdasumScope,
        staged: &[Option<Entry>],
    ) -> Result<(), Failure> {
        self.host.start(Start {
            execution: &task.execution,
            entries: staged,
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
        Ok(())
    }

    fn stage_out(
        &mut self,
        task: &mut ExecutionTask,
        device: usize,
        staged: Vec<Option<Entry>>,
    ) -> Result<Advance, Failure> {
        let backend = &mut self.devices[device].1;
        let started = backend.stage_out(Staged {
            execution: &task.execution,
            entries: &task.entries,
            staged,
            outputs: &mut task.outputs,
            results: std::mem::take(&mut self.results),
            timed: task.recorded.is_some(),
        })?;
        Ok(Advance::of(started, backend.name()))
    }
}

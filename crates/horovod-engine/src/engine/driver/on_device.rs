//! Executions in flight, which continue in a backend without the driver: polled, and aborted when the generation ends.

use std::time::{Duration, Instant};

use horovod_protocol::{EntryId, Execution, Rank, Shape};
use horovod_transport::Aborted;

use super::advance::ExecutionTask;
use super::pump::Pump;
use crate::engine::Handle;
use crate::engine::backend::{Failure, InFlight, Results};
use crate::engine::recording::By;
use crate::error::Error;

/// At most so many executions are in flight at once; the next is started when one has ended.
const ON_DEVICE_MAX: usize = 256;
/// How long the engine waits for aborted executions.
const ABORT_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// Sleep between two polls of aborted executions.
const ABORT_NAP: Duration = Duration::from_millis(1);

/// One execution in flight.
pub(super) struct DeviceExecution {
    pub(super) task: ExecutionTask,
    pub(super) execution: Box<dyn InFlight>,
    pub(super) backend: &'static str,
    /// Shapes of the execution's outputs, once it is launched.
    pub(super) output_shapes: Option<Vec<Vec<Shape>>>,
}

/// All executions in flight, in the order of their starts.
#[derive(Default)]
pub(super) struct DeviceExecutions {
    list: Vec<DeviceExecution>,
    /// When the wait for aborted executions ends; `None` before the abort.
    deadline: Option<Instant>,
    /// A failure of an execution that has not ended was reported.
    has_reported_failing: bool,
}

impl DeviceExecution {
    fn entries(&self) -> impl Iterator<Item = EntryId> {
        self.task.execution.items.iter().filter_map(|i| i.entry)
    }
}

impl DeviceExecutions {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn executions(&self) -> impl Iterator<Item = &Execution> {
        self.list.iter().map(|launched| &launched.task.execution)
    }

    pub(super) fn is_full(&self) -> bool {
        self.list.len() >= ON_DEVICE_MAX
    }

    pub(super) fn push(&mut self, launched: DeviceExecution) {
        self.list.push(launched);
    }

    pub(super) fn abort(&mut self, cause: &Aborted) {
        self.deadline
            .get_or_insert_with(|| Instant::now() + ABORT_TIMEOUT);
        for launched in &mut self.list {
            launched.execution.abort(cause);
        }
    }

    /// Returns whether the operation of this handle is in flight.
    pub(super) fn uses(&self, handle: Handle) -> bool {
        let mut entries = self.list.iter().flat_map(DeviceExecution::entries);
        entries.any(|id| id.0 == handle.0)
    }

    /// Returns whether `rank` is a member of an execution in flight.
    pub(super) fn need(&self, rank: Rank) -> bool {
        let mut members = self
            .list
            .iter()
            .map(|launched| &launched.task.execution.members);
        members.any(|members| members.contains(&rank))
    }

    /// Returns the results of one execution that was launched since the last poll.
    fn take_launched(&mut self) -> Option<Results> {
        self.list.iter_mut().find_map(|launched| {
            let results = launched.execution.launched()?;
            launched.output_shapes = Some(launched.task.output_shapes(&results));
            Some(results)
        })
    }

    /// Returns, once, why an execution that has not ended will fail.
    fn take_failing(&mut self) -> Option<Failure> {
        if self.has_reported_failing {
            return None;
        }
        let mut list = self.list.iter();
        let failure = list.find_map(|launched| launched.execution.failing())?;
        self.has_reported_failing = true;
        Some(failure)
    }

    fn take_ended(&mut self) -> Option<(DeviceExecution, Result<Results, Failure>)> {
        let mut list = self.list.iter_mut().enumerate();
        let (i, result) = list.find_map(|(i, f)| Some((i, f.execution.poll()?)))?;
        Some((self.list.remove(i), result))
    }
}

impl Pump {
    /// Completes the handles of executions that were launched or have ended. Returns whether there were any.
    pub(super) fn complete_on_device(&mut self) -> bool {
        if self.on_device.is_empty() {
            return false;
        }
        let progress = self.poll_on_device();
        self.publish_in_flight();
        progress
    }

    /// Publishes the number of executions in flight, for threads that wait for devices.
    pub(super) fn publish_in_flight(&self) {
        let in_flight = self.on_device.list.len();
        self.shared.accelerators.note_in_flight(in_flight);
    }

    fn poll_on_device(&mut self) -> bool {
        let mut progress = false;
        while let Some(results) = self.on_device.take_launched() {
            progress = true;
            let results = results.into_iter();
            self.shared
                .handles
                .complete(results.map(|(id, result)| (Handle(id.0), result)));
        }
        while let Some((ended, result)) = self.on_device.take_ended() {
            progress = true;
            let handles: Vec<_> = ended.entries().map(|id| Handle(id.0)).collect();
            let stage = ended.execution.stage();
            let DeviceExecution {
                mut task,
                backend,
                output_shapes,
                ..
            } = ended;
            // Releases the tensors before the end is visible: their owners may release memory for which other threads
            // wait.
            task.entries.clear();
            match result {
                Ok(mut results) => {
                    let shapes = output_shapes.unwrap_or_else(|| task.output_shapes(&results));
                    let ordinal = self.shared.accelerators.ordinal(task.execution.device);
                    let by = By::Device {
                        backend,
                        ordinal,
                        stage,
                    };
                    self.complete(task, &mut results, shapes, by);
                }
                Err(failure) => {
                    let error = self.failure(failure);
                    let failed = handles
                        .into_iter()
                        .map(|handle| (handle, Err(error.clone())));
                    self.shared.handles.complete(failed);
                    self.fail_unused(&error);
                }
            }
        }
        if !self.membership.is_over()
            && let Some(failure) = self.on_device.take_failing()
        {
            // The peers wait for this rank, and must not wait until its device is idle.
            progress = true;
            self.failure(failure);
        }
        let is_over = |deadline| Instant::now() >= deadline;
        if self.on_device.deadline.is_some_and(is_over) && !self.on_device.is_empty() {
            progress = true;
            self.leak_on_device();
        }
        progress
    }

    /// Gives up executions that do not end. The tensors of these executions may still be in use, so the executions are
    /// leaked.
    fn leak_on_device(&mut self) {
        for launched in std::mem::take(&mut self.on_device.list) {
            tracing::error!(
                "{} does not end after it was aborted; the memory of its tensors is never given back, and no callback \
                 of it is run",
                launched.backend
            );
            launched.execution.give_up(ABORT_TIMEOUT);
            let error = self.membership.cause().cloned().unwrap_or(Error::Closed);
            let handles: Vec<_> = launched.entries().map(|id| Handle(id.0)).collect();
            for handle in &handles {
                self.shared.handles.forget_callback(*handle);
            }
            // Memory that may still be written to must not be reused.
            std::mem::forget(launched);
            let failed = handles
                .into_iter()
                .map(|handle| (handle, Err(error.clone())));
            self.shared.handles.complete(failed);
        }
    }

    /// Aborts all executions and waits for their end. After the engine's end the owners of the tensors may reuse them.
    pub(super) fn await_on_device(&mut self) {
        self.on_device
            .abort(&Aborted("the engine has ended".into()));
        while !self.on_device.is_empty() {
            if !self.complete_on_device() {
                std::thread::sleep(ABORT_NAP);
            }
        }
    }
}

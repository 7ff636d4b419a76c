//! Runs executions in the agreed order: which is next, whether it can begin, and how it ends.

use horovod_protocol::{Device, Execution, Op, Shape};

use super::Driver;
use super::advance::{Advance, ExecutionState, ExecutionTask};
use super::on_device::DeviceExecution;
use super::pump::Pump;
use crate::engine::Entry;
use crate::engine::backend::host::{PrestageOperand, bytes_of_all};
use crate::engine::backend::{Failure, Outputs, Results, Route};
use crate::engine::handles::Handle;
use crate::engine::recording::By;
use crate::error::Error;

/// The only rank of a job runs an execution during the submission if it has at most so many bytes.
const ALONE_AT_ONCE_MAX: usize = 1 << 20;

/// State of the next execution in the total order.
pub(super) enum NextExecution {
    Nothing,
    /// The execution cannot begin yet: data of a tensor, or memory, is not ready.
    Waits,
    /// The execution can run now.
    Runs,
    /// The execution can never run, because of this failure.
    Fails(Failure),
}

impl Driver {
    /// Returns the state of the next execution, and counts how often in a row it had to wait.
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
            // After the end of its generation a task does not wait: its next step fails, and its tensors are released.
            return match self.pump.membership.is_over() || task.poll() {
                true => NextExecution::Runs,
                false => NextExecution::Waits,
            };
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
    /// every rank. A later set with the same id agrees anew.
    fn forget_removed_sets(&mut self) {
        while let Some(set) = self.pump.queue.next_removed_set() {
            self.capabilities.forget(set);
            for (_, backend) in &mut self.devices {
                backend.forget(set);
            }
        }
    }

    /// Returns whether the next execution may run on a thread that must be able to leave.
    pub(super) fn next_may_pause(&mut self) -> bool {
        if let Some(task) = &self.suspended {
            return task.may_pause();
        }
        let Some((execution, announced)) = self.pump.queue.next_with_numbers() else {
            return false;
        };
        if execution.device != Device::Cpu {
            // The host only launches it, so it may run on such a thread. Two cases are excluded because the members
            // first exchange bytes through the host without interruption: the first execution of a set, and each
            // alltoall, which exchanges its row counts.
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
            outputs: Outputs::new(),
            received: Vec::new(),
            state: ExecutionState::Agree,
        })
    }

    /// Advances an execution until it ends, waits, continues in a backend without the driver, or is interrupted.
    pub(super) fn carry_out(&mut self, mut task: ExecutionTask) {
        self.pump.queue.runs(task.execution.members.clone());
        self.results.clear();
        loop {
            let advance = self.advance(&mut task);
            if self.pump.interruption.take() && advance.is_err() {
                self.host.rewind();
                self.suspended = Some(task);
                return;
            }
            match advance {
                Ok(Advance::Continues) => {}
                Ok(Advance::Waits) => {
                    self.suspended = Some(task);
                    return;
                }
                Ok(Advance::Done) => return self.complete(task),
                Ok(Advance::InFlight(execution, backend)) => {
                    self.pump.queue.ended();
                    let launched = DeviceExecution {
                        task,
                        execution,
                        backend,
                        output_shapes: None,
                    };
                    self.pump.on_device.push(launched);
                    return self.pump.publish_in_flight();
                }
                Err(failure) => return self.give_up(task, failure),
            }
        }
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
        // From here on nothing of the execution touches its tensors.
        self.pump.fail_unused(&error);
    }

    /// Releases the tensors before the end is visible: their owners may release memory for which other threads wait.
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

    /// If a cached request is about to be announced, and is the only one: copies its operand early to where the peers
    /// read it when the operation runs.
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
        let staged = self.host.prestage(&PrestageOperand {
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
    /// Appends the tensors that this rank submitted for the execution's items, in item order.
    fn take_entries(&mut self, execution: &Execution, entries: &mut Vec<Option<Entry>>) {
        let mut state = self.shared.lock();
        let ids = execution.items.iter().map(|item| item.entry);
        entries.extend(ids.map(|id| state.remove(id?)));
    }

    /// Completes the handles of an execution that has ended and whose tensors are released.
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
        // This is first: a thread that receives the result may stop the recording.
        self.recording
            .ends(recorded, now, &execution, output_shapes, by);
        let results = results.drain(..);
        self.shared
            .handles
            .complete(results.map(|(id, result)| (Handle(id.0), result)));
        self.shared.lock().worker.recycle(execution);
    }

    /// Fails every handle with this error, except those of executions that may still touch their tensors.
    pub(super) fn fail_unused(&self, error: &Error) {
        if !self.queue.is_running() {
            let in_use = |handle| self.on_device.uses(handle);
            self.shared.handles.fail_pending(error, in_use);
        }
    }
}

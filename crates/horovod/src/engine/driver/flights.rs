//! Executions in flight, which go on by themselves: polled, and aborted when the generation ends.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use horovod_protocol::{EntryId, Execution, Rank, Shape};
use horovod_transport::Aborted;

use super::execution::ExecutionTask;
use super::pump::Pump;
use crate::engine::Handle;
use crate::engine::backend::{Failure, InFlight, Results};
use crate::engine::recording::By;
use crate::error::Error;

/// Executions that may be in flight at once; the next is started when one has ended.
const FLIGHTS_MAX: usize = 256;
/// How long what was aborted is waited for.
const ABORT_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// Between two looks at it when nothing else is left to do.
const ABORT_NAP: Duration = Duration::from_millis(1);

/// One execution on its way.
pub(super) struct Flight {
    pub(super) task: ExecutionTask,
    pub(super) execution: Box<dyn InFlight>,
    pub(super) backend: &'static str,
    /// Shapes of its outputs, once it is launched.
    pub(super) output_shapes: Option<Vec<Vec<Shape>>>,
}

/// All that are on their way, in the order of their starts.
#[derive(Default)]
pub(super) struct Flights {
    flights: Vec<Flight>,
    /// When they are waited for no longer; once they were aborted.
    deadline: Option<Instant>,
    /// That one will not end well was told.
    told_failing: bool,
}

impl Flight {
    fn entries(&self) -> impl Iterator<Item = EntryId> {
        self.task.execution.items.iter().filter_map(|i| i.entry)
    }
}

impl Flights {
    pub(super) fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    pub(super) fn executions(&self) -> impl Iterator<Item = &Execution> {
        self.flights.iter().map(|flight| &flight.task.execution)
    }

    pub(super) fn is_full(&self) -> bool {
        self.flights.len() >= FLIGHTS_MAX
    }

    pub(super) fn push(&mut self, flight: Flight) {
        self.flights.push(flight);
    }

    pub(super) fn abort(&mut self, cause: &Aborted) {
        self.deadline
            .get_or_insert_with(|| Instant::now() + ABORT_TIMEOUT);
        for flight in &mut self.flights {
            flight.execution.abort(cause);
        }
    }

    /// Whether the operation of this handle is among them.
    pub(super) fn uses(&self, handle: Handle) -> bool {
        let mut entries = self.flights.iter().flat_map(Flight::entries);
        entries.any(|id| id.0 == handle.0)
    }

    /// Whether this rank takes part in one of them.
    pub(super) fn need(&self, rank: Rank) -> bool {
        let mut members = self
            .flights
            .iter()
            .map(|flight| &flight.task.execution.members);
        members.any(|members| members.contains(&rank))
    }

    /// Results of what was launched since the last look.
    fn take_launched(&mut self) -> Option<Results> {
        self.flights.iter_mut().find_map(|flight| {
            let results = flight.execution.launched()?;
            flight.output_shapes = Some(flight.task.output_shapes(&results));
            Some(results)
        })
    }

    /// Why one that has not ended will not end well, once.
    fn take_failing(&mut self) -> Option<Failure> {
        if self.told_failing {
            return None;
        }
        let mut flights = self.flights.iter();
        let failure = flights.find_map(|flight| flight.execution.failing())?;
        self.told_failing = true;
        Some(failure)
    }

    fn take_ended(&mut self) -> Option<(Flight, Result<Results, Failure>)> {
        let mut flights = self.flights.iter_mut().enumerate();
        let (i, result) = flights.find_map(|(i, f)| Some((i, f.execution.poll()?)))?;
        Some((self.flights.remove(i), result))
    }
}

impl Pump {
    /// Tell of what has ended. `true`: something has.
    pub(super) fn end_flights(&mut self) -> bool {
        if self.flights.is_empty() {
            return false;
        }
        let progress = self.look_at_flights();
        self.tell_in_flight();
        progress
    }

    /// For who waits for devices.
    pub(super) fn tell_in_flight(&self) {
        let in_flight = self.flights.flights.len();
        self.shared.in_flight.store(in_flight, Ordering::Release);
    }

    fn look_at_flights(&mut self) -> bool {
        let mut progress = false;
        while let Some(results) = self.flights.take_launched() {
            progress = true;
            let results = results.into_iter();
            self.shared
                .handles
                .complete(results.map(|(id, result)| (Handle(id.0), result)));
        }
        while let Some((flight, result)) = self.flights.take_ended() {
            progress = true;
            let handles: Vec<_> = flight.entries().map(|id| Handle(id.0)).collect();
            let stage = flight.execution.stage();
            let Flight {
                mut task,
                backend,
                output_shapes: launched,
                ..
            } = flight;
            // Before anybody hears of the end: the owners may give back memory that is waited for.
            task.entries.clear();
            match result {
                Ok(mut results) => {
                    let shapes = launched.unwrap_or_else(|| task.output_shapes(&results));
                    let ordinal = self.shared.gpu.get();
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
        if self.dead.is_none()
            && let Some(failure) = self.flights.take_failing()
        {
            // The peers wait for this rank, and must not wait until its device comes to rest.
            progress = true;
            self.failure(failure);
        }
        let is_over = |deadline| Instant::now() >= deadline;
        if self.flights.deadline.is_some_and(is_over) && !self.flights.is_empty() {
            progress = true;
            self.leak_flights();
        }
        progress
    }

    /// What does not end is waited for no longer, though it may still use its tensors.
    fn leak_flights(&mut self) {
        for flight in std::mem::take(&mut self.flights.flights) {
            tracing::error!(
                "{} does not end after it was aborted; the memory of its tensors is never given back, and no callback \
                 of it is run",
                flight.backend
            );
            flight.execution.give_up(ABORT_TIMEOUT);
            let error = self.dead.clone().unwrap_or(Error::Closed);
            let handles: Vec<_> = flight.entries().map(|id| Handle(id.0)).collect();
            for handle in &handles {
                self.shared.handles.forget_callback(*handle);
            }
            // What may still be written to must not become other memory.
            std::mem::forget(flight);
            let failed = handles
                .into_iter()
                .map(|handle| (handle, Err(error.clone())));
            self.shared.handles.complete(failed);
        }
    }

    /// The engine ends: nothing may touch a tensor after its owner has been told so.
    pub(super) fn await_flights(&mut self) {
        self.flights.abort(&Aborted("the engine has ended".into()));
        while !self.flights.is_empty() {
            if !self.end_flights() {
                std::thread::sleep(ABORT_NAP);
            }
        }
    }
}

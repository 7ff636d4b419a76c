//! The recording of executions for the timeline, and the transport of its messages.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use horovod_collectives::{StageTime, Stages};
use horovod_metrics::Tracer;
use horovod_protocol::{
    EntryId, ExecItem, Execution, Op, OpError, Rank, Seq, Shape, StallReport, Time,
};
use horovod_timeline::{Catalog, Executed, Items, Nanos, StageReport, Timeline, op_name};
use horovod_transport::Control;

use super::Entry;
use super::backend::DeviceStage;
use super::handles::OpResult;
use super::relay::{OutOfBandMessage, Relay};
use crate::error::Error;

/// The engine's side of the timeline. It costs one load per operation when nothing is recorded.
pub(super) struct Recording {
    timeline: Arc<Timeline>,
    /// When each waiting execution was ordered; filled only while something is recorded.
    ordered: VecDeque<(Seq, Nanos)>,
    catalog: Catalog,
}

/// The timeline as the recorder of traces for commands beside the job.
#[derive(Debug)]
pub(super) struct Traced(pub(super) Arc<Timeline>);

impl Tracer for Traced {
    fn start(&self, path: &Path) -> Result<(), String> {
        self.0.start_trace(path)
    }

    fn stop(&self, path: &Path) -> Result<(), String> {
        self.0.stop_trace(path)
    }
}

/// Record of an execution that has begun.
pub(super) struct Recorded {
    session: u64,
    /// `None` if the timeline had no room to describe the operations.
    items: Option<Items>,
    ordered: Nanos,
    begin: Instant,
    /// Parts that ran before a device's last part.
    parts: Vec<StageTime>,
}

impl Recorded {
    /// Adds a part that a device ran before the host's part.
    pub(super) fn on_device(&mut self, stage: DeviceStage) {
        let DeviceStage { name, times } = stage;
        self.parts
            .extend(times.map(|(begin, end)| StageTime { name, begin, end }));
    }

    /// Adds the parts that the host ran between two parts of a device.
    pub(super) fn on_host(&mut self, parts: &[StageTime]) {
        // A device's clock is accurate to some microseconds only, but the order of the parts is certain.
        if let (Some(before), Some(first)) = (self.parts.last_mut(), parts.first()) {
            before.end = before.end.min(first.begin);
            before.begin = before.begin.min(before.end);
        }
        self.parts.extend(parts);
    }
}

/// The backend that ran an execution.
pub(super) enum By<'a> {
    /// The host's data plane, with these stages.
    Host(&'a Stages),
    /// The backend of this name, on the device with this number.
    Device {
        backend: &'static str,
        ordinal: Option<i32>,
        stage: Option<DeviceStage>,
    },
}

impl Recording {
    pub(super) fn new(timeline: Arc<Timeline>) -> Self {
        Self {
            timeline,
            ordered: VecDeque::new(),
            catalog: Catalog::default(),
        }
    }

    /// Notes the time at which the order to run this execution arrived.
    pub(super) fn ordered(&mut self, execution: &Execution) {
        if self.timeline.is_on() {
            self.ordered.push_back((execution.seq, self.timeline.now()));
        }
    }

    /// Starts the record of an execution that is about to run; returns `None` if nothing is recorded.
    pub(super) fn begins(
        &mut self,
        execution: &Execution,
        entries: &[Option<Entry>],
        stages: &mut Stages,
    ) -> Option<Box<Recorded>> {
        let on = self.timeline.is_on();
        stages.record(on);
        if !on {
            self.ordered.clear();
        }
        on.then(|| {
            let begin = Instant::now();
            let mut ordered = self.timeline.at(begin);
            // Recording may have begun while some executions were waiting.
            while let Some((seq, at)) = self.ordered.front().copied()
                && seq <= execution.seq
            {
                if seq == execution.seq {
                    ordered = at;
                }
                self.ordered.pop_front();
            }
            let submitted = |entry: &Option<Entry>| entry.as_ref().and_then(|e| e.submitted);
            let all = execution.items.iter().zip(entries);
            let all = all.map(|(item, entry)| (item, submitted(entry)));
            let (session, items) = self.timeline.pack(&mut self.catalog, all);
            Box::new(Recorded {
                session,
                items,
                ordered,
                begin,
                parts: Vec::new(),
            })
        })
    }

    /// Records an execution that has run, before any thread can receive its results.
    pub(super) fn ends(
        &self,
        recorded: Option<Box<Recorded>>,
        now: impl FnOnce() -> Time,
        execution: &Execution,
        output_shapes: Vec<Vec<Shape>>,
        by: By<'_>,
    ) {
        let Some(recorded) = recorded else {
            return;
        };
        let (timeline, now) = (&self.timeline, now());
        let Some(items) = recorded.items else {
            timeline.missed(execution.items.len());
            return;
        };
        let shown = |stage: &StageTime| {
            StageReport::new(stage.name, timeline.at(stage.begin), timeline.at(stage.end))
        };
        let mut thread = 0;
        let (begin, end) = (timeline.at(recorded.begin), now.0);
        let (begin, end, stages): (_, _, Vec<_>) = match by {
            By::Host(stages) => (begin, end, stages.recorded().iter().map(shown).collect()),
            By::Device {
                backend,
                ordinal,
                stage,
            } => {
                let is_timed = stage.is_some_and(|stage| stage.times.is_some());
                let is_timed = is_timed || !recorded.parts.is_empty();
                let parts = with_last(recorded.parts, recorded.begin, stage, backend);
                if is_timed {
                    thread = ordinal.map_or(0, |ordinal| timeline.device(ordinal));
                }
                let stages: Vec<_> = parts.iter().map(shown).collect();
                // The host launched the execution before the device began, and observed its end later.
                let begin = stages.first().map_or(begin, |first| first.begin);
                let end = stages.iter().map(|s| s.end).max().unwrap_or(end);
                (begin, end, stages)
            }
        };
        timeline.executed(Executed {
            session: recorded.session,
            seq: execution.seq.0,
            set: execution.set,
            members: execution.members.clone(),
            op: op_name(&execution.op),
            items,
            output_shapes,
            thread,
            scheduled: recorded.ordered,
            begin,
            end,
            stages,
        });
    }

    /// Records the error of an operation without data, or of one on which the ranks could not agree.
    pub(super) fn ended_without_data<T>(&self, result: &Result<T, OpError>, entry: Option<&Entry>) {
        if let (Err(e), Some(entry), true) = (result, entry, self.timeline.is_on()) {
            let thread = entry.submitted.map_or(0, |stamp| stamp.thread);
            self.timeline.note("ERROR", thread, e.to_string());
        }
    }

    /// Records that some ranks are late.
    pub(super) fn stalled(&self, report: &StallReport) {
        if self.timeline.is_on() {
            self.timeline.note("STALL", 0, report.to_string());
        }
    }

    /// Records that responses of the coordinator are about to run.
    pub(super) fn cycle(&self) {
        self.timeline.cycle();
    }

    /// Handles a message of another rank's timeline.
    pub(super) fn take(&self, received: &OutOfBandMessage<'_>) {
        self.timeline.handle(received.from, received.message);
    }

    /// Notes that nothing more can arrive from this rank.
    pub(super) fn gone(&self, rank: Rank) {
        self.timeline.gone(rank);
    }

    /// Returns whether all events have arrived, or the timeline has tried for long enough. Called when the job has
    /// stopped and nothing is left to run.
    pub(super) fn is_settled(&self) -> bool {
        self.timeline.job_stopped();
        self.timeline.is_settled()
    }

    /// Closes the timeline, because nothing can be sent or received any more.
    pub(super) fn close(&self) {
        self.timeline.close();
    }

    /// Sends the timeline's queued messages, unless more important ones wait. Returns whether something was sent.
    pub(super) fn send_queued(&self, relay: &Relay, control: &mut Control) -> bool {
        if !self.timeline.has_outgoing() {
            return false;
        }
        let mut sent = false;
        for _ in 0..self.timeline.outgoing_limit() {
            let Some((to, bytes)) = self.timeline.next_outgoing() else {
                break;
            };
            match relay.send(control, to, &bytes) {
                Ok(true) => sent = true,
                Ok(false) => self.timeline.put_back(to, bytes),
                // The driver detects a lost peer elsewhere; here only events are missing.
                Err(e) => tracing::debug!("timeline: {e}"),
            }
        }
        sent
    }
}

/// Returns these parts and a device's last one, which began after them.
fn with_last(
    mut parts: Vec<StageTime>,
    started: Instant,
    stage: Option<DeviceStage>,
    backend: &'static str,
) -> Vec<StageTime> {
    let after = parts.iter().map(|part| part.end).max();
    let (name, times) = match stage {
        // The host ran the last part.
        None if after.is_some() => return parts,
        None => (backend, None),
        Some(DeviceStage { name, times }) => (name, times),
    };
    let (begin, end) = times.unwrap_or_else(|| (started, Instant::now()));
    let begin = after.map_or(begin, |after| begin.max(after));
    let end = end.max(begin);
    parts.push(StageTime { name, begin, end });
    parts
}

/// Returns the shapes of the outputs that were allocated for the results.
pub(super) fn output_shapes(
    execution: &Execution,
    results: &[(EntryId, Result<OpResult, Error>)],
) -> Vec<Vec<Shape>> {
    if !matches!(
        execution.op,
        Op::Allgather | Op::Alltoall | Op::Reducescatter { .. }
    ) {
        return Vec::new();
    }
    let of = |item: &ExecItem| {
        let (_, result) = results.iter().find(|(id, _)| Some(*id) == item.entry)?;
        let outputs = result.as_ref().ok()?.outputs.iter();
        let shapes = outputs.map(|o| o.as_ref().map(|(_, shape)| shape.clone()));
        Some(shapes.map(Option::unwrap_or_default).collect())
    };
    execution
        .items
        .iter()
        .map(|item| of(item).unwrap_or_default())
        .collect()
}

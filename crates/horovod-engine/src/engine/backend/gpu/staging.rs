//! The way of an execution through host memory: its tensors go into pinned memory, the host's data plane works there, and
//! the results go back.

use std::sync::Arc;
use std::time::Duration;

use horovod_gpu::{Call, Executor, GpuWork, HostMemory, Launch};
use horovod_protocol::{Completion, EntryId, Execution, Op, Rank, TensorMeta};
use horovod_transport::Aborted;

use super::super::rows::{output_of, share_of, too_large};
use super::super::{DeviceStage, Failure, InFlight, Outputs, Results, StageIn, Staged};
use super::calls::{address, events};
use super::pinned::{AskedBlock, KEPT_MAX, Pinned};
use super::{Launched, failure_of};
use crate::buffer::Buffer;
use crate::engine::Entry;
use crate::engine::handles::OpResult;
use crate::error::Error;
use crate::tensor::{Output, Tensor};

/// Names in the timeline, as Horovod has them.
const IN_STAGE: &str = "MEMCPY_IN_HOST_BUFFER";
pub(super) const OUT_STAGE: &str = "MEMCPY_OUT_HOST_BUFFER";

/// Where tensors begin in pinned memory: a cache line.
const ALIGN: usize = 64;

/// A rank that has joined stages nothing.
pub(super) struct Nothing(pub(super) usize);

impl StageIn for Nothing {
    fn poll(&mut self) -> Option<Result<Vec<Option<Entry>>, Failure>> {
        Some(Ok((0..self.0).map(|_| None).collect()))
    }
}

/// An execution's tensors on their way into pinned memory.
struct CopiesIn {
    executor: Arc<Executor>,
    stage: StagingStage,
    is_recorded: bool,
}

enum StagingStage {
    /// There is no block yet; the plan is taken when it has come.
    Awaits(AskedBlock, Option<Box<StagingPlan>>),
    /// The copies have begun.
    Copies(Launch, Option<Vec<Option<Entry>>>),
    /// There never will be one.
    Fails(String),
}

/// Layout of the block.
pub(super) struct StagingPlan {
    entries: Vec<Option<PlannedEntry>>,
    bytes: usize,
    /// Without its calls.
    work: GpuWork,
    /// Results lie where the tensors do.
    is_in_place: bool,
    /// From where on the device to which offset, and how many bytes.
    copies: Vec<(u64, usize, usize)>,
}

struct PlannedEntry {
    tensors: Vec<(TensorMeta, PinnedPlace)>,
    splits: Option<Vec<u64>>,
}

/// Where a tensor, and a result of its own, lie in pinned memory.
struct PinnedPlace {
    at: usize,
    result: Option<ResultPlace>,
}

struct ResultPlace {
    at: usize,
    bytes: usize,
    /// As in [`Output`].
    is_even: bool,
}

/// Pinned memory as it is given out.
#[derive(Default)]
struct Layout {
    places: Vec<PinnedPlace>,
    bytes: usize,
}

impl Layout {
    fn of(
        execution: &Execution,
        (entries, outputs): (&[Option<Entry>], &Outputs),
        me: Rank,
    ) -> Result<Self, Failure> {
        let mut layout = Self::default();
        let is_in_place = is_in_place(&execution.op);
        let mut results = Vec::new();
        for (item, entry) in entries.iter().enumerate() {
            let tensors = entry.iter().flat_map(|entry| entry.tensors.iter());
            for (i, tensor) in tensors.enumerate() {
                let at = layout.take(tensor.bytes())?;
                layout.places.push(PinnedPlace { at, result: None });
                let given = outputs.get(item).and_then(|outputs| outputs.get(i));
                let given = given.and_then(Option::as_ref);
                results.push(match tensor.output {
                    _ if is_in_place => None,
                    Output::Even { bytes, .. } => Some((bytes, true)),
                    // Outputs that do not fit are refused later.
                    Output::Exactly { bytes, .. } => share_bytes(execution, me, tensor)
                        .filter(|share| *share == bytes)
                        .map(|bytes| (bytes, false)),
                    _ => given.map(|(buffer, _)| (buffer.len(), false)),
                });
            }
        }
        for (i, result) in results.into_iter().enumerate() {
            let Some((bytes, is_even)) = result else {
                continue;
            };
            // A block that is not kept takes longer to make than copies from it save.
            if layout.bytes.saturating_add(bytes) > KEPT_MAX {
                continue;
            }
            let at = layout.take(Some(bytes))?;
            layout.places[i].result = Some(ResultPlace { at, bytes, is_even });
        }
        Ok(layout)
    }

    fn take(&mut self, bytes: Option<usize>) -> Result<usize, Failure> {
        let at = self.bytes;
        let length = bytes.and_then(|bytes| bytes.checked_next_multiple_of(ALIGN));
        let end = length.and_then(|length| at.checked_add(length));
        self.bytes = end.ok_or_else(too_large)?;
        Ok(at)
    }
}

fn is_in_place(op: &Op) -> bool {
    matches!(op, Op::Allreduce { .. } | Op::Broadcast { .. })
}

/// Bytes of this rank's part of a reducescatter.
fn share_bytes(execution: &Execution, me: Rank, tensor: &Tensor) -> Option<usize> {
    let members = &execution.members;
    let me = members.iter().position(|rank| *rank == me)?;
    let rows = usize::try_from(tensor.rows()).ok()?;
    share_of(rows, me, members.len()).checked_mul(tensor.row_bytes()?)
}

impl StagingPlan {
    /// Lay the tensors out, and the results whose lengths are known.
    pub(super) fn of(
        execution: &Execution,
        (entries, outputs): (&[Option<Entry>], &Outputs),
        me: Rank,
        title: Arc<str>,
        timed: bool,
    ) -> Result<Self, Failure> {
        let Layout { places, bytes } = Layout::of(execution, (entries, outputs), me)?;
        // Of a broadcast only the root's bytes are read.
        let is_read = !matches!(execution.op, Op::Broadcast { root } if root != me);
        let (mut places, mut copies) = (places.into_iter(), Vec::new());
        let planned = entries.iter().map(|entry| {
            let entry = entry.as_ref()?;
            let tensors = entry
                .tensors
                .iter()
                .zip(&mut places)
                .map(|(tensor, place)| {
                    let bytes = tensor.bytes().unwrap_or(0);
                    if is_read && bytes > 0 {
                        copies.push((address(tensor.input), place.at, bytes));
                    }
                    (tensor.meta.clone(), place)
                });
            Some(PlannedEntry {
                tensors: tensors.collect(),
                splits: entry.splits.clone(),
            })
        });
        let planned = planned.collect();
        Ok(Self {
            is_in_place: is_in_place(&execution.op),
            entries: planned,
            bytes,
            work: GpuWork {
                title,
                seq: execution.seq.0,
                set: execution.set.0,
                group: None,
                after: events(entries, &Vec::new()),
                calls: Vec::new(),
                timed: timed && !copies.is_empty(),
            },
            copies,
        })
    }

    /// The bytes of its block.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copy to this block when it is there.
    pub(super) fn copy_to(
        self,
        block: AskedBlock,
        executor: Arc<Executor>,
    ) -> impl StageIn + use<> {
        let (title, seq, set) = (self.work.title.clone(), self.work.seq, self.work.set);
        let mut copies = CopiesIn {
            executor,
            is_recorded: self.work.timed,
            stage: StagingStage::Awaits(block, Some(Box::new(self))),
        };
        copies.go_on();
        if let StagingStage::Awaits(..) = copies.stage {
            copies.executor.prepares(title, seq, set);
        }
        copies
    }

    /// The copies to this block, and what stands in it for the entries.
    fn within(self, block: Pinned) -> (GpuWork, Vec<Option<Entry>>) {
        let block = Arc::new(block);
        let copies = self.copies.into_iter();
        let calls = copies.map(|(from, at, bytes)| Call::ToHost {
            from,
            to: HostMemory(block.at(at)),
            bytes,
        });
        let work = GpuWork {
            calls: calls.collect(),
            ..self.work
        };
        let tensor = |(meta, place): (TensorMeta, PinnedPlace)| {
            let memory = block.at(place.at);
            let output = match place.result {
                _ if self.is_in_place => Output::At(memory),
                Some(ResultPlace { at, bytes, is_even }) => {
                    let at = block.at(at);
                    match is_even {
                        true => Output::Even { at, bytes },
                        false => Output::Exactly { at, bytes },
                    }
                }
                None => Output::Allocate,
            };
            // SAFETY: its part of the block, which its owner keeps, and which the device writes before anybody reads.
            unsafe { Tensor::new(meta, memory, output) }.kept_by(block.clone())
        };
        let entry = |entry: PlannedEntry| Entry {
            tensors: entry
                .tensors
                .into_iter()
                .map(tensor)
                .collect::<Vec<_>>()
                .into(),
            splits: entry.splits,
            submitted: None,
            allocator: None,
            _called_back: None,
        };
        let entries = self.entries.into_iter();
        (work, entries.map(|planned| planned.map(entry)).collect())
    }
}

impl CopiesIn {
    /// Begin with the copies, if the block has come.
    fn go_on(&mut self) {
        let StagingStage::Awaits(block, plan) = &mut self.stage else {
            return;
        };
        let came = block.poll();
        if came.is_some() {
            self.executor.prepares_no_more();
        }
        match came {
            None => {}
            Some(Err(why)) => self.stage = StagingStage::Fails(why),
            Some(Ok(block)) => {
                let Some(plan) = plan.take() else { return };
                let (work, entries) = plan.within(block);
                // SAFETY: the submitters' memory is theirs until the execution has ended, which this is a part of; the
                // block is kept by the staged tensors.
                let launch = unsafe { self.executor.submit(work) };
                self.stage = StagingStage::Copies(launch, Some(entries));
            }
        }
    }
}

impl StageIn for CopiesIn {
    fn poll(&mut self) -> Option<Result<Vec<Option<Entry>>, Failure>> {
        self.go_on();
        // After a failure the device may go on with copies for long, to memory that is kept.
        let failure = || self.executor.failure().cloned().map(Err);
        let ended = match &mut self.stage {
            StagingStage::Awaits(..) => None,
            StagingStage::Copies(launch, _) => launch.ended(),
            StagingStage::Fails(why) => return Some(Err(Failure::Local(why.clone()))),
        };
        match (ended.or_else(failure)?, &mut self.stage) {
            (Ok(()), StagingStage::Copies(_, entries)) => entries.take().map(Ok),
            (Ok(()), _) => None,
            (Err(why), _) => Some(Err(failure_of(why))),
        }
    }

    fn stage(&self) -> Option<DeviceStage> {
        let times = match &self.stage {
            StagingStage::Copies(launch, _) => launch.times(),
            _ => None,
        };
        let name = IN_STAGE;
        self.is_recorded.then_some(DeviceStage { name, times })
    }
}

impl Drop for CopiesIn {
    fn drop(&mut self) {
        match &mut self.stage {
            StagingStage::Awaits(..) => self.executor.prepares_no_more(),
            // The device may still write there.
            StagingStage::Copies(launch, entries) if launch.ended().is_none() => {
                std::mem::forget(entries.take());
            }
            _ => {}
        }
    }
}

/// Memory that the device reads until the copies have ended.
pub(super) struct Kept {
    _staged: Vec<Option<Entry>>,
    _buffers: Vec<Buffer>,
}

/// An execution whose results are copied to the device.
pub(super) struct KeepingLaunched {
    pub(super) launched: Launched,
    pub(super) _kept: Kept,
}

impl InFlight for KeepingLaunched {
    fn launched(&mut self) -> Option<Results> {
        self.launched.launched()
    }

    fn failing(&self) -> Option<Failure> {
        self.launched.failing()
    }

    fn poll(&mut self) -> Option<Result<Results, Failure>> {
        self.launched.poll()
    }

    fn stage(&self) -> Option<DeviceStage> {
        self.launched.stage()
    }

    fn abort(&mut self, cause: &Aborted) {
        self.launched.abort(cause);
    }

    fn give_up(&self, after: Duration) {
        self.launched.give_up(after);
    }
}

/// Copy the results to where they belong.
pub(super) fn end(
    staged: Staged<'_>,
    title: Arc<str>,
    me: Rank,
) -> Result<(GpuWork, Results, Kept), Failure> {
    let Staged {
        execution,
        entries,
        staged: on_host,
        outputs,
        results,
        timed,
    } = staged;
    let after = events(&[], outputs);
    let mut copies = CopiesBack {
        execution,
        entries,
        outputs,
        calls: Vec::new(),
        buffers: Vec::new(),
    };
    if is_in_place(&execution.op) {
        copies.in_place(&on_host, me)?;
    }
    let results = results.into_iter().map(|result| copies.place(result));
    let results = results.collect::<Result<_, _>>()?;
    let CopiesBack { calls, buffers, .. } = copies;
    let work = GpuWork {
        title,
        seq: execution.seq.0,
        set: execution.set.0,
        group: None,
        after,
        timed: timed && !calls.is_empty(),
        calls,
    };
    let kept = Kept {
        _staged: on_host,
        _buffers: buffers,
    };
    Ok((work, results, kept))
}

/// Copies of results from host memory to a GPU, put together one by one.
struct CopiesBack<'a> {
    execution: &'a Execution,
    entries: &'a [Option<Entry>],
    /// Memory that was allocated for outputs.
    outputs: &'a mut Outputs,
    calls: Vec<Call>,
    /// Host memory that is copied from.
    buffers: Vec<Buffer>,
}

impl CopiesBack<'_> {
    /// Results that are where their copies in host memory are.
    fn in_place(&mut self, on_host: &[Option<Entry>], me: Rank) -> Result<(), Failure> {
        let is_root = matches!(self.execution.op, Op::Broadcast { root } if root == me);
        let tensors = self.entries.iter().flatten();
        let tensors = tensors.flat_map(|e| e.tensors.iter());
        let copies = on_host.iter().flatten().flat_map(|e| e.tensors.iter());
        for (tensor, copy) in tensors.zip(copies) {
            let output = output_of(tensor)?;
            let is_there = is_root && output.cast_const() == tensor.input;
            let bytes = tensor.bytes().unwrap_or(0);
            if bytes > 0 && !is_there {
                self.calls.push(Call::ToDevice {
                    from: HostMemory(copy.input.cast_mut()),
                    to: address(output),
                    bytes,
                });
            }
        }
        Ok(())
    }

    /// A result of the host's, with its outputs in the memory of the GPU.
    fn place(
        &mut self,
        (id, result): (EntryId, Result<OpResult, Error>),
    ) -> Result<(EntryId, Result<OpResult, Error>), Failure> {
        let mut items = self.execution.items.iter();
        let item = items.position(|item| item.entry == Some(id));
        let (Ok(mut result), Some(item)) = (result, item) else {
            return Err(Failure::Local("a result belongs to no tensor".into()));
        };
        let received = result.received_splits.clone();
        for (i, slot) in result.outputs.iter_mut().enumerate() {
            let Some((made, shape)) = slot.take() else {
                continue;
            };
            *slot = Some(
                match self.memory_for((item, i), &made, received.as_deref())? {
                    Some(buffer) => {
                        self.copy(made, &buffer);
                        (buffer, shape)
                    }
                    // The result stays in host memory. The caller looks for it in the submitted memory, and raises the error.
                    None => (made, shape),
                },
            );
        }
        debug_assert!(matches!(result.completion, Completion::Done));
        Ok((id, Ok(result)))
    }

    /// Where an output belongs: to memory of the submission, or what was allocated. `None`: it was submitted with memory
    /// for even parts, which are not even.
    fn memory_for(
        &mut self,
        (item, i): (usize, usize),
        made: &Buffer,
        received: Option<&[u64]>,
    ) -> Result<Option<Buffer>, Failure> {
        let entry = self.entries.get(item).and_then(Option::as_ref);
        let tensor = entry.and_then(|entry| entry.tensors.get(i));
        let output = tensor.map(|tensor| (tensor, tensor.output));
        let own = match output {
            Some((tensor, Output::Even { at, bytes }))
                if bytes == made.len() && is_even(self.execution, (item, i), tensor, received) =>
            {
                Buffer::lent(at, bytes)
            }
            Some((_, Output::Exactly { at, bytes })) if bytes == made.len() => {
                Buffer::lent(at, bytes)
            }
            _ => None,
        };
        let given = self.outputs.get_mut(item);
        let given = given.and_then(|given| given.get_mut(i));
        let buffer = own.or_else(|| Some(given?.take()?.0));
        if buffer.is_none() && matches!(output, Some((_, Output::Even { .. }))) {
            return Ok(None);
        }
        match buffer.filter(|buffer| buffer.len() >= made.len()) {
            Some(buffer) => Ok(Some(buffer)),
            None => Err(Failure::Local(format!(
                "there are no {} bytes of GPU memory for a result",
                made.len()
            ))),
        }
    }

    fn copy(&mut self, made: Buffer, to: &Buffer) {
        if !made.is_empty() {
            self.calls.push(Call::ToDevice {
                from: HostMemory(made.as_mut_ptr()),
                to: address(to.as_mut_ptr()),
                bytes: made.len(),
            });
        }
        self.buffers.push(made);
    }
}

/// Whether all members bring, or get, equally many rows.
fn is_even(
    execution: &Execution,
    (item, i): (usize, usize),
    tensor: &Tensor,
    received: Option<&[u64]>,
) -> bool {
    let all_equal = |rows: &[u64]| rows.windows(2).all(|pair| pair[0] == pair[1]);
    match execution.op {
        Op::Allgather => {
            let rows = execution
                .items
                .get(item)
                .and_then(|item| item.first_dims.get(i));
            rows.is_some_and(|rows| all_equal(rows))
        }
        Op::Alltoall => received.is_some_and(all_equal),
        _ => tensor.rows().is_multiple_of(execution.members.len() as u64),
    }
}

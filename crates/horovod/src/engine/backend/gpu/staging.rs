//! The way of an execution through host memory: its tensors go into pinned memory, the host's data plane works there, and
//! the results go back.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use horovod_gpu::{Call, Executor, HostMemory, Launch, PinnedMemory, Work, WorkError};
use horovod_protocol::{Completion, EntryId, Execution, Op, Rank};
use horovod_transport::Aborted;

use super::super::rows::{output_of, share_of, too_large};
use super::super::{DeviceStage, Failure, InFlight, Outputs, Results, StageIn, Staged};
use super::calls::{address, events};
use super::{Flight, local};
use crate::buffer::Buffer;
use crate::engine::Entry;
use crate::engine::handles::OpResult;
use crate::error::Error;
use crate::tensor::{Output, Tensor};

/// Names in the timeline, as Horovod has them.
const IN_STAGE: &str = "MEMCPY_IN_HOST_BUFFER";
pub(super) const OUT_STAGE: &str = "MEMCPY_OUT_HOST_BUFFER";

/// Bytes of pinned memory that are kept for reuse at most.
const KEPT_MAX: usize = 256 << 20;
/// Where tensors begin in pinned memory: a cache line.
const ALIGN: usize = 64;
/// Blocks are of whole pages, so that slightly different lengths share them.
const PAGE: usize = 4096;

/// Pinned memory that is not in use, smallest first: it takes long to make, and to free.
#[derive(Debug, Default)]
pub(super) struct PinnedPool(Mutex<Vec<PinnedMemory>>);

/// A block of it, which goes back when it is dropped.
#[derive(Debug)]
pub(super) struct Pinned {
    memory: Option<PinnedMemory>,
    pool: Arc<PinnedPool>,
}

impl PinnedPool {
    fn take(
        self: &Arc<Self>,
        device: &'static horovod_gpu::Device,
        bytes: usize,
    ) -> Result<Pinned, Failure> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(PAGE)
            .ok_or_else(too_large)?;
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits =
            |memory: &PinnedMemory| (bytes..=bytes.saturating_mul(2)).contains(&memory.len());
        let found = free.iter().position(fits).map(|at| free.remove(at));
        drop(free);
        let memory = match found {
            Some(memory) => memory,
            None => device.allocate_pinned(bytes).map_err(local)?,
        };
        Ok(Pinned {
            memory: Some(memory),
            pool: self.clone(),
        })
    }

    fn give_back(&self, memory: PinnedMemory) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.partition_point(|other| other.len() < memory.len());
        free.insert(at, memory);
        let mut kept: usize = free.iter().map(PinnedMemory::len).sum();
        let mut released = Vec::new();
        while kept > KEPT_MAX
            && let Some(largest) = free.pop()
        {
            kept -= largest.len();
            released.push(largest);
        }
        drop(free);
        release(released);
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        let free = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        release(std::mem::take(free));
    }
}

/// Free memory on a thread of its own: CUDA waits for the device first, which may be at something of the script's that does
/// not end.
fn release(memory: Vec<PinnedMemory>) {
    if memory.is_empty() {
        return;
    }
    let thread = std::thread::Builder::new().name("horovod-unpin".into());
    if let Err(error) = thread.spawn(move || drop(memory)) {
        tracing::debug!("pinned memory was freed by the engine's thread: {error}");
    }
}

impl Pinned {
    fn at(&self, offset: usize) -> *mut u8 {
        let start = self.memory.as_ref().map(PinnedMemory::as_mut_ptr);
        start.map_or(std::ptr::null_mut(), |start| start.wrapping_add(offset))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.give_back(memory);
        }
    }
}

/// A rank that has joined stages nothing.
pub(super) struct Nothing(pub(super) usize);

impl StageIn for Nothing {
    fn poll(&mut self) -> Option<Result<Vec<Option<Entry>>, String>> {
        Some(Ok((0..self.0).map(|_| None).collect()))
    }
}

/// Copies that can begin.
pub(super) struct Copies {
    work: Work,
    staged: Vec<Option<Entry>>,
}

/// Copies that have begun.
struct CopiesIn {
    executor: Arc<Executor>,
    launch: Launch,
    staged: Option<Vec<Option<Entry>>>,
    is_recorded: bool,
}

/// Where a tensor, and a result of its own, lie in pinned memory.
struct Place {
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
    places: Vec<Place>,
    bytes: usize,
}

impl Layout {
    fn of(
        execution: &Execution,
        (entries, outputs): (&[Option<Entry>], &Outputs),
        me: Rank,
    ) -> Result<Self, Failure> {
        let mut layout = Self::default();
        let is_in_place = matches!(execution.op, Op::Allreduce { .. } | Op::Broadcast { .. });
        let mut results = Vec::new();
        for (item, entry) in entries.iter().enumerate() {
            let tensors = entry.iter().flat_map(|entry| entry.tensors.iter());
            for (i, tensor) in tensors.enumerate() {
                let at = layout.take(tensor.bytes())?;
                layout.places.push(Place { at, result: None });
                let given = outputs.get(item).and_then(|outputs| outputs.get(i));
                let given = given.and_then(Option::as_ref);
                results.push(match tensor.output {
                    _ if is_in_place => None,
                    Output::Even { bytes, .. } => Some((bytes, true)),
                    // What does not fit is refused later.
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

/// What this rank gets of a reducescatter.
fn share_bytes(execution: &Execution, me: Rank, tensor: &Tensor) -> Option<usize> {
    let members = &execution.members;
    let me = members.iter().position(|rank| *rank == me)?;
    let rows = usize::try_from(tensor.rows()).ok()?;
    share_of(rows, me, members.len()).checked_mul(tensor.row_bytes()?)
}

/// Lay the tensors out in pinned memory, and the results whose lengths are known.
pub(super) fn begin(
    execution: &Execution,
    (entries, outputs): (&[Option<Entry>], &Outputs),
    me: Rank,
    device: &'static horovod_gpu::Device,
    pool: &Arc<PinnedPool>,
) -> Result<Copies, Failure> {
    let Layout { places, bytes } = Layout::of(execution, (entries, outputs), me)?;
    let pinned = Arc::new(pool.take(device, bytes)?);
    // Of a broadcast only the root's bytes are read.
    let is_read = !matches!(execution.op, Op::Broadcast { root } if root != me);
    let (mut places, mut calls) = (places.into_iter(), Vec::new());
    let mut stage = |tensor: &Tensor| {
        let place = places.next();
        let memory = pinned.at(place.as_ref().map_or(0, |place| place.at));
        let bytes = tensor.bytes().unwrap_or(0);
        if is_read && bytes > 0 {
            calls.push(Call::ToHost {
                from: address(tensor.input),
                to: HostMemory(memory),
                bytes,
            });
        }
        let output = match (&execution.op, place.and_then(|place| place.result)) {
            (Op::Allreduce { .. } | Op::Broadcast { .. }, _) => Output::At(memory),
            (_, Some(ResultPlace { at, bytes, is_even })) => {
                let at = pinned.at(at);
                match is_even {
                    true => Output::Even { at, bytes },
                    false => Output::Exactly { at, bytes },
                }
            }
            (_, None) => Output::Allocate,
        };
        // SAFETY: its part of the block, which its owner keeps, and which the device writes before anybody reads.
        unsafe { Tensor::new(tensor.meta.clone(), memory, output) }.kept_by(pinned.clone())
    };
    let staged = entries.iter().map(|entry| {
        entry.as_ref().map(|entry| Entry {
            tensors: entry
                .tensors
                .iter()
                .map(&mut stage)
                .collect::<Vec<_>>()
                .into(),
            splits: entry.splits.clone(),
            submitted: None,
            allocator: None,
        })
    });
    let staged = staged.collect();
    Ok(Copies {
        work: Work {
            title: "".into(),
            seq: execution.seq.0,
            set: execution.set.0,
            group: None,
            after: events(entries, &Vec::new()),
            calls,
            timed: false,
        },
        staged,
    })
}

impl Copies {
    pub(super) fn launch(
        mut self,
        executor: Arc<Executor>,
        title: Arc<str>,
        timed: bool,
    ) -> impl StageIn + use<> {
        self.work.title = title;
        self.work.timed = timed && !self.work.calls.is_empty();
        let is_recorded = self.work.timed;
        // SAFETY: the submitters' memory is theirs until completion; the pinned block is kept by the staged tensors.
        let launch = unsafe { executor.submit(self.work) };
        CopiesIn {
            executor,
            launch,
            staged: Some(self.staged),
            is_recorded,
        }
    }
}

impl StageIn for CopiesIn {
    fn poll(&mut self) -> Option<Result<Vec<Option<Entry>>, String>> {
        // After a failure the device may go on with copies for long, to memory that is kept.
        let failure = || self.executor.failure().cloned().map(Err);
        match self.launch.ended().or_else(failure)? {
            Ok(()) => self.staged.take().map(Ok),
            Err(WorkError::Aborted(why) | WorkError::Failed(why) | WorkError::PeerFailed(why)) => {
                Some(Err(why.to_string()))
            }
        }
    }

    fn stage(&self) -> Option<DeviceStage> {
        self.is_recorded.then(|| DeviceStage {
            name: IN_STAGE,
            times: self.launch.times(),
        })
    }
}

impl Drop for CopiesIn {
    fn drop(&mut self) {
        // The device may still write there.
        if self.launch.ended().is_none() {
            std::mem::forget(self.staged.take());
        }
    }
}

/// What the device reads until the copies have ended.
pub(super) struct Kept {
    _staged: Vec<Option<Entry>>,
    _buffers: Vec<Buffer>,
}

/// An execution whose results are copied to the device.
pub(super) struct KeepingFlight {
    pub(super) flight: Flight,
    pub(super) _kept: Kept,
}

impl InFlight for KeepingFlight {
    fn launched(&mut self) -> Option<Results> {
        self.flight.launched()
    }

    fn failing(&self) -> Option<Failure> {
        self.flight.failing()
    }

    fn poll(&mut self) -> Option<Result<Results, Failure>> {
        self.flight.poll()
    }

    fn stage(&self) -> Option<DeviceStage> {
        self.flight.stage()
    }

    fn abort(&mut self, cause: &Aborted) {
        self.flight.abort(cause);
    }

    fn give_up(&self, after: Duration) {
        self.flight.give_up(after);
    }
}

/// Copy the results to where they belong.
pub(super) fn end(
    staged: Staged<'_>,
    title: Arc<str>,
    me: Rank,
) -> Result<(Work, Results, Kept), Failure> {
    let Staged {
        execution,
        entries,
        staged: on_host,
        outputs,
        results,
        timed,
    } = staged;
    let after = events(&[], outputs);
    let mut calls = Vec::new();
    let is_root = matches!(execution.op, Op::Broadcast { root } if root == me);
    if matches!(execution.op, Op::Allreduce { .. } | Op::Broadcast { .. }) {
        let tensors = entries.iter().flatten().flat_map(|e| e.tensors.iter());
        let copies = on_host.iter().flatten().flat_map(|e| e.tensors.iter());
        for (tensor, copy) in tensors.zip(copies) {
            let output = output_of(tensor)?;
            let is_there = is_root && output.cast_const() == tensor.input;
            let bytes = tensor.bytes().unwrap_or(0);
            if bytes > 0 && !is_there {
                calls.push(Call::ToDevice {
                    from: HostMemory(copy.input.cast_mut()),
                    to: address(output),
                    bytes,
                });
            }
        }
    }
    let mut buffers = Vec::new();
    let mut place = |(id, result): (EntryId, Result<OpResult, Error>)| {
        let item = execution
            .items
            .iter()
            .position(|item| item.entry == Some(id));
        let (Ok(mut result), Some(item)) = (result, item) else {
            return Err(Failure::Local("a result belongs to no tensor".into()));
        };
        let tensors = entries.get(item).and_then(Option::as_ref);
        let received = result.received_splits.clone();
        for (i, slot) in result.outputs.iter_mut().enumerate() {
            let Some((made, shape)) = slot.take() else {
                continue;
            };
            let tensor = tensors.and_then(|entry| entry.tensors.get(i));
            let given = outputs.get_mut(item).and_then(|given| given.get_mut(i));
            let output = tensor.map(|tensor| (tensor, tensor.output));
            let own = match output {
                Some((tensor, Output::Even { at, bytes }))
                    if bytes == made.len()
                        && is_even(execution, (item, i), tensor, received.as_deref()) =>
                {
                    Buffer::lent(at, bytes)
                }
                Some((_, Output::Exactly { at, bytes })) if bytes == made.len() => {
                    Buffer::lent(at, bytes)
                }
                _ => None,
            };
            let buffer = own.or_else(|| Some(given?.take()?.0));
            if buffer.is_none() && matches!(output, Some((_, Output::Even { .. }))) {
                // Whoever looks for it elsewhere is told.
                *slot = Some((made, shape));
                continue;
            }
            let buffer = buffer
                .filter(|buffer| buffer.len() >= made.len())
                .ok_or_else(|| {
                    Failure::Local(format!(
                        "there are no {} bytes of GPU memory for a result",
                        made.len()
                    ))
                })?;
            if !made.is_empty() {
                calls.push(Call::ToDevice {
                    from: HostMemory(made.as_mut_ptr()),
                    to: address(buffer.as_mut_ptr()),
                    bytes: made.len(),
                });
            }
            buffers.push(made);
            *slot = Some((buffer, shape));
        }
        debug_assert!(matches!(result.completion, Completion::Done));
        Ok((id, Ok(result)))
    };
    let results = results
        .into_iter()
        .map(&mut place)
        .collect::<Result<_, _>>()?;
    let work = Work {
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

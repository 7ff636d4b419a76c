//! Submission of operations: names, local checks, hand-over of a pending entry to the engine, and the wait for it.

use std::fmt::Write;
use std::time::Duration;

use horovod_metrics::Metrics;
use horovod_protocol::{
    Completion, DType, Device, EntryId, Op, ProcessSetId, Rank, ReduceOp, Scale,
};
use horovod_timeline::op_name;

use super::accelerator::check_layout;
use super::calls::wait_for_submitted;
use super::handles::{Delivery, Handles, Wait};
use super::{Allocator, Callback, Engine, Entry, Handle, Kept, Negotiation, RecordedCall, Waited};
use crate::error::Error;
use crate::tensor::{Tensor, Tensors};

/// Longest single wait of the blocking calls between two checks whether the caller wants to stop.
const WAIT_SLICE: Duration = Duration::from_millis(100);

/// One operation as the caller describes it; a group has several tensors.
pub struct Submission<'a> {
    pub(super) prefix: &'a str,
    pub(super) name: Option<&'a str>,
    pub(super) op: Op,
    pub(super) set: ProcessSetId,
    pub(super) tensors: Tensors,
    pub(super) splits: Option<Vec<i64>>,
    pub(super) end: Delivery,
    pub(super) allocator: Option<Allocator>,
}

impl<'a> Submission<'a> {
    /// Describes an operation of the members of `set`. `prefix` is the kind of call (`allreduce`, `grouped_allreduce`,
    /// …) and the first part of the operation's name. Without a `name`, or with an empty one, the operation is numbered
    /// per process set and prefix.
    #[inline]
    pub fn new(
        prefix: &'a str,
        name: Option<&'a str>,
        op: Op,
        set: ProcessSetId,
        tensors: Tensors,
    ) -> Self {
        Self {
            prefix,
            name,
            op,
            set,
            tensors,
            splits: None,
            end: Delivery::ToWaiter(None),
            allocator: None,
        }
    }

    /// Alltoall: sets the rows of dimension 0 for each member; `None`: the same number for each.
    #[must_use]
    pub fn with_splits(mut self, splits: Option<Vec<i64>>) -> Self {
        self.splits = splits;
        self
    }

    /// Keeps an object that [`Engine::wait`] returns when the operation has ended.
    #[must_use]
    #[inline(always)] // as a call it moves all of the submission
    pub fn keeping(mut self, kept: Option<Kept>) -> Self {
        self.end = Delivery::ToWaiter(kept);
        self
    }

    /// Delivers the result to `callback` instead of a waiter of the handle. The callback runs once, on a thread of the
    /// engine that does nothing else for this rank meanwhile, while no lock of the engine is held. The callback may
    /// therefore take locks of its caller and submit again. That thread runs no other callback meanwhile. A panic in it
    /// is logged and ends nothing. The callback is not called when the submission is refused.
    #[must_use]
    pub fn calling(mut self, callback: Callback) -> Self {
        self.end = Delivery::ToCallback(callback);
        self
    }

    /// `allocator` allocates the outputs of kind [`Output::Allocate`], instead of the engine; the callback thread calls
    /// it, as of [`Self::calling`]. Only allgather, alltoall and reducescatter use it.
    ///
    /// # Safety
    /// The allocator's memory is as [`Allocator`] requires.
    ///
    /// [`Output::Allocate`]: crate::Output::Allocate
    #[must_use]
    pub unsafe fn allocating(mut self, allocator: Allocator) -> Self {
        self.allocator = Some(allocator);
        self
    }
}

impl Engine {
    /// Queues one operation. On an error nothing is queued and no name is used up.
    ///
    /// # Errors
    /// Arguments that have no meaning, tensors on a device that no accelerator serves, a name that is pending already,
    /// or an engine that has ended.
    pub fn submit(&self, submission: Submission<'_>) -> Result<Handle, Error> {
        let handle = self.queue(submission)?;
        self.driver_lock.submitted();
        Ok(handle)
    }

    /// As [`Engine::submit`], for several operations that begin together: `body` gets a function that submits one per
    /// call. All of them are announced at once.
    pub fn submit_together<T>(
        &self,
        body: impl FnOnce(&mut dyn FnMut(Submission<'_>) -> Result<Handle, Error>) -> T,
    ) -> T {
        let mut any = false;
        let outcome = body(&mut |submission| {
            let handle = self.queue(submission)?;
            any = true;
            Ok(handle)
        });
        if any {
            self.driver_lock.submitted();
        }
        outcome
    }

    /// Returns the kind of device on which all these tensors lie.
    fn device_of(&self, tensors: &[Tensor]) -> Result<Device, Error> {
        let mut devices = tensors.iter().map(|tensor| tensor.device);
        let device = devices.next().unwrap_or(Device::Cpu);
        if let Some(other) = devices.find(|other| *other != device) {
            return Err(Error::Invalid(format!(
                "the tensors of one group lie on a {} and on a {}; they must all lie on the same kind of device",
                device.name(),
                other.name()
            )));
        }
        if device != Device::Cpu {
            self.shared.accelerators.claim(device, tensors)?;
        }
        Ok(device)
    }

    pub(super) fn queue(&self, submission: Submission<'_>) -> Result<Handle, Error> {
        // The submission is not destructured, so that its tensors are moved only once, into the pending entry.
        let Submission {
            prefix,
            name,
            set,
            ref tensors,
            ..
        } = submission;
        let op = submission.op;
        check_arithmetic(&op, tensors)?;
        let device = self.device_of(tensors)?;
        let late = matches!(op, Op::Allgather | Op::Alltoall | Op::Reducescatter { .. });
        let allocator = submission.allocator.filter(|_| late);
        if device != Device::Cpu {
            check_layout(device, tensors, late && allocator.is_none())?;
        }
        let is_called_back = matches!(submission.end, Delivery::ToCallback(_));
        if is_called_back || allocator.is_some() {
            self.start_callback_thread()?;
        }
        check_sizes(tensors)?;
        let named = name.filter(|n| !n.is_empty());
        let mut state = self.shared.lock();
        let splits = match (&op, tensors.first()) {
            (Op::Alltoall, Some(tensor)) => {
                let members = state.worker.members(set).map_or(1, <[Rank]>::len);
                Some(row_splits(tensor, submission.splits.as_deref(), members)?)
            }
            _ => None,
        };
        state.describe(set, (prefix, named), op, device, tensors);
        self.shared.callers.submits();
        let handle = Handles::number();
        let id = EntryId(handle.0);
        state.prestageable = None;
        let Negotiation {
            worker, request, ..
        } = &mut *state;
        let tag = match worker.submit(id, request) {
            Ok(tag) => tag,
            Err(e) => {
                // The refused name may be of any length.
                request.name = String::new();
                drop(state);
                return Err(e.into());
            }
        };
        // Inserted only now: a thread that ends everything pending must not end an operation that was refused.
        self.shared.handles.insert(handle, submission.end);
        // If other operations are pending, this one is likely to be fused with them.
        let alone = worker.pending() == 1;
        state.prestageable = tag.filter(|_| alone).map(|tag| (id, tag));
        if named.is_none() {
            state.count_unnamed(set, prefix);
        }
        let observers = &self.shared.observers;
        let submitted = observers.timeline.stamp();
        let metrics = observers.metrics.as_ref().filter(|_| is_called_back);
        let called_back = metrics.map(Metrics::call);
        let entry = Entry {
            tensors: submission.tensors,
            splits,
            submitted,
            allocator,
            _called_back: called_back,
        };
        state.insert(id, entry);
        Ok(handle)
    }

    /// Waits at most `timeout`, and clears the handle when the operation has ended. With a zero timeout this only
    /// polls. A thread that began an execution would have to suspend it at its first wait, and wake the engine's
    /// thread.
    pub fn wait(&self, handle: Handle, timeout: Duration) -> Waited {
        if timeout.is_zero() {
            let ended = self.shared.handles.lock().take(handle);
            return ended.unwrap_or(Waited::Pending);
        }
        let waited = self.wait_as(handle, timeout, Wait::Plain);
        if matches!(waited, Waited::Pending) {
            // A soft wait for the operation may have been interrupted.
            self.shared.handles.lock().keep(handle);
        }
        waited
    }

    pub(super) fn wait_as(&self, handle: Handle, timeout: Duration, wait: Wait) -> Waited {
        let timeline = &self.shared.observers.timeline;
        // A wait for an operation that has ended is not recorded.
        if !timeline.is_on() || self.shared.handles.poll(handle) != Some(false) {
            return self.wait_unrecorded(handle, timeout, wait);
        }
        let _recorded = RecordedCall::begin(&self.shared);
        let begin = timeline.now();
        let waited = self.wait_unrecorded(handle, timeout, wait);
        timeline.waited(begin);
        waited
    }

    fn wait_unrecorded(&self, handle: Handle, timeout: Duration, wait: Wait) -> Waited {
        self.shared.callers.waits(handle, wait == Wait::Soft);
        let is_announced = wait != Wait::Announcing;
        let _measured = self.shared.observers.metrics.as_deref().map(Metrics::wait);
        let waited = self.driver_lock.wait(handle, timeout, is_announced);
        let callers = &self.shared.callers;
        match &waited {
            Waited::Pending => callers.pauses(self.shared.now().0),
            _ => callers.waits_no_more(),
        }
        waited
    }

    /// Waits for all members of the set. `interrupted` is called a few times a second; its error ends the wait.
    pub fn barrier<E: From<Error>>(
        &self,
        set: ProcessSetId,
        interrupted: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        self.run_without_data("barrier", Op::Barrier, set, interrupted)
            .map(drop)
    }

    /// Announces that this rank has no more data and waits for all others; returns the rank that joined last.
    pub fn join<E: From<Error>>(
        &self,
        interrupted: impl FnMut() -> Result<(), E>,
    ) -> Result<Rank, E> {
        match self.run_without_data("join", Op::Join, ProcessSetId::GLOBAL, interrupted)? {
            Completion::Joined { last } => {
                self.shared.replicas.note_joined();
                Ok(last)
            }
            other => Err(Error::Internal(format!("join ended with {other:?}")).into()),
        }
    }

    /// Registers a set of ranks; every rank of the job must make the same call. Returns the set's id.
    pub fn add_process_set<E: From<Error>>(
        &self,
        ranks: &[u32],
        interrupted: impl FnMut() -> Result<(), E>,
    ) -> Result<ProcessSetId, E> {
        let mut ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
        ranks.sort_unstable();
        let op = Op::AddProcessSet { ranks };
        match self.run_without_data("process_set.add", op, ProcessSetId::GLOBAL, interrupted)? {
            Completion::SetAdded(id) => Ok(id),
            other => Err(Error::Internal(format!("adding a set ended with {other:?}")).into()),
        }
    }

    /// Removes a set; every rank of the job must make the same call. Returns `false` if there was no set to remove.
    pub fn remove_process_set<E: From<Error>>(
        &self,
        set: ProcessSetId,
        interrupted: impl FnMut() -> Result<(), E>,
    ) -> Result<bool, E> {
        if set == ProcessSetId::GLOBAL || self.members(set).is_none() {
            return Ok(false);
        }
        let op = Op::RemoveProcessSet { set };
        match self.run_without_data("process_set.remove", op, ProcessSetId::GLOBAL, interrupted)? {
            Completion::SetRemoved(removed) => Ok(removed),
            other => Err(Error::Internal(format!("removing a set ended with {other:?}")).into()),
        }
    }

    fn run_without_data<E: From<Error>>(
        &self,
        prefix: &str,
        op: Op,
        set: ProcessSetId,
        mut interrupted: impl FnMut() -> Result<(), E>,
    ) -> Result<Completion, E> {
        let name = Some("noname");
        let title = op_name(&op);
        let _recorded = self
            .shared
            .observers
            .timeline
            .is_on()
            .then(|| RecordedCall::begin(&self.shared));
        let begin = self.shared.now().0;
        let tensors = Tensors::default();
        let handle = self.queue(Submission::new(prefix, name, op, set, tensors))?;
        let mut wait = wait_for_submitted(&self.driver_lock);
        loop {
            let waited = self.wait_unrecorded(handle, WAIT_SLICE, wait);
            wait = Wait::Plain;
            match waited {
                Waited::Ended { result, .. } => {
                    if self.shared.observers.timeline.is_on() {
                        self.shared.observers.timeline.spent(title, begin);
                    }
                    return Ok(result?.completion);
                }
                Waited::Unknown => return Err(vanished(handle).into()),
                Waited::Pending => {
                    if let Err(stop) = interrupted() {
                        // No thread will request the result.
                        self.shared.handles.cancel(handle);
                        return Err(stop);
                    }
                }
            }
        }
    }
}

impl Negotiation {
    /// Builds the request.
    fn describe(
        &mut self,
        set: ProcessSetId,
        (prefix, name): (&str, Option<&str>),
        op: Op,
        device: Device,
        tensors: &[Tensor],
    ) {
        let number = match name {
            Some(_) => 0,
            None => self.unnamed(set, prefix).map_or(0, |n| *n) + 1,
        };
        let request = &mut self.request;
        request.set = set;
        request.op = op;
        request.device = device;
        request.name.clear();
        request.name.push_str(prefix);
        match name {
            Some(name) => {
                request.name.push('.');
                request.name.push_str(name);
            }
            // Writing to a string cannot fail.
            None => drop(write!(request.name, ".noname.{number}")),
        }
        let metas = tensors.iter().map(|t| t.meta.clone());
        request.tensors.clear();
        request.tensors.extend(metas);
    }

    fn unnamed(&mut self, set: ProcessSetId, prefix: &str) -> Option<&mut u64> {
        let mut counters = self.unnamed.get_mut(&set)?.iter_mut();
        counters.find_map(|(of, n)| (**of == *prefix).then_some(n))
    }

    fn count_unnamed(&mut self, set: ProcessSetId, prefix: &str) {
        match self.unnamed(set, prefix) {
            Some(n) => *n += 1,
            None => {
                let counters = self.unnamed.entry(set).or_default();
                counters.push((prefix.into(), 1));
            }
        }
    }
}

pub(super) fn vanished(handle: Handle) -> Error {
    Error::Internal(format!("handle {} vanished", handle.0))
}

/// Refuses combinations of element type, operation and factors that have no meaning.
fn check_arithmetic(op: &Op, tensors: &[Tensor]) -> Result<(), Error> {
    let (op, scale) = match op {
        // The coordinator refuses these operations for every element type; its text gives the reason.
        Op::Reducescatter { op, .. } if !matches!(op, ReduceOp::Average | ReduceOp::Sum) => {
            return Ok(());
        }
        Op::Allreduce { op, scale } | Op::Reducescatter { op, scale } => (*op, *scale),
        _ => return Ok(()),
    };
    if !scale.pre.is_finite() || !scale.post.is_finite() {
        return Err(Error::Invalid(format!(
            "prescale_factor={} and postscale_factor={} must be finite numbers",
            scale.pre, scale.post
        )));
    }
    for dtype in tensors.iter().map(|t| t.meta.dtype) {
        if dtype == DType::Bool && (op == ReduceOp::Average || scale != Scale::NONE) {
            return Err(Error::Invalid(
                "bool tensors cannot be averaged or scaled; use op=Sum (or), Product (and), Min or Max"
                    .into(),
            ));
        }
        if op == ReduceOp::Adasum && !dtype.is_float() {
            return Err(Error::Invalid(format!(
                "Adasum works on floating-point tensors, not on {}",
                dtype.name()
            )));
        }
    }
    Ok(())
}

fn check_sizes(tensors: &[Tensor]) -> Result<(), Error> {
    for t in tensors {
        if t.bytes().is_none() || t.row_bytes().is_none() {
            return Err(Error::Invalid(format!(
                "shape {:?} is too large for this machine",
                t.meta.shape
            )));
        }
    }
    Ok(())
}

/// Checks alltoall splits; returns even ones if there are none.
fn row_splits(tensor: &Tensor, splits: Option<&[i64]>, members: usize) -> Result<Vec<u64>, Error> {
    let rows = tensor.rows();
    if tensor.meta.shape.is_empty() {
        // The coordinator has the text for a 0-d tensor; every rank gets it.
        return Ok(vec![0; members]);
    }
    let Some(splits) = splits else {
        let n = members as u64;
        if !rows.is_multiple_of(n) {
            return Err(Error::Invalid(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of workers."
                    .into(),
            ));
        }
        return Ok(vec![rows / n; members]);
    };
    if splits.len() != members {
        return Err(Error::Invalid(format!(
            "Number of entries in splits does not equal number of workers. Got {}, expected {members}.",
            splits.len()
        )));
    }
    let mut total = 0u64;
    let mut checked = Vec::with_capacity(members);
    for &s in splits {
        let s = u64::try_from(s)
            .map_err(|_| Error::Invalid(format!("splits entries must not be negative, got {s}")))?;
        total = total.saturating_add(s);
        checked.push(s);
    }
    if total > rows {
        return Err(Error::Invalid(format!(
            "Sum of splits entries is greater than the first dimension of tensor. Got {total}, the tensor has {rows} rows."
        )));
    }
    Ok(checked)
}

#[cfg(test)]
mod tests {
    use horovod_protocol::TensorMeta;

    use super::*;
    use crate::tensor::Output;

    fn tensor(dtype: DType, shape: &[u64]) -> Tensor {
        let meta = TensorMeta::new(dtype, shape);
        // SAFETY: no code dereferences its pointers.
        unsafe { Tensor::new(meta, std::ptr::null(), Output::Allocate) }
    }

    #[test]
    fn splits_are_even_unless_given_and_checked_when_given() {
        let t = tensor(DType::F32, &[6, 2]);
        assert_eq!(row_splits(&t, None, 3).unwrap(), [2, 2, 2]);
        assert_eq!(row_splits(&t, Some(&[1, 0, 4]), 3).unwrap(), [1, 0, 4]);
        for (splits, members, text) in [
            (None, 4, "not an even multiple"),
            (Some(&[1i64, 2][..]), 3, "Number of entries in splits"),
            (Some(&[3, 4]), 2, "Sum of splits entries is greater"),
            (Some(&[-1, 4]), 2, "negative"),
        ] {
            let e = row_splits(&t, splits, members).unwrap_err().to_string();
            assert!(e.contains(text), "{e}");
        }
    }

    #[test]
    fn meaningless_arithmetic_is_refused() {
        let average = Op::Allreduce {
            op: ReduceOp::Average,
            scale: Scale::NONE,
        };
        assert!(check_arithmetic(&average, &[tensor(DType::Bool, &[2])]).is_err());
        assert!(check_arithmetic(&average, &[tensor(DType::I16, &[2])]).is_ok());
        let adasum = Op::Allreduce {
            op: ReduceOp::Adasum,
            scale: Scale::NONE,
        };
        assert!(check_arithmetic(&adasum, &[tensor(DType::I32, &[2])]).is_err());
        let scattered = Op::Reducescatter {
            op: ReduceOp::Adasum,
            scale: Scale::NONE,
        };
        let first = check_arithmetic(&scattered, &[tensor(DType::I32, &[2])]);
        assert_eq!(first, Ok(()), "the operator is refused first, elsewhere");
        let scaled = Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale {
                pre: f64::NAN,
                post: 1.0,
            },
        };
        assert!(check_arithmetic(&scaled, &[tensor(DType::F32, &[2])]).is_err());
    }
}

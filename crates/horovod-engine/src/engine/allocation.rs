//! Allocation of outputs by the submission's allocator: called when their sizes are settled, while no lock is held.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use horovod_protocol::{DType, Shape};
use horovod_transport::Notifier;

use super::Entry;
use super::backend::Outputs;
use super::handles::DueCallback;
use super::placement::Placement;
use crate::buffer::Buffer;

/// Allocates memory for an output, given the index of its tensor in the submission, its element type and its shape. The
/// memory must be writable, and used by nothing else, until the operation has ended. For an output without elements it
/// may be null. The text of an error gives the reason.
pub type Allocator = Box<dyn FnMut(usize, DType, &[u64]) -> Result<Allocated, String> + Send>;

/// Memory for an output.
#[derive(Clone, Debug)]
pub struct Allocated {
    /// First byte, on the device of the submission.
    pub memory: *mut u8,
    /// Facts that the device of the submission needs, such as when the memory may be written.
    pub placement: Option<Placement>,
}

impl From<*mut u8> for Allocated {
    fn from(memory: *mut u8) -> Self {
        let placement = None;
        Self { memory, placement }
    }
}

/// An allocation that was requested, and its result.
#[derive(Default)]
pub(super) struct Allocation {
    ended: AtomicBool,
    outcome: Mutex<Option<Result<Outputs, String>>>,
}

/// Memory requested for one submission.
struct Wanted {
    allocator: Option<Allocator>,
    outputs: Vec<(DType, Shape)>,
}

impl Allocation {
    /// Returns an allocation for these entries, and the callback that calls their allocators. Entries without an
    /// allocator get no outputs.
    pub(super) fn of(
        entries: &mut [Option<Entry>],
        shapes: Vec<Vec<Shape>>,
        notifier: Notifier,
    ) -> (Arc<Self>, DueCallback) {
        let wanted: Vec<_> = entries
            .iter_mut()
            .zip(shapes)
            .map(|(entry, shapes)| {
                let tensors = entry.iter().flat_map(|entry| entry.tensors.iter());
                let types: Vec<_> = tensors.map(|tensor| tensor.meta.dtype).collect();
                Wanted {
                    allocator: entry.as_mut().and_then(|entry| entry.allocator.take()),
                    outputs: types.into_iter().zip(shapes).collect(),
                }
            })
            .collect();
        let allocation = Arc::new(Self::default());
        let asked = allocation.clone();
        let callback = move || {
            let asking = AssertUnwindSafe(|| wanted.into_iter().map(Wanted::ask).collect());
            let outcome = catch_unwind(asking)
                .unwrap_or_else(|_| Err("the allocator of a result panicked".into()));
            *asked.outcome() = Some(outcome);
            asked.ended.store(true, Ordering::Release);
            notifier.notify();
        };
        (allocation, Box::new(callback))
    }

    fn outcome(&self) -> std::sync::MutexGuard<'_, Option<Result<Outputs, String>>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the allocation has succeeded or failed.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns the memory or the error, once; `None` until the allocators have returned.
    pub(super) fn take(&self) -> Option<Result<Outputs, String>> {
        self.has_ended().then(|| self.outcome().take())?
    }
}

impl Wanted {
    fn ask(self) -> Result<Vec<Option<(Buffer, Shape)>>, String> {
        let Some(mut allocator) = self.allocator else {
            return Ok(Vec::new());
        };
        let mut outputs = Vec::new();
        for (i, (dtype, shape)) in self.outputs.into_iter().enumerate() {
            let elems = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
            let bytes = elems
                .and_then(|n| usize::try_from(n).ok())
                .and_then(|n| n.checked_mul(dtype.size()));
            let bytes = bytes.ok_or("a result is too large for this machine")?;
            let Allocated { memory, placement } = allocator(i, dtype, &shape)
                .map_err(|why| format!("cannot allocate a result of {bytes} bytes: {why}"))?;
            let buffer = Buffer::lent(memory, bytes).ok_or_else(|| {
                format!("cannot allocate a result of {bytes} bytes: it is at null")
            })?;
            outputs.push(Some((buffer.placed(placement), shape)));
        }
        Ok(outputs)
    }
}

//! Pinned memory of the host, in blocks that are used again. CUDA allocates and frees it on threads of
//! their own. CUDA may wait for the device first, and a kernel of the script may never end. The engine's thread cannot wait
//! for that: it sends signs of life.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use horovod_gpu::{GpuError, PinnedMemory};
use horovod_transport::Notifier;

use super::super::Failure;
use super::super::rows::too_large;

/// Bytes that are kept for reuse at most.
pub(super) const KEPT_MAX: usize = 256 << 20;
/// Blocks are of whole pages, so that slightly different lengths share them.
const PAGE: usize = 4096;

/// Blocks that are not in use, smallest first: they take long to make, and to free.
#[derive(Debug, Default)]
pub(super) struct PinnedPool(Mutex<Vec<PinnedMemory>>);

/// A block, which goes back when it is dropped.
#[derive(Debug)]
pub(super) struct Pinned {
    memory: Option<PinnedMemory>,
    pool: Arc<PinnedPool>,
}

/// A block that was asked for.
pub(super) struct AskedBlock {
    pool: Arc<PinnedPool>,
    slot: Arc<Mutex<BlockSlot>>,
}

/// Where it comes.
enum BlockSlot {
    Empty,
    Came(Result<PinnedMemory, GpuError>),
    /// Nobody waits for it any more.
    Abandoned,
}

impl PinnedPool {
    /// Ask for a block of at least so many bytes; where it has to be made, there is a notice when it is there.
    pub(super) fn ask(
        self: &Arc<Self>,
        device: &'static horovod_gpu::Device,
        bytes: usize,
        notifier: &Notifier,
    ) -> Result<AskedBlock, Failure> {
        let bytes = bytes
            .max(1)
            .checked_next_multiple_of(PAGE)
            .ok_or_else(too_large)?;
        let kept = self.take(bytes);
        let is_kept = kept.is_some();
        let slot = kept.map_or(BlockSlot::Empty, |memory| BlockSlot::Came(Ok(memory)));
        let asked = AskedBlock {
            pool: self.clone(),
            slot: Arc::new(Mutex::new(slot)),
        };
        if !is_kept {
            let (slot, notifier) = (asked.slot.clone(), notifier.clone());
            let make = move || {
                let made = device.allocate_pinned(bytes);
                let mut slot = lock(&slot);
                if matches!(*slot, BlockSlot::Empty) {
                    *slot = BlockSlot::Came(made);
                    notifier.notify();
                }
            };
            let thread = std::thread::Builder::new().name("horovod-pin".into());
            thread.spawn(make).map_err(|error| {
                Failure::Local(format!(
                    "cannot start the thread that pins memory for tensors of a GPU: {error}"
                ))
            })?;
        }
        Ok(asked)
    }

    fn take(&self, bytes: usize) -> Option<PinnedMemory> {
        let mut free = lock(&self.0);
        let fits =
            |memory: &PinnedMemory| (bytes..=bytes.saturating_mul(2)).contains(&memory.len());
        let at = free.iter().position(fits)?;
        Some(free.remove(at))
    }

    fn give_back(&self, memory: PinnedMemory) {
        let mut free = lock(&self.0);
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

fn release(memory: Vec<PinnedMemory>) {
    if memory.is_empty() {
        return;
    }
    let thread = std::thread::Builder::new().name("horovod-unpin".into());
    if let Err(error) = thread.spawn(move || drop(memory)) {
        tracing::debug!("pinned memory was freed by the engine's thread: {error}");
    }
}

fn lock<T>(it: &Mutex<T>) -> MutexGuard<'_, T> {
    it.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AskedBlock {
    /// The block, once it is there; why it never will be.
    pub(super) fn poll(&mut self) -> Option<Result<Pinned, String>> {
        let mut slot = lock(&self.slot);
        let came = match std::mem::replace(&mut *slot, BlockSlot::Empty) {
            BlockSlot::Came(came) => came,
            other => {
                *slot = other;
                return None;
            }
        };
        let block = came.map(|memory| Pinned {
            memory: Some(memory),
            pool: self.pool.clone(),
        });
        Some(block.map_err(|error| error.to_string()))
    }
}

impl Drop for AskedBlock {
    fn drop(&mut self) {
        let slot = std::mem::replace(&mut *lock(&self.slot), BlockSlot::Abandoned);
        if let BlockSlot::Came(Ok(memory)) = slot {
            self.pool.give_back(memory);
        }
    }
}

impl Pinned {
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
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

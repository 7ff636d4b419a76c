//! Memory for results whose size is known only after negotiation: of the host (aligned, pooled, reused), or of a device.

use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::engine::placement::Placement;

/// Alignment of every buffer: a cache line, enough for any vector load.
const ALIGN: usize = 64;
/// Bytes that the pool keeps for reuse at most.
const POOL_BYTES_MAX: usize = 256 << 20;

/// Freed blocks by size, so that a training loop touches fresh pages only once.
#[derive(Debug, Default)]
pub struct BufferPool {
    free: Mutex<FreeList>,
}

#[derive(Debug, Default)]
struct FreeList {
    blocks: Vec<Block>,
    bytes: usize,
}

#[derive(Debug)]
struct Block {
    ptr: NonNull<u8>,
    capacity: usize,
}

// SAFETY: a block is plain memory with a single owner; nothing in it is tied to a thread.
unsafe impl Send for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `allocate` with this same layout and freed only here.
        unsafe { dealloc(self.ptr.as_ptr(), layout(self.capacity)) }
    }
}

fn layout(capacity: usize) -> Layout {
    match Layout::from_size_align(capacity, ALIGN) {
        Ok(l) => l,
        Err(_) => unreachable!("capacities are checked when a buffer is made"),
    }
}

/// One writable block of memory: of a pool, to which it returns when dropped, of a submission's allocator, or of a device.
#[derive(Debug)]
pub struct Buffer {
    backing: Backing,
    len: usize,
}

#[derive(Debug)]
enum Backing {
    Empty,
    Pooled(Option<Block>, Weak<BufferPool>),
    /// The allocator frees the memory. Its device must know this of it, such as when it may be written.
    Lent(NonNull<u8>, Option<Placement>),
    /// The owner frees the memory.
    Owned(
        *mut u8,
        #[expect(dead_code, reason = "kept until it is dropped")] Box<dyn Any + Send>,
    ),
}

// SAFETY: a block has a single owner, and what an allocator lends is the operation's alone, as its contract demands.
unsafe impl Send for Backing {}
// SAFETY: the memory is only reached through raw pointers whose users order their own accesses.
unsafe impl Sync for Buffer {}

impl BufferPool {
    /// `len` bytes of uninitialised memory; `None` when there is no such memory. Zero length holds no memory.
    pub fn take(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        if len == 0 {
            let backing = Backing::Empty;
            return Some(Buffer { backing, len });
        }
        // Rounding to pages lets slightly different sizes share blocks.
        let capacity = len.checked_next_multiple_of(if len > 65536 { 4096 } else { ALIGN })?;
        let block = self.reuse(capacity).or_else(|| allocate(capacity))?;
        let backing = Backing::Pooled(Some(block), Arc::downgrade(self));
        Some(Buffer { backing, len })
    }

    fn reuse(&self, capacity: usize) -> Option<Block> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.blocks.iter().rposition(|b| b.capacity == capacity)?;
        let block = free.blocks.swap_remove(at);
        free.bytes -= block.capacity;
        Some(block)
    }

    fn give_back(&self, block: Block) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.bytes += block.capacity;
        free.blocks.push(block);
        while free.bytes > POOL_BYTES_MAX || free.blocks.len() > POOL_BLOCKS_MAX {
            let oldest = free.blocks.remove(0);
            free.bytes -= oldest.capacity;
        }
    }
}

/// Blocks that the pool keeps at most, so that the search stays short.
const POOL_BLOCKS_MAX: usize = 64;

fn allocate(capacity: usize) -> Option<Block> {
    let layout = Layout::from_size_align(capacity, ALIGN).ok()?;
    // SAFETY: the layout has a non-zero size.
    let ptr = NonNull::new(unsafe { alloc(layout) })?;
    Some(Block { ptr, capacity })
}

impl Buffer {
    /// Backing of a submission's allocator; `None` if it has given none for a result with bytes.
    pub(crate) fn lent(memory: *mut u8, len: usize) -> Option<Self> {
        let backing = match NonNull::new(memory) {
            Some(memory) => Backing::Lent(memory, None),
            None if len == 0 => Backing::Empty,
            None => return None,
        };
        Some(Self { backing, len })
    }

    /// Memory of a device, freed with its owner: by then whatever uses it there must have ended.
    pub(crate) fn owned(memory: *mut u8, len: usize, owner: Box<dyn Any + Send>) -> Self {
        let backing = Backing::Owned(memory, owner);
        Self { backing, len }
    }

    /// [`Self::lent`] memory, with what its device must know of it.
    pub(crate) fn placed(mut self, placement: Option<Placement>) -> Self {
        if let Backing::Lent(_, placed) = &mut self.backing {
            *placed = placement;
        }
        self
    }

    /// The facts that its device must know.
    pub fn placement(&self) -> Option<&Placement> {
        match &self.backing {
            Backing::Lent(_, placement) => placement.as_ref(),
            Backing::Empty | Backing::Pooled(..) | Backing::Owned(..) => None,
        }
    }

    /// Start of the memory; non-null also when empty, and aligned to a cache line unless an allocator gave it.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        match &self.backing {
            Backing::Pooled(Some(block), _) => block.ptr.as_ptr(),
            Backing::Lent(memory, _) => memory.as_ptr(),
            Backing::Owned(memory, _) => *memory,
            Backing::Pooled(None, _) | Backing::Empty => std::ptr::without_provenance_mut(ALIGN),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Backing::Pooled(block, pool) = &mut self.backing
            && let (Some(block), Some(pool)) = (block.take(), pool.upgrade())
        {
            pool.give_back(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_block_is_reused_for_the_same_size() {
        let pool = Arc::new(BufferPool::default());
        let first = pool.take(1000).unwrap();
        let at = first.as_mut_ptr();
        assert_eq!(at as usize % ALIGN, 0);
        drop(first);
        assert_eq!(pool.take(1000).unwrap().as_mut_ptr(), at);
    }

    #[test]
    fn slightly_different_large_sizes_share_a_block_and_small_ones_do_not() {
        let pool = Arc::new(BufferPool::default());
        for (first, second, share) in [(65_537, 69_632, true), (1000, 2000, false)] {
            let buffer = pool.take(first).unwrap();
            let at = buffer.as_mut_ptr();
            drop(buffer);
            // A block that is not shared stays in the pool, so the second one lies elsewhere.
            let is_shared = pool.take(second).unwrap().as_mut_ptr() == at;
            assert_eq!(is_shared, share, "{first} and {second} bytes");
        }
        // At 65,536 itself both ways to round give the same.
    }

    #[test]
    fn what_is_taken_out_counts_no_longer() {
        let pool = Arc::new(BufferPool::default());
        let bytes = || pool.free.lock().unwrap().bytes;
        drop([pool.take(640).unwrap(), pool.take(1280).unwrap()]);
        assert_eq!(bytes(), 640 + 1280);
        let taken = pool.take(1280).unwrap();
        assert_eq!(bytes(), 640);
        drop(taken);
        assert_eq!(bytes(), 640 + 1280);
    }

    #[test]
    fn the_pool_is_bounded_in_bytes_and_blocks() {
        let pool = Arc::new(BufferPool::default());
        let many: Vec<_> = (0..POOL_BLOCKS_MAX + 10)
            .map(|_| pool.take(100).unwrap())
            .collect();
        drop(many);
        assert_eq!(pool.free.lock().unwrap().blocks.len(), POOL_BLOCKS_MAX);
        drop(
            (0..3)
                .map(|_| pool.take(POOL_BYTES_MAX / 2).unwrap())
                .collect::<Vec<_>>(),
        );
        assert!(pool.free.lock().unwrap().bytes <= POOL_BYTES_MAX);
    }

    #[test]
    fn empty_and_impossible_sizes_do_not_panic() {
        let pool = Arc::new(BufferPool::default());
        assert!(pool.take(0).unwrap().is_empty());
        assert!(pool.take(usize::MAX).is_none());
        // A valid layout that no machine has: an error for the caller, not the end of the process.
        assert!(pool.take(isize::MAX as usize - 4096).is_none());
    }
}

//! One mapping of shared memory, which forked children do not inherit.

use std::{io, ptr::NonNull};

use rustix::mm::{MapFlags, ProtFlags};

use super::fd::{Fd, fork_epoch};
use crate::sync::{AtomicU32, AtomicU64};

/// A readable and writable shared mapping.
///
/// Peers may write to it at any time, so it is never lent as a slice: only as atomics or raw
/// pointers.
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    epoch: u32,
}

// SAFETY: the mapping belongs to the process, not to a thread; what is reached through it is atomics
// and raw pointers, whose users argue for themselves.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps the first `len` bytes of a file.
    pub(crate) fn map(fd: &Fd, len: usize) -> io::Result<Self> {
        let fd = fd.get()?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        }?;
        Self::adopt(base, len)
    }

    /// Memory of this process alone, zeroed.
    pub(crate) fn private(len: usize) -> io::Result<Self> {
        // SAFETY: as in `map`.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        Self::adopt(base, len)
    }

    fn adopt(base: *mut core::ffi::c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped shared memory at address 0"))?;
        let region = Self {
            base,
            len,
            epoch: fork_epoch(),
        };
        super::keep_from_children(base.as_ptr(), len)?;
        Ok(region)
    }

    /// Whether this is a forked child, where the mapping does not exist.
    pub(crate) fn is_foreign(&self) -> bool {
        self.epoch != fork_epoch()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes at `offset`; panics if they are not all inside.
    pub(crate) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "outside of the shared region"
        );
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// The word at `offset`.
    pub(crate) fn u32(&self, offset: usize) -> &AtomicU32 {
        let at = self.at(offset, 4);
        assert_eq!(offset % 4, 0, "misaligned word");
        // SAFETY: inside the mapping, aligned (mappings start on a page), valid for any bits and
        // only ever used as an atomic.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    /// The double word at `offset`.
    pub(crate) fn u64(&self, offset: usize) -> &AtomicU64 {
        let at = self.at(offset, 8);
        assert_eq!(offset % 8, 0, "misaligned word");
        // SAFETY: as for `u32`.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.is_foreign() {
            // SAFETY: mapped by us with this length, and nobody can hold a reference any more.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

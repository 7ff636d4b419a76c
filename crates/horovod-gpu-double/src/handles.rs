//! Handles: numbers that look like pointers and say what they are of; nothing lies at their address.

use std::ffi::c_void;

/// A pointer of the interface (`CUstream`, `ncclComm_t` ...).
pub type Handle = *mut c_void;

/// Type of the object behind a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Sort {
    Context = 1,
    Stream = 2,
    Event = 3,
    Module = 4,
    Function = 5,
    Communicator = 6,
}

const SORT_SHIFT: u32 = 40;

pub(crate) fn encode(sort: Sort, id: u64) -> Handle {
    (((sort as u64) << SORT_SHIFT) | (id << 4)) as Handle
}

/// The number of a handle of `sort`.
pub(crate) fn decode(sort: Sort, handle: Handle) -> Option<u64> {
    let bits = handle as u64;
    (bits >> SORT_SHIFT == sort as u64 && bits & 15 == 0)
        .then_some((bits & ((1 << SORT_SHIFT) - 1)) >> 4)
}

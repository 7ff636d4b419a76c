//! The calls of a thread between `ncclGroupStart` and `ncclGroupEnd`.

use super::part::Part;

/// A collective that waits for the end of its group.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) communicator: u64,
    pub(crate) part: Part,
    pub(crate) stream: u64,
}

/// State of a thread's group.
#[derive(Debug, Default)]
pub(crate) struct Group {
    /// Groups nest; the outermost counts.
    pub(crate) depth: u32,
    /// The first error of a call within.
    pub(crate) error: Option<i32>,
    pub(crate) queued: Vec<Queued>,
    /// Communicators that are being made.
    pub(crate) begun: Vec<u64>,
    pub(crate) aborted: Vec<u64>,
    pub(crate) destroyed: Vec<u64>,
}

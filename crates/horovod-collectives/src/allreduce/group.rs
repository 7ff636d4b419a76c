//! The members that exchange a vector without shared memory, and the steps of their exchange.

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::select::Across;
use crate::slices::Parts;

/// An allreduce that makes progress in steps, so that the caller can do other work in between. Extents are those of
/// [`parts`].
pub(super) trait Going {
    /// Processes data that has arrived and sends data that fits; returns whether anything moved. Inputs are complete up
    /// to the extent `ready`.
    fn step(&mut self, ctx: &mut Ctx<'_>, ready: usize) -> Result<bool, CollectiveError>;

    /// Returns the extent up to which results are in the outputs.
    fn finished(&self) -> usize;

    /// Returns whether this member has nothing left to do.
    fn is_done(&self) -> bool;

    /// Returns the buffers to the scratch.
    fn put_back(self: Box<Self>, ctx: &mut Ctx<'_>);
}

/// Returns the order in which an algorithm processes `len` elements of `members`.
pub(super) fn parts(algorithm: Across, len: usize, members: usize) -> Parts {
    let count = match algorithm {
        Across::Exchange | Across::Ring => 1,
        Across::Pairwise => members,
    };
    Parts { len, count }
}

/// The group's members as member indices, and this member's position among them.
#[derive(Clone, Copy)]
pub(super) struct Group<'a> {
    pub(super) members: &'a [usize],
    pub(super) me: usize,
}

impl Group<'_> {
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns the other positions, the next one first, so that not all members begin with the same peer.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.members.len(), self.me);
        (1..n).map(move |distance| (me + distance) % n)
    }
}

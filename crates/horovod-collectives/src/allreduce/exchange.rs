//! Small vectors between members: every member sends its whole vector to every other and reduces all of them, in the
//! order of members. This takes one hop; each member sends its vector once per peer.

use super::group::{Going, Group};
use super::{GroupPosition, Reducer, reduce_range};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::slices::Vector;

pub(super) struct Exchange<'a> {
    reducer: &'a Reducer,
    vector: &'a Vector,
    group: Group<'a>,
    /// Vectors of all members, by position; empty until this member's inputs are complete.
    all: Vec<u8>,
    /// By position: bytes sent of this member's vector, and in `received` bytes received of the other member's.
    sent: Vec<usize>,
    received: Vec<usize>,
    done: bool,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(reducer: &'a Reducer, vector: &'a Vector, group: Group<'a>) -> Self {
        Self {
            reducer,
            vector,
            group,
            all: Vec::new(),
            sent: vec![0; group.len()],
            received: vec![0; group.len()],
            done: false,
        }
    }

    fn bytes(&self) -> usize {
        self.vector.len() * self.vector.size()
    }

    /// Copies this member's tensors to their place in `all`.
    fn begin(&mut self, ctx: &mut Ctx<'_>) {
        let bytes = self.bytes();
        self.all = ctx.scratch.buffer(self.group.len() * bytes);
        let mine = &mut self.all[self.group.me * bytes..][..bytes];
        for piece in self.vector.pieces(0..self.vector.len()) {
            let to = mine[piece.at..].as_mut_ptr();
            // SAFETY: the caller of the collective vouches for the segments; the buffer holds all.
            unsafe {
                let bytes = piece.elems * self.vector.size();
                to.copy_from_nonoverlapping(piece.input, bytes);
            }
        }
    }

    fn reduce(&mut self, ctx: &mut Ctx<'_>) {
        let bytes = self.bytes();
        let theirs = |position: usize| self.all[position * bytes..].as_ptr();
        // This member's own copy is an operand like the others.
        let (nobody, all) = (usize::MAX, 0..self.vector.len());
        // SAFETY: the caller of the collective vouches for the segments; the buffer holds the vectors of all members.
        unsafe {
            let group = GroupPosition {
                me: nobody,
                members: self.group.len(),
            };
            let sources = &mut ctx.scratch.sources;
            let pieces = self.vector.pieces(all);
            reduce_range(sources, self.reducer, pieces, group, theirs, None);
        }
    }
}

impl Going for Exchange<'_> {
    fn step(&mut self, ctx: &mut Ctx<'_>, ready: usize) -> Result<bool, CollectiveError> {
        if ready < self.vector.len() || self.done {
            return Ok(false);
        }
        if self.all.is_empty() {
            self.begin(ctx);
        }
        let (bytes, me) = (self.bytes(), self.group.me);
        let (mut moved, mut complete) = (false, true);
        for position in self.group.others() {
            let link = ctx.data.link(ctx.members[self.group.members[position]]);
            let (sent, received) = (&mut self.sent[position], &mut self.received[position]);
            if *sent < bytes {
                let n = link.try_send(&self.all[me * bytes..][*sent..bytes])?;
                (*sent, moved) = (*sent + n, moved || n > 0);
            }
            if *received < bytes {
                let n = link.try_recv(&mut self.all[position * bytes..][*received..bytes])?;
                (*received, moved) = (*received + n, moved || n > 0);
            }
            complete &= *sent == bytes && *received == bytes;
        }
        if complete {
            self.reduce(ctx);
            self.done = true;
        }
        Ok(moved || complete)
    }

    fn finished(&self) -> usize {
        if self.done { self.vector.len() } else { 0 }
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn put_back(self: Box<Self>, ctx: &mut Ctx<'_>) {
        ctx.scratch.put_buffer(self.all);
    }
}

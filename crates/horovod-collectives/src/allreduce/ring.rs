//! Allreduce around a ring: a partial result travels from the first member to the last, and each adds its own data. The
//! result then travels around the ring to all.
//!
//! Each member communicates with its two neighbours only. Data is forwarded as it arrives, so with many members each
//! link carries the vector twice. A scheme in which members begin at different parts sends the same volume, but its
//! order of addition differs from part to part.

use std::ops::Range;

use horovod_kernels::{Source, reduce};

use super::Reducer;
use super::group::{Going, Group};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::{RecvCursor, SendCursor};
use crate::slices::Vector;

/// Least size of the receive buffer: one element of any type must fit.
const LEAST_BUFFER: usize = 64;

pub(super) struct Ring<'a> {
    /// Adds this member's input to the partial result; the last member's reducer completes the result.
    reducer: Reducer,
    vector: &'a Vector,
    outputs: &'a Vector,
    me: usize,
    last: usize,
    /// Member indices of the neighbours: this member sends to `next` and receives from `previous`.
    next: usize,
    previous: usize,
    /// Bytes of the vector up to here are partial results that include this member's data.
    added: usize,
    /// Received partial results; the first `have` bytes wait for the rest of their element.
    buffer: Vec<u8>,
    have: usize,
    /// Results that this member receives; complete from the start on the last member, which computes them.
    results: RecvCursor<'a>,
    out: SendCursor<'a>,
    /// The bytes that are sent are still partial results.
    contributing: bool,
}

impl<'a> Ring<'a> {
    pub(super) fn new(
        ctx: &mut Ctx<'_>,
        reducer: &Reducer,
        vector: &'a Vector,
        outputs: &'a Vector,
        group: Group<'a>,
    ) -> Self {
        let (n, me) = (group.len(), group.me);
        let last = n - 1;
        if me == 0 {
            for piece in vector.pieces(0..vector.len()) {
                // SAFETY: the caller of the collective vouches for the segments.
                unsafe { reducer.begin(piece.input, piece.output, piece.elems) };
            }
        }
        let reducer = if me == last {
            *reducer
        } else {
            reducer.partial()
        };
        let (all, none) = (0..outputs.len(), 0..0);
        let contributing = me != last;
        Self {
            reducer,
            vector,
            outputs,
            me,
            last,
            next: group.members[(me + 1) % n],
            previous: group.members[(me + n - 1) % n],
            added: 0,
            buffer: ctx
                .scratch
                .buffer(ctx.tuning.wire_chunk_bytes.max(LEAST_BUFFER)),
            have: 0,
            results: RecvCursor::new(outputs, if me == last { none } else { all.clone() }),
            out: SendCursor::new(outputs, all),
            contributing,
        }
    }

    /// Returns the range of results that this member forwards. The last member but one forwards none, because its
    /// successor has computed them.
    fn passed_on(&self) -> Range<usize> {
        if self.me + 1 == self.last {
            0..0
        } else {
            0..self.outputs.len()
        }
    }

    /// Receives one buffer of partial results and adds this member's data; returns whether anything had arrived.
    fn add(&mut self, ctx: &mut Ctx<'_>, ready: usize) -> Result<bool, CollectiveError> {
        let (size, total) = (self.vector.size(), self.outputs.len());
        let ready = ready.saturating_mul(size).min(total);
        if self.me == 0 {
            let moved = ready > self.added;
            self.added = ready;
            return Ok(moved);
        }
        let most = self.buffer.len().min(ready - self.added);
        if most <= self.have {
            return Ok(false);
        }
        let link = ctx.data.link(ctx.members[self.previous]);
        let n = link.try_recv(&mut self.buffer[self.have..most])?;
        self.have += n;
        let (start, elems) = (self.added / size, self.have / size);
        for piece in self.vector.pieces(start..start + elems) {
            let theirs = Source::partial(self.buffer[piece.at..].as_ptr());
            let sources = [theirs, Source::raw(piece.input)];
            // SAFETY: the caller of the collective vouches for the segments; the buffer holds `elems`
            // elements from the start of the range.
            unsafe {
                reduce(
                    &self.reducer.spec,
                    &sources,
                    piece.output,
                    None,
                    piece.elems,
                );
            }
        }
        let used = elems * size;
        self.added += used;
        self.buffer.copy_within(used..self.have, 0);
        self.have -= used;
        Ok(n > 0)
    }
}

impl Going for Ring<'_> {
    fn step(&mut self, ctx: &mut Ctx<'_>, ready: usize) -> Result<bool, CollectiveError> {
        let total = self.outputs.len();
        let mut moved = false;
        if self.added < total {
            moved |= self.add(ctx, ready)?;
        } else if !self.results.is_done() {
            moved |= self.results.step(ctx, self.previous)?;
        }
        // The first member gets results from the last while it still sends its own contribution.
        if self.me == 0 && self.added < total {
            moved |= self.results.step(ctx, self.previous)?;
        }
        if self.contributing {
            moved |= !self.out.is_done() && self.out.step(ctx, self.next, self.added)?;
            if self.out.is_done() {
                self.contributing = false;
                self.out.restart(self.outputs, self.passed_on());
                moved = true;
            }
        }
        if !self.contributing && !self.out.is_done() {
            let limit = if self.me == self.last {
                self.added
            } else {
                self.results.position()
            };
            moved |= self.out.step(ctx, self.next, limit)?;
        }
        Ok(moved)
    }

    fn finished(&self) -> usize {
        let bytes = if self.me == self.last {
            self.added
        } else {
            self.results.position()
        };
        bytes / self.vector.size()
    }

    fn is_done(&self) -> bool {
        self.added == self.outputs.len()
            && self.results.is_done()
            && !self.contributing
            && self.out.is_done()
    }

    fn put_back(self: Box<Self>, ctx: &mut Ctx<'_>) {
        ctx.scratch.put_buffer(self.buffer);
        self.results.finish(ctx);
        self.out.finish(ctx);
    }
}

//! Allreduce around a ring: reduce-scatter, then allgather, as one stream of parts.
//!
//! The member at position `r` of `n` sends, in its step `k`, part `r - k`, and receives part
//! `r - k - 1` (modulo `n`): what it sends in step `k + 1` is what it received in step `k`. So bytes
//! are passed on as they arrive. The first `n - 1` parts received are partial results that its own
//! data join; the others are final. Partial results live in the outputs. Part `q` is summed in the
//! order of positions `q`, `q + 1`, …

use std::cmp::Ordering;
use std::ops::Range;

use horovod_kernels::{Source, reduce};

use super::Reducer;
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::{RecvCursor, SendCursor};
use crate::slices::{Segment, Vector, even_part};

pub(super) fn run(
    ctx: &mut Ctx<'_>,
    reducer: &Reducer,
    vector: &Vector,
) -> Result<(), CollectiveError> {
    let group: Vec<usize> = (0..ctx.members.len()).collect();
    among(ctx, reducer, vector, &group)
}

/// Runs among `group` (member indices, this member one of them) over the whole vector.
pub(super) fn among(
    ctx: &mut Ctx<'_>,
    reducer: &Reducer,
    vector: &Vector,
    group: &[usize],
) -> Result<(), CollectiveError> {
    let n = group.len();
    let Some(me) = group.iter().position(|member| *member == ctx.me) else {
        return Ok(());
    };
    let size = vector.size();
    let bytes = ctx.scratch.vector(
        1,
        vector.pieces(0..vector.len()).map(|piece| Segment {
            input: piece.output.cast_const(),
            output: piece.output,
            elems: piece.elems * size,
        }),
    );
    // Bytes of the part with this index, which counts down from `me` and may not wrap below 0.
    let part = |index: usize| {
        let elems = even_part(vector.len(), n, index % n);
        elems.start * size..elems.end * size
    };
    let (sent, received) = (
        |k: usize| part(me + 2 * n - k),
        |k: usize| part(me + 2 * n - k - 1),
    );
    // Before anything travels, this rank's own part becomes the first partial result.
    for piece in vector.pieces(even_part(vector.len(), n, me)) {
        // SAFETY: the caller of the collective vouches for the segments.
        unsafe { reducer.begin(&piece, piece.output) };
    }
    let (to, from) = (group[(me + 1) % n], group[(me + n - 1) % n]);
    let steps = 2 * (n - 1);
    let partial = reducer.partial();
    let (mut sending, mut receiving, mut spins) = (0, 0, 0);
    let mut out = SendCursor::new(ctx, &bytes, sent(0));
    let mut inn = Incoming::new(ctx, &bytes, received(0), size);
    while sending < steps || receiving < steps {
        let mut moved = false;
        if sending < steps {
            // What is sent in step k is what is received in step k - 1, as far as that has come.
            let limit = match (receiving + 1).cmp(&sending) {
                _ if sending == 0 => usize::MAX,
                Ordering::Greater => usize::MAX,
                Ordering::Equal => inn.position(),
                Ordering::Less => 0,
            };
            moved |= out.step(ctx, to, limit)?;
            if out.is_done() {
                sending += 1;
                moved = true;
                out.restart(sent(sending.min(steps)));
            }
        }
        if receiving < steps {
            let finishing = receiving + 1 == n - 1;
            let reducer = if finishing { reducer } else { &partial };
            moved |= inn.step(ctx, from, reducer, vector)?;
            if inn.is_done() {
                receiving += 1;
                moved = true;
                inn.restart(received(receiving.min(steps)), receiving < n - 1);
            }
        }
        if moved {
            spins = 0;
        } else {
            ctx.idle.idle(spins)?;
            spins = u32::saturating_add(spins, 1);
        }
    }
    out.finish(ctx);
    inn.finish(ctx);
    ctx.scratch.put_vector(bytes);
    Ok(())
}

/// The part being received: a partial result that this rank's data join, or a final one.
struct Incoming<'a> {
    /// Final bytes go straight to the outputs.
    copy: RecvCursor<'a>,
    /// Partial results pass through this buffer; its first `have` bytes wait for the rest of their
    /// element.
    buffer: Vec<u8>,
    have: usize,
    size: usize,
    /// Bytes of the vector still to be reduced.
    left: Range<usize>,
    reduces: bool,
}

impl<'a> Incoming<'a> {
    fn new(ctx: &mut Ctx<'_>, bytes: &'a Vector, range: Range<usize>, size: usize) -> Self {
        let copy = RecvCursor::new(ctx, bytes, 0..0);
        let buffer = ctx
            .scratch
            .buffer(ctx.tuning.wire_chunk_bytes.max(LEAST_BUFFER));
        Self {
            copy,
            buffer,
            have: 0,
            size,
            left: range,
            reduces: true,
        }
    }

    fn restart(&mut self, range: Range<usize>, reduces: bool) {
        self.reduces = reduces;
        if reduces {
            self.left = range;
        } else {
            self.copy.restart(range);
        }
    }

    fn is_done(&self) -> bool {
        if self.reduces {
            self.left.is_empty()
        } else {
            self.copy.is_done()
        }
    }

    /// Bytes of the vector up to here may be passed on.
    fn position(&self) -> usize {
        if self.reduces {
            self.left.start
        } else {
            self.copy.position()
        }
    }

    /// Takes one buffer of what has arrived; whether anything had.
    fn step(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: usize,
        reducer: &Reducer,
        vector: &Vector,
    ) -> Result<bool, CollectiveError> {
        if !self.reduces {
            return self.copy.step(ctx, from);
        }
        let most = self.buffer.len().min(self.left.len());
        let link = ctx.data.link(ctx.members[from]);
        let n = link.try_recv(&mut self.buffer[self.have..most])?;
        self.have += n;
        let elems = self.have / self.size;
        let start = self.left.start / self.size;
        for piece in vector.pieces(start..start + elems) {
            let theirs = Source::partial(self.buffer[piece.at..].as_ptr());
            let sources = [theirs, reducer.own(&piece).unwrap_or(theirs)];
            let count = if piece.input.is_null() { 1 } else { 2 };
            // SAFETY: the caller of the collective vouches for the segments; the buffer holds
            // `elems` elements from the start of the range.
            unsafe {
                reduce(
                    &reducer.spec,
                    &sources[..count],
                    piece.output,
                    None,
                    piece.elems,
                );
            }
        }
        let used = elems * self.size;
        self.left.start += used;
        self.buffer.copy_within(used..self.have, 0);
        self.have -= used;
        Ok(n > 0)
    }

    fn finish(self, ctx: &mut Ctx<'_>) {
        self.copy.finish(ctx);
        ctx.scratch.put_buffer(self.buffer);
    }
}

/// The receive buffer holds at least one element of any type.
const LEAST_BUFFER: usize = 64;

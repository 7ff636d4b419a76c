//! Adasum adds gradients where they are orthogonal and averages them where they agree. It uses the pairwise rule and
//! the recursive vector-halving, distance-doubling scheme of Maleki et al., "Scaling Distributed Training with Adaptive
//! Summation" (2020).
//!
//! With a power of two of members this is exactly the published scheme. Otherwise the members beyond the largest power
//! of two below first combine pairwise with the first members, by the same rule. At the end the first members send them
//! the result. Dot products and norms are per segment, in `f64`.

use std::ops::Range;

use horovod_kernels::{
    DotNorms, Weighted, adasum_coefficients, adasum_combine, adasum_dot_norms, scale,
};

use super::Reduction;
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::exchange_bytes;
use crate::slices::{Segment, Vector};

pub(super) fn run(
    ctx: &mut Ctx<'_>,
    red: &Reduction,
    segs: &[Segment],
) -> Result<(), CollectiveError> {
    if !red.dtype.is_float() {
        return Err(CollectiveError::AdasumType(red.dtype));
    }
    let vector = ctx.scratch.vector(red.dtype.size(), segs.iter().copied());
    if vector.len() > 0 {
        let mut work = Adasum::load(ctx, red, &vector);
        let n = ctx.members.len();
        let power = largest_power_of_two(n);
        if ctx.me >= power {
            let partner = ctx.me - power;
            exchange_bytes(ctx, Some((partner, &work.mine)), None)?;
            exchange_bytes(ctx, None, Some((partner, &mut work.mine)))?;
        } else {
            let extra = (ctx.me + power < n).then_some(ctx.me + power);
            if let Some(extra) = extra {
                work.absorb(ctx, extra)?;
            }
            work.halve_and_double(ctx, power)?;
            if let Some(extra) = extra {
                exchange_bytes(ctx, Some((extra, &work.mine)), None)?;
            }
        }
        work.store(ctx, red);
    }
    ctx.scratch.put_vector(vector);
    Ok(())
}

/// One member's copy of the whole vector, and room for a peer's.
struct Adasum<'a> {
    vector: &'a Vector,
    mine: Vec<u8>,
    theirs: Vec<u8>,
    /// Dot products and norms of each segment.
    sums: Vec<DotNorms>,
    red: Reduction,
}

impl<'a> Adasum<'a> {
    fn load(ctx: &mut Ctx<'_>, red: &Reduction, vector: &'a Vector) -> Self {
        let bytes = vector.len() * vector.size();
        let mut mine = ctx.scratch.buffer(bytes);
        let theirs = ctx.scratch.buffer(bytes);
        for piece in vector.pieces(0..vector.len()) {
            let to = mine[piece.at..].as_mut_ptr();
            // SAFETY: the caller of the collective vouches for the segments; the buffer holds all.
            unsafe {
                if piece.input.is_null() {
                    to.write_bytes(0, piece.elems * vector.size());
                } else {
                    scale(red.dtype, red.scale.pre, piece.input, to, piece.elems);
                }
            }
        }
        Self {
            vector,
            mine,
            theirs,
            sums: Vec::new(),
            red: *red,
        }
    }

    /// Writes the result to the outputs.
    fn store(self, ctx: &mut Ctx<'_>, red: &Reduction) {
        for piece in self.vector.pieces(0..self.vector.len()) {
            let from = self.mine[piece.at..].as_ptr();
            // SAFETY: the caller of the collective vouches for the segments; the buffer holds all.
            unsafe { scale(red.dtype, red.scale.post, from, piece.output, piece.elems) };
        }
        ctx.scratch.put_buffer(self.mine);
        ctx.scratch.put_buffer(self.theirs);
    }

    fn bytes(&self, elems: &Range<usize>) -> Range<usize> {
        elems.start * self.vector.size()..elems.end * self.vector.size()
    }

    /// Combines the whole vector of `extra`, a member of higher index, into this member's vector.
    fn absorb(&mut self, ctx: &mut Ctx<'_>, extra: usize) -> Result<(), CollectiveError> {
        exchange_bytes(ctx, None, Some((extra, &mut self.theirs)))?;
        let all = 0..self.vector.len();
        self.measure(&all, true);
        self.combine(&all, true);
        Ok(())
    }

    fn halve_and_double(&mut self, ctx: &mut Ctx<'_>, power: usize) -> Result<(), CollectiveError> {
        let me = ctx.me;
        let mut range = 0..self.vector.len();
        let mut wider = Vec::new();
        let mut distance = 1;
        while distance < power {
            let lower = me & distance == 0;
            let middle = range.start + range.len() / 2;
            let (low, high) = (range.start..middle, middle..range.end);
            let (keep, give) = if lower { (low, high) } else { (high, low) };
            let peer = me ^ distance;
            let (out, inn) = (self.bytes(&give), self.bytes(&keep));
            let (send, recv) = (&self.mine[out], &mut self.theirs[inn]);
            exchange_bytes(ctx, Some((peer, send)), Some((peer, recv)))?;
            self.measure(&keep, lower);
            self.add_up(ctx, 2 * distance)?;
            self.combine(&keep, lower);
            wider.push(std::mem::replace(&mut range, keep));
            distance *= 2;
        }
        while let Some(whole) = wider.pop() {
            distance /= 2;
            let lower = me & distance == 0;
            let missing = if lower {
                range.end..whole.end
            } else {
                whole.start..range.start
            };
            let peer = me ^ distance;
            let (out, inn) = (self.bytes(&range), self.bytes(&missing));
            // Received into the other buffer, since both slices cannot borrow one buffer.
            let (send, recv) = (&self.mine[out], &mut self.theirs[inn.clone()]);
            exchange_bytes(ctx, Some((peer, send)), Some((peer, recv)))?;
            self.mine[inn.clone()].copy_from_slice(&self.theirs[inn]);
            range = whole;
        }
        Ok(())
    }

    /// Computes dot product and norms of each segment's part in `range`; `a` is this member's vector if it is `lower`.
    fn measure(&mut self, range: &Range<usize>, lower: bool) {
        self.sums.clear();
        self.sums
            .resize(self.vector.segments(), DotNorms::default());
        let base = range.start * self.vector.size();
        for piece in self.vector.pieces(range.clone()) {
            let mine = self.mine[base + piece.at..].as_ptr();
            let theirs = self.theirs[base + piece.at..].as_ptr();
            let (a, b) = if lower {
                (mine, theirs)
            } else {
                (theirs, mine)
            };
            // SAFETY: both buffers hold the whole vector.
            self.sums[piece.segment] +=
                unsafe { adasum_dot_norms(self.red.dtype, a, b, piece.elems) };
        }
    }

    /// Adds up the sums of the `group` members that have slices of the same two vectors, in the same order on all.
    fn add_up(&mut self, ctx: &mut Ctx<'_>, group: usize) -> Result<(), CollectiveError> {
        let mut send: Vec<u8> = Vec::with_capacity(self.sums.len() * 24);
        let mut recv = vec![0; self.sums.len() * 24];
        let mut distance = 1;
        while distance < group {
            send.clear();
            for sum in &self.sums {
                for value in [sum.dot, sum.norm_a, sum.norm_b] {
                    send.extend_from_slice(&value.to_le_bytes());
                }
            }
            let peer = ctx.me ^ distance;
            exchange_bytes(ctx, Some((peer, &send)), Some((peer, &mut recv)))?;
            // The addition of two numbers is commutative to the bit, so both partners get the same sum.
            for (sum, bytes) in self.sums.iter_mut().zip(recv.chunks_exact(24)) {
                let at = |i: usize| {
                    let mut value = [0; 8];
                    value.copy_from_slice(&bytes[8 * i..8 * i + 8]);
                    f64::from_le_bytes(value)
                };
                *sum += DotNorms {
                    dot: at(0),
                    norm_a: at(1),
                    norm_b: at(2),
                };
            }
            distance *= 2;
        }
        Ok(())
    }

    /// Combines `range` of both buffers into this member's buffer.
    fn combine(&mut self, range: &Range<usize>, lower: bool) {
        let base = range.start * self.vector.size();
        for piece in self.vector.pieces(range.clone()) {
            let (ca, cb) = adasum_coefficients(self.sums[piece.segment]);
            let mine = self.mine[base + piece.at..].as_mut_ptr();
            let theirs = self.theirs[base + piece.at..].as_ptr();
            let (a, b) = if lower {
                (mine.cast_const(), theirs)
            } else {
                (theirs, mine.cast_const())
            };
            let (a, b) = (
                Weighted {
                    data: a,
                    factor: ca,
                },
                Weighted {
                    data: b,
                    factor: cb,
                },
            );
            // SAFETY: both buffers hold the whole vector.
            unsafe { adasum_combine(self.red.dtype, a, b, mine, piece.elems) };
        }
    }
}

/// The largest power of two that is at most `n`; `n` is not 0.
fn largest_power_of_two(n: usize) -> usize {
    1 << n.ilog2()
}

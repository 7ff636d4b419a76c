//! Small vectors between any ranks: in round `i` each member exchanges its whole partial result with
//! the member whose index differs in bit `i`.
//!
//! With `n` not a power of two the members beyond the largest one below first hand their data to a
//! partner, and get the result from it. Both partners of an exchange combine in the same order, lower
//! index first, so all compute the same bits.

use horovod_kernels::{Source, reduce};

use super::Reducer;
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::exchange_bytes;
use crate::slices::Vector;

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
    let Some(me) = group.iter().position(|member| *member == ctx.me) else {
        return Ok(());
    };
    let bytes = vector.len() * vector.size();
    let mut mine = ctx.scratch.buffer(bytes);
    let mut theirs = ctx.scratch.buffer(bytes);
    for piece in vector.pieces(0..vector.len()) {
        // SAFETY: the caller of the collective vouches for the segments; the buffer holds all.
        unsafe { reducer.begin(&piece, mine[piece.at..].as_mut_ptr()) };
    }
    let partial = reducer.partial().spec;
    let combine = |mine: &mut [u8], theirs: &[u8], mine_first: bool| {
        let (own, other) = (
            Source::partial(mine.as_ptr()),
            Source::partial(theirs.as_ptr()),
        );
        let sources = if mine_first {
            [own, other]
        } else {
            [other, own]
        };
        // SAFETY: both buffers hold the whole vector.
        unsafe { reduce(&partial, &sources, mine.as_mut_ptr(), None, vector.len()) };
    };
    let power = largest_power_of_two(group.len());
    let extra = group.len() - power;
    if me >= power {
        exchange_bytes(ctx, Some((group[me - power], &mine)), None)?;
        exchange_bytes(ctx, None, Some((group[me - power], &mut mine)))?;
    } else {
        if me < extra {
            exchange_bytes(ctx, None, Some((group[me + power], &mut theirs)))?;
            combine(&mut mine, &theirs, true);
        }
        let mut distance = 1;
        while distance < power {
            let peer = group[me ^ distance];
            exchange_bytes(ctx, Some((peer, &mine)), Some((peer, &mut theirs)))?;
            combine(&mut mine, &theirs, me & distance == 0);
            distance *= 2;
        }
        let (source, at) = (Source::partial(mine.as_ptr()), mine.as_mut_ptr());
        // SAFETY: the buffer holds the whole vector.
        unsafe { reduce(&reducer.spec, &[source], at, None, vector.len()) };
        if me < extra {
            exchange_bytes(ctx, Some((group[me + power], &mine)), None)?;
        }
    }
    for piece in vector.pieces(0..vector.len()) {
        let from = &mine[piece.at..];
        // SAFETY: the caller of the collective vouches for the segments; the buffer holds all.
        unsafe {
            piece
                .output
                .copy_from_nonoverlapping(from.as_ptr(), piece.elems * vector.size());
        }
    }
    ctx.scratch.put_buffer(mine);
    ctx.scratch.put_buffer(theirs);
    Ok(())
}

/// The largest power of two that is at most `n`; `n` is not 0.
pub(super) fn largest_power_of_two(n: usize) -> usize {
    1 << n.ilog2()
}

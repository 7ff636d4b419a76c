//! Small vectors on one host: every rank stages its whole vector and reduces all vectors, which takes one hand-over
//! instead of two.

use super::{GroupPosition, Reducer, reduce_range};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::local::Local;
use crate::select::Across;
use crate::slices::Vector;

pub(super) fn run(
    ctx: &mut Ctx<'_>,
    reducer: &Reducer,
    vector: &Vector,
) -> Result<(), CollectiveError> {
    let Some(local) = Local::new(ctx)? else {
        return super::across::run(ctx, Across::Pairwise, reducer, vector);
    };
    let all = 0..vector.len();
    if vector.len() * vector.size() > local.small_len() {
        return super::staged(ctx, reducer, vector);
    }
    let mut sources = std::mem::take(&mut ctx.scratch.sources);
    let stage = |mine: *mut u8| {
        for piece in vector.pieces(all.clone()) {
            // SAFETY: the caller of the collective vouches for the segments; the vector fits the
            // area, which no peer reads until it is published.
            unsafe { reducer.stage(&piece, mine.wrapping_add(piece.at)) };
        }
    };
    let group = GroupPosition {
        me: local.me(),
        members: local.len(),
    };
    let result = local.run_small(ctx, stage, |slots| {
        // SAFETY: as above; all peers have published their areas.
        unsafe {
            let theirs = |position| slots.of(position).cast_const();
            reduce_range(
                &mut sources,
                reducer,
                vector.pieces(all.clone()),
                group,
                theirs,
                None,
            );
        }
    });
    ctx.scratch.sources = sources;
    result
}

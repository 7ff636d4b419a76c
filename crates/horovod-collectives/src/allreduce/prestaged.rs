//! Small vectors on one host whose operands all members staged before they announced the operation. When the decision
//! to run it arrives all operands are staged, and no member waits for another.
//!
//! This is the direct algorithm without its hand-over, so the bits are the same.

use horovod_protocol::OperationTag;
use horovod_transport::Data;

use super::{GroupPosition, Reducer, Reduction, reduce_range};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::layout::SetLayout;
use crate::local::Local;
use crate::scratch::Scratch;
use crate::select::{self, Tuning};
use crate::slices::{Segment, Vector};

/// Context of [`prestage`]: the fields of [`Ctx`] that exist before the operation starts.
#[derive(Debug)]
pub struct StagingContext<'a> {
    /// The links and the arena of this generation.
    pub data: &'a Data,
    /// Hosts of the members.
    pub layout: &'a SetLayout,
    /// Sizes that select an algorithm; the same on all members.
    pub tuning: &'a Tuning,
    /// State that lasts from one operation to the next.
    pub scratch: &'a mut Scratch,
    /// Whether ranks outnumber the cores of this host.
    pub oversubscribed: bool,
}

/// Stages the operand of the allreduce that will run with `tag` as its [`Ctx::tag`], if the operand is small enough.
/// Returns whether it was staged. The caller must be about to announce the operation. No other operation that it has
/// pre-staged may be waiting to run.
///
/// # Safety
/// The input is readable, and no code writes to it until the operation has ended.
pub unsafe fn prestage(
    context: StagingContext<'_>,
    tag: OperationTag,
    red: &Reduction,
    seg: Segment,
) -> bool {
    let StagingContext {
        data,
        layout,
        tuning,
        scratch,
        oversubscribed,
    } = context;
    let bytes = seg.elems.saturating_mul(red.dtype.size());
    if bytes == 0 || bytes > select::prestaged_max_bytes(red.op, oversubscribed, layout, tuning) {
        return false;
    }
    let reducer = Reducer::new(red);
    let Ok(Some(local)) = Local::of(data, layout) else {
        return false;
    };
    let vector = scratch.vector(red.dtype.size(), [seg]);
    let staged = !reducer.prescaled
        && local.prestage(scratch, tag, bytes, |to| {
            for piece in vector.pieces(0..vector.len()) {
                // SAFETY: the caller's promise; the vector fits the area, which no peer reads before it is published.
                unsafe { reducer.stage(&piece, to.wrapping_add(piece.at)) };
            }
        });
    scratch.put_vector(vector);
    staged
}

/// Runs the operation from pre-staged operands, if all members have staged theirs. Returns whether it ran.
pub(super) fn run(
    ctx: &mut Ctx<'_>,
    tag: OperationTag,
    reducer: &Reducer,
    vector: &Vector,
) -> Result<bool, CollectiveError> {
    let Some(local) = Local::new(ctx)? else {
        return Ok(false);
    };
    let mut sources = std::mem::take(&mut ctx.scratch.sources);
    let group = GroupPosition {
        me: local.me(),
        members: local.len(),
    };
    let all = 0..vector.len();
    let result = local.run_prestaged(ctx, tag, |theirs| {
        // SAFETY: the caller of the collective vouches for the segments; all members have published their areas.
        unsafe {
            reduce_range(
                &mut sources,
                reducer,
                vector.pieces(all),
                group,
                theirs,
                None,
            )
        };
    });
    ctx.scratch.sources = sources;
    result
}

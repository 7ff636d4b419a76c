//! Reduce-scatter: the rows of dimension 0 are shared out, each member gets the reduction of its share.
//!
//! Every member sees everybody's contribution to its share directly and combines them in member order,
//! so halves are rounded once. Inside one host through staging memory; otherwise each member sends
//! every other its share, all at once, and reduces as soon as a chunk of all has come.

use std::ops::Range;

use horovod_kernels::{DefaultMode, Source};

use crate::allreduce::{GroupPosition, Reducer, Reduction, reduce_range};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::SendCursor;
use crate::local::{LINE, Local, Pattern, Schedule, Slots, Work};
use crate::slices::{Segment, Vector};

/// One tensor to reduce and share out.
#[derive(Clone, Copy, Debug)]
pub struct ScatterItem {
    /// All rows of this member's tensor.
    pub input: *const u8,
    /// Length of dimension 0.
    pub rows: usize,
    /// Elements of one row.
    pub row_elems: usize,
    /// Room for this member's share ([`scatter_rows`]). May be where the share lies in the input.
    pub output: *mut u8,
}

/// The rows that a member gets: all get equally many, the first `rows % members` one more.
pub fn scatter_rows(rows: usize, members: usize, member: usize) -> Range<usize> {
    crate::slices::even_part(rows, members, member)
}

/// Combines the inputs of all members; each gets its share of the rows, in member order.
///
/// # Safety
/// Inputs are readable and outputs writable for their lengths; an output is exactly where the share
/// lies in its own input or overlaps no tensor; nobody else touches any of them until this returns.
///
/// # Panics
/// For Adasum, which is not element-wise.
pub unsafe fn reduce_scatter(
    ctx: &mut Ctx<'_>,
    red: &Reduction,
    items: &[ScatterItem],
) -> Result<(), CollectiveError> {
    let _mode = DefaultMode::enter();
    // Nobody contributes neutral elements here, so a factor can always be applied by the reader.
    let reducer = Reducer {
        prescaled: false,
        ..Reducer::new(red)
    };
    let shares = shares(ctx, red.dtype.size(), items);
    if ctx.members.len() == 1 {
        crate::allreduce::alone(&reducer, &shares[0]);
    } else if let Some(local) = Local::new(ctx)?.filter(|_| ctx.layout.hosts() == 1) {
        let stage = ctx.scratch.stages.begin("REDUCESCATTER_INSIDE_HOST");
        inside(ctx, &local, &reducer, &shares)?;
        ctx.scratch.stages.end(stage);
    } else {
        let stage = ctx.scratch.stages.begin("PAIRWISE_REDUCESCATTER");
        across(ctx, &reducer, &shares)?;
        ctx.scratch.stages.end(stage);
    }
    ctx.scratch.put_vectors(shares);
    Ok(())
}

/// Each member's part, as slices of this member's inputs; the own part also has outputs.
fn shares(ctx: &mut Ctx<'_>, size: usize, items: &[ScatterItem]) -> Vec<Vector> {
    let (n, me) = (ctx.members.len(), ctx.me);
    let share = |item: &ScatterItem, member: usize| {
        let rows = scatter_rows(item.rows, n, member);
        let input = item.input.wrapping_add(rows.start * item.row_elems * size);
        let output = if member == me {
            item.output
        } else {
            std::ptr::null_mut()
        };
        Segment {
            input,
            output,
            elems: rows.len() * item.row_elems,
        }
    };
    let mut shares = ctx.scratch.vectors();
    for member in 0..n {
        let segments = items.iter().map(|item| share(item, member));
        shares.push(ctx.scratch.vector(size, segments));
    }
    shares
}

fn inside(
    ctx: &mut Ctx<'_>,
    local: &Local<'_>,
    reducer: &Reducer,
    shares: &[Vector],
) -> Result<(), CollectiveError> {
    let size = reducer.spec.dtype.size();
    let align = LINE / size;
    let fits = local.slot_len() / shares.len() / LINE * align;
    let chunk = (ctx.tuning.chunk_bytes / size).clamp(align, fits);
    let longest = shares.iter().map(Vector::len).max().unwrap_or(0);
    let schedule = Schedule {
        steps: longest.div_ceil(chunk),
        pattern: Pattern::Pairs,
        slot_len: local.slot_len(),
    };
    let sources = std::mem::take(&mut ctx.scratch.sources);
    let mut work = Inside {
        reducer,
        shares,
        chunk,
        me: local.me(),
        sources,
    };
    let result = local.run(ctx, schedule, &mut work);
    ctx.scratch.sources = work.sources;
    result
}

struct Inside<'a> {
    reducer: &'a Reducer,
    shares: &'a [Vector],
    /// Elements per member and step.
    chunk: usize,
    me: usize,
    sources: Vec<Source>,
}

impl Inside<'_> {
    fn range(&self, step: usize) -> Range<usize> {
        step * self.chunk..(step + 1) * self.chunk
    }

    fn chunk_bytes(&self) -> usize {
        self.chunk * self.reducer.spec.dtype.size()
    }
}

impl Work for Inside<'_> {
    fn stage(&mut self, step: usize, slots: &Slots<'_>) {
        for (member, share) in self.shares.iter().enumerate() {
            if member != self.me {
                let to = slots.to(member, self.chunk_bytes());
                for piece in share.pieces(self.range(step)) {
                    // SAFETY: the caller of the collective vouches for the inputs; a chunk fits its
                    // place in the slot, which nobody reads until it is published.
                    unsafe { self.reducer.stage(&piece, to.wrapping_add(piece.at)) };
                }
            }
        }
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        let mut sources = std::mem::take(&mut self.sources);
        // SAFETY: as in `stage`; all peers have published this step.
        unsafe {
            let theirs = |position| slots.from(position, self.chunk_bytes()).cast_const();
            let group = GroupPosition {
                me: self.me,
                members: self.shares.len(),
            };
            let share = &self.shares[self.me];
            reduce_range(
                &mut sources,
                self.reducer,
                share.pieces(self.range(step)),
                group,
                theirs,
                None,
            );
        }
        self.sources = sources;
    }
}

/// A peer's contribution to this member's share, a chunk at a time.
struct Arriving {
    chunk: Vec<u8>,
    have: usize,
}

fn across(ctx: &mut Ctx<'_>, reducer: &Reducer, shares: &[Vector]) -> Result<(), CollectiveError> {
    let (n, me) = (shares.len(), ctx.me);
    let size = reducer.spec.dtype.size();
    let chunk = (ctx.tuning.wire_chunk_bytes / size).max(1);
    let bytes: Vec<Vector> = shares
        .iter()
        .map(|share| inputs_as_bytes(ctx, share))
        .collect();
    let mut outs: Vec<_> = (1..n)
        .map(|step| (me + step) % n)
        .map(|peer| (peer, SendCursor::new(&bytes[peer], 0..bytes[peer].len())))
        .collect();
    let mut arriving: Vec<Arriving> = (0..n)
        .map(|peer| if peer == me { 0 } else { chunk * size })
        .map(|len| Arriving {
            chunk: ctx.scratch.buffer(len),
            have: 0,
        })
        .collect();
    let mut sources = std::mem::take(&mut ctx.scratch.sources);
    let (mut done, mut spins) = (0, 0);
    let total = shares[me].len();
    while done < total || outs.iter().any(|(_, cursor)| !cursor.is_done()) {
        let mut moved = false;
        for (peer, cursor) in &mut outs {
            moved |= !cursor.is_done() && cursor.step(ctx, *peer, usize::MAX)?;
        }
        let elems = chunk.min(total - done);
        let mut complete = elems > 0;
        for (peer, arriving) in arriving
            .iter_mut()
            .enumerate()
            .filter(|(peer, _)| *peer != me)
        {
            if arriving.have < elems * size {
                let room = &mut arriving.chunk[arriving.have..elems * size];
                let got = ctx.data.link(ctx.members[peer]).try_recv(room)?;
                arriving.have += got;
                moved |= got > 0;
            }
            complete &= arriving.have == elems * size;
        }
        if complete {
            let theirs = |peer: usize| arriving[peer].chunk.as_ptr();
            let range = done..done + elems;
            // SAFETY: the caller of the collective vouches for the tensors; the chunks hold
            // `elems` elements each.
            unsafe {
                reduce_range(
                    &mut sources,
                    reducer,
                    shares[me].pieces(range),
                    GroupPosition { me, members: n },
                    theirs,
                    None,
                );
            }
            done += elems;
            arriving.iter_mut().for_each(|arriving| arriving.have = 0);
            moved = true;
        }
        if moved {
            spins = 0;
        } else {
            ctx.idle.idle(spins)?;
            spins = u32::saturating_add(spins, 1);
        }
    }
    ctx.scratch.sources = sources;
    arriving
        .into_iter()
        .for_each(|arriving| ctx.scratch.put_buffer(arriving.chunk));
    outs.into_iter().for_each(|(_, cursor)| cursor.finish(ctx));
    bytes
        .into_iter()
        .for_each(|bytes| ctx.scratch.put_vector(bytes));
    Ok(())
}

/// The inputs of a vector, as bytes to send; the cursor that sends them only reads.
fn inputs_as_bytes(ctx: &mut Ctx<'_>, share: &Vector) -> Vector {
    let size = share.size();
    ctx.scratch.vector(
        1,
        share.pieces(0..share.len()).map(|piece| Segment {
            input: piece.input,
            output: piece.input.cast_mut(),
            elems: piece.elems * size,
        }),
    )
}

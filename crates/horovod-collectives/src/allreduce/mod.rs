//! Allreduce: its arguments, the choice of an algorithm, and the algorithm for larger vectors on one host, which stages
//! in shared memory. The other algorithms are in files of their own.

mod across;
mod adasum;
mod direct;
mod exchange;
mod group;
mod hierarchical;
mod host_averages;
mod pairwise;
mod prestaged;
mod reducer;
mod ring;

use std::ops::Range;

use horovod_kernels::{DefaultMode, Source};
use horovod_protocol::{DType, ReduceOp, Scale};
use horovod_transport::Data;

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::layout::SetLayout;
use crate::local::{LINE, Local, Pattern, Schedule, Slots, Work};
use crate::select::{self, Across, AllreduceAlgorithm, Tuning};
use crate::slices::{Piece, Segment, Vector};

pub(crate) use reducer::{GroupPosition, Reducer, alone, reduce_range};

pub use host_averages::{HostGroups, adasum_of_hosts};
pub use prestaged::{StagingContext, prestage};

/// How values are combined.
#[derive(Clone, Copy, Debug)]
pub struct Reduction {
    /// Element type of all segments.
    pub dtype: DType,
    /// The operation.
    pub op: ReduceOp,
    /// Factors before and after the operation.
    pub scale: Scale,
    /// Divisor of `Average`: the number of ranks that contribute. Not used by other operations.
    pub divisor: u32,
}

/// Combines the inputs of all members and gives every member the result.
///
/// All members pass segments of the same lengths. An input may be null: that member contributes the neutral element (at
/// least one member must contribute). Every element is combined in one fixed order, whatever tensors it is fused with:
/// first the members of each host in their order, then the hosts in theirs. Halves are rounded once per host and once
/// at the end (around a ring: once per host of it). Adasum processes each segment separately.
///
/// # Safety
/// Inputs are readable and outputs writable for their lengths; an output equals its own input or overlaps no segment;
/// no other code touches any of them until this returns.
pub unsafe fn allreduce(
    ctx: &mut Ctx<'_>,
    red: &Reduction,
    segs: &[Segment],
) -> Result<(), CollectiveError> {
    let _mode = DefaultMode::enter();
    if red.op == ReduceOp::Adasum {
        // One segment at a time: a fused vector would be halved at places that depend on what the negotiation has
        // fused. Dot products, and so results, would then differ in the last bit.
        let stage = ctx.scratch.stages.begin("HALVING_DOUBLING_ADASUM");
        segs.iter()
            .try_for_each(|seg| adasum::run(ctx, red, std::slice::from_ref(seg)))?;
        ctx.scratch.stages.end(stage);
        return Ok(());
    }
    if !ctx.scratch.begin_call(ctx.seq) {
        return Ok(());
    }
    let mut reducer = Reducer::new(red);
    let mut vector = ctx.scratch.vector(red.dtype.size(), segs.iter().copied());
    let bytes = vector.len() * vector.size();
    if bytes > 0 {
        let choose = if reducer.spec.needs_all_at_once() {
            select::allreduce_at_once
        } else {
            select::allreduce
        };
        let algorithm = choose(bytes, ctx.layout, ctx.tuning);
        if reducer.prescaled && !stages_scaled(algorithm, ctx.data) {
            let scaled = across::sendable(ctx, &reducer, &vector, true);
            ctx.scratch
                .put_vector(std::mem::replace(&mut vector, scaled));
            reducer = reducer.without_pre();
        }
        let stage = ctx.scratch.stages.begin(algorithm.stage_name());
        let prestaged = match ctx.tag {
            Some(tag) => prestaged::run(ctx, tag, &reducer, &vector)?,
            None => false,
        };
        match algorithm {
            _ if prestaged => {}
            AllreduceAlgorithm::Alone => alone(&reducer, &vector),
            AllreduceAlgorithm::Direct => direct::run(ctx, &reducer, &vector)?,
            AllreduceAlgorithm::Staged => staged(ctx, &reducer, &vector)?,
            AllreduceAlgorithm::Flat(algorithm) => across::run(ctx, algorithm, &reducer, &vector)?,
            AllreduceAlgorithm::Hierarchical(algorithm) => {
                hierarchical::run(ctx, algorithm, &reducer, &vector)?;
            }
        }
        ctx.scratch.stages.end(stage);
    }
    ctx.scratch.put_vector(vector);
    ctx.scratch.end_call();
    Ok(())
}

/// Returns whether [`allreduce`] over `bytes` may be suspended in any of its waits, by an error of `Idle::idle`. After
/// [`Scratch::rewind`] the same call with the same arguments resumes it. Several calls in a row are resumed together.
///
/// [`Scratch::rewind`]: crate::Scratch::rewind
pub fn may_pause(
    red: ReduceOp,
    bytes: usize,
    data: &Data,
    set: &SetLayout,
    tuning: &Tuning,
) -> bool {
    red != ReduceOp::Adasum
        && match select::allreduce(bytes, set, tuning) {
            // `Alone` never waits.
            AllreduceAlgorithm::Alone => true,
            // These algorithms keep their position, and write an output only in steps that run once.
            algorithm => stages_scaled(algorithm, data),
        }
}

/// Returns whether operands only pass through staging memory, where each gets its own prescale factor. For the other
/// algorithms all inputs are scaled into the outputs beforehand, so such a call cannot be repeated.
fn stages_scaled(algorithm: AllreduceAlgorithm, data: &Data) -> bool {
    use AllreduceAlgorithm::{Direct, Staged};
    matches!(algorithm, Direct | Staged) && data.arena().is_some()
}

/// On one host: in each step every rank stages the parts that other ranks own, and reduces its own part from its
/// tensors and the peers' staging memory. It writes the result back there, and collects the other results from its own
/// staging memory.
///
/// Steps are consecutive stretches of the vector, so that each tensor's bytes are touched twice within a short time.
/// Several steps are in flight in different stages. While the results of one step are collected from a slot, the
/// operands of a later step replace them.
fn staged(ctx: &mut Ctx<'_>, reducer: &Reducer, vector: &Vector) -> Result<(), CollectiveError> {
    let Some(local) = Local::new(ctx)? else {
        return across::run(ctx, Across::Pairwise, reducer, vector);
    };
    let cut = Cut::new(vector, local.len(), local.slot_len(), ctx.tuning);
    let sources = std::mem::take(&mut ctx.scratch.sources);
    let mut work = Staged {
        reducer,
        vector,
        cut,
        me: local.me(),
        sources,
    };
    // Beyond the cache size the copy is memory-bound: two concurrent streams reach more bandwidth than four.
    let refills = vector.len() * vector.size() < ctx.tuning.stream_min_bytes;
    let schedule = Schedule {
        steps: cut.steps,
        pattern: Pattern::Reduce { refills },
        slot_len: if refills {
            // Two slots are enough then, and stay in the second-level cache beside the tensors.
            2 * local.slot_len()
        } else {
            local.slot_len()
        },
    };
    let result = local.run(ctx, schedule, &mut work);
    ctx.scratch.sources = work.sources;
    result
}

/// Bytes reduced at a time if several peers receive the result.
const BLOCK_BYTES: usize = 8 << 10;

/// How a vector is cut into steps, and each step into one part per rank. All numbers are in elements.
#[derive(Clone, Copy, Debug)]
struct Cut {
    total: usize,
    parts: usize,
    /// Elements of each step except the last.
    step: usize,
    steps: usize,
    /// Parts start at multiples of this.
    align: usize,
}

impl Cut {
    fn new(vector: &Vector, parts: usize, slot_len: usize, tuning: &Tuning) -> Self {
        let (total, align) = (vector.len(), LINE / vector.size());
        let fits = slot_len / parts / LINE * align;
        let most = (tuning.chunk_bytes / vector.size()).clamp(align, fits.max(align));
        let least = (tuning.chunk_min_bytes / vector.size()).clamp(align, most);
        // About eight steps fill the pipeline; with more data, larger chunks cost fewer hand-overs.
        let part = total
            .div_ceil(8 * parts)
            .clamp(least, most)
            .next_multiple_of(align)
            .min(fits);
        let step = part * parts;
        Self {
            total,
            parts,
            step,
            steps: total.div_ceil(step),
            align,
        }
    }

    /// Returns the part of `step` that the rank at `position` owns.
    fn part(&self, step: usize, position: usize) -> Range<usize> {
        let start = step * self.step;
        let end = (start + self.step).min(self.total);
        let part = self.part_len(end - start);
        let from = (start + position * part).min(end);
        from..(from + part).min(end)
    }

    /// Returns the elements of a part of a step of `len` elements.
    fn part_len(&self, len: usize) -> usize {
        len.div_ceil(self.parts).next_multiple_of(self.align)
    }
}

struct Staged<'a> {
    reducer: &'a Reducer,
    vector: &'a Vector,
    cut: Cut,
    me: usize,
    sources: Vec<Source>,
}

impl Staged<'_> {
    /// Returns the bytes of a part in every slot.
    fn part_bytes(&self) -> usize {
        self.cut.step / self.cut.parts * self.vector.size()
    }
}

/// A range of the vector, taken piece by piece.
struct Stretch<'a, P> {
    vector: &'a Vector,
    pieces: P,
    rest: Option<Piece>,
}

impl<'a> Stretch<'a, ()> {
    fn of(vector: &'a Vector, range: Range<usize>) -> Stretch<'a, impl Iterator<Item = Piece>> {
        Stretch {
            vector,
            pieces: vector.pieces(range),
            rest: None,
        }
    }
}

impl<P: Iterator<Item = Piece>> Stretch<'_, P> {
    /// Returns the next elements of one tensor, at most `most`; `None` at the end.
    fn take(&mut self, most: usize) -> Option<Piece> {
        let mut piece = self.rest.take().or_else(|| self.pieces.next())?;
        if piece.elems > most {
            self.rest = Some(piece.after(most, self.vector.size()));
            piece.elems = most;
        }
        Some(piece)
    }
}

impl Work for Staged<'_> {
    fn stage(&mut self, step: usize, slots: &Slots<'_>) {
        for position in (0..self.cut.parts).filter(|position| *position != self.me) {
            let to = slots.to(position, self.part_bytes());
            for piece in self.vector.pieces(self.cut.part(step, position)) {
                // SAFETY: the caller of the collective vouches for the segments; a part fits its
                // place in the slot, which no peer reads until it is published.
                unsafe { self.reducer.stage(&piece, to.wrapping_add(piece.at)) };
            }
        }
    }

    fn reduce(&mut self, step: usize, slots: &Slots<'_>) {
        let (me, members) = (self.me, self.cut.parts);
        let mut peers = (0..members).filter(|position| *position != me);
        let Some(first) = peers.next() else { return };
        let part = self.cut.part(step, me);
        // With several peers the result is copied to the others while it is in the first-level cache.
        let block = if members == 2 {
            part.len().max(1)
        } else {
            BLOCK_BYTES / self.vector.size()
        };
        let mut sources = std::mem::take(&mut self.sources);
        for start in part.clone().step_by(block) {
            let range = start..(start + block).min(part.end);
            let (at, bytes) = (
                (start - part.start) * self.vector.size(),
                range.len() * self.vector.size(),
            );
            let place = |position| slots.from(position, self.part_bytes()).wrapping_add(at);
            // SAFETY: as in `stage`; all peers have published this step. No other rank touches this rank's part of
            // their slots until the result is published, and none ever touches this rank's part of its own slot. The
            // result of an element replaces its operand.
            unsafe {
                if self.reducer.prescaled {
                    for piece in self.vector.pieces(range.clone()) {
                        self.reducer.stage(&piece, place(me).wrapping_add(piece.at));
                    }
                }
                reduce_range(
                    &mut sources,
                    self.reducer,
                    self.vector.pieces(range),
                    GroupPosition { me, members },
                    |position| place(position).cast_const(),
                    Some(place(first)),
                );
                for other in peers.clone() {
                    place(other).copy_from_nonoverlapping(place(first), bytes);
                }
            }
        }
        self.sources = sources;
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        for position in (0..self.cut.parts).filter(|position| *position != self.me) {
            let from = slots.to(position, self.part_bytes());
            for piece in self.vector.pieces(self.cut.part(step, position)) {
                let bytes = piece.elems * self.vector.size();
                // SAFETY: the caller of the collective vouches for the segments; the peer has
                // published its result.
                unsafe {
                    let from = from.wrapping_add(piece.at);
                    piece.output.copy_from_nonoverlapping(from, bytes);
                }
            }
        }
    }

    fn refill(&mut self, finished: usize, staged: usize, slots: &Slots<'_>) {
        for position in (0..self.cut.parts).filter(|position| *position != self.me) {
            let slot = slots.to(position, self.part_bytes());
            let results = self.cut.part(finished, position);
            let operands = self.cut.part(staged, position);
            let mut operands = Stretch::of(self.vector, operands);
            for piece in self.vector.pieces(results) {
                let (mut output, mut slot) = (piece.output, slot.wrapping_add(piece.at));
                let mut left = piece.elems;
                while left > 0 {
                    let operand = operands.take(left);
                    let elems = operand.map_or(left, |operand| operand.elems);
                    let bytes = elems * self.vector.size();
                    // SAFETY: as in `stage` and `finish`; every byte of the slot is read before it is
                    // overwritten.
                    unsafe {
                        match operand {
                            Some(operand) => self.reducer.refill(output, slot, &operand),
                            None => output.copy_from_nonoverlapping(slot, bytes),
                        }
                    }
                    (output, slot) = (output.wrapping_add(bytes), slot.wrapping_add(bytes));
                    left -= elems;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slices::Segment;

    #[test]
    fn parts_tile_the_vector_and_fit_their_slots() {
        let tuning = Tuning {
            chunk_bytes: 256,
            chunk_min_bytes: 64,
            ..Tuning::default()
        };
        for size in [1, 2, 4, 8] {
            for parts in [2, 3, 7] {
                for total in [1, 2, 63, 64, 65, 1000, 4097] {
                    let mut vector = Vector::default();
                    let (input, output) = (std::ptr::null(), std::ptr::null_mut());
                    vector.refill(
                        size,
                        [Segment {
                            input,
                            output,
                            elems: total,
                        }],
                    );
                    let slot_len = parts * 192;
                    let cut = Cut::new(&vector, parts, slot_len, &tuning);
                    let mut next = 0;
                    for step in 0..cut.steps {
                        for position in 0..parts {
                            let part = cut.part(step, position);
                            assert_eq!(part.start, next);
                            next = part.end;
                            let end = (position * cut.step / parts + part.len()) * size;
                            assert!(end <= (position + 1) * slot_len / parts);
                        }
                    }
                    assert_eq!(next, total);
                }
            }
        }
    }
}

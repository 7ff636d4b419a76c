//! Several hosts: reduce inside each host so that lane owners hold its partial result, reduce each lane
//! across hosts, and collect the lanes inside each host.
//!
//! There are as many lanes as the smallest host has members, so that hosts need not be alike: the
//! first members of each host own them, the others of larger hosts only contribute and collect.

use std::ops::Range;

use horovod_kernels::Source;

use super::{Reducer, recursive_doubling, reduce_range, ring};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::local::{LINE, Local, Plan, Slots, Work};
use crate::slices::{Segment, Vector, even_part};

pub(super) fn run(
    ctx: &mut Ctx<'_>,
    reducer: &Reducer,
    vector: &Vector,
) -> Result<(), CollectiveError> {
    let lanes = Lanes {
        len: vector.len(),
        lanes: ctx.layout.lanes(),
    };
    let local = Local::new(ctx)?;
    if let Some(local) = &local {
        reduce_inside(ctx, local, &reducer.partial(), vector, lanes)?;
    }
    across(ctx, reducer, vector, lanes, local.is_some())?;
    if let Some(local) = &local {
        collect_inside(ctx, local, vector, lanes)?;
    }
    Ok(())
}

/// The vector cut into one contiguous lane per owner. In elements.
#[derive(Clone, Copy)]
struct Lanes {
    len: usize,
    lanes: usize,
}

impl Lanes {
    fn of(self, position: usize) -> Range<usize> {
        if position < self.lanes {
            even_part(self.len, self.lanes, position)
        } else {
            0..0
        }
    }

    /// The `step`th stretch of `chunk` elements of a lane.
    fn chunk(self, position: usize, step: usize, chunk: usize) -> Range<usize> {
        let lane = self.of(position);
        let start = (lane.start + step * chunk).min(lane.end);
        start..(start + chunk).min(lane.end)
    }

    /// Steps of `chunk` elements that the longest lane takes.
    fn steps(self, chunk: usize) -> usize {
        self.of(0).len().div_ceil(chunk)
    }
}

/// Leaves this host's partial result of each lane in its owner's outputs.
fn reduce_inside(
    ctx: &mut Ctx<'_>,
    local: &Local<'_>,
    reducer: &Reducer,
    vector: &Vector,
    lanes: Lanes,
) -> Result<(), CollectiveError> {
    let align = LINE / vector.size();
    let fits = local.slot_len() / lanes.lanes / LINE * align;
    let chunk = (ctx.tuning.chunk_bytes / vector.size()).clamp(align, fits);
    let (me, members) = (local.me(), local.len());
    let sources = std::mem::take(&mut ctx.scratch.sources);
    let mut work = ReduceInside {
        reducer,
        vector,
        lanes,
        chunk,
        me,
        members,
        sources,
    };
    let plan = Plan {
        steps: lanes.steps(chunk),
        reduces: false,
        producer: None,
    };
    let result = local.run(ctx, plan, &mut work);
    ctx.scratch.sources = work.sources;
    result
}

struct ReduceInside<'a> {
    reducer: &'a Reducer,
    vector: &'a Vector,
    lanes: Lanes,
    chunk: usize,
    me: usize,
    members: usize,
    sources: Vec<Source>,
}

impl ReduceInside<'_> {
    /// Where a lane's chunk lies in every slot.
    fn at(&self, slot: *mut u8, lane: usize) -> *mut u8 {
        slot.wrapping_add(lane * self.chunk * self.vector.size())
    }
}

impl Work for ReduceInside<'_> {
    fn stage(&mut self, step: usize, mine: *mut u8) {
        for lane in (0..self.lanes.lanes).filter(|lane| *lane != self.me) {
            let to = self.at(mine, lane);
            for piece in self.vector.pieces(self.lanes.chunk(lane, step, self.chunk)) {
                // SAFETY: the caller of the collective vouches for the segments; a chunk fits its
                // place in the slot, which nobody reads until it is published.
                unsafe { self.reducer.stage(&piece, to.wrapping_add(piece.at)) };
            }
        }
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        let range = self.lanes.chunk(self.me, step, self.chunk);
        let mut sources = std::mem::take(&mut self.sources);
        // SAFETY: as in `stage`; all peers have published this step. What this overwrites of its
        // own inputs, when in place, is never staged.
        unsafe {
            let theirs = |position| self.at(slots.of(position), self.me).cast_const();
            let shape = (self.me, self.members);
            reduce_range(
                &mut sources,
                self.reducer,
                self.vector,
                range,
                shape,
                theirs,
                None,
            );
        }
        self.sources = sources;
    }
}

/// Allreduce of this rank's lane among its owners on all hosts, in place in the outputs.
fn across(
    ctx: &mut Ctx<'_>,
    reducer: &Reducer,
    vector: &Vector,
    lanes: Lanes,
    reduced: bool,
) -> Result<(), CollectiveError> {
    let position = ctx.layout.my_local();
    let range = lanes.of(position);
    if range.is_empty() {
        return Ok(());
    }
    let lane = ctx.scratch.vector(
        vector.size(),
        vector.pieces(range).map(|piece| {
            // Alone on its host a rank still has its raw input here.
            let input = if reduced {
                piece.output.cast_const()
            } else {
                piece.input
            };
            Segment {
                input,
                output: piece.output,
                elems: piece.elems,
            }
        }),
    );
    let plain = reducer.without_pre();
    let reducer = if reduced { &plain } else { reducer };
    let layout = ctx.layout;
    let group: Vec<usize> = (0..layout.hosts())
        .map(|host| layout.on_host(host)[position])
        .collect();
    let bytes = lane.len() * lane.size();
    let result = if bytes <= ctx.tuning.doubling_max_bytes {
        recursive_doubling::among(ctx, reducer, &lane, &group)
    } else {
        ring::among(ctx, reducer, &lane, &group)
    };
    ctx.scratch.put_vector(lane);
    result
}

/// Gives the finished lanes to all members of the host.
fn collect_inside(
    ctx: &mut Ctx<'_>,
    local: &Local<'_>,
    vector: &Vector,
    lanes: Lanes,
) -> Result<(), CollectiveError> {
    let align = LINE / vector.size();
    let fits = local.slot_len() / LINE * align;
    let chunk = (2 * ctx.tuning.chunk_bytes / vector.size()).clamp(align, fits);
    let mut work = CollectInside {
        vector,
        lanes,
        chunk,
        me: local.me(),
    };
    let plan = Plan {
        steps: lanes.steps(chunk),
        reduces: false,
        producer: None,
    };
    local.run(ctx, plan, &mut work)
}

struct CollectInside<'a> {
    vector: &'a Vector,
    lanes: Lanes,
    chunk: usize,
    me: usize,
}

impl Work for CollectInside<'_> {
    fn stage(&mut self, step: usize, mine: *mut u8) {
        for piece in self
            .vector
            .pieces(self.lanes.chunk(self.me, step, self.chunk))
        {
            let bytes = piece.elems * self.vector.size();
            // SAFETY: the caller of the collective vouches for the segments; a chunk fits the slot,
            // which nobody reads until it is published.
            unsafe {
                mine.wrapping_add(piece.at)
                    .copy_from_nonoverlapping(piece.output, bytes);
            }
        }
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        for lane in (0..self.lanes.lanes).filter(|lane| *lane != self.me) {
            let from = slots.of(lane);
            for piece in self.vector.pieces(self.lanes.chunk(lane, step, self.chunk)) {
                let bytes = piece.elems * self.vector.size();
                // SAFETY: as in `stage`; the owner has published this step.
                unsafe {
                    let from = from.wrapping_add(piece.at);
                    piece.output.copy_from_nonoverlapping(from, bytes);
                }
            }
        }
    }
}

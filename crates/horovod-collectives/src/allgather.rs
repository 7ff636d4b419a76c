//! Allgather: everybody's rows, in the order of members, on every member.
//!
//! Inside a host all stage chunks and all read them. Between hosts the first member of each passes
//! whole hosts' blocks around a ring as they come, and hands them to the others of its host.

use std::ops::Range;

use crate::broadcast::{self, Copies, Progress};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::{RecvCursor, SendCursor};
use crate::layout::SetLayout;
use crate::local::{Landing, Local, Pattern, Schedule, Slots, Work};
use crate::select;
use crate::slices::{Segment, Vector, copy};

/// One tensor to gather.
#[derive(Clone, Debug)]
pub struct GatherItem {
    /// This member's rows; `bytes[me]` of them. May be the place in `output` where they go.
    pub input: *const u8,
    /// Room for everybody's rows.
    pub output: *mut u8,
    /// Bytes of each member's rows.
    pub bytes: Vec<usize>,
}

impl GatherItem {
    /// The part of the output that comes from `member`.
    fn part(&self, member: usize) -> Segment {
        let at = self.bytes[..member].iter().sum();
        let output = self.output.wrapping_add(at);
        Segment {
            input: output,
            output,
            elems: self.bytes[member],
        }
    }
}

/// Concatenates each item's rows of all members, in member order, into every member's output.
///
/// # Safety
/// Inputs are readable and outputs writable for their lengths; they do not overlap, except that an
/// input may be exactly where its rows go; nobody else touches any of them until this returns.
pub unsafe fn allgather(ctx: &mut Ctx<'_>, items: &[GatherItem]) -> Result<(), CollectiveError> {
    let by_host = select::allgather_by_host(ctx.layout, ctx.tuning);
    if let Some(local) = Local::new(ctx)?.filter(|_| by_host) {
        let stage = ctx.scratch.stages.begin("ALLGATHER_INSIDE_HOST");
        inside(ctx, &local, items)?;
        ctx.scratch.stages.end(stage);
    } else {
        for item in items {
            let own = item.part(ctx.me);
            // SAFETY: the caller's promise.
            unsafe { copy(item.input, own.output, own.elems) };
        }
    }
    if !by_host {
        let stage = ctx.scratch.stages.begin("ALLGATHER_ACROSS_RANKS");
        across(ctx, items, &Blocks::by_member(ctx.layout))?;
        ctx.scratch.stages.end(stage);
        return Ok(());
    }
    if ctx.layout.hosts() > 1 {
        let stage = ctx.scratch.stages.begin("ALLGATHER_ACROSS_HOSTS");
        across(ctx, items, &Blocks::by_host(ctx.layout))?;
        ctx.scratch.stages.end(stage);
    }
    Ok(())
}

/// Blocks that pass around the ring: one per host, or one per member.
struct Blocks<'a> {
    layout: &'a SetLayout,
    by_host: bool,
    count: usize,
    /// This member's.
    mine: usize,
}

impl<'a> Blocks<'a> {
    fn by_host(layout: &'a SetLayout) -> Self {
        Self {
            layout,
            by_host: true,
            count: layout.hosts(),
            mine: layout.my_host(),
        }
    }

    fn by_member(layout: &'a SetLayout) -> Self {
        Self {
            layout,
            by_host: false,
            count: layout.members(),
            mine: layout.me(),
        }
    }

    /// The members whose rows make the block that is `distance` before this member's.
    fn before(&self, distance: usize) -> &[usize] {
        let block = (self.mine + self.count - distance) % self.count;
        if self.by_host {
            self.layout.on_host(block)
        } else {
            self.layout.just(block)
        }
    }

    /// Whether this member passes blocks on.
    fn is_delegate(&self) -> bool {
        !self.by_host || self.layout.my_local() == 0
    }
}

/// The outputs that come from these members, as bytes: all items of one, then all of the next.
fn gathered(
    ctx: &mut Ctx<'_>,
    items: &[GatherItem],
    members: impl IntoIterator<Item = usize>,
) -> Vector {
    let of = |member: usize| items.iter().map(move |item| item.part(member));
    let segments = members.into_iter().flat_map(of);
    ctx.scratch.vector(1, segments)
}

/// This member's rows: where they are and where they go.
fn own(ctx: &mut Ctx<'_>, items: &[GatherItem]) -> Vector {
    let me = ctx.me;
    let segments = items.iter().map(|item| Segment {
        input: item.input,
        ..item.part(me)
    });
    ctx.scratch.vector(1, segments)
}

fn inside(
    ctx: &mut Ctx<'_>,
    local: &Local<'_>,
    items: &[GatherItem],
) -> Result<(), CollectiveError> {
    let mut parts = ctx.scratch.vectors();
    for member in ctx.layout.locals() {
        parts.push(if *member == ctx.me {
            own(ctx, items)
        } else {
            gathered(ctx, items, [*member])
        });
    }
    let chunk = local.slot_len().min(2 * ctx.tuning.chunk_bytes).max(1);
    let longest = parts.iter().map(Vector::len).max().unwrap_or(0);
    let schedule = Schedule {
        steps: longest.div_ceil(chunk),
        pattern: Pattern::Share,
        slot_len: local.slot_len(),
    };
    let total: usize = items.iter().flat_map(|item| &item.bytes).sum();
    let landing = Landing {
        streaming: total >= ctx.tuning.stream_min_bytes,
        taking: false,
    };
    let mut work = Gather {
        parts: &parts,
        chunk,
        landing,
        me: local.me(),
    };
    let result = local.run(ctx, schedule, &mut work);
    ctx.scratch.put_vectors(parts);
    result
}

struct Gather<'a> {
    /// Where each member's bytes are or go, by position on this host.
    parts: &'a [Vector],
    chunk: usize,
    landing: Landing,
    me: usize,
}

impl Work for Gather<'_> {
    fn stage(&mut self, step: usize, slots: &Slots<'_>) {
        let range = step * self.chunk..(step + 1) * self.chunk;
        for piece in self.parts[self.me].pieces(range) {
            let to = slots.mine().wrapping_add(piece.at);
            // SAFETY: the caller of the collective vouches for the tensors; a chunk fits a slot,
            // which nobody reads until it is published.
            unsafe {
                to.copy_from_nonoverlapping(piece.input, piece.elems);
                if !std::ptr::eq(piece.input, piece.output) {
                    // From the slot, which lies in the caches.
                    self.landing.copy(to, piece.output, piece.elems);
                }
            }
        }
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        for (position, bytes) in self.parts.iter().enumerate() {
            if position != self.me {
                Copies {
                    bytes,
                    chunk: self.chunk,
                    landing: self.landing,
                }
                .collect(step, slots.of(position));
            }
        }
    }
}

/// Passes the blocks around the ring, and inside a host to those that take no part in it: first one's
/// own, then what has come, as it comes.
fn across(
    ctx: &mut Ctx<'_>,
    items: &[GatherItem],
    blocks: &Blocks<'_>,
) -> Result<(), CollectiveError> {
    let last = blocks.count - 1;
    let of = |distances: Range<usize>| {
        let members = distances.flat_map(|distance| blocks.before(distance));
        members.copied().collect::<Vec<usize>>()
    };
    let inn = gathered(ctx, items, of(1..last + 1));
    // Sent in this order: nobody needs what its successor begins with.
    let out = gathered(ctx, items, of(0..last));
    let own = gathered(ctx, items, of(0..1));
    let (next, previous) = (blocks.before(last)[0], blocks.before(1)[0]);
    let mut sending = SendCursor::new(&out, 0..out.len());
    let mut receiving = RecvCursor::new(&inn, 0..inn.len());
    let mut step = |ctx: &mut Ctx<'_>| {
        let mut moved = !receiving.is_done() && receiving.step(ctx, previous)?;
        let limit = own.len() + receiving.position();
        moved |= !sending.is_done() && sending.step(ctx, next, limit)?;
        Ok(Progress {
            moved,
            there: receiving.position(),
            done: receiving.is_done() && sending.is_done(),
        })
    };
    if !blocks.is_delegate() {
        broadcast::inside(ctx, &inn, 0, |_| Ok(Progress::NOTHING_TO_DO))?;
    } else if blocks.by_host {
        broadcast::inside(ctx, &inn, 0, &mut step)?;
    } else {
        let mut spins = 0;
        loop {
            let Progress { moved, done, .. } = step(ctx)?;
            if done {
                break;
            }
            if moved {
                spins = 0;
            } else {
                ctx.idle.idle(spins)?;
                spins = u32::saturating_add(spins, 1);
            }
        }
    }
    sending.finish(ctx);
    receiving.finish(ctx);
    for vector in [own, out, inn] {
        ctx.scratch.put_vector(vector);
    }
    Ok(())
}

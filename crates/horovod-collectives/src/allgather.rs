//! Allgather: everybody's rows, in the order of members, on every member.
//!
//! Inside a host all stage chunks and all read them. Between hosts the first member of each passes
//! whole hosts' blocks around a ring and hands what it received to the others of its host.

use crate::broadcast::{self, Copies};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::{Transfer, exchange};
use crate::local::{Landing, Local, Pattern, Plan, Slots, Work};
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
    let local = Local::new(ctx)?;
    if let Some(local) = &local {
        inside(ctx, local, items)?;
    } else {
        for item in items {
            let own = item.part(ctx.me);
            // SAFETY: the caller's promise.
            unsafe { copy(item.input, own.output, own.elems) };
        }
    }
    if ctx.layout.hosts() > 1 {
        across(ctx, items)?;
        if let Some(local) = &local {
            let host = ctx.layout.my_host();
            let layout = ctx.layout;
            let remote = (0..layout.members()).filter(|member| layout.host_of(*member) != host);
            let bytes = gathered(ctx, items, remote);
            broadcast::inside(ctx, local, &bytes, 0)?;
            ctx.scratch.put_vector(bytes);
        }
    }
    Ok(())
}

/// The outputs that come from these members, as bytes.
fn gathered(
    ctx: &mut Ctx<'_>,
    items: &[GatherItem],
    members: impl Iterator<Item = usize> + Clone,
) -> Vector {
    let segments = items
        .iter()
        .flat_map(|item| members.clone().map(move |member| item.part(member)));
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
            gathered(ctx, items, std::iter::once(*member))
        });
    }
    let chunk = local.slot_len().min(2 * ctx.tuning.chunk_bytes).max(1);
    let longest = parts.iter().map(Vector::len).max().unwrap_or(0);
    let plan = Plan {
        steps: longest.div_ceil(chunk),
        pattern: Pattern::Share,
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
    let result = local.run(ctx, plan, &mut work);
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

/// Passes hosts' blocks around the ring of first members.
fn across(ctx: &mut Ctx<'_>, items: &[GatherItem]) -> Result<(), CollectiveError> {
    let layout = ctx.layout;
    if layout.my_local() != 0 {
        return Ok(());
    }
    let (hosts, me) = (layout.hosts(), layout.my_host());
    let next = layout.on_host((me + 1) % hosts)[0];
    let previous = layout.on_host((me + hosts - 1) % hosts)[0];
    for step in 0..hosts - 1 {
        let block = |host: usize| layout.on_host(host % hosts).iter().copied();
        let out = gathered(ctx, items, block(me + hosts - step));
        let inn = gathered(ctx, items, block(me + hosts - step - 1));
        let send = Transfer {
            peer: next,
            bytes: &out,
            range: 0..out.len(),
        };
        let recv = Transfer {
            peer: previous,
            bytes: &inn,
            range: 0..inn.len(),
        };
        exchange(ctx, Some(send), Some(recv))?;
        ctx.scratch.put_vector(out);
        ctx.scratch.put_vector(inn);
    }
    Ok(())
}

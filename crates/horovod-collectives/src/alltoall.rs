//! Alltoall: a block of rows from every member to every member. The numbers of rows first, then the rows:
//! inside one host through staging memory, all pairs at the same time; otherwise pairwise, where in step
//! `s` each member sends to the one `s` after it while receiving from the one `s` before it.

use std::ops::Range;

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::{Transfer, exchange, exchange_bytes};
use crate::local::{LINE, Landing, Local, Pattern, Schedule, Slots, Work};
use crate::slices::{Segment, copy};

/// This member's input: `rows[j]` rows of `row_bytes` bytes for each member `j`, consecutive from `input` on.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The first byte.
    pub input: *const u8,
    /// Rows for each member.
    pub rows: &'a [usize],
    /// Bytes of one row.
    pub row_bytes: usize,
}

/// Rows that each member will send to this one.
#[derive(Debug)]
pub struct Incoming {
    /// Rows from each member.
    pub rows: Vec<usize>,
    /// Inside one host the most that any pair exchanges.
    longest: usize,
}

/// Tells each member `j` that it gets `send_rows[j]` rows; what this one gets. Every member has to call
/// [`exchange_rows`] next.
pub fn exchange_sizes(ctx: &mut Ctx<'_>, send_rows: &[usize]) -> Result<Incoming, CollectiveError> {
    let mut rows = ctx.scratch.counts(ctx.members.len());
    let local = inside_host(ctx)?;
    let sizes = ctx.scratch.stages.begin("EXCHANGE_SIZES");
    let longest = match &local {
        Some(local) => exchange_inside(ctx, local, send_rows, &mut rows)?,
        None => {
            exchange_across(ctx, send_rows, &mut rows)?;
            0
        }
    };
    ctx.scratch.stages.end(sizes);
    Ok(Incoming { rows, longest })
}

/// Sends what goes out, and stores what the others sent, in member order, at `output`. The rows are those of the
/// [`exchange_sizes`] before it; rows without bytes are counted and need no memory.
///
/// # Safety
/// The outgoing rows are readable. `output` is writable for the incoming rows and does not overlap the input. Nothing
/// else accesses either until this function returns.
pub unsafe fn exchange_rows(
    ctx: &mut Ctx<'_>,
    outgoing: Outgoing<'_>,
    incoming: Incoming,
    output: *mut u8,
) -> Result<(), CollectiveError> {
    let local = inside_host(ctx)?;
    let whole = ctx.scratch.stages.begin(match &local {
        Some(_) => "ALLTOALL_INSIDE_HOST",
        None => "PAIRWISE_ALLTOALL",
    });
    let blocks = Blocks {
        input: outgoing.input,
        output,
        row_bytes: outgoing.row_bytes,
        send_rows: outgoing.rows,
        recv_rows: &incoming.rows,
    };
    match &local {
        Some(local) => inside(ctx, local, &blocks, incoming.longest)?,
        None => across(ctx, &blocks)?,
    }
    ctx.scratch.put_counts(incoming.rows);
    ctx.scratch.stages.end(whole);
    Ok(())
}

impl Incoming {
    /// All rows together.
    pub fn bytes(&self, row_bytes: usize) -> Result<usize, CollectiveError> {
        let total = self.rows.iter().try_fold(0usize, |sum, rows| {
            sum.checked_add(rows.checked_mul(row_bytes)?)
        });
        total
            .filter(|total| isize::try_from(*total).is_ok())
            .ok_or_else(|| CollectiveError::Allocation("the sizes received overflow".into()))
    }
}

fn inside_host<'a>(ctx: &Ctx<'a>) -> Result<Option<Local<'a>>, CollectiveError> {
    let local = Local::new(ctx)?;
    Ok(local.filter(|local| ctx.layout.hosts() == 1 && 8 * local.len() <= local.small_len()))
}

/// Where the blocks of this member lie.
struct Blocks<'a> {
    input: *const u8,
    output: *mut u8,
    row_bytes: usize,
    send_rows: &'a [usize],
    recv_rows: &'a [usize],
}

impl Blocks<'_> {
    /// The bytes of a block among those of `rows`.
    fn range(&self, rows: &[usize], member: usize) -> Range<usize> {
        let start = rows[..member].iter().sum::<usize>() * self.row_bytes;
        start..start + rows[member] * self.row_bytes
    }

    /// The memory of the rows for a member.
    fn out(&self, member: usize) -> (*const u8, usize) {
        let range = self.range(self.send_rows, member);
        (self.input.wrapping_add(range.start), range.len())
    }

    /// The memory for the rows from a member.
    fn inn(&self, member: usize) -> (*mut u8, usize) {
        let range = self.range(self.recv_rows, member);
        (self.output.wrapping_add(range.start), range.len())
    }
}

/// Tells the others inside the host how many rows they get; returns the most that any pair exchanges.
fn exchange_inside(
    ctx: &mut Ctx<'_>,
    local: &Local<'_>,
    send_rows: &[usize],
    recv_rows: &mut [usize],
) -> Result<usize, CollectiveError> {
    let n = local.len();
    let mut longest = 0;
    let stage = |mine: *mut u8| {
        for (to, rows) in send_rows.iter().enumerate() {
            // SAFETY: the words of all members fit the area, which nobody reads until it is published.
            unsafe { mine.cast::<u64>().add(to).write_unaligned(*rows as u64) };
        }
    };
    let mut result = Ok(());
    let me = local.me();
    local.run_small(ctx, stage, |slots| {
        for (from, mine) in recv_rows.iter_mut().enumerate() {
            for to in 0..n {
                // SAFETY: as above; all members have published their areas.
                let rows = unsafe { slots.of(from).cast::<u64>().add(to).read_unaligned() };
                match block_size(from, rows) {
                    Ok(rows) if to == me => *mine = rows,
                    Ok(_) => {}
                    Err(e) => result = Err(e),
                }
                if from != to {
                    longest = longest.max(rows as usize);
                }
            }
        }
    })?;
    result.map(|()| longest)
}

/// Tells the others how many rows they get, one after the other.
fn exchange_across(
    ctx: &mut Ctx<'_>,
    send_rows: &[usize],
    recv_rows: &mut [usize],
) -> Result<(), CollectiveError> {
    let (n, me) = (ctx.members.len(), ctx.me);
    recv_rows[me] = send_rows[me];
    for step in 1..n {
        let (to, from) = ((me + step) % n, (me + n - step) % n);
        let count = (send_rows[to] as u64).to_le_bytes();
        let mut theirs = [0; 8];
        exchange_bytes(ctx, Some((to, &count)), Some((from, &mut theirs)))?;
        recv_rows[from] = block_size(from, u64::from_le_bytes(theirs))?;
    }
    Ok(())
}

/// A peer's word for the size of a block, if it can be one.
fn block_size(member: usize, rows: u64) -> Result<usize, CollectiveError> {
    isize::try_from(rows)
        .map(isize::unsigned_abs)
        .map_err(|_| CollectiveError::BlockSize { member, rows })
}

fn inside(
    ctx: &mut Ctx<'_>,
    local: &Local<'_>,
    blocks: &Blocks<'_>,
    longest: usize,
) -> Result<(), CollectiveError> {
    let fits = local.slot_len() / local.len() / LINE * LINE;
    let chunk = ctx.tuning.chunk_bytes.clamp(LINE, fits);
    let bytes = longest
        .checked_mul(blocks.row_bytes)
        .ok_or_else(|| CollectiveError::Allocation("the sizes sent overflow".into()))?;
    let total: usize = (0..local.len()).map(|member| blocks.inn(member).1).sum();
    let landing = Landing {
        streaming: total >= ctx.tuning.stream_min_bytes,
        taking: false,
    };
    let (own, len) = blocks.out(local.me());
    // SAFETY: the caller of the collective vouches for both; what only reads does not take.
    unsafe { landing.copy(own.cast_mut(), blocks.inn(local.me()).0, len) };
    let schedule = Schedule {
        steps: bytes.div_ceil(chunk),
        pattern: Pattern::Pairs,
        slot_len: local.slot_len(),
    };
    let mut work = Inside {
        blocks,
        chunk,
        landing,
        me: local.me(),
        members: local.len(),
    };
    local.run(ctx, schedule, &mut work)
}

struct Inside<'a> {
    blocks: &'a Blocks<'a>,
    /// Bytes per pair and step.
    chunk: usize,
    landing: Landing,
    me: usize,
    members: usize,
}

impl Inside<'_> {
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.members).filter(move |member| *member != me)
    }

    /// A step's part of a block of `len` bytes.
    fn range(&self, step: usize, len: usize) -> Range<usize> {
        (step * self.chunk).min(len)..((step + 1) * self.chunk).min(len)
    }
}

impl Work for Inside<'_> {
    fn stage(&mut self, step: usize, slots: &Slots<'_>) {
        for peer in self.peers() {
            let (block, len) = self.blocks.out(peer);
            let range = self.range(step, len);
            // SAFETY: the caller of the collective vouches for the input; a chunk fits its place in
            // the slot, which nobody reads until it is published.
            unsafe {
                slots
                    .to(peer, self.chunk)
                    .copy_from_nonoverlapping(block.wrapping_add(range.start), range.len());
            }
        }
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        for peer in self.peers() {
            let (block, len) = self.blocks.inn(peer);
            let range = self.range(step, len);
            let from = slots.from(peer, self.chunk);
            // SAFETY: the caller of the collective vouches for the output; the peer has published.
            unsafe {
                self.landing
                    .copy(from, block.wrapping_add(range.start), range.len());
            }
        }
    }
}

fn across(ctx: &mut Ctx<'_>, blocks: &Blocks<'_>) -> Result<(), CollectiveError> {
    let (n, me) = (ctx.members.len(), ctx.me);
    let (own, len) = blocks.out(me);
    // SAFETY: the caller of the collective vouches for both.
    unsafe { copy(own, blocks.inn(me).0, len) };
    for step in 1..n {
        let (to, from) = ((me + step) % n, (me + n - step) % n);
        let block = |(ptr, elems): (*mut u8, usize)| Segment {
            input: ptr,
            output: ptr,
            elems,
        };
        let (source, len) = blocks.out(to);
        // The cursor that sends only reads.
        let out = ctx.scratch.vector(1, [block((source.cast_mut(), len))]);
        let inn = ctx.scratch.vector(1, [block(blocks.inn(from))]);
        let send = Transfer {
            peer: to,
            bytes: &out,
            range: 0..out.len(),
        };
        let recv = Transfer {
            peer: from,
            bytes: &inn,
            range: 0..inn.len(),
        };
        exchange(ctx, Some(send), Some(recv))?;
        ctx.scratch.put_vector(out);
        ctx.scratch.put_vector(inn);
    }
    Ok(())
}

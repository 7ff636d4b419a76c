//! Broadcast: the root's bytes on every member.
//!
//! Between hosts one member of each takes part: the root for its own, the first for the others. They
//! pass the bytes down a binomial tree when few, along a chain when many. Inside a host that member
//! stages chunks as they come and the others read them.

use std::time::{Duration, Instant};

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::{RecvCursor, SendCursor};
use crate::local::{LINE, Landing, Local, Pattern, Pipeline, Schedule, Slots, Track, Work};
use crate::select::{self, Relay};
use crate::slices::{Segment, Vector, copy};

/// One tensor of a broadcast.
#[derive(Clone, Copy, Debug)]
pub struct ByteSegment {
    /// The bytes to send; only read on the root.
    pub input: *const u8,
    /// Where they go, the root included; may be `input`.
    pub output: *mut u8,
    /// How many.
    pub bytes: usize,
}

/// Copies the inputs of the member with index `root` to the outputs of all members.
///
/// # Safety
/// Outputs are writable, and on the root inputs readable, for their lengths; an output equals its own
/// input or overlaps no segment; nobody else touches any of them until this returns.
pub unsafe fn broadcast(
    ctx: &mut Ctx<'_>,
    root: usize,
    segs: &[ByteSegment],
) -> Result<(), CollectiveError> {
    if ctx.me == root {
        for seg in segs {
            // SAFETY: the caller's promise.
            unsafe { copy(seg.input, seg.output, seg.bytes) };
        }
    }
    let bytes = ctx.scratch.vector(
        1,
        segs.iter().map(|seg| Segment {
            input: seg.output.cast_const(),
            output: seg.output,
            elems: seg.bytes,
        }),
    );
    let layout = ctx.layout;
    let source = delegate(ctx, layout.my_host(), root);
    let mut relay = Relaying::new(ctx, root, &bytes);
    let position = layout
        .locals()
        .iter()
        .position(|member| *member == source)
        .unwrap_or(0);
    let stage = ctx.scratch.stages.begin(match layout.hosts() {
        1 => "BROADCAST_INSIDE_HOST",
        _ => "BROADCAST_ACROSS_HOSTS",
    });
    inside(ctx, &bytes, position, |ctx| relay.step(ctx))?;
    ctx.scratch.stages.end(stage);
    relay.put_back(ctx);
    ctx.scratch.put_vector(bytes);
    Ok(())
}

/// The member that takes part for a host.
fn delegate(ctx: &Ctx<'_>, host: usize, root: usize) -> usize {
    if host == ctx.layout.host_of(root) {
        root
    } else {
        ctx.layout.on_host(host)[0]
    }
}

/// How far bytes from other hosts have come.
pub(crate) struct Progress {
    /// Whether anything moved just now.
    pub(crate) moved: bool,
    /// Bytes that are there.
    pub(crate) there: usize,
    /// Whether there is nothing left to receive or to pass on.
    pub(crate) done: bool,
}

impl Progress {
    /// Of a member that neither receives nor passes on.
    pub(crate) const NOTHING_TO_DO: Self = Self {
        moved: false,
        there: usize::MAX,
        done: true,
    };
}

/// Gives the bytes of the member at `position` on this host to the others of the host, as `feed`
/// brings them forward.
pub(crate) fn inside(
    ctx: &mut Ctx<'_>,
    bytes: &Vector,
    position: usize,
    mut feed: impl FnMut(&mut Ctx<'_>) -> Result<Progress, CollectiveError>,
) -> Result<(), CollectiveError> {
    let local = Local::new(ctx)?;
    let slot = local.as_ref().map_or(usize::MAX, Local::slot_len);
    let chunk = slot.min(2 * ctx.tuning.chunk_bytes).max(1);
    let steps = if local.is_some() {
        bytes.len().div_ceil(chunk)
    } else {
        0
    };
    let schedule = Schedule {
        steps,
        pattern: Pattern::From(position),
        slot_len: match local.as_ref().map_or(1, Local::len) {
            // The one reader takes the slots' lines over, so the fewer there are the better.
            0..=2 => slot,
            // Lines that several peers hold are slow to write again, until they have left the peers' caches: so
            // all memory in turn. And a rank that has to wait for its core has more in stock.
            _ => chunk.next_multiple_of(LINE),
        },
    };
    let copies = Copies {
        bytes,
        chunk,
        landing: Landing {
            streaming: bytes.len() >= ctx.tuning.stream_min_bytes,
            // The only reader; with several it would not help.
            taking: local.as_ref().is_some_and(|local| local.len() == 2),
        },
    };
    let mut work = Inside {
        copies,
        source: position,
        me: local.as_ref().map_or(position, Local::me),
        writing: local
            .as_ref()
            .is_some_and(|local| local.len() > 2)
            .then(Writing::default),
    };
    let mut pipeline = Pipeline::new(ctx, schedule, Track::First)?;
    let mut spins = 0;
    loop {
        let Progress {
            mut moved,
            there,
            done,
        } = feed(ctx)?;
        if let Some(local) = local.as_ref().filter(|_| !pipeline.is_done()) {
            let staged = if there >= bytes.len() {
                usize::MAX
            } else {
                there / chunk
            };
            moved |= pipeline.step(local, ctx, &mut work, staged);
        }
        if done && pipeline.is_done() {
            return Ok(());
        }
        if moved {
            spins = 0;
        } else {
            ctx.idle.idle(spins)?;
            spins = u32::saturating_add(spins, 1);
        }
    }
}

/// Copies between a vector of bytes and slots, a chunk per step.
pub(crate) struct Copies<'a> {
    pub(crate) bytes: &'a Vector,
    pub(crate) chunk: usize,
    pub(crate) landing: Landing,
}

impl Copies<'_> {
    /// From the tensors to a slot, through the caches or past them; how many bytes.
    fn stage(&self, step: usize, slot: *mut u8, past_caches: bool) -> usize {
        let landing = Landing {
            streaming: past_caches,
            taking: false,
        };
        let mut bytes = 0;
        for piece in self
            .bytes
            .pieces(step * self.chunk..(step + 1) * self.chunk)
        {
            // SAFETY: the caller of the collective vouches for the tensors; a chunk fits a slot,
            // which nobody reads until it is published.
            unsafe { landing.copy(piece.output, slot.wrapping_add(piece.at), piece.elems) };
            bytes += piece.elems;
        }
        bytes
    }

    /// From a slot to the tensors.
    pub(crate) fn collect(&self, step: usize, slot: *mut u8) {
        for piece in self
            .bytes
            .pieces(step * self.chunk..(step + 1) * self.chunk)
        {
            // SAFETY: as in `stage`; the slot has been published, and if it is taken, this rank is
            // its only reader.
            unsafe {
                let from = slot.wrapping_add(piece.at);
                self.landing.copy(from, piece.output, piece.elems);
            }
        }
    }
}

/// How the source writes to slots that several others have read.
///
/// Where the cores share a cache, their lines are taken back quickly, and the readers find the next bytes in that
/// cache. Where they do not, taking a line back costs far more than to write past the caches and let the readers
/// fetch from memory. Which it is shows in the time that writing takes.
#[derive(Debug, Default)]
struct Writing {
    past_caches: bool,
    /// Chunks in a row that were slow.
    slow: u32,
}

impl Writing {
    /// As measured (docs/performance-decisions.md): four times what it takes with a shared cache, about half of what without.
    const SLOW_PER_LINE: Duration = Duration::from_nanos(16);
    /// One may be slow because its thread lost the core.
    const SLOW_CHUNKS: u32 = 3;

    /// Learns from the time it took to write so many bytes through the caches.
    fn learn(&mut self, bytes: usize, took: Duration) {
        let lines = u32::try_from(bytes / LINE).unwrap_or(u32::MAX);
        // A short last chunk says little.
        if lines < 64 || took < Self::SLOW_PER_LINE * lines {
            self.slow = 0;
        } else {
            self.slow += 1;
            self.past_caches |= self.slow == Self::SLOW_CHUNKS;
        }
    }
}

struct Inside<'a> {
    copies: Copies<'a>,
    source: usize,
    me: usize,
    /// `None` with one reader, which takes the lines over.
    writing: Option<Writing>,
}

impl Work for Inside<'_> {
    fn stage(&mut self, step: usize, slots: &Slots<'_>) {
        let slot = slots.mine();
        match &mut self.writing {
            Some(writing) if !writing.past_caches => {
                let begin = Instant::now();
                let bytes = self.copies.stage(step, slot, false);
                writing.learn(bytes, begin.elapsed());
            }
            writing => {
                self.copies.stage(step, slot, writing.is_some());
            }
        }
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        if self.me != self.source {
            self.copies.collect(step, slots.of(self.source));
        }
    }
}

/// Parent and children of a position among `n`, the source being position 0.
fn links(shape: Relay, position: usize, n: usize) -> (Option<usize>, Vec<usize>) {
    match shape {
        Relay::Chain => {
            let next = (position + 1 < n).then_some(position + 1);
            (position.checked_sub(1), next.into_iter().collect())
        }
        Relay::Tree => {
            let lowest = if position == 0 {
                n.next_power_of_two()
            } else {
                position & position.wrapping_neg()
            };
            let parent = (position > 0).then(|| position - lowest);
            // The farthest child first: it has the most below it.
            let distances = std::iter::successors(Some(lowest / 2), |d| Some(d / 2));
            let children = distances.take_while(|d| *d > 0).map(|d| position + d);
            (parent, children.filter(|child| *child < n).collect())
        }
    }
}

/// The bytes on their way between the delegates of the hosts.
struct Relaying<'a> {
    len: usize,
    /// From whom, and to whom.
    inn: Option<(usize, RecvCursor<'a>)>,
    outs: Vec<(usize, SendCursor<'a>)>,
}

impl<'a> Relaying<'a> {
    /// Nothing to do for those that take no part.
    fn new(ctx: &Ctx<'_>, root: usize, bytes: &'a Vector) -> Self {
        let layout = ctx.layout;
        let (hosts, first, mine) = (layout.hosts(), layout.host_of(root), layout.my_host());
        let mut relaying = Self {
            len: bytes.len(),
            inn: None,
            outs: Vec::new(),
        };
        if delegate(ctx, mine, root) == ctx.me {
            let shape = select::broadcast(bytes.len(), ctx.tuning);
            let (parent, children) = links(shape, (mine + hosts - first) % hosts, hosts);
            let member = |position: usize| delegate(ctx, (position + first) % hosts, root);
            let all = 0..bytes.len();
            relaying.inn =
                parent.map(|parent| (member(parent), RecvCursor::new(bytes, all.clone())));
            let sender = |child: usize| (member(child), SendCursor::new(bytes, all.clone()));
            relaying.outs = children.into_iter().map(sender).collect();
        }
        relaying
    }

    fn step(&mut self, ctx: &mut Ctx<'_>) -> Result<Progress, CollectiveError> {
        let (mut moved, mut there) = (false, self.len);
        if let Some((peer, cursor)) = &mut self.inn {
            moved |= !cursor.is_done() && cursor.step(ctx, *peer)?;
            there = cursor.position();
        }
        for (peer, cursor) in &mut self.outs {
            moved |= !cursor.is_done() && cursor.step(ctx, *peer, there)?;
        }
        Ok(Progress {
            moved,
            there,
            done: there == self.len && self.outs.iter().all(|(_, cursor)| cursor.is_done()),
        })
    }

    fn put_back(self, ctx: &mut Ctx<'_>) {
        if let Some((_, cursor)) = self.inn {
            cursor.finish(ctx);
        }
        for (_, cursor) in self.outs {
            cursor.finish(ctx);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_written_past_the_caches_after_three_slow_chunks_in_a_row() {
        let (chunk, lines) = (128 << 10, 2048);
        let (quick, slow) = (
            Writing::SLOW_PER_LINE * lines / 2,
            Writing::SLOW_PER_LINE * lines,
        );
        let after = |took: &[Duration]| {
            let mut writing = Writing::default();
            took.iter().for_each(|took| writing.learn(chunk, *took));
            writing.past_caches
        };
        assert!(!after(&[slow, slow, quick, slow, slow]));
        assert!(after(&[slow, slow, slow, quick]));
        let mut writing = Writing::default();
        (0..9).for_each(|_| writing.learn(LINE, slow));
        assert!(!writing.past_caches, "too short to tell");
    }

    #[test]
    fn every_position_is_reached_from_its_parent_exactly_once() {
        for shape in [Relay::Tree, Relay::Chain] {
            for n in 1..20 {
                let mut reached = vec![0; n];
                for position in 0..n {
                    for child in links(shape, position, n).1 {
                        assert_eq!(links(shape, child, n).0, Some(position));
                        reached[child] += 1;
                    }
                }
                assert_eq!(links(shape, 0, n).0, None);
                assert!(reached[0] == 0 && reached[1..].iter().all(|times| *times == 1));
            }
        }
    }
}

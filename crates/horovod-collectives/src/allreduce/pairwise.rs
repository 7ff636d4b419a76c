//! Large vectors between members: each member owns a part, and every other member sends it that part. When a chunk of
//! all contributions has arrived, the owner adds them in the order of members and sends the result to all.
//!
//! Each member sends and receives as many bytes as around a ring, but over one hop per phase. Each connection first
//! carries the contributions to the peer's part, then the results of this member's part.

use std::ops::Range;

use horovod_kernels::Source;

use super::group::{Going, Group, parts};
use super::{GroupPosition, Reducer, reduce_range};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::exchange::{RecvCursor, SendCursor};
use crate::select::Across;
use crate::slices::{Parts, Vector};

/// Most bytes of received contributions that wait for their addition, over all members.
const WAITING_MAX: usize = 2 << 20;
/// Fewest bytes of one member's contribution that are received at a time.
const CHUNK_MIN: usize = 16 << 10;

pub(super) struct Pairwise<'a> {
    reducer: &'a Reducer,
    vector: &'a Vector,
    outputs: &'a Vector,
    group: Group<'a>,
    parts: Parts,
    /// The other members, the next position first.
    peers: Vec<Peer<'a>>,
    /// A chunk of each peer's contribution to this member's part, in the order of `peers`.
    chunks: Vec<u8>,
    /// Bytes of a chunk.
    chunk: usize,
    /// Elements of this member's part that are reduced.
    reduced: usize,
    sources: Vec<Source>,
}

struct Peer<'a> {
    position: usize,
    out: SendCursor<'a>,
    /// The bytes that are sent are still contributions.
    contributing: bool,
    /// Bytes of this peer's chunk that have arrived.
    have: usize,
    results: RecvCursor<'a>,
}

impl<'a> Pairwise<'a> {
    pub(super) fn new(
        ctx: &mut Ctx<'_>,
        reducer: &'a Reducer,
        vector: &'a Vector,
        inputs: &'a Vector,
        outputs: &'a Vector,
        group: Group<'a>,
    ) -> Self {
        let (n, size) = (group.len(), vector.size());
        let parts = parts(Across::Pairwise, vector.len(), n);
        let chunk = ctx
            .tuning
            .wire_chunk_bytes
            .min((WAITING_MAX / (n - 1)).max(CHUNK_MIN))
            .next_multiple_of(size);
        let chunks = ctx.scratch.buffer((n - 1) * chunk);
        let peers = group
            .others()
            .map(|position| {
                let part = in_bytes(parts.of(position), size);
                Peer {
                    position,
                    out: SendCursor::new(inputs, part.clone()),
                    contributing: true,
                    have: 0,
                    results: RecvCursor::new(outputs, part),
                }
            })
            .collect();
        Self {
            reducer,
            vector,
            outputs,
            group,
            parts,
            peers,
            chunks,
            chunk,
            reduced: 0,
            sources: std::mem::take(&mut ctx.scratch.sources),
        }
    }

    fn my_part(&self) -> Range<usize> {
        self.parts.of(self.group.me)
    }

    /// Adds the contributions that have arrived from all members; returns whether there were any.
    fn reduce(&mut self, ready: usize) -> bool {
        let (n, size) = (self.group.len(), self.vector.size());
        let mine = self.my_part();
        let have = self.peers.iter().map(|peer| peer.have).min().unwrap_or(0);
        let left = mine.len() - self.reduced;
        let elems = (have / size).min(ready.saturating_sub(self.reduced));
        // With one peer the addition is at once, while the data is in the cache. With several peers it is by whole
        // chunks, so that the bytes of the fastest peer need not be moved.
        if elems == 0 || (n > 2 && elems < left.min(self.chunk / size).min(ready - self.reduced)) {
            return false;
        }
        let start = mine.start + self.reduced;
        let (chunks, chunk, me) = (&self.chunks, self.chunk, self.group.me);
        let theirs = |position: usize| {
            let index = (position + n - me - 1) % n;
            chunks[index * chunk..].as_ptr()
        };
        // SAFETY: the caller of the collective vouches for the segments; the chunks hold `elems`
        // elements each.
        unsafe {
            reduce_range(
                &mut self.sources,
                self.reducer,
                self.vector.pieces(start..start + elems),
                GroupPosition { me, members: n },
                theirs,
                None,
            );
        }
        self.reduced += elems;
        let used = elems * size;
        for (peer, chunk) in self
            .peers
            .iter_mut()
            .zip(self.chunks.chunks_exact_mut(chunk))
        {
            chunk.copy_within(used..peer.have, 0);
            peer.have -= used;
        }
        true
    }
}

fn in_bytes(elems: Range<usize>, size: usize) -> Range<usize> {
    elems.start * size..elems.end * size
}

impl Going for Pairwise<'_> {
    fn step(&mut self, ctx: &mut Ctx<'_>, ready: usize) -> Result<bool, CollectiveError> {
        let (size, mine) = (self.vector.size(), self.my_part());
        let left = (mine.len() - self.reduced) * size;
        let mut moved = false;
        for (peer, chunk) in self
            .peers
            .iter_mut()
            .zip(self.chunks.chunks_exact_mut(self.chunk))
        {
            let member = self.group.members[peer.position];
            if peer.have < left {
                let room = &mut chunk[peer.have..self.chunk.min(left)];
                let n = ctx.data.link(ctx.members[member]).try_recv(room)?;
                peer.have += n;
                moved |= n > 0;
            } else if !peer.results.is_done() {
                moved |= peer.results.step(ctx, member)?;
            }
        }
        moved |= self.reduce(ready);
        for peer in &mut self.peers {
            let member = self.group.members[peer.position];
            if peer.contributing {
                let limit = self.parts.between(peer.position, 0, ready).end * size;
                moved |= !peer.out.is_done() && peer.out.step(ctx, member, limit)?;
                if peer.out.is_done() {
                    peer.contributing = false;
                    peer.out.restart(self.outputs, in_bytes(mine.clone(), size));
                    moved = true;
                }
            }
            if !peer.contributing && !peer.out.is_done() {
                let limit = (mine.start + self.reduced) * size;
                moved |= peer.out.step(ctx, member, limit)?;
            }
        }
        Ok(moved)
    }

    fn finished(&self) -> usize {
        let mine = self.my_part();
        let own = if self.reduced == mine.len() {
            usize::MAX
        } else {
            self.reduced
        };
        let size = self.vector.size();
        let theirs = self.peers.iter().map(|peer| {
            if peer.results.is_done() {
                usize::MAX
            } else {
                peer.results.position() / size - self.parts.of(peer.position).start
            }
        });
        theirs.fold(own, usize::min).min(self.parts.longest())
    }

    fn is_done(&self) -> bool {
        let sent = |peer: &Peer<'_>| !peer.contributing && peer.out.is_done();
        self.reduced == self.my_part().len()
            && self
                .peers
                .iter()
                .all(|peer| sent(peer) && peer.results.is_done())
    }

    fn put_back(self: Box<Self>, ctx: &mut Ctx<'_>) {
        ctx.scratch.sources = self.sources;
        ctx.scratch.put_buffer(self.chunks);
        for peer in self.peers {
            peer.out.finish(ctx);
            peer.results.finish(ctx);
        }
    }
}

//! Byte streams between two members: cursors over vectors of bytes, and moving several at once.
//!
//! Long runs move straight from and to the tensors; short ones are gathered into, or scattered from, a
//! buffer, so that a thousand small tensors do not take a thousand system calls.

use std::ops::Range;

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::slices::Vector;

/// Runs of at least this many bytes are not copied through a buffer.
const DIRECT_MIN: usize = 16 << 10;

/// Bytes of a vector on their way out.
pub(crate) struct SendCursor<'a> {
    bytes: &'a Vector,
    /// Next byte to hand over, and where to stop.
    at: usize,
    end: usize,
    /// Gathered small runs, and how much of them has been handed over.
    gathered: Vec<u8>,
    taken: usize,
}

/// Bytes of a vector on their way in.
pub(crate) struct RecvCursor<'a> {
    bytes: &'a Vector,
    at: usize,
    end: usize,
    buffer: Vec<u8>,
}

/// One contiguous run of a byte vector at `at`, as (pointer, length), cut at `end`.
fn run(bytes: &Vector, at: usize, end: usize) -> Option<(*mut u8, usize)> {
    bytes
        .pieces(at..end)
        .next()
        .map(|piece| (piece.output, piece.elems))
}

impl<'a> SendCursor<'a> {
    /// Sends the outputs `range` of a vector of bytes.
    pub(crate) fn new(bytes: &'a Vector, range: Range<usize>) -> Self {
        debug_assert_eq!(bytes.size(), 1, "a vector of bytes");
        Self {
            bytes,
            at: range.start,
            end: range.end.min(bytes.len()),
            gathered: Vec::new(),
            taken: 0,
        }
    }

    /// Goes on with the outputs `range` of another vector, when all before has been handed over.
    pub(crate) fn restart(&mut self, bytes: &'a Vector, range: Range<usize>) {
        debug_assert!(self.is_done(), "some bytes have not been sent");
        self.bytes = bytes;
        self.at = range.start;
        self.end = range.end.min(bytes.len());
    }

    /// Whether everything has been handed over.
    pub(crate) fn is_done(&self) -> bool {
        self.at >= self.end && self.taken == self.gathered.len()
    }

    /// Hands over what fits of the bytes before `limit`; whether anything did.
    pub(crate) fn step(
        &mut self,
        ctx: &mut Ctx<'_>,
        to: usize,
        limit: usize,
    ) -> Result<bool, CollectiveError> {
        let limit = limit.min(self.end);
        let mut moved = false;
        loop {
            let link = ctx.data.link(ctx.members[to]);
            if self.taken < self.gathered.len() {
                let n = link.try_send(&self.gathered[self.taken..])?;
                if n == 0 {
                    return Ok(moved);
                }
                moved = true;
                self.taken += n;
                continue;
            }
            let Some((ptr, len)) = run(self.bytes, self.at, limit) else {
                return Ok(moved);
            };
            if len < DIRECT_MIN && self.at + len < limit {
                if self.gathered.capacity() == 0 {
                    self.gathered = ctx.scratch.buffer(0);
                }
                self.gather(limit, ctx.tuning.wire_chunk_bytes.max(1));
                continue;
            }
            // SAFETY: the caller of the collective promises that the tensor is readable, and nobody
            // writes to this part of it before it has been sent.
            let bytes = unsafe { std::slice::from_raw_parts(ptr, len) };
            let n = link.try_send(bytes)?;
            if n == 0 {
                return Ok(moved);
            }
            moved = true;
            self.at += n;
        }
    }

    fn gather(&mut self, limit: usize, most: usize) {
        self.gathered.clear();
        self.taken = 0;
        let end = limit.min(self.at + most);
        for piece in self.bytes.pieces(self.at..end) {
            // SAFETY: as in `step`.
            let bytes = unsafe { std::slice::from_raw_parts(piece.output, piece.elems) };
            self.gathered.extend_from_slice(bytes);
        }
        self.at = end;
    }

    /// Gives the buffer back.
    pub(crate) fn finish(self, ctx: &mut Ctx<'_>) {
        if self.gathered.capacity() > 0 {
            ctx.scratch.put_buffer(self.gathered);
        }
    }
}

impl<'a> RecvCursor<'a> {
    /// Receives into the outputs `range` of a vector of bytes.
    pub(crate) fn new(bytes: &'a Vector, range: Range<usize>) -> Self {
        debug_assert_eq!(bytes.size(), 1, "a vector of bytes");
        Self {
            bytes,
            at: range.start,
            end: range.end.min(bytes.len()),
            buffer: Vec::new(),
        }
    }

    /// Whether everything has arrived.
    pub(crate) fn is_done(&self) -> bool {
        self.at >= self.end
    }

    /// Everything before this has arrived.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// Takes what has arrived; whether anything had.
    pub(crate) fn step(&mut self, ctx: &mut Ctx<'_>, from: usize) -> Result<bool, CollectiveError> {
        let mut moved = false;
        while let Some((ptr, len)) = run(self.bytes, self.at, self.end) {
            let n = if len < DIRECT_MIN && self.at + len < self.end {
                if self.buffer.is_empty() {
                    self.buffer = ctx.scratch.buffer(ctx.tuning.wire_chunk_bytes.max(1));
                }
                let most = self.buffer.len().min(self.end - self.at);
                let link = ctx.data.link(ctx.members[from]);
                let n = link.try_recv(&mut self.buffer[..most])?;
                for piece in self.bytes.pieces(self.at..self.at + n) {
                    // SAFETY: the caller of the collective promises that the output is writable;
                    // the piece lies within the n bytes received.
                    unsafe {
                        let from = self.buffer.as_ptr().add(piece.at);
                        piece.output.copy_from_nonoverlapping(from, piece.elems);
                    }
                }
                n
            } else {
                // SAFETY: the caller of the collective promises that the output is writable; it may
                // be uninitialised only as memory of plain bytes that we write and never read.
                let to = unsafe { std::slice::from_raw_parts_mut(ptr, len) };
                ctx.data.link(ctx.members[from]).try_recv(to)?
            };
            if n == 0 {
                break;
            }
            moved = true;
            self.at += n;
        }
        Ok(moved)
    }

    /// Gives the buffer back.
    pub(crate) fn finish(self, ctx: &mut Ctx<'_>) {
        if !self.buffer.is_empty() {
            ctx.scratch.put_buffer(self.buffer);
        }
    }
}

/// A range of a byte vector and the member it goes to or comes from.
pub(crate) struct Transfer<'a> {
    pub(crate) peer: usize,
    pub(crate) bytes: &'a Vector,
    pub(crate) range: Range<usize>,
}

/// Sends one range while receiving another; both ends of each call it.
pub(crate) fn exchange(
    ctx: &mut Ctx<'_>,
    send: Option<Transfer<'_>>,
    recv: Option<Transfer<'_>>,
) -> Result<(), CollectiveError> {
    let mut out = send.map(|t| (SendCursor::new(t.bytes, t.range), t.peer));
    let mut inn = recv.map(|t| (RecvCursor::new(t.bytes, t.range), t.peer));
    let mut spins = 0;
    loop {
        let mut moved = false;
        if let Some((cursor, peer)) = &mut out {
            moved |= cursor.step(ctx, *peer, usize::MAX)?;
        }
        if let Some((cursor, peer)) = &mut inn {
            moved |= cursor.step(ctx, *peer)?;
        }
        let sent = out.as_ref().is_none_or(|(cursor, _)| cursor.is_done());
        if sent && inn.as_ref().is_none_or(|(cursor, _)| cursor.is_done()) {
            break;
        }
        if moved {
            spins = 0;
        } else {
            ctx.idle.idle(spins)?;
            spins = u32::saturating_add(spins, 1);
        }
    }
    if let Some((cursor, _)) = out {
        cursor.finish(ctx);
    }
    if let Some((cursor, _)) = inn {
        cursor.finish(ctx);
    }
    Ok(())
}

/// [`exchange`] of plain memory: all of `send` to `to`, all of `recv` from `from`.
pub(crate) fn exchange_bytes(
    ctx: &mut Ctx<'_>,
    send: Option<(usize, &[u8])>,
    mut recv: Option<(usize, &mut [u8])>,
) -> Result<(), CollectiveError> {
    let (mut sent, mut received, mut spins) = (0, 0, 0);
    let want_sent = send.map_or(0, |(_, bytes)| bytes.len());
    let want_received = recv.as_ref().map_or(0, |(_, bytes)| bytes.len());
    while sent < want_sent || received < want_received {
        let before = sent + received;
        if let Some((to, bytes)) = send.filter(|_| sent < want_sent) {
            sent += ctx.data.link(ctx.members[to]).try_send(&bytes[sent..])?;
        }
        if let Some((from, bytes)) = recv.as_mut().filter(|_| received < want_received) {
            received += ctx
                .data
                .link(ctx.members[*from])
                .try_recv(&mut bytes[received..])?;
        }
        if sent + received > before {
            spins = 0;
        } else {
            ctx.idle.idle(spins)?;
            spins = u32::saturating_add(spins, 1);
        }
    }
    Ok(())
}

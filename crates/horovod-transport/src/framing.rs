//! Messages on a byte stream: a length in four bytes, then that many bytes.
//!
//! A length is checked before anything is allocated for it, and the buffer grows only as bytes
//! really arrive.

use std::collections::VecDeque;

/// Instead of a length: the sender says goodbye and will send nothing more.
const GOODBYE: u32 = u32::MAX;
/// Set in a length: the message is no part of the stream's main conversation.
const OUT_OF_BAND: u32 = 1 << 31;
const HEADER: usize = 4;
/// How much is asked of the stream at once.
const CHUNK: usize = 64 << 10;

/// One item decoded from a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Incoming {
    Frame(Vec<u8>),
    OutOfBand(Vec<u8>),
    Goodbye,
}

/// A frame longer than the receiver accepts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLong(pub(crate) usize);

/// Cuts a byte stream into frames.
pub(crate) struct FrameReader {
    buf: Box<[u8]>,
    start: usize,
    end: usize,
    max: usize,
}

impl FrameReader {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            buf: Box::default(),
            start: 0,
            end: 0,
            max,
        }
    }

    /// Where to put the next bytes of the stream; never empty. Call [`Self::filled`] after.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.buf.len() - self.end < CHUNK / 2 {
            let used = self.end - self.start;
            // Room for what is there and as much again, so long frames are copied few times.
            let want = (used * 2).max(used + CHUNK);
            if self.buf.len() >= want {
                self.buf.copy_within(self.start..self.end, 0);
            } else {
                let mut bigger = vec![0; want].into_boxed_slice();
                bigger[..used].copy_from_slice(&self.buf[self.start..self.end]);
                self.buf = bigger;
            }
            (self.start, self.end) = (0, used);
        }
        &mut self.buf[self.end..]
    }

    /// `n` bytes were put at the start of [`Self::space`].
    pub(crate) fn filled(&mut self, n: usize) {
        self.end += n;
        debug_assert!(self.end <= self.buf.len());
    }

    /// The next whole message, if there is one; in the memory of `spare`.
    pub(crate) fn pop(&mut self, spare: &mut Vec<u8>) -> Result<Option<Incoming>, TooLong> {
        let bytes = &self.buf[self.start..self.end];
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let header = u32::from_le_bytes(*header);
        if header == GOODBYE {
            self.start += HEADER;
            return Ok(Some(Incoming::Goodbye));
        }
        let len = (header & !OUT_OF_BAND) as usize;
        if len > self.max {
            return Err(TooLong(len));
        }
        let Some(frame) = rest.get(..len) else {
            return Ok(None);
        };
        let mut bytes = std::mem::take(spare);
        bytes.clear();
        bytes.extend_from_slice(frame);
        self.start += HEADER + len;
        Ok(Some(if header & OUT_OF_BAND == 0 {
            Incoming::Frame(bytes)
        } else {
            Incoming::OutOfBand(bytes)
        }))
    }
}

/// Frames on their way out, in order.
#[derive(Default)]
pub(crate) struct FrameQueue {
    bytes: VecDeque<u8>,
}

impl FrameQueue {
    /// Appends a frame; the caller has checked its length against the receiver's limit.
    pub(crate) fn push(&mut self, frame: &[u8]) {
        self.push_with(0, [&[], frame]);
    }

    /// As [`Self::push`], for what is no part of the main conversation; its parts follow each other.
    pub(crate) fn push_out_of_band(&mut self, parts: [&[u8]; 2]) {
        self.push_with(OUT_OF_BAND, parts);
    }

    fn push_with(&mut self, mark: u32, parts: [&[u8]; 2]) {
        let len = parts[0].len() + parts[1].len();
        debug_assert!(len < OUT_OF_BAND as usize);
        let header = len as u32 | mark;
        self.bytes.extend(header.to_le_bytes());
        for part in parts {
            self.bytes.extend(part);
        }
    }

    pub(crate) fn push_goodbye(&mut self) {
        self.bytes.extend(GOODBYE.to_le_bytes());
    }

    /// Bytes not sent yet.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Sends as much as `send` takes (0: no more now); true when all is gone.
    pub(crate) fn flush<E>(
        &mut self,
        mut send: impl FnMut(&[u8]) -> Result<usize, E>,
    ) -> Result<bool, E> {
        while !self.bytes.is_empty() {
            let n = send(self.bytes.as_slices().0)?;
            if n == 0 {
                return Ok(false);
            }
            self.bytes.drain(..n);
        }
        // A burst must not hold its memory for ever.
        if self.bytes.capacity() > 4 * CHUNK {
            self.bytes = VecDeque::new();
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn feed(reader: &mut FrameReader, mut bytes: &[u8], piece: usize) -> Vec<Incoming> {
        let mut got = Vec::new();
        while !bytes.is_empty() {
            let space = reader.space();
            let n = piece.min(bytes.len()).min(space.len());
            space[..n].copy_from_slice(&bytes[..n]);
            reader.filled(n);
            bytes = &bytes[n..];
            while let Some(frame) = reader.pop(&mut Vec::new()).unwrap() {
                got.push(frame);
            }
        }
        got
    }

    proptest! {
        #[test]
        fn frames_survive_any_fragmentation(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
            large in 0usize..200_000,
            cuts in prop::collection::vec(1usize..5000, 1..20),
            piece in 1usize..100_000,
        ) {
            let mut frames = frames;
            frames.push(vec![7; large]);
            let mut queue = FrameQueue::default();
            for (i, frame) in frames.iter().enumerate() {
                if i % 3 == 1 {
                    queue.push_out_of_band(frame.split_at(frame.len() / 2).into());
                } else {
                    queue.push(frame);
                }
            }
            queue.push_goodbye();
            let mut wire = Vec::new();
            let mut cut = cuts.iter().cycle();
            while !queue.is_empty() {
                let mut budget = *cut.next().unwrap();
                queue.flush(|bytes| {
                    let n = bytes.len().min(budget);
                    wire.extend_from_slice(&bytes[..n]);
                    budget -= n;
                    Ok::<_, ()>(n)
                }).unwrap();
            }
            let got = feed(&mut FrameReader::new(1 << 20), &wire, piece);
            let kind = |i| if i % 3 == 1 { Incoming::OutOfBand } else { Incoming::Frame };
            let want: Vec<_> = frames
                .into_iter()
                .enumerate()
                .map(|(i, frame)| kind(i)(frame))
                .chain([Incoming::Goodbye])
                .collect();
            prop_assert!(got == want);
        }

        #[test]
        fn garbage_never_makes_it_grow(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let mut reader = FrameReader::new(1000);
            for byte in bytes {
                reader.space()[0] = byte;
                reader.filled(1);
                if reader.pop(&mut Vec::new()).is_err() {
                    break;
                }
            }
            prop_assert!(reader.buf.len() <= 2 * CHUNK);
        }
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_its_bytes_come() {
        let mut reader = FrameReader::new(100);
        reader.space()[..4].copy_from_slice(&101u32.to_le_bytes());
        reader.filled(4);
        assert_eq!(reader.pop(&mut Vec::new()), Err(TooLong(101)));
    }

    #[test]
    fn memory_of_a_burst_is_given_back() {
        let mut queue = FrameQueue::default();
        queue.push(&vec![1; 10 << 20]);
        assert!(queue.flush(|b| Ok::<_, ()>(b.len())).unwrap());
        assert_eq!(queue.bytes.capacity(), 0);
    }
}

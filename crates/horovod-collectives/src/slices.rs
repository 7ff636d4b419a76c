//! Slices: many tensors as one logical vector, no fusion buffer, ranges instead.

use std::ops::Range;
use std::ptr;

/// One tensor of a collective: where its values are and where results go.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// First input element. Null: this rank has nothing to say (it has joined) and contributes the
    /// neutral element.
    pub input: *const u8,
    /// First output element; equal to `input` when in place, else apart from all inputs.
    pub output: *mut u8,
    /// Number of elements.
    pub elems: usize,
}

/// The part of a range that lies in one tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// First input element, or null.
    pub(crate) input: *const u8,
    /// First output element.
    pub(crate) output: *mut u8,
    /// Elements.
    pub(crate) elems: usize,
    /// Byte offset from the start of the range.
    pub(crate) at: usize,
    /// Which tensor.
    pub(crate) segment: usize,
}

impl Piece {
    /// The slice after the first `elems` elements of `size` bytes.
    pub(crate) fn after(&self, elems: usize, size: usize) -> Self {
        Self {
            input: offset(self.input, elems * size),
            output: self.output.wrapping_add(elems * size),
            elems: self.elems - elems,
            at: self.at + elems * size,
            ..*self
        }
    }
}

/// Segments seen as one vector of elements of `size` bytes.
#[derive(Debug, Default)]
pub(crate) struct Vector {
    segments: Vec<Segment>,
    /// Index of each segment's first element, and the total at the end.
    starts: Vec<usize>,
    size: usize,
}

impl Vector {
    /// Replaces the content; keeps the memory.
    pub(crate) fn refill(&mut self, size: usize, segments: impl IntoIterator<Item = Segment>) {
        self.size = size;
        self.segments.clear();
        self.starts.clear();
        let mut total = 0;
        for segment in segments {
            self.starts.push(total);
            total += segment.elems;
            self.segments.push(segment);
        }
        self.starts.push(total);
    }

    /// Elements in all.
    pub(crate) fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Bytes of one element.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Number of tensors.
    pub(crate) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// The tensors, empty ones included.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter()
    }

    /// The non-empty pieces of `range`, in order. Ends beyond the vector are cut off.
    pub(crate) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Piece> + '_ {
        let (start, end) = (range.start, range.end.min(self.len()));
        let first = self
            .starts
            .partition_point(|s| *s <= start)
            .saturating_sub(1);
        let tensors = self
            .segments
            .iter()
            .zip(&self.starts)
            .enumerate()
            .skip(first);
        tensors
            .take_while(move |(_, (_, from))| **from < end)
            .map(move |(segment, (tensor, from))| {
                let lo = start.max(*from);
                let hi = end.min(from + tensor.elems);
                let (skip, size) = ((lo - from.min(&lo)) * self.size, self.size);
                Piece {
                    input: offset(tensor.input, skip),
                    output: tensor.output.wrapping_add(skip),
                    elems: hi.saturating_sub(lo),
                    at: (lo - start) * size,
                    segment,
                }
            })
            .filter(|piece| piece.elems > 0)
    }
}

/// `base + bytes`, keeping null.
pub(crate) fn offset(base: *const u8, bytes: usize) -> *const u8 {
    if base.is_null() {
        base
    } else {
        base.wrapping_add(bytes)
    }
}

/// Copies unless both are the same place.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`; they are equal or do not overlap; nobody else
/// touches either meanwhile.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if !ptr::eq(from, to) {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
    }
}

/// Cuts `len` into `parts` ranges that differ by at most one, the longer ones first.
pub(crate) fn even_part(len: usize, parts: usize, index: usize) -> Range<usize> {
    let (base, longer) = (len / parts, len % parts);
    let start = index * base + index.min(longer);
    start..start + base + usize::from(index < longer)
}

/// `len` elements cut into parts that advance side by side. How far they have come is one number, the
/// elements of each part; a part shorter than that is complete.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    pub(crate) len: usize,
    pub(crate) count: usize,
}

impl Parts {
    /// The elements of a part.
    pub(crate) fn of(self, index: usize) -> Range<usize> {
        even_part(self.len, self.count, index)
    }

    /// The elements of a part from one extent to another.
    pub(crate) fn between(self, index: usize, from: usize, to: usize) -> Range<usize> {
        let Range { start, end } = self.of(index);
        (start + from).min(end)..start.saturating_add(to).min(end)
    }

    /// The extent at which all parts are complete.
    pub(crate) fn longest(self) -> usize {
        self.of(0).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(lens: &[usize], bytes: &mut [u8]) -> Vector {
        let mut vector = Vector::default();
        let mut at = bytes.as_mut_ptr();
        vector.refill(
            4,
            lens.iter().map(|elems| {
                let segment = Segment {
                    input: at,
                    output: at,
                    elems: *elems,
                };
                at = at.wrapping_add(elems * 4);
                segment
            }),
        );
        vector
    }

    #[test]
    fn pieces_cover_every_range_once_and_skip_empty_tensors() {
        let lens = [0, 3, 0, 0, 5, 1, 0];
        let mut bytes = vec![0u8; 36];
        let base = bytes.as_ptr() as usize;
        let vector = vector(&lens, &mut bytes);
        assert_eq!(vector.len(), 9);
        for start in 0..=9 {
            for end in start..=11 {
                let mut next = start;
                for piece in vector.pieces(start..end) {
                    assert_eq!(piece.output as usize - base, next * 4);
                    assert_eq!(piece.at, (next - start) * 4);
                    assert!(piece.elems > 0 && lens[piece.segment] >= piece.elems);
                    next += piece.elems;
                }
                assert_eq!(next, end.min(9).max(start), "{start}..{end}");
            }
        }
    }

    #[test]
    fn a_missing_input_stays_missing_at_every_offset() {
        let mut out = [0u8; 8];
        let mut vector = Vector::default();
        let output = out.as_mut_ptr();
        vector.refill(
            1,
            [Segment {
                input: ptr::null(),
                output,
                elems: 8,
            }],
        );
        let piece = vector.pieces(3..5).next().unwrap();
        assert!(piece.input.is_null());
        assert_eq!(piece.output, output.wrapping_add(3));
    }

    #[test]
    fn even_parts_tile_the_whole() {
        for (len, parts) in [(0, 3), (2, 3), (7, 3), (9, 3), (1, 1)] {
            let mut next = 0;
            for index in 0..parts {
                let part = even_part(len, parts, index);
                assert_eq!(part.start, next);
                assert!(part.len() == len / parts || part.len() == len / parts + 1);
                next = part.end;
            }
            assert_eq!(next, len);
        }
    }
}

//! The arithmetic of an allreduce on pieces of its vector, independent of the algorithm.

use horovod_kernels::{Combine, Source, Spec, fill_identity, reduce};
use horovod_protocol::{ReduceOp, Scale};

use super::Reduction;
use crate::slices::{Piece, Vector};

/// The steps of one reduction over pieces of the vector.
#[derive(Clone, Copy)]
pub(crate) struct Reducer {
    /// The whole reduction, including factors and division.
    pub(crate) spec: Spec,
    /// A rank's data reaches other ranks with the prescale factor already applied. This holds for every operation
    /// except sums, because the factor would change the neutral elements of the others. The rank reads its own data
    /// from the scaled copy, too, so that it rounds halves as often as its peers.
    pub(crate) prescaled: bool,
}

impl Reducer {
    /// # Panics
    /// For Adasum, which is not element-wise.
    pub(crate) fn new(red: &Reduction) -> Self {
        let combine = Combine::of(red.op).expect("Adasum takes its own path");
        let divisor = if red.op == ReduceOp::Average {
            red.divisor.max(1)
        } else {
            1
        };
        let Scale { pre, post } = red.scale;
        let spec = Spec {
            dtype: red.dtype,
            combine,
            pre,
            divisor,
            post,
        };
        Self {
            spec,
            prescaled: pre != 1.0 && combine != Combine::Sum,
        }
    }

    /// Returns the reduction without the steps that follow the combination: division and postscale factor.
    pub(crate) fn partial(&self) -> Self {
        Self {
            spec: self.spec.partial(),
            prescaled: self.prescaled,
        }
    }

    /// Returns the reduction of values to which the prescale factor was applied.
    pub(crate) fn without_pre(&self) -> Self {
        Self {
            spec: Spec {
                pre: 1.0,
                ..self.spec
            },
            prescaled: false,
        }
    }

    /// Returns this rank's own piece as an operand; `None` if this rank does not contribute.
    pub(super) fn own(&self, piece: &Piece) -> Option<Source> {
        (!piece.input.is_null()).then(|| Source::raw(piece.input))
    }

    /// Returns a peer's staged piece as an operand.
    pub(super) fn staged(&self, ptr: *const u8) -> Source {
        Source {
            ptr,
            pre: !self.prescaled,
        }
    }

    /// Writes this rank's piece to where a peer reads it.
    ///
    /// # Safety
    /// The piece is readable and `to` writable for its length, without overlap.
    pub(crate) unsafe fn stage(&self, piece: &Piece, to: *mut u8) {
        let Spec {
            dtype,
            combine,
            pre,
            ..
        } = self.spec;
        // SAFETY: the caller's promise, passed on.
        unsafe {
            if piece.input.is_null() {
                fill_identity(dtype, combine, to, piece.elems);
            } else if self.prescaled {
                horovod_kernels::scale(dtype, pre, piece.input, to, piece.elems);
            } else {
                to.copy_from_nonoverlapping(piece.input, piece.elems * dtype.size());
            }
        }
    }

    /// Copies the contents of `slot` to `output`, then stages a piece of the same length in `slot` by [`Self::stage`].
    ///
    /// # Safety
    /// The piece is readable, `output` and `slot` are writable for its length, without overlap.
    pub(super) unsafe fn refill(&self, output: *mut u8, slot: *mut u8, piece: &Piece) {
        let bytes = piece.elems * self.spec.dtype.size();
        // SAFETY: the caller's promise, passed on.
        unsafe {
            if piece.input.is_null() || self.prescaled {
                output.copy_from_nonoverlapping(slot, bytes);
                self.stage(piece, slot);
            } else {
                horovod_kernels::copy_out_and_in(output, slot, piece.input, bytes);
            }
        }
    }

    /// Writes `elems` of this rank's elements to `to` as the first partial result, with the prescale factor applied.
    ///
    /// # Safety
    /// `input` is null or readable, `to` writable for the elements; they are equal or do not overlap.
    pub(super) unsafe fn begin(&self, input: *const u8, to: *mut u8, elems: usize) {
        let Spec {
            dtype,
            combine,
            pre,
            ..
        } = self.spec;
        // SAFETY: the caller's promise, passed on.
        unsafe {
            if input.is_null() {
                fill_identity(dtype, combine, to, elems);
            } else if pre != 1.0 {
                horovod_kernels::scale(dtype, pre, input, to, elems);
            } else {
                crate::slices::copy(input, to, elems * dtype.size());
            }
        }
    }
}

/// This rank's position among the members whose data is reduced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupPosition {
    /// Position of this rank; no member's position if its own data is staged like the others'.
    pub(crate) me: usize,
    /// Number of members.
    pub(crate) members: usize,
}

/// Reduces own and staged pieces of a range in the order of the host's members. `theirs(position)` returns a peer's
/// data for the range, and this rank's data if the reducer is prescaled. `second` is another place for the result.
///
/// # Safety
/// The pieces are of a vector that keeps its caller's promise; `theirs` are readable and stable, `second` is writable,
/// for the length of the range.
pub(crate) unsafe fn reduce_range(
    sources: &mut Vec<Source>,
    reducer: &Reducer,
    pieces: impl Iterator<Item = Piece>,
    group: GroupPosition,
    theirs: impl Fn(usize) -> *const u8,
    second: Option<*mut u8>,
) {
    for piece in pieces {
        sources.clear();
        for position in 0..group.members {
            if position != group.me || reducer.prescaled {
                let ptr = theirs(position).wrapping_add(piece.at);
                sources.push(reducer.staged(ptr));
            } else if let Some(own) = reducer.own(&piece) {
                sources.push(own);
            }
        }
        let second = second.map(|second| second.wrapping_add(piece.at));
        // SAFETY: the caller's promise; the output is the input or overlaps nothing.
        unsafe { reduce(&reducer.spec, sources, piece.output, second, piece.elems) };
    }
}

/// Applies the factors where the only member is this rank.
pub(crate) fn alone(reducer: &Reducer, vector: &Vector) {
    for piece in vector.pieces(0..vector.len()) {
        // SAFETY: the caller of the collective vouches for the segments.
        unsafe {
            match reducer.own(&piece) {
                Some(own) => reduce(&reducer.spec, &[own], piece.output, None, piece.elems),
                None => reducer.begin(piece.input, piece.output, piece.elems),
            }
        }
    }
}

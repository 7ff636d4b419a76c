//! Orders in which a dense tensor's dimensions lie in memory, as permutations packed into one word.

use std::fmt;

/// Dimensions that an order other than row-major may have: as many as a word has places of four bits.
pub const ORDERED_DIMS_MAX: usize = 16;

/// The order of a dense tensor's dimensions in memory, from the one with the largest stride to the one with the least.
/// Tensors of equal shape and order have each element at the same place.
///
/// Dimensions of one element have no place of their own, so there is one value per arrangement: they count as the
/// outermost ones, in ascending order.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryOrder(u64);

impl MemoryOrder {
    /// The last dimension's elements are neighbours.
    pub const ROW_MAJOR: Self = Self(0);

    /// The order of a tensor with these strides (in elements); `None` if some place in its memory is of no element or
    /// of two, or if there are more than [`ORDERED_DIMS_MAX`] dimensions in another order than row-major.
    pub fn of(shape: &[u64], strides: &[i64]) -> Option<Self> {
        if shape.contains(&0) {
            return Some(Self::ROW_MAJOR);
        }
        if is_row_major(shape, strides) {
            return Some(Self::ROW_MAJOR);
        }
        if shape.len() > ORDERED_DIMS_MAX || shape.len() != strides.len() {
            return None;
        }
        let mut places = [0usize; ORDERED_DIMS_MAX];
        let places = &mut places[..shape.len()];
        for (dim, place) in places.iter_mut().enumerate() {
            *place = dim;
        }
        // Stable: dimensions of one element stay in ascending order.
        places.sort_by_key(|&dim| match shape[dim] {
            1 => i64::MIN,
            _ => strides[dim].saturating_neg(),
        });
        let mut step = 1u64;
        for &dim in places.iter().rev().filter(|&&dim| shape[dim] != 1) {
            if u64::try_from(strides[dim]) != Ok(step) {
                return None;
            }
            step = step.checked_mul(shape[dim])?;
        }
        Some(Self::packed(places))
    }

    /// Decodes a number from another rank for a tensor of this shape; `None` if it is not the canonical code of an
    /// order.
    pub(crate) fn from_code(code: u64, shape: &[u64]) -> Option<Self> {
        let order = Self(code);
        if order == Self::ROW_MAJOR {
            return Some(order);
        }
        if shape.len() > ORDERED_DIMS_MAX {
            return None;
        }
        let mut seen = 0u32;
        for dim in order.dims(shape.len()) {
            seen |= 1 << dim;
        }
        let all = (1u32 << shape.len()) - 1;
        let strides = (seen == all).then(|| order.strides(shape))??;
        (Self::of(shape, &strides) == Some(order)).then_some(order)
    }

    /// Whether the last dimension's elements are neighbours.
    pub fn is_row_major(self) -> bool {
        self == Self::ROW_MAJOR
    }

    /// Whether this is an order for a tensor of this shape.
    pub(crate) fn fits(self, shape: &[u64]) -> bool {
        Self::from_code(self.0, shape) == Some(self)
    }

    /// As [`Self::from_code`] reads it.
    pub(crate) fn code(self) -> u64 {
        self.0
    }

    /// The dimensions, outermost first, of a tensor with so many.
    pub fn dims(self, count: usize) -> impl DoubleEndedIterator<Item = usize> {
        (0..count).map(move |place| match self {
            Self::ROW_MAJOR => place,
            _ => (self.0 >> (4 * place)) as usize & 0xf,
        })
    }

    /// The strides in elements of a tensor of this shape; `None` if they do not fit a number.
    pub fn strides(self, shape: &[u64]) -> Option<Vec<i64>> {
        let mut strides = vec![0; shape.len()];
        let mut step = Some(1i64);
        for dim in self.dims(shape.len()).rev() {
            *strides.get_mut(dim)? = step?;
            let length = i64::try_from(shape[dim].max(1)).ok();
            step = length.and_then(|length| step?.checked_mul(length));
        }
        Some(strides)
    }

    fn packed(places: &[usize]) -> Self {
        if places.is_sorted() {
            return Self::ROW_MAJOR;
        }
        let word = places
            .iter()
            .rev()
            .fold(0, |word, &dim| word << 4 | dim as u64);
        Self(word)
    }
}

/// Whether elements follow each other in row-major order; the usual case, without sorting.
fn is_row_major(shape: &[u64], strides: &[i64]) -> bool {
    let mut step = 1u64;
    for (&length, &stride) in shape.iter().zip(strides).rev() {
        if length != 1 {
            if u64::try_from(stride) != Ok(step) {
                return false;
            }
            let Some(next) = step.checked_mul(length) else {
                return false;
            };
            step = next;
        }
    }
    shape.len() == strides.len()
}

impl Default for MemoryOrder {
    fn default() -> Self {
        Self::ROW_MAJOR
    }
}

impl fmt::Debug for MemoryOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ROW_MAJOR => f.write_str("row-major"),
            Self(word) => write!(f, "{word:#x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn usual_orders_and_what_is_none() {
        let of = MemoryOrder::of;
        let dims = |order: MemoryOrder, n| order.dims(n).collect::<Vec<_>>();
        assert_eq!(of(&[2, 3], &[3, 1]), Some(MemoryOrder::ROW_MAJOR));
        assert_eq!(dims(of(&[2, 3], &[1, 2]).unwrap(), 2), [1, 0]);
        let channels_last = of(&[2, 3, 4, 5], &[60, 1, 15, 3]).unwrap();
        assert_eq!(dims(channels_last, 4), [0, 2, 3, 1]);
        // Nothing to say of dimensions of one element, whatever their strides.
        assert_eq!(of(&[1, 3, 1], &[7, 1, 0]), Some(MemoryOrder::ROW_MAJOR));
        assert_eq!(of(&[3, 1, 2], &[1, 99, 3]), of(&[3, 1, 2], &[1, -5, 3]),);
        assert_eq!(of(&[], &[]), Some(MemoryOrder::ROW_MAJOR));
        assert_eq!(of(&[0, 5], &[1, 1]), Some(MemoryOrder::ROW_MAJOR));
        // Gaps, shared memory, backwards, and strides that are missing.
        for (shape, strides) in [
            (&[2u64, 3][..], &[4i64, 1][..]),
            (&[2, 3], &[0, 1]),
            (&[2, 3], &[1, 1]),
            (&[2, 3], &[-3, 1]),
            (&[3], &[2]),
            (&[2, 3], &[1]),
            (&[u64::MAX, 4], &[1, i64::MAX]),
            (&[2, 3], &[i64::MIN, 1]),
        ] {
            assert_eq!(of(shape, strides), None, "{shape:?} {strides:?}");
        }
    }

    proptest! {
        #[test]
        fn an_order_is_one_number_and_has_one_set_of_strides(
            (shape, places) in prop::collection::vec(1u64..4, 0..6).prop_flat_map(|shape| {
                let places: Vec<usize> = (0..shape.len()).collect();
                (Just(shape), Just(places).prop_shuffle())
            }),
        ) {
            let mut strides = vec![0; shape.len()];
            let mut step = 1;
            for &dim in places.iter().rev() {
                strides[dim] = step;
                step *= shape[dim] as i64;
            }
            let order = MemoryOrder::of(&shape, &strides).unwrap();
            prop_assert_eq!(MemoryOrder::from_code(order.code(), &shape), Some(order));
            let again = order.strides(&shape).unwrap();
            for dim in (0..shape.len()).filter(|&dim| shape[dim] != 1) {
                prop_assert_eq!(again[dim], strides[dim]);
            }
        }

        #[test]
        fn a_number_of_a_stranger_is_an_order_or_refused(
            code: u64, shape in prop::collection::vec(0u64..4, 0..18),
        ) {
            if let Some(order) = MemoryOrder::from_code(code, &shape) {
                let strides = order.strides(&shape).unwrap();
                prop_assert_eq!(MemoryOrder::of(&shape, &strides), Some(order));
            }
        }
    }
}

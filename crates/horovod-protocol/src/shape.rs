//! Dimensions of a tensor, without memory of their own for the usual few.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// Dimensions that a [`Shape`] holds without allocating: what a batch of volumes has.
const FEW: usize = 5;

/// Dimensions, outermost first; empty for a 0-d tensor. A slice in all but name.
#[derive(Clone)]
pub struct Shape(Dims);

#[derive(Clone)]
enum Dims {
    Few(u8, [u64; FEW]),
    Many(Box<[u64]>),
}

impl Deref for Shape {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        match &self.0 {
            Dims::Few(len, dims) => &dims[..usize::from(*len)],
            Dims::Many(dims) => dims,
        }
    }
}

impl DerefMut for Shape {
    fn deref_mut(&mut self) -> &mut [u64] {
        match &mut self.0 {
            Dims::Few(len, dims) => &mut dims[..usize::from(*len)],
            Dims::Many(dims) => dims,
        }
    }
}

impl FromIterator<u64> for Shape {
    fn from_iter<I: IntoIterator<Item = u64>>(dims: I) -> Self {
        let mut few = [0; FEW];
        let mut dims = dims.into_iter();
        for len in 0..FEW {
            match dims.next() {
                Some(dim) => few[len] = dim,
                None => return Self(Dims::Few(len as u8, few)),
            }
        }
        match dims.next() {
            None => Self(Dims::Few(FEW as u8, few)),
            Some(next) => Self(Dims::Many(
                few.into_iter().chain([next]).chain(dims).collect(),
            )),
        }
    }
}

impl Default for Shape {
    fn default() -> Self {
        Self(Dims::Few(0, [0; FEW]))
    }
}

impl From<&[u64]> for Shape {
    fn from(dims: &[u64]) -> Self {
        dims.iter().copied().collect()
    }
}

impl From<Vec<u64>> for Shape {
    fn from(dims: Vec<u64>) -> Self {
        Self::from(&dims[..])
    }
}

impl<const N: usize> From<[u64; N]> for Shape {
    fn from(dims: [u64; N]) -> Self {
        Self::from(&dims[..])
    }
}

impl<'a> IntoIterator for &'a Shape {
    type Item = &'a u64;
    type IntoIter = std::slice::Iter<'a, u64>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl PartialEq for Shape {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Shape {}

impl<const N: usize> PartialEq<[u64; N]> for Shape {
    fn eq(&self, other: &[u64; N]) -> bool {
        **self == *other
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_dimensions_is_kept_in_order() {
        for len in 0..3 * FEW as u64 {
            let dims: Vec<u64> = (10..10 + len).collect();
            let mut shape = Shape::from(&dims[..]);
            assert_eq!(*shape, dims[..]);
            assert_eq!(format!("{shape:?}"), format!("{dims:?}"));
            assert_eq!(shape, Shape::from(dims.clone()));
            if let Some(first) = shape.first_mut() {
                *first = 3;
                assert_ne!(shape, Shape::from(dims));
            }
        }
    }
}

//! Copies of a tensor from one order of its elements in memory to another, tile by tile.

/// Elements along each side of a tile: of both tensors, a tile's lines stay in the first-level cache.
const TILE: usize = 32;

/// A tensor's shape and its strides, in elements, where it is read and where it is written.
#[derive(Clone, Copy, Debug)]
pub struct Reordering<'a> {
    /// Dimensions.
    pub shape: &'a [u64],
    /// Of the tensor that is read.
    pub from: &'a [i64],
    /// Of the tensor that is written.
    pub to: &'a [i64],
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: usize,
}

/// One dimension, of more than one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dim {
    length: usize,
    from: isize,
    to: isize,
}

impl Reordering<'_> {
    /// Copies all elements.
    ///
    /// # Safety
    /// The elements that shape and strides tell of, counted from `from` and `to`, are readable and writable, without
    /// overlap; nobody else touches them. The lists are equally long.
    ///
    /// # Panics
    /// For another size of elements.
    pub unsafe fn copy(&self, from: *const u8, to: *mut u8) {
        if self.shape.contains(&0) {
            return;
        }
        let dims = self.dims();
        // SAFETY: the caller's promise, passed on; elements need no alignment.
        unsafe {
            match self.element_bytes {
                1 => copy_all::<u8>(&dims, from, to),
                2 => copy_all::<u16>(&dims, from, to),
                4 => copy_all::<u32>(&dims, from, to),
                8 => copy_all::<u64>(&dims, from, to),
                other => panic!("elements of {other} bytes"),
            }
        }
    }

    /// Dimensions that matter, outermost first as written; such as follow each other in both tensors are one.
    fn dims(&self) -> Vec<Dim> {
        let each = self.shape.iter().zip(self.from).zip(self.to);
        let mut dims: Vec<Dim> = each
            .filter(|((length, _), _)| **length > 1)
            .map(|((&length, &from), &to)| Dim {
                length: length as usize,
                from: from as isize,
                to: to as isize,
            })
            .collect();
        dims.sort_by_key(|dim| std::cmp::Reverse(dim.to));
        let mut merged: Vec<Dim> = Vec::with_capacity(dims.len());
        for dim in dims {
            let length = dim.length as isize;
            match merged.last_mut() {
                Some(outer) if outer.from == dim.from * length && outer.to == dim.to * length => {
                    *outer = Dim {
                        length: outer.length * dim.length,
                        ..dim
                    };
                }
                _ => merged.push(dim),
            }
        }
        merged
    }
}

/// # Safety
/// As [`Reordering::copy`], for elements of type `T`.
unsafe fn copy_all<T: Copy>(dims: &[Dim], from: *const u8, to: *mut u8) {
    let (from, to) = (from.cast::<T>(), to.cast::<T>());
    let Some((written_inner, outer)) = dims.split_last() else {
        // SAFETY: the caller's promise: there is one element.
        return unsafe { to.write_unaligned(from.read_unaligned()) };
    };
    // The dimension whose elements are neighbours where they are read.
    let read_inner = (0..outer.len()).min_by_key(|&i| outer[i].from);
    let read_inner = read_inner.filter(|&i| outer[i].from < written_inner.from);
    let across = read_inner.map(|i| outer[i]);
    let rest: Vec<Dim> = (0..outer.len())
        .filter(|&i| Some(i) != read_inner)
        .map(|i| outer[i])
        .collect();
    let mut at = vec![0usize; rest.len()];
    loop {
        let offset = |stride: fn(&Dim) -> isize| -> isize {
            let each = rest.iter().zip(&at);
            each.map(|(dim, &index)| stride(dim) * index as isize).sum()
        };
        // SAFETY: the caller's promise: these are places of elements.
        unsafe {
            let (from, to) = (from.offset(offset(|d| d.from)), to.offset(offset(|d| d.to)));
            match across {
                Some(across) => copy_tiles(*written_inner, across, from, to),
                None => copy_line(*written_inner, from, to),
            }
        }
        // The next place, like an odometer.
        let Some(turning) = (0..rest.len()).rev().find(|&i| at[i] + 1 < rest[i].length) else {
            return;
        };
        at[turning] += 1;
        at[turning + 1..].fill(0);
    }
}

/// # Safety
/// The elements of the line are readable and writable, without overlap.
unsafe fn copy_line<T: Copy>(line: Dim, from: *const T, to: *mut T) {
    // SAFETY: the caller's promise.
    unsafe {
        if line.from == 1 && line.to == 1 {
            let bytes = line.length * size_of::<T>();
            return std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), bytes);
        }
        for i in 0..line.length as isize {
            let value = from.offset(i * line.from).read_unaligned();
            to.offset(i * line.to).write_unaligned(value);
        }
    }
}

/// # Safety
/// The elements of the plane are readable and writable, without overlap.
unsafe fn copy_tiles<T: Copy>(line: Dim, across: Dim, from: *const T, to: *mut T) {
    for first in (0..across.length).step_by(TILE) {
        let rows = TILE.min(across.length - first);
        for start in (0..line.length).step_by(TILE) {
            let part = Dim {
                length: TILE.min(line.length - start),
                ..line
            };
            for row in first..first + rows {
                let (row, start) = (row as isize, start as isize);
                // SAFETY: the caller's promise: a part of a line of the plane.
                unsafe {
                    let from = from.offset(row * across.from + start * line.from);
                    let to = to.offset(row * across.to + start * line.to);
                    copy_line(part, from, to);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Strides of a tensor whose dimensions lie in this order, outermost first.
    fn strides(shape: &[u64], order: &[usize]) -> Vec<i64> {
        let mut strides = vec![0; shape.len()];
        let mut step = 1;
        for &dim in order.iter().rev() {
            strides[dim] = step;
            step *= shape[dim] as i64;
        }
        strides
    }

    fn check(shape: &[u64], from: &[i64], to: &[i64], element_bytes: usize) {
        let elems = shape.iter().product::<u64>() as usize;
        // A byte before the first element: nothing is aligned.
        let source: Vec<u8> = (0..1 + elems * element_bytes)
            .map(|i| (i * 7 + i / 251) as u8)
            .collect();
        let mut target = vec![0xee; source.len()];
        let reordering = Reordering {
            shape,
            from,
            to,
            element_bytes,
        };
        // SAFETY: both hold all elements of a dense tensor of this shape.
        unsafe { reordering.copy(source[1..].as_ptr(), target[1..].as_mut_ptr()) };
        assert_eq!(target[0], 0xee);
        for index in 0..elems {
            let (mut left, mut read, mut written) = (index as u64, 0, 0);
            for dim in (0..shape.len()).rev() {
                let at = (left % shape[dim]) as i64;
                left /= shape[dim];
                read += at * from[dim];
                written += at * to[dim];
            }
            let place = |element: i64| {
                let start = 1 + element as usize * element_bytes;
                start..start + element_bytes
            };
            assert_eq!(
                target[place(written)],
                source[place(read)],
                "{shape:?} {from:?} {to:?} {index}"
            );
        }
    }

    #[test]
    fn planes_of_many_tiles_and_ragged_edges() {
        for shape in [[1u64, 1], [33, 65], [64, 32], [1, 100], [200, 3]] {
            let (rows, columns) = (strides(&shape, &[0, 1]), strides(&shape, &[1, 0]));
            for bytes in [1, 2, 4, 8] {
                check(&shape, &columns, &rows, bytes);
                check(&shape, &rows, &columns, bytes);
            }
        }
        check(&[], &[], &[], 4);
        check(&[3, 0], &[1, 3], &[0, 1], 4);
    }

    #[test]
    fn what_lies_alike_is_one_dimension() {
        let shape = [2u64, 3, 4, 5];
        let last = strides(&shape, &[0, 2, 3, 1]);
        let rows = strides(&shape, &[0, 1, 2, 3]);
        let dims = |from: &[i64], to: &[i64]| {
            let (shape, element_bytes) = (&shape[..], 4);
            Reordering {
                shape,
                from,
                to,
                element_bytes,
            }
            .dims()
            .len()
        };
        assert_eq!(dims(&rows, &rows), 1);
        assert_eq!(dims(&last, &rows), 3);
    }

    proptest! {
        #[test]
        fn every_element_comes_to_its_place(
            (shape, from, to) in prop::collection::vec(1u64..6, 0..6).prop_flat_map(|shape| {
                let order: Vec<usize> = (0..shape.len()).collect();
                (Just(shape), Just(order.clone()).prop_shuffle(), Just(order).prop_shuffle())
            }),
            bytes in prop::sample::select(vec![1usize, 2, 4, 8]),
        ) {
            check(&shape, &strides(&shape, &from), &strides(&shape, &to), bytes);
        }
    }
}

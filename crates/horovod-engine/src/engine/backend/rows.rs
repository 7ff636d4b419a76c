//! Sizes of each member's input and output in an operation: elements, bytes, rows of dimension 0.

use horovod_protocol::{ExecItem, Shape, TensorMeta};

use super::Failure;
use crate::engine::Entry;
use crate::tensor::Tensor;

/// This rank's input to an alltoall.
pub(super) struct AlltoallInput<'a> {
    pub(super) tensor: &'a Tensor,
    /// Rows for each member.
    pub(super) rows: Vec<usize>,
}

impl<'a> AlltoallInput<'a> {
    pub(super) fn of(item: &ExecItem, entry: Option<&'a Entry>) -> Result<Self, Failure> {
        let entry = entry.ok_or_else(joined_cannot)?;
        let (Some(tensor), Some(splits)) = (entry.tensors.first(), &entry.splits) else {
            return Err(Failure::Local(format!(
                "{}: no splits were kept",
                item.name
            )));
        };
        let rows = splits.iter().map(|rows| usize_of(*rows));
        Ok(Self {
            tensor,
            rows: rows.collect::<Result<_, _>>()?,
        })
    }
}

/// Returns the shape of the rows received from all members together.
pub(super) fn received_shape(tensor: &Tensor, rows: &[usize]) -> Shape {
    let rows = rows.iter().map(|rows| *rows as u64);
    let rows = rows.fold(0, u64::saturating_add);
    with_rows(&tensor.meta.shape, rows)
}

/// Returns how many of `rows` rows of dimension 0 the member `me` of `members` receives.
pub(in crate::engine) fn share_of(rows: usize, me: usize, members: usize) -> usize {
    rows / members + usize::from(me < rows % members)
}

pub(super) fn row_bytes_of(t: &Tensor) -> Result<usize, Failure> {
    t.row_bytes().ok_or_else(too_large)
}

pub(super) fn usize_of(n: u64) -> Result<usize, Failure> {
    usize::try_from(n).map_err(|_| too_large())
}

pub(super) fn with_rows(shape: &[u64], rows: u64) -> Shape {
    let mut shape = Shape::from(shape);
    if let Some(first) = shape.first_mut() {
        *first = rows;
    }
    shape
}

pub(super) fn joined_cannot() -> Failure {
    Failure::Local("a rank that has joined was asked for data it cannot stand in for".into())
}

/// Sizes of an allgather's result, from the rows of each member, which rank 0 has sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Gathered {
    /// Bytes of each member.
    pub(super) bytes: Vec<usize>,
    /// Bytes of all members.
    pub(super) total: usize,
    pub(super) rows: u64,
}

impl Gathered {
    pub(super) fn of(
        item: &ExecItem,
        i: usize,
        tensor: &Tensor,
        me: usize,
        members: usize,
    ) -> Result<Self, Failure> {
        let rows_of_all = item.first_dims.get(i).ok_or_else(|| {
            Failure::Local(format!(
                "{}: no sizes were agreed for tensor {i}",
                item.name
            ))
        })?;
        Self::new(rows_of_all, me, members, tensor)
    }

    /// Computes the sizes. Each member reads as many rows of its own tensor as rank 0 has sent for it, so that number
    /// is checked against the tensor.
    fn new(
        rows_of_all: &[u64],
        me: usize,
        members: usize,
        tensor: &Tensor,
    ) -> Result<Self, Failure> {
        let own = tensor.rows();
        if rows_of_all.len() != members || rows_of_all.get(me) != Some(&own) {
            return Err(Failure::Local(format!(
                "rank 0 says that the {members} members have {rows_of_all:?} rows, but this one, number {me}, has {own}"
            )));
        }
        let row_bytes = row_bytes_of(tensor)?;
        let (mut rows, mut total) = (0u64, 0usize);
        let mut bytes = Vec::with_capacity(members);
        for &of_one in rows_of_all {
            let size = usize_of(of_one)?
                .checked_mul(row_bytes)
                .ok_or_else(too_large)?;
            total = total.checked_add(size).ok_or_else(too_large)?;
            rows = rows.checked_add(of_one).ok_or_else(too_large)?;
            bytes.push(size);
        }
        Ok(Self { bytes, total, rows })
    }
}

/// Returns the elements of a tensor as agreed; an error if this machine cannot count their bytes.
pub(super) fn elems_of(meta: &TensorMeta) -> Result<usize, Failure> {
    let elems = meta.elems().and_then(|n| usize::try_from(n).ok());
    elems
        .filter(|elems| elems.checked_mul(meta.dtype.size()).is_some())
        .ok_or_else(too_large)
}

pub(super) fn bytes_of(t: &Tensor) -> Result<usize, Failure> {
    t.bytes().ok_or_else(too_large)
}

/// Returns the output of an operation that allocates none.
pub(super) fn output_of(t: &Tensor) -> Result<*mut u8, Failure> {
    t.output_ptr()
        .ok_or_else(|| Failure::Local("the operation needs an output tensor".into()))
}

pub(super) fn too_large() -> Failure {
    Failure::Local("a tensor is too large for this machine".into())
}

#[cfg(test)]
mod tests {
    use horovod_protocol::DType;

    use super::*;
    use crate::tensor::Output;

    fn tensor(shape: &[u64]) -> Tensor {
        // SAFETY: the memory outlives the operation, and no other code touches it.
        unsafe {
            Tensor::new(
                TensorMeta::new(DType::F32, shape),
                std::ptr::null(),
                Output::Allocate,
            )
        }
    }

    #[test]
    fn rows_that_are_said_of_this_rank_are_those_that_it_has() {
        let mine = tensor(&[2, 3]);
        let good = Gathered::new(&[1, 2], 1, 2, &mine).unwrap();
        let (bytes, total, rows) = (vec![12, 24], 36, 3);
        assert_eq!(good, Gathered { bytes, total, rows });
        // Too many rows, the rows of another rank, too few and too many members.
        for rows_of_all in [&[1, 3][..], &[2, 1], &[1], &[1, 2, 0], &[]] {
            let error = Gathered::new(rows_of_all, 1, 2, &mine).unwrap_err();
            assert!(
                matches!(error, Failure::Local(text) if text.contains("has 2")),
                "{rows_of_all:?}"
            );
        }
    }

    #[test]
    fn a_sum_or_product_beyond_all_memory_is_an_error() {
        let mine = tensor(&[2, 3]);
        for rows_of_all in [[u64::MAX, 2], [u64::MAX / 12, 2], [u64::MAX / 12 + 1, 2]] {
            assert!(
                Gathered::new(&rows_of_all, 1, 2, &mine).is_err(),
                "{rows_of_all:?}"
            );
        }
    }
}

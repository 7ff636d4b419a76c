//! The request of one call to the engine, as plain data.
#![forbid(unsafe_code)]

use horovod_engine::{self as engine, Op, ProcessSetId};

use crate::error::{Error, Result};
use crate::reduction::Reduction;

/// How the elements of a slice are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// As they are.
    Flat,
    /// In rows of so many elements.
    Rows(usize),
}

impl Shape {
    /// Rows of so many elements, if that divides the elements of the slice.
    pub(crate) fn rows(row: usize, len: usize) -> Result<Self> {
        if row == 0 {
            return Err(Error::invalid(
                "a row of 0 elements was asked for; pass the number of elements of one row, 1 or more",
            ));
        }
        if !len.is_multiple_of(row) {
            return Err(Error::invalid(format!(
                "a slice of {len} elements has no whole number of rows of {row} elements; pass whole rows"
            )));
        }
        Ok(match row {
            1 => Self::Flat,
            row => Self::Rows(row),
        })
    }

    /// The dimensions of a slice of `len` elements.
    pub(crate) fn of(self, len: usize) -> engine::Shape {
        let dims = match self {
            Self::Flat => [Some(len), None],
            Self::Rows(row) => [Some(len / row), Some(row)],
        };
        dims.into_iter().flatten().map(|dim| dim as u64).collect()
    }
}

/// One call: the kind and the name pair it with those of the other ranks.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) kind: &'static str,
    pub(crate) name: Option<&'a str>,
    pub(crate) op: Op,
    pub(crate) set: ProcessSetId,
    pub(crate) shape: Shape,
    /// Alltoall: rows for each member.
    pub(crate) splits: Option<Vec<i64>>,
}

pub(crate) fn allreduce(reduction: &Reduction) -> Result<Op> {
    let (op, scale) = reduction.parts()?;
    Ok(Op::Allreduce { op, scale })
}

pub(crate) fn reduce_scatter(reduction: &Reduction) -> Result<Op> {
    let (op, scale) = reduction.parts()?;
    Ok(Op::Reducescatter { op, scale })
}

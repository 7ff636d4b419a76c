//! How the values of several ranks combine: the operation, and factors before and after it.
#![forbid(unsafe_code)]

use horovod_engine::{self as engine, Scale};

use crate::error::{Error, Result};

/// How the values of the ranks combine, element by element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The mean of all ranks; of integers it is rounded towards zero.
    Average,
    /// The sum; half types are added in `f32`, integers wrap.
    Sum,
    /// The adaptive sum of Maleki and others (2020), of floats: scale-insensitive, for large batches.
    Adasum,
    /// The smallest value.
    Min,
    /// The largest value.
    Max,
    /// The product; integers wrap.
    Product,
}

/// A [`ReduceOp`] with factors. Every call that takes an operation takes this as well.
///
/// ```
/// # fn main() -> horovod::Result<()> {
/// use horovod::ReduceOp::{Average, Sum};
///
/// let hvd = horovod::init()?;
/// let half = hvd.allreduce(&[3.0f32], Sum.prescaled(0.5))?;
/// assert_eq!(half, [1.5 * hvd.size() as f32]);
/// let ten = hvd.allreduce(&[1.0f64], Average.prescaled(5.0).postscaled(2.0))?;
/// assert_eq!(ten, [10.0]);
/// # Ok(()) }
/// ```
///
/// All ranks must pass the same factors, else [`Error::Disagreement`]. They must be finite, and `bool` has none, else
/// [`Error::Invalid`]. Floats are multiplied in their own type, half types in `f32`. Integers are multiplied in `f64`;
/// the products are truncated and saturate. An average of integers with a factor after it is multiplied and divided in
/// `f64`, and truncated once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    op: ReduceOp,
    scale: Scale,
}

impl ReduceOp {
    /// This operation on values that each rank multiplies by `factor` first.
    #[must_use]
    pub fn prescaled(self, factor: f64) -> Reduction {
        Reduction::from(self).prescaled(factor)
    }

    /// This operation, whose result is multiplied by `factor`.
    #[must_use]
    pub fn postscaled(self, factor: f64) -> Reduction {
        Reduction::from(self).postscaled(factor)
    }
}

impl Reduction {
    /// As [`ReduceOp::prescaled`]; the last factor counts.
    #[must_use]
    pub fn prescaled(mut self, factor: f64) -> Self {
        self.scale.pre = factor;
        self
    }

    /// As [`ReduceOp::postscaled`]; the last factor counts.
    #[must_use]
    pub fn postscaled(mut self, factor: f64) -> Self {
        self.scale.post = factor;
        self
    }

    pub(crate) fn op(&self) -> ReduceOp {
        self.op
    }

    /// For the engine, if the factors are numbers.
    pub(crate) fn parts(&self) -> Result<(engine::ReduceOp, Scale)> {
        let Scale { pre, post } = self.scale;
        if !pre.is_finite() || !post.is_finite() {
            return Err(Error::invalid(format!(
                "a reduction was asked for with the factors {pre} before it and {post} after it; pass finite numbers"
            )));
        }
        Ok((self.op.into(), self.scale))
    }
}

impl From<ReduceOp> for Reduction {
    fn from(op: ReduceOp) -> Self {
        let scale = Scale::NONE;
        Self { op, scale }
    }
}

impl From<ReduceOp> for engine::ReduceOp {
    fn from(op: ReduceOp) -> Self {
        match op {
            ReduceOp::Average => Self::Average,
            ReduceOp::Sum => Self::Sum,
            ReduceOp::Adasum => Self::Adasum,
            ReduceOp::Min => Self::Min,
            ReduceOp::Max => Self::Max,
            ReduceOp::Product => Self::Product,
        }
    }
}

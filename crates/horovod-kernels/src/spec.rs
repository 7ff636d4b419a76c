//! The specification of a reduction: what it does to its elements.

use horovod_protocol::{DType, ReduceOp};

/// How two values become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum Combine {
    Sum,
    Min,
    Max,
    Product,
}

impl Combine {
    /// All ways to combine.
    pub const ALL: [Self; 4] = [Self::Sum, Self::Min, Self::Max, Self::Product];

    /// The element-wise step of `op`; `None` for Adasum, which is not element-wise.
    pub fn of(op: ReduceOp) -> Option<Self> {
        match op {
            ReduceOp::Average | ReduceOp::Sum => Some(Self::Sum),
            ReduceOp::Min => Some(Self::Min),
            ReduceOp::Max => Some(Self::Max),
            ReduceOp::Product => Some(Self::Product),
            ReduceOp::Adasum => None,
        }
    }
}

/// One reduction: `dst = post * ((combine over k of (pre * src_k)) / divisor)`.
/// Factors of exactly 1.0 and a divisor of 1 cost nothing and change nothing.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Element type of all operands.
    pub dtype: DType,
    /// How the operands combine.
    pub combine: Combine,
    /// Factor on every source that asks for it ([`Source::pre`]).
    pub pre: f64,
    /// Divisor of the combined value (`Average`); never 0.
    pub divisor: u32,
    /// Factor on the result, after the division.
    pub post: f64,
}

impl Spec {
    /// Combining alone: no factor, no division.
    pub fn plain(dtype: DType, combine: Combine) -> Self {
        Self {
            dtype,
            combine,
            pre: 1.0,
            divisor: 1,
            post: 1.0,
        }
    }

    /// Whether the operands must all combine in one go: a partial sum need not fit the element type.
    pub fn needs_all_at_once(&self) -> bool {
        self.divisor != 1 && !self.dtype.is_float() && self.dtype != DType::Bool
    }

    /// The same without what happens to the result; for steps before the last.
    pub fn partial(self) -> Self {
        Self {
            divisor: 1,
            post: 1.0,
            ..self
        }
    }
}

/// One operand.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// First element; any alignment.
    pub ptr: *const u8,
    /// Whether [`Spec::pre`] is still to be applied. Partial results have had it.
    pub pre: bool,
}

impl Source {
    /// An operand nothing has been done to.
    pub fn raw(ptr: *const u8) -> Self {
        Self { ptr, pre: true }
    }

    /// An operand that is a partial result.
    pub fn partial(ptr: *const u8) -> Self {
        Self { ptr, pre: false }
    }
}

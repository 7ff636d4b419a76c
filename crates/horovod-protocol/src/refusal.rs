//! Requests that fail on all their members alike: what the ranks disagree about, or what cannot be done.

use crate::error::printable_name;
use crate::limits::{FIRST_DIMS_MAX, PROCESS_SETS_MAX};
use crate::shape::Shape;
use crate::types::{DType, Device, Op, ProcessSetId, Rank, ReduceOp, Scale};
use std::fmt;

/// Ranks of a list that a text shows.
const SHOWN_RANKS_MAX: usize = 1000;

/// Why the coordinator refused a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Two ranks asked for different things under one name.
    Mismatch(Box<Mismatch>),
    /// All ask for the same, which cannot be done.
    Impossible {
        /// Name of the tensor, in a group with its place.
        tensor: String,
        /// Why not.
        why: Impossible,
    },
    /// There is a process set of the same ranks already.
    DuplicateSet {
        /// Its ranks.
        ranks: Vec<Rank>,
    },
    /// There are as many process sets as there may be.
    TooManySets,
}

/// Difference between the requests of two ranks under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Name of the tensor, in a group with its place.
    pub tensor: String,
    /// The lowest rank that asked, and the lowest that asked for something else.
    pub ranks: [Rank; 2],
    /// The difference, with values in the same order.
    pub difference: Difference,
}

/// In what two requests differ; the first entry of each pair is the first rank's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// Element types.
    DataTypes([DType; 2]),
    /// Kinds of operations.
    Operations([Op; 2]),
    /// Numbers of tensors in the group.
    GroupSizes([u64; 2]),
    /// Shapes of a tensor.
    Shapes {
        /// The operation that both requested.
        op: Op,
        /// The shapes.
        shapes: [Shape; 2],
    },
    /// Numbers of dimensions, where ranks may bring different numbers of rows.
    Dimensions {
        /// The operation that both requested.
        op: Op,
        /// The numbers.
        counts: [u64; 2],
    },
    /// Sizes of a dimension but the first, where ranks may bring different numbers of rows.
    Dimension {
        /// The operation that both requested.
        op: Op,
        /// Which dimension, from 1.
        index: u64,
        /// The sizes.
        sizes: [u64; 2],
    },
    /// Factors around a reduction.
    Factors([Scale; 2]),
    /// How values combine.
    Reductions([ReduceOp; 2]),
    /// Sources of a broadcast.
    Roots([Rank; 2]),
    /// Members of a new process set.
    NewSets([Vec<Rank>; 2]),
    /// Process sets to remove.
    RemovedSets([ProcessSetId; 2]),
    /// Where the tensors are.
    Devices {
        /// The operation that both requested.
        op: Op,
        /// The places.
        devices: [Device; 2],
    },
}

/// Request that cannot be carried out although all ranks agree.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Impossible {
    /// An operation that a rank that has joined cannot take part in.
    Joined {
        /// The operation.
        op: Op,
    },
    /// An operation on the first dimension of a tensor without dimensions.
    NoRows {
        /// The operation.
        op: Op,
    },
    /// A gather of more parts than can be announced.
    TooManyParts {
        /// Tensors of the group.
        tensors: u64,
        /// Members of the process set.
        members: u64,
    },
    /// A gather whose result no address space holds.
    TooLarge,
}

impl Refusal {
    /// Whether the call itself was wrong, rather than the ranks at odds.
    pub fn is_mistake(&self) -> bool {
        matches!(self, Self::DuplicateSet { .. } | Self::TooManySets)
    }

    /// Bytes of what has no bound of its own, at most.
    pub(crate) fn wire_bytes(&self) -> usize {
        match self {
            Self::Mismatch(mismatch) => {
                mismatch.tensor.len()
                    + match &mismatch.difference {
                        Difference::Operations(ops) => ops.iter().map(op_bytes).sum(),
                        Difference::Shapes { op, shapes } => {
                            op_bytes(op) + shapes.iter().map(|s| 10 * s.len()).sum::<usize>()
                        }
                        Difference::Dimensions { op, .. } | Difference::Dimension { op, .. } => {
                            op_bytes(op)
                        }
                        Difference::NewSets(sets) => sets.iter().map(|s| 5 * s.len()).sum(),
                        Difference::Devices { op, .. } => op_bytes(op),
                        _ => 0,
                    }
            }
            Self::Impossible { tensor, why } => {
                tensor.len()
                    + match why {
                        Impossible::Joined { op } | Impossible::NoRows { op } => op_bytes(op),
                        Impossible::TooManyParts { .. } | Impossible::TooLarge => 0,
                    }
            }
            Self::DuplicateSet { ranks } => 5 * ranks.len(),
            Self::TooManySets => 0,
        }
    }
}

fn op_bytes(op: &Op) -> usize {
    match op {
        Op::AddProcessSet { ranks } => 5 * ranks.len(),
        _ => 0,
    }
}

impl Mismatch {
    /// Both ranks, each with what it asked for in words.
    pub fn sides(&self) -> [(Rank, String); 2] {
        let [first, second] = self.difference.sides();
        [(self.ranks[0], first), (self.ranks[1], second)]
    }
}

impl Difference {
    fn sides(&self) -> [String; 2] {
        match self {
            Self::DataTypes(types) => types.map(|t| t.name().to_owned()),
            Self::Operations(ops) => ops.each_ref().map(|op| op.upper_name().to_owned()),
            Self::GroupSizes(sizes) => sizes.map(|n| format!("{n} tensors")),
            Self::Shapes { shapes, .. } => shapes.each_ref().map(|shape| format!("{shape:?}")),
            Self::Dimensions { counts, .. } => counts.map(|n| format!("{n} dimensions")),
            Self::Dimension { index, sizes, .. } => {
                sizes.map(|n| format!("dimension {index} equal to {n}"))
            }
            Self::Factors(scales) => scales.map(|s| format!("({}, {})", s.pre, s.post)),
            Self::Reductions(ops) => ops.map(|op| op.name().to_owned()),
            Self::Roots(roots) => roots.map(|root| root.0.to_string()),
            Self::NewSets(sets) => sets.each_ref().map(|ranks| Ranks(ranks).to_string()),
            Self::RemovedSets(ids) => ids.map(|id| id.0.to_string()),
            Self::Devices { devices, .. } => devices.map(|device| device.name().to_owned()),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mismatch(mismatch) => mismatch.fmt(f),
            Self::Impossible { tensor, why } => {
                write!(f, "{why} (tensor {})", printable_name(tensor))
            }
            Self::DuplicateSet { ranks } => write!(
                f,
                "Attempted to add a duplicate process set: {}",
                Ranks(ranks)
            ),
            Self::TooManySets => write!(
                f,
                "Attempted to add a process set beyond the limit of {PROCESS_SETS_MAX}"
            ),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = self.ranks;
        write!(
            f,
            "{} (tensor {}: {first} and {second})",
            self.difference,
            printable_name(&self.tensor)
        )
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = self.sides();
        match self {
            Self::Shapes { op, .. } => write!(
                f,
                "Mismatched {} tensor shapes: One rank sent a tensor of shape {a}, but another rank sent a tensor of \
                 shape {b}.",
                op.upper_name()
            ),
            Self::Dimensions { op, counts: [a, b] } => write!(
                f,
                "Mismatched {} tensor shapes: One rank sent a tensor of rank {a}, but another rank sent a tensor of \
                 rank {b}.",
                op.upper_name()
            ),
            Self::Dimension { op, .. } => write!(
                f,
                "Mismatched {} tensor shapes: One rank sent a tensor with {a}, but another rank sent a tensor with \
                 {b}.",
                op.upper_name()
            ),
            Self::NewSets([a, b]) => write!(
                f,
                "Attempted to register process set with mismatching {} on different ranks.",
                if a.len() == b.len() { "values" } else { "size" }
            ),
            Self::DataTypes(_) => write!(
                f,
                "Mismatched data types: One rank had type {a}, but another rank had type {b}."
            ),
            Self::Operations(_) => write!(
                f,
                "Mismatched operations: One rank did an {a}, but another rank did an {b}."
            ),
            Self::GroupSizes(_) => write!(
                f,
                "Mismatched group sizes: One rank submitted a group of {a}, but another rank submitted a group of {b}."
            ),
            Self::Factors(_) => write!(
                f,
                "Mismatched prescale and/or postscale factors: One rank sent factors {a}, but another rank sent \
                 factors {b}."
            ),
            Self::Reductions(_) => write!(
                f,
                "Mismatched reduction operation: One rank sent reduction op {a}, but another rank sent reduction op \
                 {b}."
            ),
            Self::Roots(_) => write!(
                f,
                "Mismatched BROADCAST root ranks: One rank specified root rank {a}, but another rank specified root \
                 rank {b}."
            ),
            Self::RemovedSets(_) => write!(
                f,
                "Attempted to remove different process sets on different ranks: {a} and {b}."
            ),
            Self::Devices { op, .. } => write!(
                f,
                "Mismatched {} CPU/GPU device selection: One rank specified device {a}, but another rank specified \
                 device {b}.",
                op.upper_name()
            ),
        }
    }
}

impl fmt::Display for Impossible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Joined { op } => f.write_str(join_text(op)),
            Self::NoRows { op } => write!(
                f,
                "Process-set rank zero tried to {} a rank-zero tensor. It needs a dimension: t.reshape(1).",
                op.upper_name()
            ),
            Self::TooManyParts { tensors, members } => write!(
                f,
                "Allgather: {tensors} tensors on {members} ranks are more than {FIRST_DIMS_MAX} parts."
            ),
            Self::TooLarge => {
                f.write_str("Allgather: the gathered tensor is larger than the address space.")
            }
        }
    }
}

fn join_text(op: &Op) -> &'static str {
    match op {
        Op::Allgather => {
            "Allgather is not supported with Join at this time. Specify sparse_to_dense=True if using \
             DistributedOptimizer"
        }
        Op::Alltoall => "Alltoall is not supported with Join at this time.",
        Op::Reducescatter { .. } => "Reducescatter is not supported with Join at this time.",
        Op::Broadcast { .. } => "Broadcast is not supported with Join at this time.",
        Op::AddProcessSet { .. } | Op::RemoveProcessSet { .. } => {
            "Process sets cannot be added or removed while a rank has joined."
        }
        Op::Allreduce { .. } | Op::Barrier | Op::Join => "not supported with Join",
    }
}

/// Ranks as a list of numbers, a long one cut.
struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (index, rank) in self.0.iter().take(SHOWN_RANKS_MAX).enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{}", rank.0)?;
        }
        match self.0.len().saturating_sub(SHOWN_RANKS_MAX) {
            0 => f.write_str("]"),
            more => write!(f, ", and {more} more]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_says_what_each_side_asked_for() {
        let mismatch = Mismatch {
            tensor: "x".into(),
            ranks: [Rank(0), Rank(3)],
            difference: Difference::Shapes {
                op: Op::Barrier,
                shapes: [[2, 3].into(), [2, 4].into()],
            },
        };
        let expected = [(Rank(0), "[2, 3]".into()), (Rank(3), "[2, 4]".into())];
        assert_eq!(mismatch.sides(), expected);
    }

    #[test]
    fn a_long_list_of_ranks_is_cut() {
        let list = |len| Ranks(&(0..len).map(Rank).collect::<Vec<_>>()).to_string();
        assert_eq!(list(3), "[0, 1, 2]");
        assert!(list(70_000).len() < 6000 && list(70_000).ends_with(", and 69000 more]"));
    }
}

//! The vocabulary every layer shares: ranks, element types, operations, requests.

use crate::memory_order::MemoryOrder;
use crate::shape::Shape;
use std::fmt;

/// Position of a process in the whole job, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// One process set; 0 is the set of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessSetId(pub u32);

impl ProcessSetId {
    /// The set of all ranks.
    pub const GLOBAL: Self = Self(0);
}

/// One life of a job's membership; every connection belongs to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

/// Place of an execution in the job's one total order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seq(pub u64);

/// Names the next execution of one known request that runs by itself: alike on all its members, known to each when it
/// submits, and never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationTag(pub u64);

/// Bits of a tag that name the slot; the rest is where the slot last stood in the order, counted from 1.
const TAG_SLOT_BITS: u32 = 20;

impl OperationTag {
    /// For the execution of a slot after the one at `last`; `None` for numbers that do not fit. Never 0.
    pub(crate) fn new(slot: u64, last: Seq) -> Option<Self> {
        let place = last.0.checked_add(1)?;
        let fits = slot >> TAG_SLOT_BITS == 0 && place >> (u64::BITS - TAG_SLOT_BITS) == 0;
        fits.then_some(Self(place << TAG_SLOT_BITS | slot))
    }
}

/// The engine's own key for one submission on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub u64);

/// Nanoseconds since an arbitrary start; tests can make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

/// Element type. The first ten codes are Horovod's own numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum DType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    I32 = 4,
    I64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bool = 9,
    BF16 = 10,
    U32 = 11,
    U64 = 12,
}

impl DType {
    /// All element types, in code order.
    pub const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::Bool,
        Self::BF16,
        Self::U32,
        Self::U64,
    ];

    /// The type with this code, if there is one.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::F32 | Self::U32 => 4,
            Self::I64 | Self::F64 | Self::U64 => 8,
        }
    }

    /// Name as used in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::U16 => "uint16",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::Bool => "bool",
            Self::BF16 => "bfloat16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
        }
    }

    /// Floating-point types, halves included.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::BF16 | Self::F32 | Self::F64)
    }
}

/// How values of several ranks combine. Codes are Horovod's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum ReduceOp {
    Average = 0,
    Sum = 1,
    Adasum = 2,
    Min = 3,
    Max = 4,
    Product = 5,
}

impl ReduceOp {
    /// Its name as scripts write it: `Average`, `Sum`, ...
    pub fn name(self) -> &'static str {
        match self {
            Self::Average => "Average",
            Self::Sum => "Sum",
            Self::Adasum => "Adasum",
            Self::Min => "Min",
            Self::Max => "Max",
            Self::Product => "Product",
        }
    }

    /// The operation with this code, if there is one.
    pub fn from_code(code: u8) -> Option<Self> {
        [
            Self::Average,
            Self::Sum,
            Self::Adasum,
            Self::Min,
            Self::Max,
            Self::Product,
        ]
        .get(usize::from(code))
        .copied()
    }
}

/// Factors applied around a reduction: `post * reduce(pre * x)`. 1.0 means no pass.
/// Compared and hashed by bits.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Applied to every input.
    pub pre: f64,
    /// Applied to the result (after the division of `Average`).
    pub post: f64,
}

impl Scale {
    /// No scaling.
    pub const NONE: Self = Self {
        pre: 1.0,
        post: 1.0,
    };
}

impl PartialEq for Scale {
    fn eq(&self, other: &Self) -> bool {
        self.pre.to_bits() == other.pre.to_bits() && self.post.to_bits() == other.post.to_bits()
    }
}
impl Eq for Scale {}

/// Where a tensor lives; the index of a GPU is the rank's own matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum Device {
    Cpu,
    Gpu,
    /// A kind of a program's own, which numbers its kinds.
    Other(u8),
}

impl Device {
    /// As in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "CPU",
            Self::Gpu => "GPU",
            Self::Other(_) => "custom device",
        }
    }
}

/// Properties of one tensor that must be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// Element type.
    pub dtype: DType,
    /// Dimensions; empty for a 0-d tensor.
    pub shape: Shape,
    /// How they lie in memory. Ranks that differ in this alone do agree: on row-major.
    pub order: MemoryOrder,
}

impl TensorMeta {
    /// A row-major tensor of this type and shape.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self {
            dtype,
            shape: shape.into(),
            order: MemoryOrder::ROW_MAJOR,
        }
    }

    /// In this order; it must be one for this shape.
    #[must_use]
    pub fn in_order(mut self, order: MemoryOrder) -> Self {
        self.order = order;
        self
    }

    /// Whether it is the same tensor, in whatever order.
    pub(crate) fn is_same_but_order(&self, other: &Self) -> bool {
        self.dtype == other.dtype && self.shape == other.shape
    }

    /// Number of elements; `None` on overflow.
    pub fn elems(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))
    }
}

/// One operation and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Combine same-shaped tensors; every member gets the result.
    Allreduce {
        /// How values combine.
        op: ReduceOp,
        /// Factors around it.
        scale: Scale,
    },
    /// Concatenate along dimension 0.
    Allgather,
    /// Copy the root's tensor to every member.
    Broadcast {
        /// Global rank of the source.
        root: Rank,
    },
    /// Exchange slices of dimension 0; split sizes travel in the data plane.
    Alltoall,
    /// Combine and keep this member's share of dimension 0.
    Reducescatter {
        /// `Average` or `Sum`.
        op: ReduceOp,
        /// Factors around it.
        scale: Scale,
    },
    /// Wait for every member.
    Barrier,
    /// This rank has no more data; completes when all ranks joined.
    Join,
    /// Register a new set (collective over all ranks).
    AddProcessSet {
        /// Ascending global ranks.
        ranks: Vec<Rank>,
    },
    /// Remove a set (collective over all ranks).
    RemoveProcessSet {
        /// The set to remove.
        set: ProcessSetId,
    },
}

/// Request of one rank. A grouped operation is ONE request with several tensors, so it is all or nothing by
/// construction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The set whose members must all ask for this.
    pub set: ProcessSetId,
    /// Full key, e.g. `allreduce.fc1.weight`; unique among the pending ones of a rank and set.
    pub name: String,
    /// Operation and arguments.
    pub op: Op,
    /// Where the tensors are.
    pub device: Device,
    /// One per group member; empty for barrier, join and set changes.
    pub tensors: Vec<TensorMeta>,
}

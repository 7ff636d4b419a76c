//! The request signature: what ranks compare for one name, that is the request without its name and set. They must agree
//! on all of it but the orders in memory.

use crate::memory_order::MemoryOrder;
use crate::types::{Device, Op, TensorMeta};
use std::sync::Arc;

/// Operation, device and tensors of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestSignature {
    /// Operation and arguments.
    pub op: Op,
    /// Where the tensors are.
    pub device: Device,
    /// One per group member.
    pub tensors: Arc<[TensorMeta]>,
}

impl RequestSignature {
    /// Whether two ranks that ask for this agree. The first dimension of an allgather or alltoall
    /// is each rank's own matter.
    pub(crate) fn agrees_with(&self, op: &Op, device: Device, tensors: &[TensorMeta]) -> bool {
        self.op == *op
            && self.device == device
            && self.tensors.len() == tensors.len()
            && if op.has_own_rows() {
                self.tensors
                    .iter()
                    .zip(tensors)
                    .all(|(a, b)| same_but_rows(a, b))
            } else {
                *self.tensors == *tensors
            }
    }

    /// Whether this is what a rank that asked for `self` may be told to carry out: the same, or the same in row-major
    /// order.
    pub(crate) fn may_run_as(&self, op: &Op, device: Device, tensors: &[TensorMeta]) -> bool {
        let is_row_major = |t: &TensorMeta| t.order.is_row_major();
        self.agrees_with(op, device, tensors)
            || (self.op == *op
                && !op.has_own_rows()
                && self.device == device
                && self.tensors.len() == tensors.len()
                && self
                    .tensors
                    .iter()
                    .zip(tensors)
                    .all(|(a, b)| a.is_same_but_order(b))
                && tensors.iter().all(is_row_major))
    }

    /// The same with row-major tensors.
    pub(crate) fn in_row_major(&self) -> Self {
        let row_major = |t: &TensorMeta| t.clone().in_order(MemoryOrder::ROW_MAJOR);
        Self {
            op: self.op.clone(),
            device: self.device,
            tensors: self.tensors.iter().map(row_major).collect(),
        }
    }

    pub(crate) fn agrees(&self, other: &Self) -> bool {
        self.agrees_with(&other.op, other.device, &other.tensors)
    }
}

fn same_but_rows(a: &TensorMeta, b: &TensorMeta) -> bool {
    a.dtype == b.dtype
        && a.shape.len() == b.shape.len()
        && a.shape.iter().zip(&b.shape).skip(1).all(|(x, y)| x == y)
}

impl Op {
    /// Whether every rank may bring its own number of rows.
    pub(crate) fn has_own_rows(&self) -> bool {
        matches!(self, Self::Allgather | Self::Alltoall)
    }

    /// Name as it appears in `Mismatched ... tensor shapes` and the like.
    pub(crate) fn upper_name(&self) -> &'static str {
        match self {
            Self::Allreduce {
                op: crate::types::ReduceOp::Adasum,
                ..
            } => "ADASUM",
            Self::Allreduce { .. } => "ALLREDUCE",
            Self::Allgather => "ALLGATHER",
            Self::Broadcast { .. } => "BROADCAST",
            Self::Alltoall => "ALLTOALL",
            Self::Reducescatter { .. } => "REDUCESCATTER",
            Self::Barrier => "BARRIER",
            Self::Join => "JOIN",
            Self::AddProcessSet { .. } => "ADD_PROCESS_SET",
            Self::RemoveProcessSet { .. } => "REMOVE_PROCESS_SET",
        }
    }

    /// Name as it begins the texts of local checks.
    pub(crate) fn title(&self) -> &'static str {
        match self {
            Self::Allreduce { .. } => "Allreduce",
            Self::Allgather => "Allgather",
            Self::Broadcast { .. } => "Broadcast",
            Self::Alltoall => "Alltoall",
            Self::Reducescatter { .. } => "Reducescatter",
            Self::Barrier => "Barrier",
            Self::Join => "Join",
            Self::AddProcessSet { .. } => "Add process set",
            Self::RemoveProcessSet { .. } => "Remove process set",
        }
    }
}

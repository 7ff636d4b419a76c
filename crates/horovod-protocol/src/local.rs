//! Mistakes that a rank can find alone, before anything is sent, in Horovod's order and words.

use crate::error::OpError;
use crate::limits::{DIMS_MAX, GROUP_TENSORS_MAX, NAME_BYTES_MAX, RANKS_MAX, REQUEST_BYTES_MAX};
use crate::types::{Op, ProcessSetId, Rank, ReduceOp, Request, TensorMeta};

pub(crate) fn unknown_set(op: &Op) -> OpError {
    OpError::UnknownSet {
        operation: op.title(),
    }
}

/// Checks of the operation's own arguments and of membership, in the order of each operation.
pub(crate) fn check_call(
    req: &Request,
    rank: Rank,
    size: u32,
    members: &[Rank],
) -> Result<(), OpError> {
    let member = || {
        members.binary_search(&rank).map(|_| ()).map_err(|_| {
            OpError::invalid(format!(
                "{}: {} is not a member of the provided process set.",
                req.op.title(),
                capitalised(rank)
            ))
        })
    };
    match &req.op {
        Op::Allreduce { .. } => {
            member()?;
            some_tensors(req)
        }
        Op::Allgather | Op::Alltoall => {
            row_major(req)?;
            member()?;
            some_tensors(req)
        }
        Op::Broadcast { root } => {
            // Non-members meet this text first, as in the original: their map of the set is empty.
            if members.binary_search(root).is_err() || members.binary_search(&rank).is_err() {
                return Err(OpError::invalid(format!(
                    "broadcast received invalid root rank {} for provided process set",
                    root.0
                )));
            }
            some_tensors(req)
        }
        Op::Reducescatter { op, .. } => {
            if !matches!(op, ReduceOp::Average | ReduceOp::Sum) {
                return Err(OpError::UnsupportedReduction);
            }
            if req.tensors.iter().any(|t| t.shape.is_empty()) {
                return Err(OpError::invalid(
                    "Reducescatter does not support scalar inputs",
                ));
            }
            row_major(req)?;
            member()?;
            some_tensors(req)
        }
        Op::Barrier => {
            member()?;
            no_tensors(req)
        }
        Op::Join | Op::RemoveProcessSet { .. } => {
            whole_job(req)?;
            no_tensors(req)
        }
        Op::AddProcessSet { ranks } => {
            whole_job(req)?;
            no_tensors(req)?;
            check_new_set(ranks, size)
        }
    }
}

/// An order is one for the shape of its tensor.
fn orders_fit(req: &Request) -> Result<(), OpError> {
    let mut tensors = req.tensors.iter();
    match tensors.find(|t| !t.order.is_row_major() && !t.order.fits(&t.shape)) {
        None => Ok(()),
        Some(tensor) => Err(OpError::invalid(format!(
            "{}: {:?} is no order in memory of a tensor of shape {:?}.",
            req.op.title(),
            tensor.order,
            tensor.shape
        ))),
    }
}

/// Rows that ranks exchange lie one after the other.
fn row_major(req: &Request) -> Result<(), OpError> {
    let mut tensors = req.tensors.iter();
    match tensors.find(|t| !t.order.is_row_major()) {
        None => Ok(()),
        Some(tensor) => Err(OpError::invalid(format!(
            "{}: a tensor of shape {:?} is not in row-major order in memory; pass a contiguous copy.",
            req.op.title(),
            tensor.shape
        ))),
    }
}

/// Bounds and orders of a request that is going to be sent in full; what is known has passed here before.
pub(crate) fn check_bounds(req: &Request) -> Result<(), OpError> {
    let too_big = |what: &str, found: usize, max: usize| {
        Err(OpError::invalid(format!(
            "{}: {what} {found}, at most {max} allowed.",
            req.op.title()
        )))
    };
    if req.name.len() > NAME_BYTES_MAX {
        return too_big(
            "length of the tensor name in bytes is",
            req.name.len(),
            NAME_BYTES_MAX,
        );
    }
    if req.tensors.len() > GROUP_TENSORS_MAX {
        return too_big(
            "number of tensors in the group is",
            req.tensors.len(),
            GROUP_TENSORS_MAX,
        );
    }
    for tensor in &req.tensors {
        if tensor.shape.len() > DIMS_MAX {
            return too_big("number of dimensions is", tensor.shape.len(), DIMS_MAX);
        }
    }
    orders_fit(req)?;
    check_elements(req)?;
    let bytes = encoded_bytes(req.name.len(), &req.tensors);
    if bytes > REQUEST_BYTES_MAX {
        return too_big("size of the request in bytes is", bytes, REQUEST_BYTES_MAX);
    }
    Ok(())
}

/// Sizes in bytes must be representable.
pub(crate) fn check_elements(req: &Request) -> Result<(), OpError> {
    let fits = |t: &TensorMeta| {
        t.elems()
            .and_then(|n| n.checked_mul(t.dtype.size() as u64))
            .is_some()
    };
    match req.tensors.iter().find(|t| !fits(t)) {
        None => Ok(()),
        Some(tensor) => Err(OpError::invalid(format!(
            "{}: a tensor of shape {:?} is larger than the address space.",
            req.op.title(),
            tensor.shape
        ))),
    }
}

/// Upper bound of the bytes that a request takes in a message.
pub(crate) fn encoded_bytes(name_len: usize, tensors: &[TensorMeta]) -> usize {
    64 + name_len
        + tensors
            .iter()
            .map(|t| 2 + 10 * (t.shape.len() + usize::from(!t.order.is_row_major())))
            .sum::<usize>()
}

fn check_new_set(ranks: &[Rank], size: u32) -> Result<(), OpError> {
    if ranks.is_empty() {
        return Err(OpError::invalid(
            "Tried to register process set without ranks",
        ));
    }
    if ranks.len() > RANKS_MAX {
        return Err(OpError::invalid(
            "Tried to register process set with too many ranks",
        ));
    }
    if let Some(rank) = ranks.iter().find(|r| r.0 >= size) {
        return Err(OpError::invalid(format!(
            "Tried to register process set with invalid rank: {}",
            rank.0
        )));
    }
    for pair in ranks.windows(2) {
        if pair[0] == pair[1] {
            return Err(OpError::invalid(format!(
                "Tried to register process set with duplicate rank: {}",
                pair[0].0
            )));
        }
        if pair[0] > pair[1] {
            return Err(OpError::invalid(
                "Tried to register process set with ranks that are not in ascending order",
            ));
        }
    }
    Ok(())
}

fn whole_job(req: &Request) -> Result<(), OpError> {
    if req.set == ProcessSetId::GLOBAL {
        return Ok(());
    }
    Err(OpError::invalid(format!(
        "{}: only possible on the global process set.",
        req.op.title()
    )))
}

fn some_tensors(req: &Request) -> Result<(), OpError> {
    if req.tensors.is_empty() {
        return Err(OpError::invalid(format!(
            "{}: at least one tensor is needed.",
            req.op.title()
        )));
    }
    Ok(())
}

fn no_tensors(req: &Request) -> Result<(), OpError> {
    if req.tensors.is_empty() {
        return Ok(());
    }
    Err(OpError::invalid(format!(
        "{}: takes no tensors.",
        req.op.title()
    )))
}

fn capitalised(rank: Rank) -> String {
    format!("Rank {}", rank.0)
}

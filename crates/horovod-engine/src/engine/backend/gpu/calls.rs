//! The translation of an execution into the calls of a launch, with the memory and shapes of its results.

use std::ptr;
use std::sync::Arc;

use horovod_gpu::{
    AllReduce, AllReduceInput, Call, DeviceMemory, Event, NcclOp, ReduceScatter, Reduction,
};
use horovod_kernels::{Combine, fill_identity};
use horovod_protocol::{Completion, DType, ExecItem, Execution, Op, Rank, ReduceOp, Scale, Shape};

use super::super::rows::{
    AlltoallInput, Gathered, bytes_of, elems_of, joined_cannot, output_of, received_shape,
    row_bytes_of, share_of, too_large, usize_of, with_rows,
};
use super::super::{Failure, Outputs, Results, Start};
use crate::buffer::Buffer;
use crate::engine::Entry;
use crate::engine::handles::OpResult;
use crate::tensor::{Output, Tensor};

use super::{Ready, ready_of};

/// An execution translated for the device.
pub(super) struct Translated {
    pub(super) calls: Vec<Call>,
    pub(super) after: Vec<Arc<Event>>,
    /// Without the end, which is known when it is launched.
    pub(super) results: Results,
}

/// An execution, seen from this rank.
pub(super) struct Translation<'a, 'b> {
    pub(super) start: Start<'a>,
    pub(super) me: Rank,
    pub(super) divisor: u32,
    pub(super) done: &'b mut Translated,
}

/// Whether only the host can do this: what NCCL has no operator for, and integers that would wrap or be rounded
/// otherwise than on the host.
pub(super) fn needs_host(execution: &Execution) -> bool {
    let (Op::Allreduce { op, scale } | Op::Reducescatter { op, scale }) = &execution.op else {
        return false;
    };
    let mut types = execution.items.iter().flat_map(|item| item.tensors.iter());
    let divides = *op == ReduceOp::Average || *scale != Scale::NONE;
    *op == ReduceOp::Adasum || (divides && types.any(|meta| !meta.dtype.is_float()))
}

/// Everything that must have passed before these tensors are touched.
pub(super) fn events(entries: &[Option<Entry>], outputs: &Outputs) -> Vec<Arc<Event>> {
    let tensors = entries.iter().flatten().flat_map(|e| e.tensors.iter());
    let placed = tensors.filter_map(Tensor::placement);
    let given = outputs.iter().flatten().flatten();
    let given = given.filter_map(|(buffer, _)| buffer.placement());
    let mut distinct: Vec<&Ready> = Vec::new();
    for ready in placed.chain(given).filter_map(ready_of) {
        // Those of one call lie together.
        if !distinct.last().is_some_and(|last| ptr::eq(*last, ready)) {
            distinct.push(ready);
        }
    }
    distinct.into_iter().map(Ready::event).collect()
}

impl Translation<'_, '_> {
    pub(super) fn translate(self) -> Result<(), Failure> {
        self.done.after = events(self.start.entries, self.start.outputs);
        match self.start.execution.op {
            Op::Allreduce { op, scale } => self.allreduce(op, scale),
            Op::Broadcast { root } => self.broadcast(root),
            Op::Allgather => self.allgather(),
            Op::Alltoall => self.alltoall(),
            Op::Reducescatter { op, scale } => self.reduce_scatter(op, scale),
            Op::Barrier | Op::Join | Op::AddProcessSet { .. } | Op::RemoveProcessSet { .. } => Err(
                Failure::Local("an operation without tensors came to a GPU".into()),
            ),
        }
    }

    fn items(&self) -> impl Iterator<Item = (usize, &ExecItem, Option<&Entry>)> {
        let entries = self.start.entries.iter().map(Option::as_ref);
        let items = self.start.execution.items.iter().zip(entries);
        items.enumerate().map(|(i, (item, entry))| (i, item, entry))
    }

    fn allreduce(self, op: ReduceOp, scale: Scale) -> Result<(), Failure> {
        let mut calls = Vec::new();
        let mut results = Results::new();
        for (_, item, entry) in self.items() {
            for (i, meta) in item.tensors.iter().enumerate() {
                let reduction = self.reduction(meta.dtype, op, scale)?;
                let (input, output) = match entry.map(|entry| &entry.tensors[i]) {
                    Some(tensor) => (
                        AllReduceInput::At(address(tensor.input)),
                        address(output_of(tensor)?),
                    ),
                    None => (identity(meta.dtype, op)?, 0),
                };
                calls.push(Call::AllReduce(AllReduce {
                    input,
                    output,
                    count: elems_of(meta)?,
                    dtype: meta.dtype,
                    reduction,
                }));
            }
            results.extend(done(item, Vec::new()));
        }
        self.put(calls, results)
    }

    fn reduction(&self, dtype: DType, op: ReduceOp, scale: Scale) -> Result<Reduction, Failure> {
        let divisor = match op {
            ReduceOp::Average => f64::from(self.divisor.max(1)),
            _ => 1.0,
        };
        let mut reduction = Reduction {
            op: operator(op)?,
            pre: scale.pre,
            post: scale.post / divisor,
        };
        if dtype == DType::F16 && op == ReduceOp::Average {
            // So that the sum is in the type's range. A power of two: bits of ordinary numbers stay.
            let headroom = f64::from(self.divisor.max(1).next_power_of_two());
            reduction.pre /= headroom;
            reduction.post *= headroom;
        }
        Ok(reduction)
    }

    fn broadcast(self, root: Rank) -> Result<(), Failure> {
        let members = &self.start.execution.members;
        let root = members.iter().position(|rank| *rank == root);
        let root = root.and_then(|root| i32::try_from(root).ok());
        let root =
            root.ok_or_else(|| Failure::Local("the root of a broadcast is not in the set".into()))?;
        let mut calls = Vec::new();
        let mut results = Results::new();
        for (_, item, entry) in self.items() {
            for tensor in entry.ok_or_else(joined_cannot)?.tensors.iter() {
                calls.push(Call::Broadcast {
                    input: address(tensor.input),
                    output: address(output_of(tensor)?),
                    bytes: bytes_of(tensor)?,
                    root,
                });
            }
            results.extend(done(item, Vec::new()));
        }
        self.put(calls, results)
    }

    fn allgather(self) -> Result<(), Failure> {
        let members = self.start.execution.members.len();
        let me = self.index()?;
        let mut given = std::mem::take(self.start.outputs);
        let mut calls = Vec::new();
        let mut results = Results::new();
        for (at, item, entry) in self.items() {
            let mut outputs = Vec::new();
            for (i, tensor) in entry.ok_or_else(joined_cannot)?.tensors.iter().enumerate() {
                let Gathered { bytes, total, rows } = Gathered::of(item, i, tensor, me, members)?;
                let even = bytes.windows(2).all(|pair| pair[0] == pair[1]);
                let buffer = memory(&mut given, (at, i), tensor, total, even)?;
                calls.push(Call::AllGather {
                    input: address(tensor.input),
                    output: address(buffer.as_mut_ptr()),
                    bytes,
                });
                outputs.push(Some((buffer, with_rows(&tensor.meta.shape, rows))));
            }
            results.extend(done(item, outputs));
        }
        self.put(calls, results)
    }

    fn alltoall(mut self) -> Result<(), Failure> {
        let mut given = std::mem::take(self.start.outputs);
        let received = std::mem::take(&mut self.start.received);
        if received.len() != self.start.entries.len() {
            return Err(Failure::Local(
                "nobody has asked the members of an alltoall for their rows".into(),
            ));
        }
        let mut calls = Vec::new();
        let mut results = Results::new();
        for ((at, item, entry), from) in self.items().zip(received) {
            let AlltoallInput { tensor, rows } = AlltoallInput::of(item, entry)?;
            let row_bytes = row_bytes_of(tensor)?;
            let bytes = |rows: &[usize]| -> Result<Vec<usize>, Failure> {
                let bytes = rows.iter().map(|rows| rows.checked_mul(row_bytes));
                bytes.collect::<Option<_>>().ok_or_else(too_large)
            };
            let (send, receive) = (bytes(&rows)?, bytes(&from)?);
            let total = receive
                .iter()
                .try_fold(0usize, |sum, n| sum.checked_add(*n));
            let total = total.ok_or_else(too_large)?;
            let even = from.windows(2).all(|pair| pair[0] == pair[1]);
            let buffer = memory(&mut given, (at, 0), tensor, total, even)?;
            calls.push(Call::AllToAll {
                input: address(tensor.input),
                output: address(buffer.as_mut_ptr()),
                send,
                receive,
            });
            let shape = received_shape(tensor, &from);
            results.extend(done(item, vec![Some((buffer, shape))]).map(|(id, result)| {
                let splits = from.iter().map(|rows| *rows as u64).collect();
                let with_splits = |result| OpResult {
                    received_splits: Some(splits),
                    ..result
                };
                (id, result.map(with_splits))
            }));
        }
        self.put(calls, results)
    }

    fn reduce_scatter(self, op: ReduceOp, scale: Scale) -> Result<(), Failure> {
        let members = self.start.execution.members.len();
        let me = self.index()?;
        let mut given = std::mem::take(self.start.outputs);
        let mut calls = Vec::new();
        let mut results = Results::new();
        for (at, item, entry) in self.items() {
            let mut outputs = Vec::new();
            for (i, tensor) in entry.ok_or_else(joined_cannot)?.tensors.iter().enumerate() {
                let (rows, row_bytes) = (usize_of(tensor.rows())?, row_bytes_of(tensor)?);
                let row_elems = row_bytes / tensor.meta.dtype.size();
                let share = share_of(rows, me, members);
                let even = rows.is_multiple_of(members);
                let buffer = memory(&mut given, (at, i), tensor, share * row_bytes, even)?;
                let counts = (0..members).map(|member| share_of(rows, member, members) * row_elems);
                calls.push(Call::ReduceScatter(ReduceScatter {
                    input: address(tensor.input),
                    output: address(buffer.as_mut_ptr()),
                    counts: counts.collect(),
                    dtype: tensor.meta.dtype,
                    reduction: self.reduction(tensor.meta.dtype, op, scale)?,
                }));
                let shape = with_rows(&tensor.meta.shape, share as u64);
                outputs.push(Some((buffer, shape)));
            }
            results.extend(done(item, outputs));
        }
        self.put(calls, results)
    }

    fn index(&self) -> Result<usize, Failure> {
        let members = self.start.execution.members.iter();
        let mut members = members.enumerate();
        let me = members.find(|(_, rank)| **rank == self.me);
        me.map(|(i, _)| i).ok_or_else(joined_cannot)
    }

    fn put(self, calls: Vec<Call>, results: Results) -> Result<(), Failure> {
        self.done.calls = calls;
        self.done.results = results;
        Ok(())
    }
}

fn done(
    item: &ExecItem,
    outputs: Vec<Option<(Buffer, Shape)>>,
) -> impl Iterator<
    Item = (
        horovod_protocol::EntryId,
        Result<OpResult, crate::error::Error>,
    ),
> {
    let result = OpResult {
        outputs,
        ..OpResult::plain(Completion::Done)
    };
    item.entry.map(|id| (id, Ok(result))).into_iter()
}

/// Memory for an output: the tensor's own if it fits, or what its allocator gave, or new memory where it was thought to
/// fit. All members carry the operation out; a caller that expects the result elsewhere gets an error.
fn memory(
    given: &mut Outputs,
    (item, i): (usize, usize),
    tensor: &Tensor,
    bytes: usize,
    even: bool,
) -> Result<Buffer, Failure> {
    let lent = match tensor.output {
        Output::Even { at, bytes: length } if even && length == bytes => Buffer::lent(at, bytes),
        Output::Exactly { at, bytes: length } if length == bytes => Buffer::lent(at, bytes),
        Output::At(at) => Buffer::lent(at, bytes),
        _ => None,
    };
    if let Some(buffer) = lent {
        return Ok(buffer);
    }
    let given = given.get_mut(item).and_then(|item| item.get_mut(i));
    let ready = tensor.placement().and_then(ready_of);
    match (given.and_then(Option::take), tensor.output, ready) {
        (Some((buffer, _)), ..) if buffer.len() >= bytes => Ok(buffer),
        (None, Output::Even { .. }, Some(ready)) => {
            let memory = ready.device().allocate(bytes);
            memory
                .map(buffer_of)
                .map_err(|error| Failure::Local(error.to_string()))
        }
        _ => Err(Failure::Local(format!(
            "there are no {bytes} bytes of GPU memory for a result"
        ))),
    }
}

fn buffer_of(memory: DeviceMemory) -> Buffer {
    let at =
        usize::try_from(memory.address()).map_or(ptr::null_mut(), ptr::with_exposed_provenance_mut);
    Buffer::owned(at, memory.len(), Box::new(memory))
}

fn operator(op: ReduceOp) -> Result<NcclOp, Failure> {
    Ok(match op {
        ReduceOp::Average | ReduceOp::Sum => NcclOp::Sum,
        ReduceOp::Min => NcclOp::Min,
        ReduceOp::Max => NcclOp::Max,
        ReduceOp::Product => NcclOp::Product,
        ReduceOp::Adasum => {
            return Err(Failure::Local("Adasum goes through host memory".into()));
        }
    })
}

/// Input of a rank that has joined.
fn identity(dtype: DType, op: ReduceOp) -> Result<AllReduceInput, Failure> {
    let combine = Combine::of(op);
    let combine = combine.ok_or_else(|| Failure::Local("Adasum has no neutral element".into()))?;
    let mut value = [0; 8];
    // SAFETY: there is room for one element of any type.
    unsafe { fill_identity(dtype, combine, value.as_mut_ptr(), 1) };
    Ok(AllReduceInput::Identity(value))
}

pub(super) fn address(pointer: *const u8) -> u64 {
    pointer.expose_provenance() as u64
}

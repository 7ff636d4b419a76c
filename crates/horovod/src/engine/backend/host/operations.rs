//! The operations on host memory beside allreduce: what each moves, and the memory of its results.

use horovod_collectives::{
    self as collectives, ByteSegment, Ctx, GatherItem, Incoming, Outgoing, ScatterItem,
};
use horovod_protocol::{Completion, DType, ExecItem, Execution, Op, Rank, ReduceOp, Scale, Shape};
use horovod_transport::Idle;

use super::{Host, Run, SegmentScratch, bytes_of, too_large};
use crate::buffer::Buffer;
use crate::engine::Entry;
use crate::engine::backend::{Failure, Outputs, Results, Start};
use crate::engine::handles::OpResult;
use crate::tensor::{Output, Tensor};

/// The outputs of one item.
pub(super) type ItemOutputs = Vec<Option<(Buffer, Shape)>>;

impl Host {
    /// Exchange the members' bytes of equal length, at the place in the order of `execution`.
    pub(in crate::engine) fn exchange(
        &mut self,
        execution: &Execution,
        mine: &[u8],
        idle: &mut dyn Idle,
    ) -> Result<Vec<u8>, Failure> {
        let members = execution.members.len();
        let mut all = vec![0; members * mine.len()];
        let item = GatherItem {
            input: mine.as_ptr(),
            output: all.as_mut_ptr(),
            bytes: vec![mine.len(); members],
        };
        self.with_context(execution, idle, |ctx, _| {
            // SAFETY: both live until it returns, and have the lengths that are given.
            unsafe { collectives::allgather(ctx, &[item]) }.map_err(Failure::from)
        })?;
        Ok(all)
    }

    /// Shapes of the outputs to be allocated, by item; of an alltoall they are found out here.
    pub(in crate::engine) fn output_shapes(
        &mut self,
        start: &mut Start<'_>,
    ) -> Result<Vec<Vec<Shape>>, Failure> {
        let execution = start.execution;
        let run = self.run(start);
        if !matches!(execution.op, Op::Alltoall) {
            return run.output_shapes(&execution.members);
        }
        let sizes = self.with_context(execution, start.idle, |ctx, _| run.exchange_sizes(ctx))?;
        let shapes = run.received_shapes(&sizes)?;
        self.sized = Some((execution.seq, sizes));
        Ok(shapes)
    }
}

impl Run<'_> {
    /// Shapes of what is allocated for an allgather or a reduce-scatter, by item.
    pub(super) fn output_shapes(&self, members: &[Rank]) -> Result<Vec<Vec<Shape>>, Failure> {
        let me = members.iter().position(|rank| *rank == self.me);
        let me = me.ok_or_else(joined_cannot)?;
        let mut all = Vec::new();
        for (item, entry) in self.items() {
            let entry = entry.ok_or_else(joined_cannot)?;
            let tensors = entry.tensors.iter().enumerate();
            let shapes = tensors.map(|(i, tensor)| {
                let rows = match self.execution.op {
                    Op::Allgather => Gathered::of(item, i, tensor, me, members.len())?.rows,
                    _ => share_of(usize_of(tensor.rows())?, me, members.len()) as u64,
                };
                Ok(with_rows(&tensor.meta.shape, rows))
            });
            all.push(shapes.collect::<Result<_, Failure>>()?);
        }
        Ok(all)
    }

    /// Memory for one output: what was given for it, or else of the pool. `even`: all members bring, or get, equally
    /// many rows.
    fn output(
        &self,
        given: &mut Outputs,
        (item, i): (usize, usize),
        tensor: &Tensor,
        bytes: usize,
        even: bool,
    ) -> Result<Buffer, Failure> {
        if let Output::Even { at, bytes: length } = tensor.output
            && even
            && length == bytes
            && let Some(buffer) = Buffer::lent(at, bytes)
        {
            return Ok(buffer);
        }
        let given = given.get_mut(item).and_then(|item| item.get_mut(i));
        match given.and_then(Option::take) {
            Some((buffer, _)) if buffer.len() >= bytes => Ok(buffer),
            Some((buffer, shape)) => Err(Failure::Local(format!(
                "{} bytes were allocated for a result of shape {shape:?}, which needs {bytes}",
                buffer.len()
            ))),
            None => self.buffer(bytes),
        }
    }

    pub(super) fn reduce_scatter(
        &self,
        ctx: &mut Ctx<'_>,
        given: &mut Outputs,
        op: ReduceOp,
        scale: Scale,
    ) -> Result<Vec<ItemOutputs>, Failure> {
        let (n, me) = (ctx.members.len(), ctx.me);
        let mut by_type: Vec<(DType, Vec<ScatterItem>)> = Vec::new();
        let mut outputs = Vec::new();
        for (at, (item, entry)) in self.items().enumerate() {
            let entry = entry.ok_or_else(joined_cannot)?;
            let mut mine = ItemOutputs::new();
            let tensors = item.tensors.iter().zip(entry.tensors.iter());
            for (i, (meta, tensor)) in tensors.enumerate() {
                let rows = usize_of(tensor.rows())?;
                let row_bytes = row_bytes_of(tensor)?;
                let share = share_of(rows, me, n);
                let buffer = self.output(
                    given,
                    (at, i),
                    tensor,
                    share * row_bytes,
                    rows.is_multiple_of(n),
                )?;
                let scatter = ScatterItem {
                    input: tensor.input,
                    rows,
                    row_elems: row_bytes / meta.dtype.size(),
                    output: buffer.as_mut_ptr(),
                };
                match by_type.iter_mut().find(|(d, _)| *d == meta.dtype) {
                    Some((_, items)) => items.push(scatter),
                    None => by_type.push((meta.dtype, vec![scatter])),
                }
                mine.push(Some((buffer, with_rows(&meta.shape, share as u64))));
            }
            outputs.push(mine);
        }
        for (dtype, items) in by_type {
            let reduction = self.reduction(dtype, op, scale);
            // SAFETY: as in `allreduce`.
            unsafe { collectives::reduce_scatter(ctx, &reduction, &items) }?;
        }
        Ok(outputs)
    }

    pub(super) fn allgather(
        &self,
        ctx: &mut Ctx<'_>,
        given: &mut Outputs,
    ) -> Result<Vec<ItemOutputs>, Failure> {
        let mut gathers = Vec::new();
        let mut outputs = Vec::new();
        for (at, (item, entry)) in self.items().enumerate() {
            let entry = entry.ok_or_else(joined_cannot)?;
            let mut mine = ItemOutputs::new();
            for (i, tensor) in entry.tensors.iter().enumerate() {
                let gathered = Gathered::of(item, i, tensor, ctx.me, ctx.members.len())?;
                let Gathered { bytes, total, rows } = gathered;
                let even = bytes.windows(2).all(|pair| pair[0] == pair[1]);
                let buffer = self.output(given, (at, i), tensor, total, even)?;
                gathers.push(GatherItem {
                    input: tensor.input,
                    output: buffer.as_mut_ptr(),
                    bytes,
                });
                mine.push(Some((buffer, with_rows(&tensor.meta.shape, rows))));
            }
            outputs.push(mine);
        }
        // SAFETY: as in `allreduce`.
        unsafe { collectives::allgather(ctx, &gathers) }?;
        Ok(outputs)
    }

    pub(super) fn broadcast(
        &self,
        ctx: &mut Ctx<'_>,
        segment_scratch: &mut SegmentScratch,
        root: Rank,
    ) -> Result<(), Failure> {
        let root = ctx
            .members
            .iter()
            .position(|r| *r == root)
            .ok_or_else(|| Failure::Local(format!("{root} is not in the process set")))?;
        for (item, entry) in self.items() {
            let entry = entry.ok_or_else(joined_cannot)?;
            for (meta, tensor) in item.tensors.iter().zip(entry.tensors.iter()) {
                let (input, output) =
                    self.operand(segment_scratch, meta, tensor, root != ctx.me)?;
                let bytes = bytes_of(tensor)?;
                segment_scratch.bytes.push(ByteSegment {
                    input,
                    output,
                    bytes,
                });
            }
        }
        // SAFETY: as in `allreduce`.
        unsafe { collectives::broadcast(ctx, root, &segment_scratch.bytes) }?;
        segment_scratch.settle();
        Ok(())
    }

    /// What each alltoall will receive.
    pub(super) fn exchange_sizes(&self, ctx: &mut Ctx<'_>) -> Result<Vec<Incoming>, Failure> {
        let exchange = |(item, entry)| {
            let AlltoallInput { rows, .. } = AlltoallInput::of(item, entry)?;
            Ok(collectives::exchange_sizes(ctx, &rows)?)
        };
        self.items().map(exchange).collect()
    }

    /// Shapes of what they receive.
    pub(super) fn received_shapes(&self, sizes: &[Incoming]) -> Result<Vec<Vec<Shape>>, Failure> {
        let shape = |((item, entry), incoming): ((_, _), &Incoming)| {
            let AlltoallInput { tensor, .. } = AlltoallInput::of(item, entry)?;
            Ok(vec![incoming_shape(tensor, incoming)])
        };
        self.items().zip(sizes).map(shape).collect()
    }

    pub(super) fn alltoall(
        &self,
        ctx: &mut Ctx<'_>,
        given: &mut Outputs,
        sizes: Vec<Incoming>,
        results: &mut Results,
    ) -> Result<(), Failure> {
        for (at, ((item, entry), incoming)) in self.items().zip(sizes).enumerate() {
            let id = item.entry.ok_or_else(joined_cannot)?;
            let AlltoallInput { tensor, rows } = AlltoallInput::of(item, entry)?;
            let row_bytes = row_bytes_of(tensor)?;
            let even = incoming.rows.windows(2).all(|pair| pair[0] == pair[1]);
            let bytes = incoming.bytes(row_bytes)?;
            let buffer = self.output(given, (at, 0), tensor, bytes, even)?;
            let shape = incoming_shape(tensor, &incoming);
            let received = incoming.rows.iter().map(|rows| *rows as u64).collect();
            let outgoing = Outgoing {
                input: tensor.input,
                rows: &rows,
                row_bytes,
            };
            // SAFETY: as in `allreduce`; the buffer is as long as what comes in, and lives until the results are taken.
            unsafe { collectives::exchange_rows(ctx, outgoing, incoming, buffer.as_mut_ptr()) }?;
            let result = OpResult {
                outputs: vec![Some((buffer, shape))],
                received_splits: Some(received),
                completion: Completion::Done,
            };
            results.push((id, Ok(result)));
        }
        Ok(())
    }
}

/// What this rank sends in an alltoall.
struct AlltoallInput<'a> {
    tensor: &'a Tensor,
    /// For each member.
    rows: Vec<usize>,
}

impl<'a> AlltoallInput<'a> {
    fn of(item: &ExecItem, entry: Option<&'a Entry>) -> Result<Self, Failure> {
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

fn incoming_shape(tensor: &Tensor, incoming: &Incoming) -> Shape {
    let rows = incoming.rows.iter().map(|rows| *rows as u64);
    let rows = rows.fold(0, u64::saturating_add);
    with_rows(&tensor.meta.shape, rows)
}

/// The rows of dimension 0 that one of so many members gets.
fn share_of(rows: usize, me: usize, members: usize) -> usize {
    rows / members + usize::from(me < rows % members)
}

fn row_bytes_of(t: &Tensor) -> Result<usize, Failure> {
    t.row_bytes().ok_or_else(too_large)
}

fn usize_of(n: u64) -> Result<usize, Failure> {
    usize::try_from(n).map_err(|_| too_large())
}

fn with_rows(shape: &[u64], rows: u64) -> Shape {
    let mut shape = Shape::from(shape);
    if let Some(first) = shape.first_mut() {
        *first = rows;
    }
    shape
}

fn joined_cannot() -> Failure {
    Failure::Local("a rank that has joined was asked for data it cannot stand in for".into())
}

/// What an allgather brings together from the rows that rank 0 has said each member has.
#[derive(Debug, PartialEq, Eq)]
struct Gathered {
    /// Of each member.
    bytes: Vec<usize>,
    /// Of all members.
    total: usize,
    rows: u64,
}

impl Gathered {
    fn of(
        item: &ExecItem,
        i: usize,
        tensor: &Tensor,
        me: usize,
        members: usize,
    ) -> Result<Self, Failure> {
        let said = item.first_dims.get(i).ok_or_else(|| {
            Failure::Local(format!(
                "{}: no sizes were agreed for tensor {i}",
                item.name
            ))
        })?;
        Self::new(said, me, members, tensor)
    }

    /// Each member reads as much of its own tensor as it is said to have, so that is checked against the tensor.
    fn new(said: &[u64], me: usize, members: usize, tensor: &Tensor) -> Result<Self, Failure> {
        let own = tensor.rows();
        if said.len() != members || said.get(me) != Some(&own) {
            return Err(Failure::Local(format!(
                "rank 0 says that the {members} members have {said:?} rows, but this one, number {me}, has {own}"
            )));
        }
        let row_bytes = row_bytes_of(tensor)?;
        let (mut rows, mut total) = (0u64, 0usize);
        let mut bytes = Vec::with_capacity(members);
        for &of_one in said {
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

#[cfg(test)]
mod tests {
    use horovod_protocol::TensorMeta;

    use super::*;
    use crate::tensor::Output;

    fn tensor(shape: &[u64]) -> Tensor {
        // SAFETY: the memory outlives the operation, and nobody else touches it.
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
        // More than it has, the other way round, of too few and of too many members.
        for said in [&[1, 3][..], &[2, 1], &[1], &[1, 2, 0], &[]] {
            let error = Gathered::new(said, 1, 2, &mine).unwrap_err();
            assert!(
                matches!(error, Failure::Local(text) if text.contains("has 2")),
                "{said:?}"
            );
        }
    }

    #[test]
    fn a_sum_or_product_beyond_all_memory_is_an_error() {
        let mine = tensor(&[2, 3]);
        for said in [[u64::MAX, 2], [u64::MAX / 12, 2], [u64::MAX / 12 + 1, 2]] {
            assert!(Gathered::new(&said, 1, 2, &mine).is_err(), "{said:?}");
        }
    }
}

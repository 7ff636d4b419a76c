//! The operations on host memory beside allreduce: what each moves, and the memory of its results.

use horovod_collectives::{
    self as collectives, ByteSegment, Ctx, GatherItem, Incoming, Outgoing, ScatterItem,
};
use horovod_protocol::{Completion, DType, Execution, Op, Rank, ReduceOp, Scale, Shape};
use horovod_transport::Idle;

use super::{Host, Run, SegmentScratch};
use crate::buffer::Buffer;
use crate::engine::backend::rows::{
    AlltoallInput, Gathered, bytes_of, joined_cannot, received_shape, row_bytes_of, share_of,
    usize_of, with_rows,
};
use crate::engine::backend::{Failure, Outputs, Results, Start};
use crate::engine::handles::OpResult;
use crate::tensor::{Output, Tensor};

/// Rows that alltoalls will receive.
pub(in crate::engine) struct Received {
    /// Of the outputs, by item.
    pub(in crate::engine) shapes: Vec<Vec<Shape>>,
    /// From each member, by item.
    pub(in crate::engine) rows: Vec<Vec<usize>>,
}

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
        let rows = sizes.iter().map(|incoming| &incoming.rows[..]);
        let shapes = run.received_shapes(rows)?;
        self.sized = Some((execution.seq, sizes));
        Ok(shapes)
    }

    /// The same for an alltoall that another backend will carry out, with the rows that come from each member.
    pub(in crate::engine) fn received_elsewhere(
        &mut self,
        start: &mut Start<'_>,
    ) -> Result<Received, Failure> {
        let (execution, members) = (start.execution, start.execution.members.len());
        let run = self.run(start);
        let me = execution.members.iter().position(|rank| *rank == run.me);
        let me = me.ok_or_else(joined_cannot)?;
        let mut mine = Vec::new();
        for (item, entry) in run.items() {
            for rows in AlltoallInput::of(item, entry)?.rows {
                mine.extend((rows as u64).to_le_bytes());
            }
        }
        let all = self.exchange(execution, &mine, start.idle)?;
        let sent = |from: usize, item: usize| {
            let at = from * mine.len() + (item * members + me) * 8;
            let rows = all.get(at..at + 8).and_then(|rows| rows.try_into().ok());
            usize_of(u64::from_le_bytes(rows.ok_or_else(joined_cannot)?))
        };
        let items = 0..execution.items.len();
        let rows: Vec<Vec<usize>> = items
            .map(|item| (0..members).map(|from| sent(from, item)).collect())
            .collect::<Result<_, Failure>>()?;
        let shapes = run.received_shapes(rows.iter().map(|rows| &rows[..]))?;
        Ok(Received { shapes, rows })
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
        let own = match tensor.output {
            Output::Even { at, bytes: length } if even && length == bytes => {
                Buffer::lent(at, bytes)
            }
            Output::Exactly { at, bytes: length } if length == bytes => Buffer::lent(at, bytes),
            Output::Exactly { bytes: length, .. } => {
                return Err(Failure::Local(format!(
                    "there are {length} bytes for a result that needs {bytes}"
                )));
            }
            _ => None,
        };
        if let Some(buffer) = own {
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

    /// Exchanges the sizes; returns the rows that each alltoall will receive.
    pub(super) fn exchange_sizes(&self, ctx: &mut Ctx<'_>) -> Result<Vec<Incoming>, Failure> {
        let exchange = |(item, entry)| {
            let AlltoallInput { rows, .. } = AlltoallInput::of(item, entry)?;
            Ok(collectives::exchange_sizes(ctx, &rows)?)
        };
        self.items().map(exchange).collect()
    }

    /// Shapes of what they receive.
    pub(super) fn received_shapes<'a>(
        &self,
        rows: impl Iterator<Item = &'a [usize]>,
    ) -> Result<Vec<Vec<Shape>>, Failure> {
        let shape = |((item, entry), rows): ((_, _), &[usize])| {
            let AlltoallInput { tensor, .. } = AlltoallInput::of(item, entry)?;
            Ok(vec![received_shape(tensor, rows)])
        };
        self.items().zip(rows).map(shape).collect()
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
            let shape = received_shape(tensor, &incoming.rows);
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
                end: None,
            };
            results.push((id, Ok(result)));
        }
        Ok(())
    }
}

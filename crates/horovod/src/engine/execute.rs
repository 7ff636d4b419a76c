//! One execution of the agreed order: from entries to segments, through a collective, to results.

use std::collections::BTreeMap;

use horovod_collectives::{
    self as collectives, ByteSegment, CollectiveError, Ctx, GatherItem, Reduction, ScatterItem,
    Scratch, Segment, SetLayout, Tuning,
};
use horovod_protocol::{
    Completion, DType, EntryId, ExecItem, Execution, Op, ProcessSetId, Rank, ReduceOp, Scale,
    Shape, TensorMeta,
};
use horovod_transport::{Aborted, Data, Idle, Topology};
use std::sync::Arc;

use super::Entry;
use super::handles::OpResult;
use crate::buffer::{Buffer, BufferPool};
use crate::error::Error;
use crate::tensor::Tensor;

/// Why an execution could not be carried out; each ends the generation, for the peers wait for this rank.
#[derive(Debug)]
pub(super) enum Failure {
    /// The generation was over already.
    Aborted(Aborted),
    /// A link broke under the collective.
    Link { rank: Rank, cause: String },
    /// This rank cannot go on: memory, an event that failed, an invariant.
    Local(String),
}

impl From<CollectiveError> for Failure {
    fn from(e: CollectiveError) -> Self {
        match e {
            CollectiveError::Aborted(a) => Self::Aborted(a),
            CollectiveError::Link(l) => Self::Link {
                rank: l.rank(),
                cause: l.to_string(),
            },
            other => Self::Local(other.to_string()),
        }
    }
}

/// Which members of each set share a host, worked out once per set.
pub(super) struct Layouts {
    topology: Topology,
    sets: BTreeMap<ProcessSetId, (Arc<[Rank]>, Arc<SetLayout>)>,
}

impl Layouts {
    pub(super) fn new(topology: &Topology) -> Self {
        Self {
            topology: topology.clone(),
            sets: BTreeMap::new(),
        }
    }

    /// The layout of a set that has been used.
    pub(super) fn known(&self, set: ProcessSetId, members: &[Rank]) -> Option<&SetLayout> {
        let (known, layout) = self.sets.get(&set)?;
        (known[..] == *members).then_some(layout)
    }

    /// Ids are reused after a removal, so the members decide whether a kept layout still fits.
    fn of(&mut self, set: ProcessSetId, members: &Arc<[Rank]>) -> Arc<SetLayout> {
        if let Some((known, layout)) = self.sets.get(&set)
            && known[..] == members[..]
        {
            return layout.clone();
        }
        let layout = Arc::new(SetLayout::new(&self.topology, members));
        self.sets.insert(set, (members.clone(), layout.clone()));
        layout
    }
}

/// Whether it may be broken off in any wait and go on later, so that a thread may carry it out that must be able
/// to leave.
pub(super) fn may_pause(
    execution: &Execution,
    data: &Data,
    layouts: &mut Layouts,
    tuning: &Tuning,
) -> bool {
    let Op::Allreduce { op, .. } = execution.op else {
        return false;
    };
    let layout = layouts.of(execution.set, &execution.members);
    // Element types run apart; the algorithm of each follows from its own bytes.
    let can = |bytes| collectives::may_pause(op, bytes, data, &layout, tuning);
    can(0) && can(bytes_of_all(execution))
}

/// Bytes of all tensors together.
pub(super) fn bytes_of_all(execution: &Execution) -> usize {
    let tensors = execution.items.iter().flat_map(|i| i.tensors.iter());
    let bytes = |meta: &TensorMeta| {
        let elems = meta.elems().and_then(|n| usize::try_from(n).ok());
        elems.map_or(usize::MAX, |n| n.saturating_mul(meta.dtype.size()))
    };
    tensors.map(bytes).fold(0, usize::saturating_add)
}

type Results = Vec<(EntryId, Result<OpResult, Error>)>;

/// What an execution is put together in, and its results; kept for the memory.
#[derive(Default)]
pub(super) struct Lists {
    /// Segments by element type, in the order in which the types first appear: mixed groups run once per type.
    by_type: Vec<(DType, Vec<Segment>)>,
    /// How many of these are in use.
    types: usize,
    bytes: Vec<ByteSegment>,
    stand_ins: Vec<Buffer>,
    results: Results,
}

// SAFETY: the pointers in the segments are only followed inside `run`, which fills in all that it uses.
unsafe impl Send for Lists {}

impl Lists {
    fn clear(&mut self) {
        self.types = 0;
        self.bytes.clear();
        self.stand_ins.clear();
        self.results.clear();
    }

    fn push(&mut self, dtype: DType, segment: Segment) {
        let known = self.by_type[..self.types].iter_mut();
        if let Some((_, segments)) = known.into_iter().find(|(of, _)| *of == dtype) {
            return segments.push(segment);
        }
        match self.by_type.get_mut(self.types) {
            Some((of, segments)) => {
                *of = dtype;
                segments.clear();
                segments.push(segment);
            }
            None => self.by_type.push((dtype, vec![segment])),
        }
        self.types += 1;
    }

    /// One per item that this rank submitted, after [`run`].
    pub(super) fn results(&mut self) -> &mut Results {
        &mut self.results
    }
}

/// What an execution runs with.
pub(super) struct Means<'a> {
    pub(super) data: &'a mut Data,
    pub(super) idle: &'a mut dyn Idle,
    pub(super) layouts: &'a mut Layouts,
    pub(super) tuning: &'a Tuning,
    pub(super) scratch: &'a mut Scratch,
    pub(super) lists: &'a mut Lists,
    pub(super) pool: &'a Arc<BufferPool>,
}

/// Run it; the results are in the lists then. All tensors are ready: nobody may be made to wait for an event here,
/// for it may be a caller who has to leave.
pub(super) fn run(
    execution: &Execution,
    entries: &[Option<Entry>],
    means: Means<'_>,
) -> Result<(), Failure> {
    let Means {
        data,
        idle,
        layouts,
        tuning,
        scratch,
        lists,
        pool,
    } = means;
    lists.clear();
    let me = layouts.topology.rank;
    let index = execution
        .members
        .iter()
        .position(|r| *r == me)
        .ok_or_else(|| {
            Failure::Local("asked to run an operation of a foreign process set".into())
        })?;
    if entries.iter().flatten().any(Entry::has_event) {
        return Err(Failure::Local(
            "asked to run an operation before its tensors are ready".into(),
        ));
    }
    let layout = layouts.of(execution.set, &execution.members);
    let mut ctx = Ctx {
        data,
        idle,
        members: &execution.members,
        me: index,
        seq: execution.seq,
        ticket: execution.ticket,
        layout: &layout,
        tuning,
        scratch,
    };
    let run = Run {
        execution,
        entries,
        pool,
    };
    let outputs = match &execution.op {
        Op::Allreduce { op, scale } => {
            run.allreduce(&mut ctx, lists, *op, *scale)?;
            return run.done(lists);
        }
        Op::Allgather => run.allgather(&mut ctx)?,
        Op::Broadcast { root } => {
            run.broadcast(&mut ctx, lists, *root)?;
            return run.done(lists);
        }
        Op::Alltoall => return run.alltoall(&mut ctx, lists),
        Op::Reducescatter { op, scale } => run.reduce_scatter(&mut ctx, *op, *scale)?,
        Op::Barrier | Op::Join | Op::AddProcessSet { .. } | Op::RemoveProcessSet { .. } => {
            collectives::barrier(&mut ctx)?;
            return run.done(lists);
        }
    };
    let items = execution.items.iter().zip(outputs);
    let results = items.filter_map(|(item, outputs)| {
        let result = OpResult {
            outputs,
            received_splits: None,
            completion: Completion::Done,
        };
        Some((item.entry?, Ok(result)))
    });
    lists.results.extend(results);
    Ok(())
}

type ItemOutputs = Vec<Option<(Buffer, Shape)>>;

struct Run<'a> {
    execution: &'a Execution,
    entries: &'a [Option<Entry>],
    pool: &'a Arc<BufferPool>,
}

impl Run<'_> {
    fn items(&self) -> impl Iterator<Item = (&ExecItem, Option<&Entry>)> {
        self.execution
            .items
            .iter()
            .zip(self.entries.iter().map(Option::as_ref))
    }

    fn buffer(&self, bytes: usize) -> Result<Buffer, Failure> {
        self.pool
            .take(bytes)
            .ok_or_else(|| Failure::Local(format!("cannot allocate {bytes} bytes for a result")))
    }

    /// Everything ended well, and what was submitted holds the results.
    fn done(&self, lists: &mut Lists) -> Result<(), Failure> {
        let ids = self.execution.items.iter().filter_map(|item| item.entry);
        let results = ids.map(|id| (id, Ok(OpResult::plain(Completion::Done))));
        lists.results.extend(results);
        Ok(())
    }

    fn allreduce(
        &self,
        ctx: &mut Ctx<'_>,
        lists: &mut Lists,
        op: ReduceOp,
        scale: Scale,
    ) -> Result<(), Failure> {
        for (item, entry) in self.items() {
            for (i, meta) in item.tensors.iter().enumerate() {
                let elems = elems_of(meta)?;
                let (input, output) = match entry.map(|e| &e.tensors[i]) {
                    Some(t) => (t.input, output_of(t)?),
                    None => {
                        // Joined: a null input stands for the identity, the result is thrown away.
                        let bytes = elems.checked_mul(meta.dtype.size()).ok_or_else(too_large)?;
                        let buffer = self.buffer(bytes)?;
                        let output = buffer.as_mut_ptr();
                        lists.stand_ins.push(buffer);
                        (std::ptr::null(), output)
                    }
                };
                let segment = Segment {
                    input,
                    output,
                    elems,
                };
                lists.push(meta.dtype, segment);
            }
        }
        for (dtype, segments) in &lists.by_type[..lists.types] {
            let reduction = self.reduction(*dtype, op, scale);
            // SAFETY: the submitter promised that its memory stays valid and untouched until completion, the lengths
            // come from the tensors' own shapes, and allocated outputs are sized for what was agreed.
            unsafe { collectives::allreduce(ctx, &reduction, segments) }?;
        }
        // What stood in for tensors goes back to the pool.
        lists.stand_ins.clear();
        Ok(())
    }

    fn reduction(&self, dtype: DType, op: ReduceOp, scale: Scale) -> Reduction {
        Reduction {
            dtype,
            op,
            scale,
            divisor: self.execution.contributors,
        }
    }

    fn reduce_scatter(
        &self,
        ctx: &mut Ctx<'_>,
        op: ReduceOp,
        scale: Scale,
    ) -> Result<Vec<ItemOutputs>, Failure> {
        let (n, me) = (ctx.members.len(), ctx.me);
        let mut by_type: Vec<(DType, Vec<ScatterItem>)> = Vec::new();
        let mut outputs = Vec::new();
        for (item, entry) in self.items() {
            let entry = entry.ok_or_else(joined_cannot)?;
            let mut mine = ItemOutputs::new();
            for (meta, tensor) in item.tensors.iter().zip(entry.tensors.iter()) {
                let rows = usize_of(tensor.rows())?;
                let row_bytes = row_bytes_of(tensor)?;
                let share = rows / n + usize::from(me < rows % n);
                let buffer = self.buffer(share * row_bytes)?;
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

    fn allgather(&self, ctx: &mut Ctx<'_>) -> Result<Vec<ItemOutputs>, Failure> {
        let mut gathers = Vec::new();
        let mut outputs = Vec::new();
        for (item, entry) in self.items() {
            let entry = entry.ok_or_else(joined_cannot)?;
            let mut mine = ItemOutputs::new();
            for (i, tensor) in entry.tensors.iter().enumerate() {
                let dims = item.first_dims.get(i).ok_or_else(|| {
                    Failure::Local(format!(
                        "{}: no sizes were agreed for tensor {i}",
                        item.name
                    ))
                })?;
                let row_bytes = row_bytes_of(tensor)?;
                let mut bytes = Vec::with_capacity(dims.len());
                let (mut rows, mut total) = (0u64, 0usize);
                for &d in dims {
                    let b = usize_of(d)?.checked_mul(row_bytes).ok_or_else(too_large)?;
                    total = total.checked_add(b).ok_or_else(too_large)?;
                    rows = rows.checked_add(d).ok_or_else(too_large)?;
                    bytes.push(b);
                }
                let buffer = self.buffer(total)?;
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

    fn broadcast(&self, ctx: &mut Ctx<'_>, lists: &mut Lists, root: Rank) -> Result<(), Failure> {
        let root = ctx
            .members
            .iter()
            .position(|r| *r == root)
            .ok_or_else(|| Failure::Local(format!("{root} is not in the process set")))?;
        for (_, entry) in self.items() {
            let entry = entry.ok_or_else(joined_cannot)?;
            for tensor in entry.tensors.iter() {
                lists.bytes.push(ByteSegment {
                    input: tensor.input,
                    output: output_of(tensor)?,
                    bytes: bytes_of(tensor)?,
                });
            }
        }
        // SAFETY: as in `allreduce`.
        unsafe { collectives::broadcast(ctx, root, &lists.bytes) }?;
        Ok(())
    }

    fn alltoall(&self, ctx: &mut Ctx<'_>, lists: &mut Lists) -> Result<(), Failure> {
        for (item, entry) in self.items() {
            let entry = entry.ok_or_else(joined_cannot)?;
            let id = item.entry.ok_or_else(joined_cannot)?;
            let (Some(tensor), Some(splits)) = (entry.tensors.first(), &entry.splits) else {
                return Err(Failure::Local(format!(
                    "{}: no splits were kept",
                    item.name
                )));
            };
            let row_bytes = row_bytes_of(tensor)?;
            let send = splits
                .iter()
                .map(|rows| usize_of(*rows))
                .collect::<Result<Vec<_>, _>>()?;
            let mut received = Vec::new();
            let mut buffer = None;
            let mut allocate = |rows: &[usize]| {
                received = rows.iter().map(|rows| *rows as u64).collect();
                let total = rows.iter().sum::<usize>() * row_bytes;
                let b = self.pool.take(total).ok_or_else(|| {
                    CollectiveError::Allocation(format!(
                        "{total} bytes for the result of {}",
                        item.name
                    ))
                })?;
                let p = b.as_mut_ptr();
                buffer = Some(b);
                Ok(p)
            };
            // SAFETY: as in `allreduce`; the buffer lives until the results are taken.
            unsafe { collectives::alltoall(ctx, tensor.input, &send, row_bytes, &mut allocate) }?;
            let buffer = buffer.ok_or_else(|| Failure::Local("alltoall gave no result".into()))?;
            let shape = with_rows(&tensor.meta.shape, received.iter().sum());
            let result = OpResult {
                outputs: vec![Some((buffer, shape))],
                received_splits: Some(received),
                completion: Completion::Done,
            };
            lists.results.push((id, Ok(result)));
        }
        Ok(())
    }
}

fn elems_of(meta: &TensorMeta) -> Result<usize, Failure> {
    meta.elems()
        .and_then(|n| usize::try_from(n).ok())
        .ok_or_else(too_large)
}

fn bytes_of(t: &Tensor) -> Result<usize, Failure> {
    t.bytes().ok_or_else(too_large)
}

fn row_bytes_of(t: &Tensor) -> Result<usize, Failure> {
    t.row_bytes().ok_or_else(too_large)
}

fn usize_of(n: u64) -> Result<usize, Failure> {
    usize::try_from(n).map_err(|_| too_large())
}

fn output_of(t: &Tensor) -> Result<*mut u8, Failure> {
    t.output_ptr()
        .ok_or_else(|| Failure::Local("the operation needs an output tensor".into()))
}

fn with_rows(shape: &[u64], rows: u64) -> Shape {
    let mut shape = Shape::from(shape);
    if let Some(first) = shape.first_mut() {
        *first = rows;
    }
    shape
}

fn too_large() -> Failure {
    Failure::Local("a tensor is too large for this machine".into())
}

fn joined_cannot() -> Failure {
    Failure::Local("a rank that has joined was asked for data it cannot stand in for".into())
}

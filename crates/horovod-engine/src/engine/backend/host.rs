//! The host's data plane: collectives over shared memory and TCP, which run to their end within the start.

mod operations;
mod prestaging;
mod reordered;
mod tuning;

use std::collections::BTreeMap;
use std::sync::Arc;

use horovod_collectives::{
    self as collectives, ByteSegment, CollectiveError, Ctx, HostGroups, Incoming, Reduction,
    Scratch, Segment, SetLayout, Stages,
};
use horovod_protocol::{
    Completion, Coordinator, DType, ExecItem, Execution, Op, ProcessSetId, Rank, ReduceOp, Scale,
    Seq, TensorMeta, Time,
};
use horovod_transport::{Data, Idle, LinkError, Topology};

use super::rows::{bytes_of, elems_of, output_of, too_large};
use super::{AdasumScope, Backend, Failure, Members, Outputs, Results, Start, Started};
use crate::buffer::{Buffer, BufferPool};
use crate::config::{Config, JoinAverage};
use crate::engine::Entry;
use crate::engine::handles::OpResult;
use crate::tensor::Tensor;
use reordered::Reordered;
use tuning::Tuned;

pub(in crate::engine) use prestaging::PrestageOperand;
pub(in crate::engine) use tuning::Announced;

/// Links to the peers, and the state with which collectives run over them.
pub(in crate::engine) struct Host {
    data: Data,
    layouts: Layouts,
    tuned: Tuned,
    scratch: Scratch,
    segment_scratch: SegmentScratch,
    /// Rows that an alltoall will receive, kept from the exchange of the sizes to the exchange of the rows.
    sized: Option<(Seq, Vec<Incoming>)>,
}

impl Host {
    pub(in crate::engine) fn new(config: &Config, data: Data, topology: &Topology) -> Self {
        Self {
            data,
            layouts: Layouts::new(topology),
            tuned: Tuned::new(config, topology),
            scratch: Scratch::default(),
            segment_scratch: SegmentScratch::default(),
            sized: None,
        }
    }

    /// Applies the tuned values that take effect before the execution `next`.
    pub(in crate::engine) fn catch_up(&mut self, announced: &mut Announced, next: Seq) {
        self.tuned.catch_up(announced, next);
    }

    /// Passes an execution on host memory that has ended to the tuner, if this rank has one.
    pub(in crate::engine) fn observe(
        &mut self,
        now: impl FnOnce() -> Time,
        execution: &Execution,
        coordinator: Option<&mut Coordinator>,
    ) {
        self.tuned.observe(now, execution, coordinator);
    }

    /// Warns if the job has succeeded before its tuning was complete.
    pub(in crate::engine) fn ended_well(&self) {
        self.tuned.ended_well();
    }

    /// Returns whether an execution may be suspended in any wait and resumed later, so that a thread may run it that
    /// must be able to leave.
    pub(in crate::engine) fn may_pause(&mut self, execution: &Execution) -> bool {
        let Op::Allreduce { op, .. } = execution.op else {
            return false;
        };
        // After a suspension the copies would be made anew, in other memory.
        if execution.items.iter().any(|item| item.reordered) {
            return false;
        }
        let layout = self.layouts.of(execution.set, &execution.members);
        let (data, tuning) = (&self.data, &self.tuned.tuning);
        // Each element type runs separately; the algorithm of each depends on its own bytes.
        let can = |bytes| collectives::may_pause(op, bytes, data, &layout, tuning);
        can(0) && can(bytes_of_all(execution))
    }

    /// Prepares the suspended execution to be started again, before any other execution.
    pub(in crate::engine) fn rewind(&mut self) {
        self.scratch.rewind();
    }

    /// Returns the stages of the last execution, if they are recorded.
    pub(in crate::engine) fn stages(&mut self) -> &mut Stages {
        &mut self.scratch.stages
    }

    fn run<'a>(&self, start: &Start<'a>) -> Run<'a> {
        Run {
            execution: start.execution,
            entries: start.entries,
            join_average: self.tuned.join_average,
            pool: start.pool,
            me: self.layouts.topology.rank,
            hosts: (start.adasum == AdasumScope::Hosts)
                .then(|| HostGroups::new(&self.layouts.topology, &start.execution.members)),
        }
    }

    fn with_context<T>(
        &mut self,
        execution: &Execution,
        idle: &mut dyn Idle,
        body: impl FnOnce(&mut Ctx<'_>, &mut SegmentScratch) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let me = self.layouts.topology.rank;
        let index = execution.members.iter().position(|r| *r == me);
        let index = index.ok_or_else(|| {
            Failure::Local("asked to run an operation of a foreign process set".into())
        })?;
        let layout = self.layouts.of(execution.set, &execution.members);
        let mut ctx = Ctx {
            data: &mut self.data,
            idle,
            members: &execution.members,
            me: index,
            seq: execution.seq,
            tag: execution.tag,
            layout: &layout,
            tuning: &self.tuned.tuning,
            scratch: &mut self.scratch,
        };
        body(&mut ctx, &mut self.segment_scratch)
    }
}

impl Backend for Host {
    fn name(&self) -> &'static str {
        "HOST"
    }

    fn offer(&mut self, _: ProcessSetId, _: &[Rank]) -> Vec<u8> {
        Vec::new()
    }

    /// Nothing to settle: every rank has this backend.
    fn settle(&mut self, _: ProcessSetId, _: &Members<'_>) -> Result<(), String> {
        Ok(())
    }

    fn start(&mut self, start: Start<'_>) -> Result<Started, Failure> {
        let run = self.run(&start);
        let sized = self.sized.take_if(|(seq, _)| *seq == start.execution.seq);
        let sizes = sized.map(|(_, sizes)| sizes);
        let (outputs, results) = (start.outputs, start.results);
        self.segment_scratch.clear();
        self.with_context(start.execution, start.idle, |ctx, segment_scratch| {
            run.all(ctx, segment_scratch, outputs, sizes, results)
        })?;
        Ok(Started::Done)
    }
}

/// An execution and this rank's part in it.
struct Run<'a> {
    execution: &'a Execution,
    join_average: JoinAverage,
    entries: &'a [Option<Entry>],
    pool: &'a Arc<BufferPool>,
    me: Rank,
    /// Groups of members for an Adasum of the hosts' averages.
    hosts: Option<HostGroups>,
}

impl<'a> Run<'a> {
    /// Runs the execution, with memory for the outputs as far as it is given.
    fn all(
        &self,
        ctx: &mut Ctx<'_>,
        segment_scratch: &mut SegmentScratch,
        given: &mut Outputs,
        sizes: Option<Vec<Incoming>>,
        results: &mut Results,
    ) -> Result<(), Failure> {
        if self.entries.iter().flatten().any(Entry::has_event) {
            return Err(Failure::Local(
                "asked to run an operation before its tensors are ready".into(),
            ));
        }
        let outputs = match &self.execution.op {
            Op::Allreduce { op, scale } => {
                self.allreduce(ctx, segment_scratch, *op, *scale)?;
                return self.done(results);
            }
            Op::Allgather => self.allgather(ctx, given)?,
            Op::Broadcast { root } => {
                self.broadcast(ctx, segment_scratch, *root)?;
                return self.done(results);
            }
            Op::Alltoall => {
                let sizes = match sizes {
                    Some(sizes) => sizes,
                    None => self.exchange_sizes(ctx)?,
                };
                return self.alltoall(ctx, given, sizes, results);
            }
            Op::Reducescatter { op, scale } => self.reduce_scatter(ctx, given, *op, *scale)?,
            Op::Barrier | Op::Join | Op::AddProcessSet { .. } | Op::RemoveProcessSet { .. } => {
                collectives::barrier(ctx)?;
                return self.done(results);
            }
        };
        let items = self.execution.items.iter().zip(outputs);
        results.extend(items.filter_map(|(item, outputs)| {
            let result = OpResult {
                outputs,
                received_splits: None,
                completion: Completion::Done,
                end: None,
            };
            Some((item.entry?, Ok(result)))
        }));
        Ok(())
    }

    fn allreduce(
        &self,
        ctx: &mut Ctx<'_>,
        segment_scratch: &mut SegmentScratch,
        op: ReduceOp,
        scale: Scale,
    ) -> Result<(), Failure> {
        for (item, entry) in self.items() {
            for (i, meta) in item.tensors.iter().enumerate() {
                let elems = elems_of(meta)?;
                let (input, output) = match entry.map(|e| &e.tensors[i]) {
                    Some(t) => self.operand(segment_scratch, meta, t, true)?,
                    None => {
                        // This rank has joined: a null input means the neutral element, and the result is discarded.
                        let bytes = elems.checked_mul(meta.dtype.size()).ok_or_else(too_large)?;
                        let buffer = self.buffer(bytes)?;
                        let output = buffer.as_mut_ptr();
                        segment_scratch.stand_ins.push(buffer);
                        (std::ptr::null(), output)
                    }
                };
                let segment = Segment {
                    input,
                    output,
                    elems,
                };
                segment_scratch.push(meta.dtype, segment);
            }
        }
        for (dtype, segments) in &segment_scratch.by_type[..segment_scratch.types] {
            let reduction = self.reduction(*dtype, op, scale);
            // SAFETY: the submitter promised that its memory stays valid and untouched until completion. The lengths
            // are those of the tensors' own shapes, and allocated outputs have the agreed sizes.
            unsafe {
                match &self.hosts {
                    Some(hosts) => collectives::adasum_of_hosts(ctx, hosts, &reduction, segments),
                    None => collectives::allreduce(ctx, &reduction, segments),
                }
            }?;
        }
        segment_scratch.settle();
        Ok(())
    }

    /// Returns where an operation reads and writes a tensor of this rank: a copy, if the agreed order in memory differs
    /// from the tensor's.
    fn operand(
        &self,
        segment_scratch: &mut SegmentScratch,
        agreed: &TensorMeta,
        tensor: &Tensor,
        changes: bool,
    ) -> Result<(*const u8, *mut u8), Failure> {
        let output = output_of(tensor)?;
        if tensor.meta.order == agreed.order {
            return Ok((tensor.input, output));
        }
        let buffer = self.buffer(bytes_of(tensor)?)?;
        // SAFETY: the submitter promised that its memory stays valid and untouched until completion.
        let copy = unsafe { Reordered::of(tensor, buffer) }.ok_or_else(too_large)?;
        let memory = copy.memory();
        let is_there = !changes && tensor.input == output.cast_const();
        let output = if is_there {
            std::ptr::null_mut()
        } else {
            output
        };
        segment_scratch.reordered.push((copy, output));
        Ok((memory, memory))
    }

    fn reduction(&self, dtype: DType, op: ReduceOp, scale: Scale) -> Reduction {
        Reduction {
            dtype,
            op,
            scale,
            divisor: match self.join_average {
                JoinAverage::Members => {
                    u32::try_from(self.execution.members.len()).unwrap_or(u32::MAX)
                }
                JoinAverage::Contributors => self.execution.contributors,
            },
        }
    }

    /// Adds a result without outputs for each operation: all have succeeded, and their own tensors have the results.
    fn done(&self, results: &mut Results) -> Result<(), Failure> {
        let items = self.execution.items.iter();
        let done = |item: &ExecItem| Some((item.entry?, Ok(OpResult::plain(Completion::Done))));
        results.extend(items.filter_map(done));
        Ok(())
    }

    fn items(&self) -> impl Iterator<Item = (&'a ExecItem, Option<&'a Entry>)> + use<'a> {
        let entries = self.entries.iter().map(Option::as_ref);
        self.execution.items.iter().zip(entries)
    }

    fn buffer(&self, bytes: usize) -> Result<Buffer, Failure> {
        self.pool
            .take(bytes)
            .ok_or_else(|| Failure::Local(format!("cannot allocate {bytes} bytes for a result")))
    }
}

/// Layouts of the process sets, computed once per set.
struct Layouts {
    topology: Topology,
    sets: BTreeMap<ProcessSetId, (Arc<[Rank]>, Arc<SetLayout>)>,
}

impl Layouts {
    fn new(topology: &Topology) -> Self {
        Self {
            topology: topology.clone(),
            sets: BTreeMap::new(),
        }
    }

    /// Returns the layout of a set that was used before.
    fn known(&self, set: ProcessSetId, members: &[Rank]) -> Option<&SetLayout> {
        let (known, layout) = self.sets.get(&set)?;
        (known[..] == *members).then_some(layout)
    }

    /// Returns the layout of a set. Ids are reused after a removal, so a stored layout is used only if its members are
    /// the same.
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

/// Returns the bytes of all tensors together.
pub(in crate::engine) fn bytes_of_all(execution: &Execution) -> usize {
    let tensors = execution.items.iter().flat_map(|i| i.tensors.iter());
    let bytes = |meta: &TensorMeta| {
        let elems = meta.elems().and_then(|n| usize::try_from(n).ok());
        elems.map_or(usize::MAX, |n| n.saturating_mul(meta.dtype.size()))
    };
    tensors.map(bytes).fold(0, usize::saturating_add)
}

/// Scratch lists for assembling an execution; kept for their memory.
#[derive(Default)]
struct SegmentScratch {
    /// Segments by element type, in the order in which the types first appear; each type runs separately.
    by_type: Vec<(DType, Vec<Segment>)>,
    /// Number of element types in use.
    types: usize,
    bytes: Vec<ByteSegment>,
    stand_ins: Vec<Buffer>,
    /// Reordered copies, each with the output to which its result is written; null if there is none.
    reordered: Vec<(Reordered, *mut u8)>,
}

// SAFETY: the pointers in the segments are only dereferenced inside `Host::start`, which fills in all that it uses.
unsafe impl Send for SegmentScratch {}

impl SegmentScratch {
    fn clear(&mut self) {
        self.types = 0;
        self.bytes.clear();
        self.stand_ins.clear();
        self.reordered.clear();
    }

    /// Completes a successful execution: writes results to their outputs, and returns stand-in buffers to the pool.
    fn settle(&mut self) {
        for (reordered, output) in self.reordered.drain(..) {
            if !output.is_null() {
                // SAFETY: the submitter promised that its output stays writable until completion.
                unsafe { reordered.write_to(output) };
            }
        }
        self.stand_ins.clear();
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
}

impl From<CollectiveError> for Failure {
    fn from(e: CollectiveError) -> Self {
        match e {
            CollectiveError::Aborted(a) => Self::Aborted(a),
            CollectiveError::Link(LinkError::Altered { rank, what, .. }) => {
                Self::Altered { rank, what }
            }
            CollectiveError::Link(l) => Self::Link {
                rank: l.rank(),
                cause: l.to_string(),
            },
            other => Self::Local(other.to_string()),
        }
    }
}

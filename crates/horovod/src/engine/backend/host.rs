//! The host's data plane: collectives over shared memory and TCP, run to their end while they are started.

mod reordered;
mod run;
mod tuning;

use std::collections::BTreeMap;
use std::sync::Arc;

use horovod_collectives::{
    self as collectives, ByteSegment, Ctx, GatherItem, Incoming, Reduction, Scratch, Segment,
    SetLayout, Stages, StagingContext,
};
use horovod_protocol::{
    Coordinator, DType, Execution, Op, OperationTag, ProcessSetId, Rank, Seq, Shape, TensorMeta,
    Time,
};
use horovod_transport::{Data, Idle, Topology};

use super::{Backend, Failure, Members, Start, Started};
use crate::buffer::Buffer;
use crate::config::Config;
use crate::tensor::Tensor;
use reordered::Reordered;
use run::Run;
use tuning::Tuned;

pub(in crate::engine) use tuning::Announced;

/// Links to the peers, and what the collectives over them run with.
pub(in crate::engine) struct Host {
    data: Data,
    layouts: Layouts,
    tuned: Tuned,
    scratch: Scratch,
    segment_scratch: SegmentScratch,
    /// What an alltoall will receive, between the exchange of the sizes and that of the rows.
    sized: Option<(Seq, Vec<Incoming>)>,
}

/// A tensor that may be staged before it is decided to run its operation.
pub(in crate::engine) struct Operand<'a> {
    pub(in crate::engine) set: ProcessSetId,
    pub(in crate::engine) members: &'a [Rank],
    pub(in crate::engine) op: &'a Op,
    pub(in crate::engine) tensor: &'a Tensor,
    pub(in crate::engine) tag: OperationTag,
    /// Ranks outnumber the cores of this host.
    pub(in crate::engine) oversubscribed: bool,
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

    /// Put in force what was announced before this place in the order.
    pub(in crate::engine) fn catch_up(&mut self, announced: &mut Announced, next: Seq) {
        self.tuned.catch_up(announced, next);
    }

    /// An execution on host memory has ended: something to learn from for who tunes.
    pub(in crate::engine) fn observe(
        &mut self,
        now: impl FnOnce() -> Time,
        execution: &Execution,
        coordinator: Option<&mut Coordinator>,
    ) {
        self.tuned.observe(now, execution, coordinator);
    }

    /// Whether an execution may be broken off in any wait and go on later, so that a thread may carry it out that must
    /// be able to leave.
    pub(in crate::engine) fn may_pause(&mut self, execution: &Execution) -> bool {
        let Op::Allreduce { op, .. } = execution.op else {
            return false;
        };
        // Copies would be made anew, elsewhere.
        if execution.items.iter().any(|item| item.reordered) {
            return false;
        }
        let layout = self.layouts.of(execution.set, &execution.members);
        let (data, tuning) = (&self.data, &self.tuned.tuning);
        // Element types run apart; the algorithm of each follows from its own bytes.
        let can = |bytes| collectives::may_pause(op, bytes, data, &layout, tuning);
        can(0) && can(bytes_of_all(execution))
    }

    /// It was broken off in a wait, and will be started again before anything else.
    pub(in crate::engine) fn rewind(&mut self) {
        self.scratch.rewind();
    }

    /// How the last execution went through its stages, if that is recorded.
    pub(in crate::engine) fn stages(&mut self) -> &mut Stages {
        &mut self.scratch.stages
    }

    /// Put the operand of an operation where the peers will look for it when it is decided to run it; `false` if it is
    /// not one for that.
    pub(in crate::engine) fn prestage(&mut self, operand: &Operand<'_>) -> bool {
        let tensor = operand.tensor;
        let layout = self.layouts.known(operand.set, operand.members);
        let elems = tensor.meta.elems().and_then(|n| usize::try_from(n).ok());
        let (Some(layout), Op::Allreduce { op, scale }, Some(elems)) = (layout, operand.op, elems)
        else {
            return false;
        };
        let segment = Segment {
            input: tensor.input,
            output: std::ptr::null_mut(),
            elems,
        };
        let reduction = Reduction {
            dtype: tensor.meta.dtype,
            op: *op,
            scale: *scale,
            divisor: 1,
        };
        let context = StagingContext {
            data: &self.data,
            layout,
            tuning: &self.tuned.tuning,
            scratch: &mut self.scratch,
            oversubscribed: operand.oversubscribed,
        };
        // SAFETY: the submitter promised that its memory stays valid and untouched until completion, which is later:
        // the entry is still pending.
        unsafe { collectives::prestage(context, operand.tag, &reduction, segment) }
    }

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

    fn run<'a>(&self, start: &Start<'a>) -> Run<'a> {
        Run {
            execution: start.execution,
            entries: start.entries,
            join_average: self.tuned.join_average,
            pool: start.pool,
            me: self.layouts.topology.rank,
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

    fn offer(&mut self, _: ProcessSetId) -> Vec<u8> {
        Vec::new()
    }

    /// Every rank has one.
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

/// Which members of each set share a host, worked out once per set.
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

    /// The layout of a set that has been used.
    fn known(&self, set: ProcessSetId, members: &[Rank]) -> Option<&SetLayout> {
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

/// Bytes of all tensors together.
pub(in crate::engine) fn bytes_of_all(execution: &Execution) -> usize {
    let tensors = execution.items.iter().flat_map(|i| i.tensors.iter());
    let bytes = |meta: &TensorMeta| {
        let elems = meta.elems().and_then(|n| usize::try_from(n).ok());
        elems.map_or(usize::MAX, |n| n.saturating_mul(meta.dtype.size()))
    };
    tensors.map(bytes).fold(0, usize::saturating_add)
}

/// What an execution is put together in; kept for the memory.
#[derive(Default)]
struct SegmentScratch {
    /// Segments by element type, in the order in which the types first appear: mixed groups run once per type.
    by_type: Vec<(DType, Vec<Segment>)>,
    /// How many of these are in use.
    types: usize,
    bytes: Vec<ByteSegment>,
    stand_ins: Vec<Buffer>,
    /// With where their results belong; null if nowhere.
    reordered: Vec<(Reordered, *mut u8)>,
}

// SAFETY: the pointers in the segments are only followed inside `Host::start`, which fills in all that it uses.
unsafe impl Send for SegmentScratch {}

impl SegmentScratch {
    fn clear(&mut self) {
        self.types = 0;
        self.bytes.clear();
        self.stand_ins.clear();
        self.reordered.clear();
    }

    /// The execution has ended well: results go where they belong, and what stood in for tensors back to the pool.
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

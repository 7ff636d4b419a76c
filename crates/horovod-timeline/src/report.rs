//! The events of one rank, for the timeline, before they become JSON or bytes.

use std::ops::Deref;
use std::sync::Arc;

use horovod_protocol::{DType, Op, ProcessSetId, Rank, ReduceOp, Shape, TensorMeta};

use super::catalog::Directory;
use super::items::Items;

/// Longest text made from the shapes of a group.
const SHAPES_BYTES_MAX: usize = 256;

/// Nanoseconds since the rank's engine started, by the rank's own clock.
pub type Nanos = u64;

/// A thread, by the number the operating system gave it, or a GPU; 0 if it is not known.
pub(crate) type ThreadId = u32;

/// When and where a submission was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// When.
    pub at: Nanos,
    /// On which thread.
    pub thread: ThreadId,
}

/// A name that outlives its event.
#[derive(Clone, Debug, Eq)]
pub(crate) enum Text {
    Static(&'static str),
    Shared(Arc<str>),
}

impl Deref for Text {
    type Target = str;
    fn deref(&self) -> &str {
        match self {
            Self::Static(text) => text,
            Self::Shared(text) => text,
        }
    }
}

impl PartialEq for Text {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

/// A part of an operation that has a name of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageReport {
    pub(crate) name: Text,
    /// When it began.
    pub begin: Nanos,
    /// When it ended.
    pub end: Nanos,
}

impl StageReport {
    /// A part with this name, from `begin` until `end`.
    #[inline]
    pub fn new(name: &'static str, begin: Nanos, end: Nanos) -> Self {
        let name = Text::Static(name);
        Self { name, begin, end }
    }
}

/// One tensor, or one group, of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) name: Text,
    /// `None` on a rank that had joined.
    pub(crate) submitted: Option<Stamp>,
    /// Only told by the rank whose view the tensor's track shows.
    pub(crate) result: Option<ReportedResult>,
}

/// Result of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReportedResult {
    pub(crate) dtype: Text,
    pub(crate) shape: Text,
    pub(crate) bytes: u64,
}

/// One execution as one rank saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) seq: u64,
    pub(crate) set: ProcessSetId,
    /// `None`: all ranks.
    pub(crate) members: Option<Arc<[Rank]>>,
    pub(crate) op: Text,
    pub(crate) thread: ThreadId,
    /// The order to run it arrived.
    pub(crate) scheduled: Nanos,
    pub(crate) begin: Nanos,
    pub(crate) end: Nanos,
    pub(crate) bytes: u64,
    pub(crate) stages: Vec<StageReport>,
    pub(crate) items: Vec<Item>,
}

/// Something else with a beginning and an end on one thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) name: Text,
    pub(crate) thread: ThreadId,
    pub(crate) begin: Nanos,
    pub(crate) end: Nanos,
    /// The error, or empty.
    pub(crate) detail: String,
}

/// Any event of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Report(Report),
    Span(Span),
}

/// An execution that was carried out, as the engine tells of it.
#[derive(Debug)]
pub struct Executed {
    /// The recording in which its numbers mean something.
    pub session: u64,
    /// Its place in the total order.
    pub seq: u64,
    /// The process set.
    pub set: ProcessSetId,
    /// The ranks of that set.
    pub members: Arc<[Rank]>,
    /// The operation, see [`op_name`].
    pub op: &'static str,
    /// The tensors, see [`Timeline::pack`](crate::Timeline::pack).
    pub items: Items,
    /// Shapes of allocated outputs, item by item; empty if all are as submitted.
    pub output_shapes: Vec<Vec<Shape>>,
    /// The track that shows it; 0 for that of the thread that tells of it.
    pub thread: ThreadId,
    /// The order to run it arrived.
    pub scheduled: Nanos,
    /// When it began.
    pub begin: Nanos,
    /// When it ended.
    pub end: Nanos,
    /// Its parts, in their order.
    pub stages: Vec<StageReport>,
}

impl Executed {
    /// Bytes that it takes, roughly.
    pub(super) fn size(&self) -> usize {
        let shapes = self.output_shapes.iter().map(Vec::capacity).sum::<usize>();
        size_of::<Self>()
            + self.items.size()
            + self.stages.capacity() * size_of::<StageReport>()
            + self.output_shapes.capacity() * size_of::<Vec<Shape>>()
            + shapes * size_of::<Shape>()
    }

    /// As `me` of `size` ranks reports it; nothing if it belongs to another recording.
    pub(super) fn into_report(self, me: Rank, size: u32, known: &Directory) -> Option<Report> {
        if self.session != known.session {
            return None;
        }
        let describes = self.members.first() == Some(&me);
        let mut total = 0u64;
        let mut shapes = self.output_shapes.into_iter();
        let mut item = |(number, submitted)| {
            let entry = known.get(number)?;
            total = total.wrapping_add(entry.outcome.bytes);
            let result = match shapes.next() {
                _ if !describes => None,
                Some(shapes) => Some(outcome(&entry.tensors, Some(&shapes))),
                None => Some(entry.outcome.clone()),
            };
            Some(Item {
                name: entry.name.clone(),
                submitted,
                result,
            })
        };
        let mut items = Vec::with_capacity(self.items.len());
        for packed in self.items.iter() {
            items.push(item(packed)?);
        }
        Some(Report {
            seq: self.seq,
            set: self.set,
            members: (self.members.len() != size as usize).then_some(self.members),
            op: Text::Static(self.op),
            thread: self.thread,
            scheduled: self.scheduled,
            begin: self.begin,
            end: self.end,
            bytes: total,
            stages: self.stages,
            items,
        })
    }
}

/// The name of an operation in the trace, as Horovod writes it.
pub fn op_name(op: &Op) -> &'static str {
    match op {
        Op::Allreduce {
            op: ReduceOp::Adasum,
            ..
        } => "ADASUM",
        Op::Allreduce { .. } => "ALLREDUCE",
        Op::Allgather => "ALLGATHER",
        Op::Broadcast { .. } => "BROADCAST",
        Op::Alltoall => "ALLTOALL",
        Op::Reducescatter { .. } => "REDUCESCATTER",
        Op::Barrier => "BARRIER",
        Op::Join => "JOIN",
        Op::AddProcessSet { .. } => "ADD_PROCESS_SET",
        Op::RemoveProcessSet { .. } => "REMOVE_PROCESS_SET",
    }
}

fn bytes_of(meta: &TensorMeta) -> u64 {
    meta.elems()
        .unwrap_or(0)
        .saturating_mul(meta.dtype.size() as u64)
}

/// The outcome of an operation on these tensors; the shapes are theirs if there are no others.
pub(super) fn outcome(tensors: &[TensorMeta], shapes: Option<&[Shape]>) -> ReportedResult {
    let mut shape = String::new();
    for (i, meta) in tensors.iter().enumerate() {
        if shape.len() > SHAPES_BYTES_MAX {
            shape.push_str(", ...");
            break;
        }
        if i > 0 {
            shape.push_str(", ");
        }
        let dims = shapes.and_then(|s| s.get(i)).unwrap_or(&meta.shape);
        push_shape(&mut shape, dims);
    }
    ReportedResult {
        dtype: dtype_of(tensors),
        shape: Text::Shared(shape.into()),
        bytes: tensors.iter().map(bytes_of).fold(0, u64::wrapping_add),
    }
}

fn dtype_of(tensors: &[TensorMeta]) -> Text {
    let mut types: Vec<DType> = Vec::new();
    for meta in tensors {
        if !types.contains(&meta.dtype) {
            types.push(meta.dtype);
        }
    }
    match types[..] {
        [] => Text::Static(""),
        [one] => Text::Static(one.name()),
        _ => {
            let names: Vec<&str> = types.iter().map(|t| t.name()).collect();
            Text::Shared(names.join(", ").into())
        }
    }
}

/// `[2, 3]`, as Horovod writes it.
fn push_shape(out: &mut String, dims: &[u64]) {
    out.push('[');
    for (i, dim) in dims.iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        out.push_str(&dim.to_string());
    }
    out.push(']');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_an_execution_is_the_sum_of_its_parts() {
        let mut executed = Executed {
            session: 1,
            seq: 1,
            set: ProcessSetId::GLOBAL,
            members: Arc::from([Rank(0)]),
            op: "ALLREDUCE",
            items: Items::with_capacity(3),
            output_shapes: Vec::new(),
            thread: 1,
            scheduled: 0,
            begin: 0,
            end: 0,
            stages: Vec::new(),
        };
        let empty = size_of::<Executed>() + executed.items.size();
        assert_eq!(executed.size(), empty);
        executed.stages = Vec::with_capacity(2);
        let stages = 2 * size_of::<StageReport>();
        assert_eq!(executed.size(), empty + stages);
        executed.output_shapes = vec![Vec::with_capacity(5)];
        let shapes = size_of::<Vec<Shape>>() + 5 * size_of::<Shape>();
        assert_eq!(executed.size(), empty + stages + shapes);
    }
}

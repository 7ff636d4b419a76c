//! Memory that operations in flight reduce or overwrite in place: no byte of it may belong to two of them.
//!
//! A check, the record and its end cost 24 ns for one operation, 28 ns with 32 in flight, 122 ns with 161. The gradients
//! of PyTorch's optimizer are not checked: their owners were counted.

use std::ops::Range;

use horovod_protocol::{Op, Request};

use super::handles::Handle;
use crate::tensor::{Output, Tensor};

/// Names that are kept for the next operations, so that recording one needs no allocation.
const SPARE_NAMES_MAX: usize = 64;

/// The memory of operations in flight. Each index is one tensor; the lists are apart so that a search reads few bytes.
#[derive(Default)]
pub(super) struct InPlace {
    spans: Vec<Range<usize>>,
    handles: Vec<Handle>,
    of: Vec<Holder>,
    spare: Vec<String>,
}

/// The operation that works on a span.
struct Holder {
    name: String,
    kind: AccessKind,
}

/// The use that an operation makes of its memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AccessKind {
    Reduces,
    /// Two broadcasts may share memory: tied weights, all from one root.
    Broadcasts,
}

impl AccessKind {
    fn of(op: &Op) -> Option<Self> {
        match op {
            Op::Allreduce { .. } => Some(Self::Reduces),
            Op::Broadcast { .. } => Some(Self::Broadcasts),
            _ => None,
        }
    }
}

/// Returns the memory on which an operation works in place.
fn span_in_place(tensor: &Tensor) -> Option<Range<usize>> {
    match tensor.output() {
        Output::At(output) if output.cast_const() == tensor.input() => tensor.span(),
        _ => None,
    }
}

impl InPlace {
    /// Returns the name of an operation in flight that works in place on memory of these tensors.
    pub(super) fn conflict(&self, op: &Op, tensors: &[Tensor]) -> Option<&str> {
        if self.spans.is_empty() {
            return None;
        }
        let kind = AccessKind::of(op)?;
        for span in tensors.iter().filter_map(span_in_place) {
            let shares = |other: &Range<usize>| other.start < span.end && span.start < other.end;
            let found = self.spans.iter().zip(&self.of);
            let mut found = found.filter(|(other, _)| shares(other));
            let conflict = found.find(|(_, of)| {
                (of.kind, kind) != (AccessKind::Broadcasts, AccessKind::Broadcasts)
            });
            if let Some((_, of)) = conflict {
                return Some(&of.name);
            }
        }
        None
    }

    /// Records the memory of an operation that begins.
    pub(super) fn record(&mut self, handle: Handle, request: &Request, tensors: &[Tensor]) {
        let Some(kind) = AccessKind::of(&request.op) else {
            return;
        };
        for span in tensors.iter().filter_map(span_in_place) {
            let mut kept = self.spare.pop().unwrap_or_default();
            kept.push_str(&request.name);
            self.spans.push(span);
            self.handles.push(handle);
            self.of.push(Holder { name: kept, kind });
        }
    }

    /// Forgets the memory of an operation that has ended.
    pub(super) fn release(&mut self, handle: Handle) {
        while let Some(index) = self.handles.iter().position(|of| *of == handle) {
            self.handles.swap_remove(index);
            self.spans.swap_remove(index);
            let Holder { mut name, .. } = self.of.swap_remove(index);
            if self.spare.len() < SPARE_NAMES_MAX {
                name.clear();
                self.spare.push(name);
            }
        }
    }
}

//! What lasts from one operation to the next: who may still read the staging memory, and buffers that
//! are used again.

use horovod_kernels::Source;
use horovod_protocol::Seq;

use crate::local::Pipeline;
use crate::slices::{Segment, Vector};
use crate::stages::Stages;

/// Staging areas for small operations; which one is used follows from the sequence number.
pub(crate) const SMALL_AREAS: usize = 4;
/// Staging areas for operands that are staged before their operation begins.
pub(crate) const EARLY_AREAS: usize = 2;
/// Pipelines that one operation may have under way at the same time.
pub(crate) const TRACKS: usize = 2;

/// Buffers kept for reuse; more are dropped.
const KEPT_MAX: usize = 16;
/// Longest buffer kept, in bytes.
const KEPT_BYTES_MAX: usize = 16 << 20;

/// State of one rank's collectives. Make a new one for each generation.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The operation that `step` belongs to.
    seq: u64,
    /// Steps of shared-memory phases done in this operation; the same on all members of the host.
    step: u64,
    /// Pipelines of this operation that have run.
    paused: Vec<Pipeline>,
    pub(crate) small: [LastUse; SMALL_AREAS],
    pub(crate) early: [LastUse; EARLY_AREAS],
    pub(crate) bulk: [LastUse; TRACKS],
    pub(crate) sources: Vec<Source>,
    vectors: Vec<Vector>,
    lists: Vec<Vec<Vector>>,
    counts: Vec<Vec<usize>>,
    buffers: Vec<Vec<u8>>,
    /// When the parts of the operation began and ended, if somebody wants to know.
    pub stages: Stages,
}

// SAFETY: the pointers inside `sources` and `vectors` are only used during a collective, from the
// pointers that its caller gave; between calls they are never followed.
unsafe impl Send for Scratch {}

/// Who may still be reading a part of this rank's staging memory.
#[derive(Debug, Default)]
pub(crate) struct LastUse {
    /// The flag value that says that a reader is through; 0 if nobody ever read.
    pub(crate) value: u64,
    /// Arena indices of the readers.
    pub(crate) readers: Vec<usize>,
}

impl LastUse {
    pub(crate) fn set(&mut self, value: u64, readers: &[usize]) {
        self.value = value;
        self.readers.clear();
        self.readers.extend_from_slice(readers);
    }
}

impl Scratch {
    /// Of a generation that has not run anything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Claims the next `steps` steps of operation `seq`; returns how many came before.
    pub(crate) fn claim(&mut self, seq: Seq, steps: u64) -> u64 {
        if self.seq != seq.0 {
            (self.seq, self.step) = (seq.0, 0);
            self.paused.clear();
        }
        let base = self.step;
        self.step += steps;
        base
    }

    /// The operation that ran last was broken off and goes on with the next call; see [`crate::may_pause`].
    pub fn rewind(&mut self) {
        self.step = 0;
    }

    /// Keeps a pipeline of the operation that runs until it ends or goes on.
    pub(crate) fn pause(&mut self, pipeline: Pipeline) {
        self.paused.push(pipeline);
    }

    /// The pipeline that began after `base` steps of the operation, if that was broken off.
    pub(crate) fn resume(&mut self, base: u64) -> Option<Pipeline> {
        let at = self.paused.iter().position(|p| p.base() == base)?;
        Some(self.paused.swap_remove(at))
    }

    /// A vector of elements of `size` bytes over these segments.
    pub(crate) fn vector(
        &mut self,
        size: usize,
        segments: impl IntoIterator<Item = Segment>,
    ) -> Vector {
        let mut vector = self.vectors.pop().unwrap_or_default();
        vector.refill(size, segments);
        vector
    }

    /// Takes a vector back for reuse.
    pub(crate) fn put_vector(&mut self, vector: Vector) {
        if self.vectors.len() < KEPT_MAX {
            self.vectors.push(vector);
        }
    }

    /// An empty list of vectors.
    pub(crate) fn vectors(&mut self) -> Vec<Vector> {
        self.lists.pop().unwrap_or_default()
    }

    /// Takes a list and what is in it back for reuse.
    pub(crate) fn put_vectors(&mut self, mut list: Vec<Vector>) {
        list.drain(..).for_each(|vector| self.put_vector(vector));
        if self.lists.len() < KEPT_MAX {
            self.lists.push(list);
        }
    }

    /// A list of `len` zeros.
    pub(crate) fn counts(&mut self, len: usize) -> Vec<usize> {
        let mut counts = self.counts.pop().unwrap_or_default();
        counts.clear();
        counts.resize(len, 0);
        counts
    }

    /// Takes a list back for reuse.
    pub(crate) fn put_counts(&mut self, counts: Vec<usize>) {
        if self.counts.len() < KEPT_MAX {
            self.counts.push(counts);
        }
    }

    /// A buffer of `len` bytes with any content.
    pub(crate) fn buffer(&mut self, len: usize) -> Vec<u8> {
        let enough = self
            .buffers
            .iter()
            .position(|buffer| buffer.capacity() >= len);
        let found = enough.or(self.buffers.len().checked_sub(1));
        let mut buffer = found
            .map(|i| self.buffers.swap_remove(i))
            .unwrap_or_default();
        buffer.resize(len, 0);
        buffer
    }

    /// Takes a buffer back for reuse.
    pub(crate) fn put_buffer(&mut self, buffer: Vec<u8>) {
        if self.buffers.len() < KEPT_MAX && buffer.capacity() <= KEPT_BYTES_MAX {
            self.buffers.push(buffer);
        }
    }
}

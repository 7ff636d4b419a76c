//! State of a rank that lasts from one operation to the next: readers of its staging memory, and buffers for reuse.

use horovod_kernels::Source;
use horovod_protocol::Seq;

use crate::local::Pipeline;
use crate::slices::{Segment, Vector};
use crate::stages::Stages;

/// Number of staging areas for small operations; the sequence number selects the area.
pub(crate) const SMALL_AREAS: usize = 4;
/// Number of staging areas for operands that are staged before their operation begins.
pub(crate) const PRESTAGED_AREAS: usize = 2;
/// Number of pipelines that one operation may have under way at the same time.
pub(crate) const TRACKS: usize = 2;

/// At most so many buffers are kept for reuse; more are dropped.
const KEPT_MAX: usize = 16;
/// Longest buffer kept, in bytes.
const KEPT_BYTES_MAX: usize = 16 << 20;

/// State of one rank's collectives. Make a new one for each generation.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The operation that `step` belongs to.
    seq: u64,
    /// Steps of shared-memory phases claimed in this operation; the same on all members of the host.
    step: u64,
    /// Calls of this operation that have begun since it began or was resumed.
    calls: usize,
    /// Calls of this operation that have ended, with the counts at the end of each.
    ended: Vec<Ended>,
    /// The pipeline in which the operation was suspended.
    paused: Option<Pipeline>,
    /// The last step for which this rank has staged its part in a small area, as a flag value.
    pub(crate) staged_small: u64,
    pub(crate) small: [LastUse; SMALL_AREAS],
    pub(crate) prestaged: [LastUse; PRESTAGED_AREAS],
    pub(crate) bulk: [LastUse; TRACKS],
    pub(crate) sources: Vec<Source>,
    vectors: Vec<Vector>,
    spare_vectors: Vec<Vec<Vector>>,
    counts: Vec<Vec<usize>>,
    buffers: Vec<Vec<u8>>,
    /// Begin and end of the operation's parts, if they are recorded.
    pub stages: Stages,
}

/// Counts of an operation at the end of one of its calls.
#[derive(Clone, Copy, Debug)]
struct Ended {
    step: u64,
    stages: usize,
}

// SAFETY: the pointers inside `sources` and `vectors` are only used during a collective, and point to memory of its
// caller. They are not dereferenced between calls.
unsafe impl Send for Scratch {}

/// Readers that may still use a part of this rank's staging memory.
#[derive(Debug, Default)]
pub(crate) struct LastUse {
    /// The flag value with which a reader has finished; 0 if there was no reader.
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
    /// Makes the state of a generation that has not run anything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps the counts if they belong to operation `seq`, and resets them otherwise.
    fn count_for(&mut self, seq: Seq) {
        if self.seq != seq.0 {
            (self.seq, self.step, self.calls) = (seq.0, 0, 0);
            self.ended.clear();
            self.paused = None;
        }
    }

    /// Claims the next `steps` steps of operation `seq`; returns the number of steps before them.
    pub(crate) fn claim(&mut self, seq: Seq, steps: u64) -> u64 {
        self.count_for(seq);
        let base = self.step;
        self.step += steps;
        base
    }

    /// Begins the next call of operation `seq`; returns whether it must run. A call that ended before the operation was
    /// suspended does not run again: its outputs have results, and its peers may have continued.
    pub(crate) fn begin_call(&mut self, seq: Seq) -> bool {
        self.count_for(seq);
        let ended = self.ended.get(self.calls).copied();
        self.calls += 1;
        if let Some(Ended { step, stages }) = ended {
            self.step = step;
            self.stages.skip_to(stages);
        }
        ended.is_none()
    }

    /// Notes that the call that began last has ended.
    pub(crate) fn end_call(&mut self) {
        self.ended.push(Ended {
            step: self.step,
            stages: self.stages.begun(),
        });
    }

    /// Prepares the operation that was suspended last to be resumed by the next call; see [`crate::may_pause`].
    pub fn rewind(&mut self) {
        (self.step, self.calls) = (0, 0);
        self.stages.skip_to(0);
    }

    /// Keeps a suspended pipeline until its operation is resumed or another begins.
    pub(crate) fn pause(&mut self, pipeline: Pipeline) {
        self.paused = Some(pipeline);
    }

    /// Returns the pipeline that began after `base` steps of the operation, if the operation was suspended in it.
    pub(crate) fn resume(&mut self, base: u64) -> Option<Pipeline> {
        self.paused.take_if(|pipeline| pipeline.base() == base)
    }

    /// Returns a vector of elements of `size` bytes over these segments.
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

    /// Returns an empty list of vectors.
    pub(crate) fn vectors(&mut self) -> Vec<Vector> {
        self.spare_vectors.pop().unwrap_or_default()
    }

    /// Takes a list and its vectors back for reuse.
    pub(crate) fn put_vectors(&mut self, mut list: Vec<Vector>) {
        list.drain(..).for_each(|vector| self.put_vector(vector));
        if self.spare_vectors.len() < KEPT_MAX {
            self.spare_vectors.push(list);
        }
    }

    /// Returns a list of `len` zeros.
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

    /// Returns a buffer of `len` bytes with any content.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_rewind_calls_that_ended_are_passed_over() {
        let mut scratch = Scratch::new();
        // Two calls end, one of them without a step, and the third is suspended.
        for steps in [3, 0] {
            assert!(scratch.begin_call(Seq(7)));
            scratch.claim(Seq(7), steps);
            scratch.end_call();
        }
        assert!(scratch.begin_call(Seq(7)));
        assert_eq!(scratch.claim(Seq(7), 2), 3);
        for _ in 0..2 {
            scratch.rewind();
            assert!(!scratch.begin_call(Seq(7)));
            assert!(!scratch.begin_call(Seq(7)));
            assert!(scratch.begin_call(Seq(7)));
            assert_eq!(scratch.claim(Seq(7), 2), 3, "the same steps as before");
        }
        scratch.end_call();
        assert!(scratch.begin_call(Seq(7)));
        assert_eq!(scratch.claim(Seq(7), 1), 5);
    }

    #[test]
    fn another_operation_begins_anew() {
        let mut scratch = Scratch::new();
        assert!(scratch.begin_call(Seq(7)));
        scratch.claim(Seq(7), 3);
        scratch.end_call();
        scratch.rewind();
        assert!(scratch.begin_call(Seq(8)));
        assert_eq!(scratch.claim(Seq(8), 1), 0);
    }

    #[test]
    fn stages_of_an_operation_that_goes_on_are_told_once() {
        let mut scratch = Scratch::new();
        scratch.stages.record(true);
        let run = |scratch: &mut Scratch, name, ends| {
            if scratch.begin_call(Seq(1)) {
                let stage = scratch.stages.begin(name);
                if ends {
                    scratch.stages.end(stage);
                    scratch.end_call();
                }
            }
        };
        run(&mut scratch, "first", true);
        run(&mut scratch, "second", false);
        scratch.rewind();
        run(&mut scratch, "first", true);
        run(&mut scratch, "second", true);
        run(&mut scratch, "third", true);
        let names: Vec<_> = scratch.stages.recorded().iter().map(|s| s.name).collect();
        assert_eq!(names, ["first", "second", "third"]);
    }
}

//! The plan of one launch: which small tensors travel together, and what scratch memory each operation needs.
//!
//! Every member of a group must make the same calls of NCCL, so a plan follows from what all members know alike:
//! counts, types and factors.

use horovod_protocol::DType;

use super::work::{AllReduce, AllReduceInput, Call, GpuWork, ReduceScatter, Reduction};
use crate::nccl::{NcclOp, NcclType};

/// Tensors of fewer bytes are copied together, larger ones are worked on where they are.
pub(super) const SMALL_MAX: usize = 64 << 10;
/// Bytes that are copied together in one launch at most.
pub(super) const PACKED_MAX: usize = 8 << 20;
/// Where parts of the scratch memory begin.
const ALIGN: usize = 256;
/// Where packed tensors begin, for copies of 16 bytes at once.
const PACKED_ALIGN: usize = 16;

/// One launch.
#[derive(Debug, Default, PartialEq)]
pub(super) struct LaunchPlan {
    pub(super) packs: Vec<Pack>,
    /// By call: where in the scratch memory its own part begins, if it needs one.
    pub(super) scratch: Vec<Option<usize>>,
    /// By call: it is in a pack.
    pub(super) is_packed: Vec<bool>,
    /// Scratch memory in all.
    pub(super) bytes: usize,
}

/// Small tensors of one type and reduction that are reduced as one.
#[derive(Debug, PartialEq)]
pub(super) struct Pack {
    pub(super) dtype: DType,
    pub(super) reduction: Reduction,
    /// In the scratch memory.
    pub(super) begin: usize,
    pub(super) bytes: usize,
    /// Which calls, and where in the scratch memory each has its tensor.
    pub(super) members: Vec<(usize, usize)>,
}

impl LaunchPlan {
    pub(super) fn of(work: &GpuWork) -> Self {
        let mut plan = Self {
            scratch: vec![None; work.calls.len()],
            is_packed: vec![false; work.calls.len()],
            ..Self::default()
        };
        if work.group.is_none() {
            return plan;
        }
        plan.pack(&work.calls);
        for (i, call) in work.calls.iter().enumerate() {
            let bytes = match call {
                Call::AllReduce(reduce) if !plan.is_packed[i] => own_scratch(reduce),
                Call::ReduceScatter(scatter) => scatter_scratch(scatter),
                _ => 0,
            };
            if bytes > 0 {
                plan.scratch[i] = Some(plan.take(bytes));
            }
        }
        plan
    }

    fn take(&mut self, bytes: usize) -> usize {
        let begin = self.bytes.next_multiple_of(ALIGN);
        self.bytes = begin + bytes;
        begin
    }

    fn pack(&mut self, calls: &[Call]) {
        let mut small: Vec<((DType, Reduction), Vec<usize>)> = Vec::new();
        let mut packed = 0;
        for (i, call) in calls.iter().enumerate() {
            let Call::AllReduce(reduce) = call else {
                continue;
            };
            let bytes = reduce.bytes();
            let fits = packed + bytes.next_multiple_of(PACKED_ALIGN) <= PACKED_MAX;
            if bytes == 0 || bytes >= SMALL_MAX || is_widened(reduce.dtype) || !fits {
                continue;
            }
            packed += bytes.next_multiple_of(PACKED_ALIGN);
            let kind = (reduce.dtype, reduce.reduction);
            match small.iter_mut().find(|(of, _)| *of == kind) {
                Some((_, members)) => members.push(i),
                None => small.push((kind, vec![i])),
            }
        }
        small.retain(|(_, members)| members.len() > 1);
        for ((dtype, reduction), members) in small {
            let begin = self.bytes.next_multiple_of(ALIGN);
            let mut at = begin;
            let place = |i: usize| {
                let Call::AllReduce(reduce) = &calls[i] else {
                    return (i, at);
                };
                let place = (i, at);
                at += reduce.bytes().next_multiple_of(PACKED_ALIGN);
                place
            };
            let members: Vec<_> = members.into_iter().map(place).collect();
            for (i, _) in &members {
                self.is_packed[*i] = true;
            }
            self.bytes = at;
            self.packs.push(Pack {
                dtype,
                reduction,
                begin,
                bytes: at - begin,
                members,
            });
        }
    }
}

impl AllReduce {
    pub(super) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// Whether NCCL has no such type, so that 32-bit integers stand for it.
pub(super) fn is_widened(dtype: DType) -> bool {
    matches!(dtype, DType::I16 | DType::U16)
}

/// The type and operator that NCCL is given.
pub(super) fn in_nccl(dtype: DType, op: NcclOp) -> (NcclType, NcclOp) {
    match (NcclType::of(dtype), op) {
        (Some(dtype), op) => (dtype, op),
        // Bytes of 0 and 1.
        (None, NcclOp::Sum | NcclOp::Max) if dtype == DType::Bool => (NcclType::U8, NcclOp::Max),
        (None, _) if dtype == DType::Bool => (NcclType::U8, NcclOp::Min),
        (None, op) => (NcclType::I32, op),
    }
}

/// Bytes beside the tensor's own memory.
fn own_scratch(reduce: &AllReduce) -> usize {
    match reduce.input {
        _ if is_widened(reduce.dtype) => reduce.count * 4,
        AllReduceInput::Identity(_) => reduce.bytes(),
        AllReduceInput::At(_) => 0,
    }
}

fn scatter_scratch(scatter: &ReduceScatter) -> usize {
    let all: usize = scatter.counts.iter().sum();
    if is_widened(scatter.dtype) {
        // The operand, then this member's part, which is not larger.
        let largest = scatter.counts.iter().max().copied().unwrap_or(0);
        return (all + largest) * 4;
    }
    if scatter.reduction.pre == 1.0 {
        return 0;
    }
    all * scatter.dtype.size()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::executor::work::{Group, Reduction};

    fn reduce(count: usize, dtype: DType) -> Call {
        Call::AllReduce(AllReduce {
            input: AllReduceInput::At(0x1000),
            output: 0x1000,
            count,
            dtype,
            reduction: Reduction {
                op: NcclOp::Sum,
                pre: 1.0,
                post: 1.0,
            },
        })
    }

    fn work(calls: Vec<Call>) -> GpuWork {
        GpuWork {
            title: "test".into(),
            group: Some(Arc::new(Group {
                key: 0,
                id: [0; 128],
                size: 2,
                rank: 0,
                name: "test".into(),
            })),
            after: Vec::new(),
            calls,
            seq: 0,
            set: 0,
            timed: false,
        }
    }

    #[test]
    fn small_tensors_of_a_type_travel_together_and_large_ones_alone() {
        let plan = LaunchPlan::of(&work(vec![
            reduce(3, DType::F32),
            reduce(1 << 20, DType::F32),
            reduce(5, DType::F16),
            reduce(0, DType::F32),
            reduce(7, DType::F32),
        ]));
        assert_eq!(plan.is_packed, [true, false, false, false, true]);
        let [pack] = &plan.packs[..] else {
            panic!("{plan:?}")
        };
        assert_eq!((pack.dtype, pack.begin, pack.bytes), (DType::F32, 0, 48));
        assert_eq!(pack.members, [(0, 0), (4, 16)]);
        assert_eq!(plan.bytes, 48);
        assert!(plan.scratch.iter().all(Option::is_none));
    }

    #[test]
    fn what_is_reduced_otherwise_travels_apart() {
        let by = |post| {
            let mut call = reduce(3, DType::F32);
            if let Call::AllReduce(reduce) = &mut call {
                reduce.reduction.post = post;
            }
            call
        };
        let plan = LaunchPlan::of(&work(vec![by(1.0), by(0.5), by(1.0), by(0.5), by(0.25)]));
        let packs: Vec<_> = plan
            .packs
            .iter()
            .map(|pack| (pack.reduction.post, &pack.members[..]))
            .collect();
        assert_eq!(
            packs,
            [
                (1.0, &[(0, 0), (2, 16)][..]),
                (0.5, &[(1, 256), (3, 272)][..])
            ]
        );
        assert_eq!(plan.is_packed, [true, true, true, true, false]);
    }

    #[test]
    fn what_is_packed_is_bounded() {
        let many = PACKED_MAX / (SMALL_MAX / 2) + 10;
        let calls = (0..many)
            .map(|_| reduce(SMALL_MAX / 8, DType::F32))
            .collect();
        let plan = LaunchPlan::of(&work(calls));
        assert_eq!(plan.bytes, PACKED_MAX);
        assert_eq!(plan.is_packed.iter().filter(|packed| !**packed).count(), 10);
    }

    #[test]
    fn parts_of_the_scratch_memory_do_not_overlap() {
        let mut identity = reduce(100, DType::F64);
        if let Call::AllReduce(reduce) = &mut identity {
            reduce.input = AllReduceInput::Identity([0; 8]);
        }
        let plan = LaunchPlan::of(&work(vec![
            reduce(10, DType::I16),
            identity,
            reduce(3, DType::U16),
        ]));
        assert_eq!(plan.scratch, [Some(0), Some(256), Some(1280)]);
        assert_eq!(plan.bytes, 1280 + 12);
    }

    #[test]
    fn a_member_alone_needs_nothing() {
        let mut alone = work(vec![reduce(1, DType::F32), reduce(2, DType::F32)]);
        alone.group = None;
        assert_eq!(LaunchPlan::of(&alone).bytes, 0);
    }

    #[test]
    fn bools_and_short_integers_have_types_of_nccl() {
        assert_eq!(
            in_nccl(DType::Bool, NcclOp::Sum),
            (NcclType::U8, NcclOp::Max)
        );
        assert_eq!(
            in_nccl(DType::Bool, NcclOp::Product),
            (NcclType::U8, NcclOp::Min)
        );
        assert_eq!(
            in_nccl(DType::U16, NcclOp::Sum),
            (NcclType::I32, NcclOp::Sum)
        );
        assert_eq!(
            in_nccl(DType::BF16, NcclOp::Max),
            (NcclType::Bf16, NcclOp::Max)
        );
    }
}

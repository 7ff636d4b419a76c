//! Fusion: which ready requests run together, a pure plan over their kinds and sizes.

use crate::limits::{BATCH_BYTES_MAX, FUSED_ITEMS_MAX};
use crate::message::SetKey;
use crate::signature::RequestSignature;
use crate::types::{DType, Device, Op, Rank};

/// Requests that a fused execution may skip over; keeps planning linear for odd mixtures.
const SKIPPED_MAX: usize = 4096;

/// Properties that requests must have in common to be fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FusionKey {
    set: SetKey,
    kind: u8,
    reduce: u8,
    /// The bits of the factors; of a broadcast, its root.
    detail: (u64, u64),
    device: Device,
    dtype: DType,
}

impl FusionKey {
    /// `None` for what always runs alone: other operations and groups of several types.
    pub(crate) fn of(set: SetKey, signature: &RequestSignature) -> Option<Self> {
        let (kind, reduce, detail) = match &signature.op {
            Op::Allreduce { op, scale } => {
                (0, *op as u8, (scale.pre.to_bits(), scale.post.to_bits()))
            }
            Op::Reducescatter { op, scale } => {
                (1, *op as u8, (scale.pre.to_bits(), scale.post.to_bits()))
            }
            Op::Allgather => (2, 0, (0, 0)),
            Op::Broadcast { root } => (3, 0, (u64::from(root.0), 0)),
            _ => return None,
        };
        let (first, rest) = signature.tensors.split_first()?;
        // Operations that only move bytes fuse whatever the element types.
        let moves = matches!(signature.op, Op::Allgather | Op::Broadcast { .. });
        let dtype = if moves { DType::U8 } else { first.dtype };
        let alike = moves || rest.iter().all(|t| t.dtype == dtype);
        alike.then_some(Self {
            set,
            kind,
            reduce,
            detail,
            device: signature.device,
            dtype,
        })
    }
}

/// One ready request, as far as planning cares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) key: Option<FusionKey>,
    /// Members that contribute the identity.
    pub(crate) absent: &'a [Rank],
    /// Bytes counted against the threshold.
    pub(crate) bytes: u64,
    /// Bytes in the message that announces it.
    pub(crate) wire_bytes: usize,
}

impl Candidate<'_> {
    /// Nothing that could run.
    pub(crate) const NONE: Self = Self {
        key: None,
        absent: &[],
        bytes: 0,
        wire_bytes: 0,
    };
}

/// Which requests run together. Kept from one time to the next for its memory.
#[derive(Debug, Default)]
pub(crate) struct FusionPlan {
    taken: Vec<bool>,
    /// Positions, one execution after the other.
    order: Vec<usize>,
    /// Where each execution ends in `order`.
    ends: Vec<usize>,
}

impl FusionPlan {
    /// Splits `count` requests into executions, in order. A request that does not fit is skipped, and later ones
    /// may still join, as long as fused and skipped bytes stay within the threshold.
    pub(crate) fn make<'a>(
        &mut self,
        count: usize,
        of: impl Fn(usize) -> Candidate<'a>,
        threshold_bytes: u64,
    ) {
        self.order.clear();
        self.ends.clear();
        self.taken.clear();
        self.taken.resize(count, false);
        for start in 0..count {
            if !self.taken[start] {
                self.fuse(start, &of, threshold_bytes);
                self.ends.push(self.order.len());
            }
        }
    }

    /// The executions, each as the positions of its requests.
    pub(crate) fn executions(&self) -> impl Iterator<Item = &[usize]> {
        let begins = std::iter::once(&0).chain(&self.ends);
        let spans = begins.zip(&self.ends);
        spans.map(|(begin, end)| &self.order[*begin..*end])
    }

    fn fuse<'a>(
        &mut self,
        start: usize,
        of: &impl Fn(usize) -> Candidate<'a>,
        threshold_bytes: u64,
    ) {
        let begin = self.order.len();
        self.order.push(start);
        let first = of(start);
        if first.key.is_none() {
            return;
        }
        let mut fused_bytes = first.bytes;
        let mut wire_bytes = first.wire_bytes;
        let mut skipped_bytes = 0u64;
        let mut skipped = 0;
        for at in start + 1..self.taken.len() {
            if self.taken[at] {
                continue;
            }
            let next = of(at);
            let fits = fused_bytes.saturating_add(next.bytes) <= threshold_bytes
                && wire_bytes + next.wire_bytes <= BATCH_BYTES_MAX
                && self.order.len() - begin < FUSED_ITEMS_MAX;
            if fits && next.key == first.key && next.absent == first.absent {
                fused_bytes += next.bytes;
                wire_bytes += next.wire_bytes;
                self.taken[at] = true;
                self.order.push(at);
                continue;
            }
            skipped += 1;
            skipped_bytes = skipped_bytes.saturating_add(next.bytes);
            if skipped > SKIPPED_MAX || fused_bytes.saturating_add(skipped_bytes) > threshold_bytes
            {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ReduceOp, Scale, TensorMeta};

    fn key(dtype: DType) -> Option<FusionKey> {
        let op = Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale::NONE,
        };
        let tensors = [TensorMeta::new(dtype, [1])].into();
        FusionKey::of(
            SetKey::GLOBAL,
            &RequestSignature {
                op,
                device: Device::Cpu,
                tensors,
            },
        )
    }

    fn planned(ready: &[(Option<FusionKey>, u64)], threshold: u64) -> Vec<Vec<usize>> {
        let ready: Vec<_> = ready
            .iter()
            .map(|(key, bytes)| Candidate {
                key: *key,
                absent: &[],
                bytes: *bytes,
                wire_bytes: 1,
            })
            .collect();
        plan(&ready, threshold)
    }

    fn plan(ready: &[Candidate<'_>], threshold: u64) -> Vec<Vec<usize>> {
        let mut plan = FusionPlan::default();
        plan.make(ready.len(), |at| ready[at], threshold);
        plan.executions().map(<[usize]>::to_vec).collect()
    }

    #[test]
    fn equal_kinds_fuse_up_to_the_threshold() {
        let a = key(DType::F32);
        assert_eq!(planned(&[(a, 4), (a, 4), (a, 4)], 8), [vec![0, 1], vec![2]]);
        assert_eq!(planned(&[(a, 100), (a, 4)], 8), [vec![0], vec![1]]);
    }

    #[test]
    fn looks_past_other_kinds_while_the_threshold_allows() {
        let (a, b) = (key(DType::F32), key(DType::F16));
        assert_eq!(
            planned(&[(a, 2), (b, 2), (a, 2), (b, 2)], 8),
            [vec![0, 2], vec![1, 3]]
        );
        assert_eq!(
            planned(&[(a, 2), (b, 7), (a, 2)], 8),
            [vec![0], vec![1], vec![2]]
        );
        assert_eq!(
            planned(&[(a, 2), (None, 2), (a, 2), (None, 1)], 8),
            [vec![0, 2], vec![1], vec![3]]
        );
    }

    #[test]
    fn a_zero_threshold_fuses_only_empty_tensors() {
        let a = key(DType::F32);
        assert_eq!(planned(&[(a, 0), (a, 0), (a, 1)], 0), [vec![0, 1], vec![2]]);
    }

    #[test]
    fn different_absent_ranks_do_not_fuse() {
        let one = Candidate {
            key: key(DType::F32),
            absent: &[],
            bytes: 1,
            wire_bytes: 1,
        };
        let other = Candidate {
            absent: &[Rank(1)],
            ..one
        };
        assert_eq!(plan(&[one, other, one], 100), [vec![0, 2], vec![1]]);
    }

    #[test]
    fn broadcasts_of_one_root_fuse_whatever_their_types() {
        let of = |root: u32, dtype: DType| {
            let tensors = [TensorMeta::new(dtype, [1])].into();
            let op = Op::Broadcast { root: Rank(root) };
            let signature = RequestSignature {
                op,
                device: Device::Cpu,
                tensors,
            };
            FusionKey::of(SetKey::GLOBAL, &signature)
        };
        let (a, b) = (of(0, DType::F32), of(0, DType::I64));
        assert_eq!(
            planned(&[(a, 2), (of(1, DType::F32), 2), (b, 2)], 8),
            [vec![0, 2], vec![1]]
        );
    }

    #[test]
    fn groups_of_several_types_run_alone() {
        let meta = |dtype| TensorMeta::new(dtype, [1]);
        let op = Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale::NONE,
        };
        let mixed = [meta(DType::F32), meta(DType::F16)].into();
        let signature = RequestSignature {
            op,
            device: Device::Cpu,
            tensors: mixed,
        };
        assert_eq!(FusionKey::of(SetKey::GLOBAL, &signature), None);
    }
}

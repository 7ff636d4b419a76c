//! Operands that are put where the peers will look for them before it is decided to run their operation.

use horovod_collectives::{self as collectives, Reduction, Segment, StagingContext};
use horovod_protocol::{Op, OperationTag, ProcessSetId, Rank};

use super::Host;
use crate::tensor::Tensor;

/// A tensor that may be staged before it is decided to run its operation.
pub(in crate::engine) struct PrestageOperand<'a> {
    pub(in crate::engine) set: ProcessSetId,
    pub(in crate::engine) members: &'a [Rank],
    pub(in crate::engine) op: &'a Op,
    pub(in crate::engine) tensor: &'a Tensor,
    pub(in crate::engine) tag: OperationTag,
    /// Ranks outnumber the cores of this host.
    pub(in crate::engine) oversubscribed: bool,
}

impl Host {
    /// Put the operand of an operation where the peers will look for it when it is decided to run it; `false` if it is
    /// not one for that.
    pub(in crate::engine) fn prestage(&mut self, operand: &PrestageOperand<'_>) -> bool {
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
}

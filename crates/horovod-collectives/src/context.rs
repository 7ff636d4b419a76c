//! The execution context of a collective: where it runs, with which peers, and how it is tuned.

use horovod_protocol::{OperationTag, Rank, Seq};
use horovod_transport::{Data, Idle};

use crate::layout::SetLayout;
use crate::scratch::Scratch;
use crate::select::Tuning;

/// Everything one operation runs with.
pub struct Ctx<'a> {
    /// The links and the arena of this generation.
    pub data: &'a mut Data,
    /// How to wait.
    pub idle: &'a mut dyn Idle,
    /// Members of the process set, ascending.
    pub members: &'a [Rank],
    /// This rank's index in `members`.
    pub me: usize,
    /// The operation's place in the job's total order. Several calls may share one, if all members make
    /// the same ones in the same order.
    pub seq: Seq,
    /// Which members share a host.
    pub layout: &'a SetLayout,
    /// Sizes and overrides; the same on all members.
    pub tuning: &'a Tuning,
    /// Under which the members may have staged the operand of [`crate::allreduce`] beforehand; see
    /// [`crate::prestage`].
    pub tag: Option<OperationTag>,
    /// State kept from one operation to the next; one per generation.
    pub scratch: &'a mut Scratch,
}

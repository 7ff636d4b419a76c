//! Adasum between hosts: the members of each host are averaged, then the averages of the hosts combine.
//!
//! Adasum is homogeneous of degree one. If all hosts have the same number of members, the result is Adasum of the
//! hosts' sums, divided by that number. Each host has the same weight, however many members it has.

use std::collections::BTreeSet;

use horovod_protocol::{DType, Rank, ReduceOp, Scale};
use horovod_transport::Topology;

use super::{Reduction, allreduce};
use crate::broadcast::{ByteSegment, broadcast};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::layout::SetLayout;
use crate::slices::Segment;

/// The members of a process set by host, for one of the members. Whether the members of a host share memory does not
/// matter.
#[derive(Clone, Debug)]
pub struct HostGroups {
    /// The members on this rank's host.
    inside: Group,
    /// The first member of each host, if this rank is one of them.
    between: Option<Group>,
}

/// Members that run collectives of their own.
#[derive(Clone, Debug)]
struct Group {
    members: Vec<Rank>,
    layout: SetLayout,
}

impl HostGroups {
    /// Groups these members (ascending global ranks, this rank among them) by host.
    ///
    /// # Panics
    /// As [`SetLayout::new`].
    pub fn new(topology: &Topology, members: &[Rank]) -> Self {
        let host = |rank: Rank| topology.peer(rank).host;
        let members = members.iter().copied();
        let inside = members.clone().filter(|r| host(*r) == topology.host());
        let mut seen = BTreeSet::new();
        let firsts: Vec<_> = members.filter(|rank| seen.insert(host(*rank))).collect();
        Self {
            inside: Group::new(topology, inside.collect()),
            between: firsts
                .contains(&topology.rank)
                .then(|| Group::new(topology, firsts)),
        }
    }
}

impl Group {
    fn new(topology: &Topology, members: Vec<Rank>) -> Self {
        let layout = SetLayout::new(topology, &members);
        Self { members, layout }
    }

    /// Returns this group's context, in place of the context of the whole set.
    fn context<'a>(&'a self, ctx: &'a mut Ctx<'_>) -> Ctx<'a> {
        Ctx {
            data: ctx.data,
            idle: ctx.idle,
            members: &self.members,
            me: self.layout.me(),
            seq: ctx.seq,
            layout: &self.layout,
            tuning: ctx.tuning,
            tag: None,
            scratch: ctx.scratch,
        }
    }
}

/// Averages the inputs of each host's members, combines the averages by Adasum, and gives every member the result.
///
/// All members pass segments of the same lengths; a null input counts as zeros. On each host the sum is divided by the
/// number of the host's members. If `red.divisor` is less than the number of all members, only the host's members with
/// inputs are counted. `red.op` is Adasum.
///
/// # Safety
/// As of [`allreduce`].
pub unsafe fn adasum_of_hosts(
    ctx: &mut Ctx<'_>,
    groups: &HostGroups,
    red: &Reduction,
    segs: &[Segment],
) -> Result<(), CollectiveError> {
    let Reduction {
        dtype,
        scale,
        divisor,
        ..
    } = *red;
    if !dtype.is_float() {
        return Err(CollectiveError::AdasumType(dtype));
    }
    let HostGroups { inside, between } = groups;
    let is_absent = segs.iter().any(|s| s.input.is_null() && s.elems > 0);
    let count_present = usize::try_from(divisor).is_ok_and(|n| n < ctx.members.len());
    let mut inside = inside.context(ctx);
    let mut present = i32::from(!is_absent);
    if count_present {
        let at = (&raw mut present).cast::<u8>();
        let count = Segment {
            input: at,
            output: at,
            elems: 1,
        };
        // SAFETY: one number of this type, which is ours.
        unsafe { allreduce(&mut inside, &plain(DType::I32, ReduceOp::Sum), &[count]) }?;
    }
    let members = u32::try_from(inside.members.len()).unwrap_or(u32::MAX);
    let own = u32::try_from(present).unwrap_or(0);
    let average = Reduction {
        dtype,
        op: ReduceOp::Average,
        scale: Scale {
            pre: scale.pre,
            post: 1.0,
        },
        divisor: if count_present { own.max(1) } else { members },
    };
    let inputs = segs.iter().map(|seg| {
        if !seg.input.is_null() {
            return *seg;
        }
        // SAFETY: the caller vouches for the outputs. All members of a host may be absent, so no input may stay null.
        unsafe { seg.output.write_bytes(0, seg.elems * dtype.size()) };
        in_place(seg)
    });
    let inputs: Vec<_> = inputs.collect();
    // SAFETY: the caller's promise.
    unsafe { allreduce(&mut inside, &average, &inputs) }?;
    let outputs: Vec<_> = segs.iter().map(in_place).collect();
    if let Some(between) = between {
        let combined = Reduction {
            scale: Scale {
                pre: 1.0,
                post: scale.post,
            },
            ..plain(dtype, ReduceOp::Adasum)
        };
        // SAFETY: the caller's promise.
        unsafe { allreduce(&mut between.context(ctx), &combined, &outputs) }?;
    }
    let bytes = segs.iter().map(|seg| ByteSegment {
        input: seg.output,
        output: seg.output,
        bytes: seg.elems * dtype.size(),
    });
    let bytes: Vec<_> = bytes.collect();
    // SAFETY: the caller's promise.
    unsafe { broadcast(&mut groups.inside.context(ctx), 0, &bytes) }
}

fn plain(dtype: DType, op: ReduceOp) -> Reduction {
    Reduction {
        dtype,
        op,
        scale: Scale::NONE,
        divisor: 1,
    }
}

fn in_place(seg: &Segment) -> Segment {
    Segment {
        input: seg.output.cast_const(),
        ..*seg
    }
}

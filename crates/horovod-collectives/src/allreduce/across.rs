//! Allreduce between members that do not share memory: one member per host, or all members of a set.
//!
//! Three algorithms differ in latency, bytes and connections, but not in the result. Every element is the sum of the
//! members' contributions in the order of members, in whatever part of the vector it lies. The result therefore does
//! not depend on which tensors the negotiation has fused. (The ring rounds halves at each member, the others once.)

use super::Reducer;
use super::exchange::Exchange;
use super::group::{Going, Group};
use super::pairwise::Pairwise;
use super::ring::Ring;
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::select::Across;
use crate::slices::{Segment, Vector};

/// Starts an allreduce of the vector among the group and lets `drive` complete it.
pub(super) fn with(
    ctx: &mut Ctx<'_>,
    algorithm: Across,
    reducer: &Reducer,
    vector: &Vector,
    group: Group<'_>,
    drive: impl FnOnce(&mut Ctx<'_>, &mut dyn Going) -> Result<(), CollectiveError>,
) -> Result<(), CollectiveError> {
    let size = vector.size();
    let inputs = as_bytes(ctx, vector, |segment| segment.input.cast_mut());
    let outputs = as_bytes(ctx, vector, |segment| segment.output);
    debug_assert_eq!(inputs.len(), vector.len() * size);
    let mut going: Box<dyn Going + '_> = match algorithm {
        Across::Exchange => Box::new(Exchange::new(reducer, vector, group)),
        Across::Pairwise => Box::new(Pairwise::new(
            ctx, reducer, vector, &inputs, &outputs, group,
        )),
        Across::Ring => Box::new(Ring::new(ctx, reducer, vector, &outputs, group)),
    };
    drive(ctx, going.as_mut())?;
    going.put_back(ctx);
    ctx.scratch.put_vector(inputs);
    ctx.scratch.put_vector(outputs);
    Ok(())
}

/// Returns one side of a vector as bytes; an input is only read.
fn as_bytes(ctx: &mut Ctx<'_>, vector: &Vector, side: impl Fn(&Segment) -> *mut u8) -> Vector {
    let size = vector.size();
    ctx.scratch.vector(
        1,
        vector.iter().map(|segment| Segment {
            input: side(segment).cast_const(),
            output: side(segment),
            elems: segment.elems * size,
        }),
    )
}

/// Runs among all members, without shared memory.
pub(super) fn run(
    ctx: &mut Ctx<'_>,
    algorithm: Across,
    reducer: &Reducer,
    vector: &Vector,
) -> Result<(), CollectiveError> {
    let members: Vec<usize> = (0..ctx.members.len()).collect();
    let group = Group {
        members: &members,
        me: ctx.me,
    };
    let ready = sendable(ctx, reducer, vector, false);
    let result = with(ctx, algorithm, reducer, &ready, group, to_the_end);
    ctx.scratch.put_vector(ready);
    result
}

/// Returns the vector with inputs that can be sent as they are. Where this rank does not contribute, the neutral
/// element is written to the outputs and sent from there. With `prescaled` and a prescale factor, all inputs are scaled
/// into the outputs and sent from there.
pub(super) fn sendable(
    ctx: &mut Ctx<'_>,
    reducer: &Reducer,
    vector: &Vector,
    prescaled: bool,
) -> Vector {
    let size = vector.size();
    let prescaled = prescaled && reducer.spec.pre != 1.0;
    ctx.scratch.vector(
        size,
        vector.iter().map(|segment| {
            if !prescaled && !segment.input.is_null() {
                return *segment;
            }
            // SAFETY: the caller of the collective vouches for the segments.
            unsafe { reducer.begin(segment.input, segment.output, segment.elems) };
            Segment {
                input: segment.output.cast_const(),
                ..*segment
            }
        }),
    )
}

/// Completes an allreduce whose inputs are all ready.
pub(super) fn to_the_end(ctx: &mut Ctx<'_>, going: &mut dyn Going) -> Result<(), CollectiveError> {
    let mut spins = 0;
    while !going.is_done() {
        if going.step(ctx, usize::MAX)? {
            spins = 0;
        } else {
            ctx.idle.idle(spins)?;
            spins = u32::saturating_add(spins, 1);
        }
    }
    Ok(())
}

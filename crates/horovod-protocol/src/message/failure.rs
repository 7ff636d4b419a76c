//! Encoding of failures: why operations fail and jobs end.

use super::bad_tag;
use super::codec::{get, put};
use crate::error::{Leaving, StopReason};
use crate::limits::{DIMS_MAX, NAME_BYTES_MAX, TEXT_BYTES_MAX};
use crate::lost::{LossCause, PeerLost};
use crate::refusal::{Difference, Impossible, Mismatch, Refusal};
use crate::shape::Shape;
use crate::types::{DType, ProcessSetId, Rank, ReduceOp, Scale};
use crate::wire::{DecodeError, Reader, Writer};

/// Bytes of the place in its group that follows a name.
const MEMBER_BYTES_MAX: usize = 32;

pub(super) fn put_refusal(w: &mut Writer<'_>, refusal: &Refusal) {
    match refusal {
        Refusal::Mismatch(mismatch) => {
            w.u8(0);
            w.str(&mismatch.tensor);
            mismatch.ranks.iter().for_each(|rank| put_rank(w, *rank));
            put_difference(w, &mismatch.difference);
        }
        Refusal::Impossible { tensor, why } => {
            w.u8(1);
            w.str(tensor);
            put_impossible(w, why);
        }
        Refusal::DuplicateSet { ranks } => {
            w.u8(2);
            put::ranks(w, ranks);
        }
        Refusal::TooManySets => w.u8(3),
    }
}

pub(super) fn get_refusal(r: &mut Reader<'_>) -> Result<Refusal, DecodeError> {
    Ok(match r.u8("refusal")? {
        0 => Refusal::Mismatch(Box::new(Mismatch {
            tensor: tensor(r)?,
            ranks: pair(r, get::rank)?,
            difference: get_difference(r)?,
        })),
        1 => Refusal::Impossible {
            tensor: tensor(r)?,
            why: get_impossible(r)?,
        },
        2 => Refusal::DuplicateSet {
            ranks: get::ranks(r)?,
        },
        3 => Refusal::TooManySets,
        tag => return Err(bad_tag("refusal", tag)),
    })
}

fn put_difference(w: &mut Writer<'_>, difference: &Difference) {
    match difference {
        Difference::DataTypes(types) => {
            w.u8(0);
            types.iter().for_each(|dtype| w.u8(*dtype as u8));
        }
        Difference::Operations(ops) => {
            w.u8(1);
            ops.iter().for_each(|op| put::op(w, op));
        }
        Difference::GroupSizes(sizes) => {
            w.u8(2);
            sizes.iter().for_each(|size| w.varint(*size));
        }
        Difference::Shapes { op, shapes } => {
            w.u8(3);
            put::op(w, op);
            shapes.iter().for_each(|shape| put::dims(w, shape));
        }
        Difference::Factors(scales) => {
            w.u8(4);
            for scale in scales {
                w.u64(scale.pre.to_bits());
                w.u64(scale.post.to_bits());
            }
        }
        Difference::Reductions(ops) => {
            w.u8(5);
            ops.iter().for_each(|op| w.u8(*op as u8));
        }
        Difference::Roots(roots) => {
            w.u8(6);
            roots.iter().for_each(|root| put_rank(w, *root));
        }
        Difference::NewSets(sets) => {
            w.u8(7);
            sets.iter().for_each(|ranks| put::ranks(w, ranks));
        }
        Difference::RemovedSets(ids) => {
            w.u8(8);
            ids.iter().for_each(|id| w.varint(u64::from(id.0)));
        }
        Difference::Devices { op, devices } => {
            w.u8(9);
            put::op(w, op);
            devices.iter().for_each(|device| put::device(w, *device));
        }
        Difference::Dimensions { op, counts } => {
            w.u8(10);
            put::op(w, op);
            counts.iter().for_each(|count| w.varint(*count));
        }
        Difference::Dimension { op, index, sizes } => {
            w.u8(11);
            put::op(w, op);
            w.varint(*index);
            sizes.iter().for_each(|size| w.varint(*size));
        }
    }
}

fn get_difference(r: &mut Reader<'_>) -> Result<Difference, DecodeError> {
    Ok(match r.u8("difference")? {
        0 => Difference::DataTypes(pair(r, |r| {
            let code = r.u8("element type")?;
            DType::from_code(code).ok_or(bad_tag("element type", code))
        })?),
        1 => Difference::Operations(pair(r, get::op)?),
        2 => Difference::GroupSizes(pair(r, |r| r.varint("group size"))?),
        3 => Difference::Shapes {
            op: get::op(r)?,
            shapes: pair(r, |r| get::dims(r, DIMS_MAX).map(Shape::from))?,
        },
        4 => Difference::Factors(pair(r, |r| {
            Ok(Scale {
                pre: f64::from_bits(r.u64("prescale")?),
                post: f64::from_bits(r.u64("postscale")?),
            })
        })?),
        5 => Difference::Reductions(pair(r, |r| {
            let code = r.u8("reduction")?;
            ReduceOp::from_code(code).ok_or(bad_tag("reduction", code))
        })?),
        6 => Difference::Roots(pair(r, get::rank)?),
        7 => Difference::NewSets(pair(r, get::ranks)?),
        8 => Difference::RemovedSets(pair(r, |r| {
            r.varint_u32("process set id").map(ProcessSetId)
        })?),
        9 => Difference::Devices {
            op: get::op(r)?,
            devices: pair(r, get::device)?,
        },
        10 => Difference::Dimensions {
            op: get::op(r)?,
            counts: pair(r, |r| r.varint("dimensions"))?,
        },
        11 => Difference::Dimension {
            op: get::op(r)?,
            index: r.varint("dimension")?,
            sizes: pair(r, |r| r.varint("size"))?,
        },
        tag => return Err(bad_tag("difference", tag)),
    })
}

fn put_impossible(w: &mut Writer<'_>, why: &Impossible) {
    match why {
        Impossible::Joined { op } => {
            w.u8(0);
            put::op(w, op);
        }
        Impossible::NoRows { op } => {
            w.u8(1);
            put::op(w, op);
        }
        Impossible::TooManyParts { tensors, members } => {
            w.u8(2);
            w.varint(*tensors);
            w.varint(*members);
        }
        Impossible::TooLarge => w.u8(3),
    }
}

fn get_impossible(r: &mut Reader<'_>) -> Result<Impossible, DecodeError> {
    Ok(match r.u8("impossibility")? {
        0 => Impossible::Joined { op: get::op(r)? },
        1 => Impossible::NoRows { op: get::op(r)? },
        2 => Impossible::TooManyParts {
            tensors: r.varint("tensors")?,
            members: r.varint("members")?,
        },
        3 => Impossible::TooLarge,
        tag => return Err(bad_tag("impossibility", tag)),
    })
}

pub(super) fn put_stop(w: &mut Writer<'_>, why: &StopReason) {
    match why {
        StopReason::Left(Leaving::Asked) => w.u8(0),
        StopReason::Left(Leaving::Ended) => w.u8(1),
        StopReason::Left(Leaving::Failed) => w.u8(2),
        StopReason::Stalled { tensor } => {
            w.u8(3);
            w.str(tensor);
        }
        StopReason::Deadlock { report } => {
            w.u8(4);
            w.str(report);
        }
        StopReason::ReplicasDiffer { report } => {
            w.u8(5);
            w.str(report);
        }
    }
}

pub(super) fn get_stop(r: &mut Reader<'_>) -> Result<StopReason, DecodeError> {
    Ok(match r.u8("reason to stop")? {
        0 => StopReason::Left(Leaving::Asked),
        1 => StopReason::Left(Leaving::Ended),
        2 => StopReason::Left(Leaving::Failed),
        3 => StopReason::Stalled { tensor: tensor(r)? },
        4 => StopReason::Deadlock { report: text(r)? },
        5 => StopReason::ReplicasDiffer { report: text(r)? },
        tag => return Err(bad_tag("reason to stop", tag)),
    })
}

pub(super) fn put_lost(w: &mut Writer<'_>, lost: &PeerLost) {
    put_rank(w, lost.rank);
    w.str(&lost.host);
    let (tag, text) = match &lost.cause {
        LossCause::Ended(text) => (0, text),
        LossCause::Connection(text) => (1, text),
        LossCause::CannotGoOn(text) => (2, text),
        LossCause::BrokeProtocol(text) => (3, text),
        LossCause::Unreadable(text) => (4, text),
        LossCause::Left => return w.u8(5),
        LossCause::Silent { seconds } => {
            w.u8(6);
            return w.varint(*seconds);
        }
        LossCause::Altered {
            from,
            from_host,
            what,
        } => {
            w.u8(7);
            put_rank(w, *from);
            w.str(from_host);
            return w.str(what);
        }
        LossCause::Stuck(text) => (8, text),
    };
    w.u8(tag);
    w.str(text);
}

pub(super) fn get_lost(r: &mut Reader<'_>) -> Result<PeerLost, DecodeError> {
    Ok(PeerLost {
        rank: get::rank(r)?,
        host: host(r)?,
        cause: match r.u8("cause")? {
            0 => LossCause::Ended(text(r)?),
            1 => LossCause::Connection(text(r)?),
            2 => LossCause::CannotGoOn(text(r)?),
            3 => LossCause::BrokeProtocol(text(r)?),
            4 => LossCause::Unreadable(text(r)?),
            5 => LossCause::Left,
            6 => LossCause::Silent {
                seconds: r.varint("seconds of silence")?,
            },
            7 => LossCause::Altered {
                from: get::rank(r)?,
                from_host: host(r)?,
                what: text(r)?,
            },
            8 => LossCause::Stuck(text(r)?),
            tag => return Err(bad_tag("cause", tag)),
        },
    })
}

fn put_rank(w: &mut Writer<'_>, rank: Rank) {
    w.varint(u64::from(rank.0));
}

fn pair<T>(
    r: &mut Reader<'_>,
    mut one: impl FnMut(&mut Reader<'_>) -> Result<T, DecodeError>,
) -> Result<[T; 2], DecodeError> {
    Ok([one(r)?, one(r)?])
}

fn tensor(r: &mut Reader<'_>) -> Result<String, DecodeError> {
    Ok(r.str(NAME_BYTES_MAX + MEMBER_BYTES_MAX, "tensor name")?
        .to_owned())
}

fn host(r: &mut Reader<'_>) -> Result<String, DecodeError> {
    Ok(r.str(NAME_BYTES_MAX, "host")?.to_owned())
}

fn text(r: &mut Reader<'_>) -> Result<String, DecodeError> {
    Ok(r.str(TEXT_BYTES_MAX, "cause")?.to_owned())
}

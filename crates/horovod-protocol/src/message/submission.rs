//! Encoding of the ranks' submissions.

use super::codec::{SlotDelta, get, put};
use super::failure::{get_lost, put_lost};
use super::{SetKey, SlotRun, Submission, bad_tag};
use crate::error::Leaving;
use crate::limits::GROUP_TENSORS_MAX;
use crate::signature::RequestSignature;
use crate::wire::{DecodeError, Reader, Writer};
use std::sync::Arc;

pub(super) fn put_submission(w: &mut Writer<'_>, item: &Submission, delta: &mut SlotDelta) {
    match item {
        Submission::Hits(run) => {
            w.u8(0);
            delta.put(w, *run);
        }
        Submission::GatherHit { slot, first_dims } => {
            w.u8(1);
            let (first, len) = (*slot, 1);
            delta.put(w, SlotRun { first, len });
            put::dims(w, first_dims);
        }
        Submission::New {
            set,
            name,
            signature,
        } => {
            w.u8(2);
            w.varint(set.0);
            w.str(name);
            put::op(w, &signature.op);
            put::device(w, signature.device);
            put::tensors(w, &signature.tensors);
        }
        Submission::Join => w.u8(3),
        Submission::Shutdown(Leaving::Asked) => w.u8(4),
        Submission::Shutdown(Leaving::Ended) => w.u8(8),
        Submission::Shutdown(Leaving::Failed) => w.u8(9),
        Submission::ShutdownAck => w.u8(5),
        Submission::Of {
            ranks,
            subtrees,
            item,
        } => {
            w.u8(6);
            put::ranks(w, ranks);
            put::ranks(w, subtrees);
            put_submission(w, item, delta);
        }
        Submission::Lost(lost) => {
            w.u8(7);
            put_lost(w, lost);
        }
    }
}

/// Anything but an `Of`, so that nothing nests.
pub(super) fn get_submission(
    r: &mut Reader<'_>,
    tag: u8,
    delta: &mut SlotDelta,
) -> Result<Submission, DecodeError> {
    Ok(match tag {
        0 => Submission::Hits(delta.get(r)?),
        1 => Submission::GatherHit {
            slot: delta.get(r)?.first,
            first_dims: get::dims(r, GROUP_TENSORS_MAX)?,
        },
        2 => Submission::New {
            set: SetKey(r.varint("process set")?),
            name: get::name(r)?,
            signature: Arc::new(RequestSignature {
                op: get::op(r)?,
                device: get::device(r)?,
                tensors: get::tensors(r)?,
            }),
        },
        3 => Submission::Join,
        4 => Submission::Shutdown(Leaving::Asked),
        8 => Submission::Shutdown(Leaving::Ended),
        9 => Submission::Shutdown(Leaving::Failed),
        5 => Submission::ShutdownAck,
        7 => Submission::Lost(get_lost(r)?),
        tag => return Err(bad_tag("submission", tag)),
    })
}

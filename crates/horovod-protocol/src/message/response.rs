//! Encoding of the coordinator's responses.

use super::codec::{SlotDelta, get, put};
use super::failure::{get_lost, get_refusal, get_stop, put_lost, put_refusal, put_stop};
use super::{Item, Response, SetKey, Slot, SlotRun, bad_tag};
use crate::limits::{FIRST_DIMS_MAX, FUSED_ITEMS_MAX, TUNED_VALUES_MAX};
use crate::types::{ProcessSetId, Seq};
use crate::wire::{DecodeError, Reader, Writer};
use std::sync::Arc;

pub(super) fn put_response(w: &mut Writer<'_>, response: &Response, delta: &mut SlotDelta) {
    match response {
        Response::Execute {
            seq,
            set,
            op,
            device,
            absent,
            items,
        } => {
            w.u8(0);
            w.varint(seq.0);
            w.varint(set.0);
            put::op(w, op);
            put::device(w, *device);
            put::ranks(w, absent);
            w.varint(items.len() as u64);
            for item in items {
                put_item(w, item, delta);
            }
        }
        Response::Fail {
            set,
            name,
            absent,
            error,
        } => {
            w.u8(1);
            w.varint(set.0);
            w.str(name);
            put::ranks(w, absent);
            put_refusal(w, error);
        }
        Response::Tuned { seq, values } => {
            w.u8(2);
            w.varint(seq.0);
            put::dims(w, values);
        }
        Response::Joined { last } => {
            w.u8(3);
            w.varint(u64::from(last.0));
        }
        Response::SetAdded {
            name,
            key,
            id,
            ranks,
        } => {
            w.u8(4);
            w.str(name);
            w.varint(key.0);
            w.varint(u64::from(id.0));
            put::ranks(w, ranks);
        }
        Response::SetRemoved { name, key } => {
            w.u8(5);
            w.str(name);
            put::option(w, key.map(|k| k.0));
        }
        Response::Shutdown { by, why } => {
            w.u8(6);
            w.varint(u64::from(by.0));
            put_stop(w, why);
        }
        Response::Stopped => w.u8(7),
        Response::Lost(lost) => {
            w.u8(8);
            put_lost(w, lost);
        }
    }
}

/// Reads into `old`, whose lists are used again where they fit.
pub(super) fn get_response(
    r: &mut Reader<'_>,
    delta: &mut SlotDelta,
    old: &mut Response,
) -> Result<(), DecodeError> {
    let tag = r.u8("response")?;
    let (mut items, nobody) = match old {
        Response::Execute { items, absent, .. } => {
            let nobody = absent.is_empty().then(|| Arc::clone(absent));
            (std::mem::take(items), nobody)
        }
        _ => (Vec::new(), None),
    };
    *old = match tag {
        0 => Response::Execute {
            seq: Seq(r.varint("sequence number")?),
            set: SetKey(r.varint("process set")?),
            op: get::op(r)?,
            device: get::device(r)?,
            absent: match nobody {
                Some(nobody) if r.skip_zero() => nobody,
                _ => get::ranks(r)?,
            },
            items: {
                items.clear();
                for _ in 0..r.count(FUSED_ITEMS_MAX, 1, "items")? {
                    items.push(get_item(r, delta)?);
                }
                items
            },
        },
        1 => Response::Fail {
            set: SetKey(r.varint("process set")?),
            name: get::name(r)?,
            absent: get::ranks(r)?,
            error: get_refusal(r)?,
        },
        2 => Response::Tuned {
            seq: Seq(r.varint("sequence number")?),
            values: get::list(r, TUNED_VALUES_MAX, 1, "tuned values", |r| {
                r.varint("tuned value")
            })?
            .into(),
        },
        3 => Response::Joined {
            last: get::rank(r)?,
        },
        4 => Response::SetAdded {
            name: get::name(r)?,
            key: SetKey(r.varint("process set")?),
            id: ProcessSetId(r.varint_u32("process set id")?),
            ranks: get::ranks(r)?,
        },
        5 => Response::SetRemoved {
            name: get::name(r)?,
            key: get::option(r, "process set")?.map(SetKey),
        },
        6 => Response::Shutdown {
            by: get::rank(r)?,
            why: get_stop(r)?,
        },
        7 => Response::Stopped,
        8 => Response::Lost(get_lost(r)?),
        tag => return Err(bad_tag("response", tag)),
    };
    Ok(())
}

fn put_item(w: &mut Writer<'_>, item: &Item, delta: &mut SlotDelta) {
    match item {
        Item::Slots(run) => {
            w.u8(0);
            delta.put(w, *run);
        }
        Item::GatherSlot { slot, first_dims } => {
            w.u8(1);
            delta.put(
                w,
                SlotRun {
                    first: *slot,
                    len: 1,
                },
            );
            put::dims(w, first_dims);
        }
        Item::New {
            name,
            tensors,
            slot,
            first_dims,
        } => {
            w.u8(2);
            w.str(name);
            put::tensors(w, tensors);
            put::option(w, slot.map(|s| s.0));
            put::dims(w, first_dims);
        }
    }
}

fn get_item(r: &mut Reader<'_>, delta: &mut SlotDelta) -> Result<Item, DecodeError> {
    Ok(match r.u8("item")? {
        0 => Item::Slots(delta.get(r)?),
        1 => Item::GatherSlot {
            slot: delta.get(r)?.first,
            first_dims: get::dims(r, FIRST_DIMS_MAX)?,
        },
        2 => Item::New {
            name: get::name(r)?,
            tensors: get::tensors(r)?,
            slot: get::option(r, "slot")?.map(Slot),
            first_dims: get::dims(r, FIRST_DIMS_MAX)?,
        },
        tag => return Err(bad_tag("item", tag)),
    })
}

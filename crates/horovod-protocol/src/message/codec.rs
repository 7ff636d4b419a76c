//! Encoding of the parts that several messages share.

use crate::types::Rank;
use crate::wire::{DecodeError, Reader, Writer};

use super::{Slot, SlotRun};

/// Beside an element type: an order in memory follows the dimensions. Row-major takes no byte.
const ORDERED: u8 = 0x80;

/// Slots relative to the slot after the previous run: in a steady step nearly always zero.
#[derive(Default)]
pub(super) struct SlotDelta {
    next: u64,
}

impl SlotDelta {
    pub(super) fn put(&mut self, w: &mut Writer<'_>, run: SlotRun) {
        w.signed(run.first.0.wrapping_sub(self.next) as i64);
        w.varint(u64::from(run.len));
        self.next = run.first.0.wrapping_add(u64::from(run.len));
    }

    pub(super) fn get(&mut self, r: &mut Reader<'_>) -> Result<SlotRun, DecodeError> {
        let first = self.next.wrapping_add(r.signed("slot")? as u64);
        let len = r.varint_u32("slot run")?;
        if len == 0 || first.checked_add(u64::from(len)).is_none() {
            return Err(DecodeError::BadValue {
                what: "slot run",
                value: u64::from(len),
            });
        }
        self.next = first + u64::from(len);
        Ok(SlotRun {
            first: Slot(first),
            len,
        })
    }
}

pub(super) mod put {
    //! Writing.
    use super::ORDERED;
    use super::{Rank, Writer};
    use crate::types::{Device, Op, ReduceOp, Scale, TensorMeta};

    pub(in super::super) fn option(w: &mut Writer<'_>, value: Option<u64>) {
        match value {
            None => w.u8(0),
            Some(value) => {
                w.u8(1);
                w.varint(value);
            }
        }
    }

    pub(in super::super) fn dims(w: &mut Writer<'_>, dims: &[u64]) {
        w.varint(dims.len() as u64);
        for dim in dims {
            w.varint(*dim);
        }
    }

    /// Ascending ranks as gaps.
    pub(in super::super) fn ranks(w: &mut Writer<'_>, ranks: &[Rank]) {
        w.varint(ranks.len() as u64);
        let mut next = 0;
        for rank in ranks {
            w.signed(i64::from(rank.0) - next);
            next = i64::from(rank.0) + 1;
        }
    }

    pub(in super::super) fn device(w: &mut Writer<'_>, device: Device) {
        match device {
            Device::Cpu => w.u8(0),
            Device::Gpu => w.u8(1),
            Device::Other(kind) => {
                w.u8(2);
                w.u8(kind);
            }
        }
    }

    pub(in super::super) fn tensors(w: &mut Writer<'_>, tensors: &[TensorMeta]) {
        w.varint(tensors.len() as u64);
        for tensor in tensors {
            if tensor.order.is_row_major() {
                w.u8(tensor.dtype as u8);
                dims(w, &tensor.shape);
            } else {
                w.u8(tensor.dtype as u8 | ORDERED);
                dims(w, &tensor.shape);
                w.varint(tensor.order.code());
            }
        }
    }

    pub(in super::super) fn op(w: &mut Writer<'_>, op: &Op) {
        match op {
            Op::Allreduce { op, scale } => {
                w.u8(0);
                reduction(w, *op, *scale);
            }
            Op::Allgather => w.u8(1),
            Op::Broadcast { root } => {
                w.u8(2);
                w.varint(u64::from(root.0));
            }
            Op::Alltoall => w.u8(3),
            Op::Reducescatter { op, scale } => {
                w.u8(4);
                reduction(w, *op, *scale);
            }
            Op::Barrier => w.u8(5),
            Op::Join => w.u8(6),
            Op::AddProcessSet { ranks: members } => {
                w.u8(7);
                ranks(w, members);
            }
            Op::RemoveProcessSet { set } => {
                w.u8(8);
                w.varint(u64::from(set.0));
            }
        }
    }

    fn reduction(w: &mut Writer<'_>, op: ReduceOp, scale: Scale) {
        w.u8(op as u8);
        if scale == Scale::NONE {
            w.u8(0);
        } else {
            w.u8(1);
            w.u64(scale.pre.to_bits());
            w.u64(scale.post.to_bits());
        }
    }
}

pub(super) mod get {
    //! Reading.
    use super::{DecodeError, ORDERED, Rank, Reader};
    use crate::limits::{DIMS_MAX, GROUP_TENSORS_MAX, NAME_BYTES_MAX, RANKS_MAX};
    use crate::memory_order::MemoryOrder;
    use crate::types::{DType, Device, Op, ProcessSetId, ReduceOp, Scale, TensorMeta};
    use std::sync::Arc;

    pub(in super::super) fn list<T>(
        r: &mut Reader<'_>,
        max: usize,
        item_bytes_min: usize,
        what: &'static str,
        mut item: impl FnMut(&mut Reader<'_>) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let count = r.count(max, item_bytes_min, what)?;
        // An item in memory is larger than on the wire: let the list grow as items turn out real.
        let mut items = Vec::with_capacity(count.min(1024));
        for _ in 0..count {
            items.push(item(r)?);
        }
        Ok(items)
    }

    pub(in super::super) fn option(
        r: &mut Reader<'_>,
        what: &'static str,
    ) -> Result<Option<u64>, DecodeError> {
        match r.u8(what)? {
            0 => Ok(None),
            1 => r.varint(what).map(Some),
            tag => Err(bad(what, tag)),
        }
    }

    pub(in super::super) fn dims(r: &mut Reader<'_>, max: usize) -> Result<Vec<u64>, DecodeError> {
        list(r, max, 1, "dimensions", |r| r.varint("dimension"))
    }

    pub(in super::super) fn name(r: &mut Reader<'_>) -> Result<Arc<str>, DecodeError> {
        r.str(NAME_BYTES_MAX, "name").map(Arc::from)
    }

    pub(in super::super) fn rank(r: &mut Reader<'_>) -> Result<Rank, DecodeError> {
        let value = r.varint_u32("rank")?;
        if value as usize >= RANKS_MAX {
            return Err(DecodeError::BadValue {
                what: "rank",
                value: u64::from(value),
            });
        }
        Ok(Rank(value))
    }

    pub(in super::super) fn ranks<C: FromIterator<Rank>>(
        r: &mut Reader<'_>,
    ) -> Result<C, DecodeError> {
        let mut next = 0i64;
        let ranks = list(r, RANKS_MAX, 1, "ranks", |r| {
            let gap = r.signed("rank")?;
            let bad = DecodeError::BadValue {
                what: "rank",
                value: gap as u64,
            };
            let rank = next.checked_add(gap).ok_or(bad.clone())?;
            if !(0..RANKS_MAX as i64).contains(&rank) {
                return Err(bad);
            }
            next = rank + 1;
            Ok(Rank(rank as u32))
        })?;
        Ok(ranks.into_iter().collect())
    }

    pub(in super::super) fn device(r: &mut Reader<'_>) -> Result<Device, DecodeError> {
        match r.u8("device")? {
            0 => Ok(Device::Cpu),
            1 => Ok(Device::Gpu),
            2 => Ok(Device::Other(r.u8("kind of device")?)),
            tag => Err(bad("device", tag)),
        }
    }

    pub(in super::super) fn tensors(r: &mut Reader<'_>) -> Result<Arc<[TensorMeta]>, DecodeError> {
        let tensors = list(r, GROUP_TENSORS_MAX, 2, "tensors", |r| {
            let code = r.u8("element type")?;
            let dtype = DType::from_code(code & !ORDERED).ok_or(bad("element type", code))?;
            let meta = TensorMeta::new(dtype, dims(r, DIMS_MAX)?);
            if code & ORDERED == 0 {
                return Ok(meta);
            }
            let what = "memory order";
            let value = r.varint(what)?;
            let order = MemoryOrder::from_code(value, &meta.shape)
                .filter(|order| !order.is_row_major())
                .ok_or(DecodeError::BadValue { what, value })?;
            Ok(meta.in_order(order))
        })?;
        Ok(tensors.into())
    }

    pub(in super::super) fn op(r: &mut Reader<'_>) -> Result<Op, DecodeError> {
        Ok(match r.u8("operation")? {
            0 => {
                let (op, scale) = reduction(r)?;
                Op::Allreduce { op, scale }
            }
            1 => Op::Allgather,
            2 => Op::Broadcast { root: rank(r)? },
            3 => Op::Alltoall,
            4 => {
                let (op, scale) = reduction(r)?;
                Op::Reducescatter { op, scale }
            }
            5 => Op::Barrier,
            6 => Op::Join,
            7 => Op::AddProcessSet { ranks: ranks(r)? },
            8 => Op::RemoveProcessSet {
                set: ProcessSetId(r.varint_u32("process set id")?),
            },
            tag => return Err(bad("operation", tag)),
        })
    }

    fn reduction(r: &mut Reader<'_>) -> Result<(ReduceOp, Scale), DecodeError> {
        let code = r.u8("reduction")?;
        let op = ReduceOp::from_code(code).ok_or(bad("reduction", code))?;
        let scale = match r.u8("scale")? {
            0 => Scale::NONE,
            1 => Scale {
                pre: f64::from_bits(r.u64("prescale")?),
                post: f64::from_bits(r.u64("postscale")?),
            },
            tag => return Err(bad("scale", tag)),
        };
        Ok((op, scale))
    }

    fn bad(what: &'static str, tag: u8) -> DecodeError {
        DecodeError::BadValue {
            what,
            value: u64::from(tag),
        }
    }
}

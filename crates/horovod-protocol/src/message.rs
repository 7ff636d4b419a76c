//! What ranks and the coordinator say to each other, with bounded encoding and decoding.
//!
//! Messages of one link arrive in order. Repeated work travels as cache slots, and neighbouring
//! slots as runs, so that a step of a thousand known tensors is a few bytes.

use crate::content::Content;
use crate::error::{OpError, OpErrorKind, PeerLost};
use crate::limits::{
    BATCH_ITEMS_MAX, FIRST_DIMS_MAX, FUSED_ITEMS_MAX, MESSAGE_BYTES_MAX, RETIRED_SLOTS_MAX,
    TEXT_BYTES_MAX, TUNED_VALUES_MAX,
};
use crate::types::{Device, Generation, Op, ProcessSetId, Rank, Seq, TensorMeta};
use crate::wire::{DecodeError, Reader, Writer};
use std::sync::Arc;

mod codec;
mod submission;
use codec::{SlotDelta, get, put};
use submission::{get_lost, get_submission, put_lost, put_submission};

/// One registration of a process set. Never reused, unlike [`ProcessSetId`], so a late message for
/// a removed set cannot be taken for its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetKey(pub u64);

impl SetKey {
    /// The set of all ranks.
    pub const GLOBAL: Self = Self(0);
}

/// Place of an agreed request in the response cache. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u64);

/// `len` neighbouring slots from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRun {
    /// The first slot.
    pub first: Slot,
    /// How many; at least one.
    pub len: u32,
}

impl SlotRun {
    /// The slots of the run; ends early rather than overflow.
    pub fn slots(self) -> impl Iterator<Item = Slot> {
        (0..u64::from(self.len))
            .map_while(move |i| self.first.0.checked_add(i))
            .map(Slot)
    }

    /// Grows the run by `next` if that begins where it ends.
    pub(crate) fn append(&mut self, next: Self) -> bool {
        let fits = self.first.0.checked_add(u64::from(self.len)) == Some(next.first.0);
        match self.len.checked_add(next.len) {
            Some(len) if fits => {
                self.len = len;
                true
            }
            _ => false,
        }
    }

    /// Grows the run by `slot` if that is its next neighbour.
    pub(crate) fn extend(&mut self, slot: Slot) -> bool {
        let fits = self.first.0.checked_add(u64::from(self.len)) == Some(slot.0);
        if fits && self.len < u32::MAX {
            self.len += 1;
            return true;
        }
        false
    }
}

/// From a rank to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToCoordinator {
    /// The life of the job that this belongs to.
    pub generation: Generation,
    /// Highest [`ToWorker::mark`] seen: which evictions this rank knows of.
    pub seen: u64,
    /// In the order of submission.
    pub items: Vec<Submission>,
}

/// One thing that a rank tells the coordinator, or an aggregator for everybody who speaks through it
/// (of the process set concerned), unless it says [`Submission::Of`] whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Submission {
    /// Requests equal to those agreed earlier under these slots.
    Hits(SlotRun),
    /// As `Hits`, for an allgather: with this rank's rows, one number per tensor.
    GatherHit {
        /// The slot.
        slot: Slot,
        /// This rank's first dimension of every tensor.
        first_dims: Vec<u64>,
    },
    /// A request in full.
    New {
        /// The set it is for.
        set: SetKey,
        /// Full key.
        name: Arc<str>,
        /// What the ranks must agree on.
        content: Arc<Content>,
    },
    /// This rank has no more data.
    Join,
    /// Ask all ranks to stop.
    Shutdown,
    /// This rank has ended its operations because of [`Response::Shutdown`].
    ShutdownAck,
    /// From an aggregator: what only some of those say who speak through it.
    Of {
        /// These ranks, ascending.
        ranks: Vec<Rank>,
        /// And all members among those who speak through these aggregators, ascending.
        subtrees: Vec<Rank>,
        /// What they say; not an `Of` again.
        item: Box<Submission>,
    },
    /// A rank is gone or cannot go on: the generation is over.
    Lost(PeerLost),
}

/// From the coordinator to a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToWorker {
    /// The life of the job that this belongs to.
    pub generation: Generation,
    /// Grows with every eviction; echoed in [`ToCoordinator::seen`].
    pub mark: u64,
    /// In the order that every member of a set sees.
    pub responses: Vec<Arc<Response>>,
    /// Slots to forget after the responses.
    pub evicted: Vec<SlotRun>,
}

/// One decision of the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
    /// Run these requests together.
    Execute {
        /// Place in the job's one order.
        seq: Seq,
        /// Its members run it.
        set: SetKey,
        /// What to run.
        op: Op,
        /// Where the tensors are.
        device: Device,
        /// Members that have joined and contribute the identity, ascending.
        absent: Arc<[Rank]>,
        /// In order.
        items: Vec<Item>,
    },
    /// The request of this name failed on every member that asked for it.
    Fail {
        /// The set.
        set: SetKey,
        /// Full key.
        name: Arc<str>,
        /// Members that had joined and are not concerned.
        absent: Arc<[Rank]>,
        /// Why.
        error: OpError,
    },
    /// Every member reached the barrier.
    BarrierDone {
        /// The set.
        set: SetKey,
        /// Full key.
        name: Arc<str>,
        /// Members that had joined.
        absent: Arc<[Rank]>,
    },
    /// Every rank joined.
    Joined {
        /// The rank that joined last.
        last: Rank,
    },
    /// A set was registered.
    SetAdded {
        /// Name of the request.
        name: Arc<str>,
        /// The new registration.
        key: SetKey,
        /// Its id.
        id: ProcessSetId,
        /// Its members, ascending.
        ranks: Arc<[Rank]>,
    },
    /// A set was removed, or there was none.
    SetRemoved {
        /// Name of the request.
        name: Arc<str>,
        /// The registration that ends; `None` when there was nothing to remove.
        key: Option<SetKey>,
    },
    /// Everybody stops: end all operations and confirm.
    Shutdown {
        /// The rank that asked for it or is to blame.
        by: Rank,
        /// Text for the user.
        reason: Arc<str>,
    },
    /// Everybody has confirmed the shutdown; links may be closed.
    Stopped,
    /// A rank was lost; this generation is over.
    Lost(PeerLost),
    /// New values for the data plane, from this place of the order on; their meaning is the engine's.
    Tuned {
        /// Place in the job's one order.
        seq: Seq,
        /// At most [`TUNED_VALUES_MAX`].
        values: Arc<[u64]>,
    },
}

/// One request of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// Known requests.
    Slots(SlotRun),
    /// A known allgather with this step's rows.
    GatherSlot {
        /// The slot.
        slot: Slot,
        /// Rows of every tensor and member, member by member within a tensor.
        first_dims: Vec<u64>,
    },
    /// A request in full.
    New {
        /// Full key.
        name: Arc<str>,
        /// As agreed.
        tensors: Arc<[TensorMeta]>,
        /// Where to remember it.
        slot: Option<Slot>,
        /// Allgather: as in `GatherSlot`; else empty.
        first_dims: Vec<u64>,
    },
}

impl ToCoordinator {
    /// Appends the encoded message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let w = &mut Writer::new(out);
        w.varint(self.generation.0);
        w.varint(self.seen);
        w.varint(self.items.len() as u64);
        let mut delta = SlotDelta::default();
        for item in &self.items {
            put_submission(w, item, &mut delta);
        }
    }

    /// The message in a peer's bytes.
    ///
    /// # Errors
    /// Whatever [`ToCoordinator::encode`] cannot have written.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut reader(bytes)?;
        let generation = Generation(r.varint("generation")?);
        let seen = r.varint("eviction mark")?;
        let mut delta = SlotDelta::default();
        let items = get::list(r, BATCH_ITEMS_MAX, 1, "submissions", |r| {
            match r.u8("submission")? {
                6 => Ok(Submission::Of {
                    ranks: get::ranks(r)?,
                    subtrees: get::ranks(r)?,
                    item: Box::new({
                        let tag = r.u8("submission")?;
                        get_submission(r, tag, &mut delta)?
                    }),
                }),
                tag => get_submission(r, tag, &mut delta),
            }
        })?;
        r.clone().finish()?;
        Ok(Self {
            generation,
            seen,
            items,
        })
    }
}

impl ToWorker {
    /// Appends the encoded message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let w = &mut Writer::new(out);
        w.varint(self.generation.0);
        w.varint(self.mark);
        w.varint(self.responses.len() as u64);
        let mut delta = SlotDelta::default();
        for response in &self.responses {
            put_response(w, response, &mut delta);
        }
        w.varint(self.evicted.len() as u64);
        for run in &self.evicted {
            delta.put(w, *run);
        }
    }

    /// The message in the coordinator's bytes.
    ///
    /// # Errors
    /// Whatever [`ToWorker::encode`] cannot have written.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let r = &mut reader(bytes)?;
        let generation = Generation(r.varint("generation")?);
        let mark = r.varint("eviction mark")?;
        let mut delta = SlotDelta::default();
        let responses = get::list(r, BATCH_ITEMS_MAX, 1, "responses", |r| {
            get_response(r, &mut delta).map(Arc::new)
        })?;
        let evicted = get::list(r, RETIRED_SLOTS_MAX, 2, "evicted slots", |r| delta.get(r))?;
        r.clone().finish()?;
        Ok(Self {
            generation,
            mark,
            responses,
            evicted,
        })
    }
}

fn reader(bytes: &[u8]) -> Result<Reader<'_>, DecodeError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(DecodeError::TooLong {
            what: "message",
            len: bytes.len() as u64,
            max: MESSAGE_BYTES_MAX as u64,
        });
    }
    Ok(Reader::new(bytes))
}

fn bad_tag(what: &'static str, tag: u8) -> DecodeError {
    DecodeError::BadValue {
        what,
        value: u64::from(tag),
    }
}

fn put_response(w: &mut Writer<'_>, response: &Response, delta: &mut SlotDelta) {
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
            w.u8(error.kind as u8);
            w.str(&error.message);
        }
        Response::BarrierDone { set, name, absent } => {
            w.u8(2);
            w.varint(set.0);
            w.str(name);
            put::ranks(w, absent);
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
        Response::Shutdown { by, reason } => {
            w.u8(6);
            w.varint(u64::from(by.0));
            w.str(reason);
        }
        Response::Stopped => w.u8(7),
        Response::Lost(lost) => {
            w.u8(8);
            put_lost(w, lost);
        }
        Response::Tuned { seq, values } => {
            w.u8(9);
            w.varint(seq.0);
            put::dims(w, values);
        }
    }
}

fn get_response(r: &mut Reader<'_>, delta: &mut SlotDelta) -> Result<Response, DecodeError> {
    Ok(match r.u8("response")? {
        0 => Response::Execute {
            seq: Seq(r.varint("sequence number")?),
            set: SetKey(r.varint("process set")?),
            op: get::op(r)?,
            device: get::device(r)?,
            absent: get::ranks(r)?,
            items: get::list(r, FUSED_ITEMS_MAX, 1, "items", |r| get_item(r, delta))?,
        },
        1 => Response::Fail {
            set: SetKey(r.varint("process set")?),
            name: get::name(r)?,
            absent: get::ranks(r)?,
            error: OpError {
                kind: get_kind(r)?,
                message: r.str(TEXT_BYTES_MAX, "error text")?.to_owned(),
            },
        },
        2 => Response::BarrierDone {
            set: SetKey(r.varint("process set")?),
            name: get::name(r)?,
            absent: get::ranks(r)?,
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
            reason: r.str(TEXT_BYTES_MAX, "shutdown reason")?.into(),
        },
        7 => Response::Stopped,
        8 => Response::Lost(get_lost(r)?),
        9 => Response::Tuned {
            seq: Seq(r.varint("sequence number")?),
            values: get::list(r, TUNED_VALUES_MAX, 1, "tuned values", |r| {
                r.varint("tuned value")
            })?
            .into(),
        },
        tag => return Err(bad_tag("response", tag)),
    })
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

fn get_kind(r: &mut Reader<'_>) -> Result<OpErrorKind, DecodeError> {
    Ok(match r.u8("error kind")? {
        0 => OpErrorKind::InvalidArgument,
        1 => OpErrorKind::Precondition,
        2 => OpErrorKind::Aborted,
        3 => OpErrorKind::Shutdown,
        4 => OpErrorKind::PeerLost,
        tag => return Err(bad_tag("error kind", tag)),
    })
}

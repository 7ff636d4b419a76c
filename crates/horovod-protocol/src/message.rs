//! Messages between ranks and the coordinator, with bounded encoding and decoding.
//!
//! Messages of one link arrive in order. Repeated work travels as cache slots, and neighbouring
//! slots as runs, so that a step of a thousand known tensors is a few bytes.

use crate::error::{Leaving, StopReason};
use crate::limits::{BATCH_ITEMS_MAX, MESSAGE_BYTES_MAX, RETIRED_SLOTS_MAX};
use crate::lost::PeerLost;
use crate::refusal::Refusal;
use crate::signature::RequestSignature;
use crate::types::{Device, Generation, Op, ProcessSetId, Rank, Seq, TensorMeta};
use crate::wire::{DecodeError, Reader, Writer};
use std::sync::Arc;

mod codec;
mod failure;
mod response;
mod submission;
use codec::{SlotDelta, get};
use response::{get_response, put_response};
use submission::{get_submission, put_submission};

/// Responses kept for the messages to come.
const SPARE_RESPONSES_MAX: usize = 64;

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
        /// Properties that must be equal on all ranks.
        signature: Arc<RequestSignature>,
    },
    /// This rank has no more data.
    Join,
    /// Ask all ranks to stop.
    Shutdown(Leaving),
    /// This rank has ended its operations because of [`Response::Shutdown`].
    ShutdownAck,
    /// From an aggregator: what only some of those say who speak through it.
    Of {
        /// These ranks, ascending.
        ranks: Vec<Rank>,
        /// And all members among those who speak through these aggregators, ascending.
        subtrees: Vec<Rank>,
        /// Their submission; never another `Of`.
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
    /// Run these requests together; a barrier has ended with this.
    Execute {
        /// Place in the job's one order.
        seq: Seq,
        /// Its members run it.
        set: SetKey,
        /// The operation.
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
        error: Refusal,
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
        /// Result of every pending and later operation.
        why: StopReason,
    },
    /// Everybody has confirmed the shutdown; links may be closed.
    Stopped,
    /// A rank was lost; this generation is over.
    Lost(PeerLost),
    /// New values for the data plane, from this place of the order on; their meaning is the engine's.
    Tuned {
        /// Place in the job's one order.
        seq: Seq,
        /// At most [`crate::TUNED_VALUES_MAX`].
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
        let mut message = Self::empty();
        message.decode_from(bytes)?;
        Ok(message)
    }

    /// A message that says nothing, to be filled by [`ToCoordinator::decode_from`].
    pub fn empty() -> Self {
        Self {
            generation: Generation(0),
            seen: 0,
            items: Vec::new(),
        }
    }

    /// As [`ToCoordinator::decode`], in the memory of this message; after an error it is good for
    /// nothing else.
    ///
    /// # Errors
    /// Whatever [`ToCoordinator::encode`] cannot have written.
    pub fn decode_from(&mut self, bytes: &[u8]) -> Result<(), DecodeError> {
        let r = &mut reader(bytes)?;
        self.generation = Generation(r.varint("generation")?);
        self.seen = r.varint("eviction mark")?;
        self.items.clear();
        let mut delta = SlotDelta::default();
        for _ in 0..r.count(BATCH_ITEMS_MAX, 1, "submissions")? {
            let item = match r.u8("submission")? {
                6 => Submission::Of {
                    ranks: get::ranks(r)?,
                    subtrees: get::ranks(r)?,
                    item: Box::new({
                        let tag = r.u8("submission")?;
                        get_submission(r, tag, &mut delta)?
                    }),
                },
                tag => get_submission(r, tag, &mut delta)?,
            };
            self.items.push(item);
        }
        r.clone().finish()
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
        let mut message = Self::empty();
        message.decode_from(bytes)?;
        Ok(message)
    }

    /// A message that says nothing, to be filled by [`ToWorker::decode_from`].
    pub fn empty() -> Self {
        Self {
            generation: Generation(0),
            mark: 0,
            responses: Vec::new(),
            evicted: Vec::new(),
        }
    }

    /// As [`ToWorker::decode`], in the memory of this message; after an error it is good for
    /// nothing else.
    ///
    /// # Errors
    /// Whatever [`ToWorker::encode`] cannot have written.
    pub fn decode_from(&mut self, bytes: &[u8]) -> Result<(), DecodeError> {
        self.decode_with(bytes, &mut Vec::new())
    }

    /// As [`ToWorker::decode_from`], where messages have more and fewer responses in turn: keeps what one does
    /// not need for the next.
    ///
    /// # Errors
    /// Whatever [`ToWorker::encode`] cannot have written.
    pub fn decode_with(
        &mut self,
        bytes: &[u8],
        spare: &mut Vec<Arc<Response>>,
    ) -> Result<(), DecodeError> {
        let r = &mut reader(bytes)?;
        self.generation = Generation(r.varint("generation")?);
        self.mark = r.varint("eviction mark")?;
        let mut delta = SlotDelta::default();
        let count = r.count(BATCH_ITEMS_MAX, 1, "responses")?;
        while self.responses.len() > count {
            if let Some(unneeded) = self.responses.pop()
                && spare.len() < SPARE_RESPONSES_MAX
            {
                spare.push(unneeded);
            }
        }
        for at in 0..count {
            if at == self.responses.len() {
                self.responses.extend(spare.pop());
            }
            match self.responses.get_mut(at).and_then(Arc::get_mut) {
                Some(old) => get_response(r, &mut delta, old)?,
                None => {
                    let mut response = Response::Stopped;
                    get_response(r, &mut delta, &mut response)?;
                    self.responses.truncate(at);
                    self.responses.push(Arc::new(response));
                }
            }
        }
        self.evicted.clear();
        for _ in 0..r.count(RETIRED_SLOTS_MAX, 2, "evicted slots")? {
            self.evicted.push(delta.get(r)?);
        }
        r.clone().finish()
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

//! Data of a dispatch: ready requests, the fusion of requests of different kinds, and messages within their size
//! limits.

use super::Coordinator;
use crate::fusion::{Candidate, FusionKey, FusionPlan};
use crate::limits::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX};
use crate::message::{Item, Response, SetKey, SlotRun, ToWorker};
use crate::signature::RequestSignature;
use crate::types::{Rank, Seq};
use std::sync::Arc;

/// A decision that is ready to be sent to the members of a set.
#[derive(Debug)]
pub(super) enum Ready {
    /// Execute a request, possibly fused with others.
    Run(Run),
    /// Execute known requests, possibly fused with others.
    Known(Known),
    /// Any other response; no request is moved past it.
    Answer {
        /// The links to the recipients.
        to: Arc<[u32]>,
        /// The response.
        response: Arc<Response>,
    },
    /// Tuned values for all ranks, with a sequence number of their own.
    Tuned(Arc<[u64]>),
}

/// A request on which all members agree.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) set: SetKey,
    /// Stored here because the set may have been removed before this is sent.
    pub(super) to: Arc<[u32]>,
    pub(super) absent: Arc<[Rank]>,
    pub(super) signature: Arc<RequestSignature>,
    pub(super) fusion: Option<FusionKey>,
    pub(super) bytes: u64,
    pub(super) wire_bytes: usize,
    pub(super) item: Item,
}

/// Known requests in neighbouring slots that can be fused with each other. No member is absent.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) set: SetKey,
    pub(super) to: Arc<[u32]>,
    /// Signature of the first request.
    pub(super) signature: Arc<RequestSignature>,
    pub(super) fusion: Option<FusionKey>,
    /// Bytes of all requests together; the coordinator's `sizes` has the bytes of each.
    pub(super) bytes: u64,
    pub(super) run: SlotRun,
}

/// One response with its recipients and an upper bound of its encoded size.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) to: Arc<[u32]>,
    pub(super) response: Arc<Response>,
    pub(super) wire_bytes: usize,
}

/// Buffers that later messages reuse.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pub(super) ready: Vec<Ready>,
    pub(super) runs: Vec<Option<Run>>,
    plan: FusionPlan,
    pub(super) outgoing: Vec<Outgoing>,
    pub(super) responses: Vec<Vec<Arc<Response>>>,
    executions: Vec<Arc<Response>>,
}

/// Maximum number of buffers kept of each kind.
const BUFFERS_MAX: usize = 64;

impl Buffers {
    pub(super) fn recycle(&mut self, mut message: ToWorker) {
        for response in message.responses.drain(..) {
            let alone = Arc::strong_count(&response) == 1;
            if alone && self.executions.len() < BUFFERS_MAX {
                self.executions.push(response);
            }
        }
        if self.responses.len() < BUFFERS_MAX {
            self.responses.push(message.responses);
        }
    }

    /// Returns the response that `make` builds from an empty list of items, in a reused allocation if there is one.
    pub(super) fn execute(&mut self, make: impl FnOnce(Vec<Item>) -> Response) -> Arc<Response> {
        let mut response = match self.executions.pop() {
            Some(response) => response,
            None => return Arc::new(make(Vec::new())),
        };
        if let Some(old) = Arc::get_mut(&mut response) {
            let mut items = match old {
                Response::Execute { items, .. } => std::mem::take(items),
                _ => Vec::new(),
            };
            items.clear();
            *old = make(items);
        }
        response
    }
}

/// Upper bound of the encoded size of known requests.
pub(super) const KNOWN_BYTES: usize = 20;

impl Coordinator {
    /// Fuses all of `runs` into executions, appends them to `outgoing` and empties `runs`.
    pub(super) fn fuse(&mut self, runs: &mut Vec<Option<Run>>, outgoing: &mut Vec<Outgoing>) {
        if runs.is_empty() {
            return;
        }
        let mut plan = std::mem::take(&mut self.buffers.plan);
        let candidate = |at: usize| match &runs[at] {
            Some(run) => Candidate {
                key: run.fusion,
                absent: &run.absent,
                bytes: run.bytes,
                wire_bytes: run.wire_bytes,
            },
            None => Candidate::NONE,
        };
        plan.make(runs.len(), candidate, self.cfg.fusion_threshold_bytes);
        for batch in plan.executions() {
            let mut batch = batch.iter().filter_map(|at| runs[*at].take());
            let Some(first) = batch.next() else { continue };
            let mut wire_bytes = 64 + 5 * first.absent.len() + first.wire_bytes;
            let seq = Seq(self.next_seq);
            self.next_seq += 1;
            let response = self.buffers.execute(|mut items| {
                items.push(first.item);
                for run in batch {
                    wire_bytes += run.wire_bytes;
                    append(&mut items, run.item);
                }
                Response::Execute {
                    seq,
                    set: first.set,
                    op: first.signature.op.clone(),
                    device: first.signature.device,
                    absent: first.absent,
                    items,
                }
            });
            outgoing.push(Outgoing {
                to: first.to,
                response,
                wire_bytes,
            });
        }
        runs.clear();
        self.buffers.plan = plan;
    }
}

impl Known {
    /// Returns the requests one by one, with the given sizes.
    pub(super) fn split(self, sizes: &[u64], nobody: &Arc<[Rank]>) -> impl Iterator<Item = Run> {
        self.run.slots().zip(sizes).map(move |(first, bytes)| Run {
            set: self.set,
            to: Arc::clone(&self.to),
            absent: Arc::clone(nobody),
            signature: Arc::clone(&self.signature),
            fusion: self.fusion,
            bytes: *bytes,
            wire_bytes: KNOWN_BYTES,
            item: Item::Slots(SlotRun { first, len: 1 }),
        })
    }
}

/// Positions of the cache before and after a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    /// Position before the message.
    pub(super) before: u64,
    /// Position after the message.
    pub(super) after: u64,
}

/// Messages for one link, or the common messages for all links.
#[derive(Default)]
pub(super) struct Stream {
    pub(super) full: Vec<Vec<Arc<Response>>>,
    pub(super) open: Vec<Arc<Response>>,
    pub(super) open_bytes: usize,
    pub(super) evicted: Vec<SlotRun>,
}

impl Stream {
    pub(super) fn push(&mut self, out: &Outgoing) {
        if !self.open.is_empty()
            && (self.open_bytes + out.wire_bytes > BATCH_BYTES_MAX
                || self.open.len() >= BATCH_ITEMS_MAX)
        {
            self.full.push(std::mem::take(&mut self.open));
            self.open_bytes = 0;
        }
        self.open_bytes += out.wire_bytes;
        self.open.push(Arc::clone(&out.response));
    }
}

/// Appends an item. Known requests in neighbouring slots become one run.
fn append(items: &mut Vec<Item>, item: Item) {
    if let (Some(Item::Slots(run)), Item::Slots(SlotRun { first, len: 1 })) =
        (items.last_mut(), &item)
        && run.extend(*first)
    {
        return;
    }
    items.push(item);
}

pub(super) fn answer_bytes(response: &Response) -> usize {
    64 + match response {
        Response::Fail {
            name,
            absent,
            error,
            ..
        } => name.len() + 5 * absent.len() + error.wire_bytes(),
        Response::SetAdded { name, ranks, .. } => name.len() + 5 * ranks.len(),
        Response::SetRemoved { name, .. } => name.len(),
        Response::Shutdown { why, .. } => why.wire_bytes(),
        Response::Tuned { values, .. } => 10 * values.len(),
        _ => 0,
    }
}

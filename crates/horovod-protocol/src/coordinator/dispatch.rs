//! The dispatch of what is ready: fused, numbered, and one stream of messages per rank.

use super::{Coordinator, CoordinatorAction};
use crate::fusion::{Candidate, FusionKey, FusionPlan};
use crate::limits::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX, FUSED_ITEMS_MAX};
use crate::message::{Item, Response, SetKey, SlotRun, ToWorker};
use crate::signature::RequestSignature;
use crate::types::{Rank, Seq};
use std::sync::Arc;

/// Something to tell the members of a set.
#[derive(Debug)]
pub(super) enum Ready {
    /// Run a request, possibly together with others.
    Run(Run),
    /// Run known requests, as above.
    Known(Known),
    /// Anything else; nothing is moved past it.
    Answer {
        /// The links to those who must know.
        to: Arc<[u32]>,
        /// What.
        response: Arc<Response>,
    },
    /// As an answer to everybody, with a place of its own in the order.
    Tuned(Arc<[u64]>),
}

/// A request that all members agree on.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) set: SetKey,
    /// Kept here because the set may be gone when this is sent.
    pub(super) to: Arc<[u32]>,
    pub(super) absent: Arc<[Rank]>,
    pub(super) signature: Arc<RequestSignature>,
    pub(super) fusion: Option<FusionKey>,
    pub(super) bytes: u64,
    pub(super) wire_bytes: usize,
    pub(super) item: Item,
}

/// Known requests in neighbouring slots that can be fused with each other; nobody is absent.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) set: SetKey,
    pub(super) to: Arc<[u32]>,
    /// Of the first.
    pub(super) signature: Arc<RequestSignature>,
    pub(super) fusion: Option<FusionKey>,
    /// Of all; of each in the coordinator's `sizes`.
    pub(super) bytes: u64,
    pub(super) run: SlotRun,
}

/// One response with its recipients and an upper bound of its encoded size.
#[derive(Debug)]
struct Outgoing {
    to: Arc<[u32]>,
    response: Arc<Response>,
    wire_bytes: usize,
}

/// What earlier messages leave for later ones.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    ready: Vec<Ready>,
    runs: Vec<Option<Run>>,
    plan: FusionPlan,
    outgoing: Vec<Outgoing>,
    responses: Vec<Vec<Arc<Response>>>,
    executions: Vec<Arc<Response>>,
}

/// Buffers kept of each kind.
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

    /// A response made with an empty list of items.
    fn execute(&mut self, make: impl FnOnce(Vec<Item>) -> Response) -> Arc<Response> {
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
const KNOWN_BYTES: usize = 20;

impl Coordinator {
    /// Turns everything that is ready into messages.
    pub(super) fn dispatch(&mut self) {
        self.urgent = false;
        let mut outgoing = std::mem::take(&mut self.buffers.outgoing);
        let mut runs = std::mem::take(&mut self.buffers.runs);
        let mut ready = std::mem::replace(&mut self.ready, std::mem::take(&mut self.buffers.ready));
        let sizes = std::mem::take(&mut self.sizes);
        let mut sizes_left = &sizes[..];
        let mut left = ready.drain(..).peekable();
        while let Some(next) = left.next() {
            match next {
                Ready::Run(run) => runs.push(Some(run)),
                Ready::Known(known) => {
                    let (sizes, rest) = sizes_left.split_at(known.run.len as usize);
                    sizes_left = rest;
                    let alone = runs.is_empty()
                        && !matches!(left.peek(), Some(Ready::Run(_) | Ready::Known(_)));
                    if alone && self.fits_one(&known) {
                        outgoing.push(self.execute_known(known));
                    } else {
                        runs.extend(known.split(sizes, &self.nobody).map(Some));
                    }
                }
                Ready::Answer { to, response } => {
                    self.fuse(&mut runs, &mut outgoing);
                    let wire_bytes = answer_bytes(&response);
                    outgoing.push(Outgoing {
                        to,
                        response,
                        wire_bytes,
                    });
                }
                Ready::Tuned(values) => {
                    self.fuse(&mut runs, &mut outgoing);
                    let response = Response::Tuned {
                        seq: Seq(self.next_seq),
                        values,
                    };
                    self.next_seq += 1;
                    outgoing.push(Outgoing {
                        to: Arc::clone(&self.everybody),
                        wire_bytes: answer_bytes(&response),
                        response: Arc::new(response),
                    });
                }
            }
        }
        drop(left);
        self.fuse(&mut runs, &mut outgoing);
        self.send(&outgoing);
        outgoing.clear();
        self.buffers.outgoing = outgoing;
        self.buffers.ready = ready;
        self.buffers.runs = runs;
        self.sizes = sizes;
        self.sizes.clear();
    }

    /// Whether known requests with nothing beside them make one execution.
    fn fits_one(&self, known: &Known) -> bool {
        known.run.len == 1
            || (known.bytes <= self.cfg.fusion_threshold_bytes
                && known.run.len as usize <= FUSED_ITEMS_MAX)
    }

    fn execute_known(&mut self, known: Known) -> Outgoing {
        let seq = Seq(self.next_seq);
        self.next_seq += 1;
        Outgoing {
            to: known.to,
            wire_bytes: 64 + KNOWN_BYTES,
            response: self.buffers.execute(|mut items| {
                items.push(Item::Slots(known.run));
                Response::Execute {
                    seq,
                    set: known.set,
                    op: known.signature.op.clone(),
                    device: known.signature.device,
                    absent: Arc::clone(&self.nobody),
                    items,
                }
            }),
        }
    }

    /// Takes all of `runs`.
    fn fuse(&mut self, runs: &mut Vec<Option<Run>>, outgoing: &mut Vec<Outgoing>) {
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

    /// One or more messages per rank, equal ones only once; evictions go into the last, after
    /// everything that may still use the slots.
    fn send(&mut self, outgoing: &[Outgoing]) {
        let mark_before = self.cache.mark();
        let evicted = self.cache.announce();
        let marks = Marks {
            before: mark_before,
            after: self.cache.mark(),
        };
        let everybody = Arc::clone(&self.everybody);
        let all_alike = outgoing.iter().all(|out| Arc::ptr_eq(&out.to, &everybody))
            && evicted.iter().all(|(to, _)| Arc::ptr_eq(to, &everybody));
        if all_alike {
            let mut stream = Stream {
                open: self.buffers.responses.pop().unwrap_or_default(),
                ..Stream::default()
            };
            outgoing.iter().for_each(|out| stream.push(out));
            for (_, runs) in &evicted {
                stream.evicted.extend_from_slice(runs);
            }
            return self.send_stream(&everybody, stream, marks);
        }
        let mut streams: Vec<Stream> = Vec::new();
        streams.resize_with(everybody.len(), Stream::default);
        for out in outgoing {
            for link in out.to.iter() {
                streams[*link as usize].push(out);
            }
        }
        for (links, runs) in &evicted {
            for link in links.iter() {
                streams[*link as usize].evicted.extend_from_slice(runs);
            }
        }
        for (stream, link) in streams.into_iter().zip(everybody.iter()) {
            self.send_stream(&[*link].into(), stream, marks);
        }
    }

    fn send_stream(&mut self, to: &Arc<[u32]>, stream: Stream, marks: Marks) {
        let Marks {
            before,
            after: mark,
        } = marks;
        let links = &self.sets.links;
        let ranks: Arc<[Rank]> = if Arc::ptr_eq(to, &self.everybody) {
            Arc::clone(&self.everybody_ranks)
        } else {
            to.iter()
                .map(|link| links.get(*link as usize).rank)
                .collect()
        };
        let generation = self.cfg.generation;
        let mut send = |mark, responses, evicted| {
            let message = ToWorker {
                generation,
                mark,
                responses,
                evicted,
            };
            self.actions
                .push_back(CoordinatorAction::Send(Arc::clone(&ranks), message));
        };
        for responses in stream.full {
            send(before, responses, Vec::new());
        }
        // An aggregator confirms for all below it, hence all below it must know, concerned or not.
        let unheard = self.tree.is_some() && to.iter().any(|link| self.told[*link as usize] < mark);
        if !stream.open.is_empty() || !stream.evicted.is_empty() || unheard {
            send(mark, stream.open, stream.evicted);
            to.iter().for_each(|link| self.told[*link as usize] = mark);
        }
    }
}

impl Known {
    /// One by one, with these sizes.
    fn split(self, sizes: &[u64], nobody: &Arc<[Rank]>) -> impl Iterator<Item = Run> {
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

/// How far the cache had come around what is sent.
#[derive(Clone, Copy, Debug)]
struct Marks {
    /// Before it.
    before: u64,
    /// After it.
    after: u64,
}

/// What goes to one link, or to all alike.
#[derive(Default)]
struct Stream {
    full: Vec<Vec<Arc<Response>>>,
    open: Vec<Arc<Response>>,
    open_bytes: usize,
    evicted: Vec<SlotRun>,
}

impl Stream {
    fn push(&mut self, out: &Outgoing) {
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

/// Adds an item; known requests in neighbouring slots become one run.
fn append(items: &mut Vec<Item>, item: Item) {
    if let (Some(Item::Slots(run)), Item::Slots(SlotRun { first, len: 1 })) =
        (items.last_mut(), &item)
        && run.extend(*first)
    {
        return;
    }
    items.push(item);
}

fn answer_bytes(response: &Response) -> usize {
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

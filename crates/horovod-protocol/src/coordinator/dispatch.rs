//! From what is ready to messages: fused, numbered, and one stream per rank.

use super::{Coordinator, CoordinatorAction};
use crate::content::Content;
use crate::fusion::{Candidate, FusionKey, plan};
use crate::limits::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX};
use crate::message::{Item, Response, SetKey, SlotRun, ToWorker};
use crate::types::{Rank, Seq};
use std::sync::Arc;

/// Something to tell the members of a set.
#[derive(Debug)]
pub(super) enum Ready {
    /// Run a request, possibly together with others.
    Run(Run),
    /// Anything else; nothing is moved past it.
    Answer {
        /// Who must know.
        to: Arc<[Rank]>,
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
    pub(super) members: Arc<[Rank]>,
    pub(super) absent: Arc<[Rank]>,
    pub(super) content: Arc<Content>,
    pub(super) fusion: Option<FusionKey>,
    pub(super) bytes: u64,
    pub(super) wire_bytes: usize,
    pub(super) item: Item,
}

/// One response with its recipients and an upper bound of its encoded size.
struct Outgoing {
    to: Arc<[Rank]>,
    response: Arc<Response>,
    wire_bytes: usize,
}

impl Coordinator {
    /// Turns everything that is ready into messages.
    pub(super) fn dispatch(&mut self) {
        self.urgent = false;
        let mut outgoing = Vec::new();
        let mut runs = Vec::new();
        for ready in std::mem::take(&mut self.ready) {
            match ready {
                Ready::Run(run) => runs.push(run),
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
        self.fuse(&mut runs, &mut outgoing);
        self.send(&outgoing);
    }

    fn fuse(&mut self, runs: &mut Vec<Run>, outgoing: &mut Vec<Outgoing>) {
        let candidates: Vec<Candidate<'_>> = runs
            .iter()
            .map(|run| Candidate {
                key: run.fusion,
                absent: &run.absent,
                bytes: run.bytes,
                wire_bytes: run.wire_bytes,
            })
            .collect();
        let batches = plan(&candidates, self.cfg.fusion_threshold_bytes);
        let mut runs: Vec<Option<Run>> = std::mem::take(runs).into_iter().map(Some).collect();
        for batch in batches {
            let mut batch = batch.into_iter().filter_map(|at| runs[at].take());
            let Some(first) = batch.next() else { continue };
            let mut wire_bytes = 64 + 5 * first.absent.len() + first.wire_bytes;
            let mut items = vec![first.item];
            for run in batch {
                wire_bytes += run.wire_bytes;
                append(&mut items, run.item);
            }
            let response = Response::Execute {
                seq: Seq(self.next_seq),
                set: first.set,
                op: first.content.op.clone(),
                device: first.content.device,
                absent: first.absent,
                items,
            };
            self.next_seq += 1;
            outgoing.push(Outgoing {
                to: first.members,
                response: Arc::new(response),
                wire_bytes,
            });
        }
    }

    /// One or more messages per rank, equal ones only once; evictions go into the last, after
    /// everything that may still use the slots.
    fn send(&mut self, outgoing: &[Outgoing]) {
        let mark_before = self.cache.mark();
        let evicted = self.cache.announce();
        let marks = (mark_before, self.cache.mark());
        let everybody = Arc::clone(&self.everybody);
        let all_alike = outgoing.iter().all(|out| Arc::ptr_eq(&out.to, &everybody))
            && evicted.iter().all(|(to, _)| Arc::ptr_eq(to, &everybody));
        if all_alike {
            let mut stream = Stream::default();
            outgoing.iter().for_each(|out| stream.push(out));
            for (_, runs) in &evicted {
                stream.evicted.extend_from_slice(runs);
            }
            return self.send_stream(&everybody, stream, marks);
        }
        let mut streams: Vec<Stream> = Vec::new();
        streams.resize_with(everybody.len(), Stream::default);
        for out in outgoing {
            for rank in out.to.iter() {
                streams[rank.index()].push(out);
            }
        }
        for (members, runs) in &evicted {
            for rank in members.iter() {
                streams[rank.index()].evicted.extend_from_slice(runs);
            }
        }
        for (stream, rank) in streams.into_iter().zip(everybody.iter()) {
            self.send_stream(&[*rank].into(), stream, marks);
        }
    }

    fn send_stream(&mut self, to: &Arc<[Rank]>, stream: Stream, (before, mark): (u64, u64)) {
        let generation = self.cfg.generation;
        let mut send = |mark, responses, evicted| {
            let message = ToWorker {
                generation,
                mark,
                responses,
                evicted,
            };
            self.actions
                .push_back(CoordinatorAction::Send(Arc::clone(to), message));
        };
        for responses in stream.full {
            send(before, responses, Vec::new());
        }
        if !stream.open.is_empty() || !stream.evicted.is_empty() {
            send(mark, stream.open, stream.evicted);
        }
    }
}

/// What goes to one rank, or to all alike.
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
        } => name.len() + 5 * absent.len() + error.message.len(),
        Response::BarrierDone { name, absent, .. } => name.len() + 5 * absent.len(),
        Response::SetAdded { name, ranks, .. } => name.len() + 5 * ranks.len(),
        Response::SetRemoved { name, .. } => name.len(),
        Response::Shutdown { reason, .. } => reason.len(),
        Response::Tuned { values, .. } => 10 * values.len(),
        _ => 0,
    }
}

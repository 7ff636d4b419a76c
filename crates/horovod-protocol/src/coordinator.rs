//! The job's one arbiter: counts who is ready, validates, fuses, orders and answers.
//!
//! The way of a request that is known stands here: a link says its slot ([`Coordinator::handle_message`]), it is
//! counted, and when all links have said it, it is ready; what is ready becomes messages when the engine asks what to
//! do ([`Coordinator::poll_action`]). Files beside it have the arrival of new or unusual requests (`arrive`), their
//! validation and effects (`ready`), the fusion of several kinds (`dispatch`), lateness and endings.

use crate::cache::Cache;
use crate::error::StopReason;
use crate::join::Joins;
use crate::lateness::{Latest, LinkLateness, SetLateness};
use crate::limits::FUSED_ITEMS_MAX;
use crate::lookup::Slab;
use crate::lost::PeerLost;
use crate::message::{Item, Response, SetKey, Slot, SlotRun, Submission, ToCoordinator, ToWorker};
use crate::process_sets::SetTable;
use crate::rank_set::RankSet;
use crate::readiness::ReadinessBitmap;
use crate::signature::RequestSignature;
use crate::slots::{blocks_of, slots_of};
use crate::stall::{StallClock, StallReport};
use crate::tree::{Link, Links, Tree};
use crate::types::{Op, ProcessSetId, Rank, Seq, Time};
use std::collections::VecDeque;
use std::sync::Arc;

mod arrive;
mod dispatch;
mod ending;
mod late;
mod ready;
mod settings;

use arrive::{FOREIGN, NOT_IN_USE, TWICE, Who};
use dispatch::{Buffers, KNOWN_BYTES, Known, Marks, Outgoing, Ready, Stream, answer_bytes};

pub use settings::{CoordinatorConfig, StallConfig};

/// Action for the engine of rank 0; drain with [`Coordinator::poll_action`].
#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorAction {
    /// Send to the workers of these ranks (rank 0's own may be among them), in order.
    Send(Arc<[Rank]>, ToWorker),
    /// Log who is late: as a warning, or as an error when it shuts the job down.
    Stall(StallReport),
    /// The response cache of a set is too small: some responses do not stay in it (once per set);
    /// see [`crate::CACHE_EVICTION_TEXT`].
    CacheEvicts(ProcessSetId),
    /// A rank broke the protocol; the others are being told. The generation is over.
    Abort(PeerLost),
}

/// The job's coordinator.
#[derive(Debug)]
pub struct Coordinator {
    cfg: CoordinatorConfig,
    now: Time,
    phase: CoordinatorPhase,
    sets: SetTable,
    entries: Slab<Entry>,
    cache: Cache,
    /// Known requests that wait, as long as there is nothing unusual about them.
    readiness: ReadinessBitmap,
    joins: Joins,
    /// Whom the links lead to; `None` in a star, where every rank has its own.
    tree: Option<Tree>,
    /// Pending requests that each link was the first to ask for.
    outstanding: Vec<usize>,
    arrivals: u64,
    stall: StallClock,
    ready: Vec<Ready>,
    ready_since: Time,
    /// Something is ready that must not be held back.
    urgent: bool,
    next_seq: u64,
    /// Numbers of all links.
    everybody: Arc<[u32]>,
    everybody_ranks: Arc<[Rank]>,
    nobody: Arc<[Rank]>,
    spare: Vec<RankSet>,
    /// Bytes of the known requests that are ready, in order.
    sizes: Vec<u64>,
    buffers: Buffers,
    /// Evictions sent to each link so far.
    sent: Vec<u64>,
    actions: VecDeque<CoordinatorAction>,
    /// If it was asked for.
    lateness: Option<LinkLateness>,
}

#[derive(Debug)]
enum CoordinatorPhase {
    Running,
    /// Everybody has been told to stop; who has confirmed.
    Stopping(RankSet),
    Over,
}

/// A name that is pending, cached or both.
#[derive(Debug)]
struct Entry {
    set: SetKey,
    name: Arc<str>,
    cached: Option<Slot>,
    pending: Option<Pending>,
}

/// A pending name: the ranks that have asked for it, and their requests.
#[derive(Debug)]
struct Pending {
    arrived: RankSet,
    /// The link that asked first.
    starter: usize,
    since: Time,
    /// Since when one rank alone is missing.
    alone: Option<Time>,
    report_at: Time,
    /// Place among all arrivals, to release in order.
    order: u64,
    /// The first rank's request, and that of every rank not among `others`.
    signature: Arc<RequestSignature>,
    others: Vec<(RankSet, Arc<RequestSignature>)>,
    /// Allgather: first dimensions per rank.
    rows: Vec<(Rank, Vec<u64>)>,
}

/// Why a rank's message is impossible.
type Violation = &'static str;

/// The sender of a link's message, as far as the link and the members of the set tell it.
fn latest(of: &Link, link: usize, members: &RankSet) -> Latest {
    match &of.below {
        None => Latest::Link(link),
        Some(below) => below
            .only_common(members)
            .map_or(Latest::Subtree(link), Latest::Behind),
    }
}

impl Coordinator {
    /// A coordinator to which every rank speaks itself; it knows only the set of all ranks.
    pub fn new(cfg: CoordinatorConfig) -> Self {
        let tree = Tree::star(cfg.size);
        Self::with_tree(cfg, &tree)
    }

    /// A coordinator to which the ranks speak through `tree`; it gets messages from rank 0's worker
    /// and from the children of rank 0 only, and sends to these only.
    pub fn with_tree(cfg: CoordinatorConfig, tree: &Tree) -> Self {
        let links = Links::of(tree, Rank(0));
        let (link_count, deep) = (links.len(), links.are_deep());
        let sets = SetTable::new(cfg.size, links);
        let everybody = sets.everybody();
        let everybody_ranks = (0..link_count)
            .map(|link| sets.links.get(link).rank)
            .collect();
        Self {
            now: Time::default(),
            phase: CoordinatorPhase::Running,
            sets,
            entries: Slab::default(),
            cache: Cache::new(cfg.cache_capacity, link_count),
            readiness: ReadinessBitmap::default(),
            joins: Joins::default(),
            tree: deep.then(|| tree.clone()),
            outstanding: vec![0; link_count],
            arrivals: 0,
            stall: StallClock::new(cfg.stall),
            ready: Vec::new(),
            ready_since: Time::default(),
            urgent: false,
            next_seq: 0,
            everybody,
            everybody_ranks,
            nobody: [].into(),
            spare: Vec::new(),
            sizes: Vec::new(),
            buffers: Buffers::default(),
            sent: vec![0; link_count],
            actions: VecDeque::new(),
            lateness: None,
            cfg,
        }
    }

    /// Counts from now on how late each link is.
    pub fn count_lateness(&mut self) {
        self.readiness.note_alone();
        self.lateness = Some(LinkLateness::new(self.everybody.len()));
    }

    /// How late the ranks are that speak through this child of rank 0, or rank 0 itself.
    pub fn lateness(&self, child: Rank) -> Vec<SetLateness> {
        let link = self.sets.links.find(child);
        let late = self.lateness.as_ref().zip(link);
        late.map_or_else(Vec::new, |(late, link)| late.of(link))
    }

    /// How late a rank is behind an aggregator, where it is known which rank it was; beside [`Coordinator::lateness`].
    pub fn lateness_behind(&self, rank: Rank) -> Vec<SetLateness> {
        let late = self.lateness.as_ref();
        late.map_or_else(Vec::new, |late| late.of_rank(rank))
    }

    /// The sets in which the children of rank 0 were compared with each other: others are all behind one child.
    pub fn compared_sets(&self) -> Vec<SetKey> {
        let late = self.lateness.as_ref();
        late.map_or_else(Vec::new, LinkLateness::compared)
    }

    /// A rank said something. Impossible content ends the generation and names that rank.
    pub fn handle_message(&mut self, now: Time, from: Rank, msg: &ToCoordinator) {
        self.now = self.now.max(now);
        // A message of another life of the job is nobody's fault, only late.
        if msg.generation != self.cfg.generation || matches!(self.phase, CoordinatorPhase::Over) {
            return;
        }
        if let Err((culprit, violation)) = self.apply(from, msg) {
            let lost = PeerLost::broke_protocol(culprit, violation);
            self.end(&lost, None);
            self.actions.push_back(CoordinatorAction::Abort(lost));
        }
        self.check_stalls();
    }

    /// The next action; call until `None` after every other method.
    pub fn poll_action(&mut self) -> Option<CoordinatorAction> {
        if !self.ready.is_empty() && (self.urgent || self.now >= self.batch_deadline()) {
            self.dispatch();
        }
        self.actions.pop_front()
    }

    fn apply(&mut self, from: Rank, msg: &ToCoordinator) -> Result<(), (Rank, Violation)> {
        let link = self.sets.links.find(from);
        let link = link.ok_or((from, "has no link to the coordinator"))?;
        for item in &msg.items {
            match (&mut self.phase, item) {
                (CoordinatorPhase::Stopping(confirmed), Submission::ShutdownAck) => {
                    if !confirmed.insert(Rank(link as u32)) {
                        return Err((from, "confirmed the shutdown twice"));
                    }
                    if confirmed.len() == self.everybody.len() {
                        self.answer(Arc::clone(&self.everybody), Response::Stopped);
                        self.dispatch();
                        self.phase = CoordinatorPhase::Over;
                    }
                }
                (
                    CoordinatorPhase::Running | CoordinatorPhase::Stopping(_),
                    Submission::Lost(lost),
                ) => {
                    let lost = lost.clone();
                    self.end(&lost, None);
                }
                // Sent before the rank knew that everybody stops.
                (CoordinatorPhase::Stopping(_), _) => {}
                (CoordinatorPhase::Running, item) => self
                    .submitted(link, item)
                    .map_err(|violation| (speaker(from, item), violation))?,
                (CoordinatorPhase::Over, _) => {}
            }
        }
        // Afterwards, because the items may have been asked for before the rank knew.
        if !self.cache.confirm(link, msg.seen) {
            return Err((from, "confirmed an eviction that was not announced"));
        }
        Ok(())
    }

    fn submitted(&mut self, link: usize, item: &Submission) -> Result<(), Violation> {
        let from = self.sets.links.get(link);
        let (rank, who) = (
            from.rank,
            match &from.below {
                None => Who::Rank(from.rank),
                Some(_) => Who::Link(link),
            },
        );
        match item {
            Submission::Hits(run) => self.hits(link, &who, *run),
            Submission::Of {
                ranks,
                subtrees,
                item,
            } => {
                let who = self.named(link, ranks, subtrees)?;
                match &**item {
                    Submission::Hits(run) => run
                        .slots()
                        .try_for_each(|slot| self.hit(link, &who, slot, None)),
                    Submission::Join => ranks.iter().try_for_each(|rank| self.joined(*rank)),
                    Submission::Shutdown(why) => {
                        let by = *ranks.first().ok_or("spoke for nobody")?;
                        self.stop(by, StopReason::Left(*why));
                        Ok(())
                    }
                    item => self.asked_or_gathered(link, &who, item),
                }
            }
            Submission::Join => self.joined(rank),
            Submission::Shutdown(why) => {
                self.stop(rank, StopReason::Left(*why));
                Ok(())
            }
            item => self.asked_or_gathered(link, &who, item),
        }
    }

    fn hits(&mut self, link: usize, who: &Who, run: SlotRun) -> Result<(), Violation> {
        for (number, mask) in blocks_of(run) {
            let counted = match self.readiness.block(number) {
                Some(block) if self.joins.is_empty() => block.counted(mask),
                _ => 0,
            };
            if counted != 0 {
                self.count(link, number, counted)?;
            }
            // A run that leaves the slots in use ends here with an error, however long.
            slots_of(number, mask & !counted)
                .try_for_each(|slot| self.hit(link, who, slot, None))?;
        }
        if run.first.0.checked_add(u64::from(run.len)).is_none() {
            return Err(NOT_IN_USE);
        }
        Ok(())
    }

    /// The usual case: a link has said known slots.
    fn count(&mut self, link: usize, number: u64, mask: u64) -> Result<(), Violation> {
        let block = self.readiness.block(number).ok_or(NOT_IN_USE)?;
        let set = self
            .sets
            .get(block.set)
            .ok_or("used an unknown process set")?;
        let position = set.position(link).ok_or(FOREIGN)?;
        let (complete, begun) = block
            .mark_ready(self.now, position, mask)
            .map_err(|_| TWICE)?;
        if begun != 0 {
            self.stall.started(self.now);
        }
        if let (Some(late), Some(alone)) = (&mut self.lateness, block.alone_since(complete)) {
            let latest = latest(self.sets.links.get(link), link, &set.bits);
            late.completes(self.now, block.set, latest, alone);
        }
        if complete != 0 {
            let (key, to) = (block.set, Arc::clone(&set.to));
            self.known_ready(key, &to, slots_of(number, complete));
        }
        Ok(())
    }

    /// These known requests of a set, which `to` lead to, are ready; nothing is unusual about them.
    fn known_ready(&mut self, set: SetKey, to: &Arc<[u32]>, slots: impl Iterator<Item = Slot>) {
        if self.ready.is_empty() {
            self.ready_since = self.now;
        }
        for slot in slots {
            let Some(line) = self.cache.touch(slot) else {
                continue;
            };
            self.sizes.push(line.bytes);
            if let Some(Ready::Known(known)) = self.ready.last_mut()
                && known.set == set
                && known.fusion.is_some()
                && known.fusion == line.fusion
                && known.bytes.checked_add(line.bytes).is_some()
                && known.run.extend(slot)
            {
                known.bytes += line.bytes;
                continue;
            }
            self.urgent |= line.signature.op == Op::Barrier;
            self.ready.push(Ready::Known(Known {
                set,
                to: Arc::clone(to),
                signature: Arc::clone(&line.signature),
                fusion: line.fusion,
                bytes: line.bytes,
                run: SlotRun {
                    first: slot,
                    len: 1,
                },
            }));
        }
    }

    /// Turns everything that is ready into messages.
    fn dispatch(&mut self) {
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
        let unheard = self.tree.is_some() && to.iter().any(|link| self.sent[*link as usize] < mark);
        if !stream.open.is_empty() || !stream.evicted.is_empty() || unheard {
            send(mark, stream.open, stream.evicted);
            to.iter().for_each(|link| self.sent[*link as usize] = mark);
        }
    }

    /// Takes back a message that has been sent, so that the next needs no allocation.
    pub fn recycle(&mut self, message: ToWorker) {
        self.buffers.recycle(message);
    }

    /// When to call [`Coordinator::handle_timeout`].
    pub fn next_deadline(&self) -> Option<Time> {
        let stall = match self.phase {
            CoordinatorPhase::Running => self.stall.next_check(),
            CoordinatorPhase::Stopping(_) | CoordinatorPhase::Over => None,
        };
        let batch = (!self.ready.is_empty()).then(|| self.batch_deadline());
        stall.into_iter().chain(batch).min()
    }

    fn batch_deadline(&self) -> Time {
        Time(self.ready_since.0.saturating_add(self.cfg.batch_delay_ns))
    }
}

/// The rank that made a submission, also where an aggregator forwards it.
fn speaker(from: Rank, item: &Submission) -> Rank {
    match item {
        Submission::Of {
            ranks, subtrees, ..
        } if subtrees.is_empty() => match ranks[..] {
            [one] => one,
            _ => from,
        },
        _ => from,
    }
}

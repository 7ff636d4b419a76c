//! The job's one arbiter: counts who is ready, validates, fuses, orders and answers.

use crate::cache::Cache;
use crate::error::{StopReason, clip};
use crate::fusion::FusionKey;
use crate::join::Joins;
use crate::limits::{PENDING_MAX, TUNED_VALUES_MAX};
use crate::lookup::Slab;
use crate::lost::PeerLost;
use crate::message::{Item, Response, SetKey, Slot, SlotRun, Submission, ToCoordinator, ToWorker};
use crate::process_sets::SetTable;
use crate::rank_set::RankSet;
use crate::readiness::ReadinessBitmap;
use crate::refusal::Refusal;
use crate::signature::RequestSignature;
use crate::stall::{StallClock, StallReport};
use crate::tree::{Links, Tree};
use crate::types::{Generation, Op, ProcessSetId, Rank, Time};
use crate::validation;
use std::collections::VecDeque;
use std::sync::Arc;

mod arrive;
mod dispatch;
mod late;
mod ready;
use dispatch::{Buffers, Known, Ready, Run};

/// All settings of the negotiation; they live only here, so ranks cannot differ in them.
#[derive(Clone, Debug)]
pub struct CoordinatorConfig {
    /// Ranks of the job.
    pub size: u32,
    /// This life of the job.
    pub generation: Generation,
    /// Bytes that one fused execution may have; 0 fuses only empty tensors.
    pub fusion_threshold_bytes: u64,
    /// Response cache entries per process set; 0 turns the cache off.
    pub cache_capacity: usize,
    /// How long a ready response may be held back to batch more; 0 never holds.
    pub batch_delay_ns: u64,
    /// Every call is a fusion batch of its own.
    pub disable_group_fusion: bool,
    /// When to report late ranks; `None` never does.
    pub stall: Option<StallConfig>,
}

/// When a request counts as stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StallConfig {
    /// Report after this long, and again every such period.
    pub warning_ns: u64,
    /// Shut the job down after this long; ignored when shorter than the warning time.
    pub shutdown_ns: Option<u64>,
}

impl CoordinatorConfig {
    /// Horovod's defaults for a job of this size.
    pub fn new(size: u32, generation: Generation) -> Self {
        Self {
            size,
            generation,
            fusion_threshold_bytes: 128 << 20,
            cache_capacity: 1024,
            batch_delay_ns: 0,
            disable_group_fusion: false,
            stall: Some(StallConfig {
                warning_ns: 60_000_000_000,
                shutdown_ns: None,
            }),
        }
    }
}

/// What the engine of rank 0 shall do; drain with [`Coordinator::poll_action`].
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
    phase: Phase,
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
    /// What each link was told of evictions.
    told: Vec<u64>,
    actions: VecDeque<CoordinatorAction>,
}

#[derive(Debug)]
enum Phase {
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

/// Who has asked for a name, and for what.
#[derive(Debug)]
struct Pending {
    arrived: RankSet,
    /// The link that asked first.
    starter: usize,
    since: Time,
    report_at: Time,
    /// Place among all arrivals, to release in order.
    order: u64,
    /// What the first asked for; so did everybody who is not among `others`.
    signature: Arc<RequestSignature>,
    others: Vec<(RankSet, Arc<RequestSignature>)>,
    /// Allgather: first dimensions per rank.
    rows: Vec<(Rank, Vec<u64>)>,
}

/// Why a rank's message is impossible.
type Violation = &'static str;

/// Who said something: the rank itself where an aggregator only passes it on.
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
            phase: Phase::Running,
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
            told: vec![0; link_count],
            actions: VecDeque::new(),
            cfg,
        }
    }

    /// A rank said something. Impossible content ends the generation and names that rank.
    pub fn handle_message(&mut self, now: Time, from: Rank, msg: &ToCoordinator) {
        self.now = self.now.max(now);
        // A message of another life of the job is nobody's fault, only late.
        if msg.generation != self.cfg.generation || matches!(self.phase, Phase::Over) {
            return;
        }
        if let Err((culprit, violation)) = self.apply(from, msg) {
            let lost = PeerLost::broke_protocol(culprit, violation);
            self.end(&lost, None);
            self.actions.push_back(CoordinatorAction::Abort(lost));
        }
        self.check_stalls();
    }

    /// From now on one fused execution may have so many bytes.
    pub fn set_fusion_threshold(&mut self, bytes: u64) {
        self.cfg.fusion_threshold_bytes = bytes;
    }

    /// From now on a ready response may be held back so long, also one that is held already.
    pub fn set_batch_delay(&mut self, ns: u64) {
        self.cfg.batch_delay_ns = ns;
    }

    /// Tells every rank new values for its data plane. Each gets them as [`crate::WorkerAction::Tuned`] at
    /// the same place of the order: after all that is ready by now, before all that becomes ready later.
    /// No effect once the job is stopping.
    ///
    /// # Panics
    /// With more than [`crate::TUNED_VALUES_MAX`] values, which nobody could decode.
    pub fn announce_tuning(&mut self, values: &[u64]) {
        assert!(
            values.len() <= TUNED_VALUES_MAX,
            "{} tuned values",
            values.len()
        );
        if matches!(self.phase, Phase::Running) {
            self.urgent = true;
            self.push_ready(Ready::Tuned(values.into()));
        }
    }

    /// A rank is gone: tells all others, then does nothing more.
    pub fn handle_peer_lost(&mut self, now: Time, lost: PeerLost) {
        self.now = self.now.max(now);
        self.end(&lost, Some(lost.rank));
    }

    /// Ends the job with this report because it can never go on; `by` is to blame.
    pub fn give_up(&mut self, now: Time, by: Rank, text: &str) {
        self.now = self.now.max(now);
        if matches!(self.phase, Phase::Running) {
            let report = clip(text.to_owned());
            self.stop(by, StopReason::Deadlock { report });
        }
    }

    /// Time has passed; call at [`Coordinator::next_deadline`] at the latest.
    pub fn handle_timeout(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.check_stalls();
    }

    /// When to call [`Coordinator::handle_timeout`].
    pub fn next_deadline(&self) -> Option<Time> {
        let stall = match self.phase {
            Phase::Running => self.stall.next_check(),
            Phase::Stopping(_) | Phase::Over => None,
        };
        let batch = (!self.ready.is_empty()).then(|| self.batch_deadline());
        stall.into_iter().chain(batch).min()
    }

    /// Takes back a message that has been sent, so that the next needs no allocation.
    pub fn recycle(&mut self, message: ToWorker) {
        self.buffers.recycle(message);
    }

    /// What to do next; call until `None` after every other method.
    pub fn poll_action(&mut self) -> Option<CoordinatorAction> {
        if !self.ready.is_empty() && (self.urgent || self.now >= self.batch_deadline()) {
            self.dispatch();
        }
        self.actions.pop_front()
    }

    fn batch_deadline(&self) -> Time {
        Time(self.ready_since.0.saturating_add(self.cfg.batch_delay_ns))
    }

    fn apply(&mut self, from: Rank, msg: &ToCoordinator) -> Result<(), (Rank, Violation)> {
        let link = self.sets.links.find(from);
        let link = link.ok_or((from, "has no link to the coordinator"))?;
        for item in &msg.items {
            match (&mut self.phase, item) {
                (Phase::Stopping(confirmed), Submission::ShutdownAck) => {
                    if !confirmed.insert(Rank(link as u32)) {
                        return Err((from, "confirmed the shutdown twice"));
                    }
                    if confirmed.len() == self.everybody.len() {
                        self.answer(Arc::clone(&self.everybody), Response::Stopped);
                        self.dispatch();
                        self.phase = Phase::Over;
                    }
                }
                (Phase::Running | Phase::Stopping(_), Submission::Lost(lost)) => {
                    let lost = lost.clone();
                    self.end(&lost, None);
                }
                // Sent before the rank knew that everybody stops.
                (Phase::Stopping(_), _) => {}
                (Phase::Running, item) => self
                    .submitted(link, item)
                    .map_err(|violation| (speaker(from, item), violation))?,
                (Phase::Over, _) => {}
            }
        }
        // Afterwards, because the items may have been asked for before the rank knew.
        if !self.cache.confirm(link, msg.seen) {
            return Err((from, "confirmed an eviction that was not announced"));
        }
        Ok(())
    }

    /// Everybody stops. What was agreed before is still carried out.
    fn stop(&mut self, by: Rank, why: StopReason) {
        self.answer(Arc::clone(&self.everybody), Response::Shutdown { by, why });
        self.phase = Phase::Stopping(RankSet::default());
    }

    /// The generation is over: tells everybody but the lost rank.
    fn end(&mut self, lost: &PeerLost, except: Option<Rank>) {
        if matches!(self.phase, Phase::Over) {
            return;
        }
        self.phase = Phase::Over;
        self.ready.clear();
        let response = Arc::new(Response::Lost(lost.clone().clipped()));
        let links = &self.sets.links;
        let to = (0..links.len())
            .map(|link| links.get(link).rank)
            .filter(|rank| Some(*rank) != except)
            .collect();
        let message = ToWorker {
            generation: self.cfg.generation,
            mark: self.cache.mark(),
            responses: vec![response],
            evicted: Vec::new(),
        };
        self.actions.push_back(CoordinatorAction::Send(to, message));
    }

    fn check_stalls(&mut self) {
        if !matches!(self.phase, Phase::Running) || !self.stall.due(self.now) {
            return;
        }
        let next = self.pend_late();
        let report = self.stall_report();
        self.stall.check_by(next);
        let Some(report) = report else { return };
        let culprit = report.shutdown.then(|| report.worst()).flatten();
        let blame = culprit.map(|(rank, request)| (rank, request.name.to_string()));
        self.actions.push_back(CoordinatorAction::Stall(report));
        if let Some((rank, tensor)) = blame {
            self.stop(rank, StopReason::Stalled { tensor });
        }
    }

    fn stall_report(&mut self) -> Option<StallReport> {
        let waiting = late::waiting(&mut self.entries, &self.sets, &self.joins);
        self.stall
            .inspect(self.now, waiting.map(|(_, request)| request))
    }
}

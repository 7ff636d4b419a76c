//! The job's one arbiter: counts who is ready, checks agreement, fuses, orders and answers.

use crate::agreement;
use crate::cache::Cache;
use crate::content::Content;
use crate::error::{OpError, PeerLost, asked_by, clip};
use crate::fusion::FusionKey;
use crate::join::Joins;
use crate::limits::{NAME_BYTES_MAX, PENDING_MAX, TUNED_VALUES_MAX};
use crate::lookup::Slab;
use crate::message::{Item, Response, SetKey, Slot, Submission, ToCoordinator, ToWorker};
use crate::process_sets::SetTable;
use crate::rank_set::RankSet;
use crate::stall::{StallClock, StallReport};
use crate::types::{Generation, Op, ProcessSetId, Rank, Time};
use std::collections::VecDeque;
use std::sync::Arc;

mod dispatch;
mod ready;
use dispatch::{Ready, Run};

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
    /// The response cache of a set is too small (once per set); see [`crate::CACHE_EVICTION_TEXT`].
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
    joins: Joins,
    /// Pending requests per rank.
    outstanding: Vec<usize>,
    arrivals: u64,
    stall: StallClock,
    ready: Vec<Ready>,
    ready_since: Time,
    /// Something is ready that must not be held back.
    urgent: bool,
    next_seq: u64,
    everybody: Arc<[Rank]>,
    nobody: Arc<[Rank]>,
    spare: Vec<RankSet>,
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
    since: Time,
    report_at: Time,
    /// Place among all arrivals, to release in order.
    order: u64,
    /// What the first asked for; so did everybody who is not among `others`.
    content: Arc<Content>,
    others: Vec<(Rank, Arc<Content>)>,
    /// Allgather: first dimensions per rank.
    rows: Vec<(Rank, Vec<u64>)>,
}

/// Why a rank's message is impossible.
type Violation = &'static str;

impl Coordinator {
    /// A coordinator that knows only the set of all ranks.
    pub fn new(cfg: CoordinatorConfig) -> Self {
        let sets = SetTable::new(cfg.size);
        let everybody = sets.everybody();
        Self {
            now: Time::default(),
            phase: Phase::Running,
            sets,
            entries: Slab::default(),
            cache: Cache::new(cfg.cache_capacity, cfg.size),
            joins: Joins::default(),
            outstanding: vec![0; everybody.len()],
            arrivals: 0,
            stall: StallClock::new(cfg.stall),
            ready: Vec::new(),
            ready_since: Time::default(),
            urgent: false,
            next_seq: 0,
            everybody,
            nobody: [].into(),
            spare: Vec::new(),
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
        if let Err(violation) = self.apply(from, msg) {
            let lost = PeerLost::broke_protocol(from, violation);
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

    fn apply(&mut self, from: Rank, msg: &ToCoordinator) -> Result<(), Violation> {
        if from.0 >= self.cfg.size {
            return Err("is not a rank of this job");
        }
        if !self.cache.confirm(from, msg.seen) {
            return Err("confirmed an eviction that was not announced");
        }
        for item in &msg.items {
            match (&mut self.phase, item) {
                (Phase::Stopping(confirmed), Submission::ShutdownAck) => {
                    if !confirmed.insert(from) {
                        return Err("confirmed the shutdown twice");
                    }
                    if confirmed.len() == self.everybody.len() {
                        self.answer(Arc::clone(&self.everybody), Response::Stopped);
                        self.dispatch();
                        self.phase = Phase::Over;
                    }
                }
                // Sent before the rank knew that everybody stops.
                (Phase::Stopping(_), _) => {}
                (Phase::Running, item) => self.submitted(from, item)?,
                (Phase::Over, _) => {}
            }
        }
        Ok(())
    }

    fn submitted(&mut self, from: Rank, item: &Submission) -> Result<(), Violation> {
        match item {
            Submission::Hits(run) => run.slots().try_for_each(|slot| self.hit(from, slot, None)),
            Submission::GatherHit { slot, first_dims } => {
                self.hit(from, *slot, Some(first_dims.clone()))
            }
            Submission::New { set, name, content } => {
                self.asked(from, *set, name, Arc::clone(content))
            }
            Submission::Join => {
                if !self.joins.add(self.now, from) {
                    return Err("joined twice");
                }
                self.release_after_join();
                Ok(())
            }
            Submission::Shutdown => {
                self.stop(from, &asked_by(from));
                Ok(())
            }
            Submission::ShutdownAck => Err("confirmed a shutdown that was not announced"),
        }
    }

    fn hit(&mut self, from: Rank, slot: Slot, rows: Option<Vec<u64>>) -> Result<(), Violation> {
        let (entry, content) = if let Some(line) = self.cache.touch(slot) {
            (line.entry, Arc::clone(&line.content))
        } else {
            let retired = self
                .cache
                .retired(slot)
                .ok_or("used a slot that is not in use")?;
            if self.sets.get(retired.set).is_none() {
                // The set was removed while this was on its way.
                return Ok(());
            }
            let (set, name) = (retired.set, Arc::clone(&retired.name));
            let content = Arc::clone(&retired.content);
            (self.entry_of(set, &name)?, content)
        };
        if (content.op == Op::Allgather) != rows.is_some()
            || rows
                .as_ref()
                .is_some_and(|rows| rows.len() != content.tensors.len())
        {
            return Err("used a slot with the wrong number of rows");
        }
        self.arrive(from, entry, content, rows)
    }

    fn asked(
        &mut self,
        from: Rank,
        set: SetKey,
        name: &Arc<str>,
        content: Arc<Content>,
    ) -> Result<(), Violation> {
        if self.sets.get(set).is_none() {
            // Sent before the rank knew of the removal, or made up.
            return if self.sets.existed(set) {
                Ok(())
            } else {
                Err("used an unknown process set")
            };
        }
        match &content.op {
            Op::Join => return Err("sent a join in place of a request"),
            Op::AddProcessSet { ranks } => {
                let ascending = ranks.windows(2).all(|pair| pair[0] < pair[1]);
                if !ascending || ranks.last().is_none_or(|last| last.0 >= self.cfg.size) {
                    return Err("asked for an impossible process set");
                }
            }
            _ => {}
        }
        let rows = (content.op == Op::Allgather).then(|| {
            content
                .tensors
                .iter()
                .map(|t| t.shape.first().copied().unwrap_or(0))
                .collect()
        });
        let entry = self.entry_of(set, name)?;
        self.arrive(from, entry, content, rows)
    }

    fn entry_of(&mut self, set: SetKey, name: &Arc<str>) -> Result<usize, Violation> {
        let names = &mut self
            .sets
            .get_mut(set)
            .ok_or("used an unknown process set")?
            .names;
        if let Some(index) = names.get(&**name) {
            return Ok(*index);
        }
        let name = Arc::clone(name);
        let entry = Entry {
            set,
            name: Arc::clone(&name),
            cached: None,
            pending: None,
        };
        let index = self.entries.insert(entry);
        names.insert(name, index);
        Ok(index)
    }

    fn arrive(
        &mut self,
        from: Rank,
        index: usize,
        content: Arc<Content>,
        rows: Option<Vec<u64>>,
    ) -> Result<(), Violation> {
        let entry = self
            .entries
            .get_mut(index)
            .ok_or("used a slot that is not in use")?;
        let set = self
            .sets
            .get(entry.set)
            .ok_or("used an unknown process set")?;
        if !set.bits.contains(from) {
            return Err("used a foreign process set");
        }
        if self.outstanding[from.index()] >= PENDING_MAX {
            return Err("has too many requests pending");
        }
        let pending = match &mut entry.pending {
            Some(pending) => {
                if !Arc::ptr_eq(&pending.content, &content) && !pending.content.agrees(&content) {
                    pending.others.push((from, content));
                }
                pending
            }
            vacant => {
                self.arrivals += 1;
                vacant.insert(Pending {
                    arrived: self.spare.pop().unwrap_or_default(),
                    since: self.now,
                    report_at: self.stall.started(self.now),
                    order: self.arrivals,
                    content,
                    others: Vec::new(),
                    rows: Vec::new(),
                })
            }
        };
        if !pending.arrived.insert(from) {
            return Err("used a name that it has pending already");
        }
        pending.rows.extend(rows.map(|rows| (from, rows)));
        self.outstanding[from.index()] += 1;
        let absent = if self.joins.is_empty() {
            0
        } else {
            self.joins.absent_count(&set.bits, &pending.arrived)
        };
        if pending.arrived.len() + absent == set.members.len() {
            self.complete(index);
        }
        Ok(())
    }

    /// A rank has joined: what waited only for it can go on, in the order of arrival.
    fn release_after_join(&mut self) {
        let mut released: Vec<(u64, usize)> = self
            .entries
            .iter()
            .filter_map(|(index, entry)| {
                let pending = entry.pending.as_ref()?;
                let set = self.sets.get(entry.set)?;
                let absent = self.joins.absent_count(&set.bits, &pending.arrived);
                (pending.arrived.len() + absent == set.members.len())
                    .then_some((pending.order, index))
            })
            .collect();
        released.sort_unstable();
        for (_, index) in released {
            // An earlier one of these may have removed the process set.
            if self
                .entries
                .get(index)
                .is_some_and(|entry| entry.pending.is_some())
            {
                self.complete(index);
            }
        }
        if let Some(last) = self.joins.finish(self.cfg.size) {
            self.answer(Arc::clone(&self.everybody), Response::Joined { last });
        }
    }

    /// Everybody stops. What was agreed before is still carried out.
    fn stop(&mut self, by: Rank, reason: &str) {
        let reason = clip(reason.to_owned()).into();
        self.answer(
            Arc::clone(&self.everybody),
            Response::Shutdown { by, reason },
        );
        self.phase = Phase::Stopping(RankSet::default());
    }

    /// The generation is over: tells everybody but the lost rank.
    fn end(&mut self, lost: &PeerLost, except: Option<Rank>) {
        if matches!(self.phase, Phase::Over) {
            return;
        }
        self.phase = Phase::Over;
        self.ready.clear();
        let mut lost = lost.clone();
        lost.cause = clip(lost.cause);
        if lost.host.len() > NAME_BYTES_MAX {
            lost.host.clear();
        }
        let response = Arc::new(Response::Lost(lost));
        let to = match except {
            None => Arc::clone(&self.everybody),
            Some(lost) => self
                .everybody
                .iter()
                .filter(|r| **r != lost)
                .copied()
                .collect(),
        };
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
        let Some(report) = self.stall_report() else {
            return;
        };
        let culprit = report.shutdown.then(|| report.worst()).flatten();
        let blame = culprit.map(|(rank, request)| {
            (
                rank,
                format!(
                    "{rank} was stalled: {} waited for it too long.",
                    request.name
                ),
            )
        });
        self.actions.push_back(CoordinatorAction::Stall(report));
        if let Some((rank, reason)) = blame {
            self.stop(rank, &reason);
        }
    }

    fn stall_report(&mut self) -> Option<StallReport> {
        let (now, joins, sets) = (self.now, &self.joins, &self.sets);
        self.stall.inspect(
            now,
            self.entries.iter_mut().filter_map(|(_, entry)| {
                let pending = entry.pending.as_mut()?;
                let set = sets.get(entry.set)?;
                Some(crate::stall::Waiting {
                    set: set.id,
                    name: &entry.name,
                    members: &set.members,
                    arrived: &pending.arrived,
                    joins,
                    since: pending.since,
                    report_at: &mut pending.report_at,
                })
            }),
        )
    }
}

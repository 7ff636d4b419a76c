//! The aggregator, a node of the negotiation's tree: merges requests from below, and passes decisions on.
//!
//! Semantics are those of a star, in which every rank speaks to the coordinator itself. A known request goes up once,
//! when all ranks below have submitted it, which saves messages. The aggregator thereby withholds arrivals, so it sends
//! them where the coordinator may need them. This is so before a join (which excuses ranks), when a rank below submits the
//! same name otherwise, and when the slot is evicted. A long wait is another case: stragglers can be named then. From then
//! until the request has run, its slot is *open*: every submission is forwarded at once.

use crate::lateness::{Latest, LinkLateness, SetLateness};
use crate::limits::CACHE_CAPACITY_MAX;
use crate::lost::PeerLost;
use crate::message::{SetKey, Slot, SlotRun, Submission, ToCoordinator, ToWorker};
use crate::outbox::Outbox;
use crate::rank_set::RankSet;
use crate::readiness::ReadinessBitmap;
use crate::slots::{SlotMap, bits, blocks_of, runs_of, slots_of};
use crate::tree::{Links, Tree, position};
use crate::types::{Generation, Rank, Time};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

mod down;
mod merge;
use merge::Merge;

/// Configuration of an aggregator.
#[derive(Clone, Debug)]
pub struct AggregatorConfig {
    /// The rank it is on.
    pub rank: Rank,
    /// Current generation of the job.
    pub generation: Generation,
    /// How long a request that only some below have asked for may stay here unreported: by so much
    /// reports of stragglers are late at most, per level of the tree.
    pub hold_ns: u64,
}

/// Action for the engine; drain with [`Aggregator::poll_action`].
#[derive(Clone, Debug, PartialEq)]
pub enum AggregatorAction {
    /// Send to the parent.
    Up(ToCoordinator),
    /// Send to these: children, and maybe the worker of this rank. In order.
    Down(Arc<[Rank]>, ToWorker),
    /// A rank broke the protocol; everybody is being told. The generation is over.
    Abort(PeerLost),
}

/// One node of the tree, on a rank other than 0.
#[derive(Debug)]
pub struct Aggregator {
    cfg: AggregatorConfig,
    parent: Rank,
    now: Time,
    phase: AggregatorPhase,
    links: Links,
    everybody: Arc<[Rank]>,
    /// The links that lead to members of each set.
    sets: BTreeMap<SetKey, Arc<[u32]>>,
    readiness: ReadinessBitmap,
    /// Known names, to see when one is asked for otherwise.
    names: BTreeMap<(SetKey, Arc<str>), Slot>,
    named: SlotMap<(SetKey, Arc<str>)>,
    /// Somebody below has joined: nothing is withheld until all have.
    transparent: bool,
    late_at: Option<Time>,
    outbox: Outbox,
    merge: Merge,
    /// The last eviction announced, to each link announced, and confirmed by each.
    mark: u64,
    sent: Vec<u64>,
    seen: Vec<u64>,
    actions: VecDeque<AggregatorAction>,
    /// If it was asked for.
    lateness: Option<LinkLateness>,
}

#[derive(Debug)]
enum AggregatorPhase {
    Running,
    /// Everybody has been told to stop; which links have confirmed.
    Stopping(RankSet),
    Over,
}

/// Why a message is impossible.
type Violation = &'static str;

const TWICE: Violation = "used a name that it has pending already";

impl Aggregator {
    /// The aggregator of a rank that has children in `tree`; `None` for others and for rank 0,
    /// which has the coordinator.
    pub fn new(cfg: AggregatorConfig, tree: &Tree) -> Option<Self> {
        let parent = tree
            .parent(cfg.rank)
            .filter(|_| tree.aggregates(cfg.rank))?;
        let links = Links::of(tree, cfg.rank);
        let count = links.len();
        Some(Self {
            parent,
            now: Time::default(),
            phase: AggregatorPhase::Running,
            everybody: (0..count).map(|link| links.get(link).rank).collect(),
            sets: BTreeMap::from([(SetKey::GLOBAL, (0..count as u32).collect())]),
            links,
            readiness: ReadinessBitmap::default(),
            names: BTreeMap::new(),
            named: SlotMap::default(),
            transparent: false,
            late_at: None,
            outbox: Outbox::new(cfg.generation),
            merge: Merge::default(),
            mark: 0,
            sent: vec![0; count],
            seen: vec![0; count],
            actions: VecDeque::new(),
            lateness: None,
            cfg,
        })
    }

    /// Counts from now on how late each link is.
    pub fn count_lateness(&mut self) {
        self.readiness.note_alone();
        self.lateness = Some(LinkLateness::new(self.links.len()));
    }

    /// How late the ranks are that speak through this child, or this rank's own worker.
    pub fn lateness(&self, child: Rank) -> Vec<SetLateness> {
        let link = self.links.find(child);
        let late = self.lateness.as_ref().zip(link);
        late.map_or_else(Vec::new, |(late, link)| late.of(link))
    }

    /// The sets in which the links were compared with each other: others are all behind one link.
    pub fn compared_sets(&self) -> Vec<SetKey> {
        let late = self.lateness.as_ref();
        late.map_or_else(Vec::new, LinkLateness::compared)
    }

    /// A child or this rank's own worker said something to the coordinator.
    pub fn handle_up(&mut self, now: Time, from: Rank, msg: &ToCoordinator) {
        self.now = self.now.max(now);
        if msg.generation != self.cfg.generation || matches!(self.phase, AggregatorPhase::Over) {
            return;
        }
        if let Err(violation) = self.pass_up(from, msg) {
            let lost = PeerLost::broke_protocol(from, violation);
            self.end(&lost, None);
            self.actions.push_back(AggregatorAction::Abort(lost));
        }
    }

    /// The parent said something to the workers.
    pub fn handle_down(&mut self, now: Time, msg: &ToWorker) {
        self.now = self.now.max(now);
        if msg.generation != self.cfg.generation || matches!(self.phase, AggregatorPhase::Over) {
            return;
        }
        if let Err(violation) = self.pass_down(msg) {
            let lost = PeerLost::broke_protocol(self.parent, violation);
            self.end(&lost, None);
            self.actions.push_back(AggregatorAction::Abort(lost));
        }
    }

    /// A rank is gone: tells the coordinator and everybody below, then does nothing more.
    pub fn handle_peer_lost(&mut self, now: Time, lost: &PeerLost) {
        self.now = self.now.max(now);
        self.end(lost, Some(lost.rank));
    }

    /// Time has passed; call at [`Aggregator::next_deadline`] at the latest.
    pub fn handle_timeout(&mut self, now: Time) {
        self.now = self.now.max(now);
        if self.late_at.is_none_or(|at| self.now < at)
            || !matches!(self.phase, AggregatorPhase::Running)
        {
            return;
        }
        let (now, hold) = (self.now, self.cfg.hold_ns);
        self.give_up(|since| now.0 >= since.0.saturating_add(hold));
        let waiting = self.readiness.waiting().flat_map(|block| {
            let times: Vec<u64> = bits(block.waiting_slots())
                .map(|bit| block.since(bit).0)
                .collect();
            times
        });
        self.late_at = waiting.min().map(|since| Time(since.saturating_add(hold)));
    }

    /// When to call [`Aggregator::handle_timeout`].
    pub fn next_deadline(&self) -> Option<Time> {
        self.late_at
            .filter(|_| matches!(self.phase, AggregatorPhase::Running))
    }

    /// The next action; call until `None` after every other method.
    pub fn poll_action(&mut self) -> Option<AggregatorAction> {
        if let Some(message) = self.outbox.take() {
            self.merge.next_batch();
            return Some(AggregatorAction::Up(message));
        }
        self.actions.pop_front()
    }

    fn pass_up(&mut self, from: Rank, msg: &ToCoordinator) -> Result<(), Violation> {
        let link = self
            .links
            .find(from)
            .ok_or("has no link to its aggregator")?;
        if msg.seen > self.mark {
            return Err("confirmed an eviction that was not announced");
        }
        msg.items
            .iter()
            .try_for_each(|item| self.submitted(link, item))?;
        if matches!(self.phase, AggregatorPhase::Over) || self.seen[link] >= msg.seen {
            return Ok(());
        }
        self.seen[link] = msg.seen;
        let known_to_all = self.seen.iter().copied().min().unwrap_or(0);
        self.outbox.acknowledge(known_to_all);
        Ok(())
    }

    fn submitted(&mut self, link: usize, item: &Submission) -> Result<(), Violation> {
        match (&mut self.phase, item) {
            (AggregatorPhase::Over, _) => return Ok(()),
            (_, Submission::Lost(lost)) => {
                self.end(&lost.clone(), None);
                return Ok(());
            }
            (AggregatorPhase::Stopping(confirmed), Submission::ShutdownAck) => {
                if !confirmed.insert(Rank(link as u32)) {
                    return Err("confirmed the shutdown twice");
                }
                if confirmed.len() == self.links.len() {
                    self.outbox.push(Submission::ShutdownAck, 1);
                }
                return Ok(());
            }
            (AggregatorPhase::Stopping(_), _) => return Ok(()),
            (AggregatorPhase::Running, _) => {}
        }
        let (rank, leaf) = {
            let link = self.links.get(link);
            (link.rank, link.below.is_none())
        };
        let own = [rank];
        let (ranks, subtrees): (&[Rank], &[Rank]) = if leaf { (&own, &[]) } else { (&[], &own) };
        match item {
            Submission::Hits(run) => self.hits(link, ranks, subtrees, *run),
            Submission::Of {
                ranks,
                subtrees,
                item,
            } => {
                let from = self.links.get(link);
                let mut named = ranks.iter().chain(subtrees);
                if leaf || named.any(|rank| !from.leads_to(*rank)) {
                    return Err("spoke for ranks that do not speak through it");
                }
                if matches!(**item, Submission::ShutdownAck | Submission::Lost(_)) {
                    return Err("said what only a rank can say, for others");
                }
                if let Submission::Hits(run) = **item {
                    check_length(run)?;
                    for (number, mask) in blocks_of(run) {
                        self.open(number, mask);
                    }
                }
                self.forward_unusual(ranks, subtrees, item);
                Ok(())
            }
            Submission::Join | Submission::Shutdown(_) if !leaf => {
                Err("said what only a rank can say, for others")
            }
            Submission::ShutdownAck => Err("confirmed a shutdown that was not announced"),
            item => {
                self.forward_unusual(ranks, subtrees, item);
                Ok(())
            }
        }
    }

    /// Anything but counted hits: gives up first what is withheld and might depend on it.
    fn forward_unusual(&mut self, ranks: &[Rank], subtrees: &[Rank], item: &Submission) {
        match item {
            Submission::Join => {
                self.give_up(|_| true);
                self.transparent = true;
            }
            Submission::New { set, name, .. } => {
                if let Some(slot) = self.names.get(&(*set, Arc::clone(name))).copied() {
                    self.open(slot.0 / 64, 1 << (slot.0 % 64));
                }
            }
            _ => {}
        }
        self.forward(ranks, subtrees, item.clone());
    }

    fn hits(
        &mut self,
        link: usize,
        ranks: &[Rank],
        subtrees: &[Rank],
        run: SlotRun,
    ) -> Result<(), Violation> {
        check_length(run)?;
        for (number, mask) in blocks_of(run) {
            let mut counted = 0;
            if let Some(block) = self.readiness.block(number).filter(|_| !self.transparent) {
                counted = block.counted(mask);
                let to = self
                    .sets
                    .get(&block.set)
                    .ok_or("used an unknown process set")?;
                let at = position(to, link).ok_or("used a foreign process set")?;
                let (complete, begun) =
                    block.mark_ready(self.now, at, counted).map_err(|_| TWICE)?;
                if let (Some(late), Some(alone)) = (&mut self.lateness, block.alone_since(complete))
                {
                    let latest = match self.links.get(link).below {
                        None => Latest::Link(link),
                        Some(_) => Latest::Subtree(link),
                    };
                    late.completes(self.now, block.set, latest, alone);
                }
                if begun != 0 {
                    let late_at = Time(self.now.0.saturating_add(self.cfg.hold_ns));
                    self.late_at.get_or_insert(late_at);
                }
                runs_of(number, complete).for_each(|run| self.outbox.push_run(run));
            }
            let rest = mask & !counted;
            self.open(number, rest);
            for run in runs_of(number, rest) {
                self.forward(ranks, subtrees, Submission::Hits(run));
            }
        }
        Ok(())
    }

    /// Passes on who has asked for these slots so far, and from now on everybody at once.
    fn open(&mut self, number: u64, mask: u64) {
        let Some(block) = self.readiness.block(number) else {
            return;
        };
        let set = block.set;
        let opened: Vec<(u32, Vec<usize>)> = bits(block.live(mask))
            .map(|bit| (bit, block.open(bit)))
            .collect();
        let Some(to) = self.sets.get(&set).cloned() else {
            return;
        };
        for (bit, submitted) in opened {
            let (mut ranks, mut subtrees) = (Vec::new(), Vec::new());
            for position in submitted {
                let link = self.links.get(to[position] as usize);
                match &link.below {
                    None => ranks.push(link.rank),
                    Some(_) => subtrees.push(link.rank),
                }
            }
            if !ranks.is_empty() || !subtrees.is_empty() {
                ranks.sort_unstable();
                let first = Slot(number * 64 + u64::from(bit));
                let run = SlotRun { first, len: 1 };
                self.forward(&ranks, &subtrees, Submission::Hits(run));
            }
        }
    }

    /// Passes on all that is withheld since a time that `chosen` picks.
    fn give_up(&mut self, chosen: impl Fn(Time) -> bool) {
        let waiting: Vec<(u64, u64)> = self
            .readiness
            .waiting()
            .map(|block| {
                let waiting = bits(block.waiting_slots());
                let chosen = waiting.filter(|bit| chosen(block.since(*bit)));
                (block.number, chosen.fold(0, |mask, bit| mask | 1 << bit))
            })
            .collect();
        for (number, mask) in waiting {
            self.open(number, mask);
        }
    }

    fn forward(&mut self, ranks: &[Rank], subtrees: &[Rank], item: Submission) {
        let everybody = match &item {
            Submission::New { set, .. } => self.sets.get(set),
            _ => None,
        };
        let all = everybody.map(|to| (&**to, &self.links));
        self.merge
            .push(&mut self.outbox, ranks, subtrees, item, all);
    }

    /// The generation is over: tells the coordinator, and everybody below but the lost rank.
    fn end(&mut self, lost: &PeerLost, except: Option<Rank>) {
        if matches!(self.phase, AggregatorPhase::Over) {
            return;
        }
        self.phase = AggregatorPhase::Over;
        let lost = lost.clone().clipped();
        self.outbox.clear();
        self.outbox.push(Submission::Lost(lost.clone()), 1);
        self.send_lost(lost, except);
    }

    fn forget(&mut self, slot: Slot) {
        self.readiness.remove(slot);
        if let Some(name) = self.named.remove(slot)
            && self.names.get(&name) == Some(&slot)
        {
            self.names.remove(&name);
        }
    }

    fn forget_set(&mut self, set: SetKey) {
        self.sets.remove(&set);
        self.readiness.remove_set(set);
        let mine = (set, Arc::from(""))..(SetKey(set.0 + 1), Arc::from(""));
        let gone: Vec<_> = self
            .names
            .range(mine)
            .map(|(key, slot)| (key.clone(), *slot))
            .collect();
        for (name, slot) in gone {
            self.names.remove(&name);
            self.named.remove(slot);
        }
    }

    fn slots_among(&mut self, run: SlotRun) -> Vec<Slot> {
        blocks_of(run)
            .flat_map(|(number, mask)| {
                let live = self
                    .readiness
                    .block(number)
                    .map_or(0, |block| block.live(mask));
                slots_of(number, live)
            })
            .collect()
    }
}

/// More slots than can be in use need not be looked at one by one.
fn check_length(run: SlotRun) -> Result<(), Violation> {
    if run.len as usize > CACHE_CAPACITY_MAX || run.first.0.checked_add(run.len.into()).is_none() {
        return Err("used a slot that is not in use");
    }
    Ok(())
}

//! The aggregator's handling of decisions: learns from them and passes them on.

use super::{Aggregator, AggregatorAction, AggregatorPhase, Arc, RankSet, SetKey, Slot, Violation};
use crate::lost::PeerLost;
use crate::message::{Item, Response, SlotRun, ToWorker};
use crate::slots::blocks_of;
use crate::types::{Op, Rank};

/// Messages for one link.
#[derive(Clone, Default)]
struct Stream {
    responses: Vec<Arc<Response>>,
    evicted: Vec<SlotRun>,
}

impl Aggregator {
    pub(super) fn pass_down(&mut self, msg: &ToWorker) -> Result<(), Violation> {
        let count = self.links.len();
        let mut streams: Option<Vec<Stream>> = None;
        for (done, response) in msg.responses.iter().enumerate() {
            let to = self.learn(response)?;
            let partly = to.filter(|to| to.len() < count);
            if partly.is_some() && streams.is_none() {
                let before = Stream {
                    responses: msg.responses[..done].to_vec(),
                    evicted: Vec::new(),
                };
                streams = Some(vec![before; count]);
            }
            if let Some(streams) = &mut streams {
                let mut push = |link: usize| streams[link].responses.push(Arc::clone(response));
                match partly {
                    None => (0..count).for_each(push),
                    Some(to) => to.iter().for_each(|link| push(*link as usize)),
                }
            }
        }
        for run in &msg.evicted {
            self.evict(*run, msg, &mut streams)?;
        }
        self.mark = self.mark.max(msg.mark);
        match streams {
            None => {
                self.sent.fill(self.mark);
                let everybody = Arc::clone(&self.everybody);
                self.actions
                    .push_back(AggregatorAction::Down(everybody, msg.clone()));
            }
            Some(streams) => self.send_streams(streams, msg),
        }
        Ok(())
    }

    fn send_streams(&mut self, streams: Vec<Stream>, msg: &ToWorker) {
        for (link, stream) in streams.into_iter().enumerate() {
            let news = self.sent[link] < self.mark;
            if stream.responses.is_empty() && stream.evicted.is_empty() && !news {
                continue;
            }
            self.sent[link] = self.mark;
            let message = ToWorker {
                generation: msg.generation,
                mark: msg.mark,
                responses: stream.responses,
                evicted: stream.evicted,
            };
            let to = [self.links.get(link).rank].into();
            self.actions.push_back(AggregatorAction::Down(to, message));
        }
    }

    /// Takes note of a decision; the links it is for, `None` for all.
    fn learn(&mut self, response: &Response) -> Result<Option<Arc<[u32]>>, Violation> {
        const UNKNOWN: Violation = "ordered work on an unknown process set";
        match response {
            Response::Execute { set, op, items, .. } => {
                let to = Arc::clone(self.sets.get(set).ok_or(UNKNOWN)?);
                for item in items {
                    match item {
                        Item::Slots(run) => {
                            super::check_length(*run)?;
                            for (number, mask) in blocks_of(*run) {
                                if let Some(block) = self.readiness.block(number) {
                                    block.close(mask);
                                }
                            }
                        }
                        Item::New {
                            name,
                            slot: Some(slot),
                            ..
                        } => self.learn_slot(*set, op, name, *slot, to.len()),
                        _ => {}
                    }
                }
                return Ok(Some(to));
            }
            Response::Fail { set, .. } => {
                return Ok(Some(Arc::clone(self.sets.get(set).ok_or(UNKNOWN)?)));
            }
            Response::SetAdded { key, ranks, .. } => {
                let members: RankSet = ranks.iter().copied().collect();
                self.sets.insert(*key, self.links.to(&members).into());
            }
            Response::SetRemoved { key, .. } => {
                if let Some(key) = key {
                    self.forget_set(*key);
                }
            }
            Response::Joined { .. } => self.transparent = false,
            Response::Shutdown { .. } => {
                if matches!(self.phase, AggregatorPhase::Running) {
                    self.phase = AggregatorPhase::Stopping(RankSet::default());
                    self.outbox.clear();
                }
            }
            Response::Stopped | Response::Lost(_) => self.phase = AggregatorPhase::Over,
            Response::Tuned { .. } => {}
        }
        Ok(None)
    }

    fn learn_slot(&mut self, set: SetKey, op: &Op, name: &Arc<str>, slot: Slot, links: usize) {
        self.readiness.add(slot, set, links);
        if *op == Op::Allgather
            && let Some((block, bit)) = self.readiness.find(slot)
        {
            // Every rank comes with rows of its own.
            block.open(bit);
        }
        let name = (set, Arc::clone(name));
        self.names.insert(name.clone(), slot);
        self.named.insert(slot, name);
    }

    /// Slots go out of use; who has asked for them is passed on first.
    fn evict(
        &mut self,
        run: SlotRun,
        msg: &ToWorker,
        streams: &mut Option<Vec<Stream>>,
    ) -> Result<(), Violation> {
        super::check_length(run)?;
        for slot in self.slots_among(run) {
            let set = self.readiness.find(slot).map(|(block, _)| block.set);
            let to = set.and_then(|set| self.sets.get(&set)).cloned();
            let count = self.links.len();
            if let Some(to) = to.filter(|to| to.len() < count || streams.is_some()) {
                let all = || Stream {
                    responses: msg.responses.clone(),
                    evicted: Vec::new(),
                };
                if streams.is_none() {
                    // Messages for all links so far go to every link below, runs before this one included.
                    let mut before = all();
                    before.evicted = evicted_before(&msg.evicted, slot);
                    *streams = Some(vec![before; count]);
                }
                for link in to.iter() {
                    if let Some(streams) = streams {
                        push_slot(&mut streams[*link as usize].evicted, slot);
                    }
                }
            }
            self.open(slot.0 / 64, 1 << (slot.0 % 64));
            self.forget(slot);
        }
        Ok(())
    }

    pub(super) fn send_lost(&mut self, lost: PeerLost, except: Option<Rank>) {
        let to: Arc<[Rank]> = self
            .everybody
            .iter()
            .filter(|rank| Some(**rank) != except)
            .copied()
            .collect();
        let message = ToWorker {
            generation: self.cfg.generation,
            mark: self.mark,
            responses: vec![Arc::new(Response::Lost(lost))],
            evicted: Vec::new(),
        };
        self.actions.push_back(AggregatorAction::Down(to, message));
    }
}

/// The part of an announcement that comes before a slot.
fn evicted_before(evicted: &[SlotRun], slot: Slot) -> Vec<SlotRun> {
    let mut before = Vec::new();
    for run in evicted {
        let last = run.first.0 + u64::from(run.len);
        if (run.first.0..last).contains(&slot.0) {
            let len = (slot.0 - run.first.0) as u32;
            if len > 0 {
                before.push(SlotRun {
                    first: run.first,
                    len,
                });
            }
            break;
        }
        before.push(*run);
    }
    before
}

fn push_slot(runs: &mut Vec<SlotRun>, slot: Slot) {
    if !runs.last_mut().is_some_and(|run| run.extend(slot)) {
        runs.push(SlotRun {
            first: slot,
            len: 1,
        });
    }
}

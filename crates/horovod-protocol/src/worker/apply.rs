//! The worker's handling of the coordinator's decisions.

use super::{Cached, Entry, Violation, Worker, WorkerSet, WorkerState};
use crate::action::{Completion, ExecItem, Execution, WorkerAction};
use crate::error::{OpError, StopReason, listed};
use crate::limits::FUSED_ITEMS_MAX;
use crate::lookup::Lookup;
use crate::lost::PeerLost;
use crate::message::{Item, Response, SetKey, Slot, Submission, ToWorker};
use crate::types::{Device, EntryId, Op, OperationTag, ProcessSetId, Rank, Seq, TensorMeta};
use std::sync::Arc;

impl Worker {
    /// Handles a message of the coordinator.
    pub fn handle_message(&mut self, msg: &ToWorker) {
        // A message of another generation is only late, not an error.
        if msg.generation != self.cfg.generation || matches!(self.state, WorkerState::Over(_)) {
            return;
        }
        let checked = self.apply(msg);
        if let Err(violation) = checked {
            self.end(PeerLost::broke_protocol(Rank(0), violation));
        }
    }

    fn apply(&mut self, msg: &ToWorker) -> Result<(), Violation> {
        for response in &msg.responses {
            self.respond(response)?;
        }
        for slot in msg.evicted.iter().flat_map(|run| run.slots()) {
            let index = self
                .slots
                .remove(slot)
                .ok_or("evicted a slot that is not in use")?;
            if let Some(entry) = self.entries.get_mut(index)
                && entry
                    .cached
                    .as_ref()
                    .is_some_and(|cached| cached.slot == slot)
            {
                entry.cached = None;
                self.forget_if_unused(index);
            }
        }
        self.outbox.acknowledge(msg.mark);
        Ok(())
    }

    fn respond(&mut self, response: &Response) -> Result<(), Violation> {
        match response {
            Response::Execute { .. } => self.on_execute(response),
            Response::Fail {
                set,
                name,
                absent,
                error,
            } => {
                // Also applies if this rank did not send the request: the tags of the other ranks are consumed.
                if let Some(cached) = self.cached_of(*set, name) {
                    cached.last = None;
                }
                if self.is_absent(absent) {
                    return Ok(());
                }
                self.complete(*set, name, Err(error.clone().into()))
            }
            Response::Joined { last } => {
                let id = self
                    .join
                    .take()
                    .ok_or("ended a join that was not asked for")?;
                self.pending -= 1;
                let joined = Ok(Completion::Joined { last: *last });
                self.actions.push_back(WorkerAction::Complete(id, joined));
                Ok(())
            }
            Response::SetAdded {
                name,
                key,
                id,
                ranks,
            } => {
                self.on_set_added(*key, *id, ranks)?;
                self.complete(SetKey::GLOBAL, name, Ok(Completion::SetAdded(*id)))
            }
            Response::SetRemoved { name, key } => {
                if let Some(key) = key {
                    self.on_set_removed(*key)?;
                }
                self.complete(
                    SetKey::GLOBAL,
                    name,
                    Ok(Completion::SetRemoved(key.is_some())),
                )
            }
            Response::Shutdown { by, why } => {
                self.on_shutdown(*by, why);
                Ok(())
            }
            Response::Stopped => match &self.state {
                WorkerState::Stopping { .. } => {
                    self.stop();
                    Ok(())
                }
                _ => Err("ended a shutdown that was not announced"),
            },
            Response::Lost(lost) => {
                self.end(lost.clone());
                Ok(())
            }
            Response::Tuned { seq, values } => {
                self.follow(*seq)?;
                let (seq, values) = (*seq, Arc::clone(values));
                self.actions.push_back(WorkerAction::Tuned { seq, values });
                Ok(())
            }
        }
    }

    /// Checks that the sequence number is higher than the last one.
    fn follow(&mut self, seq: Seq) -> Result<(), Violation> {
        if self.last_seq >= Some(seq) {
            return Err("went back in the order of its decisions");
        }
        self.last_seq = Some(seq);
        Ok(())
    }

    fn on_execute(&mut self, response: &Response) -> Result<(), Violation> {
        let Response::Execute {
            seq,
            set,
            op,
            device,
            absent,
            items,
        } = response
        else {
            return Ok(());
        };
        let id = *self
            .ids
            .get(set)
            .ok_or("ordered work on an unknown process set")?;
        let members = Arc::clone(
            &self
                .sets
                .get(&id)
                .ok_or("ordered work on an unknown process set")?
                .members,
        );
        if members.binary_search(&self.cfg.rank).is_err() {
            return Err("ordered work on a foreign process set");
        }
        let contributors = members
            .len()
            .checked_sub(absent.len())
            .ok_or("too many absent members")?;
        let run = Run {
            seq: *seq,
            set: id,
            op,
            device: *device,
            members: members.len(),
            absent: self.is_absent(absent),
        };
        self.follow(*seq)?;
        let mut exec_items = self.spare.pop().unwrap_or_default();
        let mut tag = None;
        exec_items.reserve(items.len());
        for item in items {
            match item {
                Item::Slots(slots) => {
                    exec_items.reserve(FUSED_ITEMS_MAX.min(slots.len as usize));
                    for slot in slots.slots() {
                        let (item, own) = self.run_slot(&run, slot, &[])?;
                        exec_items.push(item);
                        tag = own;
                    }
                }
                Item::GatherSlot { slot, first_dims } => {
                    exec_items.push(self.run_slot(&run, *slot, first_dims)?.0);
                }
                Item::New {
                    name,
                    tensors,
                    slot,
                    first_dims,
                } => {
                    exec_items.push(self.run_new(&run, name, tensors, *slot, first_dims)?);
                }
            }
        }
        if *op == Op::Barrier {
            // A barrier is complete when all members have arrived; nothing is executed.
            let ids = exec_items.drain(..).filter_map(|item| item.entry);
            let ended = ids.map(|id| WorkerAction::Complete(id, Ok(Completion::Done)));
            self.actions.extend(ended);
            self.spare.push(exec_items);
            return Ok(());
        }
        let tag = tag.filter(|_| exec_items.len() == 1 && absent.is_empty());
        self.actions.push_back(WorkerAction::Execute(Execution {
            seq: *seq,
            set: id,
            members,
            op: op.clone(),
            device: *device,
            contributors: contributors as u32,
            items: exec_items,
            tag,
        }));
        Ok(())
    }

    /// Returns the item of a slot, and the tag that the slot had before.
    fn run_slot(
        &mut self,
        run: &Run<'_>,
        slot: Slot,
        first_dims: &[u64],
    ) -> Result<(ExecItem, Option<OperationTag>), Violation> {
        let index = *self
            .slots
            .get_mut(slot)
            .ok_or("used a slot that is not in use")?;
        let entry = self
            .entries
            .get_mut(index)
            .ok_or("used a slot that is not in use")?;
        let cached = entry.cached.as_mut().filter(|c| c.slot == slot);
        let cached = cached.ok_or("used a slot that was replaced")?;
        if entry.set != run.set {
            return Err("used a slot of another process set");
        }
        let tag = cached.tag();
        cached.last = Some(run.seq);
        let (id, signature) = if run.absent {
            (None, &cached.signature)
        } else {
            let pending = entry
                .pending
                .as_ref()
                .ok_or("ordered work that was not asked for")?;
            (Some(pending.id), &pending.signature)
        };
        let item = ExecItem {
            entry: id,
            name: Arc::clone(&entry.name),
            tensors: Arc::clone(&signature.tensors),
            reordered: false,
            first_dims: run.rows(signature.tensors.len(), first_dims)?,
        };
        if !run.absent {
            entry.pending = None;
            self.pending -= 1;
        }
        Ok((item, tag))
    }

    fn run_new(
        &mut self,
        run: &Run<'_>,
        name: &Arc<str>,
        tensors: &Arc<[TensorMeta]>,
        slot: Option<Slot>,
        first_dims: &[u64],
    ) -> Result<ExecItem, Violation> {
        let first_dims = run.rows(tensors.len(), first_dims)?;
        if let Some(cached) = self.cached_in(run.set, name) {
            cached.last = None;
        }
        if run.absent {
            return Ok(ExecItem {
                entry: None,
                name: Arc::clone(name),
                tensors: Arc::clone(tensors),
                reordered: false,
                first_dims,
            });
        }
        let set = self
            .sets
            .get(&run.set)
            .ok_or("ordered work on an unknown process set")?;
        let index = *set
            .names
            .get(&**name)
            .ok_or("ordered work that was not asked for")?;
        let entry = self
            .entries
            .get_mut(index)
            .ok_or("ordered work that was not asked for")?;
        let asked = |p: &mut super::Pending| p.signature.may_run_as(run.op, run.device, tensors);
        let pending = entry.pending.take_if(asked);
        let pending = pending.ok_or("ordered other work than was asked for")?;
        self.pending -= 1;
        let own = &pending.signature.tensors;
        let reordered = !run.op.has_own_rows() && **own != **tensors;
        if reordered && slot.is_some() {
            return Err("gave a slot to what the ranks ask for in several orders");
        }
        let item = ExecItem {
            entry: Some(pending.id),
            name: Arc::clone(&entry.name),
            tensors: Arc::clone(if reordered { tensors } else { own }),
            reordered,
            first_dims,
        };
        match slot {
            Some(slot) => {
                if self.slots.insert(slot, index).is_some() {
                    return Err("gave out a slot twice");
                }
                entry.cached = Some(Cached {
                    slot,
                    signature: pending.signature,
                    last: Some(run.seq),
                });
            }
            None => self.forget_if_unused(index),
        }
        Ok(item)
    }

    /// Returns the cache entry of a name.
    fn cached_of(&mut self, set: SetKey, name: &str) -> Option<&mut Cached> {
        let id = *self.ids.get(&set)?;
        self.cached_in(id, name)
    }

    fn cached_in(&mut self, set: ProcessSetId, name: &str) -> Option<&mut Cached> {
        let index = *self.sets.get(&set)?.names.get(name)?;
        self.entries.get_mut(index)?.cached.as_mut()
    }

    fn complete(
        &mut self,
        set: SetKey,
        name: &str,
        result: Result<Completion, OpError>,
    ) -> Result<(), Violation> {
        const UNASKED: Violation = "answered what was not asked";
        let id = self.ids.get(&set).ok_or(UNASKED)?;
        let index = *self
            .sets
            .get(id)
            .and_then(|s| s.names.get(name))
            .ok_or(UNASKED)?;
        let pending = self
            .entries
            .get_mut(index)
            .and_then(|e| e.pending.take())
            .ok_or(UNASKED)?;
        self.pending -= 1;
        self.actions
            .push_back(WorkerAction::Complete(pending.id, result));
        self.forget_if_unused(index);
        Ok(())
    }

    fn forget_if_unused(&mut self, index: usize) {
        if let Some(entry) = self.entries.get(index)
            && entry.cached.is_none()
            && entry.pending.is_none()
            && let Some(entry) = self.entries.remove(index)
            && let Some(set) = self.sets.get_mut(&entry.set)
        {
            set.names.remove(&*entry.name);
        }
    }

    fn on_set_added(
        &mut self,
        key: SetKey,
        id: ProcessSetId,
        ranks: &Arc<[Rank]>,
    ) -> Result<(), Violation> {
        let ascending = ranks.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || ranks.last().is_none_or(|last| last.0 >= self.cfg.size) {
            return Err("registered an impossible process set");
        }
        if self.ids.contains_key(&key) || self.sets.contains_key(&id) {
            return Err("registered a process set twice");
        }
        self.ids.insert(key, id);
        let set = WorkerSet {
            key,
            members: Arc::clone(ranks),
            names: Lookup::default(),
        };
        self.sets.insert(id, set);
        Ok(())
    }

    fn on_set_removed(&mut self, key: SetKey) -> Result<(), Violation> {
        if key == SetKey::GLOBAL {
            return Err("removed the global process set");
        }
        let id = self
            .ids
            .remove(&key)
            .ok_or("removed an unknown process set")?;
        self.sets.remove(&id);
        self.fail_pending(&OpError::SetRemoved, Some(id));
        self.actions.push_back(WorkerAction::SetRemoved(id));
        let gone: Vec<usize> = self
            .entries
            .iter()
            .filter(|(_, e)| e.set == id)
            .map(|(i, _)| i)
            .collect();
        for index in gone {
            if let Some(Entry {
                cached: Some(cached),
                ..
            }) = self.entries.remove(index)
            {
                self.slots.remove(cached.slot);
            }
        }
        Ok(())
    }

    fn on_shutdown(&mut self, by: Rank, why: &StopReason) {
        if matches!(
            self.state,
            WorkerState::Stopping { .. } | WorkerState::Over(_)
        ) {
            return;
        }
        let why = why.clone();
        let names: Vec<_> = (self.entries.iter_mut())
            .filter(|(_, entry)| entry.pending.is_some())
            .map(|(_, entry)| Arc::clone(&entry.name))
            .collect();
        let error = OpError::Stopped {
            by,
            why: why.clone(),
            pending: listed(&names),
        };
        self.fail_pending(&error, None);
        self.outbox.clear();
        self.outbox.push(Submission::ShutdownAck, 1);
        self.state = WorkerState::Stopping { by, why };
    }

    fn stop(&mut self) {
        if let WorkerState::Stopping { by, why } = &self.state {
            let (by, why) = (*by, why.clone());
            self.actions.push_back(WorkerAction::ShutDown {
                by,
                why: why.clone(),
            });
            let pending = String::new();
            self.state = WorkerState::Over(OpError::Stopped { by, why, pending });
        }
    }

    pub(super) fn end(&mut self, lost: PeerLost) {
        match self.state {
            WorkerState::Over(_) => {}
            WorkerState::Stopping { .. } => self.stop(),
            WorkerState::Running | WorkerState::Asked(_) => {
                let error = OpError::Lost(Box::new(lost.clone()));
                self.fail_pending(&error, None);
                self.outbox.clear();
                self.state = WorkerState::Over(error);
                self.actions.push_back(WorkerAction::Abort(lost));
            }
        }
    }

    /// Fails the pending requests of one set, or of all sets, in the order of submission.
    fn fail_pending(&mut self, error: &OpError, set: Option<ProcessSetId>) {
        let mut failed = Vec::new();
        for (index, entry) in self.entries.iter_mut() {
            if set.is_none_or(|id| id == entry.set)
                && let Some(pending) = entry.pending.take()
            {
                failed.push((pending.id, index));
            }
        }
        for (_, index) in &failed {
            self.forget_if_unused(*index);
        }
        let mut ids: Vec<EntryId> = failed.into_iter().map(|(id, _)| id).collect();
        if set.is_none() {
            ids.extend(self.join.take());
        }
        ids.sort_unstable();
        self.pending -= ids.len();
        for id in ids {
            self.actions
                .push_back(WorkerAction::Complete(id, Err(error.clone())));
        }
    }

    fn is_absent(&self, absent: &[Rank]) -> bool {
        !absent.is_empty() && absent.binary_search(&self.cfg.rank).is_ok()
    }
}

/// Common properties of the items of one execution.
struct Run<'a> {
    seq: Seq,
    set: ProcessSetId,
    op: &'a Op,
    device: Device,
    members: usize,
    absent: bool,
}

impl Run<'_> {
    /// Returns the rows as `[tensor][member]`; empty unless the operation is an allgather.
    fn rows(&self, tensors: usize, flat: &[u64]) -> Result<Vec<Vec<u64>>, Violation> {
        if *self.op != Op::Allgather {
            return Ok(Vec::new());
        }
        if Some(flat.len()) != tensors.checked_mul(self.members) {
            return Err("announced the wrong number of rows");
        }
        Ok(flat.chunks(self.members).map(<[u64]>::to_vec).collect())
    }
}

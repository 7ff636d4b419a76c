//! Completed requests that were pending by rank: validation, effects, and the cache. Every member has sent the request,
//! or has joined and counts as absent.

use super::dispatch::{Ready, Run};
use super::{Coordinator, CoordinatorAction, Entry, Pending};
use crate::cache::Space;
use crate::fusion::FusionKey;
use crate::local::encoded_bytes;
use crate::message::{Item, Response, SetKey, Slot, SlotRun};
use crate::refusal::Refusal;
use crate::signature::RequestSignature;
use crate::types::{Op, ProcessSetId, Rank};
use crate::validation;
use std::sync::Arc;

/// Part of generated names, which are used once and therefore not cached.
const UNNAMED_MARK: &str = ".noname.";

impl Coordinator {
    /// Completes a request of which no member is missing. Members that have joined count as absent.
    pub(super) fn complete(&mut self, index: usize) {
        let Some(entry) = self.entries.get_mut(index) else {
            return;
        };
        let Some(mut pending) = entry.pending.take() else {
            return;
        };
        let (key, name, cached) = (entry.set, Arc::clone(&entry.name), entry.cached);
        let Some(set) = self.sets.get(key) else {
            return;
        };
        let (members, to) = (Arc::clone(&set.members), Arc::clone(&set.to));
        self.outstanding[pending.starter] -= 1;
        let absent: Arc<[Rank]> = if pending.arrived.len() == members.len() {
            Arc::clone(&self.nobody)
        } else {
            members
                .iter()
                .filter(|r| !pending.arrived.contains(**r))
                .copied()
                .collect()
        };
        let verdict = agreed(&name, &pending);
        // The signatures agree but are not all equal: they may differ only in memory order.
        let in_several_orders = verdict.is_ok() && !pending.others.is_empty();
        if in_several_orders {
            let row_major = pending.signature.in_row_major();
            let mut others = pending.others.iter();
            debug_assert!(others.all(|(_, other)| other.in_row_major().agrees(&row_major)));
            pending.signature = Arc::new(row_major);
        }
        let verdict = verdict
            .and_then(|()| validation::possible(&name, &pending.signature, !absent.is_empty()));
        let outcome = match (verdict, &pending.signature.op) {
            (Err(error), _) => Err(error),
            (Ok(()), Op::AddProcessSet { ranks }) => self.add_set(&name, ranks),
            (Ok(()), Op::RemoveProcessSet { set }) => {
                self.remove_set(&name, *set);
                Ok(())
            }
            (Ok(()), _) => {
                let context = RequestContext {
                    index,
                    key,
                    cached,
                    members: &members,
                    to: &to,
                    absent: &absent,
                    in_several_orders,
                };
                self.run(&context, &name, &mut pending)
            }
        };
        if let Err(error) = outcome {
            self.answer(
                to,
                Response::Fail {
                    set: key,
                    name,
                    absent,
                    error,
                },
            );
        }
        pending.arrived.clear();
        self.spare.push(pending.arrived);
        if let Some(slot) = cached
            && pending.signature.op != Op::Allgather
            && let Some((block, bit)) = self.readiness.find(slot)
        {
            block.close(1 << bit);
        }
        self.forget_if_unused(index);
    }

    /// Queues an answer that must not be delayed.
    pub(super) fn answer(&mut self, to: Arc<[u32]>, response: Response) {
        self.urgent = true;
        self.push_ready(Ready::Answer {
            to,
            response: Arc::new(response),
        });
    }

    pub(super) fn push_ready(&mut self, ready: Ready) {
        if self.ready.is_empty() {
            self.ready_since = self.now;
        }
        self.ready.push(ready);
    }

    fn run(
        &mut self,
        context: &RequestContext<'_>,
        name: &Arc<str>,
        pending: &mut Pending,
    ) -> Result<(), Refusal> {
        let signature = &pending.signature;
        let first_dims = flat_rows(&mut pending.rows, context.members, signature);
        let line = context
            .cached
            .and_then(|slot| Some((slot, self.cache.line(slot)?)));
        let known = line.filter(|(_, line)| {
            !context.in_several_orders
                && (Arc::ptr_eq(&line.signature, signature) || line.signature.agrees(signature))
        });
        let (fusion, mut bytes) = match known {
            Some((_, line)) => (line.fusion, line.bytes),
            None => (
                FusionKey::of(context.key, signature),
                tensor_bytes(signature),
            ),
        };
        let known = known.map(|(slot, _)| slot);
        if signature.op == Op::Allgather {
            bytes =
                validation::gathered_bytes(name, signature, &first_dims, context.members.len())?;
        }
        let wire_bytes = 20 + 10 * first_dims.len();
        let (item, wire_bytes) = match known {
            Some(slot) if signature.op == Op::Allgather => {
                (Item::GatherSlot { slot, first_dims }, wire_bytes)
            }
            Some(slot) => (
                Item::Slots(SlotRun {
                    first: slot,
                    len: 1,
                }),
                wire_bytes,
            ),
            None => {
                let slot = self.remember(context, name, signature);
                let wire_bytes = wire_bytes + encoded_bytes(name.len(), &signature.tensors);
                let (name, tensors) = (Arc::clone(name), Arc::clone(&signature.tensors));
                (
                    Item::New {
                        name,
                        tensors,
                        slot,
                        first_dims,
                    },
                    wire_bytes,
                )
            }
        };
        self.urgent |= signature.op == Op::Barrier;
        self.push_ready(Ready::Run(Run {
            set: context.key,
            to: Arc::clone(context.to),
            absent: Arc::clone(context.absent),
            signature: Arc::clone(signature),
            fusion: fusion.filter(|_| !self.cfg.disable_group_fusion),
            bytes,
            wire_bytes,
            item,
        }));
        Ok(())
    }

    /// Assigns a slot to the agreed request and returns the slot. Returns `None` if members are absent, because they
    /// would not receive the slot. Also returns `None` if the members' memory orders differ, because a slot stands for
    /// one order.
    fn remember(
        &mut self,
        context: &RequestContext<'_>,
        name: &Arc<str>,
        signature: &Arc<RequestSignature>,
    ) -> Option<Slot> {
        if let Some(old) = context.cached {
            self.cache.retire(old, context.to, name);
            self.readiness.remove(old);
            self.entries.get_mut(context.index)?.cached = None;
        }
        if !context.absent.is_empty() || context.in_several_orders || name.contains(UNNAMED_MARK) {
            return None;
        }
        match self.cache.space_for(context.key) {
            Space::Free => {}
            Space::Instead(victim) => self.evict(victim, context.to),
            Space::None { first } => {
                if first && let Some(set) = self.sets.get(context.key) {
                    self.actions
                        .push_back(CoordinatorAction::CacheEvicts(set.id));
                }
                return None;
            }
        }
        let bytes = tensor_bytes(signature);
        let slot = self
            .cache
            .insert(context.key, context.index, signature, bytes);
        self.readiness.add(slot, context.key, context.to.len());
        if signature.op == Op::Allgather
            && let Some((block, bit)) = self.readiness.find(slot)
        {
            // Every rank sends its own rows.
            block.open(bit);
        }
        self.entries.get_mut(context.index)?.cached = Some(slot);
        Some(slot)
    }

    fn evict(&mut self, slot: Slot, to: &Arc<[u32]>) {
        self.pend_slot(slot);
        self.readiness.remove(slot);
        let Some(index) = self.cache.line(slot).map(|line| line.entry) else {
            return;
        };
        if let Some(entry) = self.entries.get_mut(index) {
            self.cache.retire(slot, to, &entry.name);
            entry.cached = None;
        }
        self.forget_if_unused(index);
    }

    fn add_set(&mut self, name: &Arc<str>, ranks: &[Rank]) -> Result<(), Refusal> {
        let (key, id, ranks) = self.sets.add(ranks)?;
        let added = Response::SetAdded {
            name: Arc::clone(name),
            key,
            id,
            ranks,
        };
        self.answer(Arc::clone(&self.everybody), added);
        Ok(())
    }

    /// Removes a set. Its members fail their pending requests on the set when they receive the removal.
    fn remove_set(&mut self, name: &Arc<str>, id: ProcessSetId) {
        let removed = self.sets.remove(id);
        let key = removed.as_ref().map(|(key, _)| *key);
        if let Some((key, set)) = removed {
            let entries = &self.entries;
            self.readiness.remove_set(key);
            self.cache.remove_set(key, &set.to, |index| {
                entries.get(index).map(|entry| Arc::clone(&entry.name))
            });
            let gone: Vec<usize> = self
                .entries
                .iter()
                .filter(|(_, e)| e.set == key)
                .map(|(i, _)| i)
                .collect();
            for index in gone {
                if let Some(Entry {
                    pending: Some(mut pending),
                    ..
                }) = self.entries.remove(index)
                {
                    self.outstanding[pending.starter] -= 1;
                    pending.arrived.clear();
                    self.spare.push(pending.arrived);
                }
            }
        }
        let response = Response::SetRemoved {
            name: Arc::clone(name),
            key,
        };
        self.answer(Arc::clone(&self.everybody), response);
    }

    fn forget_if_unused(&mut self, index: usize) {
        if let Some(entry) = self.entries.get(index)
            && entry.cached.is_none()
            && entry.pending.is_none()
            && let Some(entry) = self.entries.remove(index)
            && let Some(set) = self.sets.get_mut(entry.set)
        {
            set.names.remove(&*entry.name);
        }
    }
}

/// A ready request's place: its entry, set, slot, members and links.
struct RequestContext<'a> {
    index: usize,
    key: SetKey,
    cached: Option<Slot>,
    members: &'a Arc<[Rank]>,
    /// The links to the members.
    to: &'a Arc<[u32]>,
    absent: &'a Arc<[Rank]>,
    /// Whether the ranks' tensors have different memory orders.
    in_several_orders: bool,
}

fn agreed(name: &str, pending: &Pending) -> Result<(), Refusal> {
    if pending.others.is_empty() {
        return Ok(());
    }
    let asked: Vec<(Rank, &RequestSignature)> = pending
        .arrived
        .iter()
        .map(|rank| {
            let other = pending
                .others
                .iter()
                .find(|(ranks, _)| ranks.contains(rank));
            (
                rank,
                other.map_or(&*pending.signature, |(_, signature)| signature),
            )
        })
        .collect();
    validation::compare(name, &asked)
}

/// Returns the rows as `[tensor][member]` in one list. The list is empty unless this is an allgather for which every
/// member has sent rows.
fn flat_rows(
    rows: &mut [(Rank, Vec<u64>)],
    members: &[Rank],
    signature: &RequestSignature,
) -> Vec<u64> {
    if signature.op != Op::Allgather || rows.len() != members.len() {
        return Vec::new();
    }
    rows.sort_unstable_by_key(|(rank, _)| *rank);
    let dim = |tensor: usize, rows: &[u64]| rows.get(tensor).copied().unwrap_or(0);
    (0..signature.tensors.len())
        .flat_map(|tensor| rows.iter().map(move |(_, rows)| dim(tensor, rows)))
        .collect()
}

fn tensor_bytes(signature: &RequestSignature) -> u64 {
    signature.tensors.iter().fold(0, |sum: u64, tensor| {
        let bytes = tensor
            .elems()
            .and_then(|n| n.checked_mul(tensor.dtype.size() as u64));
        sum.saturating_add(bytes.unwrap_or(u64::MAX))
    })
}

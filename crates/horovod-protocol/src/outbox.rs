//! The outbox of a worker: one message for everything since the last one, within bounds.

use crate::limits::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX};
use crate::message::{Slot, SlotRun, Submission, ToCoordinator};
use crate::types::Generation;
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct Outbox {
    generation: Generation,
    full: VecDeque<Vec<Submission>>,
    spare: Vec<Submission>,
    open: Vec<Submission>,
    open_bytes: usize,
    /// Number of the open batch.
    batch: u64,
    seen: u64,
    /// Part of `seen` that has been sent.
    seen_sent: u64,
}

impl Outbox {
    pub(crate) fn new(generation: Generation) -> Self {
        Self {
            generation,
            full: VecDeque::new(),
            spare: Vec::new(),
            open: Vec::new(),
            open_bytes: 0,
            batch: 0,
            seen: 0,
            seen_sent: 0,
        }
    }

    /// Adds a submission that takes at most about `bytes` in a message; returns its place, for
    /// [`Outbox::item_mut`].
    pub(crate) fn push(&mut self, item: Submission, bytes: usize) -> (u64, usize) {
        if self.open_bytes + bytes > BATCH_BYTES_MAX || self.open.len() >= BATCH_ITEMS_MAX {
            self.full.push_back(std::mem::take(&mut self.open));
            self.open_bytes = 0;
            self.batch += 1;
        }
        self.open_bytes += bytes;
        self.open.push(item);
        (self.batch, self.open.len() - 1)
    }

    /// A submission, as long as its batch is open.
    pub(crate) fn item_mut(&mut self, batch: u64, at: usize) -> Option<&mut Submission> {
        self.open.get_mut(at).filter(|_| batch == self.batch)
    }

    pub(crate) fn last_mut(&mut self) -> Option<&mut Submission> {
        self.open.last_mut()
    }

    /// A submission of the open batch takes so many bytes more.
    pub(crate) fn grow(&mut self, bytes: usize) {
        self.open_bytes += bytes;
    }

    /// Adds neighbouring hits.
    pub(crate) fn push_run(&mut self, run: SlotRun) {
        if let Some(Submission::Hits(last)) = self.open.last_mut()
            && last.append(run)
        {
            return;
        }
        self.push(Submission::Hits(run), 16);
    }

    pub(crate) fn push_hit(&mut self, slot: Slot) {
        if let Some(Submission::Hits(run)) = self.open.last_mut()
            && run.extend(slot)
        {
            return;
        }
        self.push(
            Submission::Hits(SlotRun {
                first: slot,
                len: 1,
            }),
            16,
        );
    }

    /// Evictions up to `mark` are known here; tells the coordinator with the next message.
    pub(crate) fn acknowledge(&mut self, mark: u64) {
        self.seen = self.seen.max(mark);
    }

    pub(crate) fn clear(&mut self) {
        self.full.clear();
        self.open.clear();
        self.open_bytes = 0;
        self.batch += 1;
        self.seen_sent = self.seen;
    }

    /// Takes back a message that has been sent.
    pub(crate) fn recycle(&mut self, message: ToCoordinator) {
        self.spare = message.items;
        self.spare.clear();
    }

    pub(crate) fn take(&mut self) -> Option<ToCoordinator> {
        let items = match self.full.pop_front() {
            Some(items) => items,
            None if self.open.is_empty() && self.seen_sent == self.seen => return None,
            None => {
                self.open_bytes = 0;
                self.batch += 1;
                // Only now: what was asked for before may use slots evicted since.
                self.seen_sent = self.seen;
                std::mem::replace(&mut self.open, std::mem::take(&mut self.spare))
            }
        };
        Some(ToCoordinator {
            generation: self.generation,
            seen: self.seen_sent,
            items,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_slots_become_one_run() {
        let mut outbox = Outbox::new(Generation(1));
        for slot in [5, 6, 7, 9] {
            outbox.push_hit(Slot(slot));
        }
        let runs = [(5, 3), (9, 1)].map(|(first, len)| {
            Submission::Hits(SlotRun {
                first: Slot(first),
                len,
            })
        });
        assert_eq!(outbox.take().map(|m| m.items), Some(runs.to_vec()));
        assert_eq!(outbox.take(), None);
    }

    #[test]
    fn a_large_batch_is_split_and_keeps_its_order() {
        let mut outbox = Outbox::new(Generation(1));
        for slot in 0..5 {
            let item = Submission::GatherHit {
                slot: Slot(slot),
                first_dims: vec![],
            };
            outbox.push(item, BATCH_BYTES_MAX / 2);
        }
        let sizes: Vec<usize> = std::iter::from_fn(|| outbox.take())
            .map(|m| m.items.len())
            .collect();
        assert_eq!(sizes, [2, 2, 1]);
    }

    #[test]
    fn an_eviction_is_confirmed_once_even_without_news() {
        let mut outbox = Outbox::new(Generation(1));
        outbox.acknowledge(3);
        assert_eq!(outbox.take().map(|m| m.seen), Some(3));
        outbox.acknowledge(3);
        assert_eq!(outbox.take(), None);
    }
}

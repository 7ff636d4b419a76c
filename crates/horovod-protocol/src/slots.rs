//! Values by slot, in blocks of 64 neighbours: a run of slots costs one look-up, not one each.

use crate::lookup::{Lookup, Slab};
use crate::message::{Slot, SlotRun};

/// Slots of one block; also the bits of one word.
pub(crate) const BLOCK_SLOTS: u64 = 64;

/// The block that a slot is in, and its bit there.
pub(crate) fn place(slot: Slot) -> (u64, u32) {
    (slot.0 / BLOCK_SLOTS, (slot.0 % BLOCK_SLOTS) as u32)
}

/// The parts of a run by block: number of the block and mask of its slots.
pub(crate) fn blocks_of(run: SlotRun) -> impl Iterator<Item = (u64, u64)> {
    let end = run.first.0.saturating_add(u64::from(run.len));
    let mut at = run.first.0;
    std::iter::from_fn(move || {
        let (block, bit) = place(Slot(at));
        let len = (BLOCK_SLOTS - u64::from(bit)).min(end.checked_sub(at)?);
        if len == 0 {
            return None;
        }
        at += len;
        Some((block, (u64::MAX >> (BLOCK_SLOTS - len)) << bit))
    })
}

/// The slots of a mask, ascending.
pub(crate) fn slots_of(block: u64, mask: u64) -> impl Iterator<Item = Slot> {
    bits(mask).map(move |bit| Slot(block * BLOCK_SLOTS + u64::from(bit)))
}

/// The neighbours among the slots of a mask, ascending.
pub(crate) fn runs_of(block: u64, mut mask: u64) -> impl Iterator<Item = SlotRun> {
    std::iter::from_fn(move || {
        let first = (mask != 0).then(|| mask.trailing_zeros())?;
        let len = (!(mask >> first)).trailing_zeros().min(64 - first);
        mask &= !((u64::MAX >> (64 - len)) << first);
        Some(SlotRun {
            first: Slot(block * BLOCK_SLOTS + u64::from(first)),
            len,
        })
    })
}

pub(crate) fn bits(mut mask: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (mask != 0).then(|| mask.trailing_zeros())?;
        mask &= mask - 1;
        Some(bit)
    })
}

/// A map from slots that remembers the block used last.
#[derive(Debug)]
pub(crate) struct SlotMap<T> {
    index: Lookup<u64, usize>,
    blocks: Slab<Block<T>>,
    last: (u64, usize),
}

#[derive(Debug)]
struct Block<T> {
    used: u32,
    values: Vec<Option<T>>,
}

impl<T> Default for SlotMap<T> {
    fn default() -> Self {
        Self {
            index: Lookup::default(),
            blocks: Slab::default(),
            last: (u64::MAX, 0),
        }
    }
}

impl<T> SlotMap<T> {
    pub(crate) fn get(&self, slot: Slot) -> Option<&T> {
        let (block, bit) = place(slot);
        let at = if self.last.0 == block {
            self.last.1
        } else {
            *self.index.get(&block)?
        };
        self.blocks.get(at)?.values[bit as usize].as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: Slot) -> Option<&mut T> {
        let (block, bit) = place(slot);
        let at = self.find(block)?;
        self.blocks.get_mut(at)?.values[bit as usize].as_mut()
    }

    pub(crate) fn insert(&mut self, slot: Slot, value: T) -> Option<T> {
        let (block, bit) = place(slot);
        let at = self.find(block).unwrap_or_else(|| {
            let values = std::iter::repeat_with(|| None).take(64).collect();
            let at = self.blocks.insert(Block { used: 0, values });
            self.index.insert(block, at);
            at
        });
        let block = self.blocks.get_mut(at)?;
        let old = block.values[bit as usize].replace(value);
        block.used += u32::from(old.is_none());
        old
    }

    pub(crate) fn remove(&mut self, slot: Slot) -> Option<T> {
        let (number, bit) = place(slot);
        let at = self.find(number)?;
        let block = self.blocks.get_mut(at)?;
        let old = block.values[bit as usize].take()?;
        block.used -= 1;
        if block.used == 0 {
            self.blocks.remove(at);
            self.index.remove(&number);
            self.last = (u64::MAX, 0);
        }
        Some(old)
    }

    fn find(&mut self, block: u64) -> Option<usize> {
        if self.last.0 != block {
            self.last = (block, *self.index.get(&block)?);
        }
        Some(self.last.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, len: u32) -> SlotRun {
        SlotRun {
            first: Slot(first),
            len,
        }
    }

    #[test]
    fn runs_split_at_blocks_and_come_back() {
        let parts: Vec<_> = blocks_of(run(60, 70)).collect();
        assert_eq!(parts, [(0, 0xf << 60), (1, u64::MAX), (2, 0b11)]);
        assert_eq!(blocks_of(run(64, 64)).collect::<Vec<_>>(), [(1, u64::MAX)]);
        let back: Vec<_> = parts.iter().flat_map(|(b, m)| runs_of(*b, *m)).collect();
        assert_eq!(back, [run(60, 4), run(64, 64), run(128, 2)]);
        assert_eq!(
            runs_of(1, 0b1101).collect::<Vec<_>>(),
            [run(64, 1), run(66, 2)]
        );
        // A stranger's run ends where the numbers do.
        assert!(blocks_of(run(u64::MAX - 1, u32::MAX)).count() <= 2);
    }

    #[test]
    fn a_map_forgets_empty_blocks() {
        let mut map = SlotMap::default();
        assert_eq!(map.insert(Slot(70), 'a'), None);
        assert_eq!(map.insert(Slot(70), 'b'), Some('a'));
        assert_eq!((map.get(Slot(70)), map.get(Slot(6))), (Some(&'b'), None));
        assert_eq!(map.remove(Slot(70)), Some('b'));
        assert_eq!((map.remove(Slot(70)), map.get_mut(Slot(70))), (None, None));
        assert!(map.blocks.iter().next().is_none());
    }
}

//! The readiness bitmap: which links are ready for which cached slots, counted by words. 64 slots of one link cost a
//! few machine words, whether it is ready for one or for all of them.
//!
//! The coordinator counts its own links with it, and so does every aggregator of the tree. A slot that is *open* is not
//! counted here: something is unusual about it, and its user looks at every rank that is ready for it.

use crate::lookup::{Lookup, Slab};
use crate::message::{SetKey, Slot};
use crate::slots::{BLOCK_SLOTS, bits, place};
use crate::types::Time;

#[derive(Debug, Default)]
pub(crate) struct ReadinessBitmap {
    index: Lookup<u64, usize>,
    blocks: Slab<Block>,
    /// For each waiting slot it is noted since when one link alone is missing.
    notes_alone: bool,
}

/// 64 neighbouring slots of one process set.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) number: u64,
    pub(crate) set: SetKey,
    /// Slots in use.
    live: u64,
    /// Slots that are not counted here.
    open: u64,
    /// Slots for which some links are ready and others are not.
    waiting: u64,
    /// A link is ready for a slot when its bit is as here: so a finished round needs no clearing.
    phase: u64,
    ready: Vec<u64>,
    /// Links that are not ready for each slot yet, as planes of a binary number; and how it starts.
    left: Vec<u64>,
    links: u32,
    since: Box<[Time; BLOCK_SLOTS as usize]>,
    /// Since when all links but one are ready for a waiting slot; if that is noted.
    alone: Option<Box<[Time; BLOCK_SLOTS as usize]>>,
}

/// A link marked a slot ready again before the others had done so once.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MarkedTwice;

impl ReadinessBitmap {
    /// Notes, for slots that are added from now on, since when one link alone is missing.
    pub(crate) fn note_alone(&mut self) {
        self.notes_alone = true;
    }

    /// A new slot of a set that so many links have members of.
    pub(crate) fn add(&mut self, slot: Slot, set: SetKey, links: usize) {
        let (number, bit) = place(slot);
        let (index, blocks, notes_alone) = (&mut self.index, &mut self.blocks, self.notes_alone);
        let at = index.get(&number).copied().unwrap_or_else(|| {
            let at = blocks.insert(Block::new(number, set, links, notes_alone));
            index.insert(number, at);
            at
        });
        if let Some(block) = self.blocks.get_mut(at) {
            block.live |= 1 << bit;
        }
    }

    /// The slot is no longer in use.
    pub(crate) fn remove(&mut self, slot: Slot) {
        let (number, bit) = place(slot);
        let Some(at) = self.index.get(&number).copied() else {
            return;
        };
        if let Some(block) = self.blocks.get_mut(at) {
            block.withdraw(bit);
            block.live &= !(1 << bit);
            block.open &= !(1 << bit);
            if block.live == 0 {
                self.blocks.remove(at);
                self.index.remove(&number);
            }
        }
    }

    pub(crate) fn block(&mut self, number: u64) -> Option<&mut Block> {
        self.blocks.get_mut(*self.index.get(&number)?)
    }

    /// The block of a slot that is in use, and its bit there.
    pub(crate) fn find(&mut self, slot: Slot) -> Option<(&mut Block, u32)> {
        let (number, bit) = place(slot);
        let block = self.block(number)?;
        (block.live & (1 << bit) != 0).then_some((block, bit))
    }

    /// Blocks in which something waits.
    pub(crate) fn waiting(&mut self) -> impl Iterator<Item = &mut Block> {
        self.blocks
            .iter_mut()
            .map(|(_, block)| block)
            .filter(|block| block.waiting != 0)
    }

    /// Forgets all slots of a set.
    pub(crate) fn remove_set(&mut self, set: SetKey) {
        let gone: Vec<usize> = self
            .blocks
            .iter()
            .filter(|(_, block)| block.set == set)
            .map(|(at, _)| at)
            .collect();
        for at in gone {
            if let Some(block) = self.blocks.remove(at) {
                self.index.remove(&block.number);
            }
        }
    }
}

impl Block {
    fn new(number: u64, set: SetKey, links: usize, notes_alone: bool) -> Self {
        let links = links as u32;
        let mut block = Self {
            number,
            set,
            live: 0,
            open: 0,
            waiting: 0,
            phase: u64::MAX,
            ready: vec![0; links as usize],
            left: vec![0; (u32::BITS - links.leading_zeros()) as usize],
            links,
            since: Box::new([Time(0); BLOCK_SLOTS as usize]),
            alone: notes_alone.then(|| Box::new([Time(0); BLOCK_SLOTS as usize])),
        };
        block.restart(u64::MAX);
        block
    }

    /// Slots of `mask` that are counted here.
    pub(crate) fn counted(&self, mask: u64) -> u64 {
        mask & self.live & !self.open
    }

    /// Slots in use among `mask`.
    pub(crate) fn live(&self, mask: u64) -> u64 {
        mask & self.live
    }

    pub(crate) fn waiting_slots(&self) -> u64 {
        self.waiting
    }

    pub(crate) fn waits(&self, bit: u32) -> bool {
        self.waiting & (1 << bit) != 0
    }

    /// Waiting slots for which the link at `position` is not ready.
    pub(crate) fn missing(&self, position: usize) -> u64 {
        self.waiting & (self.ready[position] ^ self.phase)
    }

    /// Since when a waiting slot has waited.
    pub(crate) fn since(&self, bit: u32) -> Time {
        self.since[bit as usize]
    }

    /// Since when the first of these slots, for which all are ready now, waited for one link alone; if that is noted.
    pub(crate) fn alone_since(&self, complete: u64) -> Option<Time> {
        let alone = self.alone.as_ref().filter(|_| self.links > 1)?;
        bits(complete).map(|bit| alone[bit as usize]).min()
    }

    /// Since when a waiting slot has waited for one link alone, if it does and that is noted.
    pub(crate) fn alone(&self, bit: u32) -> Option<Time> {
        let (ones, higher) = self.left.split_first()?;
        let is_one = ones >> bit & 1 == 1 && higher.iter().all(|plane| plane >> bit & 1 == 0);
        let alone = self.alone.as_ref().filter(|_| is_one && self.waits(bit))?;
        Some(alone[bit as usize])
    }

    /// The link at `position` is ready for the counted slots `mask`. Returns the slots for which all links are ready
    /// with this, whose next round begins, and the slots that begin to wait.
    pub(crate) fn mark_ready(
        &mut self,
        now: Time,
        position: usize,
        mask: u64,
    ) -> Result<(u64, u64), MarkedTwice> {
        let ready = &mut self.ready[position];
        if mask & !(*ready ^ self.phase) != 0 {
            return Err(MarkedTwice);
        }
        *ready ^= mask;
        let mut borrow = mask;
        for plane in &mut self.left {
            let before = *plane;
            *plane ^= borrow;
            borrow &= !before;
            if borrow == 0 {
                break;
            }
        }
        let complete = mask & !self.left.iter().fold(0, |any, plane| any | plane);
        let begun = mask & !self.waiting & !complete;
        for bit in bits(begun) {
            self.since[bit as usize] = now;
        }
        if let Some(alone) = &mut self.alone {
            let (ones, higher) = self
                .left
                .split_first()
                .map_or((0, &[][..]), |(ones, higher)| (*ones, higher));
            let missing_one = mask & ones & !higher.iter().fold(0, |any, plane| any | plane);
            for bit in bits(missing_one) {
                alone[bit as usize] = now;
            }
        }
        self.waiting = (self.waiting | mask) & !complete;
        if complete != 0 {
            self.phase ^= complete;
            self.restart(complete);
        }
        Ok((complete, begun))
    }

    /// Stops counting a slot until [`Block::close`]; returns the positions of the links that were ready for it.
    pub(crate) fn open(&mut self, bit: u32) -> Vec<usize> {
        self.open |= 1 << bit;
        self.withdraw(bit)
    }

    /// Counts the slots of a mask again.
    pub(crate) fn close(&mut self, mask: u64) {
        self.open &= !mask;
    }

    fn withdraw(&mut self, bit: u32) -> Vec<usize> {
        let mask = 1 << bit;
        if self.waiting & mask == 0 {
            return Vec::new();
        }
        self.waiting &= !mask;
        let phase = self.phase;
        let mut positions = Vec::new();
        for (position, ready) in self.ready.iter_mut().enumerate() {
            if (*ready ^ phase) & mask == 0 {
                *ready ^= mask;
                positions.push(position);
            }
        }
        self.restart(mask);
        positions
    }

    /// No link is ready for the slots of `mask`.
    fn restart(&mut self, mask: u64) {
        for (digit, plane) in self.left.iter_mut().enumerate() {
            let start = if self.links >> digit & 1 == 1 {
                mask
            } else {
                0
            };
            *plane = (*plane & !mask) | start;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readiness(slots: u64, links: usize) -> ReadinessBitmap {
        let mut readiness = ReadinessBitmap::default();
        for slot in 0..slots {
            readiness.add(Slot(slot), SetKey::GLOBAL, links);
        }
        readiness
    }

    #[test]
    fn a_slot_is_complete_when_the_last_link_is_ready_round_after_round() {
        for links in [1, 2, 3, 4, 7, 8, 1000] {
            let mut readiness = readiness(64, links);
            let block = readiness.block(0).unwrap();
            for round in 0..3 {
                for link in 0..links {
                    let last = link + 1 == links;
                    let (complete, _) = block.mark_ready(Time(round), link, u64::MAX >> 4).unwrap();
                    assert_eq!(complete, if last { u64::MAX >> 4 } else { 0 }, "{links}");
                    let (complete, _) = block.mark_ready(Time(round), link, 0b11 << 60).unwrap();
                    assert_eq!(complete, if last { 0b11 << 60 } else { 0 }, "{links}");
                }
            }
            assert_eq!(block.waiting_slots(), 0);
        }
    }

    #[test]
    fn a_slot_that_waits_for_one_link_alone_has_waited_since_the_last_but_one_was_ready() {
        let mut readiness = ReadinessBitmap::default();
        readiness.note_alone();
        readiness.add(Slot(0), SetKey::GLOBAL, 3);
        let block = readiness.block(0).unwrap();
        assert_eq!(block.alone(0), None);
        for (now, link, alone) in [(5, 0, None), (8, 2, Some(Time(8))), (9, 1, None)] {
            block.mark_ready(Time(now), link, 1).unwrap();
            assert_eq!(block.alone(0), alone, "{link}");
        }
    }

    #[test]
    fn a_link_that_marks_a_slot_twice_is_found_out() {
        let mut readiness = readiness(3, 2);
        let block = readiness.block(0).unwrap();
        assert_eq!(block.mark_ready(Time(0), 1, 0b011), Ok((0, 0b011)));
        assert_eq!(block.mark_ready(Time(0), 1, 0b110), Err(MarkedTwice));
        assert_eq!(block.mark_ready(Time(0), 0, 0b001), Ok((1, 0)));
        assert_eq!(block.mark_ready(Time(0), 1, 0b001), Ok((0, 1)));
    }

    #[test]
    fn an_opened_slot_tells_who_was_ready_and_starts_anew_when_closed() {
        let mut readiness = readiness(2, 3);
        let block = readiness.block(0).unwrap();
        block.mark_ready(Time(4), 0, 0b11).unwrap();
        block.mark_ready(Time(5), 2, 0b10).unwrap();
        assert_eq!((block.since(0), block.waiting_slots()), (Time(4), 0b11));
        assert_eq!([0, 1, 2].map(|link| block.missing(link)), [0, 0b11, 0b01]);
        assert_eq!(block.open(1), [0, 2]);
        assert_eq!(block.open(1), []);
        assert_eq!((block.counted(0b11), block.waiting_slots()), (0b01, 0b01));
        block.close(0b10);
        for link in 0..3 {
            let (complete, _) = block.mark_ready(Time(6), link, 0b10).unwrap();
            assert_eq!(complete != 0, link == 2);
        }
        assert_eq!(block.open(0), [0]);
    }

    #[test]
    fn empty_blocks_go() {
        let mut readiness = readiness(65, 1);
        readiness.remove(Slot(64));
        assert!(readiness.block(1).is_none() && readiness.find(Slot(63)).is_some());
        readiness.remove_set(SetKey::GLOBAL);
        assert!(readiness.block(0).is_none());
    }
}

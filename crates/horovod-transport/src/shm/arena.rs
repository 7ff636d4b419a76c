//! The arena: memory that the ranks of one host share, as the algorithms see it.

use std::sync::Arc;

use horovod_protocol::Rank;

use super::{
    layout::{LINE, Layout, RING_HEADER},
    notifier,
    ring::Memory,
};
use crate::{
    core_migration::CoreMigration,
    platform::{self, fd::Fd, region::Region},
    sync::{AtomicU32, AtomicU64, Ordering},
};

/// A rank's notifier as others see it: the word that says it sleeps, and what wakes it.
#[derive(Clone)]
pub(crate) struct RankNotifier {
    pub(crate) region: Arc<Region>,
    pub(crate) word: usize,
    pub(crate) fd: Arc<Fd>,
}

impl RankNotifier {
    pub(crate) fn sleeping(&self) -> &AtomicU32 {
        self.region.u32(self.word)
    }

    /// Wakes the rank if it sleeps; call after publishing what it should see.
    pub(crate) fn notify(&self) {
        notifier::publish_fence();
        self.notify_if_asleep();
    }

    /// The same after [`notifier::publish_fence`].
    fn notify_if_asleep(&self) {
        if !self.region.is_foreign() && notifier::must_notify(self.sleeping()) {
            platform::notify(&self.fd);
        }
    }

    /// Wakes the rank also if it has not said that it sleeps.
    pub(crate) fn notify_always(&self) {
        platform::notify(&self.fd);
    }
}

/// The shared memory of one host in one generation, seen by one of its ranks.
///
/// Each rank owns a staging area and [`Arena::FLAGS`] flag words that all others can read. The
/// memory is never lent as a slice, because a peer may write to it at any time: readers use raw
/// pointers and the flags say when bytes are stable. Not present in a forked child: do not call this
/// there.
pub struct Arena {
    region: Arc<Region>,
    layout: Layout,
    members: Arc<[Rank]>,
    me: usize,
    notifiers: Arc<[RankNotifier]>,
}

impl Arena {
    /// Flag words per rank.
    pub const FLAGS: usize = 8;

    pub(crate) fn new(
        region: Arc<Region>,
        layout: Layout,
        members: Arc<[Rank]>,
        me: usize,
        notifiers: &[Arc<Fd>],
    ) -> Self {
        assert!(region.len() >= layout.total() && notifiers.len() == layout.ranks);
        let notifier = |(local, fd): (usize, &Arc<Fd>)| RankNotifier {
            region: region.clone(),
            word: layout.sleeping(local),
            fd: fd.clone(),
        };
        let notifiers = notifiers.iter().enumerate().map(notifier).collect();
        Self {
            region,
            layout,
            members,
            me,
            notifiers,
        }
    }

    /// The ranks that share it, ascending.
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// This rank's index among [`Self::members`].
    pub fn me(&self) -> usize {
        self.me
    }

    /// The index of a rank among [`Self::members`], if it shares this memory.
    pub fn local(&self, rank: Rank) -> Option<usize> {
        self.members.binary_search(&rank).ok()
    }

    /// Bytes of each staging area.
    pub fn staging_len(&self) -> usize {
        self.layout.staging
    }

    /// The staging area of a member, at least page-aligned. Its owner writes, everybody reads, at
    /// the times that they agree on by flags.
    pub fn staging(&self, local: usize) -> *mut u8 {
        assert!(local < self.layout.ranks, "no such member");
        self.region
            .at(self.layout.staging(local), self.layout.staging)
    }

    /// Sets one of this rank's flags (release: what was written before is visible to whoever sees
    /// the value), then wakes those members of `wake` that sleep.
    pub fn publish(&self, flag: usize, value: u64, wake: &[usize]) {
        self.flag(self.me, flag).store(value, Ordering::Release);
        if wake.is_empty() {
            return;
        }
        notifier::publish_fence();
        for &local in wake {
            if local != self.me {
                self.notifiers[local].notify_if_asleep();
            }
        }
    }

    /// A member's flag (acquire); 0 until first published.
    pub fn peek(&self, local: usize, flag: usize) -> u64 {
        self.flag(local, flag).load(Ordering::Acquire)
    }

    fn flag(&self, local: usize, flag: usize) -> &AtomicU64 {
        assert!(
            local < self.layout.ranks && flag < Self::FLAGS,
            "no such flag"
        );
        self.region.u64(self.layout.flag(local, flag))
    }

    /// The mechanism that migrates waiting ranks among `cores` cores.
    pub(crate) fn core_migration(&self, cores: usize) -> CoreMigration {
        let words = (0..self.layout.ranks).map(|local| self.layout.core(local));
        CoreMigration::new(self.region.clone(), words.collect(), self.me, cores)
    }

    pub(crate) fn notifier(&self, local: usize) -> &RankNotifier {
        &self.notifiers[local]
    }

    pub(crate) fn data_ring(&self, from: usize, to: usize) -> RingMemory {
        self.ring(self.layout.data(from, to), self.layout.data_ring)
    }

    pub(crate) fn control_ring(&self, local: usize, to_parent: bool) -> RingMemory {
        self.ring(
            self.layout.control(local, to_parent),
            self.layout.control_ring,
        )
    }

    fn ring(&self, at: usize, capacity: usize) -> RingMemory {
        RingMemory {
            region: self.region.clone(),
            at,
            capacity,
        }
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena")
            .field("members", &self.members)
            .field("me", &self.me)
            .finish()
    }
}

/// One ring inside the arena.
pub(crate) struct RingMemory {
    region: Arc<Region>,
    at: usize,
    capacity: usize,
}

impl Memory for RingMemory {
    fn head(&self) -> &AtomicU64 {
        self.region.u64(self.at)
    }

    fn tail(&self) -> &AtomicU64 {
        self.region.u64(self.at + LINE)
    }

    fn starved(&self) -> &AtomicU32 {
        self.region.u32(self.at + 2 * LINE)
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    unsafe fn write(&self, at: usize, src: &[u8]) {
        let to = self.region.at(self.at + RING_HEADER + at, src.len());
        // SAFETY: `to` has room for `src`, which is private memory and cannot overlap; that no
        // correct peer reads these bytes now is the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), to, src.len()) };
    }

    unsafe fn read(&self, at: usize, dst: &mut [u8]) {
        let from = self.region.at(self.at + RING_HEADER + at, dst.len());
        // SAFETY: as in `write`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from, dst.as_mut_ptr(), dst.len()) };
    }
}

//! The layout of the arena: one pure function of the number of ranks and the settings.
//!
//! ```text
//! header | per rank: sleeping word, flags | control rings | data rings | staging areas
//! ```
//! Pages that nobody touches cost nothing, so the sizes are limits rather than costs.

/// Two cache lines: neighbours are prefetched in pairs.
pub(crate) const LINE: usize = 128;
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;
/// Words of a ring before its bytes: head, tail and starved, each on a line of its own.
pub(crate) const RING_HEADER: usize = 4 * LINE;

/// Most ranks of one host.
pub(crate) const LOCAL_RANKS_MAX: usize = 1024;
/// All control rings of a host together, at most (unless every ring has its least size).
const CONTROL_BUDGET: usize = 8 << 20;
const CONTROL_RING_MIN: usize = 4 << 10;
const CONTROL_RING_MAX: usize = 64 << 10;
/// All data rings of a host together, at most (unless every ring has its least size).
const DATA_BUDGET: usize = 64 << 20;
const DATA_RING_MIN: usize = 4 << 10;
const DATA_RING_MAX: usize = 1 << 20;
/// Most bytes of one staging area: 64 of them still fit where addresses are scarce.
pub(crate) const STAGING_MAX: usize = 1 << 30;

/// The sizes that the leader of a host chooses and the others check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) ranks: usize,
    pub(crate) staging: usize,
    pub(crate) control_ring: usize,
    pub(crate) data_ring: usize,
}

/// Rounds a share of a budget down to a power of two within limits.
fn share(budget: usize, parts: usize, min: usize, max: usize) -> usize {
    let each = (budget / parts.max(1)).clamp(min, max);
    if each.is_power_of_two() {
        each
    } else {
        each.next_power_of_two() / 2
    }
}

impl Layout {
    /// Rings as large as the budgets allow; staging rounded up to whole pages, and cut down beyond
    /// 64 ranks to what 64 of them would use.
    pub(crate) fn new(ranks: usize, staging: usize) -> Self {
        let staging = staging.min(STAGING_MAX);
        let staging = if ranks > 64 {
            staging * 64 / ranks
        } else {
            staging
        };
        Self {
            ranks,
            staging: staging.next_multiple_of(PAGE),
            control_ring: share(
                CONTROL_BUDGET,
                2 * ranks,
                CONTROL_RING_MIN,
                CONTROL_RING_MAX,
            ),
            data_ring: share(DATA_BUDGET, ranks * ranks, DATA_RING_MIN, DATA_RING_MAX),
        }
    }

    /// Whether a correct leader can have chosen this.
    pub(crate) fn is_sane(&self) -> bool {
        let ring = |r: usize, min: usize| r.is_power_of_two() && (min..=DATA_RING_MAX).contains(&r);
        (1..=LOCAL_RANKS_MAX).contains(&self.ranks)
            && self.staging <= STAGING_MAX
            && self.staging.is_multiple_of(PAGE)
            && ring(self.control_ring, LINE)
            && ring(self.data_ring, LINE)
    }

    const fn rank_block(flags: usize) -> usize {
        (1 + flags) * LINE
    }

    /// The word that says that a rank sleeps.
    pub(crate) fn sleeping(&self, local: usize) -> usize {
        debug_assert!(local < self.ranks);
        PAGE + local * Self::rank_block(super::arena::Arena::FLAGS)
    }

    /// The word that says on which core a rank waits, beside [`Self::sleeping`].
    pub(crate) fn core(&self, local: usize) -> usize {
        self.sleeping(local) + 4
    }

    /// One of the flags that a rank publishes.
    pub(crate) fn flag(&self, local: usize, flag: usize) -> usize {
        debug_assert!(flag < super::arena::Arena::FLAGS);
        self.sleeping(local) + (1 + flag) * LINE
    }

    fn control_start(&self) -> usize {
        let end = PAGE + self.ranks * Self::rank_block(super::arena::Arena::FLAGS);
        end.next_multiple_of(PAGE)
    }

    /// The control ring from a rank to its parent in the tree of control links, or back; unused if
    /// that is elsewhere.
    pub(crate) fn control(&self, local: usize, to_parent: bool) -> usize {
        debug_assert!(local < self.ranks);
        let index = 2 * local + usize::from(!to_parent);
        self.control_start() + index * (RING_HEADER + self.control_ring)
    }

    fn data_start(&self) -> usize {
        let end = self.control_start() + 2 * self.ranks * (RING_HEADER + self.control_ring);
        end.next_multiple_of(PAGE)
    }

    /// The data ring of an ordered pair.
    pub(crate) fn data(&self, from: usize, to: usize) -> usize {
        debug_assert!(from < self.ranks && to < self.ranks);
        self.data_start() + (from * self.ranks + to) * (RING_HEADER + self.data_ring)
    }

    fn staging_start(&self) -> usize {
        let end = self.data_start() + self.ranks * self.ranks * (RING_HEADER + self.data_ring);
        end.next_multiple_of(if self.staging >= HUGE_PAGE {
            HUGE_PAGE
        } else {
            PAGE
        })
    }

    /// The staging area of a rank.
    pub(crate) fn staging(&self, local: usize) -> usize {
        debug_assert!(local < self.ranks);
        self.staging_start() + local * self.staging
    }

    /// Bytes of the whole arena.
    pub(crate) fn total(&self) -> usize {
        (self.staging_start() + self.ranks * self.staging).next_multiple_of(PAGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::arena::Arena;

    #[test]
    fn nothing_overlaps_and_all_lies_inside() {
        for ranks in [1, 2, 3, 7, 16, 64, 100] {
            let l = Layout::new(ranks, 8 << 20);
            assert!(l.is_sane(), "{l:?}");
            let mut parts = vec![(0, 64)];
            for a in 0..ranks {
                parts.push((l.sleeping(a), LINE));
                // The two words of a rank share a line.
                assert!((l.sleeping(a) + 4..l.sleeping(a) + LINE).contains(&l.core(a)));
                parts.extend((0..Arena::FLAGS).map(|f| (l.flag(a, f), LINE)));
                parts.push((l.control(a, true), RING_HEADER + l.control_ring));
                parts.push((l.control(a, false), RING_HEADER + l.control_ring));
                parts.extend((0..ranks).map(|b| (l.data(a, b), RING_HEADER + l.data_ring)));
                parts.push((l.staging(a), l.staging));
            }
            parts.sort_unstable();
            for pair in parts.windows(2) {
                assert!(
                    pair[0].0 + pair[0].1 <= pair[1].0,
                    "{ranks} ranks: {pair:?}"
                );
            }
            let (at, len) = parts[parts.len() - 1];
            assert!(at + len <= l.total());
            assert!(parts.iter().all(|(at, _)| at % 64 == 0));
        }
    }

    #[test]
    fn many_ranks_stay_within_the_budgets() {
        let l = Layout::new(64, 8 << 20);
        assert!(64 * 64 * l.data_ring <= DATA_BUDGET);
        assert!(2 * 64 * l.control_ring <= CONTROL_BUDGET);
        assert!(
            Layout::new(256, 8 << 20).total() <= Layout::new(64, 8 << 20).total() + (512 << 20)
        );
    }

    #[test]
    fn two_ranks_get_large_rings() {
        let l = Layout::new(2, 8 << 20);
        assert_eq!(
            (l.control_ring, l.data_ring),
            (CONTROL_RING_MAX, DATA_RING_MAX)
        );
    }
}

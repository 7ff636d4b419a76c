//! Core migration of waiting ranks, where ranks outnumber cores.
//!
//! The kernel never sees a thread that yields all the time as idle, and does not move a thread that ran just now to an idle
//! core. Ranks that happen to share a core stay there for a tenth of a second or more. So each rank publishes on which core
//! it waits, and where one core has too many of them, one of those moves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::platform::{self, region::Region};
use crate::sync::Ordering;
use crate::wait_policy::HoldOff;

/// How often a rank that gives way looks where the others are, in steps.
const POLL_EVERY: u32 = 32;
/// A rank that has moved leaves it at that for so long; twice as long each time it has to go again soon after, up to
/// the second figure.
const SETTLED: Duration = Duration::from_millis(2);
const SETTLED_MAX: Duration = Duration::from_millis(1280);
/// The same after it could not move because others compute; to find that out takes 15 us.
const REFUSED: Duration = Duration::from_micros(500);
const REFUSED_MAX: Duration = Duration::from_millis(20);

/// Where the ranks of this host wait.
pub(crate) struct CoreMigration {
    region: Arc<Region>,
    /// By rank of the host, where in the region it publishes its core, from 1; 0 before it first waited. A rank that
    /// slept is mostly still on that core.
    words: Vec<usize>,
    published: u32,
    steps: u32,
    placement: Placement,
}

impl CoreMigration {
    pub(crate) fn new(region: Arc<Region>, words: Vec<usize>, me: usize, cores: usize) -> Self {
        Self {
            region,
            words,
            published: 0,
            steps: 0,
            placement: Placement::new(me, cores, platform::Cores::MAX),
        }
    }

    fn publish(&mut self, core: u32) {
        if self.published != core {
            self.published = core;
            let word = self.region.u32(self.words[self.placement.me]);
            word.store(core, Ordering::Relaxed);
        }
    }

    /// This rank is about to give way on `core`; moves it to another one if it should be there.
    pub(crate) fn before_yield(&mut self, core: usize) {
        if core >= platform::Cores::MAX {
            return;
        }
        self.publish(u32::try_from(core).map_or(0, |core| core + 1));
        self.steps = self.steps.wrapping_add(1);
        if !self.steps.is_multiple_of(POLL_EVERY) {
            return;
        }
        let words = self.words.iter();
        let published = words.map(|word| self.region.u32(*word).load(Ordering::Relaxed) as usize);
        if !self.placement.may_be_one_too_many(published, core) {
            return;
        }
        let Some(cores) = platform::Cores::of_this_thread() else {
            return;
        };
        let is_alone = || platform::running().is_some_and(|running| running <= self.words.len());
        let now = Instant::now();
        let to = self
            .placement
            .destination(core, now, |core| cores.has(core), is_alone);
        if let Some(to) = to {
            cores.move_to(to);
        }
    }
}

/// Whether one rank moves, and where to.
struct Placement {
    me: usize,
    /// So many cores there are for these ranks.
    cores: usize,
    /// By core, how many wait there.
    on: Vec<usize>,
    settled: HoldOff,
    refused: HoldOff,
}

impl Placement {
    /// `highest`: one more than the highest number of a core.
    fn new(me: usize, cores: usize, highest: usize) -> Self {
        Self {
            me,
            cores,
            on: vec![0; highest],
            settled: HoldOff::new(SETTLED, SETTLED_MAX),
            refused: HoldOff::new(REFUSED, REFUSED_MAX),
        }
    }

    /// Whether there may be too many on `core` and this rank is the last of them. `published`: the core of each rank from
    /// 1, 0 of those that never waited.
    fn may_be_one_too_many(&mut self, published: impl Iterator<Item = usize>, core: usize) -> bool {
        self.on.fill(0);
        let (mut waiting, mut last) = (0, self.me);
        for (rank, published) in published.enumerate() {
            if let Some(on) = published
                .checked_sub(1)
                .and_then(|core| self.on.get_mut(core))
            {
                *on += 1;
                waiting += 1;
                if published == core + 1 {
                    last = rank;
                }
            }
        }
        self.on[core] > (waiting / self.cores).max(1) && last == self.me
    }

    /// The core with the fewest ranks, if one more of `core`'s makes it more even, of those that this rank `may_use`.
    fn destination(
        &mut self,
        core: usize,
        now: Instant,
        may_use: impl Fn(usize) -> bool,
        is_alone: impl FnOnce() -> bool,
    ) -> Option<usize> {
        if self.settled.lasts(|| now) || self.refused.lasts(|| now) {
            return None;
        }
        let all = 0..self.on.len();
        let to = all
            .filter(|to| may_use(*to))
            .min_by_key(|to| self.on[*to])?;
        if self.on[to] + 2 > self.on[core] {
            return None;
        }
        // Beside somebody who computes it would have to wait for him. The kernel may still move it there.
        if !is_alone() {
            self.refused.begin(now);
            return None;
        }
        self.settled.begin(now);
        Some(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where rank `me` goes when it and the others are on these cores, from 1; asked anew each time.
    fn goes(published: &[usize], me: usize, may_use: impl Fn(usize) -> bool) -> Option<usize> {
        let cores = (0..8).filter(|core| may_use(*core)).count();
        poll(
            &mut Placement::new(me, cores, 8),
            published,
            Instant::now(),
            may_use,
            true,
        )
    }

    fn poll(
        placement: &mut Placement,
        published: &[usize],
        now: Instant,
        may_use: impl Fn(usize) -> bool,
        alone: bool,
    ) -> Option<usize> {
        let core = published[placement.me] - 1;
        if !placement.may_be_one_too_many(published.iter().copied(), core) {
            return None;
        }
        placement
            .destination(core, now, may_use, || alone)
            .map(|core| core + 1)
    }

    const TWO: fn(usize) -> bool = |core| core < 2;

    #[test]
    fn the_last_rank_goes_where_fewest_are_if_that_makes_it_more_even() {
        assert_eq!(goes(&[1, 1, 1, 1], 3, TWO), Some(2));
        assert_eq!(goes(&[1, 1, 1, 1], 2, TWO), None);
        assert_eq!(goes(&[2, 1, 2, 2], 3, TWO), Some(1));
        assert_eq!(goes(&[2, 2, 2, 1], 2, TWO), Some(1));
        assert_eq!(goes(&[1, 2, 2, 1], 3, TWO), None);
        assert_eq!(goes(&[1, 2, 1], 2, TWO), None);
        assert_eq!(goes(&[1, 1, 1, 2, 2, 3, 4, 4], 2, |core| core < 4), Some(3));
        assert_eq!(goes(&[1, 1, 2, 2, 3, 3], 1, |core| core < 4), Some(4));
        // A rank that never waited takes no core.
        assert_eq!(goes(&[1, 0, 0, 1], 3, TWO), Some(2));
        // Not on a core that is not for this rank.
        assert_eq!(goes(&[1, 1, 1], 2, |core| core == 0 || core == 2), Some(3));
        assert_eq!(goes(&[1, 1, 1], 2, |core| core == 0), None);
    }

    #[test]
    fn as_long_as_all_is_even_nothing_keeps_it_from_moving_later() {
        let (mut placement, now) = (Placement::new(3, 2, 8), Instant::now());
        for _ in 0..1000 {
            assert_eq!(poll(&mut placement, &[1, 1, 2, 2], now, TWO, true), None);
            assert_eq!(poll(&mut placement, &[0, 1, 2, 2], now, TWO, true), None);
        }
        let uneven = [2, 1, 2, 2];
        assert_eq!(poll(&mut placement, &uneven, now, TWO, true), Some(1));
        // Moved back by the kernel, it leaves it at that for a while.
        assert_eq!(poll(&mut placement, &uneven, now, TWO, true), None);
        let later = now + SETTLED;
        assert_eq!(poll(&mut placement, &uneven, later, TWO, true), Some(1));
        let again = later + SETTLED;
        assert_eq!(poll(&mut placement, &uneven, again, TWO, true), None);
    }

    #[test]
    fn beside_others_it_stays_and_asks_less_and_less_often() {
        let (mut placement, began) = (Placement::new(1, 2, 8), Instant::now());
        let (mut now, mut asked) = (began, 0);
        while now < began + 20 * REFUSED_MAX {
            placement.may_be_one_too_many([1, 1].into_iter(), 0);
            let to = placement.destination(0, now, TWO, || {
                asked += 1;
                false
            });
            assert_eq!(to, None);
            now += REFUSED / 4;
        }
        assert!((20..30).contains(&asked), "{asked}");
        now += 2 * REFUSED_MAX;
        assert_eq!(poll(&mut placement, &[1, 1], now, TWO, true), Some(2));
    }
}

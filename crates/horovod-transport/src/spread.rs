//! Where ranks outnumber cores: how those that wait spread over the cores.
//!
//! A thread that gives way all the time never looks idle to the kernel, and one that ran just now is not moved to a core
//! that is: ranks that happen to share a core stay there for a tenth of a second or more. So each rank tells on which core
//! it waits, and where one core has too many of them, one of those moves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::patience::HoldOff;
use crate::platform::{self, region::Region};
use crate::sync::Ordering;

/// How often a rank that gives way looks where the others are, in steps.
const LOOK_EVERY: u32 = 32;
/// A rank that has moved, or could not, leaves it at that for so long; twice as long each time it would have to go
/// again soon after, up to the second figure.
const SETTLED: Duration = Duration::from_millis(2);
const SETTLED_MAX: Duration = Duration::from_millis(1280);

/// Where the ranks of this host wait.
pub(crate) struct Spread {
    region: Arc<Region>,
    /// By rank of the host, where in the region it tells its core, from 1; 0 while it sleeps.
    words: Vec<usize>,
    me: usize,
    told: u32,
    steps: u32,
    /// By core, how many wait there.
    on: Vec<u32>,
    rest: HoldOff,
}

impl Spread {
    pub(crate) fn new(region: Arc<Region>, words: Vec<usize>, me: usize) -> Self {
        Self {
            region,
            words,
            me,
            told: 0,
            steps: 0,
            on: vec![0; platform::Cores::MAX],
            rest: HoldOff::new(SETTLED, SETTLED_MAX),
        }
    }

    fn tell(&mut self, core: u32) {
        if self.told != core {
            self.told = core;
            let word = self.region.u32(self.words[self.me]);
            word.store(core, Ordering::Relaxed);
        }
    }

    /// This rank sleeps: it takes no core.
    pub(crate) fn sleeps(&mut self) {
        self.tell(0);
    }

    /// This rank is about to give way on `core`; moves it to another one if it should be there.
    pub(crate) fn gives_way(&mut self, core: usize) {
        if core >= self.on.len() {
            return;
        }
        self.tell(u32::try_from(core).map_or(0, |core| core + 1));
        self.steps = self.steps.wrapping_add(1);
        if !self.steps.is_multiple_of(LOOK_EVERY) || !self.is_one_too_many(core) {
            return;
        }
        let now = Instant::now();
        if self.rest.lasts(now) {
            return;
        }
        self.rest.begin(now);
        // Beside somebody who computes it would have to wait for him. The kernel may still move it there.
        let is_alone = platform::running().is_some_and(|running| running <= self.words.len());
        let Some(cores) = platform::Cores::of_this_thread().filter(|_| is_alone) else {
            return;
        };
        if let Some(to) = destination(&self.on, core, |core| cores.has(core)) {
            cores.move_to(to);
        }
    }

    /// Whether this rank is the last of several on `core`; counts those on each.
    fn is_one_too_many(&mut self, core: usize) -> bool {
        self.on.fill(0);
        let mut last = self.me;
        for (rank, word) in self.words.iter().enumerate() {
            let told = self.region.u32(*word).load(Ordering::Relaxed) as usize;
            if let Some(on) = told.checked_sub(1).and_then(|core| self.on.get_mut(core)) {
                *on += 1;
                if told == core + 1 {
                    last = rank;
                }
            }
        }
        self.on[core] > 1 && last == self.me
    }
}

/// The core with the fewest ranks, if one more of `core`'s makes it more even. `on` counts ranks by core.
fn destination(on: &[u32], core: usize, may_use: impl Fn(usize) -> bool) -> Option<usize> {
    let least = (0..on.len())
        .filter(|to| may_use(*to))
        .min_by_key(|to| on[*to])?;
    (on[least] + 2 <= on[core]).then_some(least)
}

#[cfg(test)]
mod tests {
    use super::destination;

    #[test]
    fn a_rank_goes_where_fewest_are_if_that_makes_it_more_even() {
        let all = |_| true;
        assert_eq!(destination(&[4, 0], 0, all), Some(1));
        assert_eq!(destination(&[1, 3], 1, all), Some(0));
        assert_eq!(destination(&[2, 2], 1, all), None);
        assert_eq!(destination(&[2, 1], 0, all), None);
        assert_eq!(destination(&[3, 2, 1, 2], 0, all), Some(2));
        assert_eq!(destination(&[2, 2, 2, 0, 0], 2, all), Some(3));
        // Not on a core that is not for this process.
        assert_eq!(destination(&[3, 0, 1], 0, |core| core != 1), Some(2));
        assert_eq!(destination(&[3, 0], 0, |core| core == 0), None);
    }
}

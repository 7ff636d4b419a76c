//! Ranks of an elastic job that end while others go on: when they get SIGKILL, and again.

use std::time::{Duration, Instant};

/// From one SIGKILL to the next: a process may fork while its parent is being killed.
const AGAIN: Duration = Duration::from_millis(50);

/// The ranks that have got SIGTERM, until nothing of them runs.
#[derive(Default)]
pub(crate) struct SingleEndings(Vec<SingleEnding>);

struct SingleEnding {
    rank: u32,
    kill_at: Instant,
    is_killed: bool,
}

impl SingleEndings {
    /// A rank has got SIGTERM; it gets SIGKILL at this time. Of several times the first counts.
    pub(crate) fn add(&mut self, rank: u32, kill_at: Instant) {
        if !self.0.iter().any(|ending| ending.rank == rank) {
            self.0.push(SingleEnding {
                rank,
                kill_at,
                is_killed: false,
            });
        }
    }

    /// Nothing of this rank runs.
    pub(crate) fn remove(&mut self, rank: u32) {
        self.0.retain(|ending| ending.rank != rank);
    }

    /// When the next rank gets SIGKILL.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.0.iter().map(|ending| ending.kill_at).min()
    }

    /// The ranks that get SIGKILL now, and whether for the first time.
    pub(crate) fn due(&mut self, now: Instant) -> Vec<(u32, bool)> {
        let due = self.0.iter_mut().filter(|ending| ending.kill_at <= now);
        due.map(|ending| {
            ending.kill_at = now + AGAIN;
            (ending.rank, !std::mem::replace(&mut ending.is_killed, true))
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_due_again_until_nothing_of_it_runs() {
        let mut endings = SingleEndings::default();
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        endings.add(3, at(30));
        endings.add(3, at(60));
        endings.add(4, at(40));
        assert_eq!(endings.deadline(), Some(at(30)));
        assert_eq!(endings.due(at(29)), []);
        assert_eq!(endings.due(at(30)), [(3, true)]);
        // Its process ends, and leaves another one.
        endings.add(3, at(60));
        assert_eq!(endings.deadline(), Some(at(30) + AGAIN));
        assert_eq!(endings.due(at(31)), [(3, false)]);
        endings.remove(3);
        assert_eq!(endings.due(at(40)), [(4, true)]);
        endings.remove(4);
        assert_eq!(endings.deadline(), None);
    }
}

//! Which operations the thread that starts them waits for: those that run alone, unless that was in vain of late.
//!
//! A thread that waits makes the progress itself, which saves two wake-ups; the core bounds the wait. But TensorFlow has few
//! threads, so one that waits must not be needed for what is waited for, nor keep others from starting together. So a
//! kernel waits only if in its run before no other operation was under way; and after a wait that was over before the
//! operation was, it does not wait again for a while, longer each time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Runs without a wait after one that was in vain: doubled each time, at most.
const PAUSE_MAX: u32 = 64;

/// Operations of this process.
#[derive(Debug)]
struct Traffic {
    started: AtomicU64,
    under_way: AtomicUsize,
}

static TRAFFIC: Traffic = Traffic {
    started: AtomicU64::new(0),
    under_way: AtomicUsize::new(0),
};

/// A kernel's record of its runs. Runs may overlap; then only some of them are recorded.
#[derive(Debug, Default)]
pub(crate) struct WaitHistory {
    was_alone: AtomicBool,
    /// Runs in which it does not wait, and how many there were after the last wait in vain.
    paused_for: AtomicU32,
    pause: AtomicU32,
}

impl WaitHistory {
    /// At the start of a run: what is to be told of its end, and whether to wait for it; never where that cannot be
    /// (`may_wait`).
    pub(crate) fn start(self: Arc<Self>, may_wait: bool) -> (StartedRun, bool) {
        self.start_in(&TRAFFIC, may_wait)
    }

    fn start_in(self: Arc<Self>, traffic: &'static Traffic, may_wait: bool) -> (StartedRun, bool) {
        let number = traffic.started.fetch_add(1, Ordering::Relaxed) + 1;
        let alone = traffic.under_way.fetch_add(1, Ordering::Relaxed) == 0;
        let waits = may_wait && alone && self.was_alone.load(Ordering::Relaxed) && !self.pauses();
        let started_run = StartedRun {
            traffic,
            number,
            alone,
            waits_on: waits.then(this_thread),
            wait_history: self,
        };
        (started_run, waits)
    }

    fn pauses(&self) -> bool {
        let left = self.paused_for.load(Ordering::Relaxed);
        self.paused_for
            .store(left.saturating_sub(1), Ordering::Relaxed);
        left > 0
    }

    /// A wait has ended.
    fn learn(&self, in_vain: bool) {
        let pause = match self.pause.load(Ordering::Relaxed) {
            _ if !in_vain => 0,
            0 => 1,
            before => (2 * before).min(PAUSE_MAX),
        };
        self.pause.store(pause, Ordering::Relaxed);
        self.paused_for.store(pause, Ordering::Relaxed);
    }
}

/// A run that has not ended.
#[derive(Debug)]
pub(crate) struct StartedRun {
    traffic: &'static Traffic,
    number: u64,
    alone: bool,
    /// The thread that waits for it, if one does.
    waits_on: Option<usize>,
    wait_history: Arc<WaitHistory>,
}

impl StartedRun {
    /// The run has ended, and this thread tells.
    pub(crate) fn ends(self) {
        let traffic = self.traffic;
        traffic.under_way.fetch_sub(1, Ordering::Relaxed);
        let alone = self.alone && traffic.started.load(Ordering::Relaxed) == self.number;
        self.wait_history.was_alone.store(alone, Ordering::Relaxed);
        if let Some(thread) = self.waits_on {
            self.wait_history.learn(thread != this_thread());
        }
    }
}

/// A number that no other running thread has.
fn this_thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| (&raw const *mark).addr())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic() -> &'static Traffic {
        Box::leak(Box::new(Traffic {
            started: AtomicU64::new(0),
            under_way: AtomicUsize::new(0),
        }))
    }

    /// A run that ends in time, with nothing beside it; whether it was waited for.
    fn run(wait_history: &Arc<WaitHistory>, traffic: &'static Traffic) -> bool {
        let (started_run, waits) = wait_history.clone().start_in(traffic, true);
        started_run.ends();
        waits
    }

    #[test]
    fn what_was_alone_is_waited_for() {
        let (wait_history, traffic) = (Arc::default(), traffic());
        assert_eq!(
            [(); 3].map(|()| run(&wait_history, traffic)),
            [false, true, true]
        );
        let (started_run, waits) = wait_history.clone().start_in(traffic, false);
        assert!(!waits, "where that cannot be");
        started_run.ends();
    }

    #[test]
    fn what_starts_beside_others_is_not() {
        let (first, second) = (Arc::<WaitHistory>::default(), Arc::<WaitHistory>::default());
        let traffic = traffic();
        for _ in 0..3 {
            let (one, waits) = first.clone().start_in(traffic, true);
            let (two, also) = second.clone().start_in(traffic, true);
            assert!(!waits && !also);
            one.ends();
            two.ends();
        }
        // Alone again: seen in the first run, used in the second.
        assert_eq!([(); 2].map(|()| run(&first, traffic)), [false, true]);
    }

    #[test]
    fn waits_in_vain_become_rare_and_return_after_a_good_one() {
        let (wait_history, traffic) = (Arc::<WaitHistory>::default(), traffic());
        run(&wait_history, traffic);
        let mut waited_in = Vec::new();
        for n in 0..400 {
            let (started_run, waits) = wait_history.clone().start_in(traffic, true);
            waited_in.extend(waits.then_some(n));
            // As the core's thread tells it.
            std::thread::scope(|scope| {
                scope.spawn(|| started_run.ends());
            });
        }
        assert_eq!(
            waited_in,
            [0, 2, 5, 10, 19, 36, 69, 134, 199, 264, 329, 394]
        );
        while !run(&wait_history, traffic) {}
        assert!(run(&wait_history, traffic));
    }
}

//! How long threads of this process were runnable, as the system counts it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// How long threads of this process were runnable, in milliseconds: they ran on a core, or waited in the run queue for one.
/// The time in the queue of this library's own threads does not count.
///
/// On a loaded host a thread that computes may run on a core for a small part of the time. Its time in the queue tells
/// this thread from one that sleeps.
pub fn runnable_ms() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let ms = t.tv_sec.saturating_mul(1000) + t.tv_nsec / 1_000_000;
    let mut queued = QUEUED.lock().unwrap_or_else(PoisonError::into_inner);
    queued.add(in_queue());
    u64::try_from(ms).unwrap_or(0) + queued.sum_ns / 1_000_000
}

static QUEUED: Mutex<Queued> = Mutex::new(Queued {
    threads: BTreeMap::new(),
    sum_ns: 0,
});

/// How long threads have waited for a core, also those that have ended since.
#[derive(Debug, Default)]
struct Queued {
    threads: BTreeMap<String, u64>,
    sum_ns: u64,
}

impl Queued {
    fn add(&mut self, threads: BTreeMap<String, u64>) {
        for (thread, ns) in &threads {
            let before = self.threads.get(thread).copied().unwrap_or(0);
            self.sum_ns += ns.saturating_sub(before);
        }
        self.threads = threads;
    }
}

/// How long each thread of this process has waited for a core, in nanoseconds, where the system tells.
fn in_queue() -> BTreeMap<String, u64> {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return BTreeMap::new();
    };
    let of_thread = |thread: std::fs::DirEntry| {
        let name = std::fs::read_to_string(thread.path().join("comm")).ok()?;
        if name.starts_with("hvd-") || name.starts_with("horovod") {
            return None;
        }
        // Time on a core, time in the queue, number of time slices.
        let times = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        let queued = times.split_ascii_whitespace().nth(1)?.parse().ok()?;
        Some((thread.file_name().to_string_lossy().into_owned(), queued))
    };
    threads.flatten().filter_map(of_thread).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_the_queue_only_grows_when_threads_end_and_others_begin() {
        let of = |threads: &[(&str, u64)]| {
            let named = |(name, ns): &(&str, u64)| ((*name).to_owned(), *ns);
            threads.iter().map(named).collect::<BTreeMap<_, _>>()
        };
        let mut queued = Queued::default();
        for (threads, sum) in [
            (of(&[("1", 5), ("2", 7)]), 12),
            (of(&[("1", 6)]), 13),
            (of(&[("1", 6), ("3", 2)]), 15),
            (of(&[]), 15),
        ] {
            queued.add(threads);
            assert_eq!(queued.sum_ns, sum);
        }
    }

    #[test]
    fn runnable_time_grows_with_work() {
        let before = runnable_ms();
        let mut n = 0u64;
        while runnable_ms() == before {
            n = std::hint::black_box(n + 1);
        }
        assert!(runnable_ms() > before);
    }
}

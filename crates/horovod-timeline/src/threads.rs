//! The threads that take part, by the numbers and names that the operating system knows them by.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::report::ThreadId;

/// Threads whose names are kept.
const NAMED_THREADS_MAX: usize = 4096;
/// Lowest priority: a timeline takes the time that nobody else wants.
#[cfg(target_os = "linux")]
const NICEST: i32 = 19;

/// Processor time that a turn may take where others want it, too: with a turn every 50 ms, 2 % of one processor.
const TIME_SLICE: Duration = Duration::from_millis(1);

static NEXT_TABLE: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The table that knows this thread, and its number.
    static KNOWN: Cell<(u64, ThreadId)> = const { Cell::new((0, 0)) };
}

/// Names of the threads that one timeline has met.
#[derive(Debug)]
pub(super) struct Threads {
    table: u64,
    names: Mutex<HashMap<ThreadId, Arc<str>>>,
}

impl Threads {
    pub(super) fn new() -> Self {
        Self {
            table: NEXT_TABLE.fetch_add(1, Ordering::Relaxed),
            names: Mutex::default(),
        }
    }

    /// The calling thread.
    #[inline]
    pub(super) fn current(&self) -> ThreadId {
        let (table, thread) = KNOWN.get();
        if table == self.table {
            thread
        } else {
            self.introduce()
        }
    }

    /// The number of a GPU's track among the threads.
    pub(super) fn device(&self, ordinal: i32) -> ThreadId {
        // No system has so many threads.
        let track = ThreadId::MAX - ordinal.unsigned_abs();
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names
            .entry(track)
            .or_insert_with(|| format!("GPU {ordinal}").into());
        track
    }

    pub(super) fn name(&self, thread: ThreadId) -> Option<Arc<str>> {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.get(&thread).cloned()
    }

    #[cold]
    fn introduce(&self) -> ThreadId {
        let (thread, name) = system::current();
        KNOWN.set((self.table, thread));
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if names.len() < NAMED_THREADS_MAX {
            names.insert(thread, name);
        }
        thread
    }
}

/// Lets all others go first; where that cannot be had, nothing happens.
pub(super) fn lower_priority() {
    #[cfg(target_os = "linux")]
    // Linux takes a thread's number for a process's here.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICEST);
}

/// Some work of a thread that gives way: it ends early where the processors are busy.
pub(super) struct TimeSlice {
    began: Instant,
    worked: Duration,
}

impl TimeSlice {
    pub(super) fn begin() -> Self {
        Self {
            began: Instant::now(),
            worked: system::worked(),
        }
    }

    /// Whether the rest is to wait for another turn.
    pub(super) fn is_over(&self) -> bool {
        let lasted = self.began.elapsed();
        lasted > TIME_SLICE && is_over(lasted, system::worked().saturating_sub(self.worked))
    }
}

/// A thread that lacked the processor for a fifth of the time shares it with others.
fn is_over(lasted: Duration, worked: Duration) -> bool {
    worked > TIME_SLICE && worked < lasted * 4 / 5
}

#[cfg(target_os = "linux")]
mod system {
    use std::sync::Arc;
    use std::time::Duration;

    use super::ThreadId;

    /// Processor time of the calling thread so far.
    pub(super) fn worked() -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::try_from(time).unwrap_or_default()
    }

    /// Number and name of the calling thread.
    pub(super) fn current() -> (ThreadId, Arc<str>) {
        let id = rustix::thread::gettid();
        let name = rustix::thread::name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let name = if id == rustix::process::getpid() {
            format!("{name} (main)")
        } else {
            name
        };
        (id.as_raw_nonzero().get().cast_unsigned(), name.into())
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::ThreadId;

    /// Not known: it is as if others never wanted the processor.
    pub(super) fn worked() -> Duration {
        Duration::ZERO
    }

    /// A number of our own, and the name that Rust knows.
    pub(super) fn current() -> (ThreadId, Arc<str>) {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let thread = std::thread::current();
        (id, thread.name().unwrap_or("a caller's thread").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_known_by_the_name_it_was_given() {
        let threads = Arc::new(Threads::new());
        let other = std::thread::Builder::new().name("some-worker".into());
        let id = other
            .spawn({
                let threads = threads.clone();
                move || (threads.current(), threads.current())
            })
            .unwrap()
            .join()
            .unwrap();
        assert_eq!(id.0, id.1);
        assert_ne!(id.0, threads.current());
        assert_eq!(threads.name(id.0).as_deref(), Some("some-worker"));
    }

    #[test]
    fn a_time_slice_is_over_where_others_take_the_processor() {
        let ms = Duration::from_millis;
        assert!(!is_over(ms(50), ms(49)));
        assert!(!is_over(ms(50), ms(1)));
        assert!(is_over(ms(50), ms(2)));
        assert!(is_over(ms(4), ms(3)));
    }

    #[test]
    fn each_table_learns_the_names_anew() {
        let (a, b) = (Threads::new(), Threads::new());
        assert_eq!(a.current(), b.current());
        assert!(a.name(a.current()).is_some());
        assert!(b.name(b.current()).is_some());
    }
}

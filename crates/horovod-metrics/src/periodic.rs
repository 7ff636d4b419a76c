//! A thread that does something once in a while, until it is dropped.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::lock;

#[derive(Debug)]
pub(crate) struct Periodic {
    end: Arc<End>,
    thread: Option<JoinHandle<()>>,
}

/// An event that comes once.
#[derive(Debug, Default)]
pub(crate) struct End {
    came: Mutex<Option<Instant>>,
    comes: Condvar,
}

impl Periodic {
    /// Calls `task` after each `period`, on a thread of this name.
    pub(crate) fn start(
        name: &str,
        period: Duration,
        task: impl FnMut() + Send + 'static,
    ) -> std::io::Result<Self> {
        let end = Arc::new(End::default());
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn({
            let end = end.clone();
            move || end.run(period, task)
        })?;
        Ok(Self {
            end,
            thread: Some(thread),
        })
    }
}

impl End {
    pub(crate) fn come(&self) {
        lock(&self.came).get_or_insert_with(Instant::now);
        self.comes.notify_all();
    }

    /// The time at which it came.
    pub(crate) fn came(&self) -> Option<Instant> {
        *lock(&self.came)
    }

    pub(crate) fn has_come(&self) -> bool {
        self.came().is_some()
    }

    /// Waits for it, but no longer than this.
    pub(crate) fn wait(&self, most: Duration) {
        let came = lock(&self.came);
        let waited = self
            .comes
            .wait_timeout_while(came, most, |came| came.is_none());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn run(&self, period: Duration, mut task: impl FnMut()) {
        let mut came = lock(&self.came);
        while came.is_none() {
            let waited = self.comes.wait_timeout(came, period);
            came = waited.unwrap_or_else(PoisonError::into_inner).0;
            if came.is_none() {
                drop(came);
                task();
                came = lock(&self.came);
            }
        }
    }
}

impl Drop for Periodic {
    fn drop(&mut self) {
        self.end.come();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a thread of the metrics ended by a panic");
        }
    }
}

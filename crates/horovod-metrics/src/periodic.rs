//! A thread that does something once in a while, until it is dropped.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::lock;

#[derive(Debug)]
pub(crate) struct Periodic {
    end: Arc<End>,
    thread: Option<JoinHandle<()>>,
}

/// An event that comes once.
#[derive(Debug, Default)]
pub(crate) struct End {
    has_come: Mutex<bool>,
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
        *lock(&self.has_come) = true;
        self.comes.notify_all();
    }

    pub(crate) fn has_come(&self) -> bool {
        *lock(&self.has_come)
    }

    /// Waits for it, but no longer than this.
    pub(crate) fn wait(&self, most: Duration) {
        let has_come = lock(&self.has_come);
        let waited = self
            .comes
            .wait_timeout_while(has_come, most, |has_come| !*has_come);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn run(&self, period: Duration, mut task: impl FnMut()) {
        let mut has_come = lock(&self.has_come);
        while !*has_come {
            let waited = self.comes.wait_timeout(has_come, period);
            has_come = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !*has_come {
                drop(has_come);
                task();
                has_come = lock(&self.has_come);
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

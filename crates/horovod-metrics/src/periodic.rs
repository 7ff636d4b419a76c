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

#[derive(Debug, Default)]
struct End {
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
        *lock(&self.end.has_come) = true;
        self.end.comes.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a thread of the metrics ended by a panic");
        }
    }
}

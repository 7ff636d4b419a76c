//! The thread that runs callbacks: it starts with the first submission that has one, and ends with the engine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::error::Error;

/// How long a shutdown waits for a callback that does not return.
const CALLBACK_MAX: Duration = Duration::from_secs(30);

/// The thread, if it was started.
#[derive(Default)]
pub(super) struct CallbackThread {
    running: Mutex<Option<Running>>,
    was_started: AtomicBool,
}

struct Running {
    thread: JoinHandle<()>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl CallbackThread {
    pub(super) fn was_started(&self) -> bool {
        self.was_started.load(Ordering::Acquire)
    }

    /// Starts the thread, unless it was started before.
    pub(super) fn start(&self, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if self.was_started() {
            return Ok(());
        }
        let (ends, ended) = mpsc::channel::<()>();
        let thread = thread::Builder::new()
            .name("hvd-callbacks".into())
            .spawn(move || {
                let _ends = ends;
                run();
            })
            .map_err(|e| {
                Error::Internal(format!("cannot start the thread that runs callbacks: {e}"))
            })?;
        *running = Some(Running { thread, ended });
        self.was_started.store(true, Ordering::Release);
        Ok(())
    }

    /// Waits until the thread has ended, at most [`CALLBACK_MAX`]: foreign code that blocks must not keep the process in
    /// the job. Returns at once on the thread itself.
    pub(super) fn join(&self) {
        self.join_within(CALLBACK_MAX);
    }

    fn join_within(&self, limit: Duration) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Running { thread, ended }) = running.take() else {
            return;
        };
        drop(running);
        if thread.thread().id() == thread::current().id() {
            return;
        }
        if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(
                "a function that was called with a result has not returned for {} s; the process leaves the job \
                 while that function still runs",
                limit.as_secs()
            );
        } else if thread.join().is_err() {
            tracing::error!("the callback thread ended by a panic");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shutdown_ends_though_a_callback_does_not_return() {
        let (release, released) = mpsc::channel::<()>();
        let (done, is_done) = mpsc::channel();
        let thread = CallbackThread::default();
        let run = move || {
            let _ = released.recv();
            let _ = done.send(());
        };
        thread.start(run).unwrap();
        thread.start(|| panic!("started twice")).unwrap();
        thread.join_within(Duration::from_millis(1));
        drop(release);
        is_done.recv_timeout(Duration::from_secs(60)).unwrap();
        thread.join();
    }

    #[test]
    fn a_shutdown_waits_for_callbacks_that_return() {
        let (begun, has_begun) = mpsc::channel();
        let thread = CallbackThread::default();
        thread.start(move || begun.send(()).unwrap()).unwrap();
        thread.join();
        has_begun.try_recv().unwrap();
    }
}

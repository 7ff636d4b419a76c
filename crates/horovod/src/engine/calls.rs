//! Operations for which the thread that submits them waits at once, and ends that are calls where it waits only a moment.

use std::time::Duration;

use super::callers::Guest;
use super::driver_lock::DriverLock;
use super::handles::{call_here, in_callback};
use super::submit::vanished;
use super::{Callback, Engine, Handle, Submission, Waited};
use crate::error::Error;

/// How a thread waits for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Plain,
    /// It may be ended before its time: [`Engine::wait_softly`].
    Soft,
    /// It also tells of what this thread has submitted, which nobody knows of yet.
    Announcing,
}

impl Wait {
    /// The wait of the thread that has just queued the operation.
    pub(super) fn for_submitted(driver_lock: &DriverLock) -> Self {
        match driver_lock.submitted_by_waiter() {
            true => Self::Plain,
            false => Self::Announcing,
        }
    }
}

impl Engine {
    /// Have an operation that was submitted to be waited for end with a callback instead, as of
    /// [`Submission::calling`]; if it has ended already, that is called before this returns.
    ///
    /// For callers that may wait for a short time, which saves the wake-up of the thread that runs callbacks. They may
    /// not wait without end: threads that other operations need are few.
    pub fn call_at_end(&self, handle: Handle, callback: Callback) {
        let ended = match self.start_callback_thread() {
            Ok(()) => self.shared.handles.redirect(handle, callback),
            Err(error) => {
                // The caller must not take the tensors back while they are in use: so wait after all.
                tracing::warn!("{error}; a thread waits for an operation instead");
                Some((self.wait(handle, Duration::MAX), callback))
            }
        };
        match ended {
            None => {}
            Some((Waited::Ended { result, .. }, callback)) => call_here(|| callback(result)),
            Some((_, callback)) => call_here(|| callback(Err(vanished(handle)))),
        }
    }

    /// Make a call to this engine on a thread of a framework, which will not wait for what the call submits, or only for a
    /// moment. Stall reports do not count the thread among those that call operations.
    pub fn as_guest<T>(&self, call: impl FnOnce(&Self) -> T) -> T {
        let _guest = Guest::begin();
        call(self)
    }

    /// As [`Engine::submit`] and then [`Engine::wait`], but the wait sends what there is to send: so an operation for which
    /// the others wait already needs no other thread of this rank.
    ///
    /// # Errors
    /// As of [`Engine::submit`].
    pub fn submit_and_wait_for(
        &self,
        submission: Submission<'_>,
        timeout: Duration,
    ) -> Result<(Handle, Waited), Error> {
        if timeout.is_zero() {
            let handle = self.submit(submission)?;
            return Ok((handle, self.wait(handle, timeout)));
        }
        let handle = self.queue(submission)?;
        let wait = Wait::for_submitted(&self.driver_lock);
        Ok((handle, self.wait_as(handle, timeout, wait)))
    }

    /// Submits an operation that ends with a callback, as of [`Submission::calling`], but waits for it first, at most
    /// `timeout`: if it ends by then, this thread makes the call before this returns, while others may be made.
    ///
    /// A thread that waits makes the progress, so this costs no wake-up of another one. Amid a callback it does not wait.
    ///
    /// # Errors
    /// As of [`Self::submit`]; then `callback` is not called.
    pub fn submit_and_wait(
        &self,
        submission: Submission<'_>,
        timeout: Duration,
        callback: Callback,
    ) -> Result<(), Error> {
        if timeout.is_zero() || in_callback() {
            return self.submit(submission.calling(callback)).map(drop);
        }
        match self.submit_and_wait_for(submission, timeout)? {
            (_, Waited::Ended { result, .. }) => call_here(|| callback(result)),
            (handle, Waited::Pending) => self.call_at_end(handle, callback),
            (handle, Waited::Unknown) => call_here(|| callback(Err(vanished(handle)))),
        }
        Ok(())
    }
}

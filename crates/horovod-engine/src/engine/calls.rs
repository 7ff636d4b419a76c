//! Submissions whose thread waits at once, and callbacks that such a thread runs itself after a short wait.

use std::time::Duration;

use super::callers::Guest;
use super::driver_lock::DriverLock;
use super::handles::{Wait, call_here, in_callback};
use super::submit::vanished;
use super::{Callback, Engine, Handle, Submission, Waited};
use crate::error::Error;

/// Returns how the thread waits that has just queued the operation.
pub(super) fn wait_for_submitted(driver_lock: &DriverLock) -> Wait {
    match driver_lock.submitted_by_waiter() {
        true => Wait::Plain,
        false => Wait::Announcing,
    }
}

impl Engine {
    /// Delivers an operation that was submitted for a waiter to a callback instead, as of [`Submission::calling`]. If
    /// the operation has ended already, `callback` is called before this returns.
    ///
    /// This is for callers that may wait for a short time, which saves the wake-up of the callback thread. Such callers
    /// may not wait without limit, because threads that other operations need are few.
    pub fn call_at_end(&self, handle: Handle, callback: Callback) {
        let ended = match self.start_callback_thread() {
            Ok(()) => self.shared.handles.redirect(handle, callback),
            Err(error) => {
                // The caller must not reuse the tensors while they are in use, so this thread waits after all.
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

    /// Makes a call to this engine on a framework's thread that waits at most a moment for the operations of the call.
    /// Stall reports do not count the thread among those that call operations.
    pub fn as_guest<T>(&self, call: impl FnOnce(&Self) -> T) -> T {
        let _guest = Guest::begin();
        call(self)
    }

    /// As [`Engine::submit`] and then [`Engine::wait`], but the wait sends the pending messages. An operation for which
    /// the peers wait already then needs no other thread of this rank.
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
        let wait = wait_for_submitted(&self.driver_lock);
        Ok((handle, self.wait_as(handle, timeout, wait)))
    }

    /// Submits an operation that ends with a callback, as of [`Submission::calling`], but first waits for it, at most
    /// `timeout`. If the operation ends by then, this thread calls `callback` before this returns, perhaps while
    /// another callback runs.
    ///
    /// A waiting thread makes progress itself, so this costs no wake-up of another thread. Within a callback this does
    /// not wait.
    ///
    /// # Errors
    /// As of [`Self::submit`]; on an error `callback` is not called.
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

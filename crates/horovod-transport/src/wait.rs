//! One bounded poll, for the phases that have no [`crate::Waiter`] yet.

use std::time::Instant;

use rustix::event::{PollFd, Timespec, poll};

/// Waits until one of `fds` is ready or the deadline has passed. Can return early.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) {
    let timeout = deadline.map(|deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            // Rounded up: waking just before the deadline would only mean another round.
            tv_nsec: i64::from(left.subsec_nanos()),
        }
    });
    // An interrupted wait is an early return.
    let _ = poll(fds, timeout.as_ref());
}

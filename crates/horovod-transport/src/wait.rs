//! One bounded poll, for the phases that have no [`crate::Waiter`] yet.

use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::platform::fd::Fd;

/// Waits until one of `sockets` can be read, or written where that is `true`, or the deadline has passed. Can
/// return early.
pub(crate) fn wait_for_any<'a>(
    sockets: impl Iterator<Item = (&'a Fd, bool)>,
    deadline: Option<Instant>,
) {
    let poll_fd = |(fd, write): (&'a Fd, bool)| {
        let flags = if write {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        };
        Some(PollFd::from_borrowed_fd(fd.get().ok()?, flags))
    };
    let mut fds: Vec<PollFd<'_>> = sockets.filter_map(poll_fd).collect();
    poll_until(&mut fds, deadline);
}

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

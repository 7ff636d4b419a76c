//! Signals as bytes on a socket that can be polled, without unsafe code of our own.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

/// Watches some signals.
#[derive(Debug)]
pub(crate) struct Signals {
    wake: UnixStream,
    seen: Vec<(i32, Arc<AtomicBool>)>,
}

impl Signals {
    /// Watches SIGINT, SIGTERM and SIGHUP (unless whoever started us made us ignore it), and SIGCHLD.
    pub(crate) fn watch() -> io::Result<Self> {
        let (wake, ring) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        ring.set_nonblocking(true)?;
        let mut seen = Vec::new();
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGCHLD] {
            if signal != SIGCHLD && crate::platform::is_ignored(signal) {
                continue;
            }
            let flag = Arc::new(AtomicBool::new(false));
            // The flag first: handlers run in the order of registration.
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
            signal_hook::low_level::pipe::register(signal, ring.try_clone()?)?;
            seen.push((signal, flag));
        }
        Ok(Self { wake, seen })
    }

    /// Readable when a signal came.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The signals that came since the last call; SIGCHLD is only a wake-up and not among them.
    pub(crate) fn take(&mut self) -> Vec<i32> {
        let mut bytes = [0; 64];
        while matches!(self.wake.read(&mut bytes), Ok(n) if n > 0) {}
        self.seen
            .iter()
            .filter(|(signal, flag)| flag.swap(false, Ordering::SeqCst) && *signal != SIGCHLD)
            .map(|(signal, _)| *signal)
            .collect()
    }
}

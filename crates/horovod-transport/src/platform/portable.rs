//! The portable mechanisms: an unlinked file, a socket pair and poll.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{HANGUP, READABLE, Source, WRITABLE};
use super::{Mechanisms, fd::Fd};

pub(crate) const MECHANISMS: Mechanisms = Mechanisms {
    shared_memory: "file",
    notifier: "socketpair",
    readiness: "poll",
};

pub(crate) use super::unlinked_file::shared_file;

/// Whether such memory from another rank may be used: there is nothing that keeps a file from becoming shorter.
pub(crate) fn check_shared_file(_file: &Fd) -> io::Result<()> {
    Ok(())
}

/// A notifier's (receiving, sending) end.
pub(crate) fn notifier() -> io::Result<(Arc<Fd>, Arc<Fd>)> {
    let [receiving, sending] = super::net::socket_pair()?;
    Ok((receiving, sending))
}

/// Wakes whoever waits at the receiving end.
pub(crate) fn notify(sending: &Fd) {
    if let Ok(fd) = sending.get() {
        // A full buffer means that it is notified already.
        let _ = rustix::net::send(fd, &[1], crate::tcp::stream::SEND_FLAGS);
    }
}

/// Resets a notifier that was read.
pub(crate) fn silence(receiving: &Fd) {
    let mut sink = [0u8; 256];
    while let Ok(fd) = receiving.get() {
        match rustix::io::read(fd, &mut sink) {
            Ok(n) if n == sink.len() => {}
            _ => break,
        }
    }
}

/// The core this thread is on, if the system tells.
pub(crate) fn current_core() -> Option<usize> {
    None
}

/// How many threads of the whole system run or could run, if the system tells.
pub(crate) fn running() -> Option<usize> {
    None
}

/// On which cores a thread may run.
pub(crate) struct Cores;

impl Cores {
    /// One more than the highest number that is known here.
    pub(crate) const MAX: usize = 1;

    pub(crate) fn of_this_thread() -> Option<Self> {
        None
    }

    pub(crate) fn has(&self, _core: usize) -> bool {
        false
    }

    /// Moves this thread, which has these cores, to one of them.
    pub(crate) fn move_to(&self, _core: usize) {}
}

/// Waits for all sources at once.
pub(crate) struct Events {
    /// Memory of the lists of the last wait: a step that sleeps must not allocate.
    poll_set: Mutex<PollSet<'static>>,
}

/// Arguments of one call of poll: tokens of sources, and a descriptor for each.
#[derive(Default)]
struct PollSet<'fd> {
    tokens: Vec<usize>,
    fds: Vec<PollFd<'fd>>,
}

impl PollSet<'_> {
    /// The memory alone, for descriptors of any lifetime: `collect` keeps it.
    fn emptied(mut self) -> PollSet<'static> {
        self.tokens.clear();
        self.fds.clear();
        let none = |_: PollFd<'_>| -> PollFd<'static> { unreachable!("the list is empty") };
        PollSet {
            tokens: self.tokens,
            fds: self.fds.into_iter().map(none).collect(),
        }
    }
}

impl Events {
    pub(crate) fn new(sources: &[Source]) -> io::Result<Self> {
        Ok(Self {
            poll_set: Mutex::new(PollSet {
                tokens: Vec::with_capacity(sources.len()),
                fds: Vec::with_capacity(sources.len()),
            }),
        })
    }

    /// Waits until something happens, at most `timeout`, and calls `seen` for each source.
    ///
    /// Readiness that is already known (`known`) is not polled for again, so the level-triggered poll behaves like an
    /// edge-triggered one.
    pub(crate) fn wait(
        &self,
        sources: &[Source],
        timeout: Option<Duration>,
        known: &dyn Fn(usize) -> u8,
        mut seen: impl FnMut(usize, u8),
    ) {
        let mut poll_set: PollSet<'_> = std::mem::take(&mut *self.kept());
        for (token, source) in sources.iter().enumerate() {
            let bits = if source.is_notifier {
                WRITABLE
            } else {
                known(token)
            };
            let mut flags = PollFlags::empty();
            if bits & READABLE == 0 {
                flags |= PollFlags::IN;
            }
            if bits & WRITABLE == 0 {
                flags |= PollFlags::OUT;
            }
            // Poll always reports a hang-up, so a source with nothing to ask is left out.
            if bits & HANGUP == 0
                && !flags.is_empty()
                && let Ok(fd) = source.fd.get()
            {
                poll_set.tokens.push(token);
                poll_set.fds.push(PollFd::from_borrowed_fd(fd, flags));
            }
        }
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        // An interrupted wait is a wake-up like any other.
        let polled = poll(&mut poll_set.fds, timeout.as_ref()).is_ok();
        for (&token, fd) in poll_set
            .tokens
            .iter()
            .zip(&poll_set.fds)
            .take_while(|_| polled)
        {
            let flags = fd.revents();
            let mut bits = 0;
            if flags.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
                bits |= HANGUP | READABLE | WRITABLE;
            }
            if flags.contains(PollFlags::IN) {
                bits |= READABLE;
            }
            if flags.contains(PollFlags::OUT) {
                bits |= WRITABLE;
            }
            if bits != 0 {
                if sources[token].is_notifier {
                    silence(&sources[token].fd);
                }
                seen(token, bits);
            }
        }
        *self.kept() = poll_set.emptied();
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, PollSet<'static>> {
        self.poll_set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

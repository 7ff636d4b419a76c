//! The Linux way: memfd, eventfd and edge-triggered epoll.

use std::{io, mem::MaybeUninit, sync::Arc, time::Duration};

use rustix::{
    event::{Timespec, epoll},
    fs::{MemfdFlags, SealFlags},
};

use super::{Ways, fd::Fd};
use crate::poller::{HANGUP, READABLE, Source, WRITABLE};

pub(crate) const WAYS: Ways = Ways {
    shared_memory: "memfd",
    doorbell: "eventfd",
    readiness: "epoll",
};

/// Anonymous memory of `len` zero bytes that can be passed to other processes.
pub(crate) fn shared_file(len: usize) -> io::Result<Fd> {
    let fd = Fd::open(|| {
        rustix::fs::memfd_create("horovod", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
    })?;
    rustix::fs::ftruncate(fd.get()?, len as u64)?;
    // Nobody can shrink it under the others' feet (which would end them with SIGBUS).
    rustix::fs::fcntl_add_seals(
        fd.get()?,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(fd)
}

/// A doorbell's (receiving, sending) end; here both are one eventfd.
pub(crate) fn bell() -> io::Result<(Arc<Fd>, Arc<Fd>)> {
    use rustix::event::{EventfdFlags, eventfd};
    let fd = Arc::new(Fd::open(|| {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
    })?);
    Ok((fd.clone(), fd))
}

/// Wakes whoever waits at the receiving end.
pub(crate) fn ring(sending: &Fd) {
    if let Ok(fd) = sending.get() {
        // A full counter means that it rings already; nothing else can go wrong on an eventfd.
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }
}

/// Silences a bell that was heard by other means than [`Events`].
pub(crate) fn silence(receiving: &Fd) {
    if let Ok(fd) = receiving.get() {
        // Nothing to read means that it did not ring.
        let _ = rustix::io::read(fd, &mut [0; 8]);
    }
}

/// Waits for all sources at once.
pub(crate) struct Events {
    epoll: Fd,
}

impl Events {
    pub(crate) fn new(sources: &[Source]) -> io::Result<Self> {
        let epoll = Fd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC))?;
        for (token, source) in (0u64..).zip(sources) {
            // Edge-triggered: registered once for everything, no call ever changes it again, and
            // the doorbell's counter need not be read to be heard again.
            let mut flags = epoll::EventFlags::ET | epoll::EventFlags::IN;
            if !source.is_bell {
                flags |= epoll::EventFlags::OUT | epoll::EventFlags::RDHUP;
            }
            epoll::add(
                epoll.get()?,
                source.fd.get()?,
                epoll::EventData::new_u64(token),
                flags,
            )?;
        }
        Ok(Self { epoll })
    }

    /// Waits until something happens, at most `timeout`, and calls `seen` for each source.
    pub(crate) fn wait(
        &self,
        _sources: &[Source],
        timeout: Option<Duration>,
        _known: &dyn Fn(usize) -> u8,
        mut seen: impl FnMut(usize, u8),
    ) {
        let Ok(epoll) = self.epoll.get() else { return };
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 64];
        // An interrupted wait is a wake-up like any other.
        let Ok((events, _)) = epoll::wait(epoll, &mut events, timeout.as_ref()) else {
            return;
        };
        for event in events {
            let flags = event.flags;
            let mut bits = 0;
            let gone = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            if flags.intersects(gone) {
                bits |= HANGUP | READABLE | WRITABLE;
            }
            if flags.contains(epoll::EventFlags::IN) {
                bits |= READABLE;
            }
            if flags.contains(epoll::EventFlags::OUT) {
                bits |= WRITABLE;
            }
            seen(
                usize::try_from(event.data.u64()).unwrap_or(usize::MAX),
                bits,
            );
        }
    }
}

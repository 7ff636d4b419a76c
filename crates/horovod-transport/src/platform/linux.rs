//! The mechanisms of Linux: memfd, eventfd and edge-triggered epoll.

use std::{
    fs::File,
    io::{self, Read},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use rustix::{
    event::{Timespec, epoll},
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

use super::{HANGUP, READABLE, Source, WRITABLE};
use super::{Mechanisms, fd::Fd};

pub(crate) const MECHANISMS: Mechanisms = Mechanisms {
    shared_memory: "memfd",
    notifier: "eventfd",
    readiness: "epoll",
};

/// Anonymous memory of `len` zero bytes that can be passed to other processes.
pub(crate) fn shared_file(len: usize) -> io::Result<Fd> {
    shared_file_by(memfd, len)
}

/// How a memfd is made; tests have others.
type MakeMemfd = fn() -> Result<OwnedFd, Errno>;

fn memfd() -> Result<OwnedFd, Errno> {
    rustix::fs::memfd_create("horovod", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
}

/// Whether the system has no memfd, or a filter of system calls allows none.
fn is_refused(error: Errno) -> bool {
    matches!(
        error,
        Errno::NOSYS | Errno::PERM | Errno::ACCESS | Errno::INVAL | Errno::NOTSUP
    )
}

fn shared_file_by(memfd: MakeMemfd, len: usize) -> io::Result<Fd> {
    let mut refused = None;
    let made = Fd::open(|| memfd().inspect_err(|error| refused = Some(*error)));
    if let Some(error) = refused.filter(|error| is_refused(*error)) {
        tracing::warn!(
            "memfd_create is refused ({error}): memory is shared through an unlinked file instead"
        );
        return super::unlinked_file::shared_file(len);
    }
    let fd = made?;
    rustix::fs::ftruncate(fd.get()?, len as u64)?;
    // Nobody can shrink it under the others' feet (which would end them with SIGBUS).
    rustix::fs::fcntl_add_seals(
        fd.get()?,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(fd)
}

/// Whether such memory from another rank may be used: nobody must be able to make it shorter, unless it comes from
/// where no memfd can be made, which is so for this process, too.
pub(crate) fn check_shared_file(file: &Fd) -> io::Result<()> {
    check_shared_file_by(memfd, file)
}

fn check_shared_file_by(memfd: MakeMemfd, file: &Fd) -> io::Result<()> {
    let seals = rustix::fs::fcntl_get_seals(file.get()?);
    if seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        return Ok(());
    }
    match memfd() {
        Err(error) if is_refused(error) => Ok(()),
        _ => Err(io::Error::other(
            "the host's first rank offers memory that can become shorter: expected a memfd with F_SEAL_SHRINK",
        )),
    }
}

/// A notifier's (receiving, sending) end; here both are one eventfd.
pub(crate) fn notifier() -> io::Result<(Arc<Fd>, Arc<Fd>)> {
    use rustix::event::{EventfdFlags, eventfd};
    let fd = Arc::new(Fd::open(|| {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
    })?);
    Ok((fd.clone(), fd))
}

/// Wakes whoever waits at the receiving end.
pub(crate) fn notify(sending: &Fd) {
    if let Ok(fd) = sending.get() {
        // A full counter means that it is notified already; nothing else can go wrong on an eventfd.
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }
}

/// Resets a notifier that was read by other means than [`Events`].
pub(crate) fn silence(receiving: &Fd) {
    if let Ok(fd) = receiving.get() {
        // Nothing to read means that it was not notified.
        let _ = rustix::io::read(fd, &mut [0; 8]);
    }
}

/// The core this thread is on, if the system tells.
pub(crate) fn current_core() -> Option<usize> {
    // Miri does not.
    (!cfg!(miri)).then(rustix::thread::sched_getcpu)
}

/// How many threads of the whole system run or could run, if the system tells.
pub(crate) fn running() -> Option<usize> {
    // Some 30 bytes; on the stack, as ranks ask amid their work.
    let mut text = [0; 128];
    let read = File::open("/proc/loadavg").ok()?.read(&mut text).ok()?;
    let text = std::str::from_utf8(&text[..read]).ok()?;
    text.split(' ').nth(3)?.split('/').next()?.parse().ok()
}

/// On which cores a thread may run.
pub(crate) struct Cores(CpuSet);

impl Cores {
    /// One more than the highest number that is known here.
    pub(crate) const MAX: usize = CpuSet::MAX_CPU;

    pub(crate) fn of_this_thread() -> Option<Self> {
        sched_getaffinity(None).ok().map(Self)
    }

    pub(crate) fn has(&self, core: usize) -> bool {
        self.0.is_set(core)
    }

    /// Moves this thread, which has these cores, to one of them; it may leave it again at once.
    pub(crate) fn move_to(&self, core: usize) {
        let mut there = CpuSet::new();
        there.set(core);
        if sched_setaffinity(None, &there).is_err() {
            return;
        }
        // A thread that was never bound follows when its container gets other cores: that is what all of them mean.
        let mut all = CpuSet::new();
        (0..Self::MAX).for_each(|core| all.set(core));
        let free = sched_setaffinity(None, &all).and_then(|()| sched_getaffinity(None));
        if free != Ok(self.0) {
            let _ = sched_setaffinity(None, &self.0);
        }
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
            // the notifier's counter need not be read to be heard again.
            let mut flags = epoll::EventFlags::ET | epoll::EventFlags::IN;
            if !source.is_notifier {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_moves_may_afterwards_run_where_it_could_before() {
        // A thread of its own: it is bound in what follows.
        let moving = std::thread::spawn(|| {
            let all = sched_getaffinity(None).unwrap();
            let cores: Vec<usize> = (0..Cores::MAX).filter(|core| all.is_set(*core)).collect();
            for core in &cores {
                Cores::of_this_thread().unwrap().move_to(*core);
                assert_eq!(sched_getaffinity(None), Ok(all));
            }
            let mut some = CpuSet::new();
            cores.iter().skip(1).for_each(|core| some.set(*core));
            if some.count() == 0 {
                return;
            }
            sched_setaffinity(None, &some).unwrap();
            Cores::of_this_thread().unwrap().move_to(cores[1]);
            assert_eq!(sched_getaffinity(None), Ok(some));
        });
        moving.join().unwrap();
    }

    #[test]
    fn who_moves_touches_no_other_thread() {
        use std::sync::mpsc;

        // Seen from inside while it moves, not only before and after.
        let all = sched_getaffinity(None).unwrap();
        let (begins, began) = mpsc::channel();
        let (stop, stopped) = mpsc::channel::<()>();
        let moving = std::thread::spawn(move || {
            begins.send(()).unwrap();
            let cores: Vec<usize> = (0..Cores::MAX).filter(|core| all.is_set(*core)).collect();
            for core in cores.iter().cycle() {
                Cores(all).move_to(*core);
                if stopped.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
                    break;
                }
            }
            assert_eq!(sched_getaffinity(None), Ok(all));
        });
        began.recv().unwrap();
        // The process's first thread, and this one. Others of the process may be other tests.
        for _ in 0..20_000 {
            for thread in [rustix::process::getpid(), rustix::thread::gettid()] {
                assert_eq!(sched_getaffinity(Some(thread)), Ok(all), "{thread:?}");
            }
        }
        drop(stop);
        moving.join().unwrap();
    }

    #[test]
    fn where_memfd_is_refused_a_file_is_shared() {
        let len = 3 << 20;
        for error in [Errno::NOSYS, Errno::PERM, Errno::INVAL] {
            let refused: MakeMemfd = match error {
                Errno::NOSYS => || Err(Errno::NOSYS),
                Errno::PERM => || Err(Errno::PERM),
                _ => || Err(Errno::INVAL),
            };
            let file = shared_file_by(refused, len).unwrap();
            let stat = rustix::fs::fstat(file.get().unwrap()).unwrap();
            assert_eq!((stat.st_size, stat.st_nlink), (len as i64, 0), "{error}");
            // The other ranks of the host cannot make one either, and take it.
            assert!(check_shared_file_by(refused, &file).is_ok(), "{error}");
        }
        // Failures with another cause are reported.
        assert!(shared_file_by(|| Err(Errno::MFILE), len).is_err());
    }

    #[test]
    fn memory_that_can_become_shorter_is_refused() {
        let sealed = shared_file(1 << 16).unwrap();
        assert!(check_shared_file(&sealed).is_ok());
        let open = Fd::open(memfd).unwrap();
        rustix::fs::ftruncate(open.get().unwrap(), 1 << 16).unwrap();
        let text = check_shared_file(&open).unwrap_err().to_string();
        assert!(text.contains("F_SEAL_SHRINK"), "{text}");
        let file = super::super::unlinked_file::shared_file(1 << 16).unwrap();
        assert!(check_shared_file(&file).is_err());
    }

    #[test]
    fn who_asks_what_runs_is_counted() {
        assert!(running().is_some_and(|running| running > 0));
    }
}

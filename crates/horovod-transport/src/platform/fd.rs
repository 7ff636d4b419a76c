//! Every descriptor of this crate: close-on-exec, counted in a registry, closed in forked children.
//!
//! A forked child (a data-loader worker, say) must share no socket, arena or notifier: it would keep
//! a connection open after its parent died, or answer in its place. So a `pthread_atfork` handler
//! closes all registered descriptors in the child, and objects that belong to the parent do nothing
//! there, not even when dropped.

use std::{
    os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    sync::{
        Once,
        atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering},
    },
};

use rustix::io::Errno;

const FREE: i32 = -1;
const BLOCK: usize = 128;

/// Slots for descriptors; blocks are chained and never freed, so the handler needs no allocator.
struct Block {
    slots: [AtomicI32; BLOCK],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Self {
            slots: [const { AtomicI32::new(FREE) }; BLOCK],
            next: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    fn next(&self) -> Option<&'static Block> {
        // SAFETY: `next` is null or a leaked block, which lives for ever.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }
}

static FIRST: Block = Block::new();
static EPOCH: AtomicU32 = AtomicU32::new(0);
static LOCK: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();

/// How many forks lie between this process and the first one of its line that called this.
/// An object made at another value than the current one belongs to the parent. Costs a load or two, where
/// asking for the process id would be a system call.
pub fn fork_epoch() -> u32 {
    install_handlers();
    EPOCH.load(Ordering::Relaxed)
}

fn lock() {
    while LOCK.swap(true, Ordering::Acquire) {
        rustix::thread::sched_yield();
    }
}

fn unlock() {
    LOCK.store(false, Ordering::Release);
}

/// Held while descriptors come and go, so that no fork falls between their making and registering.
struct Guard;

impl Guard {
    fn take() -> Self {
        lock();
        Self
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        unlock();
    }
}

extern "C" fn before_fork() {
    lock();
}

extern "C" fn after_fork_in_parent() {
    unlock();
}

extern "C" fn after_fork_in_child() {
    // Only atomics and close(2): another thread may have held any lock when the fork happened.
    let mut block = Some(&FIRST);
    while let Some(b) = block {
        for slot in &b.slots {
            let raw = slot.swap(FREE, Ordering::Relaxed);
            if raw >= 0 {
                // SAFETY: the descriptor was registered, hence open and ours; every `Fd` that
                // refers to it is made inert by the new epoch.
                unsafe { rustix::io::close(raw) };
            }
        }
        block = b.next();
    }
    EPOCH.fetch_add(1, Ordering::Relaxed);
    unlock();
}

fn install_handlers() {
    if cfg!(miri) {
        return; // no forks there
    }
    INSTALL.call_once(|| {
        // SAFETY: the three handlers are async-signal-safe and live for ever.
        let status = unsafe {
            libc::pthread_atfork(
                Some(before_fork),
                Some(after_fork_in_parent),
                Some(after_fork_in_child),
            )
        };
        if status != 0 {
            tracing::warn!(
                status,
                "no fork handler: forked children will share our descriptors"
            );
        }
    });
}

/// Registers one descriptor; the caller holds the lock.
fn register(raw: RawFd) -> &'static AtomicI32 {
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            if slot.load(Ordering::Relaxed) == FREE {
                slot.store(raw, Ordering::Relaxed);
                return slot;
            }
        }
        block = match block.next() {
            Some(next) => next,
            None => {
                let new: &'static Block = Box::leak(Box::new(Block::new()));
                block
                    .next
                    .store(std::ptr::from_ref(new).cast_mut(), Ordering::Release);
                new
            }
        };
    }
}

/// An open descriptor that no child process gets to keep.
#[derive(Debug)]
pub(crate) struct Fd {
    raw: RawFd,
    slot: &'static AtomicI32,
    epoch: u32,
}

impl Fd {
    /// Runs a system call that opens one descriptor (close-on-exec) and registers it.
    pub(crate) fn open<E>(call: impl FnOnce() -> Result<OwnedFd, E>) -> Result<Self, E> {
        install_handlers();
        let _guard = Guard::take();
        Ok(Self::adopt(call()?))
    }

    /// As [`Self::open`] for a call that opens several.
    pub(crate) fn open_all<E, T>(
        call: impl FnOnce() -> Result<(T, Vec<OwnedFd>), E>,
    ) -> Result<(T, Vec<Self>), E> {
        install_handlers();
        let _guard = Guard::take();
        let (value, fds) = call()?;
        Ok((value, fds.into_iter().map(Self::adopt).collect()))
    }

    fn adopt(fd: OwnedFd) -> Self {
        let raw = fd.into_raw_fd();
        Self {
            raw,
            slot: register(raw),
            epoch: fork_epoch(),
        }
    }

    /// The descriptor, unless this is a forked child, where it is closed.
    pub(crate) fn get(&self) -> Result<BorrowedFd<'_>, Errno> {
        if self.epoch != fork_epoch() {
            return Err(Errno::BADF);
        }
        // SAFETY: registered and closed only by `drop` or, in a child, together with a new epoch.
        Ok(unsafe { BorrowedFd::borrow_raw(self.raw) })
    }

    /// The number, for messages and tests.
    #[cfg(test)]
    pub(crate) fn raw(&self) -> RawFd {
        self.raw
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let _guard = Guard::take();
        if self.epoch == fork_epoch() {
            self.slot.store(FREE, Ordering::Relaxed);
            // SAFETY: we are the only owner; the number is the one we were given.
            drop(unsafe { OwnedFd::from_raw_fd(self.raw) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::platform::region::Region;

    /// Runs `check` in a real forked child; its number is the child's exit status, 0 for success.
    fn in_child(check: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child only makes system calls and touches atomics before it ends by `_exit`.
        match unsafe { libc::fork() } {
            0 => {
                let status = check();
                // SAFETY: ends the child without running anything of the parent's.
                unsafe { libc::_exit(status) }
            }
            child => {
                assert!(child > 0, "fork failed");
                let mut status = 0;
                // SAFETY: waits for our own child; `status` is a valid place.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert!(libc::WIFEXITED(status), "the child crashed: {status}");
                libc::WEXITSTATUS(status)
            }
        }
    }

    fn null() -> Fd {
        Fd::open(|| {
            let flags = rustix::fs::OFlags::CLOEXEC | rustix::fs::OFlags::RDWR;
            rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty())
        })
        .unwrap()
    }

    fn is_open(raw: RawFd) -> bool {
        // SAFETY: asking for the flags of any number is harmless.
        unsafe { libc::fcntl(raw, libc::F_GETFD) != -1 }
    }

    #[test]
    fn a_forked_child_has_none_of_the_descriptors() {
        // More than one block of them.
        let fds: Vec<Fd> = (0..2 * BLOCK).map(|_| null()).collect();
        let status = in_child(|| {
            let inert = fds.iter().all(|fd| !is_open(fd.raw()) && fd.get().is_err());
            i32::from(!inert)
        });
        assert_eq!(status, 0, "a descriptor was inherited");
        assert!(
            fds.iter().all(|fd| is_open(fd.raw())),
            "the parent lost one"
        );
    }

    #[test]
    fn dropping_the_parents_objects_in_a_child_closes_nothing_of_the_childs() {
        let fd = null();
        let raw = fd.raw();
        let status = in_child(move || {
            // The child opens something that gets the same number.
            // SAFETY: plain duplication of standard error.
            if unsafe { libc::dup2(2, raw) } != raw {
                return 2;
            }
            drop(fd);
            i32::from(!is_open(raw))
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn a_child_can_open_its_own() {
        let theirs = null();
        let status = in_child(|| {
            let Ok(fd) = Fd::open(|| rustix::io::dup(rustix::stdio::stderr())) else {
                return 2;
            };
            let works = fd.get().is_ok_and(|fd| fd.as_raw_fd() >= 0) && theirs.get().is_err();
            drop(theirs);
            i32::from(!works || fd.get().is_err() || !is_open(fd.raw()))
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn a_forked_child_does_not_have_the_shared_memory() {
        let fd = crate::platform::shared_file(1 << 16).unwrap();
        let region = Region::map(&fd, 1 << 16).unwrap();
        let base = region.at(0, 1);
        let status = in_child(|| {
            let mut resident = [0u8; 16];
            // SAFETY: asks about 16 pages at most and writes one byte for each.
            let gone = unsafe { libc::mincore(base.cast(), 1 << 16, resident.as_mut_ptr().cast()) };
            i32::from(gone == 0 || !region.is_foreign())
        });
        assert_eq!(status, 0);
        region.u32(0).store(1, crate::sync::Ordering::Relaxed);
    }

    #[test]
    fn a_closed_descriptor_leaves_the_registry() {
        let fd = null();
        let slot = fd.slot;
        let raw = fd.raw();
        assert_eq!(slot.load(Ordering::Relaxed), raw);
        drop(fd);
        assert_ne!(slot.load(Ordering::Relaxed), raw);
    }
}

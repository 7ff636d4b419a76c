//! Every descriptor of this crate: close-on-exec, counted in a registry, closed in forked children.
//!
//! A forked child (a data-loader worker, say) must share no socket, arena or doorbell: it would keep
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

/// How many forks lie between this process and the first one of its line that used this crate.
/// An object made at another value than the current one belongs to the parent.
pub fn fork_epoch() -> u32 {
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

//! All that differs between operating systems, and the descriptors and mappings made from it.
//!
//! `linux` has the fast way (memfd, eventfd, epoll); `portable` does the same with what POSIX has.
//! `--cfg horovod_portable` picks the portable way on Linux too, so that it is tested there.

pub(crate) mod fd;
pub(crate) mod identity;
pub(crate) mod net;
pub(crate) mod region;

#[cfg(all(target_os = "linux", not(horovod_portable)))]
mod linux;
#[cfg(all(target_os = "linux", not(horovod_portable)))]
use linux as system;

#[cfg(not(all(target_os = "linux", not(horovod_portable))))]
mod portable;
#[cfg(not(all(target_os = "linux", not(horovod_portable))))]
use portable as system;

pub(crate) use system::{Events, bell, ring, shared_file, silence};

/// Names of the ways in use, for reports: (shared memory, doorbell, readiness).
pub(crate) const WAYS: (&str, &str, &str) = system::WAYS;

/// Leaves a mapping out of forked children.
fn keep_from_children(base: *mut u8, len: usize) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    // SAFETY: the range is one whole mapping of ours; the advice only affects forks.
    unsafe {
        rustix::mm::madvise(base.cast(), len, rustix::mm::Advice::LinuxDontFork)?;
    }
    #[cfg(target_os = "macos")]
    {
        unsafe extern "C" {
            fn minherit(
                addr: *mut libc::c_void,
                len: libc::size_t,
                inherit: libc::c_int,
            ) -> libc::c_int;
        }
        const VM_INHERIT_NONE: libc::c_int = 2;
        // SAFETY: as above.
        if unsafe { minherit(base.cast(), len, VM_INHERIT_NONE) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    let _ = (base, len);
    Ok(())
}

//! All that differs between operating systems, and the descriptors and mappings made from it.
//!
//! `linux` has the fast way (memfd, eventfd, epoll); `portable` does the same with what POSIX has.
//! `--cfg horovod_portable` picks the portable way on Linux too, so that it is tested there.

#[cfg(target_os = "linux")]
pub(crate) mod data_socket;
pub(crate) mod fd;
pub(crate) mod identity;
pub(crate) mod net;
pub mod output_file;
pub(crate) mod region;
mod unlinked_file;

#[cfg(all(target_os = "linux", not(horovod_portable)))]
mod linux;
#[cfg(all(target_os = "linux", not(horovod_portable)))]
use linux as system;

#[cfg(not(all(target_os = "linux", not(horovod_portable))))]
mod portable;
#[cfg(not(all(target_os = "linux", not(horovod_portable))))]
use portable as system;

/// Elsewhere the system's own choices stay.
#[cfg(not(target_os = "linux"))]
pub(crate) mod data_socket {
    use super::fd::Fd;
    use crate::congestion::Congestion;

    pub(crate) fn path_mtu_hint(_: &Fd) -> Option<String> {
        None
    }

    pub(crate) fn prepare(
        _: &[&Fd],
        _several: bool,
        congestion: &Congestion,
    ) -> std::io::Result<()> {
        match congestion {
            Congestion::Auto | Congestion::System => Ok(()),
            Congestion::Named(name) => Err(std::io::Error::other(format!(
                "HOROVOD_TCP_CONGESTION={name}: only on Linux can it be chosen; expected auto or system"
            ))),
        }
    }
}

use std::sync::Arc;

use fd::Fd;
pub(crate) use system::{
    Cores, Events, check_shared_file, current_core, notifier, notify, running, shared_file, silence,
};

/// Reading may bring something (data, the end, or an error).
pub(crate) const READABLE: u8 = 1;
/// Writing may bring something forward.
pub(crate) const WRITABLE: u8 = 2;
/// The peer closed its side, or the connection failed.
pub(crate) const HANGUP: u8 = 4;

/// One thing to wait for.
pub(crate) struct Source {
    pub(crate) fd: Arc<Fd>,
    pub(crate) is_notifier: bool,
}

/// The operating system's mechanisms that this build uses, for reports.
pub const MECHANISMS: Mechanisms = system::MECHANISMS;

/// Names of the operating system's mechanisms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mechanisms {
    /// Where shared memory comes from.
    pub shared_memory: &'static str,
    /// Mechanism that wakes a sleeping rank.
    pub notifier: &'static str,
    /// Mechanism that waits for many sockets.
    pub readiness: &'static str,
}

/// Bytes from the operating system's randomness.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| std::io::Error::other(format!("no randomness: {e}")))?;
    Ok(bytes)
}

/// A name that nobody can guess.
fn secret_name() -> std::io::Result<String> {
    let random = random::<16>()?;
    Ok(random
        .iter()
        .fold(String::from("horovod-"), |s, b| s + &format!("{b:02x}")))
}

/// Leaves a mapping out of forked children.
fn keep_from_children(base: *mut u8, len: usize) -> std::io::Result<()> {
    if cfg!(miri) {
        return Ok(()); // neither forks nor the call exist there
    }
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

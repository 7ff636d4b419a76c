//! The identity of a host: what makes two processes be on the same one.

/// Equal for two processes exactly if they can share memory and local sockets: the same boot of the
/// same kernel, the same host name, and the same namespaces where there are such.
pub fn host_identity(hostname: &str) -> String {
    let uname = rustix::system::uname();
    let mut parts = vec![
        boot(),
        uname.nodename().to_string_lossy().into_owned(),
        hostname.into(),
    ];
    if cfg!(target_os = "linux") {
        for namespace in ["net", "ipc", "mnt"] {
            let link = std::fs::read_link(format!("/proc/self/ns/{namespace}"));
            parts.push(
                link.map(|l| l.to_string_lossy().into_owned())
                    .unwrap_or_default(),
            );
        }
    }
    parts.join("|")
}

#[cfg(target_os = "linux")]
fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(target_os = "macos")]
fn boot() -> String {
    let mut id = [0u8; 64];
    let mut len = id.len();
    // SAFETY: the name is nul-terminated, and `len` bytes of `id` may be written.
    let status = unsafe {
        libc::sysctlbyname(
            c"kern.bootsessionuuid".as_ptr(),
            id.as_mut_ptr().cast(),
            &raw mut len,
            std::ptr::null_mut(),
            0,
        )
    };
    if status != 0 {
        return String::new();
    }
    String::from_utf8_lossy(&id[..len])
        .trim_end_matches('\0')
        .to_owned()
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn boot() -> String {
    String::new()
}

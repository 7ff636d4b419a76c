//! Sockets: non-blocking, close-on-exec, registered; and the machine's addresses.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType},
};

use super::fd::Fd;

const BACKLOG: i32 = 1024;

/// A new socket, never inherited and never blocking.
pub(super) fn socket(family: AddressFamily) -> io::Result<Fd> {
    #[cfg(not(target_vendor = "apple"))]
    let fd = Fd::open(|| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(family, SocketType::STREAM, flags, None)
    })?;
    #[cfg(target_vendor = "apple")]
    let fd = Fd::open(|| rustix::net::socket(family, SocketType::STREAM, None))?;
    prepare(&fd)?;
    Ok(fd)
}

/// Sets flags that some systems cannot set in the call that opens a socket.
fn prepare(fd: &Fd) -> io::Result<()> {
    #[cfg(target_vendor = "apple")]
    {
        rustix::io::fcntl_setfd(fd.get()?, rustix::io::FdFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(fd.get()?, true)?;
        rustix::net::sockopt::set_socket_nosigpipe(fd.get()?, true)?;
    }
    #[cfg(not(target_vendor = "apple"))]
    let _ = fd;
    Ok(())
}

/// Two connected local sockets.
pub(crate) fn socket_pair() -> io::Result<[Arc<Fd>; 2]> {
    let ((), ends) = Fd::open_all(|| -> rustix::io::Result<_> {
        #[cfg(not(target_vendor = "apple"))]
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        #[cfg(target_vendor = "apple")]
        let flags = SocketFlags::empty();
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        Ok(((), vec![a, b]))
    })?;
    for end in &ends {
        prepare(end)?;
    }
    <[Fd; 2]>::try_from(ends)
        .map(|ends| ends.map(Arc::new))
        .map_err(|_| io::Error::other("a socket pair without two ends"))
}

/// How long a connection may stand still while it is not known what the job's setting is.
const SILENCE_MAX_AT_FIRST: Duration = Duration::from_secs(25);

/// About what Linux waits of its own accord before it gives up a connection on which nothing is sent.
#[cfg(target_os = "linux")]
const SILENCE_MAX_OF_SYSTEM: Duration = Duration::from_secs(5 * 3600);

/// Small frames leave at once; dead peers are noticed even when nothing is sent.
pub(crate) fn tune_tcp(fd: &Fd) -> io::Result<()> {
    rustix::net::sockopt::set_tcp_nodelay(fd.get()?, true)?;
    rustix::net::sockopt::set_socket_keepalive(fd.get()?, true)?;
    set_silence_max(fd, Some(SILENCE_MAX_AT_FIRST))
}

/// After how long without an answer of the other machine the system gives a connection up, whether something was
/// sent or not; `None`: when it does so of its own accord. No other sockets than TCP's are changed.
#[cfg(target_os = "linux")]
pub(crate) fn set_silence_max(fd: &Fd, time: Option<Duration>) -> io::Result<()> {
    use rustix::net::sockopt;
    let fd = fd.get()?;
    if sockopt::socket_domain(fd)? == AddressFamily::UNIX {
        return Ok(());
    }
    // After a pause of two fifths the system asks three times; only whole seconds, and no more than this, can be set.
    let asked = time.unwrap_or(SILENCE_MAX_OF_SYSTEM);
    let seconds = |time: Duration| Duration::from_secs(time.as_secs().clamp(1, 32_767));
    sockopt::set_tcp_keepidle(fd, seconds(asked * 2 / 5))?;
    sockopt::set_tcp_keepintvl(fd, seconds(asked / 5))?;
    sockopt::set_tcp_keepcnt(fd, 3)?;
    // For what was sent and not answered; it also limits how long the questions go on. 0: the system's own limit.
    let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    Ok(sockopt::set_tcp_user_timeout(fd, time.map_or(0, millis))?)
}

/// Elsewhere the system's own time-outs hold.
#[cfg(not(target_os = "linux"))]
pub(crate) fn set_silence_max(_fd: &Fd, _time: Option<Duration>) -> io::Result<()> {
    Ok(())
}

/// Whether an error says that this process or machine has no more descriptors or memory for sockets.
pub(crate) fn is_exhausted(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        number,
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
    )
}

/// Starts to connect; the socket becomes writable when that has ended one way or the other.
pub(crate) fn tcp_connect(to: SocketAddr) -> io::Result<Arc<Fd>> {
    let family = if to.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let fd = socket(family)?;
    tune_tcp(&fd)?;
    match rustix::net::connect(fd.get()?, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(Arc::new(fd)),
        Err(e) => Err(e.into()),
    }
}

/// How a started connection ended; `None` while it has not.
pub(crate) fn connected(fd: &Fd) -> io::Result<Option<()>> {
    rustix::net::sockopt::socket_error(fd.get()?)??;
    match rustix::net::getpeername(fd.get()?) {
        Ok(Some(_)) => Ok(Some(())),
        Ok(None) | Err(Errno::NOTCONN) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Takes an address (port 0: any) at which nobody listens yet.
pub(crate) fn tcp_bind(at: SocketAddr) -> io::Result<(Fd, SocketAddr)> {
    let family = if at.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let fd = socket(family)?;
    if at.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(fd.get()?, true)?;
    }
    rustix::net::sockopt::set_socket_reuseaddr(fd.get()?, true)?;
    rustix::net::bind(fd.get()?, &at)?;
    let bound = rustix::net::getsockname(fd.get()?)?;
    let bound = SocketAddr::try_from(bound).map_err(io::Error::from)?;
    Ok((fd, bound))
}

/// Listens on one address (port 0: any).
pub(crate) fn tcp_listen(at: SocketAddr) -> io::Result<(Fd, SocketAddr)> {
    let (fd, bound) = tcp_bind(at)?;
    rustix::net::listen(fd.get()?, BACKLOG)?;
    Ok((fd, bound))
}

/// The local address of a connected TCP socket.
pub(crate) fn local_ip(fd: &Fd) -> Option<IpAddr> {
    let name = rustix::net::getsockname(fd.get().ok()?).ok()?;
    Some(SocketAddr::try_from(name).ok()?.ip().to_canonical())
}

/// The next waiting connection and where it comes from.
pub(crate) fn accept(listener: &Fd) -> io::Result<Option<(Arc<Fd>, String)>> {
    let mut peer = None;
    let accepted = Fd::open(|| {
        let listener = listener.get()?;
        #[cfg(not(target_vendor = "apple"))]
        let (fd, from) = {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            rustix::net::acceptfrom_with(listener, flags)?
        };
        #[cfg(target_vendor = "apple")]
        let (fd, from) = rustix::net::acceptfrom(listener)?;
        peer = from;
        Ok(fd)
    });
    match accepted {
        Ok(fd) => {
            prepare(&fd)?;
            let from = peer.and_then(|p| SocketAddr::try_from(p).ok());
            let from = from.map_or_else(|| "a local process".into(), |a| a.to_string());
            Ok(Some((Arc::new(fd), from)))
        }
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Whether a connection comes from this process's user (or root); true for all from the network, of
/// which nothing is known. `/proc/net/unix` shows the names of local sockets to everybody.
#[cfg(target_os = "linux")]
pub(crate) fn is_same_user(connection: &Fd) -> bool {
    use rustix::net::sockopt;
    let Ok(fd) = connection.get() else {
        return false;
    };
    if sockopt::socket_domain(fd) != Ok(AddressFamily::UNIX) {
        return true;
    }
    let own = rustix::process::geteuid();
    sockopt::socket_peercred(fd).is_ok_and(|peer| peer.uid == own || peer.uid.is_root())
}

/// As on Linux, where the socket's file keeps others away.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_same_user(_connection: &Fd) -> bool {
    true
}

/// A Unix listener; dropping it removes the name.
#[derive(Debug)]
pub(crate) struct UnixListener {
    pub(crate) fd: Arc<Fd>,
    pub(crate) name: String,
}

#[cfg(all(target_os = "linux", not(horovod_portable)))]
fn unix_address(name: &str) -> io::Result<rustix::net::SocketAddrUnix> {
    Ok(rustix::net::SocketAddrUnix::new_abstract_name(
        name.as_bytes(),
    )?)
}

#[cfg(not(all(target_os = "linux", not(horovod_portable))))]
fn unix_address(name: &str) -> io::Result<rustix::net::SocketAddrUnix> {
    Ok(rustix::net::SocketAddrUnix::new(name)?)
}

pub(crate) fn unix_listen() -> io::Result<UnixListener> {
    let name = super::secret_name()?;
    #[cfg(not(all(target_os = "linux", not(horovod_portable))))]
    let name = std::env::temp_dir()
        .join(name)
        .to_string_lossy()
        .into_owned();
    unix_listen_as(name)
}

/// Listens on a local socket of this name.
pub(crate) fn unix_listen_as(name: String) -> io::Result<UnixListener> {
    let fd = socket(AddressFamily::UNIX)?;
    rustix::net::bind(fd.get()?, &unix_address(&name)?)?;
    // Before it listens, so that nobody else ever gets through.
    #[cfg(not(all(target_os = "linux", not(horovod_portable))))]
    rustix::fs::chmod(&name, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    let listener = UnixListener {
        fd: Arc::new(fd),
        name,
    };
    rustix::net::listen(listener.fd.get()?, BACKLOG)?;
    Ok(listener)
}

impl Drop for UnixListener {
    fn drop(&mut self) {
        // In a forked child the name still is the parent's.
        #[cfg(not(all(target_os = "linux", not(horovod_portable))))]
        if self.fd.get().is_ok() {
            let _ = rustix::fs::unlink(&self.name);
        }
    }
}

pub(crate) fn unix_connect(name: &str) -> io::Result<Arc<Fd>> {
    let fd = socket(AddressFamily::UNIX)?;
    match rustix::net::connect(fd.get()?, &unix_address(name)?) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(Arc::new(fd)),
        Err(e) => Err(e.into()),
    }
}

/// One address of one network interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) address: IpAddr,
}

/// All addresses of this machine but IPv6 link-local ones, which mean nothing elsewhere.
pub(crate) fn interfaces() -> io::Result<Vec<Interface>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the result.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: null or an entry of the list, which lives until `freeifaddrs`.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let up = entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0;
        // SAFETY: `ifa_addr` is null or a socket address of the length its family says.
        let address = unsafe { address_of(entry.ifa_addr) };
        if let (true, Some(address)) = (up, address) {
            // SAFETY: `ifa_name` is a nul-terminated string for as long as the list lives.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            found.push(Interface {
                name: name.to_string_lossy().into_owned(),
                address,
            });
        }
    }
    // SAFETY: `list` came from `getifaddrs` and is not used after this.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

/// # Safety
/// `address` is null or points to a complete socket address of the family that it names.
unsafe fn address_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by the caller's promise.
    let family = unsafe { address.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: by the caller's promise this is a whole `sockaddr_in`.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: by the caller's promise this is a whole `sockaddr_in6`.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            let v6 = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            (!v6.is_unicast_link_local()).then_some(v6.into())
        }
        _ => None,
    }
}

/// The address by which processes of this host reach each other: `127.0.0.1`, or `::1` if the loopback has no
/// `127.0.0.1`. The error is the one of `127.0.0.1`.
pub fn loopback() -> io::Result<IpAddr> {
    let reach = |address: IpAddr| {
        // A way is looked for, nothing is sent.
        let socket = UdpSocket::bind((address, 0))?;
        socket.connect(socket.local_addr()?)?;
        Ok(address)
    };
    reach(Ipv4Addr::LOCALHOST.into())
        .or_else(|error: io::Error| reach(Ipv6Addr::LOCALHOST.into()).map_err(|_| error))
}

/// The addresses that `wanted` (names of network interfaces, or addresses) stand for on this machine.
pub fn resolve_interfaces(wanted: &[String]) -> io::Result<Vec<IpAddr>> {
    let known = interfaces()?;
    let mut found = Vec::new();
    for want in wanted {
        let literal = want.parse::<IpAddr>().ok();
        let before = found.len();
        for interface in &known {
            if interface.name == *want || Some(interface.address) == literal {
                found.push(interface.address);
            }
        }
        if found.len() == before {
            let mut names: Vec<&str> = known.iter().map(|i| i.name.as_str()).collect();
            names.sort_unstable();
            names.dedup();
            return Err(io::Error::other(format!(
                "no network interface {want:?} that is up; there are: {}",
                names.join(", ")
            )));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_loopback_by_name_and_by_address() {
        let all = interfaces().unwrap();
        let lo = all
            .iter()
            .find(|i| i.address == IpAddr::V4(Ipv4Addr::LOCALHOST))
            .unwrap();
        assert!(
            resolve_interfaces(std::slice::from_ref(&lo.name))
                .unwrap()
                .contains(&lo.address)
        );
        assert_eq!(
            resolve_interfaces(&["127.0.0.1".into()]).unwrap(),
            [lo.address]
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_asks_three_times_within_the_silence_that_is_allowed() {
        use rustix::net::sockopt;
        let fd = socket(AddressFamily::INET).unwrap();
        for (asked, silence, answer) in [
            (Some(Duration::from_secs(100)), 100, 100_000),
            (None, SILENCE_MAX_OF_SYSTEM.as_secs(), 0),
        ] {
            set_silence_max(&fd, asked).unwrap();
            let fd = fd.get().unwrap();
            let pause = sockopt::tcp_keepidle(fd).unwrap().as_secs();
            let between = sockopt::tcp_keepintvl(fd).unwrap().as_secs();
            assert_eq!((pause, between), (silence * 2 / 5, silence / 5));
            assert_eq!(sockopt::tcp_keepcnt(fd).unwrap(), 3);
            assert_eq!(sockopt::tcp_user_timeout(fd).unwrap(), answer);
        }
    }

    #[test]
    fn an_unknown_interface_is_named_together_with_the_known_ones() {
        let error = resolve_interfaces(&["nope0".into()])
            .unwrap_err()
            .to_string();
        assert!(error.contains("nope0") && error.contains("lo"), "{error}");
    }
}

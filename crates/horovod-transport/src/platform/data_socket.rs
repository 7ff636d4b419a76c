//! Socket options of connections for data, which depend on how long their route is.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use rustix::net::{AddressFamily, sockopt};

use super::{fd::Fd, net};
use crate::congestion::Congestion;

/// A round trip from which on the send buffer is what limits a connection.
const DELAYED_FROM: Duration = Duration::from_millis(4);
/// Most bytes to ask for as a connection's send buffer, and as all of them together.
const SEND_BUFFER_MAX: usize = 16 << 20;
const SEND_BUFFERS_MAX: usize = 64 << 20;

/// Most bytes that wait in a connection, not yet sent, where a link has several: so each gets as much as it sends,
/// and all are done at about the same time. Enough for some milliseconds, which the engine may need to come back.
const UNSENT_MAX: u32 = 1 << 20;

/// Prepares authenticated connections, `several` to each peer. An error only if `congestion` names what the system
/// does not have or allow; without all else they are merely slower.
pub(crate) fn prepare(
    connections: &[&Fd],
    several: bool,
    congestion: &Congestion,
) -> io::Result<()> {
    let delayed = |fd: &&Fd| round_trip(fd).is_some_and(|time| time >= DELAYED_FROM);
    let (far, near): (Vec<&Fd>, Vec<&Fd>) = connections.iter().copied().partition(delayed);
    match congestion {
        Congestion::System => {}
        Congestion::Auto => {
            for fd in near {
                let _ = send_without_pauses(fd);
            }
        }
        Congestion::Named(name) => {
            for fd in connections {
                choose(fd, name)?;
            }
        }
    }
    let _ = widen(&far, several);
    Ok(())
}

/// Where bbr is the system's choice, asks for what learns from losses instead: bbr stops every 10 s for 200 ms to
/// measure the shortest round trip. Where hosts are near, that gains nothing, and its timers cost a fast link up to
/// half of its rate. On a long way it stays, for it does not start slowly after each pause.
fn send_without_pauses(fd: &Fd) -> io::Result<()> {
    if congestion_of(fd)?.starts_with(b"bbr") {
        sockopt::set_tcp_congestion(fd.get()?, "cubic")?;
    }
    Ok(())
}

/// The name of its congestion control. Emulators (qemu) give the first bytes of it only and no end, which rustix does
/// not forgive.
fn congestion_of(fd: &Fd) -> io::Result<Vec<u8>> {
    const NAME_MAX: usize = 16;
    let mut name = [0u8; NAME_MAX];
    let mut len = NAME_MAX as libc::socklen_t;
    let (level, option, to) = (libc::IPPROTO_TCP, libc::TCP_CONGESTION, &raw mut name);
    let fd = fd.get()?.as_fd().as_raw_fd();
    // SAFETY: `to` points to `len` writable bytes.
    if unsafe { libc::getsockopt(fd, level, option, to.cast(), &raw mut len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let given = &name[..NAME_MAX.min(len as usize)];
    let end = given.iter().position(|byte| *byte == 0);
    Ok(given[..end.unwrap_or(given.len())].to_vec())
}

fn choose(fd: &Fd, name: &str) -> io::Result<()> {
    if sockopt::socket_domain(fd.get()?)? == AddressFamily::UNIX {
        return Ok(());
    }
    sockopt::set_tcp_congestion(fd.get()?, name).map_err(|error| {
        io::Error::other(format!(
            "HOROVOD_TCP_CONGESTION={name}: expected auto, system, or what this system allows, {} ({error})",
            allowed()
        ))
    })
}

/// The names that a process without privileges may ask for.
fn allowed() -> String {
    let file = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
    match std::fs::read_to_string(file) {
        Ok(names) => names.trim().replace(' ', ", "),
        Err(_) => format!("what {file} shows"),
    }
}

/// For a long way: a connection carries at most its buffers per round trip.
///
/// Send buffers become larger only where an administrator allows more (`net.core.wmem_max`, which counts twice)
/// than the system grants by itself (`net.ipv4.tcp_wmem`); elsewhere its own tuning is left on.
fn widen(far: &[&Fd], several: bool) -> io::Result<()> {
    if far.is_empty() {
        return Ok(());
    }
    let share = SEND_BUFFER_MAX.min(SEND_BUFFERS_MAX / far.len());
    for fd in far {
        open_window(fd, share)?;
        if several {
            set_unsent_max(fd, UNSENT_MAX)?;
        }
    }
    enlarge(far, share)
}

/// Lets the peer send as much as `bytes` at once from the beginning. The system would get there, too, but so slowly
/// that a congestion control that looks for the bandwidth (bbr) takes the window for the link.
///
/// Asking to be woken by so many bytes only makes room for them, within `net.ipv4.tcp_rmem`, and the system goes on
/// tuning the buffer; setting its size would end that.
fn open_window(fd: &Fd, bytes: usize) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)?;
    set_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1)
}

fn set_unsent_max(fd: &Fd, bytes: u32) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes)
}

fn set_int(fd: &Fd, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    let fd = fd.get()?.as_fd().as_raw_fd();
    let (from, len) = ((&raw const value).cast(), size_of::<libc::c_int>());
    // SAFETY: `from` points to `len` readable bytes, an integer.
    if unsafe { libc::setsockopt(fd, level, option, from, len as libc::socklen_t) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The largest send buffer that the system grants by itself.
fn send_buffer_granted() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem").ok()?;
    text.split_whitespace().nth(2)?.parse().ok()
}

fn enlarge(far: &[&Fd], wanted: usize) -> io::Result<()> {
    let Some(granted) = send_buffer_granted() else {
        return Ok(());
    };
    // Measure the size on an unused socket: setting a size ends the system's own tuning.
    let trial = net::socket(AddressFamily::INET)?;
    sockopt::set_socket_send_buffer_size(trial.get()?, wanted)?;
    if sockopt::socket_send_buffer_size(trial.get()?)? <= granted {
        return Ok(());
    }
    for fd in far {
        sockopt::set_socket_send_buffer_size(fd.get()?, wanted)?;
    }
    Ok(())
}

/// The kernel's `TCP_INFO` of a connection; `None` if it is no TCP connection.
fn info(fd: &Fd) -> Option<libc::tcp_info> {
    // SAFETY: all zeros is a valid value of this struct of integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = libc::socklen_t::try_from(size_of_val(&info)).ok()?;
    let (level, name, to) = (libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast());
    let fd = fd.get().ok()?.as_fd().as_raw_fd();
    // SAFETY: `to` points to `len` writable bytes.
    let done = unsafe { libc::getsockopt(fd, level, name, to, &raw mut len) } == 0;
    // An old kernel fills less; then the other fields are 0.
    done.then_some(info)
}

/// The shortest round trip that the connection has seen; `None` if it is no TCP connection.
fn round_trip(fd: &Fd) -> Option<Duration> {
    // `u32::MAX` is a connection without a measurement.
    let micros = Some(info(fd)?.tcpi_min_rtt).filter(|rtt| *rtt != u32::MAX)?;
    Some(Duration::from_micros(micros.into()))
}

/// Of a connection that the system has given up because nothing was answered: whether only its small packets passed.
pub(crate) fn path_mtu_hint(fd: &Fd) -> Option<String> {
    let info = info(fd)?;
    let original = info.tcpi_bytes_sent.saturating_sub(info.tcpi_bytes_retrans);
    Packets {
        passed: info.tcpi_delivered,
        passed_bytes: info.tcpi_bytes_acked,
        unanswered_bytes: original.saturating_sub(info.tcpi_bytes_acked),
        payload_max: info.tcpi_snd_mss,
        mtu: info.tcpi_pmtu,
    }
    .hint()
}

/// Packets of a connection that were acknowledged, and bytes that were not.
struct Packets {
    passed: u32,
    passed_bytes: u64,
    unanswered_bytes: u64,
    /// Most bytes in one packet.
    payload_max: u32,
    /// The path MTU that the kernel assumes, in bytes.
    mtu: u32,
}

impl Packets {
    /// Large packets are those of the full size. That none passed shows in the mean size of those that did.
    fn hint(&self) -> Option<String> {
        let full = u64::from(self.payload_max);
        let mean = self.passed_bytes / u64::from(self.passed).max(1);
        let is_known = full > 0 && self.mtu > IP_AND_ICMP_BYTES && self.passed > 0;
        (is_known && mean < full / 2 && self.unanswered_bytes >= full).then(|| {
            format!(
                "small packets passed ({mean} bytes on average) and those of {full} bytes did not, as if something on \
                 the way had a smaller MTU than the {} that this host takes for granted: `ping -M do -s {}` to the \
                 other host shows whether packets of that size pass, `ip link set dev ... mtu 1400` on both hosts \
                 makes them smaller, and `horovodrun --doctor` measures the way",
                self.mtu,
                self.mtu - IP_AND_ICMP_BYTES
            )
        })
    }
}

/// Bytes of the headers of a ping.
const IP_AND_ICMP_BYTES: u32 = 28;

#[cfg(test)]
mod tests {
    use super::*;

    /// One end of a connection of this host with itself.
    fn connection() -> Fd {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        Fd::open(|| Ok::<_, io::Error>(stream.into())).unwrap()
    }

    #[test]
    fn only_large_packets_that_vanish_point_to_the_mtu() {
        let packets = |passed, passed_bytes, unanswered_bytes| Packets {
            passed,
            passed_bytes,
            unanswered_bytes,
            payload_max: 1448,
            mtu: 1500,
        };
        let text = packets(4, 400, 14_480).hint().unwrap();
        for part in [
            "(100 bytes on average)",
            "those of 1448 bytes",
            "than the 1500 that",
            "-s 1472`",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        // All sizes passed before, or only small ones were sent, or nothing is known.
        assert!(packets(100, 140_000, 14_480).hint().is_none());
        assert!(packets(4, 400, 90).hint().is_none());
        assert!(packets(0, 0, 14_480).hint().is_none());
        assert!(path_mtu_hint(&connection()).is_none());
    }

    fn congestion(fd: &Fd) -> String {
        String::from_utf8(congestion_of(fd).unwrap()).unwrap()
    }

    fn named(name: &str) -> Congestion {
        Congestion::Named(name.into())
    }

    #[test]
    fn a_send_buffer_becomes_larger_than_the_system_makes_it_or_stays() {
        let fd = connection();
        let size = || sockopt::socket_send_buffer_size(fd.get().unwrap()).unwrap();
        let before = size();
        enlarge(&[&fd], SEND_BUFFER_MAX).unwrap();
        assert!(size() == before || size() > send_buffer_granted().unwrap());
        // Asked for by so many connections that a share is less than what each has.
        enlarge(&[&fd], SEND_BUFFERS_MAX >> 12).unwrap();
        assert!(size() == before || size() > send_buffer_granted().unwrap());
    }

    #[test]
    fn a_window_opens_at_once_and_is_not_fixed() {
        let fd = connection();
        let size = || sockopt::socket_recv_buffer_size(fd.get().unwrap()).unwrap();
        let most = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_rmem").unwrap();
        let most: usize = most.split_whitespace().nth(2).unwrap().parse().unwrap();
        for wanted in [1 << 10, most / 4, most / 2] {
            let before = size();
            open_window(&fd, wanted).unwrap();
            assert!(size() >= before.max(wanted), "{} of {wanted}", size());
        }
        // A buffer of a fixed size would stay as it is.
        open_window(&fd, usize::MAX).unwrap();
        assert!(size() >= most / 2, "{} of {most}", size());
        set_unsent_max(&fd, UNSENT_MAX).unwrap();
    }

    #[test]
    fn a_short_connection_leaves_bbr_unless_it_is_to_stay() {
        let fd = connection();
        // Without BBR, or without this socket option, the setting stays as it is.
        let _ = sockopt::set_tcp_congestion(fd.get().unwrap(), "bbr");
        let before = congestion(&fd);
        prepare(&[&fd], true, &Congestion::System).unwrap();
        assert_eq!(congestion(&fd), before);
        prepare(&[&fd], true, &Congestion::Auto).unwrap();
        // Permission for an algorithm outside the list: an administrator's process may use more than the list has.
        let other = connection();
        let granted = sockopt::set_tcp_congestion(other.get().unwrap(), "cubic").is_ok();
        let leaves = before.starts_with("bbr") && granted;
        assert_eq!(congestion(&fd), if leaves { "cubic" } else { &before });
    }

    #[test]
    fn what_is_named_is_used_or_refused_with_what_there_is() {
        let fd = connection();
        // The system's own choice may be named by everybody, another one not on every system.
        let own = congestion(&fd);
        let other = connection();
        let granted = sockopt::set_tcp_congestion(other.get().unwrap(), "reno").is_ok();
        let name = if granted { "reno" } else { &own };
        prepare(&[&fd], false, &named(name)).unwrap();
        assert_eq!(congestion(&fd), name);
        let error = prepare(&[&fd], false, &named("nope")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("HOROVOD_TCP_CONGESTION=nope"), "{text}");
        assert!(text.contains(&allowed()), "{text}");
        assert_eq!(congestion(&fd), name);
    }

    #[test]
    fn only_a_tcp_connection_has_a_round_trip() {
        assert!(round_trip(&connection()).is_some());
        let alone = net::socket(AddressFamily::UNIX).unwrap();
        assert_eq!(round_trip(&alone), None);
        for choice in [Congestion::Auto, named("no matter what")] {
            assert!(prepare(&[&alone], true, &choice).is_ok());
        }
    }
}

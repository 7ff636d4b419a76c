//! Accepting connections from a network where anybody may connect.
//!
//! A connection has a slot until it has authenticated or its deadline passes; when all slots are taken the oldest one
//! is closed. Strangers cost neither memory nor attention; reports of them grow rare while they continue. Local sockets
//! accept only processes of the same user.

use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use super::stream::Stream;
use crate::{
    JobKey,
    handshake::{Binding, Responder},
    platform::{fd::Fd, net},
    ports::Ports,
};

/// Connections that may be unauthenticated at the same time.
pub(crate) const PENDING_MAX: usize = 256;
/// How long one may be.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Connections accepted in one go before others get their turn.
const ACCEPT_BURST: usize = 64;
/// A rest after the system could not accept (out of descriptors, say).
const REST: Duration = Duration::from_millis(100);
/// Between the first two reports; twice as long after each.
const REPORT_REST: Duration = Duration::from_secs(1);
/// The longest; after twice that without a report the next stranger is news again.
const REPORT_REST_MAX: Duration = Duration::from_secs(3600);

struct Pending {
    responder: Responder,
    from: String,
    deadline: Instant,
}

/// Listening sockets and the handshakes on what they accept.
#[derive(Default)]
pub(crate) struct Gate {
    listeners: Vec<Arc<Fd>>,
    pending: VecDeque<Pending>,
    reports: Reports,
    /// Until when not to accept, after the system refused to.
    rest: Option<Instant>,
    /// The operating system's error.
    refused: Option<io::Error>,
}

impl Gate {
    pub(crate) fn add(&mut self, listener: Arc<Fd>) {
        self.listeners.push(listener);
    }

    /// Descriptors to wait for, each with whether to wait until it is writable.
    pub(crate) fn waits(&self) -> impl Iterator<Item = (&Fd, bool)> {
        let pending = self
            .pending
            .iter()
            .map(|p| (&**p.responder.fd(), p.responder.wants_write()));
        let listeners = if self.rest.is_none() {
            &self.listeners[..]
        } else {
            &[]
        };
        listeners.iter().map(|l| (&**l, false)).chain(pending)
    }

    /// When to call [`Self::step`] at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.pending
            .front()
            .map(|p| p.deadline)
            .into_iter()
            .chain(self.rest)
            .min()
    }

    /// Accepts and goes on with all handshakes; gives what has authenticated.
    pub(crate) fn step(
        &mut self,
        now: Instant,
        key: &JobKey,
        expected: &dyn Fn(&Binding) -> bool,
    ) -> Vec<(Binding, Stream)> {
        self.accept(now);
        let mut done = Vec::new();
        for _ in 0..self.pending.len() {
            let Some(mut pending) = self.pending.pop_front() else {
                break;
            };
            match pending.responder.step(key, expected) {
                Ok(Some(authenticated)) => done.push(authenticated),
                Ok(None) if now < pending.deadline => self.pending.push_back(pending),
                Ok(None) => self.report(now, &pending.from, &"no handshake in time"),
                // Ranks do that, too: they try all addresses at once and leave when one has answered.
                Err(e) if e.is_hang_up() => {}
                Err(e) => self.report(now, &pending.from, &e),
            }
        }
        done
    }

    /// Why the system would not accept a connection, if it would not since the last call.
    pub(crate) fn take_refused(&mut self) -> Option<io::Error> {
        self.refused.take()
    }

    fn accept(&mut self, now: Instant) {
        if self.rest.is_some_and(|until| now < until) {
            return;
        }
        self.rest = None;
        for i in 0..self.listeners.len() {
            for _ in 0..ACCEPT_BURST {
                match net::accept(&self.listeners[i]) {
                    Ok(Some((fd, from))) if !net::is_same_user(&fd) => {
                        self.report(now, &from, &"another user's process");
                    }
                    Ok(Some((fd, from))) => {
                        // Not a TCP socket or already dead: then the handshake will tell.
                        let _ = net::tune_tcp(&fd);
                        if self.pending.len() == PENDING_MAX
                            && let Some(oldest) = self.pending.pop_front()
                        {
                            self.report(now, &oldest.from, &"too many connections wait");
                        }
                        let (responder, deadline) = (Responder::new(fd), now + HANDSHAKE_TIME);
                        self.pending.push_back(Pending {
                            responder,
                            from,
                            deadline,
                        });
                    }
                    Ok(None) => break,
                    Err(e) => {
                        // Out of descriptors, say: leave it in the backlog and go on.
                        self.report(now, "the network", &e);
                        self.rest = Some(now + REST);
                        self.refused = Some(e);
                        break;
                    }
                }
            }
        }
    }

    fn report(&mut self, now: Instant, from: &str, why: &dyn std::fmt::Display) {
        if let Some(count) = self.reports.count(now) {
            tracing::warn!(from, %why, count, "closed a connection that is not part of the job");
        }
    }
}

/// Decides when to report, so that nobody can fill the log from outside.
#[derive(Default)]
struct Reports {
    last: Option<Instant>,
    rest: Duration,
    unreported: u64,
}

impl Reports {
    /// One more to report: how many there were since the last report, if it is time for one.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.unreported += 1;
        let silence = self.last.map(|last| now.saturating_duration_since(last));
        self.rest = match silence {
            Some(silence) if silence < self.rest => return None,
            Some(silence) if silence < 2 * REPORT_REST_MAX => (self.rest * 2).min(REPORT_REST_MAX),
            _ => REPORT_REST,
        };
        self.last = Some(now);
        Some(std::mem::take(&mut self.unreported))
    }
}

/// Listens on every given address.
pub(crate) fn listen_all(
    addresses: &[std::net::IpAddr],
    ports: Ports,
) -> io::Result<Vec<(Arc<Fd>, std::net::SocketAddr)>> {
    let mut bound = Vec::new();
    for &ip in addresses {
        match listen_within(ip, ports) {
            Ok((fd, at)) => bound.push((Arc::new(fd), at)),
            // A kernel without IPv6 is no reason to fail when all addresses are meant.
            Err(_) if ip.is_unspecified() && ip.is_ipv6() && !bound.is_empty() => {}
            Err(e) => return Err(e),
        }
    }
    if bound.is_empty() {
        return Err(io::Error::other("no address to listen on"));
    }
    Ok(bound)
}

/// Listens on one address.
fn listen_within(ip: std::net::IpAddr, ports: Ports) -> io::Result<(Fd, std::net::SocketAddr)> {
    for port in ports.candidates() {
        let at = std::net::SocketAddr::new(ip, port);
        match net::tcp_listen(at) {
            Ok(listener) => return Ok(listener),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && matches!(ports, Ports::Range(..)) => {
            }
            Err(e) => {
                return Err(io::Error::new(
                    e.kind(),
                    format!("cannot listen on {at}: {e}"),
                ));
            }
        }
    }
    let range = ports.candidates();
    let (first, last) = (range.start(), range.end());
    Err(io::Error::new(
        io::ErrorKind::AddrInUse,
        format!(
            "cannot listen on {ip}: all ports of HOROVOD_PORT_RANGE={first}-{last} are in use on this host; widen the \
             range (a rank takes up to two ports, the launcher two more), or end what uses them (`ss -ltnp` lists it)"
        ),
    ))
}

/// The addresses under which others may reach listeners that may be bound to all.
pub(crate) fn reachable(
    bound: &[(Arc<Fd>, std::net::SocketAddr)],
    loopback_too: bool,
) -> io::Result<Vec<std::net::SocketAddr>> {
    let mut found = Vec::new();
    for (_, at) in bound {
        if !at.ip().is_unspecified() {
            found.push(*at);
            continue;
        }
        for interface in net::interfaces()? {
            let ip = interface.address;
            if ip.is_ipv4() == at.is_ipv4() && (loopback_too || !ip.is_loopback()) {
                found.push(std::net::SocketAddr::new(ip, at.port()));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_strangers_fills_no_log() {
        let mut reports = Reports::default();
        let start = Instant::now();
        let day = 24 * 3600;
        let mut reported = Vec::new();
        for second in 0..day {
            let now = start + Duration::from_secs(second);
            reported.extend((0..10).filter_map(|_| reports.count(now)));
        }
        assert_eq!(reported[0], 1, "the first is reported at once");
        assert!(reported.len() < 40, "{} lines in a day", reported.len());
        let total: u64 = reported.iter().sum();
        assert_eq!(total + reports.unreported, 10 * day, "none is forgotten");
    }

    /// Connects to the local socket of this name, as another user or as this one, and waits for its end.
    #[cfg(all(target_os = "linux", not(horovod_portable)))]
    fn connects(name: &str, other_user: bool) -> std::process::Child {
        use std::os::unix::process::CommandExt;
        let script = "import socket, sys\n\
                      s = socket.socket(socket.AF_UNIX)\n\
                      s.connect('\\0' + sys.argv[1])\n\
                      print('connected', flush=True)\n\
                      s.send(b'h')\n\
                      print(s.recv(1), flush=True)";
        let mut command = std::process::Command::new("python3");
        command.args(["-I", "-c", script, name]);
        command.stdout(std::process::Stdio::piped());
        if other_user {
            command.uid(65534).gid(65534);
        }
        command.spawn().unwrap()
    }

    #[test]
    #[cfg(all(target_os = "linux", not(horovod_portable)))]
    fn another_user_is_not_heard_on_a_local_socket() {
        use std::io::{BufRead, BufReader, Read};
        if !rustix::process::geteuid().is_root() {
            println!("NOT RUN: only root can act as another user");
            return;
        }
        for other_user in [true, false] {
            let listener = net::unix_listen().unwrap();
            let mut gate = Gate::default();
            gate.add(listener.fd.clone());
            let mut child = connects(&listener.name, other_user);
            let mut out = BufReader::new(child.stdout.take().unwrap());
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            assert_eq!(line, "connected\n");
            let key = JobKey::random().unwrap();
            gate.step(Instant::now(), &key, &|_| true);
            assert_eq!(gate.pending.len(), usize::from(!other_user));
            assert_eq!(gate.reports.last.is_some(), other_user);
            drop(gate);
            let mut rest = String::new();
            out.read_to_string(&mut rest).unwrap();
            // Closed with its byte unread, or at its end.
            assert!(rest.is_empty() || rest == "b''\n", "{rest}");
            child.wait().unwrap();
        }
    }

    #[test]
    fn listeners_take_the_free_ports_of_a_range_and_say_when_there_are_none() {
        let here = [std::net::Ipv4Addr::LOCALHOST.into()];
        let listened = |ports| listen_all(&here, ports).map(|bound| (bound[0].1.port(), bound));
        let (taken, _keeps) = listened(Ports::Any).unwrap();
        let range = Ports::Range(taken, taken);
        let error = listened(range).unwrap_err().to_string();
        for text in [
            format!("HOROVOD_PORT_RANGE={taken}-{taken}"),
            "widen the range".into(),
        ] {
            assert!(error.contains(&text), "{error}");
        }
        let last = taken.saturating_add(50);
        let (first, _one) = listened(Ports::Range(taken, last)).unwrap();
        let (second, _two) = listened(Ports::Range(taken, last)).unwrap();
        assert!(
            first != second
                && [first, second]
                    .iter()
                    .all(|port| (taken..=last).contains(port))
        );
    }

    #[test]
    fn nothing_is_accepted_before_the_rest_after_a_failure_is_over() {
        let listeners = listen_all(&[std::net::Ipv4Addr::LOCALHOST.into()], Ports::Any).unwrap();
        let (listener, at) = listeners[0].clone();
        let mut gate = Gate::default();
        gate.add(listener);
        let now = Instant::now();
        gate.rest = Some(now + REST);
        let _waits = std::net::TcpStream::connect(at).unwrap();
        let key = JobKey::random().unwrap();
        let pending = |gate: &mut Gate, now| {
            gate.step(now, &key, &|_| true);
            gate.pending.len()
        };
        assert_eq!(pending(&mut gate, now), 0);
        assert_eq!(gate.deadline(), Some(now + REST), "somebody looks again");
        assert_eq!(pending(&mut gate, now + REST), 1);
        assert_eq!(gate.rest, None);
    }

    #[test]
    fn after_hours_of_silence_a_stranger_is_news_again() {
        let mut reports = Reports::default();
        let mut now = Instant::now();
        for _ in 0..100 {
            reports.count(now);
            now += Duration::from_secs(60);
        }
        now += 2 * REPORT_REST_MAX;
        assert!(reports.count(now).is_some());
        assert_eq!(reports.rest, REPORT_REST);
    }
}

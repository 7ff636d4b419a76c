//! Accepting connections from a network where anybody may connect.
//!
//! A connection has a slot until it has authenticated or its deadline passes; when all slots are
//! taken the oldest one goes. What strangers send costs neither memory nor attention, and is
//! reported at most once a second.

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
};

/// Connections that may be unauthenticated at the same time.
pub(crate) const PENDING_MAX: usize = 256;
/// How long one may be.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Connections accepted in one go before others get their turn.
const ACCEPT_BURST: usize = 64;
/// A rest after the system could not accept (out of descriptors, say).
const REST: Duration = Duration::from_millis(100);
const REPORT_EVERY: Duration = Duration::from_secs(1);

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
    reported: Option<Instant>,
    unreported: u64,
    /// Until when not to accept, after the system refused to.
    rest: Option<Instant>,
}

impl Gate {
    pub(crate) fn add(&mut self, listener: Arc<Fd>) {
        self.listeners.push(listener);
    }

    /// What to wait for: descriptor, and whether it waits for writing.
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
                Err(e) => self.report(now, &pending.from, &e),
            }
        }
        done
    }

    fn accept(&mut self, now: Instant) {
        if self.rest.is_some_and(|until| now < until) {
            return;
        }
        self.rest = None;
        for i in 0..self.listeners.len() {
            for _ in 0..ACCEPT_BURST {
                match net::accept(&self.listeners[i]) {
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
                        break;
                    }
                }
            }
        }
    }

    fn report(&mut self, now: Instant, from: &str, why: &dyn std::fmt::Display) {
        self.unreported += 1;
        if self
            .reported
            .is_none_or(|last| now.duration_since(last) >= REPORT_EVERY)
        {
            let count = std::mem::take(&mut self.unreported);
            self.reported = Some(now);
            tracing::warn!(from, %why, count, "closed a connection that is not part of the job");
        }
    }
}

/// Listens on every given address with any port.
pub(crate) fn listen_all(
    addresses: &[std::net::IpAddr],
    port: u16,
) -> io::Result<Vec<(Arc<Fd>, std::net::SocketAddr)>> {
    let mut bound = Vec::new();
    for &ip in addresses {
        let at = std::net::SocketAddr::new(ip, port);
        match net::tcp_listen(at) {
            Ok((fd, at)) => bound.push((Arc::new(fd), at)),
            // A kernel without IPv6 is no reason to fail when all addresses are meant.
            Err(_) if ip.is_unspecified() && ip.is_ipv6() => {}
            Err(e) => {
                return Err(io::Error::new(
                    e.kind(),
                    format!("cannot listen on {at}: {e}"),
                ));
            }
        }
    }
    if bound.is_empty() {
        return Err(io::Error::other("no address to listen on"));
    }
    Ok(bound)
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

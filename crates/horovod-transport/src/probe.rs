//! Probes: before a job starts, what the network between two hosts lets through, and how fast.
//!
//! Connections are made and proved as a job's are: an ephemeral listener, a mutual handshake with the key of this
//! examination. Each has one errand: to echo, to swallow or to pour bytes. Every call ends by its deadline.

mod server;

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

pub use self::server::Server;
use crate::{
    JobKey, compact,
    handshake::{Binding, HandshakeError, Initiator, Purpose},
    platform::{fd::Fd, net},
    tcp::stream::{Got, Stream, StreamError},
    wait::wait_for_any,
};

/// Purpose of a connection, its first byte.
const ECHO: u8 = 0;
const SWALLOW: u8 = 1;
const POUR: u8 = 2;
/// Bytes of one echo: those of a small control frame.
const ECHO_BYTES: usize = 64;
/// Bytes offered to a socket at a time.
const BLOCK: usize = 256 << 10;
/// The first part of a measured time is not counted: the connection still grows.
const WARM_UP: u32 = 4;
/// Longest that one errand may take at the server, whatever its client wants.
const ERRAND_TIME: Duration = Duration::from_secs(5);

/// Longest text of an obstacle on its way, in bytes.
const OBSTACLE_TEXT_MAX: usize = 1 << 10;

/// Why one host cannot reach another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Obstacle {
    /// Nothing answered in time.
    Silence,
    /// The host, or something before it, said no.
    Refused,
    /// No route leads there, or a firewall rejects the packets.
    NoRoute,
    /// Somebody answered, but not who was meant.
    Handshake(
        #[serde(
            serialize_with = "compact::put_text::<OBSTACLE_TEXT_MAX, _>",
            deserialize_with = "compact::text::<OBSTACLE_TEXT_MAX, _>"
        )]
        String,
    ),
    /// The connection stood and broke.
    Broken(
        #[serde(
            serialize_with = "compact::put_text::<OBSTACLE_TEXT_MAX, _>",
            deserialize_with = "compact::text::<OBSTACLE_TEXT_MAX, _>"
        )]
        String,
    ),
    /// Anything else that the operating system said.
    Other(
        #[serde(
            serialize_with = "compact::put_text::<OBSTACLE_TEXT_MAX, _>",
            deserialize_with = "compact::text::<OBSTACLE_TEXT_MAX, _>"
        )]
        String,
    ),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silence => f.write_str("no answer in time"),
            Self::Refused => f.write_str("connection refused"),
            Self::NoRoute => f.write_str("no route to host"),
            Self::Handshake(why) => write!(f, "somebody else answers: {why}"),
            Self::Broken(why) => write!(f, "the connection broke: {why}"),
            Self::Other(why) => f.write_str(why),
        }
    }
}

impl From<io::Error> for Obstacle {
    fn from(error: io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(Errno::CONNREFUSED) => Self::Refused,
            Some(Errno::TIMEDOUT) => Self::Silence,
            Some(Errno::HOSTUNREACH | Errno::NETUNREACH) => Self::NoRoute,
            _ => Self::Other(error.to_string()),
        }
    }
}

impl From<HandshakeError> for Obstacle {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::Io(error) => error.into(),
            other => Self::Handshake(other.to_string()),
        }
    }
}

impl From<StreamError> for Obstacle {
    fn from(error: StreamError) -> Self {
        Self::Broken(error.to_string())
    }
}

/// The examining host: both ends of a connection are numbers of hosts.
#[derive(Clone, Debug)]
pub struct Prober {
    /// The key of this examination.
    pub key: JobKey,
    /// This host's number.
    pub me: u32,
    /// Whether data is encrypted, as that of the job will be.
    pub encrypt: bool,
}

/// A connection that was made and proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The address that this host has on it.
    pub local: IpAddr,
    /// How long connecting and the handshake took.
    pub took: Duration,
}

enum ProbeStep {
    Connecting(Arc<Fd>),
    Shaking(Box<Initiator>),
    Over,
}

/// One connection on its way.
struct Attempt {
    to: u32,
    step: ProbeStep,
    result: Option<Result<(Stream, Duration), Obstacle>>,
}

impl Attempt {
    fn new(to: u32, at: SocketAddr) -> Self {
        match net::tcp_connect(at) {
            Ok(fd) => Self {
                to,
                step: ProbeStep::Connecting(fd),
                result: None,
            },
            Err(error) => Self {
                to,
                step: ProbeStep::Over,
                result: Some(Err(error.into())),
            },
        }
    }

    fn wait(&self) -> Option<(&Fd, bool)> {
        match &self.step {
            ProbeStep::Connecting(fd) => Some((fd, true)),
            ProbeStep::Shaking(initiator) => Some((initiator.fd(), initiator.wants_write())),
            ProbeStep::Over => None,
        }
    }

    fn advance(&mut self, prober: &Prober, since: Instant) {
        if let Some(result) = self.try_advance(prober).transpose() {
            self.step = ProbeStep::Over;
            self.result = Some(result.map(|stream| (stream, since.elapsed())));
        }
    }

    fn try_advance(&mut self, prober: &Prober) -> Result<Option<Stream>, Obstacle> {
        if let ProbeStep::Connecting(fd) = &self.step {
            if net::connected(fd)?.is_none() {
                return Ok(None);
            }
            let binding = Binding {
                purpose: Purpose::Probe,
                lane: 0,
                sealed: prober.encrypt,
                generation: 0,
                from: prober.me,
                to: self.to,
            };
            let initiator = Initiator::new(fd.clone(), &prober.key, binding)?;
            self.step = ProbeStep::Shaking(Box::new(initiator));
        }
        match &mut self.step {
            ProbeStep::Shaking(initiator) => Ok(initiator.step()?),
            _ => Ok(None),
        }
    }
}

impl Prober {
    /// Connects to all these (number of the host, address) at the same time; what became of each.
    pub fn reach(
        &self,
        targets: &[(u32, SocketAddr)],
        within: Duration,
    ) -> Vec<Result<Reached, Obstacle>> {
        let reached = self.connect_all(targets, within).into_iter();
        reached
            .map(|result| {
                let (stream, took) = result?;
                let local = net::local_ip(stream.fd())
                    .ok_or_else(|| Obstacle::Broken("it was closed at once".into()))?;
                Ok(Reached { local, took })
            })
            .collect()
    }

    /// The median time from here to there and back again of a small message; `window` is how long to send them.
    pub fn round_trip(
        &self,
        to: u32,
        at: SocketAddr,
        window: Duration,
    ) -> Result<Duration, Obstacle> {
        let deadline = Instant::now() + window + ERRAND_TIME / 2;
        let mut stream = self.connect(to, at, deadline - Instant::now())?;
        put(&mut stream, &[ECHO], deadline)?;
        let until = Instant::now() + window;
        let mut times = Vec::new();
        while times.len() < ECHOES_MAX && (times.is_empty() || Instant::now() < until) {
            let sent = Instant::now();
            put(&mut stream, &[1; ECHO_BYTES], deadline)?;
            fill(&mut stream, &mut [0; ECHO_BYTES], deadline)?;
            times.push(sent.elapsed());
        }
        times.sort_unstable();
        Ok(times[times.len() / 2])
    }

    /// Bytes per second from here to there, as they arrive; `window` is how long to send.
    pub fn push(&self, to: u32, at: SocketAddr, window: Duration) -> Result<f64, Obstacle> {
        let deadline = Instant::now() + window + ERRAND_TIME / 2;
        let mut stream = self.connect(to, at, deadline - Instant::now())?;
        let mut order = vec![SWALLOW];
        order.extend((window.as_nanos() as u64).to_le_bytes());
        put(&mut stream, &order, deadline)?;
        let block = vec![0; BLOCK];
        let mut sent = 0;
        let mut answer = [0; 8];
        let mut have = 0;
        // It sends until the other side has seen enough and says how much that was.
        while have < answer.len() {
            sent = (sent + stream.try_send(&block[sent..])?) % BLOCK;
            match stream.try_recv(&mut answer[have..])? {
                Got::Bytes(count) => have += count,
                Got::Nothing => pause(&stream, true, deadline)?,
                Got::End => return Err(Obstacle::Broken("it was closed".into())),
            }
        }
        Ok(u64::from_le_bytes(answer) as f64)
    }

    /// Bytes per second from there to here.
    pub fn pull(&self, to: u32, at: SocketAddr, window: Duration) -> Result<f64, Obstacle> {
        let deadline = Instant::now() + window + ERRAND_TIME / 2;
        let mut stream = self.connect(to, at, deadline - Instant::now())?;
        put(&mut stream, &[POUR], deadline)?;
        arriving(&mut stream, window, deadline)
    }

    fn connect(&self, to: u32, at: SocketAddr, within: Duration) -> Result<Stream, Obstacle> {
        let result = self.connect_all(&[(to, at)], within).pop();
        Ok(result.unwrap_or(Err(Obstacle::Silence))?.0)
    }

    fn connect_all(
        &self,
        targets: &[(u32, SocketAddr)],
        within: Duration,
    ) -> Vec<Result<(Stream, Duration), Obstacle>> {
        let start = Instant::now();
        let deadline = start + within;
        let mut attempts: Vec<Attempt> = targets
            .iter()
            .map(|&(to, at)| Attempt::new(to, at))
            .collect();
        loop {
            for attempt in &mut attempts {
                if attempt.result.is_none() {
                    attempt.advance(self, start);
                }
            }
            let is_over = attempts.iter().all(|attempt| attempt.result.is_some());
            if is_over || Instant::now() >= deadline {
                break;
            }
            wait_for_any(attempts.iter().filter_map(Attempt::wait), Some(deadline));
        }
        let results = attempts.into_iter().map(|attempt| match attempt.step {
            ProbeStep::Shaking(_) => Err(Obstacle::Handshake(
                "it took the connection and said nothing".into(),
            )),
            _ => attempt.result.unwrap_or(Err(Obstacle::Silence)),
        });
        results.collect()
    }
}

/// Most echoes for one median.
const ECHOES_MAX: usize = 200;

/// Waits for the socket; an error at the deadline.
fn pause(stream: &Stream, write: bool, deadline: Instant) -> Result<(), Obstacle> {
    if Instant::now() >= deadline {
        return Err(Obstacle::Broken("nothing moved in time".into()));
    }
    wait_for_any([(&**stream.fd(), write)].into_iter(), Some(deadline));
    Ok(())
}

/// Sends all of `bytes`.
fn put(stream: &mut Stream, bytes: &[u8], deadline: Instant) -> Result<(), Obstacle> {
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.try_send(&bytes[sent..])? {
            0 => pause(stream, true, deadline)?,
            count => sent += count,
        }
    }
    Ok(())
}

/// Receives as many bytes as `bytes` has room for.
fn fill(stream: &mut Stream, bytes: &mut [u8], deadline: Instant) -> Result<(), Obstacle> {
    let mut have = 0;
    while have < bytes.len() {
        match stream.try_recv(&mut bytes[have..])? {
            Got::Bytes(count) => have += count,
            Got::Nothing => pause(stream, false, deadline)?,
            Got::End => return Err(Obstacle::Broken("it was closed".into())),
        }
    }
    Ok(())
}

/// Bytes per second that arrive during a window that begins with the first byte.
fn arriving(stream: &mut Stream, window: Duration, deadline: Instant) -> Result<f64, Obstacle> {
    let mut buffer = vec![0; BLOCK];
    let mut began: Option<Instant> = None;
    let mut counted: Option<(Instant, u64)> = None;
    loop {
        match stream.try_recv(&mut buffer)? {
            Got::Bytes(count) => {
                let now = Instant::now();
                let start = *began.get_or_insert(now);
                let Some((since, bytes)) = &mut counted else {
                    if now - start >= window / WARM_UP {
                        counted = Some((now, 0));
                    }
                    continue;
                };
                *bytes += count as u64;
                if now - start >= window {
                    return Ok(*bytes as f64 / (now - *since).as_secs_f64().max(1e-9));
                }
            }
            Got::Nothing => pause(stream, false, deadline)?,
            Got::End => return Err(Obstacle::Broken("it was closed".into())),
        }
    }
}

#[cfg(test)]
mod tests;

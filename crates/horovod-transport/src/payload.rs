//! Payloads: bytes of any length between the process that starts a function on many ranks and those ranks.
//!
//! One [`Server`] holds what every rank fetches and collects what each delivers. Connections are authenticated and
//! encrypted like any other of a job; memory for what arrives grows as it arrives.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{
    JobKey,
    frame_stream::FrameStream,
    handshake::{Binding, Purpose, SERVER},
    mesh::dial::{Dial, Target},
    platform::fd::Fd,
    ports::Ports,
    server::{Admission, Admitted, Connections, RunningServer, ServerState},
    wait::wait_for_any,
};

/// Longest payload.
const PAYLOAD_BYTES_MAX: u64 = 1 << 40;
/// Bytes of a payload in one frame.
const PIECE: usize = 256 << 10;
/// Frames are not prepared further ahead than this.
const AHEAD: usize = 1 << 20;
/// Ranks that may be connected at the same time.
const CLIENTS_MAX: usize = 4096;
/// How often a waiting caller is asked whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// First bytes of a connection, and what a delivery is answered with.
const FETCH: u8 = 0;
const DELIVER: u8 = 1;
const TAKEN: u8 = 2;

/// Why a payload did not get through.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PayloadError {
    /// Nobody answered as who holds the key.
    #[error("rank {rank} cannot reach the process that started it: {}", tried.join("; "))]
    Unreachable {
        /// This rank.
        rank: u32,
        /// Each address, and what happened there.
        tried: Vec<String>,
    },
    /// The connection ended in the middle.
    #[error("rank {rank} lost the process that started it: {why}")]
    Lost {
        /// This rank.
        rank: u32,
        /// Why.
        why: String,
    },
    /// The caller did not want to wait any longer.
    #[error("interrupted")]
    Interrupted,
}

/// Payloads that have arrived, each with the rank that it is from.
type Inbox = VecDeque<(u32, Vec<u8>)>;

/// Gives one payload to every rank that asks, takes what they deliver. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    running: RunningServer<Inbox>,
    /// Payload for fetches from now on.
    payload: Arc<Mutex<Arc<[u8]>>>,
}

impl Server {
    /// Listens on these addresses (`0.0.0.0` and `::` mean all).
    pub fn start(bind: &[IpAddr], ports: Ports, key: JobKey, payload: Vec<u8>) -> io::Result<Self> {
        let admission = Admission {
            key,
            purpose: Purpose::Payload,
            frame_max: PIECE,
            clients_max: CLIENTS_MAX,
        };
        let inbox = Inbox::default();
        let payload = Arc::new(Mutex::new(Arc::from(payload)));
        let published = Arc::clone(&payload);
        let running = RunningServer::start(
            "hvd-payloads",
            bind,
            ports,
            admission,
            inbox,
            |mut connections: Connections<Errand>, state| {
                move || {
                    connections.wait(None);
                    connections.admit(Instant::now());
                    let payload = current(&published);
                    connections
                        .clients
                        .retain(|_, client| match client.serve(&payload, &state) {
                            Ok(goes_on) => goes_on,
                            Err(why) => {
                                let rank = client.rank;
                                tracing::debug!(rank, %why, "a payload was not finished");
                                false
                            }
                        });
                }
            },
        )?;
        Ok(Self { running, payload })
    }

    /// Where ranks can reach it.
    pub fn addrs(&self) -> &[SocketAddr] {
        self.running.addrs()
    }

    /// Has those who ask from now on fetch this; who is in the middle gets the rest of what was there.
    pub fn publish(&self, payload: Vec<u8>) {
        *self.payload.lock().unwrap_or_else(PoisonError::into_inner) = Arc::from(payload);
    }

    /// The next delivery, with the rank that it is from; waits for at most `timeout`.
    pub fn wait(&self, timeout: Duration) -> Option<(u32, Vec<u8>)> {
        self.running.state().wait(timeout, Inbox::pop_front)
    }
}

fn current(payload: &Mutex<Arc<[u8]>>) -> Arc<[u8]> {
    Arc::clone(&payload.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Request of one connection.
#[derive(Default)]
enum Errand {
    #[default]
    Unknown,
    Fetching {
        payload: Arc<[u8]>,
        sent: usize,
    },
    Delivering {
        wanted: u64,
        bytes: Vec<u8>,
    },
    Done,
}

impl Admitted<Errand> {
    /// Goes on as far as the socket allows; false when all is done.
    fn serve(&mut self, payload: &Arc<[u8]>, state: &ServerState<Inbox>) -> Result<bool, String> {
        while let Some(frame) = self.wire.next()? {
            self.handle(&frame, payload, state)?;
        }
        if let Errand::Fetching { payload, sent } = &mut self.known {
            send_pieces(&mut self.wire, payload, sent)?;
        }
        self.wire.flush()?;
        let is_complete = match &self.known {
            Errand::Fetching { payload, sent } => *sent == payload.len(),
            Errand::Done => true,
            _ => false,
        };
        Ok(!(is_complete && self.wire.unsent() == 0))
    }

    fn handle(
        &mut self,
        frame: &[u8],
        payload: &Arc<[u8]>,
        state: &ServerState<Inbox>,
    ) -> Result<(), String> {
        match (&mut self.known, frame) {
            (Errand::Unknown, [FETCH]) => {
                self.wire.push(&(payload.len() as u64).to_le_bytes());
                self.known = Errand::Fetching {
                    payload: Arc::clone(payload),
                    sent: 0,
                };
            }
            (Errand::Unknown, [DELIVER, length @ ..]) => {
                let wanted = length_of(length)?;
                let bytes = Vec::new();
                self.known = Errand::Delivering { wanted, bytes };
                self.finish_if_whole(state);
            }
            (Errand::Delivering { wanted, bytes }, piece) => {
                add(bytes, piece, *wanted)?;
                self.finish_if_whole(state);
            }
            _ => return Err("it says what it must not".into()),
        }
        Ok(())
    }

    fn finish_if_whole(&mut self, state: &ServerState<Inbox>) {
        if let Errand::Delivering { wanted, bytes } = &mut self.known
            && bytes.len() as u64 == *wanted
        {
            let bytes = std::mem::take(bytes);
            state.lock().push_back((self.rank, bytes));
            state.wake_owner();
            self.wire.push(&[TAKEN]);
            self.known = Errand::Done;
        }
    }
}

fn length_of(bytes: &[u8]) -> Result<u64, String> {
    let length = bytes.try_into().map(u64::from_le_bytes);
    length
        .ok()
        .filter(|length| *length <= PAYLOAD_BYTES_MAX)
        .ok_or_else(|| "a payload without a proper length".into())
}

fn add(bytes: &mut Vec<u8>, piece: &[u8], wanted: u64) -> Result<(), String> {
    if piece.is_empty() || bytes.len() as u64 + piece.len() as u64 > wanted {
        return Err("a payload of another length than announced".into());
    }
    bytes.extend_from_slice(piece);
    Ok(())
}

/// Sends as much of a payload as the socket takes now.
fn send_pieces(wire: &mut FrameStream, bytes: &[u8], sent: &mut usize) -> Result<(), String> {
    loop {
        while *sent < bytes.len() && wire.unsent() < AHEAD {
            let piece = &bytes[*sent..(*sent + PIECE).min(bytes.len())];
            wire.push(piece);
            *sent += piece.len();
        }
        if !wire.flush()? || *sent == bytes.len() {
            return Ok(());
        }
    }
}

/// A rank's way to the server.
#[derive(Clone, Debug)]
pub struct PayloadClient {
    /// This rank.
    pub rank: u32,
    /// Where the server may be reached; all are tried.
    pub addresses: Vec<SocketAddr>,
    /// The key that the server has.
    pub key: JobKey,
    /// How long to try to reach it.
    pub wait_timeout: Duration,
}

impl PayloadClient {
    /// Fetches the server's payload. `go_on` is called several times a second.
    pub fn fetch(&self, go_on: &mut dyn FnMut() -> bool) -> Result<Vec<u8>, PayloadError> {
        self.fetch_over(self.connect(go_on)?, go_on)
    }

    fn fetch_over(
        &self,
        mut wire: FrameStream,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u8>, PayloadError> {
        wire.push(&[FETCH]);
        let header = self.next(&mut wire, go_on)?;
        let wanted = length_of(&header).map_err(|why| self.lost(why))?;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < wanted {
            let piece = self.next(&mut wire, go_on)?;
            add(&mut bytes, &piece, wanted).map_err(|why| self.lost(why))?;
        }
        Ok(bytes)
    }

    /// Brings the server this rank's payload; returns when it is there.
    pub fn deliver(
        &self,
        bytes: &[u8],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), PayloadError> {
        self.deliver_over(self.connect(go_on)?, bytes, go_on)
    }

    fn deliver_over(
        &self,
        mut wire: FrameStream,
        bytes: &[u8],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), PayloadError> {
        let mut header = vec![DELIVER];
        header.extend((bytes.len() as u64).to_le_bytes());
        wire.push(&header);
        let mut sent = 0;
        loop {
            send_pieces(&mut wire, bytes, &mut sent).map_err(|why| self.lost(why))?;
            if sent == bytes.len() && wire.unsent() == 0 {
                break;
            }
            pause([wire.wait()].into_iter(), None, go_on)?;
        }
        match *self.next(&mut wire, go_on)? {
            [TAKEN] => Ok(()),
            _ => Err(self.lost("it did not take the payload".into())),
        }
    }

    fn lost(&self, why: String) -> PayloadError {
        PayloadError::Lost {
            rank: self.rank,
            why,
        }
    }

    fn connect(&self, go_on: &mut dyn FnMut() -> bool) -> Result<FrameStream, PayloadError> {
        let binding = Binding {
            purpose: Purpose::Payload,
            lane: 0,
            sealed: true,
            generation: 0,
            from: self.rank,
            to: SERVER,
        };
        let deadline = Instant::now() + self.wait_timeout;
        let dial = |at: &SocketAddr| Dial::new(binding, vec![Target::Tcp(*at)], Instant::now());
        let mut dials: Vec<Dial> = self.addresses.iter().map(dial).collect();
        loop {
            let now = Instant::now();
            for dial in &mut dials {
                if let Some(stream) = dial.step(now, &self.key) {
                    return Ok(FrameStream::new(stream, PIECE));
                }
            }
            if now >= deadline || dials.iter().all(Dial::has_failed_for_good) {
                let tried = dials.iter().flat_map(Dial::failures).collect();
                return Err(PayloadError::Unreachable {
                    rank: self.rank,
                    tried,
                });
            }
            let next = dials
                .iter()
                .filter_map(Dial::deadline)
                .chain([deadline])
                .min();
            pause(dials.iter().filter_map(Dial::wait), next, go_on)?;
        }
    }

    fn next(
        &self,
        wire: &mut FrameStream,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u8>, PayloadError> {
        loop {
            wire.flush().map_err(|why| self.lost(why))?;
            if let Some(frame) = wire.next().map_err(|why| self.lost(why))? {
                return Ok(frame);
            }
            pause([wire.wait()].into_iter(), None, go_on)?;
        }
    }
}

/// Waits until something can go on, but not longer than until the caller is to be asked again.
fn pause<'a>(
    waits: impl Iterator<Item = (&'a Fd, bool)>,
    until: Option<Instant>,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<(), PayloadError> {
    let ask = Instant::now() + ASK_EVERY;
    wait_for_any(waits, Some(until.map_or(ask, |until| until.min(ask))));
    if go_on() {
        Ok(())
    } else {
        Err(PayloadError::Interrupted)
    }
}

#[cfg(feature = "testing")]
pub(crate) mod harness;
#[cfg(test)]
mod tests;

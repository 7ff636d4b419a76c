//! Mutual proof that both ends hold the job's key, before anything else is read.
//!
//! `Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s` with a confirmation:
//!
//! ```text
//! initiator                                            responder
//!   "horovod" version purpose lane+sealed generation from to | e ->
//!                           <-  "horovod" version status | e, ee
//!   an empty sealed message                                    ->
//! ```
//! All clear fields are part of the prologue, so a message of another purpose, generation or pair
//! of ranks does not verify: no replay, no reflection, no crossed wires. The last message proves to
//! the responder that the initiator is alive now (the first one alone could be an old recording).
//! All messages have a fixed size.

use std::sync::Arc;

use snow::{Builder, HandshakeState, TransportState};

use crate::{
    JobKey,
    platform::fd::Fd,
    tcp::{
        sealed::Sealed,
        stream::{Got, Stream, recv, send},
    },
};

/// Version of everything that ranks say to each other; both ends must have the same.
pub(crate) const VERSION: u8 = 7;
const MAGIC: &[u8; 7] = b"horovod";
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const PREFIX: usize = MAGIC.len() + 1;
const FIELDS: usize = 1 + 1 + 8 + 4 + 4;
const NOISE: usize = 32 + 16;
const HELLO: usize = PREFIX + FIELDS + NOISE;
const REPLY: usize = PREFIX + 1 + NOISE;
const CONFIRM: usize = 16;

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Purpose {
    /// A rank registers with the rendezvous.
    Rendezvous = 1,
    /// Control frames with rank 0.
    Control = 2,
    /// Tensor data.
    Data = 3,
    /// The first rank of a host gives away the shared memory.
    Host = 4,
    /// A function to call, or what became of it.
    Payload = 5,
    /// Before a job: whether and how fast hosts reach each other.
    Probe = 6,
    /// A host agent that dials its launcher.
    Agent = 7,
}

impl Purpose {
    fn from_code(code: u8) -> Option<Self> {
        [
            Self::Rendezvous,
            Self::Control,
            Self::Data,
            Self::Host,
            Self::Payload,
            Self::Probe,
            Self::Agent,
        ]
        .into_iter()
        .find(|p| *p as u8 == code)
    }
}

impl std::fmt::Display for Purpose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Rendezvous => "rendezvous",
            Self::Control => "control",
            Self::Data => "data",
            Self::Host => "local",
            Self::Payload => "payload",
            Self::Probe => "probe",
            Self::Agent => "agent",
        })
    }
}

/// In place of a rank: the rendezvous.
pub(crate) const SERVER: u32 = u32::MAX;

/// Which connection this is: both ends must mean the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    pub(crate) purpose: Purpose,
    /// Which of several of that purpose, from 0 to 127.
    pub(crate) lane: u8,
    /// Whether the bytes after the handshake are encrypted.
    pub(crate) sealed: bool,
    pub(crate) generation: u64,
    /// The initiator's rank.
    pub(crate) from: u32,
    /// The responder's rank.
    pub(crate) to: u32,
}

impl Binding {
    fn fields(&self) -> [u8; FIELDS] {
        let mut bytes = [0; FIELDS];
        bytes[0] = self.purpose as u8;
        bytes[1] = self.lane << 1 | u8::from(self.sealed);
        bytes[2..10].copy_from_slice(&self.generation.to_le_bytes());
        bytes[10..14].copy_from_slice(&self.from.to_le_bytes());
        bytes[14..18].copy_from_slice(&self.to.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; FIELDS]) -> Option<Self> {
        let [
            purpose,
            lane_and_sealed,
            g0,
            g1,
            g2,
            g3,
            g4,
            g5,
            g6,
            g7,
            f0,
            f1,
            f2,
            f3,
            t0,
            t1,
            t2,
            t3,
        ] = *bytes;
        Some(Self {
            purpose: Purpose::from_code(purpose)?,
            lane: lane_and_sealed >> 1,
            sealed: lane_and_sealed & 1 == 1,
            generation: u64::from_le_bytes([g0, g1, g2, g3, g4, g5, g6, g7]),
            from: u32::from_le_bytes([f0, f1, f2, f3]),
            to: u32::from_le_bytes([t0, t1, t2, t3]),
        })
    }
}

/// Why a responder says no; travels as one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Refusal {
    Version = 1,
    Key = 2,
    Unexpected = 3,
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("the other side closed the connection during the handshake")]
    Closed,
    #[error("the other side does not speak this protocol")]
    Stranger,
    #[error("the other side speaks version {theirs} of the protocol, this is version {VERSION}")]
    Version { theirs: u8 },
    #[error("the job keys differ")]
    Key,
    #[error("the other side does not expect this connection (another generation, or a second one)")]
    Unexpected,
}

impl HandshakeError {
    /// The other side only went away, having said nothing wrong.
    pub(crate) fn is_hang_up(&self) -> bool {
        use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
        match self {
            Self::Closed => true,
            Self::Io(error) => matches!(error.kind(), BrokenPipe | ConnectionReset),
            _ => false,
        }
    }
}

impl From<rustix::io::Errno> for HandshakeError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

fn prefix() -> [u8; PREFIX] {
    let mut bytes = [0; PREFIX];
    bytes[..MAGIC.len()].copy_from_slice(MAGIC);
    bytes[MAGIC.len()] = VERSION;
    bytes
}

fn noise(key: &JobKey, binding: &Binding, initiator: bool) -> Result<HandshakeState, snow::Error> {
    let mut prologue = prefix().to_vec();
    prologue.extend(binding.fields());
    let builder = Builder::new(PATTERN.parse()?)
        .psk(0, key.bytes())?
        .prologue(&prologue)?;
    if initiator {
        builder.build_initiator()
    } else {
        builder.build_responder()
    }
}

fn finish(fd: Arc<Fd>, cipher: TransportState, binding: &Binding) -> Stream {
    Stream::authenticated(fd, binding.sealed.then(|| Sealed::new(cipher)))
}

/// A message of fixed size on its way in.
struct Fill<const N: usize> {
    bytes: [u8; N],
    have: usize,
}

impl<const N: usize> Fill<N> {
    fn new() -> Self {
        Self {
            bytes: [0; N],
            have: 0,
        }
    }

    /// True when all bytes are there. Never reads beyond them.
    fn read(&mut self, fd: &Fd) -> Result<bool, HandshakeError> {
        while self.have < N {
            match recv(fd, &mut self.bytes[self.have..])? {
                Got::Bytes(n) => self.have += n,
                Got::Nothing => return Ok(false),
                Got::End => return Err(HandshakeError::Closed),
            }
            let magic = self.have.min(MAGIC.len());
            if N != CONFIRM && self.bytes[..magic] != MAGIC[..magic] {
                return Err(HandshakeError::Stranger);
            }
        }
        Ok(true)
    }
}

/// Bytes on their way out.
#[derive(Default)]
struct Drain {
    bytes: Vec<u8>,
    sent: usize,
}

impl Drain {
    fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, sent: 0 }
    }

    fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    fn write(&mut self, fd: &Fd) -> Result<bool, HandshakeError> {
        while !self.is_empty() {
            match send(fd, &self.bytes[self.sent..])? {
                0 => return Ok(false),
                n => self.sent += n,
            }
        }
        Ok(true)
    }
}

/// The end that connected. Call [`Self::step`] whenever the socket may be ready.
pub(crate) struct Initiator {
    fd: Arc<Fd>,
    binding: Binding,
    noise: Option<HandshakeState>,
    cipher: Option<TransportState>,
    out: Drain,
    reply: Fill<REPLY>,
}

impl Initiator {
    pub(crate) fn new(fd: Arc<Fd>, key: &JobKey, binding: Binding) -> Result<Self, HandshakeError> {
        let mut noise = noise(key, &binding, true).map_err(|_| HandshakeError::Key)?;
        let mut hello = prefix().to_vec();
        hello.extend(binding.fields());
        let mut message = [0; NOISE];
        noise
            .write_message(&[], &mut message)
            .map_err(|_| HandshakeError::Key)?;
        hello.extend(message);
        let out = Drain::new(hello);
        Ok(Self {
            fd,
            binding,
            noise: Some(noise),
            cipher: None,
            out,
            reply: Fill::new(),
        })
    }

    pub(crate) fn fd(&self) -> &Arc<Fd> {
        &self.fd
    }

    pub(crate) fn wants_write(&self) -> bool {
        !self.out.is_empty()
    }

    /// Goes on as far as the socket allows; `Some` when done.
    pub(crate) fn step(&mut self) -> Result<Option<Stream>, HandshakeError> {
        if !self.out.write(&self.fd)? {
            return Ok(None);
        }
        if self.cipher.is_none() {
            if !self.reply.read(&self.fd)? {
                return Ok(None);
            }
            let mut cipher = self.verify()?;
            let mut confirm = vec![0; CONFIRM];
            cipher
                .write_message(&[], &mut confirm)
                .map_err(|_| HandshakeError::Key)?;
            self.cipher = Some(cipher);
            self.out = Drain::new(confirm);
        }
        if !self.out.write(&self.fd)? {
            return Ok(None);
        }
        Ok(self
            .cipher
            .take()
            .map(|cipher| finish(self.fd.clone(), cipher, &self.binding)))
    }

    fn verify(&mut self) -> Result<TransportState, HandshakeError> {
        let reply = &self.reply.bytes;
        let status = reply[PREFIX];
        if status == Refusal::Version as u8 {
            return Err(HandshakeError::Version {
                theirs: reply[MAGIC.len()],
            });
        }
        if reply[MAGIC.len()] != VERSION {
            return Err(HandshakeError::Version {
                theirs: reply[MAGIC.len()],
            });
        }
        if status == Refusal::Unexpected as u8 {
            return Err(HandshakeError::Unexpected);
        }
        let mut noise = self.noise.take().ok_or(HandshakeError::Key)?;
        if status != 0 {
            return Err(HandshakeError::Key);
        }
        noise
            .read_message(&reply[PREFIX + 1..], &mut [])
            .map_err(|_| HandshakeError::Key)?;
        noise.into_transport_mode().map_err(|_| HandshakeError::Key)
    }
}

/// The end that was connected to.
pub(crate) struct Responder {
    fd: Arc<Fd>,
    hello: Fill<HELLO>,
    out: Drain,
    agreed: Option<(Binding, TransportState)>,
    confirm: Fill<CONFIRM>,
}

impl Responder {
    pub(crate) fn new(fd: Arc<Fd>) -> Self {
        let (hello, confirm) = (Fill::new(), Fill::new());
        Self {
            fd,
            hello,
            out: Drain::default(),
            agreed: None,
            confirm,
        }
    }

    pub(crate) fn fd(&self) -> &Arc<Fd> {
        &self.fd
    }

    pub(crate) fn wants_write(&self) -> bool {
        !self.out.is_empty()
    }

    /// Goes on as far as the socket allows; `Some` when the other side has proved that it holds the
    /// key. `expected` decides on the claimed purpose and ranks before any cryptography is done.
    pub(crate) fn step(
        &mut self,
        key: &JobKey,
        expected: impl FnOnce(&Binding) -> bool,
    ) -> Result<Option<(Binding, Stream)>, HandshakeError> {
        if self.agreed.is_none() {
            if !self.hello.read(&self.fd)? {
                return Ok(None);
            }
            self.answer(key, expected)?;
        }
        if !self.out.write(&self.fd)? || !self.confirm.read(&self.fd)? {
            return Ok(None);
        }
        let Some((binding, mut cipher)) = self.agreed.take() else {
            return Ok(None);
        };
        cipher
            .read_message(&self.confirm.bytes, &mut [0; CONFIRM])
            .map_err(|_| HandshakeError::Key)?;
        Ok(Some((binding, finish(self.fd.clone(), cipher, &binding))))
    }

    fn answer(
        &mut self,
        key: &JobKey,
        expected: impl FnOnce(&Binding) -> bool,
    ) -> Result<(), HandshakeError> {
        let hello = self.hello.bytes;
        let theirs = hello[MAGIC.len()];
        if theirs != VERSION {
            return self.refuse(Refusal::Version, HandshakeError::Version { theirs });
        }
        let (_, rest) = hello.split_at(PREFIX);
        let Some((fields, message)) = rest.split_first_chunk::<FIELDS>() else {
            return Err(HandshakeError::Stranger);
        };
        let binding = match Binding::parse(fields) {
            Some(binding) if expected(&binding) => binding,
            _ => return self.refuse(Refusal::Unexpected, HandshakeError::Unexpected),
        };
        let mut reply = prefix().to_vec();
        reply.push(0);
        let mut answer = [0; NOISE];
        let agreed = noise(key, &binding, false).and_then(|mut noise| {
            noise.read_message(message, &mut [])?;
            noise.write_message(&[], &mut answer)?;
            noise.into_transport_mode()
        });
        match agreed {
            Ok(cipher) => {
                reply.extend(answer);
                self.out = Drain::new(reply);
                self.agreed = Some((binding, cipher));
                Ok(())
            }
            Err(_) => self.refuse(Refusal::Key, HandshakeError::Key),
        }
    }

    /// Tells why, as far as the socket takes it at once; the caller closes.
    fn refuse(&self, refusal: Refusal, error: HandshakeError) -> Result<(), HandshakeError> {
        let mut reply = [0; REPLY];
        reply[..PREFIX].copy_from_slice(&prefix());
        reply[PREFIX] = refusal as u8;
        let _ = send(&self.fd, &reply);
        Err(error)
    }
}

#[cfg(test)]
mod tests;

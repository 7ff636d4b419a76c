//! One authenticated, non-blocking socket: in clear, with checksums, or sealed.

use std::{
    io::{IoSlice, IoSliceMut},
    sync::Arc,
};

use rustix::{
    io::Errno,
    net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags},
};

use super::checked::{Altered, Checked, Use};
use super::sealed::Sealed;
use crate::platform::fd::Fd;

/// A write to a closed socket is an error, not a signal.
#[cfg(not(target_vendor = "apple"))]
pub(crate) const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
#[cfg(target_vendor = "apple")]
pub(crate) const SEND_FLAGS: SendFlags = SendFlags::empty();

/// Result of one read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Got {
    Bytes(usize),
    Nothing,
    End,
}

/// Why a stream broke.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("a sealed record does not open")]
    Sealed,
    #[error("{0}")]
    Altered(#[from] Altered),
}

impl StreamError {
    /// Whether what came is not what was sent, though the connection works.
    pub(crate) fn is_alteration(&self) -> bool {
        matches!(self, Self::Sealed | Self::Altered(_))
    }
}

impl From<Errno> for StreamError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// One read from a non-blocking socket.
pub(crate) fn recv(fd: &Fd, buf: &mut [u8]) -> Result<Got, Errno> {
    loop {
        match rustix::net::recv(fd.get()?, &mut *buf, RecvFlags::empty()) {
            Ok((0, _)) => return Ok(Got::End),
            Ok((n, _)) => return Ok(Got::Bytes(n)),
            Err(Errno::AGAIN) => return Ok(Got::Nothing),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// One write to a non-blocking socket; 0 when it takes nothing now.
pub(crate) fn send(fd: &Fd, bytes: &[u8]) -> Result<usize, Errno> {
    loop {
        match rustix::net::send(fd.get()?, bytes, SEND_FLAGS) {
            Ok(n) => return Ok(n),
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// As [`recv`] into `first`, and `rest` when that is full.
fn recv_both(fd: &Fd, first: &mut [u8], rest: &mut [u8]) -> Result<Got, Errno> {
    if rest.is_empty() {
        return recv(fd, first);
    }
    let parts = &mut [IoSliceMut::new(first), IoSliceMut::new(rest)];
    loop {
        let mut control = RecvAncillaryBuffer::default();
        match rustix::net::recvmsg(fd.get()?, parts, &mut control, RecvFlags::empty()) {
            Ok(got) if got.bytes == 0 => return Ok(Got::End),
            Ok(got) => return Ok(Got::Bytes(got.bytes)),
            Err(Errno::AGAIN) => return Ok(Got::Nothing),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// As [`send`] of several pieces, one after the other.
fn send_all<const N: usize>(fd: &Fd, pieces: [&[u8]; N]) -> Result<usize, Errno> {
    let parts = pieces.map(IoSlice::new);
    loop {
        let mut control = SendAncillaryBuffer::default();
        match rustix::net::sendmsg(fd.get()?, &parts, &mut control, SEND_FLAGS) {
            Ok(n) => return Ok(n),
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// A socket whose other end has proved that it holds the job's key. Only [`crate::handshake`] makes
/// one (and, for tests, `testing`), and only it can be read from.
pub(crate) struct Stream {
    fd: Arc<Fd>,
    guard: Guard,
}

/// Protection against bytes that change in transit.
enum Guard {
    None,
    Sealed(Box<Sealed>),
    Checked(Box<Checked>),
}

impl Stream {
    /// Of a socket after a complete handshake; `sealed` if the bytes are to be encrypted.
    pub(crate) fn authenticated(fd: Arc<Fd>, sealed: Option<Sealed>) -> Self {
        Self {
            fd,
            guard: sealed.map_or(Guard::None, |sealed| Guard::Sealed(Box::new(sealed))),
        }
    }

    /// From now on bytes travel with checksums, unless they are sealed; both ends must do this before the first byte.
    pub(crate) fn check(&mut self, purpose: Use) {
        if let Guard::None = self.guard {
            self.guard = Guard::Checked(Box::new(Checked::new(purpose)));
        }
    }

    pub(crate) fn fd(&self) -> &Arc<Fd> {
        &self.fd
    }

    /// Whether bytes wait that the socket no longer knows of.
    pub(crate) fn has_buffered(&self) -> bool {
        match &self.guard {
            Guard::None => false,
            Guard::Sealed(sealed) => sealed.has_plain(),
            Guard::Checked(checked) => checked.has_plain(),
        }
    }

    pub(crate) fn is_sealed(&self) -> bool {
        matches!(self.guard, Guard::Sealed(_))
    }

    /// Whether bytes that were offered have to be offered again, even if none was taken.
    pub(crate) fn is_bound_by_offers(&self) -> bool {
        match &self.guard {
            Guard::None => false,
            Guard::Sealed(_) => true,
            Guard::Checked(checked) => checked.is_under_way(),
        }
    }

    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        match &mut self.guard {
            Guard::None => Ok(send(&self.fd, bytes)?),
            Guard::Sealed(sealed) => sealed.send(bytes, |b| send(&self.fd, b)),
            Guard::Checked(checked) => checked.send(&[], bytes, |parts| send_all(&self.fd, parts)),
        }
    }

    /// As [`Self::try_send`] of `head` and then `bytes`, of which a prefix goes.
    pub(crate) fn try_send_both(
        &mut self,
        head: &[u8],
        bytes: &[u8],
    ) -> Result<usize, StreamError> {
        match &mut self.guard {
            _ if head.is_empty() => self.try_send(bytes),
            Guard::None => Ok(send_all(&self.fd, [head, bytes])?),
            Guard::Checked(checked) => checked.send(head, bytes, |parts| send_all(&self.fd, parts)),
            Guard::Sealed(sealed) => {
                let n = sealed.send(head, |b| send(&self.fd, b))?;
                if n < head.len() {
                    return Ok(n);
                }
                Ok(n + sealed.send(bytes, |b| send(&self.fd, b))?)
            }
        }
    }

    pub(crate) fn try_recv(&mut self, buf: &mut [u8]) -> Result<Got, StreamError> {
        match &mut self.guard {
            Guard::None => Ok(recv(&self.fd, buf)?),
            Guard::Sealed(sealed) => sealed.recv(buf, |b| recv(&self.fd, b)),
            Guard::Checked(checked) => checked.recv(buf, |a, b| recv_both(&self.fd, a, b)),
        }
    }
}

//! One authenticated, non-blocking socket, plain or sealed.

use std::{io::IoSlice, sync::Arc};

use rustix::{
    io::Errno,
    net::{RecvFlags, SendAncillaryBuffer, SendFlags},
};

use super::sealed::Sealed;
use crate::platform::fd::Fd;

/// A write to a closed socket is an error, not a signal.
#[cfg(not(target_vendor = "apple"))]
pub(crate) const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
#[cfg(target_vendor = "apple")]
pub(crate) const SEND_FLAGS: SendFlags = SendFlags::empty();

/// What one read gave.
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
    #[error("a sealed record does not open: the bytes were changed on the way")]
    Sealed,
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

/// As [`send`] of `head` and then `bytes`.
fn send_both(fd: &Fd, head: &[u8], bytes: &[u8]) -> Result<usize, Errno> {
    let parts = [IoSlice::new(head), IoSlice::new(bytes)];
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
    sealed: Option<Box<Sealed>>,
}

impl Stream {
    /// Of a socket after a complete handshake; `sealed` if the bytes are to be encrypted.
    pub(crate) fn authenticated(fd: Arc<Fd>, sealed: Option<Sealed>) -> Self {
        Self {
            fd,
            sealed: sealed.map(Box::new),
        }
    }

    pub(crate) fn fd(&self) -> &Arc<Fd> {
        &self.fd
    }

    /// Whether bytes wait that the socket no longer knows of.
    pub(crate) fn has_buffered(&self) -> bool {
        self.sealed.as_ref().is_some_and(|s| s.has_plain())
    }

    pub(crate) fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        match &mut self.sealed {
            None => Ok(send(&self.fd, bytes)?),
            Some(sealed) => sealed.send(bytes, |b| send(&self.fd, b)),
        }
    }

    /// As [`Self::try_send`] of `head` and then `bytes`, of which a prefix goes.
    pub(crate) fn try_send_both(
        &mut self,
        head: &[u8],
        bytes: &[u8],
    ) -> Result<usize, StreamError> {
        match &mut self.sealed {
            _ if head.is_empty() => self.try_send(bytes),
            None => Ok(send_both(&self.fd, head, bytes)?),
            Some(sealed) => {
                let n = sealed.send(head, |b| send(&self.fd, b))?;
                if n < head.len() {
                    return Ok(n);
                }
                Ok(n + sealed.send(bytes, |b| send(&self.fd, b))?)
            }
        }
    }

    pub(crate) fn try_recv(&mut self, buf: &mut [u8]) -> Result<Got, StreamError> {
        match &mut self.sealed {
            None => Ok(recv(&self.fd, buf)?),
            Some(sealed) => sealed.recv(buf, |b| recv(&self.fd, b)),
        }
    }
}

//! Non-blocking reading and writing, and one wait for many descriptors.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;

/// Makes reads and writes of this descriptor return at once.
pub(crate) fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    Ok(rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?)
}

/// Longest file of the user's that is read: no list of hosts and no settings come near it, but a device has no end.
const TEXT_BYTES_MAX: u64 = 4 << 20;

/// A file of the user's, in full.
pub(crate) fn read_text(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    let read = std::fs::File::open(file)?
        .take(TEXT_BYTES_MAX + 1)
        .read_to_string(&mut text)?;
    if read as u64 > TEXT_BYTES_MAX {
        return Err(io::Error::other(format!(
            "it is longer than {TEXT_BYTES_MAX} bytes"
        )));
    }
    Ok(text)
}

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Got {
    Bytes(usize),
    Nothing,
    End,
}

/// Reads what is there. An error of the other side is an end.
pub(crate) fn read_some(from: &mut impl Read, buffer: &mut [u8]) -> Got {
    loop {
        return match from.read(buffer) {
            Ok(0) => Got::End,
            Ok(count) => Got::Bytes(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Got::Nothing,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => Got::End,
        };
    }
}

/// Bytes on their way to a non-blocking descriptor.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
}

impl Outbox {
    /// Bytes that wait.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Where to append.
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        if self.sent > 0 {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
        &mut self.bytes
    }

    /// Forgets what waits.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.sent = 0;
    }

    /// Writes as much as is taken; an error means that the other side is gone.
    pub(crate) fn flush(&mut self, to: &mut impl Write) -> io::Result<()> {
        while self.len() > 0 {
            match to.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.clear();
        Ok(())
    }
}

/// A descriptor and what to wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interest<'a> {
    fd: BorrowedFd<'a>,
    flags: PollFlags,
}

impl<'a> Interest<'a> {
    /// Until something can be read or the other side is gone.
    pub(crate) fn read(fd: BorrowedFd<'a>) -> Self {
        Self {
            fd,
            flags: PollFlags::IN,
        }
    }

    /// Until something can be written or the other side is gone.
    pub(crate) fn write(fd: BorrowedFd<'a>) -> Self {
        Self {
            fd,
            flags: PollFlags::OUT,
        }
    }
}

/// Sleeps until one of the descriptors is ready or the time has come.
pub(crate) fn wait(interests: &[Interest<'_>], until: Option<Instant>) -> io::Result<()> {
    let mut fds: Vec<PollFd<'_>> = interests
        .iter()
        .map(|i| PollFd::from_borrowed_fd(i.fd, i.flags))
        .collect();
    let timeout = until.map(|at| {
        // A whole millisecond more, so that the time has really come after the wait.
        let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether this can be read now, be it only to find its end.
pub(crate) fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    matches!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(count) if count > 0)
}

/// The earlier of two optional times.
pub(crate) fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_an_end_is_not_read_to_it() {
        let error = read_text(Path::new("/dev/zero")).expect_err("endless");
        assert_eq!(error.to_string(), "it is longer than 4194304 bytes");
        assert_eq!(read_text(Path::new("/dev/null")).expect("empty"), "");
    }
}

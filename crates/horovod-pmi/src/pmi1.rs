//! PMI-1: one line for each request and each answer, on a socket that the launcher has passed on.
//!
//! `finalize` is never sent. After it an MPI library of this process could not be initialised any more, and launchers do
//! without it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::{Store, StoreError};

/// A write to a closed socket is an error, not a signal.
#[cfg(not(target_vendor = "apple"))]
const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
#[cfg(target_vendor = "apple")]
const SEND_FLAGS: SendFlags = SendFlags::empty();

/// A longer line is no answer. Launchers' values have 1,024 or 4,096 bytes at most.
const LINE_MAX: usize = 1 << 14;

/// The connection to the launcher.
pub(crate) struct Pmi1 {
    name: String,
    socket: OwnedFd,
    kvs: String,
    value_max: usize,
    /// Bytes received after the last line.
    received: Vec<u8>,
    /// An exchange has ended half-way: a late answer would be taken for that of the next request.
    is_broken: bool,
}

impl Pmi1 {
    pub(crate) fn open(descriptor: i32) -> Result<Self, StoreError> {
        let name = format!("PMI-1 (PMI_FD={descriptor})");
        let owned = duplicate(descriptor).map_err(|e| StoreError {
            by: name.clone(),
            why: format!("the descriptor is not open in this process: {e}"),
        })?;
        Self::over(owned, name)
    }

    pub(crate) fn over(socket: OwnedFd, name: String) -> Result<Self, StoreError> {
        let mut store = Self {
            name,
            socket,
            kvs: String::new(),
            value_max: 0,
            received: Vec::new(),
            is_broken: false,
        };
        let init = "cmd=init pmi_version=1 pmi_subversion=1";
        store.ask(init, "response_to_init")?;
        let maxes = store.ask("cmd=get_maxes", "maxes")?;
        store.value_max = (field(&maxes, "vallen_max").and_then(|text| text.parse().ok()))
            .ok_or_else(|| store.error(format!("no vallen_max in {maxes:?}")))?;
        let answer = store.ask("cmd=get_my_kvsname", "my_kvsname")?;
        store.kvs = (field(&answer, "kvsname").map(str::to_owned))
            .ok_or_else(|| store.error(format!("no kvsname in {answer:?}")))?;
        Ok(store)
    }

    /// Sends a request and receives its answer.
    fn ask(&mut self, request: &str, answer: &str) -> Result<String, StoreError> {
        if std::mem::replace(&mut self.is_broken, true) {
            let why = "an earlier request got no answer, so the answers are out of step";
            return Err(self.error(why.to_owned()));
        }
        self.send(format!("{request}\n").as_bytes())?;
        let line = self.line()?;
        if field(&line, "cmd") != Some(answer) {
            return Err(self.error(format!("{request:?} was answered by {line:?}")));
        }
        self.is_broken = false;
        match field(&line, "rc") {
            None | Some("0") => Ok(line),
            Some(_) => Err(self.error(format!("{request:?} was refused: {line:?}"))),
        }
    }

    fn send(&self, mut bytes: &[u8]) -> Result<(), StoreError> {
        while !bytes.is_empty() {
            self.wait_for(PollFlags::OUT)?;
            match rustix::net::send(&self.socket, bytes, SEND_FLAGS) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(e) => return Err(self.error(format!("sending to the launcher failed: {e}"))),
            }
        }
        Ok(())
    }

    fn line(&mut self) -> Result<String, StoreError> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line[..end]).into_owned());
            }
            if self.received.len() > LINE_MAX {
                return Err(self.error(format!("an answer of more than {LINE_MAX} bytes")));
            }
            self.wait_for(PollFlags::IN)?;
            let mut chunk = [0; 1024];
            match rustix::io::read(&self.socket, &mut chunk) {
                Ok(0) => return Err(self.error("the launcher has closed its end".to_owned())),
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(e) => {
                    return Err(self.error(format!("receiving from the launcher failed: {e}")));
                }
            }
        }
    }

    /// Waits for the launcher, also where its socket does not block.
    fn wait_for(&self, event: PollFlags) -> Result<(), StoreError> {
        loop {
            let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), event)];
            match poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(e) => return Err(self.error(format!("waiting for the launcher failed: {e}"))),
            }
        }
    }

    fn error(&self, why: String) -> StoreError {
        StoreError {
            by: self.name.clone(),
            why,
        }
    }
}

impl Store for Pmi1 {
    fn put(&mut self, key: &str, value: &str) -> Result<(), StoreError> {
        if value.len() >= self.value_max {
            let (length, max) = (value.len(), self.value_max);
            let why =
                format!("the value of {key} has {length} bytes; it must have less than {max}");
            return Err(self.error(why));
        }
        let request = format!("cmd=put kvsname={} key={key} value={value}", self.kvs);
        self.ask(&request, "put_result").map(drop)
    }

    fn fence(&mut self) -> Result<(), StoreError> {
        self.ask("cmd=barrier_in", "barrier_out").map(drop)
    }

    fn get(&mut self, rank: u32, key: &str) -> Result<String, StoreError> {
        let request = format!("cmd=get kvsname={} key={key}", self.kvs);
        let answer = self.ask(&request, "get_result")?;
        (field(&answer, "value").map(str::to_owned))
            .ok_or_else(|| self.error(format!("no value of {key} of rank {rank} in {answer:?}")))
    }
}

/// The value of a field, whatever the order of fields is.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    (line.split_ascii_whitespace()).find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

/// A descriptor of our own for the launcher's socket, which an MPI library of this process goes on using.
fn duplicate(descriptor: i32) -> Result<OwnedFd, Errno> {
    if descriptor < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: it is borrowed for the one call, which fails where no such descriptor is open.
    rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(descriptor) }, 3)
}

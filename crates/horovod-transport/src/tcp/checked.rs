//! Checksums of a stream in clear: records of at most a stripe and its head, each with the CRC32C of its bytes.
//!
//! The checksum of TCP misses what changes before a card computes it or after a card has compared it, and one of a
//! few thousand changes in between. Here the sender computes a record's CRC while it brings the bytes into the cache
//! for the system to copy. The receiver computes the CRC again from the bytes that the system has just put there.
//!
//! A record that fits into the inbox is handed out when all of it has come and is as it was sent. Everything small is such
//! a record, and so is all that the transport or the negotiation acts upon. Of a larger one, tensor data, bytes are handed out
//! as they come, but the last only when the whole record is right. A record holds bytes of one offer only, which are
//! never of two operations, so an operation that waits for all of its bytes never ends with wrong ones.

use crc_fast::{CrcAlgorithm, Digest};
use rustix::io::Errno;

use super::stream::{Got, StreamError};

/// Most bytes of a record of data: a stripe with its head. Small enough to be in the cache when the system copies them.
const DATA_MAX: usize = LEAD_MAX + (128 << 10);
/// Most bytes at the beginning of a record that have a checksum of their own: a stripe's head.
const LEAD_MAX: usize = 64;
/// Bytes before a record: its length and checksum, those of its lead, zeros, and a checksum of all this and of the
/// record's number. The zeros keep the place of the record in cache lines.
pub(super) const HEAD: usize = 64;
const HEAD_CHECKED: usize = HEAD - 4;
/// Bytes read at once when no record is under way: all of a small one.
const DATA_INBOX: usize = 1024;
/// The same for control, where every record is so small.
const CONTROL_INBOX: usize = 8 << 10;

/// Use of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use {
    /// Tensors: much at a time.
    Data,
    /// Messages, which are acted upon one by one.
    Control,
}

/// A checksum failure: the received bytes differ from those sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Altered {
    #[error("the head of record {number} has checksum {got:08x} instead of {want:08x}")]
    Head { number: u64, got: u32, want: u32 },
    #[error("the {len} bytes of record {number} have checksum {got:08x} instead of {want:08x}")]
    Bytes {
        number: u64,
        len: u32,
        got: u32,
        want: u32,
    },
}

/// The state of both directions.
pub(crate) struct Checked {
    /// The head of the record under way, what of it has not been sent, and what of the bytes after it.
    head: [u8; HEAD],
    head_left: usize,
    left: usize,
    sent: u64,
    /// Most bytes of a record that is sent.
    record_max: usize,
    inbox: Box<[u8]>,
    inbox_at: usize,
    inbox_len: usize,
    coming: Coming,
    received: u64,
    /// How the stream ended, after bytes that came before.
    end: Option<Result<Got, Errno>>,
}

/// The record that is coming in.
struct Coming {
    len: u32,
    left: usize,
    want: u32,
    crc: Crc,
}

/// The CRC32C of bytes that come one after the other.
struct Crc(Digest);

impl Crc {
    fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    fn add(&mut self, bytes: &[u8]) -> u32 {
        self.0.update(bytes);
        self.value()
    }

    fn value(&self) -> u32 {
        // The library has one type for all widths; this one has 32 bits.
        self.0.finalize() as u32
    }
}

impl Checked {
    pub(crate) fn new(purpose: Use) -> Self {
        let (record_max, inbox) = match purpose {
            Use::Data => (DATA_MAX, DATA_INBOX),
            Use::Control => (CONTROL_INBOX - HEAD, CONTROL_INBOX),
        };
        Self {
            record_max,
            head: [0; HEAD],
            head_left: 0,
            left: 0,
            sent: 0,
            inbox: vec![0; inbox].into(),
            inbox_at: 0,
            inbox_len: 0,
            coming: Coming {
                len: 0,
                left: 0,
                want: 0,
                crc: Crc::new(),
            },
            received: 0,
            end: None,
        }
    }

    /// Sends a prefix of `first` and then `bytes`.
    ///
    /// The record is that of all bytes offered, up to its limit; if it could not be sent whole, the rest must be
    /// offered next. One of which nothing could be sent is forgotten.
    pub(crate) fn send(
        &mut self,
        first: &[u8],
        bytes: &[u8],
        mut send: impl FnMut([&[u8]; 3]) -> Result<usize, Errno>,
    ) -> Result<usize, StreamError> {
        let total = first.len() + bytes.len();
        let mut sent = 0;
        while sent < total {
            let a = &first[sent.min(first.len())..];
            let b = &bytes[sent.saturating_sub(first.len())..];
            if self.left == 0 && self.head_left == 0 {
                self.begin(a, b);
            }
            let a = &a[..a.len().min(self.left)];
            let b = &b[..b.len().min(self.left - a.len())];
            let head = &self.head[HEAD - self.head_left..];
            let offered = head.len() + a.len() + b.len();
            let n = send([head, a, b])?;
            if n == 0 && self.head_left == HEAD {
                (self.head_left, self.left) = (0, 0);
                self.sent -= 1;
            }
            let of_head = n.min(self.head_left);
            self.head_left -= of_head;
            self.left -= n - of_head;
            sent += n - of_head;
            if n < offered {
                break;
            }
        }
        Ok(sent)
    }

    fn begin(&mut self, first: &[u8], bytes: &[u8]) {
        let first = &first[..first.len().min(LEAD_MAX)];
        let bytes = &bytes[..bytes.len().min(self.record_max - first.len())];
        let mut crc = Crc::new();
        let lead_crc = crc.add(first);
        let crc = crc.add(bytes);
        self.left = first.len() + bytes.len();
        // At most DATA_MAX, which fits.
        let words = [self.left as u32, crc, first.len() as u32, lead_crc];
        for (to, word) in self.head.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let own = crc_of_head(self.sent, &self.head[..HEAD_CHECKED]);
        self.head[HEAD_CHECKED..].copy_from_slice(&own.to_le_bytes());
        self.head_left = HEAD;
        self.sent += 1;
    }

    /// Whether a record has begun to go, of which the rest must be offered next.
    pub(crate) fn is_under_way(&self) -> bool {
        self.head_left > 0 || self.left > 0
    }

    /// Whether bytes wait that the socket no longer knows of.
    pub(crate) fn has_plain(&self) -> bool {
        let waiting = self.inbox_len - self.inbox_at;
        self.end.is_some() || waiting > if self.coming.left > 0 { 0 } else { HEAD }
    }

    /// Fills a prefix of `buf`. `recv` fills two buffers one after the other.
    pub(crate) fn recv(
        &mut self,
        buf: &mut [u8],
        mut recv: impl FnMut(&mut [u8], &mut [u8]) -> Result<Got, Errno>,
    ) -> Result<Got, StreamError> {
        let mut filled = 0;
        // A read that filled less than it could has emptied the socket; more makes a new event.
        let mut emptied = false;
        while filled < buf.len() && !(emptied && filled > 0 && !self.has_plain()) {
            if self.coming.left == 0 && !self.open()? {
                let space = self.inbox.len() - (self.inbox_len - self.inbox_at);
                match self.fill(&mut recv) {
                    Ok(Got::Bytes(n)) => emptied = n < space,
                    other => return self.ended(filled, other),
                }
                continue;
            }
            let waiting = self.inbox_len - self.inbox_at;
            let rest = &mut buf[filled..];
            let most = rest.len().min(self.coming.left);
            let n = if waiting > 0 {
                let n = most.min(waiting);
                rest[..n].copy_from_slice(&self.inbox[self.inbox_at..self.inbox_at + n]);
                self.inbox_at += n;
                n
            } else {
                // If there is room for all of this record, the beginning of the next comes with it.
                let next = if most == self.coming.left {
                    self.inbox.len()
                } else {
                    0
                };
                let got = match self.end.take() {
                    Some(end) => end,
                    None => recv(&mut rest[..most], &mut self.inbox[..next]),
                };
                let Ok(Got::Bytes(n)) = got else {
                    return self.ended(filled, got);
                };
                emptied = n < most + next;
                (self.inbox_at, self.inbox_len) = (0, n.saturating_sub(most));
                n.min(most)
            };
            self.coming.crc.add(&rest[..n]);
            self.coming.left -= n;
            if self.coming.left == 0 {
                self.close()?;
            }
            filled += n;
        }
        Ok(Got::Bytes(filled))
    }

    /// Nothing more comes now, or ever: told when the bytes before have been taken.
    fn ended(&mut self, filled: usize, how: Result<Got, Errno>) -> Result<Got, StreamError> {
        if filled == 0 {
            return Ok(how?);
        }
        if how != Ok(Got::Nothing) {
            self.end = Some(how);
        }
        Ok(Got::Bytes(filled))
    }

    /// Reads what has come into the empty end of the inbox.
    fn fill(
        &mut self,
        mut recv: impl FnMut(&mut [u8], &mut [u8]) -> Result<Got, Errno>,
    ) -> Result<Got, Errno> {
        if let Some(end) = self.end.take() {
            return end;
        }
        self.inbox.copy_within(self.inbox_at..self.inbox_len, 0);
        (self.inbox_at, self.inbox_len) = (0, self.inbox_len - self.inbox_at);
        let got = recv(&mut self.inbox[self.inbox_len..], &mut [])?;
        if let Got::Bytes(n) = got {
            self.inbox_len += n;
        }
        Ok(got)
    }

    /// Begins the next record if its head is there.
    fn open(&mut self) -> Result<bool, StreamError> {
        let Some((head, body)) =
            self.inbox[self.inbox_at..self.inbox_len].split_first_chunk::<HEAD>()
        else {
            return Ok(false);
        };
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (number, want) = (self.received, word(HEAD_CHECKED));
        let got = crc_of_head(number, &head[..HEAD_CHECKED]);
        let (len, lead) = (word(0), word(8) as usize);
        // A correct peer sends neither an empty record nor one that is too long.
        let sane = len > 0 && len as usize <= DATA_MAX && lead <= LEAD_MAX.min(len as usize);
        if got != want || !sane {
            return Err(Altered::Head { number, got, want }.into());
        }
        let fits = HEAD + len as usize <= self.inbox.len();
        let (first, want) = if fits {
            (len as usize, word(4))
        } else {
            (lead, word(12))
        };
        let Some(first) = body.get(..first) else {
            return Ok(false);
        };
        let got = crc_fast::crc32_iscsi(first);
        if got != want {
            return Err(Altered::Bytes {
                number,
                len,
                got,
                want,
            }
            .into());
        }
        self.coming = Coming {
            len,
            left: len as usize,
            want: word(4),
            crc: Crc::new(),
        };
        self.inbox_at += HEAD;
        self.received += 1;
        Ok(true)
    }

    /// All of a record has come.
    fn close(&self) -> Result<(), StreamError> {
        let Coming { len, want, .. } = self.coming;
        let got = self.coming.crc.value();
        if got == want {
            return Ok(());
        }
        Err(Altered::Bytes {
            number: self.received - 1,
            len,
            got,
            want,
        }
        .into())
    }
}

/// A head's checksum, also of its place among all: a record that is lost or repeated does not fit.
fn crc_of_head(number: u64, head: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.add(&number.to_le_bytes());
    crc.add(head)
}

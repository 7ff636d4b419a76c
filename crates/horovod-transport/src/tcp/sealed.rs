//! Encryption of a stream after the handshake: records of at most 16 KiB, each authenticated.

use rustix::io::Errno;
use snow::TransportState;

use super::stream::{Got, StreamError};

/// Most plain bytes of one record.
const PLAIN_MAX: usize = 16 << 10;
const TAG: usize = 16;
const HEADER: usize = 2;
const RECORD_MAX: usize = HEADER + PLAIN_MAX + TAG;

/// The state of both directions.
pub(crate) struct Sealed {
    cipher: TransportState,
    /// The record on its way out, from `out_at`, and the plain bytes it stands for.
    out: Vec<u8>,
    out_at: usize,
    out_plain: usize,
    /// The record that is coming in.
    record: Box<[u8; RECORD_MAX]>,
    record_len: usize,
    /// Plaintext of the last record, from `plain_at`.
    plain: Box<[u8; PLAIN_MAX]>,
    plain_at: usize,
    plain_len: usize,
}

impl Sealed {
    pub(crate) fn new(cipher: TransportState) -> Self {
        Self {
            cipher,
            out: Vec::new(),
            out_at: 0,
            out_plain: 0,
            record: Box::new([0; RECORD_MAX]),
            record_len: 0,
            plain: Box::new([0; PLAIN_MAX]),
            plain_at: 0,
            plain_len: 0,
        }
    }

    pub(crate) fn has_plain(&self) -> bool {
        self.plain_at < self.plain_len
    }

    /// Seals and sends a prefix of `bytes`.
    ///
    /// It counts as sent only when its whole record has left, so that nothing stays behind here
    /// without anybody who would send it; until then the caller offers the same bytes again.
    pub(crate) fn send(
        &mut self,
        bytes: &[u8],
        mut send: impl FnMut(&[u8]) -> Result<usize, Errno>,
    ) -> Result<usize, StreamError> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let mut sent = 0;
        loop {
            if self.out_plain == 0 {
                if sent == bytes.len() {
                    return Ok(sent);
                }
                self.seal(&bytes[sent..])?;
            }
            assert!(
                sent + self.out_plain <= bytes.len(),
                "bytes offered before were withdrawn"
            );
            while self.out_at < self.out.len() {
                match send(&self.out[self.out_at..])? {
                    0 => return Ok(sent),
                    n => self.out_at += n,
                }
            }
            sent += std::mem::take(&mut self.out_plain);
        }
    }

    fn seal(&mut self, bytes: &[u8]) -> Result<(), StreamError> {
        let plain = &bytes[..bytes.len().min(PLAIN_MAX)];
        self.out.resize(HEADER + plain.len() + TAG, 0);
        let n = self
            .cipher
            .write_message(plain, &mut self.out[HEADER..])
            .map_err(|_| StreamError::Sealed)?;
        // At most PLAIN_MAX + TAG, which fits.
        self.out[..HEADER].copy_from_slice(&(n as u16).to_le_bytes());
        self.out.truncate(HEADER + n);
        (self.out_at, self.out_plain) = (0, plain.len());
        Ok(())
    }

    /// Fills a prefix of `buf` with opened bytes.
    pub(crate) fn recv(
        &mut self,
        buf: &mut [u8],
        mut recv: impl FnMut(&mut [u8]) -> Result<Got, Errno>,
    ) -> Result<Got, StreamError> {
        while !self.has_plain() {
            // Exactly what is missing of the header or the record: nothing of the next one.
            let want = match self.record_len {
                0..HEADER => HEADER,
                _ => {
                    let len = usize::from(u16::from_le_bytes([self.record[0], self.record[1]]));
                    if !(TAG + 1..=PLAIN_MAX + TAG).contains(&len) {
                        return Err(StreamError::Sealed);
                    }
                    HEADER + len
                }
            };
            if self.record_len < want {
                match recv(&mut self.record[self.record_len..want])? {
                    Got::Bytes(n) => self.record_len += n,
                    nothing_or_end => return Ok(nothing_or_end),
                }
                continue;
            }
            let n = self
                .cipher
                .read_message(&self.record[HEADER..want], &mut self.plain[..])
                .map_err(|_| StreamError::Sealed)?;
            (self.plain_at, self.plain_len, self.record_len) = (0, n, 0);
        }
        let n = buf.len().min(self.plain_len - self.plain_at);
        buf[..n].copy_from_slice(&self.plain[self.plain_at..self.plain_at + n]);
        self.plain_at += n;
        Ok(Got::Bytes(n))
    }
}

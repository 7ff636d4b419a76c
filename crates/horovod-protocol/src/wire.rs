//! Bounded reading and writing of bytes that travel between ranks.
//!
//! A [`Reader`] never panics and never reads past its input. A length that a peer claims decides no allocation before
//! the bytes for it are known to be there.

/// At most `max` bytes of a text, cut at a character.
pub fn cut_at(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Error in a peer's bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The input ended inside a value.
    #[error("message ends inside {what}")]
    Truncated {
        /// The value.
        what: &'static str,
    },
    /// A length above its bound.
    #[error("{what} is {len} long, at most {max} are allowed")]
    TooLong {
        /// The value.
        what: &'static str,
        /// Claimed length.
        len: u64,
        /// Bound.
        max: u64,
    },
    /// A value outside its range or an unknown tag.
    #[error("{what} has the impossible value {value}")]
    BadValue {
        /// The value's meaning.
        what: &'static str,
        /// The received value.
        value: u64,
    },
    /// Text that is not UTF-8.
    #[error("{what} is not UTF-8")]
    NotUtf8 {
        /// The value.
        what: &'static str,
    },
    /// No message of the kind that is expected, or a part of it above its bound.
    #[error("the bytes are no such message")]
    Malformed,
    /// Bytes after the end.
    #[error("{len} bytes after the end of the message")]
    Trailing {
        /// How many.
        len: usize,
    },
}

/// Appends values to a buffer.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Writer<'a> {
    /// Writes to the end of `out`.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out }
    }

    /// One byte.
    pub fn u8(&mut self, value: u8) {
        self.out.push(value);
    }

    /// An unsigned number, 7 bits per byte, low bits first.
    pub fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.out.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.out.push(value as u8);
    }

    /// A signed number; small magnitudes stay short.
    pub fn signed(&mut self, value: i64) {
        self.varint(((value << 1) ^ (value >> 63)) as u64);
    }

    /// Eight bytes, little endian.
    pub fn u64(&mut self, value: u64) {
        self.out.extend_from_slice(&value.to_le_bytes());
    }

    /// Exactly these bytes, without a length.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// A length and the bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.raw(bytes);
    }

    /// A length and UTF-8 text.
    pub fn str(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }
}

/// Takes values from the front of a peer's bytes.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads `bytes` from the start.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Bytes not yet read.
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// One byte.
    pub fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        let (first, rest) = self
            .rest
            .split_first()
            .ok_or(DecodeError::Truncated { what })?;
        self.rest = rest;
        Ok(*first)
    }

    /// Whether the next byte is a zero, which then is read.
    pub(crate) fn skip_zero(&mut self) -> bool {
        match self.rest {
            [0, rest @ ..] => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    /// An unsigned number as [`Writer::varint`] wrote it.
    pub fn varint(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(DecodeError::BadValue { what, value });
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(DecodeError::BadValue { what, value })
    }

    /// An unsigned number that fits into 32 bits.
    pub fn varint_u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        let value = self.varint(what)?;
        u32::try_from(value).map_err(|_| DecodeError::BadValue { what, value })
    }

    /// A signed number as [`Writer::signed`] wrote it.
    pub fn signed(&mut self, what: &'static str) -> Result<i64, DecodeError> {
        let value = self.varint(what)?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// Eight bytes, little endian.
    pub fn u64(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// `N` bytes without a length.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        let (first, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(DecodeError::Truncated { what })?;
        self.rest = rest;
        Ok(*first)
    }

    /// `len` bytes without a length of their own.
    pub fn raw(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let (first, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(DecodeError::Truncated { what })?;
        self.rest = rest;
        Ok(first)
    }

    /// How many items follow: at most `max`, and no more than the remaining bytes can hold when
    /// each takes at least `item_bytes_min`. Safe to allocate for.
    pub fn count(
        &mut self,
        max: usize,
        item_bytes_min: usize,
        what: &'static str,
    ) -> Result<usize, DecodeError> {
        let len = self.varint(what)?;
        if len > max as u64 {
            return Err(DecodeError::TooLong {
                what,
                len,
                max: max as u64,
            });
        }
        let len = len as usize;
        if len.saturating_mul(item_bytes_min) > self.rest.len() {
            return Err(DecodeError::Truncated { what });
        }
        Ok(len)
    }

    /// A length of at most `max` and that many bytes.
    pub fn bytes(&mut self, max: usize, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let len = self.count(max, 1, what)?;
        self.raw(len, what)
    }

    /// UTF-8 text of at most `max` bytes.
    pub fn str(&mut self, max: usize, what: &'static str) -> Result<&'a str, DecodeError> {
        std::str::from_utf8(self.bytes(max, what)?).map_err(|_| DecodeError::NotUtf8 { what })
    }

    /// Everything must have been read.
    pub fn finish(self) -> Result<(), DecodeError> {
        match self.rest.len() {
            0 => Ok(()),
            len => Err(DecodeError::Trailing { len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut Writer::new(&mut out));
        out
    }

    #[test]
    fn numbers_survive_at_their_limits() {
        for value in [
            0,
            1,
            127,
            128,
            300,
            u64::from(u32::MAX),
            u64::MAX - 1,
            u64::MAX,
        ] {
            let bytes = written(|w| w.varint(value));
            let mut reader = Reader::new(&bytes);
            assert_eq!(reader.varint("n"), Ok(value));
            assert_eq!(reader.finish(), Ok(()));
        }
        for value in [0, 1, -1, 63, -64, i64::MAX, i64::MIN] {
            let bytes = written(|w| w.signed(value));
            assert_eq!(Reader::new(&bytes).signed("n"), Ok(value));
        }
    }

    #[test]
    fn a_number_that_does_not_fit_is_refused() {
        let too_big = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02];
        assert!(matches!(
            Reader::new(&too_big).varint("n"),
            Err(DecodeError::BadValue { .. })
        ));
        assert!(matches!(
            Reader::new(&[0x80; 20]).varint("n"),
            Err(DecodeError::BadValue { .. })
        ));
        let five_gib = written(|w| w.varint(5 << 30));
        assert!(matches!(
            Reader::new(&five_gib).varint_u32("n"),
            Err(DecodeError::BadValue { .. })
        ));
    }

    #[test]
    fn a_claimed_length_is_checked_against_bound_and_input() {
        let long = written(|w| w.varint(1 << 40));
        assert!(matches!(
            Reader::new(&long).bytes(100, "name"),
            Err(DecodeError::TooLong {
                len: 0x100_0000_0000,
                max: 100,
                ..
            })
        ));
        let short = written(|w| w.varint(50));
        assert!(matches!(
            Reader::new(&short).bytes(100, "name"),
            Err(DecodeError::Truncated { what: "name" })
        ));
        let items = written(|w| {
            w.varint(3);
            w.raw(&[0; 5]);
        });
        assert!(Reader::new(&items).count(10, 2, "items").is_err());
        assert_eq!(Reader::new(&items).count(10, 1, "items"), Ok(3));
    }

    #[test]
    fn text_and_trailing_bytes_are_checked() {
        let bad = written(|w| w.bytes(&[0xff]));
        assert_eq!(
            Reader::new(&bad).str(9, "name"),
            Err(DecodeError::NotUtf8 { what: "name" })
        );
        assert_eq!(
            Reader::new(&[1]).finish(),
            Err(DecodeError::Trailing { len: 1 })
        );
    }
}

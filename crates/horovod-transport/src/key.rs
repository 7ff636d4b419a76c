//! The secret that all processes of one job share.

use std::fmt;

/// The job's 256-bit key: whoever holds it is part of the job.
///
/// Never printed by `Debug` and wiped when dropped.
#[derive(Clone)]
pub struct JobKey([u8; 32]);

impl JobKey {
    /// A fresh key from the operating system's randomness.
    pub fn random() -> std::io::Result<Self> {
        Ok(Self(crate::platform::random()?))
    }

    /// Reads 64 hexadecimal digits; `None` for anything else.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let high = char::from(pair[0]).to_digit(16)?;
            let low = char::from(pair[1]).to_digit(16)?;
            *byte = u8::try_from(high * 16 + low).ok()?;
        }
        Some(Self(bytes))
    }

    /// The 64 digits that [`Self::from_hex`] reads, for a child's environment.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|b| format!("{b:02x}")).collect()
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Drop for JobKey {
    fn drop(&mut self) {
        for byte in &mut self.0 {
            // SAFETY: a plain write to our own byte; volatile so that it is not optimised away.
            unsafe { std::ptr::write_volatile(byte, 0) };
        }
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::JobKey;

    #[test]
    fn survives_the_way_through_hex() {
        let key = JobKey::random().unwrap();
        let hex = key.to_hex();
        assert_eq!(hex.len(), 64);
        assert_eq!(JobKey::from_hex(&hex).unwrap().bytes(), key.bytes());
        assert_eq!(
            JobKey::from_hex(&hex.to_uppercase()).unwrap().bytes(),
            key.bytes()
        );
    }

    #[test]
    fn refuses_what_is_not_64_digits() {
        for bad in [
            "",
            "00",
            &"0".repeat(63),
            &"0".repeat(65),
            &"g".repeat(64),
            &"é".repeat(32),
        ] {
            assert!(JobKey::from_hex(bad).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn is_not_printed() {
        let key = JobKey::from_hex(&"ab".repeat(32)).unwrap();
        assert_eq!(format!("{key:?}"), "JobKey(..)");
    }
}

//! The secret that all processes of one job share.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Longest file with a key that is read.
const FILE_BYTES_MAX: u64 = 4096;

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
        Some(Self(of_hex(text)?.try_into().ok()?))
    }

    /// Reads the digits from a file that the user keeps, and that other users of the machine cannot read. The error does
    /// not repeat the content.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        // Kubernetes mounts secrets as links, so links are followed here.
        let file = File::open(path).map_err(|e| e.to_string())?;
        let found = file.metadata().map_err(|e| e.to_string())?;
        if found.mode() & 0o007 != 0 {
            return Err(format!(
                "everybody on this machine may read it (mode {:o}): chmod 600 (a Kubernetes secret: defaultMode 0440)",
                found.mode() & 0o7777
            ));
        }
        let mut text = String::new();
        let mut start = file.take(FILE_BYTES_MAX);
        start.read_to_string(&mut text).map_err(|e| e.to_string())?;
        Self::from_hex(text.trim())
            .ok_or_else(|| "its content is not 64 hex digits (`openssl rand -hex 32`)".to_owned())
    }

    /// The 64 digits that [`Self::from_hex`] reads, for a child's environment.
    pub fn to_hex(&self) -> String {
        hex(&self.0)
    }

    pub(crate) fn of_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
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

/// Two digits for each byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The bytes that [`hex`] wrote; `None` for anything else.
pub(crate) fn of_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |pair: &[u8]| u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok();
    let digits = text.as_bytes();
    (digits.len().is_multiple_of(2)).then(|| digits.chunks_exact(2).map(byte).collect())?
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::JobKey;

    #[test]
    fn a_key_file_that_everybody_may_read_is_refused() {
        let name = format!("horovod-key-test-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let with_mode = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let read = JobKey::from_file(&path);
            std::fs::remove_file(&path).unwrap();
            read
        };
        let text = format!("{}\n", "ab".repeat(32));
        assert!(with_mode(&text, 0o644).unwrap_err().contains("chmod 600"));
        assert_eq!(with_mode(&text, 0o440).unwrap().to_hex(), text.trim());
        let why = with_mode("secret", 0o600).unwrap_err();
        assert!(why.starts_with("its content is not 64 hex digits"), "{why}");
        assert!(
            JobKey::from_file(&path)
                .unwrap_err()
                .contains("No such file")
        );
    }

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

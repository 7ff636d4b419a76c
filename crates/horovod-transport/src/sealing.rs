//! A job's key on its way through channels that others can read, such as a launcher's key-value store.
//!
//! A receiver makes a pair of keys and publishes one of them; the sender encrypts the job's key with it
//! (`Noise_N_25519_ChaChaPoly_BLAKE2s`). Others who only read learn nothing. The receiver does not learn who has sealed:
//! a channel that others can write to is not safe.

use std::io;

use snow::Builder;

use crate::JobKey;
use crate::key::{hex, of_hex};

const PATTERN: &str = "Noise_N_25519_ChaChaPoly_BLAKE2s";
/// Binds what is sealed to its use.
const PROLOGUE: &[u8] = b"horovod job key 1";
/// The sender's public key and the sealed one.
const SEALED: usize = 32 + 32 + 16;

/// The side that a key is sealed for.
pub struct KeyReceiver {
    private: Vec<u8>,
    public: Vec<u8>,
}

impl KeyReceiver {
    /// A fresh pair.
    ///
    /// # Errors
    /// The system gives no randomness.
    pub fn new() -> io::Result<Self> {
        let pair = (PATTERN.parse())
            .and_then(|pattern| Builder::new(pattern).generate_keypair())
            .map_err(io::Error::other)?;
        Ok(Self {
            private: pair.private,
            public: pair.public,
        })
    }

    /// The key that senders need, as 64 hex digits.
    pub fn public(&self) -> String {
        hex(&self.public)
    }

    /// The job's key in what [`seal`] made for this receiver; `None` for anything else.
    pub fn open(&self, sealed: &str) -> Option<JobKey> {
        let sealed = of_hex(sealed)?;
        let mut state = Builder::new(PATTERN.parse().ok()?)
            .local_private_key(&self.private)
            .and_then(|builder| builder.prologue(PROLOGUE))
            .and_then(Builder::build_responder)
            .ok()?;
        let mut key = [0; 32];
        let length = state.read_message(&sealed, &mut key).ok()?;
        (length == key.len()).then(|| JobKey::of_bytes(key))
    }
}

/// The key for the receiver that has published `public`, as hex digits; `None` if that is no public key.
pub fn seal(key: &JobKey, public: &str) -> Option<String> {
    let public: [u8; 32] = of_hex(public)?.try_into().ok()?;
    let mut state = Builder::new(PATTERN.parse().ok()?)
        .remote_public_key(&public)
        .and_then(|builder| builder.prologue(PROLOGUE))
        .and_then(Builder::build_initiator)
        .ok()?;
    let mut sealed = [0; SEALED];
    let length = state.write_message(key.bytes(), &mut sealed).ok()?;
    (length == SEALED).then(|| hex(&sealed))
}

const PROOF_PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const PROOF_PROLOGUE: &[u8] = b"horovod job key 1, known here";
/// A public key and the authenticator of an empty message.
const PROOF: usize = 32 + 16;

/// A text that only a process with this key can make; as hex digits. Others learn nothing from it, but they can repeat
/// it: the text does not prove who has sent it. Send no secret because of a proof.
///
/// # Errors
/// The system gives no randomness.
pub fn prove(key: &JobKey) -> io::Result<String> {
    let mut proof = [0; PROOF];
    let length = (PROOF_PATTERN.parse())
        .and_then(|pattern| Builder::new(pattern).psk(0, key.bytes()))
        .and_then(|builder| builder.prologue(PROOF_PROLOGUE))
        .and_then(Builder::build_initiator)
        .and_then(|mut state| state.write_message(&[], &mut proof))
        .map_err(io::Error::other)?;
    Ok(hex(&proof[..length]))
}

/// Whether [`prove`] made this text of this key.
pub fn is_proof(key: &JobKey, text: &str) -> bool {
    let read = |proof: Vec<u8>| {
        (PROOF_PATTERN.parse())
            .and_then(|pattern| Builder::new(pattern).psk(0, key.bytes()))
            .and_then(|builder| builder.prologue(PROOF_PROLOGUE))
            .and_then(Builder::build_responder)
            .and_then(|mut state| state.read_message(&proof, &mut [0; PROOF]))
    };
    of_hex(text).is_some_and(|proof| read(proof).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_convinces_those_with_the_key_alone() {
        let (key, other) = (JobKey::random().unwrap(), JobKey::random().unwrap());
        let proof = prove(&key).unwrap();
        assert_eq!(proof.len(), 2 * PROOF);
        assert!(is_proof(&key, &proof));
        assert!(!is_proof(&other, &proof));
        assert!(!is_proof(&key, &proof[2..]));
        assert!(!is_proof(&key, ""));
        assert_ne!(prove(&key).unwrap(), proof);
    }

    #[test]
    fn a_key_is_opened_by_its_receiver_alone() {
        let (receiver, other) = (KeyReceiver::new().unwrap(), KeyReceiver::new().unwrap());
        let key = JobKey::random().unwrap();
        let sealed = seal(&key, &receiver.public()).unwrap();
        assert_eq!(receiver.open(&sealed).unwrap().to_hex(), key.to_hex());
        assert!(other.open(&sealed).is_none());
        assert!(!sealed.contains(&key.to_hex()));
        assert_ne!(
            seal(&key, &receiver.public()).unwrap(),
            sealed,
            "another each time"
        );
    }

    #[test]
    fn what_is_no_sealed_key_is_refused() {
        let receiver = KeyReceiver::new().unwrap();
        let sealed = seal(&JobKey::random().unwrap(), &receiver.public()).unwrap();
        let last = if sealed.ends_with('0') { "1" } else { "0" };
        let altered = format!("{}{last}", &sealed[..sealed.len() - 1]);
        for text in [
            "",
            "zz",
            "é",
            &sealed[2..],
            &format!("{sealed}00"),
            &altered,
        ] {
            assert!(receiver.open(text).is_none(), "{text}");
        }
        for text in ["", "00", "é", &format!("{}zz", &receiver.public()[2..])] {
            assert!(seal(&JobKey::random().unwrap(), text).is_none(), "{text}");
        }
    }
}

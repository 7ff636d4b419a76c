//! Questions and answers between rank 0 and the others, as out-of-band messages of the control plane; every length is
//! bounded.

use std::sync::Arc;

use horovod_protocol::DecodeError;
use horovod_protocol::wire::cut_at;
use horovod_transport::compact;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Brief, Complaint, Key, NAMES_MAX, Standing};

/// First byte, which no other out-of-band message has.
const STALL: u8 = 0xA0;
/// Longest name of an operation in an answer.
const NAME_MAX: usize = 4096;

/// Messages between ranks about a stall.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Rank 0 wants to know.
    Ask {
        /// The number of the question.
        question: u64,
    },
    /// A rank tells.
    Answer {
        /// Which question.
        question: u64,
        /// Where this rank stands.
        standing: Standing,
    },
    /// A rank has begun to wait softly, and for a while; or does so no more.
    Soft {
        /// Whether it waits.
        waits: bool,
    },
    /// Rank 0 wants to know what a rank waits for, and which of these it has asked for.
    AskBriefly {
        /// The number of the question.
        question: u64,
        /// These operations.
        #[serde(serialize_with = "put_keys", deserialize_with = "get_keys")]
        keys: Vec<Key>,
    },
    /// A rank tells.
    Brief {
        /// Which question.
        question: u64,
        /// The rank's waits.
        brief: Brief,
    },
    /// Rank 0 ends a soft wait: this rank, among others, waits for this operation.
    LetGo {
        /// The handle that is waited for.
        handle: u64,
        /// This rank waits.
        rank: u32,
        /// For this operation.
        #[serde(serialize_with = "put_name", deserialize_with = "get_name")]
        name: Arc<str>,
    },
    /// A rank's GPU does not end an operation.
    Complaint(Complaint),
}

/// Whether these bytes are meant to be a [`Message`].
pub fn is_message(bytes: &[u8]) -> bool {
    bytes.first() == Some(&STALL)
}

impl Message {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![STALL];
        compact::encode(self, &mut out);
        out
    }

    /// From bytes of another rank.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        match bytes {
            [STALL, message @ ..] => compact::decode(message),
            _ => Err(DecodeError::Malformed),
        }
    }
}

type Name = compact::Text<NAME_MAX>;

fn put_name<S: Serializer>(name: &str, to: S) -> Result<S::Ok, S::Error> {
    cut_at(name, NAME_MAX).serialize(to)
}

fn get_name<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<str>, D::Error> {
    Name::deserialize(from).map(|name| name.0.into())
}

pub(crate) fn put_key<S: Serializer>(key: &Key, to: S) -> Result<S::Ok, S::Error> {
    cut_key(key).serialize(to)
}

pub(crate) fn get_key<'de, D: Deserializer<'de>>(from: D) -> Result<Key, D::Error> {
    <(u32, Name)>::deserialize(from).map(whole_key)
}

pub(crate) fn put_keys<S: Serializer>(keys: &[Key], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(keys.iter().take(NAMES_MAX).map(cut_key))
}

pub(crate) fn get_keys<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Key>, D::Error> {
    let keys = compact::List::<(u32, Name), NAMES_MAX>::deserialize(from)?;
    Ok(keys.0.into_iter().map(whole_key).collect())
}

pub(crate) fn put_waits<S: Serializer>(waits: &[(Key, u64)], to: S) -> Result<S::Ok, S::Error> {
    let waits = waits.iter().take(NAMES_MAX);
    to.collect_seq(waits.map(|(key, handle)| (cut_key(key), handle)))
}

pub(crate) fn get_waits<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(Key, u64)>, D::Error> {
    let waits = compact::List::<((u32, Name), u64), NAMES_MAX>::deserialize(from)?;
    let waits = waits.0.into_iter();
    Ok(waits
        .map(|(key, handle)| (whole_key(key), handle))
        .collect())
}

fn cut_key((number, name): &Key) -> (u32, &str) {
    (*number, cut_at(name, NAME_MAX))
}

fn whole_key((number, name): (u32, Name)) -> Key {
    (number, name.0.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        DevicePhase, DeviceStanding, FRAMES_MAX, Frame, OnDevice, STACK_TEXT_MAX, THREADS_MAX,
        ThreadStack, Unfinished,
    };

    fn standing() -> impl Strategy<Value = Standing> {
        let text = || "\\PC{0,20}";
        let frame = (text(), any::<u32>(), text()).prop_map(|(file, line, function)| Frame {
            file,
            line,
            function,
        });
        let frames = prop::collection::vec(frame, 0..FRAMES_MAX);
        let thread = (text(), frames).prop_map(|(name, frames)| ThreadStack { name, frames });
        let name = (any::<u32>(), text()).prop_map(|(set, name)| (set, Arc::from(name)));
        (
            (any::<u32>(), any::<u64>(), any::<u64>()),
            (any::<bool>(), any::<bool>(), any::<bool>(), device()),
            (prop::collection::vec(name, 0..NAMES_MAX), any::<u64>()),
            in_hand(),
            text(),
            prop::collection::vec(thread, 0..4),
        )
            .prop_map(
                |(
                    (pid, submitted, runnable_ms),
                    (executes, blocked, waits_if_idle, device),
                    (waits_for, untold),
                    in_hand,
                    note,
                    threads,
                )| {
                    Standing {
                        pid,
                        submitted,
                        runnable_ms,
                        executes,
                        blocked,
                        waits_if_idle,
                        waits_for,
                        untold,
                        in_hand,
                        device,
                        without_stacks: note,
                        threads,
                    }
                },
            )
    }

    fn in_hand() -> impl Strategy<Value = Unfinished> {
        let name = (any::<u32>(), "\\PC{0,20}").prop_map(|(set, name)| (set, Arc::from(name)));
        let names = prop::collection::vec(name, 0..NAMES_MAX);
        (any::<u64>(), any::<u64>(), names).prop_map(|(count, callbacks, names)| Unfinished {
            count,
            names,
            callbacks,
        })
    }

    fn device() -> impl Strategy<Value = Option<DeviceStanding>> {
        let phases = vec![
            DevicePhase::Launching,
            DevicePhase::AwaitsInputs,
            DevicePhase::Runs,
        ];
        let phase = prop::sample::select(phases);
        let key = (any::<u32>(), "\\PC{0,20}").prop_map(|(set, name)| (set, Arc::from(name)));
        let at =
            (any::<u64>(), key, phase, any::<u64>()).prop_map(|(seq, key, phase, ms)| OnDevice {
                seq,
                key,
                phase,
                ms,
            });
        let standing = (any::<u64>(), prop::option::of(at));
        prop::option::of(standing.prop_map(|(given, at)| DeviceStanding {
            given: Some(given),
            at,
        }))
    }

    fn keys() -> impl Strategy<Value = Vec<Key>> {
        let name = (any::<u32>(), "\\PC{0,20}").prop_map(|(set, name)| (set, Arc::from(name)));
        prop::collection::vec(name, 0..NAMES_MAX)
    }

    proptest! {
        #[test]
        fn what_is_said_is_heard(
            question in any::<u64>(),
            standing in standing(),
            keys in keys(),
            (waits, handle, rank) in (any::<bool>(), any::<u64>(), any::<u32>()),
            pending in prop::collection::vec(any::<bool>(), 0..NAMES_MAX),
        ) {
            let waits_for = keys.iter().cloned().zip(0..).collect();
            let brief = Brief { blocked: waits, waits_for, pending };
            let name: Arc<str> = "näme".into();
            for message in [
                Message::Ask { question },
                Message::Answer { question, standing },
                Message::Soft { waits },
                Message::AskBriefly { question, keys },
                Message::Brief { question, brief },
                Message::LetGo { handle, rank, name: name.clone() },
                Message::Complaint(Complaint { seq: handle, key: (rank, name), ms: question, ends: waits }),
            ] {
                let bytes = message.encode();
                prop_assert!(is_message(&bytes));
                prop_assert_eq!(Message::decode(&bytes).unwrap(), message);
            }
        }

        #[test]
        fn garbage_is_an_error_and_no_panic(mut bytes in prop::collection::vec(any::<u8>(), 2..200), kind in 0u8..7) {
            (bytes[0], bytes[1]) = (STALL, kind);
            let _ = Message::decode(&bytes);
        }
    }

    #[test]
    fn what_is_too_long_is_cut_before_it_is_sent() {
        let long = "ä".repeat(STACK_TEXT_MAX);
        let thread = ThreadStack {
            name: long.clone(),
            frames: vec![
                Frame {
                    file: long.clone(),
                    line: 1,
                    function: long.clone(),
                };
                2 * FRAMES_MAX
            ],
        };
        let standing = Standing {
            waits_for: vec![(0, Arc::from(long.as_str())); 2 * NAMES_MAX],
            without_stacks: long,
            threads: vec![thread; 2 * THREADS_MAX],
            ..Standing::default()
        };
        let bytes = Message::Answer {
            question: 1,
            standing,
        }
        .encode();
        let Message::Answer { standing, .. } = Message::decode(&bytes).unwrap() else {
            panic!()
        };
        assert_eq!(standing.threads.len(), THREADS_MAX);
        assert_eq!(standing.threads[0].frames.len(), FRAMES_MAX);
        assert_eq!(standing.waits_for.len(), NAMES_MAX);
    }
}

//! Questions and answers between rank 0 and the others, as out-of-band messages of the control plane; every length is
//! bounded.

use std::sync::Arc;

use horovod_protocol::DecodeError;
use horovod_protocol::wire::{Reader, Writer, cut_at};

use super::{
    Brief, Complaint, DeviceStanding, FRAMES_MAX, Frame, Key, NAMES_MAX, OnDevice, Phase,
    STACK_TEXT_MAX, Standing, THREADS_MAX, ThreadStack, Unfinished,
};

/// First bytes, which no message of a timeline has.
const ASK: u8 = 0xA0;
const ANSWER: u8 = 0xA1;
const SOFT: u8 = 0xA2;
const ASK_BRIEFLY: u8 = 0xA3;
const BRIEF: u8 = 0xA4;
const LET_GO: u8 = 0xA5;
const COMPLAINT: u8 = 0xA6;
/// Longest name of an operation in an answer.
const NAME_MAX: usize = 4096;

/// Messages between ranks about a stall.
#[derive(Clone, Debug, PartialEq, Eq)]
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
        name: Arc<str>,
    },
    /// A rank's GPU does not end an operation.
    Complaint(Complaint),
}

/// Whether these bytes are meant to be a [`Message`].
pub fn is_message(bytes: &[u8]) -> bool {
    matches!(bytes.first(), Some(&(ASK..=COMPLAINT)))
}

impl Message {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let w = &mut Writer::new(&mut out);
        match self {
            Self::Ask { question } => {
                w.u8(ASK);
                w.varint(*question);
            }
            Self::Answer { question, standing } => {
                w.u8(ANSWER);
                w.varint(*question);
                put(w, standing);
            }
            Self::Soft { waits } => {
                w.u8(SOFT);
                w.u8(u8::from(*waits));
            }
            Self::AskBriefly { question, keys } => {
                w.u8(ASK_BRIEFLY);
                w.varint(*question);
                let keys = &keys[..keys.len().min(NAMES_MAX)];
                w.varint(keys.len() as u64);
                keys.iter().for_each(|key| put_key(w, key));
            }
            Self::Brief { question, brief } => {
                w.u8(BRIEF);
                w.varint(*question);
                w.u8(u8::from(brief.blocked));
                let waits_for = &brief.waits_for[..brief.waits_for.len().min(NAMES_MAX)];
                w.varint(waits_for.len() as u64);
                for (key, handle) in waits_for {
                    put_key(w, key);
                    w.varint(*handle);
                }
                let pending = &brief.pending[..brief.pending.len().min(NAMES_MAX)];
                w.varint(pending.len() as u64);
                pending.iter().for_each(|is| w.u8(u8::from(*is)));
            }
            Self::LetGo { handle, rank, name } => {
                w.u8(LET_GO);
                w.varint(*handle);
                put_key(w, &(*rank, name.clone()));
            }
            Self::Complaint(complaint) => {
                w.u8(COMPLAINT);
                w.varint(complaint.seq);
                put_key(w, &complaint.key);
                w.varint(complaint.ms);
                w.u8(u8::from(complaint.ends));
            }
        }
        out
    }

    /// From bytes of another rank.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let message = match r.u8("question or answer")? {
            ASK => Self::Ask {
                question: r.varint("question")?,
            },
            ANSWER => Self::Answer {
                question: r.varint("question")?,
                standing: get(&mut r)?,
            },
            SOFT => Self::Soft {
                waits: r.u8("whether it waits")? != 0,
            },
            ASK_BRIEFLY => {
                let question = r.varint("question")?;
                let mut keys = Vec::new();
                for _ in 0..r.count(NAMES_MAX, 2, "names")? {
                    keys.push(get_key(&mut r)?);
                }
                Self::AskBriefly { question, keys }
            }
            BRIEF => Self::Brief {
                question: r.varint("question")?,
                brief: get_brief(&mut r)?,
            },
            LET_GO => {
                let handle = r.varint("handle")?;
                let (rank, name) = get_key(&mut r)?;
                Self::LetGo { handle, rank, name }
            }
            COMPLAINT => Self::Complaint(Complaint {
                seq: r.varint("place in the order")?,
                key: get_key(&mut r)?,
                ms: r.varint("time on the GPU")?,
                ends: r.u8("whether it ends the job")? != 0,
            }),
            other => {
                return Err(DecodeError::BadValue {
                    what: "question or answer",
                    value: u64::from(other),
                });
            }
        };
        match r.remaining() {
            0 => Ok(message),
            len => Err(DecodeError::Trailing { len }),
        }
    }
}

fn put_key(w: &mut Writer<'_>, (number, name): &Key) {
    w.varint(u64::from(*number));
    w.str(cut_at(name, NAME_MAX));
}

fn get_key(r: &mut Reader<'_>) -> Result<Key, DecodeError> {
    let number = r.varint_u32("process set")?;
    Ok((number, r.str(NAME_MAX, "name")?.into()))
}

fn get_brief(r: &mut Reader<'_>) -> Result<Brief, DecodeError> {
    let mut brief = Brief {
        blocked: r.u8("whether all threads wait")? != 0,
        ..Brief::default()
    };
    for _ in 0..r.count(NAMES_MAX, 3, "names")? {
        let key = get_key(r)?;
        brief.waits_for.push((key, r.varint("handle")?));
    }
    for _ in 0..r.count(NAMES_MAX, 1, "answers")? {
        brief.pending.push(r.u8("whether it is pending")? != 0);
    }
    Ok(brief)
}

fn put(w: &mut Writer<'_>, standing: &Standing) {
    w.varint(u64::from(standing.pid));
    w.varint(standing.submitted);
    w.varint(standing.runnable_ms);
    w.u8(u8::from(standing.executes));
    w.u8(u8::from(standing.blocked) | u8::from(standing.waits_if_idle) << 1);
    let names = &standing.waits_for[..standing.waits_for.len().min(NAMES_MAX)];
    w.varint(names.len() as u64);
    names.iter().for_each(|key| put_key(w, key));
    w.varint(standing.untold);
    put_in_hand(w, &standing.in_hand);
    put_device(w, standing.device.as_ref());
    w.str(cut_at(&standing.without_stacks, STACK_TEXT_MAX));
    let threads = &standing.threads[..standing.threads.len().min(THREADS_MAX)];
    w.varint(threads.len() as u64);
    for thread in threads {
        w.str(cut_at(&thread.name, STACK_TEXT_MAX));
        let frames = &thread.frames[..thread.frames.len().min(FRAMES_MAX)];
        w.varint(frames.len() as u64);
        for frame in frames {
            w.str(cut_at(&frame.file, STACK_TEXT_MAX));
            w.varint(u64::from(frame.line));
            w.str(cut_at(&frame.function, STACK_TEXT_MAX));
        }
    }
}

/// 0: nothing was given to a GPU; 1: all of it has ended; else 2 and the phase.
fn put_device(w: &mut Writer<'_>, device: Option<&DeviceStanding>) {
    let given = device.and_then(|device| device.given);
    let (Some(device), Some(given)) = (device, given) else {
        return w.u8(0);
    };
    let Some(at) = &device.at else {
        w.u8(1);
        return w.varint(given);
    };
    w.u8(2 + at.phase as u8);
    w.varint(given);
    w.varint(at.seq);
    put_key(w, &at.key);
    w.varint(at.ms);
}

fn get_device(r: &mut Reader<'_>) -> Result<Option<DeviceStanding>, DecodeError> {
    let what = "where the GPU stands";
    let phase = match r.u8(what)? {
        0 => return Ok(None),
        1 => None,
        2 => Some(Phase::Launching),
        3 => Some(Phase::AwaitsInputs),
        4 => Some(Phase::Runs),
        other => {
            let value = u64::from(other);
            return Err(DecodeError::BadValue { what, value });
        }
    };
    let given = Some(r.varint("place in the order")?);
    let at = match phase {
        None => None,
        Some(phase) => Some(OnDevice {
            seq: r.varint("place in the order")?,
            key: get_key(r)?,
            phase,
            ms: r.varint("time on the GPU")?,
        }),
    };
    Ok(Some(DeviceStanding { given, at }))
}

fn put_in_hand(w: &mut Writer<'_>, in_hand: &Unfinished) {
    w.varint(in_hand.count);
    w.varint(in_hand.callbacks);
    let names = &in_hand.names[..in_hand.names.len().min(NAMES_MAX)];
    w.varint(names.len() as u64);
    names.iter().for_each(|key| put_key(w, key));
}

fn get_in_hand(r: &mut Reader<'_>) -> Result<Unfinished, DecodeError> {
    let mut in_hand = Unfinished {
        count: r.varint("unfinished operations")?,
        callbacks: r.varint("callbacks that have not returned")?,
        names: Vec::new(),
    };
    for _ in 0..r.count(NAMES_MAX, 2, "names")? {
        in_hand.names.push(get_key(r)?);
    }
    Ok(in_hand)
}

fn get(r: &mut Reader<'_>) -> Result<Standing, DecodeError> {
    let mut standing = Standing {
        pid: r.varint_u32("process id")?,
        submitted: r.varint("operations submitted")?,
        runnable_ms: r.varint("runnable time")?,
        executes: r.u8("whether a collective runs")? != 0,
        ..Standing::default()
    };
    let waits = r.u8("who waits")?;
    (standing.blocked, standing.waits_if_idle) = (waits & 1 != 0, waits & 2 != 0);
    for _ in 0..r.count(NAMES_MAX, 2, "names")? {
        standing.waits_for.push(get_key(r)?);
    }
    standing.untold = r.varint("names left out")?;
    standing.in_hand = get_in_hand(r)?;
    standing.device = get_device(r)?;
    standing.without_stacks = r.str(STACK_TEXT_MAX, "note")?.to_owned();
    for _ in 0..r.count(THREADS_MAX, 2, "threads")? {
        let mut thread = ThreadStack {
            name: r.str(STACK_TEXT_MAX, "thread name")?.to_owned(),
            frames: Vec::new(),
        };
        for _ in 0..r.count(FRAMES_MAX, 3, "frames")? {
            thread.frames.push(Frame {
                file: r.str(STACK_TEXT_MAX, "file")?.to_owned(),
                line: r.varint_u32("line")?,
                function: r.str(STACK_TEXT_MAX, "function")?.to_owned(),
            });
        }
        standing.threads.push(thread);
    }
    Ok(standing)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
        let phases = vec![Phase::Launching, Phase::AwaitsInputs, Phase::Runs];
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
        fn garbage_is_an_error_and_no_panic(mut bytes in prop::collection::vec(any::<u8>(), 1..200), kind in ASK..=COMPLAINT) {
            bytes[0] = kind;
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

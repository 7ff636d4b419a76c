//! The timeline's messages between rank 0 and the others, as bytes.
//!
//! A batch stands for itself: texts and threads that it names are in it, so one that is lost harms no other.

use std::collections::HashMap;
use std::sync::Arc;

use horovod_protocol::wire::{DecodeError, Reader, Writer, cut_at};
use horovod_protocol::{ProcessSetId, Rank};

use super::report::{
    Event, Item, Nanos, Report, ReportedResult, Span, StageReport, Stamp, Text, ThreadId,
};

/// Most events, items or texts of one batch: far more than fit into one of the usual size.
const COUNT_MAX: usize = 1 << 20;
/// Longest text.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// A message of the timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Rank 0: record from now on.
    Start { epoch: u64 },
    /// Rank 0: stop recording and send the rest.
    Stop { epoch: u64 },
    /// Rank 0: what time is it?
    Ping { sent: Nanos },
    /// The answer: `here` by the rank's clock, whose zero is at `zero` of its system's clock.
    Pong { sent: Nanos, here: Nanos, zero: u64 },
    /// Events; see [`Batch`].
    Batch { epoch: u64, batch: Vec<u8> },
    /// Nothing follows for this epoch.
    End { epoch: u64 },
}

const START: u8 = 0;
const END: u8 = 5;

/// Kind of a message, for ranks that only forward it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageKind {
    /// The addressee begins to record.
    Start,
    /// The sender has told everything.
    End,
    /// Neither.
    Other,
}

/// The kind of a message.
pub fn kind_of(message: &[u8]) -> MessageKind {
    match message.first() {
        Some(&START) => MessageKind::Start,
        Some(&END) => MessageKind::End,
        _ => MessageKind::Other,
    }
}

/// The number of events of a batch for which there is no room, as a message. `None` for other messages.
pub fn emptied(message: &[u8]) -> Option<Vec<u8>> {
    let Ok(Message::Batch { epoch, batch }) = Message::decode(message) else {
        return None;
    };
    let dropped = events_of(&batch)?;
    let batch = Encoder::default().finish(dropped, |_| None);
    Some(Message::Batch { epoch, batch }.encode())
}

/// How many events a batch tells of, dropped ones included; of an execution each tensor counts.
pub(super) fn events_of(batch: &[u8]) -> Option<u64> {
    let mut r = Reader::new(batch);
    let dropped = r.varint("dropped events").ok()?;
    Some(dropped.saturating_add(r.varint("kept events").ok()?))
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut w = Writer::new(&mut out);
        match self {
            Self::Start { epoch } => {
                w.u8(START);
                w.varint(*epoch);
            }
            Self::Stop { epoch } => {
                w.u8(1);
                w.varint(*epoch);
            }
            Self::Ping { sent } => {
                w.u8(2);
                w.varint(*sent);
            }
            Self::Pong { sent, here, zero } => {
                w.u8(3);
                w.varint(*sent);
                w.varint(*here);
                w.varint(*zero);
            }
            Self::Batch { epoch, batch } => {
                w.u8(4);
                w.varint(*epoch);
                w.raw(batch);
            }
            Self::End { epoch } => {
                w.u8(END);
                w.varint(*epoch);
            }
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let what = "timeline message";
        let kind = r.u8(what)?;
        let first = r.varint(what)?;
        Ok(match kind {
            START => Self::Start { epoch: first },
            1 => Self::Stop { epoch: first },
            2 => Self::Ping { sent: first },
            3 => Self::Pong {
                sent: first,
                here: r.varint(what)?,
                zero: r.varint(what)?,
            },
            4 => Self::Batch {
                epoch: first,
                batch: r.raw(r.remaining(), what)?.to_vec(),
            },
            END => Self::End { epoch: first },
            value => {
                let value = u64::from(value);
                return Err(DecodeError::BadValue { what, value });
            }
        })
    }
}

/// The content of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    /// Events that were not kept, since the last batch.
    pub(super) dropped: u64,
    /// Names of the threads that occur.
    pub(super) threads: Vec<(ThreadId, Arc<str>)>,
    pub(super) events: Vec<Event>,
}

/// Builds one batch.
#[derive(Default)]
pub(super) struct Encoder {
    texts: Vec<u8>,
    text_count: u64,
    /// By address: the same name is the same `Arc` or static.
    known: HashMap<(usize, usize), u64>,
    events: Vec<u8>,
    event_count: u64,
    /// Of an execution each tensor counts.
    reported: u64,
    threads: Vec<ThreadId>,
    last: Nanos,
    /// Keeps the addresses in `known` from being used again.
    kept: Vec<Event>,
}

impl Encoder {
    /// Bytes so far, roughly.
    pub(super) fn len(&self) -> usize {
        self.texts.len() + self.events.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.event_count == 0
    }

    pub(super) fn add(&mut self, event: Event) {
        self.event_count += 1;
        match &event {
            Event::Report(report) => {
                self.reported += report.items.len().max(1) as u64;
                self.report(report);
            }
            Event::Span(span) => {
                self.reported += 1;
                self.number(1);
                self.text(&span.name);
                self.thread(span.thread);
                self.time(span.begin);
                self.time(span.end);
                Writer::new(&mut self.events).str(clipped(&span.detail));
            }
        }
        self.kept.push(event);
    }

    /// The batch; the encoder begins anew.
    pub(super) fn finish(
        &mut self,
        dropped: u64,
        name_of: impl Fn(ThreadId) -> Option<Arc<str>>,
    ) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.len() + 64);
        let mut w = Writer::new(&mut out);
        w.varint(dropped);
        w.varint(self.reported);
        let names: Vec<_> = self
            .threads
            .iter()
            .filter_map(|t| Some((*t, name_of(*t)?)))
            .collect();
        w.varint(names.len() as u64);
        for (id, name) in names {
            w.varint(u64::from(id));
            w.str(clipped(&name));
        }
        w.varint(self.text_count);
        w.raw(&self.texts);
        w.varint(self.event_count);
        w.raw(&self.events);
        *self = Self::default();
        out
    }

    fn report(&mut self, report: &Report) {
        self.number(0);
        self.number(report.seq);
        self.number(u64::from(report.set.0));
        let members = report.members.as_deref().unwrap_or_default();
        self.number(members.len() as u64);
        for member in members {
            self.number(u64::from(member.0));
        }
        self.text(&report.op);
        self.thread(report.thread);
        self.time(report.scheduled);
        self.time(report.begin);
        self.time(report.end);
        self.number(report.bytes);
        self.number(report.stages.len() as u64);
        for stage in &report.stages {
            self.text(&stage.name);
            self.time(stage.begin);
            self.time(stage.end);
        }
        self.number(report.items.len() as u64);
        for item in &report.items {
            self.text(&item.name);
            match item.submitted {
                None => self.number(0),
                Some(stamp) => {
                    self.number(1);
                    self.time(stamp.at);
                    self.thread(stamp.thread);
                }
            }
            match &item.result {
                None => self.number(0),
                Some(result) => {
                    self.number(1);
                    self.text(&result.dtype);
                    Writer::new(&mut self.events).str(clipped(&result.shape));
                    self.number(result.bytes);
                }
            }
        }
    }

    fn number(&mut self, n: u64) {
        Writer::new(&mut self.events).varint(n);
    }

    /// Neighbouring times are close.
    fn time(&mut self, at: Nanos) {
        let difference = at.wrapping_sub(self.last).cast_signed();
        Writer::new(&mut self.events).signed(difference);
        self.last = at;
    }

    fn thread(&mut self, thread: ThreadId) {
        self.number(u64::from(thread));
        if thread != 0 && !self.threads.contains(&thread) {
            self.threads.push(thread);
        }
    }

    fn text(&mut self, text: &Text) {
        let key = (text.as_ptr().addr(), text.len());
        let next = self.text_count;
        let index = *self.known.entry(key).or_insert(next);
        if index == next {
            self.text_count += 1;
            Writer::new(&mut self.texts).str(clipped(text));
        }
        self.number(index);
    }
}

fn clipped(text: &str) -> &str {
    cut_at(text, TEXT_BYTES_MAX)
}

impl Batch {
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let dropped = r.varint("dropped events")?;
        r.varint("kept events")?; // for those who do not read on
        let mut threads = Vec::new();
        for _ in 0..r.count(COUNT_MAX, 2, "threads")? {
            let id = r.varint_u32("thread")?;
            threads.push((id, text(&mut r)?));
        }
        let mut texts = Vec::new();
        for _ in 0..r.count(COUNT_MAX, 1, "texts")? {
            texts.push(text(&mut r)?);
        }
        let mut d = Decoder { r, texts, last: 0 };
        let mut events = Vec::new();
        for _ in 0..d.count("events")? {
            events.push(d.event()?);
        }
        match d.r.remaining() {
            0 => Ok(Self {
                dropped,
                threads,
                events,
            }),
            len => Err(DecodeError::Trailing { len }),
        }
    }
}

fn text(r: &mut Reader<'_>) -> Result<Arc<str>, DecodeError> {
    let len = r.count(TEXT_BYTES_MAX, 1, "text")?;
    let bytes = r.raw(len, "text")?;
    std::str::from_utf8(bytes)
        .map(Into::into)
        .map_err(|_| DecodeError::NotUtf8 { what: "text" })
}

struct Decoder<'a> {
    r: Reader<'a>,
    texts: Vec<Arc<str>>,
    last: Nanos,
}

impl Decoder<'_> {
    fn event(&mut self) -> Result<Event, DecodeError> {
        match self.r.varint("event")? {
            0 => self.report().map(Event::Report),
            1 => Ok(Event::Span(Span {
                name: self.text()?,
                thread: self.r.varint_u32("thread")?,
                begin: self.time()?,
                end: self.time()?,
                detail: text(&mut self.r)?.to_string(),
            })),
            value => Err(DecodeError::BadValue {
                what: "event",
                value,
            }),
        }
    }

    fn report(&mut self) -> Result<Report, DecodeError> {
        let seq = self.r.varint("place in the order")?;
        let set = ProcessSetId(self.r.varint_u32("process set")?);
        let mut members = Vec::new();
        for _ in 0..self.count("members")? {
            members.push(Rank(self.r.varint_u32("member")?));
        }
        let members = (!members.is_empty()).then(|| members.into());
        let op = self.text()?;
        let thread = self.r.varint_u32("thread")?;
        let (scheduled, begin, end) = (self.time()?, self.time()?, self.time()?);
        let bytes = self.r.varint("bytes")?;
        let mut stages = Vec::new();
        for _ in 0..self.count("stages")? {
            stages.push(StageReport {
                name: self.text()?,
                begin: self.time()?,
                end: self.time()?,
            });
        }
        let mut items = Vec::new();
        for _ in 0..self.count("items")? {
            items.push(self.item()?);
        }
        Ok(Report {
            seq,
            set,
            members,
            op,
            thread,
            scheduled,
            begin,
            end,
            bytes,
            stages,
            items,
        })
    }

    fn item(&mut self) -> Result<Item, DecodeError> {
        let name = self.text()?;
        let submitted = match self.r.varint("submission")? {
            0 => None,
            _ => Some(Stamp {
                at: self.time()?,
                thread: self.r.varint_u32("thread")?,
            }),
        };
        let result = match self.r.varint("result")? {
            0 => None,
            _ => Some(ReportedResult {
                dtype: self.text()?,
                shape: Text::Shared(text(&mut self.r)?),
                bytes: self.r.varint("bytes")?,
            }),
        };
        Ok(Item {
            name,
            submitted,
            result,
        })
    }

    fn count(&mut self, what: &'static str) -> Result<usize, DecodeError> {
        self.r.count(COUNT_MAX, 1, what)
    }

    fn text(&mut self) -> Result<Text, DecodeError> {
        let what = "text";
        let value = self.r.varint(what)?;
        usize::try_from(value)
            .ok()
            .and_then(|i| self.texts.get(i))
            .map(|t| Text::Shared(t.clone()))
            .ok_or(DecodeError::BadValue { what, value })
    }

    fn time(&mut self) -> Result<Nanos, DecodeError> {
        let difference = self.r.signed("time")?;
        self.last = self.last.wrapping_add(difference.cast_unsigned());
        Ok(self.last)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names() -> impl Strategy<Value = Text> {
        any::<String>().prop_map(|s| Text::Shared(s.into()))
    }

    fn items() -> impl Strategy<Value = Item> {
        let stamp = (any::<u64>(), any::<u32>()).prop_map(|(at, thread)| Stamp { at, thread });
        let result = (names(), any::<String>(), any::<u64>()).prop_map(|(dtype, shape, bytes)| {
            ReportedResult {
                dtype,
                shape: Text::Shared(shape.into()),
                bytes,
            }
        });
        (
            names(),
            proptest::option::of(stamp),
            proptest::option::of(result),
        )
            .prop_map(|(name, submitted, result)| Item {
                name,
                submitted,
                result,
            })
    }

    fn stages() -> impl Strategy<Value = StageReport> {
        (names(), any::<u64>(), any::<u64>()).prop_map(|(name, begin, end)| StageReport {
            name,
            begin,
            end,
        })
    }

    fn events() -> impl Strategy<Value = Event> {
        let report = (
            any::<[u64; 5]>(),
            any::<[u32; 2]>(),
            proptest::collection::vec(any::<u32>().prop_map(Rank), 0..4),
            names(),
            proptest::collection::vec(stages(), 0..3),
            proptest::collection::vec(items(), 0..6),
        )
            .prop_map(
                |(
                    [seq, scheduled, begin, end, bytes],
                    [set, thread],
                    members,
                    op,
                    stages,
                    items,
                )| {
                    Event::Report(Report {
                        seq,
                        set: ProcessSetId(set),
                        members: (!members.is_empty()).then(|| members.into()),
                        op,
                        thread,
                        scheduled,
                        begin,
                        end,
                        bytes,
                        stages,
                        items,
                    })
                },
            );
        let span = (any::<[u64; 2]>(), any::<u32>(), names(), any::<String>()).prop_map(
            |([begin, end], thread, name, detail)| {
                Event::Span(Span {
                    name,
                    thread,
                    begin,
                    end,
                    detail,
                })
            },
        );
        prop_oneof![report, span]
    }

    proptest! {
        #[test]
        fn any_events_come_back_as_they_were(
            events in proptest::collection::vec(events(), 0..8),
            dropped in any::<u64>(),
        ) {
            let mut encoder = Encoder::default();
            for event in &events {
                encoder.add(event.clone());
            }
            let bytes = encoder.finish(dropped, |_| Some("a thread".into()));
            let batch = Batch::decode(&bytes).unwrap();
            prop_assert_eq!(batch.dropped, dropped);
            prop_assert_eq!(batch.events, events);
            // Cut short it is an error, not a panic.
            for len in 0..bytes.len() {
                prop_assert!(Batch::decode(&bytes[..len]).is_err());
            }
        }

        #[test]
        fn strange_bytes_are_an_error_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Batch::decode(&bytes);
            let _ = Message::decode(&bytes);
        }
    }

    #[test]
    fn of_a_batch_without_room_the_number_of_events_remains() {
        let batch = crate::temporary::batch(30);
        let empty = emptied(&batch).unwrap();
        let Ok(Message::Batch { epoch: 7, batch }) = Message::decode(&empty) else {
            panic!("{empty:?}");
        };
        let batch = Batch::decode(&batch).unwrap();
        assert_eq!((batch.dropped, batch.events.len()), (31, 0));
        assert_eq!(emptied(&Message::End { epoch: 7 }.encode()), None);
    }

    #[test]
    fn messages_come_back_as_they_were() {
        for message in [
            Message::Start { epoch: 1 },
            Message::Stop { epoch: 1 << 40 },
            Message::Ping { sent: 5 },
            Message::Pong {
                sent: 5,
                here: 6,
                zero: u64::MAX,
            },
            Message::Batch {
                epoch: 3,
                batch: vec![1, 2, 3],
            },
            Message::End { epoch: 9 },
        ] {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }
}

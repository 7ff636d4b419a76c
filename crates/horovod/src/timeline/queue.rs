//! From the threads that work to the one that writes: bounded, and nobody who works ever waits here.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use horovod_protocol::Rank;

use super::report::{Event, Executed, Nanos, Span, Text, ThreadId};

/// Records that may wait.
const RECORDS_MAX: usize = 1 << 15;
/// Tensors, and pieces of this many bytes of batches, in records that may wait: some 30 MB at the very most.
const WEIGHT_MAX: usize = 1 << 18;
const WEIGHT_BYTES: usize = 64;

/// One thing to tell.
#[derive(Debug)]
pub(super) enum Record {
    Executed(Box<Executed>),
    Span(Box<Span>),
    /// The commonest span.
    Wait {
        thread: ThreadId,
        begin: Nanos,
        end: Nanos,
    },
    Cycle(Nanos),
    /// What another rank has sent, with the difference of its clock.
    Batch {
        from: Rank,
        shift: i64,
        bytes: Vec<u8>,
    },
    /// Nothing; wakes the reader.
    Nudge,
}

impl Record {
    /// What it tells of rank `me` of `size`; nothing if it is no event of a rank.
    pub(super) fn into_event(self, me: Rank, size: u32) -> Option<Event> {
        match self {
            Self::Executed(executed) => Some(Event::Report(executed.into_report(me, size))),
            Self::Span(span) => Some(Event::Span(*span)),
            Self::Wait { thread, begin, end } => Some(Event::Span(Span {
                name: Text::Static("WAIT"),
                thread,
                begin,
                end,
                detail: String::new(),
            })),
            Self::Cycle(_) | Self::Batch { .. } | Self::Nudge => None,
        }
    }

    fn weight(&self) -> usize {
        match self {
            Self::Executed(executed) => 1 + executed.submitted.len(),
            Self::Batch { bytes, .. } => 1 + bytes.len() / WEIGHT_BYTES,
            _ => 1,
        }
    }
}

/// Records on their way to the writer.
#[derive(Debug)]
pub(super) struct Queue {
    sender: SyncSender<Record>,
    receiver: Mutex<Receiver<Record>>,
    weight: AtomicUsize,
    /// Weight of what was not kept, since somebody asked.
    dropped: AtomicU64,
}

impl Queue {
    pub(super) fn new() -> Self {
        let (sender, receiver) = sync_channel(RECORDS_MAX);
        Self {
            sender,
            receiver: Mutex::new(receiver),
            weight: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Never waits: what does not fit is counted and dropped.
    pub(super) fn push(&self, record: Record) {
        let weight = record.weight();
        let before = self.weight.fetch_add(weight, Ordering::Relaxed);
        if before + weight > WEIGHT_MAX || self.sender.try_send(record).is_err() {
            self.weight.fetch_sub(weight, Ordering::Relaxed);
            self.dropped.fetch_add(weight as u64, Ordering::Relaxed);
        }
    }

    /// Wakes the reader if it sleeps.
    pub(super) fn nudge(&self) {
        self.weight.fetch_add(1, Ordering::Relaxed);
        // When there is no room the reader does not sleep.
        if self.sender.try_send(Record::Nudge).is_err() {
            self.weight.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The other end; one reader at a time.
    pub(super) fn reader(&self) -> Reader<'_> {
        Reader {
            receiver: self.receiver.lock().unwrap_or_else(PoisonError::into_inner),
            queue: self,
        }
    }

    /// How much was dropped since the last call.
    pub(super) fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::Relaxed)
    }
}

/// Takes records out.
pub(super) struct Reader<'a> {
    receiver: MutexGuard<'a, Receiver<Record>>,
    queue: &'a Queue,
}

impl Reader<'_> {
    /// The next record, if there is one.
    pub(super) fn next(&self) -> Option<Record> {
        match self.receiver.try_recv() {
            Ok(record) => Some(self.taken(record)),
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => None,
        }
    }

    /// The next record, however long it takes to come.
    pub(super) fn wait(&self) -> Option<Record> {
        self.receiver.recv().ok().map(|record| self.taken(record))
    }

    fn taken(&self, record: Record) -> Record {
        self.queue
            .weight
            .fetch_sub(record.weight(), Ordering::Relaxed);
        record
    }
}

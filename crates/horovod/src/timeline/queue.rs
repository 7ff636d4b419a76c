//! From the threads that work to the one that writes: bounded, and nobody who works ever waits here.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use horovod_protocol::Rank;

use super::catalog::{Description, Directory};
use super::report::{Event, Executed, Nanos, Span, Text, ThreadId};

/// Records that may wait.
const RECORDS_MAX: usize = 1 << 15;
/// Tensors, and pieces of this many bytes of batches, in records that may wait: some 30 MB at the very most.
const WEIGHT_MAX: usize = 1 << 18;
const WEIGHT_BYTES: usize = 64;

/// One thing to tell.
#[derive(Debug)]
pub(super) enum Record {
    /// What a number in later executions of this recording stands for.
    Described {
        session: u64,
        number: u32,
        description: Description,
    },
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
    fn weight(&self) -> usize {
        match self {
            Self::Executed(executed) => 1 + executed.items.len(),
            Self::Batch { bytes, .. } => 1 + bytes.len() / WEIGHT_BYTES,
            _ => 1,
        }
    }
}

/// A record as its reader wants it.
#[derive(Debug)]
pub(super) enum News {
    Event(Event),
    Cycle(Nanos),
    Batch {
        from: Rank,
        shift: i64,
        bytes: Vec<u8>,
    },
    /// Nothing to write.
    Nothing,
}

/// What only one reader at a time may have.
#[derive(Debug)]
struct Out {
    receiver: Receiver<Record>,
    directory: Directory,
}

/// Records on their way to the writer.
#[derive(Debug)]
pub(super) struct Queue {
    /// Whose it is, of how many.
    me: Rank,
    size: u32,
    sender: SyncSender<Record>,
    out: Mutex<Out>,
    weight: AtomicUsize,
    /// Weight of what was not kept, since somebody asked.
    dropped: AtomicU64,
}

impl Queue {
    pub(super) fn new(me: Rank, size: u32) -> Self {
        let (sender, receiver) = sync_channel(RECORDS_MAX);
        let directory = Directory::default();
        Self {
            me,
            size,
            sender,
            out: Mutex::new(Out {
                receiver,
                directory,
            }),
            weight: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Never waits: what does not fit is counted and dropped. Whether it did fit.
    pub(super) fn push(&self, record: Record) -> bool {
        let weight = record.weight();
        let before = self.weight.fetch_add(weight, Ordering::Relaxed);
        let fits = before + weight <= WEIGHT_MAX && self.sender.try_send(record).is_ok();
        if !fits {
            self.weight.fetch_sub(weight, Ordering::Relaxed);
            self.miss(weight as u64);
        }
        fits
    }

    /// Counts what was not even pushed.
    pub(super) fn miss(&self, weight: u64) {
        self.dropped.fetch_add(weight, Ordering::Relaxed);
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
            out: self.out.lock().unwrap_or_else(PoisonError::into_inner),
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
    out: MutexGuard<'a, Out>,
    queue: &'a Queue,
}

impl Reader<'_> {
    /// A recording begins: what was told before does not belong to it.
    pub(super) fn enter(&mut self, session: u64) {
        while self.next().is_some() {}
        self.out.directory = Directory::new(session);
        self.queue.take_dropped();
    }

    /// The next record, if there is one.
    pub(super) fn next(&mut self) -> Option<News> {
        match self.out.receiver.try_recv() {
            Ok(record) => Some(self.taken(record)),
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => None,
        }
    }

    /// The next record, however long it takes to come.
    pub(super) fn wait(&mut self) -> Option<News> {
        let record = self.out.receiver.recv().ok()?;
        Some(self.taken(record))
    }

    fn taken(&mut self, record: Record) -> News {
        let weight = record.weight();
        self.queue.weight.fetch_sub(weight, Ordering::Relaxed);
        match record {
            Record::Described {
                session,
                number,
                description,
            } => {
                self.out.directory.learn(session, number, &description);
                News::Nothing
            }
            Record::Executed(executed) => {
                let (me, size) = (self.queue.me, self.queue.size);
                let report = executed.into_report(me, size, &self.out.directory);
                report.map_or(News::Nothing, |report| News::Event(Event::Report(report)))
            }
            Record::Span(span) => News::Event(Event::Span(*span)),
            Record::Wait { thread, begin, end } => News::Event(Event::Span(Span {
                name: Text::Static("WAIT"),
                thread,
                begin,
                end,
                detail: String::new(),
            })),
            Record::Cycle(at) => News::Cycle(at),
            Record::Batch { from, shift, bytes } => News::Batch { from, shift, bytes },
            Record::Nudge => News::Nothing,
        }
    }
}

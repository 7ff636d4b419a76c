//! The queue from the threads that work to the one that writes: bounded, and nobody who works ever waits here.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use horovod_protocol::Rank;

use super::catalog::{Description, Directory};
use super::report::{Event, Executed, Nanos, Span, Text, ThreadId};

/// Records that may wait.
const RECORDS_MAX: usize = 1 << 15;
/// Bytes of all that waits: some five million tensors whose steps repeat, which take a second or two to write.
const BYTES_MAX: usize = 16 << 20;

/// One thing to tell.
#[derive(Debug)]
pub(super) enum Record {
    /// The meaning of a number in later executions of this recording.
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
    /// Events that another rank has sent, with the difference of its clock.
    Batch {
        from: Rank,
        shift: i64,
        /// How many events it has.
        events: u64,
        bytes: Vec<u8>,
    },
}

impl Record {
    /// Bytes that it takes beside its place in the queue, roughly.
    fn size(&self) -> usize {
        match self {
            Self::Executed(executed) => executed.size(),
            Self::Batch { bytes, .. } => bytes.capacity(),
            Self::Span(span) => size_of::<Span>() + span.detail.capacity(),
            Self::Described { .. } | Self::Wait { .. } | Self::Cycle(_) => 0,
        }
    }

    /// How many events are missing if it is.
    fn events(&self) -> u64 {
        match self {
            Self::Executed(executed) => executed.items.len().max(1) as u64,
            Self::Batch { events, .. } => *events,
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

/// State for one reader at a time.
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
    /// Of all records that wait.
    size_now: AtomicUsize,
    /// Events that were not kept, since somebody asked.
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
            size_now: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Never waits: what does not fit is counted and dropped. Whether it did fit.
    pub(super) fn push(&self, record: Record) -> bool {
        let (size, events) = (record.size(), record.events());
        let before = self.size_now.fetch_add(size, Ordering::Relaxed);
        let fits = before + size <= BYTES_MAX && self.sender.try_send(record).is_ok();
        if !fits {
            self.size_now.fetch_sub(size, Ordering::Relaxed);
            self.miss(events);
        }
        fits
    }

    /// Counts what was not even pushed.
    pub(super) fn miss(&self, events: u64) {
        self.dropped.fetch_add(events, Ordering::Relaxed);
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

    fn taken(&mut self, record: Record) -> News {
        let size = record.size();
        self.queue.size_now.fetch_sub(size, Ordering::Relaxed);
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
            Record::Batch {
                from, shift, bytes, ..
            } => News::Batch { from, shift, bytes },
        }
    }
}

//! The timeline on every rank but 0: pack what happened, for the engine to send.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Instant;

use horovod_protocol::Rank;

use super::batch::{Encoder, Message};
use super::queue::{News, Reader};
use super::threads::{self, TimeSlice};
use super::{GATHER, LAST_EVENTS_TIMEOUT, Timeline};

/// A batch is sent when it has this many bytes.
const BATCH_BYTES: usize = 16 << 10;
/// Batches that wait for the engine to send them.
const BATCHES_MAX: usize = 16;

/// State of a rank that reports to rank 0.
pub(super) struct Member {
    zero: u64,
    /// The recording that batches belong to.
    epoch: AtomicU64,
    /// Recording has ended; the engine sends the rest and says so.
    finishing: AtomicBool,
    /// The recording that begins when that is done; 0: none.
    next_epoch: AtomicU64,
    packer_thread: Mutex<Option<PackerThread>>,
    /// Until when the rest must have been sent.
    deadline: Mutex<Option<Instant>>,
}

/// The thread that packs, and what it has packed.
struct PackerThread {
    quit: Arc<AtomicBool>,
    thread: Thread,
    packer: Arc<Mutex<Packer>>,
    batches: Receiver<Vec<u8>>,
}

impl Member {
    pub(super) fn new(zero: u64) -> Self {
        Self {
            zero,
            epoch: AtomicU64::new(0),
            finishing: AtomicBool::new(false),
            next_epoch: AtomicU64::new(0),
            packer_thread: Mutex::default(),
            deadline: Mutex::default(),
        }
    }

    /// Rank 0 said something.
    pub(super) fn handle(&self, timeline: &Arc<Timeline>, message: Message) {
        match message {
            Message::Start { epoch } if self.is_finishing() => {
                self.next_epoch.store(epoch, Ordering::Relaxed);
            }
            Message::Start { epoch } => self.begin(timeline, epoch),
            Message::Stop { epoch } if epoch == self.epoch.load(Ordering::Relaxed) => {
                self.finish(timeline);
            }
            Message::Ping { sent } => {
                let (here, zero) = (timeline.now(), self.zero);
                timeline.queue_to(Rank(0), &Message::Pong { sent, here, zero });
            }
            other => tracing::debug!("timeline: nothing to do for {other:?}"),
        }
    }

    /// Recording ends; what is left is sent, bounded in time.
    pub(super) fn finish(&self, timeline: &Timeline) {
        if !timeline.on.swap(false, Ordering::Relaxed) {
            return;
        }
        *lock(&self.deadline) = Some(Instant::now() + LAST_EVENTS_TIMEOUT);
        self.finishing.store(true, Ordering::Relaxed);
        if let Some(packer_thread) = &*lock(&self.packer_thread) {
            packer_thread.end();
        }
        timeline.has_queued.store(true, Ordering::Release);
    }

    pub(super) fn is_finishing(&self) -> bool {
        self.finishing.load(Ordering::Relaxed)
    }

    pub(super) fn is_overdue(&self) -> bool {
        lock(&self.deadline).is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// The next message for rank 0, on the engine's thread.
    pub(super) fn next_outgoing(&self, timeline: &Timeline) -> Option<Vec<u8>> {
        let mut slot = lock(&self.packer_thread);
        let packer_thread = slot.as_ref()?;
        let epoch = self.epoch.load(Ordering::Relaxed);
        if let Ok(batch) = packer_thread.batches.try_recv() {
            return Some(Message::Batch { epoch, batch }.encode());
        }
        if !self.is_finishing() {
            return None;
        }
        // The engine packs the rest, a batch at a time.
        let mut packer = lock(&packer_thread.packer);
        // The worker may have packed one more before it heard that it ends.
        let packed = packer_thread.batches.try_recv().ok();
        if let Some(batch) = packed.or_else(|| packer.rest(timeline)) {
            return Some(Message::Batch { epoch, batch }.encode());
        }
        drop(packer);
        *slot = None;
        drop(slot);
        self.finishing.store(false, Ordering::Relaxed);
        Some(Message::End { epoch }.encode())
    }

    /// After the end of a recording: the next one may have been asked for.
    pub(super) fn begin_next(&self, timeline: &Arc<Timeline>) {
        if !self.is_finishing() {
            let epoch = self.next_epoch.swap(0, Ordering::Relaxed);
            if epoch != 0 {
                self.begin(timeline, epoch);
            }
        }
    }

    /// The engine has ended: nothing can be sent any more.
    pub(super) fn close(&self) {
        if let Some(packer_thread) = lock(&self.packer_thread).take() {
            packer_thread.end();
        }
    }

    fn begin(&self, timeline: &Arc<Timeline>, epoch: u64) {
        if timeline.is_on() {
            return;
        }
        timeline.enter();
        let (sender, batches) = sync_channel(BATCHES_MAX);
        let packer = Arc::new(Mutex::new(Packer::new(sender)));
        let quit = Arc::new(AtomicBool::new(false));
        let body = {
            let (timeline, quit, packer) = (timeline.clone(), quit.clone(), packer.clone());
            move || pack(&timeline, &quit, &packer)
        };
        let thread = std::thread::Builder::new().name("horovod-timeline".into());
        match thread.spawn(body) {
            Ok(thread) => {
                *lock(&self.packer_thread) = Some(PackerThread {
                    quit,
                    thread: thread.thread().clone(),
                    packer,
                    batches,
                });
                self.epoch.store(epoch, Ordering::Relaxed);
                *lock(&self.deadline) = None;
                timeline.on.store(true, Ordering::Release);
            }
            Err(e) => {
                tracing::warn!("timeline: this rank is missing, its thread did not start: {e}");
                timeline.queue_to(Rank(0), &Message::End { epoch });
            }
        }
    }
}

impl PackerThread {
    /// It is not joined: on a busy machine it may be long before a thread that gives way to all others runs.
    fn end(&self) {
        self.quit.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// The body of the packing thread.
fn pack(timeline: &Timeline, quit: &AtomicBool, packer: &Mutex<Packer>) {
    threads::lower_priority();
    while !quit.load(Ordering::Acquire) {
        // One wake-up and one message for many events.
        std::thread::park_timeout(GATHER);
        let slice = TimeSlice::begin();
        loop {
            // The engine waits for no more than one record.
            let mut packer = lock(packer);
            if quit.load(Ordering::Acquire) {
                return;
            }
            let step = packer.step(timeline);
            drop(packer);
            if step.sent {
                timeline.has_queued.store(true, Ordering::Release);
                timeline.notifier.notify();
            }
            if !step.more || slice.is_over() {
                break;
            }
            // As in `Layout::put`.
            std::thread::yield_now();
        }
    }
}

/// Makes batches of records.
struct Packer {
    encoder: Encoder,
    batches: SyncSender<Vec<u8>>,
    /// There was no room for it.
    unsent: Option<Vec<u8>>,
}

/// Result of packing one record.
struct Packed {
    /// There is something for the engine.
    sent: bool,
    /// There may be another record, and room for it.
    more: bool,
}

impl Packer {
    fn new(batches: SyncSender<Vec<u8>>) -> Self {
        Self {
            encoder: Encoder::default(),
            batches,
            unsent: None,
        }
    }

    /// Packs one record; sends the batch when it is full or there are no more.
    fn step(&mut self, timeline: &Timeline) -> Packed {
        let any = self.unsent.is_none() && self.add_one(&mut timeline.queue().reader());
        let ends = self.is_full() || (!any && !self.encoder.is_empty());
        let batch = match self.unsent.take() {
            None if ends => Some(self.take(timeline)),
            unsent => unsent,
        };
        let sent = batch.is_some_and(|batch| match self.batches.try_send(batch) {
            Ok(()) => true,
            Err(TrySendError::Full(batch)) => {
                self.unsent = Some(batch);
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        });
        let more = any && self.unsent.is_none();
        Packed { sent, more }
    }

    /// The next batch of what is left; `None` when nothing is.
    fn rest(&mut self, timeline: &Timeline) -> Option<Vec<u8>> {
        if let Some(batch) = self.unsent.take() {
            return Some(batch);
        }
        let mut reader = timeline.queue().reader();
        while !self.is_full() && self.add_one(&mut reader) {}
        drop(reader);
        (!self.encoder.is_empty()).then(|| self.take(timeline))
    }

    fn is_full(&self) -> bool {
        self.encoder.len() >= BATCH_BYTES
    }

    fn take(&mut self, timeline: &Timeline) -> Vec<u8> {
        let dropped = timeline.queue().take_dropped();
        self.encoder.finish(dropped, |t| timeline.threads.name(t))
    }

    fn add_one(&mut self, reader: &mut Reader<'_>) -> bool {
        let news = reader.next();
        let any = news.is_some();
        if let Some(News::Event(event)) = news {
            self.encoder.add(event);
        }
        any
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

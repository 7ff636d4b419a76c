//! The timeline on every rank but 0: pack what happened, for the engine to send.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use horovod_protocol::Rank;

use super::batch::{Encoder, Message};
use super::queue::{News, Queue, Reader};
use super::{GATHER, LAST_EVENTS_PATIENCE, Timeline, threads};

/// A batch is sent when it has this many bytes.
const BATCH_BYTES: usize = 32 << 10;
/// Batches that wait for the engine to send them.
const BATCHES_MAX: usize = 8;

/// State of a rank that reports to rank 0.
pub(super) struct Member {
    zero: u64,
    /// The recording that batches belong to.
    epoch: AtomicU64,
    /// Recording has ended; the engine sends the rest and says so.
    finishing: AtomicBool,
    /// The recording that begins when that is done; 0: none.
    next_epoch: AtomicU64,
    worker: Mutex<Option<Worker>>,
    /// Until when the rest must have been sent.
    deadline: Mutex<Option<Instant>>,
}

/// The thread that packs, while there is one.
struct Worker {
    quit: Arc<AtomicBool>,
    thread: JoinHandle<()>,
    batches: Receiver<Vec<u8>>,
}

impl Member {
    pub(super) fn new(zero: u64) -> Self {
        Self {
            zero,
            epoch: AtomicU64::new(0),
            finishing: AtomicBool::new(false),
            next_epoch: AtomicU64::new(0),
            worker: Mutex::default(),
            deadline: Mutex::default(),
        }
    }

    /// Rank 0 said something.
    pub(super) fn heard(&self, timeline: &Arc<Timeline>, message: Message) {
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
                timeline.mail_to(Rank(0), &Message::Pong { sent, here, zero });
            }
            other => tracing::debug!("timeline: nothing to do for {other:?}"),
        }
    }

    /// Recording ends; what is left is sent, bounded in time.
    pub(super) fn finish(&self, timeline: &Timeline) {
        if !timeline.on.swap(false, Ordering::Relaxed) {
            return;
        }
        *lock(&self.deadline) = Some(Instant::now() + LAST_EVENTS_PATIENCE);
        self.finishing.store(true, Ordering::Relaxed);
        if let Some(worker) = &*lock(&self.worker) {
            worker.end(timeline.queue());
        }
        timeline.mail.store(true, Ordering::Release);
    }

    pub(super) fn is_finishing(&self) -> bool {
        self.finishing.load(Ordering::Relaxed)
    }

    pub(super) fn is_overdue(&self) -> bool {
        lock(&self.deadline).is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// The next message for rank 0, on the engine's thread.
    pub(super) fn next_mail(&self, timeline: &Timeline) -> Option<Vec<u8>> {
        let mut slot = lock(&self.worker);
        let worker = slot.as_ref()?;
        let epoch = self.epoch.load(Ordering::Relaxed);
        match worker.batches.try_recv() {
            Ok(batch) => return Some(Message::Batch { epoch, batch }.encode()),
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) if !self.is_finishing() => return None,
            Err(TryRecvError::Disconnected) => {}
        }
        // The worker has ended: the engine packs the rest, a batch at a time.
        let queue = timeline.queue();
        let mut packer = Packer::default();
        if let Some(batch) = packer
            .fill(&mut queue.reader(), || false)
            .then(|| packer.take(timeline))
        {
            return Some(Message::Batch { epoch, batch }.encode());
        }
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
    pub(super) fn close(&self, timeline: &Timeline) {
        if let Some(worker) = lock(&self.worker).take() {
            worker.end(timeline.queue());
            // Without it the worker cannot be kept waiting.
            drop(worker.batches);
            if worker.thread.join().is_err() {
                tracing::error!("the timeline's thread ended by a panic");
            }
        }
    }

    fn begin(&self, timeline: &Arc<Timeline>, epoch: u64) {
        if timeline.is_on() {
            return;
        }
        timeline.enter();
        let (sender, batches) = sync_channel(BATCHES_MAX);
        let quit = Arc::new(AtomicBool::new(false));
        let body = {
            let (timeline, quit) = (timeline.clone(), quit.clone());
            move || pack(&timeline, &quit, sender)
        };
        let thread = std::thread::Builder::new().name("horovod-timeline".into());
        match thread.spawn(body) {
            Ok(thread) => {
                *lock(&self.worker) = Some(Worker {
                    quit,
                    thread,
                    batches,
                });
                self.epoch.store(epoch, Ordering::Relaxed);
                *lock(&self.deadline) = None;
                timeline.on.store(true, Ordering::Release);
            }
            Err(e) => {
                tracing::warn!("timeline: this rank is missing, its thread did not start: {e}");
                timeline.mail_to(Rank(0), &Message::End { epoch });
            }
        }
    }
}

impl Worker {
    fn end(&self, queue: &Queue) {
        self.quit.store(true, Ordering::Release);
        queue.nudge();
        self.thread.thread().unpark();
    }
}

/// The body of the packing thread.
fn pack(timeline: &Timeline, quit: &AtomicBool, batches: SyncSender<Vec<u8>>) {
    threads::give_way();
    let mut packer = Packer::default();
    let ends = || quit.load(Ordering::Acquire);
    let mut reader = timeline.queue().reader();
    while let Some(first) = reader.wait() {
        packer.add(first);
        if !ends() {
            // Let some more gather: one wake-up and one message for many events.
            std::thread::park_timeout(GATHER);
        }
        while packer.fill(&mut reader, ends) {
            if batches.send(packer.take(timeline)).is_err() {
                return;
            }
            timeline.mail.store(true, Ordering::Release);
            timeline.doorbell.ring();
        }
        if ends() {
            break;
        }
    }
    drop(reader);
    drop(batches);
    // The engine goes on from here.
    timeline.mail.store(true, Ordering::Release);
    timeline.doorbell.ring();
}

/// Makes batches of records.
#[derive(Default)]
struct Packer {
    encoder: Encoder,
}

impl Packer {
    fn add(&mut self, news: News) {
        if let News::Event(event) = news {
            self.encoder.add(event);
        }
    }

    /// Takes records until there are no more or the batch is full; whether there is something to send.
    fn fill(&mut self, reader: &mut Reader<'_>, ends: impl Fn() -> bool) -> bool {
        while self.encoder.len() < BATCH_BYTES && !ends() {
            let Some(news) = reader.next() else { break };
            self.add(news);
            // As in `Layout::put`.
            std::thread::yield_now();
        }
        !self.encoder.is_empty()
    }

    fn take(&mut self, timeline: &Timeline) -> Vec<u8> {
        let dropped = timeline.queue().take_dropped();
        self.encoder.finish(dropped, |t| timeline.threads.name(t))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

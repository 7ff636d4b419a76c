//! The timeline on rank 0: one file from the events of all ranks.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use horovod_protocol::Rank;

use super::batch::{Batch, Message, events_of};
use super::clock::Clock;
use super::layout::{Cast, Layout};
use super::queue::{News, Record};
use super::report::{Event, ThreadId};
use super::threads::{self, TimeSlice};
use super::{GATHER, LAST_EVENTS_TIMEOUT, Timeline};

/// Questions for the time when a recording starts; later one with every batch.
const FIRST_QUESTIONS: usize = 8;
/// How long to wait for others' last events before writing what has come meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// State of the rank that writes.
pub(super) struct Leader {
    cast: Cast,
    /// Which ranks share this one's host, and hence its clock.
    neighbours: Vec<bool>,
    zero: u64,
    /// Held while recording starts or stops.
    session: Mutex<Session>,
    peers: Mutex<Peers>,
    peers_changed: Condvar,
    file: Mutex<Option<Layout>>,
    /// Why the file of this recording is written no longer.
    failure: Mutex<Option<String>>,
}

#[derive(Default)]
struct Session {
    path: Option<PathBuf>,
    /// The last file that was not written to its end, and why.
    broken: Option<(PathBuf, String)>,
    worker: Option<(Arc<AtomicBool>, Thread)>,
}

struct Peers {
    /// Counts recordings, so that what is late is told from what is new.
    epoch: u64,
    clocks: Vec<Clock>,
    /// Ranks that have sent everything, or are lost.
    ended: Vec<bool>,
    gone: Vec<bool>,
    deadline: Option<Instant>,
    /// The engine has ended.
    closed: bool,
}

impl Peers {
    fn all_ended(&self) -> bool {
        self.closed || self.ended.iter().all(|ended| *ended)
    }
}

impl Leader {
    pub(super) fn new(cast: Cast, neighbours: Vec<bool>, zero: u64) -> Self {
        let size = cast.ranks.len();
        Self {
            cast,
            neighbours,
            zero,
            session: Mutex::default(),
            peers: Mutex::new(Peers {
                epoch: 0,
                clocks: vec![Clock::default(); size],
                ended: vec![true; size],
                gone: vec![false; size],
                deadline: None,
                closed: false,
            }),
            peers_changed: Condvar::new(),
            file: Mutex::default(),
            failure: Mutex::default(),
        }
    }

    pub(super) fn start(&self, timeline: &Arc<Timeline>, path: &Path) {
        let mut session = lock(&self.session);
        if session.path.as_deref() == Some(path) && lock(&self.file).is_some() {
            return;
        }
        if let Err(why) = self.begin(timeline, &mut session, path) {
            tracing::error!("{why}");
        }
    }

    /// As `start`, unless something is recorded.
    pub(super) fn start_trace(&self, timeline: &Arc<Timeline>, path: &Path) -> Result<(), String> {
        let mut session = lock(&self.session);
        if session.path.is_some() {
            return Err("a timeline is being recorded already".into());
        }
        self.begin(timeline, &mut session, path)
    }

    fn begin(
        &self,
        timeline: &Arc<Timeline>,
        session: &mut Session,
        path: &Path,
    ) -> Result<(), String> {
        self.finish(timeline, session);
        let layout = Layout::create(path, self.cast.clone()).map_err(|e| {
            format!(
                "Error opening the Horovod timeline file {}, will not write a timeline: {e}",
                path.display()
            )
        })?;
        timeline.enter();
        *lock(&self.file) = Some(layout);
        *lock(&self.failure) = None;
        let quit = Arc::new(AtomicBool::new(false));
        let body = {
            let (timeline, quit) = (timeline.clone(), quit.clone());
            move || {
                if let super::Role::Leader(leader) = &timeline.role {
                    leader.work(&timeline, &quit);
                }
            }
        };
        let thread = std::thread::Builder::new().name("horovod-timeline".into());
        match thread.spawn(body) {
            Ok(thread) => session.worker = Some((quit, thread.thread().clone())),
            Err(e) => {
                *lock(&self.file) = None;
                return Err(format!(
                    "cannot start the timeline's thread, will not write a timeline: {e}"
                ));
            }
        }
        session.path = Some(path.to_owned());
        let mut peers = lock(&self.peers);
        peers.epoch += 1;
        peers.deadline = None;
        peers.ended = peers.gone.clone();
        peers.ended[0] = true;
        let epoch = peers.epoch;
        drop(peers);
        for rank in self.others() {
            timeline.queue_to(rank, &Message::Start { epoch });
            self.ask_for_time(timeline, rank);
        }
        timeline.on.store(true, Ordering::Release);
        timeline.notifier.notify();
        Ok(())
    }

    /// As `stop`, if this file is being recorded: the script may have begun another one meanwhile.
    pub(super) fn stop_trace(&self, timeline: &Timeline, path: &Path) -> Result<(), String> {
        let mut session = lock(&self.session);
        if session.path.as_deref() == Some(path) {
            self.finish(timeline, &mut session);
        }
        let broken = session.broken.take_if(|(broken, _)| broken == path);
        broken.map_or(Ok(()), |(_, why)| Err(why))
    }

    /// Whether there was anything to stop.
    pub(super) fn stop(&self, timeline: &Timeline) -> bool {
        let mut session = lock(&self.session);
        self.finish(timeline, &mut session)
    }

    pub(super) fn close(&self, timeline: &Timeline) {
        lock(&self.peers).closed = true;
        self.peers_changed.notify_all();
        let mut session = lock(&self.session);
        self.finish(timeline, &mut session);
    }

    /// This rank has nothing more to tell.
    pub(super) fn ended(&self, rank: Rank) {
        let mut peers = lock(&self.peers);
        if let Some(gone) = peers.gone.get_mut(rank.index()) {
            *gone = true;
        }
        if let Some(ended) = peers.ended.get_mut(rank.index()) {
            *ended = true;
        }
        drop(peers);
        self.peers_changed.notify_all();
    }

    /// At the end of the job: all others have told everything, or were waited for long enough.
    pub(super) fn is_settled(&self) -> bool {
        let mut peers = lock(&self.peers);
        if peers.all_ended() {
            return true;
        }
        let now = Instant::now();
        now >= *peers.deadline.get_or_insert(now + LAST_EVENTS_TIMEOUT)
    }

    pub(super) fn handle(&self, timeline: &Timeline, from: Rank, message: Message) {
        let now = timeline.now();
        let mut peers = lock(&self.peers);
        let current = peers.epoch;
        let Some(clock) = peers.clocks.get_mut(from.index()) else {
            return;
        };
        match message {
            Message::Pong { sent, here, zero } => {
                if self.neighbours.get(from.index()) == Some(&true) {
                    clock.same_host(zero.wrapping_sub(self.zero).cast_signed());
                } else {
                    clock.answered(sent, here, now);
                    let more = clock.answers() < FIRST_QUESTIONS;
                    drop(peers);
                    if more {
                        self.ask_for_time(timeline, from);
                    }
                }
            }
            Message::Batch { epoch, batch } if epoch == current => {
                let (shift, _) = clock.shift();
                drop(peers);
                timeline.push(Record::Batch {
                    from,
                    shift,
                    events: events_of(&batch).unwrap_or(1),
                    bytes: batch,
                });
                if self.neighbours.get(from.index()) != Some(&true) {
                    self.ask_for_time(timeline, from);
                }
            }
            Message::End { epoch } if epoch == current => {
                peers.ended[from.index()] = true;
                drop(peers);
                self.peers_changed.notify_all();
            }
            other => tracing::debug!("timeline: {from} is late with {other:?}"),
        }
    }

    fn others(&self) -> impl Iterator<Item = Rank> + use<> {
        (1..u32::try_from(self.neighbours.len()).unwrap_or(0)).map(Rank)
    }

    fn ask_for_time(&self, timeline: &Timeline, rank: Rank) {
        let sent = timeline.now();
        timeline.queue_to(rank, &Message::Ping { sent });
    }

    /// Ends the recording, if there is one: waits a bounded time for the other ranks' last events, then writes all
    /// that waits.
    fn finish(&self, timeline: &Timeline, session: &mut Session) -> bool {
        let Some(path) = session.path.take() else {
            return false;
        };
        timeline.on.store(false, Ordering::Relaxed);
        if let Some((quit, thread)) = session.worker.take() {
            // It is not joined: on a busy machine it may be long before a thread that gives way to all others runs.
            quit.store(true, Ordering::Release);
            thread.unpark();
        }
        let goes_on = AtomicBool::new(false);
        self.collect_last_events(timeline, &goes_on);
        while self.write_some(timeline, &goes_on) {}
        let layout = lock(&self.file).take();
        if let Some(mut layout) = layout
            && let Err(e) = self.write_clocks(&mut layout).and_then(|()| layout.close())
        {
            tracing::warn!("The timeline {} lacks its end: {e}", path.display());
            *lock(&self.failure) = Some(e.to_string());
        }
        session.broken = lock(&self.failure).take().map(|why| (path, why));
        true
    }

    /// Writes meanwhile.
    fn collect_last_events(&self, timeline: &Timeline, goes_on: &AtomicBool) {
        let mut peers = lock(&self.peers);
        if peers.all_ended() {
            return;
        }
        let epoch = peers.epoch;
        for rank in self.others() {
            timeline.queue_to(rank, &Message::Stop { epoch });
        }
        timeline.notifier.notify();
        let deadline = Instant::now() + LAST_EVENTS_TIMEOUT;
        while !peers.all_ended() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let late: Vec<usize> = (0..peers.ended.len())
                    .filter(|r| !peers.ended[*r])
                    .collect();
                tracing::warn!("timeline: ranks {late:?} did not send their last events in time");
                return;
            }
            drop(peers);
            let wrote = self.write_some(timeline, goes_on);
            peers = lock(&self.peers);
            if !wrote && !peers.all_ended() {
                peers = self
                    .peers_changed
                    .wait_timeout(peers, left.min(POLL_INTERVAL))
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
    }

    fn write_clocks(&self, layout: &mut Layout) -> io::Result<()> {
        let clocks = lock(&self.peers).clocks.clone();
        for (rank, clock) in self.others().zip(clocks.iter().skip(1)) {
            let (shift, error) = clock.shift();
            if error != u64::MAX {
                layout.clock(rank, shift, error)?;
            }
        }
        Ok(())
    }

    /// The body of the writing thread.
    fn work(&self, timeline: &Timeline, quit: &AtomicBool) {
        threads::lower_priority();
        while !quit.load(Ordering::Acquire) {
            // Nobody wakes it for an event; so it also writes many at a time.
            std::thread::park_timeout(GATHER);
            let slice = TimeSlice::begin();
            while self.write_some(timeline, quit) && !slice.is_over() {}
        }
    }

    /// Writes one record; `false` if there was none, or its writer shall quit. The end of the recording waits for no
    /// more than one record.
    fn write_some(&self, timeline: &Timeline, quit: &AtomicBool) -> bool {
        let mut file = lock(&self.file);
        if quit.load(Ordering::Acquire) {
            return false;
        }
        let news = timeline.queue().reader().next();
        let any = news.is_some();
        // Without a file they are only taken out of the way.
        if let Some(layout) = &mut *file
            && let Err(e) = self.write(timeline, layout, news)
        {
            let failed = file.take();
            *lock(&self.failure) = Some(e.to_string());
            drop(file);
            timeline.on.store(false, Ordering::Relaxed);
            tracing::warn!(
                "The timeline {} cannot be written any more ({e}): recording ends here, training goes on",
                failed
                    .map(|l| l.path().display().to_string())
                    .unwrap_or_default()
            );
            let epoch = lock(&self.peers).epoch;
            for rank in self.others() {
                timeline.queue_to(rank, &Message::Stop { epoch });
            }
            timeline.notifier.notify();
        }
        any
    }

    /// Writes all events known by now.
    fn write(
        &self,
        timeline: &Timeline,
        layout: &mut Layout,
        news: Option<News>,
    ) -> io::Result<()> {
        if let Some(news) = news {
            return self.write_one(timeline, layout, news);
        }
        let dropped = timeline.queue().take_dropped();
        if dropped > 0 {
            layout.dropped(Rank(0), dropped, timeline.now())?;
        }
        layout.flush()
    }

    fn write_one(&self, timeline: &Timeline, layout: &mut Layout, news: News) -> io::Result<()> {
        match news {
            News::Nothing => Ok(()),
            News::Cycle(at) => layout.cycle(at),
            News::Batch { from, shift, bytes } => match Batch::decode(&bytes) {
                Ok(batch) => layout.batch(from, batch, shift),
                Err(e) => {
                    tracing::warn!("timeline: {from} sent a batch that cannot be read: {e}");
                    Ok(())
                }
            },
            News::Event(event) => {
                introduce(timeline, layout, &event)?;
                layout.event(Rank(0), event, 0)
            }
        }
    }
}

/// Gives the threads of an event of this process their names.
fn introduce(timeline: &Timeline, layout: &mut Layout, event: &Event) -> io::Result<()> {
    let mut known = 0;
    let mut name = |thread: ThreadId| {
        if thread != known {
            known = thread;
            if let Some(name) = timeline.threads.name(thread) {
                return layout.thread(Rank(0), thread, &name);
            }
        }
        Ok(())
    };
    match event {
        Event::Span(span) => name(span.thread),
        Event::Report(report) => {
            name(report.thread)?;
            let mut stamps = report.items.iter().filter_map(|i| i.submitted);
            stamps.try_for_each(|stamp| name(stamp.thread))
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

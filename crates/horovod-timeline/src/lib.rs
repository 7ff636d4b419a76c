//! The timeline: what happened to each tensor on every rank, as a trace that Perfetto and chrome://tracing show.
//!
//! The engine hands over what it has in hand anyway (an execution that was carried out, the times of its submissions)
//! through a bounded queue that never makes it wait. A thread of lowest priority, which exists only while something
//! is recorded, does the rest. On rank 0 it writes the file. On the others it packs batches, which the engine sends to
//! rank 0 when nothing of the negotiation waits to be sent. Rank 0 says when recording starts and stops.
//!
//! An internal part of horovod-rs: programs use the crate `horovod`, and this interface may change in any version.
#![forbid(unsafe_code)]

mod batch;
mod catalog;
mod clock;
mod items;
mod layout;
mod leader;
mod member;
mod object;
mod queue;
mod report;
#[cfg(any(test, feature = "testing"))]
mod temporary;
#[cfg(feature = "testing")]
pub mod testing;
mod threads;
mod trace;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use horovod_protocol::{ExecItem, Rank};
use horovod_transport::{Notifier, Topology};

use batch::Message;
use catalog::Description;
use layout::{Cast, Member as CastMember};
use queue::{Queue, Record};
use report::{Span, Text, ThreadId};
use threads::Threads;

pub use batch::{MessageKind, emptied, kind_of};
pub use catalog::Catalog;
pub use items::Items;
pub use report::{Executed, Nanos, StageReport, Stamp, op_name};

/// Where rank 0 writes to when the job starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TimelineSetting {
    /// Nowhere yet: `start_timeline` may come.
    Dynamic,
    /// To this file.
    File(PathBuf),
}

/// How long events gather before they are written or sent.
const GATHER: Duration = Duration::from_millis(50);
/// Time limit for the last events of other ranks, on rank 0 and on ranks that forward events. A lost rank is known by
/// its closed connection and not waited for; the limit is for ranks that are stopped or cut off. It is long, as a
/// silent rank counts as alive elsewhere by default, and slow ranks are not to lose events.
pub const LAST_EVENTS_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeline of one rank and one generation.
pub struct Timeline {
    /// Something is recorded.
    on: AtomicBool,
    /// Counts recordings of this process.
    session: AtomicU64,
    me: Rank,
    size: u32,
    /// The engine shall send something, or make something to send.
    has_queued: AtomicBool,
    mark_cycles: AtomicBool,
    /// Recording may be asked for in this process.
    armed: bool,
    started: Instant,
    threads: Threads,
    queue: OnceLock<Queue>,
    notifier: Notifier,
    outgoing: Mutex<VecDeque<(Rank, Vec<u8>)>>,
    role: Role,
}

enum Role {
    Leader(Box<leader::Leader>),
    Member(member::Member),
}

/// Why a timeline cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotArmed;

impl Timeline {
    /// `started` is the zero of the engine's clock.
    pub fn new(
        setting: Option<&TimelineSetting>,
        mark_cycles: bool,
        topology: &Topology,
        started: Instant,
        notifier: Notifier,
    ) -> Self {
        let zero = zero_of(started);
        let role = if topology.rank == Rank(0) {
            let cast = Cast {
                ranks: topology
                    .peers
                    .iter()
                    .map(|peer| CastMember {
                        hostname: peer.hostname.clone(),
                        pid: peer.pid,
                    })
                    .collect(),
                epoch_micros: epoch_of(started),
            };
            let neighbours = topology
                .peers
                .iter()
                .map(|peer| {
                    topology
                        .peers
                        .first()
                        .is_some_and(|first| first.host == peer.host)
                })
                .collect();
            Role::Leader(Box::new(leader::Leader::new(cast, neighbours, zero)))
        } else {
            Role::Member(member::Member::new(zero))
        };
        Self {
            on: AtomicBool::new(false),
            session: AtomicU64::new(0),
            me: topology.rank,
            size: topology.size,
            has_queued: AtomicBool::new(false),
            mark_cycles: AtomicBool::new(mark_cycles),
            armed: setting.is_some(),
            started,
            threads: Threads::new(),
            queue: OnceLock::new(),
            notifier,
            outgoing: Mutex::default(),
            role,
        }
    }

    // -- what the engine tells; each costs one load when nothing is recorded

    /// Whether something is recorded.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// The mark of a submission made now by this thread; `None` where nothing is recorded nor can be.
    #[inline]
    pub fn stamp(&self) -> Option<Stamp> {
        (self.armed || self.is_on()).then(|| Stamp {
            at: self.now(),
            thread: self.threads.current(),
        })
    }

    /// Nanoseconds since the engine started.
    #[inline]
    pub fn now(&self) -> Nanos {
        self.at(Instant::now())
    }

    /// A moment as nanoseconds since the engine started.
    #[inline]
    pub fn at(&self, instant: Instant) -> Nanos {
        let since = instant.saturating_duration_since(self.started);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// The recording that goes on, or the last one, and in it the numbers of these tensors with their submissions.
    /// `None`: there is no room to tell what a number stands for.
    pub fn pack<'a>(
        &self,
        catalog: &mut Catalog,
        mut all: impl ExactSizeIterator<Item = (&'a ExecItem, Option<Stamp>)>,
    ) -> (u64, Option<Items>) {
        let session = self.session.load(Ordering::Acquire);
        catalog.enter(session);
        let mut items = Items::with_capacity(all.len());
        let written = all.try_for_each(|(item, submitted)| {
            let tell = |number, what| self.describe(session, number, what);
            items.push(catalog.number(item, tell)?, submitted);
            Some(())
        });
        (session, written.map(|()| items))
    }

    /// Records the meaning of a number in executions of this recording. `false`: the queue is full.
    fn describe(&self, session: u64, number: u32, description: Description) -> bool {
        self.queue.get().is_some_and(|queue| {
            queue.push(Record::Described {
                session,
                number,
                description,
            })
        })
    }

    /// Nothing can be told of an execution of so many tensors.
    pub fn missed(&self, items: usize) {
        if let Some(queue) = self.queue.get() {
            queue.miss(items as u64);
        }
    }

    /// The track of a GPU of this process, which is none of its threads.
    pub fn device(&self, ordinal: i32) -> ThreadId {
        self.threads.device(ordinal)
    }

    /// An execution was carried out, by the calling thread if it is not said by whom.
    pub fn executed(&self, mut executed: Executed) {
        if executed.thread == 0 {
            executed.thread = self.threads.current();
        }
        self.push(Record::Executed(Box::new(executed)));
    }

    /// The calling thread did something else from `begin` until now.
    pub fn spent(&self, name: &'static str, begin: Nanos) {
        let span = Span {
            name: Text::Static(name),
            thread: self.threads.current(),
            begin,
            end: self.now(),
            detail: String::new(),
        };
        self.push(Record::Span(Box::new(span)));
    }

    /// The calling thread was kept waiting from `begin` until now.
    pub fn waited(&self, begin: Nanos) {
        self.push(Record::Wait {
            thread: self.threads.current(),
            begin,
            end: self.now(),
        });
    }

    /// Something that has no duration; `thread` 0 is the calling one.
    pub fn note(&self, name: &'static str, thread: ThreadId, detail: String) {
        let thread = if thread == 0 {
            self.threads.current()
        } else {
            thread
        };
        let at = self.now();
        let span = Span {
            name: Text::Static(name),
            thread,
            begin: at,
            end: at,
            detail,
        };
        self.push(Record::Span(Box::new(span)));
    }

    /// Answers of the coordinator are about to be carried out.
    #[inline]
    pub fn cycle(&self) {
        if self.is_on() && self.mark_cycles.load(Ordering::Relaxed) {
            self.push(Record::Cycle(self.now()));
        }
    }

    fn push(&self, record: Record) {
        if let Some(queue) = self.queue.get() {
            queue.push(record);
        }
    }

    // -- messages, carried by the engine

    /// Whether [`Self::next_outgoing`] may give something.
    #[inline]
    pub fn has_outgoing(&self) -> bool {
        self.has_queued.load(Ordering::Acquire)
    }

    /// How many to take at most before looking at other things again.
    pub fn outgoing_limit(&self) -> usize {
        self.outgoing().len().max(1)
    }

    /// The next message to send, with its receiver.
    pub fn next_outgoing(self: &Arc<Self>) -> Option<(Rank, Vec<u8>)> {
        if let Role::Member(member) = &self.role {
            member.begin_next(self);
        }
        self.has_queued.store(false, Ordering::Release);
        let waiting = self.outgoing().pop_front();
        let message = waiting.or_else(|| match &self.role {
            Role::Leader(_) => None,
            Role::Member(member) => member.next_outgoing(self).map(|bytes| (Rank(0), bytes)),
        });
        if message.is_some() {
            self.has_queued.store(true, Ordering::Release);
        }
        message
    }

    /// It could not be sent now.
    pub fn put_back(&self, to: Rank, bytes: Vec<u8>) {
        let message = (to, bytes);
        match &self.role {
            // One busy peer must not keep the others waiting.
            Role::Leader(_) => self.outgoing().push_back(message),
            Role::Member(_) => self.outgoing().push_front(message),
        }
        self.has_queued.store(true, Ordering::Release);
    }

    /// A message of a peer.
    pub fn handle(self: &Arc<Self>, from: Rank, bytes: &[u8]) {
        let message = match Message::decode(bytes) {
            Ok(message) => message,
            Err(e) => {
                tracing::warn!("timeline: {from} sent what cannot be read: {e}");
                return;
            }
        };
        match &self.role {
            Role::Leader(leader) => leader.handle(self, from, message),
            Role::Member(member) => member.handle(self, message),
        }
    }

    /// A rank will send nothing more.
    pub fn gone(&self, rank: Rank) {
        if let Role::Leader(leader) = &self.role {
            leader.ended(rank);
        }
    }

    /// The ranks have agreed to stop and everything agreed has been carried out: tell the rest.
    pub fn job_stopped(&self) {
        if let Role::Member(member) = &self.role {
            member.finish(self);
        }
    }

    /// Whether everything was told to rank 0, or it was waited for long enough; on rank 0: by all others.
    pub fn is_settled(&self) -> bool {
        match &self.role {
            Role::Leader(leader) => !self.is_on() || leader.is_settled(),
            Role::Member(member) => {
                (!self.has_outgoing() && !member.is_finishing()) || member.is_overdue()
            }
        }
    }

    fn queue(&self) -> &Queue {
        self.queue.get_or_init(|| Queue::new(self.me, self.size))
    }

    /// Another recording is about to begin: nothing of a former one is left in the queue, nor taken for its own.
    fn enter(&self) {
        let session = self.session.load(Ordering::Relaxed) + 1;
        self.queue().reader().enter(session);
        self.session.store(session, Ordering::Release);
    }

    fn queue_to(&self, rank: Rank, message: &Message) {
        self.outgoing().push_back((rank, message.encode()));
        self.has_queued.store(true, Ordering::Release);
    }

    fn outgoing(&self) -> MutexGuard<'_, VecDeque<(Rank, Vec<u8>)>> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timeline {
    // -- start and stop, by any thread but the engine's

    /// Record into this file from now on, which is emptied; on other ranks than 0 nothing happens, for rank 0
    /// decides for all. A file that cannot be written is an error in the log.
    pub fn start(self: &Arc<Self>, path: &Path, mark_cycles: bool) -> Result<(), NotArmed> {
        if !self.armed {
            return Err(NotArmed);
        }
        self.mark_cycles.store(mark_cycles, Ordering::Relaxed);
        if let Role::Leader(leader) = &self.role {
            leader.start(self, path);
        }
        Ok(())
    }

    /// Records into this file from now on for a command beside the job, which needs no setting. The marks of operations
    /// that were submitted before are then missing.
    ///
    /// # Errors
    /// The text says why nothing is recorded: another recording goes on, or the file cannot be written.
    pub fn start_trace(self: &Arc<Self>, path: &Path) -> Result<(), String> {
        match &self.role {
            Role::Leader(leader) => leader.start_trace(self, path),
            Role::Member(_) => Err("only rank 0 records".into()),
        }
    }

    /// Ends what `start_trace` has begun with this file.
    ///
    /// # Errors
    /// The text says why the file lacks events.
    pub fn stop_trace(&self, path: &Path) -> Result<(), String> {
        match &self.role {
            Role::Leader(leader) => leader.stop_trace(self, path),
            Role::Member(_) => Ok(()),
        }
    }

    /// Record no longer. Everything recorded so far, on any rank, is in the file then. `false`: nothing was recorded.
    pub fn stop(&self) -> bool {
        match &self.role {
            Role::Leader(leader) => leader.stop(self),
            Role::Member(_) => self.armed,
        }
    }

    /// The engine has ended: no more events, no more messages.
    pub fn close(&self) {
        match &self.role {
            Role::Leader(leader) => leader.close(self),
            Role::Member(member) => {
                self.on.store(false, Ordering::Relaxed);
                member.close();
            }
        }
    }
}

impl std::fmt::Debug for Timeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timeline")
            .field("on", &self.is_on())
            .finish_non_exhaustive()
    }
}

/// When the engine started, by the system's clock that all processes of a host share.
fn zero_of(started: Instant) -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let since = started.elapsed();
    let now = Duration::new(
        now.tv_sec.cast_unsigned(),
        u32::try_from(now.tv_nsec).unwrap_or(0),
    );
    u64::try_from(now.saturating_sub(since).as_nanos()).unwrap_or(0)
}

/// When the engine started, in microseconds since 1970.
fn epoch_of(started: Instant) -> u64 {
    let started = SystemTime::now() - started.elapsed();
    started
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(0))
}

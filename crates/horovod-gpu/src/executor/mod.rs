//! The executor: one thread and one stream of a GPU, which carry out work in the order in which it is given.
//!
//! The thread alone calls NCCL, and all communicators share the stream. So the order of launches is that of the work,
//! which the engine keeps alike on all ranks, and overlapping groups cannot wait for each other. The thread polls
//! launched work until its end event has passed.

mod clock;
mod communicators;
mod launch;
mod plan;
mod thread;
mod work;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::device::event::Event;
use crate::error::GpuError;
use crate::loss::{GpuLoss, stays_busy};

pub use work::{
    AllReduce, AllReduceInput, Call, GpuWork, Group, HostMemory, ReduceScatter, Reduction,
};

use thread::GpuThread;

/// How an executor works.
#[derive(Clone, Debug)]
pub struct ExecutorSettings {
    /// How long the members of a new communicator may take to meet.
    pub rendezvous: Duration,
    /// Thread blocks of NCCL's kernels at most.
    pub max_ctas: Option<i32>,
    /// How long [`Executor::close`] waits for the thread: NCCL ends a communicator only when the GPU comes to rest, which
    /// with a kernel of somebody else's on it may be never.
    pub closing: Duration,
}

/// Why work has not ended well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkError {
    /// [`Executor::abort`], with its cause.
    Aborted(Arc<str>),
    /// The device or NCCL failed; so does all later work of this executor.
    Failed(Arc<str>),
    /// The same, because of another member.
    PeerFailed(Arc<str>),
}

/// Runs work on one device.
pub struct Executor {
    shared: Arc<ExecutorState>,
    thread: Mutex<Option<Running>>,
    closing: Duration,
}

/// The thread of an executor.
struct Running {
    thread: JoinHandle<()>,
    /// Closed when it ends.
    ended: Receiver<()>,
}

/// State common to the callers and the thread.
struct ExecutorState {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Set with [`QueueState::Abort`], for who is amid a wait.
    stops: AtomicBool,
    /// As [`Executor::failure`].
    failure: OnceLock<WorkError>,
    /// The device does not come to rest, and is waited for no longer.
    given_up: AtomicBool,
    /// Of the device.
    ordinal: i32,
    /// Called when work was launched, has ended or has failed.
    notify: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Queued>,
    /// Keys of groups of which no more work will come.
    removed_groups: Vec<u64>,
    state: QueueState,
    /// Of what was queued last.
    last: Option<u64>,
    /// Work being launched.
    launching: Option<WorkProgress>,
    /// Launched work that is the next to end.
    oldest: Option<WorkProgress>,
    /// Work that will be queued as soon as there is memory for it.
    preparing: Option<WorkProgress>,
}

/// Work that the thread has not taken up.
struct Queued {
    work: GpuWork,
    state: Arc<Mutex<WorkState>>,
    since: Instant,
}

impl Queued {
    /// As what keeps all else up: the thread is in a call that does not return.
    fn oldest(&self) -> WorkProgress {
        WorkProgress {
            title: self.work.title.clone(),
            seq: self.work.seq,
            set: self.work.set,
            phase: WorkPhase::Launching,
            since: self.since,
        }
    }
}

/// How long a launch may take before it counts as what keeps all else up: the thread that would see ends is in it.
const LAUNCH_MAX: Duration = Duration::from_millis(200);

/// The work that is the next to end.
#[derive(Clone, Debug)]
pub struct WorkProgress {
    /// As in [`GpuWork`].
    pub title: Arc<str>,
    /// As in [`GpuWork`].
    pub seq: u64,
    /// As in [`GpuWork`].
    pub set: u32,
    /// How far it is.
    pub phase: WorkPhase,
    /// Since when it is the next.
    pub since: Instant,
}

/// How far work is that was taken up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkPhase {
    /// Its launch has not returned.
    Launching,
    /// It is launched, behind events that have not passed.
    AwaitsEvents,
    /// It is launched, and runs, as far as is known.
    Runs,
}

/// How far an executor is, for who wonders why nothing ends.
#[derive(Clone, Debug, Default)]
pub struct ExecutorProgress {
    /// The place of the work that was queued last.
    pub last: Option<u64>,
    /// Work that has not ended, if any.
    pub oldest: Option<WorkProgress>,
}

/// Mode in which the thread handles its queue.
#[derive(Default)]
enum QueueState {
    /// Launches it, and waits for more.
    #[default]
    Run,
    /// Ends it with this cause, and if it closes the thread after it.
    Abort { cause: Arc<str>, closes: bool },
    /// Ends the thread in good order when nothing is left.
    Close,
}

impl ExecutorState {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything ends with this cause; if another one was first, with that.
    fn abort(&self, why: &str, and_close: bool) {
        let mut queue = self.lock();
        let (cause, closes) = match std::mem::take(&mut queue.state) {
            QueueState::Run => (why.into(), and_close),
            QueueState::Close => (why.into(), true),
            QueueState::Abort { cause, closes } => (cause, closes || and_close),
        };
        queue.state = QueueState::Abort { cause, closes };
        drop(queue);
        self.stops.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// The thread ends when nothing is left.
    fn close(&self) {
        let mut queue = self.lock();
        match &mut queue.state {
            QueueState::Abort { closes, .. } => *closes = true,
            state => *state = QueueState::Close,
        }
        drop(queue);
        self.changed.notify_one();
    }

    /// Set what is the next to end.
    fn set_oldest(&self, oldest: Option<WorkProgress>) {
        self.lock().oldest = oldest;
    }

    /// The device has not come to rest in this time.
    fn give_up(&self, after: Duration, orderly: bool) {
        self.given_up.store(true, Ordering::Release);
        stays_busy(GpuLoss::Busy {
            ordinal: self.ordinal,
            title: self.progress().oldest.map(|oldest| oldest.title),
            after,
            orderly,
        });
    }

    fn progress(&self) -> ExecutorProgress {
        let queue = self.lock();
        let is_long = |oldest: &&WorkProgress| oldest.since.elapsed() >= LAUNCH_MAX;
        let launching = queue.launching.as_ref();
        let oldest = launching
            .filter(is_long)
            .or(queue.oldest.as_ref())
            .or(launching)
            .or(queue.preparing.as_ref());
        let queued = || queue.work.front().map(Queued::oldest);
        ExecutorProgress {
            last: queue.last,
            oldest: oldest.cloned().or_else(queued),
        }
    }

    fn stops(&self) -> bool {
        self.stops.load(Ordering::Acquire)
    }
}

/// How far one piece of work is.
#[derive(Debug, Default)]
struct WorkState {
    /// The end of what was launched, until somebody asks.
    launched: Option<Arc<Event>>,
    ended: Option<Result<(), WorkError>>,
    times: Option<(Instant, Instant)>,
}

/// One piece of work on its way.
#[derive(Clone, Debug)]
pub struct Launch(Arc<Mutex<WorkState>>);

impl Launch {
    /// The end of the work on the device, once, as soon as it is launched.
    pub fn launched(&self) -> Option<Arc<Event>> {
        self.lock().launched.take()
    }

    /// When the device began and ended it, by the host's clock, once it has ended; of timed work whose device could be
    /// asked for its clock.
    pub fn times(&self) -> Option<(Instant, Instant)> {
        self.lock().times
    }

    /// How it has ended, if so: then nothing of it touches its memory any more.
    pub fn ended(&self) -> Option<Result<(), WorkError>> {
        self.lock().ended.clone()
    }

    fn lock(&self) -> MutexGuard<'_, WorkState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Executor {
    /// Start its thread. `notify` is called by it, with no lock held.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(
        device: &'static Device,
        settings: ExecutorSettings,
        notify: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Self, GpuError> {
        let shared = Arc::new(ExecutorState {
            queue: Mutex::new(Queue::default()),
            changed: Condvar::new(),
            stops: AtomicBool::new(false),
            failure: OnceLock::new(),
            given_up: AtomicBool::new(false),
            ordinal: device.ordinal(),
            notify,
        });
        let closing = settings.closing;
        let thread = GpuThread::new(device, settings, shared.clone());
        let (running, ended) = channel();
        let thread = std::thread::Builder::new()
            .name("horovod-gpu".into())
            .spawn(move || {
                let _running: Sender<()> = running;
                thread.run();
            })
            .map_err(|e| GpuError::Invalid(format!("cannot start the thread for the GPU: {e}")))?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(Running { thread, ended })),
            closing,
        })
    }

    /// Queue work; it is launched after all that was queued before.
    ///
    /// # Safety
    /// Until it has ended: addresses are memory of the device (of the host where they say so) with room for what their
    /// call needs; outputs are nobody else's, and inputs are not written to, but by what the events of the work or this
    /// executor's order cover. All members of its group bring work of the same shape, in the same order.
    pub unsafe fn submit(&self, work: GpuWork) -> Launch {
        let state = Arc::new(Mutex::new(WorkState::default()));
        let launch = Launch(state.clone());
        let mut queue = self.shared.lock();
        queue.last = Some(work.seq);
        let since = Instant::now();
        queue.work.push_back(Queued { work, state, since });
        drop(queue);
        self.shared.changed.notify_one();
        launch
    }

    /// No more work comes of the group with this key: its communicator ends when what there is of it has ended. All
    /// members say so at the same place in the order of their work.
    pub fn remove_group(&self, key: u64) {
        self.shared.lock().removed_groups.push(key);
        self.shared.changed.notify_one();
    }

    /// Work of this title, place and set will be submitted as soon as CUDA has given memory for it, which it may be long
    /// about: until [`Self::prepares_no_more`] that counts as its launch.
    pub fn prepares(&self, title: Arc<str>, seq: u64, set: u32) {
        let mut queue = self.shared.lock();
        queue.last = Some(seq);
        queue.preparing = Some(WorkProgress {
            title,
            seq,
            set,
            phase: WorkPhase::Launching,
            since: Instant::now(),
        });
    }

    /// The memory is there, or is not needed any more.
    pub fn prepares_no_more(&self) {
        self.shared.lock().preparing = None;
    }

    /// How far it is; calls nothing of CUDA's, so this never blocks.
    pub fn progress(&self) -> ExecutorProgress {
        self.shared.progress()
    }

    /// The error of all work that has not ended, as soon as the error is known, unless it comes from [`Self::abort`].
    /// The work itself may end much later: communicators are aborted first, and the device must become idle.
    pub fn failure(&self) -> Option<&WorkError> {
        self.shared.failure.get()
    }

    /// End everything with this cause: communicators are aborted, and work ends when the device has come to rest.
    pub fn abort(&self, cause: &str) {
        self.shared.abort(cause, false);
    }

    /// Stop waiting, after this time, for work that was aborted but has not ended: [`crate::loss()`] reports it from
    /// now on.
    pub fn give_up(&self, after: Duration) {
        self.shared.give_up(after, false);
    }

    /// End the thread, or leave it to itself if it does not end in time. `orderly`: all work has ended, and the other
    /// members of all groups close as well; else what is left is aborted.
    pub fn close(&self, orderly: bool) {
        let Some(Running { thread, ended }) = self.take_thread() else {
            return;
        };
        match orderly {
            true => self.shared.close(),
            false => self.shared.abort("its executor was closed", true),
        }
        if self.shared.given_up.load(Ordering::Acquire) {
            return; // it had its time
        }
        if ended.recv_timeout(self.closing) == Err(RecvTimeoutError::Timeout) {
            self.shared.give_up(self.closing, orderly);
            tracing::error!(
                "NCCL does not end, for a call of it does not return or the GPU does not come to rest; what it uses is \
                 not given back, and only a new process can use this GPU as before"
            );
            return;
        }
        if thread.join().is_err() {
            tracing::error!("the thread for the GPU ended by a panic");
        }
    }

    fn take_thread(&self) -> Option<Running> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.take()
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if self.take_thread().is_some() {
            self.shared.abort("its executor was dropped", true);
        }
    }
}

//! The thread of a GPU: takes work in order, launches it, sees it end, aborts it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::clock::{DeviceClock, Timed};
use super::communicators::{Communicators, Unfinished};
use super::launch::Launcher;
use super::plan::{LaunchPlan, PACKED_MAX, SMALL_MAX};
use super::work::GpuWork;
use super::{
    ExecutorSettings, ExecutorState, Queue, QueueState, Queued, WorkError, WorkPhase, WorkProgress,
    WorkState,
};
use crate::device::Device;
use crate::device::event::Event;
use crate::device::memory::DeviceMemory;
use crate::device::stream::Stream;
use crate::error::GpuError;

/// Between two looks at what is on the device: doubled with each look in vain, and at most.
const NAP: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_millis(1);
/// Between two questions whether a communicator has failed.
const CHECK_EVERY: Duration = Duration::from_millis(100);
/// `ncclRemoteError`: another process, or the network to it, has failed.
const REMOTE_ERROR: i32 = 6;
/// How old work must be for it to be asked whether what it waits for has passed.
const INPUTS_CHECK_AFTER: Duration = Duration::from_millis(200);
/// How long the device may take to come to rest after an abort.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(8);

/// State of the executor's thread.
pub(super) struct GpuThread {
    device: &'static Device,
    settings: ExecutorSettings,
    shared: Arc<ExecutorState>,
    stream: Option<Stream>,
    communicators: Communicators,
    /// Where small tensors are brought together; grows.
    arena: Option<DeviceMemory>,
    /// Earlier arenas, where memory is not freed in the stream's order. Freeing one would wait for the device, which
    /// may run a kernel that only ends when this thread aborts it.
    outgrown: Vec<DeviceMemory>,
    /// Beside that, for what is being launched.
    scratch: Option<DeviceMemory>,
    on_device: VecDeque<OnDevice>,
    /// Result of all work from now on, if there was a failure or an abort.
    over: Option<WorkError>,
    checked: Instant,
    nap: Duration,
    clock: DeviceClock,
}

/// Work that was launched.
struct OnDevice {
    end: Arc<Event>,
    /// Of its group.
    key: Option<u64>,
    /// Events known to precede this work.
    after: Vec<Arc<Event>>,
    title: Arc<str>,
    seq: u64,
    set: u32,
    state: Arc<Mutex<WorkState>>,
    timed: Option<Timed>,
}

/// Next task of the thread.
enum Next {
    Launch(GpuWork, Arc<Mutex<WorkState>>),
    /// The communicator of this group, which was removed.
    Finalize(u64),
    Abort(Arc<str>),
    Poll,
    Close,
}

impl GpuThread {
    pub(super) fn new(
        device: &'static Device,
        settings: ExecutorSettings,
        shared: Arc<ExecutorState>,
    ) -> Self {
        Self {
            device,
            settings,
            shared,
            stream: None,
            communicators: Communicators::default(),
            arena: None,
            outgrown: Vec::new(),
            scratch: None,
            on_device: VecDeque::new(),
            over: None,
            checked: Instant::now(),
            nap: NAP,
            clock: DeviceClock::default(),
        }
    }

    pub(super) fn run(mut self) {
        if let Err(error) = self.set_up() {
            self.fail(&error);
        }
        loop {
            match self.next() {
                Next::Launch(work, state) => {
                    self.nap = NAP;
                    self.launch(work, state);
                    (self.shared.notify)();
                }
                Next::Abort(cause) => {
                    let aborted = WorkError::Aborted(cause);
                    self.end_all(self.over.clone().unwrap_or(aborted));
                }
                Next::Finalize(key) => {
                    self.nap = NAP;
                    if let Err(error) = self.communicators.finalize_group(key) {
                        self.fail(&error);
                    }
                }
                Next::Poll => {}
                Next::Close => return self.close(),
            }
            self.poll();
        }
    }

    fn set_up(&mut self) -> Result<(), GpuError> {
        self.device.adopt_thread()?;
        self.stream = Some(self.device.create_stream()?);
        Ok(())
    }

    fn next(&mut self) -> Next {
        let shared = self.shared.clone();
        let mut queue = shared.lock();
        let mut waited = false;
        loop {
            if let QueueState::Abort { cause, .. } = &queue.state
                && !self.is_aborted()
            {
                return Next::Abort(cause.clone());
            }
            if let Some(key) = self.take_removed_group(&mut queue) {
                return Next::Finalize(key);
            }
            if let Some(Queued { work, state, .. }) = queue.work.pop_front() {
                queue.launching = Some(WorkProgress {
                    title: work.title.clone(),
                    seq: work.seq,
                    set: work.set,
                    phase: WorkPhase::Launching,
                    since: Instant::now(),
                });
                return Next::Launch(work, state);
            }
            if self.on_device.is_empty()
                && let QueueState::Close | QueueState::Abort { closes: true, .. } = queue.state
            {
                return Next::Close;
            }
            if self.on_device.is_empty() && !self.communicators.are_finalizing() {
                let woken = shared.changed.wait(queue);
                queue = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if waited {
                return Next::Poll;
            }
            let woken = shared.changed.wait_timeout(queue, self.nap);
            (queue, _) = woken.unwrap_or_else(PoisonError::into_inner);
            self.nap = (self.nap * 2).min(NAP_MAX);
            waited = true;
        }
    }

    /// A removed group of which there is no work any more.
    fn take_removed_group(&self, queue: &mut Queue) -> Option<u64> {
        let is_in_use = |key: u64| {
            let queued = queue.work.iter();
            let queued = queued.filter_map(|queued| queued.work.group.as_ref());
            let on_device = self.on_device.iter().filter_map(|work| work.key);
            queued
                .map(|group| group.key)
                .chain(on_device)
                .any(|used| used == key)
        };
        let at = queue
            .removed_groups
            .iter()
            .position(|key| !is_in_use(*key))?;
        Some(queue.removed_groups.swap_remove(at))
    }

    fn is_aborted(&self) -> bool {
        matches!(self.over, Some(WorkError::Aborted(_)))
            || self.over.is_some() && self.on_device.is_empty()
    }

    fn launch(&mut self, work: GpuWork, state: Arc<Mutex<WorkState>>) {
        let title = work.title.clone();
        let launched = match &self.over {
            Some(over) => Err(over.clone()),
            None => self.try_launch(&work).map_err(|why| match why {
                Unfinished::Stopped => WorkError::Aborted("it was stopped".into()),
                Unfinished::Failed(error) => failed(&error, format!("{title}: {error}")),
            }),
        };
        match launched {
            Ok((end, timed)) => {
                // It is freed after what was launched.
                self.scratch = None;
                lock(&state).launched = Some(end.clone());
                self.on_device.push_back(OnDevice {
                    end,
                    key: work.group.map(|group| group.key),
                    after: work.after,
                    title,
                    seq: work.seq,
                    set: work.set,
                    state,
                    timed,
                });
                if self.on_device.len() == 1 {
                    self.publish_progress();
                }
            }
            Err(why) => {
                // Parts of it may be on the device, which has to come to rest, or yet be launched by a thread of NCCL's.
                if self.over.is_some() || self.end_all(why.clone()) {
                    self.scratch = None;
                    lock(&state).ended = Some(Err(why));
                }
                std::mem::forget(self.scratch.take());
            }
        }
        self.shared.lock().launching = None;
    }

    fn try_launch(&mut self, work: &GpuWork) -> Result<(Arc<Event>, Option<Timed>), Unfinished> {
        let stream = self.stream.clone();
        let stream = stream.ok_or_else(|| GpuError::Invalid("there is no stream".into()))?;
        for event in &work.after {
            event.order(stream.raw())?;
        }
        let plan = LaunchPlan::of(work);
        let scratch = self.scratch(&stream, plan.bytes)?;
        let communicator = match &work.group {
            Some(group) => Some(self.communicators.of(group, &self.settings, &self.shared)?),
            None => None,
        };
        let launcher = Launcher {
            device: self.device,
            stream: &stream,
            communicator,
            scratch,
            shared: &self.shared,
            rank: work
                .group
                .as_ref()
                .map_or(0, |group| group.rank.unsigned_abs() as usize),
        };
        let timed = match work.timed {
            true => self.clock.begin(self.device, &stream),
            false => None,
        };
        // SAFETY: what `Executor::submit` was promised of this work.
        unsafe { launcher.launch(work, &plan)? };
        let end = match timed {
            Some(_) => self.device.record_timed(stream.raw())?,
            None => self.device.record(stream.raw())?,
        };
        Ok((Arc::new(end), timed))
    }

    /// Memory that a launch needs beside its tensors': what is not too much is kept, the rest given back in the stream's
    /// order, where that can be.
    fn scratch(&mut self, stream: &Stream, bytes: usize) -> Result<u64, GpuError> {
        let has_pools = self.device.has_memory_pools();
        if bytes > PACKED_MAX && has_pools {
            let scratch = self.device.allocate_on(stream, bytes)?;
            return Ok(self.scratch.insert(scratch).address());
        }
        if bytes > self.arena.as_ref().map_or(0, DeviceMemory::len) {
            let bytes = bytes.max(SMALL_MAX).next_power_of_two();
            let outgrown = self.arena.replace(self.device.allocate_on(stream, bytes)?);
            self.outgrown.extend(outgrown.filter(|_| !has_pools));
        }
        Ok(self.arena.as_ref().map_or(0, DeviceMemory::address))
    }

    /// Tell what is the next to end.
    fn publish_progress(&self) {
        let oldest = self.on_device.front().map(|first| WorkProgress {
            title: first.title.clone(),
            seq: first.seq,
            set: first.set,
            phase: WorkPhase::Runs,
            since: Instant::now(),
        });
        self.shared.set_oldest(oldest);
    }

    /// Find out what keeps the device from what has not ended for long.
    fn poll_inputs(&mut self) -> Result<(), GpuError> {
        let Some(first) = self.on_device.front_mut() else {
            return Ok(());
        };
        let since = self
            .shared
            .lock()
            .oldest
            .as_ref()
            .map(|oldest| oldest.since);
        let is_old = since.is_some_and(|since| since.elapsed() >= INPUTS_CHECK_AFTER);
        if first.after.is_empty() || !is_old {
            return Ok(());
        }
        let mut left = Vec::new();
        for event in first.after.drain(..) {
            if !event.has_passed()? {
                left.push(event);
            }
        }
        first.after = left;
        let phase = match first.after.is_empty() {
            true => WorkPhase::Runs,
            false => WorkPhase::AwaitsEvents,
        };
        if let Some(oldest) = &mut self.shared.lock().oldest {
            oldest.phase = phase;
        }
        Ok(())
    }

    /// Completes the work whose end event has passed. `true`: there was some.
    fn complete_ended(&mut self) -> Result<bool, GpuError> {
        let mut any = false;
        while let Some(first) = self.on_device.front() {
            if !first.end.has_passed()? {
                break;
            }
            if let Some(ended) = self.on_device.pop_front() {
                let times = ended.timed.and_then(|timed| timed.until(&ended.end));
                let mut state = lock(&ended.state);
                state.times = times;
                state.ended = Some(Ok(()));
                any = true;
            }
        }
        Ok(any)
    }

    /// See what has ended, or has failed.
    fn poll(&mut self) {
        let any = match self.complete_ended() {
            Ok(any) => any,
            Err(error) => return self.fail(&error),
        };
        let is_at_rest = self.on_device.is_empty();
        if let Err(error) = self.communicators.destroy_finalized(is_at_rest) {
            return self.fail(&error);
        }
        let now = Instant::now();
        if !self.on_device.is_empty() && now.duration_since(self.checked) >= CHECK_EVERY {
            self.checked = now;
            if let Err(error) = self.communicators.check() {
                return self.fail(&error);
            }
            if let Err(error) = self.poll_inputs() {
                return self.fail(&error);
            }
        }
        if any {
            self.nap = NAP;
            self.publish_progress();
            (self.shared.notify)();
        }
    }

    fn fail(&mut self, error: &GpuError) {
        self.end_all(failed(error, error.to_string()));
        (self.shared.notify)();
    }

    /// Abort the communicators, let the device come to rest, and end all work with this. `false`: it does not.
    fn end_all(&mut self, why: WorkError) -> bool {
        // Work that ended before the abort did not fail; after the abort an event may pass without a result. An error
        // of this query does not replace `why`.
        let _ = self.complete_ended();
        self.over = Some(why.clone());
        if !matches!(why, WorkError::Aborted(_)) {
            // The other members wait for this one, and NCCL may not come back for as long as the device does not rest.
            let _ = self.shared.failure.set(why.clone()); // there is one
            (self.shared.notify)();
        }
        if let Err(error) = self.communicators.abort() {
            tracing::warn!("while NCCL was aborted: {error}");
        }
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        let mut nap = NAP;
        // Also parts of what failed while it was launched. An error is an end, too: nothing runs in a lost context.
        while let Some(Ok(false)) = self.stream.as_ref().map(Stream::is_idle) {
            if Instant::now() >= deadline {
                tracing::error!("the GPU does not come to rest after NCCL was aborted");
                self.shared.give_up(DRAIN_TIMEOUT, false);
                // Their memory stays in use: they never end.
                self.on_device.clear();
                self.publish_progress();
                return false;
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(NAP_MAX);
        }
        for ended in self.on_device.drain(..) {
            lock(&ended.state).ended = Some(Err(why.clone()));
        }
        self.publish_progress();
        (self.shared.notify)();
        true
    }

    fn close(mut self) {
        let ended = match self.over {
            None => self.communicators.destroy(),
            Some(_) => self.communicators.abort(),
        };
        // At the interpreter's end CUDA may be gone.
        if let Err(error) = ended {
            tracing::debug!("while NCCL was ended: {error}");
        }
    }
}

fn failed(error: &GpuError, text: String) -> WorkError {
    match error {
        GpuError::Nccl {
            code: REMOTE_ERROR, ..
        } => WorkError::PeerFailed(text.into()),
        _ => WorkError::Failed(text.into()),
    }
}

fn lock(state: &Mutex<WorkState>) -> std::sync::MutexGuard<'_, WorkState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

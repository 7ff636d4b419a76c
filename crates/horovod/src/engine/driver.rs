//! What drives a rank: turns the control plane, runs executions in order, ends the generation when it must.

mod ending;
mod inspect;
mod node;
mod pump;

use std::sync::Arc;
use std::time::{Duration, Instant};

use horovod_collectives::{Reduction, Scratch, Segment};
use horovod_protocol::{EntryId, Execution, Op, PeerLost};
use horovod_transport::{Data, Mesh};

use pump::Pump;

use super::execute::{Failure, Layouts, Lists, Means};
use super::tuning::Tuned;
use super::{Entry, Shared, nanos};
use crate::config::Config;

/// How long an ending engine tries to send what is queued.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(2);

/// Bytes that the only rank of a job handles at most while it submits.
const ALONE_AT_ONCE_MAX: usize = 1 << 20;

/// Everything that it takes to drive this rank; one thread at a time has it.
pub(super) struct Driver {
    pump: Pump,
    data: Data,
    layouts: Layouts,
    tuned: Tuned,
    scratch: Scratch,
    lists: Lists,
    /// Where the next job puts its tensors.
    spare: Vec<Option<Entry>>,
    /// The submission whose operand was staged early last.
    staged: Option<EntryId>,
    /// Broken off by a thread that had to leave; goes on before anything else.
    parked: Option<Job>,
    /// A panic has passed through.
    broken: bool,
    /// When the engine's thread will look around even if nothing wakes it; as [`Time`].
    ///
    /// [`Time`]: horovod_protocol::Time
    engine_looks_at: u64,
}

/// One execution and the tensors of this rank.
struct Job {
    execution: Execution,
    entries: Vec<Option<Entry>>,
}

impl Job {
    /// Block until the bytes of all tensors are there; only for the engine's own thread, which nobody waits to see
    /// return.
    fn await_events(&mut self) -> Result<(), String> {
        let mut entries = self.entries.iter_mut().flatten();
        entries.try_for_each(Entry::await_events)
    }
}

/// How the engine's thread goes on.
pub(super) enum Work {
    /// Nothing to do until something happens or this time has passed.
    Sleep(Duration),
    /// The engine has ended.
    Finished,
}

impl Driver {
    pub(super) fn new(config: &Config, mesh: Mesh, shared: Arc<Shared>) -> Self {
        let Mesh {
            topology,
            tree,
            control,
            data,
            mut waiter,
            heartbeat,
            settings: _,
            seat: _,
        } = mesh;
        // Beside the engine's thread its process computes.
        waiter.set_has_time(false);
        Self {
            layouts: Layouts::new(&topology),
            tuned: Tuned::new(config, &topology),
            scratch: Scratch::default(),
            lists: Lists::default(),
            spare: Vec::new(),
            staged: None,
            data,
            pump: Pump::new(
                config,
                (control, heartbeat),
                waiter,
                (topology, tree),
                shared,
            ),
            parked: None,
            broken: false,
            engine_looks_at: 0,
        }
    }

    /// Whether ranks outnumber the cores of this host.
    pub(super) fn is_crowded(&self) -> bool {
        self.pump.waiter.is_crowded()
    }

    /// As the engine's own thread: carry out everything, until nothing is left that could be done now.
    pub(super) fn work(&mut self) -> Work {
        let mut announced = false;
        loop {
            if self.broken {
                return Work::Finished;
            }
            self.stage_early();
            let progress = self.pump.turn();
            if let Some(mut job) = self.next_job() {
                self.pump.waiter.disarm();
                match job.await_events() {
                    Ok(()) => self.carry_out(job),
                    Err(cause) => self.give_up(job, Failure::Local(cause)),
                }
                announced = false;
                continue;
            }
            if self.pump.finished() {
                return Work::Finished;
            }
            if announced && !progress && !self.pump.waiter.has_news() {
                let limit = self.pump.sleep_limit();
                self.engine_looks_at = self.pump.shared.now().0.saturating_add(nanos(limit));
                return Work::Sleep(limit);
            }
            self.pump.waiter.arm();
            announced = true;
        }
    }

    /// As a thread that waits until `done`, at most until `deadline`: carry out what may pause.
    pub(super) fn work_until(&mut self, deadline: Instant, done: impl Fn() -> bool) {
        self.pump.waiter.disarm();
        self.pump.leave_by = Some(deadline);
        self.pump.waiter.set_has_time(true);
        self.stage_early();
        let mut spins = 0;
        loop {
            let progress = self.pump.turn();
            if self.next_may_pause() {
                let Some(job) = self.next_job() else { break };
                self.carry_out(job);
                spins = 0;
                // Broken off, or the work of others never ends: this thread has to leave.
                if self.parked.is_some() || done() || Instant::now() >= deadline {
                    break;
                }
                continue;
            }
            if self.has_job() || self.pump.dead.is_some() || self.pump.shared.wanted() {
                break;
            }
            if progress {
                spins = 0;
                if done() {
                    break;
                }
                continue;
            }
            if !self.pump.waiter.stays_awake(spins) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let sleep = left.min(self.pump.sleep_limit());
                self.pump.waiter.falls_asleep(spins, Some(sleep));
            }
            spins = spins.saturating_add(1);
        }
        self.pump.leave_by = None;
        self.pump.waiter.set_has_time(false);
    }

    /// Say and hear what can be said and heard now. In a job of one rank, also carry out what is small: there
    /// is nobody to wait for.
    pub(super) fn glance(&mut self) {
        self.stage_early();
        self.pump.turn();
        while self.pump.shared.alone && self.next_is_small() {
            let Some(job) = self.next_job() else { break };
            self.carry_out(job);
            self.pump.turn();
        }
    }

    /// If a known request is about to be told of, and the only one: put its operand where the peers will look for it
    /// when it is decided to run it.
    fn stage_early(&mut self) {
        let mut state = self.pump.shared.lock();
        let Some((id, ticket)) = state.early.take() else {
            return;
        };
        let (request, worker) = (&state.request, &state.worker);
        let before = self.staged.filter(|id| state.entries.contains_key(&id.0));
        let known = worker.members(request.set);
        let known = known.and_then(|members| self.layouts.known(request.set, members));
        let (Some(entry), Some(layout), Op::Allreduce { op, scale }, None) =
            (state.entries.get(&id.0), known, &request.op, before)
        else {
            return;
        };
        let [tensor] = &*entry.tensors else { return };
        let elems = tensor.meta.elems().and_then(|n| usize::try_from(n).ok());
        let (Some(elems), false) = (elems, entry.has_event()) else {
            return;
        };
        let segment = Segment {
            input: tensor.input,
            output: std::ptr::null_mut(),
            elems,
        };
        let reduction = Reduction {
            dtype: tensor.meta.dtype,
            op: *op,
            scale: *scale,
            divisor: 1,
        };
        let crowded = self.pump.waiter.is_crowded();
        // SAFETY: the submitter promised that its memory stays valid and untouched until completion, which is later,
        // for the entry is still pending.
        let staged = unsafe {
            horovod_collectives::stage_early(
                &self.data,
                layout,
                &self.tuned.tuning,
                (&mut self.scratch, crowded),
                ticket,
                (&reduction, segment),
            )
        };
        if staged {
            self.staged = Some(id);
        }
    }

    /// What a thread does before it leaves the driver to itself; whether the engine's thread must come now.
    /// With `ticking`, that thread looks again soon of its own accord.
    pub(super) fn leave(&mut self, ticking: bool) -> bool {
        if !ticking {
            loop {
                self.pump.waiter.arm();
                if !self.pump.turn() && !self.pump.waiter.has_news() {
                    break;
                }
            }
        }
        if self.broken || self.parked.is_some() || self.pump.shared.wanted() {
            return true;
        }
        if self.has_job() {
            return !ticking || !self.next_may_pause();
        }
        !ticking
            && self
                .pump
                .deadline()
                .is_some_and(|at| at < self.engine_looks_at)
    }

    /// A bug of ours has shown itself: must not leave the callers waiting, nor the peers.
    pub(super) fn break_down(&mut self) {
        self.pump.running = None;
        self.parked = None;
        self.broken = true;
    }

    /// The end: tell the peers, close the links.
    pub(super) fn end(mut self) {
        if self.broken {
            self.pump.end_generation(&PeerLost {
                rank: self.pump.topology.rank,
                host: self.pump.host_of(self.pump.topology.rank),
                cause: "the engine panicked; please report this with the log above".into(),
            });
        }
        self.pump.control.goodbye(GOODBYE_PATIENCE);
        self.pump.recording.close();
    }

    pub(super) fn has_job(&self) -> bool {
        self.parked.is_some() || !self.pump.ready.is_empty()
    }

    fn next(&self) -> Option<&Execution> {
        let parked = self.parked.as_ref().map(|job| &job.execution);
        parked.or(self.pump.ready.front())
    }

    fn next_is_small(&self) -> bool {
        self.next().is_some_and(|e| {
            super::execute::bytes_of_all(e) <= ALONE_AT_ONCE_MAX && !self.pump.awaits_event(e)
        })
    }

    /// Whether a thread may carry it out that must be able to leave.
    fn next_may_pause(&mut self) -> bool {
        if self.parked.is_some() {
            return true;
        }
        let Some(execution) = self.pump.ready.front() else {
            return false;
        };
        if self.pump.awaits_event(execution) {
            return false;
        }
        self.tuned.catch_up(&mut self.pump.announced, execution.seq);
        let tuning = &self.tuned.tuning;
        super::execute::may_pause(execution, &self.data, &mut self.layouts, tuning)
    }

    fn next_job(&mut self) -> Option<Job> {
        if let Some(job) = self.parked.take() {
            return Some(job);
        }
        let execution = self.pump.ready.pop_front()?;
        self.tuned.catch_up(&mut self.pump.announced, execution.seq);
        let mut entries = std::mem::take(&mut self.spare);
        self.pump.take_entries(&execution, &mut entries);
        let stages = &mut self.scratch.stages;
        self.pump.recording.begins(&execution, &entries, stages);
        self.pump.begins(&execution);
        Some(Job { execution, entries })
    }

    fn carry_out(&mut self, job: Job) {
        self.pump.running = Some(job.execution.members.clone());
        let pool = self.pump.shared.pool.clone();
        let result = super::execute::run(
            &job.execution,
            &job.entries,
            Means {
                data: &mut self.data,
                idle: &mut self.pump,
                layouts: &mut self.layouts,
                tuning: &self.tuned.tuning,
                scratch: &mut self.scratch,
                lists: &mut self.lists,
                pool: &pool,
            },
        );
        if std::mem::take(&mut self.pump.broken_off) && result.is_err() {
            self.scratch.rewind();
            self.parked = Some(job);
            return;
        }
        match result {
            Ok(()) => self.complete(job),
            Err(failure) => self.give_up(job, failure),
        }
    }

    fn complete(&mut self, job: Job) {
        let execution = self.let_go(job);
        self.pump.running = None;
        self.pump.runs = None;
        let now = || self.pump.shared.now();
        let coordinator = self.pump.node.coordinator();
        self.tuned.observe(now, &execution, coordinator);
        let stages = &self.scratch.stages;
        let results = self.lists.results();
        // First: who learns of the end may stop the recording.
        self.pump.recording.ends(now, &execution, results, stages);
        self.pump.shared.handles.complete(
            results
                .drain(..)
                .map(|(id, result)| (super::Handle(id.0), result)),
        );
        self.pump.shared.lock().worker.recycle(execution);
    }

    fn give_up(&mut self, job: Job, failure: Failure) {
        self.let_go(job);
        let error = self.pump.failure(failure);
        self.pump.running = None;
        self.pump.runs = None;
        // Nothing touches the tensors any more.
        self.pump.shared.handles.fail_pending(&error);
    }

    /// Before anybody hears of the end: the owners may give back memory that is waited for.
    fn let_go(&mut self, job: Job) -> Execution {
        let Job {
            execution,
            mut entries,
        } = job;
        entries.clear();
        self.spare = entries;
        execution
    }
}

#[cfg(test)]
mod tests;

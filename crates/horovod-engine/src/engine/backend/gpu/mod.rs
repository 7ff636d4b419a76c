//! The backend for GPUs, NVIDIA's and AMD's alike: NCCL where the members of a set can use it together, else host memory
//! and the host's data plane.
//!
//! This module uses no function of CUDA before the first execution on a GPU. `route` has the members' agreement of that
//! moment. `calls` turns an execution into calls; `staging` and `pinned` carry it through host memory.
//! `horovod_gpu::Executor` launches the calls, in the order of the executions. `device` is what all threads share,
//! `adapter` what frameworks see, `settings` what the environment says.

pub mod adapter;
mod calls;
mod device;
mod pinned;
mod route;
pub(crate) mod settings;
mod staging;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use horovod_gpu::{
    Executor, ExecutorSettings, GpuError, GpuWork, Group, Launch, WorkError, driver, nccl,
    set_default_search, stack,
};
use horovod_protocol::{EntryId, Execution, Op, ProcessSetId, Rank, ReduceOp};
use horovod_transport::{Aborted, Notifier, Topology};

use super::{
    AdasumScope, Backend, DeviceStage, Failure, InFlight, Members, Outputs, Results, Route,
    StageIn, Staged, Start, Started, Surroundings,
};
use crate::config::{GpuOperations, GpuSettings, JoinAverage};
use crate::engine::Entry;
use crate::engine::accelerator::Accelerator;
use crate::engine::handles::OpResult;
use crate::engine::placement::Placement;
use crate::error::Error;
use adapter::{EventEnd, Ready, nccl_version};
use calls::{Translated, Translation, needs_host};
pub(in crate::engine) use device::ChosenGpu;
use pinned::PinnedPool;
use route::{Conclusion, Equipment, Offer, SetRoute, conclude};
use staging::StagingPlan;

/// How long the members of a communicator may take to meet.
const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(60);

/// How long communicators may take to end when the engine does: an orderly end is given up after 5 s, an aborted GPU has 8 s
/// to come to rest.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(15);

const NOT_AGREED: &str = "the members of a process set have not agreed on how they use their GPUs";

/// The event that an adapter has recorded for a tensor.
fn ready_of(placement: &Placement) -> Option<&Ready> {
    placement.downcast_ref()
}

/// This rank's GPU, as far as it is used.
struct Gpu {
    settings: GpuSettings,
    join_average: JoinAverage,
    topology: Topology,
    chosen: Arc<ChosenGpu>,
    notifier: Notifier,
    /// By set.
    routes: BTreeMap<ProcessSetId, Agreed>,
    /// How often members have agreed.
    agreements: u64,
    executor: Option<Arc<Executor>>,
    pinned: Arc<PinnedPool>,
    /// Whether the note that appears once has been logged.
    has_noted: bool,
}

struct Agreed {
    members: Arc<[Rank]>,
    route: SetRoute,
    adasum: Result<AdasumScope, String>,
    group: Option<Arc<Group>>,
}

impl Gpu {
    fn new(chosen: Arc<ChosenGpu>, surroundings: &Surroundings<'_>) -> Self {
        let config = surroundings.config;
        // An adapter, which knows the packages, tells of them later.
        set_default_search(config.gpu.search.clone());
        Self {
            settings: config.gpu.clone(),
            join_average: config.algorithms.join_average,
            topology: surroundings.topology.clone(),
            chosen,
            notifier: surroundings.notifier.clone(),
            routes: BTreeMap::new(),
            agreements: 0,
            executor: None,
            pinned: Arc::default(),
            has_noted: false,
        }
    }

    /// The GPU of this rank's tensors; of a rank that has submitted none, the one that it most likely would.
    fn device(&self) -> Result<&'static horovod_gpu::Device, GpuError> {
        let driver = driver()?;
        let ordinal = match self.chosen.ordinal() {
            Some(ordinal) => ordinal,
            None => {
                let count = driver.device_count()?;
                let local = i32::try_from(self.topology.local_rank()).unwrap_or(0);
                self.chosen.choose(if local < count { local } else { 0 })
            }
        };
        driver.device(ordinal)
    }

    fn equipment(&self, is_first: bool) -> Result<Equipment, GpuError> {
        let device = self.device()?;
        let nccl = nccl()?;
        device.check_kernels()?;
        Ok(Equipment {
            stack: stack(),
            nccl: nccl.version(),
            uuid: device.uuid(),
            id: if is_first {
                nccl.unique_id()?
            } else {
                [0; 128]
            },
        })
    }

    fn agreed(&self, execution: &Execution) -> Option<&Agreed> {
        let agreed = self.routes.get(&execution.set)?;
        (agreed.members[..] == execution.members[..]).then_some(agreed)
    }

    fn executor(&mut self) -> Result<Arc<Executor>, Failure> {
        if let Some(executor) = &self.executor {
            return Ok(executor.clone());
        }
        let settings = ExecutorSettings {
            rendezvous: RENDEZVOUS_TIMEOUT,
            max_ctas: self.settings.max_ctas,
            closing: CLOSE_TIMEOUT,
        };
        let notifier = self.notifier.clone();
        let notify = Box::new(move || notifier.notify());
        let executor = self
            .device()
            .and_then(|device| Executor::start(device, settings, notify))
            .map_err(local)?;
        let executor = self.executor.insert(Arc::new(executor));
        self.chosen.is_served_by(executor.clone());
        Ok(executor.clone())
    }

    fn divisor(&self, execution: &Execution) -> u32 {
        match self.join_average {
            JoinAverage::Members => u32::try_from(execution.members.len()).unwrap_or(u32::MAX),
            JoinAverage::Contributors => execution.contributors,
        }
    }

    fn host(&self, rank: Rank) -> String {
        let peer = self.topology.peers.get(rank.index());
        peer.map(|peer| peer.hostname.to_string())
            .unwrap_or_default()
    }

    /// Logs a note for users, once for each job.
    fn note(&mut self, members: &[Rank], route: &SetRoute) {
        if self.has_noted || members.first() != Some(&self.topology.rank) {
            return;
        }
        let of = |rank: &Rank| self.topology.peers.get(rank.index()).map(|peer| peer.host);
        let is_across = members.windows(2).any(|pair| of(&pair[0]) != of(&pair[1]));
        match route {
            SetRoute::Staged(Some(why)) => tracing::warn!(
                "operations on GPU tensors go through host memory, which is slower: {why} \
                 (HOROVOD_GPU_OPERATIONS=HOST says that this is intended)"
            ),
            SetRoute::Staged(None) if self.settings.names_mpi => tracing::warn!(
                "HOROVOD_GPU_OPERATIONS=MPI: there is no MPI here, so operations on GPU tensors go through host memory, as \
                 with HOST"
            ),
            SetRoute::Nccl(_) if is_across => tracing::warn!(
                "data of GPU tensors travel between hosts by NCCL, without authentication or encryption; use a network \
                 that only this job's hosts can reach, or HOROVOD_GPU_OPERATIONS=HOST"
            ),
            _ => return,
        }
        self.has_noted = true;
    }

    fn title(execution: &Execution) -> Arc<str> {
        match &execution.items[..] {
            [] => "nothing".into(),
            [item] => item.name.clone(),
            [first, rest @ ..] => format!("{} and {} more", first.name, rest.len()).into(),
        }
    }
}

impl Backend for Gpu {
    fn name(&self) -> &'static str {
        "GPU"
    }

    fn offer(&mut self, _: ProcessSetId, members: &[Rank]) -> Vec<u8> {
        let is_first = members.first() == Some(&self.topology.rank) && members.len() > 1;
        let has = match self.settings.operations {
            GpuOperations::Host => Err("host memory was asked for".into()),
            _ => self.equipment(is_first).map_err(|error| error.to_string()),
        };
        let offer = Offer {
            operations: self.settings.operations,
            shares_gpus: self.settings.shares_gpus,
            reports_nccl: nccl_version(self.settings.operations).is_some(),
            has,
        };
        offer.encode()
    }

    fn settle(&mut self, set: ProcessSetId, members: &Members<'_>) -> Result<(), String> {
        let Conclusion { route, adasum } =
            conclude(members.ranks, members.offers, |rank| self.host(rank))?;
        self.note(members.ranks, &route);
        self.agreements += 1;
        let me = members
            .ranks
            .iter()
            .position(|rank| *rank == self.topology.rank);
        let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let group = match (&route, me) {
            (SetRoute::Nccl(id), Some(me)) => Some(Arc::new(Group {
                key: self.agreements,
                id: **id,
                size: number(members.ranks.len()),
                rank: number(me),
                name: format!("hvd-{}-{}", set.0, self.topology.generation.0),
            })),
            _ => None,
        };
        let members = members.ranks.into();
        let agreed = Agreed {
            members,
            route,
            adasum,
            group,
        };
        self.routes.insert(set, agreed);
        Ok(())
    }

    fn forget(&mut self, set: ProcessSetId) {
        let group = self.routes.remove(&set).and_then(|agreed| agreed.group);
        if let (Some(group), Some(executor)) = (group, &self.executor) {
            executor.remove_group(group.key);
        }
    }

    fn route(&self, execution: &Execution) -> Route {
        let agreed = self.agreed(execution);
        if is_adasum(execution) {
            let scope = agreed.map_or_else(|| Err(NOT_AGREED.into()), |a| a.adasum.clone());
            return scope.map_or_else(Route::Refused, Route::Staged);
        }
        let is_staged = agreed.is_some_and(|a| matches!(a.route, SetRoute::Staged(_)));
        match is_staged || needs_host(execution) {
            true => Route::Staged(AdasumScope::Ranks),
            false => Route::Native,
        }
    }

    fn start(&mut self, start: Start<'_>) -> Result<Started, Failure> {
        let execution = start.execution;
        // Without a group an operation is this rank's alone: that must have been agreed on.
        let group = match self.agreed(execution) {
            Some(Agreed {
                route: SetRoute::Alone,
                ..
            }) => None,
            Some(Agreed {
                group: Some(group), ..
            }) => Some(group.clone()),
            _ => return Err(Failure::Local(NOT_AGREED.into())),
        };
        let mut translated = Translated {
            calls: Vec::new(),
            after: Vec::new(),
            results: Results::new(),
        };
        let timed = start.timed;
        let translation = Translation {
            start,
            me: self.topology.rank,
            divisor: self.divisor(execution),
            done: &mut translated,
        };
        translation.translate()?;
        let executor = self.executor()?;
        let stage = timed.then(|| stage_name(&execution.op, group.is_some()));
        let work = GpuWork {
            title: Self::title(execution),
            seq: execution.seq.0,
            set: execution.set.0,
            group,
            after: translated.after,
            calls: translated.calls,
            timed,
        };
        // SAFETY: the submitters promised that their memory is theirs until completion. Lengths come from the tensors'
        // own shapes and from what was agreed. Executions start in one order on all members.
        let launch = unsafe { executor.submit(work) };
        Ok(Started::InFlight(Box::new(Launched {
            executor,
            launch,
            results: Some(translated.results),
            stage,
        })))
    }

    fn stage_in(
        &mut self,
        execution: &Execution,
        entries: &[Option<Entry>],
        outputs: &Outputs,
        timed: bool,
    ) -> Result<Box<dyn StageIn>, Failure> {
        if entries.iter().all(Option::is_none) {
            return Ok(Box::new(staging::Nothing(entries.len())));
        }
        let device = self.device().map_err(local)?;
        let executor = self.executor()?;
        let title = Self::title(execution);
        let me = self.topology.rank;
        let plan = StagingPlan::of(execution, (entries, outputs), me, title, timed)?;
        let block = self.pinned.ask(device, plan.bytes(), &self.notifier)?;
        Ok(Box::new(plan.copy_to(block, executor)))
    }

    fn stage_out(&mut self, staged: Staged<'_>) -> Result<Started, Failure> {
        if staged.entries.iter().all(Option::is_none) {
            return Ok(Started::Done);
        }
        let executor = self.executor()?;
        let title = Self::title(staged.execution);
        let timed = staged.timed;
        let (work, results, kept) = staging::end(staged, title, self.topology.rank)?;
        let stage = (timed && !work.calls.is_empty()).then_some(staging::OUT_STAGE);
        // SAFETY: as in `start`; `KeepingLaunched` keeps the host's side.
        let launch = unsafe { executor.submit(work) };
        let launched = Launched {
            executor,
            launch,
            results: Some(results),
            stage,
        };
        Ok(Started::InFlight(Box::new(staging::KeepingLaunched {
            launched,
            _kept: kept,
        })))
    }

    fn close(&mut self, orderly: bool) {
        if let Some(executor) = self.executor.take() {
            executor.close(orderly);
        }
    }
}

fn is_adasum(execution: &Execution) -> bool {
    matches!(execution.op, Op::Allreduce { op, .. } if op == ReduceOp::Adasum)
}

/// Name of an operation on the device in the timeline: Horovod's, where Horovod has one.
fn stage_name(op: &Op, has_peers: bool) -> &'static str {
    match (op, has_peers) {
        (Op::Allreduce { .. }, true) => "NCCL_ALLREDUCE",
        (Op::Allgather, true) => "NCCL_ALLGATHER",
        (Op::Broadcast { .. }, true) => "NCCL_BCAST",
        (Op::Alltoall, true) => "NCCL_ALLTOALL",
        (Op::Reducescatter { .. }, true) => "NCCL_REDUCESCATTER",
        (Op::Allreduce { .. }, false) => "LOCAL_ALLREDUCE",
        _ => "LOCAL_COPY",
    }
}

fn failure_of(why: WorkError) -> Failure {
    match why {
        WorkError::Aborted(cause) => Failure::Aborted(Aborted(cause)),
        WorkError::Failed(text) => Failure::Local(text.to_string()),
        WorkError::PeerFailed(text) => Failure::Remote(text.to_string()),
    }
}

fn local(error: GpuError) -> Failure {
    Failure::Local(error.to_string())
}

/// An execution on the device.
struct Launched {
    executor: Arc<Executor>,
    launch: Launch,
    /// Until they are told.
    results: Option<Results>,
    /// Its recorded stage, if it is recorded.
    stage: Option<&'static str>,
}

impl Launched {
    fn take_results(&mut self) -> Option<Results> {
        let end = Arc::new(EventEnd {
            event: self.launch.launched()?,
            launch: self.launch.clone(),
        });
        let results = self.results.take()?;
        let with_end = |(id, result): (EntryId, Result<OpResult, Error>)| {
            let result = result.map(|result| OpResult {
                end: Some(end.clone()),
                ..result
            });
            (id, result)
        };
        Some(results.into_iter().map(with_end).collect())
    }
}

impl InFlight for Launched {
    fn launched(&mut self) -> Option<Results> {
        self.take_results()
    }

    fn failing(&self) -> Option<Failure> {
        self.executor.failure().cloned().map(failure_of)
    }

    fn poll(&mut self) -> Option<Result<Results, Failure>> {
        Some(match self.launch.ended()? {
            Ok(()) => Ok(self.take_results().unwrap_or_default()),
            Err(why) => Err(failure_of(why)),
        })
    }

    fn stage(&self) -> Option<DeviceStage> {
        let name = self.stage?;
        let times = self.launch.times();
        Some(DeviceStage { name, times })
    }

    fn abort(&mut self, cause: &Aborted) {
        self.executor.abort(&cause.0);
    }

    fn give_up(&self, after: Duration) {
        self.executor.give_up(after);
    }
}

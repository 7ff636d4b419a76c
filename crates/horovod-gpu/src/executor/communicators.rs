//! Communicators by group: made when first needed, waited for with a bound, ended together.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use super::work::Group;
use super::{ExecutorSettings, ExecutorState};
use crate::error::GpuError;
use crate::load::nccl;
use crate::nccl::{CommSettings, Communicator, Nccl, Progress};

/// How long a communicator that goes on is looked at without a pause: a thread of NCCL's launches in some 10 us, and what
/// waits for that would sleep for longer.
const SPIN: Duration = Duration::from_micros(200);
/// Between two looks at it later.
const NAP: Duration = Duration::from_micros(50);
const NAP_MAX: Duration = Duration::from_millis(2);
/// How long an orderly end may take before it is an abort.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);

/// All communicators of one executor.
#[derive(Default)]
pub(super) struct Communicators {
    /// By group; members have them in one order, though under different numbers.
    made: BTreeMap<u64, Communicator>,
    /// Of groups that were removed, until the other members have finalized them, too.
    finalizing: Vec<Communicator>,
}

/// Why a wait for NCCL has ended in vain.
#[derive(Debug)]
pub(super) enum Unfinished {
    Stopped,
    Failed(GpuError),
}

impl From<GpuError> for Unfinished {
    fn from(error: GpuError) -> Self {
        Self::Failed(error)
    }
}

impl Communicators {
    /// The communicator of a group, which all its members make at this place in the order. One that is begun and not
    /// made is ended by [`Self::abort`], as the others are.
    pub(super) fn of(
        &mut self,
        group: &Group,
        settings: &ExecutorSettings,
        shared: &ExecutorState,
    ) -> Result<&Communicator, Unfinished> {
        let begun = match self.made.entry(group.key) {
            Entry::Occupied(made) => return Ok(made.into_mut()),
            Entry::Vacant(place) => place.insert(begin(group, settings)?),
        };
        let deadline = Instant::now() + settings.rendezvous;
        settle(begun, shared, Some(deadline))?;
        Ok(begun)
    }

    /// Whether one of them has failed since the last look.
    pub(super) fn check(&self) -> Result<(), GpuError> {
        for communicator in self.made.values() {
            let _ = communicator.progress()?;
        }
        Ok(())
    }

    /// Finalize the communicator of a group that was removed, and of which nothing is on the device any more, as all its
    /// members do; [`Self::destroy_finalized`] brings that to its end. Versions in which that could block keep it. One that
    /// fails is ended by [`Self::abort`], as the others are.
    pub(super) fn finalize_group(&mut self, key: u64) -> Result<(), GpuError> {
        let may_block = |nccl: &Nccl| needs_blocking(nccl) || !nccl.ends_in_groups();
        if nccl().map_or(true, may_block) {
            return Ok(());
        }
        let Some(communicator) = self.made.remove(&key) else {
            return Ok(());
        };
        let finalized = communicator.finalize();
        self.finalizing.push(communicator);
        finalized.map(|_| ())
    }

    /// Whether some are being finalized.
    pub(super) fn are_finalizing(&self) -> bool {
        !self.finalizing.is_empty()
    }

    /// Destroy those that all members have finalized, when nothing is on the device: NCCL frees memory then, for which CUDA
    /// waits for all kernels, also for those of a rank that is lost, which only this thread can abort. One that fails is left
    /// for [`Self::abort`].
    pub(super) fn destroy_finalized(&mut self, is_at_rest: bool) -> Result<(), GpuError> {
        let mut result = Ok(());
        for communicator in std::mem::take(&mut self.finalizing) {
            let progress = communicator.progress();
            if let (Ok(Progress::Done), true) = (&progress, is_at_rest) {
                let ended = nccl().and_then(|nccl| nccl.destroy_all(vec![communicator]));
                if let Err(error) = ended {
                    tracing::debug!("while a communicator of NCCL was ended: {error}");
                }
                continue;
            }
            self.finalizing.push(communicator);
            result = result.and(progress.map(|_| ()));
        }
        result
    }

    /// End what they do, and them.
    pub(super) fn abort(&mut self) -> Result<(), GpuError> {
        let all = self.take_all();
        if all.is_empty() {
            return Ok(());
        }
        nccl()?.abort_all(all)
    }

    fn take_all(&mut self) -> Vec<Communicator> {
        let made = std::mem::take(&mut self.made).into_values();
        made.chain(self.finalizing.drain(..)).collect()
    }

    /// End them together with the other members, who do the same; those that do not come are not waited for for long.
    pub(super) fn destroy(&mut self) -> Result<(), GpuError> {
        if self.made.is_empty() && self.finalizing.is_empty() {
            return Ok(());
        }
        let finalized = self.finalize_all();
        if finalized.is_err() {
            return finalized.and(self.abort());
        }
        nccl()?.destroy_all(self.take_all())
    }

    /// All at once: each waits for its members, who may be at another one.
    fn finalize_all(&self) -> Result<(), GpuError> {
        let deadline = Instant::now() + FINALIZE_TIMEOUT;
        for communicator in self.made.values() {
            let _ = communicator.finalize()?;
        }
        let mut left: Vec<_> = self.made.values().chain(&self.finalizing).collect();
        let mut nap = NAP;
        loop {
            let mut go_on = Vec::new();
            for communicator in left {
                if communicator.progress()? == Progress::InProgress {
                    go_on.push(communicator);
                }
            }
            if go_on.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(GpuError::Invalid("not all ranks end NCCL".into()));
            }
            left = go_on;
            std::thread::sleep(nap);
            nap = (nap * 2).min(NAP_MAX);
        }
    }
}

/// NCCL goes on on a thread of its own, in the global capture mode, and beside allocations it calls what that forbids while
/// a script captures a graph (2.30.7: `cudaStreamSynchronize` in `initChannel`, `cudaMemset` in `nvlsAllocateMem`). Nothing
/// tells whether a stream of the process is captured, so this cannot wait for it.
fn begin(group: &Group, settings: &ExecutorSettings) -> Result<Communicator, GpuError> {
    let nccl = nccl()?;
    let comm_settings = CommSettings {
        name: group.name.clone(),
        blocking: needs_blocking(nccl),
        max_ctas: settings.max_ctas,
    };
    nccl.begin(&group.id, group.size, group.rank, &comm_settings)
}

/// Calls that return at once hang in these versions.
fn needs_blocking(nccl: &Nccl) -> bool {
    (22600..22700).contains(&nccl.version())
}

/// Wait until the last call of a communicator is finished, as long as nobody stops it.
pub(super) fn settle(
    communicator: &Communicator,
    shared: &ExecutorState,
    deadline: Option<Instant>,
) -> Result<(), Unfinished> {
    let mut nap = NAP;
    let begin = Instant::now();
    loop {
        if communicator.progress()? == Progress::Done {
            return Ok(());
        }
        if shared.stops() {
            return Err(Unfinished::Stopped);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Unfinished::Failed(GpuError::Invalid(
                "the ranks did not meet in NCCL in time: look at NCCL_DEBUG=INFO, and at NCCL_SOCKET_IFNAME if \
                 the hosts have several networks"
                    .into(),
            )));
        }
        if begin.elapsed() < SPIN {
            std::thread::yield_now();
            continue;
        }
        std::thread::sleep(nap);
        nap = (nap * 2).min(NAP_MAX);
    }
}

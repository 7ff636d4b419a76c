//! Operations inside a host: staging memory cut into areas, and the pipeline that runs over them.
//!
//! Each rank writes only its own staging memory and reads its peers'. Three flags per rank order this;
//! their values only grow: place of the operation in the job's total order, then steps within it.
//! Overlapping process sets need nothing more, since every rank runs its operations in that order.

use horovod_protocol::Seq;
use horovod_transport::{Arena, Idle};

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::scratch::{LastUse, SMALL_AREAS};

/// "I have staged my chunks up to this step."
const STAGED: usize = 0;
/// "My reduced results are there up to this step."
const REDUCED: usize = 1;
/// "I have read all I need of my peers' memory up to this step."
const DONE: usize = 2;

/// Bits of a flag value that count steps; the rest is the sequence number.
const STEP_BITS: u32 = 24;

/// Slots of the bulk area. Two would let a rank stage while its peers read; with four, ranks that
/// share a core seldom wait for each other.
const SLOTS: usize = 4;
/// Most bytes of an area for small operations.
const SMALL_BYTES_MAX: usize = 32 << 10;
/// Everything is cut at cache lines.
pub(crate) const LINE: usize = 64;

/// How each rank's staging memory is cut up; the same on all ranks of a host.
#[derive(Clone, Copy, Debug)]
struct Areas {
    small: usize,
    slot: usize,
}

impl Areas {
    fn of(staging: usize, ranks: usize) -> Result<Self, CollectiveError> {
        let down = |bytes: usize| bytes - bytes % LINE;
        let small = down((staging / 4 / SMALL_AREAS).min(SMALL_BYTES_MAX));
        let slot = down((staging - SMALL_AREAS * small) / SLOTS);
        if slot / LINE < ranks {
            return Err(CollectiveError::StagingTooSmall {
                have: staging,
                ranks,
            });
        }
        Ok(Self { small, slot })
    }
}

/// The members of this operation on this host and their memory.
pub(crate) struct Local<'a> {
    arena: Arena,
    areas: Areas,
    /// Arena index of each member on this host.
    index: &'a [usize],
    me: usize,
}

/// One slot of every member.
pub(crate) struct Slots<'a> {
    local: &'a Local<'a>,
    offset: usize,
}

impl Slots<'_> {
    /// The slot of the member at a position among this host's members.
    pub(crate) fn of(&self, position: usize) -> *mut u8 {
        self.local
            .arena
            .staging(self.local.index[position])
            .wrapping_add(self.offset)
    }
}

/// What a pipelined operation does in each step, between the waits. Called in order of steps within
/// each method; `stage` runs ahead of `reduce`, and that of `finish`.
pub(crate) trait Work {
    /// Writes this rank's slot.
    fn stage(&mut self, step: usize, mine: *mut u8);
    /// Reads the peers' slots, writes what it owns; only in plans that reduce.
    fn reduce(&mut self, _step: usize, _slots: &Slots<'_>) {}
    /// Reads the peers' slots for the last time.
    fn finish(&mut self, step: usize, slots: &Slots<'_>);
}

/// The shape of a pipelined operation; the same on all members of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) steps: usize,
    /// Whether results are written back to the slots for others to collect.
    pub(crate) reduces: bool,
    /// The one member that stages, if not all do.
    pub(crate) producer: Option<usize>,
}

fn flag_value(seq: Seq, step: u64) -> u64 {
    (seq.0 << STEP_BITS) | step
}

fn check_steps(steps: u64) -> Result<(), CollectiveError> {
    let max = (1 << STEP_BITS) - 1;
    if steps > max {
        Err(CollectiveError::TooManySteps { steps, max })
    } else {
        Ok(())
    }
}

impl<'a> Local<'a> {
    /// `None` when this rank has no other member on its host.
    pub(crate) fn new(ctx: &Ctx<'a>) -> Result<Option<Self>, CollectiveError> {
        let index = ctx.layout.arena();
        let Some(arena) = ctx.data.arena().filter(|_| index.len() > 1) else {
            return Ok(None);
        };
        let areas = Areas::of(arena.staging_len(), arena.members().len())?;
        Ok(Some(Self {
            arena: arena.clone(),
            areas,
            index,
            me: ctx.layout.my_local(),
        }))
    }

    /// Bytes that one member may stage in one step.
    pub(crate) fn slot_len(&self) -> usize {
        self.areas.slot
    }

    /// Bytes of a small operation at most.
    pub(crate) fn small_len(&self) -> usize {
        self.areas.small
    }

    /// Number of members on this host.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// Position of this member among them.
    pub(crate) fn me(&self) -> usize {
        self.me
    }

    fn peers(&self) -> impl Iterator<Item = usize> + '_ {
        self.index
            .iter()
            .enumerate()
            .filter(|(i, _)| *i != self.me)
            .map(|(_, arena)| *arena)
    }

    /// Whether all `of` have published at least `value`.
    fn reached(&self, of: impl IntoIterator<Item = usize>, flag: usize, value: u64) -> bool {
        of.into_iter()
            .all(|peer| self.arena.peek(peer, flag) >= value)
    }

    fn is_free(&self, last: &LastUse) -> bool {
        self.reached(last.readers.iter().copied(), DONE, last.value)
    }

    fn publish(&self, flag: usize, value: u64) {
        self.arena.publish(flag, value, self.index);
    }

    /// One step through the small area: `stage` writes this rank's, `finish` reads all of them.
    pub(crate) fn run_small(
        &self,
        ctx: &mut Ctx<'_>,
        stage: impl FnOnce(*mut u8),
        finish: impl FnOnce(&Slots<'_>),
    ) -> Result<(), CollectiveError> {
        let step = ctx.scratch.claim(ctx.seq, 1) + 1;
        check_steps(step)?;
        let value = flag_value(ctx.seq, step);
        let area = (ctx.seq.0 % SMALL_AREAS as u64) as usize;
        let slots = Slots {
            local: self,
            offset: area * self.areas.small,
        };
        wait(ctx.idle, || self.is_free(&ctx.scratch.small[area]))?;
        stage(slots.of(self.me));
        self.publish(STAGED, value);
        wait(ctx.idle, || self.reached(self.peers(), STAGED, value))?;
        finish(&slots);
        self.publish(DONE, value);
        ctx.scratch.small[area].set(value, self.index);
        Ok(())
    }

    /// Runs `work` through the bulk area, each stage as far ahead as slots allow.
    pub(crate) fn run(
        &self,
        ctx: &mut Ctx<'_>,
        plan: Plan,
        work: &mut dyn Work,
    ) -> Result<(), CollectiveError> {
        let base = ctx.scratch.claim(ctx.seq, plan.steps as u64);
        check_steps(base + plan.steps as u64)?;
        // The value that says that step `n` (from 0) is through.
        let value = |n: usize| flag_value(ctx.seq, base + n as u64 + 1);
        let slots = |step: usize| Slots {
            local: self,
            offset: SMALL_AREAS * self.areas.small + step % SLOTS * self.areas.slot,
        };
        let produces = plan.producer.is_none_or(|producer| producer == self.me);
        let awaited = |reduced: bool, step: usize| match plan.producer {
            Some(producer) if producer == self.me => true,
            Some(producer) => self.reached([self.index[producer]], STAGED, value(step)),
            None => self.reached(
                self.peers(),
                if reduced { REDUCED } else { STAGED },
                value(step),
            ),
        };
        let mut free = !produces;
        let mut staged = if produces { 0 } else { plan.steps };
        let (mut reduced, mut finished, mut spins) = (0, 0, 0);
        while finished < plan.steps {
            let ready = if plan.reduces { reduced } else { staged };
            if finished < ready && awaited(plan.reduces, finished) {
                work.finish(finished, &slots(finished));
                self.publish(DONE, value(finished));
                finished += 1;
            } else if plan.reduces && reduced < staged && awaited(false, reduced) {
                work.reduce(reduced, &slots(reduced));
                self.publish(REDUCED, value(reduced));
                reduced += 1;
            } else if staged < plan.steps
                && (free || self.is_free(&ctx.scratch.bulk))
                && (staged < SLOTS || self.reached(self.peers(), DONE, value(staged - SLOTS)))
            {
                free = true;
                work.stage(staged, slots(staged).of(self.me));
                self.publish(STAGED, value(staged));
                staged += 1;
            } else {
                ctx.idle.idle(spins)?;
                spins = spins.saturating_add(1);
                continue;
            }
            spins = 0;
        }
        if produces && plan.steps > 0 {
            ctx.scratch.bulk.set(value(plan.steps - 1), self.index);
        }
        Ok(())
    }
}

/// Waits until `ready`.
pub(crate) fn wait(
    idle: &mut dyn Idle,
    mut ready: impl FnMut() -> bool,
) -> Result<(), CollectiveError> {
    let mut spins = 0;
    while !ready() {
        idle.idle(spins)?;
        spins = u32::saturating_add(spins, 1);
    }
    Ok(())
}

//! Operations inside a host: the layout of staging memory, and the pipeline that runs over it.
//!
//! Three flags per rank order the accesses to its staging memory. Their values only grow: the operation's place in the
//! job's total order, then the steps within it. Overlapping process sets need nothing more, because every rank runs its
//! operations in that order. An operation may have two pipelines under way, each on a [`Track`] with its own flags and
//! slots.
//!
//! To read a line that a peer wrote is cheap: the line is transferred from the peer's cache. To write a line that a
//! peer has read since costs several times as much, unless the peer wrote it, too. The reader of staged bytes therefore
//! writes that memory next, wherever the scheme allows. Results replace their operands. Where a member's staged bytes
//! have one reader, the two swap places after each round. The cheapest write is to a line that is still in the
//! first-level cache from the read.

use horovod_protocol::{OperationTag, Seq};
use horovod_transport::{Arena, Data, Idle};

use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::layout::SetLayout;
use crate::scratch::{LastUse, PRESTAGED_AREAS, SMALL_AREAS, Scratch, TRACKS};
use crate::select::PRESTAGED_BYTES_MAX;

/// The rank has staged its chunks up to this step.
const STAGED: usize = 0;
/// The rank's reduced results are complete up to this step.
const REDUCED: usize = 1;
/// The rank has read all it needs of its peers' memory up to this step.
const DONE: usize = 2;

/// Bits of a flag value that count steps; the rest is the sequence number.
const STEP_BITS: u32 = 24;

/// Flags of one track: [`STAGED`], [`REDUCED`] and [`DONE`].
const TRACK_FLAGS: usize = 3;
/// First flag behind those of both tracks: the tag of the operand in each area for pre-staged operands.
const PRESTAGED: usize = TRACKS * TRACK_FLAGS;
const _: () = assert!(PRESTAGED + PRESTAGED_AREAS <= Arena::FLAGS);

/// Slots of a track at their full length. With two, a rank could stage while its peers read; with four, ranks that
/// share a core seldom wait for each other.
const SLOTS: usize = 4;
/// Largest area for small operations, in bytes.
const SMALL_BYTES_MAX: usize = 32 << 10;
/// Bytes of a cache line; all areas are cut at cache lines.
pub(crate) const LINE: usize = 64;

/// Layout of each rank's staging memory; the same on all ranks of a host.
#[derive(Clone, Copy, Debug)]
struct Areas {
    small: usize,
    ahead: usize,
    slot: usize,
}

/// Selects the flags and slots of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Track {
    /// For operations with one pipeline.
    First,
    /// For a second pipeline that runs beside the first.
    Second,
}

impl Areas {
    fn of(staging: usize, ranks: usize) -> Result<Self, CollectiveError> {
        let down = |bytes: usize| bytes - bytes % LINE;
        let small = down((staging / 4 / SMALL_AREAS).min(SMALL_BYTES_MAX));
        let ahead = down((staging / 8 / PRESTAGED_AREAS).min(PRESTAGED_BYTES_MAX));
        let rest = staging - SMALL_AREAS * small - PRESTAGED_AREAS * ahead;
        let slot = down(rest / (TRACKS * SLOTS));
        if slot / LINE < ranks {
            return Err(CollectiveError::StagingTooSmall {
                have: staging,
                ranks,
            });
        }
        Ok(Self { small, ahead, slot })
    }

    /// Returns where the slots of the first track begin.
    fn before_slots(&self) -> usize {
        SMALL_AREAS * self.small + PRESTAGED_AREAS * self.ahead
    }
}

/// The members of this operation on this host and their memory.
pub(crate) struct Local<'a> {
    arena: std::sync::Arc<Arena>,
    areas: Areas,
    /// Arena index of each member on this host.
    index: &'a [usize],
    me: usize,
}

/// One slot of every member.
pub(crate) struct Slots<'a> {
    local: &'a Local<'a>,
    offset: usize,
    /// The members that exchange bytes have swapped places.
    swapped: bool,
}

impl Slots<'_> {
    /// Returns the slot of the member at a position among this host's members.
    pub(crate) fn of(&self, position: usize) -> *mut u8 {
        self.area(if self.swapped { 1 - position } else { position })
    }

    /// Returns this member's slot.
    pub(crate) fn mine(&self) -> *mut u8 {
        self.of(self.local.me)
    }

    /// Returns where this member stages its part, of `part` bytes, for the member at `position`.
    pub(crate) fn to(&self, position: usize, part: usize) -> *mut u8 {
        self.between(self.local.me, position, part)
    }

    /// Returns where the member at `position` stages its part, of `part` bytes, for this member.
    pub(crate) fn from(&self, position: usize, part: usize) -> *mut u8 {
        self.between(position, self.local.me, part)
    }

    fn between(&self, from: usize, to: usize, part: usize) -> *mut u8 {
        let (owner, place) = if self.swapped { (to, from) } else { (from, to) };
        self.area(owner).wrapping_add(place * part)
    }

    fn area(&self, owner: usize) -> *mut u8 {
        self.local
            .arena
            .staging(self.local.index[owner])
            .wrapping_add(self.offset)
    }
}

/// Work of a pipelined operation in each step, between the waits. Each method is called in the order of steps; `stage`
/// runs ahead of `reduce`, and `reduce` ahead of `finish`. The work of a step depends only on its number, because a
/// suspended operation is resumed with new work of the same kind.
pub(crate) trait Work {
    /// Writes this rank's slot.
    fn stage(&mut self, step: usize, slots: &Slots<'_>);
    /// Reads the peers' slots and writes results there; only in schedules that reduce.
    fn reduce(&mut self, _step: usize, _slots: &Slots<'_>) {}
    /// Reads slots for the last time: its own slot, with the peers' results, in schedules that reduce; otherwise the
    /// peers' slots.
    fn finish(&mut self, step: usize, slots: &Slots<'_>);
    /// [`Self::finish`] of one step and [`Self::stage`] of the step that uses its slot next; only with `refills`.
    fn refill(&mut self, finished: usize, staged: usize, slots: &Slots<'_>) {
        self.finish(finished, slots);
        self.stage(staged, slots);
    }
}

/// The shape of a pipelined operation; the same on all members of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) steps: usize,
    pub(crate) pattern: Pattern,
    /// Bytes of a slot, at most [`SLOTS`] times [`Local::slot_len`]. A track has more slots if they are shorter.
    pub(crate) slot_len: usize,
}

/// Readers of the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Every member stages a part for each other member, which replaces the part by its result. After all results have
    /// arrived, only its owner uses the slot.
    Reduce {
        /// One pass reads a slot's results and writes the next operands there, which fetches its lines once.
        refills: bool,
    },
    /// Every member stages for all others.
    Share,
    /// Every member stages a part for each other member, so that each part has one reader. The work uses [`Slots::to`]
    /// and [`Slots::from`].
    Pairs,
    /// One member stages for all others.
    From(usize),
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
    /// Returns `None` if this rank has no other member on its host.
    pub(crate) fn new(ctx: &Ctx<'a>) -> Result<Option<Self>, CollectiveError> {
        Self::of(ctx.data, ctx.layout)
    }

    /// As [`Self::new`], for callers without a context.
    pub(crate) fn of(data: &Data, layout: &'a SetLayout) -> Result<Option<Self>, CollectiveError> {
        let index = layout.arena();
        let Some(arena) = data.arena().filter(|_| index.len() > 1) else {
            return Ok(None);
        };
        let areas = Areas::of(arena.staging_len(), arena.members().len())?;
        Ok(Some(Self {
            arena: arena.clone(),
            areas,
            index,
            me: layout.my_local(),
        }))
    }

    /// Returns how many bytes one member may stage in one step.
    pub(crate) fn slot_len(&self) -> usize {
        self.areas.slot
    }

    /// Returns how many bytes a small operation may have.
    pub(crate) fn small_len(&self) -> usize {
        self.areas.small
    }

    /// Returns the number of members on this host.
    pub(crate) fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns the position of this member among those of this host.
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

    /// Returns whether all of `of` have published at least `value`.
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

    /// Lets `stage` write `bytes` for the operation that will have this tag. Returns `false` if no area is free. Only
    /// before this rank announces the operation, and while no other tag waits for its operation.
    pub(crate) fn prestage(
        &self,
        scratch: &Scratch,
        tag: OperationTag,
        bytes: usize,
        stage: impl FnOnce(*mut u8),
    ) -> bool {
        // First check the area that was used longer ago, because each check reads the peers' flags.
        let mut by_age: [usize; PRESTAGED_AREAS] = std::array::from_fn(|area| area);
        by_age.sort_unstable_by_key(|area| scratch.prestaged[*area].value);
        let is_free =
            |area: &usize| bytes <= self.areas.ahead && self.is_free(&scratch.prestaged[*area]);
        let Some(area) = by_age.into_iter().find(is_free) else {
            return false;
        };
        stage(self.prestaged_area(self.index[self.me], area));
        self.arena.publish(PRESTAGED + area, tag.0, &[]);
        true
    }

    /// Runs the whole operation if all members have staged under this tag; returns whether they have. Every member gets
    /// the same answer: it is settled before the operation is agreed on, and does not change until all members have
    /// completed the operation.
    pub(crate) fn run_prestaged(
        &self,
        ctx: &mut Ctx<'_>,
        tag: OperationTag,
        finish: impl FnOnce(&dyn Fn(usize) -> *const u8),
    ) -> Result<bool, CollectiveError> {
        let area_of = |arena: usize| {
            (0..PRESTAGED_AREAS).find(|area| self.arena.peek(arena, PRESTAGED + area) == tag.0)
        };
        let Some(mine) = area_of(self.index[self.me]) else {
            return Ok(false);
        };
        if !self.peers().all(|peer| area_of(peer).is_some()) {
            return Ok(false);
        }
        let step = ctx.scratch.claim(ctx.seq, 1) + 1;
        check_steps(step)?;
        finish(&|position| {
            let arena = self.index[position];
            self.prestaged_area(arena, area_of(arena).unwrap_or_default())
        });
        let value = flag_value(ctx.seq, step);
        // No rank sleeps until these areas are free, so no wake-up is needed.
        self.arena.publish(DONE, value, &[]);
        ctx.scratch.prestaged[mine].set(value, self.index);
        Ok(true)
    }

    fn prestaged_area(&self, arena: usize, area: usize) -> *mut u8 {
        let offset = SMALL_AREAS * self.areas.small + area * self.areas.ahead;
        self.arena.staging(arena).wrapping_add(offset)
    }

    /// Runs one step through the small area: `stage` writes this rank's slot, `finish` reads all slots.
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
            swapped: false,
        };
        // Stage only once: after a suspension the peers may be reading this slot.
        if ctx.scratch.staged_small != value {
            wait(ctx.idle, || self.is_free(&ctx.scratch.small[area]))?;
            stage(slots.of(self.me));
            self.publish(STAGED, value);
            ctx.scratch.staged_small = value;
        }
        wait(ctx.idle, || self.reached(self.peers(), STAGED, value))?;
        finish(&slots);
        self.publish(DONE, value);
        ctx.scratch.small[area].set(value, self.index);
        Ok(())
    }

    /// Runs `work` through the first track; each stage runs as far ahead as slots allow.
    pub(crate) fn run(
        &self,
        ctx: &mut Ctx<'_>,
        schedule: Schedule,
        work: &mut dyn Work,
    ) -> Result<(), CollectiveError> {
        let mut pipeline = Pipeline::new(ctx, schedule, Track::First)?;
        let mut spins = 0;
        let mut result = Ok(());
        while result.is_ok() && !pipeline.is_done() {
            if pipeline.step(self, ctx, work, usize::MAX) {
                spins = 0;
            } else {
                result = ctx.idle.idle(spins);
                spins = u32::saturating_add(spins, 1);
            }
        }
        if result.is_err() {
            // Keep the position, in case the operation is resumed.
            ctx.scratch.pause(pipeline);
        }
        Ok(result?)
    }
}

/// A pipelined operation under way. All members of the host make the same pipelines in the same order.
#[derive(Debug)]
pub(crate) struct Pipeline {
    schedule: Schedule,
    track: Track,
    seq: Seq,
    /// Steps of this operation before this pipeline.
    base: u64,
    /// The earlier readers of the track's slots have finished, so this pipeline may stage.
    free: bool,
    staged: usize,
    reduced: usize,
    finished: usize,
}

impl Pipeline {
    pub(crate) fn new(
        ctx: &mut Ctx<'_>,
        schedule: Schedule,
        track: Track,
    ) -> Result<Self, CollectiveError> {
        let base = ctx.scratch.claim(ctx.seq, schedule.steps as u64);
        check_steps(base + schedule.steps as u64)?;
        if let Some(paused) = ctx.scratch.resume(base) {
            return Ok(paused);
        }
        Ok(Self {
            schedule,
            track,
            seq: ctx.seq,
            base,
            free: false,
            staged: 0,
            reduced: 0,
            finished: 0,
        })
    }

    /// Returns the steps of the operation before this pipeline, which identify the pipeline within the operation.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Returns whether this rank has nothing left to do.
    pub(crate) fn is_done(&self) -> bool {
        self.finished == self.schedule.steps
    }

    /// Returns the number of steps of which this rank has read all it needs.
    pub(crate) fn finished(&self) -> usize {
        self.finished
    }

    /// Returns the flag value that marks step `n` (from 0) as complete.
    fn value(&self, n: usize) -> u64 {
        flag_value(self.seq, self.base + n as u64 + 1)
    }

    fn flag(&self, flag: usize) -> usize {
        self.track as usize * TRACK_FLAGS + flag
    }

    fn slots<'a>(&self, local: &'a Local<'a>, step: usize) -> Slots<'a> {
        let track = self.track as usize * SLOTS * local.areas.slot;
        let (count, slot_len) = (self.slot_count(local), self.schedule.slot_len);
        Slots {
            local,
            offset: local.areas.before_slots() + track + step % count * slot_len,
            swapped: self.swaps(local) && step / count % 2 == 1,
        }
    }

    fn slot_count(&self, local: &Local<'_>) -> usize {
        SLOTS * local.areas.slot / self.schedule.slot_len
    }

    /// Returns whether members write next where they have just read.
    fn swaps(&self, local: &Local<'_>) -> bool {
        match self.schedule.pattern {
            Pattern::Pairs => true,
            Pattern::Share => local.len() == 2,
            Pattern::Reduce { .. } | Pattern::From(_) => false,
        }
    }

    /// Returns whether a slot may be written once this rank itself has finished its step.
    fn returns_slots(&self, local: &Local<'_>) -> bool {
        matches!(self.schedule.pattern, Pattern::Reduce { .. }) || self.swaps(local)
    }

    /// Returns whether the peers whose slots this rank reads have set `flag` for a step.
    fn awaited(&self, local: &Local<'_>, flag: usize, step: usize) -> bool {
        let (flag, value) = (self.flag(flag), self.value(step));
        match self.schedule.pattern {
            Pattern::From(producer) if producer == local.me => true,
            Pattern::From(producer) => local.reached([local.index[producer]], flag, value),
            _ => local.reached(local.peers(), flag, value),
        }
    }

    /// Performs the most urgent action that is possible now; returns whether there was one. Stages no step from
    /// `stage_limit` on.
    pub(crate) fn step(
        &mut self,
        local: &Local<'_>,
        ctx: &mut Ctx<'_>,
        work: &mut dyn Work,
        stage_limit: usize,
    ) -> bool {
        let schedule = self.schedule;
        let reduces = matches!(schedule.pattern, Pattern::Reduce { .. });
        let refills = schedule.pattern == Pattern::Reduce { refills: true };
        let produces = match schedule.pattern {
            Pattern::From(producer) => producer == local.me,
            _ => true,
        };
        let staged = if produces {
            self.staged
        } else {
            schedule.steps
        };
        let (ready, flag) = if reduces {
            (self.reduced, REDUCED)
        } else {
            (staged, STAGED)
        };
        let stage_end = schedule.steps.min(stage_limit);
        let count = self.slot_count(local);
        // Work that refills slots fills all of them first.
        let fills = refills && staged < count.min(stage_end) && self.may_stage(local, ctx);
        if !fills && self.finished < ready && self.awaited(local, flag, self.finished) {
            let slots = self.slots(local, self.finished);
            if refills && staged == self.finished + count && staged < stage_end {
                work.refill(self.finished, staged, &slots);
                local.publish(self.flag(STAGED), self.value(staged));
                self.staged += 1;
            } else {
                work.finish(self.finished, &slots);
            }
            let asked_for = !self.returns_slots(local) || self.finished + 1 == schedule.steps;
            if asked_for && !reduces {
                local.publish(self.flag(DONE), self.value(self.finished));
            }
            self.finished += 1;
        } else if !fills
            && reduces
            && self.reduced < staged
            && self.awaited(local, STAGED, self.reduced)
        {
            work.reduce(self.reduced, &self.slots(local, self.reduced));
            local.publish(self.flag(REDUCED), self.value(self.reduced));
            self.reduced += 1;
        } else if staged < stage_end && self.may_stage(local, ctx) {
            work.stage(staged, &self.slots(local, staged));
            local.publish(self.flag(STAGED), self.value(staged));
            self.staged += 1;
            if self.staged == schedule.steps && !reduces {
                let last = self.value(schedule.steps - 1);
                ctx.scratch.bulk[self.track as usize].set(last, local.index);
            }
        } else {
            return false;
        }
        true
    }

    /// Returns whether no rank needs the contents of the slot of the next step to stage.
    fn may_stage(&mut self, local: &Local<'_>, ctx: &Ctx<'_>) -> bool {
        let done = self.flag(DONE);
        if !self.free {
            let last = &ctx.scratch.bulk[self.track as usize];
            self.free = local.reached(last.readers.iter().copied(), done, last.value);
        }
        let through = |step: usize| {
            if self.returns_slots(local) {
                step < self.finished
            } else {
                local.reached(local.peers(), done, self.value(step))
            }
        };
        let count = self.slot_count(local);
        self.free && (self.staged < count || through(self.staged - count))
    }
}

/// How bytes from a slot are written to their destination.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Landing {
    /// Write past the caches.
    pub(crate) streaming: bool,
    /// Write the bytes back to the slot, too, so that its owner may soon write there again.
    pub(crate) taking: bool,
}

/// Shorter pieces gain nothing from a write past the caches.
const STREAMED_MIN: usize = 1 << 10;

impl Landing {
    /// Copies `bytes` from a slot.
    ///
    /// # Safety
    /// Both are readable and writable for `bytes`, without overlap; no other code touches either.
    pub(crate) unsafe fn copy(self, from: *mut u8, to: *mut u8, bytes: usize) {
        let streaming = self.streaming && bytes >= STREAMED_MIN;
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match (streaming, self.taking) {
                (false, false) => to.copy_from_nonoverlapping(from, bytes),
                (true, false) => horovod_kernels::copy_streaming(from, to, bytes),
                (false, true) => horovod_kernels::copy_taking(from, to, bytes),
                (true, true) => horovod_kernels::copy_taking_streaming(from, to, bytes),
            }
        }
    }
}

/// Waits until `ready` returns `true`.
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

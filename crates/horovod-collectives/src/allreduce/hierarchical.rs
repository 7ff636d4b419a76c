//! Several hosts: reduce inside each host so that lane owners get its partial result, reduce each lane across hosts,
//! and collect the lanes inside each host. All three phases run at the same time, a step apart.
//!
//! There are as many lanes as the smallest host has members, so hosts may differ in size. The first members of each
//! host own the lanes; the other members of larger hosts only contribute and collect. A small vector is one lane.

use std::ops::Range;

use horovod_kernels::Source;

use super::across::{self, sendable, to_the_end};
use super::group::{Going, Group, parts};
use super::{GroupPosition, Reducer, reduce_range};
use crate::context::Ctx;
use crate::error::CollectiveError;
use crate::local::{LINE, Landing, Local, Pattern, Pipeline, Schedule, Slots, Track, Work};
use crate::select::Across;
use crate::slices::{Parts, Segment, Vector, even_part};

pub(super) fn run(
    ctx: &mut Ctx<'_>,
    algorithm: Across,
    reducer: &Reducer,
    vector: &Vector,
) -> Result<(), CollectiveError> {
    let local = Local::new(ctx)?;
    let bytes = vector.len() * vector.size();
    // The choice is the same on all hosts, because all have the same settings.
    let small = algorithm == Across::Exchange && bytes <= ctx.tuning.exchange_max_bytes;
    let lanes = Lanes {
        len: vector.len(),
        lanes: if small { 1 } else { ctx.layout.lanes() },
        hosts: ctx.layout.hosts(),
        algorithm,
    };
    match local {
        None => alone_on_host(ctx, reducer, vector, lanes),
        Some(local) if small && bytes <= local.small_len() => {
            in_one_go(ctx, &local, reducer, vector, lanes)
        }
        Some(local) => side_by_side(ctx, &local, reducer, vector, lanes),
    }
}

/// The vector cut into one contiguous lane per owner, and each lane into the parts in which it passes between hosts.
/// All numbers are in elements.
#[derive(Clone, Copy)]
struct Lanes {
    len: usize,
    lanes: usize,
    hosts: usize,
    algorithm: Across,
}

impl Lanes {
    fn of(self, position: usize) -> Range<usize> {
        if position < self.lanes {
            even_part(self.len, self.lanes, position)
        } else {
            0..0
        }
    }

    fn parts(self, position: usize) -> Parts {
        parts(self.algorithm, self.of(position).len(), self.hosts)
    }

    /// Returns a step's part of a lane: `chunk` elements of each part, with the part's number.
    fn step(
        self,
        position: usize,
        step: usize,
        chunk: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let (lane, parts) = (self.of(position), self.parts(position));
        (0..parts.count).map(move |part| {
            let within = parts.between(part, step * chunk, (step + 1) * chunk);
            (part, lane.start + within.start..lane.start + within.end)
        })
    }

    /// Returns the number of steps of `chunk` elements that the longest lane takes.
    fn steps(self, chunk: usize) -> usize {
        self.parts(0).longest().div_ceil(chunk)
    }

    /// Returns the members that reduce this rank's lane across hosts.
    fn owners(self, ctx: &Ctx<'_>) -> Vec<usize> {
        let position = ctx.layout.my_local();
        (0..self.hosts)
            .map(|host| ctx.layout.on_host(host)[position])
            .collect()
    }
}

/// Returns this rank's lane of its host's partial result. With `reduced` the partial result is in the outputs;
/// otherwise it is in the inputs, because no other member of the host adds to them.
fn lane(ctx: &mut Ctx<'_>, vector: &Vector, range: Range<usize>, reduced: bool) -> Vector {
    ctx.scratch.vector(
        vector.size(),
        vector.pieces(range).map(|piece| Segment {
            input: if reduced {
                piece.output.cast_const()
            } else {
                piece.input
            },
            output: piece.output,
            elems: piece.elems,
        }),
    )
}

/// Runs on a host without another member: then there is one lane, and this rank owns it.
fn alone_on_host(
    ctx: &mut Ctx<'_>,
    reducer: &Reducer,
    vector: &Vector,
    lanes: Lanes,
) -> Result<(), CollectiveError> {
    let members = lanes.owners(ctx);
    let me = ctx.layout.my_host();
    let group = Group {
        members: &members,
        me,
    };
    let ready = sendable(ctx, reducer, vector, true);
    let plain = reducer.without_pre();
    let result = across::with(ctx, lanes.algorithm, &plain, &ready, group, to_the_end);
    ctx.scratch.put_vector(ready);
    result
}

/// Runs a small vector: the first member of the host reduces it, exchanges it with the other hosts, and distributes the
/// result.
fn in_one_go(
    ctx: &mut Ctx<'_>,
    local: &Local<'_>,
    reducer: &Reducer,
    vector: &Vector,
    lanes: Lanes,
) -> Result<(), CollectiveError> {
    let all = 0..vector.len();
    let (leader, partial) = (local.me() == 0, reducer.partial());
    let mut sources = std::mem::take(&mut ctx.scratch.sources);
    let stage = |mine: *mut u8| {
        for piece in vector.pieces(all.clone()).filter(|_| !leader) {
            // SAFETY: the caller of the collective vouches for the segments; the vector fits the
            // area, which no peer reads until it is published.
            unsafe { reducer.stage(&piece, mine.wrapping_add(piece.at)) };
        }
    };
    let group = GroupPosition {
        me: local.me(),
        members: local.len(),
    };
    let done = local.run_small(ctx, stage, |slots| {
        let theirs = |position| slots.of(position).cast_const();
        if leader {
            // SAFETY: as above; all peers have published their areas.
            unsafe {
                let pieces = vector.pieces(all.clone());
                reduce_range(&mut sources, &partial, pieces, group, theirs, None);
            }
        }
    });
    ctx.scratch.sources = sources;
    done?;
    if leader {
        let mine = lane(ctx, vector, all.clone(), true);
        let members = lanes.owners(ctx);
        let me = ctx.layout.my_host();
        let group = Group {
            members: &members,
            me,
        };
        let plain = reducer.without_pre();
        across::with(ctx, lanes.algorithm, &plain, &mine, group, to_the_end)?;
        ctx.scratch.put_vector(mine);
    }
    let size = vector.size();
    let give = |mine: *mut u8| {
        for piece in vector.pieces(all.clone()).filter(|_| leader) {
            let to = mine.wrapping_add(piece.at);
            // SAFETY: as above.
            unsafe { to.copy_from_nonoverlapping(piece.output, piece.elems * size) };
        }
    };
    local.run_small(ctx, give, |slots| {
        for piece in vector.pieces(all.clone()).filter(|_| !leader) {
            let from = slots.of(0).wrapping_add(piece.at);
            // SAFETY: as above; the first member has published the results.
            unsafe {
                piece
                    .output
                    .copy_from_nonoverlapping(from, piece.elems * size);
            }
        }
    })
}

/// Runs all phases at the same time: while a step is reduced inside the host, earlier steps pass between the hosts, and
/// still earlier steps are collected.
fn side_by_side(
    ctx: &mut Ctx<'_>,
    local: &Local<'_>,
    reducer: &Reducer,
    vector: &Vector,
    lanes: Lanes,
) -> Result<(), CollectiveError> {
    let size = vector.size();
    let align = LINE / size;
    let places = lanes.lanes * lanes.parts(0).count;
    let fits = local.slot_len() / places / LINE * align;
    // Elements of a part that pass between hosts in one step; the size of a slot may limit them.
    let chunk = (ctx.tuning.wire_chunk_bytes / size / align * align).clamp(align, fits.max(align));
    let schedule = Schedule {
        steps: lanes.steps(chunk),
        pattern: Pattern::Share,
        slot_len: local.slot_len(),
    };
    let partial = reducer.partial();
    let me = local.me();
    let mut inward = Inward {
        reducer: &partial,
        vector,
        lanes,
        chunk,
        me,
        members: local.len(),
        sources: Vec::new(),
    };
    let mut outward = Outward {
        vector,
        lanes,
        chunk,
        me,
        // A rank sends all its contributions before results arrive, so a vector of this size has left the caches by
        // then.
        landing: Landing {
            streaming: vector.len() * size >= ctx.tuning.stream_min_bytes,
            taking: false,
        },
    };
    let mut reducing = Pipeline::new(ctx, schedule, Track::First)?;
    let mut collecting = Pipeline::new(ctx, schedule, Track::Second)?;
    let mut drive = |ctx: &mut Ctx<'_>, mut going: Option<&mut dyn Going>| {
        let mut spins = 0;
        loop {
            let mut moved = false;
            if !reducing.is_done() {
                moved |= reducing.step(local, ctx, &mut inward, usize::MAX);
            }
            let extent = |steps: usize| {
                if steps == schedule.steps {
                    usize::MAX
                } else {
                    steps * chunk
                }
            };
            let mut results = usize::MAX;
            if let Some(going) = &mut going {
                if !going.is_done() {
                    moved |= going.step(ctx, extent(reducing.finished()))?;
                }
                results = if going.is_done() || going.finished() == lanes.parts(me).longest() {
                    usize::MAX
                } else {
                    going.finished() / chunk
                };
            }
            if !collecting.is_done() {
                moved |= collecting.step(local, ctx, &mut outward, results);
            }
            let across = going.as_ref().is_none_or(|going| going.is_done());
            if across && reducing.is_done() && collecting.is_done() {
                return Ok(());
            }
            if moved {
                spins = 0;
            } else {
                ctx.idle.idle(spins)?;
                spins = u32::saturating_add(spins, 1);
            }
        }
    };
    let range = lanes.of(me);
    if range.is_empty() {
        return drive(ctx, None);
    }
    let mine = lane(ctx, vector, range, true);
    let members = lanes.owners(ctx);
    let group = Group {
        members: &members,
        me: ctx.layout.my_host(),
    };
    let plain = reducer.without_pre();
    across::with(ctx, lanes.algorithm, &plain, &mine, group, |ctx, going| {
        drive(ctx, Some(going))
    })?;
    ctx.scratch.put_vector(mine);
    Ok(())
}

/// Reduces this host's partial result of each lane into the outputs of the lane's owner.
struct Inward<'a> {
    reducer: &'a Reducer,
    vector: &'a Vector,
    lanes: Lanes,
    chunk: usize,
    me: usize,
    members: usize,
    sources: Vec<Source>,
}

impl Inward<'_> {
    /// Returns where a step of a part of a lane lies in every slot.
    fn at(&self, slot: *mut u8, lane: usize, part: usize) -> *mut u8 {
        let place = lane * self.lanes.parts(0).count + part;
        slot.wrapping_add(place * self.chunk * self.vector.size())
    }
}

impl Work for Inward<'_> {
    fn stage(&mut self, step: usize, slots: &Slots<'_>) {
        let mine = slots.mine();
        for lane in (0..self.lanes.lanes).filter(|lane| *lane != self.me) {
            for (part, range) in self.lanes.step(lane, step, self.chunk) {
                let to = self.at(mine, lane, part);
                for piece in self.vector.pieces(range) {
                    // SAFETY: the caller of the collective vouches for the segments; a chunk fits
                    // its place in the slot, which no peer reads until it is published.
                    unsafe { self.reducer.stage(&piece, to.wrapping_add(piece.at)) };
                }
            }
        }
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        let mut sources = std::mem::take(&mut self.sources);
        for (part, range) in self.lanes.step(self.me, step, self.chunk) {
            // SAFETY: as in `stage`; all peers have published this step. An in-place step overwrites only those of its
            // own inputs that are never staged.
            unsafe {
                let theirs = |position| self.at(slots.of(position), self.me, part).cast_const();
                let reducer = self.reducer;
                let group = GroupPosition {
                    me: self.me,
                    members: self.members,
                };
                reduce_range(
                    &mut sources,
                    reducer,
                    self.vector.pieces(range),
                    group,
                    theirs,
                    None,
                );
            }
        }
        self.sources = sources;
    }
}

/// Copies the finished lanes to all members of the host.
struct Outward<'a> {
    vector: &'a Vector,
    lanes: Lanes,
    chunk: usize,
    me: usize,
    landing: Landing,
}

impl Outward<'_> {
    /// Returns where a step of a part of the owner's lane lies in its slot.
    fn at(&self, slot: *mut u8, part: usize) -> *mut u8 {
        slot.wrapping_add(part * self.chunk * self.vector.size())
    }
}

impl Work for Outward<'_> {
    fn stage(&mut self, step: usize, slots: &Slots<'_>) {
        let mine = slots.mine();
        for (part, range) in self.lanes.step(self.me, step, self.chunk) {
            let to = self.at(mine, part);
            for piece in self.vector.pieces(range) {
                let bytes = piece.elems * self.vector.size();
                // SAFETY: the caller of the collective vouches for the segments; a chunk fits its
                // place in the slot, which no peer reads until it is published.
                unsafe {
                    to.wrapping_add(piece.at)
                        .copy_from_nonoverlapping(piece.output, bytes);
                }
            }
        }
    }

    fn finish(&mut self, step: usize, slots: &Slots<'_>) {
        for lane in (0..self.lanes.lanes).filter(|lane| *lane != self.me) {
            for (part, range) in self.lanes.step(lane, step, self.chunk) {
                let from = self.at(slots.of(lane), part);
                for piece in self.vector.pieces(range) {
                    let bytes = piece.elems * self.vector.size();
                    // SAFETY: as in `stage`; the owner has published this step.
                    unsafe {
                        let from = from.wrapping_add(piece.at);
                        self.landing.copy(from, piece.output, bytes);
                    }
                }
            }
        }
    }
}

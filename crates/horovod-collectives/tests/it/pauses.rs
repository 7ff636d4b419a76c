//! Allreduces that a thread leaves in the middle and that go on later: broken off at every wait there is, they give the
//! bits of those that nobody disturbed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::common::{Node, World, exact_values, rough_values, uneven};
use horovod_collectives::{
    CollectiveError, Ctx, Reduction, Segment, StagingContext, allreduce, may_pause, prestage,
};
use horovod_protocol::{DType, OperationTag, ReduceOp, Scale};
use horovod_transport::{Aborted, Idle};

/// More waits than any operation here has: who waits so often waits for nothing.
const WAITS_MAX: u64 = 50_000;

/// Per call, per tensor, bytes.
type Outputs = Vec<Vec<Vec<u8>>>;

/// Several calls of one operation, as a group of tensors of several types makes them.
#[derive(Clone, Debug)]
struct Case {
    op: ReduceOp,
    scale: Scale,
    calls: Vec<(DType, usize)>,
    in_place: bool,
    /// The last rank has nothing to say.
    joined: bool,
    /// All ranks but the last have pre-staged their operand, so nobody can use it.
    tag: Option<OperationTag>,
}

impl Case {
    /// Every way to combine with and without factors, in every length that takes another path.
    fn all() -> Vec<Self> {
        let plain = Scale::NONE;
        let scaled = |pre, post| Scale { pre, post };
        let ops = [
            (ReduceOp::Sum, plain),
            (ReduceOp::Sum, scaled(0.3, 1.7)),
            (ReduceOp::Average, scaled(3.0, 1.0)),
            (ReduceOp::Min, plain),
            (ReduceOp::Min, scaled(-2.0, 1.0)),
            (ReduceOp::Max, scaled(0.7, 3.0)),
            (ReduceOp::Product, scaled(2.0, 1.0)),
        ];
        let calls: [&[(DType, usize)]; 6] = [
            // By everybody alone; in one step; in several that refill slots, and do not.
            &[(DType::F32, 40)],
            &[(DType::F16, 120)],
            &[(DType::F32, 700)],
            &[(DType::I32, 1300)],
            &[(DType::F32, 40), (DType::F16, 400), (DType::I32, 30)],
            &[(DType::F16, 1100), (DType::F64, 12)],
        ];
        let mut cases = Vec::new();
        for (i, (op, scale)) in ops.into_iter().enumerate() {
            for (j, calls) in calls.iter().enumerate() {
                for in_place in [true, false] {
                    cases.push(Self {
                        op,
                        scale,
                        calls: calls.to_vec(),
                        in_place,
                        joined: (i + j) % 3 == 2,
                        tag: (calls.len() == 1 && j == 0)
                            .then(|| OperationTag(cases.len() as u64 + 1)),
                    });
                }
            }
        }
        cases
    }

    fn reduction(&self, dtype: DType, size: usize) -> Reduction {
        Reduction {
            dtype,
            op: self.op,
            scale: self.scale,
            divisor: size as u32,
        }
    }

    fn is_silent(&self, node: &Node) -> bool {
        self.joined && node.rank == node.size - 1
    }

    /// This rank's tensors, one list per call.
    fn tensors(&self, rank: usize) -> Outputs {
        let values = |(call, (dtype, elems)): (usize, &(DType, usize))| {
            let lens = uneven(*elems).into_iter().enumerate();
            let of = |(i, len)| {
                let seed = rank * 101 + call * 17 + i;
                match dtype.is_float() {
                    true => rough_values(*dtype, len, seed),
                    false => exact_values(*dtype, self.op, len, seed),
                }
            };
            lens.map(of).collect()
        };
        self.calls.iter().enumerate().map(values).collect()
    }

    /// Runs it to its end, however often `idle` has to leave; gives all outputs.
    fn run(&self, node: &mut Node, leaving: &mut Leaving<'_>) -> Outputs {
        let mut inputs = self.tensors(node.rank);
        let mut outputs: Outputs = inputs
            .iter()
            .map(|call| call.iter().map(|t| vec![0xa5; t.len()]).collect())
            .collect();
        let silent = self.is_silent(node);
        let mut segments = Vec::new();
        for ((inputs, outputs), (dtype, _)) in inputs.iter_mut().zip(&mut outputs).zip(&self.calls)
        {
            let pairs = inputs.iter_mut().zip(outputs);
            let segment = |(input, output): (&mut Vec<u8>, &mut Vec<u8>)| {
                let from = input.as_mut_ptr();
                Segment {
                    input: if silent { std::ptr::null() } else { from },
                    output: if self.in_place {
                        from
                    } else {
                        output.as_mut_ptr()
                    },
                    elems: input.len() / dtype.size(),
                }
            };
            segments.push(pairs.map(segment).collect::<Vec<_>>());
        }
        let size = node.size;
        node.op(|ctx| {
            let bytes = self.calls.iter().map(|(dtype, n)| dtype.size() * n).sum();
            assert!(may_pause(self.op, bytes, ctx.data, ctx.layout, ctx.tuning));
            loop {
                let mut part = Ctx {
                    data: &mut *ctx.data,
                    idle: &mut *leaving,
                    members: ctx.members,
                    me: ctx.me,
                    seq: ctx.seq,
                    layout: ctx.layout,
                    tuning: ctx.tuning,
                    tag: self.tag,
                    scratch: &mut *ctx.scratch,
                };
                let mut calls = self.calls.iter().zip(&segments);
                let result: Result<(), CollectiveError> =
                    calls.try_for_each(|((dtype, _), call)| {
                        // SAFETY: the tensors are this thread's own.
                        unsafe { allreduce(&mut part, &self.reduction(*dtype, size), call) }
                    });
                match result {
                    Ok(()) => break,
                    Err(_) if std::mem::take(&mut leaving.has_left) => {
                        ctx.scratch.rewind();
                        leaving.others_go_on();
                    }
                    Err(e) => panic!("{e}"),
                }
            }
        });
        if self.in_place { inputs } else { outputs }
    }

    /// Some pre-stage, so that the operation has to find out that not all have.
    fn stage(&self, node: &mut Node) {
        let (Some(tag), [(dtype, elems)]) = (self.tag, &self.calls[..]) else {
            return;
        };
        let red = self.reduction(*dtype, node.size);
        let (last, rank) = (node.size - 1, node.rank);
        let mut data = rough_values(*dtype, *elems, 1);
        let segment = Segment {
            input: data.as_ptr(),
            output: data.as_mut_ptr(),
            elems: *elems,
        };
        node.op(|ctx| {
            let context = StagingContext {
                data: ctx.data,
                layout: ctx.layout,
                tuning: ctx.tuning,
                scratch: ctx.scratch,
                oversubscribed: true,
            };
            if rank != last {
                // SAFETY: this thread's own bytes; what is staged is never used.
                unsafe { prestage(context, tag, &red, segment) };
            }
        });
    }
}

/// Which rank runs: one at a time, until it has to wait. So every wait comes again with the same seed.
struct RoundRobin {
    state: Mutex<RoundRobinState>,
    changed: Condvar,
}

struct RoundRobinState {
    whose: usize,
    present: Vec<bool>,
    random: u64,
    /// How many have come to the barrier with this number.
    arrived: usize,
    barriers: u64,
    /// How often somebody left since the last operation began.
    left: u64,
}

impl RoundRobin {
    fn new(ranks: usize) -> Self {
        Self {
            state: Mutex::new(RoundRobinState {
                whose: 0,
                present: vec![true; ranks],
                random: 0,
                arrived: 0,
                barriers: 0,
                left: 0,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RoundRobinState> {
        self.state.lock().expect("another rank has failed")
    }

    /// Waits until `ready`; fails when another rank has.
    fn wait(
        &self,
        mut state: MutexGuard<'_, RoundRobinState>,
        ready: impl Fn(&RoundRobinState) -> bool,
    ) -> u64 {
        while !ready(&state) {
            let limit = Duration::from_secs(240);
            let next = self.changed.wait_timeout(state, limit);
            let (next, timeout) = next.expect("another rank has failed");
            assert!(!timeout.timed_out(), "nobody goes on");
            state = next;
        }
        state.left
    }

    /// Waits for all ranks, while none runs an operation; how often somebody left in the last one. The next begins as
    /// `seed` says.
    fn meet(&self, seed: u64) -> u64 {
        let mut state = self.lock();
        state.arrived += 1;
        let barriers = state.barriers;
        if state.arrived == state.present.len() {
            state.arrived = 0;
            state.barriers += 1;
            state.present.fill(true);
            state.random = seed;
            state.whose = seed as usize % state.present.len();
            self.changed.notify_all();
        }
        self.wait(state, |state| state.barriers > barriers)
    }

    fn take(&self, me: usize) {
        let state = self.lock();
        self.wait(state, |state| state.whose == me);
    }

    /// Lets another one run.
    fn pass(&self, is_leaving: bool) {
        let mut state = self.lock();
        let me = state.whose;
        state.present[me] = !is_leaving;
        let others: Vec<usize> = (0..state.present.len())
            .filter(|rank| *rank != me && state.present[*rank])
            .collect();
        if !others.is_empty() {
            state.random = state
                .random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state.whose = others[(state.random >> 33) as usize % others.len()];
        }
        self.changed.notify_all();
    }
}

/// Wakes the others when a rank fails, so that they do, too.
struct Poison<'a>(&'a RoundRobin);

impl Drop for Poison<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let state = self.0.state.lock();
            self.0.changed.notify_all();
            drop(state);
        }
    }
}

/// How a rank waits.
#[derive(Clone, Copy)]
enum Among<'a> {
    /// Of those of whom one runs at a time; which one it is.
    RoundRobin(&'a RoundRobin, usize),
    /// Of those that all run at the same time, until one has failed.
    All(&'a AtomicBool),
}

/// How a rank waits that leaves in some of its waits.
struct Leaving<'a> {
    among: Among<'a>,
    /// Whether it leaves in its wait with this number, counted from 1.
    leaves: &'a dyn Fn(u64) -> bool,
    waits: u64,
    /// It has, and the operation shall go on.
    has_left: bool,
    times: u64,
}

impl<'a> Leaving<'a> {
    fn new(among: Among<'a>, leaves: &'a dyn Fn(u64) -> bool) -> Self {
        Self {
            among,
            leaves,
            waits: 0,
            has_left: false,
            times: 0,
        }
    }

    fn others_go_on(&self) {
        match self.among {
            Among::RoundRobin(round_robin, me) => {
                assert!(self.waits < WAITS_MAX, "it waits for ever");
                round_robin.pass(false);
                round_robin.take(me);
            }
            Among::All(aborted) => {
                assert!(!aborted.load(Ordering::SeqCst), "another rank has failed");
                std::thread::yield_now();
            }
        }
    }
}

impl Idle for Leaving<'_> {
    fn idle(&mut self, _spins: u32) -> Result<(), Aborted> {
        self.waits += 1;
        if (self.leaves)(self.waits) {
            self.has_left = true;
            self.times += 1;
            return Err(Aborted("its thread had to leave".into()));
        }
        self.others_go_on();
        Ok(())
    }
}

/// Runs `case` on all ranks, one at a time, in the order that `seed` gives; tells how often somebody left.
fn in_round_robin(
    (node, case): (&mut Node, &Case),
    round_robin: &RoundRobin,
    seed: u64,
    leaves: &dyn Fn(u64) -> bool,
) -> (Outputs, u64) {
    case.stage(node);
    round_robin.meet(seed);
    round_robin.take(node.rank);
    let mut leaving = Leaving::new(Among::RoundRobin(round_robin, node.rank), leaves);
    let got = case.run(node, &mut leaving);
    round_robin.lock().left += leaving.times;
    round_robin.pass(true);
    let left = round_robin.meet(0);
    round_robin.meet(0);
    round_robin.lock().left = 0;
    (got, left)
}

/// Every case with `n` ranks: undisturbed, left at every wait, and left once, at each wait of each rank in turn.
fn every_wait(n: usize) {
    let round_robin = RoundRobin::new(n);
    let wrong = World::shm(n).run(|node| {
        let _poison = Poison(&round_robin);
        let me = node.rank;
        let mut waits = 0;
        let mut wrong = Vec::new();
        for (number, case) in Case::all().iter().enumerate() {
            let seed = number as u64;
            let mut run = |seed, leaves: &dyn Fn(u64) -> bool| {
                in_round_robin((node, case), &round_robin, seed, leaves)
            };
            let (want, _) = run(seed, &|_| false);
            for seed in [seed, seed + 1000] {
                let (got, times) = run(seed, &|_| true);
                if got != want {
                    wrong.push(format!("{case:?}: rank {me} when all left at every wait"));
                }
                waits += times;
            }
            for who in 0..n {
                for wait in 1.. {
                    let (got, times) = run(seed, &|number| who == me && number == wait);
                    if got != want {
                        wrong.push(format!(
                            "{case:?}: rank {me} when {who} left at wait {wait}"
                        ));
                    }
                    if times == 0 {
                        break;
                    }
                }
            }
        }
        assert!(waits > 100, "hardly anybody ever waits: {waits}");
        wrong
    });
    none_is(&wrong.concat());
}

fn none_is(wrong: &[String]) {
    let first = &wrong[..wrong.len().min(8)];
    assert!(wrong.is_empty(), "{} wrong: {first:#?}", wrong.len());
}

#[test]
fn two_ranks_leave_at_every_wait() {
    every_wait(2);
}

#[test]
fn three_ranks_leave_at_every_wait() {
    every_wait(3);
}

#[test]
fn four_ranks_leave_at_every_wait() {
    every_wait(4);
}

/// For the tools that watch memory: here nothing but the operations' own flags orders who touches what.
#[test]
fn ranks_leave_while_others_run() {
    for n in [2, 3, 4] {
        let wrong = World::shm(n).run(|node| {
            let aborted = node.idle.aborted.clone();
            let mut wrong = Vec::new();
            for (number, case) in Case::all().iter().enumerate() {
                // Miri and others are some thousand times slower.
                if cfg!(miri) && number % 9 != n {
                    continue;
                }
                case.stage(node);
                let want = case.run(node, &mut Leaving::new(Among::All(&aborted), &|_| false));
                for often in [1, 2, 5] {
                    let leaves = |wait: u64| wait.is_multiple_of(often);
                    case.stage(node);
                    let got = case.run(node, &mut Leaving::new(Among::All(&aborted), &leaves));
                    if got != want {
                        wrong.push(format!("{case:?}: left at every {often}. wait"));
                    }
                }
            }
            wrong
        });
        none_is(&wrong.concat());
    }
}

#[test]
fn what_keeps_no_place_may_not_be_left() {
    let may = |op, world: World| {
        let answers = world.run(|node| {
            node.op(|ctx| {
                let of = |bytes| may_pause(op, bytes, ctx.data, ctx.layout, ctx.tuning);
                [of(16), of(1 << 20)]
            })
        });
        answers.into_iter().flatten().all(|may| may)
    };
    assert!(may(ReduceOp::Max, World::shm(1)));
    assert!(may(ReduceOp::Max, World::shm(2)));
    for world in [World::tcp(2), World::hosts(&[1, 1]), World::hosts(&[2, 1])] {
        assert!(!may(ReduceOp::Sum, world));
    }
    assert!(!may(ReduceOp::Adasum, World::shm(2)));
}

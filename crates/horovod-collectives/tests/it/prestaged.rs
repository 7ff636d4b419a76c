//! Operands that were staged before their operation began: the same bits, no wait, and nothing that was meant for another
//! operation.

use std::sync::{Mutex, mpsc};
use std::time::Duration;

use crate::common::{Node, World, exact_values, oracle, rough_values};
use horovod_collectives::{Ctx, Reduction, Segment, StagingContext, allreduce, barrier, prestage};
use horovod_protocol::{DType, OperationTag, ReduceOp, Scale};
use horovod_transport::{Aborted, Idle};

/// An area of an arena with 16 KiB of staging memory.
const AREA: usize = 1 << 10;

/// Miri is some thousand times slower.
const WORLDS: &[usize] = if cfg!(miri) { &[2, 3] } else { &[2, 3, 4, 8] };
const ROUNDS: usize = if cfg!(miri) { 24 } else { 300 };

/// Fails whoever has to wait.
struct Never;

impl Idle for Never {
    fn idle(&mut self, _spins: u32) -> Result<(), Aborted> {
        Err(Aborted("it had to wait".into()))
    }
}

fn sum(dtype: DType) -> Reduction {
    Reduction {
        dtype,
        op: ReduceOp::Sum,
        scale: Scale::NONE,
        divisor: 1,
    }
}

fn segment(data: &mut [u8], dtype: DType) -> Segment {
    let output = data.as_mut_ptr();
    Segment {
        input: output,
        output,
        elems: data.len() / dtype.size(),
    }
}

fn stage(node: &mut Node, tag: u64, red: &Reduction, data: &mut [u8]) -> bool {
    let segment = segment(data, red.dtype);
    node.op(|ctx| {
        let context = StagingContext {
            data: ctx.data,
            layout: ctx.layout,
            tuning: ctx.tuning,
            scratch: ctx.scratch,
            oversubscribed: true,
        };
        // SAFETY: this thread's own bytes, which it does not touch until the operation has ended.
        unsafe { prestage(context, OperationTag(tag), red, segment) }
    })
}

/// Counts as many operations as [`stage`] does.
fn skip(node: &mut Node) {
    node.op(|_| ());
}

/// As the negotiation does it: nobody begins before all are ready.
fn meet(node: &mut Node) {
    node.op(barrier).expect("nobody aborts");
}

fn run(node: &mut Node, tag: u64, red: &Reduction, data: &mut [u8]) {
    let segments = [segment(data, red.dtype)];
    node.op(|ctx| {
        ctx.tag = Some(OperationTag(tag));
        // SAFETY: as in `stage`.
        unsafe { allreduce(ctx, red, &segments) }
    })
    .expect("nobody aborts");
}

#[test]
fn where_all_have_staged_nobody_waits_and_the_bits_are_the_same() {
    for world in WORLDS.iter().map(|n| World::shm(*n)) {
        world.run(|node| {
            let jobs = [
                (DType::F32, ReduceOp::Sum, Scale::NONE),
                (DType::F16, ReduceOp::Average, Scale::NONE),
                (DType::I32, ReduceOp::Average, Scale::NONE),
                (DType::F64, ReduceOp::Max, Scale::NONE),
                (
                    DType::BF16,
                    ReduceOp::Sum,
                    Scale {
                        pre: 0.3,
                        post: 1.7,
                    },
                ),
            ];
            for (number, (dtype, op, scale)) in jobs.into_iter().enumerate() {
                for elems in [1, 16, AREA / dtype.size()] {
                    let values = |rank: usize| match dtype.is_float() {
                        true => rough_values(dtype, elems, rank + 1),
                        false => exact_values(dtype, op, elems, rank + 1),
                    };
                    let inputs: Vec<_> = (0..node.size).map(values).collect();
                    let mut data = inputs[node.rank].clone();
                    let red = Reduction {
                        dtype,
                        op,
                        scale,
                        divisor: node.size as u32,
                    };
                    let tag = (number * 1000 + elems + 1) as u64;
                    assert!(stage(node, tag, &red, &mut data));
                    meet(node);
                    let segments = [segment(&mut data, dtype)];
                    node.op(|ctx| {
                        let mut ctx = Ctx {
                            data: ctx.data,
                            idle: &mut Never,
                            members: ctx.members,
                            me: ctx.me,
                            seq: ctx.seq,
                            layout: ctx.layout,
                            tuning: ctx.tuning,
                            tag: Some(OperationTag(tag)),
                            scratch: ctx.scratch,
                        };
                        // SAFETY: as in `stage`.
                        unsafe { allreduce(&mut ctx, &red, &segments) }
                    })
                    .expect("it does not wait");
                    assert_eq!(data, oracle(dtype, op, scale, &inputs), "{red:?} {elems}");
                }
            }
        });
    }
}

#[test]
fn some_stage_and_some_do_not_round_after_round() {
    World::shm(4).run(|node| {
        let red = sum(DType::F32);
        for round in 0..ROUNDS {
            let elems = 1 + round * 37 % (AREA / 4);
            let inputs: Vec<_> = (0..node.size)
                .map(|rank| exact_values(DType::F32, ReduceOp::Sum, elems, round * 8 + rank))
                .collect();
            let mut data = inputs[node.rank].clone();
            let tag = round as u64 + 1;
            // Sometimes all, sometimes all but one, sometimes nobody.
            let stages = match round % 3 {
                0 => true,
                1 => node.rank != round / 3 % 4,
                _ => round % 4 == 0,
            };
            if stages {
                // All have read what was staged two rounds ago: they have met since.
                assert!(stage(node, tag, &red, &mut data));
            } else {
                skip(node);
            }
            // No barrier after the operation: slow ranks still read while fast ones stage the next.
            meet(node);
            run(node, tag, &red, &mut data);
            let want = oracle(DType::F32, ReduceOp::Sum, Scale::NONE, &inputs);
            assert_eq!(data, want, "round {round}");
        }
    });
}

#[test]
fn what_nobody_has_read_yet_keeps_its_place() {
    let (done, first_is_done) = mpsc::channel();
    let (done, first_is_done) = (Mutex::new(done), Mutex::new(first_is_done));
    World::shm(2).run(|node| {
        let red = sum(DType::F32);
        let values = |rank, seed| exact_values(DType::F32, ReduceOp::Sum, 8, 10 * seed + rank);
        for round in 0..ROUNDS.min(50) {
            let mut data = values(node.rank, round);
            let tag = round as u64 + 1;
            assert!(stage(node, tag, &red, &mut data));
            meet(node);
            if node.rank == 0 {
                run(node, tag, &red, &mut data);
                // The peer has not run, so this goes to the other area.
                assert!(stage(node, 1000, &red, &mut values(7, 7)));
                done.lock().unwrap().send(()).unwrap();
            } else {
                let first = first_is_done.lock().unwrap();
                first.recv_timeout(Duration::from_secs(240)).unwrap();
                run(node, tag, &red, &mut data);
                skip(node);
            }
            let inputs = [0, 1].map(|rank| values(rank, round));
            let want = oracle(DType::F32, ReduceOp::Sum, Scale::NONE, &inputs);
            assert_eq!(data, want);
            meet(node);
        }
    });
}

#[test]
fn what_is_too_long_or_not_possible_is_not_staged() {
    World::shm(2).run(|node| {
        let mut data = vec![0; AREA + 4];
        assert!(!stage(node, 1, &sum(DType::F32), &mut data));
        assert!(!stage(node, 1, &sum(DType::F32), &mut []));
        let adasum = Reduction {
            op: ReduceOp::Adasum,
            ..sum(DType::F32)
        };
        assert!(!stage(node, 1, &adasum, &mut data[..64]));
        let scaled = Reduction {
            op: ReduceOp::Max,
            scale: Scale {
                pre: 2.0,
                post: 1.0,
            },
            ..sum(DType::F32)
        };
        assert!(!stage(node, 1, &scaled, &mut data[..64]));
    });
    for world in [World::tcp(2), World::hosts(&[1, 1]), World::hosts(&[2, 1])] {
        world.run(|node| assert!(!stage(node, 1, &sum(DType::F32), &mut [0; 64])));
    }
}

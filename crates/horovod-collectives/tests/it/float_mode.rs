//! Reductions on threads whose floating-point mode is not the default: the same bits, and the mode is still theirs afterwards.
#![cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]

use std::arch::asm;

use crate::common::{Node, World};
use horovod_collectives::{
    Reduction, ScatterItem, Segment, StagingContext, allreduce, barrier, prestage, reduce_scatter,
};
use horovod_protocol::{DType, OperationTag, ReduceOp, Scale};

/// Subnormal results are zeros; subnormal operands are; all is rounded up, or to zero; what is rounded ends the process.
/// Each by itself, so that none is overlooked beside another, and some together.
#[cfg(target_arch = "x86_64")]
const OTHERS: [u64; 6] = [
    DEFAULT | 0x8000,
    DEFAULT | 0x40,
    DEFAULT | 0x4000,
    DEFAULT | 0x6000,
    DEFAULT & !0x1000,
    DEFAULT | 0x8000 | 0x4000 | 0x40,
];
#[cfg(target_arch = "x86_64")]
const DEFAULT: u64 = 0x1f80;
/// Subnormals are zeros; all is rounded up, or to zero; NaNs lose what they carry; both of the first.
#[cfg(target_arch = "aarch64")]
const OTHERS: [u64; 5] = [1 << 24, 1 << 22, 3 << 22, 1 << 25, 1 << 24 | 1 << 22];
#[cfg(target_arch = "aarch64")]
const DEFAULT: u64 = 0;

#[cfg(target_arch = "x86_64")]
fn mode() -> u64 {
    let mut word = 0u32;
    // SAFETY: stores the register to `word`.
    unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack)) };
    // Without what has happened.
    u64::from(word & 0xffc0)
}

#[cfg(target_arch = "x86_64")]
fn set_mode(mode: u64) {
    let word = mode as u32;
    // SAFETY: a valid value; no arithmetic of the test depends on it.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack)) };
}

#[cfg(target_arch = "aarch64")]
fn mode() -> u64 {
    let word: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nostack)) };
    word
}

#[cfg(target_arch = "aarch64")]
fn set_mode(mode: u64) {
    // SAFETY: a valid value; no arithmetic of the test depends on it.
    unsafe { asm!("msr fpcr, {}", in(reg) mode, options(nostack)) };
}

/// Runs `operation` in another mode on every other rank, or on none.
fn run<T>(node: &mut Node, other: Option<u64>, operation: impl FnOnce(&mut Node) -> T) -> T {
    let other = other.filter(|_| node.rank.is_multiple_of(2));
    let wanted = other.unwrap_or(DEFAULT);
    set_mode(wanted);
    let result = operation(node);
    let left_in = mode();
    set_mode(DEFAULT);
    assert_eq!(left_in, wanted, "the thread's own mode");
    result
}

/// Subnormals and numbers whose sums are rounded, as bytes.
fn values(dtype: DType, elems: usize, seed: usize) -> Vec<u8> {
    let one = |i: usize| {
        let random = (i * 7_368_787 + seed * 1_299_709 + 17) % 4093;
        let is_subnormal = !i.is_multiple_of(3);
        match dtype {
            DType::F32 if is_subnormal => f32::from_bits(random as u32 + 1).to_ne_bytes().to_vec(),
            DType::F32 => (random as f32 / 4097.0).to_ne_bytes().to_vec(),
            DType::F64 if is_subnormal => f64::from_bits(random as u64 + 1).to_ne_bytes().to_vec(),
            DType::F64 => (random as f64 / 4097.0).to_ne_bytes().to_vec(),
            DType::F16 if is_subnormal => (random as u16 % 1023 + 1).to_ne_bytes().to_vec(),
            DType::BF16 if is_subnormal => (random as u16 % 127 + 1).to_ne_bytes().to_vec(),
            DType::F16 => half::f16::from_f64(random as f64 / 4097.0)
                .to_ne_bytes()
                .to_vec(),
            _ => half::bf16::from_f64(random as f64 / 4097.0)
                .to_ne_bytes()
                .to_vec(),
        }
    };
    (0..elems).flat_map(one).collect()
}

/// Every way to reduce, one after the other; all results.
fn reduce_all(node: &mut Node, other: Option<u64>) -> Vec<Vec<u8>> {
    let mut results = Vec::new();
    let ops = [
        (ReduceOp::Sum, Scale::NONE),
        (
            ReduceOp::Average,
            Scale {
                pre: 0.7,
                post: 1.3,
            },
        ),
        (
            ReduceOp::Max,
            Scale {
                pre: 0.7,
                post: 1.3,
            },
        ),
        (ReduceOp::Product, Scale::NONE),
        (ReduceOp::Adasum, Scale::NONE),
    ];
    let mut tag = 0;
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for (op, scale) in ops {
            let red = Reduction {
                dtype,
                op,
                scale,
                divisor: node.size as u32,
            };
            for (elems, prestaged) in [(9, true), (21, false), (900, false)] {
                tag += 1;
                let mut data = values(dtype, elems, node.rank);
                let output = data.as_mut_ptr();
                let segment = Segment {
                    input: output,
                    output,
                    elems,
                };
                let tag = prestaged.then_some(OperationTag(tag));
                run(node, other, |node| {
                    node.op(|ctx| {
                        let context = StagingContext {
                            data: ctx.data,
                            layout: ctx.layout,
                            tuning: ctx.tuning,
                            scratch: ctx.scratch,
                            oversubscribed: true,
                        };
                        if let Some(tag) = tag {
                            // SAFETY: this thread's own bytes.
                            unsafe { prestage(context, tag, &red, segment) };
                        }
                    });
                    node.op(barrier).expect("nobody aborts");
                    node.op(|ctx| {
                        ctx.tag = tag;
                        // SAFETY: as above.
                        unsafe { allreduce(ctx, &red, &[segment]) }
                    })
                    .expect("nobody aborts");
                });
                results.push(data);
            }
            if op != ReduceOp::Average {
                continue;
            }
            let (rows, row_elems) = (2 * node.size, 40);
            let mine = values(dtype, rows * row_elems, node.rank);
            let mut share = vec![0; mine.len() / node.size];
            let item = ScatterItem {
                input: mine.as_ptr(),
                rows,
                row_elems,
                output: share.as_mut_ptr(),
            };
            run(node, other, |node| {
                // SAFETY: as above.
                node.op(|ctx| unsafe { reduce_scatter(ctx, &red, &[item]) })
                    .expect("nobody aborts");
            });
            results.push(share);
        }
    }
    results
}

#[test]
fn a_thread_with_another_mode_gets_the_same_bits_and_keeps_it() {
    for world in [
        World::shm(1),
        World::shm(2),
        World::shm(4),
        World::tcp(2),
        World::hosts(&[2, 2]),
    ] {
        let want = world.run(|node| reduce_all(node, None));
        for mode in OTHERS {
            let got = world.run(|node| reduce_all(node, Some(mode)));
            assert!(got == want, "{world:?} with {mode:#x}");
        }
    }
}

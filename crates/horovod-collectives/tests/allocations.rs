//! No heap allocation per operation once the first few have warmed up, for what runs inside a host.
//!
//! All threads of this binary are counted, so it holds one test only.

#[path = "it/common/mod.rs"]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{World, alltoall};
use horovod_collectives::{
    ByteSegment, Ctx, GatherItem, Outgoing, Reduction, ScatterItem, Segment, allgather, allreduce,
    barrier, broadcast, reduce_scatter,
};
use horovod_protocol::{DType, ReduceOp, Scale};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Bytes of a tensor, and of what all ranks together give.
const SMALL: usize = 160;
const LARGE: usize = 6000;

const WARM_UP: usize = 5;
const COUNTED: usize = 20;

/// A rank's buffers, allocated before counting begins.
struct Memory {
    small: Vec<u8>,
    large: Vec<u8>,
    out: Vec<u8>,
    gather: Vec<GatherItem>,
    rows: Vec<usize>,
}

/// One of everything.
fn step(ctx: &mut Ctx<'_>, memory: &mut Memory) {
    let (small, large) = (memory.small.as_mut_ptr(), memory.large.as_mut_ptr());
    let n = ctx.members.len();
    let red = Reduction {
        dtype: DType::F32,
        op: ReduceOp::Average,
        scale: Scale::NONE,
        divisor: n as u32,
    };
    let segment = |at: *mut u8, bytes: usize| Segment {
        input: at,
        output: at,
        elems: bytes / 4,
    };
    // SAFETY: the memory is this thread's own; nothing overlaps within one operation.
    unsafe {
        allreduce(ctx, &red, &[segment(small, SMALL)]).expect("nobody aborts");
        allreduce(ctx, &red, &[segment(small, SMALL), segment(large, LARGE)])
            .expect("nobody aborts");
        let bytes = [ByteSegment {
            input: large,
            output: large,
            bytes: LARGE,
        }];
        broadcast(ctx, n - 1, &bytes).expect("nobody aborts");
        allgather(ctx, &memory.gather).expect("nobody aborts");
        let scatter = [ScatterItem {
            input: large,
            rows: LARGE / 4,
            row_elems: 1,
            output: memory.out.as_mut_ptr(),
        }];
        reduce_scatter(ctx, &red, &scatter).expect("nobody aborts");
        let out = memory.out.as_mut_ptr();
        alltoall(
            ctx,
            Outgoing {
                input: large,
                rows: &memory.rows,
                row_bytes: 10,
            },
            &mut |_| Ok(out),
        )
        .expect("nobody aborts");
        barrier(ctx).expect("nobody aborts");
    }
}

#[test]
fn a_steady_state_allocates_nothing() {
    for world in [World::shm(2), World::shm(3)] {
        let n = world.size();
        let together = Barrier::new(n);
        world.run(|node| {
            let mut memory = Memory {
                small: vec![0; SMALL],
                large: vec![0; LARGE],
                out: vec![0; n * LARGE],
                gather: Vec::new(),
                rows: vec![LARGE / 10 / n; n],
            };
            memory.gather.push(GatherItem {
                input: memory.large.as_ptr(),
                output: memory.out.as_mut_ptr(),
                bytes: vec![LARGE; n],
            });
            let (mut done, mut before) = (0, 0);
            node.ops(WARM_UP + COUNTED, |ctx| {
                if done == WARM_UP {
                    together.wait();
                    before = ALLOCATIONS.load(Ordering::SeqCst);
                    together.wait();
                }
                step(ctx, &mut memory);
                done += 1;
            });
            let after = ALLOCATIONS.load(Ordering::SeqCst);
            // Nobody goes on, and allocates, before all have looked.
            together.wait();
            assert_eq!(after - before, 0, "{n} ranks, {COUNTED} steps");
        });
    }
}

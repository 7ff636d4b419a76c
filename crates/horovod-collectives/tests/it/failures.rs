//! A rank that stops in the middle: everybody else comes back with the cause.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Node, World, alltoall};
use horovod_collectives::{
    ByteSegment, CollectiveError, Ctx, GatherItem, Outgoing, Reduction, ScatterItem, Segment,
    allgather, allreduce, barrier, broadcast, reduce_scatter,
};
use horovod_protocol::{DType, ReduceOp, Scale};
use horovod_transport::Data;

type Operation = fn(&mut Ctx<'_>, &mut [u8], &mut [u8]) -> Result<(), CollectiveError>;

const ELEMS: usize = 30_000;

fn reduction(op: ReduceOp) -> Reduction {
    Reduction {
        dtype: DType::F32,
        op,
        scale: Scale::NONE,
        divisor: 1,
    }
}

fn all_of(input: &[u8], output: &mut [u8]) -> Segment {
    Segment {
        input: input.as_ptr(),
        output: output.as_mut_ptr(),
        elems: ELEMS,
    }
}

/// Each operation, over more data than staging memory, rings and socket buffers hold.
const OPERATIONS: [(&str, Operation); 7] = [
    // SAFETY: the memory is the calling thread's own and long enough.
    ("allreduce", |ctx, input, output| unsafe {
        allreduce(ctx, &reduction(ReduceOp::Sum), &[all_of(input, output)])
    }),
    // SAFETY: as above.
    ("adasum", |ctx, input, output| unsafe {
        allreduce(ctx, &reduction(ReduceOp::Adasum), &[all_of(input, output)])
    }),
    // SAFETY: as above.
    ("allgather", |ctx, input, output| unsafe {
        let part = ELEMS * 4 / ctx.members.len();
        let bytes = vec![part; ctx.members.len()];
        let (input, output) = (input.as_ptr(), output.as_mut_ptr());
        allgather(
            ctx,
            &[GatherItem {
                input,
                output,
                bytes,
            }],
        )
    }),
    // SAFETY: as above.
    ("broadcast", |ctx, input, output| unsafe {
        let (input, output) = (input.as_ptr(), output.as_mut_ptr());
        broadcast(
            ctx,
            ctx.members.len() - 1,
            &[ByteSegment {
                input,
                output,
                bytes: ELEMS * 4,
            }],
        )
    }),
    // SAFETY: as above.
    ("alltoall", |ctx, input, output| unsafe {
        let send = vec![ELEMS * 4 / ctx.members.len(); ctx.members.len()];
        alltoall(
            ctx,
            Outgoing {
                input: input.as_ptr(),
                rows: &send,
                row_bytes: 1,
            },
            &mut |_| Ok(output.as_mut_ptr()),
        )
    }),
    // SAFETY: as above.
    ("reduce_scatter", |ctx, input, output| unsafe {
        let (input, output) = (input.as_ptr(), output.as_mut_ptr());
        let item = ScatterItem {
            input,
            rows: ELEMS,
            row_elems: 1,
            output,
        };
        reduce_scatter(ctx, &reduction(ReduceOp::Sum), &[item])
    }),
    ("barrier", |ctx, _, _| barrier(ctx)),
];

fn call(node: &mut Node, operation: Operation) -> Result<(), CollectiveError> {
    let (mut input, mut output) = (vec![1u8; ELEMS * 4], vec![0u8; ELEMS * 4]);
    node.op(|ctx| operation(ctx, &mut input, &mut output))
}

/// Until `n` ranks are through their first operation.
fn wait_for(through: &AtomicUsize, n: usize) {
    let deadline = Instant::now() + Duration::from_secs(240);
    while through.load(Ordering::SeqCst) < n {
        assert!(
            Instant::now() < deadline,
            "a rank does not finish its first operation"
        );
        std::thread::yield_now();
    }
}

fn worlds() -> [World; 4] {
    [
        World::shm(3),
        World::tcp(3),
        World::hosts(&[2, 2]),
        World::hosts(&[1, 3]),
    ]
}

#[test]
fn an_abort_returns_from_every_operation_on_every_rank() {
    for world in worlds() {
        for (name, operation) in OPERATIONS {
            let through = AtomicUsize::new(0);
            let results = world.run(|node| {
                call(node, operation).unwrap();
                through.fetch_add(1, Ordering::SeqCst);
                if node.rank == node.size - 1 {
                    wait_for(&through, node.size);
                    // Never takes part; the others find out from the generation's end.
                    node.idle.aborted.store(true, Ordering::SeqCst);
                    return None;
                }
                Some(call(node, operation))
            });
            for (rank, result) in results.into_iter().flatten().enumerate() {
                // Over sockets the end of a rank may be seen before the cause is told.
                let ended = matches!(
                    result,
                    Err(CollectiveError::Aborted(_) | CollectiveError::Link(_))
                );
                assert!(ended, "{name} on {rank} in {world:?}: {result:?}");
            }
        }
    }
}

#[test]
fn a_connection_that_closes_is_an_error_that_names_the_rank() {
    for (name, operation) in OPERATIONS {
        let through = AtomicUsize::new(0);
        let results = World::tcp(2).run(|node| {
            call(node, operation).unwrap();
            through.fetch_add(1, Ordering::SeqCst);
            if node.rank == 1 {
                wait_for(&through, 2);
                node.drop_links();
                return None;
            }
            Some(call(node, operation))
        });
        let result = results.into_iter().flatten().next().unwrap();
        match result {
            Err(CollectiveError::Link(lost)) => assert_eq!(lost.rank().0, 1, "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// The engine moves these between threads.
#[test]
fn state_can_move_to_the_engines_thread() {
    fn is_send<T: Send>() {}
    is_send::<horovod_collectives::Scratch>();
    is_send::<horovod_collectives::SetLayout>();
    is_send::<Data>();
}

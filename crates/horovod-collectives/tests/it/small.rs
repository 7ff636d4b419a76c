//! Each collective once or twice between few ranks that share memory, so small that Miri ends: it sees undefined behaviour and
//! races in what the other tests run at length (`make sanitizers`).

use crate::common::{Node, World, alltoall, exact_values, oracle, uneven};
use horovod_collectives::{
    ByteSegment, GatherItem, Outgoing, Reduction, ScatterItem, Segment, allgather, allreduce,
    barrier, broadcast, reduce_scatter, scatter_rows,
};
use horovod_protocol::{DType, Rank, ReduceOp, Scale};

fn reduction(dtype: DType, op: ReduceOp, ranks: usize) -> Reduction {
    Reduction {
        dtype,
        op,
        scale: Scale::NONE,
        divisor: ranks as u32,
    }
}

/// Runs `body` on two ranks and on three, once with ordinary and once with streaming copies.
fn few(body: impl Fn(&mut Node) + Sync) {
    for world in [2, 3].map(World::shm) {
        world.run(|node| {
            body(node);
            node.tuning.stream_min_bytes = 0;
            body(node);
        });
    }
}

#[test]
fn allreduce_of_fused_tensors() {
    few(|node| {
        let n = node.size;
        // By everybody alone; in one piece; in many that take turns in the slots.
        for (dtype, elems) in [
            (DType::F32, 7),
            (DType::F16, 150),
            (DType::I64, 60),
            (DType::F32, 1100),
        ] {
            let values = |rank: usize, i: usize, len: usize| {
                exact_values(dtype, ReduceOp::Sum, len, rank * 11 + i)
            };
            let lens = uneven(elems);
            let mine = lens.iter().enumerate();
            let mut tensors: Vec<Vec<u8>> =
                mine.map(|(i, len)| values(node.rank, i, *len)).collect();
            let segments: Vec<Segment> = tensors
                .iter_mut()
                .zip(&lens)
                .map(|(tensor, len)| {
                    let output = tensor.as_mut_ptr();
                    Segment {
                        input: output,
                        output,
                        elems: *len,
                    }
                })
                .collect();
            let red = reduction(dtype, ReduceOp::Sum, n);
            // SAFETY: the tensors are this thread's own.
            node.op(|ctx| unsafe { allreduce(ctx, &red, &segments) })
                .unwrap();
            for (i, len) in lens.into_iter().enumerate() {
                let all: Vec<_> = (0..n).map(|rank| values(rank, i, len)).collect();
                let want = oracle(dtype, ReduceOp::Sum, Scale::NONE, &all);
                assert!(tensors[i] == want, "{dtype:?} {elems}, tensor {i}");
            }
        }
    });
}

#[test]
fn adasum_gives_the_same_bits_everywhere() {
    for n in [2, 4] {
        let results = World::shm(n).run(|node| {
            let mine = exact_values(DType::F32, ReduceOp::Sum, 150, node.rank);
            let mut sum = vec![0u8; mine.len()];
            let segment = Segment {
                input: mine.as_ptr(),
                output: sum.as_mut_ptr(),
                elems: 150,
            };
            let red = reduction(DType::F32, ReduceOp::Adasum, 1);
            // SAFETY: the memory is this thread's own.
            node.op(|ctx| unsafe { allreduce(ctx, &red, &[segment]) })
                .unwrap();
            sum
        });
        assert!(results.iter().all(|sum| *sum == results[0]));
        assert!(results[0].iter().any(|byte| *byte != 0));
    }
}

#[test]
fn allgather_and_broadcast() {
    few(|node| {
        let n = node.size;
        let part = |rank: usize| exact_values(DType::U8, ReduceOp::Sum, 700 * rank + 5, rank);
        let (mine, bytes): (_, Vec<usize>) = (
            part(node.rank),
            (0..n).map(|rank| part(rank).len()).collect(),
        );
        let mut gathered = vec![0; bytes.iter().sum()];
        let item = GatherItem {
            input: mine.as_ptr(),
            output: gathered.as_mut_ptr(),
            bytes,
        };
        // SAFETY: the memory is this thread's own.
        node.op(|ctx| unsafe { allgather(ctx, &[item]) }).unwrap();
        let want: Vec<u8> = (0..n).flat_map(part).collect();
        assert!(gathered == want);

        let root = n - 1;
        let mut sent = match node.rank == root {
            true => want.clone(),
            false => vec![0; want.len()],
        };
        let output = sent.as_mut_ptr();
        let segment = ByteSegment {
            input: output,
            output,
            bytes: sent.len(),
        };
        // SAFETY: as above.
        node.op(|ctx| unsafe { broadcast(ctx, root, &[segment]) })
            .unwrap();
        assert!(sent == want);
    });
}

#[test]
fn alltoall_and_reduce_scatter() {
    few(|node| {
        let (n, me) = (node.size, node.rank);
        let block = |from: usize, to: usize| {
            exact_values(
                DType::U8,
                ReduceOp::Sum,
                300 * from + 10 * to,
                from * n + to,
            )
        };
        let sent: Vec<u8> = (0..n).flat_map(|to| block(me, to)).collect();
        let send: Vec<usize> = (0..n).map(|to| block(me, to).len()).collect();
        let mut received = Vec::new();
        let mut allocate = |bytes: &[usize]| {
            received = vec![0u8; bytes.iter().sum()];
            Ok(received.as_mut_ptr())
        };
        // SAFETY: the memory is this thread's own.
        node.op(|ctx| unsafe {
            alltoall(
                ctx,
                Outgoing {
                    input: sent.as_ptr(),
                    rows: &send,
                    row_bytes: 1,
                },
                &mut allocate,
            )
        })
        .unwrap();
        let want: Vec<u8> = (0..n).flat_map(|from| block(from, me)).collect();
        assert!(received == want);

        let (rows, row_elems) = (n * 4 + 1, 33);
        let values = |rank: usize| exact_values(DType::F32, ReduceOp::Sum, rows * row_elems, rank);
        let share = scatter_rows(rows, n, me);
        let row = row_elems * DType::F32.size();
        let (mine, mut output) = (values(me), vec![0u8; share.len() * row]);
        let item = ScatterItem {
            input: mine.as_ptr(),
            rows,
            row_elems,
            output: output.as_mut_ptr(),
        };
        let red = reduction(DType::F32, ReduceOp::Sum, n);
        // SAFETY: as above.
        node.op(|ctx| unsafe { reduce_scatter(ctx, &red, &[item]) })
            .unwrap();
        let all: Vec<_> = (0..n).map(values).collect();
        let want = oracle(DType::F32, ReduceOp::Sum, Scale::NONE, &all);
        assert!(output == want[share.start * row..share.end * row]);
    });
}

#[test]
fn a_subset_between_two_barriers() {
    World::shm(3).run(|node| {
        node.op(barrier).unwrap();
        let mut data = exact_values(DType::F32, ReduceOp::Max, 90, node.rank);
        let output = data.as_mut_ptr();
        let segment = Segment {
            input: output,
            output,
            elems: 90,
        };
        let red = reduction(DType::F32, ReduceOp::Max, 1);
        // SAFETY: the memory is this thread's own.
        let done = node.op_of(&[Rank(0), Rank(2)], |ctx| unsafe {
            allreduce(ctx, &red, &[segment])
        });
        let members = match done {
            Some(done) => {
                done.unwrap();
                vec![0, 2]
            }
            None => vec![node.rank],
        };
        let all: Vec<_> = members
            .into_iter()
            .map(|rank| exact_values(DType::F32, ReduceOp::Max, 90, rank))
            .collect();
        assert!(data == oracle(DType::F32, ReduceOp::Max, Scale::NONE, &all));
        node.op(barrier).unwrap();
    });
}

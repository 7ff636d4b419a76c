//! Allgather, broadcast, alltoall, reduce-scatter and barrier in every world.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{World, alltoall, exact_values, oracle};
use horovod_collectives::{
    ByteSegment, GatherItem, Outgoing, Reduction, ScatterItem, allgather, barrier, broadcast,
    reduce_scatter, scatter_rows,
};
use horovod_protocol::{DType, ReduceOp, Scale};

/// `n` bytes that tell where they come from.
fn bytes(n: usize, seed: usize) -> Vec<u8> {
    (0..n)
        .map(|i| ((i * 31 + seed * 97 + i / 251) % 253) as u8)
        .collect()
}

#[test]
fn allgather_concatenates_uneven_and_empty_contributions() {
    for world in World::all() {
        let n = world.size();
        world.run(|node| {
            // Per case, bytes of tensor `i` on a rank.
            let cases: [fn(usize, usize) -> usize; 5] = [
                |_, _| 0,
                |rank, _| if rank == 0 { 0 } else { 3 },
                |rank, i| 17 * rank + i,
                |rank, i| if (rank + i) % 2 == 0 { 0 } else { 5003 },
                |rank, _| if rank == 1 { 40_000 } else { 1 },
            ];
            for (case, len) in cases.iter().enumerate() {
                for (in_place, by_host) in
                    [(false, true), (true, true), (false, false), (true, false)]
                {
                    node.tuning.hierarchical_allgather = by_host;
                    let lens = |i| (0..n).map(|rank| len(rank, i)).collect::<Vec<_>>();
                    let inputs: Vec<_> = (0..3)
                        .map(|i| bytes(len(node.rank, i), node.rank + i))
                        .collect();
                    let mut outputs: Vec<_> = (0..3)
                        .map(|i| vec![0xee; lens(i).iter().sum::<usize>() + 1])
                        .collect();
                    let items: Vec<GatherItem> = (0..3)
                        .map(|i| {
                            let bytes = lens(i);
                            let at: usize = bytes[..node.rank].iter().sum();
                            if in_place {
                                outputs[i][at..at + bytes[node.rank]].copy_from_slice(&inputs[i]);
                            }
                            let output = outputs[i].as_mut_ptr();
                            let input = match in_place {
                                true => output.wrapping_add(at),
                                false => inputs[i].as_ptr(),
                            };
                            GatherItem {
                                input,
                                output,
                                bytes,
                            }
                        })
                        .collect();
                    // SAFETY: the memory is this thread's own.
                    node.op(|ctx| unsafe { allgather(ctx, &items) }).unwrap();
                    for (i, output) in outputs.iter().enumerate() {
                        let want: Vec<u8> = (0..n)
                            .flat_map(|rank| bytes(len(rank, i), rank + i))
                            .collect();
                        assert!(output[..want.len()] == want, "case {case} {i} {world:?}");
                        assert_eq!(output[want.len()], 0xee, "wrote beyond the output");
                    }
                }
            }
        });
    }
}

#[test]
fn broadcast_from_every_root() {
    for world in World::all() {
        let n = world.size();
        world.run(|node| {
            for root in 0..n {
                for lens in [[0, 0, 0], [1, 0, 5], [100, 33, 300], [0, 20_011, 9]] {
                    let sent: Vec<_> = (0..3).map(|i| bytes(lens[i], root + i)).collect();
                    let in_place = root % 2 == 0;
                    let mut outputs: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
                    if in_place && node.rank == root {
                        outputs.clone_from(&sent);
                    }
                    let segments: Vec<ByteSegment> = (0..3)
                        .map(|i| {
                            let output = outputs[i].as_mut_ptr();
                            let input = if in_place { output } else { sent[i].as_ptr() };
                            // Only the root's input may be read.
                            let input = if node.rank == root {
                                input
                            } else {
                                std::ptr::null()
                            };
                            ByteSegment {
                                input,
                                output,
                                bytes: lens[i],
                            }
                        })
                        .collect();
                    // SAFETY: the memory is this thread's own.
                    node.op(|ctx| unsafe { broadcast(ctx, root, &segments) })
                        .unwrap();
                    assert!(outputs == sent, "root {root} {lens:?} {world:?}");
                }
            }
        });
    }
}

#[test]
fn operations_that_cut_the_memory_into_other_slots_follow_each_other() {
    for ranks in 2..=5 {
        World::shm(ranks).run(|node| {
            let me = node.rank;
            // Slots of whole lines and not, few and many.
            for (round, chunk) in [256, 100, 33, 768, 4096].into_iter().enumerate() {
                node.tuning.chunk_bytes = chunk;
                let root = round % ranks;
                let mut sent = bytes(30_001, me);
                let segment = ByteSegment {
                    input: sent.as_ptr(),
                    output: sent.as_mut_ptr(),
                    bytes: sent.len(),
                };
                // SAFETY: the memory is this thread's own.
                node.op(|ctx| unsafe { broadcast(ctx, root, &[segment]) })
                    .unwrap();
                assert!(sent == bytes(30_001, root), "{ranks} ranks, chunk {chunk}");
                let mine = bytes(9_000, me);
                let mut gathered = vec![0; 9_000 * ranks];
                let item = GatherItem {
                    input: mine.as_ptr(),
                    output: gathered.as_mut_ptr(),
                    bytes: vec![9_000; ranks],
                };
                // SAFETY: as above.
                node.op(|ctx| unsafe { allgather(ctx, &[item]) }).unwrap();
                let want: Vec<u8> = (0..ranks).flat_map(|rank| bytes(9_000, rank)).collect();
                assert!(gathered == want, "{ranks} ranks, chunk {chunk}");
            }
        });
    }
}

#[test]
fn alltoall_delivers_every_block() {
    for world in World::all() {
        let n = world.size();
        world.run(|node| {
            // Bytes from one rank to another.
            let cases: [fn(usize, usize) -> usize; 4] = [
                |_, _| 0,
                |_, _| 12,
                |from, to| (from * 7 + to * 3) % 11,
                |from, to| if (from + to) % 3 == 0 { 9001 } else { from },
            ];
            for (case, len) in cases.iter().enumerate() {
                let block = |from: usize, to: usize| bytes(len(from, to), from * n + to);
                let input: Vec<u8> = (0..n).flat_map(|to| block(node.rank, to)).collect();
                let send: Vec<usize> = (0..n).map(|to| len(node.rank, to)).collect();
                let mut output = Vec::new();
                let (width, mut calls, me) = (1, 0, node.rank);
                let mut alloc = |recv: &[usize]| {
                    calls += 1;
                    let want: Vec<usize> = (0..n).map(|from| len(from, me)).collect();
                    assert_eq!(recv, want);
                    output = vec![0u8; recv.iter().sum()];
                    Ok(output.as_mut_ptr())
                };
                // SAFETY: the memory is this thread's own.
                let done = node.op(|ctx| unsafe {
                    alltoall(
                        ctx,
                        Outgoing {
                            input: input.as_ptr(),
                            rows: &send,
                            row_bytes: width,
                        },
                        &mut alloc,
                    )
                });
                done.unwrap();
                assert_eq!(calls, 1);
                let want: Vec<u8> = (0..n).flat_map(|from| block(from, node.rank)).collect();
                assert!(output == want, "case {case} {world:?}");
            }
        });
    }
}

#[test]
fn alltoall_counts_rows_of_any_width_also_of_none() {
    for world in World::all() {
        let n = world.size();
        world.run(|node| {
            let rows = |from: usize, to: usize| (from * 5 + to * 3) % 7;
            let me = node.rank;
            for width in [0, 3, 1024] {
                // So many rows without bytes that standing in for each would take gigabytes.
                let many = if width == 0 { 1 << 30 } else { 1 };
                let send: Vec<usize> = (0..n).map(|to| many * rows(me, to)).collect();
                let block = |from: usize, to: usize| bytes(rows(from, to) * width, from * n + to);
                let input: Vec<u8> = (0..n).flat_map(|to| block(me, to)).collect();
                let mut output = Vec::new();
                let mut alloc = |recv: &[usize]| {
                    let want: Vec<usize> = (0..n).map(|from| many * rows(from, me)).collect();
                    assert_eq!(recv, want);
                    output = vec![0u8; recv.iter().sum::<usize>() * width];
                    Ok(output.as_mut_ptr())
                };
                // SAFETY: the memory is this thread's own.
                node.op(|ctx| unsafe {
                    alltoall(
                        ctx,
                        Outgoing {
                            input: input.as_ptr(),
                            rows: &send,
                            row_bytes: width,
                        },
                        &mut alloc,
                    )
                })
                .unwrap();
                let want: Vec<u8> = (0..n).flat_map(|from| block(from, me)).collect();
                assert!(output == want, "width {width} {world:?}");
            }
        });
    }
}

#[test]
fn results_written_past_the_caches_are_the_same() {
    for world in [World::shm(2), World::shm(3)] {
        let n = world.size();
        world.run(|node| {
            node.tuning.stream_min_bytes = 0;
            let me = node.rank;
            let lens = [5000, 1, 20_011];
            let mine: Vec<Vec<u8>> = lens.iter().map(|len| bytes(*len, me)).collect();
            let mut gathered: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; len * n]).collect();
            let items: Vec<GatherItem> = (0..lens.len())
                .map(|i| GatherItem {
                    input: mine[i].as_ptr(),
                    output: gathered[i].as_mut_ptr(),
                    bytes: vec![lens[i]; n],
                })
                .collect();
            // SAFETY: the memory is this thread's own.
            node.op(|ctx| unsafe { allgather(ctx, &items) }).unwrap();
            for (i, len) in lens.into_iter().enumerate() {
                let want: Vec<u8> = (0..n).flat_map(|rank| bytes(len, rank)).collect();
                assert!(gathered[i] == want);
            }
            let mut sent = bytes(30_001, me);
            let segment = ByteSegment {
                input: sent.as_ptr(),
                output: sent.as_mut_ptr(),
                bytes: sent.len(),
            };
            // SAFETY: as above.
            node.op(|ctx| unsafe { broadcast(ctx, 1, &[segment]) })
                .unwrap();
            assert!(sent == bytes(30_001, 1));
            let send = vec![7000; n];
            let (input, mut output) = (bytes(7000 * n, me), vec![0u8; 7000 * n]);
            let mut alloc = |_: &[usize]| Ok(output.as_mut_ptr());
            // SAFETY: as above.
            node.op(|ctx| unsafe {
                alltoall(
                    ctx,
                    Outgoing {
                        input: input.as_ptr(),
                        rows: &send,
                        row_bytes: 1,
                    },
                    &mut alloc,
                )
            })
            .unwrap();
            let block = |from| bytes(7000 * n, from)[7000 * me..][..7000].to_vec();
            let want: Vec<u8> = (0..n).flat_map(block).collect();
            assert!(output == want);
        });
    }
}

#[test]
fn reduce_scatter_shares_out_rows_of_every_type() {
    for world in World::all() {
        let n = world.size();
        world.run(|node| {
            for dtype in DType::ALL {
                for op in [ReduceOp::Sum, ReduceOp::Average] {
                    for scale in [
                        Scale::NONE,
                        Scale {
                            pre: 2.0,
                            post: 0.5,
                        },
                    ] {
                        // Rows and elements per row of the fused tensors.
                        let shapes = [(n + 1, 3), (0, 5), (2, 1), (4 * n + n / 2, 41), (3, 0)];
                        let inputs = |rank: usize, i: usize| {
                            exact_values(dtype, op, shapes[i].0 * shapes[i].1, rank * 5 + i)
                        };
                        let mine: Vec<_> = (0..5).map(|i| inputs(node.rank, i)).collect();
                        let mut outputs = Vec::new();
                        let mut items = Vec::new();
                        for (i, (rows, row_elems)) in shapes.into_iter().enumerate() {
                            let share = scatter_rows(rows, n, node.rank).len();
                            let mut output = vec![0u8; share * row_elems * dtype.size()];
                            let (input, at) = (mine[i].as_ptr(), output.as_mut_ptr());
                            items.push(ScatterItem {
                                input,
                                rows,
                                row_elems,
                                output: at,
                            });
                            outputs.push(output);
                        }
                        let red = Reduction {
                            dtype,
                            op,
                            scale,
                            divisor: n as u32,
                        };
                        // SAFETY: the memory is this thread's own.
                        node.op(|ctx| unsafe { reduce_scatter(ctx, &red, &items) })
                            .unwrap();
                        for (i, (rows, row_elems)) in shapes.into_iter().enumerate() {
                            let all: Vec<_> = (0..n).map(|rank| inputs(rank, i)).collect();
                            let want = oracle(dtype, op, scale, &all);
                            let share = scatter_rows(rows, n, node.rank);
                            let row = row_elems * dtype.size();
                            let want = &want[share.start * row..share.end * row];
                            assert!(outputs[i] == want, "{dtype:?} {op:?} {i} {world:?}");
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn rows_are_shared_out_with_the_longer_shares_first() {
    let lens: Vec<_> = (0..4).map(|member| scatter_rows(6, 4, member)).collect();
    assert_eq!(lens, [0..2, 2..4, 4..5, 5..6]);
}

#[test]
fn nobody_leaves_a_barrier_before_everybody_came() {
    for world in World::all() {
        let arrived = AtomicUsize::new(0);
        world.run(|node| {
            for round in 1..=50 {
                arrived.fetch_add(1, Ordering::SeqCst);
                node.op(barrier).unwrap();
                assert!(arrived.load(Ordering::SeqCst) >= round * node.size);
            }
        });
    }
}

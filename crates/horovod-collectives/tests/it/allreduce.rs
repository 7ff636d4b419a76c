//! Allreduce over every world, type, operation and length: bitwise what the oracle says.

use crate::common::{Node, World, exact_values, oracle, rough_values, uneven};
use horovod_collectives::select::{Across, AlgorithmOverride};
use horovod_collectives::{CollectiveError, Reduction, Segment, allreduce};
use horovod_protocol::{DType, ReduceOp, Scale};

const OPS: [ReduceOp; 5] = [
    ReduceOp::Average,
    ReduceOp::Sum,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
];

/// No override, and every algorithm between hosts.
const ACROSS: [Option<AlgorithmOverride>; 4] = [
    None,
    Some(AlgorithmOverride::Across(Across::Exchange)),
    Some(AlgorithmOverride::Across(Across::Pairwise)),
    Some(AlgorithmOverride::Across(Across::Ring)),
];

/// One case: what is reduced and how it lies in memory.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    op: ReduceOp,
    scale: Scale,
    elems: usize,
    in_place: bool,
}

impl Case {
    fn inputs(&self, ranks: usize) -> Vec<Vec<u8>> {
        (0..ranks)
            .map(|rank| exact_values(self.dtype, self.op, self.elems, rank + 1))
            .collect()
    }

    /// Reduces this rank's `input` and returns the result.
    fn run(&self, node: &mut Node, input: &[u8]) -> Result<Vec<u8>, CollectiveError> {
        let size = self.dtype.size();
        // Each tensor in memory of its own, one element in, so that nothing lines up.
        let mut at = 0;
        let mut tensors: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for len in uneven(self.elems) {
            let mut memory = vec![0xa5; (len + 1) * size];
            memory[size..].copy_from_slice(&input[at..at + len * size]);
            at += len * size;
            let output = if self.in_place {
                Vec::new()
            } else {
                vec![0x5a; len * size]
            };
            tensors.push((memory, output));
        }
        let segments: Vec<Segment> = tensors
            .iter_mut()
            .map(|(memory, output)| {
                let elems = memory.len() / size - 1;
                let input = memory[size..].as_mut_ptr();
                let output = if self.in_place {
                    input
                } else {
                    output.as_mut_ptr()
                };
                Segment {
                    input,
                    output,
                    elems,
                }
            })
            .collect();
        let Self {
            dtype, op, scale, ..
        } = *self;
        let red = Reduction {
            dtype,
            op,
            scale,
            divisor: node.size as u32,
        };
        // SAFETY: the segments are this thread's own vectors.
        node.op(|ctx| unsafe { allreduce(ctx, &red, &segments) })?;
        let result = tensors.iter().flat_map(|(memory, output)| {
            if self.in_place {
                &memory[size..]
            } else {
                &output[..]
            }
        });
        Ok(result.copied().collect())
    }

    fn check(&self, node: &mut Node) {
        let inputs = self.inputs(node.size);
        let want = oracle(self.dtype, self.op, self.scale, &inputs);
        let got = self.run(node, &inputs[node.rank]).expect("nobody aborts");
        assert!(
            got == want,
            "rank {} of {}: {self:?} {:?}",
            node.rank,
            node.size,
            node.tuning
        );
    }
}

fn check_all(node: &mut Node, dtypes: &[DType], lens: &[usize]) {
    for dtype in dtypes.iter().copied() {
        for op in OPS {
            for (i, elems) in lens.iter().copied().enumerate() {
                let in_place = (i + op as usize).is_multiple_of(2);
                Case {
                    dtype,
                    op,
                    scale: Scale::NONE,
                    elems,
                    in_place,
                }
                .check(node);
            }
        }
    }
}

#[test]
fn every_type_and_operation_in_every_world() {
    for world in World::all() {
        world.run(|node| check_all(node, &DType::ALL, &[0, 1, 37, 1003]));
    }
}

#[test]
fn long_vectors_take_many_steps_in_place_and_not() {
    for world in World::all() {
        world.run(|node| {
            for dtype in [DType::F32, DType::F16, DType::I64] {
                for in_place in [false, true] {
                    let (op, scale) = (ReduceOp::Average, Scale::NONE);
                    Case {
                        dtype,
                        op,
                        scale,
                        elems: 20_011,
                        in_place,
                    }
                    .check(node);
                }
            }
        });
    }
}

#[test]
fn results_handed_out_past_the_caches_are_the_same() {
    for counts in [&[2, 2][..], &[3, 2]] {
        // Room for pieces that are long enough for it.
        let world = World {
            staging: 1 << 20,
            ..World::hosts(counts)
        };
        world.run(|node| {
            node.tuning.stream_min_bytes = 0;
            node.tuning.wire_chunk_bytes = 16 << 10;
            for in_place in [false, true] {
                Case {
                    dtype: DType::F32,
                    op: ReduceOp::Sum,
                    scale: Scale::NONE,
                    elems: 100_003,
                    in_place,
                }
                .check(node);
            }
        });
    }
}

#[test]
fn every_algorithm_gives_the_same_wherever_it_is_possible() {
    let some = [DType::F32, DType::BF16, DType::U8, DType::I32, DType::Bool];
    for world in World::all() {
        for forced in AlgorithmOverride::ALL {
            for hierarchical in [true, false] {
                world.run(|node| {
                    node.tuning.allreduce = Some(forced);
                    node.tuning.hierarchical_allreduce = hierarchical;
                    check_all(node, &some, &[1, 3, 700]);
                });
            }
        }
    }
}

#[test]
fn links_that_drip_split_elements_anywhere() {
    for hosts in [vec![0, 1, 2], vec![0, 0, 1, 1]] {
        let world = World {
            hosts,
            drip: Some(7),
            ..World::shm(1)
        };
        for forced in ACROSS {
            world.run(|node| {
                node.tuning.allreduce = forced;
                check_all(node, &[DType::F64, DType::F16], &[1, 501]);
            });
        }
    }
}

#[test]
fn factors_apply_once_around_the_reduction() {
    // Powers of two, so that floats stay exact; 0.5 makes integers truncate.
    let scales = [
        Scale {
            pre: 0.5,
            post: 1.0,
        },
        Scale {
            pre: 1.0,
            post: 0.5,
        },
        Scale {
            pre: 2.0,
            post: -0.25,
        },
    ];
    let types = [
        DType::F32,
        DType::F16,
        DType::F64,
        DType::I32,
        DType::I64,
        DType::U8,
    ];
    for world in [
        World::shm(1),
        World::shm(3),
        World::tcp(3),
        World::hosts(&[2, 1]),
        World::hosts(&[2, 2]),
    ] {
        for forced in ACROSS.into_iter().chain([Some(AlgorithmOverride::Staged)]) {
            world.run(|node| {
                node.tuning.allreduce = forced;
                for scale in scales {
                    for dtype in types {
                        for op in OPS {
                            Case {
                                dtype,
                                op,
                                scale,
                                elems: 157,
                                in_place: true,
                            }
                            .check(node);
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn rough_floats_are_bitwise_equal_on_all_ranks_and_near_the_oracle() {
    for world in World::all() {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let n = world.size();
            let inputs: Vec<Vec<u8>> = (0..n).map(|rank| rough_values(dtype, 1501, rank)).collect();
            let case = Case {
                dtype,
                op: ReduceOp::Sum,
                scale: Scale::NONE,
                elems: 1501,
                in_place: true,
            };
            let run = |forced: Option<AlgorithmOverride>| {
                world.run(|node| {
                    node.tuning.allreduce = forced;
                    case.run(node, &inputs[node.rank]).unwrap()
                })
            };
            let exact = oracle(dtype, ReduceOp::Sum, Scale::NONE, &inputs);
            for forced in ACROSS {
                let results = run(forced);
                assert!(
                    results.iter().all(|result| *result == results[0]),
                    "{world:?} {forced:?}"
                );
                assert_eq!(run(forced), results, "not the same from run to run");
                // At most one rounding per member, each of half a unit of at most n.
                let unit = match dtype {
                    DType::F16 => 2f64.powi(-10),
                    DType::BF16 => 2f64.powi(-7),
                    DType::F32 => 2f64.powi(-23),
                    _ => 2f64.powi(-52),
                };
                let pairs = crate::common::decode(dtype, &results[0]);
                for (got, want) in pairs.iter().zip(crate::common::decode(dtype, &exact)) {
                    let bound = (n * n) as f64 * unit;
                    assert!(
                        (got - want).abs() <= bound,
                        "{world:?} {forced:?}: {got} {want}"
                    );
                }
            }
            // One host: exactly the order of members, rounded once.
            if world.shm && world.hosts.iter().all(|host| *host == 0) {
                assert_eq!(run(None)[0], exact);
            }
        }
    }
}

#[test]
fn a_rank_that_joined_contributes_the_neutral_element() {
    for world in [
        World::shm(2),
        World::shm(4),
        World::tcp(3),
        World::hosts(&[2, 2]),
    ] {
        for forced in ACROSS {
            for elems in [5, 900] {
                world.run(|node| {
                    node.tuning.allreduce = forced;
                    for dtype in DType::ALL {
                        for op in [
                            ReduceOp::Sum,
                            ReduceOp::Min,
                            ReduceOp::Max,
                            ReduceOp::Product,
                        ] {
                            let scale = Scale {
                                pre: 0.5,
                                post: 1.0,
                            };
                            let case = Case {
                                dtype,
                                op,
                                scale,
                                elems,
                                in_place: false,
                            };
                            let inputs = case.inputs(node.size);
                            let want = oracle(dtype, op, scale, &inputs[1..]);
                            let mut out = vec![0u8; elems * dtype.size()];
                            let joined = node.rank == 0;
                            let input = if joined {
                                std::ptr::null()
                            } else {
                                inputs[node.rank].as_ptr()
                            };
                            let red = Reduction {
                                dtype,
                                op,
                                scale,
                                divisor: 1,
                            };
                            let segment = Segment {
                                input,
                                output: out.as_mut_ptr(),
                                elems,
                            };
                            // SAFETY: the memory is this thread's own.
                            node.op(|ctx| unsafe { allreduce(ctx, &red, &[segment]) })
                                .unwrap();
                            assert!(out == want, "{dtype:?} {op:?} {forced:?} {elems}");
                        }
                    }
                });
            }
        }
    }
}

#[test]
fn overlapping_sets_share_the_staging_memory_in_order() {
    use horovod_protocol::Rank;
    let world = World::shm(4);
    world.run(|node| {
        let sets: [&[u32]; 4] = [&[0, 1], &[1, 2, 3], &[0, 3], &[0, 1, 2, 3]];
        for round in 0..200 {
            let members: Vec<Rank> = sets[round % 4].iter().map(|rank| Rank(*rank)).collect();
            let elems = [3, 40, 500][round % 3];
            let case_inputs: Vec<Vec<u8>> = (0..members.len())
                .map(|member| exact_values(DType::F32, ReduceOp::Sum, elems, member + round))
                .collect();
            let want = oracle(DType::F32, ReduceOp::Sum, Scale::NONE, &case_inputs);
            let (dtype, op, scale) = (DType::F32, ReduceOp::Sum, Scale::NONE);
            node.op_of(&members, |ctx| {
                let mut data = case_inputs[ctx.me].clone();
                let at = data.as_mut_ptr();
                let red = Reduction {
                    dtype,
                    op,
                    scale,
                    divisor: 1,
                };
                // SAFETY: the memory is this thread's own.
                unsafe {
                    allreduce(
                        ctx,
                        &red,
                        &[Segment {
                            input: at,
                            output: at,
                            elems,
                        }],
                    )
                }
                .unwrap();
                assert!(data == want, "round {round}");
            });
        }
    });
}

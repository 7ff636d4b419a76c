//! The same bits however tensors are fused, in every run, on every rank, and by every algorithm: each
//! element combines in one order, which depends on who shares a host with whom and on nothing else.

use crate::common::{Node, World, oracle, rough_values};
use horovod_collectives::select::{Across, AlgorithmOverride};
use horovod_collectives::{Reduction, Segment, allreduce};
use horovod_kernels::{Combine, Isa, Source, Spec, reduce_with};
use horovod_protocol::{DType, ReduceOp, Scale};

const LENGTHS: [usize; 14] = [1, 7, 300, 2, 33, 64, 1500, 5, 16, 90, 3, 700, 1, 250];
const FUSIONS: u64 = 6;

/// The operation on every tensor.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    op: ReduceOp,
    scale: Scale,
}

const CASES: [Case; 6] = [
    Case {
        dtype: DType::F32,
        op: ReduceOp::Sum,
        scale: Scale::NONE,
    },
    Case {
        dtype: DType::F64,
        op: ReduceOp::Average,
        scale: Scale::NONE,
    },
    Case {
        dtype: DType::F16,
        op: ReduceOp::Average,
        scale: Scale::NONE,
    },
    Case {
        dtype: DType::BF16,
        op: ReduceOp::Sum,
        scale: Scale {
            pre: 0.3,
            post: 1.7,
        },
    },
    Case {
        dtype: DType::F16,
        op: ReduceOp::Product,
        scale: Scale {
            pre: 1.3,
            post: 0.9,
        },
    },
    Case {
        dtype: DType::I32,
        op: ReduceOp::Average,
        scale: Scale {
            pre: 1.5,
            post: 1.0,
        },
    },
];

fn values(dtype: DType, tensor: usize, rank: usize) -> Vec<u8> {
    let seed = 31 * tensor + rank + 1;
    if dtype.is_float() {
        rough_values(dtype, LENGTHS[tensor], seed)
    } else {
        crate::common::exact_values(dtype, ReduceOp::Sum, LENGTHS[tensor], seed)
    }
}

fn combine(case: Case, pre: f64, divisor: u32, post: f64, inputs: &[Vec<u8>]) -> Vec<u8> {
    let spec = Spec {
        dtype: case.dtype,
        combine: Combine::of(case.op).expect("not Adasum"),
        pre,
        divisor,
        post,
    };
    let sources: Vec<Source> = inputs.iter().map(|i| Source::raw(i.as_ptr())).collect();
    let mut out = vec![0; inputs[0].len()];
    let elems = out.len() / case.dtype.size();
    // SAFETY: all vectors have the same length.
    unsafe { reduce_with(Isa::Scalar, &spec, &sources, out.as_mut_ptr(), None, elems) };
    out
}

/// The expected result on every rank: the members of each host in their order, then the hosts in theirs.
fn expected(world: &World, grouped: bool, case: Case, tensor: usize) -> Vec<u8> {
    let n = world.size();
    let mut inputs: Vec<Vec<u8>> = (0..n)
        .map(|rank| values(case.dtype, tensor, rank))
        .collect();
    let Scale { mut pre, post } = case.scale;
    if pre != 1.0 && case.op == ReduceOp::Product {
        inputs = inputs
            .iter()
            .map(|input| combine(case, pre, 1, 1.0, std::slice::from_ref(input)))
            .collect();
        pre = 1.0;
    }
    let mut hosts: Vec<usize> = Vec::new();
    for host in &world.hosts {
        if !hosts.contains(host) {
            hosts.push(*host);
        }
    }
    let divisor = if case.op == ReduceOp::Average {
        n as u32
    } else {
        1
    };
    if !grouped || !world.shm || hosts.len() == 1 || hosts.len() == n {
        let scale = Scale { pre, post };
        return oracle(case.dtype, case.op, scale, &inputs);
    }
    let partials: Vec<Vec<u8>> = hosts
        .iter()
        .map(|host| {
            let members = (0..n).filter(|rank| world.hosts[*rank] == *host);
            let theirs: Vec<Vec<u8>> = members.map(|rank| inputs[rank].clone()).collect();
            combine(case, pre, 1, 1.0, &theirs)
        })
        .collect();
    combine(case, 1.0, divisor, post, &partials)
}

/// Cuts the tensors, in an order of its own, into groups that run as one collective each.
fn fusion(seed: u64) -> Vec<Vec<usize>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let mut order: Vec<usize> = (0..LENGTHS.len()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random(i + 1));
    }
    let mut groups = vec![Vec::new()];
    for tensor in order {
        if random(3) == 0 {
            groups.push(Vec::new());
        }
        groups.last_mut().expect("there is one").push(tensor);
    }
    groups
}

/// Reduces all tensors, fused as the seed says; results by tensor.
fn reduce_all(node: &mut Node, case: Case, seed: u64) -> Vec<Vec<u8>> {
    let mut results = vec![Vec::new(); LENGTHS.len()];
    for group in fusion(seed) {
        let mut tensors: Vec<Vec<u8>> = group
            .iter()
            .map(|tensor| values(case.dtype, *tensor, node.rank))
            .collect();
        let segments: Vec<Segment> = tensors
            .iter_mut()
            .map(|tensor| Segment {
                input: tensor.as_ptr(),
                output: tensor.as_mut_ptr(),
                elems: tensor.len() / case.dtype.size(),
            })
            .collect();
        let red = Reduction {
            dtype: case.dtype,
            op: case.op,
            scale: case.scale,
            divisor: node.size as u32,
        };
        // SAFETY: the memory is this thread's own.
        node.op(|ctx| unsafe { allreduce(ctx, &red, &segments) })
            .expect("nobody aborts");
        for (tensor, result) in group.into_iter().zip(tensors) {
            results[tensor] = result;
        }
    }
    results
}

fn worlds() -> Vec<World> {
    let mut worlds = vec![
        World::shm(3),
        World::tcp(3),
        World::tcp(4),
        World::tcp(5),
        World::hosts(&[3, 1]),
        World::hosts(&[1, 3]),
        World::hosts(&[2, 2]),
        World::hosts(&[2, 1]),
        World::hosts(&[1, 1, 1]),
        World::hosts(&[2, 2, 1]),
    ];
    // Hosts whose ranks are not consecutive.
    worlds.push(World {
        hosts: vec![0, 1, 0, 1, 2],
        ..World::shm(1)
    });
    worlds
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Grouping {
    ByHost,
    None,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AcrossHosts {
    Chosen,
    Ring,
}

fn check(forced: Option<AlgorithmOverride>, grouping: Grouping, across: AcrossHosts) {
    for world in worlds() {
        for case in CASES {
            let want: Vec<Vec<u8>> = (0..LENGTHS.len())
                .map(|tensor| expected(&world, grouping == Grouping::ByHost, case, tensor))
                .collect();
            let runs: Vec<Vec<Vec<Vec<u8>>>> = (0..2)
                .map(|_| {
                    world.run(|node| {
                        node.tuning.allreduce = forced;
                        node.tuning.hierarchical_allreduce = grouping == Grouping::ByHost;
                        if across == AcrossHosts::Ring {
                            node.tuning.pairwise_max_hosts = 1;
                        }
                        let seeds = 0..FUSIONS;
                        let all = seeds.map(|seed| reduce_all(node, case, seed));
                        let all: Vec<_> = all.collect();
                        assert!(all.iter().all(|one| *one == all[0]), "{case:?} {world:?}");
                        all.into_iter().next().expect("some fusion")
                    })
                })
                .collect();
            for rank in runs.iter().flatten() {
                assert!(
                    *rank == runs[0][0],
                    "ranks or runs differ: {case:?} {world:?}"
                );
            }
            // A ring rounds halves at each member.
            let exact = across != AcrossHosts::Ring || case.dtype.size() > 2;
            assert!(!exact || runs[0][0] == want, "{case:?} {world:?}");
        }
    }
}

#[test]
fn what_is_chosen_by_itself() {
    check(None, Grouping::ByHost, AcrossHosts::Chosen);
}

#[test]
fn without_regard_to_hosts() {
    check(None, Grouping::None, AcrossHosts::Chosen);
}

#[test]
fn by_exchange() {
    check(
        Some(AlgorithmOverride::Across(Across::Exchange)),
        Grouping::ByHost,
        AcrossHosts::Chosen,
    );
}

#[test]
fn pairwise() {
    check(
        Some(AlgorithmOverride::Across(Across::Pairwise)),
        Grouping::ByHost,
        AcrossHosts::Chosen,
    );
}

#[test]
fn around_a_ring() {
    check(
        Some(AlgorithmOverride::Across(Across::Ring)),
        Grouping::ByHost,
        AcrossHosts::Ring,
    );
    check(
        Some(AlgorithmOverride::Across(Across::Ring)),
        Grouping::None,
        AcrossHosts::Ring,
    );
}

#[test]
fn around_a_ring_because_there_are_many_hosts() {
    check(None, Grouping::ByHost, AcrossHosts::Ring);
}

//! Adasum in every world, of all ranks and of the averages of hosts, against the published recursion written plainly.

use crate::common::{World, decode, oracle, rough_values};
use horovod_collectives::{CollectiveError, Reduction, Segment, adasum_of_hosts, allreduce};
use horovod_protocol::{DType, ReduceOp, Scale};

/// The pairwise rule on whole vectors; `a` is the one of lower rank.
fn pair(a: &[f64], b: &[f64]) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let factor = |norm: f64| {
        if norm > 0.0 {
            1.0 - dot(a, b) / (2.0 * norm)
        } else {
            1.0
        }
    };
    let (ca, cb) = (factor(dot(a, a)), factor(dot(b, b)));
    a.iter().zip(b).map(|(a, b)| ca * a + cb * b).collect()
}

/// Neighbours first, then pairs of pairs; the ones beyond a power of two join before.
fn tree(mut vectors: Vec<Vec<f64>>) -> Vec<f64> {
    let power = 1 << vectors.len().ilog2();
    for extra in power..vectors.len() {
        vectors[extra - power] = pair(&vectors[extra - power], &vectors[extra]);
    }
    vectors.truncate(power);
    while vectors.len() > 1 {
        vectors = vectors
            .chunks(2)
            .map(|two| pair(&two[0], &two[1]))
            .collect();
    }
    vectors.remove(0)
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2e-2,
        DType::BF16 => 2e-1,
        DType::F32 => 1e-4,
        _ => 1e-12,
    }
}

#[test]
fn follows_the_published_recursion_per_tensor() {
    let scale = Scale {
        pre: 0.5,
        post: 4.0,
    };
    for world in World::all() {
        let n = world.size();
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let lens = [0usize, 1, 130, 7, 400];
            let tensor = |rank: usize, i: usize| rough_values(dtype, lens[i], rank * 31 + i);
            let results = world.run(|node| {
                let mut tensors: Vec<_> = (0..lens.len()).map(|i| tensor(node.rank, i)).collect();
                let segments: Vec<Segment> = tensors
                    .iter_mut()
                    .zip(lens)
                    .map(|(t, elems)| Segment {
                        input: t.as_ptr(),
                        output: t.as_mut_ptr(),
                        elems,
                    })
                    .collect();
                let red = Reduction {
                    dtype,
                    op: ReduceOp::Adasum,
                    scale,
                    divisor: 1,
                };
                // SAFETY: the tensors are this thread's own.
                node.op(|ctx| unsafe { allreduce(ctx, &red, &segments) })
                    .unwrap();
                tensors
            });
            let tolerance = tolerance(dtype);
            assert!(
                results.iter().all(|result| *result == results[0]),
                "{world:?} {dtype:?}"
            );
            for (i, result) in results[0].iter().enumerate() {
                let halved = |v: Vec<f64>| v.into_iter().map(|x| x * 0.5).collect();
                let inputs = (0..n)
                    .map(|rank| halved(decode(dtype, &tensor(rank, i))))
                    .collect();
                let want = tree(inputs);
                for (got, want) in decode(dtype, result).iter().zip(want) {
                    let want = want * 4.0;
                    let gap = (got - want).abs() / want.abs().max(1.0);
                    assert!(gap < tolerance, "{world:?} {dtype:?} {i}: {got} {want}");
                }
            }
        }
    }
}

/// The inputs of the ranks that have any: averaged on each host over these, or over all ranks of it, then combined.
fn of_hosts(world: &World, inputs: &[Option<Vec<f64>>], over_present: bool) -> Vec<f64> {
    let elems = inputs.iter().flatten().next().map_or(0, Vec::len);
    let hosts = world.hosts.iter().max().map_or(0, |last| last + 1);
    let averages = (0..hosts).map(|host| {
        let on_host = world.hosts.iter().zip(inputs).filter(|(h, _)| **h == host);
        let present: Vec<_> = on_host.clone().filter_map(|(_, v)| v.as_ref()).collect();
        let all = on_host.count();
        let divisor = if over_present { present.len() } else { all };
        let sum = |i: usize| present.iter().map(|v| v[i]).sum::<f64>();
        (0..elems).map(|i| sum(i) / divisor.max(1) as f64).collect()
    });
    tree(averages.collect())
}

/// `adasum_of_hosts` in a world where some ranks are absent, against the same written plainly.
fn check_hosts(world: &World, dtype: DType, absent: &[usize], over_present: bool) {
    let scale = Scale {
        pre: 0.5,
        post: 4.0,
    };
    let n = world.size();
    let lens = [0usize, 1, 130, 7, 400];
    let tensor = |rank: usize, i: usize| rough_values(dtype, lens[i], rank * 31 + i);
    let results = world.run(|node| {
        let mut tensors: Vec<_> = (0..lens.len()).map(|i| tensor(node.rank, i)).collect();
        let is_absent = absent.contains(&node.rank);
        let segments = tensors.iter_mut().zip(lens).map(|(t, elems)| Segment {
            input: if is_absent {
                std::ptr::null()
            } else {
                t.as_ptr()
            },
            output: t.as_mut_ptr(),
            elems,
        });
        let segments: Vec<Segment> = segments.collect();
        let divisor = if over_present { n - absent.len() } else { n };
        let red = Reduction {
            dtype,
            op: ReduceOp::Adasum,
            scale,
            divisor: divisor as u32,
        };
        let groups = node.host_groups();
        // SAFETY: the tensors are this thread's own.
        node.op(|ctx| unsafe { adasum_of_hosts(ctx, &groups, &red, &segments) })
            .expect("all ranks go on");
        tensors
    });
    assert!(
        results.iter().all(|result| *result == results[0]),
        "{world:?} {dtype:?}"
    );
    let tolerance = tolerance(dtype);
    for (i, result) in results[0].iter().enumerate() {
        let halved = |v: Vec<f64>| v.into_iter().map(|x| x * 0.5).collect();
        let inputs: Vec<_> = (0..n)
            .map(|rank| (!absent.contains(&rank)).then(|| halved(decode(dtype, &tensor(rank, i)))))
            .collect();
        let want = of_hosts(world, &inputs, over_present);
        for (got, want) in decode(dtype, result).iter().zip(want) {
            let want = want * 4.0;
            let gap = (got - want).abs() / want.abs().max(1.0);
            assert!(gap < tolerance, "{world:?} {dtype:?} {i}: {got} {want}");
        }
    }
}

#[test]
fn of_hosts_combines_the_averages_of_the_hosts() {
    let mut worlds = World::all();
    worlds.extend([[2, 2, 2], [3, 1, 2]].iter().map(|c| World::hosts(c)));
    for world in worlds {
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            check_hosts(&world, dtype, &[], false);
        }
    }
}

#[test]
fn of_hosts_counts_absent_members_as_zeros_or_not_at_all() {
    for over_present in [false, true] {
        let check = |world: &World, absent: &[usize]| {
            check_hosts(world, DType::F64, absent, over_present);
        };
        check(&World::shm(3), &[1]);
        check(&World::tcp(3), &[0]);
        check(&World::hosts(&[2, 3]), &[3]);
        // A whole host, and the first of another one.
        check(&World::hosts(&[2, 2, 2]), &[0, 2, 3]);
    }
}

#[test]
fn equal_gradients_stay_as_they_are_and_orthogonal_ones_add() {
    World::shm(4).run(|node| {
        let red = |op| Reduction {
            dtype: DType::F32,
            op,
            scale: Scale::NONE,
            divisor: 1,
        };
        let mut equal = rough_values(DType::F32, 99, 5);
        let before = equal.clone();
        let at = equal.as_mut_ptr();
        let segment = Segment {
            input: at,
            output: at,
            elems: 99,
        };
        // SAFETY: the memory is this thread's own.
        node.op(|ctx| unsafe { allreduce(ctx, &red(ReduceOp::Adasum), &[segment]) })
            .unwrap();
        assert_eq!(decode(DType::F32, &equal), decode(DType::F32, &before));

        // Each rank's values where the others have zeros.
        let inputs: Vec<Vec<u8>> = (0..4usize)
            .map(|rank| {
                (0..8)
                    .flat_map(|i| (if i % 4 == rank { 3f32 } else { 0. }).to_ne_bytes())
                    .collect()
            })
            .collect();
        let mut mine = inputs[node.rank].clone();
        let at = mine.as_mut_ptr();
        let segment = Segment {
            input: at,
            output: at,
            elems: 8,
        };
        // SAFETY: the memory is this thread's own.
        node.op(|ctx| unsafe { allreduce(ctx, &red(ReduceOp::Adasum), &[segment]) })
            .unwrap();
        assert_eq!(
            mine,
            oracle(DType::F32, ReduceOp::Sum, Scale::NONE, &inputs)
        );
    });
}

#[test]
fn what_a_tensor_is_fused_with_does_not_change_its_bits() {
    for world in [World::shm(4), World::shm(3)] {
        let results = world.run(|node| {
            let red = Reduction {
                dtype: DType::F64,
                op: ReduceOp::Adasum,
                scale: Scale::NONE,
                divisor: 1,
            };
            let mut bits = Vec::new();
            for neighbour in [0usize, 1, 37, 301] {
                let mut tensor = rough_values(DType::F64, 257, node.rank);
                let mut other = rough_values(DType::F64, neighbour, node.rank + 9);
                let segments =
                    [(&mut other, neighbour), (&mut tensor, 257)].map(|(t, elems)| Segment {
                        input: t.as_ptr(),
                        output: t.as_mut_ptr(),
                        elems,
                    });
                // SAFETY: the tensors are this thread's own.
                node.op(|ctx| unsafe { allreduce(ctx, &red, &segments) })
                    .unwrap();
                bits.push(tensor);
            }
            bits
        });
        for bits in results {
            assert!(bits.iter().all(|b| *b == bits[0]), "{world:?}");
        }
    }
}

#[test]
fn integers_are_refused_before_anything_is_sent() {
    World::shm(2).run(|node| {
        let mut data = [0u8; 8];
        let at = data.as_mut_ptr();
        let (dtype, op, scale) = (DType::I32, ReduceOp::Adasum, Scale::NONE);
        let red = Reduction {
            dtype,
            op,
            scale,
            divisor: 1,
        };
        // SAFETY: the memory is this thread's own.
        let result = node.op(|ctx| unsafe {
            allreduce(
                ctx,
                &red,
                &[Segment {
                    input: at,
                    output: at,
                    elems: 2,
                }],
            )
        });
        assert!(matches!(
            result,
            Err(CollectiveError::AdasumType(DType::I32))
        ));
    });
}

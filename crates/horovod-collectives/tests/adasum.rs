//! Adasum in every world, against the published recursion written plainly.

mod common;

use common::{World, decode, oracle, rough_values};
use horovod_collectives::{CollectiveError, Reduction, Segment, allreduce};
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
            let tolerance = match dtype {
                DType::F16 => 2e-2,
                DType::BF16 => 2e-1,
                DType::F32 => 1e-4,
                _ => 1e-12,
            };
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

//! Tensors whose dimensions lie in different orders in memory, reduced and broadcast by several engines in one process.

use crate::common::{LIMIT, on_meshes};
use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, MemoryOrder, Op, Output, ProcessSetId, Rank, ReduceOp, Scale, Submission,
    Tensor, TensorMeta, Waited,
};
use horovod_transport::testing;

const SUM: Op = Op::Allreduce {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};

/// Run `body` on every rank of a job of `n` ranks, each on a thread of its own.
fn on_ranks(n: usize, body: impl Fn(&Engine, usize) + Send + Clone + 'static) {
    on_meshes(testing::cluster(n), &Config::solo(), body);
}

fn run(
    engine: &Engine,
    name: &str,
    op: Op,
    meta: TensorMeta,
    data: &mut [f32],
    output: Option<&mut [f32]>,
) {
    let input = data.as_mut_ptr().cast::<u8>();
    let output = output.map_or(input, |output| output.as_mut_ptr().cast());
    // SAFETY: the memory outlives the operation, which is waited for here, and nobody else touches it.
    let tensor = unsafe { Tensor::new(meta, input, Output::At(output)) };
    let submission = Submission::new("test", Some(name), op, ProcessSetId::GLOBAL, tensor.into());
    let handle = engine.submit(submission).expect("accepted");
    match engine.wait(handle, LIMIT) {
        Waited::Ended { result, .. } => drop(result.expect("ends well")),
        other => panic!("{other:?}"),
    }
}

/// Where each element of a matrix of this shape lies, by rows.
fn places(shape: [u64; 2], order: MemoryOrder) -> Vec<usize> {
    let strides = order.strides(&shape).expect("small");
    let row = |r: u64| (0..shape[1]).map(move |c| (r, c));
    let place = |(r, c): (u64, u64)| (r as i64 * strides[0] + c as i64 * strides[1]) as usize;
    (0..shape[0]).flat_map(row).map(place).collect()
}

fn orders(shape: [u64; 2]) -> [MemoryOrder; 2] {
    let columns = MemoryOrder::of(&shape, &[1, shape[0] as i64]).expect("dense");
    [MemoryOrder::ROW_MAJOR, columns]
}

/// Small and large ones, which take other algorithms; each name several times, so that the same order becomes known.
#[test]
fn every_element_meets_its_like() {
    for n in [1, 2, 3] {
        on_ranks(n, move |engine, rank| {
            for shape in [[2, 3], [40, 50], [300, 700]] {
                for (pattern, of_rank) in [[0usize, 0, 0], [1, 1, 1], [1, 0, 1], [0, 1, 1]]
                    .iter()
                    .enumerate()
                {
                    let order = orders(shape)[of_rank[rank]];
                    let places = places(shape, order);
                    let meta = || TensorMeta::new(DType::F32, shape).in_order(order);
                    for repeat in 0..3 {
                        let mut data = vec![f32::NAN; places.len()];
                        for (i, place) in places.iter().enumerate() {
                            data[*place] = (i * (rank + 1)) as f32;
                        }
                        let sum = |i: usize| (1..=n).map(|rank| (i * rank) as f32).sum::<f32>();
                        let name = format!("{shape:?}");
                        let mut apart = vec![f32::NAN; places.len()];
                        let kept = data.clone();
                        run(
                            engine,
                            &format!("{name}.apart"),
                            SUM,
                            meta(),
                            &mut data,
                            Some(&mut apart),
                        );
                        assert_eq!(data, kept, "the input was changed");
                        run(engine, &name, SUM, meta(), &mut data, None);
                        for (i, place) in places.iter().enumerate() {
                            let what = (shape, pattern, repeat, i);
                            assert_eq!(data[*place], sum(i), "{what:?}");
                            assert_eq!(apart[*place], sum(i), "{what:?}");
                        }
                        data[places[1]] = rank as f32;
                        let root = Rank(n as u32 - 1);
                        run(
                            engine,
                            &format!("{name}.sent"),
                            Op::Broadcast { root },
                            meta(),
                            &mut data,
                            None,
                        );
                        assert_eq!(data[places[1]], root.0 as f32);
                        assert_eq!(data[places[2]], sum(2));
                    }
                }
            }
        });
    }
}

#[test]
fn an_order_of_another_shape_is_refused() {
    on_ranks(2, |engine, _| {
        for op in [SUM, Op::Broadcast { root: Rank(0) }] {
            let mut data = [0f32; 6];
            let meta = TensorMeta::new(DType::F32, [1, 2, 3]).in_order(orders([2, 3])[1]);
            let memory = data.as_mut_ptr().cast::<u8>();
            // SAFETY: it is refused, so nobody uses the memory.
            let tensor = unsafe { Tensor::new(meta, memory, Output::At(memory)) };
            let submission = Submission::new("test", None, op, ProcessSetId::GLOBAL, tensor.into());
            let error = engine.submit(submission).expect_err("refused").to_string();
            assert!(error.contains("is no order in memory"), "{error}");
        }
    });
}

#[test]
fn rows_that_are_exchanged_have_to_lie_in_order() {
    on_ranks(2, |engine, _| {
        let shape = [2, 3];
        for op in [
            Op::Allgather,
            Op::Alltoall,
            Op::Reducescatter {
                op: ReduceOp::Sum,
                scale: Scale::NONE,
            },
        ] {
            let mut data = [0f32; 6];
            let meta = TensorMeta::new(DType::F32, shape).in_order(orders(shape)[1]);
            let input = data.as_mut_ptr().cast::<u8>();
            // SAFETY: it is refused, so nobody uses the memory.
            let tensor = unsafe { Tensor::new(meta, input, Output::Allocate) };
            let submission = Submission::new("test", None, op, ProcessSetId::GLOBAL, tensor.into());
            let error = engine.submit(submission).expect_err("refused").to_string();
            assert!(error.contains("not in row-major order"), "{error}");
        }
    });
}

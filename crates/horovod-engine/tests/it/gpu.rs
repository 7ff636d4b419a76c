//! Operations on GPU tensors, against the same on host tensors: ranks are threads, each with a GPU of the double.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::gpu_double::ranks::{OnRank, finish, on_ranks};
use crate::gpu_double::{Double, Memory, allocator, with_double};
use horovod_engine::config::{Config, GpuOperations};
use horovod_engine::gpu::{Ready, read_number};
use horovod_engine::{
    DType, Error, Op, Output, ProcessSetId, Rank, ReduceOp, Scale, Submission, Tensor, TensorMeta,
};

/// One operation on one or several tensors.
#[derive(Clone)]
struct Case {
    name: String,
    op: Op,
    dtype: DType,
    /// Of this rank.
    shapes: Vec<Vec<u64>>,
    in_place: bool,
    splits: Option<Vec<i64>>,
}

impl Case {
    fn allocates(&self) -> bool {
        matches!(
            self.op,
            Op::Allgather | Op::Alltoall | Op::Reducescatter { .. }
        )
    }

    /// Small whole numbers that all types hold, whose sums are exact and divide by 6.
    fn data(&self, rank: usize, shape: &[u64], seed: u64) -> Vec<u8> {
        let elems: u64 = shape.iter().product();
        let mut bytes = Vec::new();
        for i in 0..elems {
            let number = 6 * ((i * 7 + rank as u64 * 5 + seed) % 3);
            let value = match self.dtype {
                // Every combination of the ranks' values, also several that are true.
                DType::Bool => ((i >> rank) & 1 == 1).into(),
                _ => number as u8,
            };
            bytes.extend(encode(self.dtype, value));
        }
        bytes
    }
}

fn encode(dtype: DType, value: u8) -> Vec<u8> {
    let float = f32::from(value);
    match dtype {
        DType::U8 | DType::I8 | DType::Bool => vec![value],
        DType::U16 | DType::I16 => u16::from(value).to_le_bytes().to_vec(),
        DType::I32 | DType::U32 => u32::from(value).to_le_bytes().to_vec(),
        DType::I64 | DType::U64 => u64::from(value).to_le_bytes().to_vec(),
        DType::F32 => float.to_le_bytes().to_vec(),
        DType::F64 => f64::from(float).to_le_bytes().to_vec(),
        DType::BF16 => ((float.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
        DType::F16 => {
            // Exact for what is used here.
            let bits = float.to_bits();
            let half = match float {
                0.0 => 0,
                _ => (((bits >> 23) - 127 + 15) << 10) | ((bits >> 13) & 0x3ff),
            };
            (half as u16).to_le_bytes().to_vec()
        }
    }
}

/// Results: bytes and shape of each tensor, and an alltoall's splits.
type RankOutcome = (Vec<(Vec<u8>, Vec<u64>)>, Option<Vec<u64>>);

fn on_host(on: &OnRank<'_>, case: &Case) -> Result<RankOutcome, Error> {
    let inputs = case.shapes.iter().zip(0..);
    let mut inputs: Vec<_> = inputs
        .map(|(shape, seed)| case.data(on.rank, shape, seed))
        .collect();
    let tensors = inputs.iter_mut().zip(&case.shapes).map(|(input, shape)| {
        let memory = input.as_mut_ptr();
        let output = match case.allocates() {
            true => Output::Allocate,
            false => Output::At(memory),
        };
        // SAFETY: the inputs live until the operation has ended.
        unsafe { Tensor::new(TensorMeta::new(case.dtype, &shape[..]), memory, output) }
    });
    let tensors: Vec<_> = tensors.collect();
    let name = format!("host.{}", case.name);
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some(&name), case.op.clone(), set, tensors.into())
        .with_splits(case.splits.clone());
    let result = finish(on.engine, submission)?;
    let outputs = if case.allocates() {
        let outputs = result.outputs.iter().flatten();
        outputs
            .map(|(buffer, shape)| {
                // SAFETY: the operation has ended.
                let bytes =
                    unsafe { std::slice::from_raw_parts(buffer.as_mut_ptr(), buffer.len()) };
                (bytes.to_vec(), shape.to_vec())
            })
            .collect()
    } else {
        inputs.into_iter().zip(case.shapes.clone()).collect()
    };
    Ok((outputs, result.received_splits))
}

fn on_gpu(on: &OnRank<'_>, case: &Case) -> Result<RankOutcome, Error> {
    let (device, stream) = (on.rank as i32, on.stream);
    let mut inputs = Vec::new();
    let mut outputs = Vec::new();
    for (shape, seed) in case.shapes.iter().zip(0..) {
        let bytes = case.data(on.rank, shape, seed);
        let input = Memory::new(on.double, device, stream, bytes.len());
        input.write(&bytes);
        outputs.push(match case.in_place {
            true => input.clone(),
            false => Memory::new(on.double, device, stream, bytes.len()),
        });
        inputs.push(input);
    }
    let ready = Ready::record(device, stream)?;
    let tensors = inputs.iter().zip(&outputs).zip(&case.shapes);
    let tensors = tensors.map(|((input, output), shape)| {
        let output = (!case.allocates()).then_some(output);
        input.tensor(case.dtype, shape, output, &ready)
    });
    let tensors: Vec<_> = tensors.collect();
    let made = Arc::new(Mutex::new(Vec::new()));
    let name = format!("gpu.{}", case.name);
    let set = ProcessSetId::GLOBAL;
    let mut submission = Submission::new("test", Some(&name), case.op.clone(), set, tensors.into())
        .with_splits(case.splits.clone());
    if case.allocates() {
        let allocator = allocator(on.double, device, stream, made.clone());
        // SAFETY: memory of the double, kept until the result was read.
        submission = unsafe { submission.allocating(allocator) };
    }
    // The framework lets go of it: only the operation keeps it.
    drop((inputs, ready));
    let result = finish(on.engine, submission)?;
    let end = result.end.as_ref().expect("it was launched");
    end.order(stream)?;
    let read = if case.allocates() {
        let made = made.lock().expect("no panic");
        let shapes = result.outputs.iter().flatten();
        made.iter()
            .zip(shapes)
            .map(|(memory, (_, shape))| (memory.read(), shape.to_vec()))
            .collect()
    } else {
        let outputs = outputs.iter().map(|memory| memory.read());
        outputs.zip(case.shapes.clone()).collect()
    };
    on.engine.wait_for_devices(Duration::MAX)?;
    Ok((read, result.received_splits))
}

fn allreduce(op: ReduceOp, pre: f64, post: f64) -> Op {
    Op::Allreduce {
        op,
        scale: Scale { pre, post },
    }
}

/// All that a rank of so many is asked for.
fn cases(rank: usize, size: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: String, op: Op, dtype, shapes: Vec<Vec<u64>>, splits: Option<Vec<i64>>| {
        for in_place in [false, true] {
            cases.push(Case {
                name: format!("{name}.{dtype:?}.{in_place}"),
                op: op.clone(),
                dtype,
                shapes: shapes.clone(),
                in_place,
                splits: splits.clone(),
            });
            if matches!(op, Op::Allgather | Op::Alltoall | Op::Reducescatter { .. }) {
                break;
            }
        }
    };
    for dtype in DType::ALL {
        for op in [
            ReduceOp::Sum,
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::Average,
        ] {
            if dtype == DType::Bool && op == ReduceOp::Average {
                continue;
            }
            // Odd, empty, 0-d, many small ones beside a large one.
            let shapes = vec![vec![7], vec![0], vec![], vec![3, 5], vec![40_000]];
            add(
                format!("{op:?}"),
                allreduce(op, 1.0, 1.0),
                dtype,
                shapes,
                None,
            );
        }
        let shape = vec![vec![2 + rank as u64, 3], vec![rank as u64, 2]];
        add("gather".into(), Op::Allgather, dtype, shape, None);
        add("even".into(), Op::Allgather, dtype, vec![vec![4, 2]], None);
        let root = Rank(size as u32 - 1);
        let op = Op::Broadcast { root };
        add("broadcast".into(), op, dtype, vec![vec![9], vec![0]], None);
        if dtype != DType::Bool {
            for (op, rows) in [(ReduceOp::Sum, 7), (ReduceOp::Average, 6)] {
                let scale = Scale::NONE;
                let op = Op::Reducescatter { op, scale };
                add(
                    format!("scatter{rows}"),
                    op,
                    dtype,
                    vec![vec![rows, 2]],
                    None,
                );
            }
        }
    }
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64, DType::I32] {
        let shapes = vec![vec![11], vec![70_000]];
        let op = allreduce(ReduceOp::Sum, 0.5, 4.0);
        add("scaled".into(), op, dtype, shapes, None);
        let scale = Scale {
            pre: 0.5,
            post: 2.0,
        };
        let op = Op::Reducescatter {
            op: ReduceOp::Sum,
            scale,
        };
        add("scattered".into(), op, dtype, vec![vec![6, 2]], None);
    }
    let op = allreduce(ReduceOp::Product, 1.0, 1.0);
    add("product".into(), op, DType::F32, vec![vec![5]], None);
    let splits: Vec<i64> = (0..size).map(|to| ((rank + to) % 3) as i64).collect();
    let rows = splits.iter().sum::<i64>() as u64;
    add(
        "uneven".into(),
        Op::Alltoall,
        DType::F32,
        vec![vec![rows, 2]],
        Some(splits),
    );
    let shape = vec![vec![2 * size as u64, 3]];
    add("exchange".into(), Op::Alltoall, DType::I64, shape, None);
    cases
}

/// All cases on the GPU and on the host; how often NCCL was asked for a reduction.
fn compare(double: Double, n: usize, operations: GpuOperations) -> u64 {
    let config = move |config: &mut Config| config.gpu.operations = operations;
    on_ranks(double, n, config, |on| {
        for case in cases(on.rank, on.size) {
            let host = on_host(on, &case).expect("on the host");
            let gpu = on_gpu(on, &case).expect("on the GPU");
            assert_eq!(gpu, host, "{} on rank {}", case.name, on.rank);
        }
    });
    double.count("ncclAllReduce")
}

#[test]
fn results_by_nccl_are_those_of_the_host() {
    for (n, seed) in [(2, 1), (3, 2), (2, 3)] {
        let settings = format!("devices={n},seed={seed},delay=20");
        with_double(
            "results_by_nccl_are_those_of_the_host",
            &settings,
            |double| {
                assert!(compare(double, n, GpuOperations::Nccl) > 0);
            },
        );
    }
}

#[test]
fn results_are_the_same_where_every_call_of_nccl_goes_on_for_a_while() {
    let test = "results_are_the_same_where_every_call_of_nccl_goes_on_for_a_while";
    with_double(test, "devices=2,in_progress=3", |double| {
        assert!(compare(double, 2, GpuOperations::Nccl) > 0);
    });
}

#[test]
fn results_through_host_memory_are_those_of_the_host() {
    let test = "results_through_host_memory_are_those_of_the_host";
    with_double(test, "devices=3,delay=20", |double| {
        assert_eq!(compare(double, 3, GpuOperations::Host), 0);
        assert!(double.count("cuMemcpyHtoDAsync_v2") > 0);
        assert_eq!(double.count("pageable"), 0, "the host does not wait");
    });
}

#[test]
fn a_rank_alone_needs_no_nccl() {
    with_double("a_rank_alone_needs_no_nccl", "devices=1", |double| {
        assert_eq!(compare(double, 1, GpuOperations::Auto), 0);
    });
}

#[test]
fn numbers_are_read_in_the_order_of_a_stream_that_is_used_again() {
    let test = "numbers_are_read_in_the_order_of_a_stream_that_is_used_again";
    with_double(test, "devices=1,delay=20", |double| {
        let stream = double.stream(0);
        let memory = Memory::new(double, 0, stream, 8);
        let read = || {
            let ready = Ready::record(0, stream).expect("records");
            // SAFETY: it lies there, and is written to only by the stream.
            unsafe { read_number(memory.address as *const i64, &ready) }.expect("is read")
        };
        let before = double.count("cuStreamCreateWithPriority");
        for number in [7i64, -8, i64::MAX] {
            memory.write(&number.to_le_bytes());
            assert_eq!(read(), number);
        }
        let made = |n| assert_eq!(double.count("cuStreamCreateWithPriority") - before, n);
        made(1);
        // One that waits holds up no other.
        let gated = double.stream(0);
        let gate = double.gate(gated);
        let other = Memory::new(double, 0, gated, 8);
        other.write(&5i64.to_le_bytes());
        let ready = Ready::record(0, gated).expect("records");
        std::thread::scope(|scope| {
            let waiting = double.count("cuEventSynchronize") + 1;
            let waits = scope.spawn(|| {
                // SAFETY: as above; `other` is not written to meanwhile.
                unsafe { read_number(other.address as *const i64, &ready) }.expect("is read")
            });
            while double.count("cuEventSynchronize") < waiting {
                std::thread::yield_now();
            }
            assert_eq!(read(), i64::MAX);
            double.open(gate);
            assert_eq!(waits.join().expect("no panic"), 5);
        });
        made(2);
        assert_eq!(read(), i64::MAX);
        made(2);
    });
}

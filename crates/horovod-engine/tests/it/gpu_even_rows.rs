//! Results of GPU tensors in the caller's memory where the ranks bring, or get, equally many rows, elsewhere on all of them
//! where they do not; and those of reducescatters, always there.

use std::sync::Arc;
use std::time::Duration;

use crate::gpu_double::ranks::{OnRank, finish, on_ranks};
use crate::gpu_double::{Memory, with_double};
use horovod_engine::config::GpuOperations;
use horovod_engine::gpu::Ready;
use horovod_engine::{
    DType, Error, Op, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor, TensorMeta,
};

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(120);
const RANKS: usize = 3;

fn even(at: *mut u8, bytes: usize) -> Output {
    Output::Even { at, bytes }
}

fn exactly(at: *mut u8, bytes: usize) -> Output {
    Output::Exactly { at, bytes }
}

/// Carry `op` out on so many rows of one number each, with memory for `expected` rows; whether the result is there.
fn is_there(on: &OnRank<'_>, name: &str, op: Op, rows: u64, expected: u64) -> bool {
    is_at(on, name, op, (rows, expected), even).expect("succeeds")
}

fn is_at(
    on: &OnRank<'_>,
    name: &str,
    op: Op,
    (rows, expected): (u64, u64),
    place: fn(*mut u8, usize) -> Output,
) -> Result<bool, Error> {
    let memory = |rows: u64| Memory::new(on.double, on.rank as i32, on.stream, rows as usize * 4);
    let (input, output) = (memory(rows), memory(expected));
    input.write(&1.0f32.to_le_bytes().repeat(rows as usize));
    let ready = Ready::record(on.rank as i32, on.stream).expect("is recorded");
    let at = |memory: &Memory| std::ptr::with_exposed_provenance_mut::<u8>(memory.address as usize);
    let place = place(at(&output), expected as usize * 4);
    let meta = TensorMeta::new(DType::F32, [rows]);
    // SAFETY: the double's memory, kept by the owner; the double checks the rest.
    let tensor = unsafe { Tensor::new(meta, at(&input), place).on_gpu(ready) };
    let tensor = tensor.kept_by(Arc::new((input, output.clone())));
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some(name), op.clone(), set, tensor.into());
    let result = finish(on.engine, submission)?;

    let end = result.end.as_ref().expect("it is launched");
    end.order(on.stream).expect("is ordered");
    let (buffer, _) = result.outputs[0].as_ref().expect("an output");
    let is_there = buffer.as_mut_ptr() == at(&output);
    if is_there {
        let sum = match op {
            Op::Reducescatter { .. } => RANKS as f32,
            _ => 1.0,
        };
        assert_eq!(output.read(), sum.to_le_bytes().repeat(expected as usize));
    } else {
        let ended = on.engine.wait_for_launch(&**end, LIMIT);
        assert!(ended.expect("ends well"), "it hangs");
    }
    Ok(is_there)
}

const SCATTER: Op = Op::Reducescatter {
    op: ReduceOp::Sum,
    scale: Scale::NONE,
};

fn check(on: &OnRank<'_>) -> Vec<bool> {
    let (n, rank) = (RANKS as u64, on.rank as u64);
    let scatter = SCATTER;
    for rows in [0, 1, n + 1, 2 * n] {
        let mine = on.engine.scattered_rows(ProcessSetId::GLOBAL, rows);
        let mine = mine.expect("it is a member");
        assert_eq!(mine, rows / n + u64::from(rank < rows % n));
        let name = format!("scatter of {rows}");
        let is_there = is_at(on, &name, SCATTER, (rows, mine), exactly);
        assert!(is_there.expect("succeeds") || mine == 0, "{name}");
    }
    let elsewhere = on.engine.scattered_rows(ProcessSetId(7), 1);
    assert_eq!(elsewhere, None, "there is no such set");
    vec![
        is_there(on, "gather", Op::Allgather, 2, 2 * n),
        is_there(on, "exchange", Op::Alltoall, 2 * n, 2 * n),
        is_there(on, "scatter", scatter.clone(), 2 * n, 2),
        // The second rank brings what the ranks bring on the average.
        is_there(on, "uneven gather", Op::Allgather, rank + 1, (rank + 1) * n),
        is_there(
            on,
            "uneven exchange",
            Op::Alltoall,
            (rank + 1) * n,
            (rank + 1) * n,
        ),
        // The last ranks get what they expect.
        is_there(on, "uneven scatter", scatter, n + 1, 1),
    ]
}

fn check_with(operations: GpuOperations) {
    with_double(
        match operations {
            GpuOperations::Host => "through_host_memory",
            _ => "through_nccl",
        },
        "devices=3,seed=9",
        |double| {
            let all = on_ranks(
                double,
                RANKS,
                |config| config.gpu.operations = operations,
                check,
            );
            assert_eq!(
                all,
                vec![vec![true, true, true, false, false, false]; RANKS]
            );
        },
    );
}

#[test]
fn through_nccl() {
    check_with(GpuOperations::Nccl);
}

#[test]
fn through_host_memory() {
    check_with(GpuOperations::Host);
}

fn refuse_with(test: &str, operations: GpuOperations) {
    with_double(test, "devices=3,seed=9", |double| {
        let errors = on_ranks(
            double,
            RANKS,
            |config| config.gpu.operations = operations,
            |on| {
                // Of two rows, on ranks that get one.
                let expected = if on.rank == 1 { 2 } else { 1 };
                let rows = (RANKS as u64, expected);
                let refused = is_at(on, "scatter", SCATTER, rows, exactly);
                let refused =
                    refused.and_then(|_| on.engine.barrier(ProcessSetId::GLOBAL, || Ok(())));
                refused
                    .expect_err("one has memory of another size")
                    .to_string()
            },
        );
        for error in errors {
            assert!(error.contains("rank 1"), "{error}");
            assert!(
                error.contains("there are no 4 bytes of GPU memory"),
                "{error}"
            );
        }
    });
}

#[test]
fn memory_of_another_size_is_refused_through_nccl() {
    let test = "memory_of_another_size_is_refused_through_nccl";
    refuse_with(test, GpuOperations::Nccl);
}

#[test]
fn memory_of_another_size_is_refused_through_host_memory() {
    let test = "memory_of_another_size_is_refused_through_host_memory";
    refuse_with(test, GpuOperations::Host);
}

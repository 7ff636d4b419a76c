//! Results of GPU tensors in the caller's memory where the ranks bring, or get, equally many rows; elsewhere on all of them
//! where they do not.

mod gpu_double;

use std::sync::Arc;
use std::time::Duration;

use gpu_double::ranks::{OnRank, finish, on_ranks};
use gpu_double::{Memory, with_double};
use horovod::config::GpuOperations;
use horovod::gpu::Ready;
use horovod::{DType, Op, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor, TensorMeta};

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(120);
const RANKS: usize = 3;

/// Carry `op` out on so many rows of one number each, with memory for `expected` rows; whether the result is there.
fn is_there(on: &OnRank<'_>, name: &str, op: Op, rows: u64, expected: u64) -> bool {
    let memory = |rows: u64| Memory::new(on.double, on.rank as i32, on.stream, rows as usize * 4);
    let (input, output) = (memory(rows), memory(expected));
    input.write(&1.0f32.to_le_bytes().repeat(rows as usize));
    let ready = Ready::record(on.rank as i32, on.stream).expect("is recorded");
    let at = |memory: &Memory| std::ptr::with_exposed_provenance_mut::<u8>(memory.address as usize);
    let place = Output::Even {
        at: at(&output),
        bytes: expected as usize * 4,
    };
    let meta = TensorMeta::new(DType::F32, [rows]);
    // SAFETY: the double's memory, kept by the owner; the double checks the rest.
    let tensor = unsafe { Tensor::new(meta, at(&input), place).on_gpu(ready) };
    let tensor = tensor.kept_by(Arc::new((input, output.clone())));
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some(name), op.clone(), set, tensor.into());
    let result = finish(on.engine, submission).expect("succeeds");

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
    is_there
}

fn check(on: &OnRank<'_>) -> Vec<bool> {
    let (n, rank) = (RANKS as u64, on.rank as u64);
    let scatter = Op::Reducescatter {
        op: ReduceOp::Sum,
        scale: Scale::NONE,
    };
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

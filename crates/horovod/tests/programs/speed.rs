//! The time of calls on slices, beside the engine's own way: the peer `rust` of `bench/frameworks.py`.

mod measuring;

use std::sync::Arc;
use std::time::Duration;

use horovod::ReduceOp::Sum;
use horovod_engine::{
    self as engine, DType, Engine, Op, Output, ProcessSetId, Scale, Submission, Tensor, TensorMeta,
    Waited,
};
use measuring::Bench;

fn main() -> horovod::Result<()> {
    let hvd = horovod::init()?;
    let bench = Bench::new(&hvd)?;
    let engine = engine::engine().map_err(failed)?;
    let named = hvd.named("one");
    let (mut one, mut raw) = ([1.0f32], [1.0f32]);
    bench.in_turns(&mut [
        ("4 B", &mut |bench| {
            bench.time(|| named.allreduce_in_place(&mut one, Sum))
        }),
        ("4 B, the engine's submit and wait", &mut |bench| {
            bench.time(|| submit_and_wait(&engine, &mut raw))
        }),
    ])?;
    // PyTorch's memory begins at a multiple of 64 bytes, that of a large `Vec` 16 bytes behind one.
    for (name, elements, alignment) in [
        ("1,000 elements", 1_000, 4),
        ("1,000,000 elements", 1_000_000, 4),
        ("64 MiB, in place", 16 << 20, 64),
        ("64 MiB, in place, a Vec", 16 << 20, 4),
    ] {
        let (named, mut values) = (hvd.named(name), vec![1.0f32; elements + 16]);
        let begin = values.as_ptr().align_offset(alignment);
        let values = &mut values[begin..begin + elements];
        bench.in_turns(&mut [(name, &mut |bench| {
            bench.time(|| named.allreduce_in_place(values, Sum))
        })])?;
    }
    bench.done()
}

/// The least that a caller of the engine does.
fn submit_and_wait(engine: &Arc<Engine>, values: &mut [f32]) -> horovod::Result<()> {
    let at = values.as_mut_ptr().cast::<u8>();
    let meta = TensorMeta::new(DType::F32, [values.len() as u64]);
    // SAFETY: the slice is borrowed until the operation has ended: a wait without a limit returns then.
    let tensor = unsafe { Tensor::new(meta, at, Output::At(at)) };
    let op = Op::Allreduce {
        op: engine::ReduceOp::Sum,
        scale: Scale::NONE,
    };
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("allreduce", Some("raw"), op, set, tensor.into());
    let waited = engine.submit_and_wait_for(submission, Duration::MAX);
    match waited.map_err(failed)? {
        (_, Waited::Ended { result, .. }) => result.map(drop).map_err(failed),
        // The memory is in use.
        _ => std::process::abort(),
    }
}

fn failed(error: engine::Error) -> horovod::Error {
    let mistake = error.to_string();
    horovod::Error::Invalid { mistake }
}

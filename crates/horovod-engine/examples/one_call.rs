//! One cached allreduce, for a profiler: `python bench/one_call.py` counts its instructions.
//!
//! Usage: one_call RANKS ELEMENTS. The ranks are threads of this process; of rank 0 the call that is measured has a
//! function of its own.

use std::thread;
use std::time::Duration;

use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, Error, Op, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor,
    TensorMeta, Waited,
};
use horovod_transport::testing;

/// Calls before the measured one. All ranks know the name then, and no memory has to be allocated.
const WARM_UP: usize = 50;
/// Hard bound of a wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(60);

fn main() {
    let numbers = std::env::args().skip(1).map(|word| word.parse());
    let numbers: Result<Vec<usize>, _> = numbers.collect();
    let Ok([ranks, elements]) = numbers.as_deref() else {
        panic!("usage: one_call RANKS ELEMENTS");
    };
    let elements = *elements;
    let meshes = testing::cluster(*ranks).into_iter().enumerate();
    let threads: Vec<_> = meshes
        .map(|(rank, mesh)| {
            thread::spawn(move || {
                let engine = Engine::start(Config::solo(), mesh).expect("starts");
                let mut data = vec![1.0_f32; elements];
                for _ in 0..WARM_UP {
                    call(&engine, &mut data);
                }
                match rank {
                    0 => measured_call(&engine, &mut data),
                    _ => call(&engine, &mut data),
                }
                let _ = engine.barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()));
                engine.shutdown();
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("a rank ends well");
    }
}

/// The profiler finds the call by this name.
#[unsafe(no_mangle)]
#[inline(never)]
fn measured_call(engine: &Engine, data: &mut [f32]) {
    call(engine, data);
}

/// Sums `data` over the ranks, in place.
fn call(engine: &Engine, data: &mut [f32]) {
    let memory = data.as_mut_ptr().cast::<u8>();
    let meta = TensorMeta::new(DType::F32, [data.len() as u64]);
    // SAFETY: the memory outlives the operation, and nothing else accesses it.
    let tensor = unsafe { Tensor::new(meta, memory, Output::At(memory)) };
    let op = Op::Allreduce {
        op: ReduceOp::Sum,
        scale: Scale::NONE,
    };
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("example", Some("gradient"), op, set, tensor.into());
    let handle = engine.submit(submission).expect("accepted");
    match engine.wait(handle, LIMIT) {
        Waited::Ended { result, .. } => drop(result.expect("succeeds")),
        other => panic!("{other:?}"),
    }
}

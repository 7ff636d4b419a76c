//! An elastic training for `tests/integration/test_candle.py`, in which rank 1 is killed once: its result does not depend
//! on the members, because all ranks have the same batch.
//!
//! The argument is a folder, or none if no rank shall be killed.

#[path = "../../../horovod/tests/programs/mishap.rs"]
mod mishap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, Optimizer, SGD, VarBuilder, VarMap};
use horovod::elastic;
use horovod_candle::{DistributedOptimizer, ElasticState, Result};

const STEPS: usize = 20;

fn main() -> Result<()> {
    let folder = std::env::args().nth(1);
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let weight = vars.get_with_hints((4, 3), "weight", Init::Const(0.5))?;
    let mut training = ElasticState {
        parameters: map.clone(),
        progress: 0,
    };
    let rank = elastic::run(&mut training, |job, training| {
        let (rank, size, step) = (job.rank(), job.size(), training.progress);
        mishap::tell(&format!(
            "generation of {size}: rank {rank} from step {step}\n"
        ));
        let inner = SGD::new(map.all_vars(), 0.1)?;
        let mut optimizer = DistributedOptimizer::new(job, inner, &map)?;
        while training.progress < STEPS {
            if let Some(folder) = &folder
                && training.progress >= 5
                && rank == 1
            {
                mishap::kill_once(folder.as_ref());
            }
            let batch = Tensor::arange(0.0f32, 8.0, &Device::Cpu)?.reshape((2, 4))?;
            let batch = (batch * (training.progress as f64 * 0.01))?;
            optimizer.backward_step(&batch.matmul(&weight)?.sqr()?.mean_all()?)?;
            training.progress += 1;
            if training.progress.is_multiple_of(2) {
                job.commit(training)?;
            }
        }
        Result::Ok(rank)
    })?;
    let weights = weight.flatten_all()?.to_vec1::<f32>()?;
    match rank {
        Some(rank) => mishap::tell(&format!("rank {rank} ended with {weights:?}\n")),
        None => mishap::tell("was removed\n"),
    }
    Ok(())
}

//! An elastic training for `tests/integration/test_burn.py`, in which rank 1 is killed once: its result does not depend on
//! the members, because all ranks have the same batch.
//!
//! The argument is a folder, or none if no rank shall be killed.

#[path = "../../../horovod/tests/programs/mishap.rs"]
mod mishap;

use burn::nn::LinearConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use horovod::elastic;
use horovod_burn::{DistributedOptimizer, ElasticState, Result};

const STEPS: usize = 20;

fn main() -> Result<()> {
    let folder = std::env::args().nth(1);
    let device = Device::flex().autodiff();
    device.seed(7); // every run begins alike
    let mut training = ElasticState {
        model: LinearConfig::new(4, 3).init(&device),
        optimizer: AdamWConfig::new().init(),
        progress: 0,
    };
    let rank = elastic::run(&mut training, |job, training| {
        let (rank, size, step) = (job.rank(), job.size(), training.progress);
        mishap::tell(&format!(
            "generation of {size}: rank {rank} from step {step}\n"
        ));
        let mut optimizer = DistributedOptimizer::new(job, training.optimizer.clone());
        while training.progress < STEPS {
            if let Some(folder) = &folder
                && training.progress >= 5
                && rank == 1
            {
                mishap::kill_once(folder.as_ref());
            }
            let batch = Tensor::<2>::full([2, 4], training.progress as f32 * 0.1, &device);
            let loss = training.model.forward(batch).square().mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &training.model);
            training.model = optimizer.step(0.1, training.model.clone(), gradients)?;
            training.progress += 1;
            if training.progress.is_multiple_of(2) {
                training.optimizer = optimizer.inner().clone();
                job.commit(training)?;
            }
        }
        Result::Ok(rank)
    })?;
    let weights = training.model.weight.val().into_data();
    let weights = weights.as_slice::<f32>()?;
    match rank {
        Some(rank) => mishap::tell(&format!("rank {rank} ended with {weights:?}\n")),
        None => mishap::tell("was removed\n"),
    }
    Ok(())
}

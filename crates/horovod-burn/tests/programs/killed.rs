//! An elastic training for `tests/integration/test_burn.py`, in which rank 1 is killed once: its result does not depend on
//! the members, because all ranks have the same batch.
//!
//! The argument is a folder, or none if no rank shall be killed.
#![allow(clippy::print_stdout, reason = "the lines that the test reads")]

use std::io::Write;
use std::path::Path;
use std::process::Command;

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
        tell(&format!(
            "generation of {size}: rank {rank} from step {step}\n"
        ));
        let mut optimizer = DistributedOptimizer::new(job, training.optimizer.clone());
        while training.progress < STEPS {
            if let Some(folder) = &folder
                && training.progress >= 5
                && rank == 1
                && is_first(Path::new(folder))
            {
                kill();
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
        Some(rank) => tell(&format!("rank {rank} ended with {weights:?}\n")),
        None => tell("was removed\n"),
    }
    Ok(())
}

/// Whether no rank has called this before.
fn is_first(folder: &Path) -> bool {
    std::fs::File::create_new(folder.join("killed")).is_ok()
}

fn kill() -> ! {
    let own = std::process::id().to_string();
    let _ = Command::new("kill").args(["-KILL", &own]).status();
    loop {
        std::thread::park();
    }
}

/// One write, so that the lines of ranks stay whole.
fn tell(line: &str) {
    let _ = std::io::stdout().write_all(line.as_bytes());
}

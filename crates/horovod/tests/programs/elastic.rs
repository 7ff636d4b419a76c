//! An elastic training for `tests/integration/test_rust.py`: its result does not depend on the members.
//!
//! Arguments: a folder, the number of ranks with which the second half is trained, and `kill once` or `kill always` if the
//! last rank shall be killed in the first half.

mod mishap;

use std::path::Path;
use std::time::Duration;

use horovod::ReduceOp::Max;
use horovod::elastic;

const STEPS: usize = 20;

#[derive(serde::Serialize, serde::Deserialize)]
struct Training {
    step: usize,
    weights: Vec<f64>,
}

fn main() -> horovod::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (folder, wanted) = (Path::new(&arguments[0]), &arguments[1]);
    let kills = arguments.get(2).map_or("", String::as_str);
    // No rank begins alike.
    let mut training = Training {
        step: 0,
        weights: vec![f64::from(std::process::id()); 3],
    };
    let last_rank = elastic::run(&mut training, |job, training| {
        let (rank, size) = (job.rank(), job.size());
        let step = training.step;
        mishap::tell(&format!(
            "generation of {size}: rank {rank} from step {step}\n"
        ));
        if step == 0 {
            training.weights = vec![0.5; 3];
        }
        while training.step < STEPS {
            if training.step >= 5 && rank == 1 {
                match kills {
                    "kill once" => mishap::kill_once(folder),
                    "kill always" => mishap::kill(),
                    _ => {}
                }
            }
            if training.step == STEPS / 2 && size.to_string() != *wanted {
                mishap::tell(&format!("rank {rank} waits\n"));
                loop {
                    job.check_members()?;
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            let mut gradient: Vec<f64> = (0..3).map(|at| (training.step * at) as f64).collect();
            job.named("gradient")
                .allreduce_in_place(&mut gradient, Max)?;
            for (weight, gradient) in training.weights.iter_mut().zip(&gradient) {
                *weight = 0.75 * *weight - 0.1 * gradient;
            }
            training.step += 1;
            if training.step.is_multiple_of(2) {
                job.commit(training)?;
            }
        }
        horovod::Result::Ok(rank)
    })?;
    match last_rank {
        Some(rank) => mishap::tell(&format!("rank {rank} ended with {:?}\n", training.weights)),
        None => mishap::tell("was removed\n"),
    }
    Ok(())
}

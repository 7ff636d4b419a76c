//! A network of two layers that learns handwritten digits with burn, on any number of processes. Ranks may be lost, and
//! members may come and go:
//!
//! ```sh
//! cargo build --release --example mlp
//! horovodrun -np 2 --min-np 1 target/release/examples/mlp
//! ```
#![allow(clippy::print_stdout, reason = "the results of an example")]

#[path = "../../horovod/examples/digits/mod.rs"]
mod digits;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use horovod::elastic::{self, Job};
use horovod_burn::{DistributedOptimizer, ElasticState, Result};

/// Images of one step, over all ranks.
const BATCH: usize = 96;
const STEPS: usize = 160;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    last: Linear,
}

impl Net {
    fn forward(&self, images: Tensor<2>) -> Tensor<2> {
        let hidden = Relu::new().forward(self.first.forward(images));
        self.last.forward(hidden)
    }
}

type Training = ElasticState<Net, usize>;

fn main() -> Result<()> {
    let device = Device::flex().autodiff();
    device.seed(7); // runs on other numbers of ranks begin alike
    let mut training = Training {
        model: Net {
            first: LinearConfig::new(digits::PIXELS, 32).init(&device),
            last: LinearConfig::new(32, 10).init(&device),
        },
        optimizer: AdamWConfig::new().init(),
        progress: 0, // steps
    };
    elastic::run(&mut training, |job, training| train(job, training, &device))?;
    Ok(())
}

/// Goes on from the step that the state says.
fn train(job: &Job<'_, Training>, training: &mut Training, device: &Device) -> Result<()> {
    let (images, test) = digits::load();
    let mut optimizer = DistributedOptimizer::new(job, training.optimizer.clone());
    let share = BATCH / job.size();
    while training.progress < STEPS {
        let begin = training.progress * BATCH % images.len() + job.rank() * share;
        let (pixels, labels) = tensors(&images[begin..begin + share], device);
        let loss = loss(&training.model.forward(pixels), &labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &training.model);
        training.model = optimizer.step(0.01, training.model.clone(), gradients)?;
        training.progress += 1;
        if training.progress.is_multiple_of(16) {
            training.optimizer = optimizer.inner().clone();
            job.commit(training)?;
        }
    }
    let (pixels, labels) = tensors(&test, device);
    let outputs = training.model.forward(pixels);
    let loss = loss(&outputs, &labels).into_scalar::<f32>();
    let right = outputs.argmax(1).squeeze::<1>().equal(labels).float();
    let accuracy = right.mean().into_scalar::<f32>();
    let weights = training.model.clone().into_record().into_bytes()?;
    let all = job.allgather(&weights, 1)?;
    let equal = all.chunks(weights.len()).all(|other| *other == weights[..]);
    if job.rank() == 0 {
        println!("loss {loss} accuracy {accuracy} replicas equal: {equal}");
    }
    Ok(())
}

fn loss(outputs: &Tensor<2>, labels: &Tensor<1, Int>) -> Tensor<1> {
    let entropy = CrossEntropyLossConfig::new().init(&outputs.device());
    entropy.forward(outputs.clone(), labels.clone())
}

fn tensors(digits: &[digits::Digit], device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
    let pixels: Vec<f32> = digits.iter().flat_map(|digit| digit.pixels).collect();
    let labels: Vec<i64> = digits.iter().map(|digit| digit.label as i64).collect();
    let pixels = TensorData::new(pixels, [digits.len(), digits::PIXELS]);
    let labels = TensorData::new(labels, [digits.len()]);
    let pixels = Tensor::from_data(pixels, device);
    (pixels, Tensor::from_data(labels, device))
}

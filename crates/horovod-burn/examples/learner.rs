//! burn's `Learner` on any number of processes: a network that learns handwritten digits.
//!
//! ```sh
//! cargo build --release --features train --example learner
//! horovodrun -np 2 target/release/examples/learner
//! ```
#![allow(clippy::print_stdout, reason = "the results of an example")]

#[path = "../../horovod/examples/digits/mod.rs"]
mod digits;

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use horovod_burn::{LearnerStrategy, broadcast_parameters};

const EPOCHS: usize = 60;

type Row = ([f32; digits::PIXELS], usize);
type Batch = (Tensor<2>, Tensor<1, Int>);

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    last: Linear,
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, (pixels, labels): Batch) -> ClassificationOutput {
        let hidden = Relu::new().forward(self.first.forward(pixels));
        let output = self.last.forward(hidden);
        let entropy = CrossEntropyLossConfig::new().init(&output.device());
        let loss = entropy.forward(output.clone(), labels.clone());
        ClassificationOutput::new(loss, output, labels)
    }
}

struct ToTensors;

impl Batcher<Row, Batch> for ToTensors {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Batch {
        let pixels: Vec<f32> = rows.iter().flat_map(|(pixels, _)| *pixels).collect();
        let labels: Vec<i64> = rows.iter().map(|(_, label)| *label as i64).collect();
        let pixels = TensorData::new(pixels, [rows.len(), digits::PIXELS]);
        let labels = TensorData::new(labels, [rows.len()]);
        (
            Tensor::from_data(pixels, device),
            Tensor::from_data(labels, device),
        )
    }
}

fn loader(digits: Vec<digits::Digit>, batch: usize) -> Arc<dyn DataLoader<Batch>> {
    let rows = digits.into_iter().map(|digit| (digit.pixels, digit.label));
    let builder = DataLoaderBuilder::new(ToTensors).batch_size(batch);
    builder.build(InMemDataset::new(rows.collect()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let hvd = horovod::init()?;
    let device = Device::flex().autodiff();
    device.seed(7); // runs on other numbers of ranks begin alike
    let model = Net {
        first: LinearConfig::new(digits::PIXELS, 32).init(&device),
        last: LinearConfig::new(32, 10).init(&device),
    };
    let model = broadcast_parameters(&hvd, model, 0)?;
    let (images, test) = digits::load();
    // One step an epoch: all ranks together take all images.
    let train = loader(images, digits::TRAINING / hvd.size());
    let learner = Learner::new(model, AdamWConfig::new().init(), ConstantLr::new(0.02));
    let learned = SupervisedTraining::new("logs", train, loader(test, 64))
        .with_metric_logger(InMemoryMetricLogger::default()) // without it burn writes files into the folder
        .with_application_logger(None)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .num_epochs(EPOCHS)
        .with_training_strategy(LearnerStrategy::new(&hvd, &device).into())
        .launch(learner);
    if let Some(error) = learned.error {
        return Err(error.to_string().into());
    }
    report(&hvd, learned.model, &device.inner())
}

/// Prints what the model has learned, and whether all ranks have the same.
fn report(
    hvd: &horovod::Communicator,
    model: Net,
    device: &Device,
) -> Result<(), Box<dyn std::error::Error>> {
    let (_, test) = digits::load();
    let rows = test.iter().map(|digit| (digit.pixels, digit.label));
    let output = InferenceStep::step(&model, ToTensors.batch(rows.collect(), device));
    let (loss, right) = (output.loss, output.output.argmax(1).squeeze::<1>());
    let accuracy = right.equal(output.targets).float().mean();
    let (loss, accuracy) = (loss.into_scalar::<f32>(), accuracy.into_scalar::<f32>());
    let weights = model.into_record().into_bytes()?;
    let all = hvd.allgather(&weights, 1)?;
    let equal = all.chunks(weights.len()).all(|other| *other == weights[..]);
    if hvd.rank() == 0 {
        println!("loss {loss} accuracy {accuracy} replicas equal: {equal}");
    }
    Ok(())
}

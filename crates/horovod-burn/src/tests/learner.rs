//! burn's `Learner` on several ranks: as a loop by hand, as burn's own strategy on one rank, and its ends.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::{Dataset, DatasetError};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn::train::logger::InMemoryMetricLogger;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    EarlyStoppingStrategy, ExecutionStrategy, InferenceStep, Learner, LearningResult,
    RegressionOutput, SupervisedTraining, TrainOutput, TrainStep, TrainingStrategy,
};
use horovod::Communicator;
use horovod::testing::on_ranks;

use super::{device, momentum, values};
use crate::{DistributedOptimizer, LearnerStrategy, broadcast_parameters};

const EPOCHS: usize = 2;
const BATCH: usize = 3;
const RATE: f64 = 0.5;

#[derive(Module, Debug)]
struct Line {
    layer: Linear,
}

/// A line through some points, whose `x` cannot be read from this row on.
#[derive(Clone, Debug)]
struct Points {
    count: usize,
    unreadable: usize,
}

struct ToTensor;

impl Dataset<f32> for Points {
    fn get(&self, row: usize) -> Result<f32, DatasetError> {
        match row < self.unreadable {
            true => Ok((row as f32 * 1.7).sin()),
            false => Err(DatasetError::new(std::io::Error::other("no such row"))),
        }
    }

    fn len(&self) -> usize {
        self.count
    }
}

impl Batcher<f32, Tensor<2>> for ToTensor {
    fn batch(&self, rows: Vec<f32>, device: &Device) -> Tensor<2> {
        Tensor::<1>::from_data(rows.as_slice(), device).unsqueeze_dim(1)
    }
}

impl Line {
    fn output(&self, x: Tensor<2>) -> RegressionOutput {
        let (found, wanted) = (self.layer.forward(x.clone()), x * 3.0 + 1.0);
        let loss = (found.clone() - wanted.clone()).square().mean();
        RegressionOutput::new(loss, found, wanted)
    }

    fn bits(&self) -> Vec<u32> {
        let bias = self.layer.bias.as_ref().unwrap();
        let all = [values(&self.layer.weight), values(bias)].concat();
        all.into_iter().map(f32::to_bits).collect()
    }
}

impl TrainStep for Line {
    type Input = Tensor<2>;
    type Output = RegressionOutput;

    fn step(&self, x: Tensor<2>) -> TrainOutput<RegressionOutput> {
        let output = self.output(x);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Line {
    type Input = Tensor<2>;
    type Output = RegressionOutput;

    fn step(&self, x: Tensor<2>) -> RegressionOutput {
        self.output(x)
    }
}

fn points(count: usize) -> Points {
    Points {
        count,
        unreadable: count,
    }
}

fn loader(points: Points) -> Arc<dyn DataLoader<Tensor<2>>> {
    DataLoaderBuilder::new(ToTensor)
        .batch_size(BATCH)
        .build(points)
}

/// A model that all ranks have alike.
fn line(hvd: &Communicator) -> Line {
    let layer = LinearConfig::new(1, 1).init(&device());
    broadcast_parameters(hvd, Line { layer }, 0).unwrap()
}

fn learn(
    model: Line,
    strategy: impl Into<TrainingStrategy<Line>>,
    points: Points,
    set: impl FnOnce(SupervisedTraining<Line>) -> SupervisedTraining<Line>,
) -> LearningResult<Line> {
    let training = SupervisedTraining::new("unused", loader(points.clone()), loader(points))
        .num_epochs(EPOCHS)
        .with_application_logger(None)
        .with_metric_logger(InMemoryMetricLogger::default())
        .with_training_strategy(strategy.into());
    let rates = ExponentialLrSchedulerConfig::new(RATE, 0.9).init().unwrap();
    set(training).launch(Learner::new(model, momentum(), rates))
}

/// The same with a loop of one's own.
fn loop_by_hand(hvd: &Communicator, mut model: Line, count: usize) -> Line {
    let mut optimizer = DistributedOptimizer::new(hvd, momentum()).max_norm(0.5);
    let (rank, size) = (hvd.rank(), hvd.size());
    let share: Vec<usize> = (count * rank / size..count * (rank + 1) / size).collect();
    let steps = count.div_ceil(size).div_ceil(BATCH);
    let mut rate = RATE;
    for _ in 0..EPOCHS {
        for step in 0..steps {
            let batch = share.chunks(BATCH).nth(step).map(|rows| {
                let rows = rows.iter().map(|row| points(count).get(*row).unwrap());
                ToTensor.batch(rows.collect(), &device())
            });
            let gradients = batch.map(|batch| TrainStep::step(&model, batch).grads);
            let gradients = gradients.unwrap_or_else(GradientsParams::new);
            model = optimizer.step(rate, model, gradients).unwrap();
            rate *= 0.9;
        }
    }
    model
}

#[test]
fn a_learner_trains_as_a_loop_by_hand() {
    // Of 13 and of 10 rows a rank has a batch more than another one.
    for (size, count) in [(1, 13), (2, 13), (2, 12), (3, 13), (3, 10)] {
        let results = on_ranks(size, move |hvd| {
            let model = line(hvd);
            let by_hand = loop_by_hand(hvd, model.clone(), count).bits();
            let strategy = LearnerStrategy::new(hvd, &device()).max_norm(0.5);
            let learned = learn(model.clone(), strategy, points(count), |set| set);
            assert!(learned.error.is_none() && learned.interrupted.is_none());
            assert_ne!(model.bits(), by_hand);
            assert_eq!(learned.model.bits(), by_hand);
            by_hand
        });
        for replica in &results {
            assert_eq!(replica, &results[0], "replicas are equal bit for bit");
        }
    }
}

#[test]
fn a_learner_alone_trains_as_with_the_strategy_of_burn() {
    // Of five batches the last is a step of its own.
    on_ranks(1, |hvd| {
        let model = line(hvd);
        let set = |training: SupervisedTraining<Line>| training.grads_accumulation(2);
        let burns = ExecutionStrategy::single(device());
        let burns = learn(model.clone(), burns, points(13), set);
        let ours = LearnerStrategy::new(hvd, &Device::flex());
        let ours = learn(model, ours, points(13), set);
        assert_eq!(ours.model.bits(), burns.model.bits());
    });
}

#[test]
fn a_loader_that_fails_on_one_rank_ends_the_training_on_all() {
    on_ranks(3, |hvd| {
        let mut points = points(30);
        if hvd.rank() == 1 {
            points.unreadable = 15; // within its share of 10..20
        }
        let strategy = LearnerStrategy::new(hvd, &device());
        let learned = learn(line(hvd), strategy, points, |set| set);
        let error = learned.error.expect("the rows of rank 1 end").to_string();
        let expected = match hvd.rank() {
            1 => "Dataset error: no such row",
            _ => "rank 1 cannot take part in this call: Dataset error: no such row",
        };
        assert!(error.contains(expected), "{error}");
        // The job goes on.
        hvd.barrier().unwrap();
    });
}

#[test]
fn ranks_with_other_numbers_of_epochs_or_another_clipping_get_an_error_that_names_both() {
    on_ranks(2, |hvd| {
        let epochs = 1 + hvd.rank();
        let set = |training: SupervisedTraining<Line>| training.num_epochs(epochs);
        let strategy = LearnerStrategy::new(hvd, &device());
        let learned = learn(line(hvd), strategy.clone(), points(6), set);
        let error = learned.error.expect("the ranks differ").to_string();
        let expected = "rank 0 has number of epochs 1, rank 1 has number of epochs 2";
        assert!(error.contains(expected), "{error}");

        let strategy = strategy.max_norm(1.0 + hvd.rank() as f64);
        let learned = learn(line(hvd), strategy, points(6), |set| set);
        let error = learned.error.expect("the ranks differ").to_string();
        let expected = "rank 0 has max_norm Some(1.0), rank 1 has max_norm Some(2.0)";
        assert!(error.contains(expected), "{error}");
    });
}

/// Stops after the first epoch.
#[derive(Clone)]
struct AfterOne;

impl EarlyStoppingStrategy for AfterOne {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        epoch == 1
    }
}

#[test]
fn rank_0_stops_early_for_all_and_any_rank_may_interrupt() {
    on_ranks(2, |hvd| {
        let model = line(hvd);
        let strategy = || LearnerStrategy::new(hvd, &device());
        let one = |training: SupervisedTraining<Line>| training.num_epochs(1);
        let expected = learn(model.clone(), strategy(), points(13), one);
        // Only the answer of rank 0 counts.
        let stopped = learn(
            model.clone(),
            strategy(),
            points(13),
            |training| match hvd.rank() {
                0 => training.early_stopping(AfterOne),
                _ => training,
            },
        );
        assert!(stopped.error.is_none() && stopped.interrupted.is_none());
        assert_eq!(stopped.model.bits(), expected.model.bits());

        let stopped = learn(model.clone(), strategy(), points(13), |training| {
            if hvd.rank() == 1 {
                training.interrupter().stop(Some("enough"));
            }
            training
        });
        let reason = stopped.interrupted.expect("rank 1 has stopped").reason;
        let expected = ["another rank has stopped the training", "enough"][hvd.rank()];
        assert_eq!(reason.as_deref(), Some(expected));
        assert_eq!(stopped.model.bits(), model.bits());
    });
}

//! The strategy for burn's `Learner`: the loop over epochs and batches, in which gradients are reduced over the ranks.

use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn::train::train::WorkerFailure;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents,
    TrainingError, TrainingItem, TrainingStrategy, ValidLoader,
};
use horovod::framework::{Lines, Obstacle, Settings};
use horovod::{Communicator, ReduceOp};

use crate::error::{Error, Result};
use crate::parameters::agree;
use crate::reducer::{self, Reducer};

/// Trains a `Learner` of burn on all ranks, each of which runs the same program.
///
/// ```
/// # use std::sync::Arc;
/// # use burn::data::{dataloader::{DataLoaderBuilder, batcher::Batcher}, dataset::InMemDataset};
/// # use burn::lr_scheduler::constant::ConstantLr;
/// # use burn::module::Module;
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::optim::SgdConfig;
/// # use burn::tensor::{Device, Tensor};
/// # use burn::train::{InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep};
/// # #[derive(Module, Debug)]
/// # struct Net { layer: Linear }
/// # struct Rows;
/// # impl Batcher<f32, Tensor<2>> for Rows {
/// #     fn batch(&self, rows: Vec<f32>, device: &Device) -> Tensor<2> {
/// #         Tensor::<1>::from_data(rows.as_slice(), device).unsqueeze_dim(1)
/// #     }
/// # }
/// # impl Net {
/// #     fn output(&self, rows: Tensor<2>) -> RegressionOutput {
/// #         let output = self.layer.forward(rows.clone());
/// #         RegressionOutput::new((output.clone() - rows.clone()).square().mean(), output, rows)
/// #     }
/// # }
/// # impl TrainStep for Net {
/// #     type Input = Tensor<2>;
/// #     type Output = RegressionOutput;
/// #     fn step(&self, rows: Tensor<2>) -> TrainOutput<RegressionOutput> {
/// #         let output = self.output(rows);
/// #         TrainOutput::new(self, output.loss.backward(), output)
/// #     }
/// # }
/// # impl InferenceStep for Net {
/// #     type Input = Tensor<2>;
/// #     type Output = RegressionOutput;
/// #     fn step(&self, rows: Tensor<2>) -> RegressionOutput { self.output(rows) }
/// # }
/// # fn rows() -> InMemDataset<f32> { InMemDataset::new((0..16).map(|at| at as f32 / 16.0).collect()) }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use horovod_burn::{LearnerStrategy, broadcast_parameters};
///
/// let hvd = horovod::init()?;
/// let device = Device::flex().autodiff();
/// let model = Net { layer: LinearConfig::new(1, 1).init(&device) };
/// let model = broadcast_parameters(&hvd, model, 0)?; // all ranks begin alike
/// let loader = || DataLoaderBuilder::new(Rows).batch_size(4).build(rows()); // all rows, on each rank
/// let strategy = LearnerStrategy::new(&hvd, &device);
/// let folder = format!("logs/{}", hvd.rank());
/// let trained = SupervisedTraining::new(folder, loader(), loader())
///     .num_epochs(2)
///     .with_training_strategy(strategy.into())
/// #   .with_application_logger(None)
/// #   .with_metric_logger(burn::train::logger::InMemoryMetricLogger::default())
///     .launch(Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.1)));
/// if let Some(error) = trained.error {
///     return Err(error.to_string().into());
/// }
/// # Ok(()) }
/// ```
///
/// Like burn's own strategies, it takes the loader of all rows. Each rank trains with its share of neighbouring rows, as
/// many as on the other ranks or one more. A rank whose batches have ended goes on with gradients of zeros. Rank 0 validates
/// with all rows of the other loader, writes the checkpoints and decides whether to stop early. `grads_accumulation`
/// counts batches of each rank.
///
/// Metrics of the training are those of this rank's share. Give each rank a folder of its own for logs, and for
/// checkpoints one folder to all by `with_custom_checkpointers`: with `checkpoint` all ranks read them.
///
/// # Errors
/// burn returns an error of a training in its `LearningResult`. An error of one rank, such as of its loader, ends the
/// training on all, and the others have an error that names this rank.
#[derive(Clone, Debug)]
pub struct LearnerStrategy {
    hvd: Communicator,
    device: Device,
    settings: Settings,
}

impl LearnerStrategy {
    /// A strategy for the ranks of `hvd`, which is the guard or the communicator of a process set. This rank trains on
    /// `device`.
    pub fn new(hvd: &Communicator, device: &Device) -> Self {
        let device = match device.is_autodiff() {
            true => device.clone(),
            false => device.clone().autodiff(),
        };
        Self {
            hvd: hvd.clone(),
            device,
            settings: Settings::default(),
        }
    }

    /// As [`DistributedOptimizer::op`](crate::DistributedOptimizer::op).
    #[must_use]
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.settings.op = op;
        self
    }

    /// As [`DistributedOptimizer::groups`](crate::DistributedOptimizer::groups).
    #[must_use]
    pub fn groups(mut self, groups: usize) -> Self {
        self.settings.groups = groups;
        self
    }

    /// As [`DistributedOptimizer::max_norm`](crate::DistributedOptimizer::max_norm).
    #[must_use]
    pub fn max_norm(mut self, max: f64) -> Self {
        self.settings.max_norm = Some(max);
        self
    }

    fn is_main(&self) -> bool {
        self.hvd.rank() == 0
    }

    /// This rank's share of the rows.
    fn share<T>(&self, loader: &Arc<dyn DataLoader<T>>) -> Arc<dyn DataLoader<T>> {
        let (rows, rank, size) = (loader.num_items(), self.hvd.rank(), self.hvd.size());
        loader.slice(rows * rank / size, rows * (rank + 1) / size)
    }

    /// Whether a rank has more to do and none has stopped; the same on all ranks. An error of one rank becomes one of all.
    fn go_on(&self, interrupter: &Interrupter, has_more: bool) -> Result<bool> {
        let mut any = [has_more, interrupter.should_stop()].map(u8::from);
        let hvd = self.hvd.named("burn.learner");
        hvd.allreduce_in_place(&mut any, ReduceOp::Max)?;
        let [has_more, stops] = any.map(|any| any != 0);
        if !stops {
            return Ok(has_more);
        }
        let error = interrupter.error().map(|error| error.to_string());
        match Lines::new(Vec::new()).compare(&hvd, "burn.learner", None, error)? {
            Some(Obstacle::Mistake(rank, _)) if rank == hvd.members()[hvd.rank()] => {}
            Some(Obstacle::Mistake(rank, cause)) => {
                interrupter.fail(of_training(rank, Error::OfRank { rank, cause }));
            }
            _ if interrupter.should_stop() => {}
            _ => interrupter.stop(Some("another rank has stopped the training")),
        }
        Ok(false)
    }
}

impl<M: LearnerModel> From<LearnerStrategy> for TrainingStrategy<M> {
    fn from(strategy: LearnerStrategy) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for LearnerStrategy {
    fn fit(
        &self,
        mut components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        learner.fork(&self.device);
        let passes = components.grad_accumulation.unwrap_or(1);
        let settings = Settings {
            passes,
            ..self.settings.clone()
        };
        let mut training = Training {
            strategy: self,
            reducer: Reducer::new(&self.hvd, settings),
            rows: train.num_items(),
            train: self.share(&train).to_device(&self.device),
            valid: valid.to_device(&self.device.clone().inner()),
            learner,
        };
        let interrupter = components.interrupter.clone();
        if let Err(error) = training.epochs(&mut components, starting_epoch) {
            interrupter.fail(of_training(self.hvd.members()[self.hvd.rank()], error));
        }
        (training.learner.model(), components.event_processor)
    }
}

/// The error of a rank of the job, for burn.
fn of_training(rank: usize, error: Error) -> TrainingError {
    TrainingError::Workers(vec![WorkerFailure {
        device_id: rank,
        message: error.to_string(),
    }])
}

/// One training.
struct Training<'a, M: LearnerModel> {
    strategy: &'a LearnerStrategy,
    reducer: Reducer,
    learner: Learner<M>,
    /// The number of rows of all ranks.
    rows: usize,
    /// The rows of this rank.
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
}

impl<M: LearnerModel> Training<'_, M> {
    fn epochs(&mut self, components: &mut TrainingComponents<M>, first: usize) -> Result<()> {
        // Ranks with other numbers would wait for each other.
        let passes = self.reducer.settings().passes;
        let lines = [
            format!("first epoch\t{first}"),
            format!("number of epochs\t{}", components.num_epochs),
            format!("grads_accumulation\t{passes}"),
            format!("rows for training\t{}", self.rows),
        ];
        let hvd = &self.strategy.hvd;
        agree(hvd, "burn.learner", &Lines::new(lines.into()), None, Ok(()))?;
        let interrupter = components.interrupter.clone();
        for epoch in first..=components.num_epochs {
            let events = &mut components.event_processor;
            let start = LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: self.train.num_items(),
            };
            interrupter.fail_on_error(events.process_train(start));
            self.train_epoch(events, &interrupter)?;
            interrupter.fail_on_error(events.process_train(LearnerEvent::EndSplit(epoch)));
            if !self.strategy.go_on(&interrupter, true)? {
                break;
            }
            if self.strategy.is_main() {
                self.validate(epoch, events, &interrupter);
            }
            interrupter.fail_on_error(events.process_train(LearnerEvent::EndEpoch(epoch)));
            interrupter.fail_on_error(events.flush());
            if !self.strategy.go_on(&interrupter, true)? {
                break;
            }
            let goes_on = self.strategy.is_main() && self.checkpoint(components, epoch);
            if !self.strategy.go_on(&interrupter, goes_on)? {
                break;
            }
        }
        Ok(())
    }

    fn train_epoch(
        &mut self,
        events: &mut SupervisedTrainingEventProcessor<M>,
        interrupter: &Interrupter,
    ) -> Result<()> {
        let loader = self.train.clone();
        let mut batches = loader.iter();
        for iteration in 1.. {
            let batch = batches.next().transpose().unwrap_or_else(|error| {
                interrupter.fail(error);
                None
            });
            if !self.strategy.go_on(interrupter, batch.is_some())? {
                break;
            }
            let (gradients, output) = match batch.map(|batch| self.learner.train_step(batch)) {
                Some(output) => (output.grads, Some(output.item)),
                None => (GradientsParams::new(), None),
            };
            let rate = self.rate();
            let model = self.learner.model();
            let reduced = self.reducer.reduce(&model, gradients, Some(&rate))?;
            self.step(reduced)?;
            if let Some(output) = output {
                let rate = Some(self.learner.lr_current());
                let item = TrainingItem::new(output, batches.progress(), Some(iteration), rate);
                let event = LearnerEvent::ProcessedItem(item);
                interrupter.fail_on_error(events.process_train(event));
            }
        }
        // The last batches of an epoch, if they are too few for a step; as many on all ranks.
        let (rate, model) = (self.rate(), self.learner.model());
        let reduced = self.reducer.finish(&model, Some(&rate))?;
        self.step(reduced)
    }

    /// A line with the rate of the step before: `step` sets the next rate, after the reduction.
    fn rate(&self) -> String {
        format!("learning rate\t{:?}", self.learner.lr_current().base())
    }

    fn step(&mut self, reduced: Option<GradientsParams>) -> Result<()> {
        let Some(mut gradients) = reduced else {
            return Ok(());
        };
        if let Some(max) = self.reducer.settings().max_norm {
            reducer::clip(&self.learner.model(), &mut gradients, max)?;
        }
        self.learner.lr_step();
        self.learner.optimizer_step(gradients);
        Ok(())
    }

    fn validate(
        &self,
        epoch: usize,
        events: &mut SupervisedTrainingEventProcessor<M>,
        interrupter: &Interrupter,
    ) {
        let start = LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items: self.valid.num_items(),
        };
        interrupter.fail_on_error(events.process_valid(start));
        let model = self.learner.model().valid();
        let mut batches = self.valid.iter();
        for iteration in 1.. {
            match batches.next() {
                Some(Ok(batch)) if !interrupter.should_stop() => {
                    let output = InferenceStep::step(&model, batch);
                    let item = TrainingItem::new(output, batches.progress(), Some(iteration), None);
                    let event = LearnerEvent::ProcessedItem(item);
                    interrupter.fail_on_error(events.process_valid(event));
                }
                Some(Err(error)) => interrupter.fail(error),
                _ => break,
            }
        }
        interrupter.fail_on_error(events.process_valid(LearnerEvent::EndSplit(epoch)));
    }

    /// Writes a checkpoint if it is time; `false` if the metrics say that the training shall stop.
    fn checkpoint(&self, components: &mut TrainingComponents<M>, epoch: usize) -> bool {
        let store = &components.event_store;
        if let Some(checkpointer) = &mut components.checkpointer {
            checkpointer.checkpoint(&self.learner, epoch, store);
        }
        let stopping = components.early_stopping.as_mut();
        !stopping.is_some_and(|stopping| stopping.should_stop(epoch, store))
    }
}

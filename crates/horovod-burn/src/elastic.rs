//! The state of an elastic training: a model, its optimizer, and the place that the training has reached.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use horovod::elastic::Checkpoint;
use horovod::framework;

use crate::error::{Error, Result};
use crate::parameters;

/// The state of a training for [`horovod::elastic::run`], which gives it to all ranks before it calls its function: there
/// is no need of [`broadcast_parameters`](crate::broadcast_parameters).
///
/// A commit copies the model and the optimizer's state into memory, so commit after some number of steps.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::{AdamWConfig, GradientsParams};
/// use burn::tensor::{Device, Tensor};
/// use horovod_burn::{DistributedOptimizer, ElasticState};
///
/// fn main() -> horovod_burn::Result<()> {
///     let device = Device::flex().autodiff();
///     let mut training = ElasticState {
///         model: LinearConfig::new(3, 1).init(&device),
///         optimizer: AdamWConfig::new().init(),
///         progress: 0, // steps
///     };
///     horovod::elastic::run(&mut training, |job, training| {
///         let mut optimizer = DistributedOptimizer::new(job, training.optimizer.clone());
///         while training.progress < 20 {
///             let loss = training.model.forward(Tensor::<2>::ones([8, 3], &device)).mean();
///             let gradients = GradientsParams::from_grads(loss.backward(), &training.model);
///             training.model = optimizer.step(1e-3, training.model.clone(), gradients)?;
///             training.progress += 1;
///             if training.progress % 10 == 0 {
///                 training.optimizer = optimizer.inner().clone();
///                 job.commit(training)?;
///             }
///         }
///         horovod_burn::Result::Ok(())
///     })?;
///     Ok(())
/// }
/// ```
pub struct ElasticState<M, P> {
    /// The model.
    pub model: M,
    /// burn's optimizer. Before each `commit` and each `check_members` of the job, copy that of the
    /// [`DistributedOptimizer`](crate::DistributedOptimizer) here: after a change of members the training goes on with this
    /// one. Make groups of parameters by path: `run` changes the ids before it calls its function.
    pub optimizer: ModuleOptimizer,
    /// The rest: all that serde can write and read, such as the number of steps.
    pub progress: P,
}

impl<M: Module, P: Checkpoint> Checkpoint for ElasticState<M, P> {
    fn save(&self) -> horovod::Result<Vec<u8>> {
        let model = parameters::to_bytes(parameters::of(&self.model)).map_err(of_horovod)?;
        let optimizer = self.optimizer.into_bytes();
        let optimizer = optimizer.map_err(|error| of_horovod(error.into()))?;
        Ok(framework::join(
            &[&model, &optimizer],
            &self.progress.save()?,
        ))
    }

    fn restore(&mut self, saved: &[u8]) -> horovod::Result<()> {
        let (model, rest) = framework::cut(saved)?;
        let (optimizer, progress) = framework::cut(rest)?;
        self.progress.restore(progress)?;
        self.restore_burn(model, optimizer).map_err(of_horovod)
    }
}

impl<M: Module, P> ElasticState<M, P> {
    fn restore_burn(&mut self, model: &[u8], optimizer: &[u8]) -> Result<()> {
        self.model = parameters::put(self.model.clone(), model.to_vec())?;
        let optimizer = Bytes::from_bytes_vec(optimizer.to_vec());
        self.optimizer = self.optimizer.clone().from_bytes(optimizer)?;
        Ok(())
    }
}

fn of_horovod(error: Error) -> horovod::Error {
    match error {
        Error::Horovod(error) => error,
        error => framework::state_error(&error),
    }
}

impl<M: std::fmt::Debug, P: std::fmt::Debug> std::fmt::Debug for ElasticState<M, P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ElasticState")
            .field("model", &self.model)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

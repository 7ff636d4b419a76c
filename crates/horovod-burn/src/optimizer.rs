//! The distributed optimizer: gradients of all ranks for burn's optimizers.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use horovod::framework::Settings;
use horovod::{Communicator, ReduceOp};

#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::reducer::{self, Reducer};

/// An optimizer that steps with the gradients of all ranks.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::{Device, Tensor};
/// # fn main() -> horovod_burn::Result<()> {
/// # let hvd = horovod::init()?;
/// # let device = Device::flex().autodiff();
/// # let mut model = LinearConfig::new(3, 1).init(&device);
/// use burn::optim::{AdamWConfig, GradientsParams};
/// use horovod_burn::DistributedOptimizer;
///
/// let mut optimizer = DistributedOptimizer::new(&hvd, AdamWConfig::new().init())
///     .backward_passes_per_step(2)
///     .max_norm(1.0);
/// for _batch in 0..4 {
///     let loss = model.forward(Tensor::<2>::ones([8, 3], &device)).mean();
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     model = optimizer.step(1e-3, model, gradients)?;
/// }
/// # Ok(()) }
/// ```
///
/// All ranks must have the same parameters, settings of this type, learning rate and inner optimizer, and make their
/// optimizers in the same order. Each [`step`](Self::step) compares parameters, settings, the rate and the optimizer's
/// number; [`reduce`](Self::reduce) does not know the rate. Inner optimizers and rates of groups of parameters are not
/// compared: if they differ, the replicas differ without an error. A parameter that the loss of this rank does not use
/// counts as a gradient of zeros, also if no rank uses it. One that needs no gradient is left out.
///
/// Replicas stay equal bit for bit if they begin so, see [`broadcast_parameters`](crate::broadcast_parameters).
pub struct DistributedOptimizer {
    inner: ModuleOptimizer,
    reducer: Reducer,
}

impl DistributedOptimizer {
    /// Wraps an optimizer.
    ///
    /// `hvd` is the guard, the job of [`elastic::run`](horovod::elastic::run), or the communicator of a process set.
    /// Optimizers that step at the same time in several threads need a process set each, because the names of their
    /// operations are the same.
    pub fn new(hvd: &Communicator, inner: impl Into<ModuleOptimizer>) -> Self {
        Self {
            inner: inner.into(),
            reducer: Reducer::new(hvd, Settings::default()),
        }
    }

    /// How the gradients of the ranks combine; without this call by `Average`.
    #[must_use]
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.reducer.settings_mut().op = op;
        self
    }

    /// In how many operations the gradients of one type are reduced, each of neighbours by path; without this call
    /// in one.
    #[must_use]
    pub fn groups(mut self, groups: usize) -> Self {
        self.reducer.settings_mut().groups = groups;
        self
    }

    /// How many gradients are added on each rank before they are reduced; without this call 1. For their mean divide
    /// the loss by this number.
    #[must_use]
    pub fn backward_passes_per_step(mut self, passes: usize) -> Self {
        self.reducer.settings_mut().passes = passes;
        self
    }

    /// Clips the reduced gradients before each step: they are scaled so that the norm of all of them is at most `max`,
    /// which must be above 0. burn's own clipping takes each parameter by itself; it works here as well.
    #[must_use]
    pub fn max_norm(mut self, max: f64) -> Self {
        self.reducer.settings_mut().max_norm = Some(max);
        self
    }

    /// Reduces the gradients, clips them if [`max_norm`](Self::max_norm) was set, and lets the inner optimizer step.
    /// Returns the model, unchanged where [`backward_passes_per_step`](Self::backward_passes_per_step) asks for more
    /// gradients. Pass a clone of a model that is needed after an error, which costs little: it shares the parameters.
    ///
    /// # Errors
    /// Those of [`reduce`](Self::reduce); [`Error::Differ`] on all ranks if two pass different learning rates.
    pub fn step<M: Module>(
        &mut self,
        rate: impl Into<ModuleLearningRate>,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M> {
        let rate = rate.into();
        // burn does not show those of groups.
        let line = format!("learning rate\t{:?}", rate.base());
        let Some(mut gradients) = self.reducer.reduce(&model, gradients, Some(&line))? else {
            return Ok(model);
        };
        if let Some(max) = self.reducer.settings().max_norm {
            self.clip(&model, &mut gradients, max)?;
        }
        Ok(self.inner.step(rate, model, gradients))
    }

    /// Adds the gradients to those of earlier passes. The last pass reduces the sums over all ranks and returns them,
    /// the others return `None`. For a step of one's own making:
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{GradientsParams, SgdConfig};
    /// # use burn::tensor::{Device, Tensor};
    /// # fn main() -> horovod_burn::Result<()> {
    /// # let hvd = horovod::init()?;
    /// # let device = Device::flex().autodiff();
    /// # let mut model = LinearConfig::new(3, 1).init(&device);
    /// # let mut optimizer = horovod_burn::DistributedOptimizer::new(&hvd, SgdConfig::new().init());
    /// let loss = model.forward(Tensor::<2>::ones([8, 3], &device)).sum();
    /// let gradients = GradientsParams::from_grads(loss.backward(), &model);
    /// if let Some(mut gradients) = optimizer.reduce(&model, gradients)? {
    ///     let norm = optimizer.clip(&model, &mut gradients, 0.5)?;
    ///     assert_eq!(norm, 16.0);
    ///     model = optimizer.inner_mut().step(0.1, model, gradients);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - [`Error::Differ`] on all ranks if two have different parameters or settings, or reduce for different optimizers;
    /// - [`Error::OfRank`] on all ranks if one has a setting that is not above 0, a parameter of a type that cannot be sent,
    ///   a gradient of another type or shape than its parameter, or of no parameter of this model;
    /// - [`Error::Horovod`] for those of [`Communicator`].
    ///
    /// A mistake in an earlier pass is an error of the last one, in which the ranks meet. After an error the passes are
    /// counted from 0 again.
    pub fn reduce<M: Module>(
        &mut self,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<Option<GradientsParams>> {
        self.reducer.reduce(model, gradients, None)
    }

    /// Scales these gradients so that the norm of all of them is at most `max`, and returns the norm before. The norm is
    /// the same on all ranks, to the last bit.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `max` is not above 0, or for a gradient as in [`reduce`](Self::reduce). After an error about
    /// a gradient `gradients` is empty.
    pub fn clip<M: Module>(
        &self,
        model: &M,
        gradients: &mut GradientsParams,
        max: f64,
    ) -> Result<f64> {
        reducer::clip(model, gradients, max)
    }

    /// The inner optimizer.
    pub fn inner(&self) -> &ModuleOptimizer {
        &self.inner
    }

    /// The inner optimizer.
    pub fn inner_mut(&mut self) -> &mut ModuleOptimizer {
        &mut self.inner
    }

    /// The inner optimizer, without this one.
    pub fn into_inner(self) -> ModuleOptimizer {
        self.inner
    }
}

impl std::fmt::Debug for DistributedOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DistributedOptimizer")
            .field("settings", self.reducer.settings())
            .finish_non_exhaustive()
    }
}

//! The distributed optimizer: gradients of all ranks for burn's optimizers.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Shape};
use horovod::framework::{self, Lines};
use horovod::{Communicator, ReduceOp};

use crate::error::{Error, Result};
use crate::gradients::{self, Gradients, Missing, TYPES};
use crate::parameters::{agree, line};

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
    hvd: Communicator,
    inner: ModuleOptimizer,
    op: ReduceOp,
    groups: usize,
    passes: usize,
    max_norm: Option<f64>,
    /// Sums of the passes since the last reduction, and their number.
    sums: GradientsParams,
    done: usize,
    /// Tells this optimizer from others of the same parameters.
    number: String,
    /// Made by the first reduction, and again for a model with other parameters.
    compared: Option<Compared>,
}

/// The parameters of a reduction, and the lines that all ranks must have alike.
struct Compared {
    parameters: Vec<(String, DType, Shape)>,
    lines: Lines,
}

impl DistributedOptimizer {
    /// Wraps an optimizer.
    ///
    /// `hvd` is the guard, the job of [`elastic::run`](horovod::elastic::run), or the communicator of a process set.
    /// Optimizers that step at the same time in several threads need a process set each, because the names of their
    /// operations are the same.
    pub fn new(hvd: &Communicator, inner: impl Into<ModuleOptimizer>) -> Self {
        Self {
            hvd: hvd.clone(),
            inner: inner.into(),
            op: ReduceOp::Average,
            groups: 1,
            passes: 1,
            max_norm: None,
            sums: GradientsParams::new(),
            done: 0,
            number: framework::optimizer_line(hvd),
            compared: None,
        }
    }

    /// How the gradients of the ranks combine; without this call by `Average`.
    #[must_use]
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.op = op;
        self.compared = None; // compare the settings again
        self
    }

    /// In how many operations the gradients of one type are reduced, each of neighbours by path; without this call
    /// in one.
    #[must_use]
    pub fn groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self.compared = None; // compare the settings again
        self
    }

    /// How many gradients are added on each rank before they are reduced; without this call 1. For their mean divide
    /// the loss by this number.
    #[must_use]
    pub fn backward_passes_per_step(mut self, passes: usize) -> Self {
        self.passes = passes;
        self.compared = None; // compare the settings again
        self
    }

    /// Clips the reduced gradients before each step: they are scaled so that the norm of all of them is at most `max`,
    /// which must be above 0. burn's own clipping takes each parameter by itself; it works here as well.
    #[must_use]
    pub fn max_norm(mut self, max: f64) -> Self {
        self.max_norm = Some(max);
        self.compared = None; // compare the settings again
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
        let Some(mut gradients) = self.reduce_with(&model, gradients, Some(&line))? else {
            return Ok(model);
        };
        if let Some(max) = self.max_norm {
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
    /// - [`Error::Invalid`] for a setting that is not above 0, for a parameter of a type that cannot be sent, for a
    ///   gradient of another type or shape than its parameter, or of no parameter of this model;
    /// - [`Error::Horovod`] for those of [`Communicator`]; [`Error::Burn`] for those of reading gradients.
    ///
    /// After an error the passes of this rank are counted from 0 again. After [`Error::Invalid`] on one rank only, end the
    /// program: the ranks no longer reduce in the same call.
    pub fn reduce<M: Module>(
        &mut self,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<Option<GradientsParams>> {
        self.reduce_with(model, gradients, None)
    }

    /// The rate is a line to be compared, if the caller knows it.
    fn reduce_with<M: Module>(
        &mut self,
        model: &M,
        gradients: GradientsParams,
        rate: Option<&str>,
    ) -> Result<Option<GradientsParams>> {
        self.check_settings()?;
        let mut sums = std::mem::take(&mut self.sums);
        let done = std::mem::take(&mut self.done) + 1;
        gradients::add(model, gradients, &mut sums)?;
        if done < self.passes {
            (self.sums, self.done) = (sums, done);
            return Ok(None);
        }
        let mut gradients = Gradients::take(model, sums, Missing::Zeros)?;
        self.agree(&gradients, rate)?;
        gradients.reduce(&self.hvd, self.op, self.groups)?;
        Ok(Some(gradients.put()))
    }

    /// Scales these gradients so that the norm of all of them is at most `max`, and returns the norm before. The norm is
    /// the same on all ranks, to the last bit.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `max` is not above 0, or for a gradient as in [`reduce`](Self::reduce); [`Error::Burn`]. After
    /// an error about a gradient `gradients` is empty.
    pub fn clip<M: Module>(
        &self,
        model: &M,
        gradients: &mut GradientsParams,
        max: f64,
    ) -> Result<f64> {
        check_norm(max)?;
        let mut taken = Gradients::take(model, std::mem::take(gradients), Missing::Nothing)?;
        check_types(&taken)?;
        let norm = taken.clip(max)?;
        *gradients = taken.put();
        Ok(norm)
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

    fn check_settings(&self) -> Result<()> {
        for (name, value) in [
            ("groups", self.groups),
            ("backward_passes_per_step", self.passes),
        ] {
            if value == 0 {
                return Err(Error::invalid(format!(
                    "{name} was set to 0; pass 1 or more"
                )));
            }
        }
        self.max_norm.map_or(Ok(()), check_norm)
    }

    /// Compares parameters and settings of all ranks. Ranks may give another model to each call, so each call compares.
    fn agree(&mut self, gradients: &Gradients, rate: Option<&str>) -> Result<()> {
        let compared = match self.compared.take() {
            Some(compared) if compared.is_of(gradients) => compared,
            _ => self.lines_of(gradients),
        };
        agree(&self.hvd, &self.compared.insert(compared).lines, rate)?;
        check_types(gradients)
    }

    fn lines_of(&self, gradients: &Gradients) -> Compared {
        let parameters = gradients.parameters();
        let mut lines: Vec<String> = parameters
            .map(|(path, dtype, shape)| line(path, dtype, shape))
            .collect();
        lines.push(format!("op\t{:?}", self.op));
        lines.push(format!("groups\t{}", self.groups));
        lines.push(format!("backward_passes_per_step\t{}", self.passes));
        lines.push(format!("max_norm\t{:?}", self.max_norm));
        lines.push(self.number.clone());
        let parameters = gradients.parameters();
        Compared {
            parameters: parameters
                .map(|(path, dtype, shape)| (path.to_owned(), dtype, shape.clone()))
                .collect(),
            lines: Lines::new(lines),
        }
    }
}

impl Compared {
    fn is_of(&self, gradients: &Gradients) -> bool {
        let own = self.parameters.iter();
        own.map(|(path, dtype, shape)| (path.as_str(), *dtype, shape))
            .eq(gradients.parameters())
    }
}

fn check_types(gradients: &Gradients) -> Result<()> {
    let mut parameters = gradients.parameters();
    match parameters.find(|(_, dtype, _)| !TYPES.contains(dtype)) {
        Some((path, dtype, _)) => Err(Error::invalid(format!(
            "parameter {path:?} is of type {}, whose gradients cannot be sent; use one of {}",
            dtype.name(),
            TYPES.map(|dtype| dtype.name()).join(", ")
        ))),
        None => Ok(()),
    }
}

/// Also refuses NaN.
fn check_norm(max: f64) -> Result<()> {
    if max > 0.0 {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the norm of gradients was limited to {max}; pass a number above 0"
    )))
}

impl std::fmt::Debug for DistributedOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DistributedOptimizer")
            .field("op", &self.op)
            .field("groups", &self.groups)
            .field("backward_passes_per_step", &self.passes)
            .field("max_norm", &self.max_norm)
            .finish_non_exhaustive()
    }
}

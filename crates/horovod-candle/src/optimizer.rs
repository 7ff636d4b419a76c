//! The distributed optimizer: gradients of all ranks for one of candle's optimizers.

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_nn::Optimizer;
use horovod::framework::{self, Lines, Settings};
use horovod::{Communicator, ReduceOp};

use crate::error::{Error, Result};
use crate::gradients::{self, Group, Prepared};
use crate::parameters::{Parameters, Sorted, agree};

/// An optimizer that steps with the gradients of all ranks.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
/// # fn main() -> horovod_candle::Result<()> {
/// # let hvd = horovod::init()?;
/// # let map = VarMap::new();
/// # let weight = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu).get(3, "weight")?;
/// use horovod_candle::DistributedOptimizer;
///
/// let inner = AdamW::new(map.all_vars(), ParamsAdamW::default())?;
/// let mut optimizer = DistributedOptimizer::new(&hvd, inner, &map)?
///     .backward_passes_per_step(2)
///     .max_norm(1.0);
/// for batch in 0..4 {
///     let loss = (&weight * batch as f64)?.sum_all()?;
///     let has_stepped = optimizer.backward_step(&loss)?;
///     assert_eq!(has_stepped, batch % 2 == 1);
/// }
/// # Ok(()) }
/// ```
///
/// All ranks must have the same parameters, settings and learning rate, and make their optimizers in the same order.
/// Each reduction compares them. A parameter that the loss of this rank does not use counts as a gradient of zeros, also
/// if no rank uses it.
///
/// Replicas stay equal bit for bit if they begin so, see [`broadcast_parameters`](crate::broadcast_parameters).
pub struct DistributedOptimizer<O> {
    hvd: Communicator,
    inner: O,
    parameters: Sorted,
    settings: Settings,
    /// Sums of the passes since the last reduction, or the first error of these passes, and their number.
    sums: Result<GradStore>,
    done: usize,
    /// Tells this optimizer from others of the same parameters.
    number: String,
    /// Made by the first reduction.
    plan: Option<ReductionPlan>,
}

/// The groups of each reduction, and the lines that all ranks must have alike.
struct ReductionPlan {
    groups: Vec<Group>,
    lines: Lines,
}

impl<O: Optimizer> DistributedOptimizer<O> {
    /// Wraps an optimizer of these parameters. Those of integers have no gradients and are left out.
    ///
    /// `parameters` must have every variable of `inner`: gradients of other variables are not reduced, and the replicas
    /// then differ. `hvd` is the guard, or the communicator of a process set. Optimizers that step at the same time in
    /// several threads need a process set each, because the names of their operations are the same.
    ///
    /// # Errors
    /// [`Error::Invalid`] if two parameters have the same name.
    pub fn new(
        hvd: &Communicator,
        inner: O,
        parameters: &(impl Parameters + ?Sized),
    ) -> Result<Self> {
        Ok(Self {
            hvd: hvd.clone(),
            inner,
            parameters: Sorted::of(parameters)?.floats(),
            settings: Settings::default(),
            sums: Ok(GradStore::default()),
            done: 0,
            number: framework::optimizer_line(hvd),
            plan: None,
        })
    }

    /// How the gradients of the ranks combine; without this call by `Average`.
    #[must_use]
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.settings_mut().op = op;
        self
    }

    /// In how many operations the gradients of one type are reduced, each of neighbours by name; without this call
    /// in one, and of more than 128 gradients in several.
    #[must_use]
    pub fn groups(mut self, groups: usize) -> Self {
        self.settings_mut().groups = groups;
        self
    }

    /// How many gradients are added on each rank before they are reduced; without this call 1. For their mean divide
    /// the loss by this number.
    #[must_use]
    pub fn backward_passes_per_step(mut self, passes: usize) -> Self {
        self.settings_mut().passes = passes;
        self
    }

    /// Clips the reduced gradients before each step: they are scaled so that the norm of all of them is at most `max`,
    /// which must be above 0.
    #[must_use]
    pub fn max_norm(mut self, max: f64) -> Self {
        self.settings_mut().max_norm = Some(max);
        self
    }

    /// Computes the gradients of `loss` and does [`step`](Self::step) with them.
    ///
    /// # Errors
    /// Those of [`step`](Self::step); [`Error::OfRank`] on all ranks also if the backward pass of one has failed.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<bool> {
        self.step_with(loss.backward().map_err(Error::from))
    }

    /// Reduces the gradients, clips them if [`max_norm`](Self::max_norm) was set, and lets the inner optimizer step.
    /// Returns whether it did: with [`backward_passes_per_step`](Self::backward_passes_per_step) not every call steps.
    /// A clone of a gradient changes with it.
    ///
    /// # Errors
    /// Those of [`reduce`](Self::reduce); [`Error::Candle`] if the inner optimizer of this rank has failed. Then end the
    /// program: the other ranks may have stepped.
    pub fn step(&mut self, gradients: GradStore) -> Result<bool> {
        self.step_with(Ok(gradients))
    }

    fn step_with(&mut self, gradients: Result<GradStore>) -> Result<bool> {
        let Some(mut gradients) = self.reduce_with(gradients)? else {
            return Ok(false);
        };
        if let Some(max) = self.settings.max_norm {
            self.clip(&mut gradients, max)?;
        }
        self.inner.step(&gradients)?;
        Ok(true)
    }

    /// Adds the gradients to those of earlier passes. The last pass reduces the sums over all ranks and returns them,
    /// the others return `None`. For a step of one's own making:
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
    /// # fn main() -> horovod_candle::Result<()> {
    /// # let hvd = horovod::init()?;
    /// # let map = VarMap::new();
    /// # let weight = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu).get(3, "weight")?;
    /// # let inner = SGD::new(map.all_vars(), 0.1)?;
    /// # let mut optimizer = horovod_candle::DistributedOptimizer::new(&hvd, inner, &map)?;
    /// let loss = weight.sum_all()?;
    /// if let Some(mut gradients) = optimizer.reduce(loss.backward()?)? {
    ///     let norm = optimizer.clip(&mut gradients, 0.5)?;
    ///     assert!(norm > 1.7);
    ///     optimizer.inner_mut().step(&gradients)?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// The gradients are reduced where they are. A clone of one of these tensors changes with it.
    ///
    /// # Errors
    /// - [`Error::Differ`] on all ranks if two have different parameters, settings or learning rates, or step different
    ///   optimizers;
    /// - [`Error::OfRank`] on all ranks if one has a setting that is not above 0, a parameter of a type that cannot be sent,
    ///   a gradient of another type or shape than its parameter, or if an operation of candle has failed on it;
    /// - [`Error::Horovod`] for those of [`Communicator`];
    /// - [`Error::Candle`] if this rank cannot copy a reduced gradient to its device.
    ///
    /// A mistake in an earlier pass is an error of the last one, in which the ranks meet. After an error the passes are
    /// counted from 0 again.
    pub fn reduce(&mut self, gradients: GradStore) -> Result<Option<GradStore>> {
        self.reduce_with(Ok(gradients))
    }

    fn reduce_with(&mut self, gradients: Result<GradStore>) -> Result<Option<GradStore>> {
        let sums = std::mem::replace(&mut self.sums, Ok(GradStore::default()));
        let sums = sums.and_then(|mut sums| {
            sums.extend(gradients?)?;
            Ok(sums)
        });
        let done = std::mem::take(&mut self.done) + 1;
        if done < self.settings.passes {
            (self.sums, self.done) = (sums, done);
            return Ok(None);
        }
        let own = self.settings.check().map_err(Error::invalid).and(sums);
        let own = own.and_then(|sums| Prepared::of(&self.parameters, sums));
        let plan = self.plan.take().unwrap_or_else(|| self.make_plan());
        let ReductionPlan { groups, lines } = self.plan.insert(plan);
        // Each time: ranks that step different optimizers, or wait in `join`, would mix or miss gradients.
        let rate = format!("learning rate\t{:?}", self.inner.learning_rate());
        let prepared = agree(&self.hvd, lines, Some(&rate), own)?;
        let reduced = prepared.reduce(&self.hvd, self.settings.op, &self.parameters, groups)?;
        Ok(Some(reduced))
    }

    /// Scales these gradients so that the norm of all of them is at most `max`, and returns the norm before. The norm is
    /// the same on all ranks. A sum in the order of a `GradStore` would not be.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `max` is not above 0; [`Error::Candle`].
    pub fn clip(&self, gradients: &mut GradStore, max: f64) -> Result<f64> {
        framework::check_norm(max).map_err(Error::invalid)?;
        gradients::clip(&self.parameters, gradients, max)
    }

    /// The learning rate of the inner optimizer.
    pub fn learning_rate(&self) -> f64 {
        self.inner.learning_rate()
    }

    /// Sets the learning rate of the inner optimizer; set the same on all ranks.
    pub fn set_learning_rate(&mut self, rate: f64) {
        self.inner.set_learning_rate(rate);
    }

    /// The inner optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// The inner optimizer.
    pub fn inner_mut(&mut self) -> &mut O {
        &mut self.inner
    }

    /// The inner optimizer, without this one.
    pub fn into_inner(self) -> O {
        self.inner
    }

    /// The settings, to be changed: the next reduction compares them again.
    fn settings_mut(&mut self) -> &mut Settings {
        self.plan = None;
        &mut self.settings
    }

    fn make_plan(&self) -> ReductionPlan {
        let mut lines = self.parameters.lines();
        lines.extend(self.settings.lines());
        lines.push(self.number.clone());
        ReductionPlan {
            groups: gradients::groups(&self.parameters, self.settings.groups),
            lines: Lines::new(lines),
        }
    }
}

impl<O: std::fmt::Debug> std::fmt::Debug for DistributedOptimizer<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DistributedOptimizer")
            .field("inner", &self.inner)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

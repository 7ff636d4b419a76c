//! The state of an elastic training: parameters, and the place that the training has reached.

use std::collections::BTreeSet;

use candle_core::safetensors::BufferedSafetensors;
use horovod::elastic::Checkpoint;
use horovod::framework;

use crate::error::{Error, Result};
use crate::parameters::{Parameters, Sorted};

/// The state of a training for [`horovod::elastic::run`], which gives it to all ranks before it calls its function: there
/// is no need of [`broadcast_parameters`](crate::broadcast_parameters).
///
/// Make the optimizer in that function, so that all ranks begin with a new one: `AdamW` keeps its moments private, and
/// after a change of members they begin anew. A commit copies the parameters into memory, so commit after some number
/// of steps.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
/// use horovod_candle::{DistributedOptimizer, ElasticState};
///
/// fn main() -> horovod_candle::Result<()> {
///     let map = VarMap::new();
///     let weight = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu).get(3, "weight")?;
///     let mut training = ElasticState {
///         parameters: map.clone(),
///         progress: 0, // steps
///     };
///     horovod::elastic::run(&mut training, |job, training| {
///         let inner = SGD::new(map.all_vars(), 0.1)?;
///         let mut optimizer = DistributedOptimizer::new(job, inner, &map)?;
///         while training.progress < 20 {
///             optimizer.backward_step(&weight.sqr()?.sum_all()?)?;
///             training.progress += 1;
///             if training.progress % 10 == 0 {
///                 job.commit(training)?;
///             }
///         }
///         horovod_candle::Result::Ok(())
///     })?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct ElasticState<V, P> {
    /// The parameters. A clone of a `VarMap` has the same variables, and restoring changes them.
    pub parameters: V,
    /// The rest: all that serde can write and read, such as the number of steps.
    pub progress: P,
}

impl<V: Parameters, P: Checkpoint> Checkpoint for ElasticState<V, P> {
    fn save(&self) -> horovod::Result<Vec<u8>> {
        let parameters = to_bytes(&self.parameters).map_err(of_horovod)?;
        Ok(framework::join(&[&parameters], &self.progress.save()?))
    }

    fn restore(&mut self, saved: &[u8]) -> horovod::Result<()> {
        let (parameters, progress) = framework::cut(saved)?;
        self.progress.restore(progress)?;
        put(&self.parameters, parameters).map_err(of_horovod)
    }
}

fn to_bytes(parameters: &impl Parameters) -> Result<Vec<u8>> {
    let sorted = Sorted::of(parameters)?;
    let tensors = sorted.iter().map(|(name, var)| (name, var.as_tensor()));
    let bytes = safetensors::serialize(tensors, None);
    Ok(bytes.map_err(candle_core::Error::from)?)
}

/// Gives the variables the values that [`to_bytes`] has written.
fn put(parameters: &impl Parameters, bytes: &[u8]) -> Result<()> {
    let saved = BufferedSafetensors::new(bytes.to_vec())?;
    let names = saved.tensors().into_iter().map(|(name, _)| name);
    let mut left_over: BTreeSet<String> = names.collect();
    let sorted = Sorted::of(parameters)?;
    let mut values = Vec::with_capacity(sorted.len());
    for (name, var) in sorted.iter() {
        if !left_over.remove(name) {
            return Err(of_another_model(&format!("they have no {name:?}")));
        }
        let value = saved.load(name, var.device())?;
        if (value.dtype(), value.dims()) != (var.dtype(), var.dims()) {
            return Err(of_another_model(&format!(
                "{name:?} of type {} and shape {:?} was sent for one of type {} and shape {:?}",
                value.dtype().as_str(),
                value.dims(),
                var.dtype().as_str(),
                var.dims()
            )));
        }
        values.push(value);
    }
    if let Some(name) = left_over.first() {
        return Err(of_another_model(&format!(
            "the model has no parameter {name:?}"
        )));
    }
    for ((_, var), value) in sorted.iter().zip(values) {
        var.set(&value)?;
    }
    Ok(())
}

fn of_another_model(why: &str) -> Error {
    Error::Invalid {
        mistake: framework::another_model_text(why),
    }
}

fn of_horovod(error: Error) -> horovod::Error {
    match error {
        Error::Horovod(error) => error,
        error => framework::state_error(&error),
    }
}

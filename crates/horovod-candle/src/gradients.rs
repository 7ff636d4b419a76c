//! The gradients of one step: sums over passes, zeros for unused parameters, the mean over the ranks, the norm.

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use horovod::{Communicator, ReduceOp};

use crate::error::{Error, Result};
use crate::memory::{self, CandleElement, LOCKS_MAX, Operation, TensorMemory, UsedMemory};
use crate::parameters::Sorted;

/// Gradients that one operation reduces: their type, and their places among the parameters.
pub(crate) struct Group {
    dtype: DType,
    members: Vec<usize>,
}

/// Splits the parameters into so many groups of neighbours, and each of these by type and size.
pub(crate) fn groups(parameters: &Sorted, count: usize) -> Vec<Group> {
    let vars: Vec<&Var> = parameters.iter().map(|(_, var)| var).collect();
    let mut groups = Vec::new();
    let count = count.min(vars.len());
    for number in 0..count {
        let (begin, end) = (
            vars.len() * number / count,
            vars.len() * (number + 1) / count,
        );
        for dtype in memory::TYPES {
            let members: Vec<usize> = (begin..end)
                .filter(|at| vars[*at].dtype() == dtype && vars[*at].elem_count() > 0)
                .collect();
            groups.extend(members.chunks(LOCKS_MAX).map(|members| Group {
                dtype,
                members: members.to_vec(),
            }));
        }
    }
    groups
}

/// Gradients that can be reduced: one of each parameter, with the memory of each.
pub(crate) struct Prepared {
    gradients: GradStore,
    places: Vec<TensorMemory>,
}

impl Prepared {
    /// Checks the gradients of these parameters; a parameter without one counts as zero.
    pub(crate) fn of(parameters: &Sorted, mut gradients: GradStore) -> Result<Self> {
        parameters.check_types()?;
        let mut used = UsedMemory::default();
        let mut places = Vec::with_capacity(parameters.len());
        for (name, var) in parameters.iter() {
            let gradient = match gradients.get(var) {
                Some(gradient) => gradient.clone(),
                None => {
                    let zeros = var.zeros_like()?;
                    gradients.insert(var, zeros.clone());
                    zeros
                }
            };
            check(name, var, &gradient)?;
            places.push(used.place(&gradient)?);
        }
        Ok(Self { gradients, places })
    }

    /// Reduces them over the ranks, of which all have prepared theirs.
    pub(crate) fn reduce(
        mut self,
        hvd: &Communicator,
        op: ReduceOp,
        parameters: &Sorted,
        groups: &[Group],
    ) -> Result<GradStore> {
        for (number, group) in groups.iter().enumerate() {
            let members = group.members.iter();
            let tensors: Vec<Tensor> = members
                .map(|at| self.places[*at].tensor().clone())
                .collect();
            let hvd = hvd.named(&format!("candle.gradients.{number}"));
            memory::run(group.dtype, &tensors, &Allreduce { hvd, op })?;
        }
        for ((_, var), place) in parameters.iter().zip(self.places) {
            if let TensorMemory::Copy(copy) = place {
                self.gradients.insert(var, copy.to_device(var.device())?);
            }
        }
        Ok(self.gradients)
    }
}

fn check(name: &str, var: &Var, gradient: &Tensor) -> Result<()> {
    if (gradient.dtype(), gradient.dims()) == (var.dtype(), var.dims()) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the gradient of {name:?} is of type {} and shape {:?}; expected are those of the parameter, {} and {:?}",
        gradient.dtype().as_str(),
        gradient.dims(),
        var.dtype().as_str(),
        var.dims()
    )))
}

struct Allreduce {
    hvd: Communicator,
    op: ReduceOp,
}

impl Operation for Allreduce {
    fn run<T: CandleElement>(&self, mut slices: Vec<&mut [T]>) -> horovod::Result<()> {
        self.hvd.grouped_allreduce_in_place(&mut slices, self.op)
    }
}

/// Scales all gradients so that their norm is at most `max`; their norm before. The squares are added in the order of
/// the names, in `f64`, so the result is the same on all ranks.
pub(crate) fn clip(parameters: &Sorted, gradients: &mut GradStore, max: f64) -> Result<f64> {
    let mut squares = 0.0;
    for (_, var) in parameters.iter() {
        if let Some(gradient) = gradients.get(var) {
            let square = gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?;
            squares += square.to_scalar::<f64>()?;
        }
    }
    let norm = squares.sqrt();
    // NaN is not `<= max`: then all gradients become NaN, which shows it.
    if norm <= max {
        return Ok(norm);
    }
    for (_, var) in parameters.iter() {
        if let Some(gradient) = gradients.get(var) {
            let scaled = (gradient * (max / norm))?;
            gradients.insert(var, scaled);
        }
    }
    Ok(norm)
}

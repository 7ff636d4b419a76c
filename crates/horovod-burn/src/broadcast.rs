//! The broadcast of parameters and of the optimizer's state, so that all ranks begin alike.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use horovod::Communicator;
use horovod::framework::{Lines, broadcast_bytes, difference_text};

use crate::error::{Error, Result};
use crate::parameters::{self, Named};

/// Gives the module of all ranks the parameters of that of the rank `root`.
///
/// Call it on all ranks after the module is made or loaded, before the first step. Parameters pair by their paths in the
/// module; all ranks must have the same paths, types and shapes. Tensors of integers, of booleans and running means are
/// sent, too. The parameters also take over the ids of that rank, which burn draws at random in each process: the
/// state of an optimizer belongs to ids.
///
/// The state of an optimizer that has made steps before is sent by [`broadcast_optimizer_state`].
///
/// # Errors
/// - [`Error::Differ`] on all ranks if two have different parameters;
/// - [`Error::Burn`] if burn cannot write or read the parameters;
/// - [`Error::Horovod`] for those of [`Communicator`], also if there is no rank `root`.
pub fn broadcast_parameters<M: Module>(hvd: &Communicator, module: M, root: usize) -> Result<M> {
    let own = parameters::of(&module);
    parameters::agree(hvd, &parameters::lines(&own))?;
    let bytes = match hvd.rank() == root {
        true => parameters::to_bytes(own)?,
        false => Vec::new(),
    };
    let bytes = broadcast_bytes(&hvd.named("burn.parameters"), bytes, root)?;
    match hvd.rank() == root {
        true => Ok(module),
        false => parameters::put(module, bytes),
    }
}

/// Gives the optimizer of all ranks the state of that of the rank `root`, such as moments and numbers of steps.
///
/// Call it on all ranks after [`broadcast_parameters`] and after a state was loaded, with optimizers that are made alike.
/// That of a [`DistributedOptimizer`](crate::DistributedOptimizer) is its
/// [`inner_mut`](crate::DistributedOptimizer::inner_mut).
///
/// # Errors
/// - [`Error::Invalid`] on all ranks if the parameters of two ranks have different ids;
/// - [`Error::Burn`] if burn cannot write or read the state;
/// - [`Error::Horovod`] for those of [`Communicator`], also if there is no rank `root`.
pub fn broadcast_optimizer_state<M: Module>(
    hvd: &Communicator,
    optimizer: &mut ModuleOptimizer,
    module: &M,
    root: usize,
) -> Result<()> {
    let ids = parameters::of(module);
    let id = |one: &Named| format!("{:?}\twith id {}", one.path, one.id.val());
    let ids = Lines::new(ids.iter().map(id).collect());
    if let Some(sides) = ids.difference(hvd, "burn.optimizer")? {
        return Err(Error::invalid(format!(
            "the state of an optimizer belongs to ids of parameters, which differ: {}; call broadcast_parameters before",
            difference_text(&sides)
        )));
    }
    let bytes = match hvd.rank() == root {
        true => optimizer.into_bytes()?.to_vec(),
        false => Vec::new(),
    };
    let bytes = broadcast_bytes(&hvd.named("burn.optimizer"), bytes, root)?;
    if hvd.rank() != root {
        *optimizer = optimizer.clone().from_bytes(Bytes::from_bytes_vec(bytes))?;
    }
    Ok(())
}

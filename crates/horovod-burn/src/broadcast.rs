//! The broadcast of parameters and of the optimizer's state, so that all ranks begin alike.

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use horovod::Communicator;
use horovod::framework::{Lines, Sides, broadcast_bytes};

use crate::error::{Error, Result};
use crate::parameters::{self, Named, agree, all_done};

/// Returns the module with the parameters of the rank `root`, on all ranks.
///
/// Call it on all ranks after the module is made or loaded, before the first step. Parameters pair by their paths in the
/// module; all ranks must have the same paths, types and shapes. Tensors of integers, of booleans and running means are
/// sent, too. The parameters also take over the ids of that rank, which burn draws at random in each process: the
/// state of an optimizer belongs to ids. Make groups of parameters by path, or by ids after this call: ids that were
/// collected before do not match on the other ranks, and the replicas then differ without an error.
///
/// The state of an optimizer that has made steps before is sent by [`broadcast_optimizer_state`].
///
/// # Errors
/// - [`Error::Differ`] on all ranks if two have different parameters or pass another `root`;
/// - [`Error::OfRank`] on all ranks if burn cannot write the parameters on `root`, or read them on another rank;
/// - [`Error::Horovod`] for those of [`Communicator`], also if there is no rank `root`.
pub fn broadcast_parameters<M: Module>(hvd: &Communicator, module: M, root: usize) -> Result<M> {
    let own = parameters::of(&module);
    let lines = parameters::lines(&own);
    let bytes = match hvd.rank() == root {
        true => parameters::to_bytes(own),
        false => Ok(Vec::new()),
    };
    let bytes = agree(
        hvd,
        "burn.parameters",
        &lines,
        Some(&root_line(root)),
        bytes,
    )?;
    let bytes = broadcast_bytes(&hvd.named("burn.parameters"), bytes, root)?;
    let module = match hvd.rank() == root {
        true => Ok(module),
        false => parameters::put(module, bytes),
    };
    all_done(hvd, "burn.parameters", module)
}

/// Sends the state of the optimizer of the rank `root`, such as moments and numbers of steps, to all ranks.
///
/// Call it on all ranks after [`broadcast_parameters`] and after a state was loaded, with optimizers that are made alike:
/// burn leaves out a state that does not fit, without an error.
/// That of a [`DistributedOptimizer`](crate::DistributedOptimizer) is its
/// [`inner_mut`](crate::DistributedOptimizer::inner_mut).
///
/// # Errors
/// - [`Error::Invalid`] on all ranks if the parameters of two ranks have different ids;
/// - [`Error::Differ`] on all ranks if two pass another `root`;
/// - [`Error::OfRank`] on all ranks if burn cannot write the state on `root`, or read it on another rank;
/// - [`Error::Horovod`] for those of [`Communicator`], also if there is no rank `root`.
pub fn broadcast_optimizer_state<M: Module>(
    hvd: &Communicator,
    optimizer: &mut ModuleOptimizer,
    module: &M,
    root: usize,
) -> Result<()> {
    let ids = parameters::of(module);
    let id = |one: &Named| format!("{:?}\twith id {}", one.path, one.id.val());
    // burn keeps a random id of its own for running means; no optimizer has a state for them.
    let ids = ids.iter().filter(|one| one.is_trained).map(id);
    let ids = Lines::new(ids.collect());
    let bytes = match hvd.rank() == root {
        true => optimizer.into_bytes().map_err(Error::from),
        false => Ok(Bytes::from_bytes_vec(Vec::new())),
    };
    let bytes =
        agree(hvd, "burn.optimizer", &ids, Some(&root_line(root)), bytes).map_err(of_ids)?;
    let bytes = broadcast_bytes(&hvd.named("burn.optimizer"), bytes.to_vec(), root)?;
    let read = match hvd.rank() == root {
        true => Ok(optimizer.clone()),
        false => optimizer.clone().from_bytes(Bytes::from_bytes_vec(bytes)),
    };
    *optimizer = all_done(hvd, "burn.optimizer", read.map_err(Error::from))?;
    Ok(())
}

/// The ranks compare this line: a rank that passes another root would wait for the others.
fn root_line(root: usize) -> String {
    format!("root\t{root}")
}

/// Whether ranks differ by the line of [`root_line`]. All other lines begin with a path in quotation marks.
fn is_of_root(sides: &Sides) -> bool {
    sides
        .iter()
        .all(|(_, side)| side.as_ref().is_some_and(|side| !side.starts_with('"')))
}

/// The error for ranks whose ids differ.
fn of_ids(error: Error) -> Error {
    let sides = match error {
        Error::Differ { sides } if !is_of_root(&sides) => sides,
        error => return error,
    };
    let [(first, one), (second, other)] = sides;
    let [one, other] = [one, other].map(|side| side.unwrap_or("no such parameter".to_owned()));
    Error::invalid(format!(
        "the state of an optimizer belongs to ids of parameters, which differ: rank {first} has {one}, rank {second} \
         has {other}; call broadcast_parameters before"
    ))
}

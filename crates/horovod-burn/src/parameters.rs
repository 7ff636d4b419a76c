//! The parameters of a module by their paths: as they are in the module, and as bytes.

use std::any::Any;
use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter};
use burn::tensor::{Bool, Bytes, DType, Float, Int, Shape, Tensor, TensorData};
use burn_pack::{Reader, Writer};
use horovod::Communicator;
use horovod::framework::{self, Lines, Obstacle};

use crate::error::{Error, Result};

/// A tensor that a module owns: a parameter, or a value that it keeps with them, such as a running mean.
pub(crate) struct Named {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    pub(crate) is_trained: bool,
    data: TensorData,
}

#[cfg(test)]
impl Named {
    pub(crate) fn into_data(self) -> TensorData {
        self.data
    }
}

/// The place of a traversal in the module.
#[derive(Default)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    pub(crate) fn exit(&mut self) {
        self.0.pop();
    }

    pub(crate) fn text(&self) -> String {
        self.0.join(".")
    }
}

/// The methods of a visitor or mapper that keep its `path`.
macro_rules! keep_path {
    () => {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.enter(name);
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.exit();
        }
    };
}
pub(crate) use keep_path;

/// The parameters of a module with copies of their values. Parameters that burn has not initialized yet are initialized.
pub(crate) fn of<M: Module>(module: &M) -> Vec<Named> {
    settle(module);
    let mut collector = Collector::default();
    module.visit(&mut collector);
    collector.found
}

/// Applies the pending update of running means. burn applies that update in the next forward pass: a copy made before lacks
/// the update, and a value put before is overwritten.
fn settle<M: Module>(module: &M) {
    // `valid` applies the update, and a module shares its running means with its copies.
    drop(module.valid());
}

#[derive(Default)]
struct Collector {
    path: Path,
    found: Vec<Named>,
}

macro_rules! visit {
    ($($method:ident: $kind:ty),+ $(,)?) => {$(
        fn $method<const D: usize>(&mut self, param: &Param<Tensor<D, $kind>>) {
            self.found.push(Named {
                path: self.path.text(),
                id: param.id,
                is_trained: param.is_require_grad(),
                data: param.base().into_data(),
            });
        }
    )+};
}

impl ModuleVisitor for Collector {
    keep_path!();

    visit! { visit_float: Float, visit_int: Int, visit_bool: Bool }
}

/// A line for each parameter, which all ranks should have: its path, a tab, the type and shape.
pub(crate) fn lines(parameters: &[Named]) -> Lines {
    let line = |one: &Named| line(&one.path, one.data.dtype(), one.data.shape());
    Lines::new(parameters.iter().map(line).collect())
}

pub(crate) fn line(path: &str, dtype: DType, shape: &Shape) -> String {
    format!(
        "{path:?}\tof type {} and shape {:?}",
        dtype.name(),
        shape.as_slice()
    )
}

/// Returns the preparations of this rank, if all ranks are ready for their operations. An error on all of them if one could
/// not prepare, or if two have different lines, or another line that changes from call to call.
pub(crate) fn agree<T>(
    hvd: &Communicator,
    name: &str,
    lines: &Lines,
    changing: Option<&str>,
    own: Result<T>,
) -> Result<T> {
    let mistake = own.as_ref().err().map(Error::to_string);
    match lines.compare(hvd, name, changing, mistake)? {
        Some(Obstacle::Differ(sides)) => Err(Error::Differ { sides }),
        Some(Obstacle::Mistake(rank, cause)) => Err(Error::OfRank { rank, cause }),
        None => own,
    }
}

/// The result of this rank, if all ranks have one. An error on all of them if one has an error.
pub(crate) fn all_done<T>(hvd: &Communicator, name: &str, own: Result<T>) -> Result<T> {
    agree(hvd, name, &Lines::new(Vec::new()), None, own)
}

/// Parameters in burn's own format.
pub(crate) fn to_bytes(parameters: Vec<Named>) -> Result<Vec<u8>> {
    let packed = parameters.into_iter().map(|one| {
        let (bytes, shape, dtype) = one.data.into_parts();
        burn_pack::Tensor::new(one.path, dtype, shape, Some(one.id.val()), bytes)
    });
    Ok(Writer::new(packed.collect()).into_bytes()?.to_vec())
}

/// Gives the parameters of a module the values and the ids of those that [`to_bytes`] has written.
pub(crate) fn put<M: Module>(module: M, bytes: Vec<u8>) -> Result<M> {
    let (mut values, mut ids, mut tied) = (HashMap::new(), HashSet::new(), HashSet::new());
    for tensor in Reader::from_bytes(Bytes::from_bytes_vec(bytes))?.into_tensors()? {
        let (path, dtype, shape, id, bytes) = tensor.into_parts()?;
        let id = id.map_or_else(ParamId::new, ParamId::from);
        if !ids.insert(id) {
            tied.insert(id);
        }
        values.insert(path, (id, TensorData::from_bytes(bytes, shape, dtype)));
    }
    settle(&module);
    let mut mapper = Mapper {
        path: Path::default(),
        values,
        tied,
        placed: HashMap::new(),
        unfit: None,
    };
    let module = module.map(&mut mapper);
    let left_over = mapper.values.into_keys().min();
    let left_over = left_over.map(|path| format!("the model has no parameter {path:?}"));
    match mapper.unfit.or(left_over) {
        Some(why) => Err(Error::invalid(framework::another_model_text(&why))),
        None => Ok(module),
    }
}

struct Mapper {
    path: Path,
    values: HashMap<String, (ParamId, TensorData)>,
    /// Ids of several places: clones of one parameter, whose gradients burn adds up. They must stay clones.
    tied: HashSet<ParamId>,
    /// The first place of each: its values, and the parameter. An optimizer's step separates the values.
    placed: HashMap<ParamId, (TensorData, Box<dyn Any>)>,
    /// The first parameter that has no value, and the reason.
    unfit: Option<String>,
}

impl Mapper {
    fn value(&mut self, dtype: DType, shape: &Shape) -> Option<(ParamId, TensorData)> {
        let path = self.path.text();
        let found = self.values.remove(&path);
        let why = match &found {
            Some((_, data)) if (data.dtype(), data.shape()) == (dtype, shape) => return found,
            Some((_, data)) => format!(
                "{} was sent for {}",
                line(&path, data.dtype(), data.shape()).replace('\t', " "),
                line(&path, dtype, shape).replace('\t', " ")
            ),
            None => format!("they have no {path:?}"),
        };
        self.unfit.get_or_insert(why);
        None
    }
}

macro_rules! map {
    ($($method:ident: $kind:ty),+ $(,)?) => {$(
        fn $method<const D: usize>(
            &mut self,
            param: Param<Tensor<D, $kind>>,
        ) -> Param<Tensor<D, $kind>> {
            let dtype = param.dtype();
            let Some((id, data)) = self.value(dtype, &param.shape()) else {
                return param;
            };
            if let Some((first, placed)) = self.placed.get(&id)
                && *first == data
                && let Some(placed) = placed.downcast_ref::<Param<Tensor<D, $kind>>>()
            {
                return placed.clone();
            }
            let kept = self.tied.contains(&id).then(|| data.clone());
            let mut param = param.map(|old| {
                let new = Tensor::from_data(data, (&old.device(), dtype));
                Parameter::set_require_grad(new, Parameter::is_require_grad(&old))
            });
            param.id = id;
            if let Some(data) = kept {
                self.placed.insert(id, (data, Box::new(param.clone())));
            }
            param
        }
    )+};
}

impl ModuleMapper for Mapper {
    keep_path!();

    map! { map_float: Float, map_int: Int, map_bool: Bool }
}

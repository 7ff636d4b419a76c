//! The named parameters of a model, and the check that all ranks have the same.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::PoisonError;

use candle_core::{DType, TensorId, Var};
use candle_nn::VarMap;
use horovod::Communicator;
use horovod::framework::{Lines, Obstacle};

use crate::error::{Error, Result};
use crate::memory::TYPES;

/// Parameters with their names: a `VarMap`, a map, or a list of pairs.
pub trait Parameters {
    /// Each parameter with its name, in any order.
    fn named(&self) -> Vec<(String, Var)>;
}

impl Parameters for VarMap {
    fn named(&self) -> Vec<(String, Var)> {
        let vars = self.data().lock().unwrap_or_else(PoisonError::into_inner);
        vars.named()
    }
}

impl<S: BuildHasher> Parameters for HashMap<String, Var, S> {
    fn named(&self) -> Vec<(String, Var)> {
        let pairs = self.iter();
        pairs
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect()
    }
}

impl Parameters for BTreeMap<String, Var> {
    fn named(&self) -> Vec<(String, Var)> {
        let pairs = self.iter();
        pairs
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect()
    }
}

impl Parameters for [(String, Var)] {
    fn named(&self) -> Vec<(String, Var)> {
        self.to_vec()
    }
}

impl Parameters for Vec<(String, Var)> {
    fn named(&self) -> Vec<(String, Var)> {
        self.clone()
    }
}

/// Parameters in the order of their names, which is the same on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Sorted {
    /// Each variable once. A variable with several names has the first of them here.
    vars: Vec<(String, Var)>,
    /// Its other names, each with the first.
    others: Vec<(String, String)>,
}

impl Sorted {
    pub(crate) fn of(parameters: &(impl Parameters + ?Sized)) -> Result<Self> {
        let mut named = parameters.named();
        named.sort_by(|(one, _), (other, _)| one.cmp(other));
        if let Some(twins) = named.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::invalid(format!(
                "two parameters are named {:?}; give each a name of its own",
                twins[0].0
            )));
        }
        let (mut vars, mut others) = (Vec::new(), Vec::new());
        let mut names: HashMap<TensorId, String> = HashMap::new();
        for (name, var) in named {
            match names.get(&var.id()) {
                Some(first) => others.push((name, first.clone())),
                None => {
                    names.insert(var.id(), name.clone());
                    vars.push((name, var));
                }
            }
        }
        Ok(Self { vars, others })
    }

    /// Those that have gradients.
    pub(crate) fn floats(mut self) -> Self {
        self.vars.retain(|(_, var)| var.dtype().is_float());
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.vars.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// A line for each name: the name, a tab, the type and shape.
    pub(crate) fn lines(&self) -> Vec<String> {
        let line = |(name, var): (&str, &Var)| {
            let (dtype, dims) = (var.dtype().as_str(), var.dims());
            format!("{name:?}\tof type {dtype} and shape {dims:?}")
        };
        let other =
            |(name, first): &(String, String)| format!("{name:?}\tas another name of {first:?}");
        let others = self.others.iter().map(other);
        self.iter().map(line).chain(others).collect()
    }

    /// An error for a parameter of a type that cannot be sent.
    pub(crate) fn check_types(&self) -> Result<()> {
        let Some((name, var)) = self.iter().find(|(_, var)| !TYPES.contains(&var.dtype())) else {
            return Ok(());
        };
        Err(Error::invalid(format!(
            "parameter {name:?} is of type {}, which cannot be sent; use one of {}",
            var.dtype().as_str(),
            TYPES.map(|dtype: DType| dtype.as_str()).join(", ")
        )))
    }
}

/// Returns the preparations of this rank, if all ranks are ready for their operations. An error on all of them if one could
/// not prepare, or if two have different lines, or another line that changes from call to call.
pub(crate) fn agree<T>(
    hvd: &Communicator,
    lines: &Lines,
    changing: Option<&str>,
    own: Result<T>,
) -> Result<T> {
    let mistake = own.as_ref().err().map(Error::to_string);
    match lines.compare(hvd, "candle.parameters", changing, mistake)? {
        Some(Obstacle::Differ(sides)) => Err(Error::Differ { sides }),
        Some(Obstacle::Mistake(rank, cause)) => Err(Error::OfRank { rank, cause }),
        None => own,
    }
}

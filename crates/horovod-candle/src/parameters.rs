//! The named parameters of a model, and the check that all ranks have the same.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;
use std::sync::PoisonError;

use candle_core::{DType, TensorId, Var};
use candle_nn::VarMap;
use horovod::Communicator;

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
            return Err(Error::Invalid {
                mistake: format!(
                    "two parameters are named {:?}; give each a name of its own",
                    twins[0].0
                ),
            });
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
        Err(Error::Invalid {
            mistake: format!(
                "parameter {name:?} is of type {}, which cannot be sent; use one of {}",
                var.dtype().as_str(),
                TYPES.map(|dtype: DType| dtype.as_str()).join(", ")
            ),
        })
    }
}

/// Compares the lines of all ranks, each a key, a tab and a value. If two ranks differ, all ranks get the error.
pub(crate) fn agree(hvd: &Communicator, mut lines: Vec<String>) -> Result<()> {
    if hvd.size() == 1 {
        return Ok(());
    }
    lines.sort_unstable();
    let text = lines.join("\n");
    let fingerprints = hvd
        .named("candle.parameters")
        .allgather(&[fingerprint(text.as_bytes())], 1)?;
    let Some(other) = fingerprints.iter().position(|one| *one != fingerprints[0]) else {
        return Ok(());
    };
    // Rank 0 and the first one that differs send their lines to all.
    let mine = match hvd.rank() {
        rank if rank == 0 || rank == other => format!("{text}\0").into_bytes(),
        _ => Vec::new(),
    };
    let texts = hvd.named("candle.parameters.differ").allgather(&mine, 1)?;
    let texts = String::from_utf8_lossy(&texts);
    let (first, second) = texts.split_once('\0').unwrap_or((&texts, ""));
    let [one, two] = first_difference(first, second.trim_end_matches('\0'));
    let members = hvd.members();
    Err(Error::Differ {
        sides: [(members[0], one), (members[other], two)],
    })
}

/// The first key of sorted lines whose values differ, or that one side lacks.
fn first_difference(first: &str, second: &str) -> [Option<String>; 2] {
    let (mut first, mut second) = (first.lines().peekable(), second.lines().peekable());
    while first.peek() == second.peek() && first.peek().is_some() {
        first.next();
        second.next();
    }
    let shown = |line: &str| Some(line.replace('\t', " "));
    let key = |line: &str| line.split('\t').next().map(str::to_owned);
    match (first.next(), second.next()) {
        (Some(one), Some(two)) => match key(one).cmp(&key(two)) {
            Ordering::Equal => [shown(one), shown(two)],
            Ordering::Less => [shown(one), None],
            Ordering::Greater => [None, shown(two)],
        },
        (one, two) => [one.and_then(shown), two.and_then(shown)],
    }
}

/// A number that is the same for the same bytes (FNV-1a).
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

//! The gradients of one step: sums over passes, zeros for unused parameters, the mean over the ranks, the norm.

use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Element, ElementConversion, Shape, Tensor, TensorData, bf16, f16};
use horovod::{Communicator, ReduceOp};

use crate::error::{Error, Result};
use crate::parameters::{Path, keep_path};

/// The types of gradients that can be reduced.
pub(crate) const TYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// Runs an expression with the Rust type of a [`DType`] of [`TYPES`].
macro_rules! with_type {
    ($dtype:expr, $Type:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $Type = f64;
                $body
            }
            DType::F16 => {
                type $Type = f16;
                $body
            }
            DType::BF16 => {
                type $Type = bf16;
                $body
            }
            _ => {
                type $Type = f32;
                $body
            }
        }
    };
}

/// The gradient of one parameter, taken out of burn's container.
struct Gradient {
    path: String,
    data: TensorData,
    put: Put,
}

/// Puts a gradient back into burn's container: it knows the number of dimensions, which is part of a tensor's type.
type Put = Box<dyn FnOnce(TensorData, &mut GradientsParams)>;

/// Gradients in the order of the paths of their parameters, which is the same on all ranks.
pub(crate) struct Gradients(Vec<Gradient>);

/// The choice for a parameter without a gradient.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    Nothing,
    Zeros,
}

impl Gradients {
    /// Takes the gradients of these parameters.
    pub(crate) fn take<M: Module>(
        model: &M,
        mut from: GradientsParams,
        missing: Missing,
    ) -> Result<Self> {
        let mut taker = Taker {
            path: Path::default(),
            from: &mut from,
            missing,
            seen: HashSet::new(),
            taken: Vec::new(),
            unfit: None,
        };
        model.visit(&mut taker);
        let Taker {
            mut taken, unfit, ..
        } = taker;
        if let Some(mistake) = unfit {
            return Err(Error::Invalid { mistake });
        }
        check_that_none_is_left(&from)?;
        taken.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(Self(taken))
    }

    /// Gives the gradients back to burn.
    pub(crate) fn put(self) -> GradientsParams {
        let mut all = GradientsParams::new();
        for gradient in self.0 {
            (gradient.put)(gradient.data, &mut all);
        }
        all
    }

    /// The paths, types and shapes.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = (&str, DType, &Shape)> {
        let all = self.0.iter();
        all.map(|one| (one.path.as_str(), one.data.dtype(), one.data.shape()))
    }

    /// Reduces them over the ranks, in so many groups of neighbours and each type of a group by itself.
    pub(crate) fn reduce(&mut self, hvd: &Communicator, op: ReduceOp, groups: usize) -> Result<()> {
        let count = self.0.len();
        let groups = groups.min(count);
        for number in 0..groups {
            let part = count * number / groups..count * (number + 1) / groups;
            for dtype in TYPES {
                let members = self.0[part.clone()].iter_mut().map(|one| &mut one.data);
                let members: Vec<&mut TensorData> = members
                    .filter(|data| data.dtype() == dtype && data.num_elements() > 0)
                    .collect();
                if members.is_empty() {
                    continue;
                }
                let hvd = hvd.named(&format!("burn.gradients.{number}.{}", dtype.name()));
                with_type!(dtype, T => reduce_typed::<T>(&hvd, op, members))?;
            }
        }
        Ok(())
    }

    /// Scales all so that their norm is at most `max`; their norm before. The squares are added in the order of the
    /// paths, in `f64`, so the result is the same on all ranks.
    pub(crate) fn clip(&mut self, max: f64) -> Result<f64> {
        let mut squares = 0.0;
        for one in &self.0 {
            squares += with_type!(one.data.dtype(), T => sum_of_squares::<T>(&one.data))?;
        }
        let norm = squares.sqrt();
        // NaN is not `<= max`: then all gradients become NaN, which shows it.
        if norm <= max {
            return Ok(norm);
        }
        for one in &mut self.0 {
            with_type!(one.data.dtype(), T => scale::<T>(&mut one.data, max / norm))?;
        }
        Ok(norm)
    }
}

fn reduce_typed<T: Element + horovod::Reduce>(
    hvd: &Communicator,
    op: ReduceOp,
    members: Vec<&mut TensorData>,
) -> Result<()> {
    let slices = members.into_iter().map(TensorData::as_mut_slice::<T>);
    let mut slices = slices.collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(hvd.grouped_allreduce_in_place(&mut slices, op)?)
}

fn sum_of_squares<T: Element>(data: &TensorData) -> Result<f64> {
    let values = data.as_slice::<T>()?.iter();
    Ok(values.map(|value| value.elem::<f64>().powi(2)).sum())
}

fn scale<T: Element>(data: &mut TensorData, factor: f64) -> Result<()> {
    for value in data.as_mut_slice::<T>()? {
        *value = (value.elem::<f64>() * factor).elem();
    }
    Ok(())
}

/// Takes each gradient of a model.
struct Taker<'a> {
    path: Path,
    from: &'a mut GradientsParams,
    missing: Missing,
    /// A parameter that is at several places has one gradient.
    seen: HashSet<ParamId>,
    taken: Vec<Gradient>,
    /// The first mistake.
    unfit: Option<String>,
}

impl ModuleVisitor for Taker<'_> {
    keep_path!();

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() || !self.seen.insert(param.id) {
            return;
        }
        let (id, path) = (param.id, self.path.text());
        let gradient = match (self.from.remove::<D>(id), self.missing) {
            (Some(gradient), _) => gradient,
            (None, Missing::Nothing) => return,
            (None, Missing::Zeros) => param.base().without_autodiff().zeros_like(),
        };
        let device = gradient.device();
        let data = gradient.into_data();
        let (dtype, shape) = (data.dtype(), data.shape());
        if let Some(why) = misfit(&path, (dtype, shape), param) {
            self.unfit.get_or_insert(why);
        }
        self.taken.push(Gradient {
            path,
            data,
            put: Box::new(move |data, all| {
                all.register(id, Tensor::<D>::from_data(data, (&device, dtype)));
            }),
        });
    }
}

/// The mistake of a gradient whose type or shape is not that of its parameter.
fn misfit<const D: usize>(
    path: &str,
    (dtype, shape): (DType, &Shape),
    param: &Param<Tensor<D>>,
) -> Option<String> {
    let expected = (param.dtype(), &param.shape());
    ((dtype, shape) != expected).then(|| {
        format!(
            "the gradient of {path:?} is of type {} and shape {:?}; expected are those of the parameter, {} and {:?}",
            dtype.name(),
            shape.as_slice(),
            expected.0.name(),
            expected.1.as_slice()
        )
    })
}

/// Gradients of another model are a mistake: its parameters would not be trained.
fn check_that_none_is_left(gradients: &GradientsParams) -> Result<()> {
    match gradients.len() {
        0 => Ok(()),
        count => Err(Error::invalid(format!(
            "gradients that belong to no trained parameter of this model: {count}; make them by \
             GradientsParams::from_grads of the same model"
        ))),
    }
}

/// Adds the gradients of a pass to the sums of earlier ones.
pub(crate) fn add<M: Module>(
    model: &M,
    pass: GradientsParams,
    sums: &mut GradientsParams,
) -> Result<()> {
    struct Adder<'a> {
        path: Path,
        pass: GradientsParams,
        sums: &'a mut GradientsParams,
        /// The first mistake.
        unfit: Option<String>,
    }

    impl ModuleVisitor for Adder<'_> {
        keep_path!();

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Some(gradient) = self.pass.remove::<D>(param.id) else {
                return;
            };
            // burn's addition would repeat the values of a smaller shape.
            let found = (gradient.dtype(), &gradient.shape());
            if let Some(why) = misfit(&self.path.text(), found, param) {
                self.unfit.get_or_insert(why);
                return;
            }
            let sum = match self.sums.remove::<D>(param.id) {
                Some(sum) => sum + gradient,
                None => gradient,
            };
            self.sums.register(param.id, sum);
        }
    }

    let mut adder = Adder {
        path: Path::default(),
        pass,
        sums,
        unfit: None,
    };
    model.visit(&mut adder);
    let Adder { pass, unfit, .. } = adder;
    match unfit {
        Some(mistake) => Err(Error::Invalid { mistake }),
        None => check_that_none_is_left(&pass),
    }
}

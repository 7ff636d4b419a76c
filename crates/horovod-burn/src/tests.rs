//! The calls of this crate on one to three ranks, each a thread of this process.

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig, LinearLayout};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use horovod::Communicator;
use horovod::ReduceOp::{Average, Max, Sum};
use horovod::testing::{on_ranks, process_set};

use crate::{DistributedOptimizer, Error, broadcast_parameters};

#[cfg(feature = "train")]
mod learner;
mod mistakes;
mod state;

fn device() -> Device {
    Device::flex().autodiff()
}

/// A gradient: it has no part in autodiff.
fn gradient(values: &[f32], dtype: DType) -> Tensor<1> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    Tensor::from_data(data, (&Device::flex(), dtype))
}

fn typed(values: &[f32], dtype: DType) -> Param<Tensor<1>> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    Param::from_tensor(Tensor::from_data(data, (&device(), dtype)))
}

fn param(values: &[f32]) -> Param<Tensor<1>> {
    typed(values, DType::F32)
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().try_into_vec_as().unwrap()
}

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().init()
}

#[derive(Module, Debug)]
struct Three {
    a: Param<Tensor<1>>,
    b: Param<Tensor<1>>,
    c: Param<Tensor<1>>,
}

impl Three {
    fn of(values: &[f32]) -> Self {
        let [a, b, c] = [(); 3].map(|()| param(values));
        Self { a, b, c }
    }

    fn first_values(&self) -> [f32; 3] {
        [&self.a, &self.b, &self.c].map(|param| values(param)[0])
    }
}

#[derive(Module, Debug)]
struct EveryType {
    f64: Param<Tensor<1>>,
    f32: Param<Tensor<1>>,
    f16: Param<Tensor<1>>,
    bf16: Param<Tensor<1>>,
    empty: Param<Tensor<1>>,
    integers: Param<Tensor<2, Int>>,
    booleans: Vec<Param<Tensor<1, Bool>>>,
    norm: BatchNorm,
    /// Its matrix is transposed in burn's own records.
    columns: Linear,
}

impl EveryType {
    fn of_rank(rank: usize) -> Self {
        let own = rank as f32 + 1.0;
        let integers = Tensor::from_data([[rank as i64, 7], [8, 9]], &device());
        let booleans = Tensor::from_data([rank == 1, true], &device());
        let columns = LinearConfig::new(2, 3)
            .with_layout(LinearLayout::Col)
            .with_initializer(Initializer::Constant {
                value: f64::from(own),
            });
        let norm = BatchNormConfig::new(2).init(&device());
        // In training it changes its running mean.
        norm.forward(Tensor::<2>::full([4, 2], own, &device()));
        Self {
            f64: typed(&[own, own + 0.5], DType::F64),
            f32: typed(&[own; 5], DType::F32),
            f16: typed(&[own; 3], DType::F16),
            bf16: typed(&[own; 3], DType::BF16),
            empty: param(&[]),
            integers: Param::initialized(ParamId::new(), integers),
            booleans: vec![Param::initialized(ParamId::new(), booleans)],
            norm: norm.clone(),
            columns: columns.init(&device()),
        }
    }

    /// Everything but the ids.
    fn contents(&self) -> Vec<(String, TensorData)> {
        let mut all = crate::parameters::of(self);
        all.sort_by(|one, other| one.path.cmp(&other.path));
        let all = all.into_iter();
        all.map(|one| (one.path.clone(), one.into_data())).collect()
    }
}

#[test]
fn a_broadcast_gives_all_ranks_the_values_and_ids_of_the_root() {
    for (size, root) in [(2, 0), (2, 1), (3, 1)] {
        on_ranks(size, move |hvd| {
            let model = EveryType::of_rank(hvd.rank());
            let own = model.f32.id;
            let model = broadcast_parameters(hvd, model, root).unwrap();
            assert_eq!(model.contents(), EveryType::of_rank(root).contents());
            assert_eq!(model.f32.id == own, hvd.rank() == root);
            assert!(model.f64.is_require_grad() && model.columns.weight.is_require_grad());
            assert_eq!(model.columns.weight.dims(), [2, 3]);
            let mean = |model: &EveryType| values(&model.norm.running_mean.value_sync());
            assert_eq!(mean(&model), mean(&EveryType::of_rank(root)));
            let ids = hvd.allgather(&[model.f32.id.val()], 1).unwrap();
            assert_eq!(ids, vec![ids[0]; size]);
        });
    }
}

#[test]
fn gradients_of_every_float_type_are_averaged() {
    on_ranks(2, |hvd| {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let model = typed(&[1.0; 5], dtype);
            let mut gradients = GradientsParams::new();
            gradients.register(model.id, gradient(&[hvd.rank() as f32 * 2.0; 5], dtype));
            let mut optimizer = DistributedOptimizer::new(hvd, sgd());
            let reduced = optimizer.reduce(&model, gradients).unwrap().unwrap();
            let reduced = reduced.get::<1>(model.id).unwrap();
            assert_eq!((values(&reduced), reduced.dtype()), (vec![1.0; 5], dtype));

            let loss = model.val().mul_scalar(2.0 * hvd.rank() as f32).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            let model = optimizer.step(0.5, model, gradients).unwrap();
            assert_eq!((values(&model), model.dtype()), (vec![0.5; 5], dtype));
        }
    });
}

#[test]
fn gradients_are_reduced_in_their_own_memory() {
    fn address(data: &TensorData) -> *const f32 {
        data.as_slice::<f32>().unwrap().as_ptr()
    }
    on_ranks(2, |hvd| {
        let model = param(&[1.0; 1000]);
        let own = TensorData::new(vec![hvd.rank() as f32; 1000], [1000]);
        let before = address(&own);
        let mut gradients = GradientsParams::new();
        gradients.register(model.id, Tensor::<1>::from_data(own, &Device::flex()));
        let mut optimizer = DistributedOptimizer::new(hvd, sgd());
        let mut reduced = optimizer.reduce(&model, gradients).unwrap().unwrap();
        let reduced = reduced.remove::<1>(model.id).unwrap().into_data();
        assert_eq!(address(&reduced), before);
    });
}

#[test]
fn unused_parameters_count_as_zero() {
    let results = on_ranks(3, |hvd| {
        let model = Three::of(&[1.0]);
        let mut optimizer = DistributedOptimizer::new(hvd, sgd()).op(Sum);
        // Each rank uses another parameter; no rank uses `c`.
        let used = if hvd.rank() == 0 { &model.a } else { &model.b };
        let loss = used.val().mul_scalar(hvd.rank() as f32 + 1.0).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        optimizer
            .step(1.0, model, gradients)
            .unwrap()
            .first_values()
    });
    assert_eq!(results, [[0.0, -4.0, 1.0]; 3]);
}

/// The paths of [`Three`] in another order.
#[derive(Module, Debug)]
struct Reversed {
    c: Param<Tensor<1>>,
    b: Param<Tensor<1>>,
    a: Param<Tensor<1>>,
}

#[test]
fn parameters_and_gradients_pair_by_path_whatever_their_order() {
    fn stepped<M: Module>(hvd: &Communicator, model: M, ids: impl Fn(&M) -> [ParamId; 3]) -> M {
        let model = broadcast_parameters(hvd, model, 1).unwrap();
        let mut gradients = GradientsParams::new();
        for (id, value) in ids(&model).into_iter().zip([1.0, 2.0, 3.0]) {
            gradients.register(id, gradient(&[value], DType::F32));
        }
        let mut optimizer = DistributedOptimizer::new(hvd, sgd());
        optimizer.step(1.0, model, gradients).unwrap()
    }
    let results = on_ranks(2, |hvd| {
        let own = hvd.rank() as f32;
        let [a, b, c] = [10.0, 20.0, 30.0].map(|value| param(&[value * own]));
        if hvd.rank() == 0 {
            let model = stepped(hvd, Three { a, b, c }, |model| {
                [model.a.id, model.b.id, model.c.id]
            });
            return model.first_values();
        }
        let Reversed { c, b, a } = stepped(hvd, Reversed { c, b, a }, |model| {
            [model.a.id, model.b.id, model.c.id]
        });
        Three { a, b, c }.first_values()
    });
    assert_eq!(results, [[9.0, 18.0, 27.0]; 2]);
}

#[test]
fn a_process_set_trains_by_itself() {
    let results = on_ranks(3, |hvd| {
        let set = process_set(hvd, &[0, 2]).unwrap();
        let model = param(&[hvd.rank() as f32 + 5.0]);
        let Some(hvd) = set.communicator() else {
            return values(&model)[0];
        };
        let model = broadcast_parameters(hvd, model, 1).unwrap();
        let mut gradients = GradientsParams::new();
        gradients.register(model.id, gradient(&[2.0 * hvd.rank() as f32], DType::F32));
        let mut optimizer = DistributedOptimizer::new(hvd, sgd());
        values(&optimizer.step(1.0, model, gradients).unwrap())[0]
    });
    assert_eq!(results, [6.0; 3]);
}

#[test]
fn many_gradients_are_reduced_in_any_number_of_groups() {
    for groups in [1, 2, 7, 400, usize::MAX] {
        on_ranks(2, move |hvd| {
            let model: Vec<_> = (0..259)
                .map(|at| match at % 3 {
                    0 => typed(&[0.0; 2], DType::F64),
                    _ => param(&[0.0; 2]),
                })
                .collect();
            let mut gradients = GradientsParams::new();
            for (at, param) in model.iter().enumerate() {
                let own = [at as f32, 2.0 * hvd.rank() as f32];
                gradients.register(param.id, gradient(&own, param.dtype()));
            }
            let mut optimizer = DistributedOptimizer::new(hvd, sgd()).groups(groups);
            let model = optimizer.step(1.0, model, gradients).unwrap();
            for (at, param) in model.iter().enumerate() {
                assert_eq!(values(param), [-(at as f32), -1.0]);
            }
        });
    }
}

#[test]
fn gradients_of_several_passes_are_added_before_they_are_reduced() {
    on_ranks(2, |hvd| {
        let mut model = Three::of(&[0.0, 0.0]);
        let mut optimizer = DistributedOptimizer::new(hvd, sgd()).backward_passes_per_step(3);
        for step in 0..2 {
            for pass in 0..3 {
                let before = step as f32;
                assert_eq!(model.first_values(), [-6.0 * before, -5.0 * before, 0.0]);
                let factor = 2.0 * hvd.rank() as f32 + pass as f32;
                // The first pass does not use `b`.
                let used = match pass {
                    0 => model.a.val(),
                    _ => model.a.val() + model.b.val(),
                };
                let loss = used.mul_scalar(factor).sum();
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(1.0, model, gradients).unwrap();
            }
            // 3 on rank 0 and 9 on rank 1; without the first pass 3 and 7.
            let steps = step as f32 + 1.0;
            assert_eq!(model.first_values(), [-6.0 * steps, -5.0 * steps, 0.0]);
        }
    });
}

#[test]
fn the_norm_of_the_reduced_gradients_is_clipped() {
    on_ranks(2, |hvd| {
        let mut model = vec![param(&[0.0]), typed(&[0.0], DType::F16)];
        let mut optimizer = DistributedOptimizer::new(hvd, sgd()).op(Sum).max_norm(5.0);
        let gradients = |model: &[Param<Tensor<1>>], scale: f32| {
            let mut gradients = GradientsParams::new();
            // The sums over both ranks are 3 and 4, times the scale.
            gradients.register(model[0].id, gradient(&[1.5 * scale], DType::F32));
            let second = 4.0 * scale * hvd.rank() as f32;
            gradients.register(model[1].id, gradient(&[second], DType::F16));
            gradients
        };
        let both = |model: &[Param<Tensor<1>>]| [values(&model[0])[0], values(&model[1])[0]];
        let given = gradients(&model, 1.0);
        model = optimizer.step(1.0, model, given).unwrap();
        assert_eq!(both(&model), [-3.0, -4.0]);
        let given = gradients(&model, 10.0);
        model = optimizer.step(1.0, model, given).unwrap();
        assert_eq!(both(&model), [-6.0, -8.0]);

        let mut given = GradientsParams::new();
        given.register(model[0].id, gradient(&[50.0], DType::F32));
        assert_eq!(optimizer.clip(&model, &mut given, 5.0).unwrap(), 50.0);
        assert_eq!(values(&given.get::<1>(model[0].id).unwrap()), [5.0]);
        assert_eq!(given.len(), 1, "no zeros are added");
    });
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn of_waves() -> Self {
        let linear = |rows, columns, phase| {
            let mut linear = LinearConfig::new(rows, columns)
                .with_bias(false)
                .init(&device());
            linear.weight = Param::from_tensor(wave(rows, columns, phase));
            linear
        };
        Self {
            first: linear(8, 6, 0.1),
            second: linear(6, 1, 0.7),
        }
    }

    fn loss(&self, batch: Tensor<2>) -> Tensor<1> {
        let hidden = self.first.forward(batch).tanh();
        self.second.forward(hidden).square().mean()
    }

    fn bits(&self) -> Vec<u32> {
        let all = [values(&self.first.weight), values(&self.second.weight)].concat();
        all.iter().map(|value| value.to_bits()).collect()
    }
}

fn wave(rows: usize, columns: usize, phase: f32) -> Tensor<2> {
    let numbers = (0..rows * columns).map(|at| (at as f32 * 1.7 + phase).sin());
    let data = TensorData::new(numbers.collect(), [rows, columns]);
    Tensor::from_data(data, &device())
}

/// Steps with the rank's part of each batch.
fn train(
    optimizer: &mut DistributedOptimizer,
    mut model: Net,
    hvd: &Communicator,
    steps: std::ops::Range<u32>,
) -> Net {
    let share = 12 / hvd.size();
    for step in steps {
        let part = wave(12, 8, step as f32).narrow(0, hvd.rank() * share, share);
        let gradients = GradientsParams::from_grads(model.loss(part).backward(), &model);
        model = optimizer.step(0.05, model, gradients).unwrap();
    }
    model
}

fn momentum() -> ModuleOptimizer {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .init()
}

#[test]
fn training_on_several_ranks_is_that_of_one_with_the_whole_batch() {
    let adam = || AdamWConfig::new().init();
    for (inner, clip) in [
        (momentum as fn() -> ModuleOptimizer, None),
        (momentum, Some(0.5)),
        (adam, None),
    ] {
        let trained = move |hvd: &Communicator| {
            let model = broadcast_parameters(hvd, Net::of_waves(), 0).unwrap();
            let mut optimizer = DistributedOptimizer::new(hvd, inner());
            if let Some(max) = clip {
                optimizer = optimizer.max_norm(max);
            }
            train(&mut optimizer, model, hvd, 0..20).bits()
        };
        let alone = on_ranks(1, trained).remove(0);
        for size in [2, 3] {
            let results = on_ranks(size, trained);
            for replica in &results {
                assert_eq!(replica, &results[0], "replicas are equal bit for bit");
            }
            for (one, other) in alone.iter().zip(&results[0]) {
                let difference = f32::from_bits(*one) - f32::from_bits(*other);
                assert!(difference.abs() < 2e-5, "{difference}");
            }
        }
    }
}

#[test]
fn ranks_with_different_parameters_or_settings_get_an_error_that_names_both() {
    on_ranks(3, |hvd| {
        let is_last = hvd.rank() == 2;
        let text = |result: crate::Result<()>| result.unwrap_err().to_string();
        let mut other = Three::of(&[0.0; 3]);
        if is_last {
            other.b = param(&[0.0; 4]);
        }
        let text_of = text(broadcast_parameters(hvd, other, 0).map(drop));
        assert!(
            text_of.contains(
                r#"rank 0 has "b" of type f32 and shape [3], rank 2 has "b" of type f32 and shape [4]"#
            ),
            "{text_of}"
        );

        let more = vec![param(&[0.0]); 1 + usize::from(is_last)];
        let text_of = text(broadcast_parameters(hvd, more, 0).map(drop));
        assert!(
            text_of.contains(r#"rank 2 has "1" of type"#)
                && text_of.contains("rank 0 has nothing of that name"),
            "{text_of}"
        );

        let gradients = |model: &Three| {
            let loss = (model.a.val() + model.c.val()).sum();
            GradientsParams::from_grads(loss.backward(), model)
        };
        let model = Three::of(&[1.0]);
        let op = if is_last { Max } else { Average };
        let mut optimizer = DistributedOptimizer::new(hvd, sgd()).op(op);
        let text_of = text(
            optimizer
                .step(1.0, model.clone(), gradients(&model))
                .map(drop),
        );
        assert!(
            text_of.contains("rank 0 has op Average, rank 2 has op Max"),
            "{text_of}"
        );

        // Every step compares: a rank may freeze a parameter on the way.
        let mut optimizer = DistributedOptimizer::new(hvd, sgd());
        let mut model = optimizer
            .step(1.0, model.clone(), gradients(&model))
            .unwrap();
        if is_last {
            model.b = model.b.set_require_grad(false);
        }
        let text_of = text(
            optimizer
                .step(1.0, model.clone(), gradients(&model))
                .map(drop),
        );
        assert!(
            text_of
                .contains(r#"has "b" of type f32 and shape [1], rank 2 has nothing of that name"#),
            "{text_of}"
        );

        // The job goes on.
        model.b = model.b.set_require_grad(false);
        let model = optimizer
            .step(1.0, model.clone(), gradients(&model))
            .unwrap();
        assert_eq!(model.first_values(), [-1.0, 1.0, -1.0]);
    });
}

#[test]
fn arguments_without_a_meaning_are_refused() {
    on_ranks(1, |hvd| {
        let model = Three::of(&[1.0]);
        let none = GradientsParams::new;
        let text = |result: crate::Result<Three>| result.unwrap_err().to_string();
        let new = || DistributedOptimizer::new(hvd, sgd());
        for (mut optimizer, name) in [
            (new().groups(0), "groups"),
            (
                new().backward_passes_per_step(0),
                "backward_passes_per_step",
            ),
        ] {
            let text = text(optimizer.step(1.0, model.clone(), none()));
            assert!(text.contains(&format!("{name} was set to 0")), "{text}");
        }
        for max in [0.0, -1.0, f64::NAN] {
            let text = text(new().max_norm(max).step(1.0, model.clone(), none()));
            assert!(text.contains("pass a number above 0"), "{text}");
        }
        let text_of = text(broadcast_parameters(hvd, model.clone(), 1));
        assert!(text_of.contains("from rank 1"), "{text_of}");

        let mut gradients = none();
        gradients.register(model.b.id, gradient(&[1.0, 2.0], DType::F32));
        let text_of = text(new().step(1.0, model.clone(), gradients));
        assert!(
            text_of.contains(r#"the gradient of "b" is of type f32 and shape [2]"#),
            "{text_of}"
        );

        // A sum would repeat the one value for both.
        let two = Three::of(&[1.0, 2.0]);
        let mut optimizer = new().backward_passes_per_step(2);
        let mut pass = |values: &[f32]| {
            let mut gradients = none();
            gradients.register(two.a.id, gradient(values, DType::F32));
            optimizer.reduce(&two, gradients)
        };
        assert!(pass(&[1.0, 2.0]).unwrap().is_none());
        let text_of = pass(&[1.0]).map(|_| ()).unwrap_err().to_string();
        assert!(text_of.contains(r#"the gradient of "a""#), "{text_of}");

        let mut gradients = none();
        gradients.register(ParamId::new(), gradient(&[1.0], DType::F32));
        let text_of = text(new().step(1.0, model.clone(), gradients));
        assert!(
            text_of.contains("belong to no trained parameter of this model: 1;"),
            "{text_of}"
        );
    });
}

#[test]
fn a_parameter_at_two_places_has_one_gradient() {
    on_ranks(2, |hvd| {
        let tied = param(&[0.0]);
        let model = vec![tied.clone(), tied];
        let mut gradients = GradientsParams::new();
        gradients.register(
            model[0].id,
            gradient(&[2.0 * hvd.rank() as f32], DType::F32),
        );
        let mut optimizer = DistributedOptimizer::new(hvd, sgd());
        let reduced = optimizer.reduce(&model, gradients).unwrap().unwrap();
        assert_eq!(values(&reduced.get::<1>(model[0].id).unwrap()), [1.0]);
    });
}

#[test]
fn errors_are_sentences() {
    let error = Error::from(horovod::Error::Closed);
    let words = horovod::Error::Closed.to_string();
    assert_eq!(
        (error.to_string(), format!("{error:?}")),
        (words.clone(), words)
    );
    // Programs print the text of the source as well.
    assert!(std::error::Error::source(&error).is_none());
}

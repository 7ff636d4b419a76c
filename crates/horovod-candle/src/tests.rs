//! The calls of this crate on one to three ranks, each a thread of this process.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Storage, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD, VarMap};
use horovod::ReduceOp::{Average, Max, Sum};
use horovod::elastic::Checkpoint;
use horovod::testing::{join, on_ranks, process_set};

use crate::memory::LOCKS_MAX;
use crate::{DistributedOptimizer, ElasticState, Error, Parameters, broadcast_parameters};

mod mistakes;

fn var(values: &[f32]) -> Var {
    Var::new(values, &Device::Cpu).unwrap()
}

fn tensor(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    flat.to_vec1().unwrap()
}

fn named(pairs: &[(&str, &Var)]) -> Vec<(String, Var)> {
    let pairs = pairs.iter();
    pairs
        .map(|(name, var)| ((*name).into(), (*var).clone()))
        .collect()
}

fn sgd(parameters: &[(String, Var)]) -> SGD {
    let vars = parameters.iter().map(|(_, var)| var.clone()).collect();
    SGD::new(vars, 1.0).unwrap()
}

/// Where the elements of a tensor of `f32` are.
fn address(tensor: &Tensor) -> usize {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        panic!("not on the host");
    };
    storage.as_slice::<f32>().unwrap()[layout.start_offset()..].as_ptr() as usize
}

#[test]
fn a_broadcast_copies_every_type_into_the_variables_by_their_names() {
    for root in [0, 1] {
        on_ranks(2, move |hvd| {
            let (map, own) = (VarMap::new(), hvd.rank() as f64 + 1.0);
            let mut names = vec![
                ("f64", DType::F64),
                ("f32", DType::F32),
                ("f16", DType::F16),
                ("bf16", DType::BF16),
                ("i64", DType::I64),
                ("u8", DType::U8),
            ];
            if hvd.rank() == 1 {
                names.reverse();
            }
            for (name, dtype) in &names {
                // The value depends on the name and the rank, not on the order.
                let value = own * 10.0 + (name.len() as f64);
                let full = Tensor::full(value as f32, (2, 3), &Device::Cpu).unwrap();
                let var = Var::from_tensor(&full.to_dtype(*dtype).unwrap()).unwrap();
                map.data().lock().unwrap().insert((*name).into(), var);
            }
            broadcast_parameters(hvd, &map, root).unwrap();
            for (name, dtype) in names {
                let value = (root as f32 + 1.0) * 10.0 + name.len() as f32;
                let var = map.data().lock().unwrap()[name].clone();
                assert_eq!(
                    (values(&var), var.dtype()),
                    (vec![value; 6], dtype),
                    "{name}"
                );
            }
        });
    }
}

#[test]
fn a_broadcast_serves_variables_that_are_empty_or_have_two_names() {
    on_ranks(2, |hvd| {
        let (tied, empty) = (var(&[hvd.rank() as f32; 3]), var(&[]));
        let parameters = named(&[("in", &tied), ("out", &tied), ("empty", &empty)]);
        broadcast_parameters(hvd, &parameters, 1).unwrap();
        assert_eq!(values(&tied), [1.0; 3]);
    });
}

#[test]
fn gradients_of_every_float_type_are_averaged_in_place() {
    on_ranks(2, |hvd| {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let own = Tensor::full(hvd.rank() as f32 * 2.0, 5, &Device::Cpu).unwrap();
            let var = Var::from_tensor(&own.to_dtype(dtype).unwrap()).unwrap();
            let parameters = named(&[("w", &var)]);
            let mut optimizer =
                DistributedOptimizer::new(hvd, sgd(&parameters), &parameters).unwrap();
            let mut gradients = GradStore::default();
            gradients.insert(&var, own.to_dtype(dtype).unwrap());
            let reduced = optimizer.reduce(gradients).unwrap().unwrap();
            let gradient = reduced.get(&var).unwrap();
            assert_eq!((values(gradient), gradient.dtype()), (vec![1.0; 5], dtype));
        }
        let var = var(&[1.0; 7]);
        let parameters = named(&[("w", &var)]);
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&parameters), &parameters).unwrap();
        let mut gradients = GradStore::default();
        let gradient = tensor(&[hvd.rank() as f32; 7]);
        let before = address(&gradient);
        gradients.insert(&var, gradient);
        let reduced = optimizer.reduce(gradients).unwrap().unwrap();
        assert_eq!(address(reduced.get(&var).unwrap()), before);
    });
}

#[test]
fn gradients_that_share_memory_or_are_strided_are_reduced_once_each() {
    on_ranks(2, |hvd| {
        let own = hvd.rank() as f32;
        let [a, b, c, d] = [(); 4].map(|()| Var::zeros((2, 2), DType::F32, &Device::Cpu).unwrap());
        let parameters = named(&[("a", &a), ("b", &b), ("c", &c), ("d", &d)]);
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&parameters), &parameters)
            .unwrap()
            .op(Sum)
            .groups(3);
        let both = tensor(&[1.0, 2.0, 3.0, 4.0, own, own, own, own]);
        let first = both.narrow(0, 0, 4).unwrap().reshape((2, 2)).unwrap();
        let mut gradients = GradStore::default();
        gradients.insert(&a, first.clone());
        gradients.insert(&b, both.narrow(0, 4, 4).unwrap().reshape((2, 2)).unwrap());
        gradients.insert(&c, first.t().unwrap());
        let repeated = tensor(&[own]).broadcast_as((2, 2)).unwrap();
        gradients.insert(&d, repeated);
        let reduced = optimizer.reduce(gradients).unwrap().unwrap();
        let of = |var: &Var| values(reduced.get(var).unwrap());
        assert_eq!(of(&a), [2.0, 4.0, 6.0, 8.0]);
        assert_eq!(of(&b), [1.0; 4]);
        assert_eq!(of(&c), [2.0, 6.0, 4.0, 8.0]);
        assert_eq!(of(&d), [1.0; 4]);
    });
}

#[test]
fn unused_parameters_count_as_zero_and_pair_by_name() {
    let results = on_ranks(3, |hvd| {
        let (a, b, c) = (var(&[1.0]), var(&[1.0]), var(&[1.0]));
        let mut parameters = named(&[("a", &a), ("b", &b), ("c", &c)]);
        if hvd.rank() == 1 {
            parameters.reverse();
        }
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&parameters), &parameters)
            .unwrap()
            .op(Sum);
        // Each rank uses another parameter; no rank uses `c`.
        let used = if hvd.rank() == 0 { &a } else { &b };
        let loss = (used.as_tensor() * (hvd.rank() as f64 + 1.0)).unwrap();
        assert!(optimizer.backward_step(&loss.sum_all().unwrap()).unwrap());
        [a, b, c].map(|var| values(&var)[0])
    });
    assert_eq!(results, [[0.0, -4.0, 1.0]; 3]);
}

#[test]
fn a_process_set_trains_by_itself() {
    let results = on_ranks(3, |hvd| {
        let set = process_set(hvd, &[0, 2]).unwrap();
        let weight = var(&[hvd.rank() as f32 + 5.0]);
        let parameters = named(&[("w", &weight)]);
        if let Some(hvd) = set.communicator() {
            broadcast_parameters(hvd, &parameters, 1).unwrap();
            let mut optimizer =
                DistributedOptimizer::new(hvd, sgd(&parameters), &parameters).unwrap();
            let loss = (weight.as_tensor() * (2.0 * hvd.rank() as f64)).unwrap();
            optimizer.backward_step(&loss.sum_all().unwrap()).unwrap();
        }
        values(&weight)[0]
    });
    assert_eq!(results, [6.0; 3]);
}

#[test]
fn more_gradients_than_are_held_at_once_are_reduced_in_any_number_of_groups() {
    for groups in [1, 2, 7, usize::MAX] {
        on_ranks(2, move |hvd| {
            let count = 2 * LOCKS_MAX + 3;
            let vars: Vec<Var> = (0..count).map(|_| var(&[0.0, 0.0])).collect();
            let pairs = vars.iter().enumerate();
            let parameters: Vec<_> = pairs
                .map(|(at, var)| (at.to_string(), var.clone()))
                .collect();
            let mut optimizer = DistributedOptimizer::new(hvd, sgd(&parameters), &parameters)
                .unwrap()
                .groups(groups);
            let mut gradients = GradStore::default();
            for (at, var) in vars.iter().enumerate() {
                gradients.insert(var, tensor(&[at as f32, 2.0 * hvd.rank() as f32]));
            }
            assert!(optimizer.step(gradients).unwrap());
            for (at, var) in vars.iter().enumerate() {
                assert_eq!(values(var), [-(at as f32), -1.0]);
            }
        });
    }
}

#[test]
fn gradients_of_several_passes_are_added_before_they_are_reduced() {
    on_ranks(2, |hvd| {
        let weight = var(&[0.0, 0.0]);
        let parameters = named(&[("w", &weight)]);
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&parameters), &parameters)
            .unwrap()
            .backward_passes_per_step(3);
        for step in 1..3 {
            for pass in 0..3 {
                let factor = 2.0 * hvd.rank() as f64 + f64::from(pass);
                let loss = (weight.as_tensor() * factor).unwrap().sum_all().unwrap();
                assert_eq!(optimizer.backward_step(&loss).unwrap(), pass == 2);
            }
            // 3 on rank 0 and 9 on rank 1.
            assert_eq!(values(&weight), [-6.0 * step as f32; 2]);
        }
    });
}

#[test]
fn the_norm_of_the_reduced_gradients_is_clipped() {
    on_ranks(2, |hvd| {
        let (a, b) = (var(&[0.0]), var(&[0.0]));
        let parameters = named(&[("a", &a), ("b", &b)]);
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&parameters), &parameters)
            .unwrap()
            .op(Sum)
            .max_norm(5.0);
        let step = |optimizer: &mut DistributedOptimizer<SGD>, scale: f32| {
            let mut gradients = GradStore::default();
            // The sums over both ranks are 3 and 4, times the scale.
            gradients.insert(&a, tensor(&[1.5 * scale]));
            gradients.insert(&b, tensor(&[4.0 * scale * hvd.rank() as f32]));
            assert!(optimizer.step(gradients).unwrap());
        };
        step(&mut optimizer, 1.0);
        assert_eq!((values(&a)[0], values(&b)[0]), (-3.0, -4.0));
        step(&mut optimizer, 10.0);
        assert_eq!((values(&a)[0], values(&b)[0]), (-6.0, -8.0));
        let mut gradients = GradStore::default();
        gradients.insert(&a, tensor(&[30.0]));
        gradients.insert(&b, tensor(&[40.0]));
        assert_eq!(optimizer.clip(&mut gradients, 5.0).unwrap(), 50.0);
        assert_eq!(values(gradients.get(&b).unwrap()), [4.0]);
    });
}

/// The parameters after some steps of a small model, with images `begin..end` of each batch.
fn trained(
    hvd: &horovod::Communicator,
    inner: impl Fn(Vec<Var>) -> TwoOptimizers,
    clip: bool,
) -> Vec<u32> {
    let wave = |count: usize, phase: f64| {
        let numbers = Tensor::arange(0.0f32, count as f32, &Device::Cpu).unwrap();
        numbers.affine(1.7, phase).unwrap().sin().unwrap()
    };
    let first = Var::from_tensor(&wave(8 * 6, 0.1).reshape((8, 6)).unwrap()).unwrap();
    let second = Var::from_tensor(&wave(6, 0.7).reshape((6, 1)).unwrap()).unwrap();
    let parameters = named(&[("first", &first), ("second", &second)]);
    let inner = inner(vec![second.clone(), first.clone()]);
    let mut optimizer = DistributedOptimizer::new(hvd, inner, &parameters).unwrap();
    if clip {
        optimizer = optimizer.max_norm(0.5);
    }
    broadcast_parameters(hvd, &parameters, 0).unwrap();
    let share = 12 / hvd.size();
    for step in 0..20 {
        let batch = wave(12 * 8, f64::from(step)).reshape((12, 8)).unwrap();
        let part = batch.narrow(0, hvd.rank() * share, share).unwrap();
        let hidden = part.matmul(&first).unwrap().tanh().unwrap();
        let loss = hidden.matmul(&second).unwrap().sqr().unwrap();
        optimizer.backward_step(&loss.mean_all().unwrap()).unwrap();
    }
    let all = [values(&first), values(&second)].concat();
    all.iter().map(|value| value.to_bits()).collect()
}

/// Either optimizer of candle.
enum TwoOptimizers {
    Sgd(SGD),
    AdamW(AdamW),
}

impl Optimizer for TwoOptimizers {
    type Config = f64;

    fn new(vars: Vec<Var>, rate: f64) -> candle_core::Result<Self> {
        Ok(Self::Sgd(SGD::new(vars, rate)?))
    }

    fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        match self {
            Self::Sgd(inner) => inner.step(gradients),
            Self::AdamW(inner) => inner.step(gradients),
        }
    }

    fn learning_rate(&self) -> f64 {
        match self {
            Self::Sgd(inner) => inner.learning_rate(),
            Self::AdamW(inner) => inner.learning_rate(),
        }
    }

    fn set_learning_rate(&mut self, rate: f64) {
        match self {
            Self::Sgd(inner) => inner.set_learning_rate(rate),
            Self::AdamW(inner) => inner.set_learning_rate(rate),
        }
    }
}

#[test]
fn training_on_several_ranks_is_that_of_one_with_the_whole_batch() {
    let sgd = |vars| TwoOptimizers::Sgd(SGD::new(vars, 0.1).unwrap());
    let adam = |vars| {
        let params = ParamsAdamW {
            lr: 0.01,
            ..ParamsAdamW::default()
        };
        TwoOptimizers::AdamW(AdamW::new(vars, params).unwrap())
    };
    for (inner, clip) in [
        (sgd as fn(Vec<Var>) -> TwoOptimizers, false),
        (sgd, true),
        (adam, false),
    ] {
        let alone = on_ranks(1, move |hvd| trained(hvd, inner, clip)).remove(0);
        for size in [2, 3] {
            let results = on_ranks(size, move |hvd| trained(hvd, inner, clip));
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
        let texts = |result: crate::Result<()>| result.unwrap_err().to_string();
        let (three, four, same_shape) = (var(&[0.0; 3]), var(&[0.0; 4]), var(&[1.0; 3]));

        let other = if is_last { &four } else { &same_shape };
        let shapes = named(&[("a", &three), ("b", other)]);
        let text = texts(broadcast_parameters(hvd, &shapes, 0));
        assert!(
            text.contains(r#"rank 0 has "b" of type f32 and shape [3], rank 2 has "b" of type f32 and shape [4]"#),
            "{text}"
        );

        let other = if is_last { &same_shape } else { &three };
        let tied = named(&[("a", &three), ("b", other)]);
        let text = texts(broadcast_parameters(hvd, &tied, 0));
        assert!(
            text.contains(r#"rank 0 has "b" as another name of "a", rank 2 has "b" of type f32"#),
            "{text}"
        );

        let name = if is_last { "an\"\nother" } else { "b" };
        let names = named(&[("a", &three), (name, &four), ("z", &same_shape)]);
        let text = texts(broadcast_parameters(hvd, &names, 0));
        assert!(
            text.contains(r#"rank 2 has "an\"\nother" of type"#)
                && text.contains("rank 0 has nothing of that name"),
            "{text}"
        );

        let same = named(&[("a", &three)]);
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&same), &same)
            .unwrap()
            .op(if is_last { Max } else { Average });
        let loss = three.sum_all().unwrap();
        let text = texts(optimizer.backward_step(&loss).map(drop));
        assert!(
            text.contains("rank 0 has op Average, rank 2 has op Max"),
            "{text}"
        );

        // A rate that one rank has forgotten to change, after a step.
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&same), &same).unwrap();
        assert!(optimizer.backward_step(&loss).unwrap());
        optimizer.set_learning_rate(if is_last { 1.0 } else { 0.5 });
        let text = texts(optimizer.backward_step(&loss).map(drop));
        assert!(
            text.contains("rank 0 has learning rate 0.5, rank 2 has learning rate 1.0"),
            "{text}"
        );

        // The job goes on.
        broadcast_parameters(hvd, &same, 2).unwrap();
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&same), &same).unwrap();
        assert!(optimizer.backward_step(&loss).unwrap());
    });
}

#[test]
fn arguments_without_a_meaning_are_refused() {
    on_ranks(1, |hvd| {
        let text = |result: crate::Result<()>| result.unwrap_err().to_string();
        let (a, loss) = (var(&[1.0]), tensor(&[1.0]));
        let twins = named(&[("a", &a), ("a", &var(&[2.0]))]);
        assert!(
            text(broadcast_parameters(hvd, &twins, 0)).contains("two parameters are named \"a\"")
        );

        let one = named(&[("a", &a)]);
        let new = || DistributedOptimizer::new(hvd, sgd(&one), &one).unwrap();
        for (mut optimizer, name) in [
            (new().groups(0), "groups"),
            (
                new().backward_passes_per_step(0),
                "backward_passes_per_step",
            ),
        ] {
            let text = text(optimizer.backward_step(&loss).map(drop));
            assert!(text.contains(&format!("{name} was set to 0")), "{text}");
        }
        for max in [0.0, -1.0, f64::NAN] {
            let text = text(new().max_norm(max).backward_step(&loss).map(drop));
            assert!(text.contains("pass a number above 0"), "{text}");
        }
        let text_of = text(broadcast_parameters(hvd, &one, 1));
        assert!(text_of.contains("from rank 1"), "{text_of}");

        let mut gradients = GradStore::default();
        gradients.insert(&a, tensor(&[1.0, 2.0]));
        let text_of = text(new().step(gradients).map(drop));
        assert!(
            text_of.contains(r#"the gradient of "a" is of type f32 and shape [2]"#),
            "{text_of}"
        );

        let eight = Tensor::zeros(1, DType::F8E4M3, &Device::Cpu).unwrap();
        let eight = named(&[("a", &Var::from_tensor(&eight).unwrap())]);
        let text_of = text(broadcast_parameters(hvd, &eight, 0));
        assert!(
            text_of.contains("of type f8e4m3, which cannot be sent"),
            "{text_of}"
        );
    });
}

#[test]
fn errors_keep_their_words_in_functions_of_candle() {
    fn of_candle(error: Error) -> candle_core::Result<()> {
        Err(error)?
    }
    let lost = horovod::Error::Closed;
    let words = lost.to_string();
    // Programs print the text of the source as well.
    assert!(std::error::Error::source(&Error::from(lost.clone())).is_none());
    let error = of_candle(lost.into()).unwrap_err();
    assert_eq!(
        (error.to_string(), format!("{error:?}")),
        (words.clone(), words)
    );
    let error = Error::from(candle_core::Error::Msg("of candle".into()));
    assert_eq!(of_candle(error).unwrap_err().to_string(), "of candle");
}

#[test]
fn an_elastic_state_is_restored_into_the_same_variables() {
    let half = Tensor::new(&[0.5f32, -2.0], &Device::Cpu).unwrap();
    let half = Var::from_tensor(&half.to_dtype(DType::BF16).unwrap()).unwrap();
    let weight = var(&[1.0, 2.0, 3.0]);
    let mut state = ElasticState {
        parameters: named(&[("weight", &weight), ("half", &half), ("tied", &weight)]),
        progress: (7u32, "seventh".to_owned()),
    };
    let saved = state.save().unwrap();
    weight.set(&tensor(&[0.0; 3])).unwrap();
    half.set(&half.zeros_like().unwrap()).unwrap();
    state.progress = (0, String::new());
    state.restore(&saved).unwrap();
    assert_eq!(state.progress, (7, "seventh".to_owned()));
    assert_eq!(values(&weight), [1.0, 2.0, 3.0]);
    assert_eq!(values(&half), [0.5, -2.0]);
}

#[test]
fn bytes_of_another_elastic_state_are_an_error_and_change_nothing() {
    fn state(parameters: &[(&str, &Var)]) -> ElasticState<Vec<(String, Var)>, u32> {
        ElasticState {
            parameters: named(parameters),
            progress: 1,
        }
    }
    let (a, b, longer) = (var(&[1.0]), var(&[2.0]), var(&[3.0, 4.0]));
    let saved = state(&[("a", &a), ("b", &b)]).save().unwrap();
    let other = var(&[5.0]);
    for (parameters, expected) in [
        (
            vec![("a", &other), ("b", &longer)],
            r#""b" of type f32 and shape [1] was sent for one of type f32 and shape [2]"#,
        ),
        (vec![("a", &other), ("c", &b)], r#"they have no "c""#),
        (vec![("a", &other)], r#"the model has no parameter "b""#),
    ] {
        let error = state(&parameters).restore(&saved).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.is_mistake());
    }
    for len in [0, 5, 8, 20, saved.len() - 1] {
        let error = state(&[("a", &other), ("b", &b)]).restore(&saved[..len]);
        assert!(error.unwrap_err().is_mistake(), "{len}");
    }
    assert_eq!(values(&other), [5.0]);
}

#[test]
fn a_var_map_and_other_maps_are_parameters() {
    let map = VarMap::new();
    let weight = var(&[1.0]);
    map.data()
        .lock()
        .unwrap()
        .insert("w".into(), weight.clone());
    let sorted = std::collections::BTreeMap::from([("w".to_owned(), weight.clone())]);
    for found in [
        map.named(),
        sorted.named(),
        named(&[("w", &weight)]).named(),
    ] {
        assert_eq!((found.len(), found[0].0.as_str()), (1, "w"));
    }
}

#[test]
fn optimizers_of_equal_models_that_step_in_another_order_are_an_error_on_all_ranks() {
    on_ranks(2, |hvd| {
        let (a, b) = (var(&[0.0]), var(&[0.0]));
        let both = [&a, &b].map(|var| named(&[("w", var)]));
        let mut optimizers = both
            .each_ref()
            .map(|one| DistributedOptimizer::new(hvd, sgd(one), one).unwrap());
        let step = |optimizer: &mut DistributedOptimizer<SGD>, var: &Var| {
            optimizer.backward_step(&var.sum_all().unwrap())
        };
        // As in a program with two networks, twice. Their rates differ as well.
        optimizers[1].set_learning_rate(2.0);
        for _ in 0..2 {
            assert!(step(&mut optimizers[0], &a).unwrap());
            assert!(step(&mut optimizers[1], &b).unwrap());
        }
        let other = hvd.rank();
        let text = step(&mut optimizers[other], [&a, &b][other]).unwrap_err();
        let text = text.to_string();
        assert!(
            text.contains("rank 0 reduces for optimizer number 0")
                && text.contains("rank 1 for optimizer number 1"),
            "{text}"
        );
        // The job goes on.
        assert!(step(&mut optimizers[1], &b).unwrap());
        assert_eq!((values(&a)[0], values(&b)[0]), (-2.0, -6.0));
    });
}

#[test]
fn a_step_is_an_error_while_another_rank_waits_in_join() {
    on_ranks(2, |hvd| {
        let weight = var(&[0.0]);
        let parameters = named(&[("w", &weight)]);
        let mut optimizer = DistributedOptimizer::new(hvd, sgd(&parameters), &parameters).unwrap();
        let loss = weight.sum_all().unwrap();
        assert!(optimizer.backward_step(&loss).unwrap());
        if hvd.rank() == 1 {
            // Else the replica of rank 0 would differ, for it misses this step.
            let text = optimizer.backward_step(&loss).unwrap_err().to_string();
            assert!(text.contains("while a rank waits in `join`"), "{text}");
        }
        join(hvd).unwrap();
        assert_eq!(values(&weight), [-1.0]);
    });
}

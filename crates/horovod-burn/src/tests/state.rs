//! The state of optimizers and of elastic trainings: sent to other ranks, saved and restored.

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use horovod::elastic::Checkpoint;
use horovod::testing::on_ranks;

use super::{EveryType, Net, Three, momentum, param, sgd, train, values, wave};
use crate::{DistributedOptimizer, ElasticState, broadcast_optimizer_state, broadcast_parameters};

#[test]
fn a_broadcast_of_the_optimizer_gives_all_ranks_its_moments() {
    for inner in [momentum as fn() -> ModuleOptimizer, || {
        AdamWConfig::new().init()
    }] {
        on_ranks(2, move |hvd| {
            // Only the root has trained; a rank that trains alone is a job of one here.
            let mut model = Net::of_waves();
            let mut optimizer = inner();
            if hvd.rank() == 1 {
                for step in 0..3 {
                    let loss = model.loss(wave(12, 8, step as f32));
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(0.05, model, gradients);
                }
            }
            let broadcast = broadcast_optimizer_state(hvd, &mut optimizer, &model, 1);
            let text = broadcast.unwrap_err().to_string();
            assert!(text.contains("call broadcast_parameters before"), "{text}");

            let model = broadcast_parameters(hvd, model, 1).unwrap();
            broadcast_optimizer_state(hvd, &mut optimizer, &model, 1).unwrap();
            let states = hvd.allgather(&state(&optimizer), 1).unwrap();
            let (one, other) = states.split_at(states.len() / 2);
            assert_eq!(one, other);
            // Nothing else is in the way of equal replicas, which depend on all of the state.
            let mut optimizer = DistributedOptimizer::new(hvd, optimizer);
            let bits = train(&mut optimizer, model, hvd, 3..6).bits();
            let all = hvd.allgather(&bits, 1).unwrap();
            assert_eq!(all[..bits.len()], all[bits.len()..]);
        });
    }
}

#[test]
fn running_means_are_not_in_the_way_of_the_optimizers_state() {
    on_ranks(2, |hvd| {
        let model = EveryType::of_rank(hvd.rank());
        let model = broadcast_parameters(hvd, model, 0).unwrap();
        broadcast_optimizer_state(hvd, &mut momentum(), &model, 0).unwrap();
    });
}

/// The state of an optimizer as a number: the record's tensors have no fixed order.
fn state(optimizer: &ModuleOptimizer) -> Vec<u8> {
    let bytes = optimizer.into_bytes().unwrap();
    let tensors = burn_pack::Reader::from_bytes(bytes).unwrap().into_tensors();
    let mut tensors: Vec<_> = tensors
        .unwrap()
        .into_iter()
        .map(|tensor| tensor.into_parts().unwrap())
        .map(|(name, _, _, _, bytes)| (name, bytes.to_vec()))
        .collect();
    assert!(!tensors.is_empty());
    tensors.sort();
    let all = tensors.into_iter();
    all.flat_map(|(name, bytes)| [name.into_bytes(), bytes].concat())
        .collect()
}

#[test]
fn an_elastic_state_is_restored_with_moments_and_ids() {
    let trained = on_ranks(1, |hvd| {
        let mut state = ElasticState {
            model: Net::of_waves(),
            optimizer: AdamWConfig::new().init(),
            progress: (3u32, "third".to_owned()),
        };
        let mut optimizer = DistributedOptimizer::new(hvd, state.optimizer.clone());
        state.model = train(&mut optimizer, state.model, hvd, 0..3);
        state.optimizer = optimizer.inner().clone();
        let saved = state.save().unwrap();
        // As a new rank has it: with other ids, and without moments.
        let mut new = ElasticState {
            model: Net::of_waves(),
            optimizer: AdamWConfig::new().init(),
            progress: (0, String::new()),
        };
        new.restore(&saved).unwrap();
        assert_eq!(new.progress, (3, "third".to_owned()));
        [state, new].map(|state| {
            let mut optimizer = DistributedOptimizer::new(hvd, state.optimizer);
            train(&mut optimizer, state.model, hvd, 3..6).bits()
        })
    });
    assert_eq!(trained[0][0], trained[0][1]);
}

#[test]
fn bytes_of_another_elastic_state_are_an_error_that_says_why() {
    fn state<M>(model: M) -> ElasticState<M, u32> {
        ElasticState {
            model,
            optimizer: sgd(),
            progress: 1,
        }
    }
    let saved = state(Three::of(&[1.0])).save().unwrap();
    let text = state(Three::of(&[1.0, 2.0])).restore(&saved).unwrap_err();
    let text = text.to_string();
    assert!(
        text.contains(
            r#""a" of type f32 and shape [1] was sent for "a" of type f32 and shape [2]"#
        ),
        "{text}"
    );
    let text = state(vec![param(&[1.0])]).restore(&saved).unwrap_err();
    assert!(text.to_string().contains(r#"they have no "0""#), "{text}");
    for len in [0, 5, 8, 20, saved.len() - 1] {
        let error = state(Three::of(&[1.0])).restore(&saved[..len]);
        assert!(error.unwrap_err().is_mistake(), "{len}");
    }
}

#[test]
fn a_parameter_at_two_places_stays_one_after_a_broadcast() {
    let gradients = on_ranks(2, |hvd| {
        let mut model = Three::of(&[hvd.rank() as f32 + 1.0]);
        model.b = model.a.clone();
        let model = broadcast_parameters(hvd, model, 0).unwrap();
        assert_eq!(model.first_values(), [1.0; 3]);
        let loss = model.a.val() * 2.0 + model.b.val() * 3.0;
        let gradients = GradientsParams::from_grads(loss.sum().backward(), &model);
        values(&gradients.get::<1>(model.b.id).unwrap())
    });
    assert_eq!(gradients, [[5.0], [5.0]]);
}

#[test]
fn optimizers_in_another_order_and_other_rates_are_an_error_on_all_ranks() {
    on_ranks(2, |hvd| {
        let mut optimizers = [(); 2].map(|()| DistributedOptimizer::new(hvd, sgd()));
        let mut step = |number: usize, rate: f64| {
            let model = Three::of(&[1.0]);
            let gradients = GradientsParams::from_grads(model.a.val().sum().backward(), &model);
            optimizers[number].step(rate, model, gradients).map(drop)
        };
        step(0, 1.0).unwrap();
        step(1, 1.0).unwrap();
        // Their rates differ as well, which follows from the order.
        let text = step(hvd.rank(), 1.0 + hvd.rank() as f64);
        let text = text.unwrap_err().to_string();
        assert!(
            text.contains("rank 0 reduces for optimizer number 0")
                && text.contains("rank 1 for optimizer number 1"),
            "{text}"
        );
        let rate = 1.0 + hvd.rank() as f64;
        let text = step(1, rate).unwrap_err().to_string();
        assert!(
            text.contains("rank 0 has learning rate 1.0, rank 1 has learning rate 2.0"),
            "{text}"
        );
        // The job goes on.
        step(1, 1.0).unwrap();
    });
}

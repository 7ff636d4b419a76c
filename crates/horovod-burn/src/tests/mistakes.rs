//! Mistakes of one rank: an error that names the rank on all of them, and nothing is reduced.

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::DType;
use horovod::Communicator;
use horovod::testing::{on_ranks, process_set};

use super::{Three, gradient, sgd};
use crate::parameters::all_done;
use crate::{DistributedOptimizer, Error, Result, broadcast_optimizer_state, broadcast_parameters};

/// Gradients for `a` of the model, by its id or another one.
fn gradients(id: ParamId, values: &[f32]) -> GradientsParams {
    let mut gradients = GradientsParams::new();
    gradients.register(id, gradient(values, DType::F32));
    gradients
}

#[track_caller]
fn check(error: &Error, rank: usize, cause: &str) {
    assert!(
        matches!(error, Error::OfRank { rank: found, .. } if *found == rank),
        "{error}"
    );
    let text = format!("rank {rank} cannot take part in this call: {cause}");
    assert!(error.to_string().starts_with(&text), "{error}");
}

/// The error of a step in which one rank makes a mistake. Then a step without one, which shows that the job goes on.
fn step_with_a_mistake(
    hvd: &Communicator,
    set: impl Fn(DistributedOptimizer) -> DistributedOptimizer,
    step: impl Fn(&mut DistributedOptimizer, &Three) -> Result<Three>,
) -> Error {
    let model = Three::of(&[5.0]);
    let error = step(&mut set(DistributedOptimizer::new(hvd, sgd())), &model).unwrap_err();
    let stepped = DistributedOptimizer::new(hvd, sgd())
        .step(1.0, model.clone(), gradients(model.a.id, &[1.0]))
        .unwrap();
    assert_eq!(stepped.first_values(), [4.0, 5.0, 5.0]);
    error
}

const UNFIT: &str = r#"the gradient of "a" is of type f32 and shape [2]; expected"#;

#[test]
fn a_gradient_that_does_not_fit_is_an_error_on_all_ranks() {
    on_ranks(3, |hvd| {
        let values: &[f32] = if hvd.rank() == 1 { &[1.0, 2.0] } else { &[1.0] };
        let step = |optimizer: &mut DistributedOptimizer, model: &Three| {
            optimizer.step(1.0, model.clone(), gradients(model.a.id, values))
        };
        check(&step_with_a_mistake(hvd, |new| new, step), 1, UNFIT);

        let of_another_model = |optimizer: &mut DistributedOptimizer, model: &Three| {
            let id = if hvd.rank() == 1 {
                ParamId::new()
            } else {
                model.a.id
            };
            optimizer.step(1.0, model.clone(), gradients(id, &[1.0]))
        };
        let error = step_with_a_mistake(hvd, |new| new, of_another_model);
        check(&error, 1, "gradients that belong to no trained parameter");

        // The rank is that of the job.
        let set = process_set(hvd, &[0, 2]).unwrap();
        if let Some(hvd) = set.communicator() {
            let values: &[f32] = if hvd.rank() == 1 { &[1.0, 2.0] } else { &[1.0] };
            let step = |optimizer: &mut DistributedOptimizer, model: &Three| {
                optimizer.step(1.0, model.clone(), gradients(model.a.id, values))
            };
            check(&step_with_a_mistake(hvd, |new| new, step), 2, UNFIT);
        }
    });
}

#[test]
fn a_mistake_in_an_earlier_pass_is_an_error_of_the_last_one_on_all_ranks() {
    on_ranks(2, |hvd| {
        let passes = |new: DistributedOptimizer| new.backward_passes_per_step(3);
        let step = |optimizer: &mut DistributedOptimizer, model: &Three| {
            let wrong: &[f32] = if hvd.rank() == 1 { &[1.0, 2.0] } else { &[1.0] };
            for values in [&[1.0], wrong] {
                let passed = optimizer.reduce(model, gradients(model.a.id, values))?;
                assert!(passed.is_none());
            }
            optimizer.step(1.0, model.clone(), gradients(model.a.id, &[1.0]))
        };
        check(&step_with_a_mistake(hvd, passes, step), 1, UNFIT);
    });
}

#[test]
fn a_setting_without_a_meaning_is_an_error_on_all_ranks() {
    on_ranks(2, |hvd| {
        let groups = |new: DistributedOptimizer| new.groups(1 - hvd.rank());
        let step = |optimizer: &mut DistributedOptimizer, model: &Three| {
            optimizer.step(1.0, model.clone(), gradients(model.a.id, &[1.0]))
        };
        let error = step_with_a_mistake(hvd, groups, step);
        check(&error, 1, "groups was set to 0");
    });
}

#[test]
fn a_root_that_only_one_rank_can_refuse_is_an_error_on_all() {
    on_ranks(2, |hvd| {
        let root = if hvd.rank() == 1 { 7 } else { 0 };
        let expected = "rank 0 has root 0, rank 1 has root 7";
        let model = Three::of(&[hvd.rank() as f32]);
        let error = broadcast_parameters(hvd, model.clone(), root).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        let model = broadcast_parameters(hvd, model, 0).unwrap();
        assert_eq!(model.first_values(), [0.0; 3]);
        let mut optimizer = sgd();
        let error = broadcast_optimizer_state(hvd, &mut optimizer, &model, root).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        broadcast_optimizer_state(hvd, &mut optimizer, &model, 1).unwrap();
    });
}

#[test]
fn a_rank_that_cannot_read_what_it_received_is_an_error_on_all() {
    on_ranks(2, |hvd| {
        let own = match hvd.rank() {
            1 => Err(Error::Burn("unreadable".into())),
            rank => Ok(rank),
        };
        check(&all_done(hvd, "read", own).unwrap_err(), 1, "unreadable");
        assert_eq!(all_done(hvd, "read", Ok(hvd.rank())).unwrap(), hvd.rank());
    });
}

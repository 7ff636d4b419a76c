//! Mistakes of one rank: an error that names the rank on all of them, and nothing is reduced.

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use candle_nn::SGD;
use horovod::Communicator;
use horovod::testing::{on_ranks, process_set};

use super::{named, sgd, tensor, values, var};
use crate::{DistributedOptimizer, Error, Result, broadcast_parameters};

/// Gradients of ones for `a`, or such that do not fit it.
fn gradients(a: &Var, fit: bool) -> GradStore {
    let mut gradients = GradStore::default();
    gradients.insert(a, tensor(if fit { &[1.0] } else { &[1.0, 2.0] }));
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

/// The error of a step in which one rank makes a mistake. Then a step without one, which shows that the job goes on and
/// that nothing was reduced before.
fn step_with_a_mistake(
    hvd: &Communicator,
    set: impl Fn(DistributedOptimizer<SGD>) -> DistributedOptimizer<SGD>,
    step: impl Fn(&mut DistributedOptimizer<SGD>, &Var) -> Result<bool>,
) -> Error {
    let (a, b) = (var(&[5.0]), var(&[7.0]));
    let both = named(&[("a", &a), ("b", &b)]);
    let new = || DistributedOptimizer::new(hvd, sgd(&both), &both).unwrap();
    let error = step(&mut set(new()), &a).unwrap_err();
    assert_eq!((values(&a), values(&b)), (vec![5.0], vec![7.0]));
    assert!(new().step(gradients(&a, true)).unwrap());
    assert_eq!((values(&a), values(&b)), (vec![4.0], vec![7.0]));
    error
}

const UNFIT: &str = r#"the gradient of "a" is of type f32 and shape [2]; expected"#;

#[test]
fn a_gradient_that_does_not_fit_is_an_error_on_all_ranks() {
    on_ranks(3, |hvd| {
        let is_wrong = hvd.rank() == 1;
        let step = |optimizer: &mut DistributedOptimizer<SGD>, a: &Var| {
            optimizer.step(gradients(a, !is_wrong))
        };
        check(&step_with_a_mistake(hvd, |new| new, step), 1, UNFIT);

        let of_another_type = |optimizer: &mut DistributedOptimizer<SGD>, a: &Var| {
            let mut gradients = GradStore::default();
            let dtype = if is_wrong { DType::F64 } else { DType::F32 };
            gradients.insert(a, Tensor::zeros(1, dtype, &Device::Cpu)?);
            optimizer.step(gradients)
        };
        let error = step_with_a_mistake(hvd, |new| new, of_another_type);
        check(&error, 1, r#"the gradient of "a" is of type f64"#);

        // The rank is that of the job.
        let set = process_set(hvd, &[0, 2]).unwrap();
        if let Some(hvd) = set.communicator() {
            let step = |optimizer: &mut DistributedOptimizer<SGD>, a: &Var| {
                optimizer.step(gradients(a, hvd.rank() == 0))
            };
            check(&step_with_a_mistake(hvd, |new| new, step), 2, UNFIT);
        }
    });
}

#[test]
fn a_mistake_in_an_earlier_pass_is_an_error_of_the_last_one_on_all_ranks() {
    on_ranks(2, |hvd| {
        let passes = |new: DistributedOptimizer<SGD>| new.backward_passes_per_step(3);
        let step = |optimizer: &mut DistributedOptimizer<SGD>, a: &Var| {
            assert!(!optimizer.step(gradients(a, true))?);
            assert!(!optimizer.step(gradients(a, hvd.rank() == 0))?);
            optimizer.step(gradients(a, true))
        };
        check(&step_with_a_mistake(hvd, passes, step), 1, "shape mismatch");
    });
}

#[test]
fn a_setting_without_a_meaning_is_an_error_on_all_ranks() {
    on_ranks(2, |hvd| {
        let is_wrong = hvd.rank() == 1;
        let step =
            |optimizer: &mut DistributedOptimizer<SGD>, a: &Var| optimizer.step(gradients(a, true));
        let groups = |new: DistributedOptimizer<SGD>| new.groups(usize::from(!is_wrong));
        check(
            &step_with_a_mistake(hvd, groups, step),
            1,
            "groups was set to 0",
        );
        let norm =
            |new: DistributedOptimizer<SGD>| new.max_norm(if is_wrong { f64::NAN } else { 1.0 });
        let error = step_with_a_mistake(hvd, norm, step);
        check(&error, 1, "the norm of gradients was limited to NaN");
    });
}

/// An operation whose gradient nobody has written.
struct NoGradient;

impl CustomOp1 for NoGradient {
    fn name(&self) -> &'static str {
        "no-gradient"
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }
}

#[test]
fn a_backward_pass_that_fails_on_one_rank_is_an_error_on_all() {
    on_ranks(2, |hvd| {
        let step = |optimizer: &mut DistributedOptimizer<SGD>, a: &Var| {
            let loss = match hvd.rank() {
                1 => a.apply_op1(NoGradient)?,
                _ => a.sqr()?,
            };
            optimizer.backward_step(&loss.sum_all()?)
        };
        let error = step_with_a_mistake(hvd, |new| new, step);
        check(&error, 1, "backward is not supported for no-gradient");
    });
}

#[test]
fn parameters_that_one_rank_cannot_send_are_an_error_of_the_broadcast_on_all() {
    on_ranks(2, |hvd| {
        let (a, b) = (var(&[hvd.rank() as f32]), var(&[2.0]));
        let twins = named(&[("a", &a), (if hvd.rank() == 1 { "a" } else { "b" }, &b)]);
        let error = broadcast_parameters(hvd, &twins, 0).unwrap_err();
        check(&error, 1, r#"two parameters are named "a""#);
        assert_eq!(values(&a), [hvd.rank() as f32]);

        let eight = Tensor::zeros(1, DType::F8E4M3, &Device::Cpu).unwrap();
        let eight = named(&[("a", &Var::from_tensor(&eight).unwrap())]);
        let fit = named(&[("a", &a)]);
        let parameters = if hvd.rank() == 1 { &eight } else { &fit };
        let error = broadcast_parameters(hvd, parameters, 0).unwrap_err();
        check(
            &error,
            1,
            r#"parameter "a" is of type f8e4m3, which cannot be sent"#,
        );

        // A root that only this rank can refuse.
        let root = if hvd.rank() == 1 { 7 } else { 0 };
        let error = broadcast_parameters(hvd, &fit, root).unwrap_err();
        let text = "rank 0 has root 0, rank 1 has root 7";
        assert!(error.to_string().contains(text), "{error}");
        broadcast_parameters(hvd, &fit, 0).unwrap();
        assert_eq!(values(&a), [0.0]);
    });
}

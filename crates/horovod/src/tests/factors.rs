//! Reductions with factors.

use super::is_disagreement;
use crate::Error;
use crate::ReduceOp::{Average, Max, Sum};
use crate::testing::on_ranks;

#[test]
fn factors_are_applied_before_and_after_in_every_call_that_reduces() {
    on_ranks(2, |hvd| {
        let both = Sum.prescaled(0.5).postscaled(3.0);
        assert_eq!(hvd.allreduce(&[1.0f32, 2.0], both).unwrap(), [3.0, 6.0]);
        assert_eq!(
            hvd.allreduce(&[4.0f64], Average.postscaled(0.5)).unwrap(),
            [2.0]
        );
        let (mut a, mut b) = ([1.0f64], [2.0f64, 3.0]);
        hvd.grouped_allreduce_in_place(&mut [&mut a, &mut b], Sum.prescaled(10.0))
            .unwrap();
        assert_eq!((a, b), ([20.0], [40.0, 60.0]));
        let share = hvd.reduce_scatter(&[1.0f32, 2.0], 1, both).unwrap();
        assert_eq!(share, [[3.0], [6.0]][hvd.rank()]);
        let later = hvd.allreduce_async(vec![1.0f32], both);
        let share = hvd.reduce_scatter_async(vec![1.0f32, 2.0], 1, both);
        assert_eq!(later.wait().unwrap(), [3.0]);
        assert_eq!(share.wait().unwrap(), [[3.0], [6.0]][hvd.rank()]);
        let (mut c, mut d) = ([1.0f32], [2.0f32]);
        hvd.scope(|s| {
            s.allreduce_in_place(&mut c, both);
            s.grouped_allreduce_in_place([&mut d[..]], both);
        })
        .unwrap();
        assert_eq!((c, d), ([3.0], [6.0]));
    });
}

#[test]
fn integers_are_truncated_once_by_each_factor_and_the_last_factor_counts() {
    on_ranks(2, |hvd| {
        assert_eq!(hvd.allreduce(&[3i32], Sum.prescaled(0.5)).unwrap(), [2]);
        assert_eq!(hvd.allreduce(&[3i32], Sum.postscaled(0.5)).unwrap(), [3]);
        let again = Sum.prescaled(7.0).prescaled(1.0);
        assert_eq!(again, Sum.into());
        assert_eq!(hvd.allreduce(&[3i32], again).unwrap(), [6]);
    });
}

#[test]
fn factors_without_a_meaning_or_that_differ_are_refused() {
    on_ranks(2, |hvd| {
        let own = Sum.prescaled(1.0 + hvd.rank() as f64);
        let error = hvd.allreduce(&[1.0f32], own).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("rank 0 passed factors (1, 1), rank 1 passed factors (2, 1)"),
            "{error}"
        );
        is_disagreement(hvd.reduce_scatter(&[1.0f32, 2.0], 1, own));
        for factor in [f64::NAN, f64::INFINITY] {
            let reductions = [Sum.prescaled(factor), Sum.postscaled(factor)];
            for reduction in reductions {
                let mut values = [1.0f32];
                let scope = hvd.scope(|s| s.allreduce_in_place(&mut values, reduction));
                for result in [
                    hvd.allreduce(&[1.0f32], reduction).map(drop),
                    hvd.grouped_allreduce(&[&[1.0f32][..]], reduction).map(drop),
                    hvd.reduce_scatter(&[1.0f32], 1, reduction).map(drop),
                    hvd.allreduce_async(vec![1.0f32], reduction)
                        .wait()
                        .map(drop),
                    scope,
                ] {
                    let error = result.unwrap_err();
                    assert!(error.to_string().contains("pass finite numbers"), "{error}");
                }
            }
        }
        let error = hvd.allreduce(&[true], Max.prescaled(2.0)).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
        assert_eq!(hvd.allreduce(&[1], Sum).unwrap(), [2]);
    });
}

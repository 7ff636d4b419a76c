//! One rank alone, which needs no other and no shared memory: Miri can run it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{block_on, on_ranks};
use crate::Error;
use crate::ReduceOp::{Average, Max, Sum};

/// All ways in which memory is passed to the engine.
#[test]
fn one_rank_uses_every_kind_of_memory() {
    on_ranks(1, |hvd| {
        assert_eq!(hvd.allreduce(&[1.5f32, 2.0], Sum).unwrap(), [1.5, 2.0]);
        assert_eq!(hvd.allreduce(&[true, false], Max).unwrap(), [true, false]);
        assert_eq!(hvd.allgather(&[true, false], 1).unwrap(), [true, false]);
        assert_eq!(hvd.allgather::<u8>(&[], 3).unwrap(), [0; 0]);
        assert_eq!(hvd.alltoall(&[1u16, 2], 2, None).unwrap().values, [1, 2]);
        assert_eq!(hvd.reduce_scatter(&[1i64, 2], 1, Sum).unwrap(), [1, 2]);
        let (mut a, mut b, mut c) = ([1u8], vec![2.0f64; 3], [true]);
        hvd.grouped_allreduce_in_place(&mut [&mut b, &mut []], Average)
            .unwrap();
        hvd.scope(|s| {
            s.named("a").allreduce_in_place(&mut a, Sum);
            s.named("b").broadcast_in_place(&mut b, 0);
            s.grouped_allreduce_in_place([&mut c[..]], Sum);
        })
        .unwrap();
        assert_eq!((a, b, c), ([1], vec![2.0; 3], [true]));
        drop(hvd.allreduce_async(vec![1u32; 10], Sum));
        let kept = hvd.allgather_async(vec![1i8; 4], 2);
        assert_eq!(
            block_on(hvd.allreduce_async(vec![true], Sum)).unwrap(),
            [true]
        );
        assert_eq!(kept.wait().unwrap(), [1; 4]);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            let mut values = vec![1.0f32; 8];
            hvd.scope(|s| {
                s.allreduce_in_place(&mut values, Sum);
                panic!("on purpose");
            })
        }));
        assert!(panic.is_err());
        assert_eq!(hvd.allreduce(&[1], Sum), Err(Error::Closed));
    });
}

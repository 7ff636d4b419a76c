//! The operations on one to three ranks, each a thread of this process with an engine of its own.

mod bad_input;
mod comparison;
mod factors;
mod one_rank;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use crate::ReduceOp::{Adasum, Average, Max, Min, Product, Sum};
use crate::process_set::ProcessSet;
use crate::testing::{LIMIT, on_ranks};
use crate::{Communicator, Element, Error, Pending, Reduce};

/// Drives a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park_timeout(LIMIT);
    }
}

#[track_caller]
fn is_disagreement<T>(result: crate::Result<T>) {
    let error = result.err().expect("the ranks disagree");
    assert!(matches!(error, Error::Disagreement { .. }), "{error}");
    assert!(error.is_mistake() && !error.is_lost());
}

#[test]
fn reductions_are_right_on_every_rank_and_out_of_place_leaves_the_input() {
    for size in [1, 2, 3] {
        let results = on_ranks(size, |hvd| {
            let mine = [hvd.rank() as f64 + 1.0, 2.0];
            let mut results = Vec::new();
            for op in [Sum, Average, Min, Max, Product] {
                results.push(hvd.allreduce(&mine, op).unwrap());
            }
            assert_eq!(mine, [hvd.rank() as f64 + 1.0, 2.0]);
            results
        });
        let n = size as f64;
        let sum = n * (n + 1.0) / 2.0;
        let product: f64 = (1..=size).map(|r| r as f64).product();
        let expected = vec![
            vec![sum, 2.0 * n],
            vec![sum / n, 2.0],
            vec![1.0, 2.0],
            vec![n, 2.0],
            vec![product, 2.0f64.powi(size as i32)],
        ];
        assert_eq!(results, vec![expected; size]);
    }
}

#[test]
fn every_element_type_is_reduced_gathered_and_copied() {
    fn check<T: Reduce + From<u8>>(hvd: &Communicator) {
        let one = [T::from(1u8), T::from(2u8)];
        let (two, four) = (T::from(2u8), T::from(4u8));
        assert_eq!(hvd.allreduce(&one, Sum).unwrap(), [two, four]);
        let mine = [T::from(hvd.rank() as u8)];
        assert_eq!(
            hvd.allgather(&mine, 1).unwrap(),
            [T::from(0u8), T::from(1u8)]
        );
        assert_eq!(hvd.broadcast(&mine, 1).unwrap(), [T::from(1u8)]);
    }
    on_ranks(2, |hvd| {
        check::<u8>(hvd);
        check::<u16>(hvd);
        check::<i16>(hvd);
        check::<u32>(hvd);
        check::<i32>(hvd);
        check::<u64>(hvd);
        check::<i64>(hvd);
        check::<f32>(hvd);
        check::<f64>(hvd);
        assert_eq!(hvd.allreduce(&[-3i8], Sum).unwrap(), [-6]);
        let mine = [hvd.rank() == 0, true, false];
        assert_eq!(hvd.allreduce(&mine, Sum).unwrap(), [true, true, false]);
        assert_eq!(hvd.allreduce(&mine, Product).unwrap(), [false, true, false]);
        assert_eq!(hvd.broadcast(&mine, 1).unwrap(), [false, true, false]);
        assert_eq!(hvd.allgather(&mine[..1], 1).unwrap(), [true, false]);
        assert!(matches!(
            hvd.allreduce(&mine, Average),
            Err(Error::Invalid { .. })
        ));
        assert!(matches!(
            hvd.allreduce(&[1i32], Adasum),
            Err(Error::Invalid { .. })
        ));
    });
}

#[cfg(feature = "half")]
#[test]
fn half_types_are_reduced() {
    on_ranks(2, |hvd| {
        let three = half::f16::from_f32(1.5);
        let sum = hvd.allreduce(&[three], Sum).unwrap();
        assert_eq!(sum, [half::f16::from_f32(3.0)]);
        let two = hvd.allreduce(&[half::bf16::ONE], Sum).unwrap();
        assert_eq!(two, [half::bf16::from_f32(2.0)]);
    });
}

#[test]
fn groups_reduce_slices_of_different_lengths_also_empty_ones() {
    on_ranks(3, |hvd| {
        let mut short = [1i64];
        let mut long = vec![2i64; 1000];
        let mut none: [i64; 0] = [];
        hvd.grouped_allreduce_in_place(&mut [&mut short, &mut long, &mut none], Sum)
            .unwrap();
        assert_eq!((short[0], long[999]), (3, 6));
        assert_eq!(
            hvd.grouped_allreduce(&[&[1u8][..], &[2, 3]], Max).unwrap(),
            [vec![1], vec![2, 3]]
        );
        hvd.grouped_allreduce_in_place::<f32>(&mut [], Sum).unwrap();
        assert_eq!(hvd.allreduce::<f32>(&[], Sum).unwrap(), [0.0; 0]);
    });
}

#[test]
fn uneven_rows_are_gathered_exchanged_and_scattered() {
    on_ranks(3, |hvd| {
        let rank = hvd.rank();
        let gathered = hvd.allgather(&vec![rank as u16; 2 * rank], 2).unwrap();
        assert_eq!(gathered, [1, 1, 2, 2, 2, 2]);
        // Rank r sends r + 1 rows to rank 0, none to rank 1, one to rank 2.
        let mine = vec![rank as f32; 2 * (rank + 2)];
        let received = hvd.alltoall(&mine, 2, Some(&[rank + 1, 0, 1])).unwrap();
        let expected = [vec![1, 2, 3], vec![0, 0, 0], vec![1, 1, 1]];
        assert_eq!(received.rows, expected[rank]);
        assert_eq!(
            received.values.len(),
            2 * expected[rank].iter().sum::<usize>()
        );
        if rank == 2 {
            assert_eq!(received.values, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
        }
        let share = hvd
            .reduce_scatter(&[1, 2, 3, 4, 5, 6, 7, 8], 2, Sum)
            .unwrap();
        assert_eq!(share, [vec![3, 6, 9, 12], vec![15, 18], vec![21, 24]][rank]);
    });
}

#[test]
fn calls_with_names_pair_whatever_their_order() {
    on_ranks(2, |hvd| {
        let order = if hvd.rank() == 0 {
            ["a", "b"]
        } else {
            ["b", "a"]
        };
        let begin = |name: &str| {
            let factor = if name == "a" { 1 } else { 10 };
            hvd.named(name).allreduce_async(vec![factor], Sum)
        };
        let [first, second] = order.map(begin);
        let [first, second] = [first.wait().unwrap()[0], second.wait().unwrap()[0]];
        assert_eq!(
            [first, second],
            if hvd.rank() == 0 { [2, 20] } else { [20, 2] }
        );
    });
}

#[test]
fn a_scope_fills_borrowed_slices_and_gives_the_result_of_its_closure() {
    on_ranks(3, |hvd| {
        let mut a = vec![1.0f32; 5000];
        let mut b = [hvd.rank() as u8];
        let (mut c, mut d) = (vec![true, false], vec![hvd.rank() == 1, false]);
        let result = hvd.scope(|s| {
            s.named("a").allreduce_in_place(&mut a, Sum);
            s.broadcast_in_place(&mut b, 2);
            s.grouped_allreduce_in_place([&mut c[..], &mut d[..]], Sum);
            7
        });
        assert_eq!(result.unwrap(), 7);
        assert_eq!((a[4999], b), (3.0, [2]));
        assert_eq!((c, d), (vec![true, false], vec![true, false]));
    });
}

#[test]
fn a_scope_gives_its_first_error_and_waits_for_the_rest() {
    on_ranks(2, |hvd| {
        let (mut a, mut b) = (vec![1; 1 + hvd.rank()], [1]);
        is_disagreement(hvd.scope(|s| {
            s.allreduce_in_place(&mut a, Sum);
            s.named("b").allreduce_in_place(&mut b, Sum);
        }));
        assert_eq!(b, [2]);
        let mut c = [1];
        let error = hvd.scope(|s| s.broadcast_in_place(&mut c, 2)).unwrap_err();
        assert!(error.to_string().contains("from rank 2"), "{error}");
    });
}

#[test]
fn futures_are_driven_by_any_executor_and_may_be_dropped() {
    on_ranks(2, |hvd| {
        let size = hvd.size() as u32;
        drop(hvd.allreduce_async(vec![1u8; 100_000], Sum));
        std::mem::forget(hvd.allreduce_async(vec![1u8; 100_000], Sum));
        let sum = block_on(hvd.allreduce_async(vec![1u32; 3], Sum)).unwrap();
        assert_eq!(sum, vec![size; 3]);
        let both = block_on(async {
            let a = hvd.allgather_async(vec![hvd.rank() as u32], 1);
            let b = hvd.reduce_scatter_async(vec![true, false], 1, Sum);
            let c = hvd.alltoall_async(vec![hvd.rank() as f32; 2], 1, None);
            let d = hvd.broadcast_async(vec![hvd.rank() as i8; 2], 1);
            (
                a.await.unwrap(),
                b.await.unwrap(),
                c.await.unwrap().values,
                d.await.unwrap(),
            )
        });
        let scattered = vec![hvd.rank() == 0];
        assert_eq!(both, (vec![0, 1], scattered, vec![0.0, 1.0], vec![1, 1]));
    });
}

#[test]
fn a_future_that_has_given_its_result_gives_an_error_and_no_panic() {
    on_ranks(1, |hvd| {
        let mut pending = pin!(hvd.allreduce_async(vec![1u32], Sum));
        assert_eq!(block_on(pending.as_mut()).unwrap(), [1]);
        assert!(matches!(block_on(pending), Err(Error::Invalid { .. })));
    });
}

#[test]
fn a_process_set_has_operations_and_ranks_of_its_own() {
    on_ranks(3, |hvd| {
        let set = ProcessSet::add(hvd, &[2, 1]).unwrap();
        assert_eq!(set.members(), [1, 2]);
        let twin = ProcessSet::add(hvd, &[1, 2]).unwrap_err();
        assert!(
            twin.to_string().contains("of the same ranks already"),
            "{twin}"
        );
        if hvd.rank() == 0 {
            assert!(set.communicator().is_none());
        } else {
            let pair = set.communicator().unwrap().clone();
            assert_eq!((pair.rank(), pair.size()), (hvd.rank() - 1, 2));
            assert_eq!(
                pair.broadcast(&[hvd.rank()].map(|r| r as u64), 1).unwrap(),
                [2]
            );
            assert_eq!(pair.allgather(&[pair.rank() as u8], 1).unwrap(), [0, 1]);
            pair.barrier().unwrap();
        }
        let after = set.communicator().cloned();
        set.remove().unwrap();
        if let Some(pair) = after {
            let error = pair.allreduce(&[1], Sum).unwrap_err();
            assert!(error.is_mistake(), "{error}");
        }
    });
}

#[test]
fn threads_share_a_communicator() {
    on_ranks(2, |hvd| {
        std::thread::scope(|threads| {
            for thread in 0..4u64 {
                threads.spawn(move || {
                    let hvd = hvd.named(&format!("of thread {thread}"));
                    for step in 0..20 {
                        let sum = hvd.allreduce(&[thread * step], Sum).unwrap();
                        assert_eq!(sum, [2 * thread * step]);
                    }
                });
            }
        });
    });
}

#[test]
fn types_may_be_sent_to_threads() {
    fn is_send_and_sync<T: Send + Sync>() {}
    fn elements<T: Element>() {
        is_send_and_sync::<Pending<Vec<T>>>();
        is_send_and_sync::<T>();
    }
    elements::<f32>();
    is_send_and_sync::<Communicator>();
    is_send_and_sync::<crate::Horovod>();
    is_send_and_sync::<ProcessSet>();
    is_send_and_sync::<crate::Scope<'_, '_>>();
    is_send_and_sync::<Error>();
}

#[test]
fn an_error_prints_a_sentence_also_from_main() {
    let lost = Error::Lost {
        rank: 1,
        host: "h".into(),
        cause: "its process ended".into(),
    };
    let text = "Horovod lost a member of the job: rank 1 on host h: its process ended";
    assert_eq!(
        (lost.to_string(), format!("{lost:?}")),
        (text.into(), text.into())
    );
    assert!(lost.is_lost() && !lost.is_mistake());
}

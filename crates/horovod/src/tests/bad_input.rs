//! Mistakes and endings: each is an error or a defined end on every rank.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Wake, Waker};

use super::{block_on, is_disagreement};
use crate::ReduceOp::{Max, Sum};
use crate::process_set::ProcessSet;
use crate::testing::{LIMIT, on_ranks};
use crate::{Communicator, Error, Pending};

#[test]
fn a_panic_in_a_scope_ends_the_job_and_nobody_waits_for_ever() {
    let results = on_ranks(2, |hvd| {
        let mut values = [1.0f32];
        if hvd.rank() == 1 {
            let panic = catch_unwind(AssertUnwindSafe(|| {
                hvd.scope(|s| {
                    s.named("never on the other")
                        .allreduce_in_place(&mut values, Sum);
                    panic!("on purpose");
                })
            }));
            assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"on purpose"));
            // The borrow has ended: the slice may be used.
            values[0] += 1.0;
            assert!(values[0] >= 2.0);
            assert_eq!(hvd.barrier(), Err(Error::Closed));
            return String::new();
        }
        let error = hvd
            .named("of this one")
            .allreduce_in_place(&mut values, Sum)
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Left {
                    rank: 1,
                    failed: true
                }
            ),
            "{error}"
        );
        format!("{error:?}")
    });
    assert!(
        results[0].contains("the program of rank 1 has failed"),
        "{results:?}"
    );
}

#[test]
fn a_waker_that_waits_gets_an_error() {
    /// Waits in the waker, and tells what came of it.
    struct Waits(Communicator, mpsc::Sender<[Option<Error>; 3]>);
    impl Wake for Waits {
        fn wake(self: Arc<Self>) {
            let mut value = [1.0f32];
            let errors = [
                self.0.barrier().err(),
                self.0.allreduce_in_place(&mut value, Sum).err(),
                self.0
                    .named("third")
                    .allreduce_async(vec![1u64], Sum)
                    .wait()
                    .err(),
            ];
            let _ = self.1.send(errors);
        }
    }
    on_ranks(2, |hvd| {
        if hvd.rank() == 1 {
            hvd.barrier().unwrap();
            let first = hvd.named("first").allreduce_async(vec![1u8], Sum);
            let third = hvd.named("third").allreduce_async(vec![1u64], Sum);
            assert_eq!(
                (first.wait().unwrap(), third.wait().unwrap()),
                (vec![2], vec![2])
            );
            return;
        }
        let (done, errors) = mpsc::channel();
        let waker = Waker::from(Arc::new(Waits(hvd.clone(), done)));
        let mut pending = pin!(hvd.named("first").allreduce_async(vec![1u8], Sum));
        let polled = pending.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        hvd.barrier().unwrap();
        let [first, second, third] = errors.recv_timeout(LIMIT).unwrap();
        assert_eq!(
            (first, second),
            (Some(Error::InCallback), Some(Error::InCallback))
        );
        assert!(third.is_none_or(|error| error == Error::InCallback));
    });
}

#[test]
fn ranks_that_disagree_get_both_sides_and_go_on() {
    let errors = on_ranks(2, |hvd| {
        let rank = hvd.rank();
        is_disagreement(hvd.allreduce_in_place(&mut vec![1.0f32; 4 + rank], Sum));
        is_disagreement(hvd.allreduce(&[1], if rank == 0 { Sum } else { Max }));
        is_disagreement(hvd.broadcast(&[1], rank));
        is_disagreement(hvd.allgather(&[1, 2, 3, 4], 2 + 2 * rank));
        is_disagreement(match rank {
            0 => hvd.allreduce(&[1.0f32], Sum).map(drop),
            _ => hvd.allreduce(&[1.0f64], Sum).map(drop),
        });
        is_disagreement(hvd.grouped_allreduce(&vec![&[1][..]; 1 + rank], Sum));
        assert_eq!(hvd.allreduce(&[1], Sum).unwrap(), [2]);
        hvd.named("w")
            .allreduce(&vec![1.0f32; 4 + rank], Sum)
            .unwrap_err()
            .to_string()
    });
    let text = "the ranks disagree about \"allreduce.w\": rank 0 passed shape [4], rank 1 passed shape [5]";
    assert_eq!(errors, [text, text]);
}

#[test]
fn a_name_that_is_under_way_is_refused_and_the_first_goes_on() {
    on_ranks(2, |hvd| {
        let named = hvd.named("x");
        // Rank 1 comes later, so that rank 0's first is surely under way.
        if hvd.rank() == 1 {
            hvd.named("may come").broadcast(&[0u8], 0).unwrap();
            assert_eq!(named.allreduce(&[1], Sum).unwrap(), [2]);
            return;
        }
        let first: Pending<_> = named.allreduce_async(vec![1], Sum);
        let name = "allreduce.x".to_owned();
        let second = named.allreduce(&[1], Sum);
        assert_eq!(second, Err(Error::NameInUse { name: name.clone() }));
        let mut values = [1];
        let third = hvd.scope(|s| s.named("x").allreduce_in_place(&mut values, Sum));
        assert_eq!(third, Err(Error::NameInUse { name }));
        hvd.named("may come").broadcast(&[0u8], 0).unwrap();
        assert_eq!(first.wait().unwrap(), [2]);
    });
}

#[test]
fn arguments_without_a_meaning_are_refused_before_anything_is_sent() {
    on_ranks(2, |hvd| {
        for (result, text) in [
            (
                hvd.allgather(&[1, 2, 3], 0).map(drop),
                "a row of 0 elements",
            ),
            (
                hvd.allgather(&[1, 2, 3], 2).map(drop),
                "3 elements has no whole number of rows of 2",
            ),
            (
                hvd.broadcast(&[1], 2).map(drop),
                "from rank 2 was asked for, among 2 ranks",
            ),
            (
                hvd.alltoall(&[1, 2, 3], 1, None).map(drop),
                "3 rows cannot be sent in equal numbers",
            ),
            (
                hvd.alltoall(&[1, 2], 1, Some(&[1])).map(drop),
                "rows for each rank are [1]",
            ),
            (
                hvd.alltoall(&[1, 2], 1, Some(&[1, 2])).map(drop),
                "whose sum is 2",
            ),
            (
                hvd.alltoall(&[1], 1, Some(&[usize::MAX, 2])).map(drop),
                "whose sum is 1",
            ),
            (
                hvd.reduce_scatter(&[1], 1, Max).map(drop),
                "it has Average and Sum",
            ),
            (
                ProcessSet::add(hvd, &[]).map(drop),
                "the ranks [] was asked for",
            ),
            (
                ProcessSet::add(hvd, &[0, 0]).map(drop),
                "different ranks below 2",
            ),
            (
                ProcessSet::add(hvd, &[0, 2]).map(drop),
                "different ranks below 2",
            ),
        ] {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Invalid { .. }), "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
        assert_eq!(hvd.allreduce(&[1], Sum).unwrap(), [2]);
    });
}

#[test]
fn calls_after_the_end_of_the_job_are_errors() {
    on_ranks(1, |hvd| {
        hvd.engine.shutdown();
        assert_eq!(hvd.allreduce(&[1], Sum), Err(Error::Closed));
        assert_eq!(hvd.barrier(), Err(Error::Closed));
        assert_eq!(hvd.allreduce_async(vec![1], Sum).wait(), Err(Error::Closed));
        let mut values = [1];
        let scope = hvd.scope(|s| s.allreduce_in_place(&mut values, Sum));
        assert_eq!(scope, Err(Error::Closed));
    });
}

#[test]
fn a_future_dropped_half_way_still_takes_part_and_its_waker_is_let_go() {
    /// Does nothing, and reports when nobody has it any more.
    struct Reports(mpsc::Sender<()>);
    impl Wake for Reports {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for Reports {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }
    on_ranks(2, |hvd| {
        if hvd.rank() == 1 {
            hvd.barrier().unwrap();
            let sum = hvd.named("dropped").allreduce(&[1u8; 1000], Sum).unwrap();
            assert_eq!(sum, [2; 1000]);
            return;
        }
        let (dropped, was_dropped) = mpsc::channel();
        let waker = Waker::from(Arc::new(Reports(dropped)));
        let mut pending = Box::pin(hvd.named("dropped").allreduce_async(vec![1u8; 1000], Sum));
        let polled = pending.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        drop((pending, waker));
        // The name is in use until the operation has ended.
        let again = hvd.named("dropped").allreduce(&[1u8; 1000], Sum);
        assert!(matches!(again, Err(Error::NameInUse { .. })));
        hvd.barrier().unwrap();
        was_dropped.recv_timeout(LIMIT).unwrap();
    });
}

#[test]
fn while_a_waker_blocks_calls_go_on_and_only_futures_wait() {
    /// Blocks until it is released, as an executor's waker must not.
    struct Blocks(mpsc::Sender<()>, Mutex<mpsc::Receiver<()>>);
    impl Wake for Blocks {
        fn wake(self: Arc<Self>) {
            self.0.send(()).unwrap();
            self.1.lock().unwrap().recv_timeout(LIMIT).unwrap();
        }
    }
    on_ranks(2, |hvd| {
        let first = hvd.named("first");
        if hvd.rank() == 1 {
            hvd.barrier().unwrap();
            assert_eq!(first.allreduce(&[1u8], Sum).unwrap(), [2]);
            assert_eq!(hvd.allreduce(&[1u64], Sum).unwrap(), [2]);
            let second = hvd.named("second").allreduce(&[1u16], Sum);
            assert_eq!(second.unwrap(), [2]);
            return;
        }
        let ((begins, has_begun), (release, released)) = (mpsc::channel(), mpsc::channel());
        let waker = Waker::from(Arc::new(Blocks(begins, Mutex::new(released))));
        let mut pending = pin!(first.allreduce_async(vec![1u8], Sum));
        let polled = pending.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        hvd.barrier().unwrap();
        has_begun.recv_timeout(LIMIT).unwrap();
        // Its result is there, and calls of this thread need no waker.
        assert_eq!(block_on(pending).unwrap(), [2]);
        assert_eq!(hvd.allreduce(&[1u64], Sum).unwrap(), [2]);
        let second = hvd.named("second").allreduce_async(vec![1u16], Sum);
        release.send(()).unwrap();
        assert_eq!(second.wait().unwrap(), [2]);
    });
}

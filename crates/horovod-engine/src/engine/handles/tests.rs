//! Handles end, once each, for whoever is to hear of it.

use std::time::Duration;

use super::*;

impl Handles {
    pub(in crate::engine) fn create(&self, end: Delivery) -> Handle {
        let handle = Self::number();
        self.insert(handle, end);
        handle
    }
}

#[test]
fn a_handle_is_pending_then_done_then_cleared() {
    let h = Handles::default();
    let a = h.create(Delivery::ToWaiter(None));
    assert!(a >= Handle(1));
    assert_eq!(h.poll(a), Some(false));
    assert!(h.lock().take(a).is_none());
    h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
    assert_eq!(h.poll(a), Some(true));
    assert!(matches!(
        h.lock().take(a),
        Some(Waited::Ended { result: Ok(_), .. })
    ));
    assert_eq!(h.poll(a), None);
    assert!(matches!(h.lock().take(a), Some(Waited::Unknown)));
}

#[test]
fn what_is_let_go_of_is_left_once_and_stays_pending() {
    let h = Handles::default();
    let a = h.create(Delivery::ToWaiter(None));
    let cause = WaitedFor {
        rank: horovod_protocol::Rank(1),
        name: "metric".into(),
    };
    assert!(h.is_awaited(a));
    h.let_go(a, cause.clone());
    assert!(!h.is_awaited(a) && h.lock().is_pending(a));
    assert_eq!(h.poll(a), Some(false));
    assert!(matches!(h.lock().take(a), Some(Waited::Pending)));
    assert_eq!(h.lock().let_go(a), Some(&cause));
    h.lock().keep(a);
    assert!(h.is_awaited(a) && h.lock().take(a).is_none());
    h.let_go(a, cause.clone());
    h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
    let Some(Waited::Ended { result, kept }) = h.lock().take(a) else {
        panic!("it has ended");
    };
    h.lock().put_back(a, result, kept);
    h.let_go(a, cause);
    h.lock().keep(a);
    assert!(matches!(
        h.lock().take(a),
        Some(Waited::Ended { result: Ok(_), .. })
    ));
}

#[test]
fn a_wait_that_is_given_up_ends_with_a_callback_or_at_once() {
    let h = Handles::default();
    let a = h.create(Delivery::ToWaiter(None));
    let called = std::sync::Arc::new(AtomicU64::new(0));
    let callback = || {
        let called = called.clone();
        Box::new(move |result: Result<OpResult, Error>| {
            called.fetch_add(1 + u64::from(result.is_err()), Ordering::Relaxed);
        })
    };
    assert!(h.redirect(a, callback()).is_none());
    h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
    let b = h.create(Delivery::ToWaiter(None));
    h.complete([(b, Ok(OpResult::plain(Completion::Done)))]);
    let Some((Waited::Ended { result: Ok(_), .. }, _)) = h.redirect(b, callback()) else {
        panic!("it has ended");
    };
    assert!(matches!(
        h.redirect(b, callback()),
        Some((Waited::Unknown, _))
    ));
    h.close();
    assert!(h.run_callbacks().is_none());
    assert_eq!(called.load(Ordering::Relaxed), 1);
}

#[test]
fn a_handle_of_an_ended_engine_is_unknown_to_the_next() {
    let old = Handles::default().create(Delivery::ToWaiter(None));
    let h = Handles::default();
    h.create(Delivery::ToWaiter(None));
    assert_eq!(h.poll(old), None);
}

#[test]
fn pending_handles_end_with_the_error_and_finished_ones_keep_their_result() {
    let h = Handles::default();
    let (a, b) = (
        h.create(Delivery::ToWaiter(None)),
        h.create(Delivery::ToWaiter(None)),
    );
    h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
    h.fail_pending(&Error::Closed, |_| false);
    assert!(matches!(
        h.lock().take(a),
        Some(Waited::Ended { result: Ok(_), .. })
    ));
    assert!(matches!(
        h.lock().take(b),
        Some(Waited::Ended {
            result: Err(Error::Closed),
            ..
        })
    ));
}

#[test]
fn a_function_is_called_once_with_the_end_whatever_it_is_and_its_panic_ends_nothing() {
    let h = Arc::new(Handles::default());
    let called = Arc::new(Mutex::new(Vec::new()));
    let callback = |name: &'static str| {
        let (called, table) = (called.clone(), h.clone());
        let callback: Callback = Box::new(move |result| {
            assert!(table.table.try_lock().is_ok(), "a lock is held");
            called.lock().unwrap().push((name, result.is_ok()));
            assert_ne!(name, "panics", "as some function may");
        });
        h.create(Delivery::ToCallback(callback))
    };
    let done = || Ok(OpResult::plain(Completion::Done));
    let first = callback("panics");
    h.complete([(first, done())]);
    assert!(h.has_callbacks() && called.lock().unwrap().is_empty());
    assert_eq!(h.poll(first), None, "nobody can ask for its result");
    let (kept, failed) = (callback("kept"), callback("failed"));
    h.cancel(callback("given up"));
    h.forget_callback(callback("still in use"));
    let gone = Error::Internal("gone".into());
    h.fail_pending(&gone, |handle| handle == kept);
    assert!(h.run_callbacks().is_some(), "one is still pending");
    h.complete([(kept, done()), (failed, done()), (first, done())]);
    h.close();
    assert!(h.run_callbacks().is_none());
    let called = called.lock().unwrap();
    let expected = [("panics", true), ("failed", false), ("kept", true)];
    assert_eq!(*called, expected);
}

#[test]
fn a_waiting_thread_is_woken_when_the_driver_lock_is_free() {
    let (h, hour) = (std::sync::Arc::new(Handles::default()), 3600);
    let (waits, deadline) = (h.clone(), Instant::now() + Duration::from_secs(hour));
    let waiter = std::thread::spawn(move || waits.sleep(waits.lock(), deadline));
    while h.lock().waiters == 0 {
        std::thread::yield_now();
    }
    h.driver_is_free();
    waiter.join().unwrap(); // without the wake-up the test runner's limit ends it
}

#[test]
fn a_waiting_thread_is_woken_by_the_completion() {
    let h = std::sync::Arc::new(Handles::default());
    let a = h.create(Delivery::ToWaiter(None));
    let other = std::thread::spawn({
        let h = h.clone();
        move || {
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                let mut table = h.lock();
                if let Some(end) = table.take(a) {
                    return matches!(end, Waited::Ended { result: Ok(_), .. });
                }
                if !h.sleep(table, deadline) {
                    return false;
                }
            }
        }
    });
    h.complete([(a, Ok(OpResult::plain(Completion::Done)))]);
    assert!(other.join().unwrap());
}

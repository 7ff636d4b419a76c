//! Every order of events of one rank: who submits, waits, leaves, or is called.

use super::*;

impl Setup {
    /// As [`Self::submit`] by a thread that waits next.
    fn submit_and_wait(&self, timeout: Duration) -> (Handle, Waited) {
        let handle = self.shared.submitted.fetch_add(1, Ordering::SeqCst);
        let is_announced = self.driver_lock.submitted_by_waiter();
        let waited = self.driver_lock.wait(handle, timeout, is_announced);
        (handle, waited)
    }
}

fn cases() -> impl Iterator<Item = Case> {
    let both = [false, true];
    both.into_iter()
        .flat_map(move |burst| both.map(|for_engine| Case { burst, for_engine }))
}

#[test]
fn who_submits_and_waits_gets_the_end() {
    for case in cases() {
        check(2, case, |setup| setup.finish(setup.submit()), 1);
    }
}

#[test]
fn who_submits_only_to_wait_gets_the_end() {
    for case in cases() {
        check(
            2,
            case,
            |setup| drop(setup.submit_and_wait(Duration::MAX)),
            1,
        );
    }
}

#[test]
fn what_nobody_waits_for_ends_by_the_engines_thread() {
    for case in cases() {
        check(2, case, |setup| setup.see_end(setup.submit()), 1);
    }
}

#[test]
fn a_caller_that_leaves_hands_over() {
    for case in cases() {
        check(
            2,
            case,
            |setup| {
                let handle = setup.submit();
                let _ = setup.driver_lock.wait(handle, Duration::ZERO, true);
                setup.see_end(handle);
            },
            1,
        );
    }
}

#[test]
fn a_caller_that_submits_only_to_wait_and_leaves_hands_over() {
    for case in cases() {
        check(
            2,
            case,
            |setup| {
                let (handle, _) = setup.submit_and_wait(Duration::ZERO);
                setup.see_end(handle);
            },
            1,
        );
    }
}

#[test]
fn who_is_called_need_not_wait() {
    for case in cases() {
        check(1, case, Setup::end_with_callback, 1);
    }
}

/// One thread submits and leaves at once; another one of the rank does `work`, which submits one thing.
fn one_thread_leaves_while_another(work: fn(Setup)) {
    for case in cases() {
        check(
            1,
            case,
            move |setup| {
                let first = setup.submit();
                let (shared, driver_lock) = (setup.shared.clone(), setup.driver_lock.clone());
                let other = loom::thread::spawn(move || {
                    work(Setup {
                        shared,
                        driver_lock,
                        threads: Vec::new(),
                    });
                });
                let _ = setup.driver_lock.wait(first, Duration::ZERO, true);
                other.join().unwrap();
                setup.see_end(first);
            },
            2,
        );
    }
}

#[test]
fn one_thread_leaves_while_another_submits_and_waits() {
    one_thread_leaves_while_another(|setup| setup.finish(setup.submit()));
}

#[test]
fn one_thread_leaves_while_another_submits_only_to_wait() {
    one_thread_leaves_while_another(|setup| {
        let (handle, waited) = setup.submit_and_wait(Duration::MAX);
        if !matches!(waited, Waited::Ended) {
            setup.finish(handle);
        }
    });
}

//! Every order of events of one rank: who submits, waits, leaves, or is called.

use super::*;

fn cases() -> impl Iterator<Item = Case> {
    let both = [false, true];
    both.into_iter()
        .flat_map(move |burst| both.map(|for_engine| Case { burst, for_engine }))
}

#[test]
fn who_submits_and_waits_gets_the_end() {
    for case in cases() {
        check(2, case, |job| job.finish(job.submit()), 1);
    }
}

#[test]
fn what_nobody_waits_for_ends_by_the_engines_thread() {
    for case in cases() {
        check(2, case, |job| job.see_end(job.submit()), 1);
    }
}

#[test]
fn a_caller_that_leaves_hands_over() {
    for case in cases() {
        check(
            2,
            case,
            |job| {
                let handle = job.submit();
                let _ = job.seat.wait(handle, Duration::ZERO);
                job.see_end(handle);
            },
            1,
        );
    }
}

#[test]
fn who_is_called_need_not_wait() {
    for case in cases() {
        check(1, case, Job::be_called, 1);
    }
}

#[test]
fn one_thread_leaves_while_another_submits_and_waits() {
    for case in cases() {
        check(
            1,
            case,
            |job| {
                let first = job.submit();
                let (shared, seat) = (job.shared.clone(), job.seat.clone());
                let other = loom::thread::spawn(move || {
                    let job = Job {
                        shared,
                        seat,
                        threads: Vec::new(),
                    };
                    job.finish(job.submit());
                });
                let _ = job.seat.wait(first, Duration::ZERO);
                other.join().unwrap();
                job.see_end(first);
            },
            2,
        );
    }
}

//! Stories of barriers: requests without data, known like any other.

use crate::job::*;
use horovod_protocol::*;

#[test]
fn a_barrier_that_comes_again_is_told_by_its_slot() {
    let mut job = Job::new(3);
    let set = job.add_set(&[0, 2]);
    for (members, request) in [(vec![0, 1, 2], barrier()), (vec![0, 2], on(set, barrier()))] {
        for known in [false, true, true] {
            let mut come = Vec::new();
            for rank in &members {
                come.push((*rank, job.submit(*rank, request.clone())));
                job.drain();
                let items = &job.up[*rank].back().expect("said").items[..];
                assert_eq!(matches!(items, [Submission::Hits(_)]), known, "{items:?}");
                assert!(
                    come.iter()
                        .all(|(rank, id)| job.completion(*rank, *id).is_none())
                );
                job.settle();
            }
            for (rank, id) in come {
                assert_eq!(job.completion(rank, id), Some(Ok(Completion::Done)));
            }
        }
    }
    assert!((0..3).all(|rank| job.executions(rank).is_empty()));
}

#[test]
fn a_known_barrier_and_another_operation_of_its_name_are_told_apart() {
    let mut job = Job::new(2);
    let sum = || sum("barrier.noname", &[2]);
    for request in [barrier(), sum(), barrier()] {
        job.submit_all(&request);
        job.settle();
        assert_eq!(job.workers[0].pending(), 0);
        let ids = [job.submit(0, barrier()), job.submit(1, sum())];
        job.settle();
        for (rank, id) in ids.into_iter().enumerate() {
            let error = job.error(rank, id).to_string();
            assert!(
                error.starts_with("Mismatched operations: One rank did"),
                "{error}"
            );
        }
    }
    assert_eq!(job.ran(0), [["barrier.noname"]]);
}

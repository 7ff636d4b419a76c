//! Faults that NCCL can have, and what ends them.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::ffi::c_int;
use std::sync::Barrier;

use crate::rig::ranks::{Rank, async_error, join, ranks, unique_id};
use crate::rig::{self, adopt, configure, rig};
use horovod_gpu_double::driver::stream::{cuStreamQuery, cuStreamSynchronize};
use horovod_gpu_double::nccl::exports::{
    ncclCommAbort, ncclGetLastError, ncclGroupEnd, ncclGroupStart, text_of,
};
use horovod_gpu_double::testing::double_live;

/// Errors of ranks that cannot form a communicator.
fn refusals(settings: [&str; 2], sizes: [usize; 2], devices: [c_int; 2]) -> Vec<(i32, String)> {
    let id = unique_id();
    let mut received = Vec::new();
    let mut made = Vec::new();
    for rank in 0..2 {
        configure(settings[rank]);
        adopt(devices[rank]);
        let (communicator, code) = join(id, sizes[rank], rank, false);
        assert_eq!(code, 7);
        made.push(communicator);
    }
    for communicator in made {
        let code = loop {
            match async_error(communicator) {
                7 => std::thread::yield_now(),
                code => break code,
            }
        };
        // SAFETY: a communicator.
        unsafe {
            received.push((code, text_of(ncclGetLastError(communicator))));
            ncclCommAbort(communicator);
        }
    }
    received
}

#[test]
fn a_peer_that_never_comes_hangs_the_collective_until_abort() {
    let rig = rig("devices=2,never=1");
    let barrier = Barrier::new(2);
    // The first collective of the process, that of whichever rank comes first.
    ranks(2, true, |r| {
        let memory = r.put(&[1.0]);
        assert_eq!(r.all_reduce(memory, 1), 0);
        assert_eq!(async_error(r.communicator), 0);
        // SAFETY: handles that exist.
        unsafe {
            assert_eq!(cuStreamQuery(r.stream), 600);
            barrier.wait();
            assert_eq!(ncclCommAbort(r.communicator), 0);
            assert_eq!(cuStreamSynchronize(r.stream), 0);
        }
    });
    rig.is_clean();
}

#[test]
fn an_asynchronous_error_comes_after_the_launch() {
    let rig = rig("devices=2,async=3:6");
    let barrier = Barrier::new(2);
    ranks(2, true, |r| {
        let memory = r.put(&[1.0]);
        assert_eq!(r.all_reduce(memory, 1), 0);
        assert_eq!(r.get(memory, 1), [2.0]);
        barrier.wait();
        if r.rank == 0 {
            assert_eq!(r.all_reduce(memory, 1), 0);
            while async_error(r.communicator) == 0 {
                std::thread::yield_now();
            }
            assert_eq!(async_error(r.communicator), 6);
            assert_eq!(r.all_reduce(memory, 1), 6);
        }
        barrier.wait();
        // SAFETY: a communicator.
        assert_eq!(unsafe { ncclCommAbort(r.communicator) }, 0);
    });
    rig.is_clean();
}

#[test]
fn a_rank_that_is_lost_is_an_error_of_the_others() {
    let rig = rig("devices=2");
    let barrier = Barrier::new(2);
    ranks(2, true, |r| {
        if r.rank == 1 {
            barrier.wait();
        } else {
            let memory = r.put(&[1.0]);
            assert_eq!(r.all_reduce(memory, 1), 0);
            barrier.wait();
            while async_error(r.communicator) == 0 {
                std::thread::yield_now();
            }
            assert_eq!(async_error(r.communicator), 6);
            // SAFETY: a communicator.
            let text = unsafe { text_of(ncclGetLastError(r.communicator)) };
            assert!(text.contains("rank 1 is gone"), "{text}");
        }
        // SAFETY: a communicator.
        assert_eq!(unsafe { ncclCommAbort(r.communicator) }, 0);
    });
    rig.is_clean();
}

#[test]
fn communicators_are_aborted_together_in_a_group() {
    let rig = rig("devices=1,never=1,never=2");
    let (first, second) = (
        Rank::join(unique_id(), 1, 0, true),
        Rank::join(unique_id(), 1, 0, true),
    );
    let (a, b) = (first.put(&[1.0]), second.put(&[1.0]));
    first.all_reduce(a, 1);
    rig::order(second.stream, first.stream);
    second.all_reduce(b, 1);
    // Each alone would wait for the other's kernel.
    // SAFETY: communicators.
    unsafe {
        ncclGroupStart();
        assert_eq!(ncclCommAbort(first.communicator), 0);
        assert_eq!(ncclCommAbort(second.communicator), 0);
        assert_eq!(ncclGroupEnd(), 0);
        assert_eq!(double_live(c"communicators".as_ptr()), 0);
    }
    let all = rig.violations();
    assert!(
        all.iter().all(|v| v.starts_with("launch order: ")),
        "{all:?}"
    );
}

#[test]
fn ranks_that_do_not_fit_are_refused() {
    let _rig = rig("devices=2");
    let two = "devices=2";
    let cases = [
        (
            ["devices=2,nccl_version=22703", two],
            [2, 2],
            [0, 1],
            "Mismatched NCCL version",
        ),
        ([two, two], [2, 2], [0, 0], "Duplicate GPU detected"),
        ([two, two], [2, 3], [0, 1], "says 2"),
    ];
    for (settings, sizes, devices, text) in cases {
        for (code, received) in refusals(settings, sizes, devices) {
            assert_eq!(code, 5);
            assert!(received.contains(text), "{received}");
        }
    }
}

#[test]
fn faults_of_groups_concern_their_communicators() {
    let rig = rig("fail=ncclGroupEnd:1:6,fail=ncclAllReduce:2:4");
    ranks(1, true, |r| {
        let memory = r.put(&[1.0]);
        ncclGroupStart();
        assert_eq!(r.all_reduce(memory, 1), 0);
        assert_eq!(ncclGroupEnd(), 6);
        assert_eq!(async_error(r.communicator), 6);
        // SAFETY: a communicator.
        assert_eq!(unsafe { ncclCommAbort(r.communicator) }, 0);
    });
    // An argument that is refused leaves the communicator as it was.
    ranks(1, true, |r| {
        let memory = r.put(&[1.0]);
        ncclGroupStart();
        assert_eq!(r.all_reduce(memory, 1), 4);
        assert_eq!(ncclGroupEnd(), 4);
        assert_eq!(r.all_reduce(memory, 1), 0);
        r.leave();
    });
    rig.is_clean();
}

//! Collectives between ranks, and the rules and faults of NCCL.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::ffi::c_int;
use std::ptr::null_mut;

use crate::rig::ranks::{Config, F32, Rank, SUM, async_error, pointer, ranks, unique_id};
use crate::rig::{self, adopt, bytes_of, configure, counts, event, own_stream, rig};
use horovod_gpu_double::Handle;
use horovod_gpu_double::driver::stream::{cuEventRecord, cuStreamSynchronize};
use horovod_gpu_double::nccl::collectives::{
    ncclAllGather, ncclAllReduce, ncclAlltoAll, ncclBroadcast, ncclRecv, ncclReduce,
    ncclReduceScatter, ncclSend,
};
use horovod_gpu_double::nccl::exports::{
    ncclCommAbort, ncclCommCount, ncclCommDestroy, ncclCommFinalize, ncclCommSplit,
    ncclCommUserRank, ncclGetLastError, ncclGetVersion, ncclGroupEnd, ncclGroupStart,
    ncclRedOpCreatePreMulSum, ncclRedOpDestroy, text_of,
};
use horovod_gpu_double::testing::double_live;

#[test]
fn every_collective_gives_every_rank_its_result() {
    let rig = rig("devices=3,seed=3,delay=50");
    ranks(3, true, |r| {
        let own = r.rank as f32;
        let (c, s) = (r.communicator, r.stream);
        let put = |values: &[f32]| pointer(r.put(values));
        // SAFETY: memory of the device, a communicator and a stream, which exist.
        unsafe {
            let sum = put(&[own, 10.0 * own]);
            assert_eq!(ncclAllReduce(sum, sum, 2, F32, SUM, c, s), 0);
            assert_eq!(r.get(sum as u64, 2), [3.0, 30.0]);
            for (operator, expected) in [(1, 24.0), (2, 4.0), (3, 2.0), (4, 3.0)] {
                let value = put(&[own + 2.0]);
                assert_eq!(ncclAllReduce(value, value, 1, F32, operator, c, s), 0);
                let got = r.get(value as u64, 1)[0];
                assert!((got - expected).abs() < 1e-6, "{operator}: {got}");
            }
            let (from, to) = (put(&[own]), put(&[-1.0; 3]));
            assert_eq!(ncclReduce(from, to, 1, F32, SUM, 1, c, s), 0);
            let expected = if r.rank == 1 { 3.0 } else { -1.0 };
            assert_eq!(r.get(to as u64, 1), [expected]);
            assert_eq!(ncclAllGather(from, to, 1, F32, c, s), 0);
            assert_eq!(r.get(to as u64, 3), [0.0, 1.0, 2.0]);
            let all = put(&[own, own + 10.0, own + 20.0]);
            assert_eq!(ncclReduceScatter(all, from, 1, F32, SUM, c, s), 0);
            assert_eq!(r.get(from as u64, 1), [3.0 + 30.0 * own]);
            assert_eq!(ncclAlltoAll(all, to, 1, F32, c, s), 0);
            let column = 10.0 * own;
            assert_eq!(r.get(to as u64, 3), [column, column + 1.0, column + 2.0]);
            assert_eq!(ncclBroadcast(all, all, 3, F32, 2, c, s), 0);
            assert_eq!(r.get(all as u64, 3), [2.0, 12.0, 22.0]);
        }
        r.leave();
    });
    rig.is_clean();
}

#[test]
fn transfers_in_a_group_do_not_wait_for_each_other() {
    let rig = rig("devices=3");
    ranks(3, true, |r| {
        let out = r.put(&[r.rank as f32; 3]);
        let into = r.put(&[-1.0; 3]);
        // SAFETY: memory of the device, a communicator and a stream, which exist.
        unsafe {
            ncclGroupStart();
            for peer in 0..3 {
                let at = 4 * peer as u64;
                assert_eq!(
                    ncclSend(pointer(out + at), 1, F32, peer, r.communicator, r.stream),
                    0
                );
                assert_eq!(
                    ncclRecv(pointer(into + at), 1, F32, peer, r.communicator, r.stream),
                    0
                );
            }
            assert_eq!(ncclGroupEnd(), 0);
        }
        assert_eq!(r.get(into, 3), [0.0, 1.0, 2.0]);
        r.leave();
    });
    rig.is_clean();
}

#[test]
fn a_group_over_two_streams_joins_them() {
    let rig = rig("devices=2,delay=100,seed=8");
    ranks(2, true, |r| {
        let other = own_stream();
        let (a, b) = (r.put(&[1.0]), r.put(&[2.0]));
        rig::order(r.stream, other);
        // SAFETY: memory of the device, a communicator and streams, which exist.
        unsafe {
            ncclGroupStart();
            r.all_reduce(a, 1);
            let c = r.communicator;
            ncclAllReduce(pointer(b), pointer(b), 1, F32, SUM, c, other);
            assert_eq!(ncclGroupEnd(), 0);
        }
        // Each stream comes after both.
        assert_eq!(r.get(b, 1), [4.0]);
        assert_eq!(Rank { stream: other, ..r }.get(a, 1), [2.0]);
    });
    rig.is_clean();
}

#[test]
fn a_made_operator_multiplies_first() {
    let rig = rig("devices=2");
    ranks(2, true, |r| {
        let (mut operator, scalar) = (0, [0.5f32]);
        let memory = r.put(&[3.0]);
        // SAFETY: places and values that exist.
        unsafe {
            let place = &raw mut operator;
            let made = ncclRedOpCreatePreMulSum(place, bytes_of(&scalar), F32, 1, r.communicator);
            assert_eq!(made, 0);
            assert_eq!(r.all_reduce_with(memory, 1, operator), 0);
            assert_eq!(ncclRedOpDestroy(operator, r.communicator), 0);
            assert_eq!(r.all_reduce_with(memory, 1, operator), 4);
        }
        assert_eq!(r.get(memory, 1), [3.0]);
        r.leave();
    });
    rig.is_clean();
}

#[test]
fn a_split_makes_communicators_by_color_and_key() {
    let rig = rig("devices=3");
    ranks(3, true, |r| {
        let mut new = null_mut();
        let color = if r.rank == 1 { -1 } else { 5 };
        let (mut size, mut rank) = (0, 0);
        // SAFETY: places for what is written.
        unsafe {
            let code = ncclCommSplit(
                r.communicator,
                color,
                -r.device(),
                &raw mut new,
                std::ptr::null(),
            );
            assert_eq!(code, 0);
            assert_eq!(new.is_null(), r.rank == 1);
            if r.rank != 1 {
                ncclCommCount(new, &raw mut size);
                ncclCommUserRank(new, &raw mut rank);
                assert_eq!((size, rank), (2, c_int::from(r.rank == 0)));
                let memory = r.put(&[r.rank as f32]);
                assert_eq!(
                    ncclAllReduce(pointer(memory), pointer(memory), 1, F32, SUM, new, r.stream),
                    0
                );
                assert_eq!(r.get(memory, 1), [2.0]);
                assert_eq!(ncclCommDestroy(new), 0);
            }
        }
        r.leave();
    });
    rig.is_clean();
}

#[test]
fn calls_that_differ_between_ranks_are_found() {
    for what in ["count", "type", "operator", "function"] {
        let rig = rig("devices=2");
        let codes = ranks(2, true, |r| {
            let memory = r.put(&[0.0; 4]);
            let other = r.rank == 1;
            let (buffer, c) = (pointer(memory), r.communicator);
            // SAFETY: memory of the device, a communicator and a stream, which exist.
            unsafe {
                match what {
                    "function" if other => ncclBroadcast(buffer, buffer, 1, F32, 0, c, r.stream),
                    "count" if other => r.all_reduce(memory, 2),
                    "type" if other => ncclAllReduce(buffer, buffer, 1, 2, SUM, c, r.stream),
                    "operator" if other => r.all_reduce_with(memory, 1, 2),
                    _ => r.all_reduce(memory, 1),
                };
                let code = loop {
                    match async_error(c) {
                        0 => std::thread::yield_now(),
                        code => break code,
                    }
                };
                let text = text_of(ncclGetLastError(c));
                assert!(
                    text.contains("collective 0 is ncclAllReduce(") || text.contains("on rank 0"),
                    "{text}"
                );
                assert_eq!(ncclCommAbort(c), 0);
                // The stream goes on.
                assert_eq!(cuStreamSynchronize(r.stream), 0);
                code
            }
        });
        assert_eq!(codes, [5, 5]);
        let all = rig.violations();
        assert!(
            !all.is_empty() && all.iter().all(|v| v.starts_with("mismatch: ")),
            "{all:?}"
        );
    }
}

#[test]
fn a_stream_is_not_used_while_nccl_is_in_progress_there() {
    let rig = rig("devices=2,in_progress=3");
    ranks(2, false, |r| {
        let memory = r.put(&[1.0]);
        let other = own_stream();
        assert_eq!(r.all_reduce(memory, 1), 7);
        // Another stream may be used.
        // SAFETY: handles that exist.
        unsafe { cuEventRecord(event(), other) };
        assert_eq!(r.settle(), 0);
        assert_eq!(r.get(memory, 1), [2.0]);
        r.leave();
    });
    rig.is_clean();
    assert!(counts("ncclCommGetAsyncError") >= 12);
    ranks(2, false, |r| {
        let memory = r.put(&[1.0]);
        assert_eq!(r.all_reduce(memory, 1), 7);
        if r.rank == 0 {
            // SAFETY: handles that exist.
            unsafe { cuEventRecord(event(), r.stream) };
        }
        assert_eq!(r.settle(), 0);
        r.leave();
    });
    rig.broke("stream in progress", "cuEventRecord");
    configure("devices=2,in_progress=3");
    ranks(2, false, |r| {
        let memory = r.put(&[1.0]);
        assert_eq!(r.all_reduce(memory, 1), 7);
        if r.rank == 0 {
            assert_eq!(r.all_reduce(memory, 1), 4);
        }
        assert_eq!(r.settle(), 0);
        r.leave();
    });
    rig.broke("in progress", "ncclAllReduce");
}

#[test]
fn results_need_the_stream_they_come_from() {
    let rig = rig("devices=1");
    ranks(1, true, |r| {
        let memory = r.put(&[1.0]);
        assert_eq!(r.all_reduce(memory, 1), 0);
        let user = Rank {
            stream: own_stream(),
            ..r
        };
        user.get(memory, 1);
        rig.broke("memory", "which ncclAllReduce of communicator");
        configure("");
        // SAFETY: streams that exist.
        unsafe { cuStreamSynchronize(r.stream) };
        // Beyond the end of the buffer, and into another allocation.
        assert_eq!(r.all_reduce(memory, 2), 4);
        rig.broke("memory", "out of bounds");
        configure("");
        // SAFETY: memory of the device, which overlaps itself.
        unsafe {
            let from = r.put(&[0.0; 8]);
            ncclAllReduce(
                pointer(from),
                pointer(from + 4),
                4,
                F32,
                SUM,
                r.communicator,
                r.stream,
            );
        }
        rig.broke("memory", "overlap");
        configure("");
        let at = r.put(&[0.0; 8]);
        ncclGroupStart();
        r.all_reduce(at, 4);
        r.all_reduce(at + 12, 4);
        ncclGroupEnd();
        rig.broke("memory", "two parts of a group");
        r.leave();
    });
}

#[test]
fn a_communicator_belongs_to_a_thread() {
    let rig = rig("devices=1");
    let alone = {
        adopt(0);
        Rank::join(unique_id(), 1, 0, true)
    };
    let memory = alone.put(&[1.0]);
    assert_eq!(alone.all_reduce(memory, 1), 0);
    let bits = (alone.communicator as usize, alone.stream as usize);
    let rig = &rig;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            adopt(0);
            let (communicator, stream) = (bits.0 as Handle, bits.1 as Handle);
            let buffer = pointer(memory);
            // Asking for errors is fine.
            assert_eq!(async_error(communicator), 0);
            rig.is_clean();
            // SAFETY: memory of the device, a communicator and a stream, which exist.
            unsafe { ncclAllReduce(buffer, buffer, 1, F32, SUM, communicator, stream) };
            rig.broke("threads", "belongs to thread");
        });
    });
    alone.leave();
}

#[test]
fn communicators_of_one_device_are_launched_in_order_and_by_one_thread_at_a_time() {
    let rig = rig("devices=1");
    let first = Rank::join(unique_id(), 1, 0, true);
    let second = Rank::join(unique_id(), 1, 0, true);
    let (a, b) = (first.put(&[1.0]), second.put(&[1.0]));
    first.all_reduce(a, 1);
    rig::order(first.stream, second.stream);
    second.all_reduce(b, 1);
    rig.is_clean();
    second.all_reduce(b, 1);
    first.all_reduce(a, 1);
    rig.broke("launch order", "nothing that orders");
    configure("");
    let id = unique_id();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            adopt(0);
            let third = Rank::join(id, 1, 0, true);
            let memory = third.put(&[1.0]);
            third.all_reduce(memory, 1);
            third.get(memory, 1);
            third.leave();
        });
    });
    let all = rig.violations();
    assert!(all.iter().any(|v| v.starts_with("threads: ")), "{all:?}");
    configure("");
    // The host has seen the end of what the others have launched.
    first.get(a, 1);
    second.get(b, 1);
    let id = unique_id();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            adopt(0);
            let fourth = Rank::join(id, 1, 0, true);
            let memory = fourth.put(&[1.0]);
            fourth.all_reduce(memory, 1);
            fourth.get(memory, 1);
            fourth.leave();
        });
    });
    rig.is_clean();
    first.leave();
    second.leave();
}

#[test]
fn nothing_is_called_after_the_end() {
    let rig = rig("devices=2");
    ranks(2, true, |r| {
        let memory = r.put(&[1.0]);
        assert_eq!(r.all_reduce(memory, 1), 0);
        // SAFETY: a communicator.
        unsafe {
            assert_eq!(ncclCommFinalize(r.communicator), 0);
            // All that was launched has ended, and the host knows it.
            assert_eq!(horovod_gpu_double::testing::double_free(memory), 0);
            assert_eq!(ncclCommDestroy(r.communicator), 0);
            assert_eq!(ncclCommDestroy(null_mut()), 0);
        }
        r.communicator as usize
    })
    .into_iter()
    .for_each(|communicator| {
        rig.is_clean();
        // SAFETY: it is refused.
        assert_eq!(unsafe { ncclCommDestroy(communicator as Handle) }, 4);
        rig.broke("after destroy", "communicator");
        configure("devices=2");
    });
    // SAFETY: a C string.
    assert_eq!(unsafe { double_live(c"communicators".as_ptr()) }, 0);
}

#[test]
fn what_a_version_does_not_have_is_not_called() {
    let rig = rig("nccl_version=21800");
    ranks(1, true, |r| {
        let mut version = 0;
        let memory = pointer(r.put(&[1.0; 2]));
        // SAFETY: memory of the device, places for what is written.
        unsafe {
            ncclGetVersion(&raw mut version);
            assert_eq!(version, 21800);
            let code = ncclAlltoAll(memory, memory, 1, F32, r.communicator, r.stream);
            assert_eq!(code, 5);
            // f8 is no type of the double's.
            assert_eq!(
                ncclAllReduce(memory, memory, 1, 10, SUM, r.communicator, r.stream),
                4
            );
        }
        rig.broke("version", "ncclAlltoAll came with 22800");
        r.leave();
    });
}

#[test]
fn configurations_are_checked() {
    let rig = rig("");
    let try_with = |config: Config| {
        let mut communicator = null_mut();
        let (place, config) = (&raw mut communicator, (&raw const config).cast());
        // SAFETY: a place for one handle, and a configuration.
        unsafe {
            let code = horovod_gpu_double::nccl::exports::ncclCommInitRankConfig(
                place,
                1,
                unique_id(),
                0,
                config,
            );
            ncclCommAbort(communicator);
            code
        }
    };
    assert_eq!(try_with(Config::new(1)), 0);
    assert_eq!(try_with(Config::new(2)), 4);
    assert_eq!(
        try_with(Config {
            most: 0,
            ..Config::new(1)
        }),
        4
    );
    assert_eq!(
        try_with(Config {
            least: 8,
            most: 4,
            ..Config::new(1)
        }),
        4
    );
    rig.is_clean();
}

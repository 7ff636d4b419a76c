//! Every rule that the double keeps for single processes: breaking it is recorded, keeping it is not.
#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use crate::rig::{
    adopt, bytes_of, configure, counts, event, order, own_stream, rig, user_stream, violations,
};
use horovod_gpu_double::Handle;
use horovod_gpu_double::driver::context::{
    cuCtxPopCurrent_v2, cuCtxPushCurrent_v2, cuCtxSetCurrent, cuCtxSynchronize, cuDeviceGetUuid_v2,
    cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRetain, cuThreadExchangeStreamCaptureMode,
};
use horovod_gpu_double::driver::memory::{
    cuMemAlloc_v2, cuMemAllocAsync, cuMemFree_v2, cuMemFreeAsync, cuMemFreeHost, cuMemGetInfo_v2,
    cuMemHostAlloc, cuMemcpyDtoDAsync_v2, cuMemcpyDtoHAsync_v2, cuMemcpyHtoDAsync_v2,
    cuMemsetD8Async, cuPointerGetAttribute,
};
use horovod_gpu_double::driver::stream::{
    cuEventCreate, cuEventDestroy_v2, cuEventElapsedTime, cuEventQuery, cuEventRecord,
    cuEventSynchronize, cuLaunchHostFunc, cuStreamCreate, cuStreamDestroy_v2, cuStreamIsCapturing,
    cuStreamQuery, cuStreamSynchronize, cuStreamWaitEvent,
};
use horovod_gpu_double::testing::{
    double_alloc, double_free, double_free_on, double_gate_open, double_live,
    double_stream_begin_capture, double_stream_end_capture, double_stream_gate, double_stream_read,
    double_stream_sleep, double_stream_synchronize, double_stream_write,
};

fn write(stream: Handle, to: u64, values: &[u8]) -> i32 {
    // SAFETY: as many bytes as are named.
    unsafe { double_stream_write(stream, to, bytes_of(values), values.len()) }
}

fn read(stream: Handle, from: u64, bytes: usize) -> Vec<u8> {
    let mut to = vec![0; bytes];
    // SAFETY: as many bytes as are named, and they stay until the stream has come there.
    unsafe {
        assert_eq!(
            double_stream_read(stream, to.as_mut_ptr().cast(), from, bytes),
            0
        );
        assert_eq!(double_stream_synchronize(stream), 0);
    }
    to
}

fn sync(stream: Handle) {
    // SAFETY: a stream.
    assert_eq!(unsafe { cuStreamSynchronize(stream) }, 0);
}

#[test]
fn a_read_before_a_write_of_another_stream_has_ended_is_found() {
    let rig = rig("");
    let (a, b) = (user_stream(), own_stream());
    let memory = double_alloc(0, 64);
    write(a, memory, &[1; 64]);
    assert_eq!(cuMemsetD8Async(memory + 60, 0, 8, b), 1);
    rig.broke("memory", "out of bounds");
    configure("");
    assert_eq!(cuMemsetD8Async(memory + 32, 0, 8, b), 0);
    rig.broke("memory", "no order");
}

#[test]
fn reads_do_not_conflict_and_writes_of_other_parts_neither() {
    let rig = rig("");
    let (a, b) = (user_stream(), user_stream());
    let memory = double_alloc(0, 64);
    write(a, memory, &[1; 32]);
    write(b, memory + 32, &[2; 32]);
    order(a, b);
    assert_eq!(read(b, memory, 64)[..], [[1; 32], [2; 32]].concat());
    order(b, a);
    // Both read at once.
    assert_eq!(read(a, memory, 64), read(b, memory, 64));
    rig.is_clean();
}

#[test]
fn a_write_after_a_read_needs_an_order_too() {
    let rig = rig("");
    let (a, b) = (user_stream(), user_stream());
    let memory = double_alloc(0, 8);
    write(a, memory, &[1; 8]);
    order(a, b);
    let mut seen = [0u8; 8];
    // SAFETY: eight bytes, which stay.
    unsafe { double_stream_read(b, seen.as_mut_ptr().cast(), memory, 8) };
    write(a, memory, &[2; 8]);
    rig.broke("memory", "which double_stream_read in stream");
    sync(b);
}

#[test]
fn the_host_orders_what_it_has_seen() {
    let rig = rig("delay=200,seed=5");
    let (a, b) = (user_stream(), own_stream());
    let memory = double_alloc(0, 8);
    let done = event();
    write(a, memory, &[1; 8]);
    // SAFETY: an event and a stream that exist.
    unsafe {
        assert_eq!(cuEventRecord(done, a), 0);
        while cuEventQuery(done) == 600 {
            std::thread::yield_now();
        }
    }
    write(b, memory, &[2; 8]);
    assert_eq!(read(b, memory, 8), [2; 8]);
    rig.is_clean();
}

#[test]
fn an_event_counts_as_it_was_when_it_was_waited_for() {
    let rig = rig("");
    let (a, b) = (user_stream(), own_stream());
    let memory = double_alloc(0, 8);
    let place = event();
    // SAFETY: handles that exist.
    unsafe {
        cuEventRecord(place, a);
        write(a, memory, &[1; 8]);
        cuStreamWaitEvent(b, place, 0);
    }
    write(b, memory, &[2; 8]);
    rig.broke("memory", "no order");
}

#[test]
fn the_default_stream_is_ordered_with_blocking_streams_only() {
    let rig = rig("");
    let mut blocking = null_mut();
    // SAFETY: a place for one handle.
    assert_eq!(unsafe { cuStreamCreate(&raw mut blocking, 0) }, 0);
    let memory = double_alloc(0, 8);
    write(blocking, memory, &[1; 8]);
    write(null_mut(), memory, &[2; 8]);
    write(blocking, memory, &[3; 8]);
    assert_eq!(read(null_mut(), memory, 8), [3; 8]);
    rig.is_clean();
    let other = own_stream();
    write(null_mut(), memory, &[4; 8]);
    write(other, memory, &[5; 8]);
    rig.broke("memory", "no order");
}

#[test]
fn use_after_free_and_wrong_frees_are_found() {
    let rig = rig("");
    let stream = own_stream();
    let mut memory = 0;
    // SAFETY: a place for one address.
    unsafe {
        assert_eq!(cuMemAlloc_v2(&raw mut memory, 100), 0);
        cuMemsetD8Async(memory, 7, 100, stream);
    }
    sync(stream);
    assert_eq!(cuMemFree_v2(memory), 0);
    rig.is_clean();
    assert_eq!(cuMemsetD8Async(memory + 8, 0, 8, stream), 1);
    rig.broke("memory", "after free");
    configure("");
    assert_eq!(cuMemFree_v2(memory), 1);
    rig.broke("memory", "freed twice");
    configure("");
    assert_eq!(cuMemFree_v2(memory + 4096), 1);
    rig.broke("memory", "no allocation");
}

#[test]
fn freeing_what_may_be_in_use_is_found() {
    let rig = rig("");
    let stream = own_stream();
    let memory = double_alloc(0, 8);
    cuMemsetD8Async(memory, 7, 8, stream);
    // It has ended, but the host has not seen it.
    assert_eq!(double_free(memory), 0);
    rig.broke("memory", "freed in use");
    sync(stream);
    let mut pinned = null_mut();
    let source = double_alloc(0, 8);
    configure("");
    // SAFETY: places and memory that exist.
    unsafe {
        assert_eq!(cuMemHostAlloc(&raw mut pinned, 8, 1), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(pinned, source, 8, stream), 0);
        assert_eq!(cuMemFreeHost(pinned), 0);
    }
    rig.broke("memory", "freed in use");
}

#[test]
fn memory_of_a_stream_lives_from_place_to_place() {
    let rig = rig("delay=100");
    let (a, b) = (own_stream(), own_stream());
    let mut memory = 0;
    // SAFETY: a place for one address; streams that exist.
    unsafe {
        assert_eq!(cuMemAllocAsync(&raw mut memory, 8, a), 0);
        write(a, memory, &[9; 8]);
        order(a, b);
        cuMemsetD8Async(memory, 1, 8, b);
        order(b, a);
        assert_eq!(cuMemFreeAsync(memory, a), 0);
    }
    sync(a);
    rig.is_clean();
    // SAFETY: as above.
    unsafe {
        assert_eq!(cuMemAllocAsync(&raw mut memory, 8, a), 0);
        cuMemsetD8Async(memory, 1, 8, b);
    }
    rig.broke("memory", "which cuMemAllocAsync in stream");
    configure("");
    // The other stream may still be writing.
    // SAFETY: as above.
    assert_eq!(unsafe { cuMemFreeAsync(memory, a) }, 0);
    rig.broke("memory", "no order");
    sync(a);
    sync(b);
    configure("");
    let kept = double_alloc(0, 8);
    write(a, kept, &[1; 8]);
    // SAFETY: a stream.
    assert_eq!(unsafe { double_free_on(kept, a) }, 0);
    rig.is_clean();
    write(a, kept, &[1; 8]);
    rig.broke("memory", "after free");
}

#[test]
fn what_is_queued_before_a_stream_frees_still_runs() {
    let rig = rig("");
    let (a, b) = (own_stream(), own_stream());
    let (from, to) = (double_alloc(0, 8), double_alloc(0, 8));
    // SAFETY: a stream.
    let gate = unsafe { double_stream_gate(a) };
    write(a, from, &[6; 8]);
    assert_eq!(cuMemcpyDtoDAsync_v2(to, from, 8, a), 0);
    // SAFETY: a stream.
    assert_eq!(unsafe { double_free_on(from, a) }, 0);
    // SAFETY: a stream.
    assert_eq!(unsafe { cuStreamQuery(a) }, 600);
    double_gate_open(gate);
    order(a, b);
    assert_eq!(read(b, to, 8), [6; 8]);
    rig.is_clean();
}

#[test]
fn copies_to_host_memory_that_is_not_pinned_wait() {
    let rig = rig("delay=300");
    let stream = own_stream();
    let memory = double_alloc(0, 4);
    let (from, mut to) = ([1u8, 2, 3, 4], [0u8; 4]);
    // SAFETY: four bytes each.
    unsafe {
        assert_eq!(cuMemcpyHtoDAsync_v2(memory, bytes_of(&from), 4, stream), 0);
        assert_eq!(
            cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), memory, 4, stream),
            0
        );
    }
    assert_eq!(to, from);
    rig.is_clean();
    let mut kind = 0;
    // SAFETY: a place for an int.
    unsafe {
        cuPointerGetAttribute((&raw mut kind).cast::<c_void>(), 2, memory);
        assert_eq!(kind, 2);
        let address = to.as_ptr() as u64;
        assert_eq!(cuPointerGetAttribute((&raw mut kind).cast(), 2, address), 1);
    }
}

#[test]
fn calls_need_a_current_context() {
    let rig = rig("devices=2");
    let stream = own_stream();
    let mut context = null_mut();
    // SAFETY: a stream, and null, which means no context.
    unsafe {
        assert_eq!(cuCtxSetCurrent(null_mut()), 0);
        assert_eq!(cuStreamQuery(stream), 201);
        rig.broke("no context", "cuStreamQuery");
        configure("devices=2");
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 1), 0);
        assert_eq!(cuCtxPushCurrent_v2(context), 0);
        // An event of device 1 in a stream of device 0.
        let event = event();
        assert_eq!(cuEventRecord(event, stream), 400);
        rig.broke("invalid handle", "of another");
        configure("devices=2");
        assert_eq!(cuDevicePrimaryCtxRelease_v2(1), 0);
        assert_eq!(cuCtxSynchronize(), 201);
        rig.broke("no context", "released");
        assert_eq!(cuCtxPopCurrent_v2(&raw mut context), 0);
        assert_eq!(cuCtxPopCurrent_v2(&raw mut context), 201);
    }
}

#[test]
fn what_was_destroyed_is_not_used() {
    let rig = rig("");
    let (stream, kept, event) = (own_stream(), own_stream(), event());
    // SAFETY: handles, that exist or not.
    unsafe {
        cuEventRecord(event, stream);
        assert_eq!(cuEventDestroy_v2(event), 0);
        assert_eq!(cuStreamWaitEvent(kept, event, 0), 400);
        rig.broke("after destroy", "event");
        configure("");
        assert_eq!(cuStreamDestroy_v2(stream), 0);
        assert_eq!(cuStreamSynchronize(stream), 400);
        rig.broke("after destroy", "stream");
        configure("");
        assert_eq!(cuStreamSynchronize(event), 400);
        rig.broke("invalid handle", "is no stream");
        assert_eq!(double_live(c"streams".as_ptr()), 1);
        assert_eq!(double_live(c"events".as_ptr()), 0);
    }
}

extern "C" fn calls_cuda(result: *mut c_void) {
    // SAFETY: the test's place for a result.
    unsafe { result.cast::<i32>().write(cuStreamQuery(null_mut())) };
}

#[test]
fn host_functions_do_not_call_cuda() {
    let rig = rig("");
    let stream = own_stream();
    let mut result = 0i32;
    // SAFETY: the result stays until the stream has come there.
    unsafe { cuLaunchHostFunc(stream, Some(calls_cuda), (&raw mut result).cast()) };
    sync(stream);
    assert_eq!(result, 800);
    rig.broke("host function", "cuStreamQuery");
}

#[test]
fn a_global_capture_forbids_what_may_synchronise() {
    let rig = rig("");
    let (stream, own, event) = (user_stream(), own_stream(), event());
    let memory = double_alloc(0, 8);
    let mut status = -1;
    // SAFETY: handles that exist, places for what is written.
    unsafe {
        cuEventRecord(event, own);
        assert_eq!(double_stream_begin_capture(stream, 0), 0);
        assert_eq!(cuStreamIsCapturing(stream, &raw mut status), 0);
        assert_eq!(status, 1);
        write(stream, memory, &[1; 8]);
        // Records and waits of other streams are allowed, on any thread.
        cuEventRecord(event, own);
        rig.is_clean();
        let bits = event as usize;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                adopt(0);
                let event = bits as Handle;
                let mut mode = 2;
                cuThreadExchangeStreamCaptureMode(&raw mut mode);
                assert!(matches!(cuEventQuery(event), 0 | 600));
            });
        });
        rig.is_clean();
        assert_eq!(double_stream_end_capture(stream), 1);
        double_stream_begin_capture(stream, 0);
        assert_eq!(cuEventQuery(event), 900);
        rig.broke("capture", "cuEventQuery");
        cuStreamIsCapturing(stream, &raw mut status);
        assert_eq!(status, 2);
        assert_eq!(double_stream_end_capture(stream), -1);
    }
    // Captured operations did not run.
    assert_ne!(read(own, memory, 8), [1; 8]);
}

#[test]
fn captured_events_stay_in_their_capture() {
    let rig = rig("");
    let (stream, own, event) = (user_stream(), own_stream(), event());
    // SAFETY: handles that exist.
    unsafe {
        double_stream_begin_capture(stream, 2);
        cuEventRecord(event, stream);
        assert_eq!(cuStreamWaitEvent(own, event, 0), 905);
        rig.broke("capture", "across the border");
        configure("");
        assert_eq!(cuEventSynchronize(event), 907);
        rig.broke("capture", "cuEventSynchronize");
        double_stream_end_capture(stream);
    }
}

#[test]
fn faults_come_when_they_are_asked_for() {
    let rig = rig("fail=cuEventRecord:2:1,fail=cuStreamQuery:1:700,memory=4096");
    let (stream, event) = (own_stream(), event());
    let (mut free, mut total, mut memory) = (0, 0, 0);
    // SAFETY: handles that exist, places for what is written.
    unsafe {
        let codes = [(); 3].map(|()| cuEventRecord(event, stream));
        assert_eq!(codes, [0, 1, 0]);
        assert_eq!(counts("cuEventRecord"), 3);
        assert_eq!(cuMemAlloc_v2(&raw mut memory, 4000), 0);
        assert_eq!(cuMemGetInfo_v2(&raw mut free, &raw mut total), 0);
        assert_eq!((free, total), (96, 4096));
        assert_eq!(cuMemAlloc_v2(&raw mut memory, 100), 2);
        // The context is lost for good.
        assert_eq!(cuStreamQuery(stream), 700);
        assert_eq!(cuEventQuery(event), 700);
        assert_eq!(cuStreamSynchronize(stream), 700);
    }
    rig.is_clean();
}

#[test]
fn times_are_measured_between_events_that_may() {
    let rig = rig("");
    let stream = own_stream();
    let (mut first, mut second) = (null_mut(), null_mut());
    let mut time = -1.0;
    // SAFETY: handles that exist, places for what is written.
    unsafe {
        cuEventCreate(&raw mut first, 0);
        cuEventCreate(&raw mut second, 0);
        cuEventRecord(first, stream);
        let gate = double_stream_gate(stream);
        double_stream_sleep(stream, 1);
        cuEventRecord(second, stream);
        assert_eq!(cuEventElapsedTime(&raw mut time, first, second), 600);
        double_gate_open(gate);
        cuEventSynchronize(second);
        assert_eq!(cuEventElapsedTime(&raw mut time, first, second), 0);
        assert!(time >= 0.0);
        let untimed = event();
        cuEventRecord(untimed, stream);
        assert_eq!(cuEventElapsedTime(&raw mut time, first, untimed), 400);
    }
    rig.is_clean();
}

#[test]
fn devices_of_one_machine_have_the_same_uuids_in_all_processes() {
    let _rig = rig("devices=2,host=a");
    let uuid = |device| {
        let mut uuid = [0; 16];
        // SAFETY: a place for it.
        assert_eq!(unsafe { cuDeviceGetUuid_v2(&raw mut uuid, device) }, 0);
        uuid
    };
    let (first, second) = (uuid(0), uuid(1));
    assert_ne!(first, second);
    configure("devices=2,host=b");
    assert_ne!(uuid(0), first);
    configure("devices=2,host=a");
    assert_eq!(uuid(0), first);
}

#[test]
fn null_pointers_are_no_places_for_results() {
    let rig = rig("");
    // SAFETY: null is refused.
    unsafe {
        assert_eq!(cuMemAlloc_v2(null_mut(), 8), 1);
        assert_eq!(cuEventCreate(null_mut(), 0), 1);
        assert_eq!(cuLaunchHostFunc(null_mut(), None, null_mut()), 1);
        assert_eq!(double_live(null()), 0);
    }
    rig.is_clean();
    assert!(violations().is_empty());
}

//! Devices, contexts, events, memory; and what happens after errors and forks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use super::Double;
use crate::testing::{alone, in_fork};
use crate::{Device, GpuError, RawStream, driver, nccl};

/// The context that is current on this thread, as a number.
fn current(device: &'static Device) -> usize {
    let mut context = null_mut();
    // SAFETY: writes one handle.
    unsafe { (device.driver().table.ctx_get_current)(&raw mut context) };
    context as usize
}

#[test]
fn a_device_tells_what_it_is_and_is_opened_once() {
    alone(&[], || {
        let double = Double::start("devices=2,driver_version=12040");
        let driver = driver().expect("the double");
        assert_eq!((driver.version(), driver.device_count()), (12040, Ok(2)));
        let [one, two] = [0, 1].map(|i| driver.device(i).expect("a device"));
        assert_eq!((one.ordinal(), two.ordinal()), (0, 1));
        assert_ne!(one.uuid(), two.uuid());
        assert_eq!(one.compute_capability(), (9, 0));
        assert_eq!(one.multiprocessors(), 132);
        assert!(!one.name().is_empty());
        assert!(std::ptr::eq(one, driver.device(0).expect("the same")));
        assert_eq!(double.live("contexts"), 2);
        assert_eq!(double.calls("cuInit"), 1);
        for ordinal in [-1, 2] {
            let error = driver.device(ordinal).expect_err("no such device");
            let expected =
                format!("there is no GPU {ordinal}: this process sees 2, numbered from 0");
            assert_eq!(error, GpuError::Invalid(expected));
        }
        double.assert_clean();
    });
}

#[test]
fn the_device_of_a_stream_is_found_whatever_number_is_told() {
    alone(&[], || {
        let double = Double::start("devices=3");
        let driver = driver().expect("the double");
        let theirs = double.stream(2);
        let ours = Double::adopted(0);
        let before = current(ours);
        let found = driver.device_of(theirs, 1).expect("a device");
        assert_eq!(found.ordinal(), 2);
        assert_eq!(current(ours), before);
        let asked = double.calls("cuCtxGetDevice");
        assert!(std::ptr::eq(
            found,
            driver.device_of(theirs, 0).expect("the same")
        ));
        assert_eq!(double.calls("cuCtxGetDevice"), asked);
        // The framework's, and those of the two that were opened: none of a device that was told by mistake.
        assert_eq!(double.live("contexts"), 3);
        // A default stream is of the device that is told.
        for default in [0, 1] {
            let stream = RawStream(std::ptr::without_provenance_mut(default));
            assert_eq!(driver.device_of(stream, 1).map(Device::ordinal), Ok(1));
        }
        double.assert_clean();
    });
}

#[test]
fn the_former_context_is_current_again_even_after_a_panic() {
    alone(&[], || {
        let double = Double::start("devices=2");
        let theirs = Double::adopted(1);
        let before = current(theirs);
        let ours = driver()
            .and_then(|driver| driver.device(0))
            .expect("a device");
        let inside = ours.entered(|| {
            let sets = double.calls("cuCtxSetCurrent");
            ours.entered(|| Ok(()))?;
            assert_eq!(
                double.calls("cuCtxSetCurrent"),
                sets,
                "it is current already"
            );
            Ok(current(ours))
        });
        assert_ne!(inside, Ok(before));
        assert_eq!(current(theirs), before);
        let panicked = catch_unwind(AssertUnwindSafe(|| ours.entered::<()>(|| panic!("inside"))));
        assert!(panicked.is_err());
        assert_eq!(current(theirs), before);
        // A thread that has never met CUDA is left as it was.
        std::thread::scope(|scope| {
            let event = scope.spawn(|| {
                let event = ours.record(RawStream(null_mut()));
                assert_eq!(current(ours), 0);
                event
            });
            assert!(event.join().expect("no panic").is_ok());
        });
        double.assert_clean();
    });
}

#[test]
fn events_order_streams_and_tell_when_they_have_passed() {
    alone(&[], || {
        let double = Double::start("seed=3,delay=50");
        let device = Double::adopted(0);
        let (theirs, ours) = (double.stream(0), device.create_stream().expect("a stream"));
        let memory = double.alloc(0, 8);
        double.write(theirs, memory, &[1; 8]);
        let gate = double.gate(theirs);
        double.write(theirs, memory, &[2; 8]);
        let ready = device.record(theirs).expect("an event");
        ready.order(ours.raw()).expect("ordered");
        let pinned = device.allocate_pinned(8).expect("memory");
        // SAFETY: eight bytes on either side; the event before orders the copy after the writes.
        unsafe { device.copy_to_host(pinned.as_mut_ptr(), memory, 8, &ours) }.expect("a copy");
        let end = device.record(ours.raw()).expect("an event");
        assert_eq!(
            (ready.has_passed(), end.has_passed()),
            (Ok(false), Ok(false))
        );
        assert_eq!(ours.is_idle(), Ok(false));
        double.open(gate);
        end.wait().expect("it passes");
        assert_eq!((ready.has_passed(), end.has_passed()), (Ok(true), Ok(true)));
        // SAFETY: the event says that the copy is done.
        let copied = unsafe { std::slice::from_raw_parts(pinned.as_mut_ptr(), 8) };
        assert_eq!(copied, [2; 8]);
        assert_eq!(ours.synchronize(), Ok(()));
        double.assert_clean();
    });
}

#[test]
fn a_pooled_event_may_be_recorded_again_while_others_wait_for_its_past() {
    alone(&[], || {
        let double = Double::start("");
        let device = Double::adopted(0);
        let (theirs, other) = (double.stream(0), double.stream(0));
        let ours = device.create_stream().expect("a stream");
        let memory = double.alloc(0, 4);
        let gate = double.gate(theirs);
        double.write(theirs, memory, &[7; 4]);
        let ready = device.record(theirs).expect("an event");
        ready.order(ours.raw()).expect("ordered");
        drop(ready);
        let again = device.record(other).expect("the same event");
        again.wait().expect("the other stream is empty");
        assert_eq!(double.calls("cuEventCreate"), 1);
        let pinned = device.allocate_pinned(4).expect("memory");
        // SAFETY: four bytes on either side, ordered by the first recording.
        unsafe { device.copy_to_host(pinned.as_mut_ptr(), memory, 4, &ours) }.expect("a copy");
        assert_eq!(ours.is_idle(), Ok(false));
        double.open(gate);
        ours.synchronize().expect("it ends");
        // SAFETY: the copy is done.
        let copied = unsafe { pinned.as_mut_ptr().cast::<[u8; 4]>().read() };
        assert_eq!(copied, [7; 4]);
        double.assert_clean();
    });
}

#[test]
fn events_are_made_once_for_as_many_as_are_held() {
    alone(&[], || {
        let double = Double::start("");
        let device = Double::adopted(0);
        let stream = double.stream(0);
        for _ in 0..20 {
            let kept = [(); 3].map(|()| device.record(stream).expect("an event"));
            assert!(kept.iter().all(|event| event.device().ordinal() == 0));
        }
        assert_eq!(double.calls("cuEventCreate"), 3);
        assert_eq!(double.calls("cuEventRecord"), 60);
        let timed = [(); 2].map(|()| device.record_timed(stream).expect("an event"));
        assert_eq!(double.live("events"), 5);
        timed[1].wait().expect("it passes");
        assert!(timed[1].milliseconds_since(&timed[0]).expect("a time") >= 0.0);
        let plain = device.record(stream).expect("an event");
        assert!(matches!(
            plain.milliseconds_since(&timed[0]),
            Err(GpuError::Invalid(_))
        ));
        double.assert_clean();
    });
}

#[test]
fn memory_is_used_in_order_and_given_back() {
    alone(&[], || use_memory("pools=1,delay=20", 1));
}

#[test]
fn memory_without_pools_is_used_in_the_same_way() {
    alone(&[], || use_memory("pools=0,delay=20", 0));
}

fn use_memory(settings: &str, allocations_in_order: u64) {
    let double = Double::start(settings);
    let device = Double::adopted(0);
    let stream = device.create_stream().expect("a stream");
    let before = device.free_memory().expect("numbers");
    {
        let first = device.allocate(64).expect("memory");
        let second = device.allocate_on(&stream, 64).expect("memory");
        let pinned = device.allocate_pinned(64).expect("memory");
        assert_eq!((first.len(), second.len(), pinned.len()), (64, 64, 64));
        assert!(!pinned.is_empty() && first.address() != second.address());
        let from: Vec<u8> = (0..64).collect();
        // SAFETY: 64 bytes each, all in one stream's order.
        unsafe {
            device
                .copy_to_device(first.address(), from.as_ptr(), 64, &stream)
                .expect("in");
            device
                .copy_within(second.address(), first.address(), 64, &stream)
                .expect("on");
            let to = pinned.as_mut_ptr();
            device
                .copy_to_host(to, second.address(), 64, &stream)
                .expect("out");
            device
                .copy_to_host(to, second.address(), 0, &stream)
                .expect("nothing");
        }
        stream.synchronize().expect("it ends");
        // SAFETY: the copies are done.
        let copied = unsafe { std::slice::from_raw_parts(pinned.as_mut_ptr(), 64) };
        assert_eq!(copied, from);
        assert!(device.allocate(0).expect("memory").is_empty());
    }
    stream.synchronize().expect("it ends");
    assert_eq!(double.live("allocations"), 0);
    assert_eq!(device.free_memory(), Ok(before));
    assert_eq!(double.calls("cuMemAllocAsync"), allocations_in_order);
    let clone = stream.clone();
    drop(stream);
    assert_eq!(double.live("streams"), 1);
    drop(clone);
    assert_eq!(double.live("streams"), 0);
    double.assert_clean();
}

#[test]
fn memory_that_is_not_there_is_an_error_that_others_survive() {
    alone(&[], || {
        let double = Double::start("memory=1048576");
        let device = Double::adopted(0);
        let error = device.allocate(2 << 20).expect_err("too much");
        assert!(!error.is_sticky());
        for part in [
            "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY: out of memory (2)",
            "2097152 bytes are needed on GPU 0, of whose 1048576 bytes 1048576 are free",
            "HOROVOD_FUSION_THRESHOLD",
        ] {
            assert!(error.to_string().contains(part), "{part} is not in {error}");
        }
        assert!(device.allocate(1 << 10).is_ok());
        double.assert_clean();
    });
}

#[test]
fn memory_that_nccl_does_not_get_is_told_with_what_to_do() {
    let failed = |text: &str| {
        let (call, code) = ("ncclCommInitRankConfig", 1);
        let text = text.to_owned();
        GpuError::Nccl { call, code, text }.to_string()
    };
    // As NCCL says it, whose own failures of other kinds have no advice.
    let error = failed("unhandled cuda error: Cuda failure 2 'out of memory'");
    assert!(
        error.contains("(1); NCCL needs memory of the GPU"),
        "{error}"
    );
    assert!(error.contains("HOROVOD_NCCL_MAX_CTAS"), "{error}");
    let error = failed("unhandled cuda error: Cuda failure 700 'an illegal memory access'");
    assert!(error.ends_with("(1)"), "{error}");
}

#[test]
fn a_lost_context_is_told_from_other_errors() {
    alone(&[], || {
        let double = Double::start("fail=cuEventQuery:1:700,fail=cuEventRecord:3:600");
        let device = Double::adopted(0);
        let stream = double.stream(0);
        let event = device.record(stream).expect("an event");
        assert_eq!(crate::loss(), None);
        let error = event.has_passed().expect_err("an illegal address");
        assert!(error.is_sticky());
        assert_eq!(crate::loss(), Some(crate::GpuLoss::Context { code: 700 }));
        assert!(
            error
                .to_string()
                .contains("cuEventQuery failed with CUDA_ERROR_ILLEGAL_ADDRESS")
        );
        for code in [2, 3, 201, 600, 701, 900] {
            let text = String::new();
            assert!(
                !GpuError::Cuda {
                    call: "",
                    code,
                    text
                }
                .is_sticky(),
                "{code}"
            );
        }
        assert!(!GpuError::Forked.is_sticky());
    });
}

#[test]
fn captures_are_seen_and_not_disturbed() {
    alone(&[], || {
        let double = Double::start("");
        let device = Double::adopted(0);
        let (captured, other) = (double.stream(0), double.stream(0));
        let event = device.record(other).expect("an event");
        assert_eq!(device.is_capturing(captured), Ok(false));
        // In global mode calls of any thread invalidate it, but for those of threads that have been adopted.
        std::thread::scope(|scope| {
            scope
                .spawn(|| double.begin_capture(captured, 0))
                .join()
                .expect("no panic");
        });
        assert_eq!(device.is_capturing(captured), Ok(true));
        assert_eq!(device.is_capturing(other), Ok(false));
        event.wait().expect("it passes");
        assert_eq!(event.has_passed(), Ok(true));
        assert_eq!(double.end_capture(captured), Some(0));
        double.assert_clean();
    });
}

#[test]
fn threads_that_were_not_adopted_leave_captures_alone_too() {
    alone(&[], || {
        let double = Double::start("pools=0");
        let device = driver()
            .and_then(|driver| driver.device(0))
            .expect("a device");
        let captured = double.stream(0);
        let stream = device.create_stream().expect("a stream");
        let event = device.record(stream.raw()).expect("an event");
        let others = (device.allocate(8), device.allocate_pinned(8));
        for mode in [0, 1] {
            // By this thread, which would end it in both modes.
            double.begin_capture(captured, mode);
            event.wait().expect("it passes");
            assert_eq!(event.has_passed(), Ok(true));
            assert_eq!(stream.is_idle(), Ok(true));
            stream.synchronize().expect("it is idle");
            device.kernels().expect("they are loaded");
            drop((device.allocate(8), device.allocate_pinned(8)));
            drop(device.allocate_on(&stream, 8));
            assert_eq!(double.end_capture(captured), Some(0), "mode {mode}");
        }
        drop(others);
        double.assert_clean();
    });
}

#[test]
fn a_forked_child_is_refused_everywhere_and_gives_nothing_back() {
    alone(&[], || {
        let double = Double::start("");
        let device = Double::adopted(0);
        let stream = device.create_stream().expect("a stream");
        let event = device.record(stream.raw()).expect("an event");
        let memory = device.allocate_on(&stream, 16).expect("memory");
        let pinned = device.allocate_pinned(16).expect("memory");
        let mut kept = Some((event, memory, pinned, stream));
        let refused = in_fork(|| {
            let (event, memory, pinned, stream) = kept.take().expect("held");
            let forked = Some(GpuError::Forked);
            let results = [
                driver().err(),
                nccl().err(),
                device.record(stream.raw()).err(),
                device.create_stream().err(),
                device.adopt_thread().err(),
                device.is_capturing(stream.raw()).err(),
                device.allocate(16).err(),
                device.free_memory().err(),
                device.kernels().err(),
                event.has_passed().err(),
                event.wait().err(),
                stream.synchronize().err(),
                // SAFETY: nothing is copied.
                unsafe { device.copy_within(memory.address(), 0, 4, &stream) }.err(),
            ];
            drop((event, memory, pinned, stream));
            results.iter().all(|error| *error == forked)
        });
        assert_eq!(refused, Some(true));
        let (event, memory, pinned, stream) = kept.expect("the parent's");
        assert_eq!(event.wait(), Ok(()));
        drop((event, memory, pinned));
        stream.synchronize().expect("it is idle");
        drop(stream);
        assert_eq!(double.live("streams"), 0);
        double.assert_clean();
    });
}

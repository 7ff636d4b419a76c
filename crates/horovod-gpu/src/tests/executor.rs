//! How executors end, with communicators and without the GPU's help.

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use horovod_protocol::DType;

use super::Double;
use crate::executor::{AllReduce, AllReduceInput, Call, Group, Reduction};
use crate::testing::alone;
use crate::{
    Device, Event, Executor, ExecutorSettings, GpuWork, Launch, NcclOp, RawStream, WorkPhase, nccl,
};

const ELEMENTS: usize = 4;

fn start(device: &'static Device, closing: Duration) -> Executor {
    start_with(device, Duration::from_secs(60), closing)
}

fn settings(rendezvous: Duration, closing: Duration) -> ExecutorSettings {
    ExecutorSettings {
        rendezvous,
        max_ctas: None,
        closing,
    }
}

fn start_with(device: &'static Device, rendezvous: Duration, closing: Duration) -> Executor {
    let settings = settings(rendezvous, closing);
    Executor::start(device, settings, Box::new(|| ())).expect("a thread")
}

fn group(key: u64, id: [u8; 128], size: i32, rank: i32) -> Arc<Group> {
    Arc::new(Group {
        key,
        id,
        size,
        rank,
        name: format!("test-{key}"),
    })
}

/// Sums in place, when the event has passed.
fn sum(executor: &Executor, group: &Arc<Group>, memory: u64, after: &Arc<Event>) -> Launch {
    let call = Call::AllReduce(AllReduce {
        input: AllReduceInput::At(memory),
        output: memory,
        count: ELEMENTS,
        dtype: DType::F32,
        reduction: Reduction {
            op: NcclOp::Sum,
            pre: 1.0,
            post: 1.0,
        },
    });
    let work = GpuWork {
        title: "sum".into(),
        seq: group.key,
        set: 0,
        group: Some(group.clone()),
        after: vec![after.clone()],
        calls: vec![call],
        timed: false,
    };
    // SAFETY: memory for so many elements, which only the executor uses, after the event.
    unsafe { executor.submit(work) }
}

/// A GPU, a script's stream there, memory that is written on it, and when that has been done.
fn operand(double: &Double, ordinal: i32) -> (&'static Device, RawStream, u64, Arc<Event>) {
    let device = Double::adopted(ordinal);
    let stream = double.stream(ordinal);
    let memory = double.alloc(ordinal, ELEMENTS * 4);
    double.write(stream, memory, &[0; ELEMENTS * 4]);
    let ready = Arc::new(device.record(stream).expect("an event"));
    (device, stream, memory, ready)
}

fn unique_id() -> [u8; 128] {
    nccl().and_then(crate::Nccl::unique_id).expect("an id")
}

/// The test runner's limit ends it.
fn await_that(is_so: impl Fn() -> bool) {
    while !is_so() {
        std::thread::yield_now();
    }
}

fn launched(launch: &Launch) -> Arc<Event> {
    loop {
        if let Some(end) = launch.launched() {
            return end;
        }
        std::thread::yield_now();
    }
}

#[test]
fn an_executor_is_left_to_itself_when_nccl_cannot_be_ended() {
    alone(&[], || {
        let double = Double::start("");
        let device = Double::adopted(0);
        let theirs = double.stream(0);
        let memory = double.alloc(0, ELEMENTS * 4);
        double.write(theirs, memory, &[0; ELEMENTS * 4]);
        // A kernel of a script's that does not end: NCCL frees memory, for which it waits for the device.
        let gate = double.gate(theirs);
        let ready = Arc::new(device.record(theirs).expect("an event"));
        let id = unique_id();
        let executor = start(device, Duration::from_millis(50));
        let launch = sum(&executor, &group(1, id, 1, 0), memory, &ready);
        let _end = launched(&launch);
        executor.close(false);
        assert_eq!(launch.ended(), None, "its memory is in use");
        let loss = crate::loss().expect("this process cannot use the GPU again");
        assert_eq!(
            loss.to_string(),
            "GPU 0 has not come to rest 0.05 s after NCCL was aborted, with sum under way"
        );
        double.open(gate);
        await_that(|| launch.ended().is_some());
        double.assert_clean();
    });
}

/// How a sum fails.
#[derive(Default)]
struct Failing {
    /// Of the double.
    settings: &'static str,
    /// Members that do not come.
    others: i32,
    /// Whether NCCL knows the name of the communicator.
    is_unknown: bool,
    expected: &'static str,
}

/// A sum fails while a kernel of the script's holds up the abort: its failure is known though it has not ended.
fn is_known_before_the_abort_ends(failing: &Failing) {
    let double = Double::start(failing.settings);
    let (device, _, memory, ready) = operand(&double, 0);
    let gate = double.gate(double.stream(0));
    let mut id = unique_id();
    id[0] ^= u8::from(failing.is_unknown);
    // Members that come have time to.
    let rendezvous = match failing.others {
        0 => Duration::from_secs(60),
        _ => Duration::from_millis(20),
    };
    let executor = start_with(device, rendezvous, Duration::from_secs(60));
    let group = group(1, id, 1 + failing.others, 0);
    let launch = sum(&executor, &group, memory, &ready);
    let failure = loop {
        if let Some(failure) = executor.failure() {
            break failure.clone();
        }
        std::thread::yield_now();
    };
    assert_eq!(launch.ended(), None, "the device is not at rest");
    let text = format!("{failure:?}");
    assert!(text.contains(failing.expected), "{text}");
    double.open(gate);
    await_that(|| launch.ended().is_some());
    assert_eq!(launch.ended().and_then(Result::err), Some(failure));
    executor.close(false);
    assert_eq!(double.live("communicators"), 0);
    double.assert_clean();
}

#[test]
fn a_call_that_fails_is_known_before_the_abort_ends() {
    alone(&[], || {
        is_known_before_the_abort_ends(&Failing {
            settings: "fail=ncclAllReduce:1:2",
            expected: "ncclAllReduce",
            ..Failing::default()
        });
    });
}

#[test]
fn an_error_after_the_launch_is_known_before_the_abort_ends() {
    alone(&[], || {
        is_known_before_the_abort_ends(&Failing {
            settings: "async=1:6",
            expected: "PeerFailed",
            ..Failing::default()
        });
    });
}

#[test]
fn members_that_do_not_come_are_known_before_the_abort_ends() {
    alone(&[], || {
        is_known_before_the_abort_ends(&Failing {
            others: 1,
            expected: "did not meet",
            ..Failing::default()
        });
    });
}

#[test]
fn a_communicator_that_cannot_be_made_is_known_before_the_abort_ends() {
    alone(&[], || {
        is_known_before_the_abort_ends(&Failing {
            // Blocking: the call that makes it fails.
            settings: "nccl_version=22605",
            is_unknown: true,
            expected: "ncclCommInitRankConfig",
            ..Failing::default()
        });
    });
}

/// The communicator of a removed group fails while a kernel of the script's holds up the abort.
fn is_known_before_its_abort_ends(fault: &str) {
    let double = Double::start("");
    let (device, theirs, memory, ready) = operand(&double, 0);
    let id = unique_id();
    let executor = start(device, Duration::from_secs(60));
    let launch = sum(&executor, &group(1, id, 1, 0), memory, &ready);
    await_that(|| launch.ended().is_some());
    assert_eq!(launch.ended(), Some(Ok(())));
    let gate = double.gate(theirs);
    double.configure(fault);
    executor.remove_group(1);
    await_that(|| executor.failure().is_some());
    double.open(gate);
    executor.close(false);
    assert_eq!(double.live("communicators"), 0);
    double.assert_clean();
}

#[test]
fn a_removed_group_that_cannot_be_finalized_is_known_before_its_abort_ends() {
    alone(&[], || {
        is_known_before_its_abort_ends("fail=ncclCommFinalize:1:3")
    });
}

#[test]
fn a_removed_group_that_fails_while_it_is_finalized_is_known_before_its_abort_ends() {
    alone(&[], || {
        is_known_before_its_abort_ends("fail=ncclCommGetAsyncError:1:3")
    });
}

#[test]
fn a_communicator_is_not_destroyed_while_the_device_is_at_what_only_an_abort_ends() {
    alone(&[], || {
        // The second collective waits for a rank that does not come.
        let double = Double::start("never=2");
        let (device, _, memory, ready) = operand(&double, 0);
        let executor = start(device, Duration::from_secs(60));
        let removed = group(1, unique_id(), 1, 0);
        launched(&sum(&executor, &removed, memory, &ready))
            .wait()
            .expect("it ends");
        let launch = sum(&executor, &group(2, unique_id(), 1, 0), memory, &ready);
        let _end = launched(&launch);
        executor.remove_group(1);
        await_that(|| double.calls("ncclCommFinalize") > 0);
        // It is looked at again, and is done: to destroy it waits for the device.
        let polls = double.calls("ncclCommGetAsyncError");
        while double.calls("ncclCommGetAsyncError") < polls + 2
            && double.calls("ncclCommDestroy") == 0
        {
            std::thread::yield_now();
        }
        executor.abort("enough");
        await_that(|| launch.ended().is_some());
        executor.close(false);
        assert_eq!(double.live("communicators"), 0);
        double.assert_clean();
    });
}

#[test]
fn work_that_ended_before_the_abort_has_not_failed() {
    alone(&[], || {
        let double = Double::start("");
        let (device, theirs, memory, _) = operand(&double, 0);
        let behind_a_gate = || {
            let gate = double.gate(theirs);
            (gate, Arc::new(device.record(theirs).expect("an event")))
        };
        let ((first_gate, first_ready), (gate, ready)) = (behind_a_gate(), behind_a_gate());
        // The executor's thread stays in the notification of the first one's end: it does not see the second one's.
        let first_launch = Arc::new(OnceLock::<Launch>::new());
        let (stays, go_on) = (mpsc::channel(), mpsc::channel::<()>());
        let (first, go_on_received) = (first_launch.clone(), Mutex::new(Some(go_on.1)));
        let notify = Box::new(move || {
            if first.get().is_some_and(|first| first.ended().is_some())
                && let Some(go_on) = go_on_received.lock().expect("no panic").take()
            {
                stays.0.send(()).expect("the test listens");
                go_on.recv().expect("the test sends");
            }
        });
        let minute = Duration::from_secs(60);
        let executor = Executor::start(device, settings(minute, minute), notify).expect("a thread");
        let group = group(1, unique_id(), 1, 0);
        let launch = sum(&executor, &group, memory, &first_ready);
        let _ = first_launch.set(launch); // there was none
        let launch = sum(&executor, &group, memory, &ready);
        let end = launched(&launch);
        double.open(first_gate);
        stays.1.recv().expect("the executor notifies");
        double.open(gate);
        await_that(|| end.has_passed().expect("a device"));
        executor.abort("a peer failed later");
        go_on.0.send(()).expect("the executor listens");
        await_that(|| launch.ended().is_some());
        assert_eq!(launch.ended(), Some(Ok(())));
        executor.close(false);
        double.assert_clean();
    });
}

#[test]
fn work_that_is_not_taken_up_is_seen_as_what_keeps_all_up() {
    alone(&[], || {
        let double = Double::start("");
        let (device, theirs, memory, ready) = operand(&double, 0);
        let executor = start(device, Duration::from_secs(60));
        let first = sum(&executor, &group(1, unique_id(), 1, 0), memory, &ready);
        await_that(|| first.ended().is_some());
        // A kernel of the script's, for which it is waited when a communicator is destroyed.
        let gate = double.gate(theirs);
        executor.remove_group(1);
        await_that(|| double.calls("ncclCommDestroy") > 0);
        let launch = sum(&executor, &group(2, unique_id(), 1, 0), memory, &ready);
        let oldest = executor.progress().oldest.expect("it is the next");
        assert_eq!((oldest.seq, oldest.phase), (2, WorkPhase::Launching));
        double.open(gate);
        await_that(|| launch.ended().is_some());
        executor.close(true);
        double.assert_clean();
    });
}

/// An abort of communicators does not disturb a capture of the script.
fn abort_leaves_captures_alone(settings: &str) {
    let double = Double::start(settings);
    let (device, _, memory, ready) = operand(&double, 0);
    let executor = start(device, Duration::from_secs(60));
    for key in 0..2 {
        let id = unique_id();
        let launch = sum(&executor, &group(key, id, 1, 0), memory, &ready);
        launched(&launch).wait().expect("it ends");
    }
    let captured = double.stream(0);
    double.begin_capture(captured, 0);
    executor.close(false);
    assert_eq!(double.live("communicators"), 0);
    assert_eq!(double.end_capture(captured), Some(0));
    double.assert_clean();
}

#[test]
fn an_abort_of_all_at_once_leaves_captures_alone() {
    alone(&[], || abort_leaves_captures_alone(""));
}

#[test]
fn an_abort_of_each_by_its_own_thread_leaves_captures_alone() {
    alone(&[], || abort_leaves_captures_alone("nccl_version=21805"));
}

/// Elements that NCCL is given as others, for which a launch needs more memory than is kept.
const MANY: usize = 3 << 20;

/// Sums so many of them in place.
fn widened_sum(double: &Double, executor: &Executor, group: &Arc<Group>, count: usize) -> Launch {
    let device = Double::adopted(0);
    let theirs = double.stream(0);
    let memory = double.alloc(0, 2 * count);
    double.write(theirs, memory, &vec![0; 2 * count]);
    let ready = Arc::new(device.record(theirs).expect("an event"));
    let call = Call::AllReduce(AllReduce {
        input: AllReduceInput::At(memory),
        output: memory,
        count,
        dtype: DType::I16,
        reduction: Reduction {
            op: NcclOp::Sum,
            pre: 1.0,
            post: 1.0,
        },
    });
    let work = GpuWork {
        title: "widened".into(),
        seq: 0,
        set: 0,
        group: Some(group.clone()),
        after: vec![ready],
        calls: vec![call],
        timed: false,
    };
    // SAFETY: memory for so many elements, which only the executor uses, after the event.
    unsafe { executor.submit(work) }
}

#[test]
fn what_a_launch_needs_is_kept_until_the_abort_when_nccl_is_stopped_amid_it() {
    alone(&[], || {
        let double = Double::start("");
        let id = unique_id();
        let executor = start(Double::adopted(0), Duration::from_secs(60));
        let group = group(1, id, 1, 0);
        let first = widened_sum(&double, &executor, &group, ELEMENTS);
        launched(&first).wait().expect("it ends");
        // A thread of NCCL's may launch at any time.
        double.configure("in_progress=1000000");
        let launch = widened_sum(&double, &executor, &group, MANY);
        await_that(|| double.calls("ncclGroupEnd") > 0);
        executor.abort("enough");
        await_that(|| launch.ended().is_some());
        executor.close(false);
        double.assert_clean();
    });
}

#[test]
fn without_memory_pools_nothing_is_freed_while_the_device_works() {
    alone(&[], || {
        let double = Double::start("pools=0,delay=20");
        let id = unique_id();
        let executor = start(Double::adopted(0), Duration::from_secs(60));
        let group = group(1, id, 1, 0);
        // The real `cuMemFree` waits for the device: for a kernel of NCCL's, which may wait for a rank that is lost.
        let counts = [ELEMENTS, MANY, 2 * MANY, MANY];
        let launches = counts.map(|count| widened_sum(&double, &executor, &group, count));
        for launch in launches {
            await_that(|| launch.ended().is_some());
            assert_eq!(launch.ended(), Some(Ok(())));
        }
        assert_eq!(double.calls("cuMemFree_v2"), 0);
        executor.close(true);
        assert_eq!(double.live("communicators"), 0);
        double.assert_clean();
    });
}

#[test]
fn communicators_end_in_any_order_on_their_members() {
    alone(&[], || {
        let double = Double::start("devices=2,in_progress=2");
        let ids = [unique_id(), unique_id()];
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let double = &double;
                scope.spawn(move || {
                    let (device, _, memory, ready) = operand(double, rank);
                    let executor = start(device, Duration::from_secs(60));
                    for (key, id) in (0..).zip(ids) {
                        // The second has on one of them the place that the first has on the other.
                        let key = if rank == 0 { key } else { 1 - key };
                        let launch = sum(&executor, &group(key, id, 2, rank), memory, &ready);
                        launched(&launch).wait().expect("it ends");
                    }
                    executor.close(true);
                });
            }
        });
        assert_eq!(double.calls("ncclCommAbort"), 0, "nobody waits in vain");
        assert_eq!(double.calls("ncclCommDestroy"), 4);
        double.assert_clean();
    });
}

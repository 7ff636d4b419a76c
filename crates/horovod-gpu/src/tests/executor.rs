//! How executors end, with communicators and without the GPU's help.

use std::sync::Arc;
use std::time::Duration;

use horovod_protocol::DType;

use super::Double;
use crate::executor::{AllReduce, Call, Group, Operand, Reduction};
use crate::testing::alone;
use crate::{Device, Event, Executor, ExecutorSettings, Launch, NcclOp, Work, nccl};

const ELEMENTS: usize = 4;

fn start(device: &'static Device, closing: Duration) -> Executor {
    let settings = ExecutorSettings {
        rendezvous: Duration::from_secs(60),
        max_ctas: None,
        closing,
    };
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
        input: Operand::At(memory),
        output: memory,
        count: ELEMENTS,
        dtype: DType::F32,
        reduction: Reduction {
            op: NcclOp::Sum,
            pre: 1.0,
            post: 1.0,
        },
    });
    let work = Work {
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
        let id = nccl().and_then(crate::Nccl::unique_id).expect("an id");
        let executor = start(device, Duration::from_millis(50));
        let launch = sum(&executor, &group(1, id, 1, 0), memory, &ready);
        let _end = launched(&launch);
        executor.close(false);
        assert_eq!(launch.ended(), None, "its memory is in use");
        double.open(gate);
        while launch.ended().is_none() {
            std::thread::yield_now();
        }
        double.assert_clean();
    });
}

#[test]
fn communicators_end_in_any_order_on_their_members() {
    alone(&[], || {
        let double = Double::start("devices=2,in_progress=2");
        let id = || nccl().and_then(crate::Nccl::unique_id).expect("an id");
        let ids = [id(), id()];
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let double = &double;
                scope.spawn(move || {
                    let device = Double::adopted(rank);
                    let theirs = double.stream(rank);
                    let memory = double.alloc(rank, ELEMENTS * 4);
                    double.write(theirs, memory, &[0; ELEMENTS * 4]);
                    let ready = Arc::new(device.record(theirs).expect("an event"));
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

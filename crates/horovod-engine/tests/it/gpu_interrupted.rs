//! An operation on GPUs whose caller leaves its wait while the members still tell each other what they send.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::gpu_double::ranks::{OnRank, on_ranks};
use crate::gpu_double::{Memory, allocator, with_double};
use horovod_engine::config::{Config, GpuOperations};
use horovod_engine::gpu::Ready;
use horovod_engine::{DType, Op, ProcessSetId, ReadyEvent, Submission, Waited};

/// Rows that each rank sends to each.
const ROWS: u64 = 3;
/// The wait of a caller that leaves.
const SHORT: Duration = Duration::from_millis(2);
const LIMIT: Duration = Duration::from_secs(120);
const ROUNDS: u64 = 8;

/// A tensor's bytes are there when rank 0's caller has left a wait of this round.
struct HasLeft {
    rounds: Arc<AtomicU64>,
    round: u64,
}

impl ReadyEvent for HasLeft {
    fn is_ready(&self) -> Result<bool, String> {
        Ok(self.rounds.load(Ordering::Acquire) > self.round)
    }
}

/// An alltoall of new tensors; the splits that this rank receives.
fn exchange(on: &OnRank<'_>, round: u64, left: &Arc<AtomicU64>) -> Option<Vec<u64>> {
    let (device, stream) = (on.rank as i32, on.stream);
    let rows = ROWS * on.size as u64;
    let input = Memory::new(on.double, device, stream, rows as usize);
    input.write(&vec![1; rows as usize]);
    let ready = Ready::record(device, stream).expect("records");
    let mut tensor = input.tensor(DType::U8, &[rows], None, &ready);
    if on.rank != 0 {
        let rounds = left.clone();
        tensor = tensor.ready_after(Some(Box::new(HasLeft { rounds, round })));
    }
    let made = Arc::new(Mutex::new(Vec::new()));
    let name = format!("exchange {round}");
    let (op, set) = (Op::Alltoall, ProcessSetId::GLOBAL);
    let submission = Submission::new("test", Some(&name), op, set, vec![tensor].into());
    // SAFETY: memory of the double, kept until the operation has ended.
    let submission =
        unsafe { submission.allocating(allocator(on.double, device, stream, made.clone())) };
    let handle = on.engine.submit(submission).expect("is taken");
    if on.rank == 0 {
        let waited = on.engine.wait(handle, SHORT);
        assert!(matches!(waited, Waited::Pending), "{waited:?}");
        left.fetch_add(1, Ordering::Release);
    }
    let Waited::Ended { result, .. } = on.engine.wait(handle, LIMIT) else {
        panic!("it does not end");
    };
    on.engine.wait_for_devices(LIMIT).expect("runs");
    result.expect("ends well").received_splits
}

#[test]
fn an_alltoall_whose_caller_leaves_its_wait_receives_all_rows() {
    let test = "an_alltoall_whose_caller_leaves_its_wait_receives_all_rows";
    with_double(test, "devices=2", |double| {
        let config = |config: &mut Config| config.gpu.operations = GpuOperations::Nccl;
        let left = Arc::new(AtomicU64::new(0));
        on_ranks(double, 2, config, move |on| {
            for round in 0..ROUNDS {
                let splits = exchange(on, round, &left);
                assert_eq!(splits, Some(vec![ROWS; on.size]), "rank {}", on.rank);
            }
        });
    });
}

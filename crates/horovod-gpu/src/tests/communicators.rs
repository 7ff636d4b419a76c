//! Communicators of two ranks: operations, progress, errors and ends.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Barrier;

use super::Double;
use crate::testing::alone;
use crate::{
    CommSettings, Communicator, Device, GpuError, NcclOp, NcclType, Progress, Stream, nccl,
};

/// One rank of a job: a device, a stream and a communicator.
struct Rank {
    number: i32,
    device: &'static Device,
    stream: Stream,
    communicator: Communicator,
}

fn settings() -> CommSettings {
    CommSettings {
        name: "hvd-0-1".to_owned(),
        ..CommSettings::default()
    }
}

/// Polls until the communicator takes the next call.
fn settle(communicator: &Communicator, mut progress: Progress) -> Result<usize, GpuError> {
    let mut polls = 0;
    while progress == Progress::InProgress {
        std::thread::yield_now();
        progress = communicator.progress()?;
        polls += 1;
    }
    Ok(polls)
}

impl Rank {
    fn join(id: &[u8; 128], size: i32, number: i32, ordinal: i32) -> Self {
        let device = Double::adopted(ordinal);
        let nccl = nccl().expect("the double");
        let communicator = nccl.begin(id, size, number, &settings()).expect("begun");
        settle(&communicator, Progress::InProgress).expect("made");
        Self {
            number,
            device,
            stream: device.create_stream().expect("a stream"),
            communicator,
        }
    }

    /// Launches, polls, and returns how often it had to.
    fn launch(&self, operation: impl FnOnce(&Self) -> Result<Progress, GpuError>) -> usize {
        let progress = operation(self).expect("launched");
        settle(&self.communicator, progress).expect("in flight")
    }

    /// Memory that holds these values.
    fn memory(&self, double: &Double, values: &[f32]) -> u64 {
        let address = double.alloc(self.device.ordinal(), values.len() * 4);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        double.write(self.stream.raw(), address, &bytes);
        address
    }

    fn values(&self, double: &Double, address: u64, count: usize) -> Vec<f32> {
        let bytes = double.read(self.stream.raw(), address, count * 4);
        let words = bytes.chunks(4).map(|b| b.try_into().expect("four bytes"));
        words.map(f32::from_le_bytes).collect()
    }

    /// The good end.
    fn finish(self) {
        self.stream.synchronize().expect("it ends");
        self.launch(|rank| rank.communicator.finalize());
        nccl()
            .and_then(|nccl| nccl.destroy_all(vec![self.communicator]))
            .expect("destroyed");
    }
}

/// Two ranks as threads, each with a device of its own.
fn two_ranks(body: impl Fn(Rank) + Sync) {
    let id = nccl().and_then(crate::Nccl::unique_id).expect("an id");
    // A rank that ends early must not be missed by one that still joins.
    let joined = Barrier::new(2);
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (id, body, joined) = (&id, &body, &joined);
            scope.spawn(move || {
                let rank = Rank::join(id, 2, number, number);
                joined.wait();
                body(rank);
            });
        }
    });
}

#[test]
fn every_operation_gives_its_result_through_calls_that_go_on_after_they_return() {
    alone(&[], || {
        let double = Double::start("devices=2,in_progress=3,seed=5,delay=20");
        two_ranks(|rank| {
            let (own, f32s) = (rank.number as f32, NcclType::F32);
            let (to, from) = (
                rank.memory(&double, &[0.0; 8]),
                rank.memory(&double, &[1.0 + own, 10.0, 3.0, 4.0]),
            );
            let sum = NcclOp::Sum;
            // SAFETY: four elements each, eight of `to`; all work of a rank is in its stream.
            unsafe {
                let polls =
                    rank.launch(|r| r.communicator.all_reduce(from, to, 4, f32s, sum, &r.stream));
                assert!(polls >= 3, "{polls} polls");
                assert_eq!(rank.values(&double, to, 4), [3.0, 20.0, 6.0, 8.0]);
                let max = NcclOp::Max;
                rank.launch(|r| r.communicator.reduce(from, to, 4, f32s, max, 1, &r.stream));
                let first = if own == 1.0 { 2.0 } else { 3.0 };
                assert_eq!(rank.values(&double, to, 1), [first], "on the root only");
                rank.launch(|r| {
                    r.communicator
                        .reduce_scatter(from, to, 2, f32s, sum, &r.stream)
                });
                let parts = [[3.0, 20.0], [6.0, 8.0]];
                assert_eq!(rank.values(&double, to, 2), parts[rank.number as usize]);
                rank.launch(|r| r.communicator.all_gather(from, to, 2, f32s, &r.stream));
                assert_eq!(rank.values(&double, to, 4), [1.0, 10.0, 2.0, 10.0]);
                rank.launch(|r| r.communicator.broadcast(from, to, 4, f32s, 1, &r.stream));
                assert_eq!(rank.values(&double, to, 4), [2.0, 10.0, 3.0, 4.0]);
            }
            rank.finish();
        });
        assert_eq!(double.live("communicators"), 0);
        double.assert_clean();
    });
}

#[test]
fn a_group_is_one_launch_of_many_calls() {
    alone(&[], || {
        let double = Double::start("devices=2,in_progress=2");
        two_ranks(|rank| {
            let nccl = nccl().expect("the double");
            let peer = 1 - rank.number;
            let from = rank.memory(&double, &[rank.number as f32, 5.0]);
            let to = rank.memory(&double, &[0.0; 4]);
            let stream = &rank.stream;
            // SAFETY: two elements from `from`, one or two to `to`; the group is ended by this thread.
            rank.launch(|rank| unsafe {
                let comm = &rank.communicator;
                nccl.group_start()?;
                let _ = comm.send(from, 1, NcclType::F32, peer, stream)?;
                let _ = comm.recv(to, 1, NcclType::F32, peer, stream)?;
                let _ =
                    comm.all_reduce(from + 4, to + 4, 1, NcclType::F32, NcclOp::Product, stream)?;
                nccl.group_end()
            });
            assert_eq!(rank.values(&double, to, 2), [peer as f32, 25.0]);
            rank.finish();
        });
        double.assert_clean();
    });
}

#[test]
fn ranks_of_two_processes_meet_by_the_id() {
    /// Where the second process finds the id.
    const ID: &str = "GPU_TEST_ID";
    alone(&[], || {
        #[expect(clippy::disallowed_methods, reason = "from the first rank")]
        let given = std::env::var(ID);
        let double = Double::start("in_progress=1,devices=2");
        let mut second = None;
        let id = match &given {
            Ok(text) => {
                let numbers = text.split(' ').map(|n| n.parse().expect("a byte"));
                numbers.collect::<Vec<u8>>().try_into().expect("128 bytes")
            }
            Err(_) => {
                let id = nccl().and_then(crate::Nccl::unique_id).expect("an id");
                let text = id.map(|byte| byte.to_string()).join(" ");
                let arguments: Vec<_> = std::env::args_os().skip(1).collect();
                let command = Command::new(std::env::current_exe().expect("this test binary"))
                    .args(arguments)
                    .env(ID, text)
                    .stdout(Stdio::piped())
                    .spawn();
                second = Some(command.expect("this test binary"));
                id
            }
        };
        let number = i32::from(given.is_ok());
        let rank = Rank::join(&id, 2, number, number);
        let memory = rank.memory(&double, &[1.0, 2.0]);
        // SAFETY: two elements, in the rank's stream.
        rank.launch(|r| unsafe {
            r.communicator
                .all_reduce(memory, memory, 2, NcclType::F32, NcclOp::Sum, &r.stream)
        });
        assert_eq!(rank.values(&double, memory, 2), [2.0, 4.0]);
        rank.finish();
        double.assert_clean();
        if let Some(mut second) = second {
            let lines = BufReader::new(second.stdout.take().expect("piped")).lines();
            let text: Vec<String> = lines.map_while(Result::ok).collect();
            assert!(second.wait().expect("it ends").success(), "{text:#?}");
        }
    });
}

/// A peer never arrives; then the communicators are aborted, and the GPU comes to rest.
fn abort_what_never_ends(settings: &str) {
    let double = Double::start(settings);
    let nccl = nccl().expect("the double");
    let device = Double::adopted(0);
    let stream = device.create_stream().expect("a stream");
    let memory = double.alloc(0, 64);
    double.write(stream.raw(), memory, &[0; 64]);
    let communicators: Vec<Communicator> = (0..2)
        .map(|_| {
            let id = nccl.unique_id().expect("an id");
            let made = nccl.begin(&id, 1, 0, &self::settings()).expect("begun");
            settle(&made, Progress::InProgress).expect("made");
            made
        })
        .collect();
    for communicator in &communicators {
        // SAFETY: four elements in one stream's order.
        let progress = unsafe {
            communicator.all_reduce(memory, memory, 4, NcclType::F32, NcclOp::Sum, &stream)
        };
        settle(communicator, progress.expect("launched")).expect("in flight");
    }
    let end = device.record(stream.raw()).expect("an event");
    assert_eq!(end.has_passed(), Ok(false));
    nccl.abort_all(communicators).expect("aborted");
    end.wait().expect("it passes");
    assert_eq!(double.live("communicators"), 0);
    assert_eq!(double.calls("ncclCommAbort"), 2);
    double.assert_clean();
}

#[test]
fn communicators_are_aborted_in_one_group() {
    alone(&[], || abort_what_never_ends("never=1,nccl_version=22203"));
}

#[test]
fn communicators_of_an_older_nccl_are_aborted_at_once_by_threads() {
    alone(&[], || abort_what_never_ends("never=1,nccl_version=22105"));
}

#[test]
fn an_error_after_the_launch_comes_with_its_text() {
    alone(&[], || {
        let double = Double::start("devices=2,async=1:6");
        two_ranks(|rank| {
            let memory = rank.memory(&double, &[1.0; 4]);
            // SAFETY: four elements in the rank's stream.
            let progress = unsafe {
                let (comm, stream) = (&rank.communicator, &rank.stream);
                comm.all_reduce(memory, memory, 4, NcclType::F32, NcclOp::Sum, stream)
            };
            let mut error = progress.err();
            // One of the two ranks has it by itself, the other one by its peer's end.
            while error.is_none() {
                std::thread::yield_now();
                error = rank.communicator.progress().err();
            }
            let Some(GpuError::Nccl { code: 6, text, .. }) = error else {
                panic!("{error:?}")
            };
            assert!(!text.is_empty());
            let nccl = nccl().expect("the double");
            nccl.abort_all(vec![rank.communicator]).expect("aborted");
            rank.stream.synchronize().expect("it comes to rest");
        });
        assert_eq!(double.live("communicators"), 0);
    });
}

#[test]
fn a_call_that_fails_says_which_and_why() {
    alone(&[], || {
        let double = Double::start("fail=ncclCommInitRankConfig:1:5,fail=ncclGroupStart:2:3");
        Double::adopted(0);
        let nccl = nccl().expect("the double");
        let id = nccl.unique_id().expect("an id");
        let error = nccl.begin(&id, 1, 0, &settings()).expect_err("it fails");
        let GpuError::Nccl { call, code, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((*call, *code), ("ncclCommInitRankConfig", 5));
        assert!(error.to_string().contains("invalid usage"), "{error}");
        assert!(!error.is_sticky());
        assert_eq!(double.live("communicators"), 0);
        // SAFETY: an empty group.
        unsafe {
            nccl.group_start().expect("begun");
            assert_eq!(nccl.group_end(), Ok(Progress::Done));
            assert!(matches!(
                nccl.group_start(),
                Err(GpuError::Nccl { code: 3, .. })
            ));
        }
        assert_eq!(
            nccl.abort_all(Vec::new()).err().map(|e| e.is_sticky()),
            None
        );
        double.assert_clean();
    });
}

#[test]
fn a_communicator_that_is_dropped_stays() {
    alone(&[], || {
        let double = Double::start("");
        Double::adopted(0);
        let nccl = nccl().expect("the double");
        let id = nccl.unique_id().expect("an id");
        let made = nccl.begin(&id, 1, 0, &settings()).expect("begun");
        settle(&made, Progress::InProgress).expect("made");
        drop(made);
        assert_eq!(double.live("communicators"), 1);
        assert_eq!(
            double.calls("ncclCommAbort") + double.calls("ncclCommDestroy"),
            0
        );
    });
}

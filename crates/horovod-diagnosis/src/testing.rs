//! Stall reports of which other ranks say anything, for fuzzing.

use std::sync::Arc;
use std::time::Duration;

use horovod_protocol::{ProcessSetId, Rank, StalledRequest, Tree};

use super::device::FIRST_QUESTION;
use super::leader::{Leader, LeaderStep};
pub use super::replicas::testing::{replica_report, replica_report_seeds};
use super::{
    Brief, Complaint, DeviceInquiry, DevicePhase, DeviceStanding, DeviceStep, FRAMES_MAX, Frame,
    JobView, Key, Late, Message, NAMES_MAX, OnDevice, STACK_TEXT_MAX, Standing, THREADS_MAX,
    ThreadStack, Unfinished, is_message, render, render_device, summary_device,
};

const SIZE: u32 = 4;
/// More than any report of so few ranks.
const REPORT_BYTES_MAX: usize = 1 << 20;

/// Answers to rank 0's questions, each with its length in front: they are bounded, survive being written and read
/// again, and whatever they say becomes a bounded report.
///
/// # Panics
/// If not.
pub fn stall_report(bytes: &[u8]) {
    let [who, rest @ ..] = bytes else { return };
    let mut plan = rest;
    let mut leader = Leader::new(9000);
    // Rank 0 itself has counted the waits.
    let request = |name: &str, missing: u8, now: u64| StalledRequest {
        set: ProcessSetId(0),
        name: Arc::from(name),
        waiting: (0..SIZE)
            .filter(|r| missing >> r & 1 == 0)
            .map(Rank)
            .collect(),
        missing: (0..SIZE)
            .filter(|r| missing >> r & 1 == 1)
            .map(Rank)
            .collect(),
        waited_ns: now * 1_000_000,
    };
    let mut now = 0;
    for _ in 0..8 {
        now = leader.deadline().max(now);
        let late = |_| Late {
            requests: vec![request("a", who & 15, now), request("b", who >> 4, now)],
            running: (who % 3 == 0).then(|| request("c", 14, now)),
        };
        match leader.poll(now, late) {
            Some(LeaderStep::Ask { question, ranks }) => {
                let ask = Message::Ask { question };
                assert_eq!(Message::decode(&ask.encode()), Ok(ask));
                for rank in ranks {
                    if let Some(Message::Answer { question, standing }) = next(&mut plan) {
                        leader.answered(question, rank, standing);
                    }
                }
            }
            Some(LeaderStep::Report(diagnosis)) => {
                let job = JobView {
                    // 3 speaks through 1.
                    tree: &Tree::new(&[0; SIZE as usize], 2),
                    host_of: &|rank| format!("h{rank}"),
                    heartbeat: Some(Duration::from_secs(30)),
                    has_newcomers: true,
                };
                let report = render(&diagnosis, &job);
                assert!(report.contains("What waits"), "{report}");
                assert!(report.len() < REPORT_BYTES_MAX);
            }
            None => {}
        }
    }
    gpu_reports(&mut plan);
}

/// Messages of ranks about GPUs whose work does not end, and their answers.
fn gpu_reports(plan: &mut &[u8]) {
    let mut inquiry = DeviceInquiry::default();
    let host_of = |rank: Rank| format!("h{rank}");
    let mut asked = (0, Vec::new());
    for now in 0..16 {
        match next(plan) {
            Some(Message::Complaint(complaint)) => inquiry.complain(now, Rank(1), complaint),
            Some(Message::Answer { standing, .. }) => {
                let (question, ranks) = &mut asked;
                if let Some(rank) = ranks.pop() {
                    inquiry.answered(*question, rank, &standing);
                }
            }
            _ => {}
        }
        // Answers do not come in time at last.
        match inquiry.poll(now * 500, |_| (0..SIZE).map(Rank).collect()) {
            Some(DeviceStep::Ask { question, ranks }) => asked = (question, ranks),
            Some(DeviceStep::Report(diagnosis)) => {
                let report = render_device(&diagnosis, &host_of);
                assert!(report.contains("without an end"), "{report}");
                assert!(report.len() < REPORT_BYTES_MAX);
                assert!(summary_device(&diagnosis, &host_of).len() < REPORT_BYTES_MAX);
            }
            None => {}
        }
    }
}

fn next(plan: &mut &[u8]) -> Option<Message> {
    let [length, rest @ ..] = *plan else {
        return None;
    };
    let (message, rest) = rest.split_at(rest.len().min(usize::from(*length)));
    *plan = rest;
    let decoded = Message::decode(message).ok()?;
    assert!(is_message(message));
    assert_eq!(Message::decode(&decoded.encode()), Ok(decoded.clone()));
    if let Message::Answer { standing, .. } = &decoded {
        assert!(standing.waits_for.len() <= NAMES_MAX && standing.threads.len() <= THREADS_MAX);
        assert!(standing.without_stacks.len() <= STACK_TEXT_MAX);
        let frames = standing.threads.iter().map(|thread| thread.frames.len());
        assert!(frames.max().unwrap_or(0) <= FRAMES_MAX);
    }
    Some(decoded)
}

/// A message with its length in front, as the targets read it.
pub(crate) fn prefixed(message: Vec<u8>) -> Vec<u8> {
    let length = u8::try_from(message.len()).expect("a short message");
    [&[length], &message[..]].concat()
}

/// Valid inputs of [`stall_report`]: answers of ranks that wait for each other, and every other kind of message.
pub fn stall_report_seeds() -> Vec<Vec<u8>> {
    let key = |name: &str| -> Key { (0, Arc::from(name)) };
    let at = OnDevice {
        seq: 9,
        key: key("g"),
        phase: DevicePhase::Runs,
        ms: 70_000,
    };
    let standing = |name: &str| Standing {
        pid: 4711,
        submitted: 3,
        blocked: true,
        waits_for: vec![key(name)],
        in_hand: Unfinished {
            count: 1,
            names: vec![key("g")],
            callbacks: 1,
        },
        device: Some(DeviceStanding {
            given: Some(9),
            at: Some(at.clone()),
        }),
        threads: vec![ThreadStack {
            name: "MainThread".into(),
            frames: vec![Frame {
                file: "train.py".into(),
                line: 7,
                function: "step".into(),
            }],
        }],
        ..Standing::default()
    };
    let answer = |question, name| Message::Answer {
        question,
        standing: standing(name),
    };
    let seed = |who: u8, messages: &[Message]| {
        let messages = messages.iter().map(Message::encode).flat_map(prefixed);
        [who].into_iter().chain(messages).collect()
    };
    let complaint = Message::Complaint(Complaint {
        seq: 9,
        key: key("g"),
        ms: 70_000,
        ends: true,
    });
    // Rank 0 asks all ranks twice for each of its reports.
    let answers: Vec<_> = (1..=4)
        .flat_map(|question| ["a", "b", "b", "a"].map(|name| answer(question, name)))
        .collect();
    let on_device = (0..SIZE).map(|_| answer(FIRST_QUESTION + 1, "b"));
    let devices: Vec<_> = answers
        .iter()
        .cloned()
        .chain([complaint])
        .chain(on_device)
        .collect();
    let others = [
        Message::Ask { question: 9000 },
        Message::Soft { waits: true },
        Message::AskBriefly {
            question: 1,
            keys: vec![key("a")],
        },
        Message::Brief {
            question: 1,
            brief: Brief {
                blocked: true,
                waits_for: vec![(key("a"), 5)],
                pending: vec![true],
            },
        },
        Message::LetGo {
            handle: 5,
            rank: 1,
            name: "a".into(),
        },
    ];
    let all = [(0x12, &answers[..]), (0x4e, &answers[..])];
    let more = [(0x12, &devices[..]), (3, &others[..])];
    let all = all.into_iter().chain(more);
    all.map(|(who, messages)| seed(who, messages)).collect()
}

//! One message of each kind, for tests and as seeds of fuzzing.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use super::{
    Answer, DialedTask, ExitStatus, FromAgent, JobSpec, Question, RankSpec, Stop, Stream, Threads,
    ToAgent,
};

/// The launcher's messages.
pub fn to_agent() -> Vec<ToAgent> {
    let pair = |name: &str, value: &[u8]| (name.into(), OsString::from_vec(value.to_vec()));
    let rank = |rank: u32| RankSpec {
        rank,
        env: vec![pair("HOROVOD_RANK", rank.to_string().as_bytes())],
    };
    vec![
        ToAgent::Job(JobSpec {
            inherit_env: true,
            env: vec![pair("A", b"1"), pair("B", b"\xff\n")],
            on_top: vec![pair("C", b"2")],
            stays: true,
            cwd: "/tmp/a b".into(),
            command: vec!["python".into(), OsString::from_vec(b"\xfe".to_vec())],
            silence_max_s: 60,
            terminate_timeout_s: 300,
            ranks: vec![rank(0), rank(300)],
            is_open: true,
        }),
        ToAgent::Start,
        ToAgent::Stop(Stop::Terminate),
        ToAgent::Ping,
        ToAgent::Spawn(rank(70_000)),
        ToAgent::End(70_000),
        ToAgent::CheckStopped { rank: 3, pid: 4711 },
        ToAgent::Close,
        ToAgent::Cause("a firewall".into()),
        ToAgent::Examine(Question::Clock(7)),
    ]
}

/// The messages of agents of this version. The task of another version's agent is not read.
pub fn from_agent(version: &str) -> Vec<FromAgent> {
    let hello = |task| FromAgent::Hello {
        version: version.into(),
        hostname: "h".into(),
        task,
    };
    let exited = |status| FromAgent::Exited { rank: 2, status };
    vec![
        hello(None),
        hello(Some(DialedTask {
            index: 70_000,
            attempt: 2,
            host: "boot|h".into(),
            host_name: "h".into(),
            pid: 77,
            python: "3.11.7".into(),
        })),
        FromAgent::Ready,
        FromAgent::Refused {
            code: 127,
            why: "no".into(),
        },
        FromAgent::Note("well".into()),
        FromAgent::Started { rank: 1, pid: 77 },
        FromAgent::Output {
            rank: 2,
            stream: Stream::Stderr,
            bytes: vec![0xff, b'\r'],
        },
        exited(ExitStatus::Code(-1)),
        exited(ExitStatus::Signal(9)),
        exited(ExitStatus::OutOfMemory),
        FromAgent::StoppedState {
            rank: 2,
            is_stopped: true,
        },
        FromAgent::Threads(Threads {
            threads: 1,
            cores: 2,
            ranks: 300,
            is_openmp: true,
        }),
        FromAgent::Done,
        FromAgent::Found(Answer::Clock(7, u64::MAX)),
    ]
}

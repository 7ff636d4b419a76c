//! Every message survives its way; nothing that is no message does.

use std::os::unix::ffi::OsStringExt;

use super::*;

fn pair(name: &str, value: &[u8]) -> (OsString, OsString) {
    (name.into(), OsString::from_vec(value.to_vec()))
}

#[test]
fn messages_survive_one_byte_at_a_time() {
    let job = ToAgent::Job(JobSpec {
        inherit_env: true,
        env: vec![pair("A", b"1"), pair("B", b"\xff\n")],
        on_top: vec![pair("C", b"2")],
        stays: true,
        cwd: "/tmp/a b".into(),
        command: vec!["python".into(), OsString::from_vec(b"\xfe".to_vec())],
        silence_max_s: 60,
        terminate_timeout_s: 30,
        ranks: vec![RankSpec {
            rank: 3,
            env: vec![pair("HOROVOD_RANK", b"3")],
        }],
        is_open: true,
    });
    let sent = [
        job,
        ToAgent::Start,
        ToAgent::Stop(Stop::Kill),
        ToAgent::Ping,
        ToAgent::Spawn(RankSpec {
            rank: 70_000,
            env: vec![pair("A", b"2")],
        }),
        ToAgent::End(70_000),
        ToAgent::CheckStopped { rank: 3, pid: 4711 },
        ToAgent::Close,
        ToAgent::Cause("a firewall".into()),
        ToAgent::Examine(Question::Clock(7)),
    ];
    let mut bytes = Vec::new();
    sent.iter().for_each(|message| message.encode(&mut bytes));
    let mut buffer = FrameBuffer::default();
    let mut got = Vec::new();
    for byte in bytes {
        buffer.push(&[byte]);
        while let Some(frame) = buffer.next_frame().expect("short") {
            got.push(ToAgent::decode(frame).expect("valid"));
        }
    }
    assert_eq!(got, sent);
}

#[test]
fn answers_survive() {
    let sent = [
        FromAgent::Hello {
            version: "1".into(),
            hostname: "h".into(),
            task: None,
        },
        FromAgent::Hello {
            version: env!("CARGO_PKG_VERSION").into(),
            hostname: "h".into(),
            task: Some(DialedTask {
                index: 70_000,
                attempt: 2,
                host: "boot|h".into(),
                host_name: "h".into(),
                pid: 77,
                python: "3.11.7".into(),
            }),
        },
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
        FromAgent::Exited {
            rank: 2,
            status: ExitStatus::Code(-1),
        },
        FromAgent::Exited {
            rank: 2,
            status: ExitStatus::Signal(9),
        },
        FromAgent::Exited {
            rank: 2,
            status: ExitStatus::OutOfMemory,
        },
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
    ];
    let mut bytes = Vec::new();
    sent.iter().for_each(|message| message.encode(&mut bytes));
    let mut buffer = FrameBuffer::default();
    buffer.push(&bytes);
    for want in sent {
        let frame = buffer.next_frame().expect("short").expect("complete");
        assert_eq!(FromAgent::decode(frame), Ok(want));
    }
}

#[test]
fn refuses_garbage_without_believing_its_lengths() {
    let mut buffer = FrameBuffer::default();
    buffer.push(b"Welcome to this machine!");
    assert!(matches!(
        buffer.next_frame(),
        Err(DecodeError::TooLong { .. })
    ));
    assert!(ToAgent::decode(&[10]).is_err());
    assert!(FromAgent::decode(&[5, 1, 7, 0]).is_err());
    assert!(FromAgent::decode(&[7, 7]).is_err());
    assert!(ToAgent::decode(&[0, 0, 0xff, 0xff, 0xff, 0x7f]).is_err());
}

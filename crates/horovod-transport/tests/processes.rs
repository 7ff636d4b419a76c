//! Ranks as real processes: killed ones are noticed, forked children keep nobody alive.
//!
//! These tests have a binary of their own, because a forked child keeps open the descriptors of all tests in its process.
#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]
#![cfg(unix)]

#[path = "it/common/mod.rs"]
mod common;

use std::{
    io::{BufRead, BufReader, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use common::{Rig, TIMEOUT, rigs};
use horovod_protocol::Rank;
use horovod_transport::{
    ControlEvent, JobKey, MeshConfig, connect,
    rendezvous::{Server, ServerConfig},
    testing,
};

#[expect(
    clippy::disallowed_methods,
    reason = "how the test tells its processes who they are"
)]
fn var(name: &str) -> String {
    std::env::var(name).unwrap()
}

/// One rank: joins, exchanges data, says so, then tells of the next event.
#[test]
#[ignore = "the body of the processes that the other tests start"]
fn rank_process() {
    let rank: u32 = var("T_RANK").parse().unwrap();
    let key = JobKey::from_hex(&var("T_KEY")).unwrap();
    let at: SocketAddr = var("T_AT").parse().unwrap();
    let mut config = MeshConfig::new(Rank(rank), var("T_SIZE").parse().unwrap(), key, vec![at]);
    config.timeout = TIMEOUT;
    config.heartbeat = None; // see `connect.rs`
    config.shm = var("T_SHM") == "1";
    let mut rig = Rig::new(connect(&config).unwrap());
    rig.exchange(300_000);
    println!("\nready {rank}");
    match rig.event() {
        ControlEvent::Lost(lost) => println!("lost {} {}", lost.rank.0, lost.cause),
        other => println!("other {other:?}"),
    }
    // Stay until told to go, so that nobody else sees this end.
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

/// A started rank; killed if the test fails.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(rank: u32, size: u32, key: &JobKey, at: SocketAddr, shm: bool) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank_process", "--ignored", "--nocapture"])
            .env("T_RANK", rank.to_string())
            .env("T_SIZE", size.to_string())
            .env("T_KEY", key.to_hex())
            .env("T_AT", at.to_string())
            .env("T_SHM", if shm { "1" } else { "0" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    /// The next line that starts with `word`; the process itself bounds the wait.
    fn line(&mut self, word: &str) -> String {
        let mut seen = String::new();
        loop {
            let start = seen.len();
            assert!(
                self.output.read_line(&mut seen).unwrap() > 0,
                "no {word:?} in:\n{seen}"
            );
            if seen[start..].starts_with(word) {
                return seen[start..].trim_end().to_owned();
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_killed_process_is_reported_by_those_who_talk_to_it() {
    for shm in [true, false] {
        let key = JobKey::random().unwrap();
        let bind = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
        let server = Server::start(ServerConfig::new(bind, key.clone(), 3)).unwrap();
        let at = server.addrs()[0];
        let mut ranks: Vec<Process> = (0..3)
            .map(|rank| Process::start(rank, 3, &key, at, shm))
            .collect();
        for rank in &mut ranks {
            rank.line("ready");
        }
        // SIGKILL: nothing of the process gets to run.
        ranks[2].child.kill().unwrap();
        let reported = ranks[0].line("lost");
        assert!(
            reported.starts_with("lost 2 ") && reported.len() > 8,
            "{reported}"
        );
        // Rank 0 is the only one that rank 1 exchanges control frames with.
        ranks[0].child.kill().unwrap();
        let reported = ranks[1].line("lost");
        assert!(
            reported.starts_with("lost 0 ") && reported.len() > 8,
            "{reported}"
        );
        ranks[1].input.write_all(b"go\n").unwrap();
        assert!(ranks[1].child.wait().unwrap().success());
    }
}

/// A child that lives until the parent lets go of the returned descriptor.
fn forked_child() -> (libc::pid_t, std::io::PipeWriter) {
    let (mut reader, writer) = std::io::pipe().unwrap();
    use std::os::fd::AsRawFd;
    let writer_raw = writer.as_raw_fd();
    // SAFETY: the child only makes system calls and ends by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork failed");
    if child == 0 {
        // SAFETY: its own copy of the writing end, which would keep the pipe open.
        unsafe { libc::close(writer_raw) };
        let end = std::io::Read::read(&mut reader, &mut [0]);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!matches!(end, Ok(0)))) };
    }
    (child, writer)
}

#[test]
fn a_forked_child_keeps_no_connection_open() {
    for (kind, meshes) in [
        ("shm", testing::cluster(2)),
        ("tcp", testing::cluster_tcp(2)),
        ("two hosts", testing::cluster_hosts(&[0, 1])),
    ] {
        let mut rigs = rigs(meshes);
        let (child, hold) = forked_child();
        drop(rigs.remove(1));
        // The child lives; only because it holds none of rank 1's sockets does rank 0 notice.
        match rigs[0].event() {
            ControlEvent::Lost(lost) => assert_eq!(lost.rank, Rank(1), "{kind}"),
            other => panic!("{kind}: {other:?}"),
        }
        drop(hold);
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "{kind}: the child crashed");
    }
}

#[test]
fn the_parent_goes_on_after_a_fork_and_the_child_is_inert() {
    let mut rigs = rigs(testing::cluster(2));
    let notifier = rigs[0].waiter.notifier();
    // SAFETY: the child touches atomics only and ends by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork failed");
    if child == 0 {
        // Would crash if it touched the shared memory, which is not there.
        notifier.notify();
        let dead = rigs[0].data.link(Rank(1)).try_recv(&mut [0]).is_err();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!dead)) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child could use a link");
    rigs[1].control.send(Rank(0), b"still here").unwrap();
    assert_eq!(rigs[0].frame(), (Rank(1), b"still here".to_vec()));
}

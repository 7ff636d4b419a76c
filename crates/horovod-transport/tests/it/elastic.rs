//! Workers of an elastic job that meet through a real rendezvous server, round after round.
#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]

use std::{
    net::{IpAddr, Ipv4Addr},
    thread::{JoinHandle, spawn},
};

use crate::common::{TIMEOUT, on_all, rigs};
use horovod_protocol::{Generation, Rank};
use horovod_transport::{
    ConnectError, ControlEvent, HEARTBEAT, JobKey, Membership, Mesh, MeshConfig, connect,
    rendezvous::{RankAssignment, Server, ServerConfig, ServerEvent},
};

struct Job {
    key: JobKey,
    server: Server,
}

impl Job {
    fn new() -> Self {
        let key = JobKey::random().unwrap();
        let loopback = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
        let server = Server::start(ServerConfig::elastic(loopback, key.clone())).unwrap();
        Self { key, server }
    }

    /// A worker joins the waiting set; returns when the server knows it.
    fn join(&self, worker: u32, training_state: u8) -> JoinHandle<Result<Mesh, ConnectError>> {
        let addresses = self.server.addrs().to_vec();
        let mut config = MeshConfig::new(Rank(0), 1, self.key.clone(), addresses);
        config.timeout = TIMEOUT;
        config.staging = 1 << 16;
        config.elastic = Some(Membership {
            worker,
            training_state,
            wait_timeout: TIMEOUT,
        });
        let thread = spawn(move || connect(&config));
        self.expect(&joined(worker, training_state));
        thread
    }

    fn expect(&self, event: &ServerEvent) {
        let next = self.server.wait_event(TIMEOUT);
        assert_eq!(next.as_ref(), Some(event));
    }

    /// These workers form a round, each in a slot of its own number.
    fn form(&self, workers: &[u32]) {
        let size = workers.len() as u32;
        let assignment = |(rank, worker): (u32, &u32)| {
            let assignment = RankAssignment {
                rank,
                local_rank: *worker,
                local_size: size,
                cross_rank: 0,
                cross_size: 1,
                needs_sync: true,
            };
            (*worker, assignment)
        };
        self.server
            .form((0..).zip(workers).map(assignment).collect());
    }
}

fn joined(worker: u32, training_state: u8) -> ServerEvent {
    ServerEvent::Joined {
        worker,
        training_state,
        pid: std::process::id(),
        heartbeat: Some(HEARTBEAT),
    }
}

fn mesh(thread: JoinHandle<Result<Mesh, ConnectError>>) -> Mesh {
    thread
        .join()
        .unwrap()
        .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_launcher_says_who_takes_part_and_all_hear_of_changes() {
    let job = Job::new();
    let (five, three, nine) = (job.join(5, 0), job.join(3, 2), job.join(9, 1));
    job.form(&[9, 3]);
    let meshes = vec![mesh(nine), mesh(three)];
    job.expect(&ServerEvent::Up(Generation(1)));
    for (rank, worker, mesh) in [(0, 9, &meshes[0]), (1, 3, &meshes[1])] {
        assert_eq!((mesh.topology.rank, mesh.topology.size), (Rank(rank), 2));
        let assignment = mesh.assignment.unwrap();
        assert_eq!((assignment.rank, assignment.local_rank), (rank, worker));
    }

    let mut rigs = rigs(meshes);
    for (version, kind) in [(1, 2), (2, 1)] {
        job.server.announce(kind);
        for rig in &mut rigs {
            assert_eq!(rig.event(), ControlEvent::HostsUpdated { version, kind });
        }
    }
    rigs[1].control.send_training_state(2);
    job.expect(&ServerEvent::StateChanged {
        worker: 3,
        training_state: 2,
    });
    job.server.report_death(Rank(9), "h1", "signal 9");
    match rigs[1].event() {
        ControlEvent::Notice(lost) => {
            assert_eq!((lost.rank, &*lost.cause.to_string()), (Rank(0), "signal 9"));
        }
        other => panic!("{other:?}"),
    }

    job.server.dismiss(5, "no slot is left");
    match five.join().unwrap() {
        Err(ConnectError::Removed(why)) => assert_eq!(why, "no slot is left"),
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[test]
fn a_round_that_does_not_come_to_be_brings_its_workers_back_to_the_waiting_set() {
    let job = Job::new();
    let (one, two) = (job.join(1, 0), job.join(2, 0));
    // Somebody has died in the waiting set without being noticed yet.
    job.form(&[1, 2, 7]);
    job.expect(&ServerEvent::Failed("worker 7 has left".into()));
    let mut back: Vec<_> = (0..2).map(|_| job.server.wait_event(TIMEOUT)).collect();
    back.sort_by_key(|event| format!("{event:?}"));
    assert_eq!(back, [Some(joined(1, 0)), Some(joined(2, 0))]);
    job.form(&[2, 1]);
    let meshes = vec![mesh(two), mesh(one)];
    assert_eq!(meshes[0].topology.rank, Rank(0));
    on_all("after a failed round", meshes, |rig| rig.exchange(1000));
}

#[test]
fn an_announcement_while_links_are_made_is_not_lost() {
    let job = Job::new();
    let one = job.join(1, 0);
    job.form(&[1]);
    // Before, while or after the only worker is told of its round: it hears of it in each case.
    job.server.announce(2);
    let mut rigs = rigs(vec![mesh(one)]);
    let update = ControlEvent::HostsUpdated {
        version: 1,
        kind: 2,
    };
    assert_eq!(rigs[0].event(), update);
}

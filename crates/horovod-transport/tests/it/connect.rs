//! Ranks that meet through a real rendezvous server and make real links.
#![allow(
    clippy::unwrap_used,
    reason = "a test wants to fail at once, with the place"
)]

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, TcpStream},
    time::{Duration, Instant},
};

use crate::common::{Rig, TIMEOUT, on_all, rigs};
use horovod_protocol::{Generation, LossCause, Rank};
use horovod_transport::{
    ConnectError, ControlEvent, JobKey, Mesh, MeshConfig, connect,
    rendezvous::{Server, ServerConfig, ServerEvent},
    testing::Refusing,
};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

struct Job {
    key: JobKey,
    size: u32,
    server: Server,
}

impl Job {
    fn new(size: u32) -> Self {
        let key = JobKey::random().unwrap();
        let server = Server::start(ServerConfig::new(vec![LOOPBACK], key.clone(), size)).unwrap();
        Self { key, size, server }
    }

    fn config(&self, rank: u32) -> MeshConfig {
        let rendezvous = self.server.addrs().to_vec();
        let mut config = MeshConfig::new(Rank(rank), self.size, self.key.clone(), rendezvous);
        config.timeout = TIMEOUT;
        // A heartbeat sets TCP_USER_TIMEOUT, which also counts the time in which the receiver's buffer is full. On a loaded
        // machine a rank may not read for that long.
        config.heartbeat = None;
        config.staging = 1 << 16;
        config
    }

    /// All ranks connect, each on its own thread; `change` adjusts their settings.
    fn connect(&self, change: impl Fn(u32, &mut MeshConfig) + Sync) -> Vec<Mesh> {
        let results = self.try_connect(change);
        results
            .into_iter()
            .map(|r| r.unwrap_or_else(|e| panic!("{e}")))
            .collect()
    }

    fn try_connect(
        &self,
        change: impl Fn(u32, &mut MeshConfig) + Sync,
    ) -> Vec<Result<Mesh, ConnectError>> {
        let change = &change;
        std::thread::scope(|s| {
            let start = |rank| {
                let mut config = self.config(rank);
                change(rank, &mut config);
                s.spawn(move || connect(&config))
            };
            let threads: Vec<_> = (0..self.size).map(start).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }
}

/// Control and data of every pair work.
fn check(kind: &str, meshes: Vec<Mesh>) {
    let size = meshes.len();
    on_all(kind, meshes, |rig| {
        if rig.rank() == Rank(0) {
            for _ in 1..size {
                let (from, bytes) = rig.frame();
                assert_eq!(bytes, format!("from {from}").into_bytes());
                rig.control.send(from, b"welcome").unwrap();
            }
        } else {
            let hello = format!("from {}", rig.rank());
            rig.control.send(Rank(0), hello.as_bytes()).unwrap();
            assert_eq!(rig.frame(), (Rank(0), b"welcome".to_vec()));
        }
        rig.exchange(1000);
        rig.exchange(100_000);
    });
}

#[test]
fn ranks_of_one_host_share_memory() {
    for size in [2, 3, 5] {
        let job = Job::new(size);
        let meshes = job.connect(|_, _| {});
        for mesh in &meshes {
            assert_eq!(mesh.topology.generation, Generation(1));
            assert_eq!(
                (mesh.topology.hosts(), mesh.topology.local_size()),
                (1, size)
            );
            assert_eq!(mesh.data.arena().unwrap().members().len(), size as usize);
        }
        check("shm", meshes);
    }
}

#[test]
fn without_shared_memory_they_use_tcp() {
    for (encrypt, size) in [(false, 2), (false, 5), (true, 2), (true, 4)] {
        let job = Job::new(size);
        let meshes = job.connect(|_, config| {
            config.shm = false;
            config.encrypt = encrypt;
        });
        assert!(meshes.iter().all(|m| m.data.arena().is_none()));
        check(if encrypt { "sealed" } else { "tcp" }, meshes);
    }
}

#[test]
fn control_links_and_news_of_ends_follow_the_tree() {
    for shm in [true, false] {
        let job = Job::new(6);
        let meshes = job.connect(|rank, config| {
            config.shm = shm;
            // Rank 0 decides: the others' word does not count.
            config.fan_out = if rank == 0 { 2 } else { 300 };
        });
        let tree = meshes[3].tree.clone();
        assert_eq!(tree.parent(Rank(4)), Some(Rank(1)));
        assert!(meshes.iter().all(|mesh| mesh.tree == tree));
        let mut rigs = rigs(meshes);
        for child in 1..6 {
            let (from, to) = (Rank(child), tree.parent(Rank(child)).unwrap());
            for (from, to) in [(from, to), (to, from)] {
                rigs[from.index()].control.send(to, b"hello").unwrap();
                assert_eq!(rigs[to.index()].frame(), (from, b"hello".to_vec()));
            }
        }
        assert!(rigs[0].control.send(Rank(4), b"no link").is_err());
        // Rank 1 ends: its parent and its children notice.
        drop(rigs.remove(1));
        for at in [0, 2, 3] {
            match rigs[at].event() {
                ControlEvent::Lost(lost) => assert_eq!(lost.rank, Rank(1)),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn several_connections_carry_one_stream() {
    for encrypt in [false, true] {
        let job = Job::new(3);
        let meshes = job.connect(|rank, config| {
            config.shm = false;
            config.encrypt = encrypt;
            // Rank 0 decides: the others' word does not count.
            config.connections = if rank == 0 { 4 } else { 1 };
        });
        on_all("striped", meshes, |rig| {
            rig.exchange(1000);
            rig.exchange(3_000_000);
            rig.exchange(1);
        });
    }
}

#[test]
fn rank_0_says_what_is_equal_everywhere() {
    let job = Job::new(3);
    let meshes = job.connect(|rank, config| config.settings = vec![rank as u8 + 7; 3]);
    assert!(meshes.iter().all(|mesh| mesh.settings == [7, 7, 7]));
}

#[test]
fn other_host_names_are_other_hosts() {
    for size in [3, 4, 5] {
        let job = Job::new(size);
        let meshes = job.connect(|rank, config| {
            config.hostname = format!("host{}", rank % 2);
            config.interfaces = vec!["127.0.0.1".into()];
        });
        let last = &meshes[size as usize - 1].topology;
        assert_eq!(last.hosts(), 2);
        assert_eq!(&*last.peer(Rank(1)).hostname, "host1");
        check("two hosts", meshes);
    }
}

#[test]
fn one_rank_that_will_not_share_memory_is_enough() {
    let job = Job::new(3);
    let meshes = job.connect(|rank, config| config.shm = rank != 1);
    assert!(meshes.iter().all(|m| m.data.arena().is_none()));
    check("mixed settings", meshes);
}

#[test]
fn sixteen_ranks_on_three_hosts() {
    let job = Job::new(16);
    let meshes = job.connect(|rank, config| {
        config.hostname = format!("host{}", rank / 6);
        config.interfaces = vec!["127.0.0.1".into()];
        config.encrypt = true;
    });
    check("sixteen", meshes);
}

#[test]
fn a_job_of_one_rank_meets_itself() {
    let job = Job::new(1);
    let mesh = job.connect(|_, _| {}).pop().unwrap();
    assert_eq!(mesh.topology.size, 1);
    assert!(mesh.data.arena().is_none());
}

#[test]
fn registering_again_makes_the_next_generation() {
    let job = Job::new(3);
    for generation in 1..=3 {
        let meshes = job.connect(|_, _| {});
        assert!(
            meshes
                .iter()
                .all(|m| m.topology.generation == Generation(generation))
        );
        check("again", meshes);
    }
    let deadline = Instant::now() + TIMEOUT;
    let mut ups = Vec::new();
    while ups.len() < 3 {
        assert!(Instant::now() < deadline, "only {ups:?}");
        if let Some(ServerEvent::Up(generation)) = job.server.wait_event(TIMEOUT) {
            ups.push(generation.0);
        }
    }
    assert_eq!(ups, [1, 2, 3]);
}

#[test]
fn missing_ranks_are_named_to_those_who_came() {
    let job = Job::new(4);
    let errors: Vec<_> = std::thread::scope(|s| {
        let wait = |rank| {
            let mut config = job.config(rank);
            config.timeout = Duration::from_secs(5);
            s.spawn(move || connect(&config).unwrap_err())
        };
        let threads: Vec<_> = [0, 2].map(wait).into();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    // The first to give up may not see the other one missing, too; both miss 1 and 3.
    for error in errors {
        match error {
            ConnectError::Missing {
                missing, size: 4, ..
            } => {
                assert!(
                    missing.contains(&Rank(1)) && missing.contains(&Rank(3)),
                    "{missing:?}"
                );
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn refusals_are_clear() {
    let job = Job::new(2);
    let fail = |change: &dyn Fn(&mut MeshConfig)| {
        let mut config = job.config(1);
        change(&mut config);
        connect(&config).unwrap_err()
    };
    let text = fail(&|c| c.key = JobKey::random().unwrap()).to_string();
    assert!(
        text.contains("somebody else answers: the job keys differ"),
        "{text}"
    );
    assert!(
        text.contains("Another job or program answers there"),
        "{text}"
    );
    let text = fail(&|c| c.size = 5).to_string();
    assert!(text.contains("5 ranks, this one has 2"), "{text}");
    let text = fail(&|c| c.rank = Rank(7)).to_string();
    assert!(text.contains("no rank 7"), "{text}");
    // The job itself is untouched.
    check("after refusals", job.connect(|_, _| {}));
}

#[test]
fn a_second_process_for_a_rank_is_refused() {
    let job = Job::new(2);
    std::thread::scope(|s| {
        let first = s.spawn(|| connect(&job.config(1)).unwrap());
        // Only when the first has registered is the second one a duplicate.
        match job.server.wait_event(TIMEOUT) {
            Some(ServerEvent::Registered { rank: Rank(1), .. }) => {}
            other => panic!("{other:?}"),
        }
        let error = connect(&job.config(1)).unwrap_err().to_string();
        assert!(error.contains("registered already, by process"), "{error}");
        let second = s.spawn(|| connect(&job.config(0)).unwrap());
        check(
            "after a duplicate",
            vec![second.join().unwrap(), first.join().unwrap()],
        );
    });
}

#[test]
fn an_address_that_leads_nowhere_is_skipped_or_named() {
    let job = Job::new(1);
    let refusing = Refusing::new();
    let mut config = job.config(0);
    config.rendezvous.insert(0, refusing.at);
    connect(&config).unwrap();
    config.rendezvous = vec![refusing.at];
    config.timeout = Duration::from_secs(2);
    let error = connect(&config).unwrap_err().to_string();
    assert!(
        error.contains(&format!("{}: connection refused", refusing.at)),
        "{error}"
    );
}

#[test]
fn a_rank_that_cannot_join_takes_the_others_along_at_once() {
    let job = Job::new(3);
    let results = job.try_connect(|rank, config| {
        config.hostname = format!("host{rank}");
        if rank == 1 {
            config.interfaces = vec!["nope0".into()];
        }
    });
    for (rank, result) in results.into_iter().enumerate() {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("nope0"), "{text}");
        if rank != 1 {
            assert!(text.contains("rank 1 on host1"), "{text}");
        }
    }
    check("after a failure", job.connect(|_, _| {}));
}

#[test]
fn strangers_do_not_disturb() {
    let job = Job::new(3);
    let at = job.server.addrs()[0];
    std::thread::scope(|s| {
        // Some say nothing, some send garbage until they are thrown out, some speak HTTP.
        let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(at).unwrap()).collect();
        s.spawn(move || {
            let mut stream = TcpStream::connect(at).unwrap();
            stream.set_write_timeout(Some(TIMEOUT)).unwrap();
            let garbage = vec![0xa5; 1 << 20];
            let refused = (0..1000).any(|_| stream.write_all(&garbage).is_err());
            assert!(refused, "a gigabyte of garbage was taken");
        });
        s.spawn(move || {
            let mut stream = TcpStream::connect(at).unwrap();
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let mut answer = Vec::new();
            // Closed without a word; a reset is as good.
            let _ = stream.read_to_end(&mut answer);
            assert_eq!(answer, b"");
        });
        s.spawn(move || {
            // The right first words, then another version: an answer that says so.
            let mut stream = TcpStream::connect(at).unwrap();
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            let mut hello = b"horovod\xee".to_vec();
            hello.resize(74, 0);
            stream.write_all(&hello).unwrap();
            let mut answer = [0; 9];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!((&answer[..7], answer[8]), (&b"horovod"[..], 1));
        });
        check("among strangers", job.connect(|_, _| {}));
        drop(silent);
    });
}

#[test]
fn the_launchers_notice_reaches_every_rank() {
    let job = Job::new(3);
    let mut rigs: Vec<Rig> = job.connect(|_, _| {}).into_iter().map(Rig::new).collect();
    job.server.report_death(Rank(2), "h1", "killed by signal 9");
    for rig in &mut rigs {
        match rig.event() {
            ControlEvent::Notice(lost) => {
                assert_eq!((lost.rank, lost.host.as_str()), (Rank(2), "h1"));
                assert_eq!(lost.cause, LossCause::Ended("killed by signal 9".into()));
            }
            other => panic!("{other:?}"),
        }
    }
    job.server.stop();
    for rig in &mut rigs {
        assert!(matches!(rig.event(), ControlEvent::LauncherLost { .. }));
    }
}

#[test]
fn who_never_waits_in_vain_for_long_hears_the_launcher_all_the_same() {
    let job = Job::new(2);
    let mut rigs: Vec<Rig> = job.connect(|_, _| {}).into_iter().map(Rig::new).collect();
    let (first, second) = rigs.split_at_mut(1);
    let (first, second) = (&mut first[0], &mut second[0]);
    // From here on only a look at the sockets can show it.
    while first.control.poll().is_some() {}
    job.server.report_death(Rank(1), "h1", "killed by signal 9");
    let deadline = Instant::now() + TIMEOUT;
    loop {
        assert!(Instant::now() < deadline, "the notice did not come");
        second.control.send(Rank(0), b"frame").unwrap();
        // Nobody sleeps or gives way here: each look but one finds something.
        let received = std::iter::from_fn(|| first.control.poll());
        if received
            .into_iter()
            .any(|e| matches!(e, ControlEvent::Notice(_)))
        {
            return;
        }
    }
}

#[test]
fn a_death_while_others_wait_is_told_at_once() {
    let job = Job::new(2);
    std::thread::scope(|s| {
        let waiting = s.spawn(|| connect(&job.config(0)).unwrap_err());
        match job.server.wait_event(TIMEOUT) {
            Some(ServerEvent::Registered { .. }) => {}
            other => panic!("{other:?}"),
        }
        job.server.report_death(Rank(1), "h2", "exit code 3");
        let error = waiting.join().unwrap().to_string();
        assert!(error.contains("rank 1 on h2: exit code 3"), "{error}");
    });
}

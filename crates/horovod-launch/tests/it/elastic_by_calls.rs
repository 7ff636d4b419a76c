//! An elastic job whose workers an executor of its own starts and ends: threads here, which meet at a real rendezvous.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use horovod_launch::elastic::{
    Cause, Ending, Executor, NewWorker, News, Opened, Policy, Supervisor, WorkerId,
};
use horovod_launch::hosts::Host;
use horovod_launch::{ExitStatus, Reach, Rendezvous};
use horovod_protocol::Rank;
use horovod_transport::{ConnectError, ControlEvent, JobKey, Membership, MeshConfig, connect};

/// No test may take longer.
const LIMIT: Duration = Duration::from_secs(240);
/// How often threads look at what has no channel.
const POLL: Duration = Duration::from_millis(5);

/// Order to a worker.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// End at once, as after this.
    End(ExitStatus),
    /// Come out of the round for the next one.
    Again,
}

/// Message from a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    /// It is part of a round: rank, size, local rank.
    In(WorkerId, [u32; 3]),
    /// It has been told that the members change.
    Changed(WorkerId),
    Ended(WorkerId, ExitStatus),
}

struct WorkerProcess {
    orders: Sender<Order>,
    thread: JoinHandle<()>,
}

/// Starts threads.
struct Threads {
    reports: Sender<Report>,
    workers: BTreeMap<WorkerId, WorkerProcess>,
    /// Hosts that take time to open.
    slow: Vec<&'static str>,
    /// All calls but those that start and end workers.
    calls: Vec<String>,
    environments: BTreeMap<WorkerId, BTreeMap<String, String>>,
    rounds: Vec<Vec<WorkerId>>,
}

impl Threads {
    fn order(&self, worker: WorkerId, order: Order) {
        // It may have ended by itself.
        let _ = self.workers[&worker].orders.send(order);
    }
}

impl Executor for Threads {
    fn open(&mut self, host: &str) -> Result<Opened, String> {
        self.calls.push(format!("open {host}"));
        match host {
            "broken" => Err("no way there".to_owned()),
            host if self.slow.contains(&host) => Ok(Opened::Opening),
            _ => Ok(Opened::Ready),
        }
    }

    fn close(&mut self, host: &str) {
        self.calls.push(format!("close {host}"));
    }

    fn start(&mut self, new: &NewWorker<'_>) -> Result<(), Cause> {
        if new.host == "full" {
            return Err(Cause::Exit(ExitStatus::Code(127)));
        }
        let text = |word: std::ffi::OsString| word.into_string().expect("plain");
        let environment = new.environment().into_iter();
        let environment: BTreeMap<String, String> =
            environment.map(|(n, v)| (text(n), text(v))).collect();
        let (orders, received_orders) = channel();
        let (number, reports) = (new.worker, self.reports.clone());
        let own = environment.clone();
        let thread = std::thread::spawn(move || {
            let status = work(number, &own, &received_orders, &reports);
            // The test may be over.
            let _ = reports.send(Report::Ended(number, status));
        });
        self.environments.insert(number, environment);
        self.workers
            .insert(number, WorkerProcess { orders, thread });
        Ok(())
    }

    fn end(&mut self, worker: WorkerId) {
        self.order(worker, Order::End(ExitStatus::Signal(15)));
    }

    fn finish(&mut self, has_succeeded: bool) {
        self.calls.push(format!("finish {has_succeeded}"));
        for worker in self.workers.keys() {
            self.order(*worker, Order::End(ExitStatus::Signal(15)));
        }
    }

    fn notify(&mut self, news: News<'_>) {
        if let News::Round { workers, .. } = news {
            self.rounds.push(workers.to_vec());
        }
    }
}

/// One worker's life: into a round, out of it when another is lost, into the next.
fn work(
    worker: WorkerId,
    environment: &BTreeMap<String, String>,
    orders: &Receiver<Order>,
    reports: &Sender<Report>,
) -> ExitStatus {
    let key = JobKey::from_hex(&environment["HOROVOD_JOB_KEY"]).expect("a key");
    let places = environment["HOROVOD_RENDEZVOUS"].split(',');
    let places = places.map(|at| at.parse().expect("an address")).collect();
    let mut config = MeshConfig::new(Rank(0), 1, key, places);
    config.shm = false;
    config.elastic = Some(Membership {
        worker,
        // As if restored from a file: what is told later may arrive after the death that a test lets follow.
        training_state: 2,
        wait_timeout: LIMIT,
    });
    loop {
        let mut mesh = match connect(&config) {
            Ok(mesh) => mesh,
            Err(ConnectError::Removed(_)) => return ExitStatus::Code(0),
            Err(_) => return ExitStatus::Code(1),
        };
        let assignment = mesh.assignment.expect("of an elastic job");
        let place = [assignment.rank, mesh.topology.size, assignment.local_rank];
        let _ = reports.send(Report::In(worker, place));
        loop {
            match orders.recv_timeout(POLL) {
                Ok(Order::End(status)) => return status,
                Ok(Order::Again) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
            match mesh.control.poll() {
                None | Some(ControlEvent::Frame { .. } | ControlEvent::OutOfBand { .. }) => {}
                Some(ControlEvent::HostsUpdated { .. }) => {
                    let _ = reports.send(Report::Changed(worker));
                }
                // Another has gone.
                Some(_) => break,
            }
        }
    }
}

/// A job and what its workers say.
struct Job {
    supervisor: Supervisor<Threads>,
    reports: Receiver<Report>,
    deadline: Instant,
}

fn host(name: &str, slots: u32) -> Host {
    Host {
        name: name.to_owned(),
        slots,
    }
}

impl Job {
    fn start(first_np: u32, np: RangeInclusive<u32>, slow: Vec<&'static str>) -> Self {
        let policy = Policy {
            first_np,
            min_np: *np.start(),
            max_np: *np.end(),
            wait_timeout: LIMIT,
            start_grace: Duration::ZERO,
            reset_limit: None,
            cooldown: None,
            slot_failures_max: 3,
            has_fixed_hosts: false,
        };
        let rendezvous = Rendezvous::start_elastic(Reach::ThisHost, &[]).expect("listens");
        let (sender, reports) = channel();
        let threads = Threads {
            reports: sender,
            workers: BTreeMap::new(),
            slow,
            calls: Vec::new(),
            environments: BTreeMap::new(),
            rounds: Vec::new(),
        };
        Self {
            supervisor: Supervisor::new(policy, rendezvous, &[], threads),
            reports,
            deadline: Instant::now() + LIMIT,
        }
    }

    /// Goes on until workers have said all of this, in any order.
    #[track_caller]
    fn until_reported(&mut self, mut expected: Vec<Report>) {
        while !expected.is_empty() {
            assert!(Instant::now() < self.deadline, "not in time: {expected:?}");
            if let Ok(reports) = self.reports.recv_timeout(POLL) {
                if let Report::Ended(worker, status) = reports {
                    self.supervisor.ended(worker, Cause::Exit(status));
                }
                expected.retain(|one| *one != reports);
            }
            self.supervisor.advance();
        }
    }

    /// Goes on until the executor has been told of this round; the rendezvous may be slower than its workers.
    #[track_caller]
    fn until_round(&mut self, workers: &[WorkerId]) {
        while self.supervisor.executor().rounds.last().map(Vec::as_slice) != Some(workers) {
            assert!(Instant::now() < self.deadline, "not in time: {workers:?}");
            std::thread::park_timeout(POLL);
            self.supervisor.advance();
        }
    }

    fn order(&mut self, worker: WorkerId, order: Order) {
        self.supervisor.executor().order(worker, order);
    }

    /// Lets everybody who runs end with 0, and waits for them.
    fn finish(mut self, workers: &[WorkerId]) {
        let done = ExitStatus::Code(0);
        for worker in workers {
            self.order(*worker, Order::End(done));
        }
        self.until_reported(workers.iter().map(|w| Report::Ended(*w, done)).collect());
        assert_eq!(self.supervisor.ending(), Some(&Ending::Success));
        assert_eq!(self.supervisor.deadline(), None);
        let threads = self.supervisor.into_executor();
        assert!(threads.calls.contains(&"finish true".to_owned()));
        for (_, worker) in threads.workers {
            worker.thread.join().expect("no panic");
        }
    }
}

#[test]
fn a_worker_that_dies_is_replaced_and_a_host_that_comes_is_used() {
    let mut job = Job::start(2, 2..=3, vec!["b"]);
    job.supervisor.set_hosts(vec![host("a", 2)]);
    job.until_reported(vec![Report::In(0, [0, 2, 0]), Report::In(1, [1, 2, 1])]);
    let environments = &job.supervisor.executor().environments;
    assert_eq!(environments[&1]["HOROVOD_ELASTIC_WORKER"], "1");
    assert_eq!(environments[&1]["HOROVOD_LOCAL_RANK"], "1");
    assert_eq!(environments[&1]["HOROVOD_HOSTNAME"], "a");

    // The survivor sees it by itself and comes back, before the newcomer in the order of ranks.
    let killed = ExitStatus::Signal(9);
    job.order(0, Order::End(killed));
    job.until_reported(vec![
        Report::Ended(0, killed),
        Report::In(1, [0, 2, 1]),
        Report::In(2, [1, 2, 0]),
    ]);
    assert_eq!(job.supervisor.host_of(2), Some("a"));

    // A host is announced by a call, opened, and its worker let in at the next round.
    job.supervisor.add_host(host("b", 1));
    let threads = job.supervisor.executor();
    assert_eq!(threads.calls, ["open a", "open b"]);
    assert!(!threads.workers.contains_key(&3), "it is not open yet");
    job.supervisor.host_ready("b");
    job.until_reported(vec![Report::Changed(1), Report::Changed(2)]);
    // The other follows, as its round is over.
    job.order(1, Order::Again);
    job.until_reported(vec![
        Report::In(1, [0, 3, 1]),
        Report::In(2, [1, 3, 0]),
        Report::In(3, [2, 3, 0]),
    ]);
    job.until_round(&[1, 2, 3]);
    job.finish(&[1, 2, 3]);
}

#[test]
fn a_lost_host_takes_its_workers_with_it() {
    let mut job = Job::start(2, 1..=2, Vec::new());
    job.supervisor.set_hosts(vec![host("a", 1), host("b", 1)]);
    job.until_reported(vec![Report::In(0, [0, 2, 0]), Report::In(1, [1, 2, 0])]);
    // As of a machine that is gone: nobody says that its worker has ended.
    job.order(1, Order::End(ExitStatus::Signal(9)));
    let lost = Report::Ended(1, ExitStatus::Signal(9));
    while job.reports.recv_timeout(LIMIT).expect("in time") != lost {}
    job.supervisor.host_lost("b", "its machine is gone", 1);
    assert_eq!(job.supervisor.workers_on("b"), [0; 0]);
    job.until_reported(vec![Report::In(0, [0, 1, 0])]);
    job.supervisor.remove_host("b");
    job.finish(&[0]);
}

#[test]
fn a_host_that_cannot_be_opened_or_start_workers_is_left_alone() {
    let mut job = Job::start(1, 1..=3, Vec::new());
    let hosts = vec![host("broken", 1), host("full", 1), host("a", 1)];
    job.supervisor.set_hosts(hosts);
    let there = job.supervisor.workers_on("a");
    assert_eq!(there.len(), 1);
    job.until_reported(vec![Report::In(there[0], [0, 1, 0])]);
    assert_eq!(job.supervisor.workers_on("full"), [0; 0]);
    job.finish(&there);
}

#[test]
fn a_halted_job_decides_nothing() {
    let mut job = Job::start(1, 1..=2, Vec::new());
    job.supervisor.set_hosts(vec![host("a", 1)]);
    job.until_reported(vec![Report::In(0, [0, 1, 0])]);
    job.supervisor.halt();
    assert_eq!(job.supervisor.deadline(), None);
    job.supervisor.add_host(host("b", 1));
    job.order(0, Order::End(ExitStatus::Code(1)));
    job.until_reported(vec![Report::Ended(0, ExitStatus::Code(1))]);
    let threads = job.supervisor.executor();
    assert_eq!(threads.workers.len(), 1, "nothing is started for it");
    assert_eq!(threads.calls, ["open a"]);
    assert_eq!(job.supervisor.ending(), None);
}

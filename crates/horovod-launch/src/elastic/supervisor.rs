//! An elastic job without its processes: the driver, the rendezvous, and an executor that carries out the driver's
//! actions.
//!
//! The supervisor has no thread and never blocks. Its methods report events; each call performs the resulting actions
//! before it returns. Its owner waits until [`Supervisor::as_fd`] is readable or [`Supervisor::deadline`] has passed,
//! and then calls [`Supervisor::advance`].

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::time::Instant;

use horovod_protocol::Rank;
use horovod_transport::rendezvous::ServerEvent;

use super::driver::Driver;
use super::events::{Action, Cause, Ending, Event, Policy, WorkerId};
use super::executor::{Executor, NewWorker, News, Opened};
use crate::environment;
use crate::frames::Variables;
use crate::hosts::Host;
use crate::rendezvous::Rendezvous;

/// A running worker.
#[derive(Debug)]
struct Running {
    host: String,
    local: u32,
    /// The rank of this worker in messages to the user.
    label: u32,
    /// Process number that the worker reported to the rendezvous; `None` before.
    pid: Option<u32>,
}

/// Runs one elastic job.
#[derive(Debug)]
pub struct Supervisor<E> {
    driver: Driver,
    pub(super) rendezvous: Rendezvous,
    pub(super) executor: E,
    of_job: Variables,
    started: Instant,
    /// Present hosts, in the order in which they were added.
    hosts: Vec<Host>,
    /// All hosts that were ever present, with their last number of slots.
    known: BTreeMap<String, Host>,
    workers: BTreeMap<WorkerId, Running>,
    /// The last worker's rank, by place.
    labels: BTreeMap<(String, u32), u32>,
    /// Places whose last worker could not start its script, a failure that another process would repeat.
    unstartable: BTreeSet<(String, u32)>,
    /// Whether any worker has ever joined the rendezvous.
    has_joined: bool,
    is_halted: bool,
    ending: Option<Ending>,
}

impl<E: Executor> Supervisor<E> {
    /// Creates a job that has no hosts yet. The rendezvous must be [elastic](Rendezvous::start_elastic). `interfaces`
    /// are the network interfaces for links between hosts; an empty list means all.
    pub fn new(policy: Policy, rendezvous: Rendezvous, interfaces: &[String], executor: E) -> Self {
        let of_job =
            environment::of_job(rendezvous.addresses(), &rendezvous.key(), interfaces, &[]);
        Self {
            driver: Driver::new(policy),
            rendezvous,
            executor,
            of_job,
            started: Instant::now(),
            hosts: Vec::new(),
            known: BTreeMap::new(),
            workers: BTreeMap::new(),
            labels: BTreeMap::new(),
            unstartable: BTreeSet::new(),
            has_joined: false,
            is_halted: false,
            ending: None,
        }
    }

    /// Sets the present hosts and slots; hosts that are not in the list are removed.
    pub fn set_hosts(&mut self, hosts: Vec<Host>) {
        let pairs = hosts.iter().map(|host| (host.name.clone(), host.slots));
        let pairs = pairs.collect();
        for host in &hosts {
            self.known.insert(host.name.clone(), host.clone());
        }
        self.hosts = hosts;
        self.handle(Event::Hosts(pairs));
    }

    /// Announces that hosts are added one by one and that there is no list to wait for.
    pub fn expect_hosts(&mut self) {
        self.driver.knows_hosts = true;
    }

    /// Adds a host, or changes its number of slots.
    pub fn add_host(&mut self, host: Host) {
        let mut hosts = self.hosts.clone();
        match hosts.iter_mut().find(|known| known.name == host.name) {
            Some(known) => *known = host,
            None => hosts.push(host),
        }
        self.set_hosts(hosts);
    }

    /// Adds a host of one slot on a machine that it may share with other hosts.
    pub fn add_host_on(&mut self, host: Host, machine: &str) {
        self.driver.machines.add(&host.name, machine);
        self.add_host(host);
    }

    /// Removes a host: its workers leave at their next commit. If the host is already lost, also call
    /// [`Self::host_lost`].
    pub fn remove_host(&mut self, name: &str) {
        let mut hosts = self.hosts.clone();
        hosts.retain(|host| host.name != name);
        self.set_hosts(hosts);
    }

    /// Reports that workers can be started on a host that was being opened.
    pub fn host_ready(&mut self, host: &str) {
        self.handle(Event::HostReady(host.to_owned()));
    }

    /// Reports that a host was lost: no worker runs there, and none can be started for now. `why` is the reason, `code`
    /// the job's exit code if it fails by this loss.
    pub fn host_lost(&mut self, host: &str, why: &str, code: u8) {
        let here = self.workers_on(host);
        self.handle(Event::HostLost {
            host: host.to_owned(),
            why: why.to_owned(),
            code,
        });
        for worker in here {
            self.forget(worker);
        }
    }

    /// Reports that a host was lost with all its workers and is not expected back. [`Self::add_host`] adds it again.
    pub fn host_gone(&mut self, host: &str, why: &str) {
        let here = self.workers_on(host);
        self.hosts.retain(|known| known.name != host);
        self.handle(Event::HostGone {
            host: host.to_owned(),
            why: why.to_owned(),
        });
        for worker in here {
            self.forget(worker);
        }
    }

    /// Reports that a worker has ended.
    pub fn ended(&mut self, worker: WorkerId, cause: Cause) {
        self.handle(Event::Exited { worker, cause });
        self.forget(worker);
    }

    /// Reports that a worker has ended because its script cannot start, for example because a module is missing. The
    /// job ends if this is so in every place and no worker ever joined the rendezvous: other processes would fail in
    /// the same way.
    pub fn could_not_start(&mut self, worker: WorkerId, cause: Cause) {
        let Some(w) = self.workers.get(&worker) else {
            return;
        };
        self.unstartable.insert((w.host.clone(), w.local));
        let runs = |w: &Running| !self.unstartable.contains(&(w.host.clone(), w.local));
        if !self.has_joined && !self.workers.values().any(runs) {
            let why = format!(
                "the script cannot start: {} {}",
                self.driver.name(worker),
                cause.text()
            );
            self.finish(Ending::Failure {
                worker: Some(worker),
                code: cause.code(),
                why,
                is_state_lost: false,
            });
        }
        self.ended(worker, cause);
    }

    /// Passes on the answer to [`Executor::check_stopped`].
    pub fn stopped_state(&mut self, worker: WorkerId, is_stopped: bool) {
        self.handle(Event::StoppedState { worker, is_stopped });
    }

    /// Handles the events of the rendezvous, and performs what is due.
    pub fn advance(&mut self) {
        while let Some(event) = self.rendezvous.server().poll_event() {
            self.on_rendezvous(event);
        }
        let now = Instant::now();
        if self.deadline().is_some_and(|at| now >= at) {
            self.driver.handle_timeout(now - self.started);
            self.carry_out();
        }
    }

    /// Returns when to call [`Self::advance`] at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        let due = self.driver.next_deadline().filter(|_| self.is_going_on());
        due.map(|at| self.started + at)
    }

    /// Returns a descriptor that is readable when [`Self::advance`] must be called; `None` in a forked child.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.rendezvous.server().as_fd()
    }

    /// Returns the result of the job once it is decided; its workers may still run then.
    pub fn ending(&self) -> Option<&Ending> {
        self.ending.as_ref()
    }

    /// Ends the job with this result, unless it has ended already.
    pub fn finish(&mut self, ending: Ending) {
        if self.is_going_on() {
            self.executor.finish(ending == Ending::Success);
            self.ending = Some(ending);
        }
    }

    /// Stops all decisions and starts. The executor must end the workers that still run.
    pub fn halt(&mut self) {
        self.is_halted = true;
    }

    /// Returns the executor.
    pub fn executor(&mut self) -> &mut E {
        &mut self.executor
    }

    /// Drops the rendezvous and returns the executor.
    pub fn into_executor(self) -> E {
        self.executor
    }

    /// Returns the host on which this worker runs.
    pub fn host_of(&self, worker: WorkerId) -> Option<&str> {
        self.workers.get(&worker).map(|w| w.host.as_str())
    }

    /// Returns the workers that run on this host.
    pub fn workers_on(&self, host: &str) -> Vec<WorkerId> {
        let here = self.workers.iter().filter(|(_, w)| w.host == host);
        here.map(|(worker, _)| *worker).collect()
    }

    fn is_going_on(&self) -> bool {
        self.ending.is_none() && !self.is_halted
    }

    fn handle(&mut self, event: Event) {
        if self.is_going_on() {
            self.driver.handle(self.started.elapsed(), event);
            self.carry_out();
        }
    }

    fn on_rendezvous(&mut self, event: ServerEvent) {
        match event {
            ServerEvent::Joined {
                worker,
                training_state,
                pid,
                heartbeat,
            } => {
                self.has_joined = true;
                if let Some(w) = self.workers.get_mut(&worker) {
                    w.pid = Some(pid);
                }
                self.driver.expect_life_within(heartbeat);
                self.handle(Event::Joined {
                    worker,
                    training_state,
                });
            }
            ServerEvent::Away { worker } => self.handle(Event::Away(worker)),
            ServerEvent::StateChanged {
                worker,
                training_state,
            } => self.handle(Event::StateChanged {
                worker,
                training_state,
            }),
            ServerEvent::Silent { who, by } => self.handle(Event::Silent { worker: who, by }),
            ServerEvent::Up(generation) => {
                self.executor.notify(News::Round {
                    number: generation.0,
                    workers: &self.driver.round,
                });
                self.handle(Event::Up);
            }
            ServerEvent::Failed(why) => self.executor.notify(News::NoRound(&why)),
            _ => {}
        }
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.driver.poll_action() {
            self.act(action);
        }
    }

    /// Carries out an action, and feeds its immediate results to the driver.
    fn act(&mut self, action: Action) {
        match action {
            Action::Open(host) => match self.executor.open(&host) {
                Ok(Opened::Opening) => {}
                Ok(Opened::Ready) => self.feed(Event::HostReady(host)),
                Err(why) => self.feed(Event::HostLost { host, why, code: 1 }),
            },
            Action::Close(host) => self.executor.close(&host),
            Action::Start {
                worker,
                host,
                local,
            } => self.start(worker, &host, local),
            Action::Stop(worker) => {
                if self.workers.contains_key(&worker) {
                    self.executor.end(worker);
                }
            }
            Action::CheckStopped(worker) => {
                if let Some(pid) = self.workers.get(&worker).and_then(|w| w.pid) {
                    self.executor.check_stopped(worker, pid);
                }
            }
            Action::AnnounceDeath { worker, cause } => {
                let host = self.host_of(worker).unwrap_or_default();
                let server = self.rendezvous.server();
                server.report_death(Rank(worker), host, &cause);
            }
            Action::Form(assignments) => {
                for (worker, assignment) in &assignments {
                    self.relabel(*worker, assignment.rank);
                }
                self.rendezvous.server().form(assignments);
            }
            Action::Announce(kind) => self.rendezvous.server().announce(kind),
            Action::Dismiss(worker, why) => self.rendezvous.server().dismiss(worker, &why),
            Action::Note(text) => self.executor.notify(News::Words(&text)),
            Action::End(ending) => self.finish(ending),
        }
    }

    fn feed(&mut self, event: Event) {
        self.driver.handle(self.started.elapsed(), event);
    }

    fn start(&mut self, worker: WorkerId, host: &str, local: u32) {
        let Some(mut on) = self.known.get(host).cloned() else {
            return;
        };
        // More workers than `max_np` never run there.
        let policy = &self.driver.policy;
        on.slots = on.slots.min(policy.max_np);
        let (size, timeout_s) = (policy.first_np, policy.wait_timeout.as_secs());
        let before = self.labels.get(&(host.to_owned(), local)).copied();
        let label = before.filter(|label| !self.is_taken(*label));
        let label = label.unwrap_or_else(|| self.free_label());
        self.workers.insert(
            worker,
            Running {
                host: host.to_owned(),
                local,
                label,
                pid: None,
            },
        );
        let (_, local_rank) = self.driver.machines.place(host, local);
        let of_worker = environment::of_worker(&on, worker, local_rank, label, size, timeout_s);
        let started = self.executor.start(&NewWorker {
            worker,
            host,
            local_rank: local,
            rank: label,
            of_job: &self.of_job,
            of_worker,
        });
        if let Err(cause) = started {
            self.feed(Event::Exited { worker, cause });
            self.forget(worker);
        }
    }

    fn forget(&mut self, worker: WorkerId) {
        if let Some(w) = self.workers.remove(&worker) {
            self.labels.insert((w.host, w.local), w.label);
        }
    }

    fn is_taken(&self, label: u32) -> bool {
        self.workers.values().any(|w| w.label == label)
    }

    fn free_label(&self) -> u32 {
        (0..).find(|label| !self.is_taken(*label)).unwrap_or(0)
    }

    /// Sets a worker's rank. Another worker that was expected to get this rank gets another expected rank.
    fn relabel(&mut self, worker: WorkerId, rank: u32) {
        let has_it = |(id, w): &(&WorkerId, &Running)| **id != worker && w.label == rank;
        let other = self.workers.iter().find(has_it).map(|(id, _)| *id);
        self.label(worker, rank);
        if let Some(other) = other {
            let label = self.free_label();
            self.label(other, label);
        }
    }

    fn label(&mut self, worker: WorkerId, label: u32) {
        if let Some(w) = self.workers.get_mut(&worker) {
            w.label = label;
            self.executor.notify(News::Rank(worker, label));
        }
    }
}

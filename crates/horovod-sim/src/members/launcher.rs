//! The launcher: carries out what the real driver decides, over agents and the real rendezvous.

use std::time::Duration;

use horovod_launch::elastic::{Action, Cause, Event, WorkerId};
use horovod_launch::frames::ExitStatus;
use horovod_transport::rendezvous::{RankAssignment, ServerEvent};
use horovod_transport::testing::Done;

use super::links::{LinkId, Message, Route};
use super::{Happening, MS, SECOND, World};

/// The launcher's order to the rendezvous, which has a thread of its own.
#[derive(Debug)]
pub(super) enum Order {
    Form(Vec<(WorkerId, RankAssignment)>),
    Announce(u8),
    Dismiss(WorkerId, String),
    Died { worker: WorkerId, cause: String },
}

pub(super) fn name_of(host: usize) -> String {
    format!("h{host}")
}

pub(super) fn host_of(name: &str) -> usize {
    name[1..].parse().unwrap_or(usize::MAX)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// From the launcher to a host.
fn down(host: usize) -> Route {
    Route {
        from: None,
        to: Some(host),
    }
}

impl World {
    pub(super) fn list_hosts(&mut self) {
        let listed = (0..).zip(&self.hosts).filter(|(_, host)| host.is_listed);
        let listed = listed.map(|(i, host)| (name_of(i), host.slots)).collect();
        self.log(format!("hosts {listed:?}"));
        self.feed_driver(Event::Hosts(listed));
    }

    pub(super) fn feed_driver(&mut self, event: Event) {
        let now = self.time();
        self.driver.handle(now, event);
        self.obey();
    }

    pub(super) fn launcher_timer(&mut self) {
        self.launcher_timer_at = None;
        let now = self.time();
        if self.driver.next_deadline().is_some_and(|at| at <= now) {
            self.driver.handle_timeout(now);
            self.obey();
            if self.driver.next_deadline().is_some_and(|at| at <= now) {
                self.fail("the driver's deadline stays: the launcher would spin".to_owned());
            }
        } else {
            self.obey();
        }
    }

    fn obey(&mut self) {
        while let Some(action) = self.driver.poll_action() {
            if self.ending.is_some() {
                self.fail(format!("{action:?} after the end"));
            }
            self.act(action);
        }
        if let Some(at) = self.driver.next_deadline() {
            let at = nanos(at).max(self.now + 1);
            if self
                .launcher_timer_at
                .is_none_or(|known| at < known || known <= self.now)
            {
                self.launcher_timer_at = Some(at);
                self.at(at, Happening::LauncherTimer);
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Open(host) => {
                let host = host_of(&host);
                if self.hosts[host].agent.is_some() {
                    self.fail("a host is opened twice".to_owned());
                }
                self.next_agent += 1;
                let agent = self.next_agent;
                self.hosts[host].agent = Some(agent);
                let after = self.between(SECOND, 3 * SECOND);
                self.after(after, Happening::AgentUp(host, agent));
            }
            Action::Close(host) => {
                let host = host_of(&host);
                if self.known.values().any(|(there, _)| *there == host) {
                    self.fail("a host in use is closed".to_owned());
                }
                if let Some(agent) = self.hosts[host].agent.take() {
                    self.hosts[host].agents.remove(&agent);
                }
            }
            Action::Start {
                worker,
                host,
                local,
            } => {
                let host = host_of(&host);
                self.check_start(worker, host, local);
                self.known.insert(worker, (host, local));
                match self.hosts[host].agent {
                    Some(agent) => {
                        let link = LinkId::ToAgent(host, agent);
                        self.send(link, down(host), Message::Start { worker, local });
                    }
                    None => self.fail("a worker is started where no agent is".to_owned()),
                }
            }
            Action::Stop(worker) => {
                self.stopping.insert(worker);
                if let Some((host, _)) = self.known.get(&worker).copied()
                    && let Some(agent) = self.hosts[host].agent
                {
                    let link = LinkId::ToAgent(host, agent);
                    self.send(link, down(host), Message::End(worker));
                }
            }
            // Only where the driver was told of a time-out.
            Action::CheckStopped(_) => {}
            Action::AnnounceDeath { worker, cause } => {
                self.order(Order::Died { worker, cause });
            }
            Action::Form(assignments) => {
                self.check_round(&assignments);
                self.order(Order::Form(assignments));
            }
            Action::Announce(kind) => {
                self.log(format!("the launcher announces {kind}"));
                self.order(Order::Announce(kind));
            }
            Action::Dismiss(worker, why) => {
                self.stopping.insert(worker);
                self.order(Order::Dismiss(worker, why));
            }
            Action::Note(text) => self.log(format!("horovodrun: {text}")),
            Action::End(ending) => {
                self.log(format!("the end: {ending:?}"));
                self.ending = Some(ending);
            }
        }
    }

    fn order(&mut self, order: Order) {
        self.orders.push_back(order);
        let after = self.rng.below(MS);
        self.after(after, Happening::Ordered);
    }

    pub(super) fn obey_order(&mut self) {
        let now = self.time();
        let Some(order) = self.orders.pop_front() else {
            return;
        };
        let done = match order {
            Order::Form(assignments) => self.rendezvous.form(&assignments, now),
            Order::Announce(kind) => self.rendezvous.announce(kind),
            Order::Dismiss(worker, why) => self.rendezvous.dismiss(worker, &why),
            Order::Died { worker, cause } => self.rendezvous.died(worker, "its host", &cause),
        };
        self.rendezvous_did(done);
    }

    /// Carries out what the rendezvous does.
    pub(super) fn rendezvous_did(&mut self, done: Vec<Done>) {
        for item in done {
            match item {
                Done::Send {
                    client,
                    bytes,
                    is_last,
                } => {
                    let Some((_, host)) = self.clients.get(&client).copied() else {
                        continue;
                    };
                    let (link, route) = (LinkId::FromRendezvous(client), down(host));
                    self.send(link, route, Message::Bytes(bytes));
                    if is_last {
                        self.send(link, route, Message::Closed);
                    }
                }
                Done::Close(client) => {
                    if let Some((_, host)) = self.clients.get(&client).copied() {
                        let route = down(host);
                        self.send(LinkId::FromRendezvous(client), route, Message::Closed);
                    }
                }
                Done::Report(event) => {
                    self.reports.push_back(event);
                    let after = self.rng.below(self.delay / 4 + 1);
                    self.after(after, Happening::Reported);
                }
            }
        }
        if let Some(at) = self.rendezvous.deadline() {
            let at = nanos(at).max(self.now);
            if self.rendezvous_timer_at != Some(at) {
                self.rendezvous_timer_at = Some(at);
                self.at(at, Happening::RendezvousTimer);
            }
        }
    }

    pub(super) fn rendezvous_timer(&mut self) {
        let done = self.rendezvous.timeout(self.time());
        self.rendezvous_did(done);
    }

    pub(super) fn take_report(&mut self) {
        match self.reports.pop_front() {
            Some(ServerEvent::Joined {
                worker,
                training_state,
                ..
            }) => {
                self.feed_driver(Event::Joined {
                    worker,
                    training_state,
                });
            }
            Some(ServerEvent::Away { worker }) => self.feed_driver(Event::Away(worker)),
            Some(ServerEvent::StateChanged {
                worker,
                training_state,
            }) => {
                self.feed_driver(Event::StateChanged {
                    worker,
                    training_state,
                });
            }
            Some(ServerEvent::Up(generation)) => {
                self.log(format!("round {} stands", generation.0));
                self.ledger.rounds += 1;
                self.feed_driver(Event::Up);
            }
            Some(ServerEvent::Failed(why)) => self.log(format!("a round was given up: {why}")),
            _ => {}
        }
    }

    pub(super) fn agent_up(&mut self, host: usize, agent: u64) {
        if self.hosts[host].agent != Some(agent) {
            return;
        }
        let reached = self.is_open(None, Some(host)) && self.is_open(Some(host), None);
        let fails = self.now < self.calm_at && self.fate_strikes(30_000);
        if !reached || fails {
            return self.lose_host(host, "no answer");
        }
        self.hosts[host].agents.insert(agent);
        self.feed_driver(Event::HostReady(name_of(host)));
    }

    /// The launcher has no connection to this host any more.
    pub(super) fn lose_host(&mut self, host: usize, why: &str) {
        if self.hosts[host].agent.take().is_none() {
            return;
        }
        let event = Event::HostLost {
            host: name_of(host),
            why: why.to_owned(),
            code: 1,
        };
        self.known.retain(|_, (there, _)| *there != host);
        self.feed_driver(event);
    }

    pub(super) fn worker_exited(&mut self, host: usize, agent: u64, worker: WorkerId, status: i32) {
        let is_current = self.hosts[host].agent == Some(agent);
        if !is_current
            || self
                .known
                .get(&worker)
                .is_none_or(|(there, _)| *there != host)
        {
            return;
        }
        let status = match status {
            0 | 1 => ExitStatus::Code(status),
            signal => ExitStatus::Signal(signal),
        };
        let cause = Cause::Exit(status);
        self.known.remove(&worker);
        self.feed_driver(Event::Exited { worker, cause });
    }

    pub(super) fn on_agent_message(&mut self, host: usize, agent: u64, message: Message) {
        if !self.hosts[host].agents.contains(&agent) {
            return;
        }
        match message {
            Message::Start { worker, local } => self.spawn(worker, host, local, agent),
            Message::End(worker) => {
                let after = self.between(MS, 4 * SECOND);
                self.after(after, Happening::Dies(worker, 15));
            }
            _ => {}
        }
    }

    /// An agent that has lost the launcher leaves nothing behind.
    pub(super) fn agent_ends(&mut self, host: usize, agent: u64) {
        if !self.hosts[host].agents.remove(&agent) {
            return;
        }
        let mine = self.processes.iter().filter(|(_, p)| p.agent == agent);
        let mine: Vec<WorkerId> = mine.map(|(worker, _)| *worker).collect();
        for worker in mine {
            self.die(worker, 9);
        }
    }
}

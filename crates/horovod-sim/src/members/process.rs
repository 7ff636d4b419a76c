//! One process of the job on its way into a round, as `crates/horovod-transport/src/mesh/connect.rs` goes it.

use std::rc::Rc;

use horovod_launch::elastic::WorkerId;
use horovod_protocol::Tree;
use horovod_transport::testing::{ServerMessage, WorkerMessage};

use super::engine::Engine;
use super::links::{LinkId, Message, Route};
use super::script::Script;
use super::{Happening, MS, SECOND, TIMEOUT, World};

/// Attempts that may fail before a process gives up.
const FAILED_MAX: u32 = 3;

/// Where a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessStage {
    Importing,
    /// Looks for the rendezvous, until then.
    Dialing(u64),
    /// Waits there, since then.
    AtRendezvous(u64),
    /// Has the roster and will say where it listens, until then.
    Preparing(u64),
    /// Has said so.
    Ready(u64),
    /// Connects to the others.
    Linking(u64),
    /// Its engine runs.
    Member,
}

/// A process's copy of its round's roster.
#[derive(Clone, Debug)]
pub(super) struct Roster {
    pub(super) generation: u64,
    pub(super) rank: u32,
    pub(super) tree: Rc<Tree>,
    pub(super) members: Rc<[WorkerId]>,
    pub(super) hosts: Rc<[usize]>,
}

#[derive(Debug)]
pub(super) struct Process {
    pub(super) host: usize,
    pub(super) local: u32,
    pub(super) agent: u64,
    pub(super) stage: ProcessStage,
    /// Counts its stages, so that what was planned for an earlier one does not happen.
    pub(super) epoch: u64,
    pub(super) client: Option<u64>,
    /// Attempts to become a member that failed in a row.
    failed: u32,
    pub(super) roster: Option<Roster>,
    /// Announcements over the present connection to the rendezvous: newest version, all kinds.
    pub(super) updates: (u64, u8),
    pub(super) engine: Option<Engine>,
    pub(super) script: Script,
}

impl World {
    pub(super) fn spawn(&mut self, worker: WorkerId, host: usize, local: u32, agent: u64) {
        let mut there = self.processes.values();
        if there.any(|p| p.host == host && p.local == local) {
            self.fail(format!("two processes in slot {local} of h{host}"));
        }
        let process = Process {
            host,
            local,
            agent,
            stage: ProcessStage::Importing,
            epoch: 0,
            client: None,
            failed: 0,
            roster: None,
            updates: (0, 0),
            engine: None,
            script: Script::default(),
        };
        self.processes.insert(worker, process);
        self.log(format!("worker {worker} starts on h{host}, slot {local}"));
        let after = self.between(300 * MS, 5 * SECOND);
        self.after(after, Happening::Goes(worker, 0));
    }

    /// Goes on after a time in the present stage.
    pub(super) fn goes_after(&mut self, worker: WorkerId, delay: u64) {
        if let Some(process) = self.processes.get_mut(&worker) {
            process.epoch += 1;
            let epoch = process.epoch;
            self.after(delay, Happening::Goes(worker, epoch));
        }
    }

    fn enter(&mut self, worker: WorkerId, stage: ProcessStage, delay: u64) {
        if let Some(process) = self.processes.get_mut(&worker) {
            process.stage = stage;
            self.goes_after(worker, delay);
        }
    }

    pub(super) fn go_on(&mut self, worker: WorkerId, epoch: u64) {
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        if process.epoch != epoch {
            return;
        }
        match process.stage {
            ProcessStage::Importing => self.dial(worker),
            ProcessStage::Dialing(until) => self.try_rendezvous(worker, until),
            // It has waited there for longer than the launcher would.
            ProcessStage::AtRendezvous(_) => self.exit(worker, 1),
            ProcessStage::Preparing(until) => {
                self.send_to_rendezvous(worker, &WorkerMessage::Ready);
                let left = until.saturating_sub(self.now);
                self.enter(worker, ProcessStage::Ready(until), left);
            }
            ProcessStage::Ready(_) => self.tries_again(worker),
            ProcessStage::Linking(until) => self.try_links(worker, until),
            ProcessStage::Member => self.script_goes_on(worker),
        }
    }

    /// `hvd.init()`.
    pub(super) fn dial(&mut self, worker: WorkerId) {
        if let Some(process) = self.processes.get_mut(&worker) {
            process.failed = 0;
        }
        self.dial_again(worker);
    }

    fn dial_again(&mut self, worker: WorkerId) {
        self.hang_up(worker);
        let until = self.now + self.connect_timeout;
        let after = self.rng.below(10 * MS);
        self.enter(worker, ProcessStage::Dialing(until), after);
    }

    fn hang_up(&mut self, worker: WorkerId) {
        if let Some(process) = self.processes.get_mut(&worker)
            && let Some(client) = process.client.take()
        {
            process.roster = None;
            process.updates = (0, 0);
            let route = Route {
                from: Some(process.host),
                to: None,
            };
            self.send(LinkId::ToRendezvous(client), route, Message::Closed);
        }
    }

    fn try_rendezvous(&mut self, worker: WorkerId, until: u64) {
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        let host = process.host;
        if !(self.is_open(None, Some(host)) && self.is_open(Some(host), None)) {
            if self.now >= until {
                return self.exit(worker, 1);
            }
            return self.goes_after(worker, SECOND);
        }
        let training_state = process.script.training_state;
        self.next_client += 1;
        let client = self.next_client;
        self.clients.insert(client, (worker, host));
        self.rendezvous.connected(client, worker);
        if let Some(process) = self.processes.get_mut(&worker) {
            process.client = Some(client);
        }
        let join = WorkerMessage::Join {
            worker,
            training_state: training_state as u8,
            timeout_ms: self.connect_timeout / MS,
            host: super::launcher::name_of(host),
            fan_out: self.fan_out,
        };
        self.send_to_rendezvous(worker, &join);
        let at_rendezvous = ProcessStage::AtRendezvous(self.now);
        self.enter(worker, at_rendezvous, 2 * TIMEOUT + self.connect_timeout);
    }

    /// Says something to the rendezvous.
    pub(super) fn send_to_rendezvous(&mut self, worker: WorkerId, what: &WorkerMessage) {
        if let Some(process) = self.processes.get(&worker)
            && let Some(client) = process.client
        {
            let route = Route {
                from: Some(process.host),
                to: None,
            };
            let message = Message::Bytes(what.encode());
            self.send(LinkId::ToRendezvous(client), route, message);
        }
    }

    pub(super) fn on_rendezvous_message(&mut self, client: u64, message: Message) {
        let Some((worker, _)) = self.clients.get(&client).copied() else {
            return;
        };
        let Some(process) = self.processes.get_mut(&worker) else {
            return;
        };
        if process.client != Some(client) {
            return;
        }
        let is_joining = process.engine.is_none();
        let Message::Bytes(bytes) = message else {
            process.client = None;
            if is_joining {
                self.tries_again(worker);
            } else {
                // A member would hear of no change any more, so it asks for a new round.
                process.updates = (process.updates.0 + 1, process.updates.1 | 2);
            }
            return;
        };
        match ServerMessage::decode(&bytes) {
            None => self.fail(format!("worker {worker} cannot read what it is told")),
            Some(ServerMessage::Roster {
                generation,
                members,
                fan_out,
                assignment,
            }) => {
                let rank = assignment.map_or(u32::MAX, |assignment| assignment.rank);
                self.enrol(worker, generation, &members, rank, fan_out);
            }
            Some(ServerMessage::Table(_)) => {
                if let ProcessStage::Ready(until) = process.stage {
                    self.fate_at(worker, "the table");
                    let after = self.between(MS, 100 * MS);
                    self.enter(worker, ProcessStage::Linking(until), after);
                }
            }
            Some(ServerMessage::PeerDied(rank)) if !is_joining => self.on_death(worker, rank),
            Some(ServerMessage::HostsUpdated { version, kind }) => {
                process.updates = (version, process.updates.1 | kind);
            }
            Some(ServerMessage::PeerDied(_) | ServerMessage::Aborted) if is_joining => {
                self.dial_again(worker)
            }
            Some(ServerMessage::Removed) if is_joining => {
                self.log(format!("worker {worker} is sent away"));
                self.exit(worker, 0);
            }
            Some(ServerMessage::Refused) if is_joining => self.exit(worker, 1),
            Some(_) => {}
        }
    }

    fn enrol(
        &mut self,
        worker: WorkerId,
        generation: u64,
        members: &[(u32, String)],
        rank: u32,
        fan_out: u32,
    ) {
        self.check_roster(worker, generation, members, rank);
        let known = self.generations.entry(generation).or_insert_with(|| {
            let workers: Rc<[WorkerId]> = members.iter().map(|(worker, _)| *worker).collect();
            let hosts: Rc<[usize]> = members
                .iter()
                .map(|(_, host)| super::launcher::host_of(host))
                .collect();
            // Hosts by number, in the order in which they appear.
            let mut seen: Vec<usize> = Vec::new();
            let numbers: Vec<u32> = hosts
                .iter()
                .map(|host| {
                    let at = seen.iter().position(|known| known == host);
                    at.unwrap_or_else(|| {
                        seen.push(*host);
                        seen.len() - 1
                    }) as u32
                })
                .collect();
            let tree = Rc::new(Tree::new(&numbers, fan_out));
            super::data::Generation::new(workers, hosts, tree)
        });
        let roster = Roster {
            generation,
            rank,
            tree: known.tree.clone(),
            members: known.members.clone(),
            hosts: known.hosts.clone(),
        };
        if let Some(process) = self.processes.get_mut(&worker) {
            process.roster = Some(roster);
        }
        self.fate_at(worker, "the roster");
        let after = self.between(MS, 50 * MS);
        let until = self.now + self.connect_timeout;
        self.enter(worker, ProcessStage::Preparing(until), after);
    }

    fn try_links(&mut self, worker: WorkerId, until: u64) {
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        let Some(roster) = process.roster.clone() else {
            return;
        };
        let here = Some(process.host);
        let listens = |other: &WorkerId| {
            self.processes.get(other).is_some_and(|p| {
                p.roster
                    .as_ref()
                    .is_some_and(|r| r.generation == roster.generation)
            })
        };
        let mut hosts = roster.hosts.iter();
        let reaches = hosts.all(|h| self.is_open(here, Some(*h)) && self.is_open(Some(*h), here));
        if reaches && roster.members.iter().all(listens) {
            self.fate_at(worker, "standing links");
            self.become_member(worker, &roster);
        } else if self.now >= until {
            self.tries_again(worker);
        } else {
            self.goes_after(worker, 200 * MS);
        }
    }

    /// Its round did not come to be, and no death explains it: a link may have been cut for a while.
    fn tries_again(&mut self, worker: WorkerId) {
        self.send_to_rendezvous(worker, &WorkerMessage::Failed);
        let Some(process) = self.processes.get_mut(&worker) else {
            return;
        };
        process.failed += 1;
        match process.failed > FAILED_MAX {
            true => self.exit(worker, 1),
            false => self.dial_again(worker),
        }
    }

    /// The process ends by itself.
    pub(super) fn exit(&mut self, worker: WorkerId, status: i32) {
        if let Some(process) = self.processes.get_mut(&worker) {
            process.epoch += 1;
        }
        self.after(0, Happening::Dies(worker, status));
    }

    /// A process is no more: what it had open is closed, and its agent tells.
    pub(super) fn die(&mut self, worker: WorkerId, status: i32) {
        let Some(process) = self.processes.get(&worker) else {
            return;
        };
        let (host, agent) = (process.host, process.agent);
        let stage = process.stage;
        self.log(format!(
            "worker {worker} on h{host} ends with {status} ({stage:?}, {})",
            process.script.describe()
        ));
        self.check_end_of(worker, status);
        self.leave_generation(worker, &|| Message::Closed);
        self.hang_up(worker);
        self.processes.remove(&worker);
        if self.hosts[host].agents.contains(&agent) {
            let link = LinkId::FromAgent(host, agent);
            let message = Message::Exited(worker, status);
            let route = Route {
                from: Some(host),
                to: None,
            };
            self.send(link, route, message);
        }
    }
}

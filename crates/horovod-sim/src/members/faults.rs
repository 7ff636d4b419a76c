//! Faults: processes die, hosts lose power, are cut off for a while, come onto the list and go.

use horovod_launch::elastic::WorkerId;

use super::links::{LinkId, Message};
use super::{HEARTBEAT_TIMEOUT, Happening, MS, SECOND, TCP_TIMEOUT, World};

/// Directions, seen from a host, in which nothing passes.
struct Directions {
    inward: bool,
    outward: bool,
}

/// Faults that are planned, besides those at special points.
const PLANNED_MAX: u64 = 9;
/// When everything that was cut off has been given up by everybody.
const GIVEN_UP: u64 = TCP_TIMEOUT + 5 * SECOND;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Any process is killed.
    Kill,
    /// A host loses its power for so long.
    PowerLoss(u64),
    /// A host is cut off for so long: nothing comes in, nothing goes out, or both.
    Cut {
        inward: bool,
        outward: bool,
        time: u64,
    },
    /// The connection to an agent breaks.
    AgentLost,
    /// A host comes onto the list or leaves it, or has another number of slots.
    Hosts,
    /// Nothing goes wrong any more, and all hosts are there.
    Calm,
}

impl World {
    pub(super) fn plan_faults(&mut self) {
        for _ in 0..self.fate.below(PLANNED_MAX + 1) {
            let at = self.fate.below(self.calm_at);
            let time = match self.fate.below(3) {
                0 => SECOND + self.fate.below(8 * SECOND),
                1 => HEARTBEAT_TIMEOUT + self.fate.below(14 * SECOND),
                _ => GIVEN_UP + self.fate.below(120 * SECOND),
            };
            let side = self.fate.below(3);
            let fault = match self.fate.below(10) {
                0..=3 => Fault::Kill,
                4 => Fault::PowerLoss(GIVEN_UP + time),
                5 | 6 => Fault::Cut {
                    inward: side != 0,
                    outward: side != 1,
                    time,
                },
                7 => Fault::AgentLost,
                _ => Fault::Hosts,
            };
            if self.faults_left > 0 {
                self.faults_left -= 1;
                self.at(at, Happening::Fault(fault));
            }
        }
        self.at(self.calm_at, Happening::Fault(Fault::Calm));
    }

    /// A point at which a death matters: it may come now.
    pub(super) fn fate_at(&mut self, worker: WorkerId, point: &str) {
        let strikes = self.fate_strikes(self.crashes_per_million);
        if strikes && self.now < self.calm_at {
            self.faults_left -= 1;
            self.log(format!("FAULT: worker {worker} is killed at {point}"));
            self.after(0, Happening::Dies(worker, 9));
        }
    }

    pub(super) fn fate_strikes(&mut self, times_in_a_million: u64) -> bool {
        self.faults_left > 0 && self.fate.below(1_000_000) < times_in_a_million
    }

    pub(super) fn strike(&mut self, fault: Fault) {
        let host = self.fate.index(self.hosts.len());
        let victim = self.fate.index(self.processes.len().max(1));
        if fault != Fault::Calm {
            self.log(format!("FAULT: {fault:?} (host h{host})"));
        }
        match fault {
            Fault::Kill => {
                if let Some(worker) = self.processes.keys().nth(victim).copied() {
                    self.die(worker, 9);
                }
            }
            Fault::PowerLoss(time) => {
                let both = Directions {
                    inward: true,
                    outward: true,
                };
                if self.cut(host, both, time) {
                    self.lose_power(host);
                }
            }
            Fault::Cut {
                inward,
                outward,
                time,
            } => {
                self.cut(host, Directions { inward, outward }, time);
            }
            Fault::AgentLost => {
                if let Some(agent) = self.hosts[host].agent {
                    let after = self.between(MS, SECOND);
                    self.after(after, Happening::AgentEnds(host, agent));
                    self.lose_host(host, "its connection broke");
                }
            }
            Fault::Hosts if self.policy.has_fixed_hosts => {}
            Fault::Hosts => {
                let slots = 1 + self.fate.below(u64::from(self.hosts[host].slots) + 1) as u32;
                let host = &mut self.hosts[host];
                match host.is_listed && self.fate.chance(50) {
                    true => host.is_listed = false,
                    false => (host.is_listed, host.slots) = (true, slots),
                }
                self.list_hosts();
            }
            Fault::Calm => {
                self.log("nothing goes wrong any more".to_owned());
                for host in 0..self.hosts.len() {
                    let cut = self.hosts[host].cuts;
                    // A host without power comes back when all others have noticed.
                    if !self.hosts[host].is_dark {
                        self.heal(host, cut);
                    }
                    self.hosts[host].is_listed |= !self.policy.has_fixed_hosts;
                }
                if !self.policy.has_fixed_hosts {
                    self.list_hosts();
                }
            }
        }
    }

    fn cut(&mut self, host: usize, cut: Directions, time: u64) -> bool {
        let it = &mut self.hosts[host];
        if it.cut_in || it.cut_out {
            return false;
        }
        it.cuts += 1;
        (it.cut_in, it.cut_out) = (cut.inward, cut.outward);
        let cut = it.cuts;
        for how_long in [HEARTBEAT_TIMEOUT, TCP_TIMEOUT] {
            self.after(how_long, Happening::CutLasts(host, cut, how_long));
        }
        self.after(time, Happening::Heal(host, cut));
        true
    }

    fn lose_power(&mut self, host: usize) {
        self.hosts[host].is_dark = true;
        self.hosts[host].agents.clear();
        let here = self.processes.iter().filter(|(_, p)| p.host == host);
        let here: Vec<WorkerId> = here.map(|(worker, _)| *worker).collect();
        for worker in here {
            self.check_end_of(worker, 9);
            self.abandon(worker);
            self.processes.remove(&worker);
        }
    }

    pub(super) fn heal(&mut self, host: usize, cut: u64) {
        let it = &mut self.hosts[host];
        if it.cuts != cut || !(it.cut_in || it.cut_out) {
            return;
        }
        (it.cut_in, it.cut_out, it.is_dark) = (false, false, false);
        self.log(format!("h{host} is no longer cut off"));
        self.unblock();
        self.resume();
    }

    /// A host has been cut off for as long as somebody waits at most.
    pub(super) fn cut_lasts(&mut self, host: usize, cut: u64, how_long: u64) {
        let it = &self.hosts[host];
        if it.cuts != cut || !(it.cut_in || it.cut_out) {
            return;
        }
        if how_long == HEARTBEAT_TIMEOUT {
            return self.silence();
        }
        self.lose_host(host, "its connection timed out");
        for agent in self.hosts[host].agents.clone() {
            let after = self.between(MS, SECOND);
            self.after(after, Happening::AgentEnds(host, agent));
        }
        let here = self.clients.iter().filter(|(_, (_, there))| *there == host);
        let here: Vec<u64> = here.map(|(client, _)| *client).collect();
        for client in here {
            let done = self.rendezvous.gone(client, "the connection timed out");
            self.rendezvous_did(done);
            self.on_rendezvous_message(client, Message::Closed);
            self.clients.remove(&client);
            self.links.remove(&LinkId::ToRendezvous(client));
            self.links.remove(&LinkId::FromRendezvous(client));
        }
    }

    /// Neighbours from whom nothing can come are taken for lost.
    fn silence(&mut self) {
        let mut lost = Vec::new();
        for (worker, process) in &self.processes {
            let Some(engine) = &process.engine else {
                continue;
            };
            for rank in engine.neighbours() {
                let there = engine.roster.hosts[rank.index()];
                if !self.is_open(Some(there), Some(process.host)) {
                    lost.push((*worker, rank));
                }
            }
        }
        for (worker, rank) in lost {
            self.note_lost(worker, rank);
        }
    }
}

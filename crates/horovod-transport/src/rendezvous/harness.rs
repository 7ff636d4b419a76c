//! The rendezvous of an elastic job without sockets, for simulation, and with arbitrary bytes, for fuzzing.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use super::{
    config::ServerEvent,
    elastic::Rounds,
    messages::{Common, MemberEntry, RankAssignment, Registration, ToClient, ToServer, Where},
    round::{ClientId, Do, FixedRounds},
};

/// Action of the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Done {
    /// Send a message; if it is the last, close the connection afterwards.
    Send {
        /// The connection.
        client: u64,
        /// The message.
        bytes: Vec<u8>,
        /// Whether no message follows.
        is_last: bool,
    },
    /// Close a connection.
    Close(u64),
    /// Report an event to the launcher.
    Report(ServerEvent),
}

/// Message from a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerMessage {
    /// The worker requests a place in the next round.
    Join {
        /// Its number.
        worker: u32,
        /// Its training state.
        training_state: u8,
        /// How long the members may take to be ready.
        timeout_ms: u64,
        /// Its host.
        host: String,
        /// Maximum number of ranks that send control messages to one rank.
        fan_out: u32,
    },
    /// The worker can be reached.
    Ready,
    /// The worker could not take part.
    Failed,
    /// The worker's training state has changed.
    StateChanged(u8),
}

impl WorkerMessage {
    /// Returns the encoded message.
    pub fn encode(&self) -> Vec<u8> {
        match self.clone() {
            Self::Join {
                worker,
                training_state,
                timeout_ms,
                host,
                fan_out,
            } => ToServer::Join {
                worker,
                training_state,
                timeout_ms,
                member: MemberEntry {
                    identity: host.clone(),
                    hostname: host,
                    pid: worker,
                    shm: true,
                },
                common: Common {
                    connections: 1,
                    fan_out,
                    heartbeat: None,
                    checksums: true,
                    settings: Vec::new(),
                },
            }
            .encode(),
            Self::Ready => ToServer::Ready(Where::default()).encode(),
            Self::Failed => ToServer::Failed {
                text: "a link could not be made".to_owned(),
            }
            .encode(),
            Self::StateChanged(training_state) => {
                ToServer::StateChanged { training_state }.encode()
            }
        }
    }
}

/// Message to a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerMessage {
    /// The worker is part of a round.
    Roster {
        /// The round's number.
        generation: u64,
        /// Workers in the order of ranks, with their hosts.
        members: Vec<(u32, String)>,
        /// The `fan_out` of rank 0.
        fan_out: u32,
        /// The worker's own place.
        assignment: Option<RankAssignment>,
    },
    /// All members can be reached; their number.
    Table(usize),
    /// A member died.
    PeerDied(u32),
    /// The members of the job change.
    HostsUpdated {
        /// Version of the change; grows with every change.
        version: u64,
        /// 1 removed, 2 added, 3 both.
        kind: u8,
    },
    /// The round could not be set up; the worker may join again.
    Aborted,
    /// The worker was removed from the job.
    Removed,
    /// The rendezvous refuses the worker, or members are missing.
    Refused,
}

impl ServerMessage {
    /// Returns the decoded message, or `None` if it is invalid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(match ToClient::decode(bytes).ok()? {
            ToClient::Roster {
                generation,
                members,
                common,
                assignment,
            } => Self::Roster {
                generation,
                members: members.into_iter().map(|m| (m.pid, m.hostname)).collect(),
                fan_out: common.fan_out,
                assignment,
            },
            ToClient::Table { places } => Self::Table(places.len()),
            ToClient::PeerDied { rank, .. } => Self::PeerDied(rank),
            ToClient::HostsUpdated { version, kind } => Self::HostsUpdated { version, kind },
            ToClient::Aborted { .. } => Self::Aborted,
            ToClient::Removed { .. } => Self::Removed,
            ToClient::Refused { .. } | ToClient::Missing { .. } => Self::Refused,
        })
    }
}

/// The rendezvous of an elastic job. Times count from its start.
pub struct SimulatedRendezvous {
    rounds: Rounds,
    start: Instant,
    /// Open connections: the worker that each authenticated as, and whether it has registered.
    clients: BTreeMap<ClientId, (u32, bool)>,
}

impl Default for SimulatedRendezvous {
    fn default() -> Self {
        Self {
            rounds: Rounds::default(),
            start: Instant::now(),
            clients: BTreeMap::new(),
        }
    }
}

impl SimulatedRendezvous {
    /// Adds the connection of a worker.
    pub fn connected(&mut self, client: u64, worker: u32) {
        self.clients.insert(client, (worker, false));
    }

    /// Handles a message that arrived over a connection.
    pub fn handle(&mut self, client: u64, bytes: &[u8]) -> Vec<Done> {
        let Some((worker, registered)) = self.clients.get_mut(&client) else {
            return Vec::new();
        };
        let message = ToServer::decode(bytes).map_err(|error| error.to_string());
        let handled = message.and_then(|message| {
            let handled = self.rounds.handle(client, *worker, registered, message);
            handled.map_err(str::to_owned)
        });
        match handled {
            Ok(todo) => self.carry_out(todo),
            Err(why) => {
                let mut done = self.gone(client, &why);
                done.push(Done::Close(client));
                done
            }
        }
    }

    /// Handles the end of a connection.
    pub fn gone(&mut self, client: u64, why: &str) -> Vec<Done> {
        if self.clients.remove(&client).is_none() {
            return Vec::new();
        }
        let todo = self.rounds.gone(client, why);
        self.carry_out(todo)
    }

    /// Carries out the launcher's decision to form a round.
    pub fn form(&mut self, assignments: &[(u32, RankAssignment)], now: Duration) -> Vec<Done> {
        let todo = self.rounds.form(assignments, self.start + now);
        self.carry_out(todo)
    }

    /// Announces a change of the members.
    pub fn announce(&mut self, kind: u8) -> Vec<Done> {
        let todo = self.rounds.announce(kind);
        self.carry_out(todo)
    }

    /// Dismisses a worker.
    pub fn dismiss(&mut self, worker: u32, why: &str) -> Vec<Done> {
        let todo = self.rounds.dismiss(worker, why);
        self.carry_out(todo)
    }

    /// Reports to the rendezvous that a worker died.
    pub fn died(&mut self, worker: u32, host: &str, cause: &str) -> Vec<Done> {
        let todo = self.rounds.died(worker, host, cause);
        self.carry_out(todo)
    }

    /// Returns when to call [`Self::timeout`] at the latest.
    pub fn deadline(&self) -> Option<Duration> {
        let deadline = self.rounds.deadline()?;
        Some(deadline.saturating_duration_since(self.start))
    }

    /// Performs what is due.
    pub fn timeout(&mut self, now: Duration) -> Vec<Done> {
        let todo = self.rounds.timeout(self.start + now);
        self.carry_out(todo)
    }

    /// Carries out actions as the server does: messages to a closed connection are dropped.
    fn carry_out(&mut self, todo: Vec<Do>) -> Vec<Done> {
        let mut done = Vec::new();
        for item in todo {
            match item {
                Do::Send(client, message) | Do::Dismiss(client, message)
                    if !self.clients.contains_key(&client) =>
                {
                    drop(message);
                }
                Do::Send(client, message) => done.push(Done::Send {
                    client,
                    bytes: message.encode(),
                    is_last: false,
                }),
                Do::Dismiss(client, message) => {
                    self.clients.remove(&client);
                    done.push(Done::Send {
                        client,
                        bytes: message.encode(),
                        is_last: true,
                    });
                }
                Do::Up(generation) => {
                    let generation = horovod_protocol::Generation(generation);
                    done.push(Done::Report(ServerEvent::Up(generation)));
                }
                Do::Failed(text) => done.push(Done::Report(ServerEvent::Failed(text))),
                Do::Report(event) => done.push(Done::Report(event)),
            }
        }
        done
    }
}

impl std::fmt::Debug for SimulatedRendezvous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedRendezvous")
            .finish_non_exhaustive()
    }
}

/// Runs a whole rendezvous on arbitrary input, elastic if the first byte is odd: messages of members, ended
/// connections, orders of the launcher, time. Checks that generations grow, that a table goes only to clients with its
/// roster, that no worker is in a round twice, and that no message follows a last one.
pub fn rendezvous_server(bytes: &[u8]) {
    let [kind, rest @ ..] = bytes else { return };
    if kind % 2 == 1 {
        elastic(rest);
    } else {
        fixed(rest);
    }
}

/// Returns the next message of a plan, which has its length and its bytes.
fn message<'a>(plan: &mut &'a [u8]) -> &'a [u8] {
    let [length, rest @ ..] = *plan else {
        return &[];
    };
    let (message, rest) = rest.split_at(rest.len().min(usize::from(*length)));
    *plan = rest;
    message
}

/// Checker of the messages sent, step by step.
#[derive(Default)]
struct Judge {
    generation: u64,
    invited: BTreeSet<u64>,
    closed: BTreeSet<u64>,
}

impl Judge {
    fn see(&mut self, done: &[Done]) {
        for item in done {
            match item {
                Done::Send {
                    client,
                    bytes,
                    is_last,
                } => {
                    assert!(!self.closed.contains(client), "said after the last word");
                    self.handle(*client, bytes);
                    if *is_last {
                        self.closed.insert(*client);
                    }
                }
                Done::Close(client) => {
                    self.closed.insert(*client);
                }
                Done::Report(ServerEvent::Up(generation)) => {
                    assert_eq!(generation.0, self.generation, "another generation is up");
                }
                Done::Report(_) => {}
            }
        }
    }

    fn handle(&mut self, client: u64, bytes: &[u8]) {
        match ServerMessage::decode(bytes).expect("what it says can be understood") {
            ServerMessage::Roster {
                generation,
                members,
                assignment,
                ..
            } => {
                assert!(generation >= self.generation, "an old generation");
                if generation > self.generation {
                    self.generation = generation;
                    self.invited.clear();
                }
                assert!(self.invited.insert(client), "twice in a round");
                assert!(self.invited.len() <= members.len(), "more than its members");
                if let Some(assignment) = assignment {
                    assert!((assignment.rank as usize) < members.len(), "no such rank");
                }
            }
            ServerMessage::Table(_) => {
                assert!(self.invited.contains(&client), "a table for nobody")
            }
            _ => {}
        }
    }
}

fn elastic(mut plan: &[u8]) {
    let mut rendezvous = SimulatedRendezvous::default();
    let mut judge = Judge::default();
    let mut now = Duration::ZERO;
    let mut next = 0;
    while let [what, who, rest @ ..] = plan {
        plan = rest;
        let worker = u32::from(who % 8);
        let client = u64::from(*who);
        let done = match what % 10 {
            0 | 1 => {
                // A new connection of a worker with this number, with a valid or an arbitrary first message.
                next += 1;
                let client = 256 + next;
                rendezvous.connected(client, worker);
                let honest = WorkerMessage::Join {
                    worker,
                    training_state: who >> 6,
                    timeout_ms: 1000,
                    host: "h".to_owned(),
                    fan_out: 2,
                };
                match what % 10 {
                    0 => rendezvous.handle(client, &honest.encode()),
                    _ => rendezvous.handle(client, message(&mut plan)),
                }
            }
            2 => rendezvous.handle(256 + client % (next + 1), &WorkerMessage::Ready.encode()),
            3 => rendezvous.handle(256 + client % (next + 1), message(&mut plan)),
            4 => rendezvous.gone(256 + client % (next + 1), "closed"),
            5 => {
                let mut assignments = Vec::new();
                for worker in (0..8).filter(|worker| who >> worker & 1 == 1) {
                    let assignment = RankAssignment {
                        rank: assignments.len() as u32,
                        local_rank: 0,
                        local_size: 1,
                        cross_rank: 0,
                        cross_size: 1,
                        needs_sync: true,
                    };
                    assignments.push((worker, assignment));
                }
                rendezvous.form(&assignments, now)
            }
            6 => rendezvous.announce(who % 4),
            7 => rendezvous.dismiss(worker, "not needed"),
            8 => rendezvous.died(worker, "h", "killed"),
            _ => {
                now += Duration::from_millis(u64::from(*who) * 10);
                rendezvous.timeout(now)
            }
        };
        judge.see(&done);
        assert!(
            rendezvous.deadline().is_none_or(|at| at > now) || what % 10 != 9,
            "a deadline stays"
        );
    }
}

fn fixed(mut plan: &[u8]) {
    let [size, rest @ ..] = plan else { return };
    plan = rest;
    let start = Instant::now();
    let mut fixed = FixedRounds::new(u32::from(size % 8) + 1, String::new());
    let mut now = start;
    let mut next = 0;
    let mut generation = 0;
    let mut invited = BTreeSet::new();
    while let [what, who, rest @ ..] = plan {
        plan = rest;
        let client = u64::from(*who) % (next + 1);
        let todo = match what % 5 {
            0 | 1 => {
                next += 1;
                let decoded = ToServer::decode(message(&mut plan));
                if let Ok(ToServer::Unreached(report)) = decoded {
                    fixed.unreached(client, report.clone(), now);
                    fixed.unreached_by_agent(report, now);
                    continue;
                }
                let (rank, size, report) = match decoded {
                    Ok(ToServer::Hello {
                        rank,
                        size,
                        member,
                        common,
                        ..
                    }) => (rank, size, Registration { member, common }),
                    _ => {
                        let member = MemberEntry {
                            identity: String::new(),
                            hostname: String::new(),
                            pid: 1,
                            shm: false,
                        };
                        let size = u32::from(size % 8) + 1;
                        let common = Common::default();
                        (u32::from(*who), size, Registration { member, common })
                    }
                };
                let answer_by = now + Duration::from_millis(u64::from(*who));
                fixed.hello(next, rank, size, report, answer_by)
            }
            2 => fixed.ready(client, Where::default()),
            3 => fixed.gone(client, "closed"),
            _ => {
                now += Duration::from_millis(u64::from(*who));
                let todo = fixed.timeout(now);
                assert!(
                    fixed.deadline().is_none_or(|at| at > now),
                    "a deadline stays"
                );
                todo
            }
        };
        for item in todo {
            match item {
                Do::Send(client, ToClient::Roster { generation: g, .. }) => {
                    if g > generation {
                        generation = g;
                        invited.clear();
                    }
                    assert!(
                        g == generation && invited.insert(client),
                        "twice in a round"
                    );
                }
                Do::Send(client, ToClient::Table { .. }) => {
                    assert!(generation > 0 && client <= next, "a table without a round");
                }
                Do::Up(g) => assert!(g == generation || g + 1 == generation, "another is up"),
                _ => {}
            }
        }
    }
}

//! The rendezvous server: one thread for any number of ranks.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    os::fd::BorrowedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use horovod_protocol::{Generation, Rank};

use super::{
    config::{ServerConfig, ServerEvent},
    elastic::Rounds,
    messages::{RANKS_MAX, RankAssignment, Registration, TO_SERVER_MAX, ToClient, ToServer},
    round::{ClientId, Do, FixedRounds},
};
use crate::{
    handshake::Purpose,
    platform::{self, fd::Fd, net},
    server::{Admission, Admitted, Connections, RunningServer, ServerState},
    unreached::Unreached,
};

/// Maximum number of events kept for a caller that does not fetch them; the oldest are dropped first. The limit exceeds
/// what all workers of an elastic job can cause at a time. The launcher of such a job needs every event and fetches
/// each at once.
const EVENTS_MAX: usize = 4 * RANKS_MAX;
/// Maximum bytes queued for one client.
const QUEUE_MAX: usize = 128 << 20;
/// Connected clients per rank: its last and its next generation, and some that connect again.
const CLIENTS_PER_RANK: usize = 4;

/// Request of the launcher.
enum Order {
    Died(u32, String, String),
    Ended(u32, String),
    Unreached(Unreached),
    Form(Vec<(u32, RankAssignment)>),
    Announce(u8),
    Dismiss(u32, String),
}

#[derive(Default)]
struct Inbox {
    orders: VecDeque<Order>,
    events: VecDeque<ServerEvent>,
}

/// Rounds of fixed members, or of members that the launcher chooses.
enum Sessions {
    Fixed(FixedRounds),
    Elastic(Rounds),
}

/// A running rendezvous. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    running: RunningServer<Inbox>,
    events_fd: Arc<Fd>,
}

impl Server {
    /// Listens on the configured addresses and starts the thread.
    pub fn start(config: ServerConfig) -> io::Result<Self> {
        let (events_fd, events_notifier) = platform::notifier()?;
        let admission = Admission {
            key: config.key,
            purpose: Purpose::Rendezvous,
            frame_max: TO_SERVER_MAX,
            clients_max: CLIENTS_PER_RANK * config.size as usize + 16,
        };
        let sessions = match config.elastic {
            true => Sessions::Elastic(Rounds::default()),
            false => Sessions::Fixed(FixedRounds::new(config.size, config.check)),
        };
        let running = RunningServer::start(
            "hvd-rendezvous",
            &config.bind,
            config.ports,
            admission,
            Inbox::default(),
            |connections, state| {
                let mut thread = ServerThread {
                    sessions,
                    connections,
                    state,
                    events_notifier,
                };
                move || thread.step()
            },
        )?;
        Ok(Self { running, events_fd })
    }

    /// Returns the addresses at which ranks can reach the server: for each address listened on, or all of this
    /// machine's.
    pub fn addrs(&self) -> &[SocketAddr] {
        self.running.addrs()
    }

    /// Informs all ranks that one of them died. In an elastic job, `rank` is a worker and only the members of its round
    /// are informed.
    pub fn report_death(&self, rank: Rank, host: &str, cause: &str) {
        self.order(Order::Died(rank.0, host.to_owned(), cause.to_owned()));
    }

    /// Fixed members: reports that the process of a rank has exited with code 0. Ranks that wait for it at the
    /// rendezvous receive an error.
    pub fn report_end(&self, rank: Rank, host: &str) {
        self.order(Order::Ended(rank.0, host.to_owned()));
    }

    /// Fixed members: passes on an agent's report that a rank cannot reach the rendezvous. All such reports are
    /// combined into one cause, with which every rank fails ([`ServerEvent::Unreachable`]).
    pub fn report_unreached(&self, report: Unreached) {
        self.order(Order::Unreached(report));
    }

    /// Elastic: forms the next round of these waiting workers with these places, in the order of their ranks. If the
    /// round cannot be set up, the remaining workers join again ([`ServerEvent::Joined`]).
    pub fn form(&self, assignments: Vec<(u32, RankAssignment)>) {
        self.order(Order::Form(assignments));
    }

    /// Elastic: informs every rank of the present round that the members of the job change. The kind is 1 if a member
    /// is removed, 2 if one was added, 3 if both.
    pub fn announce(&self, kind: u8) {
        self.order(Order::Announce(kind));
    }

    /// Elastic: dismisses a waiting worker permanently.
    pub fn dismiss(&self, worker: u32, why: &str) {
        self.order(Order::Dismiss(worker, why.to_owned()));
    }

    fn order(&self, order: Order) {
        self.running.state().lock().orders.push_back(order);
        self.running.state().wake_thread();
    }

    /// Returns the oldest event that was not fetched yet.
    pub fn poll_event(&self) -> Option<ServerEvent> {
        let mut inbox = self.running.state().lock();
        if inbox.events.len() <= 1 {
            platform::silence(&self.events_fd);
        }
        inbox.events.pop_front()
    }

    /// Returns a descriptor that is readable while there are events, or `None` in a forked child.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.events_fd.get().ok()
    }

    /// Waits for an event for at most `timeout` and returns it.
    pub fn wait_event(&self, timeout: Duration) -> Option<ServerEvent> {
        self.running
            .state()
            .wait(timeout, |inbox| inbox.events.pop_front())
    }

    /// Closes all connections and waits for the thread.
    pub fn stop(self) {
        drop(self);
    }
}

/// State of a connection.
#[derive(Default)]
struct Known {
    /// Whether the client has registered. The registration must agree with the rank of the connection's handshake.
    registered: bool,
    /// Whether to close the connection as soon as the queue is empty.
    leaving: bool,
}

struct ServerThread {
    sessions: Sessions,
    connections: Connections<Known>,
    state: Arc<ServerState<Inbox>>,
    /// Wakes the thread that waits for events.
    events_notifier: Arc<Fd>,
}

impl ServerThread {
    fn step(&mut self) {
        let deadline = match &self.sessions {
            Sessions::Fixed(rounds) => rounds.deadline(),
            Sessions::Elastic(rounds) => rounds.deadline(),
        };
        self.connections.wait(deadline);
        let now = Instant::now();
        let orders = std::mem::take(&mut self.state.lock().orders);
        for order in orders {
            self.obey(order, now);
        }
        self.connections.admit(now);
        let ids: Vec<ClientId> = self.connections.clients.keys().copied().collect();
        for id in ids {
            self.serve(id, now);
        }
        let todo = match &mut self.sessions {
            Sessions::Fixed(rounds) => rounds.timeout(now),
            Sessions::Elastic(rounds) => rounds.timeout(now),
        };
        self.carry_out(todo);
        let clients = &mut self.connections.clients;
        clients.retain(|_, c| !c.known.leaving || c.wire.unsent() > 0);
    }

    /// Reads and writes as much as one client's socket allows.
    fn serve(&mut self, id: ClientId, now: Instant) {
        loop {
            let Some(client) = self.connections.clients.get_mut(&id) else {
                return;
            };
            match client.next() {
                Ok(Some(message)) => self.handle(id, message, now),
                Ok(None) => break,
                Err(why) => return self.remove(id, &why),
            }
        }
        let Some(client) = self.connections.clients.get_mut(&id) else {
            return;
        };
        match client.wire.flush() {
            Ok(true) if client.known.leaving => self.remove(id, "dismissed"),
            Ok(_) => {}
            Err(why) => self.remove(id, &why),
        }
    }

    fn handle(&mut self, id: ClientId, message: ToServer, now: Instant) {
        let Some(client) = self.connections.clients.get_mut(&id) else {
            return;
        };
        if client.known.leaving {
            return;
        }
        if let ToServer::Hello { common, .. } | ToServer::Join { common, .. } = &message {
            client.keep(common.heartbeat);
        }
        let todo = match (message, &mut self.sessions) {
            (
                ToServer::Hello {
                    rank,
                    size,
                    wait_timeout_ms,
                    member,
                    common,
                },
                Sessions::Fixed(rounds),
            ) => {
                if client.known.registered || client.rank != rank {
                    return self.remove(id, "it registered twice or for another rank");
                }
                client.known.registered = true;
                let (hostname, pid) = (member.hostname.clone(), member.pid);
                let wait_timeout = Duration::from_millis(wait_timeout_ms.min(1 << 40));
                let todo = rounds.hello(
                    id,
                    rank,
                    size,
                    Registration { member, common },
                    now + wait_timeout,
                );
                if !matches!(todo.first(), Some(Do::Dismiss(..))) {
                    self.event(ServerEvent::Registered {
                        rank: Rank(rank),
                        hostname,
                        pid,
                    });
                }
                todo
            }
            (message, Sessions::Elastic(rounds)) => {
                match rounds.handle(id, client.rank, &mut client.known.registered, message) {
                    Ok(todo) => todo,
                    Err(why) => return self.remove(id, why),
                }
            }
            (ToServer::Silent { rank: who }, Sessions::Fixed(_)) => {
                let by = client.rank;
                let known = client.known.registered;
                let silent = known.then_some(Do::Report(ServerEvent::Silent { who, by }));
                silent.into_iter().collect()
            }
            (ToServer::Ready(place), Sessions::Fixed(rounds)) => rounds.ready(id, place),
            (ToServer::Failed { text }, Sessions::Fixed(rounds)) => rounds.gone(id, &text),
            (ToServer::Unreached(report), Sessions::Fixed(rounds)) => {
                // A rank may report only for itself.
                if client.known.registered && client.rank == report.rank() {
                    rounds.unreached(id, report, now);
                }
                Vec::new()
            }
            (ToServer::Join { .. } | ToServer::StateChanged { .. }, Sessions::Fixed(_)) => {
                let text = "HOROVOD_ELASTIC is set in this process, but its job is not elastic";
                let text = text.to_owned();
                vec![Do::Dismiss(id, ToClient::Refused { text })]
            }
        };
        self.carry_out(todo);
    }

    fn gone(&mut self, id: ClientId, why: &str) -> Vec<Do> {
        match &mut self.sessions {
            Sessions::Fixed(rounds) => rounds.gone(id, why),
            Sessions::Elastic(rounds) => rounds.gone(id, why),
        }
    }

    fn remove(&mut self, id: ClientId, why: &str) {
        let Some(client) = self.connections.clients.remove(&id) else {
            return;
        };
        if client.known.registered
            && !client.known.leaving
            && matches!(self.sessions, Sessions::Fixed(_))
        {
            self.event(ServerEvent::Left(Rank(client.rank)));
        }
        let todo = self.gone(id, why);
        self.carry_out(todo);
    }

    fn carry_out(&mut self, todo: Vec<Do>) {
        for item in todo {
            match item {
                Do::Send(id, message) => self.send(id, &message, false),
                Do::Dismiss(id, message) => self.send(id, &message, true),
                Do::Up(generation) => self.event(ServerEvent::Up(Generation(generation))),
                Do::Failed(text) => self.event(ServerEvent::Failed(text)),
                Do::Report(event) => self.event(event),
            }
        }
    }

    /// Queues a message and sends as much as the socket accepts. The next round of serving sends the rest and handles
    /// errors.
    fn send(&mut self, id: ClientId, message: &ToClient, last: bool) {
        let Some(client) = self.connections.clients.get_mut(&id) else {
            return;
        };
        let bytes = message.encode();
        if client.wire.unsent() + bytes.len() > QUEUE_MAX {
            return self.remove(id, "it does not read");
        }
        client.wire.push(&bytes);
        client.known.leaving |= last;
        // The error appears again when the client is served.
        let _ = client.wire.flush();
    }

    fn obey(&mut self, order: Order, now: Instant) {
        let todo = match (order, &mut self.sessions) {
            (Order::Died(worker, host, cause), Sessions::Elastic(rounds)) => {
                rounds.died(worker, &host, &cause)
            }
            (Order::Died(rank, host, cause), Sessions::Fixed(_)) => {
                return self.send_death(Rank(rank), &host, &cause);
            }
            (Order::Ended(rank, host), Sessions::Fixed(rounds)) => rounds.ended(rank, host),
            (Order::Unreached(report), Sessions::Fixed(rounds)) => {
                rounds.unreached_by_agent(report, now)
            }
            (Order::Ended(..) | Order::Unreached(_), Sessions::Elastic(_)) => return,
            (Order::Form(assignments), Sessions::Elastic(rounds)) => rounds.form(&assignments, now),
            (Order::Announce(kind), Sessions::Elastic(rounds)) => rounds.announce(kind),
            (Order::Dismiss(worker, why), Sessions::Elastic(rounds)) => {
                rounds.dismiss(worker, &why)
            }
            (_, Sessions::Fixed(_)) => return,
        };
        self.carry_out(todo);
    }

    fn send_death(&mut self, rank: Rank, host: &str, cause: &str) {
        let Sessions::Fixed(rounds) = &mut self.sessions else {
            return;
        };
        let todo = rounds.died(&format!("{rank} on {host}: {cause}"));
        self.carry_out(todo);
        let message = ToClient::PeerDied {
            rank: rank.0,
            host: host.to_owned(),
            cause: cause.to_owned(),
        };
        let ids: Vec<ClientId> = self.connections.clients.keys().copied().collect();
        for id in ids {
            self.send(id, &message, false);
        }
    }

    fn event(&self, event: ServerEvent) {
        let mut inbox = self.state.lock();
        if inbox.events.len() == EVENTS_MAX {
            inbox.events.pop_front();
        }
        inbox.events.push_back(event);
        platform::notify(&self.events_notifier);
        self.state.wake_owner();
    }
}

impl Admitted<Known> {
    /// Limits how long the connection may stall, to the silence that the rank allows its peers.
    fn keep(&self, silence_max: Option<Duration>) {
        let _ = net::set_silence_max(self.wire.fd(), silence_max);
    }

    fn next(&mut self) -> Result<Option<ToServer>, String> {
        let Some(frame) = self.wire.next()? else {
            return Ok(None);
        };
        ToServer::decode(&frame)
            .map(Some)
            .map_err(|e| e.to_string())
    }
}

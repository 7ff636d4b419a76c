//! The rendezvous server: one thread for any number of ranks.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    iter::once,
    net::SocketAddr,
    os::fd::BorrowedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use horovod_protocol::{Generation, Rank};

use super::{
    config::{ServerConfig, ServerEvent},
    elastic::Rounds,
    messages::{RANKS_MAX, Registration, Seat, TO_SERVER_MAX, ToClient, ToServer},
    round::{ClientId, Do, Meeting},
};
use crate::{
    frame_stream::FrameStream,
    handshake::{Binding, Purpose, SERVER},
    platform::{self, fd::Fd, net},
    tcp::{
        listener::{Gate, listen_all, reachable},
        stream::Stream,
    },
    wait::wait_for_any,
};

/// Events kept for a caller that does not ask; the oldest go first. More than all workers of an elastic job, whose
/// launcher needs every one and asks as soon as there is one, can cause at a time.
const EVENTS_MAX: usize = 4 * RANKS_MAX;
/// Most bytes that wait for one client.
const QUEUE_MAX: usize = 128 << 20;
/// Connected clients: each rank's last and next generation, and some that come again.
const CLIENTS_PER_RANK: usize = 4;

/// What the launcher wants done.
enum Order {
    Died(u32, String, String),
    Form(Vec<(u32, Seat)>),
    Announce(u8),
    Dismiss(u32, String),
}

#[derive(Default)]
struct Inbox {
    orders: VecDeque<Order>,
    events: VecDeque<ServerEvent>,
}

/// Fixed members, or those that the launcher names.
enum Room {
    Fixed(Meeting),
    Elastic(Rounds),
}

struct Shared {
    inbox: Mutex<Inbox>,
    news: Condvar,
    stop: AtomicBool,
    /// Wakes the server.
    bell: Arc<Fd>,
    /// Wakes who waits for events.
    events_bell: Arc<Fd>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running rendezvous. Dropping it stops it.
pub struct Server {
    addresses: Vec<SocketAddr>,
    shared: Arc<Shared>,
    hears_events: Arc<Fd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens and starts the thread.
    pub fn start(config: ServerConfig) -> io::Result<Self> {
        let bound = listen_all(&config.bind, config.port)?;
        let addresses = reachable(&bound, true)?;
        let mut gate = Gate::default();
        for (fd, _) in bound {
            gate.add(fd);
        }
        let (hears, bell) = platform::bell()?;
        let (hears_events, events_bell) = platform::bell()?;
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            news: Condvar::new(),
            stop: AtomicBool::new(false),
            bell,
            events_bell,
        });
        let worker = Worker {
            room: match config.elastic {
                true => Room::Elastic(Rounds::default()),
                false => Room::Fixed(Meeting::new(config.size)),
            },
            config,
            gate,
            hears,
            shared: shared.clone(),
            clients: BTreeMap::new(),
            next_client: 0,
        };
        let thread = std::thread::Builder::new()
            .name("hvd-rendezvous".into())
            .spawn(move || worker.run())?;
        Ok(Self {
            addresses,
            shared,
            hears_events,
            thread: Some(thread),
        })
    }

    /// Where ranks can reach it: for each address listened on, or for all of this machine's.
    pub fn addrs(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Tells all ranks that one of them died; in an elastic job, all of its round that this worker died.
    pub fn report_death(&self, rank: Rank, host: &str, cause: &str) {
        self.order(Order::Died(rank.0, host.to_owned(), cause.to_owned()));
    }

    /// Elastic: these workers, which wait, form the next round with these places, in the order of their ranks.
    /// If it does not come to be, all of them that are left come again ([`ServerEvent::Joined`]).
    pub fn form(&self, seats: Vec<(u32, Seat)>) {
        self.order(Order::Form(seats));
    }

    /// Elastic: tells every rank of the present round that the members of the job change: kind 1 if somebody
    /// is removed, 2 if somebody was added, 3 if both.
    pub fn announce(&self, kind: u8) {
        self.order(Order::Announce(kind));
    }

    /// Elastic: sends a worker that waits away for good.
    pub fn dismiss(&self, worker: u32, why: &str) {
        self.order(Order::Dismiss(worker, why.to_owned()));
    }

    fn order(&self, order: Order) {
        self.shared.lock().orders.push_back(order);
        platform::ring(&self.shared.bell);
    }

    /// The oldest event not taken yet.
    pub fn poll_event(&self) -> Option<ServerEvent> {
        let mut inbox = self.shared.lock();
        if inbox.events.len() <= 1 {
            platform::silence(&self.hears_events);
        }
        inbox.events.pop_front()
    }

    /// Readable while there are events. `None` in a forked child.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.hears_events.get().ok()
    }

    /// Waits for an event, at most `timeout`.
    pub fn wait_event(&self, timeout: Duration) -> Option<ServerEvent> {
        let empty = |inbox: &mut Inbox| inbox.events.is_empty();
        let waited = self
            .shared
            .news
            .wait_timeout_while(self.shared.lock(), timeout, empty);
        let (mut inbox, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inbox.events.pop_front()
    }

    /// Closes everything and waits for the thread.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        platform::ring(&self.shared.bell);
        if let Some(thread) = self.thread.take() {
            // It only ends early by a panic, which has been reported.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

struct Client {
    wire: FrameStream,
    /// From the handshake; what it registers must agree.
    rank: u32,
    registered: bool,
    /// Close as soon as the queue is empty.
    leaving: bool,
}

struct Worker {
    config: ServerConfig,
    room: Room,
    gate: Gate,
    hears: Arc<Fd>,
    shared: Arc<Shared>,
    clients: BTreeMap<ClientId, Client>,
    next_client: ClientId,
}

fn expected(binding: &Binding) -> bool {
    binding.purpose == Purpose::Rendezvous
        && binding.to == SERVER
        && binding.generation == 0
        && binding.sealed
}

impl Worker {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            self.wait();
            let now = Instant::now();
            let orders = std::mem::take(&mut self.shared.lock().orders);
            for order in orders {
                self.obey(order, now);
            }
            for (binding, stream) in self.gate.step(now, &self.config.key, &expected) {
                self.admit(binding.from, stream);
            }
            let ids: Vec<ClientId> = self.clients.keys().copied().collect();
            for id in ids {
                self.serve(id, now);
            }
            let todo = match &mut self.room {
                Room::Fixed(meeting) => meeting.timeout(now),
                Room::Elastic(rounds) => rounds.timeout(now),
            };
            self.carry_out(todo);
            self.clients
                .retain(|_, c| !c.leaving || c.wire.unsent() > 0);
        }
    }

    fn wait(&self) {
        let clients = self.clients.values().map(|c| c.wire.wait());
        let sockets = once((&*self.hears, false)).chain(self.gate.waits());
        let room = match &self.room {
            Room::Fixed(meeting) => meeting.deadline(),
            Room::Elastic(rounds) => rounds.deadline(),
        };
        let deadline = [self.gate.deadline(), room].into_iter().flatten().min();
        wait_for_any(sockets.chain(clients), deadline);
        platform::silence(&self.hears);
    }

    fn admit(&mut self, rank: u32, stream: Stream) {
        if self.clients.len() >= CLIENTS_PER_RANK * self.config.size as usize + 16 {
            tracing::warn!(rank, "too many connections of ranks; closed one");
            return;
        }
        let id = self.next_client;
        self.next_client += 1;
        let client = Client {
            wire: FrameStream::new(stream, TO_SERVER_MAX),
            rank,
            registered: false,
            leaving: false,
        };
        self.clients.insert(id, client);
    }

    /// Reads and writes what one client's socket allows.
    fn serve(&mut self, id: ClientId, now: Instant) {
        loop {
            let Some(client) = self.clients.get_mut(&id) else {
                return;
            };
            match client.next() {
                Ok(Some(message)) => self.handle(id, message, now),
                Ok(None) => break,
                Err(why) => return self.remove(id, &why),
            }
        }
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        match client.wire.flush() {
            Ok(true) if client.leaving => self.remove(id, "dismissed"),
            Ok(_) => {}
            Err(why) => self.remove(id, &why),
        }
    }

    fn handle(&mut self, id: ClientId, message: ToServer, now: Instant) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if client.leaving {
            return;
        }
        if let ToServer::Hello { common, .. } | ToServer::Join { common, .. } = &message {
            client.keep(common.heartbeat);
        }
        let todo = match (message, &mut self.room) {
            (
                ToServer::Hello {
                    rank,
                    size,
                    patience_ms,
                    member,
                    common,
                },
                Room::Fixed(meeting),
            ) => {
                if client.registered || client.rank != rank {
                    return self.remove(id, "it registered twice or for another rank");
                }
                client.registered = true;
                let (hostname, pid) = (member.hostname.clone(), member.pid);
                let patience = Duration::from_millis(patience_ms.min(1 << 40));
                let todo = meeting.hello(
                    id,
                    rank,
                    size,
                    Registration { member, common },
                    now + patience,
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
            (message, Room::Elastic(rounds)) => {
                match rounds.hear(id, client.rank, &mut client.registered, message) {
                    Ok(todo) => todo,
                    Err(why) => return self.remove(id, why),
                }
            }
            (ToServer::Silent { rank: who }, Room::Fixed(_)) => {
                let by = client.rank;
                let known = client.registered;
                let silent = known.then_some(Do::Report(ServerEvent::Silent { who, by }));
                silent.into_iter().collect()
            }
            (ToServer::Ready(place), Room::Fixed(meeting)) => meeting.ready(id, place),
            (ToServer::Failed { text }, Room::Fixed(meeting)) => meeting.gone(id, &text),
            (ToServer::Join { .. } | ToServer::Holds { .. }, Room::Fixed(_)) => {
                let text = "HOROVOD_ELASTIC is set in this process, but its job is not elastic";
                let text = text.to_owned();
                vec![Do::Dismiss(id, ToClient::Refused { text })]
            }
        };
        self.carry_out(todo);
    }

    fn gone(&mut self, id: ClientId, why: &str) -> Vec<Do> {
        match &mut self.room {
            Room::Fixed(meeting) => meeting.gone(id, why),
            Room::Elastic(rounds) => rounds.gone(id, why),
        }
    }

    fn remove(&mut self, id: ClientId, why: &str) {
        let Some(client) = self.clients.remove(&id) else {
            return;
        };
        if client.registered && !client.leaving && matches!(self.room, Room::Fixed(_)) {
            self.event(ServerEvent::Left(Rank(client.rank)));
        }
        let todo = self.gone(id, why);
        self.carry_out(todo);
    }

    fn carry_out(&mut self, todo: Vec<Do>) {
        for item in todo {
            match item {
                Do::Tell(id, message) => self.tell(id, &message, false),
                Do::Dismiss(id, message) => self.tell(id, &message, true),
                Do::Up(generation) => self.event(ServerEvent::Up(Generation(generation))),
                Do::Failed(text) => self.event(ServerEvent::Failed(text)),
                Do::Report(event) => self.event(event),
            }
        }
    }

    /// Queues a message; the next round of serving sends it and notices if it cannot be sent.
    fn tell(&mut self, id: ClientId, message: &ToClient, last: bool) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let bytes = message.encode();
        if client.wire.unsent() + bytes.len() > QUEUE_MAX {
            return self.remove(id, "it does not read");
        }
        client.wire.push(&bytes);
        client.leaving |= last;
        // An error shows again when it is served.
        let _ = client.wire.flush();
    }

    fn obey(&mut self, order: Order, now: Instant) {
        let todo = match (order, &mut self.room) {
            (Order::Died(worker, host, cause), Room::Elastic(rounds)) => {
                rounds.died(worker, &host, &cause)
            }
            (Order::Died(rank, host, cause), Room::Fixed(_)) => {
                return self.tell_death(Rank(rank), &host, &cause);
            }
            (Order::Form(seats), Room::Elastic(rounds)) => rounds.form(&seats, now),
            (Order::Announce(kind), Room::Elastic(rounds)) => rounds.announce(kind),
            (Order::Dismiss(worker, why), Room::Elastic(rounds)) => rounds.dismiss(worker, &why),
            (_, Room::Fixed(_)) => return,
        };
        self.carry_out(todo);
    }

    fn tell_death(&mut self, rank: Rank, host: &str, cause: &str) {
        let Room::Fixed(meeting) = &mut self.room else {
            return;
        };
        let todo = meeting.died(&format!("{rank} on {host}: {cause}"));
        self.carry_out(todo);
        let message = ToClient::PeerDied {
            rank: rank.0,
            host: host.to_owned(),
            cause: cause.to_owned(),
        };
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for id in ids {
            self.tell(id, &message, false);
        }
    }

    fn event(&self, event: ServerEvent) {
        let mut inbox = self.shared.lock();
        if inbox.events.len() == EVENTS_MAX {
            inbox.events.pop_front();
        }
        inbox.events.push_back(event);
        platform::ring(&self.shared.events_bell);
        self.shared.news.notify_all();
    }
}

impl Client {
    /// How long its connection may stand still, as the rank has it for its others.
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

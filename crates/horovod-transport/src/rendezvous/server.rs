//! The rendezvous server: one thread for any number of ranks.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use horovod_protocol::{Generation, Rank};
use rustix::event::{PollFd, PollFlags};

use super::{
    messages::{TO_SERVER_MAX, ToClient, ToServer},
    round::{ClientId, Do, Meeting},
};
use crate::{
    JobKey,
    framing::{FrameQueue, FrameReader, Incoming},
    handshake::{Binding, Purpose, SERVER},
    platform::{self, fd::Fd},
    tcp::{
        listener::{Gate, listen_all, reachable},
        stream::{Got, Stream},
    },
    wait::poll_until,
};

/// Events kept for a caller that does not ask; the oldest go first.
const EVENTS_MAX: usize = 4096;
/// Most bytes that wait for one client.
const QUEUE_MAX: usize = 128 << 20;
/// Connected clients: each rank's last and next generation, and some that come again.
const CLIENTS_PER_RANK: usize = 4;

/// What a server needs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Addresses to listen on. `0.0.0.0` and `::` mean all; a job on one host needs only loopback.
    pub bind: Vec<IpAddr>,
    /// The port on all of them; 0 lets the system choose (per address).
    pub port: u16,
    /// The job's key.
    pub key: JobKey,
    /// The number of ranks.
    pub size: u32,
}

impl ServerConfig {
    /// A server for `size` ranks on these addresses, on a port of the system's choice.
    pub fn new(bind: Vec<IpAddr>, key: JobKey, size: u32) -> Self {
        Self {
            bind,
            port: 0,
            key,
            size,
        }
    }
}

/// What happened at the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerEvent {
    /// A rank registered.
    Registered {
        /// The rank.
        rank: Rank,
        /// Its host.
        hostname: String,
        /// Its process.
        pid: u32,
    },
    /// All ranks have met.
    Up(Generation),
    /// A meeting failed; the ranks know.
    Failed(String),
    /// A registered rank closed its connection.
    Left(Rank),
}

#[derive(Default)]
struct Inbox {
    deaths: Vec<(Rank, String, String)>,
    events: VecDeque<ServerEvent>,
}

struct Shared {
    inbox: Mutex<Inbox>,
    news: Condvar,
    stop: AtomicBool,
    bell: Arc<Fd>,
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
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            news: Condvar::new(),
            stop: AtomicBool::new(false),
            bell,
        });
        let worker = Worker {
            meeting: Meeting::new(config.size),
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
            thread: Some(thread),
        })
    }

    /// Where ranks can reach it: for each address listened on, or for all of this machine's.
    pub fn addrs(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Tells all ranks that one of them died.
    pub fn report_death(&self, rank: Rank, host: &str, cause: &str) {
        self.shared
            .lock()
            .deaths
            .push((rank, host.to_owned(), cause.to_owned()));
        platform::ring(&self.shared.bell);
    }

    /// The oldest event not taken yet.
    pub fn poll_event(&self) -> Option<ServerEvent> {
        self.shared.lock().events.pop_front()
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
    stream: Stream,
    reader: FrameReader,
    queue: FrameQueue,
    /// From the handshake; what it registers must agree.
    rank: u32,
    registered: bool,
    /// Close as soon as the queue is empty.
    leaving: bool,
}

struct Worker {
    config: ServerConfig,
    meeting: Meeting,
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
            let deaths = std::mem::take(&mut self.shared.lock().deaths);
            for (rank, host, cause) in deaths {
                self.tell_death(rank, &host, &cause);
            }
            for (binding, stream) in self.gate.step(now, &self.config.key, &expected) {
                self.admit(binding.from, stream);
            }
            let ids: Vec<ClientId> = self.clients.keys().copied().collect();
            for id in ids {
                self.serve(id, now);
            }
            let todo = self.meeting.timeout(now);
            self.carry_out(todo);
            self.clients
                .retain(|_, c| !c.leaving || !c.queue.is_empty());
        }
    }

    fn wait(&self) {
        let mut fds = Vec::new();
        let mut add = |fd, flags| fds.push(PollFd::from_borrowed_fd(fd, flags));
        if let Ok(fd) = self.hears.get() {
            add(fd, PollFlags::IN);
        }
        let clients = self
            .clients
            .values()
            .map(|c| (&**c.stream.fd(), !c.queue.is_empty()));
        for (fd, write) in self.gate.waits().chain(clients) {
            if let Ok(fd) = fd.get() {
                add(
                    fd,
                    if write {
                        PollFlags::IN | PollFlags::OUT
                    } else {
                        PollFlags::IN
                    },
                );
            }
        }
        let deadline = [self.gate.deadline(), self.meeting.deadline()]
            .into_iter()
            .flatten()
            .min();
        poll_until(&mut fds, deadline);
        platform::silence(&self.hears);
    }

    fn admit(&mut self, rank: u32, stream: Stream) {
        if self.clients.len() >= CLIENTS_PER_RANK * self.config.size as usize + 16 {
            tracing::warn!(rank, "too many connections of ranks; closed one");
            return;
        }
        let id = self.next_client;
        self.next_client += 1;
        let (reader, queue) = (FrameReader::new(TO_SERVER_MAX), FrameQueue::default());
        let client = Client {
            stream,
            reader,
            queue,
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
        match client.flush() {
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
        let todo = match message {
            ToServer::Hello {
                rank,
                size,
                patience_ms,
                member,
                common,
            } => {
                if client.registered || client.rank != rank {
                    return self.remove(id, "it registered twice or for another rank");
                }
                client.registered = true;
                let (hostname, pid) = (member.hostname.clone(), member.pid);
                let patience = Duration::from_millis(patience_ms.min(1 << 40));
                let todo = self
                    .meeting
                    .hello(id, (rank, size), (member, common), now + patience);
                if !matches!(todo.first(), Some(Do::Dismiss(..))) {
                    self.event(ServerEvent::Registered {
                        rank: Rank(rank),
                        hostname,
                        pid,
                    });
                }
                todo
            }
            ToServer::Ready(place) => self.meeting.ready(id, place),
            ToServer::Failed { text } => self.meeting.gone(id, &text),
        };
        self.carry_out(todo);
    }

    fn remove(&mut self, id: ClientId, why: &str) {
        let Some(client) = self.clients.remove(&id) else {
            return;
        };
        if client.registered && !client.leaving {
            self.event(ServerEvent::Left(Rank(client.rank)));
        }
        let todo = self.meeting.gone(id, why);
        self.carry_out(todo);
    }

    fn carry_out(&mut self, todo: Vec<Do>) {
        for item in todo {
            match item {
                Do::Tell(id, message) => self.tell(id, &message, false),
                Do::Dismiss(id, message) => self.tell(id, &message, true),
                Do::Up(generation) => self.event(ServerEvent::Up(Generation(generation))),
                Do::Failed(text) => self.event(ServerEvent::Failed(text)),
            }
        }
    }

    /// Queues a message; the next round of serving sends it and notices if it cannot be sent.
    fn tell(&mut self, id: ClientId, message: &ToClient, last: bool) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let bytes = message.encode();
        if client.queue.len() + bytes.len() > QUEUE_MAX {
            return self.remove(id, "it does not read");
        }
        client.queue.push(&bytes);
        client.leaving |= last;
        // An error shows again when it is served.
        let _ = client.flush();
    }

    fn tell_death(&mut self, rank: Rank, host: &str, cause: &str) {
        let todo = self.meeting.died(&format!("{rank} on {host}: {cause}"));
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
        self.shared.news.notify_all();
    }
}

impl Client {
    fn next(&mut self) -> Result<Option<ToServer>, String> {
        loop {
            match self
                .reader
                .pop()
                .map_err(|e| format!("a message of {} bytes", e.0))?
            {
                Some(Incoming::Frame(bytes)) => {
                    return ToServer::decode(&bytes)
                        .map(Some)
                        .map_err(|e| e.to_string());
                }
                Some(Incoming::Aside(_)) => return Err("a message of an unknown kind".into()),
                Some(Incoming::Goodbye) => return Err("it said goodbye".into()),
                None => {}
            }
            match self
                .stream
                .try_recv(self.reader.space())
                .map_err(|e| e.to_string())?
            {
                Got::Bytes(n) => self.reader.filled(n),
                Got::Nothing => return Ok(None),
                Got::End => return Err("it closed the connection".into()),
            }
        }
    }

    fn flush(&mut self) -> Result<bool, String> {
        let stream = &mut self.stream;
        self.queue
            .flush(|b| stream.try_send(b))
            .map_err(|e| e.to_string())
    }
}

//! A server in one thread. It listens, admits clients that hold the job's key, and serves each as far as its socket
//! allows, until its owner drops it. Messages between the server and its owner lie in an inbox.

use std::{
    collections::BTreeMap,
    io,
    iter::once,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{
    JobKey,
    frame_stream::FrameStream,
    handshake::{Binding, Purpose, SERVER},
    platform::{self, fd::Fd},
    ports::Ports,
    tcp::listener::{Gate, listen_all, reachable},
    wait::wait_for_any,
};

/// State common to a server's owner and the server's thread.
pub(crate) struct ServerState<I> {
    inbox: Mutex<I>,
    news: Condvar,
    stop: AtomicBool,
    /// Wakes the thread.
    notifier: Arc<Fd>,
}

impl<I> ServerState<I> {
    pub(crate) fn new(inbox: I, notifier: Arc<Fd>) -> Self {
        Self {
            inbox: Mutex::new(inbox),
            news: Condvar::new(),
            stop: AtomicBool::new(false),
            notifier,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, I> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look into the inbox.
    pub(crate) fn wake_thread(&self) {
        platform::notify(&self.notifier);
    }

    /// Has the owner look into the inbox, if it waits.
    pub(crate) fn wake_owner(&self) {
        self.news.notify_all();
    }

    /// Returns the result of `take` on the inbox, or `None` after `timeout`.
    pub(crate) fn wait<T>(
        &self,
        timeout: Duration,
        mut take: impl FnMut(&mut I) -> Option<T>,
    ) -> Option<T> {
        let mut found = None;
        let nothing = |inbox: &mut I| {
            found = take(inbox);
            found.is_none()
        };
        drop(self.news.wait_timeout_while(self.lock(), timeout, nothing));
        found
    }
}

/// Whom a server admits: ranks that hold the key and come for this purpose, over sealed connections.
pub(crate) struct Admission {
    pub(crate) key: JobKey,
    pub(crate) purpose: Purpose,
    /// Longest frame that one of them may send.
    pub(crate) frame_max: usize,
    /// Connections at the same time.
    pub(crate) clients_max: usize,
}

/// One that was admitted, and what the server knows of it.
pub(crate) struct Admitted<C> {
    pub(crate) wire: FrameStream,
    /// From the handshake.
    pub(crate) rank: u32,
    pub(crate) known: C,
}

/// The connections of a server, by number.
pub(crate) struct Connections<C> {
    pub(crate) clients: BTreeMap<u64, Admitted<C>>,
    next_client: u64,
    admission: Admission,
    gate: Gate,
    notified_fd: Arc<Fd>,
}

impl<C: Default> Connections<C> {
    /// Waits until something can go on, or until `deadline`.
    pub(crate) fn wait(&self, deadline: Option<Instant>) {
        let clients = self.clients.values().map(|c| c.wire.wait());
        let sockets = once((&*self.notified_fd, false)).chain(self.gate.waits());
        let deadline = self.gate.deadline().into_iter().chain(deadline).min();
        wait_for_any(sockets.chain(clients), deadline);
        platform::silence(&self.notified_fd);
    }

    /// Takes in who has proven by now that it may come.
    pub(crate) fn admit(&mut self, now: Instant) {
        let Admission {
            key,
            purpose,
            frame_max,
            clients_max,
        } = &self.admission;
        let expected = |binding: &Binding| {
            binding.purpose == *purpose
                && binding.to == SERVER
                && binding.generation == 0
                && binding.sealed
        };
        for (binding, stream) in self.gate.step(now, key, &expected) {
            if self.clients.len() >= *clients_max {
                tracing::warn!(
                    rank = binding.from,
                    "too many connections of ranks; closed one"
                );
                continue;
            }
            let client = Admitted {
                wire: FrameStream::new(stream, *frame_max),
                rank: binding.from,
                known: C::default(),
            };
            self.clients.insert(self.next_client, client);
            self.next_client += 1;
        }
    }
}

/// A server as its owner has it. Dropping it stops the thread and closes everything.
pub(crate) struct RunningServer<I> {
    addresses: Vec<SocketAddr>,
    state: Arc<ServerState<I>>,
    thread: Option<JoinHandle<()>>,
}

impl<I: Send + 'static> RunningServer<I> {
    /// Listens on these addresses (`0.0.0.0` and `::` mean all) and starts the thread, which does what `make` returns
    /// again and again: one [`Connections::wait`] and what follows from it.
    pub(crate) fn start<C, F: FnMut() + Send + 'static>(
        name: &str,
        bind: &[IpAddr],
        ports: Ports,
        admission: Admission,
        inbox: I,
        make: impl FnOnce(Connections<C>, Arc<ServerState<I>>) -> F,
    ) -> io::Result<Self> {
        let bound = listen_all(bind, ports)?;
        let addresses = reachable(&bound, true)?;
        let mut gate = Gate::default();
        for (fd, _) in bound {
            gate.add(fd);
        }
        let (notified_fd, notifier) = platform::notifier()?;
        let state = Arc::new(ServerState::new(inbox, notifier));
        let connections = Connections {
            clients: BTreeMap::new(),
            next_client: 0,
            admission,
            gate,
            notified_fd,
        };
        let mut step = make(connections, state.clone());
        let shared = state.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                while !shared.stop.load(Ordering::Acquire) {
                    step();
                }
            })?;
        Ok(Self {
            addresses,
            state,
            thread: Some(thread),
        })
    }
}

impl<I> RunningServer<I> {
    /// Where ranks can reach it: for each address listened on, or for all of this machine's.
    pub(crate) fn addrs(&self) -> &[SocketAddr] {
        &self.addresses
    }

    pub(crate) fn state(&self) -> &ServerState<I> {
        &self.state
    }
}

impl<I> Drop for RunningServer<I> {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Release);
        self.state.wake_thread();
        if let Some(thread) = self.thread.take() {
            // It only ends early by a panic, which has been reported.
            let _ = thread.join();
        }
    }
}

impl<I> std::fmt::Debug for RunningServer<I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningServer")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

//! Byte streams of host agents that dial their launcher, instead of being reached by fork or ssh.
//!
//! Each is authenticated and encrypted like any other connection of a job. Both ends get one half of a local socket
//! pair; a thread carries bytes between it and the network.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io::{self, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};

use crate::{
    JobKey,
    frame_stream::FrameStream,
    handshake::{Binding, Purpose, SERVER},
    mesh::dial::{Dial, Target},
    platform::net,
    ports::Ports,
    server::{Admission, Connections, RunningServer},
    wait::{poll_until, wait_for_any},
};

/// Bytes of the stream in one frame.
const PIECE: usize = 64 << 10;
/// No more is read from one side while so much waits for the other.
const AHEAD: usize = 1 << 20;
/// Agents that may be connected at the same time.
const AGENTS_MAX: usize = 1 << 14;
/// Stack of a thread that carries bytes.
const STACK: usize = 256 << 10;

/// An agent that has proved that it holds the key.
#[derive(Debug)]
pub struct Arrival {
    /// The number that it has given itself.
    pub index: u32,
    /// Its stream.
    pub stream: UnixStream,
}

/// Where agents dial. Dropping it ends the listening; streams go on.
#[derive(Debug)]
pub struct Server {
    running: RunningServer<VecDeque<Arrival>>,
    notifier: UnixStream,
}

impl Server {
    /// Listens on these addresses (`0.0.0.0` and `::` mean all). A connection is given up when its machine has not
    /// answered for `silence_max`.
    pub fn start(
        bind: &[IpAddr],
        ports: Ports,
        key: JobKey,
        silence_max: Option<Duration>,
    ) -> io::Result<Self> {
        let admission = Admission {
            key,
            purpose: Purpose::Agent,
            frame_max: PIECE,
            clients_max: AGENTS_MAX,
        };
        let (notifier, theirs) = UnixStream::pair()?;
        notifier.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        let running = RunningServer::start(
            "hvd-agents",
            bind,
            ports,
            admission,
            VecDeque::new(),
            |mut connections: Connections<()>, state| {
                move || {
                    connections.wait(None);
                    connections.admit(Instant::now());
                    while let Some((_, client)) = connections.clients.pop_first() {
                        let index = client.rank;
                        let stream = net::set_silence_max(client.wire.fd(), silence_max)
                            .and_then(|()| carry(client.wire));
                        match stream {
                            Ok((stream, _)) => state.lock().push_back(Arrival { index, stream }),
                            Err(why) => tracing::warn!(index, %why, "an agent was turned away"),
                        }
                        // A full socket has enough wake-ups in it.
                        let _ = (&theirs).write(&[1]);
                    }
                }
            },
        )?;
        Ok(Self { running, notifier })
    }

    /// Where agents can reach it.
    pub fn addrs(&self) -> &[SocketAddr] {
        self.running.addrs()
    }

    /// Readable when somebody has come.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }

    /// The agents that have connected since the last call.
    pub fn take(&self) -> Vec<Arrival> {
        while matches!((&self.notifier).read(&mut [0; 64]), Ok(count) if count > 0) {}
        self.running.state().lock().drain(..).collect()
    }
}

/// An agent's connection to its launcher.
#[derive(Debug)]
pub struct Connection {
    /// Its stream.
    pub stream: UnixStream,
    /// Ends with the thread that carries bytes.
    carrier: Receiver<Infallible>,
}

impl Connection {
    /// Returns when the launcher has all that was written and has hung up too, or the time is over. A process that ends
    /// without it may take its last words with it.
    pub fn close(self, within: Duration) {
        let _ = self.stream.shutdown(Shutdown::Both);
        let _ = self.carrier.recv_timeout(within);
    }
}

/// How long an agent tries to reach its launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tries {
    /// At most the time that it has, and not if trying on is in vain: others wait for it.
    WhileItMayHelp,
    /// All of its time: the others of an elastic job go on without it meanwhile.
    WholeTime,
}

/// In the agent: its connection to the launcher, which listens at one of these addresses. The error names what happened
/// at each.
pub fn dial(
    addresses: &[SocketAddr],
    key: &JobKey,
    index: u32,
    timeout: Duration,
    tries: Tries,
) -> Result<Connection, String> {
    let binding = Binding {
        purpose: Purpose::Agent,
        lane: 0,
        sealed: true,
        generation: 0,
        from: index,
        to: SERVER,
    };
    let deadline = Instant::now() + timeout;
    let one = |at: &SocketAddr| Dial::new(binding, vec![Target::Tcp(*at)], Instant::now());
    let mut dials: Vec<Dial> = addresses.iter().map(one).collect();
    loop {
        let now = Instant::now();
        for dial in &mut dials {
            if let Some(stream) = dial.step(now, key) {
                // The agent itself ends when it has heard nothing for too long.
                return net::set_silence_max(stream.fd(), None)
                    .and_then(|()| carry(FrameStream::new(stream, PIECE)))
                    .map(|(stream, carrier)| Connection { stream, carrier })
                    .map_err(|error| error.to_string());
            }
        }
        let is_in_vain = |dial: &Dial| {
            dial.has_failed_for_good()
                || (tries == Tries::WhileItMayHelp && dial.is_futile(now, timeout))
        };
        if now >= deadline || dials.iter().all(is_in_vain) {
            let tried: Vec<String> = dials.iter().flat_map(Dial::failures).collect();
            return Err(tried.join("; "));
        }
        let next = dials.iter().filter_map(Dial::deadline).chain([deadline]);
        let next = next.min();
        wait_for_any(dials.iter().filter_map(Dial::wait), next);
    }
}

/// Starts the thread that carries bytes; the other end of its local socket, and what ends with the thread.
fn carry(wire: FrameStream) -> io::Result<(UnixStream, Receiver<Infallible>)> {
    let (ours, theirs) = UnixStream::pair()?;
    let (running, ended) = channel();
    ours.set_nonblocking(true)?;
    let carrier = Carrier {
        wire,
        local: ours,
        for_local: VecDeque::new(),
        local_ended: false,
        wire_ended: false,
        wire_is_shut: false,
        local_is_shut: false,
    };
    std::thread::Builder::new()
        .name("hvd-carrier".into())
        .stack_size(STACK)
        .spawn(move || {
            carrier.run();
            drop(running);
        })?;
    Ok((theirs, ended))
}

/// Bytes written before one side closes still arrive; bytes written after the other side closed are dropped.
struct Carrier {
    wire: FrameStream,
    local: UnixStream,
    /// From the network, not yet taken by the local side.
    for_local: VecDeque<u8>,
    local_ended: bool,
    wire_ended: bool,
    /// The end of the one side has been passed on to the other.
    wire_is_shut: bool,
    local_is_shut: bool,
}

impl Carrier {
    fn run(mut self) {
        let mut buffer = vec![0; PIECE];
        while !(self.wire_is_shut && self.local_is_shut) {
            self.wait();
            self.read_wire();
            self.write_local();
            self.read_local(&mut buffer);
            self.write_wire();
        }
    }

    fn wait(&self) {
        let Ok(wire) = self.wire.fd().get() else {
            return;
        };
        let mut fds = Vec::new();
        let mut add = |fd, read: bool, write: bool| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, read);
            flags.set(PollFlags::OUT, write);
            if !flags.is_empty() {
                fds.push(PollFd::from_borrowed_fd(fd, flags));
            }
        };
        let has_unsent = self.wire.unsent() > 0 && !self.wire_ended;
        add(wire, self.reads_wire(), has_unsent);
        add(
            self.local.as_fd(),
            self.reads_local(),
            !self.for_local.is_empty(),
        );
        poll_until(&mut fds, None);
    }

    fn reads_wire(&self) -> bool {
        !self.wire_ended && self.for_local.len() < AHEAD
    }

    fn reads_local(&self) -> bool {
        !self.local_ended && (self.wire_ended || self.wire.unsent() < AHEAD)
    }

    fn read_wire(&mut self) {
        while self.reads_wire() {
            match self.wire.next() {
                Ok(Some(frame)) => self.for_local.extend(frame),
                Ok(None) => return,
                Err(_) => self.wire_ended = true,
            }
        }
    }

    fn write_local(&mut self) {
        while !self.for_local.is_empty() {
            match (&self.local).write(self.for_local.as_slices().0) {
                Ok(count) => drop(self.for_local.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Nobody reads any more.
                Err(_) => self.for_local.clear(),
            }
        }
        if self.wire_ended && !self.local_is_shut {
            self.local_is_shut = true;
            let _ = self.local.shutdown(Shutdown::Write);
        }
    }

    fn read_local(&mut self, buffer: &mut [u8]) {
        while self.reads_local() {
            match (&self.local).read(buffer) {
                Ok(0) => self.local_ended = true,
                Ok(_) if self.wire_ended => {}
                Ok(count) => self.wire.push(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.local_ended = true,
            }
        }
    }

    fn write_wire(&mut self) {
        let is_sent = self.wire_ended
            || self.wire.flush().unwrap_or_else(|_| {
                self.wire_ended = true;
                true
            });
        if self.local_ended && is_sent && !self.wire_is_shut {
            self.wire_is_shut = true;
            if let Ok(fd) = self.wire.fd().get() {
                let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const SOON: Duration = Duration::from_secs(60);
    const TRIES: Tries = Tries::WhileItMayHelp;

    fn server(key: &JobKey) -> Server {
        Server::start(
            &[Ipv4Addr::LOCALHOST.into()],
            Ports::Any,
            key.clone(),
            Some(SOON),
        )
        .expect("listens")
    }

    fn arrival(server: &Server) -> Arrival {
        let deadline = Instant::now() + SOON;
        loop {
            if let Some(arrival) = server.take().pop() {
                return arrival;
            }
            assert!(Instant::now() < deadline, "nobody came");
            let fd = server.as_fd();
            poll_until(
                &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
                Some(deadline),
            );
        }
    }

    #[test]
    fn much_goes_both_ways_and_ends_arrive_after_it() {
        let key = JobKey::random().expect("randomness");
        let server = server(&key);
        let mut agent = dial(server.addrs(), &key, 7, SOON, TRIES)
            .expect("reaches it")
            .stream;
        let Arrival { index, mut stream } = arrival(&server);
        assert_eq!(index, 7);
        drop(server);
        let sent: Vec<u8> = (0..5_000_000_u32).map(|i| (i % 251) as u8).collect();
        let expected = sent.clone();
        let writer = std::thread::spawn(move || {
            agent.write_all(&sent).expect("takes all");
            let mut back = Vec::new();
            agent.read_to_end(&mut back).expect("readable");
            back
        });
        let mut got = vec![0; expected.len()];
        stream.read_exact(&mut got).expect("all of it");
        assert!(got == expected);
        stream.write_all(b"thanks").expect("open");
        drop(stream);
        assert_eq!(writer.join().expect("no panic"), b"thanks");
    }

    #[test]
    fn another_key_is_refused() {
        let key = JobKey::random().expect("randomness");
        let server = server(&key);
        let other = JobKey::random().expect("randomness");
        let why = dial(server.addrs(), &other, 0, SOON, TRIES).expect_err("another key");
        assert!(why.contains("the job keys differ"), "{why}");
        assert!(server.take().is_empty());
    }

    #[test]
    fn a_launcher_that_cannot_be_reached_is_given_up_before_the_time_is_over() {
        let key = JobKey::random().expect("randomness");
        // Taken, but nobody listens.
        let (_taken, at) = net::tcp_bind((Ipv4Addr::LOCALHOST, 0).into()).expect("a port");
        let why =
            dial(&[at], &key, 0, Duration::from_secs(1 << 30), TRIES).expect_err("nobody listens");
        assert_eq!(why, format!("{at}: connection refused"));
    }

    #[test]
    fn the_end_of_one_side_is_noticed_by_the_other() {
        let key = JobKey::random().expect("randomness");
        let server = server(&key);
        let agent = dial(server.addrs(), &key, 0, SOON, TRIES).expect("reaches it");
        let mut stream = arrival(&server).stream;
        drop(agent);
        assert_eq!(stream.read(&mut [0; 8]).expect("an end"), 0);
    }

    #[test]
    fn an_agent_that_closes_waits_until_all_has_arrived() {
        let key = JobKey::random().expect("randomness");
        let server = server(&key);
        let mut agent = dial(server.addrs(), &key, 0, SOON, TRIES).expect("reaches it");
        let stream = arrival(&server).stream;
        agent.stream.write_all(b"the last words").expect("open");
        let (has_read, read) = channel();
        let reader = std::thread::spawn(move || {
            let mut words = Vec::new();
            (&stream).read_to_end(&mut words).expect("readable");
            has_read.send(words).expect("somebody waits");
            drop(stream);
        });
        agent.close(SOON);
        assert_eq!(read.try_recv().expect("was read before"), b"the last words");
        reader.join().expect("no panic");
    }
}

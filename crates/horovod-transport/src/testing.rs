//! Clusters inside one process, for tests: real links, arenas and waiters, no rendezvous. `tests/it/cluster.rs` shows how ranks use one.
#![expect(
    clippy::expect_used,
    reason = "tests want to fail at once, with the place"
)]

pub mod parsers;
pub use crate::rendezvous::harness::{Done, ServerMessage, SimulatedRendezvous, WorkerMessage};

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use horovod_protocol::{Generation, Rank, Tree};

use crate::{
    Arena, Congestion, Link, LinkError, Mesh, Topology,
    mesh::{FAN_OUT, Parts, SharedMemory},
    platform::{self, fd::Fd, net, region::Region},
    shm::{layout::Layout, segment},
    tcp::stream::Stream,
    topology::Member,
};

/// `n` ranks on one host, shared memory between them.
pub fn cluster(n: usize) -> Vec<Mesh> {
    Cluster::new(n).build()
}

/// `n` ranks without shared memory: TCP over the loopback interface between all.
pub fn cluster_tcp(n: usize) -> Vec<Mesh> {
    Cluster::new(n).shm(false).build()
}

/// One rank per entry on the pretended host of that number, e.g. `[0, 0, 1, 1]`: shared memory
/// inside each, TCP between them.
pub fn cluster_hosts(hosts: &[usize]) -> Vec<Mesh> {
    Cluster::new(hosts.len()).hosts(hosts).build()
}

/// A cluster to be built.
#[derive(Clone, Debug)]
pub struct Cluster {
    hosts: Vec<usize>,
    shm: bool,
    staging: usize,
    drip: Option<usize>,
    connections: u8,
    fan_out: u32,
    heartbeat: Option<Duration>,
    checksums: bool,
    flip: Option<Flip>,
}

/// A bit that is changed on the way.
#[derive(Clone, Copy, Debug)]
pub struct Flip {
    /// From which rank to which.
    pub direction: [usize; 2],
    /// Of the bytes for control, or of those of each connection for data.
    pub control: bool,
    /// Which bit of all that travels there, the checksums included.
    pub bit: u64,
}

impl Cluster {
    /// `n` ranks on one host.
    pub fn new(n: usize) -> Self {
        assert!(n > 0, "a cluster needs a rank");
        Self {
            hosts: vec![0; n],
            shm: true,
            staging: 1 << 20,
            drip: None,
            connections: 1,
            fan_out: FAN_OUT,
            heartbeat: None,
            checksums: true,
            flip: None,
        }
    }

    /// The pretended host of each rank.
    pub fn hosts(mut self, hosts: &[usize]) -> Self {
        assert_eq!(hosts.len(), self.hosts.len(), "one host per rank");
        self.hosts = hosts.to_vec();
        self
    }

    /// Whether the ranks of a host share memory (default) or use TCP.
    pub fn shm(mut self, on: bool) -> Self {
        self.shm = on;
        self
    }

    /// Bytes of each staging area, rounded up to whole pages (default 1 MiB).
    pub fn staging(mut self, bytes: usize) -> Self {
        self.staging = bytes;
        self
    }

    /// TCP connections between two ranks (default 1).
    pub fn connections(mut self, count: u8) -> Self {
        self.connections = count;
        self
    }

    /// Ranks that one of them listens to for control (default as in a real job).
    pub fn fan_out(mut self, count: u32) -> Self {
        self.fan_out = count;
        self
    }

    /// How long a rank may be silent (default: for ever).
    pub fn heartbeat(mut self, timeout: Duration) -> Self {
        self.heartbeat = Some(timeout);
        self
    }

    /// Whether what travels between hosts has checksums (default as in a real job: it has).
    pub fn checksums(mut self, on: bool) -> Self {
        self.checksums = on;
        self
    }

    /// Changes a bit on the way between two hosts.
    pub fn flip(mut self, flip: Flip) -> Self {
        self.flip = Some(flip);
        self
    }

    /// Makes data links move at most `most` bytes per call.
    pub fn drip(mut self, most: usize) -> Self {
        self.drip = Some(most);
        self
    }

    /// Connects it; the mesh of rank `i` is at index `i`.
    pub fn build(&self) -> Vec<Mesh> {
        let n = self.hosts.len();
        let member = |host: &usize| Member {
            identity: host.to_string(),
            hostname: format!("host{host}"),
            pid: std::process::id(),
            shm: self.shm,
        };
        let members: Vec<Member> = self.hosts.iter().map(member).collect();
        let topology = |rank| Topology::new(Rank(rank), Generation(1), &members);
        let tree = Tree::new(&topology(0).host_numbers(), self.fan_out);
        let mut parts: Vec<Parts> = (0..n)
            .map(|rank| Parts {
                topology: topology(rank as u32),
                tree: tree.clone(),
                shared: None,
                detectors: Vec::new(),
                control: Vec::new(),
                data: Vec::new(),
                launcher: None,
                settings: Vec::new(),
                congestion: Congestion::Auto,
                heartbeat: self.heartbeat,
                checksums: self.checksums,
                assignment: None,
            })
            .collect();
        self.share_memory(&mut parts);
        self.connect(&mut parts);
        parts.into_iter().map(|p| self.finish(p)).collect()
    }

    fn share_memory(&self, parts: &mut [Parts]) {
        for host in 0..parts[0].topology.hosts() {
            let ranks = parts[0].topology.ranks_on(crate::HostId(host));
            if !self.shm || ranks.len() < 2 {
                continue;
            }
            let layout = Layout::new(ranks.len(), self.staging);
            let region = Arc::new(Region::private(layout.total()).expect("memory"));
            let notifiers: Vec<_> = ranks
                .iter()
                .map(|_| platform::notifier().expect("a notifier"))
                .collect();
            let senders: Vec<Arc<Fd>> = notifiers
                .iter()
                .map(|(_, senders)| senders.clone())
                .collect();
            let members: Arc<[Rank]> = ranks.clone().into();
            for (local, (rank, (notified_fd, _))) in ranks.iter().zip(notifiers).enumerate() {
                let arena = Arena::new(region.clone(), layout, members.clone(), local, &senders);
                parts[rank.index()].shared = Some(SharedMemory { arena, notified_fd });
            }
            for (local, &rank) in ranks.iter().enumerate() {
                let tree = &parts[0].tree;
                let watched = segment::watched(tree, &ranks, local);
                let first = (local > 0).then_some(ranks[0]);
                let lower = watched.into_iter().filter(|other| *other < rank);
                for other in lower.chain(first).collect::<Vec<_>>() {
                    let [a, b] = net::socket_pair().expect("a socket pair");
                    parts[other.index()].detectors.push((rank, a));
                    parts[rank.index()].detectors.push((other, b));
                }
            }
        }
    }

    fn connect(&self, parts: &mut [Parts]) {
        for low in 0..parts.len() {
            for high in low + 1..parts.len() {
                if self.shm && self.hosts[low] == self.hosts[high] {
                    continue;
                }
                for lane in 0..self.connections {
                    let (a, b) = self.direction([low, high], false);
                    parts[low].data.push((Rank(high as u32), lane, a));
                    parts[high].data.push((Rank(low as u32), lane, b));
                }
                let [l, h] = [low, high].map(|rank| Rank(rank as u32));
                if parts[0].tree.parent(h) == Some(l) {
                    let (a, b) = self.direction([low, high], true);
                    parts[low].control.push((Rank(high as u32), a));
                    parts[high].control.push((Rank(low as u32), b));
                }
            }
        }
    }

    /// A connection, with somebody in between who changes a bit if that is wanted here.
    fn direction(&self, [low, high]: [usize; 2], control: bool) -> (Stream, Stream) {
        let Some(flip) = self.flip.filter(|flip| {
            let same = flip.direction == [low, high] || flip.direction == [high, low];
            same && flip.control == control
        }) else {
            let (a, b) = tcp_pair();
            return (stream(a), stream(b));
        };
        let ((a, to_a), (b, to_b)) = (tcp_pair(), tcp_pair());
        let clone = |socket: &TcpStream| socket.try_clone().expect("a descriptor");
        let upwards = (flip.direction == [low, high]).then_some(flip.bit);
        let downwards = (flip.direction == [high, low]).then_some(flip.bit);
        let directions = [
            (clone(&to_a), clone(&to_b), upwards),
            (to_b, to_a, downwards),
        ];
        for (from, to, bit) in directions {
            std::thread::spawn(move || pass_on(from, to, bit));
        }
        (stream(a), stream(b))
    }

    fn finish(&self, parts: Parts) -> Mesh {
        let mut mesh = Mesh::assemble(parts).expect("epoll");
        if let Some(most) = self.drip {
            mesh.data.wrap_links(|link| Box::new(Drip { link, most }));
        }
        mesh
    }
}

/// An address on the loopback that refuses connections as long as this exists: its port is taken, so no other
/// process can get it, but nobody listens there.
#[derive(Debug)]
pub struct Refusing {
    /// The address.
    pub at: SocketAddr,
    _taken: Fd,
}

impl Refusing {
    /// Takes any port.
    #[expect(clippy::new_without_default, reason = "it takes a port")]
    pub fn new() -> Self {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (_taken, at) = net::tcp_bind(any).expect("a port");
        Self { at, _taken }
    }
}

/// Two connected TCP sockets; who connected to whom is known, so nobody needs to prove anything.
fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let one = TcpStream::connect(address).expect("a connection");
    let own = one.local_addr().expect("its address");
    // A client that still looks for the previous owner of the port may connect first.
    loop {
        let (other, from) = listener.accept().expect("a connection");
        if from == own {
            return (one, other);
        }
    }
}

fn stream(socket: TcpStream) -> Stream {
    socket.set_nonblocking(true).expect("non-blocking");
    socket.set_nodelay(true).expect("no delay");
    let fd = Fd::open(|| Ok::<_, std::io::Error>(socket.into())).expect("a socket");
    Stream::authenticated(Arc::new(fd), None)
}

/// Passes everything on until the end, with one bit of it changed.
fn pass_on(mut from: TcpStream, mut to: TcpStream, bit: Option<u64>) {
    let (mut buf, mut at) = (vec![0; 64 << 10], 0);
    while let Ok(n @ 1..) = from.read(&mut buf) {
        let of_these = bit.and_then(|bit| (bit / 8).checked_sub(at).map(|byte| (byte, bit % 8)));
        let place = of_these.and_then(|(byte, bit)| Some((usize::try_from(byte).ok()?, bit)));
        if let Some((byte, bit)) = place.filter(|(byte, _)| *byte < n) {
            buf[byte] ^= 1 << bit;
        }
        at += n as u64;
        if to.write_all(&buf[..n]).is_err() {
            break;
        }
    }
    // Either end learns when the other closes.
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

/// A link that moves little at a time.
struct Drip {
    link: Box<dyn Link>,
    most: usize,
}

impl Link for Drip {
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, LinkError> {
        self.link.try_send(&bytes[..bytes.len().min(self.most)])
    }

    fn try_recv(&mut self, buf: &mut [u8]) -> Result<usize, LinkError> {
        let most = buf.len().min(self.most);
        self.link.try_recv(&mut buf[..most])
    }
}

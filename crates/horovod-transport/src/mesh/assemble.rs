//! The assembly of a [`Mesh`] from connected sockets and a mapped arena.

use std::{io, sync::Arc, time::Duration};

use horovod_protocol::{Generation, Rank, Tree};

use super::Mesh;
use crate::{
    Arena, Congestion, Control, Data, Topology, Waiter,
    control::{Detector, Peer},
    link::{Link, PeerName},
    platform::Source,
    platform::{self, data_socket, fd::Fd, net, region::Region},
    poller::Poller,
    rendezvous::{Client, RankAssignment},
    shm::{arena::RankNotifier, link::ShmLink},
    tcp::{
        checked::Use,
        link::{PolledStream, StreamLink},
        stream::Stream,
    },
    topology::Member,
    wait_policy::WaitConditions,
};

/// The arena of a host and the receiving end of this rank's notifier.
pub(crate) struct SharedMemory {
    pub(crate) arena: Arena,
    pub(crate) notified_fd: Arc<Fd>,
}

/// Result of connecting to all peers.
pub(crate) struct Parts {
    pub(crate) topology: Topology,
    pub(crate) tree: Tree,
    pub(crate) shared: Option<SharedMemory>,
    pub(crate) detectors: Vec<(Rank, Arc<Fd>)>,
    pub(crate) control: Vec<(Rank, Stream)>,
    /// Data connections; the number distinguishes the connections to the same rank.
    pub(crate) data: Vec<(Rank, u8, Stream)>,
    pub(crate) launcher: Option<Client>,
    /// Settings of rank 0, see [`super::MeshConfig::settings`].
    pub(crate) settings: Vec<u8>,
    /// Congestion control of this rank, see [`super::MeshConfig::congestion`].
    pub(crate) congestion: Congestion,
    /// Heartbeat timeout of rank 0, see [`super::MeshConfig::heartbeat`].
    pub(crate) heartbeat: Option<Duration>,
    /// Whether rank 0 has checksums on, see [`super::MeshConfig::checksums`].
    pub(crate) checksums: bool,
    pub(crate) assignment: Option<RankAssignment>,
}

/// Assigns tokens for the poller.
struct Sources(Vec<Source>);

impl Sources {
    fn add(&mut self, fd: Arc<Fd>) -> usize {
        self.0.push(Source {
            fd,
            is_notifier: false,
        });
        self.0.len() - 1
    }
}

fn hostname() -> String {
    // Miri's `uname` fills only a part of the memory that rustix takes as filled.
    if cfg!(miri) {
        return "miri".to_owned();
    }
    let uname = rustix::system::uname();
    uname.nodename().to_string_lossy().into_owned()
}

impl Mesh {
    /// Returns the mesh of a job with one rank: no sockets, no shared memory.
    pub fn solo() -> io::Result<Self> {
        let member = Member {
            identity: String::new(),
            hostname: hostname(),
            pid: std::process::id(),
            shm: true,
        };
        Self::assemble(Parts {
            topology: Topology::new(Rank(0), Generation(0), &[member]),
            tree: Tree::star(1),
            shared: None,
            detectors: Vec::new(),
            control: Vec::new(),
            data: Vec::new(),
            launcher: None,
            settings: Vec::new(),
            congestion: Congestion::Auto,
            heartbeat: None,
            checksums: false,
            assignment: None,
        })
    }

    pub(crate) fn assemble(parts: Parts) -> io::Result<Self> {
        let Parts {
            topology,
            tree,
            shared,
            detectors,
            mut control,
            mut data,
            launcher,
            settings,
            congestion,
            heartbeat,
            checksums,
            assignment,
        } = parts;
        let is_elsewhere = |rank: Rank| topology.peer(rank).host != topology.host();
        let control_ends = control.iter_mut().map(|(rank, s)| (*rank, s, Use::Control));
        let data_ends = data.iter_mut().map(|(rank, _, s)| (*rank, s, Use::Data));
        for (rank, stream, purpose) in control_ends.chain(data_ends) {
            if checksums && is_elsewhere(rank) {
                stream.check(purpose);
            }
        }
        let streams = control.iter().map(|(_, stream)| stream);
        let streams = streams.chain(data.iter().map(|(.., stream)| stream));
        let sockets = streams.map(|stream| &**stream.fd());
        for fd in sockets.chain(launcher.as_ref().map(|client| &**client.fd())) {
            // If this fails, only the system's own timeouts remain.
            let _ = net::set_silence_max(fd, heartbeat);
        }
        let name = |rank: Rank| PeerName {
            rank,
            host: topology.peer(rank).hostname.clone(),
        };
        let (notifier, notified_fd, arena) = own_notifier(shared)?;

        let mut sources = Sources(vec![Source {
            fd: notified_fd,
            is_notifier: true,
        }]);
        let has_sockets = !control.is_empty() || !data.is_empty();
        let mut with_token = |(rank, stream): (Rank, Stream)| {
            let token = sources.add(stream.fd().clone());
            (rank, stream, token)
        };
        let control: Vec<_> = control.into_iter().map(&mut with_token).collect();
        data.sort_by_key(|(rank, lane, _)| (*rank, *lane));
        let sockets: Vec<&Fd> = data.iter().map(|(.., stream)| &**stream.fd()).collect();
        data_socket::prepare(
            &sockets,
            data.iter().any(|(_, lane, _)| *lane > 0),
            &congestion,
        )?;
        let data: Vec<_> = data
            .into_iter()
            .map(|(rank, _, stream)| with_token((rank, stream)))
            .collect();
        let detectors: Vec<_> = detectors
            .into_iter()
            .map(|(rank, fd)| {
                let token = sources.add(fd.clone());
                Detector {
                    name: name(rank),
                    fd,
                    token,
                    ended: false,
                }
            })
            .collect();
        let launcher = launcher.map(|client| (sources.add(client.fd().clone()), client));
        let poller = Arc::new(Poller::new(sources.0)?);

        let polled = |stream, token| PolledStream::new(stream, poller.clone(), token);
        let mut links: Vec<Option<Box<dyn Link>>> = topology.peers.iter().map(|_| None).collect();
        let mut peers = Vec::new();
        for (rank, stream, token) in control {
            let link = StreamLink::new(name(rank), vec![polled(stream, token)]);
            peers.push(Peer::new(name(rank), Box::new(link)));
        }
        let mut data = data.into_iter().peekable();
        while let Some((rank, stream, token)) = data.next() {
            let mut streams = vec![polled(stream, token)];
            while let Some((_, stream, token)) = data.next_if(|(next, ..)| *next == rank) {
                streams.push(polled(stream, token));
            }
            links[rank.index()] = Some(Box::new(StreamLink::new(name(rank), streams)));
        }
        if let Some(arena) = &arena {
            add_shared(arena, &tree, &name, &mut links, &mut peers);
        }
        peers.sort_by_key(Peer::rank);

        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let oversubscribed = topology.local_size() as usize > cores;
        let control = Control::new(
            topology.peers.len(),
            peers,
            detectors,
            launcher,
            poller.clone(),
        );
        let core_migration = arena
            .as_ref()
            .filter(|_| oversubscribed)
            .map(|arena| arena.core_migration(cores));
        let data = Data::new(links, arena);
        let waiter = Waiter::new(
            notifier,
            poller,
            WaitConditions {
                oversubscribed,
                has_sockets,
            },
            core_migration,
        );
        Ok(Self {
            topology,
            tree,
            control,
            data,
            waiter,
            settings,
            heartbeat,
            assignment,
        })
    }
}

/// Returns this rank's notifier: in the arena, or in private memory if there is no arena.
fn own_notifier(
    shared: Option<SharedMemory>,
) -> io::Result<(RankNotifier, Arc<Fd>, Option<Arena>)> {
    if let Some(SharedMemory { arena, notified_fd }) = shared {
        return Ok((arena.notifier(arena.me()).clone(), notified_fd, Some(arena)));
    }
    let (notified_fd, senders) = platform::notifier()?;
    let region = Arc::new(Region::private(4096)?);
    Ok((
        RankNotifier {
            region,
            word: 0,
            fd: senders,
        },
        notified_fd,
        None,
    ))
}

/// Adds links through shared memory: data links to all ranks of the host, control links where the tree has them.
fn add_shared(
    arena: &Arena,
    tree: &Tree,
    name: &dyn Fn(Rank) -> PeerName,
    links: &mut [Option<Box<dyn Link>>],
    peers: &mut Vec<Peer>,
) {
    let me = arena.me();
    for (local, &rank) in arena
        .members()
        .iter()
        .enumerate()
        .filter(|(local, _)| *local != me)
    {
        let (out, inn) = (arena.data_ring(me, local), arena.data_ring(local, me));
        let notifier = || arena.notifier(local).clone();
        links[rank.index()] = Some(Box::new(ShmLink::new(name(rank), out, inn, notifier())));
        let mine = arena.members()[me];
        let (child, up) = if tree.parent(rank) == Some(mine) {
            (local, false)
        } else if tree.parent(mine) == Some(rank) {
            (me, true)
        } else {
            continue;
        };
        let (out, inn) = (
            arena.control_ring(child, up),
            arena.control_ring(child, !up),
        );
        peers.push(Peer::new(
            name(rank),
            Box::new(ShmLink::new(name(rank), out, inn, notifier())),
        ));
    }
}

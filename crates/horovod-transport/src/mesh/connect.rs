//! Joining a job: register, receive the list of members, establish all links at the same time.
//!
//! The higher rank of a pair connects to the lower one. Ranks that share memory do not connect to each other: each
//! connects to the first rank of its host and receives the arena from it. Each keeps this local socket to detect the
//! first rank's death. Together with the arena, ranks whose control links are in it receive sockets between them, for
//! the same purpose.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::{Duration, Instant},
};

use horovod_protocol::{Rank, Tree};

use super::{
    CONNECTIONS_MAX, ConnectError, Mesh, MeshConfig, Parts, SharedMemory, chosen,
    dial::{Dial, Target},
    register::{register, wait_for},
    talk::Roster,
};
use crate::{
    Topology,
    handshake::{Binding, Purpose},
    platform::net,
    rendezvous::{Client, ToServer, Where},
    shm::segment::{AttachingRank, ShmSegment},
    tcp::{
        listener::{Gate, listen_all, reachable},
        stream::Stream,
    },
    topology::Member,
    unreached::{Goal, Unreached},
};

/// How often a process of an elastic job retries after failed connections that no death explains. A link may be cut
/// temporarily, but not every end of a cut link can stay in the job.
const FAILED_MAX: u32 = 3;

/// Joins the job: registers with the rendezvous, waits for all ranks and connects to them.
///
/// Blocks for at most `config.timeout`. All ranks must call it; another call after the end of a generation joins the
/// next one. In an elastic job it waits for the launcher to form the next round instead. It then retries if another
/// rank dies during the setup of their round, or cannot be reached. Errors name the missing ranks, or the failed
/// connections with both ends and the cause.
pub fn connect(config: &MeshConfig) -> Result<Mesh, ConnectError> {
    let mut failed = 0;
    loop {
        match connect_once(config) {
            // The other members of an elastic job join another round together with this process.
            Err(ConnectError::Aborted(why)) if config.elastic.is_some() => {
                tracing::debug!("the round was given up: {why}");
            }
            Err(error @ (ConnectError::Links { .. } | ConnectError::RendezvousLost { .. }))
                if config.elastic.is_some() && failed < FAILED_MAX =>
            {
                failed += 1;
                tracing::warn!("the round was given up, trying again: {error}");
            }
            result => return result,
        }
    }
}

fn connect_once(config: &MeshConfig) -> Result<Mesh, ConnectError> {
    let started = Instant::now();
    let deadline = started + config.timeout;
    let mut config = config.clone();
    if let Some(elastic) = config.elastic {
        // Until the launcher assigns a rank, messages show this number instead.
        config.rank = Rank(elastic.worker);
    }
    if config.hostname.is_empty() {
        config.hostname = rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned();
    }
    let client = register(&mut config, deadline)?;
    let mut joining = Joining {
        config,
        started,
        deadline,
        client,
    };
    let joined = joining.run();
    match joined {
        Ok(parts) => {
            let Joining { client, config, .. } = joining;
            let parts = Parts {
                launcher: Some(client),
                ..parts
            };
            Mesh::assemble(parts).map_err(|source| ConnectError::System {
                rank: config.rank,
                what: "cannot set up its links",
                source,
            })
        }
        Err(e) => {
            // With this report the other ranks need not wait for their timeouts.
            let _ = joining.client.send(&ToServer::Failed {
                text: e.to_string(),
            });
            Err(e)
        }
    }
}

/// The arena that the first rank of a host distributes, and its progress.
struct Giving {
    segment: ShmSegment,
    /// Local rank, connection, number of descriptors sent.
    open: Vec<(usize, Stream, usize)>,
}

/// A rank that is joining a generation.
pub(super) struct Joining {
    pub(super) config: MeshConfig,
    pub(super) started: Instant,
    pub(super) deadline: Instant,
    pub(super) client: Client,
}

impl Joining {
    fn run(&mut self) -> Result<Parts, ConnectError> {
        self.hello()?;
        let Roster {
            generation,
            members,
            common,
            assignment,
        } = self.roster()?;
        let members: Vec<Member> = members
            .iter()
            .map(|m| Member {
                identity: m.identity.clone(),
                hostname: m.hostname.clone(),
                pid: m.pid,
                shm: m.shm,
            })
            .collect();
        let topology = Topology::new(self.config.rank, generation, &members);
        let tree = Tree::new(&topology.host_numbers(), common.fan_out);
        let mates = mates(&topology);
        let mut gate = Gate::default();
        let (place, giving, _local_listener) = self.open(&topology, &tree, &mates, &mut gate)?;
        self.send(&ToServer::Ready(place))?;
        let places = self.table()?;
        let mut links = Links::new(self, topology, tree, mates, gate, giving);
        links.plan(&places, common.connections.clamp(1, CONNECTIONS_MAX));
        links.parts.settings = common.settings;
        links.parts.heartbeat = common.heartbeat;
        links.parts.checksums = common.checksums;
        links.parts.assignment = assignment;
        links.run()
    }

    /// Opens the listeners that other ranks need, and the arena if this is the first rank of its host.
    fn open(
        &self,
        topology: &Topology,
        tree: &Tree,
        mates: &Arc<[Rank]>,
        gate: &mut Gate,
    ) -> Result<(Where, Option<Giving>, Option<net::UnixListener>), ConnectError> {
        let rank = self.config.rank;
        let mut place = Where::default();
        let higher = (rank.0 + 1..self.config.size).map(Rank);
        if higher.into_iter().any(|r| !mates.contains(&r)) {
            place.addresses = self.listen(topology, gate)?;
        }
        if mates.len() < 2 || mates[0] != rank {
            return Ok((place, None, None));
        }
        let shared_memory = |source| ConnectError::SharedMemory {
            rank,
            host: self.config.hostname.clone(),
            source,
        };
        let segment =
            ShmSegment::new(mates.clone(), self.config.staging, tree).map_err(shared_memory)?;
        let listener = net::unix_listen().map_err(shared_memory)?;
        place.local = Some(listener.name.clone());
        gate.add(listener.fd.clone());
        Ok((
            place,
            Some(Giving {
                segment,
                open: Vec::new(),
            }),
            Some(listener),
        ))
    }

    fn listen(
        &self,
        topology: &Topology,
        gate: &mut Gate,
    ) -> Result<Vec<std::net::SocketAddr>, ConnectError> {
        let rank = self.config.rank;
        let system = |what| move |source| ConnectError::System { rank, what, source };
        let several_hosts = topology.hosts() > 1;
        let addresses = if !self.config.interfaces.is_empty() {
            net::resolve_interfaces(&self.config.interfaces)
                .map_err(system("no such network interface"))?
        } else if several_hosts {
            vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()]
        } else {
            vec![net::loopback().map_err(system("the loopback interface is down"))?]
        };
        let bound = listen_all(&addresses, self.config.ports)
            .map_err(system("cannot wait for other ranks"))?;
        let mut found =
            reachable(&bound, false).map_err(system("cannot list network interfaces"))?;
        // The interface of the connection to the rendezvous most likely leads to other hosts, too.
        let known_good = net::local_ip(self.client.fd());
        found.sort_by_key(|at| (Some(at.ip()) != known_good, at.is_ipv6()));
        for (fd, _) in bound {
            gate.add(fd);
        }
        chosen::log_listeners(&found, &self.config.interfaces, several_hosts);
        Ok(found)
    }
}

/// Returns the ranks that share memory with this one, including itself.
fn mates(topology: &Topology) -> Arc<[Rank]> {
    if topology.peer(topology.rank).shares_memory {
        topology.ranks_on(topology.host()).into()
    } else {
        [topology.rank].into()
    }
}

/// All connections that are being established.
struct Links<'a> {
    joining: &'a mut Joining,
    mates: Arc<[Rank]>,
    gate: Gate,
    giving: Option<Giving>,
    dials: Vec<Dial>,
    expected: Vec<(Rank, Purpose, u8)>,
    attaching: Option<(Stream, AttachingRank)>,
    parts: Parts,
}

impl<'a> Links<'a> {
    fn new(
        joining: &'a mut Joining,
        topology: Topology,
        tree: Tree,
        mates: Arc<[Rank]>,
        gate: Gate,
        giving: Option<Giving>,
    ) -> Self {
        let parts = Parts {
            topology,
            tree,
            shared: None,
            detectors: Vec::new(),
            control: Vec::new(),
            data: Vec::new(),
            launcher: None,
            settings: Vec::new(),
            congestion: joining.config.congestion.clone(),
            heartbeat: None,
            checksums: false,
            assignment: None,
        };
        Self {
            joining,
            mates,
            gate,
            giving,
            dials: Vec::new(),
            expected: Vec::new(),
            attaching: None,
            parts,
        }
    }

    /// Determines the necessary connections, and which of them this rank dials.
    fn plan(&mut self, places: &[Where], connections: u8) {
        let (topology, tree) = (&self.parts.topology, &self.parts.tree);
        let (me, first, now) = (topology.rank, self.mates[0], Instant::now());
        for peer in topology.peers.iter().map(|p| p.rank).filter(|r| *r != me) {
            let place = &places[peer.index()];
            let mut purposes = Vec::new();
            let targets: Vec<Target> = if !self.mates.contains(&peer) {
                purposes.extend((0..connections).map(|lane| (Purpose::Data, lane)));
                if tree.parent(me) == Some(peer) || tree.parent(peer) == Some(me) {
                    purposes.push((Purpose::Control, 0));
                }
                place.addresses.iter().copied().map(Target::Tcp).collect()
            } else if peer == first || me == first {
                purposes.push((Purpose::Host, 0));
                place.local.iter().cloned().map(Target::Local).collect()
            } else {
                continue;
            };
            for (purpose, lane) in purposes {
                if peer > me {
                    self.expected.push((peer, purpose, lane));
                    continue;
                }
                let binding = Binding {
                    purpose,
                    lane,
                    sealed: self.joining.config.encrypt && purpose != Purpose::Host,
                    generation: topology.generation.0,
                    from: me.0,
                    to: peer.0,
                };
                self.dials.push(Dial::new(binding, targets.clone(), now));
            }
        }
    }

    fn run(mut self) -> Result<Parts, ConnectError> {
        loop {
            let now = Instant::now();
            self.joining.message()?;
            self.dial(now);
            self.accept(now);
            self.share()?;
            if self.dials.is_empty()
                && self.expected.is_empty()
                && self.attaching.is_none()
                && self.giving.as_ref().is_none_or(|g| g.open.is_empty())
            {
                return self.finish();
            }
            if self.joining.config.elastic.is_none()
                && let Some(report) = self.unreached(now)
            {
                return Err(self.joining.report_unreached(report));
            }
            if now >= self.joining.deadline {
                return Err(self.unfinished());
            }
            self.check_supplies()?;
            self.wait()?;
        }
    }

    /// Fails if the process has no descriptors left, because other ranks would wait for this one in vain.
    fn check_supplies(&mut self) -> Result<(), ConnectError> {
        let rank = self.parts.topology.rank;
        let error = |what, source| Err(ConnectError::System { rank, what, source });
        if let Some(source) = self.dials.iter_mut().find_map(Dial::take_exhausted) {
            return error("cannot connect to other ranks", source);
        }
        match self.gate.take_refused() {
            Some(source) if net::is_exhausted(&source) => {
                error("cannot take connections of other ranks", source)
            }
            _ => Ok(()),
        }
    }

    fn wait(&self) -> Result<(), ConnectError> {
        let client = &self.joining.client;
        let giving = self
            .giving
            .iter()
            .flat_map(|g| &g.open)
            .map(|(_, s, _)| (&**s.fd(), true));
        let waits = self
            .gate
            .waits()
            .chain(self.dials.iter().filter_map(Dial::wait))
            .chain(self.attaching.iter().map(|(s, _)| (&**s.fd(), false)))
            .chain(giving)
            .chain([(&**client.fd(), client.wants_write())]);
        let times = self.dials.iter().filter_map(Dial::deadline);
        let until = times
            .chain(self.gate.deadline())
            .chain([self.joining.deadline])
            .min();
        wait_for(&self.joining.config, waits, until)
    }

    fn dial(&mut self, now: Instant) {
        let mut i = 0;
        while i < self.dials.len() {
            match self.dials[i].step(now, &self.joining.config.key) {
                None => i += 1,
                Some(stream) => {
                    let binding = self.dials.swap_remove(i).binding;
                    self.keep(Rank(binding.to), binding, stream);
                }
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        let me = self.parts.topology.rank.0;
        let generation = self.parts.topology.generation.0;
        let expected = &self.expected;
        let wanted = |b: &Binding| {
            b.to == me
                && b.generation == generation
                && expected.contains(&(Rank(b.from), b.purpose, b.lane))
        };
        let done = self.gate.step(now, &self.joining.config.key, &wanted);
        for (binding, stream) in done {
            let key = (Rank(binding.from), binding.purpose, binding.lane);
            // Of two connections whose handshakes end at the same time, the first is kept.
            if let Some(i) = self.expected.iter().position(|e| *e == key) {
                self.expected.swap_remove(i);
                self.keep(key.0, binding, stream);
            }
        }
    }

    fn keep(&mut self, peer: Rank, binding: Binding, stream: Stream) {
        match binding.purpose {
            Purpose::Control => self.parts.control.push((peer, stream)),
            Purpose::Data => self.parts.data.push((peer, binding.lane, stream)),
            Purpose::Host if peer < self.parts.topology.rank => {
                self.attaching = Some((stream, AttachingRank::default()));
            }
            Purpose::Host => {
                let local = self.mates.iter().position(|m| *m == peer);
                if let (Some(giving), Some(local)) = (&mut self.giving, local) {
                    giving.open.push((local, stream, 0));
                }
            }
            // Only servers expect these purposes.
            Purpose::Rendezvous | Purpose::Payload | Purpose::Probe | Purpose::Agent => {}
        }
    }

    /// Sends or receives the arena.
    fn share(&mut self) -> Result<(), ConnectError> {
        let rank = self.parts.topology.rank;
        let host = self.joining.config.hostname.clone();
        let failed = |source| ConnectError::SharedMemory {
            rank,
            host: host.clone(),
            source,
        };
        if let Some(giving) = &mut self.giving {
            let mut waiting = Vec::new();
            for (local, stream, mut sent) in std::mem::take(&mut giving.open) {
                if giving
                    .segment
                    .give(stream.fd(), local, &mut sent)
                    .map_err(&failed)?
                {
                    self.parts
                        .detectors
                        .push((self.mates[local], stream.fd().clone()));
                } else {
                    waiting.push((local, stream, sent));
                }
            }
            giving.open = waiting;
        }
        if let Some((stream, attaching)) = &mut self.attaching {
            let local = self.mates.iter().position(|m| *m == rank).unwrap_or(0);
            let tree = &self.parts.tree;
            if let Some((shared, watched)) = attaching
                .receive(stream.fd(), &self.mates, tree, local)
                .map_err(&failed)?
            {
                self.parts.detectors.extend(watched);
                self.parts
                    .detectors
                    .push((self.mates[0], stream.fd().clone()));
                self.parts.shared = Some(shared);
                self.attaching = None;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Parts, ConnectError> {
        let Self {
            mut parts,
            giving,
            joining,
            mates,
            ..
        } = self;
        if let Some(giving) = giving {
            let shared: Result<SharedMemory, _> = giving.segment.shared(0);
            let (rank, host) = (parts.topology.rank, joining.config.hostname.clone());
            let failed = |source| ConnectError::SharedMemory { rank, host, source };
            parts.shared = Some(shared.map_err(failed)?);
        }
        chosen::log_links(&parts, &mates);
        Ok(parts)
    }

    /// Returns whether a connection to this rank exists. If it does, the rank is reachable and missing connections are
    /// only late.
    fn is_linked(&self, peer: Rank) -> bool {
        let data = self.parts.data.iter().map(|(rank, ..)| *rank);
        let control = self.parts.control.iter().map(|(rank, _)| *rank);
        data.chain(control).any(|rank| rank == peer)
    }

    /// Returns the ranks of other hosts that are unreachable, or `None` if further attempts may succeed.
    fn unreached(&self, now: Instant) -> Option<Unreached> {
        let config = &self.joining.config;
        let mut goals: Vec<(Goal, _)> = Vec::new();
        let futile = |dial: &&Dial| {
            dial.binding.purpose != Purpose::Host
                && dial.is_futile(now, config.timeout)
                && !self.is_linked(Rank(dial.binding.to))
        };
        for dial in self.dials.iter().filter(futile) {
            let peer = self.parts.topology.peer(Rank(dial.binding.to));
            let goal = Goal::Peer {
                rank: peer.rank,
                host: peer.hostname.to_string(),
            };
            if !goals.iter().any(|(known, _)| *known == goal) {
                goals.push((goal, dial.tried()));
            }
        }
        if goals.is_empty() {
            return None;
        }
        Some(Unreached::new(
            config.rank,
            &config.hostname,
            &config.interfaces,
            goals,
        ))
    }

    fn unfinished(&self) -> ConnectError {
        let topology = &self.parts.topology;
        let mut links = Vec::new();
        for dial in &self.dials {
            let peer = topology.peer(Rank(dial.binding.to));
            links.push(format!(
                "{} connection to {} on {}: {}",
                dial.binding.purpose,
                peer.rank,
                peer.hostname,
                dial.failures().join(", ")
            ));
        }
        for (peer, purpose, _) in &self.expected {
            let host = &topology.peer(*peer).hostname;
            links.push(format!(
                "{} connection from {peer} on {host}: it never came",
                purpose
            ));
        }
        if self.attaching.is_some() {
            links.push(format!(
                "shared memory from {}: it never came",
                self.mates[0]
            ));
        }
        for (local, ..) in self.giving.iter().flat_map(|g| &g.open) {
            links.push(format!(
                "shared memory to {}: it takes nothing",
                self.mates[*local]
            ));
        }
        let waited: Duration = self.joining.started.elapsed();
        let host = self.joining.config.hostname.clone();
        ConnectError::Links {
            rank: topology.rank,
            host,
            waited,
            links,
        }
    }
}

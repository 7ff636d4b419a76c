//! The layout of a process set: which members share a host, by which algorithms are chosen.

use horovod_protocol::Rank;
use horovod_transport::Topology;

/// The members of a process set, grouped by host, seen from one of them. Member indices throughout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetLayout {
    /// Members of each host, ascending; hosts in order of their first member.
    hosts: Vec<Vec<usize>>,
    /// Index into `hosts`, per member.
    host_of: Vec<usize>,
    /// This member.
    me: usize,
    /// Index in this host's arena, per member of this host in the order of `hosts`.
    arena: Vec<usize>,
    /// Position among the members of its host, per member.
    local_of: Vec<usize>,
}

impl SetLayout {
    /// The layout of `members` (ascending global ranks, this rank among them). Where the ranks of a host
    /// do not share memory, each counts as a host of its own.
    ///
    /// # Panics
    /// When this rank is not a member or a member is not in the topology: negotiation excludes both.
    pub fn new(topology: &Topology, members: &[Rank]) -> Self {
        let me = members
            .iter()
            .position(|rank| *rank == topology.rank)
            .expect("a rank executes only operations of sets it belongs to");
        let mut ids = Vec::new();
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        let (mut host_of, mut local_of) = (Vec::new(), Vec::new());
        for (member, rank) in members.iter().enumerate() {
            let peer = topology.peer(*rank);
            let id = peer.host;
            let known = ids
                .iter()
                .position(|known| *known == id && peer.shares_memory);
            let host = known.unwrap_or_else(|| {
                ids.push(id);
                hosts.push(Vec::new());
                hosts.len() - 1
            });
            host_of.push(host);
            local_of.push(hosts[host].len());
            hosts[host].push(member);
        }
        let arena = hosts[host_of[me]]
            .iter()
            .map(|member| topology.peer(members[*member]).local_rank as usize)
            .collect();
        Self {
            hosts,
            host_of,
            me,
            arena,
            local_of,
        }
    }

    /// Of members on these hosts, numbered from 0, seen from the first.
    #[cfg(test)]
    pub(crate) fn of_hosts(host_of: &[usize]) -> Self {
        let mut hosts = vec![Vec::new(); host_of.iter().max().map_or(0, |last| last + 1)];
        let mut local_of = Vec::new();
        for (member, host) in host_of.iter().enumerate() {
            local_of.push(hosts[*host].len());
            hosts[*host].push(member);
        }
        Self {
            arena: (0..hosts[host_of[0]].len()).collect(),
            host_of: host_of.to_vec(),
            me: 0,
            local_of,
            hosts,
        }
    }

    /// Number of members.
    pub fn members(&self) -> usize {
        self.host_of.len()
    }

    /// Number of hosts that have members.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Members of the smallest host: how many lanes can run across hosts in parallel.
    pub fn lanes(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// This member.
    pub(crate) fn me(&self) -> usize {
        self.me
    }

    /// One member, as a list of members.
    pub(crate) fn just(&self, member: usize) -> &[usize] {
        let (host, local) = (self.host_of[member], self.local_of[member]);
        &self.hosts[host][local..=local]
    }

    /// Members of one host.
    pub(crate) fn on_host(&self, host: usize) -> &[usize] {
        &self.hosts[host]
    }

    /// The host of this member.
    pub(crate) fn my_host(&self) -> usize {
        self.host_of[self.me]
    }

    /// The host of a member.
    pub(crate) fn host_of(&self, member: usize) -> usize {
        self.host_of[member]
    }

    /// Members of this host.
    pub(crate) fn locals(&self) -> &[usize] {
        &self.hosts[self.my_host()]
    }

    /// Position of this member among [`Self::locals`].
    pub(crate) fn my_local(&self) -> usize {
        self.local_of[self.me]
    }

    /// Arena index of each of [`Self::locals`].
    pub(crate) fn arena(&self) -> &[usize] {
        &self.arena
    }
}

//! The topology of a generation: its ranks, and who shares a host with whom.

use std::sync::Arc;

use horovod_protocol::{Generation, Rank};

/// One host of the job: an index from 0, in order of its lowest rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// Identity and location of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Its rank.
    pub rank: Rank,
    /// Its host.
    pub host: HostId,
    /// Position among the ranks of its host, ascending by rank.
    pub local_rank: u32,
    /// The name of its host, for people.
    pub hostname: Arc<str>,
    /// Its process on that host.
    pub pid: u32,
    /// Whether the ranks of its host share memory (it may be switched off); the same on all of them.
    pub shares_memory: bool,
}

/// The members of one generation, seen from one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Topology {
    /// This rank.
    pub rank: Rank,
    /// Number of ranks.
    pub size: u32,
    /// Which life of the job this is.
    pub generation: Generation,
    /// All ranks in order, this one included.
    pub peers: Vec<PeerInfo>,
}

/// A rank's self-description before hosts are numbered.
pub(crate) struct Member {
    /// Equal on two ranks exactly if they share a host.
    pub(crate) identity: String,
    pub(crate) hostname: String,
    pub(crate) pid: u32,
    /// It is ready to share memory with its host.
    pub(crate) shm: bool,
}

impl Topology {
    pub(crate) fn new(rank: Rank, generation: Generation, members: &[Member]) -> Self {
        let mut hosts: Vec<(&str, u32)> = Vec::new();
        let mut peers = Vec::with_capacity(members.len());
        for (rank, member) in (0u32..).zip(members) {
            let host = match hosts.iter().position(|(id, _)| *id == member.identity) {
                Some(host) => host,
                None => {
                    hosts.push((&member.identity, 0));
                    hosts.len() - 1
                }
            };
            let local_rank = hosts[host].1;
            hosts[host].1 += 1;
            peers.push(PeerInfo {
                rank: Rank(rank),
                host: HostId(u32::try_from(host).unwrap_or(u32::MAX)),
                local_rank,
                hostname: member.hostname.as_str().into(),
                pid: member.pid,
                shares_memory: member.shm,
            });
        }
        let mut all_share = vec![true; hosts.len()];
        for peer in &peers {
            all_share[peer.host.0 as usize] &= peer.shares_memory;
        }
        for peer in &mut peers {
            peer.shares_memory = all_share[peer.host.0 as usize];
        }
        let size = u32::try_from(peers.len()).unwrap_or(u32::MAX);
        Self {
            rank,
            size,
            generation,
            peers,
        }
    }

    /// The [`PeerInfo`] of a rank. Panics unless the rank is below the size.
    pub fn peer(&self, rank: Rank) -> &PeerInfo {
        &self.peers[rank.index()]
    }

    /// This rank's host.
    pub fn host(&self) -> HostId {
        self.peer(self.rank).host
    }

    /// Number of hosts.
    pub fn hosts(&self) -> u32 {
        self.peers.iter().map(|p| p.host.0 + 1).max().unwrap_or(0)
    }

    /// The number of each rank's host.
    pub(crate) fn host_numbers(&self) -> Vec<u32> {
        self.peers.iter().map(|p| p.host.0).collect()
    }

    /// The ranks of a host, ascending.
    pub fn ranks_on(&self, host: HostId) -> Vec<Rank> {
        self.peers
            .iter()
            .filter(|p| p.host == host)
            .map(|p| p.rank)
            .collect()
    }

    /// Position of this rank among those of its host.
    pub fn local_rank(&self) -> u32 {
        self.peer(self.rank).local_rank
    }

    /// Number of ranks on this rank's host.
    pub fn local_size(&self) -> u32 {
        self.count(|p| p.host == self.host())
    }

    /// Position of this rank's host among the hosts that have this local rank.
    pub fn cross_rank(&self) -> u32 {
        let (host, local) = (self.host(), self.local_rank());
        self.count(|p| p.local_rank == local && p.host < host)
    }

    /// Number of hosts that have this local rank.
    pub fn cross_size(&self) -> u32 {
        self.count(|p| p.local_rank == self.local_rank())
    }

    /// Whether all hosts have equally many ranks.
    pub fn is_homogeneous(&self) -> bool {
        (0..self.hosts()).all(|h| self.count(|p| p.host == HostId(h)) == self.local_size())
    }

    fn count(&self, keep: impl Fn(&PeerInfo) -> bool) -> u32 {
        self.peers.iter().map(|p| u32::from(keep(p))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(rank: u32, hosts: &[&str]) -> Topology {
        let members: Vec<Member> = hosts
            .iter()
            .map(|h| Member {
                identity: (*h).into(),
                hostname: (*h).into(),
                pid: 1,
                shm: *h != "off",
            })
            .collect();
        Topology::new(Rank(rank), Generation(1), &members)
    }

    #[test]
    fn all_ranks_see_alike_which_hosts_share_memory() {
        for rank in 0..4 {
            let t = topology(rank, &["a", "off", "a", "b"]);
            let shares: Vec<bool> = t.peers.iter().map(|p| p.shares_memory).collect();
            assert_eq!(shares, [true, false, true, true]);
        }
    }

    #[test]
    fn counts_within_and_across_hosts() {
        let t = topology(4, &["a", "b", "a", "b", "a"]);
        assert_eq!(t.hosts(), 2);
        assert_eq!(t.ranks_on(HostId(0)), [Rank(0), Rank(2), Rank(4)]);
        assert_eq!((t.local_rank(), t.local_size()), (2, 3));
        assert_eq!((t.cross_rank(), t.cross_size()), (0, 1));
        assert!(!t.is_homogeneous());
        let t = topology(3, &["a", "a", "b", "b"]);
        assert_eq!((t.local_rank(), t.local_size()), (1, 2));
        assert_eq!((t.cross_rank(), t.cross_size()), (1, 2));
        assert!(t.is_homogeneous());
    }
}

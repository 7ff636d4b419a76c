//! The chart of an examination: everything that it has found, as plain data.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use horovod_transport::probe::Obstacle;

use super::facts::HostFacts;
use super::talk::{Pace, Stood};

/// Description of the planned job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobPlan {
    /// Number of ranks.
    pub size: u32,
    /// Bytes of shared memory of each rank.
    pub staging: u64,
    /// TCP connections between two ranks of different hosts.
    pub connections: u32,
    /// First and last port on which ranks listen; `None`: any.
    pub ports: Option<(u32, u32)>,
    /// Data between hosts is encrypted.
    pub encrypt: bool,
    /// Ranks are Python programs, as far as one can tell.
    pub runs_python: bool,
    /// Where they start.
    pub cwd: PathBuf,
    /// This launcher's version.
    pub version: String,
}

/// How a host's clock differs from the launcher's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Skew {
    /// Nanoseconds that it is ahead.
    pub(crate) ahead_ns: i64,
    /// Half of the round trip: how wrong that may be.
    pub(crate) uncertain_ns: u64,
}

/// One host of the examination.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Patient {
    pub(crate) name: String,
    /// Ranks that would run there; none where only the launcher does.
    pub(crate) slots: u32,
    /// It is this machine.
    pub(crate) is_local: bool,
    /// Why there is nothing else to tell: it could not be asked.
    pub(crate) absent: Option<String>,
    pub(crate) facts: Option<HostFacts>,
    /// Interface and address of each listener; `None` before it has answered.
    pub(crate) listens: Option<Result<Vec<(String, SocketAddr)>, String>>,
    pub(crate) skew: Option<Skew>,
}

impl Patient {
    /// A host before it is asked anything; `slots` ranks would run there.
    pub fn new(name: &str, slots: u32, is_local: bool) -> Self {
        Self {
            name: name.to_owned(),
            slots,
            is_local,
            ..Self::default()
        }
    }
}

/// An address and what happened there.
pub(crate) type Tried = (SocketAddr, Result<Stood, Obstacle>);

/// Hosts, the ways between them, and how good these are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chart {
    pub(crate) plan: JobPlan,
    pub(crate) hosts: Vec<Patient>,
    /// From host to host: every address that was tried, in the order in which ranks would.
    pub(crate) routes: BTreeMap<(usize, usize), Vec<Tried>>,
    /// Results by measuring host and measured host.
    pub(crate) paces: BTreeMap<(usize, usize), Result<Pace, Obstacle>>,
    pub(crate) took: Duration,
}

impl Chart {
    /// The launcher's host.
    pub(crate) fn launcher(&self) -> Option<usize> {
        self.hosts.iter().position(|host| host.is_local)
    }

    /// The job needs no network.
    pub(crate) fn is_all_local(&self) -> bool {
        self.hosts.iter().all(|host| host.is_local)
    }

    /// The address by which ranks of `from` would reach those of `to`, and its interface there.
    pub(crate) fn chosen(&self, from: usize, to: usize) -> Option<(SocketAddr, &str)> {
        let tried = self.routes.get(&(from, to))?;
        let (at, _) = tried.iter().find(|(_, result)| result.is_ok())?;
        Some((*at, self.interface(to, at.ip())))
    }

    /// The interface of a host that has this address.
    pub(crate) fn interface(&self, host: usize, ip: IpAddr) -> &str {
        let listens = self.hosts[host].listens.as_ref();
        let mut known = listens.into_iter().flatten().flatten();
        known
            .find(|(_, at)| at.ip() == ip)
            .map_or("?", |(name, _)| name)
    }

    /// Bytes per second from one host to another, as far as measured.
    pub(crate) fn rate(&self, from: usize, to: usize) -> Option<f64> {
        let there = self.paces.get(&(from, to)).and_then(|p| p.as_ref().ok());
        let back = self.paces.get(&(to, from)).and_then(|p| p.as_ref().ok());
        there
            .map(|pace| pace.there)
            .or_else(|| back.map(|pace| pace.back))
    }

    /// Nanoseconds there and back again, as far as measured.
    pub(crate) fn round_trip_ns(&self, a: usize, b: usize) -> Option<u64> {
        let found = self.paces.get(&(a, b)).or_else(|| self.paces.get(&(b, a)));
        Some(found?.as_ref().ok()?.round_trip_ns)
    }

    /// Pairs of hosts that could be measured and were not.
    pub(crate) fn left_out(&self) -> Vec<(usize, usize)> {
        let mut pairs = Vec::new();
        for b in 0..self.hosts.len() {
            for a in 0..b {
                let is_measured =
                    self.paces.contains_key(&(a, b)) || self.paces.contains_key(&(b, a));
                let has_ranks =
                    |host: usize| self.hosts[host].slots > 0 && self.hosts[host].absent.is_none();
                let is_blocked = self.is_blocked(a, b) && self.is_blocked(b, a);
                if has_ranks(a) && has_ranks(b) && !is_measured && !is_blocked {
                    pairs.push((a, b));
                }
            }
        }
        pairs
    }

    /// Every address was tried without success.
    pub(crate) fn is_blocked(&self, from: usize, to: usize) -> bool {
        let tried = self.routes.get(&(from, to));
        tried.is_some_and(|t| !t.is_empty() && t.iter().all(|(_, result)| result.is_err()))
    }

    /// Brings the addresses into the order in which ranks try them: first the one by which a host reaches the
    /// launcher, then those of IP version 4.
    pub(crate) fn sort_routes(&mut self) {
        let Some(launcher) = self.launcher() else {
            return;
        };
        let towards_launcher = |host: usize| {
            let tried = self.routes.get(&(host, launcher))?;
            let stood = tried.iter().find_map(|(_, result)| result.as_ref().ok())?;
            Some(stood.local)
        };
        let known_good: Vec<Option<IpAddr>> = (0..self.hosts.len()).map(towards_launcher).collect();
        for (&(_, to), tried) in &mut self.routes {
            tried.sort_by_key(|(at, _)| (Some(at.ip()) != known_good[to], at.is_ipv6()));
        }
    }
}

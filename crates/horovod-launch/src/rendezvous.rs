//! The job's rendezvous: where it listens, what it tells about the ranks.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use horovod_protocol::Rank;
use horovod_transport::rendezvous::{Server, ServerConfig, ServerEvent};
use horovod_transport::unreached::Unreached;
use horovod_transport::{JobKey, Ports, loopback, resolve_interfaces};

use crate::environment;
use crate::executor::RendezvousSource;

/// Where it listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// On the loopback: all ranks are on this host.
    ThisHost,
    /// On the chosen interfaces, or on all.
    AllHosts,
}

impl Reach {
    pub(crate) fn of(all_local: bool) -> Self {
        if all_local {
            Self::ThisHost
        } else {
            Self::AllHosts
        }
    }

    /// The addresses to listen on.
    pub(crate) fn addresses(self, interfaces: &[String]) -> Result<Vec<IpAddr>, RendezvousError> {
        let chosen = resolve_interfaces(interfaces).map_err(RendezvousError::Interfaces)?;
        match self {
            Self::ThisHost => Ok(vec![loopback().map_err(RendezvousError::Loopback)?]),
            Self::AllHosts if chosen.is_empty() => Ok(vec![
                Ipv4Addr::UNSPECIFIED.into(),
                Ipv6Addr::UNSPECIFIED.into(),
            ]),
            Self::AllHosts => Ok(chosen),
        }
    }
}

/// Why it could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// An interface that was asked for is not there.
    #[error("network interfaces: {0}")]
    Interfaces(io::Error),
    /// `HOROVOD_PORT_RANGE` is no range of ports.
    #[error(transparent)]
    Ports(horovod_settings::Refused),
    /// There is no loopback.
    #[error(
        "the loopback interface is down or has neither 127.0.0.1 nor ::1, through which ranks of one host meet ({0}): \
         bring it up, e.g. with `ip link set lo up`, and look for its addresses with `ip addr show lo`"
    )]
    Loopback(io::Error),
    /// It cannot listen.
    #[error("the ranks would have nowhere to meet: {0}")]
    Listen(io::Error),
    /// There is no randomness for a key.
    #[error(transparent)]
    Key(io::Error),
}

/// Serves one job, from a thread of its own, until it is dropped.
#[derive(Debug)]
pub struct Rendezvous {
    server: Server,
    key: JobKey,
    addresses: Vec<SocketAddr>,
    rounds: u32,
    /// Ranks that do not answer, and who said so.
    silent: BTreeMap<u32, u32>,
    /// Ranks whose processes have ended while others wait for them here.
    absent: Vec<u32>,
    /// Why ranks cannot connect, until it is taken.
    unreachable: Option<String>,
}

impl Rendezvous {
    /// For a job of `size` ranks. `interfaces` are looked up even where they do not matter: a name that does not exist
    /// is a mistake.
    pub fn start(size: u32, reach: Reach, interfaces: &[String]) -> Result<Self, RendezvousError> {
        Self::start_with_key(size, reach, interfaces, None)
    }

    /// As [`Self::start`], with a key that the ranks have already; `None`: it makes one.
    pub fn start_with_key(
        size: u32,
        reach: Reach,
        interfaces: &[String],
        key: Option<JobKey>,
    ) -> Result<Self, RendezvousError> {
        Self::serve(reach, interfaces, key, |bind, key| {
            ServerConfig::new(bind, key, size)
        })
    }

    /// For ranks of any host that have the key and know the port already.
    pub fn start_at(port: u16, size: u32, key: JobKey) -> Result<Self, RendezvousError> {
        Self::serve(Reach::AllHosts, &[], Some(key), |bind, key| {
            let mut config = ServerConfig::new(bind, key, size);
            config.ports = Ports::One(port);
            config
        })
    }

    /// As [`Self::start`]; `check` is the command that checks the network of this job, for people.
    pub(crate) fn start_with_check(
        check: String,
        size: u32,
        reach: Reach,
        interfaces: &[String],
    ) -> Result<Self, RendezvousError> {
        Self::serve(reach, interfaces, None, |bind, key| {
            let mut config = ServerConfig::new(bind, key, size);
            config.check = check;
            config
        })
    }

    /// For an elastic job.
    pub fn start_elastic(reach: Reach, interfaces: &[String]) -> Result<Self, RendezvousError> {
        Self::serve(reach, interfaces, None, ServerConfig::elastic)
    }

    fn serve(
        reach: Reach,
        interfaces: &[String],
        key: Option<JobKey>,
        config: impl FnOnce(Vec<IpAddr>, JobKey) -> ServerConfig,
    ) -> Result<Self, RendezvousError> {
        let key = match key {
            Some(key) => key,
            None => JobKey::random().map_err(RendezvousError::Key)?,
        };
        let bind = reach.addresses(interfaces)?;
        let mut config = config(bind, key.clone());
        if config.ports == Ports::Any {
            config.ports = environment::ports().map_err(RendezvousError::Ports)?;
        }
        let server = Server::start(config).map_err(RendezvousError::Listen)?;
        let mut addresses = server.addrs().to_vec();
        // To another host the loopback is itself.
        if addresses.iter().any(|address| !address.ip().is_loopback()) {
            addresses.retain(|address| !address.ip().is_loopback());
        }
        addresses.sort_by_key(SocketAddr::is_ipv6);
        Ok(Self {
            server,
            key,
            addresses,
            rounds: 0,
            silent: BTreeMap::new(),
            absent: Vec::new(),
            unreachable: None,
        })
    }

    /// Where the ranks find each other, for [`crate::executor::assign`].
    pub fn rendezvous(&self) -> RendezvousSource {
        RendezvousSource::At {
            addresses: self.addresses.clone(),
            key: self.key.clone(),
        }
    }

    /// The job's key, as ranks get it.
    pub fn key(&self) -> String {
        self.key.to_hex()
    }

    /// Where ranks reach it.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The server itself.
    pub(crate) fn server(&self) -> &Server {
        &self.server
    }

    /// Tells all ranks that one of them died, on this host and from this cause; their errors say so.
    pub fn report_death(&self, rank: u32, host: &str, cause: &str) {
        self.server.report_death(Rank(rank), host, cause);
    }

    /// A rank's process has exited with code 0: ranks that wait for it here get an error.
    pub fn report_end(&self, rank: u32, host: &str) {
        self.server.report_end(Rank(rank), host);
    }

    /// Takes note of what happened, so that the queries below know; in words, what a curious user may want to know.
    pub fn follow(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        while let Some(event) = self.server.poll_event() {
            words.extend(self.note(event));
        }
        words
    }

    fn note(&mut self, event: ServerEvent) -> Option<String> {
        match event {
            ServerEvent::Up(_) => {
                self.rounds += 1;
                // All ranks have met, so an earlier cause is stale.
                self.unreachable = None;
                return Some("all ranks have met".to_owned());
            }
            ServerEvent::Silent { who, by } => {
                self.silent.entry(who).or_insert(by);
            }
            ServerEvent::Unreachable(why) => self.unreachable = Some(why),
            ServerEvent::Absent(ranks) => self.absent = ranks.iter().map(|r| r.0).collect(),
            ServerEvent::Failed(why) => return Some(format!("the ranks did not meet: {why}")),
            _ => {}
        }
        None
    }

    /// Ranks that others have given up because they do not answer, and who said so.
    pub fn silent(&self) -> &BTreeMap<u32, u32> {
        &self.silent
    }

    /// Ranks that have exited with code 0 while others waited for them here.
    pub fn absent(&self) -> &[u32] {
        &self.absent
    }

    /// A rank cannot reach this rendezvous, as its agent tells: all ranks get an error.
    pub(crate) fn report_unreached(&self, report: Unreached) {
        self.server.report_unreached(report);
    }

    /// Why ranks cannot connect, as all ranks are told; once.
    pub(crate) fn take_unreachable(&mut self) -> Option<String> {
        self.unreachable.take()
    }

    /// Whether all ranks have ever met, so that they notice when one is lost.
    pub fn has_met(&self) -> bool {
        self.rounds > 0
    }

    /// How often all ranks have met.
    pub fn rounds(&self) -> u32 {
        self.rounds
    }
}

#[cfg(test)]
mod tests {
    use horovod_protocol::Generation;

    use super::*;

    #[test]
    fn what_kept_ranks_apart_is_over_when_they_have_met() {
        let mut rendezvous = Rendezvous::start(2, Reach::ThisHost, &[]).unwrap();
        rendezvous.note(ServerEvent::Unreachable("a firewall".into()));
        rendezvous.note(ServerEvent::Up(Generation(1)));
        assert_eq!(rendezvous.take_unreachable(), None);
        // After they have met they may be unable to make their links.
        rendezvous.note(ServerEvent::Unreachable("a firewall".into()));
        assert_eq!(rendezvous.take_unreachable().as_deref(), Some("a firewall"));
        assert_eq!(rendezvous.take_unreachable(), None);
    }
}

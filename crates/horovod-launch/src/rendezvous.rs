//! The job's meeting point: where it listens, what it tells about the ranks.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use horovod_protocol::Rank;
use horovod_transport::rendezvous::{Server, ServerConfig, ServerEvent};
use horovod_transport::{JobKey, resolve_interfaces};

use crate::launch::LaunchError;

/// Serves one job.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    server: Server,
    key: JobKey,
    addresses: Vec<SocketAddr>,
    has_met: bool,
    /// Ranks that do not answer, and who said so.
    silent: BTreeMap<u32, u32>,
}

impl Rendezvous {
    /// Listens on the loopback for a job on this host alone, else on these interfaces or all.
    pub(crate) fn start(
        size: u32,
        all_local: bool,
        wanted: &[String],
    ) -> Result<Self, LaunchError> {
        Self::serve(all_local, wanted, |bind, key| {
            ServerConfig::new(bind, key, size)
        })
    }

    /// The same for an elastic job.
    pub(crate) fn start_elastic(all_local: bool, wanted: &[String]) -> Result<Self, LaunchError> {
        Self::serve(all_local, wanted, ServerConfig::elastic)
    }

    fn serve(
        all_local: bool,
        wanted: &[String],
        config: impl FnOnce(Vec<IpAddr>, JobKey) -> ServerConfig,
    ) -> Result<Self, LaunchError> {
        let key = JobKey::random()?;
        // A name that does not exist is a mistake also where it would not be used.
        let chosen = resolve_interfaces(wanted)
            .map_err(|error| LaunchError::Wrong(format!("--network-interfaces: {error}")))?;
        let bind: Vec<IpAddr> = if all_local {
            vec![Ipv4Addr::LOCALHOST.into()]
        } else if chosen.is_empty() {
            vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()]
        } else {
            chosen
        };
        let server = Server::start(config(bind, key.clone())).map_err(|error| {
            LaunchError::Other(format!("the ranks would have nowhere to meet: {error}"))
        })?;
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
            has_met: false,
            silent: BTreeMap::new(),
        })
    }

    /// The job's key, as ranks get it.
    pub(crate) fn key(&self) -> String {
        self.key.to_hex()
    }

    /// Where ranks reach it.
    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The server itself.
    pub(crate) fn server(&self) -> &Server {
        &self.server
    }

    /// Tells all ranks that one of them died.
    pub(crate) fn report_death(&self, rank: u32, host: &str, cause: &str) {
        self.server.report_death(Rank(rank), host, cause);
    }

    /// Takes note of what happened; in words, what a curious user may want to know.
    pub(crate) fn follow(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        while let Some(event) = self.server.poll_event() {
            match event {
                ServerEvent::Up(_) => {
                    self.has_met = true;
                    words.push("all ranks have met".to_owned());
                }
                ServerEvent::Silent { who, by } => {
                    self.silent.entry(who).or_insert(by);
                }
                ServerEvent::Failed(why) => words.push(format!("the ranks did not meet: {why}")),
                _ => {}
            }
        }
        words
    }

    /// Ranks that others have given up because they do not answer, and who said so.
    pub(crate) fn silent(&self) -> &BTreeMap<u32, u32> {
        &self.silent
    }

    /// Whether all ranks have ever met, so that they notice when one is lost.
    pub(crate) fn has_met(&self) -> bool {
        self.has_met
    }
}

//! The first step of joining: a connection to the rendezvous at one of its possible addresses.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::{
    ConnectError, MeshConfig, RendezvousPlace,
    dial::{Dial, Target, pause},
};
use crate::{
    handshake::{Binding, Purpose, SERVER},
    platform::fd::Fd,
    rendezvous::Client,
    unreached::{ANSWER_WITHIN, Goal, Unreached, cause, post},
    wait::poll_until,
};

/// How often the pause between two calls of the finder doubles. Name servers and shared file systems must bear the
/// calls of all ranks.
const DOUBLINGS: u32 = 5;
/// Interval of the checks whether the caller wants to abort.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// Percentage of the timeout in which rank 0 must be reached if a lasting failure was seen. Rank 0 gives up missing
/// ranks later ([`super::talk`]), so the ranks with a known cause can report it first. Without such a failure rank 0
/// may only be late, and the full timeout applies.
const REACH_PERCENT: u32 = 85;

/// Connects to the candidate address of the rendezvous that answers first. Afterwards `config` has the key of this
/// rendezvous.
pub(super) fn register(config: &mut MeshConfig, deadline: Instant) -> Result<Client, ConnectError> {
    let mut search = Search::new(config);
    let started = deadline - config.timeout;
    loop {
        let now = Instant::now();
        search.poll(config, now);
        for dial in &mut search.dials {
            if let Some(stream) = dial.step(now, &config.key) {
                return Ok(Client::new(stream));
            }
        }
        // Without free descriptors no further attempt can succeed.
        if let Some(source) = search.dials.iter_mut().find_map(Dial::take_exhausted) {
            return Err(ConnectError::System {
                rank: config.rank,
                what: "cannot connect to the rendezvous",
                source,
            });
        }
        let deadline = search.deadline(config, deadline);
        if now >= deadline || search.has_failed_for_good(config) || search.is_futile(config, now) {
            return Err(search.error(config, now - started));
        }
        if now >= started + config.timeout / 2 {
            search.warn(config, deadline - now);
        }
        let next = search
            .dials
            .iter()
            .filter_map(Dial::deadline)
            .chain(search.poll_at)
            .chain([deadline])
            .min();
        wait_for(config, search.dials.iter().filter_map(Dial::wait), next)?;
    }
}

/// The addresses to try, and the results so far.
struct Search {
    binding: Binding,
    dials: Vec<Dial>,
    /// When to call the finder next.
    poll_at: Option<Instant>,
    polls: u32,
    not_found: Option<String>,
    has_warned: bool,
}

impl Search {
    fn new(config: &MeshConfig) -> Self {
        let binding = Binding {
            purpose: Purpose::Rendezvous,
            lane: 0,
            sealed: true,
            generation: 0,
            from: config.rank.0,
            to: SERVER,
        };
        let mut search = Self {
            binding,
            dials: Vec::new(),
            poll_at: None,
            polls: 0,
            not_found: None,
            has_warned: false,
        };
        match &config.finder {
            Some(_) => search.poll_at = Some(Instant::now()),
            None => search.dial(config),
        }
        search
    }

    fn dial(&mut self, config: &MeshConfig) {
        let now = Instant::now();
        let dial = |at: &std::net::SocketAddr| Dial::new(self.binding, vec![Target::Tcp(*at)], now);
        self.dials = config.rendezvous.iter().map(dial).collect();
    }

    /// Calls the finder when it is due. Its result may change until the rendezvous answers.
    fn poll(&mut self, config: &mut MeshConfig, now: Instant) {
        let Some(finder) = config
            .finder
            .clone()
            .filter(|_| self.poll_at.is_some_and(|at| now >= at))
        else {
            return;
        };
        match finder.find() {
            Ok(RendezvousPlace { addresses, key }) => {
                self.not_found = None;
                let is_known = !self.dials.is_empty()
                    && addresses == config.rendezvous
                    && key.bytes() == config.key.bytes();
                if !is_known {
                    config.rendezvous = addresses;
                    config.key = key;
                    self.dial(config);
                }
            }
            Err(why) => self.not_found = Some(why),
        }
        self.polls += 1;
        self.poll_at = Some(Instant::now() + pause(self.polls, DOUBLINGS));
    }

    /// Returns whether further attempts cannot help.
    fn has_failed_for_good(&self, config: &MeshConfig) -> bool {
        config.finder.is_none() && self.dials.iter().all(Dial::has_failed_for_good)
    }

    /// Returns when the attempts end.
    fn deadline(&self, config: &MeshConfig, latest: Instant) -> Instant {
        match config.finder.is_some() && self.dials.iter().any(Dial::is_obstructed) {
            true => latest - config.timeout * (100 - REACH_PERCENT) / 100,
            false => latest,
        }
    }

    /// Returns whether to give up. The launcher listened before this process began, so its silence is a failure. Rank 0
    /// may begin later, so attempts continue. A worker of an elastic job also continues, because it may have the
    /// training state.
    fn is_futile(&self, config: &MeshConfig, now: Instant) -> bool {
        config.finder.is_none()
            && config.elastic.is_none()
            && self
                .dials
                .iter()
                .all(|dial| dial.is_futile(now, config.timeout))
    }

    /// Returns the error of an attempt without an answer. It has the same text on all ranks that have a launcher.
    fn error(&self, config: &MeshConfig, waited: Duration) -> ConnectError {
        let report = match (self.report(config), &config.elastic) {
            (Some(report), None) => return ConnectError::Aborted(common_cause(config, &report)),
            (report, _) => report,
        };
        ConnectError::Rendezvous {
            rank: config.rank,
            waited,
            tried: report.map_or_else(|| self.failures(), |report| vec![cause(&[report], "")]),
        }
    }

    /// Returns the report of this rank, or `None` if it had no address to try.
    fn report(&self, config: &MeshConfig) -> Option<Unreached> {
        let tried: Vec<_> = self.dials.iter().flat_map(Dial::tried).collect();
        let goal = match config.finder {
            Some(_) => Goal::RankZero,
            None => Goal::Launcher,
        };
        let goals = vec![(goal, tried)];
        let report = || Unreached::new(config.rank, &config.hostname, &config.interfaces, goals);
        (!self.dials.is_empty()).then(report)
    }

    /// Logs once the attempts so far, because another process may end this one before it gives up. Only for jobs with a
    /// finder.
    fn warn(&mut self, config: &MeshConfig, left: Duration) {
        if self.has_warned || config.finder.is_none() {
            return;
        }
        self.has_warned = true;
        let left = left.as_secs();
        match self.report(config) {
            Some(report) => tracing::warn!(
                "not connected yet, trying for {left} s more: {} (or rank 0 has not called hvd.init() yet)",
                cause(&[report], "")
            ),
            None => tracing::warn!(
                "{} has not found rank 0 yet, looking for {left} s more: {}",
                config.rank,
                self.failures().join("; ")
            ),
        }
    }

    fn failures(&self) -> Vec<String> {
        let dials = self.dials.iter().flat_map(Dial::failures);
        let tried: Vec<String> = self.not_found.iter().cloned().chain(dials).collect();
        if tried.is_empty() {
            return vec!["there is no address to try".into()];
        }
        tried
    }
}

/// Returns the cause that the launcher determines from the reports of all ranks. Without a launcher, the cause follows
/// from the report of this rank alone.
fn common_cause(config: &MeshConfig, report: &Unreached) -> String {
    let wants_to_leave = || {
        let interrupt = config.interrupt.as_ref();
        interrupt.is_some_and(|interrupt| interrupt.wants_to_leave())
    };
    // With a finder this job has no launcher of its own: the post then belongs to an enclosing job.
    let post = config.post.as_ref().filter(|_| config.finder.is_none());
    post.and_then(|name| post::send_report(name, report, ANSWER_WITHIN, &wants_to_leave))
        .unwrap_or_else(|| cause(std::slice::from_ref(report), ""))
}

/// Waits until an attempt can continue. Returns an error if the caller wants to abort.
pub(super) fn wait_for<'a>(
    config: &MeshConfig,
    waits: impl Iterator<Item = (&'a Fd, bool)>,
    until: Option<Instant>,
) -> Result<(), ConnectError> {
    let poll_fd = |(fd, write): (&'a Fd, bool)| {
        let flags = if write { PollFlags::OUT } else { PollFlags::IN };
        fd.get().ok().map(|fd| PollFd::from_borrowed_fd(fd, flags))
    };
    let mut fds: Vec<PollFd<'_>> = waits.filter_map(poll_fd).collect();
    let Some(interrupt) = &config.interrupt else {
        poll_until(&mut fds, until);
        return Ok(());
    };
    let ask = Instant::now() + ASK_EVERY;
    poll_until(&mut fds, Some(until.map_or(ask, |until| until.min(ask))));
    if interrupt.wants_to_leave() {
        return Err(ConnectError::Interrupted { rank: config.rank });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use horovod_protocol::Rank;

    use super::*;
    use crate::JobKey;
    use crate::rendezvous::{Common, MemberEntry, Server, ServerConfig, ToClient, ToServer};

    #[test]
    fn a_rank_that_is_sent_away_is_hung_up_on_without_a_word_of_its_own() {
        let key = JobKey::random().unwrap();
        let here = vec![std::net::Ipv4Addr::LOCALHOST.into()];
        let server = Server::start(ServerConfig::new(here, key.clone(), 2)).unwrap();
        let mut config = MeshConfig::new(Rank(0), 2, key, server.addrs().to_vec());
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut client = register(&mut config, deadline).unwrap();
        let hello = ToServer::Hello {
            rank: 0,
            size: 2,
            wait_timeout_ms: 1,
            member: MemberEntry {
                identity: "machine".into(),
                hostname: "host".into(),
                pid: 1,
                shm: false,
            },
            common: Common {
                connections: 1,
                fan_out: 8,
                heartbeat: None,
                checksums: true,
                settings: Vec::new(),
            },
        };
        client.send(&hello).unwrap();
        let mut report = None;
        // An error is the end of the connection.
        while let Ok(message) = client.next() {
            assert!(Instant::now() < deadline, "still open after {report:?}");
            match message {
                Some(message) => report = Some(message),
                None => wait_for(
                    &config,
                    [(&**client.fd(), false)].into_iter(),
                    Some(deadline),
                )
                .unwrap(),
            }
        }
        assert_eq!(report, Some(ToClient::Missing { ranks: vec![1] }));
    }
}

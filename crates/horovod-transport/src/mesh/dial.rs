//! One outgoing connection: candidates in turn, each with a limit, until one stands.

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    JobKey,
    handshake::{Binding, HandshakeError, Initiator},
    platform::{self, fd::Fd, net},
    probe::Obstacle,
    tcp::stream::Stream,
};

/// Longest time for one candidate (connecting and handshake): a black hole must not eat it all.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Pause before all candidates are tried again: the first, which doubles until the last.
const PAUSE: Duration = Duration::from_millis(50);
const DOUBLINGS: u32 = 3;
/// When every candidate has failed for so long, of causes that only a person can change, it is abandoned. Two attempts
/// at an address that answers nothing take as long.
const FUTILE_AFTER: Duration = ATTEMPT.saturating_mul(2);

/// Longer with every round, and different for everybody: thousands of ranks may wait for the same one.
pub(super) fn pause(rounds: u32, doublings: u32) -> Duration {
    let pause = PAUSE * (1 << rounds.saturating_sub(1).min(doublings));
    let chance = platform::random::<1>().map_or(128, |[byte]| u32::from(byte));
    pause / 2 + pause * chance / 255
}

/// Where to connect to.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    Tcp(SocketAddr),
    Local(String),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(at) => at.fmt(f),
            Self::Local(_) => f.write_str("its local socket"),
        }
    }
}

enum State {
    Pausing {
        until: Instant,
    },
    Connecting {
        fd: Arc<Fd>,
        until: Instant,
    },
    Shaking {
        initiator: Box<Initiator>,
        until: Instant,
    },
    Done,
}

/// What happened at one candidate.
#[derive(Clone, Debug)]
struct Failure {
    why: Obstacle,
    /// The network or who answers is at fault: not the load of who should answer, nor a moment too early.
    is_settled: bool,
}

impl Failure {
    fn of_network(error: io::Error) -> Self {
        Self {
            why: error.into(),
            is_settled: true,
        }
    }

    fn of_handshake(error: HandshakeError) -> Self {
        let is_settled = matches!(
            error,
            HandshakeError::Key | HandshakeError::Version { .. } | HandshakeError::Stranger
        );
        let why = match error {
            HandshakeError::Io(error) => Obstacle::Handshake(error.to_string()),
            error => error.into(),
        };
        Self { why, is_settled }
    }

    fn unsettled(why: Obstacle) -> Self {
        Self {
            why,
            is_settled: false,
        }
    }
}

/// The attempt to make one connection.
pub(crate) struct Dial {
    pub(crate) binding: Binding,
    targets: Vec<Target>,
    failures: Vec<Option<Failure>>,
    since: Instant,
    next: usize,
    /// How often all candidates have failed.
    rounds: u32,
    state: State,
    /// A cause that trying again cannot change.
    failed_for_good: bool,
    /// What this process has run out of.
    exhausted: Option<io::Error>,
}

impl Dial {
    pub(crate) fn new(binding: Binding, targets: Vec<Target>, now: Instant) -> Self {
        let failures = vec![None; targets.len()];
        let state = State::Pausing { until: now };
        Self {
            binding,
            targets,
            failures,
            since: now,
            next: 0,
            rounds: 0,
            state,
            failed_for_good: false,
            exhausted: None,
        }
    }

    /// What this process has run out of, when that is why it cannot connect.
    pub(super) fn take_exhausted(&mut self) -> Option<io::Error> {
        self.exhausted.take()
    }

    /// What to wait for.
    pub(crate) fn wait(&self) -> Option<(&Fd, bool)> {
        match &self.state {
            State::Pausing { .. } | State::Done => None,
            State::Connecting { fd, .. } => Some((fd, true)),
            State::Shaking { initiator, .. } => Some((initiator.fd(), initiator.wants_write())),
        }
    }

    /// When to call [`Self::step`] at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Pausing { until } => (!self.failed_for_good).then_some(*until),
            State::Connecting { until, .. } | State::Shaking { until, .. } => Some(*until),
            State::Done => None,
        }
    }

    /// Whether every candidate failed for a reason that will not change.
    pub(crate) fn has_failed_for_good(&self) -> bool {
        self.failed_for_good
    }

    /// Whether every candidate has failed for so long that trying on is in vain. `timeout` is how long it may take at
    /// most: where that is short, half of it is long enough, so that there is time to tell others.
    pub(crate) fn is_futile(&self, now: Instant, timeout: Duration) -> bool {
        let has_failed = |failure: &Option<Failure>| failure.as_ref().is_some_and(|f| f.is_settled);
        now >= self.since + FUTILE_AFTER.min(timeout / 2)
            && !matches!(self.state, State::Shaking { .. })
            && self.failures.iter().all(has_failed)
    }

    /// Each address that was tried, and what came back.
    pub(crate) fn tried(&self) -> Vec<(SocketAddr, Obstacle)> {
        let tried = self.targets.iter().zip(&self.failures);
        tried
            .filter_map(|(target, failure)| match target {
                Target::Tcp(at) => {
                    let why = failure.as_ref().map(|failure| failure.why.clone());
                    Some((*at, why.unwrap_or(Obstacle::Silence)))
                }
                Target::Local(_) => None,
            })
            .collect()
    }

    /// What happened at each candidate.
    pub(crate) fn failures(&self) -> Vec<String> {
        if self.targets.is_empty() {
            return vec!["it has no address".into()];
        }
        let failures = self.targets.iter().zip(&self.failures);
        failures
            .map(|(target, failure)| match failure {
                Some(failure) => format!("{target}: {}", failure.why),
                None => format!("{target}: {}", Obstacle::Silence),
            })
            .collect()
    }

    /// Goes on as far as possible; `Some` when the connection stands.
    pub(crate) fn step(&mut self, now: Instant, key: &JobKey) -> Option<Stream> {
        loop {
            match std::mem::replace(&mut self.state, State::Done) {
                State::Done => return None,
                State::Pausing { until } => {
                    if now < until || self.failed_for_good || self.targets.is_empty() {
                        self.state = State::Pausing { until };
                        return None;
                    }
                    let started = match &self.targets[self.next] {
                        Target::Tcp(at) => net::tcp_connect(*at),
                        Target::Local(name) => net::unix_connect(name),
                    };
                    match started {
                        Ok(fd) => {
                            self.state = State::Connecting {
                                fd,
                                until: now + ATTEMPT,
                            }
                        }
                        Err(e) if net::is_exhausted(&e) => {
                            self.fail(now, Failure::unsettled(Obstacle::Other(e.to_string())));
                            self.exhausted = Some(e);
                        }
                        Err(e) => self.fail(now, Failure::of_network(e)),
                    }
                }
                State::Connecting { fd, until } => match net::connected(&fd) {
                    Ok(Some(())) => match Initiator::new(fd, key, self.binding) {
                        Ok(initiator) => {
                            let initiator = Box::new(initiator);
                            self.state = State::Shaking { initiator, until };
                        }
                        Err(e) => self.fail(now, Failure::of_handshake(e)),
                    },
                    Ok(None) if now < until => {
                        self.state = State::Connecting { fd, until };
                        return None;
                    }
                    Ok(None) => {
                        self.fail(now, Failure::of_network(rustix::io::Errno::TIMEDOUT.into()));
                    }
                    Err(e) => self.fail(now, Failure::of_network(e)),
                },
                State::Shaking {
                    mut initiator,
                    until,
                } => match initiator.step() {
                    Ok(Some(stream)) => return Some(stream),
                    Ok(None) if now < until => {
                        self.state = State::Shaking { initiator, until };
                        return None;
                    }
                    Ok(None) => {
                        let why = "it took the connection and said nothing".to_owned();
                        self.fail(now, Failure::unsettled(Obstacle::Handshake(why)));
                    }
                    Err(e) => {
                        let for_good =
                            matches!(e, HandshakeError::Key | HandshakeError::Version { .. });
                        self.fail(now, Failure::of_handshake(e));
                        // Only a lone candidate can fail for good: behind another address may be the right one.
                        self.failed_for_good = for_good && self.targets.len() == 1;
                    }
                },
            }
        }
    }

    /// Notes a failure and turns to the next candidate, after a pause when all have had their turn.
    fn fail(&mut self, now: Instant, failure: Failure) {
        self.failures[self.next] = Some(failure);
        self.next = (self.next + 1) % self.targets.len();
        let until = if self.next == 0 {
            self.rounds += 1;
            now + pause(self.rounds, DOUBLINGS)
        } else {
            now
        };
        self.state = State::Pausing { until };
    }
}

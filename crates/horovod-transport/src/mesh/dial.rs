//! One outgoing connection: tries the candidate addresses in turn, each with a time limit, until a connection is
//! established.

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

/// Longest time for one candidate (connecting and handshake), so that a silent address does not use up the whole
/// timeout.
const ATTEMPT: Duration = Duration::from_secs(3);
/// First pause before all candidates are tried again. It doubles up to [`DOUBLINGS`] times.
const PAUSE: Duration = Duration::from_millis(50);
const DOUBLINGS: u32 = 3;
/// A dial is abandoned after this long, if every candidate has failed twice for causes that only a person can change.
/// Two attempts at one silent address take this long.
const FUTILE_AFTER: Duration = ATTEMPT.saturating_mul(2);

/// Returns the pause after so many rounds: it grows with each round and is random, because thousands of ranks may wait
/// for the same one.
pub(super) fn pause(rounds: u32, doublings: u32) -> Duration {
    let pause = PAUSE * (1 << rounds.saturating_sub(1).min(doublings));
    let chance = platform::random::<1>().map_or(128, |[byte]| u32::from(byte));
    pause / 2 + pause * chance / 255
}

/// Address of a connection attempt.
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

enum DialState {
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

/// Reason why one candidate could not be reached.
#[derive(Clone, Debug)]
struct Failure {
    why: Obstacle,
    /// Whether the network or the answering program is the cause. Neither load nor an early start explains such a
    /// failure.
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
            // A process that is slow, stopped or about to end causes the same errors as a foreign program.
            HandshakeError::Io(_) | HandshakeError::Closed => Obstacle::Broken(error.to_string()),
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
    state: DialState,
    /// Whether the cause of the failure cannot change by another attempt.
    failed_for_good: bool,
    /// Error of the operating system, if this process has run out of a resource.
    exhausted: Option<io::Error>,
}

impl Dial {
    pub(crate) fn new(binding: Binding, targets: Vec<Target>, now: Instant) -> Self {
        let failures = vec![None; targets.len()];
        let state = DialState::Pausing { until: now };
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

    /// Takes the error that reports an exhausted resource of this process, if there is one.
    pub(super) fn take_exhausted(&mut self) -> Option<io::Error> {
        self.exhausted.take()
    }

    /// Returns the socket to poll, and whether to wait until it is writable.
    pub(crate) fn wait(&self) -> Option<(&Fd, bool)> {
        match &self.state {
            DialState::Pausing { .. } | DialState::Done => None,
            DialState::Connecting { fd, .. } => Some((fd, true)),
            DialState::Shaking { initiator, .. } => Some((initiator.fd(), initiator.wants_write())),
        }
    }

    /// Returns when to call [`Self::step`] at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match &self.state {
            DialState::Pausing { until } => (!self.failed_for_good).then_some(*until),
            DialState::Connecting { until, .. } | DialState::Shaking { until, .. } => Some(*until),
            DialState::Done => None,
        }
    }

    /// Returns whether the only candidate failed for a reason that cannot change.
    pub(crate) fn has_failed_for_good(&self) -> bool {
        self.failed_for_good
    }

    /// Returns whether every candidate has failed so often or for so long that further attempts are futile. One lost
    /// packet at the right address is not enough. `timeout` is the limit of all attempts. Half of it always suffices,
    /// so that time remains to inform the other ranks.
    pub(crate) fn is_futile(&self, now: Instant, timeout: Duration) -> bool {
        let is_settled = |failure: &Option<Failure>| failure.as_ref().is_some_and(|f| f.is_settled);
        let is_long = now >= self.since + timeout / 2
            || (self.rounds >= 2 && now >= self.since + FUTILE_AFTER);
        is_long
            && !matches!(self.state, DialState::Shaking { .. })
            && self.failures.iter().all(is_settled)
    }

    /// Returns whether an attempt failed for a lasting cause other than a refused connection, which only means that no
    /// process listens yet.
    pub(super) fn is_obstructed(&self) -> bool {
        let failures = self.failures.iter().flatten();
        failures
            .filter(|failure| failure.is_settled)
            .any(|failure| failure.why != Obstacle::Refused)
    }

    /// Returns each TCP address that was tried, and its result.
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

    /// Returns each candidate address with its failure, as text.
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

    /// Advances the attempt without blocking. Returns the stream once the connection is established.
    pub(crate) fn step(&mut self, now: Instant, key: &JobKey) -> Option<Stream> {
        loop {
            match std::mem::replace(&mut self.state, DialState::Done) {
                DialState::Done => return None,
                DialState::Pausing { until } => {
                    if now < until || self.failed_for_good || self.targets.is_empty() {
                        self.state = DialState::Pausing { until };
                        return None;
                    }
                    let started = match &self.targets[self.next] {
                        Target::Tcp(at) => net::tcp_connect(*at),
                        Target::Local(name) => net::unix_connect(name),
                    };
                    match started {
                        Ok(fd) => {
                            self.state = DialState::Connecting {
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
                DialState::Connecting { fd, until } => match net::connected(&fd) {
                    Ok(Some(())) => match Initiator::new(fd, key, self.binding) {
                        Ok(initiator) => {
                            let initiator = Box::new(initiator);
                            self.state = DialState::Shaking { initiator, until };
                        }
                        Err(e) => self.fail(now, Failure::of_handshake(e)),
                    },
                    Ok(None) if now < until => {
                        self.state = DialState::Connecting { fd, until };
                        return None;
                    }
                    Ok(None) => {
                        self.fail(now, Failure::of_network(rustix::io::Errno::TIMEDOUT.into()));
                    }
                    Err(e) => self.fail(now, Failure::of_network(e)),
                },
                DialState::Shaking {
                    mut initiator,
                    until,
                } => match initiator.step() {
                    Ok(Some(stream)) => return Some(stream),
                    Ok(None) if now < until => {
                        self.state = DialState::Shaking { initiator, until };
                        return None;
                    }
                    Ok(None) => {
                        let why = "no answer to the handshake in time".to_owned();
                        self.fail(now, Failure::unsettled(Obstacle::Broken(why)));
                    }
                    Err(e) => {
                        let for_good =
                            matches!(e, HandshakeError::Key | HandshakeError::Version { .. });
                        self.fail(now, Failure::of_handshake(e));
                        // Only a single candidate can fail permanently, because another address may lead to the right
                        // program.
                        self.failed_for_good = for_good && self.targets.len() == 1;
                    }
                },
            }
        }
    }

    /// Records a failure and selects the next candidate, after a pause if all candidates were tried.
    fn fail(&mut self, now: Instant, failure: Failure) {
        self.failures[self.next] = Some(failure);
        self.next = (self.next + 1) % self.targets.len();
        let until = if self.next == 0 {
            self.rounds += 1;
            now + pause(self.rounds, DOUBLINGS)
        } else {
            now
        };
        self.state = DialState::Pausing { until };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::Purpose;

    const LONG: Duration = Duration::from_secs(60);

    fn dial(targets: usize, now: Instant) -> Dial {
        let binding = Binding {
            purpose: Purpose::Data,
            lane: 0,
            sealed: false,
            generation: 1,
            from: 1,
            to: 0,
        };
        let at = Target::Tcp(SocketAddr::from(([127, 0, 0, 1], 1)));
        Dial::new(binding, vec![at; targets], now)
    }

    fn silence() -> Failure {
        Failure::of_network(rustix::io::Errno::TIMEDOUT.into())
    }

    #[test]
    fn one_failed_attempt_at_the_good_address_is_not_futile() {
        let start = Instant::now();
        let mut dial = dial(2, start);
        assert!(!dial.is_futile(start + FUTILE_AFTER, LONG));
        // The one leads nowhere, the other loses a packet.
        dial.fail(start + ATTEMPT, silence());
        assert!(!dial.is_futile(start + FUTILE_AFTER, LONG));
        dial.fail(start + 2 * ATTEMPT, silence());
        assert!(!dial.is_futile(start + FUTILE_AFTER, LONG));
        dial.fail(start + 3 * ATTEMPT, silence());
        assert!(!dial.is_futile(start + 3 * ATTEMPT, LONG));
        dial.fail(start + 4 * ATTEMPT, silence());
        assert!(dial.is_futile(start + 4 * ATTEMPT, LONG));
        // With many addresses there is no time for a second round.
        let mut dial = super::tests::dial(9, start);
        (0..9).for_each(|_| dial.fail(start, silence()));
        assert!(!dial.is_futile(start + FUTILE_AFTER, LONG));
        assert!(dial.is_futile(start + LONG / 2, LONG));
    }

    #[test]
    fn what_load_or_an_early_start_explains_is_not_futile() {
        let start = Instant::now();
        let late = start + FUTILE_AFTER;
        for (error, is_futile) in [
            (HandshakeError::Closed, false),
            (HandshakeError::Unexpected, false),
            (HandshakeError::Key, true),
            (HandshakeError::Stranger, true),
        ] {
            let mut dial = dial(1, start);
            dial.fail(start, silence());
            dial.fail(start, Failure::of_handshake(error));
            assert_eq!(
                dial.is_futile(late, LONG),
                is_futile,
                "{:?}",
                dial.failures()
            );
            assert_eq!(dial.is_obstructed(), is_futile);
        }
        let mut dial = dial(1, start);
        dial.fail(start, silence());
        dial.fail(
            start,
            Failure::of_network(rustix::io::Errno::CONNREFUSED.into()),
        );
        // Nobody listens: that may be too early, but only where who listens begins later.
        assert!(!dial.is_obstructed());
        assert!(dial.is_futile(late, LONG));
    }

    #[test]
    fn a_peer_that_hangs_up_is_no_stranger() {
        let broken = Failure::of_handshake(HandshakeError::Closed);
        assert!(matches!(broken.why, Obstacle::Broken(_)));
        let reset = HandshakeError::Io(rustix::io::Errno::CONNRESET.into());
        assert!(matches!(
            Failure::of_handshake(reset).why,
            Obstacle::Broken(_)
        ));
        let other = Failure::of_handshake(HandshakeError::Key);
        assert!(matches!(other.why, Obstacle::Handshake(_)));
    }

    #[test]
    fn a_short_time_limit_leaves_time_to_tell_others() {
        let start = Instant::now();
        let short = FUTILE_AFTER;
        let mut dial = dial(1, start);
        dial.fail(start, silence());
        assert!(!dial.is_futile(start + short / 2 - Duration::from_millis(1), short));
        assert!(dial.is_futile(start + short / 2, short));
    }
}

//! The end of agents: how long they may take, and what is done about those that take longer.

use std::io;
use std::time::{Duration, Instant};

use crate::agent::{INTERRUPT_GRACE, LEFTOVER_GRACE};
use crate::environment;
use crate::frames::Stop;
use crate::io::{Interest, wait};
use crate::link::HostLink;
use crate::options::Options;
use crate::platform;
use crate::signals::Signals;

/// Seconds from SIGTERM to SIGKILL, unless told otherwise: a script may write its checkpoint.
const TERMINATE_TIMEOUT_S: u32 = 30;
/// Time, beyond all graces, for an agent to report that its ranks have ended.
const AGENT_GRACE: Duration = Duration::from_secs(5);
/// How long the last output may wait for a reader after a signal.
pub(crate) const CONSOLE_GRACE: Duration = Duration::from_secs(2);

/// When agents that have not ended are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kill {
    /// They have started nothing.
    AtOnce,
    AfterGrace,
}

/// Seconds that ranks may take to end after SIGTERM.
pub(crate) fn terminate_timeout_of(options: &Options) -> u32 {
    options
        .terminate_timeout
        .or_else(environment::terminate_timeout)
        .unwrap_or(TERMINATE_TIMEOUT_S)
}

/// Waits for the agents' processes, and kills those that remain.
pub(crate) fn let_go(links: &mut [HostLink], signals: &mut Signals, kill: Kill) -> io::Result<()> {
    let deadline = Instant::now() + AGENT_GRACE;
    for link in links.iter_mut() {
        link.hang_up();
    }
    while links.iter_mut().any(|link| !link.has_ended()) {
        let now = Instant::now();
        if now >= deadline || kill == Kill::AtOnce {
            links.iter_mut().for_each(HostLink::kill);
        }
        let _ = signals.take();
        wait(
            &[Interest::read(signals.as_fd())],
            Some(now + Duration::from_millis(100)),
        )?;
    }
    // An agent that was killed leaves the descendants of its ranks to us.
    while Instant::now() < deadline + AGENT_GRACE && links.iter().all(|link| link.is_local) {
        while let Ok(Some(_)) = rustix::process::wait(rustix::process::WaitOptions::NOHANG) {}
        let left = platform::descendants();
        if left.is_empty() {
            break;
        }
        for pid in left {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        wait(&[], Some(Instant::now() + Duration::from_millis(10)))?;
    }
    Ok(())
}

/// From a request until its agent must have said that all is over.
pub(crate) fn agent_limit(how: Stop, options: &Options) -> Duration {
    let terminate = Duration::from_secs(terminate_timeout_of(options).into());
    AGENT_GRACE
        + match how {
            Stop::Interrupt => INTERRUPT_GRACE + terminate + LEFTOVER_GRACE,
            Stop::Terminate => terminate + LEFTOVER_GRACE,
            Stop::Kill => Duration::ZERO,
        }
}

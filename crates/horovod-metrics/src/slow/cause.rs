//! The likely cause for which a rank is slow, by its own figures and those of its host.

use std::fmt;

use super::Row;
use super::judge::{Change, Suspect};
use crate::figures::HostFigures;

/// A cause explains the delay if it takes at least this part of it.
const PART_OF_DELAY: f64 = 0.5;
/// A slow rank computes longer than the others by at least this part of the delay; otherwise its messages are late.
const PART_COMPUTED: f64 = 0.25;
/// Least share of its processors that a host loses to the hypervisor.
const STEAL_MIN: f64 = 0.05;
/// A host with less available memory than this share is short of it.
const AVAILABLE_MIN: f64 = 0.03;
/// A host that moves so many bytes into swap meanwhile is short of memory.
const SWAPPED_MIN: u64 = 16 << 20;
/// A process that computes uses a processor for at least this share of the time.
const RUNNING_MIN: f64 = 0.7;
/// On a host with too many processes all ranks run less. A rank is slow for this reason only if its process runs less
/// than this part of the time for which the others run.
const RUNNING_PART: f64 = 0.8;
/// Least share of a host's processors that processes outside the job use.
const OTHERS_MIN: f64 = 0.1;

/// The likely cause for which a rank or a host is slow. Shares are from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cause {
    /// It waits for input, which the script has marked, for this share of its time; the others for the second.
    Input(f64, f64),
    /// It computes no longer than the others, so its messages are late.
    Network,
    /// Its host is short of memory: available and total bytes.
    Memory(u64, u64),
    /// The hypervisor gives this share of its host's processors to other machines.
    Steal(f64),
    /// Processes outside the job use this share of its host's processors.
    OtherProcesses(f64),
    /// Its process uses a processor for this share only of the time in which it waits for no rank.
    NotRunning(f64),
    /// It computes for this share of its time; the others for the second.
    Computing(f64, f64),
    /// No figure says why.
    Unknown,
}

impl Cause {
    /// A name of one word, for programs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Input(..) => "input",
            Self::Network => "network",
            Self::Memory(..) => "memory",
            Self::Steal(_) => "steal",
            Self::OtherProcesses(_) => "other_processes",
            Self::NotRunning(_) => "not_running",
            Self::Computing(..) => "computing",
            Self::Unknown => "unknown",
        }
    }

    /// The cause for which `suspect` delays the others for this share of their time. `None`: a rank has no figures.
    pub(super) fn of(suspect: Suspect, change: &Change<'_>, delay: f64) -> Option<Self> {
        let own = |get| change.share(|row| suspect.includes(row), get);
        let others = |get| change.share(|row| !suspect.includes(row), get);
        let input = (own(|f| f.input)?, others(|f| f.input)?);
        if input.0 - input.1 >= PART_OF_DELAY * delay {
            return Some(Self::Input(input.0, input.1));
        }
        let computing = (own(|f| f.computing)?, others(|f| f.computing)?);
        let host = change.rows().find(|(_, row)| suspect.includes(row))?.1.host;
        let has_other_hosts = change.rows().any(|(_, row)| row.host != host);
        if computing.0 - computing.1 < PART_COMPUTED * delay {
            return Some(match has_other_hosts {
                true => Self::Network,
                false => Self::Unknown,
            });
        }
        let of_host = HostChange::of(host, change);
        if let Some(cause) = of_host.as_ref().and_then(HostChange::shortage) {
            return Some(cause);
        }
        let running = own(|f| f.cpu)? / computing.0.max(f64::EPSILON);
        // Threads that wait may poll, which takes processor time, too.
        let others_run = (others(|f| f.cpu)? / computing.1.max(f64::EPSILON)).min(1.0);
        if running < RUNNING_MIN && running < RUNNING_PART * others_run {
            return Some(match of_host {
                Some(host) if host.other_processes >= OTHERS_MIN => {
                    Self::OtherProcesses(host.other_processes)
                }
                _ => Self::NotRunning(running),
            });
        }
        Some(Self::Computing(computing.0, computing.1))
    }
}

/// The change of the processors and the memory of a host between two samples.
struct HostChange<'a> {
    before: &'a HostFigures,
    after: &'a HostFigures,
    /// Shares of the time of all processors.
    steal: f64,
    other_processes: f64,
}

impl<'a> HostChange<'a> {
    /// `None`: the host has no figures, for instance because its system has no tables of them.
    fn of(host: u32, change: &Change<'a>) -> Option<Self> {
        let rows = || change.rows().filter(|(_, row)| row.host == host);
        let figures = |(before, after): (&'a Row, &'a Row)| {
            let elapsed = after.figures.elapsed.saturating_sub(before.figures.elapsed);
            Some((before.of_host.as_ref()?, after.of_host.as_ref()?, elapsed))
        };
        let (before, after, elapsed) = rows().find_map(figures)?;
        let capacity = (elapsed * after.processors) as f64;
        if capacity == 0.0 {
            return None;
        }
        let own = rows().map(|(b, a)| a.figures.cpu.saturating_sub(b.figures.cpu));
        let busy = after.busy.saturating_sub(before.busy);
        let others = busy.saturating_sub(own.sum());
        let steal = after.steal.saturating_sub(before.steal);
        Some(Self {
            before,
            after,
            steal: (steal as f64 / capacity).min(1.0),
            other_processes: (others as f64 / capacity).min(1.0),
        })
    }

    fn shortage(&self) -> Option<Cause> {
        let HostFigures {
            memory, available, ..
        } = *self.after;
        let swapped = self.after.swapped.saturating_sub(self.before.swapped);
        let is_short = memory > 0 && (available as f64) < AVAILABLE_MIN * memory as f64;
        if is_short || swapped >= SWAPPED_MIN {
            return Some(Cause::Memory(available, memory));
        }
        (self.steal >= STEAL_MIN).then_some(Cause::Steal(self.steal))
    }
}

/// A share as a text.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Input(own, others) => write!(
                f,
                "input. It waits for data for {} of its time, the others for {}.",
                percent(own),
                percent(others)
            ),
            Self::Network => write!(
                f,
                "the network of its host. It computes no longer than the others, but its messages come later."
            ),
            Self::Memory(available, memory) => write!(
                f,
                "memory. Its host has {} of {} available.",
                crate::in_bytes(available),
                crate::in_bytes(memory)
            ),
            Self::Steal(share) => write!(
                f,
                "its virtual machine. The hypervisor gives {} of its processors to others.",
                percent(share)
            ),
            Self::OtherProcesses(share) => write!(
                f,
                "other processes. They use {} of the processors of its host.",
                percent(share)
            ),
            Self::NotRunning(share) => write!(
                f,
                "input, a disk or a lock. Its process runs for {} only of the time in which it waits for no rank.",
                percent(share)
            ),
            Self::Computing(own, others) => write!(
                f,
                "more work, or a slower processor. It computes for {} of its time, the others for {}.",
                percent(own),
                percent(others)
            ),
            Self::Unknown => write!(f, "unknown. It computes no longer than the others."),
        }
    }
}

//! The likely cause for which a rank is slow, by its own figures and those of its host.

use std::fmt;

use super::Row;
use super::judge::{Change, Suspect};
use crate::figures::HostFigures;

/// A cause explains a delay if it takes at least this part of the delay.
const PART_OF_DELAY: f64 = 0.5;
/// A slow rank computes longer than the others by at least this part of the delay; otherwise its messages are late.
const PART_COMPUTED: f64 = 0.25;
/// A host loses at least this share more of its processors to the hypervisor than the other hosts.
const STEAL_MIN: f64 = 0.05;
/// A host with less available memory than this share is short of it.
const AVAILABLE_MIN: f64 = 0.03;
/// A host that moves so many bytes into swap, in the compared time, is short of memory.
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
    /// It waits longer for input, which the script has marked.
    Input {
        /// Share of its time.
        own: f64,
        /// Share of the time of the others.
        others: f64,
    },
    /// It computes no longer than the others, so its messages are late.
    Network,
    /// Its host is short of memory.
    Memory {
        /// Bytes that are available now.
        available: u64,
        /// Bytes that the host has.
        of: u64,
        /// Bytes that the host moved into swap in the compared time.
        swapped: u64,
    },
    /// The hypervisor gives this share of its host's processors to other machines.
    Steal(f64),
    /// Processes beside the ranks use this share of its host's processors.
    OtherProcesses(f64),
    /// Its process uses a processor for this share only of its computing time.
    NotRunning(f64),
    /// It computes longer.
    Computing {
        /// Share of its time.
        own: f64,
        /// Share of the time of the others.
        others: f64,
    },
    /// No figure says why.
    Unknown,
}

impl Cause {
    /// A name of one word, for programs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Input { .. } => "input",
            Self::Network => "network",
            Self::Memory { .. } => "memory",
            Self::Steal(_) => "steal",
            Self::OtherProcesses(_) => "other_processes",
            Self::NotRunning(_) => "not_running",
            Self::Computing { .. } => "computing",
            Self::Unknown => "unknown",
        }
    }

    /// Returns the cause of a delay. The others wait for `suspect` for the share `delay` of their time. `None`: a rank has
    /// no figures.
    pub(super) fn of(suspect: Suspect, change: &Change<'_>, delay: f64) -> Option<Self> {
        let own = |get| change.share(|row| suspect.includes(row), get);
        let others = |get| change.share(|row| !suspect.includes(row), get);
        let (own_input, others_input) = (own(|f| f.input)?, others(|f| f.input)?);
        if own_input - others_input >= PART_OF_DELAY * delay {
            return Some(Self::Input {
                own: own_input,
                others: others_input,
            });
        }
        let (own_computing, others_computing) = (own(|f| f.computing)?, others(|f| f.computing)?);
        let host = change.rows().find(|(_, row)| suspect.includes(row))?.1.host;
        let has_other_hosts = change.rows().any(|(_, row)| row.host != host);
        if own_computing - others_computing < PART_COMPUTED * delay {
            return Some(if has_other_hosts {
                Self::Network
            } else {
                Self::Unknown
            });
        }
        let of_host = HostChange::of(host, change);
        // A shortage slows all ranks of a host alike, so only other hosts show that it matters.
        if has_other_hosts && let Some(of_host) = &of_host {
            let others = change
                .rows()
                .map(|(_, row)| row)
                .filter(|row| row.host != host);
            let others = others.filter(|row| row.of_host.is_some());
            let steal = others.filter_map(|row| Some(HostChange::of(row.host, change)?.steal));
            let least_steal = steal.fold(1.0, f64::min);
            if let Some(cause) = of_host.shortage(least_steal) {
                return Some(cause);
            }
        }
        let running = own(|f| f.cpu)? / own_computing.max(f64::EPSILON);
        // Threads that wait may poll, which takes processor time, too.
        let others_run = (others(|f| f.cpu)? / others_computing.max(f64::EPSILON)).min(1.0);
        if running < RUNNING_MIN && running < RUNNING_PART * others_run {
            return Some(match of_host {
                Some(host) if host.other_processes >= OTHERS_MIN => {
                    Self::OtherProcesses(host.other_processes)
                }
                _ => Self::NotRunning(running),
            });
        }
        Some(Self::Computing {
            own: own_computing,
            others: others_computing,
        })
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
        let capacity = elapsed as f64 * after.processors as f64;
        if capacity == 0.0 {
            return None;
        }
        let own = rows().map(|(b, a)| a.figures.cpu.saturating_sub(b.figures.cpu));
        let busy = after.busy.saturating_sub(before.busy);
        let others = busy.saturating_sub(own.fold(0, u64::saturating_add));
        let steal = after.steal.saturating_sub(before.steal);
        Some(Self {
            before,
            after,
            steal: (steal as f64 / capacity).min(1.0),
            other_processes: (others as f64 / capacity).min(1.0),
        })
    }

    /// Returns what the host is short of. `least_steal` is the least share of its processors that another host loses to the
    /// hypervisor.
    fn shortage(&self, least_steal: f64) -> Option<Cause> {
        let HostFigures {
            memory, available, ..
        } = *self.after;
        let swapped = self.after.swapped.saturating_sub(self.before.swapped);
        let is_short = memory > 0 && (available as f64) < AVAILABLE_MIN * memory as f64;
        if is_short || swapped >= SWAPPED_MIN {
            return Some(Cause::Memory {
                available,
                of: memory,
                swapped,
            });
        }
        (self.steal - least_steal >= STEAL_MIN).then_some(Cause::Steal(self.steal))
    }
}

/// A share as a text.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Input { own, others } => {
                let (own, others) = (percent(own), percent(others));
                write!(f, "input. Waiting for data takes {own} of the time there, {others} elsewhere.")
            }
            Self::Network => f.write_str(
                "the network between the hosts. Computing takes no longer there, but messages come later.",
            ),
            Self::Memory {
                available,
                of,
                swapped,
            } => {
                let [available, of, swapped] = [available, of, swapped].map(crate::amounts::in_bytes);
                write!(
                    f,
                    "memory. The host has {available} of {of} available, and moved {swapped} into swap."
                )
            }
            Self::Steal(share) => {
                let share = percent(share);
                write!(f, "other virtual machines. The hypervisor takes {share} of the processors of the host.")
            }
            Self::OtherProcesses(share) => {
                let share = percent(share);
                write!(f, "other processes, such as workers of a data loader. They use {share} of the host.")
            }
            Self::NotRunning(share) => {
                let share = percent(share);
                write!(f, "input, a disk, a lock or an accelerator. A processor is used for only {share} of the computing time.")
            }
            Self::Computing { own, others } => {
                let (own, others) = (percent(own), percent(others));
                write!(f, "more work, or slower hardware. Computing takes {own} of the time there, {others} elsewhere.")
            }
            Self::Unknown => f.write_str("unknown. Computing takes no longer there."),
        }
    }
}

//! Stalled requests, which some members asked for and others have not, as data and as text.

use crate::coordinator::StallConfig;
use crate::error::printable_name;
use crate::join::Joins;
use crate::rank_set::RankSet;
use crate::types::{ProcessSetId, Rank, Time};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Names printed per missing rank; then ` ...`.
const NAMES_SHOWN_MAX: usize = 6;

/// Requests that have waited too long for some of their members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StallReport {
    /// The warning time, in nanoseconds.
    pub warning_ns: u64,
    /// The shutdown time, if there is one, in nanoseconds.
    pub shutdown_ns: Option<u64>,
    /// Whether the job is being shut down because of it.
    pub shutdown: bool,
    /// The late requests, by set and name.
    pub stalled: Vec<StalledRequest>,
}

/// One request that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StalledRequest {
    /// Its process set.
    pub set: ProcessSetId,
    /// Its name.
    pub name: Arc<str>,
    /// Global ranks that asked for it.
    pub waiting: Vec<Rank>,
    /// Global ranks that have neither asked for it nor joined.
    pub missing: Vec<Rank>,
    /// How long the first has been waiting, in nanoseconds.
    pub waited_ns: u64,
}

/// Decides when to look and what to report.
#[derive(Clone, Debug)]
pub(crate) struct StallClock {
    config: Option<StallConfig>,
    next_check: Option<Time>,
}

/// A pending request, as far as inspection cares.
pub(crate) struct WaitingRequest<'a> {
    pub(crate) set: ProcessSetId,
    pub(crate) name: &'a Arc<str>,
    pub(crate) members: &'a [Rank],
    pub(crate) arrived: &'a RankSet,
    pub(crate) joins: &'a Joins,
    pub(crate) since: Time,
    /// When it is due for a report; moved on when it is reported.
    pub(crate) report_at: &'a mut Time,
}

impl StallClock {
    pub(crate) fn new(config: Option<StallConfig>) -> Self {
        let config = config.map(|c| StallConfig {
            warning_ns: c.warning_ns.max(1),
            shutdown_ns: c.shutdown_ns.filter(|limit| *limit >= c.warning_ns),
        });
        Self {
            config,
            next_check: None,
        }
    }

    /// A request starts to wait; returns when it is due for a report. No timer per request: the
    /// one check finds when the next is needed.
    pub(crate) fn started(&mut self, now: Time) -> Time {
        let Some(config) = self.config else {
            return Time(u64::MAX);
        };
        let due = after(now, config.warning_ns);
        self.next_check.get_or_insert(due);
        due
    }

    /// When a request that has waited since `since` is due for its first report.
    pub(crate) fn report_at(&self, since: Time) -> Time {
        self.config
            .map_or(Time(u64::MAX), |config| after(since, config.warning_ns))
    }

    /// Looks again at this time at the latest.
    pub(crate) fn check_by(&mut self, at: Option<Time>) {
        self.next_check = self.next_check.into_iter().chain(at).min();
    }

    pub(crate) fn next_check(&self) -> Option<Time> {
        self.next_check
    }

    pub(crate) fn due(&self, now: Time) -> bool {
        self.next_check.is_some_and(|at| now >= at)
    }

    /// Looks at everything that waits; a report if something is due.
    pub(crate) fn inspect<'a>(
        &mut self,
        now: Time,
        waiting: impl Iterator<Item = WaitingRequest<'a>>,
    ) -> Option<StallReport> {
        let StallConfig {
            warning_ns,
            shutdown_ns,
        } = self.config?;
        let mut report = StallReport {
            warning_ns,
            shutdown_ns,
            shutdown: false,
            stalled: Vec::new(),
        };
        let mut next: Option<Time> = None;
        for request in waiting {
            let waited_ns = now.0.saturating_sub(request.since.0);
            let past_shutdown = shutdown_ns.is_some_and(|limit| waited_ns >= limit);
            report.shutdown |= past_shutdown;
            if now >= *request.report_at || past_shutdown {
                *request.report_at = after(now, warning_ns);
                report.stalled.push(request.describe(now));
            }
            let shutdown_at = shutdown_ns.map(|limit| after(request.since, limit));
            let due = shutdown_at.map_or(*request.report_at, |at| at.min(*request.report_at));
            next = Some(next.map_or(due, |at| at.min(due)));
        }
        self.next_check = next;
        report
            .stalled
            .sort_by(|a, b| (a.set, &a.name).cmp(&(b.set, &b.name)));
        (!report.stalled.is_empty()).then_some(report)
    }
}

impl WaitingRequest<'_> {
    /// Members that have neither asked for it nor joined.
    pub(crate) fn missing(&self) -> impl Iterator<Item = Rank> {
        let members = self.members.iter().copied();
        members.filter(|r| !self.arrived.contains(*r) && !self.joins.contains(*r))
    }

    pub(crate) fn describe(&self, now: Time) -> StalledRequest {
        StalledRequest {
            set: self.set,
            name: Arc::clone(self.name),
            waiting: self.arrived.iter().collect(),
            missing: self.missing().collect(),
            waited_ns: now.0.saturating_sub(self.since.0),
        }
    }
}

fn after(time: Time, ns: u64) -> Time {
    Time(time.0.saturating_add(ns))
}

impl StallReport {
    /// The rank to blame for a shutdown: the lowest that the longest waiting request lacks.
    pub(crate) fn worst(&self) -> Option<(Rank, &StalledRequest)> {
        // The first of the longest, so that equal waits give the same answer everywhere.
        let longest = self
            .stalled
            .iter()
            .rev()
            .max_by_key(|request| request.waited_ns)?;
        Some((*longest.missing.first()?, longest))
    }

    fn past_shutdown(&self, request: &StalledRequest) -> bool {
        self.shutdown_ns
            .is_some_and(|limit| request.waited_ns >= limit)
    }
}

impl fmt::Display for StallReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset \
             of ranks and are waiting for remainder of ranks for more than {} seconds. Usual \
             causes: the ranks call different operations or in a different order, one of them does not \
             make the call at all, or it is slow or stuck elsewhere.\nMissing ranks:",
            seconds(self.warning_ns)
        )?;
        let mut by_rank: BTreeMap<Rank, (bool, Vec<Cow<'_, str>>)> = BTreeMap::new();
        for request in &self.stalled {
            for rank in &request.missing {
                let (marked, names) = by_rank.entry(*rank).or_default();
                *marked |= self.past_shutdown(request);
                names.push(printable_name(&request.name));
            }
        }
        for (rank, (marked, mut names)) in by_rank {
            names.sort_unstable();
            let more = if names.len() >= NAMES_SHOWN_MAX {
                " ..."
            } else {
                ""
            };
            names.truncate(NAMES_SHOWN_MAX);
            let mark = if marked { "!" } else { "" };
            write!(f, "\n{}{mark}: [{}{more}]", rank.0, names.join(", "))?;
        }
        if let (true, Some(limit)) = (self.shutdown, self.shutdown_ns) {
            write!(
                f,
                "\nOne or more rank (marked by \"!\") is stalled for longer than {} seconds. \
                 Will shutdown.",
                seconds(limit)
            )?;
        }
        Ok(())
    }
}

/// Whole seconds as `60`, others as `0.25`.
fn seconds(ns: u64) -> String {
    let (whole, rest) = (ns / 1_000_000_000, ns % 1_000_000_000);
    if rest == 0 {
        whole.to_string()
    } else {
        format!("{whole}.{rest:09}")
            .trim_end_matches('0')
            .to_owned()
    }
}

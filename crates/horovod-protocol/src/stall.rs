//! Who is late: requests that some members asked for and others have not, as data and as text.

use crate::types::{ProcessSetId, Rank};
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

impl StallReport {
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
             of ranks and are waiting for remainder of ranks for more than {} seconds. This may \
             indicate that different ranks are trying to submit different tensors or that only \
             subset of ranks is submitting tensors, which will cause deadlock.\nMissing ranks:",
            seconds(self.warning_ns)
        )?;
        let mut by_rank: BTreeMap<Rank, (bool, Vec<&str>)> = BTreeMap::new();
        for request in &self.stalled {
            for rank in &request.missing {
                let (marked, names) = by_rank.entry(*rank).or_default();
                *marked |= self.past_shutdown(request);
                names.push(&request.name);
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

//! Which algorithm runs: one pure function of operation, size, layout and tuning.

use crate::context::Tuning;
use crate::layout::SetLayout;

/// How an allreduce (other than Adasum) is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllreduceAlgorithm {
    /// One member: only factors apply.
    Alone,
    /// One host, small: every rank stages all, every rank reduces all.
    Direct,
    /// One host: every rank stages what others own, reduces its own part, and collects the results.
    Staged,
    /// Any layout, small: whole vectors are exchanged in log2(n) rounds.
    RecursiveDoubling,
    /// Any layout: reduce-scatter and allgather around a ring.
    Ring,
    /// Several hosts, several ranks on each: reduce inside hosts, then across in parallel lanes, then
    /// collect inside hosts.
    Hierarchical,
}

/// The algorithm for an allreduce of `bytes`. The override of `tuning` counts where it is possible.
pub fn allreduce(bytes: usize, layout: &SetLayout, tuning: &Tuning) -> AllreduceAlgorithm {
    use AllreduceAlgorithm::{Alone, Direct, Hierarchical, RecursiveDoubling, Ring, Staged};
    if layout.members() == 1 {
        return Alone;
    }
    let one_host = layout.hosts() == 1;
    if let Some(forced) = tuning.allreduce {
        let possible = match forced {
            Alone => false,
            Direct => one_host && bytes <= tuning.direct_max_bytes,
            Staged => one_host,
            RecursiveDoubling | Ring => true,
            Hierarchical => !one_host,
        };
        if possible {
            return forced;
        }
    }
    match one_host {
        true if bytes <= tuning.direct_max_bytes => Direct,
        true => Staged,
        false if bytes <= tuning.doubling_max_bytes => RecursiveDoubling,
        false if layout.hosts() == layout.members() => Ring,
        false => Hierarchical,
    }
}

/// How a broadcast passes between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Relay {
    /// Binomial tree: fewest hops.
    Tree,
    /// Each host passes on to the next: every link carries the data once, all at the same time.
    Chain,
}

/// How a broadcast of `bytes` passes between hosts.
pub fn broadcast(bytes: usize, tuning: &Tuning) -> Relay {
    if bytes >= tuning.chain_min_bytes {
        Relay::Chain
    } else {
        Relay::Tree
    }
}

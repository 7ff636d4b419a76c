//! The choice of an algorithm: one pure function of operation, size, layout and tuning.
//!
//! Choices by size never change the result: all of them combine every element in the same order (see
//! [`crate::allreduce`]). Choices that would change the result are made by the layout and the settings alone: a ring
//! rounds halves more often, and a flat algorithm knows no hosts.

use horovod_protocol::ReduceOp;
use horovod_settings as settings;

use crate::layout::SetLayout;

/// Sizes at which algorithms change, and overrides. All members must use the same values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tuning {
    /// Most bytes that one rank stages for one peer in one step within a host.
    pub chunk_bytes: usize,
    /// Fewest bytes of such a step; smaller operations take fewer steps.
    pub chunk_min_bytes: usize,
    /// Up to this many bytes every rank of a host reduces everything itself: one hand-over, not two.
    pub direct_max_bytes: usize,
    /// Hosts exchange whole vectors if none gets more than this many bytes.
    pub exchange_max_bytes: usize,
    /// Most hosts of which each sends to each; more form a ring.
    pub pairwise_max_hosts: usize,
    /// Bytes received, or gathered from small tensors, at a time on a stream between two ranks.
    pub wire_chunk_bytes: usize,
    /// So much does not stay in the caches: results of at least this many bytes that land in fresh memory are
    /// written past them, and an allreduce inside a host reads and writes few streams at a time.
    pub stream_min_bytes: usize,
    /// From this many bytes a broadcast passes along a chain of hosts rather than down a tree.
    pub chain_min_bytes: usize,
    /// Use this algorithm for allreduce wherever it is possible.
    pub allreduce: Option<AlgorithmOverride>,
    /// Whether an allreduce between hosts adds up inside each host first.
    pub hierarchical_allreduce: bool,
    /// Whether an allgather between hosts gathers inside each host first.
    pub hierarchical_allgather: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            chunk_bytes: settings::CHUNK_BYTES.kind.default,
            chunk_min_bytes: 16 << 10,
            direct_max_bytes: settings::DIRECT_MAX_BYTES.kind.default,
            exchange_max_bytes: settings::EXCHANGE_MAX_BYTES.kind.default,
            pairwise_max_hosts: settings::PAIRWISE_MAX_HOSTS.kind.default,
            wire_chunk_bytes: settings::WIRE_CHUNK_BYTES.kind.default,
            stream_min_bytes: 16 << 20,
            chain_min_bytes: 256 << 10,
            allreduce: None,
            hierarchical_allreduce: settings::HIERARCHICAL_ALLREDUCE.kind.0,
            hierarchical_allgather: settings::HIERARCHICAL_ALLGATHER.kind.0,
        }
    }
}

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
    /// Between all members over their links, hosts or not.
    Flat(Across),
    /// Several hosts, several ranks on some: reduce inside hosts, then across in parallel lanes, then
    /// collect inside hosts.
    Hierarchical(Across),
}

impl AllreduceAlgorithm {
    /// Its name in a timeline.
    pub fn stage_name(self) -> &'static str {
        match self {
            Self::Alone => "LOCAL_ALLREDUCE",
            Self::Direct => "DIRECT_ALLREDUCE",
            Self::Staged => "STAGED_ALLREDUCE",
            Self::Flat(Across::Exchange) => "EXCHANGE_ALLREDUCE",
            Self::Flat(Across::Pairwise) => "PAIRWISE_ALLREDUCE",
            Self::Flat(Across::Ring) => "RING_ALLREDUCE",
            Self::Hierarchical(Across::Exchange) => "HIERARCHICAL_EXCHANGE_ALLREDUCE",
            Self::Hierarchical(Across::Pairwise) => "HIERARCHICAL_PAIRWISE_ALLREDUCE",
            Self::Hierarchical(Across::Ring) => "HIERARCHICAL_RING_ALLREDUCE",
        }
    }
}

/// How vectors pass between members that do not share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Across {
    /// Small: everybody sends everything to everybody and reduces all. One hop.
    Exchange,
    /// Everybody owns a part, gets it from all and sends the result to all. Two hops.
    Pairwise,
    /// Partial results pass from the first to the last, results on around. Two connections per member.
    Ring,
}

/// Largest area for pre-staged operands, in bytes.
pub(crate) const PRESTAGED_BYTES_MAX: usize = 64 << 10;
/// Bytes of its peers that a rank of an oversubscribed host reads at most, rather than share the work.
const PRESTAGED_READ_MAX: usize = 192 << 10;

/// An algorithm that a user asks for by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AlgorithmOverride {
    /// [`AllreduceAlgorithm::Staged`], on one host.
    Staged,
    /// This one between hosts; on one host between its ranks, over links instead of staging memory.
    Across(Across),
}

impl AlgorithmOverride {
    /// All there are; the words for them are those of the setting.
    pub const ALL: [Self; 4] = [
        Self::Staged,
        Self::Across(Across::Exchange),
        Self::Across(Across::Pairwise),
        Self::Across(Across::Ring),
    ];
}

/// The algorithm for an allreduce of `bytes`. An override counts where it is possible.
pub fn allreduce(bytes: usize, layout: &SetLayout, tuning: &Tuning) -> AllreduceAlgorithm {
    use AllreduceAlgorithm::{Alone, Direct, Flat, Hierarchical, Staged};
    let (members, hosts) = (layout.members(), layout.hosts());
    if members == 1 {
        return Alone;
    }
    if hosts == 1 {
        return match tuning.allreduce {
            Some(AlgorithmOverride::Across(algorithm)) => Flat(algorithm),
            None if bytes <= tuning.direct_max_bytes => Direct,
            Some(AlgorithmOverride::Staged) | None => Staged,
        };
    }
    let grouped = tuning.hierarchical_allreduce && hosts < members;
    let ends = if grouped { hosts } else { members };
    let algorithm = match tuning.allreduce {
        Some(AlgorithmOverride::Across(algorithm)) => algorithm,
        Some(AlgorithmOverride::Staged) | None => across(bytes, ends, tuning),
    };
    if grouped {
        Hierarchical(algorithm)
    } else {
        Flat(algorithm)
    }
}

/// The algorithms by size: each with the most bytes that it is for, ascending; the last one has no limit.
pub fn allreduce_classes(
    layout: &SetLayout,
    tuning: &Tuning,
) -> Vec<(Option<usize>, AllreduceAlgorithm)> {
    let shared = |ends: usize| tuning.exchange_max_bytes / ends.saturating_sub(1).max(1);
    let mut bounds = [
        tuning.direct_max_bytes,
        shared(layout.hosts()),
        shared(layout.members()),
    ];
    bounds.sort_unstable();
    let mut classes: Vec<(Option<usize>, AllreduceAlgorithm)> = Vec::new();
    for most in bounds.into_iter().map(Some).chain([None]) {
        let algorithm = allreduce(most.unwrap_or(usize::MAX), layout, tuning);
        match classes.last_mut().filter(|(_, last)| *last == algorithm) {
            Some((limit, _)) => *limit = most,
            None => classes.push((most, algorithm)),
        }
    }
    classes
}

/// The algorithm where partial results cannot be passed on, because every element has to be combined in
/// one go: the average of integers, whose sums may not fit their type.
pub fn allreduce_at_once(bytes: usize, layout: &SetLayout, tuning: &Tuning) -> AllreduceAlgorithm {
    use AllreduceAlgorithm::{Flat, Hierarchical};
    match allreduce(bytes, layout, tuning) {
        Hierarchical(_) | Flat(Across::Ring) => {
            let everything = bytes.saturating_mul(layout.members() - 1);
            Flat(if everything <= tuning.exchange_max_bytes {
                Across::Exchange
            } else {
                Across::Pairwise
            })
        }
        possible => possible,
    }
}

/// Most bytes of an allreduce for which a rank stages its operand before it says that it is ready; so it is done with
/// the direct algorithm, if all do. Each rank may go by numbers of its own.
pub fn prestaged_max_bytes(
    op: ReduceOp,
    oversubscribed: bool,
    layout: &SetLayout,
    tuning: &Tuning,
) -> usize {
    if op == ReduceOp::Adasum || layout.hosts() > 1 || tuning.allreduce.is_some() {
        return 0;
    }
    // Where ranks share cores, each hand-over that is saved saves several switches between them.
    let most = if oversubscribed {
        PRESTAGED_READ_MAX / (layout.members() - 1).max(1)
    } else {
        0
    };
    tuning.direct_max_bytes.max(most).min(PRESTAGED_BYTES_MAX)
}

/// How `bytes` pass between so many ends.
fn across(bytes: usize, ends: usize, tuning: &Tuning) -> Across {
    if ends > tuning.pairwise_max_hosts {
        // Not by size: a ring may round halves differently.
        Across::Ring
    } else if bytes.saturating_mul(ends - 1) <= tuning.exchange_max_bytes {
        Across::Exchange
    } else {
        Across::Pairwise
    }
}

/// Whether an allgather gathers inside each host before blocks pass between hosts.
pub fn allgather_by_host(layout: &SetLayout, tuning: &Tuning) -> bool {
    layout.hosts() == 1 || (tuning.hierarchical_allgather && layout.hosts() < layout.members())
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

#[cfg(test)]
mod tests {
    use super::AllreduceAlgorithm::{Direct, Flat, Hierarchical, Staged};
    use super::*;

    fn chosen(hosts: &[usize], bytes: usize, tuning: &Tuning) -> AllreduceAlgorithm {
        allreduce(bytes, &SetLayout::of_hosts(hosts), tuning)
    }

    #[test]
    fn by_layout_and_size() {
        let tuning = Tuning::default();
        let (small, large) = (1 << 10, 1 << 20);
        for (hosts, bytes, want) in [
            (&[0][..], large, AllreduceAlgorithm::Alone),
            (&[0, 0], small, Direct),
            (&[0, 0], large, Staged),
            (&[0, 1], small, Flat(Across::Exchange)),
            (&[0, 1], large, Flat(Across::Pairwise)),
            (&[0, 0, 1, 1], small, Hierarchical(Across::Exchange)),
            (&[0, 0, 1], large, Hierarchical(Across::Pairwise)),
        ] {
            assert_eq!(chosen(hosts, bytes, &tuning), want, "{hosts:?} {bytes}");
        }
    }

    #[test]
    fn classes_change_where_the_choice_changes() {
        let tuning = Tuning::default();
        for hosts in [&[0][..], &[0, 0], &[0, 1], &[0, 0, 1], &[0, 1, 2, 2, 3]] {
            let layout = SetLayout::of_hosts(hosts);
            let classes = allreduce_classes(&layout, &tuning);
            assert_eq!(classes.last().map(|(most, _)| *most), Some(None));
            for pair in classes.windows(2) {
                let (most, below) = (pair[0].0.expect("a limit"), pair[0].1);
                assert_eq!(allreduce(most, &layout, &tuning), below);
                assert_eq!(allreduce(most + 1, &layout, &tuning), pair[1].1);
            }
        }
    }

    #[test]
    fn exchange_counts_what_each_host_receives() {
        let tuning = Tuning::default();
        let bytes = tuning.exchange_max_bytes;
        assert_eq!(chosen(&[0, 1], bytes, &tuning), Flat(Across::Exchange));
        assert_eq!(chosen(&[0, 1, 2], bytes, &tuning), Flat(Across::Pairwise));
        let half = bytes / 2;
        assert_eq!(chosen(&[0, 1, 2], half, &tuning), Flat(Across::Exchange));
    }

    #[test]
    fn an_override_and_flatness_hold_where_they_are_possible() {
        let ring = Tuning {
            allreduce: Some(AlgorithmOverride::Across(Across::Ring)),
            ..Tuning::default()
        };
        assert_eq!(chosen(&[0, 0], 4, &ring), Flat(Across::Ring));
        assert_eq!(chosen(&[0, 0, 1], 4, &ring), Hierarchical(Across::Ring));
        let flat = Tuning {
            hierarchical_allreduce: false,
            ..ring.clone()
        };
        assert_eq!(chosen(&[0, 0, 1], 4, &flat), Flat(Across::Ring));
        let staged = Tuning {
            allreduce: Some(AlgorithmOverride::Staged),
            ..Tuning::default()
        };
        assert_eq!(chosen(&[0, 0], 4, &staged), Staged);
        assert_eq!(chosen(&[0, 1], 4, &staged), Flat(Across::Exchange));
    }

    #[test]
    fn many_hosts_form_a_ring_at_every_size() {
        let tuning = Tuning {
            pairwise_max_hosts: 2,
            ..Tuning::default()
        };
        for bytes in [4, 1 << 24] {
            assert_eq!(chosen(&[0, 1, 2], bytes, &tuning), Flat(Across::Ring));
            assert_ne!(chosen(&[0, 1], bytes, &tuning), Flat(Across::Ring));
        }
    }
}

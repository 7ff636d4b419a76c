//! Operations that some ranks have begun and others have not, by the ranks that are waited for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use horovod_protocol::{Rank, StalledRequest};

/// Groups of ranks that are shown; those that are waited for longest.
const HANGS_MAX: usize = 8;

/// Some ranks wait for others now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hang {
    /// The ranks that have not begun the operations, and their hosts.
    pub missing: Vec<(u32, Arc<str>)>,
    /// The ranks that have begun the operation which has waited longest.
    pub waiting: Vec<u32>,
    /// The process set of the operations.
    pub set: u32,
    /// Time for which the first operation has waited.
    pub lasts: Duration,
    /// The name of that operation.
    pub operation: Arc<str>,
    /// Number of operations that wait for the same ranks.
    pub operations: usize,
}

/// The groups, those first that are waited for longest. `since`: so long ago the requests were described.
pub(crate) fn grouped(
    incomplete: &[StalledRequest],
    since: Duration,
    hostname: impl Fn(Rank) -> Arc<str>,
) -> Vec<Hang> {
    let mut groups: BTreeMap<_, Vec<&StalledRequest>> = BTreeMap::new();
    for request in incomplete
        .iter()
        .filter(|request| !request.missing.is_empty())
    {
        let key = (request.set.0, &request.missing);
        groups.entry(key).or_default().push(request);
    }
    let hang = |((set, missing), requests): ((u32, &Vec<Rank>), Vec<&StalledRequest>)| {
        let first = requests.iter().max_by_key(|request| request.waited_ns)?;
        let named = missing.iter().map(|rank| (rank.0, hostname(*rank)));
        Some(Hang {
            missing: named.collect(),
            waiting: first.waiting.iter().map(|rank| rank.0).collect(),
            set,
            lasts: Duration::from_nanos(first.waited_ns).saturating_add(since),
            operation: first.name.clone(),
            operations: requests.len(),
        })
    };
    let mut hangs: Vec<Hang> = groups.into_iter().filter_map(hang).collect();
    hangs.sort_by_key(|hang| std::cmp::Reverse(hang.lasts));
    hangs.truncate(HANGS_MAX);
    hangs
}

#[cfg(test)]
mod tests {
    use horovod_protocol::ProcessSetId;

    use super::*;

    fn request(name: &str, missing: &[u32], waited_s: u64) -> StalledRequest {
        StalledRequest {
            set: ProcessSetId(0),
            name: name.into(),
            waiting: vec![Rank(0)],
            missing: missing.iter().copied().map(Rank).collect(),
            waited_ns: waited_s * 1_000_000_000,
        }
    }

    #[test]
    fn operations_that_wait_for_the_same_ranks_are_one_hang() {
        let incomplete = [
            request("a", &[2], 3),
            request("b", &[2], 4),
            request("c", &[1, 3], 9),
            request("d", &[], 9),
        ];
        let hangs = grouped(&incomplete, Duration::from_secs(1), |_| "h".into());
        let found: Vec<_> = hangs
            .iter()
            .map(|h| {
                let missing: Vec<u32> = h.missing.iter().map(|(rank, _)| *rank).collect();
                assert_eq!(h.waiting, [0]);
                (missing, h.lasts.as_secs(), &*h.operation, h.operations)
            })
            .collect();
        assert_eq!(found, [(vec![1, 3], 10, "c", 1), (vec![2], 5, "b", 2)]);
    }

    #[test]
    fn of_many_hangs_the_longest() {
        let incomplete: Vec<_> = (1..30).map(|n| request("x", &[n], n.into())).collect();
        let hangs = grouped(&incomplete, Duration::ZERO, |_| "h".into());
        assert_eq!(hangs.len(), HANGS_MAX);
        assert_eq!(hangs[0].missing[0].0, 29);
    }
}

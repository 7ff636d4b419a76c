//! The ranks of a round's members, computed from their hosts and slots.

use std::collections::{BTreeMap, BTreeSet};

use horovod_transport::rendezvous::RankAssignment;

/// Returns the assignments for a round's places (host and slot) in the order of ranks. The local rank is the slot, so
/// it never changes while the process lives: scripts select their GPU by it.
pub(super) fn assign(places: &[(&str, u32)], needs_sync: bool) -> Vec<RankAssignment> {
    // `hosts` maps each host to its position and number of ranks. `columns` maps each local rank to the positions of
    // the hosts that have it.
    let mut hosts: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    let mut columns: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for (host, local) in places {
        let next = hosts.len() as u32;
        let (position, count) = hosts.entry(host).or_insert((next, 0));
        *count += 1;
        columns.entry(*local).or_default().insert(*position);
    }
    (0..)
        .zip(places)
        .map(|(rank, (host, local))| {
            let (position, local_size) = hosts[host];
            let column = &columns[local];
            let cross_rank = column.range(..position).count() as u32;
            RankAssignment {
                rank,
                local_rank: *local,
                local_size,
                cross_rank,
                cross_size: column.len() as u32,
                needs_sync,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_from_hosts_and_slots() {
        let assignments = assign(&[("a", 1), ("b", 0), ("b", 1)], true);
        assert_eq!(
            assignments,
            [
                RankAssignment {
                    rank: 0,
                    local_rank: 1,
                    local_size: 1,
                    cross_rank: 0,
                    cross_size: 2,
                    needs_sync: true
                },
                RankAssignment {
                    rank: 1,
                    local_rank: 0,
                    local_size: 2,
                    cross_rank: 0,
                    cross_size: 1,
                    needs_sync: true
                },
                RankAssignment {
                    rank: 2,
                    local_rank: 1,
                    local_size: 2,
                    cross_rank: 1,
                    cross_size: 2,
                    needs_sync: true
                },
            ]
        );
    }
}

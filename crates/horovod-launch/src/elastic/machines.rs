//! Hosts that share a machine: agents that dial are hosts of one slot each, and their ranks count as ranks of the
//! machine.

use std::collections::BTreeMap;

/// For each host that is part of a machine: the machine, and the local rank of the host's slot there.
#[derive(Debug, Default)]
pub(super) struct Machines {
    parts: BTreeMap<String, (String, u32)>,
}

impl Machines {
    /// Adds a host of one slot to a machine. The host keeps its local rank, the lowest free one, until it is removed.
    pub(super) fn add(&mut self, host: &str, machine: &str) {
        if self.parts.get(host).is_some_and(|(at, _)| at == machine) {
            return;
        }
        self.parts.remove(host);
        let is_taken = |local: &u32| {
            self.parts
                .values()
                .any(|(at, l)| at == machine && l == local)
        };
        let free = (0..).find(|local| !is_taken(local)).unwrap_or_default();
        self.parts
            .insert(host.to_owned(), (machine.to_owned(), free));
    }

    /// Removes all hosts for which `is_there` is false.
    pub(super) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.parts.retain(|host, _| is_there(host));
    }

    /// Returns the place of a host's slot: the machine and the local rank there.
    pub(super) fn place<'a>(&'a self, host: &'a str, slot: u32) -> (&'a str, u32) {
        match self.parts.get(host) {
            Some((machine, local)) => (machine, *local),
            None => (host, slot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_keeps_its_local_rank_and_the_next_takes_the_lowest_free_one() {
        let mut machines = Machines::default();
        for (host, machine) in [("a0", "a"), ("a1", "a"), ("b0", "b"), ("a2", "a")] {
            machines.add(host, machine);
        }
        assert_eq!(machines.place("a2", 0), ("a", 2));
        assert_eq!(machines.place("b0", 0), ("b", 0));
        machines.retain(|host| host != "a1");
        machines.add("a2", "a");
        machines.add("a3", "a");
        assert_eq!(machines.place("a2", 0), ("a", 2));
        assert_eq!(machines.place("a3", 0), ("a", 1));
        // A host by ssh is a machine.
        assert_eq!(machines.place("c", 3), ("c", 3));
    }
}

//! Ranks that an executor starts by itself (Spark tasks, Ray actors, pods): their places, environments and rendezvous.
//!
//! An executor knows N processes, the host of each, and how to reach each of them. [`assign`] makes ranks of the
//! processes and gives each the environment that `horovodrun` would have given it. Ranks meet at a
//! [`Rendezvous`](crate::Rendezvous), which the executor or the process of rank 0 serves, or which rank 0 alone
//! provides during init. The executor starts the processes, passes the environments on, and ends the other processes
//! when one has failed. Elastic jobs: [`crate::elastic`].

use std::net::SocketAddr;

use horovod_transport::JobKey;

use crate::environment;
use crate::frames::Variables;
use crate::hosts::{self, Host, HostSlot, HostsError};

/// A process that is to be a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its host: processes that have the same are on one host. The ranks know their host by it.
    pub host: String,
    /// A name or an IP address by which the other processes reach that host. It matters where rank 0 serves the
    /// rendezvous by itself.
    pub address: String,
}

/// Where the ranks of a job find each other.
#[derive(Clone, Debug)]
pub enum RendezvousSource {
    /// At a running rendezvous: [`crate::Rendezvous::rendezvous`].
    At {
        /// Where it can be reached.
        addresses: Vec<SocketAddr>,
        /// The job's key.
        key: JobKey,
    },
    /// At rank 0, which listens on this port of its host during init. Nobody tells the ranks why one of them has died.
    RankZero {
        /// The port; not 0, as all must know it beforehand.
        port: u16,
        /// The job's key.
        key: JobKey,
    },
}

/// A process's part in the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    /// Its place.
    pub slot: HostSlot,
    /// Variables to set in its environment, after removing those of [`names_of_a_job`].
    pub environment: Variables,
}

/// Why there are no places.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AssignError {
    /// A job has at least one process.
    #[error("there is no process")]
    NoProcess,
    /// Its host or address is empty.
    #[error("process {0} has no {1}")]
    Missing(usize, &'static str),
    /// Rank 0 cannot tell which port it was given.
    #[error(
        "the port at which rank 0 serves the rendezvous must be known beforehand, so it cannot be 0"
    )]
    Port,
    /// Too many on one host.
    #[error(transparent)]
    Hosts(#[from] HostsError),
}

/// The part of each process, in their order. `interfaces` are those to use between hosts; none means all.
///
/// The ranks of a host are consecutive, and hosts follow each other as their first processes do: so rank 0 is the first
/// process, whatever the order of the others.
pub fn assign(
    processes: &[Process],
    rendezvous: &RendezvousSource,
    interfaces: &[String],
) -> Result<Vec<Assigned>, AssignError> {
    let Some(first) = processes.first() else {
        return Err(AssignError::NoProcess);
    };
    for (index, process) in processes.iter().enumerate() {
        for (what, text) in [("host", &process.host), ("address", &process.address)] {
            if text.is_empty() {
                return Err(AssignError::Missing(index, what));
            }
        }
    }
    let of_job = match rendezvous {
        RendezvousSource::At { addresses, key } => {
            environment::of_job(addresses, &key.to_hex(), interfaces, &[])
        }
        RendezvousSource::RankZero { port: 0, .. } => return Err(AssignError::Port),
        RendezvousSource::RankZero { port, key } => {
            environment::of_job_at_rank_0(&first.address, *port, &key.to_hex(), interfaces)
        }
    };
    let mut found = Vec::new();
    for (slot, process) in places(processes)?.into_iter().zip(processes) {
        let host = Host {
            name: process.host.clone(),
            slots: slot.local_size,
        };
        let mut environment = of_job.clone();
        environment.extend(environment::of_rank(&host, slot));
        found.push(Assigned { slot, environment });
    }
    Ok(found)
}

/// The place of each process, in their order.
fn places(processes: &[Process]) -> Result<Vec<HostSlot>, HostsError> {
    let each = processes.iter().map(|process| Host {
        name: process.host.clone(),
        slots: 1,
    });
    let hosts = hosts::merge(each.collect());
    let count = u32::try_from(processes.len()).unwrap_or(u32::MAX);
    let placements = hosts::assign(&hosts, count)?;
    let mut left: std::collections::HashMap<&str, _> = placements
        .iter()
        .map(|placement| (placement.host.name.as_str(), placement.slots.iter()))
        .collect();
    let next = |process: &Process| left.get_mut(process.host.as_str())?.next().copied();
    Ok(processes.iter().filter_map(next).collect())
}

/// Variables by which launchers tell processes their part in a job. A process that had one in another job, or whose parent
/// has, must lose them before it gets those of [`assign`].
pub fn names_of_a_job() -> impl Iterator<Item = &'static str> {
    environment::IDENTITY
        .iter()
        .copied()
        .chain([environment::RANK0_ADDRESS])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> JobKey {
        JobKey::from_hex(&"ab".repeat(32)).expect("a key")
    }

    fn at() -> RendezvousSource {
        RendezvousSource::At {
            addresses: vec![
                "10.0.0.1:5".parse().expect("an address"),
                "[::1]:6".parse().expect("an address"),
            ],
            key: key(),
        }
    }

    fn on(hosts: &[&str]) -> Vec<Process> {
        let process = |host: &&str| Process {
            host: (*host).to_owned(),
            address: format!("{host}.example"),
        };
        hosts.iter().map(process).collect()
    }

    fn value<'a>(assigned: &'a Assigned, name: &str) -> Option<&'a str> {
        let mut found = assigned.environment.iter().filter(|(n, _)| n == name);
        let (_, value) = found.next()?;
        assert!(found.next().is_none(), "{name} twice");
        value.to_str()
    }

    /// Rank, local rank and size, cross rank and size.
    fn numbers(assigned: &Assigned) -> [u32; 5] {
        [
            "RANK",
            "LOCAL_RANK",
            "LOCAL_SIZE",
            "CROSS_RANK",
            "CROSS_SIZE",
        ]
        .map(|name| {
            let text = value(assigned, &format!("HOROVOD_{name}")).expect("set");
            text.parse().expect("a number")
        })
    }

    #[test]
    fn ranks_of_a_host_are_consecutive_whatever_the_order_of_the_processes() {
        let assigned = assign(&on(&["b", "a", "b", "c", "a", "b"]), &at(), &[]);
        let assigned = assigned.expect("possible");
        let numbers: Vec<_> = assigned.iter().map(numbers).collect();
        assert_eq!(
            numbers,
            [
                [0, 0, 3, 0, 3],
                [3, 0, 2, 1, 3],
                [1, 1, 3, 0, 2],
                [5, 0, 1, 2, 3],
                [4, 1, 2, 1, 2],
                [2, 2, 3, 0, 1],
            ]
        );
        assert!(
            assigned
                .iter()
                .all(|a| value(a, "HOROVOD_SIZE") == Some("6"))
        );
        let hosts: Vec<_> = assigned
            .iter()
            .map(|a| value(a, "HOROVOD_HOSTNAME"))
            .collect();
        assert_eq!(hosts, ["b", "a", "b", "c", "a", "b"].map(Some));
    }

    /// The environments that `horovodrun` gives the ranks of these hosts, in the order of ranks.
    fn of_horovodrun(hosts: &[(&str, u32)], interfaces: &[String]) -> Vec<Variables> {
        let host = |(name, slots): &(&str, u32)| Host {
            name: (*name).to_owned(),
            slots: *slots,
        };
        let hosts: Vec<Host> = hosts.iter().map(host).collect();
        let RendezvousSource::At { addresses, key } = at() else {
            panic!("it is");
        };
        let of_job = environment::of_job(&addresses, &key.to_hex(), interfaces, &[]);
        let count = hosts.iter().map(|host| host.slots).sum();
        let placements = hosts::assign(&hosts, count).expect("possible");
        let of = |placement: &hosts::Placement| -> Vec<Variables> {
            let slots = placement.slots.iter();
            let own = slots.map(|slot| environment::of_rank(&placement.host, *slot));
            own.map(|own| of_job.iter().cloned().chain(own).collect())
                .collect()
        };
        placements.iter().flat_map(of).collect()
    }

    #[test]
    fn environments_are_those_of_horovodrun() {
        let interfaces = ["eth0".to_owned()];
        let cases: [&[(&str, u32)]; 4] = [
            &[("a", 1)],
            &[("a", 4)],
            &[("a", 1), ("b", 3), ("c", 2)],
            &[("a", 3), ("[fe80::1]", 3)],
        ];
        for hosts in cases {
            let names = hosts.iter().flat_map(|(name, n)| vec![*name; *n as usize]);
            let names: Vec<&str> = names.collect();
            let assigned = assign(&on(&names), &at(), &interfaces).expect("possible");
            let environments: Vec<_> = assigned.into_iter().map(|a| a.environment).collect();
            assert_eq!(environments, of_horovodrun(hosts, &interfaces), "{hosts:?}");
        }
    }

    #[test]
    fn rank_0_serves_at_the_address_of_its_process() {
        #[track_caller]
        fn check(address: &str, expected: &str) {
            let mut processes = on(&["a", "b"]);
            processes[0].address = address.to_owned();
            let rendezvous = RendezvousSource::RankZero {
                port: 29_600,
                key: key(),
            };
            let assigned = assign(&processes, &rendezvous, &[]).expect("possible");
            for one in &assigned {
                assert_eq!(value(one, "HOROVOD_RANK0_ADDRESS"), Some(expected));
                assert_eq!(value(one, "HOROVOD_JOB_KEY"), Some(&*"ab".repeat(32)));
                assert_eq!(value(one, "HOROVOD_RENDEZVOUS"), None);
            }
        }
        check("node-1.example", "node-1.example:29600");
        check("10.0.0.1", "10.0.0.1:29600");
        check("fe80::1", "[fe80::1]:29600");
        check("[fe80::1]", "[fe80::1]:29600");
    }

    #[test]
    fn mistakes_are_named() {
        #[track_caller]
        fn check(processes: &[Process], rendezvous: &RendezvousSource, expected: &AssignError) {
            assert_eq!(&assign(processes, rendezvous, &[]).unwrap_err(), expected);
        }
        check(&[], &at(), &AssignError::NoProcess);
        check(&on(&["a", ""]), &at(), &AssignError::Missing(1, "host"));
        let mut nowhere = on(&["a"]);
        nowhere[0].address.clear();
        check(&nowhere, &at(), &AssignError::Missing(0, "address"));
        let (port, key) = (0, key());
        check(
            &on(&["a"]),
            &RendezvousSource::RankZero { port, key },
            &AssignError::Port,
        );
    }

    #[test]
    fn what_a_job_sets_is_removed_before_the_next() {
        let names: Vec<_> = names_of_a_job().collect();
        let sources = [
            at(),
            RendezvousSource::RankZero {
                port: 1,
                key: key(),
            },
        ];
        for rendezvous in sources {
            let assigned = assign(&on(&["a"]), &rendezvous, &[]).expect("possible");
            for (name, _) in &assigned[0].environment {
                let name = name.to_str().expect("plain");
                // Not of a single job.
                if name != "PYTHONUNBUFFERED" {
                    assert!(names.contains(&name), "{name}");
                }
            }
        }
    }
}

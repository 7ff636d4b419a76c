//! The hosts and slots that a batch system gave to the job in which `horovodrun` runs: Slurm, LSF, PBS, Grid Engine, OAR.
//!
//! Only variables of the batch system and the files that they name are read; no command of it is run.

mod lines;
mod lsf;
mod slurm;

use std::path::Path;

use horovod_settings::{Environment, text_of};

use crate::hosts::Host;
use crate::io::read_text;

/// Hosts of one allocation; a batch system with more of them gives a list that is refused.
const HOSTS_MAX: usize = 65_536;

/// Hosts and slots that a batch system gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its name, for messages.
    pub by: &'static str,
    /// The variables that were read, for messages.
    pub variables: &'static str,
    /// At least one host; all have slots.
    pub hosts: Vec<Host>,
}

impl Allocation {
    /// All slots together.
    pub(crate) fn slots(&self) -> u32 {
        self.hosts
            .iter()
            .fold(0, |sum, host| sum.saturating_add(host.slots))
    }

    /// The line that says what is used.
    pub(crate) fn describe(&self) -> String {
        const NAMED_MAX: usize = 8;
        let names = self.hosts.iter().take(NAMED_MAX).map(ToString::to_string);
        let mut list = names.collect::<Vec<_>>().join(",");
        if self.hosts.len() > NAMED_MAX {
            list.push_str(",...");
        }
        let (slots, hosts) = (self.slots(), self.hosts.len());
        format!(
            "uses the whole allocation of {}, {slots} {} on {hosts} {} ({list}; from {}); -np and -H choose otherwise",
            self.by,
            if slots == 1 { "slot" } else { "slots" },
            if hosts == 1 { "host" } else { "hosts" },
            self.variables,
        )
    }
}

/// The hosts that a batch system gave, or what of its variables is not understood; `None`: this process runs in no job of it.
type Found = Option<Result<Vec<Host>, String>>;

/// One batch system: which variables it sets, and how they are read.
struct BatchSystem {
    name: &'static str,
    variables: &'static str,
    read: fn(&dyn Environment) -> Found,
}

const BATCH_SYSTEMS: &[BatchSystem] = &[
    BatchSystem {
        name: "Slurm",
        variables: "SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE",
        read: slurm::read,
    },
    BatchSystem {
        name: "LSF",
        variables: "LSB_DJOB_HOSTFILE or LSB_MCPU_HOSTS",
        read: lsf::read,
    },
    BatchSystem {
        name: "PBS",
        variables: "PBS_NODEFILE",
        read: |env| of_file(env, "PBS_NODEFILE", lines::one_per_slot),
    },
    BatchSystem {
        name: "Grid Engine",
        variables: "PE_HOSTFILE",
        read: |env| of_file(env, "PE_HOSTFILE", lines::names_and_slots),
    },
    BatchSystem {
        name: "OAR",
        variables: "OAR_NODEFILE",
        read: |env| of_file(env, "OAR_NODEFILE", lines::one_per_slot),
    },
];

/// The allocation in which this process runs; the error names the variable, and what to do.
pub(crate) fn find(env: &dyn Environment) -> Result<Option<Allocation>, String> {
    for system in BATCH_SYSTEMS {
        let Some(hosts) = (system.read)(env) else {
            continue;
        };
        let hosts = hosts.map_err(|why| {
            format!(
                "the allocation of {} is not understood: {why}; say -H or --hostfile",
                system.name
            )
        })?;
        let hosts: Vec<Host> = hosts.into_iter().filter(|host| host.slots > 0).collect();
        if hosts.is_empty() {
            continue;
        }
        return Ok(Some(Allocation {
            by: system.name,
            variables: system.variables,
            hosts,
        }));
    }
    Ok(None)
}

/// The result of `parse` for the file that a variable names.
fn of_file(
    env: &dyn Environment,
    name: &str,
    parse: fn(&str) -> Result<Vec<Host>, String>,
) -> Found {
    let file = text_of(env, name)?;
    let text = read_text(Path::new(&file));
    Some(match text {
        Ok(text) => parse(&text).map_err(|why| format!("{name}={file}: {why}")),
        Err(error) => Err(format!("{name}={file} cannot be read: {error}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) struct Map(pub(super) Vec<(&'static str, String)>);

    impl Environment for Map {
        fn get(&self, name: &str) -> Option<String> {
            let found = self.0.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.clone())
        }

        fn names(&self) -> Vec<String> {
            self.0.iter().map(|(name, _)| (*name).to_owned()).collect()
        }
    }

    /// The hosts that an environment gives, and by whom.
    fn found(vars: &[(&'static str, &str)]) -> Result<Option<(&'static str, String)>, String> {
        let vars = vars
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()));
        let found = find(&Map(vars.collect()))?;
        Ok(found.map(|allocation| {
            let hosts = allocation.hosts.iter().map(ToString::to_string);
            (allocation.by, hosts.collect::<Vec<_>>().join(","))
        }))
    }

    fn with_file(content: &str, test: impl FnOnce(&str)) {
        let name = format!(
            "horovodrun-allocation-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        );
        let file = std::env::temp_dir().join(name);
        std::fs::write(&file, content).unwrap();
        test(file.to_str().unwrap());
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn each_batch_system_is_known_by_its_variables() {
        assert_eq!(found(&[]), Ok(None));
        let slurm = [
            ("SLURM_JOB_ID", "41"),
            ("SLURM_JOB_NODELIST", "n[1-2]"),
            ("SLURM_TASKS_PER_NODE", "4(x2)"),
        ];
        assert_eq!(found(&slurm), Ok(Some(("Slurm", "n1:4,n2:4".to_owned()))));
        let lsf = [("LSB_JOBID", "7"), ("LSB_MCPU_HOSTS", "a 2 b 1")];
        assert_eq!(found(&lsf), Ok(Some(("LSF", "a:2,b:1".to_owned()))));
        with_file("a\na\nb\n", |file| {
            for (name, by) in [("PBS_NODEFILE", "PBS"), ("OAR_NODEFILE", "OAR")] {
                assert_eq!(found(&[(name, file)]), Ok(Some((by, "a:2,b:1".to_owned()))));
            }
            let lsf = [("LSB_JOBID", "7"), ("LSB_DJOB_HOSTFILE", file)];
            assert_eq!(found(&lsf), Ok(Some(("LSF", "a:2,b:1".to_owned()))));
        });
        with_file(
            "a.site 4 all.q@a UNDEFINED\nb.site 2 all.q@b UNDEFINED\n",
            |file| {
                let hosts = "a.site:4,b.site:2".to_owned();
                assert_eq!(
                    found(&[("PE_HOSTFILE", file)]),
                    Ok(Some(("Grid Engine", hosts)))
                );
            },
        );
    }

    #[test]
    fn an_error_names_the_variable_and_the_cure() {
        let error = found(&[("PBS_NODEFILE", "/nonexistent")]).unwrap_err();
        for text in ["PBS_NODEFILE=/nonexistent", "-H"] {
            assert!(error.contains(text), "{error}");
        }
        with_file("a b\n", |file| {
            let error = found(&[("PE_HOSTFILE", file)]).unwrap_err();
            assert!(
                error.contains("PE_HOSTFILE=") && error.contains("\"a b\""),
                "{error}"
            );
        });
    }

    #[test]
    fn the_line_for_people_is_one_and_bounded() {
        let hosts = (0..9).map(|number| Host {
            name: format!("n{number}"),
            slots: 2,
        });
        let allocation = Allocation {
            by: "PBS",
            variables: "PBS_NODEFILE",
            hosts: hosts.collect(),
        };
        assert_eq!(
            allocation.describe(),
            "uses the whole allocation of PBS, 18 slots on 9 hosts (n0:2,n1:2,n2:2,n3:2,n4:2,n5:2,n6:2,n7:2,...; \
             from PBS_NODEFILE); -np and -H choose otherwise"
        );
    }
}

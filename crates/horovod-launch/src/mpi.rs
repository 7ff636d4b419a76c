//! Jobs whose processes MPI's launcher starts, or jsrun: each of these is an agent of one rank, which dials this launcher.
//!
//! The launcher of MPI starts processes and gives them what MPI needs; the agents do the rest, as on other hosts. The
//! key of the agents travels in the environment, never on a command line.

mod family;
pub(crate) mod launcher;
mod words;

use horovod_transport::JobKey;
use rustix::process::Signal;

use self::family::Family;
use self::launcher::MpiLauncher;
use crate::dialed::{self, Expected, Gathered, Order};
use crate::events::Events;
use crate::hosts::{self, Host};
use crate::launch::{
    run_gathered, start_output, start_timeout_of, wanted_hosts, working_directory,
};
use crate::launch_error::LaunchError;
use crate::options::{MpiOptions, Options, Starter};
use crate::rendezvous::Reach;
use crate::signals::Signals;
use crate::{environment, parent_watch, remote};

const OWN_TCP: &str =
    "--tcp: Horovod's own links are TCP in any case; NCCL_IB_DISABLE=1 is set, for tensors on GPUs";
impl MpiOptions {
    /// Variables that the further words give the processes: `-x NAME=VALUE`, `-genv NAME VALUE`, `-E NAME=VALUE`.
    pub(crate) fn variables(&self) -> Vec<String> {
        let texts = self.args.iter().chain(&self.binding);
        let words: Vec<String> = texts
            .flat_map(|text| words::split(text).unwrap_or_default())
            .collect();
        let is_option = |word: &str| ["-x", "-genv", "-env", "-E", "--env"].contains(&word);
        let pairs = words.windows(2).filter(|pair| is_option(&pair[0]));
        let name = |pair: &[String]| pair[1].split('=').next().unwrap_or_default().to_owned();
        pairs.map(name).collect()
    }

    /// Notes on options that have no effect; the error names those that exclude each other.
    pub(crate) fn check(&self, options: &Options) -> Result<Vec<String>, String> {
        let mut notes = Vec::new();
        let name = match self.starter {
            Starter::Own => {
                for (option, is_given) in [
                    ("--mpi-args", self.args.is_some()),
                    ("--binding-args", self.binding.is_some()),
                ] {
                    if is_given {
                        notes.push(format!("{option}: no effect without --mpi or --jsrun"));
                    }
                }
                if self.tcp {
                    notes.push(OWN_TCP.to_owned());
                }
                return Ok(notes);
            }
            Starter::Mpi => "--mpi",
            Starter::Jsrun => "--jsrun",
        };
        if options.elastic.is_on() {
            return Err(format!(
                "argument {name}: processes of MPI cannot come and go: leave it out for an elastic job, or leave out \
                 --min-np, --max-np and --host-discovery-script"
            ));
        }
        if options.dialed {
            return Err(format!(
                "argument {name}: not allowed with argument --dialed-agents"
            ));
        }
        Ok(notes)
    }
}

/// Runs the job; the exit code.
pub(crate) fn run(options: &Options, events: &Events) -> Result<u8, LaunchError> {
    let size = options.num_proc.unwrap_or(1);
    let placements = hosts::assign(&wanted_hosts(options, size)?, size)?;
    let hosts: Vec<Host> = placements
        .iter()
        .map(|placement| Host {
            name: placement.host.name.clone(),
            slots: placement.slots.len() as u32,
        })
        .collect();
    let start_timeout = start_timeout_of(options);
    let family = Family::find(options.mpi.starter, start_timeout)?;
    let line = family.line(options, &hosts, &std::env::current_exe()?)?;
    let cwd = working_directory()?;
    let mut signals = Signals::watch()?;
    parent_watch::watch();
    let mut output = start_output(options, size, events)?;
    let are_local = remote::are_local(&hosts.iter().collect::<Vec<_>>(), start_timeout);
    let reach = Reach::of(are_local.iter().all(|local| *local));
    let key = JobKey::random()?;
    let server = dialed::listen_on(reach, &options.network_interfaces, key.clone())?;
    if options.verbose {
        let text = line.to_string();
        output.note(&format!("horovodrun: {family} starts the ranks: {text}"));
    }
    let mut command = line.command();
    // Those of an outer launcher: an agent would take one for its own.
    for name in environment::RANKS_OF_MPI {
        command.env_remove(name);
    }
    command.envs(environment::of_agents(
        &key.to_hex(),
        &dialed::addresses(&server),
    ));
    let mut started = MpiLauncher::start(family.to_string(), command)?;
    let expected = Expected {
        size,
        within: start_timeout,
        order: Order::Indexes,
        started: Some(&mut started),
    };
    let gathered = dialed::gather(
        &server,
        expected,
        &mut output,
        &mut signals,
        options.verbose,
    )?;
    // Nobody else is expected.
    drop(server);
    if matches!(gathered, Gathered::All(_)) {
        started.drain()?;
    } else {
        started.end(Some(Signal::TERM));
    }
    let result = run_gathered(options, output, signals, gathered, cwd);
    started.end(None);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_found_among_the_further_words() {
        let options = MpiOptions {
            args: Some("-x UCX_TLS=tcp -genv A 'b c' -mca x y".to_owned()),
            binding: Some("-E C=d -x LAST".to_owned()),
            ..MpiOptions::default()
        };
        assert_eq!(options.variables(), ["UCX_TLS", "A", "C", "LAST"]);
        assert!(MpiOptions::default().variables().is_empty());
    }
}

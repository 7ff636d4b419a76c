//! The launch of a job from its options: hosts, rendezvous, agents.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::dialed::{self, Expected, Gathered, Order};
use crate::events::Events;
use crate::hosts::{self, Host, Placement};
use crate::job::{Job, JobState};
use crate::launch_error::LaunchError;
use crate::link::HostLink;
use crate::mpi;
use crate::options::{Options, Starter};
use crate::output::Output;
use crate::remote::{self, Ssh};
use crate::rendezvous::{Reach, Rendezvous};
use crate::signals::Signals;
use crate::threads::Share;
use crate::{agent, elastic, environment, parent_watch, platform, stdin};

/// Seconds until all hosts must have answered, unless told otherwise.
const START_TIMEOUT_S: u32 = 30;

/// A note is printed for more processes than this for each core of this machine: they may be a mistake.
const NOTED_PER_CORE: u32 = 8;

/// Runs the job and returns its exit code.
pub(crate) fn run(options: &Options, events: &Events) -> Result<u8, LaunchError> {
    if options.elastic.is_on() {
        return elastic::run(options, events);
    }
    if options.mpi.starter != Starter::Own {
        return mpi::run(options, events);
    }
    if options.dialed {
        return run_dialed(options, events);
    }
    let size = options.num_proc.unwrap_or(1);
    let placements = hosts::assign(&wanted_hosts(options, size)?, size)?;
    let ssh = ssh_of(options)?;
    let start_timeout = start_timeout_of(options);
    // From here on Ctrl-C ends things in order.
    let signals = Signals::watch()?;
    parent_watch::watch();
    let mut output = start_output(options, size, events)?;

    let hosts: Vec<&Host> = placements.iter().map(|placement| &placement.host).collect();
    let are_local = remote::are_local(&hosts, start_timeout);
    let all_local = are_local.iter().all(|local| *local);
    if all_local {
        platform::adopt_orphans();
    }
    let reach = Reach::of(all_local);
    let check = check_of(options, &placements);
    let interfaces = &options.network_interfaces;
    let rendezvous = Rendezvous::start_with_check(check, size, reach, interfaces)?;
    for line in plan(options, &placements, &are_local, &rendezvous) {
        match options.verbose {
            true => output.note(&format!("horovodrun: {line}")),
            false => tracing::debug!("{line}"),
        }
    }
    let cwd = working_directory()?;
    let now = Instant::now();
    let links = open_links(placements, &are_local, &ssh)?;
    let job = Job {
        options,
        output,
        signals,
        rendezvous,
        links,
        start_timeout,
        cwd,
        state: JobState::new(now, start_timeout),
    };
    Ok(job.run()?)
}

/// Makes the output of the ranks: files, lines and events as the options ask.
pub(crate) fn start_output(
    options: &Options,
    size: u32,
    events: &Events,
) -> Result<Output, LaunchError> {
    let mut output = Output::new(size, options.prefix_timestamp)?;
    output.show_log(options)?;
    output.show_ranks(options.output_ranks.clone());
    output.show_events(events);
    Ok(output)
}

/// Returns the launcher's working directory, which ranks on other hosts use, too.
pub(crate) fn working_directory() -> Result<PathBuf, LaunchError> {
    std::env::current_dir().map_err(|error| {
        LaunchError::Other(format!(
            "the working directory cannot be found (was it removed?): {error}"
        ))
    })
}

/// Waits for agents that connect to this launcher, and runs the job on them.
fn run_dialed(options: &Options, events: &Events) -> Result<u8, LaunchError> {
    let size = options.num_proc.unwrap_or(1);
    let server = dialed::listen(options)?;
    let mut signals = Signals::watch()?;
    parent_watch::watch();
    let mut output = start_output(options, size, events)?;
    dialed::announce(&output, &server);
    let expected = Expected {
        size,
        within: start_timeout_of(options),
        order: Order::HostsTogether,
        started: None,
    };
    let verbose = options.verbose;
    let gathered = dialed::gather(&server, expected, &mut output, &mut signals, verbose)?;
    // No more agents are expected.
    drop(server);
    // The directory of each executor is used.
    run_gathered(options, output, signals, gathered, PathBuf::new())
}

/// Runs the job on the agents that have connected.
pub(crate) fn run_gathered(
    options: &Options,
    output: Output,
    signals: Signals,
    gathered: Gathered,
    cwd: PathBuf,
) -> Result<u8, LaunchError> {
    let size = options.num_proc.unwrap_or(1);
    let start_timeout = start_timeout_of(options);
    let (links, early) = match gathered {
        Gathered::All(links) => (links, None),
        Gathered::Interrupted(signal) => (Vec::new(), Some(Err(signal))),
        Gathered::Failed(why) => (Vec::new(), Some(Ok(why))),
    };
    let own = horovod_transport::host_identity(&environment::hostname());
    let mut tasks = links.iter().filter_map(|link| link.task.as_ref());
    let all_here = tasks.all(|task| task.host == own);
    let reach = Reach::of(all_here && options.network_interfaces.is_empty());
    let rendezvous = Rendezvous::start(size, reach, &options.network_interfaces)?;
    let mut state = JobState::new(Instant::now(), start_timeout);
    match early {
        Some(Ok(why)) => state.fail_start(why),
        Some(Err(signal)) => state.interrupt(signal),
        None => {}
    }
    let job = Job {
        options,
        output,
        signals,
        rendezvous,
        links,
        start_timeout,
        cwd,
        state,
    };
    Ok(job.run()?)
}

/// Returns the shell command that checks the network of this job.
fn check_of(options: &Options, placements: &[Placement]) -> String {
    let mut words = vec!["horovodrun --doctor".to_owned()];
    match (&options.hosts, &options.hostfile) {
        (None, Some(file)) => words.push(format!("--hostfile {}", shell_word(file))),
        _ => {
            let hosts = placements
                .iter()
                .map(|placement| placement.host.to_string());
            words.push(format!("-H {}", hosts.collect::<Vec<_>>().join(",")));
        }
    }
    if let Some(port) = options.ssh_port {
        words.push(format!("-p {port}"));
    }
    if let Some(identity) = &options.ssh_identity_file {
        words.push(format!("-i {}", shell_word(identity)));
    }
    if !options.network_interfaces.is_empty() {
        let names = options.network_interfaces.join(",");
        words.push(format!("--network-interfaces {names}"));
    }
    words.join(" ")
}

/// Quotes a path so that a shell reads it as one word.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text,
        false => remote::shell_quoted(&text),
    }
}

/// Returns how long hosts may take to answer.
pub(crate) fn start_timeout_of(options: &Options) -> Duration {
    let seconds = options.start_timeout.filter(|seconds| *seconds > 0);
    let seconds = seconds
        .or_else(environment::start_timeout)
        .unwrap_or(START_TIMEOUT_S);
    Duration::from_secs(seconds.into())
}

/// Returns how ssh reaches other hosts; the file of the key must exist.
pub(crate) fn ssh_of(options: &Options) -> Result<Ssh, LaunchError> {
    if let Some(identity) = &options.ssh_identity_file {
        std::fs::metadata(identity).map_err(|error| {
            LaunchError::Wrong(format!("the ssh key {}: {error}", identity.display()))
        })?;
    }
    let seconds = start_timeout_of(options).as_secs();
    Ok(Ssh {
        port: options.ssh_port,
        identity: options.ssh_identity_file.clone(),
        connect_timeout_s: u32::try_from(seconds).unwrap_or(u32::MAX),
        alive_interval_s: remote::alive_interval(environment::heartbeat_s()),
    })
}

pub(crate) fn wanted_hosts(options: &Options, size: u32) -> Result<Vec<Host>, LaunchError> {
    if let Some(text) = &options.hosts {
        return Ok(hosts::parse_hosts(text, cores_of_this_machine)?);
    }
    if let Some(allocation) = &options.allocation {
        return Ok(allocation.hosts.clone());
    }
    let found;
    let file = match &options.hostfile {
        Some(file) => file,
        None => match environment::default_hostfile() {
            Some(file) => {
                crate::complain(&format!("note: hosts from {}", file.display()));
                found = file;
                &found
            }
            None => {
                if let Some(note) = oversubscription(size, Share::of_this_process().usable) {
                    crate::complain(&note);
                }
                return Ok(vec![Host {
                    name: "localhost".to_owned(),
                    slots: size,
                }]);
            }
        },
    };
    Ok(hosts::read_hostfile(file)?)
}

/// Returns the note on too many processes for this machine, whose slots the user has not named. A few processes for
/// each core are common in trials and have no note.
fn oversubscription(size: u32, cores: u32) -> Option<String> {
    let of_core = if cores == 1 {
        "1 core"
    } else {
        &format!("{cores} cores")
    };
    (size > cores.saturating_mul(NOTED_PER_CORE)).then(|| {
        format!(
            "note: all {size} processes start on this machine, which has {of_core} for them; -H or --hostfile names \
             other machines"
        )
    })
}

/// Returns the slots of a host that is given without a number; `None` for other machines, whose cores are unknown here.
fn cores_of_this_machine(name: &str) -> Option<u32> {
    let is_own = name == "localhost" || name == environment::hostname();
    is_own.then(|| Share::of_this_process().usable)
}

/// Returns the lines that describe the job and the reasons for its hosts and addresses, for `--verbose` and the log.
fn plan(
    options: &Options,
    placements: &[Placement],
    are_local: &[bool],
    rendezvous: &Rendezvous,
) -> Vec<String> {
    let mut lines = vec![format!("the hosts are {}", origin_of_hosts(options))];
    for (placement, local) in placements.iter().zip(are_local) {
        let ranks: Vec<String> = placement.slots.iter().map(|s| s.rank.to_string()).collect();
        let how = if *local { "this host" } else { "over ssh" };
        let name = &placement.host.name;
        lines.push(format!("{name} ({how}): ranks {}", ranks.join(", ")));
    }
    let places: Vec<String> = rendezvous
        .addresses()
        .iter()
        .map(ToString::to_string)
        .collect();
    let why = match (&options.network_interfaces[..], are_local.contains(&false)) {
        ([], true) => "all interfaces, because some hosts are remote".to_owned(),
        ([], false) => "because all ranks are on this host".to_owned(),
        (named, _) => format!("because --network-interfaces names {}", named.join(", ")),
    };
    lines.push(format!("the ranks meet at {} ({why})", places.join(", ")));
    for (name, value) in &options.knobs {
        lines.push(format!("{name}={value}"));
    }
    let words: Vec<_> = options
        .command
        .iter()
        .map(|word| word.to_string_lossy())
        .collect();
    lines.push(format!("each rank runs: {}", words.join(" ")));
    lines
}

/// Names the source of the hosts that [`wanted_hosts`] chooses.
fn origin_of_hosts(options: &Options) -> String {
    if options.hosts.is_some() {
        return "those of -H".to_owned();
    }
    if let Some(allocation) = &options.allocation {
        return format!(
            "those of the allocation of {} ({})",
            allocation.by, allocation.variables
        );
    }
    match (&options.hostfile, environment::default_hostfile()) {
        (Some(file), _) => format!("those of --hostfile {}", file.display()),
        (None, Some(file)) => format!("those of {}", file.display()),
        (None, None) => "this one, because none are named".to_owned(),
    }
}

pub(crate) fn open_links(
    placements: Vec<Placement>,
    are_local: &[bool],
    ssh: &Ssh,
) -> Result<Vec<HostLink>, LaunchError> {
    let program = std::env::current_exe()?;
    let remote_hosts: Vec<&Host> = placements
        .iter()
        .zip(are_local)
        .filter(|(_, local)| !**local)
        .map(|(placement, _)| &placement.host)
        .collect();
    let mut keys_settled = ssh.new_host_keys_are_settled(&remote_hosts).into_iter();
    let mut links = Vec::new();
    for (placement, &is_local) in placements.into_iter().zip(are_local) {
        let mut command = if is_local {
            local_agent(&program)
        } else {
            ssh.agent(
                &placement.host,
                keys_settled.next().unwrap_or(false),
                &program,
            )
        };
        let name = placement.host.name.clone();
        let what = if is_local { "an agent" } else { "ssh" };
        let has_rank_0 = placement.slots.iter().any(|slot| slot.rank == 0);
        let _lent = (is_local && has_rank_0).then(|| stdin::lend(&mut command));
        let link = HostLink::open(placement, is_local, command).map_err(|error| {
            let what = format!("{what} for host {name} cannot be started");
            LaunchError::Cannot { what, error }
        })?;
        links.push(link);
    }
    Ok(links)
}

pub(crate) fn local_agent(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg(agent::SUBCOMMAND);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_in_a_command_for_people_are_quoted_where_a_shell_needs_it() {
        for (path, word) in [
            ("/home/me/.ssh/id_ed25519", "/home/me/.ssh/id_ed25519"),
            ("my hosts", "'my hosts'"),
            ("it's$HOME", r"'it'\''s$HOME'"),
            ("~/key", "'~/key'"),
        ] {
            assert_eq!(shell_word(Path::new(path)), word);
        }
    }

    #[test]
    fn many_processes_for_each_core_are_noted() {
        assert_eq!(oversubscription(16, 2), None);
        let note = oversubscription(1000, 2).expect("a note");
        assert!(note.contains("all 1000 processes start on this machine, which has 2 cores"));
        assert!(oversubscription(9, 1).is_some_and(|note| note.contains("1 core for them")));
        assert_eq!(oversubscription(u32::MAX, u32::MAX), None);
    }
}

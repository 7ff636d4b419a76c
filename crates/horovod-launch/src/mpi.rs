//! Jobs whose processes MPI's launcher starts, or jsrun: each of these is an agent of one rank, which dials this launcher.
//!
//! The launcher of MPI starts processes and gives them what MPI needs; the agents do the rest, as on other hosts. The
//! key of the agents travels in the environment, never on a command line.

mod family;
mod words;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use horovod_transport::JobKey;
use rustix::process::{Pid, Signal, kill_process_group};

use self::family::Family;
use crate::args::Options;
use crate::dialed::{self, Expected, Gathered, Order};
use crate::events::Events;
use crate::frames::ExitStatus;
use crate::hosts::{self, Host};
use crate::io::{Got, Interest, read_some, set_nonblocking, wait};
use crate::launch::{
    LaunchError, run_gathered, start_output, start_timeout_of, wanted_hosts, working_directory,
};
use crate::rendezvous::Reach;
use crate::report::Cause;
use crate::signals::Signals;
use crate::{environment, parent_watch, remote};

const OWN_TCP: &str =
    "--tcp: Horovod's own links are TCP in any case; NCCL_IB_DISABLE=1 is set, for tensors on GPUs";
/// Bytes of the launcher's own words that are kept.
const WORDS_BYTES_MAX: usize = 32 << 10;
/// How long it may take to end after all agents have, and after SIGTERM.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks at whether it has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Program that starts the processes of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Starter {
    /// This launcher: through ssh where needed.
    #[default]
    Own,
    /// That of the MPI on `PATH`.
    Mpi,
    /// LSF's.
    Jsrun,
}

/// Options about MPI's launcher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpiOptions {
    /// Program that starts the processes.
    pub starter: Starter,
    /// Its further words, as typed.
    pub args: Option<String>,
    /// Words in place of its usual ones about processors, as typed.
    pub binding: Option<String>,
    /// TCP for MPI's messages, where its launcher has an option for that.
    pub tcp: bool,
}

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
    let mut started = Started::start(family.to_string(), command)?;
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

/// MPI's launcher as a child of this process, and the group of processes that the child leads.
pub(crate) struct Started {
    name: String,
    child: Child,
    output: Arc<File>,
    words: Arc<Mutex<Vec<u8>>>,
}

impl Started {
    fn start(name: String, mut command: Command) -> Result<Self, LaunchError> {
        let cannot = |error| LaunchError::Cannot {
            what: format!("{name} cannot be started"),
            error,
        };
        let (reader, writer) = io::pipe().map_err(cannot)?;
        let output = File::from(OwnedFd::from(reader));
        set_nonblocking(&output)?;
        let child = command
            // Away from the terminal's group: Ctrl-C is this launcher's to pass on.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().map_err(cannot)?)
            .stderr(writer)
            .spawn()
            .map_err(cannot)?;
        // The command holds copies of the pipe's end for writing.
        drop(command);
        Ok(Self {
            name,
            child,
            output: Arc::new(output),
            words: Arc::default(),
        })
    }

    /// When to look after it again.
    pub(crate) fn interest(&self) -> Interest<'_> {
        Interest::read(self.output.as_fd())
    }

    /// All that it says until its end, and how it ends; `None` after this time.
    fn answer(mut self, within: Duration) -> io::Result<Option<(String, ExitStatus)>> {
        let deadline = Instant::now() + within;
        while !read(&self.output, &self.words) {
            if Instant::now() >= deadline {
                return Ok(None);
            }
            wait(&[self.interest()], Some(deadline))?;
        }
        self.end(None);
        let status = ExitStatus::from(self.child.wait()?);
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Some((String::from_utf8_lossy(&words).into_owned(), status)))
    }

    /// Why no more agents come, once it has ended.
    pub(crate) fn failure(&mut self) -> Option<String> {
        if !read(&self.output, &self.words) {
            return None;
        }
        self.end(None);
        let status = self.child.try_wait().ok().flatten().map(ExitStatus::from);
        let how = status.map_or_else(|| "ended".to_owned(), |status| Cause::Exit(status).text());
        Some(format!(
            "{} {how} before all processes were there{}",
            self.name,
            self.output_text()
        ))
    }

    /// Its own words, for the end of a message.
    pub(crate) fn output_text(&self) -> String {
        let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&words);
        let lines = text.lines().map(str::trim);
        let lines: Vec<&str> = lines
            .filter(|line| !line.chars().all(|c| "-=".contains(c)))
            .collect();
        match lines.is_empty() {
            true => String::new(),
            false => format!("; its output: {}", lines.join(" ")),
        }
    }

    /// Goes on reading in a thread of its own, so that a full pipe never stops it.
    fn drain(&self) -> io::Result<()> {
        let (output, words) = (Arc::clone(&self.output), Arc::clone(&self.words));
        let thread = std::thread::Builder::new().name("mpi".to_owned());
        thread.spawn(move || {
            while !read(&output, &words) {
                let _ = wait(&[Interest::read(output.as_fd())], None);
            }
        })?;
        Ok(())
    }

    /// Waits for its end after this signal, then after SIGTERM, then kills it.
    fn end(&mut self, first: Option<Signal>) {
        for signal in [first, Some(Signal::TERM)] {
            if let Some(signal) = signal {
                self.signal(signal);
            }
            let deadline = Instant::now() + END_LIMIT;
            while Instant::now() < deadline {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                let _ = wait(&[], Some(Instant::now() + POLL_INTERVAL));
            }
        }
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }

    /// To the whole group: the program may be a script that has started the launcher itself.
    fn signal(&mut self, signal: Signal) {
        // Once it has been waited for, the number may be another's.
        if matches!(self.child.try_wait(), Ok(None)) {
            let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
            let _ = group.map(|group| kill_process_group(group, signal));
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.end(Some(Signal::TERM));
    }
}

/// Keeps the end of what is there; whether all has been read.
fn read(output: &File, words: &Mutex<Vec<u8>>) -> bool {
    let mut buffer = [0; 4096];
    let mut output = output;
    loop {
        match read_some(&mut output, &mut buffer) {
            Got::Bytes(count) => {
                let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
                words.extend_from_slice(&buffer[..count]);
                let surplus = words.len().saturating_sub(WORDS_BYTES_MAX);
                words.drain(..surplus);
            }
            Got::Nothing => return false,
            Got::End => return true,
        }
    }
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

    #[test]
    fn a_launcher_that_is_a_script_ends_with_all_it_has_started() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "(sleep 60; echo late) & echo early; wait"]);
        let mut started = Started::start("sh".to_owned(), command).expect("a shell");
        while !started.words.lock().expect("no panic").contains(&b'\n') {
            wait(&[started.interest()], None).expect("a wait");
            assert!(!read(&started.output, &started.words), "it goes on");
        }
        started.signal(Signal::KILL);
        // The end of the pipe that both hold.
        while !read(&started.output, &started.words) {
            wait(&[started.interest()], None).expect("a wait");
        }
        assert_eq!(*started.words.lock().expect("no panic"), b"early\n");
    }
}

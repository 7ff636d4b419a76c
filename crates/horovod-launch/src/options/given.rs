//! The options of a command line, as values.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use horovod_doctor::Form as DoctorForm;

use crate::allocation::Allocation;

/// Options of the command line.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Number of processes to start.
    pub num_proc: Option<u32>,
    /// `-H`: hosts and slots as typed.
    pub hosts: Option<String>,
    /// File with hosts and slots.
    pub hostfile: Option<PathBuf>,
    /// ssh port of all hosts.
    pub ssh_port: Option<u16>,
    /// Private key for ssh.
    pub ssh_identity_file: Option<PathBuf>,
    /// Interfaces to use between hosts; empty means all.
    pub network_interfaces: Vec<String>,
    /// Directory for one pair of files per rank.
    pub output_filename: Option<PathBuf>,
    /// Directory that gets a new one for each run, with one pair of files per rank.
    pub log_dir: Option<PathBuf>,
    /// Ranks whose output is shown, as first and last of each group; `None`: all.
    pub output_ranks: Option<Vec<(u32, u32)>>,
    /// Only print a script for this shell.
    pub completion: Option<Shell>,
    /// Put the local time before each line's rank.
    pub prefix_timestamp: bool,
    /// Say what is done.
    pub verbose: bool,
    /// Seconds until all hosts must have answered.
    pub start_timeout: Option<u32>,
    /// Seconds from SIGTERM to SIGKILL.
    pub terminate_timeout: Option<u32>,
    /// Only look at the hosts, and say so in this form.
    pub doctor: Option<DoctorForm>,
    /// Only show running jobs.
    pub status: Option<Wanted>,
    /// Only show a running job until the user quits.
    pub top: Option<Wanted>,
    /// Only record so much of a running job.
    pub trace: Option<(Duration, Wanted)>,
    /// Only report what this installation can do.
    pub check_build: bool,
    /// Only print the version.
    pub version: bool,
    /// Only print the help.
    pub help: bool,
    /// YAML file with settings for the ranks.
    pub config_file: Option<PathBuf>,
    /// Agents dial the launcher.
    pub dialed: bool,
    /// Port on which the launcher waits for them; `None`: any.
    pub agents_port: Option<u16>,
    /// Whether MPI's launcher starts the ranks.
    pub mpi: MpiOptions,
    /// The allocation of the batch system's job around this process, when the command line names no hosts.
    pub allocation: Option<Allocation>,
    /// One line for each thing that was accepted but means nothing here.
    pub notes: Vec<String>,
    /// How the members may change.
    pub elastic: ElasticOptions,
    /// Settings for the ranks: environment variable and value, in the order given.
    pub knobs: Vec<(&'static str, String)>,
    /// The command of every rank.
    pub command: Vec<OsString>,
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

/// Options of the command line for changing members.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ElasticOptions {
    /// Shell command that prints the hosts there are now.
    pub script: Option<String>,
    /// Processes needed to go on.
    pub min_np: Option<u32>,
    /// Most processes.
    pub max_np: Option<u32>,
    /// Slots of a host that the script names without a number.
    pub slots_per_host: Option<u32>,
    /// Seconds to wait for enough processes.
    pub timeout: Option<u32>,
    /// Most changes of the members.
    pub reset_limit: Option<u32>,
    /// Seconds for which a failed host is left alone: the first time, and at most.
    pub cooldown: Option<(u32, u32)>,
}

/// A shell that can complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shell {
    /// GNU Bash.
    Bash,
    /// The Z shell.
    Zsh,
    /// The friendly interactive shell.
    Fish,
}

/// The jobs that are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// All jobs of this user.
    All,
    /// The one whose rank 0 is this process.
    Process(u32),
}

/// Why a command line was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Text of an option's value; the error names what was found.
pub(crate) fn text(value: &OsStr) -> Result<&str, String> {
    value
        .to_str()
        .ok_or_else(|| format!("{value:?} is not valid UTF-8"))
}

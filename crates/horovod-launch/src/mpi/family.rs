//! The one table of MPI's launchers: how each is recognised, and how it starts an agent for each rank.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::launcher::MpiLauncher;
use super::words;
use crate::frames::ExitStatus;
use crate::hosts::Host;
use crate::launch_error::LaunchError;
use crate::options::{Options, Starter};
use crate::report::Cause;
use crate::{agent, dialing, environment};

/// From this number of hosts on Open MPI's launcher connects to all of them itself, at once.
const MANY_HOSTS: usize = 64;

/// Launchers that take the same options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FamilyKind {
    /// Open MPI up to version 4.
    OpenMpi,
    /// Open MPI from version 5 on: its launcher is PRRTE's.
    Prrte,
    Spectrum,
    /// MPICH and those that have its launcher, such as MVAPICH.
    Hydra,
    Intel,
    Jsrun,
}

/// A launcher of this host.
#[derive(Debug)]
pub(super) struct Family {
    kind: FamilyKind,
    program: PathBuf,
    /// Its name and version, as it says.
    banner: String,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.program.file_name().unwrap_or_default();
        write!(f, "{} ({})", name.display(), self.banner)
    }
}

/// A command line, and variables of the launcher itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Line {
    words: Vec<OsString>,
    env: Vec<(&'static str, String)>,
}

impl Line {
    fn add<W: Into<OsString>>(&mut self, words: impl IntoIterator<Item = W>) {
        self.words.extend(words.into_iter().map(Into::into));
    }

    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]);
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.words.iter().map(|word| word.to_string_lossy());
        f.write_str(&words.collect::<Vec<_>>().join(" "))
    }
}

fn wrong<T>(text: impl Into<String>) -> Result<T, LaunchError> {
    Err(LaunchError::Wrong(text.into()))
}

impl Family {
    /// The launcher on `PATH`, which has to say within this time which one it is.
    pub(super) fn find(starter: Starter, within: Duration) -> Result<Self, LaunchError> {
        if starter == Starter::Jsrun {
            if !environment::is_in_lsf() {
                return wrong(
                    "argument --jsrun: Horovod did not detect an LSF job. (LSB_JOBID is not set; inside a job of bsub \
                     it is)",
                );
            }
            let Some(program) = on_path("jsrun") else {
                return wrong("argument --jsrun: there is no jsrun on PATH");
            };
            return Ok(Self {
                kind: FamilyKind::Jsrun,
                program,
                banner: "LSF".to_owned(),
            });
        }
        let Some(program) = on_path("mpirun").or_else(|| on_path("mpiexec")) else {
            return wrong(
                "argument --mpi: horovod does not find an installed MPI. Neither mpirun nor mpiexec is on PATH; \
                 without --mpi the ranks are started without MPI",
            );
        };
        let text = version(&program, within)?;
        match recognise(&text) {
            Some((kind, banner)) => Ok(Self {
                kind,
                program,
                banner,
            }),
            None => wrong(format!(
                "argument --mpi: {} --version says nothing of Open MPI, Spectrum MPI, MPICH, MVAPICH or Intel MPI, \
                 but {:?}; without --mpi the ranks are started without MPI",
                program.display(),
                start_of(&text)
            )),
        }
    }

    /// The command line that starts an agent of this program for each rank.
    pub(super) fn line(
        &self,
        options: &Options,
        hosts: &[Host],
        program: &Path,
    ) -> Result<Line, LaunchError> {
        if let Some(host) = hosts.iter().find(|host| host.name.contains('@')) {
            return wrong(format!(
                "host {}: MPI's launcher takes no user names; put `User` for this host into ~/.ssh/config",
                host.name
            ));
        }
        let mpi = &options.mpi;
        let args = split("--mpi-args", mpi.args.as_deref())?;
        let binding = match &mpi.binding {
            Some(text) => Some(split("--binding-args", Some(text))?),
            None => None,
        };
        let mut line = Line::default();
        line.add([&self.program]);
        match self.kind {
            FamilyKind::OpenMpi | FamilyKind::Prrte | FamilyKind::Spectrum => {
                self.open_mpi(&mut line, options, hosts, binding);
            }
            FamilyKind::Hydra | FamilyKind::Intel => {
                self.hydra(&mut line, options, hosts, binding)?
            }
            FamilyKind::Jsrun => jsrun(&mut line, options, hosts, binding)?,
        }
        match self.kind {
            FamilyKind::Jsrun => {}
            _ => line.add(args),
        }
        line.add([program]);
        line.add([agent::SUBCOMMAND, dialing::STARTED_BY_MPI]);
        Ok(line)
    }

    fn open_mpi(
        &self,
        line: &mut Line,
        options: &Options,
        hosts: &[Host],
        binding: Option<Vec<String>>,
    ) {
        let is_prrte = self.kind == FamilyKind::Prrte;
        // PRRTE has the parameters of the launcher itself, which Open MPI 4 keeps with its own.
        let (of_launcher, ssh) = match is_prrte {
            true => ("--prtemca", "plm_ssh"),
            false => ("-mca", "plm_rsh"),
        };
        line.add(["--allow-run-as-root", "-np"]);
        line.add([count(hosts).to_string()]);
        line.add(["-H".to_owned(), list(hosts)]);
        match (binding, self.kind) {
            (Some(words), _) => line.add(words),
            (None, FamilyKind::Spectrum) => {
                line.add("-bind-to socket -map-by socket -rank-by core".split(' '));
            }
            (None, _) => line.add("--bind-to none --map-by slot".split(' ')),
        }
        if self.kind == FamilyKind::Spectrum && options.mpi.tcp {
            line.add(["-tcp"]);
        }
        if hosts.len() >= MANY_HOSTS {
            line.add([of_launcher, &format!("{ssh}_no_tree_spawn"), "true"]);
            let at_once = hosts.len().to_string();
            line.add([of_launcher, &format!("{ssh}_num_concurrent"), &at_once]);
        }
        if let Some(words) = ssh_words(options) {
            line.add([of_launcher, &format!("{ssh}_args"), &words]);
        }
        if !options.network_interfaces.is_empty() {
            let names = options.network_interfaces.join(",");
            line.add(["-mca", "btl_tcp_if_include", &names]);
            let of_daemons = match is_prrte {
                true => "prte_if_include",
                false => "oob_tcp_if_include",
            };
            line.add([of_launcher, of_daemons, &names]);
        }
        for name in environment::OF_AGENTS {
            line.add(["-x", name]);
        }
    }

    fn hydra(
        &self,
        line: &mut Line,
        options: &Options,
        hosts: &[Host],
        binding: Option<Vec<String>>,
    ) -> Result<(), LaunchError> {
        line.add(["-np".to_owned(), count(hosts).to_string()]);
        if self.kind == FamilyKind::Intel {
            let slots = equal_slots(hosts, "Intel MPI's -ppn", "")?;
            let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            line.add(["-ppn".to_owned(), slots.to_string()]);
            line.add(["-hosts".to_owned(), names.join(",")]);
        } else {
            line.add(["-hosts".to_owned(), list(hosts)]);
        }
        match (binding, self.kind) {
            (Some(words), _) => line.add(words),
            (None, FamilyKind::Intel) => {}
            (None, _) => line.add(["-bind-to", "none"]),
        }
        match &options.network_interfaces[..] {
            [] => {}
            [name] => line.add(["-iface", name]),
            several => {
                return wrong(format!(
                    "argument --network-interfaces: {} takes one interface, got {}",
                    self.banner,
                    several.join(",")
                ));
            }
        }
        if let Some(words) = ssh_words(options) {
            let name = match self.kind {
                FamilyKind::Intel => "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",
                _ => "HYDRA_LAUNCHER_EXTRA_ARGS",
            };
            line.env.push((name, words));
        }
        // All of the environment reaches the processes.
        Ok(())
    }
}

const OF_LSF: &str = "which starts the ranks on the hosts of the LSF job";
const WITHOUT_SSH: &str = "which uses no ssh";

/// One resource set for each host: its ranks choose among all GPUs and cores there, as without jsrun.
fn jsrun(
    line: &mut Line,
    options: &Options,
    hosts: &[Host],
    binding: Option<Vec<String>>,
) -> Result<(), LaunchError> {
    for (option, is_given, advice) in [
        ("-H", options.hosts.is_some(), OF_LSF),
        ("--hostfile", options.hostfile.is_some(), OF_LSF),
        ("-p", options.ssh_port.is_some(), WITHOUT_SSH),
        ("-i", options.ssh_identity_file.is_some(), WITHOUT_SSH),
    ] {
        if is_given {
            return wrong(format!(
                "argument {option}: not allowed with --jsrun, {advice}; leave {option} out"
            ));
        }
    }
    let mpi = &options.mpi;
    match binding {
        Some(words) => line.add(words),
        None => {
            let hint = ", or say with --binding-args which resources the ranks get";
            let slots = equal_slots(hosts, "one resource set for each host", hint)?;
            line.add(["--nrs".to_owned(), hosts.len().to_string()]);
            line.add(["--tasks_per_rs".to_owned(), slots.to_string()]);
            line.add("--rs_per_host 1 --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS".split(' '));
            line.add(["--bind", "none"]);
        }
    }
    let of_mpi = [mpi.tcp.then_some("-tcp"), mpi.args.as_deref()];
    let of_mpi: Vec<&str> = of_mpi.into_iter().flatten().collect();
    if !of_mpi.is_empty() {
        line.add(["--smpiargs".to_owned(), of_mpi.join(" ")]);
    }
    Ok(())
}

/// Output of `--version`.
fn version(program: &Path, within: Duration) -> Result<String, LaunchError> {
    let mut command = Command::new(program);
    command.arg("--version");
    let started = MpiLauncher::start(program.display().to_string(), command)?;
    let name = program.display();
    match started.answer(within)? {
        Some((text, ExitStatus::Code(0))) => Ok(text),
        Some((text, status)) => wrong(format!(
            "argument --mpi: {name} --version {}, its output: {:?}; mend this MPI or put another first on PATH",
            Cause::Exit(status).text(),
            start_of(&text)
        )),
        None => wrong(format!(
            "argument --mpi: {name} --version has not ended within {} s (see --start-timeout); mend this MPI or put \
             another first on PATH",
            within.as_secs()
        )),
    }
}

fn start_of(text: &str) -> String {
    text.trim().chars().take(200).collect()
}

/// The kind, and its name and version for messages.
fn recognise(text: &str) -> Option<(FamilyKind, String)> {
    let line = |word: &&str| text.lines().find(|line| line.contains(*word));
    let found = |words: &[&str]| words.iter().find_map(line);
    let last_word = |line: &str| {
        line.split_whitespace()
            .last()
            .unwrap_or_default()
            .to_owned()
    };
    if let Some(banner) = found(&["Spectrum MPI"]) {
        return Some((
            FamilyKind::Spectrum,
            format!("Spectrum MPI {}", last_word(banner)),
        ));
    }
    if let Some(banner) = found(&["Open MPI", "OpenRTE"]) {
        let version = last_word(banner);
        let major: Option<u32> = version.split('.').next().and_then(|v| v.parse().ok());
        let kind = match major {
            Some(5..) => FamilyKind::Prrte,
            _ => FamilyKind::OpenMpi,
        };
        return Some((kind, format!("Open MPI {version}")));
    }
    if let Some(banner) = found(&["Intel(R) MPI"]) {
        return Some((FamilyKind::Intel, banner.trim().to_owned()));
    }
    found(&["MPICH", "HYDRA", "MVAPICH"])?;
    let version = found(&["Version:"]).map(last_word).unwrap_or_default();
    Some((
        FamilyKind::Hydra,
        format!("Hydra {version}").trim().to_owned(),
    ))
}

fn on_path(name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let is_program = |path: &PathBuf| {
        let found = std::fs::metadata(path);
        found.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&environment::path())
        .map(|folder| folder.join(name))
        .find(is_program)
}

fn split(option: &str, text: Option<&str>) -> Result<Vec<String>, LaunchError> {
    words::split(text.unwrap_or_default())
        .map_err(|why| LaunchError::Wrong(format!("argument {option}: {why}")))
}

fn count(hosts: &[Host]) -> u32 {
    hosts.iter().map(|host| host.slots).sum()
}

fn list(hosts: &[Host]) -> String {
    let hosts = hosts.iter().map(Host::to_string);
    hosts.collect::<Vec<_>>().join(",")
}

fn equal_slots(hosts: &[Host], what: &str, hint: &str) -> Result<u32, LaunchError> {
    let first = hosts.first().map_or(1, |host| host.slots);
    match hosts.iter().all(|host| host.slots == first) {
        true => Ok(first),
        false => wrong(format!(
            "{what} needs the same number of processes on each host, got {}: choose -np and -H accordingly{hint}",
            list(hosts)
        )),
    }
}

/// Options for ssh, in one text.
fn ssh_words(options: &Options) -> Option<String> {
    let port = options.ssh_port.map(|port| format!("-p {port}"));
    let identity = options.ssh_identity_file.as_ref();
    let identity = identity.map(|path| format!("-i {}", path.display()));
    let words: Vec<String> = port.into_iter().chain(identity).collect();
    (!words.is_empty()).then(|| words.join(" "))
}

#[cfg(test)]
mod tests;

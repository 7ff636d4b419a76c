//! `horovodrun --doctor`: an examination of a job's hosts before there is a job, and what to mend.
//!
//! The launcher starts its agents as for a job and carries questions to them and answers back; `agent` does that on a
//! host. The questions, the answers and what follows from them are in the crate `horovod-doctor`.

pub(crate) mod agent;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use horovod_doctor::{Agents, Form, Job, JobPlan, News, Patient, Question, output_of};

use crate::endings::{Kill, let_go};
use crate::frames::{FromAgent, ToAgent, Variables};
use crate::hosts::{self, Host, Placement};
use crate::io::{Interest, wait};
use crate::launch::{open_links, ssh_of, wanted_hosts};
use crate::launch_error::LaunchError;
use crate::link::{HostLink, HostStage};
use crate::options::Options;
use crate::signals::Signals;
use crate::{environment, parent_watch, platform, remote};

/// How long a name server may take to say which hosts are this machine.
const RESOLVE_TIME: Duration = Duration::from_secs(2);
/// How long the script that lists the hosts of an elastic job may take.
const SCRIPT_TIME: Duration = Duration::from_secs(3);
/// How long ssh may try to connect.
const SSH_TIME_S: u32 = 5;
/// Until agents that were told to go have gone.
const FAREWELL: Duration = Duration::from_millis(300);

/// Examines the hosts and prints the result; 0 if nothing would stop a job.
pub(crate) fn run(options: &Options, form: Form) -> Result<u8, LaunchError> {
    examine(options, form).map_err(|error| match error {
        error if error.is_out_of_files() => LaunchError::Other(format!(
            "{error}: the limit of open files is too low for the launcher itself, \
             see `ulimit -n`; try `ulimit -n 1024`"
        )),
        error => error,
    })
}

fn examine(options: &Options, form: Form) -> Result<u8, LaunchError> {
    let begun = Instant::now();
    let (hosts, size) = hosts_of(options)?;
    let mut placements = hosts::assign(&hosts, size)?;
    let mut ssh = ssh_of(options)?;
    ssh.connect_timeout_s = ssh.connect_timeout_s.min(SSH_TIME_S);
    let signals = Signals::watch()?;
    parent_watch::watch();
    platform::adopt_orphans();
    let named: Vec<&Host> = placements.iter().map(|placement| &placement.host).collect();
    let mut are_local = remote::are_local(&named, RESOLVE_TIME);
    if !are_local.contains(&true) {
        // Every rank connects to the launcher, wherever that runs.
        placements.push(Placement {
            host: Host {
                name: "localhost".to_owned(),
                slots: 0,
            },
            slots: Vec::new(),
        });
        are_local.push(true);
    }
    let cwd = std::env::current_dir()?;
    let patients = placements.iter().zip(&are_local);
    let patients = patients.map(|(placement, is_local)| {
        let slots = u32::try_from(placement.slots.len()).unwrap_or(u32::MAX);
        Patient::new(&placement.host.name, slots, *is_local)
    });
    let patients = patients.collect();
    let job = Job {
        plan: plan(options, size, cwd),
        interfaces: options.network_interfaces.clone(),
        command: options.command.clone(),
    };
    let mut agents = Links {
        options,
        signals,
        links: open_links(placements, &are_local, &ssh)?,
        interrupted_by: None,
    };
    let chart = horovod_doctor::examine(&mut agents, job, patients, begun)?;
    agents.hang_up()?;
    if let Some(signal) = agents.interrupted_by {
        return Ok((128 + signal) as u8);
    }
    let report = chart.report(form);
    crate::show(&report.text);
    Ok(u8::from(report.would_stop))
}

/// The planned job according to the settings.
fn plan(options: &Options, size: u32, cwd: PathBuf) -> JobPlan {
    let program = options.command.first().map(Path::new);
    let name = program.and_then(|program| program.file_name());
    let runs_python = name.is_none_or(|name| name.to_string_lossy().starts_with("python"));
    let settings = environment::of_data_plane();
    JobPlan {
        size,
        staging: settings.staging,
        connections: settings.connections,
        ports: settings
            .ports
            .map(|(first, last)| (first.into(), last.into())),
        encrypt: settings.encrypt,
        runs_python,
        cwd,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// The agents of all hosts, as the launcher has them.
struct Links<'a> {
    options: &'a Options,
    signals: Signals,
    links: Vec<HostLink>,
    interrupted_by: Option<i32>,
}

impl Links<'_> {
    /// Everything was asked.
    fn hang_up(&mut self) -> io::Result<()> {
        let until = Instant::now() + FAREWELL;
        self.links.iter_mut().for_each(HostLink::hang_up);
        while self.links.iter_mut().any(|link| !link.has_ended()) && Instant::now() < until {
            wait(&[Interest::read(self.signals.as_fd())], Some(until))?;
            let _ = self.signals.take();
        }
        let_go(&mut self.links, &mut self.signals, Kill::AtOnce)
    }

    fn lose(&mut self, host: usize, why: &str) -> String {
        let link = &mut self.links[host];
        let why = match link.stage == HostStage::Greeted {
            true => link.with_words(why),
            false => link.why_not_started(),
        };
        self.dismiss(host);
        why
    }
}

impl Agents for Links<'_> {
    fn ask(&mut self, host: usize, question: Question) {
        self.links[host].send(&ToAgent::Examine(question));
    }

    fn environment(&self, host: usize) -> Variables {
        let mut env = environment::forwarded(self.links[host].is_local);
        let knobs = self.options.knobs.iter();
        env.extend(knobs.map(|(name, value)| (name.into(), OsString::from(value))));
        env
    }

    fn receive(&mut self, deadline: Instant) -> io::Result<Option<Vec<(usize, News)>>> {
        let mut interests = vec![Interest::read(self.signals.as_fd())];
        for link in self.links.iter().filter(|link| !link.is_over()) {
            interests.extend(link.interests(true));
        }
        wait(&interests, Some(deadline))?;
        self.interrupted_by = self.signals.take().first().copied();
        if self.interrupted_by.is_some() {
            return Ok(None);
        }
        let mut news = Vec::new();
        for host in 0..self.links.len() {
            if self.links[host].is_over() {
                continue;
            }
            let (messages, result) = self.links[host].exchange(true);
            for message in messages {
                match message {
                    FromAgent::Hello { version, .. } => {
                        match remote::other_version(&version) {
                            None => {
                                self.links[host].stage = HostStage::Greeted;
                                news.push((host, News::Greeted));
                            }
                            Some(problem) => {
                                self.dismiss(host);
                                news.push((host, News::Absent(problem)));
                            }
                        };
                    }
                    FromAgent::Found(answer) => {
                        news.push((host, News::Answer(answer, Instant::now())));
                    }
                    _ => {}
                }
            }
            if let Err(why) = result
                && !self.links[host].is_over()
            {
                let why = self.lose(host, &why);
                news.push((host, News::Absent(why)));
            }
        }
        Ok(Some(news))
    }

    fn dismiss(&mut self, host: usize) {
        let link = &mut self.links[host];
        link.kill();
        link.stage = HostStage::Lost;
    }
}

/// The hosts of the job, and how many ranks it would have.
fn hosts_of(options: &Options) -> Result<(Vec<Host>, u32), LaunchError> {
    let all = |hosts: &[Host]| {
        hosts
            .iter()
            .fold(0, |sum: u32, h| sum.saturating_add(h.slots))
    };
    let Some(script) = &options.elastic.script else {
        let hosts = wanted_hosts(options, options.num_proc.unwrap_or(1))?;
        let size = options.num_proc.unwrap_or_else(|| all(&hosts));
        return Ok((hosts, size));
    };
    let mut shell = std::process::Command::new("/bin/sh");
    shell.arg("-c").arg(script);
    let what = format!("the host discovery script ({script})");
    let (_, listed, _) = output_of(shell, Instant::now() + SCRIPT_TIME).map_err(|error| {
        let what = what.clone();
        LaunchError::Cannot { what, error }
    })?;
    let hosts = hosts::parse_discovered(&listed, options.elastic.slots_per_host)
        .map_err(|why| LaunchError::Other(format!("{what}: {why}")))?;
    let size = all(&hosts).min(options.elastic.max_np.unwrap_or(u32::MAX));
    Ok((hosts, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host whose agent did not start.
    struct Absent(String);

    impl Agents for Absent {
        fn ask(&mut self, _: usize, _: Question) {
            unreachable!("it is absent")
        }

        fn environment(&self, _: usize) -> Variables {
            Variables::new()
        }

        fn receive(&mut self, _: Instant) -> io::Result<Option<Vec<(usize, News)>>> {
            Ok(Some(vec![(0, News::Absent(self.0.clone()))]))
        }

        fn dismiss(&mut self, _: usize) {}
    }

    #[test]
    fn every_text_of_ssh_that_the_launcher_explains_has_a_fix_of_its_own() {
        let fix_of = |why: &str| {
            let job = Job {
                plan: JobPlan::default(),
                interfaces: Vec::new(),
                command: Vec::new(),
            };
            let hosts = vec![Patient::new("h", 2, true)];
            let mut agents = Absent(why.to_owned());
            let chart = horovod_doctor::examine(&mut agents, job, hosts, Instant::now());
            chart.expect("no I/O").report(Form::Json).text
        };
        let other = "by hand: a start-up file";
        let text = fix_of("its agent did not start (Welcome)");
        assert!(text.contains(other), "{text}");
        for words in [
            "Could not resolve hostname",
            "Permission denied",
            "Host key verification failed",
            "Connection refused",
            "No route to host",
            "Network is unreachable",
            "timed out",
            "was found: install",
            "Too many authentication failures",
        ] {
            let why = remote::why_not_started(false, words, None);
            let text = fix_of(&why);
            assert!(!text.contains(other), "{why}: {text}");
        }
    }
}

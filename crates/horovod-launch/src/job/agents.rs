//! Messages of the agents and the launcher's answers to them.

use std::path::Path;
use std::time::Instant;

use super::{Job, has_rank};
use crate::endings::terminate_timeout_of;
use crate::events::Event;
use crate::frames::{FromAgent, JobSpec, RankSpec, Stop, ToAgent, Variables};
use crate::link::HostStage;
use crate::options::Options;
use crate::options::Starter;
use crate::rendezvous::Rendezvous;
use crate::report::Cause;
use crate::{dialed, environment, remote, threads};

/// Returns the job's specification for the agent of a host, without its ranks.
pub(crate) fn spec(
    options: &Options,
    rendezvous: &Rendezvous,
    cwd: &Path,
    is_local: bool,
) -> JobSpec {
    let is_mpi = options.mpi.starter != Starter::Own;
    let mut env = match is_mpi {
        true => environment::forwarded_to_mpi(&options.mpi.variables()),
        false => environment::forwarded(is_local),
    };
    let of_job = environment::of_job(
        rendezvous.addresses(),
        &rendezvous.key(),
        &options.network_interfaces,
        &options.knobs,
    );
    let mut on_top = Variables::new();
    if options.dialed {
        on_top.extend(environment::on_top());
        on_top.extend(of_job);
    } else {
        env.extend(of_job);
        env.extend(is_mpi.then(environment::controller_is_mpi));
    }
    JobSpec {
        inherit_env: !is_local,
        env,
        on_top,
        stays: options.dialed,
        cwd: cwd.to_owned(),
        command: options.command.clone(),
        silence_max_s: remote::silence_max(is_local, environment::heartbeat_s()),
        terminate_timeout_s: terminate_timeout_of(options),
        ranks: Vec::new(),
        is_open: false,
    }
}

impl Job<'_> {
    pub(super) fn on_message(&mut self, index: usize, message: FromAgent) {
        let verbose = self.options.verbose;
        let name = self.links[index].name().to_owned();
        match message {
            FromAgent::Hello {
                version, hostname, ..
            } => {
                if let Some(text) = remote::other_version(&version) {
                    self.refuse(index, 1, &text);
                    return;
                }
                if verbose {
                    self.output.note(&format!(
                        "horovodrun: {name} answers and calls itself {hostname}"
                    ));
                }
                self.links[index].stage = HostStage::Greeted;
                if self.slowest() == HostStage::Greeted {
                    self.send_jobs();
                }
            }
            FromAgent::Ready => {
                self.links[index].stage = HostStage::Ready;
                if self.slowest() == HostStage::Ready && self.state.start_errors.is_empty() {
                    self.start();
                }
            }
            FromAgent::Refused { code, why } => self.refuse(index, code, &why),
            FromAgent::Note(text) => self.output.note(&format!("horovodrun: {name}: {text}")),
            FromAgent::Started { rank, pid } => {
                self.output.emit(&Event::Started {
                    worker: rank,
                    host: name.clone(),
                    pid,
                });
                if verbose {
                    self.output.note(&format!(
                        "horovodrun: rank {rank} runs on {name} as process {pid}"
                    ));
                }
            }
            FromAgent::Output {
                rank,
                stream,
                bytes,
            } => {
                if self.is_of(index, rank) {
                    self.output.push(rank, stream, &bytes);
                }
            }
            FromAgent::Exited { rank, status } => {
                if self.is_of(index, rank) {
                    self.on_end(index, rank, Cause::Exit(status));
                }
            }
            FromAgent::Done => {
                self.links[index].stage = HostStage::Done;
                // Agents that MPI's launcher has started all end together, after the job.
                if self.options.mpi.starter == Starter::Own {
                    self.links[index].hang_up();
                }
            }
            FromAgent::Unreached(report) => {
                if self.is_of(index, report.rank()) {
                    self.rendezvous.report_unreached(report);
                }
            }
            FromAgent::Threads(report) => self.state.threads.push((name, report)),
            // The launcher has not requested these reports.
            FromAgent::Found(_) | FromAgent::StoppedState { .. } => {}
        }
    }

    fn is_of(&self, index: usize, rank: u32) -> bool {
        has_rank(&self.links[index], rank)
    }

    fn refuse(&mut self, index: usize, code: u8, why: &str) {
        let link = &mut self.links[index];
        let text = match link.is_local {
            true => why.to_owned(),
            false => format!("host {}: {why}", link.name()),
        };
        if self.state.is_running {
            // The agent ends the ranks that it has started and reports their ends.
            self.state.start_errors.push((code, text));
            self.ask(Stop::Terminate);
        } else {
            link.hang_up();
            link.stage = HostStage::Lost;
            self.start_error(code, text);
        }
    }

    /// Sends each host its job, after every host has answered.
    pub(super) fn send_jobs(&mut self) {
        self.state.start_deadline = Instant::now() + self.start_timeout;
        self.state.has_sent_jobs = true;
        for link in &mut self.links {
            let host = &link.placement.host;
            let ranks = link.placement.slots.iter().map(|slot| RankSpec {
                rank: slot.rank,
                env: dialed::with_host_name(environment::of_rank(host, *slot), link.task.as_ref()),
            });
            link.send(&ToAgent::Job(JobSpec {
                ranks: ranks.collect(),
                ..spec(self.options, &self.rendezvous, &self.cwd, link.is_local)
            }));
        }
    }

    /// Starts the ranks, after every host has reported that it is ready.
    fn start(&mut self) {
        let size = self.options.num_proc.unwrap_or(1);
        if let Err(why) = self.output.open_files_of(self.options, size) {
            self.start_error(1, why);
            for link in &mut self.links {
                link.hang_up();
                link.stage = HostStage::Lost;
            }
            return;
        }
        self.state.is_running = true;
        for line in threads::news(&self.state.threads, self.options.verbose) {
            self.output.note(&format!("horovodrun: {line}"));
        }
        for link in &mut self.links {
            link.send(&ToAgent::Start);
        }
    }

    pub(super) fn on_lost(&mut self, index: usize, why: &str) {
        if self.links[index].is_over() {
            return;
        }
        self.links[index].stage = HostStage::Lost;
        let name = self.links[index].name().to_owned();
        if !self.state.is_running {
            let why = self.links[index].why_not_started();
            let text = match self.links[index].is_local {
                true => why,
                false => format!("host {name}: {why}"),
            };
            self.links[index].kill();
            self.start_error(1, text);
            return;
        }
        let why = self.links[index].with_words(why);
        let slots: Vec<u32> = self.links[index]
            .placement
            .slots
            .iter()
            .map(|s| s.rank)
            .collect();
        for rank in slots {
            if !self.state.ends.iter().any(|end| end.rank == rank) {
                self.on_end(index, rank, Cause::HostLost(why.clone()));
            }
        }
        self.links[index].kill();
    }
}

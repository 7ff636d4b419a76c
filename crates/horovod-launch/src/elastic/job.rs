//! An elastic job of `horovodrun`: passes the messages of agents, the list of hosts, and signals to the supervisor.
//!
//! One thread polls everything, as in a job of fixed size; the discovery of hosts and the rendezvous have their own
//! threads.

use std::io;
use std::time::Instant;

use horovod_transport::agents::Server;

use super::agents::Agents;
use super::discovery::{Discovery, Listed};
use super::events::Ending;
use super::supervisor::Supervisor;
use crate::endings::{CONSOLE_GRACE, Kill, let_go};
use crate::events::{End, Event as JobEvent, JobOutcome};
use crate::frames::{FromAgent, Stop, ToAgent};
use crate::io::{Interest, earlier, wait};
use crate::job::ended_by;
use crate::link::{HostLink, HostStage};
use crate::remote;
use crate::report::Cause;
use crate::signals::Signals;

/// A job under way.
pub(super) struct ElasticJob<'a> {
    pub(super) supervisor: Supervisor<Agents<'a>>,
    pub(super) signals: Signals,
    /// The discovery of hosts; `None` if hosts dial in.
    pub(super) discovery: Option<Discovery>,
    /// The server to which hosts dial in.
    pub(super) server: Option<Server>,
    /// Whether a list of hosts, or a first host, was ever received.
    pub(super) has_listed: bool,
    /// Last error of the discovery, until it succeeds again.
    pub(super) last_complaint: Option<String>,
    pub(super) interrupted_by: Option<i32>,
}

impl<'a> ElasticJob<'a> {
    /// Runs the job to its end and returns the launcher's exit code.
    pub(super) fn run(mut self) -> io::Result<u8> {
        while !self.is_over() {
            self.step()?;
        }
        let end = self.conclude();
        let status = end.status;
        // The discovery script must not count as a process that a worker left behind.
        drop(self.discovery);
        let Agents { links, output, .. } = self.supervisor.into_executor();
        let mut links: Vec<HostLink> = links.into_iter().map(|l| l.link).collect();
        let_go(&mut links, &mut self.signals, Kill::AfterGrace)?;
        output.emit(&JobEvent::End(end));
        output.close(self.interrupted_by.map(|_| CONSOLE_GRACE));
        Ok(status)
    }

    pub(super) fn agents(&mut self) -> &mut Agents<'a> {
        &mut self.supervisor.executor
    }

    fn is_over(&self) -> bool {
        let ends = self.supervisor.ending().is_some() || self.interrupted_by.is_some();
        ends && self.supervisor.executor.all_over()
    }

    fn step(&mut self) -> io::Result<()> {
        let has_room = self.agents().output.has_room();
        let agents = &self.supervisor.executor;
        let mut interests = vec![
            Interest::read(self.signals.as_fd()),
            Interest::read(agents.output.as_fd()),
        ];
        let others = [
            self.supervisor.as_fd(),
            self.discovery.as_ref().and_then(Discovery::as_fd),
            self.server.as_ref().map(Server::as_fd),
        ];
        interests.extend(others.into_iter().flatten().map(Interest::read));
        for link in &agents.links {
            interests.extend(link.link.interests(has_room));
        }
        let deadlines = agents.deadlines().into_iter();
        wait(
            &interests,
            deadlines.fold(self.supervisor.deadline(), earlier),
        )?;
        for signal in self.signals.take() {
            self.on_signal(signal);
        }
        if self.agents().output.is_stdout_gone() && self.interrupted_by.is_none() {
            self.interrupt(libc::SIGPIPE, Stop::Terminate);
        }
        // Process ends are handled first, because a dead worker cannot be part of a round.
        for index in 0..self.agents().links.len() {
            let (messages, result) = self.agents().links[index].link.exchange(has_room);
            for message in messages {
                self.on_message(index, message);
            }
            if let Err(why) = result {
                self.on_lost(index, &why);
            }
        }
        self.agents()
            .links
            .retain_mut(|l| !(l.is_closing && l.link.is_over() && l.link.has_ended()));
        let found = self.discovery.as_ref().map(Discovery::take);
        for found in found.into_iter().flatten() {
            self.on_found(found);
        }
        self.admit();
        let now = Instant::now();
        self.end_openings(now);
        self.agents().on_time(now);
        self.supervisor.advance();
        Ok(())
    }

    /// Gives up hosts that have not answered in time.
    fn end_openings(&mut self, now: Instant) {
        for index in 0..self.agents().links.len() {
            let limit = self.agents().start_timeout.as_secs();
            let link = &mut self.agents().links[index];
            if link.link.stage < HostStage::Ready && now >= link.open_by {
                link.link.kill();
                let why = format!("no answer within {limit} s (see --start-timeout)");
                self.lose(index, &why, 1);
            }
        }
    }

    fn on_signal(&mut self, signal: i32) {
        let how = match signal {
            _ if self.interrupted_by.is_some() => Stop::Kill,
            libc::SIGINT => Stop::Interrupt,
            _ => Stop::Terminate,
        };
        self.interrupt(signal, how);
    }

    fn interrupt(&mut self, signal: i32, how: Stop) {
        self.interrupted_by.get_or_insert(signal);
        self.supervisor.halt();
        self.agents().ask(how);
    }

    pub(super) fn note(&mut self, text: &str) {
        self.agents().note(text);
    }

    fn on_found(&mut self, found: Result<Vec<Listed>, String>) {
        match found {
            Ok(hosts) => {
                self.has_listed = true;
                if self.last_complaint.take().is_some() {
                    self.note("the list of hosts is there again");
                }
                if self.agents().options.verbose {
                    let text = hosts.iter().map(|l| l.host.to_string());
                    let text: Vec<String> = text.collect();
                    self.note(&format!("hosts: {}", text.join(", ")));
                }
                let named = hosts.iter().map(|l| l.host.clone()).collect();
                for listed in hosts {
                    let name = listed.host.name.clone();
                    self.agents().listed.insert(name, listed);
                }
                self.supervisor.set_hosts(named);
            }
            Err(why) if !self.has_listed => {
                self.note(&why);
                self.supervisor.finish(Ending::Failure {
                    worker: None,
                    code: 1,
                    why: "the job cannot begin without a list of hosts".to_owned(),
                    is_state_lost: false,
                });
            }
            Err(why) => {
                if self.last_complaint.as_ref() != Some(&why) {
                    self.note(&format!("warning: {why}; the hosts stay as they were"));
                }
                self.last_complaint = Some(why);
            }
        }
    }

    pub(super) fn send_job(&mut self, index: usize) {
        let Supervisor {
            executor: agents,
            rendezvous,
            ..
        } = &mut self.supervisor;
        agents.send_job(index, rendezvous);
    }

    fn on_message(&mut self, index: usize, message: FromAgent) {
        let agents = &mut self.supervisor.executor;
        let name = agents.links[index].link.name().to_owned();
        match message {
            FromAgent::Hello {
                version,
                hostname,
                task,
            } if agents.options.dialed => self.greet(index, &version, &hostname, task),
            FromAgent::Hello { version, .. } => {
                if let Some(why) = remote::other_version(&version) {
                    agents.links[index].link.hang_up();
                    self.lose(index, &why, 1);
                } else {
                    agents.links[index].link.stage = HostStage::Greeted;
                    self.send_job(index);
                }
            }
            FromAgent::Ready => {
                let link = &mut agents.links[index].link;
                link.stage = HostStage::Ready;
                link.send(&ToAgent::Start);
                match agents.options.dialed {
                    true => self.has_host(index),
                    false => self.supervisor.host_ready(&name),
                }
            }
            FromAgent::Refused { code, why } if agents.options.dialed => {
                self.turn_away(index, &why, code);
            }
            FromAgent::Refused { code, why } => {
                agents.links[index].link.hang_up();
                self.lose(index, &why, code);
            }
            FromAgent::Note(text) => agents.note(&format!("{name}: {text}")),
            FromAgent::Started { rank, pid } => {
                agents.output.emit(&JobEvent::Started {
                    worker: rank,
                    host: name.clone(),
                    pid,
                });
                if agents.options.verbose {
                    agents.note(&format!("worker {rank} runs on {name} as process {pid}"));
                }
            }
            FromAgent::Output {
                rank,
                stream,
                bytes,
            } => {
                if agents.is_of(&name, rank) {
                    agents.output.push(rank, stream, &bytes);
                }
            }
            FromAgent::Exited { rank, status } => {
                if agents.is_of(&name, rank) {
                    let cause = Cause::Exit(status);
                    agents.on_end(rank, &cause);
                    if cause.is_failure() && agents.output.shows_no_start(rank) {
                        self.supervisor.could_not_start(rank, cause);
                    } else {
                        self.supervisor.ended(rank, cause);
                    }
                    self.agents().forget(rank);
                }
            }
            FromAgent::StoppedState { rank, is_stopped } => {
                self.supervisor.stopped_state(rank, is_stopped)
            }
            FromAgent::Threads(report) => agents.on_threads(name, report),
            // The launcher has not requested these reports.
            FromAgent::Found(_) | FromAgent::Unreached(_) => {}
            FromAgent::Done => {
                let link = &mut agents.links[index];
                link.link.stage = HostStage::Done;
                link.link.hang_up();
                if !std::mem::replace(&mut link.is_closing, true) {
                    let why = "its agent has ended";
                    match agents.options.dialed {
                        true => self.supervisor.host_gone(&name, why),
                        false => self.supervisor.host_lost(&name, why, 1),
                    }
                }
            }
        }
    }

    fn on_lost(&mut self, index: usize, why: &str) {
        let link = &mut self.agents().links[index].link;
        if link.is_over() {
            return;
        }
        let why = match link.stage >= HostStage::Ready {
            true => link.with_words(why),
            false => link.why_not_started(),
        };
        link.kill();
        self.lose(index, &why, 1);
    }

    /// Gives up a host together with its workers.
    pub(super) fn lose(&mut self, index: usize, why: &str, code: u8) {
        let link = &mut self.agents().links[index];
        let was_closing = std::mem::replace(&mut link.is_closing, true);
        link.link.stage = HostStage::Lost;
        let host = link.link.name().to_owned();
        if was_closing {
            return;
        }
        let here = self.supervisor.workers_on(&host);
        for worker in &here {
            let cause = Cause::HostLost(why.to_owned());
            self.agents().on_end(*worker, &cause);
        }
        if self.agents().options.dialed {
            self.supervisor.host_gone(&host, why);
        } else {
            self.supervisor.host_lost(&host, why, code);
        }
        for worker in here {
            self.agents().forget(worker);
        }
    }

    /// Reports the result of the job to the user and returns it.
    fn conclude(&mut self) -> End {
        let (status, outcome, report) = self.judge();
        if !report.is_empty() {
            self.note(&report);
        }
        End {
            status,
            outcome,
            report,
        }
    }

    fn judge(&mut self) -> (u8, JobOutcome, String) {
        if let Some(signal) = self.interrupted_by {
            let text = ended_by(signal);
            return ((128 + signal) as u8, JobOutcome::Interrupted, text);
        }
        match self.supervisor.ending().cloned() {
            None | Some(Ending::Success) => (0, JobOutcome::Success, String::new()),
            Some(Ending::Failure {
                worker, code, why, ..
            }) => {
                let mut text = format!("{why}.");
                let tail = worker.and_then(|w| self.agents().tails.remove(&w));
                if let Some((stream, lines)) = tail {
                    text.push_str(&format!(" Last lines of its {}:", stream.name()));
                    for line in lines {
                        text.push_str("\n    ");
                        text.push_str(&line);
                    }
                }
                (code, JobOutcome::Failure, text)
            }
        }
    }
}

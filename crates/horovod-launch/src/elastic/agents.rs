//! Workers started by agents: `horovodrun`'s own executor. It connects to an agent on every host and shows the output
//! of the workers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::discovery::Listed;
use super::events::{Cause, WorkerId};
use super::executor::{Executor, NewWorker, News, Opened};
use crate::dialed;
use crate::endings::agent_limit;
use crate::events::Event as JobEvent;
use crate::frames::{JobSpec, RankSpec, Stop, Stream, ToAgent};
use crate::hosts::Placement;
use crate::job::{self, PING_INTERVAL};
use crate::launch::local_agent;
use crate::link::{HostLink, HostStage};
use crate::options::Options;
use crate::output::Output;
use crate::remote::Ssh;
use crate::rendezvous::Rendezvous;
use crate::threads::{self, Threads};

/// Maximum number of failed workers whose last lines are kept for the report.
const TAILS_MAX: usize = 16;

/// The connection to a host's agent.
pub(super) struct Link {
    pub(super) link: HostLink,
    /// Deadline for the agent's answer.
    pub(super) open_by: Instant,
    /// Whether no more workers will be started over this connection.
    pub(super) is_closing: bool,
}

/// The executor's state: connections, workers and their output.
pub(super) struct Agents<'a> {
    pub(super) options: &'a Options,
    pub(super) output: Output,
    pub(super) start_timeout: Duration,
    pub(super) program: PathBuf,
    pub(super) ssh: Ssh,
    pub(super) cwd: PathBuf,
    /// Every host that was ever listed.
    pub(super) listed: BTreeMap<String, Listed>,
    pub(super) links: Vec<Link>,
    /// The host of every running worker.
    pub(super) workers: BTreeMap<WorkerId, String>,
    /// Reports of the threads per rank, by host, as far as they were new.
    pub(super) threads: Vec<(String, Threads)>,
    /// Last lines of failed workers.
    pub(super) tails: BTreeMap<WorkerId, (Stream, Vec<String>)>,
    pub(super) asked: Option<(Stop, Instant)>,
    pub(super) ping_at: Instant,
}

impl Executor for Agents<'_> {
    fn open(&mut self, host: &str) -> Result<Opened, String> {
        if self.options.dialed {
            let is_there = self.link(host).is_some();
            let gone = || "its agent has gone".to_owned();
            return is_there.then_some(Opened::Ready).ok_or_else(gone);
        }
        let Some(listed) = self.listed.get(host).cloned() else {
            return Ok(Opened::Opening);
        };
        let command = match listed.is_local {
            true => local_agent(&self.program),
            false => self
                .ssh
                .agent(&listed.host, listed.keys_settled, &self.program),
        };
        let placement = Placement {
            host: listed.host,
            slots: Vec::new(),
        };
        let link = HostLink::open(placement, listed.is_local, command)
            .map_err(|error| format!("its agent cannot be started: {error}"))?;
        self.links.push(Link {
            link,
            open_by: Instant::now() + self.start_timeout,
            is_closing: false,
        });
        Ok(Opened::Opening)
    }

    fn close(&mut self, host: &str) {
        if let Some(link) = self.link(host) {
            link.link.send(&ToAgent::Close);
            link.is_closing = true;
        }
    }

    fn start(&mut self, new: &NewWorker<'_>) -> Result<(), Cause> {
        let (worker, label) = (new.worker, new.rank);
        if let Err(why) = self.output.add(worker, label) {
            self.note(&format!("{why}; the output of rank {label} is only here"));
        }
        self.workers.insert(worker, new.host.to_owned());
        // The agent already has the variables common to all workers.
        let env = new.of_worker.clone();
        if let Some(link) = self.link(new.host) {
            let env = dialed::with_host_name(env, link.link.task.as_ref());
            link.link
                .send(&ToAgent::Spawn(RankSpec { rank: worker, env }));
        }
        Ok(())
    }

    fn end(&mut self, worker: WorkerId) {
        self.send_to_host_of(worker, &ToAgent::End(worker));
    }

    fn check_stopped(&mut self, worker: WorkerId, pid: u32) {
        self.send_to_host_of(worker, &ToAgent::CheckStopped { rank: worker, pid });
    }

    fn finish(&mut self, has_succeeded: bool) {
        if !has_succeeded {
            return self.ask(Stop::Terminate);
        }
        for link in &mut self.links {
            if link.link.is_dialed() && link.link.stage < HostStage::Ready {
                link.link.kill();
                link.link.stage = HostStage::Lost;
            }
            link.link.send(&ToAgent::Close);
            link.is_closing = true;
        }
        // Workers that were asked to end, and processes that ranks left behind, get as much time as after a signal.
        self.asked.get_or_insert((Stop::Terminate, Instant::now()));
    }

    fn notify(&mut self, news: News<'_>) {
        match news {
            News::Words(text) => self.note(text),
            News::Rank(worker, rank) => self.output.relabel(worker, rank),
            News::Round { number, workers } => {
                self.output.emit(&JobEvent::Round(workers.to_vec()));
                if self.options.verbose {
                    self.note(&format!("round {number} stands"));
                }
            }
            News::NoRound(why) if self.options.verbose => {
                self.note(&format!("a round was given up: {why}"));
            }
            News::NoRound(_) => {}
        }
    }
}

impl Agents<'_> {
    pub(super) fn note(&mut self, text: &str) {
        self.output.note(&format!("horovodrun: {text}"));
    }

    /// Returns the connection over which workers are started on this host.
    fn link(&mut self, host: &str) -> Option<&mut Link> {
        let mut links = self.links.iter_mut();
        links.find(|l| !l.is_closing && l.link.name() == host)
    }

    fn send_to_host_of(&mut self, worker: WorkerId, message: &ToAgent) {
        if let Some(host) = self.workers.get(&worker).cloned()
            && let Some(link) = self.link(&host)
        {
            link.link.send(message);
        }
    }

    /// Sends the job to an agent that has answered.
    pub(super) fn send_job(&mut self, index: usize, rendezvous: &Rendezvous) {
        let link = &mut self.links[index].link;
        link.send(&ToAgent::Job(JobSpec {
            is_open: true,
            ..job::spec(self.options, rendezvous, &self.cwd, link.is_local)
        }));
    }

    /// Requests the end of all workers, if `how` is stronger than the last request.
    pub(super) fn ask(&mut self, how: Stop) {
        if self.asked.is_none_or(|(before, _)| before < how) {
            self.asked = Some((how, Instant::now()));
            for link in &mut self.links {
                link.link.send(&ToAgent::Stop(how));
                if link.link.stage < HostStage::Ready {
                    // No worker runs there yet.
                    link.link.kill();
                    link.link.stage = HostStage::Lost;
                }
            }
        }
    }

    pub(super) fn all_over(&self) -> bool {
        self.links.iter().all(|l| l.link.is_over())
    }

    /// Returns three deadlines: the next host's answer, the end of the workers, the next ping.
    pub(super) fn deadlines(&self) -> [Option<Instant>; 3] {
        let opening = self
            .links
            .iter()
            .filter(|l| l.link.stage < HostStage::Ready);
        let opening = opening.map(|l| l.open_by).min();
        let given_up = self
            .asked
            .map(|(how, at)| at + agent_limit(how, self.options));
        let has_remote = self.links.iter().any(|l| !l.link.is_local);
        [opening, given_up, has_remote.then_some(self.ping_at)]
    }

    /// Kills the agents that have not reported the end of their workers in time, and sends due pings to the others.
    pub(super) fn on_time(&mut self, now: Instant) {
        if let Some((how, at)) = self.asked
            && now >= at + agent_limit(how, self.options)
        {
            for link in &mut self.links {
                if !link.link.is_over() {
                    link.link.kill();
                    link.link.stage = HostStage::Lost;
                }
            }
        }
        if now >= self.ping_at {
            self.ping_at = now + PING_INTERVAL;
            for l in &mut self.links {
                if !l.link.is_local && !l.link.has_unsent() {
                    l.link.send(&ToAgent::Ping);
                }
            }
        }
    }

    /// Reports the number of threads per rank, once for each distinct number, although hosts join and leave.
    pub(super) fn on_threads(&mut self, host: String, threads: Threads) {
        let known = threads::news(&self.threads, self.options.verbose).len();
        self.threads.push((host, threads));
        let lines = threads::news(&self.threads, self.options.verbose);
        match lines.get(known) {
            Some(line) => self.note(line),
            None => drop(self.threads.pop()),
        }
    }

    pub(super) fn is_of(&self, host: &str, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|h| h == host)
    }

    /// Finishes the output of a worker, and keeps its last lines if it has failed.
    pub(super) fn on_end(&mut self, worker: WorkerId, cause: &Cause) {
        self.output.finish(worker);
        if let Some(host) = self.workers.get(&worker) {
            self.output.emit(&JobEvent::Ended {
                worker,
                host: host.clone(),
                cause: cause.clone(),
            });
        }
        if cause.is_failure()
            && let Some(tail) = self.output.tail(worker)
        {
            self.tails.insert(worker, tail);
            if self.tails.len() > TAILS_MAX {
                self.tails.pop_first();
            }
        }
    }

    /// Removes a worker whose end the supervisor has processed.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
        self.output.remove(worker);
    }
}

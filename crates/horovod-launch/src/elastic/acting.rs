//! Carries out what the driver of an elastic job decides.

use std::time::Instant;

use horovod_protocol::Rank;

use super::events::{Action, Ending, Event, WorkerId};
use super::job::{ElasticJob, Link};
use crate::frames::{JobSpec, RankSpec, Stop, ToAgent};
use crate::hosts::Placement;
use crate::launch::local_agent;
use crate::link::HostLink;
use crate::{environment, job};

impl ElasticJob<'_> {
    pub(super) fn carry_out(&mut self) {
        while let Some(action) = self.driver.poll_action() {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Open(host) => self.open(&host),
            Action::Close(host) => {
                if let Some(link) = self.link(&host) {
                    link.link.send(&ToAgent::Close);
                    link.is_closing = true;
                }
            }
            Action::Start {
                worker,
                host,
                local,
            } => self.start(worker, &host, local),
            Action::Stop(worker) => {
                if let Some((host, _)) = self.workers.get(&worker).cloned()
                    && let Some(link) = self.link(&host)
                {
                    link.link.send(&ToAgent::End(worker));
                }
            }
            Action::Look(worker) => {
                if let Some((host, _)) = self.workers.get(&worker).cloned()
                    && let Some(pid) = self.pids.get(&worker).copied()
                    && let Some(link) = self.link(&host)
                {
                    link.link.send(&ToAgent::Look { rank: worker, pid });
                }
            }
            Action::TellDeath { worker, cause } => {
                let host = self.workers.get(&worker).map_or("", |(host, _)| host);
                let server = self.rendezvous.server();
                server.report_death(Rank(worker), host, &cause);
            }
            Action::Form(seats) => {
                for (worker, seat) in &seats {
                    self.relabel(*worker, seat.rank);
                }
                self.rendezvous.server().form(seats);
            }
            Action::Announce(kind) => self.rendezvous.server().announce(kind),
            Action::Dismiss(worker, why) => self.rendezvous.server().dismiss(worker, &why),
            Action::Say(text) => self.say(&text),
            Action::End(ending) => self.finish(ending),
        }
    }

    pub(super) fn finish(&mut self, ending: Ending) {
        if ending == Ending::Success {
            for link in &mut self.links {
                link.link.send(&ToAgent::Close);
                link.is_closing = true;
            }
            // Who was told to end, and what the ranks left, has as long as after a signal.
            self.asked.get_or_insert((Stop::Terminate, Instant::now()));
        } else {
            self.ask(Stop::Terminate);
        }
        self.ending.get_or_insert(ending);
    }

    fn open(&mut self, host: &str) {
        let Some(listed) = self.listed.get(host).cloned() else {
            return;
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
        match HostLink::open(placement, listed.is_local, command) {
            Ok(link) => self.links.push(Link {
                link,
                open_by: Instant::now() + self.start_timeout,
                is_closing: false,
            }),
            Err(error) => self.driver.handle(
                self.started.elapsed(),
                Event::HostLost {
                    host: host.to_owned(),
                    why: format!("its agent cannot be started: {error}"),
                    code: 1,
                },
            ),
        }
    }

    pub(super) fn send_job(&mut self, index: usize) {
        let link = &mut self.links[index].link;
        link.send(&ToAgent::Job(JobSpec {
            is_open: true,
            ..job::spec(self.options, &self.rendezvous, &self.cwd, link.is_local)
        }));
    }

    fn start(&mut self, worker: WorkerId, host: &str, local: u32) {
        let Some(listed) = self.listed.get(host).cloned() else {
            return;
        };
        let place = (host.to_owned(), local);
        let before = self.labels.get(&place).copied();
        let label = before.filter(|label| !self.is_taken(*label));
        let label = label.unwrap_or_else(|| self.free_label());
        if let Err(why) = self.output.add(worker, label) {
            self.say(&format!("{why}; the output of rank {label} is only here"));
        }
        self.workers.insert(worker, place);
        let size = self.options.num_proc.unwrap_or(1);
        let env =
            environment::of_worker(&listed.host, worker, (local, label), size, self.patience_s);
        if let Some(link) = self.link(host) {
            let rank = RankSpec { rank: worker, env };
            link.link.send(&ToAgent::Spawn(rank));
        }
    }

    fn is_taken(&self, label: u32) -> bool {
        let mut workers = self.workers.keys();
        workers.any(|worker| self.output.label(*worker) == Some(label))
    }

    fn free_label(&self) -> u32 {
        (0..).find(|label| !self.is_taken(*label)).unwrap_or(0)
    }

    /// A worker's rank is known now; who was only guessed to get it gets another guess.
    fn relabel(&mut self, worker: WorkerId, rank: u32) {
        let has_it = |w: &&WorkerId| **w != worker && self.output.label(**w) == Some(rank);
        let other = self.workers.keys().find(has_it).copied();
        self.output.relabel(worker, rank);
        if let Some(other) = other {
            let label = self.free_label();
            self.output.relabel(other, label);
        }
    }
}

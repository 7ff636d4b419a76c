//! Elastic jobs on agents that dial: each agent is a host with one slot while its connection lasts.

use std::time::Instant;

use super::agents::Link;
use super::events::Ending;
use super::job::ElasticJob;
use crate::dialed;
use crate::frames::DialedTask;
use crate::hosts::Host;
use crate::link::{HostLink, HostStage};

impl ElasticJob<'_> {
    /// Accepts the agents that have dialed in.
    pub(super) fn admit(&mut self) {
        let arrivals = self.server.as_ref().map(|server| server.take());
        let is_going_on = self.supervisor.ending().is_none() && self.interrupted_by.is_none();
        for arrival in arrivals.into_iter().flatten().filter(|_| is_going_on) {
            let agents = self.agents();
            let open_by = Instant::now() + agents.start_timeout;
            match HostLink::dialed(arrival.index, arrival.stream) {
                Ok(link) => agents.links.push(Link {
                    link,
                    open_by,
                    is_closing: false,
                }),
                Err(error) => {
                    let index = arrival.index;
                    self.note(&format!(
                        "the agent of task {index} was turned away: {error}"
                    ));
                }
            }
        }
    }

    /// Handles an agent's greeting: accepts the agent, or turns it away.
    pub(super) fn greet(
        &mut self,
        index: usize,
        version: &str,
        host: &str,
        task: Option<DialedTask>,
    ) {
        let link = &mut self.agents().links[index].link;
        link.placement.host.name = format!("{} on host {host}", link.placement.host.name);
        let objection = dialed::objection(version, task.as_ref());
        let task = match (objection, task) {
            (None, Some(task)) => task,
            (why, _) => return self.turn_away(index, &why.unwrap_or_default(), 1),
        };
        let is_rival = |l: &Link| {
            let other = l.link.task.as_ref();
            !l.is_closing && !l.link.is_over() && other.is_some_and(|s| s.index == task.index)
        };
        if let Some(rival) = self.agents().links.iter().position(is_rival) {
            let attempt = self.agents().links[rival].link.task.as_ref();
            let attempt = attempt.map_or(0, |task| task.attempt);
            if attempt >= task.attempt {
                let link = &mut self.agents().links[index];
                link.link.kill();
                link.link.stage = HostStage::Lost;
                link.is_closing = true;
                return;
            }
            self.agents().links[rival].link.kill();
            let why = format!("attempt {} of its task has come", task.attempt);
            self.lose(rival, &why, 1);
        }
        let link = &mut self.agents().links[index].link;
        link.placement.host.name = dialed::name_of(&task);
        link.task = Some(task);
        link.stage = HostStage::Greeted;
        self.send_job(index);
    }

    /// Adds the host of an agent that can run a rank.
    pub(super) fn has_host(&mut self, index: usize) {
        let name = self.agents().links[index].link.name().to_owned();
        self.has_listed = true;
        if self.agents().options.verbose {
            self.note(&format!("{name} has come"));
        }
        let task = self.agents().links[index].link.task.as_ref();
        let machine = task.map_or_else(|| name.clone(), |task| task.host.clone());
        self.supervisor
            .add_host_on(Host { name, slots: 1 }, &machine);
    }

    /// Turns away an agent that can run no rank. The job fails if no agent was accepted yet, because all others may
    /// have the same fault.
    pub(super) fn turn_away(&mut self, index: usize, why: &str, code: u8) {
        let link = &mut self.agents().links[index];
        link.link.kill();
        link.link.stage = HostStage::Lost;
        link.is_closing = true;
        let why = format!("{} {why}", link.link.name());
        if self.has_listed {
            return self.note(&why);
        }
        self.supervisor.finish(Ending::Failure {
            worker: None,
            code,
            why,
            is_state_lost: false,
        });
    }
}

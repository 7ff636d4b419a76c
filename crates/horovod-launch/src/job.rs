//! One job in the launcher: starts all hosts, forwards output, handles signals, ends all processes.
//!
//! One thread polls everything. No rank starts on any host before every host has confirmed that it is ready.

mod agents;
mod ends;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::endings::{CONSOLE_GRACE, Kill, agent_limit, let_go};
use crate::events::Event;
use crate::frames::{Stop, ToAgent};
use crate::io::{Interest, earlier, wait};
use crate::link::{HostLink, HostStage};
use crate::options::Options;
use crate::output::Output;
use crate::remote;
use crate::rendezvous::Rendezvous;
use crate::report::End;
use crate::signals::Signals;
use crate::threads::Threads;

pub(crate) use self::agents::spec;
pub(crate) use self::ends::ended_by;

/// Ranks that lost a peer have this long to report it and to end without a request; then the launcher stops them.
const FAILURE_GRACE: Duration = Duration::from_secs(3);
/// After the first host that could not be started, the errors of other hosts are collected for this long.
const COLLECT_ERRORS: Duration = Duration::from_secs(2);
/// Interval between two pings to the agents of other hosts.
pub(crate) const PING_INTERVAL: Duration = Duration::from_secs(remote::PING_INTERVAL_S as u64);

/// A job under way.
pub(crate) struct Job<'a> {
    pub(crate) options: &'a Options,
    pub(crate) output: Output,
    pub(crate) signals: Signals,
    pub(crate) rendezvous: Rendezvous,
    pub(crate) links: Vec<HostLink>,
    pub(crate) start_timeout: Duration,
    pub(crate) cwd: PathBuf,
    pub(crate) state: JobState,
}

/// Progress of the job so far.
#[derive(Debug)]
pub(crate) struct JobState {
    start_deadline: Instant,
    has_sent_jobs: bool,
    is_running: bool,
    start_errors: Vec<(u8, String)>,
    first_error_at: Option<Instant>,
    ends: Vec<End>,
    failed_at: Option<Instant>,
    asked: Option<(Stop, Instant)>,
    interrupted_by: Option<i32>,
    ping_at: Instant,
    /// Limits on threads per rank, reported by the agents, by host.
    threads: Vec<(String, Threads)>,
    /// Silent ranks that were already reported to the user.
    noted_silent: Vec<u32>,
    /// Why ranks cannot connect; this cause was sent to all agents.
    unreachable: Option<String>,
}

impl JobState {
    pub(crate) fn new(now: Instant, start_timeout: Duration) -> Self {
        Self {
            start_deadline: now + start_timeout,
            has_sent_jobs: false,
            is_running: false,
            start_errors: Vec::new(),
            first_error_at: None,
            ends: Vec::new(),
            failed_at: None,
            asked: None,
            interrupted_by: None,
            ping_at: now + PING_INTERVAL,
            threads: Vec::new(),
            noted_silent: Vec::new(),
            unreachable: None,
        }
    }

    /// Records that the job failed before it had any hosts.
    pub(crate) fn fail_start(&mut self, why: String) {
        self.start_errors.push((1, why));
    }

    /// Records a signal that arrived before the job had any hosts.
    pub(crate) fn interrupt(&mut self, signal: i32) {
        self.interrupted_by = Some(signal);
    }
}

impl Job<'_> {
    /// Runs the job to its end and returns the launcher's exit code.
    pub(crate) fn run(mut self) -> io::Result<u8> {
        if !self.links.is_empty() && self.slowest() == HostStage::Greeted {
            // The agents have dialed in.
            self.send_jobs();
        }
        while !self.is_over() {
            self.step()?;
        }
        let end = self.conclude();
        let kill = if self.state.is_running {
            Kill::AfterGrace
        } else {
            Kill::AtOnce
        };
        let_go(&mut self.links, &mut self.signals, kill)?;
        let status = end.status;
        self.output.emit(&Event::End(end));
        let timeout = self.state.interrupted_by.map(|_| CONSOLE_GRACE);
        self.output.close(timeout);
        Ok(status)
    }

    fn is_over(&self) -> bool {
        if self.links.iter().all(HostLink::is_over) {
            return true;
        }
        if self.state.is_running {
            return false;
        }
        let collected = self
            .state
            .first_error_at
            .is_some_and(|at| at.elapsed() >= COLLECT_ERRORS);
        self.state.interrupted_by.is_some() || collected || !self.is_anyone_undecided()
    }

    /// During the start: returns whether a host may still fail, or all may still become ready.
    fn is_anyone_undecided(&self) -> bool {
        let first_to_wait_for = if self.state.has_sent_jobs {
            HostStage::Greeted
        } else {
            HostStage::Starting
        };
        self.state.first_error_at.is_none()
            || self
                .links
                .iter()
                .any(|link| link.stage <= first_to_wait_for)
    }

    fn step(&mut self) -> io::Result<()> {
        let has_room = self.output.has_room();
        let mut interests = vec![
            Interest::read(self.signals.as_fd()),
            Interest::read(self.output.as_fd()),
        ];
        interests.extend(self.rendezvous.server().as_fd().map(Interest::read));
        for link in &self.links {
            interests.extend(link.interests(has_room));
        }
        wait(&interests, self.deadline())?;
        for signal in self.signals.take() {
            self.on_signal(signal);
        }
        self.follow_rendezvous();
        if self.output.is_stdout_gone() && self.state.interrupted_by.is_none() {
            self.state.interrupted_by = Some(libc::SIGPIPE);
            self.ask(Stop::Terminate);
        }
        for index in 0..self.links.len() {
            let (messages, result) = self.links[index].exchange(has_room);
            for message in messages {
                self.on_message(index, message);
            }
            if let Err(why) = result {
                self.on_lost(index, &why);
            }
        }
        self.on_time(Instant::now());
        Ok(())
    }

    fn follow_rendezvous(&mut self) {
        let before = self.rendezvous.rounds();
        for words in self.rendezvous.follow() {
            if self.options.verbose {
                self.output.note(&format!("horovodrun: {words}"));
            }
        }
        if self.rendezvous.rounds() > before {
            // A new round is established, so a later failure has another cause.
            self.state.unreachable = None;
        }
        if let Some(why) = self.rendezvous.take_unreachable() {
            for link in &mut self.links {
                link.send(&ToAgent::Cause(why.clone()));
            }
            self.state.unreachable = Some(why);
        }
        for _ in before..self.rendezvous.rounds() {
            let size = self.options.num_proc.unwrap_or(1);
            self.output.emit(&Event::Round((0..size).collect()));
        }
        // A rank that computes notices a silent peer only at its next operation, but the user must be informed now.
        for (who, by) in self.rendezvous.silent() {
            if !self.state.noted_silent.contains(who) {
                self.state.noted_silent.push(*who);
                let host = self.links.iter().find(|link| has_rank(link, *who));
                let host = host.map_or("?", HostLink::name);
                self.output.note(&format!(
                    "horovodrun: rank {who} on host {host} does not answer rank {by}: it is stopped, or cut off. The \
                     job cannot go on."
                ));
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let state = &self.state;
        let start = (!state.is_running).then_some(state.start_deadline);
        let errors = state.first_error_at.map(|at| at + COLLECT_ERRORS);
        let failure = state
            .failed_at
            .filter(|_| state.asked.is_none())
            .map(|at| at + self.grace());
        let given_up = state
            .asked
            .map(|(how, at)| at + agent_limit(how, self.options));
        let ping = (self.links.iter().any(|link| !link.is_local)).then_some(state.ping_at);
        [errors, failure, given_up, ping]
            .into_iter()
            .fold(start, earlier)
    }

    /// Returns how long after the first failure ranks may take to end without a request. Ranks that were never in a
    /// round together cannot notice each other's failure, so they get no time. Ranks that were informed why they cannot
    /// connect need time to report it. Silent ranks do not end without a request, so they get no time either.
    fn grace(&self) -> Duration {
        let ended = |rank: u32| self.state.ends.iter().any(|end| end.rank == rank);
        let slots = self.links.iter().flat_map(|link| &link.placement.slots);
        let mut left = slots.map(|slot| slot.rank).filter(|rank| !ended(*rank));
        if left.all(|rank| self.rendezvous.silent().contains_key(&rank)) {
            return Duration::ZERO;
        }
        let noticed = self.state.ends.iter().any(|end| end.is_consequence);
        let are_unreachable = self.state.unreachable.is_some();
        if self.rendezvous.has_met() || noticed || are_unreachable {
            FAILURE_GRACE
        } else {
            Duration::ZERO
        }
    }

    fn on_time(&mut self, now: Instant) {
        if !self.state.is_running && now >= self.state.start_deadline {
            self.on_start_timeout();
        }
        if self.state.asked.is_none()
            && self
                .state
                .failed_at
                .is_some_and(|at| now >= at + self.grace())
        {
            self.ask(Stop::Terminate);
        }
        if let Some((how, at)) = self.state.asked
            && now >= at + agent_limit(how, self.options)
        {
            for index in 0..self.links.len() {
                if !self.links[index].is_over() {
                    self.links[index].kill();
                    self.on_lost(index, "its agent did not say that its ranks have ended");
                }
            }
        }
        if now >= self.state.ping_at {
            self.state.ping_at = now + PING_INTERVAL;
            for link in self
                .links
                .iter_mut()
                .filter(|link| !link.is_local && !link.has_unsent())
            {
                link.send(&ToAgent::Ping);
            }
        }
    }

    fn on_signal(&mut self, signal: i32) {
        let again = self.state.interrupted_by.is_some();
        self.state.interrupted_by.get_or_insert(signal);
        self.ask(match signal {
            _ if again => Stop::Kill,
            libc::SIGINT => Stop::Interrupt,
            _ => Stop::Terminate,
        });
    }

    fn ask(&mut self, how: Stop) {
        if self.state.asked.is_none_or(|(before, _)| before < how) {
            self.state.asked = Some((how, Instant::now()));
            for link in &mut self.links {
                link.send(&ToAgent::Stop(how));
            }
        }
    }

    fn start_error(&mut self, code: u8, text: String) {
        self.state.first_error_at.get_or_insert_with(Instant::now);
        self.state.start_errors.push((code, text));
    }

    fn on_start_timeout(&mut self) {
        let late: Vec<String> = self
            .links
            .iter()
            .filter(|link| !link.is_over() && link.stage <= self.slowest())
            .map(|link| link.name().to_owned())
            .collect();
        self.start_error(
            1,
            format!(
                "no answer within {} s from {} (see --start-timeout)",
                self.start_timeout.as_secs(),
                late.join(", ")
            ),
        );
        for link in &mut self.links {
            link.kill();
            link.stage = HostStage::Lost;
        }
    }

    fn slowest(&self) -> HostStage {
        self.links
            .iter()
            .map(|link| link.stage)
            .min()
            .unwrap_or(HostStage::Starting)
    }
}

fn has_rank(link: &HostLink, rank: u32) -> bool {
    let mut slots = link.placement.slots.iter();
    slots.any(|slot| slot.rank == rank)
}

//! An elastic job from the launcher's side: feeds the driver with what happens, and does what it says.
//!
//! One thread, one poll, as in a job of fixed size; the discovery of hosts and the rendezvous have their own.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use horovod_transport::rendezvous::ServerEvent;

use super::discovery::{Discovery, Listed};
use super::driver::Driver;
use super::events::{Ending, Event, WorkerId};
use crate::args::Options;
use crate::frames::{FromAgent, Stop, Stream, ToAgent};
use crate::io::{Interest, earlier, wait};
use crate::job::{CONSOLE_GRACE, PING_INTERVAL, agent_limit, let_go};
use crate::link::{HostLink, Stage};
use crate::output::Output;
use crate::platform;
use crate::remote::{self, Ssh};
use crate::rendezvous::Rendezvous;
use crate::report::Cause;
use crate::signals::Signals;

/// Workers that failed whose last words are kept for the report.
const TAILS_MAX: usize = 16;

/// A host's connection.
pub(super) struct Link {
    pub(super) link: HostLink,
    /// Until when it must have answered.
    pub(super) open_by: Instant,
    /// Nothing will be started there any more.
    pub(super) is_closing: bool,
}

/// A job under way.
pub(super) struct ElasticJob<'a> {
    pub(super) options: &'a Options,
    pub(super) output: Output,
    pub(super) signals: Signals,
    pub(super) rendezvous: Rendezvous,
    pub(super) discovery: Discovery,
    pub(super) driver: Driver,
    pub(super) started: Instant,
    pub(super) start_timeout: Duration,
    pub(super) patience_s: u64,
    pub(super) program: PathBuf,
    pub(super) ssh: Ssh,
    pub(super) cwd: PathBuf,
    /// Everything that was ever on the list.
    pub(super) listed: BTreeMap<String, Listed>,
    /// The list was had once.
    pub(super) has_listed: bool,
    /// Why it could not be had last time.
    pub(super) last_complaint: Option<String>,
    pub(super) links: Vec<Link>,
    /// The host and slot of every process that runs.
    pub(super) workers: BTreeMap<WorkerId, (String, u32)>,
    /// As those who have come to the rendezvous are known on their hosts.
    pub(super) pids: BTreeMap<WorkerId, u32>,
    /// The rank that the last process of each slot had.
    pub(super) labels: BTreeMap<(String, u32), u32>,
    /// Last words of workers that failed.
    pub(super) tails: BTreeMap<WorkerId, (Stream, Vec<String>)>,
    pub(super) ending: Option<Ending>,
    pub(super) asked: Option<(Stop, Instant)>,
    pub(super) interrupted_by: Option<i32>,
    pub(super) ping_at: Instant,
}

impl ElasticJob<'_> {
    /// Runs it to its end; the launcher's exit code.
    pub(super) fn run(mut self) -> io::Result<u8> {
        while !self.is_over() {
            self.step()?;
        }
        let code = self.conclude();
        // Its script must not be taken for something that a worker left.
        let Self {
            discovery,
            links,
            mut signals,
            output,
            interrupted_by,
            ..
        } = self;
        drop(discovery);
        let mut links: Vec<HostLink> = links.into_iter().map(|l| l.link).collect();
        let_go(&mut links, &mut signals, true)?;
        output.close(interrupted_by.map(|_| CONSOLE_GRACE));
        Ok(code)
    }

    fn is_over(&self) -> bool {
        let ends = self.ending.is_some() || self.interrupted_by.is_some();
        ends && self.links.iter().all(|l| l.link.is_over())
    }

    fn step(&mut self) -> io::Result<()> {
        let has_room = self.output.has_room();
        let mut interests = vec![
            Interest::read(self.signals.as_fd()),
            Interest::read(self.output.as_fd()),
        ];
        let server = self.rendezvous.server().as_fd();
        let others = [server, self.discovery.as_fd()];
        interests.extend(others.into_iter().flatten().map(Interest::read));
        for link in &self.links {
            interests.extend(link.link.interests(has_room));
        }
        wait(&interests, self.deadline())?;
        for signal in self.signals.take() {
            self.on_signal(signal);
        }
        if self.output.is_stdout_gone() && self.interrupted_by.is_none() {
            self.interrupted_by = Some(libc::SIGPIPE);
            self.ask(Stop::Terminate);
        }
        // Ends of processes first: who is dead cannot be part of a round.
        for index in 0..self.links.len() {
            let (messages, result) = self.links[index].link.exchange(has_room);
            for message in messages {
                self.on_message(index, message);
            }
            if let Err(why) = result {
                self.on_lost(index, &why);
            }
        }
        self.links
            .retain_mut(|l| !(l.is_closing && l.link.is_over() && l.link.has_ended()));
        for found in self.discovery.take() {
            self.on_found(found);
        }
        while let Some(event) = self.rendezvous.server().poll_event() {
            self.on_rendezvous(event);
        }
        self.on_time(Instant::now());
        Ok(())
    }

    fn deadline(&self) -> Option<Instant> {
        let driver = self.driver.next_deadline().map(|at| self.started + at);
        let opening = self.links.iter().filter(|l| l.link.stage < Stage::Ready);
        let opening = opening.map(|l| l.open_by).min();
        let given_up = self.asked.map(|(how, at)| at + agent_limit(how));
        let has_remote = self.links.iter().any(|l| !l.link.is_local);
        let ping = has_remote.then_some(self.ping_at);
        [opening, given_up, ping].into_iter().fold(driver, earlier)
    }

    fn on_time(&mut self, now: Instant) {
        for index in 0..self.links.len() {
            let link = &self.links[index];
            if link.link.stage < Stage::Ready && now >= link.open_by {
                let limit = self.start_timeout.as_secs();
                let why = format!("no answer within {limit} s (see --start-timeout)");
                self.links[index].link.kill();
                self.lose(index, why, 1);
            }
        }
        if let Some((how, at)) = self.asked
            && now >= at + agent_limit(how)
        {
            for link in &mut self.links {
                if !link.link.is_over() {
                    link.link.kill();
                    link.link.stage = Stage::Lost;
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
        let due = self.driver.next_deadline().map(|at| self.started + at);
        if due.is_some_and(|at| now >= at) {
            self.driver.handle_timeout(now - self.started);
            self.carry_out();
        }
    }

    fn on_signal(&mut self, signal: i32) {
        let again = self.interrupted_by.is_some();
        self.interrupted_by.get_or_insert(signal);
        self.ask(match signal {
            _ if again => Stop::Kill,
            libc::SIGINT => Stop::Interrupt,
            _ => Stop::Terminate,
        });
    }

    pub(super) fn ask(&mut self, how: Stop) {
        if self.asked.is_none_or(|(before, _)| before < how) {
            self.asked = Some((how, Instant::now()));
            for link in &mut self.links {
                link.link.send(&ToAgent::Stop(how));
                if link.link.stage < Stage::Ready {
                    // Nothing runs there yet.
                    link.link.kill();
                    link.link.stage = Stage::Lost;
                }
            }
        }
    }

    /// Tells the driver, unless the job is ending anyway.
    fn tell(&mut self, event: Event) {
        if self.ending.is_some() || self.interrupted_by.is_some() {
            return;
        }
        self.driver.handle(self.started.elapsed(), event);
        self.carry_out();
    }

    pub(super) fn say(&mut self, text: &str) {
        self.output.say(&format!("horovodrun: {text}"));
    }

    fn on_found(&mut self, found: Result<Vec<Listed>, String>) {
        match found {
            Ok(hosts) => {
                self.has_listed = true;
                if self.last_complaint.take().is_some() {
                    self.say("the list of hosts is there again");
                }
                let pairs = hosts.iter().map(|l| (l.host.name.clone(), l.host.slots));
                let pairs: Vec<_> = pairs.collect();
                for listed in hosts {
                    self.listed.insert(listed.host.name.clone(), listed);
                }
                if self.options.verbose {
                    let text = pairs.iter().map(|(h, n)| format!("{h}:{n}"));
                    let text: Vec<String> = text.collect();
                    self.say(&format!("hosts: {}", text.join(", ")));
                }
                self.tell(Event::Hosts(pairs));
            }
            Err(why) if !self.has_listed => {
                self.say(&why);
                self.finish(Ending::Failure {
                    worker: None,
                    code: 1,
                    why: "the job cannot begin without a list of hosts".to_owned(),
                });
            }
            Err(why) => {
                if self.last_complaint.as_ref() != Some(&why) {
                    self.say(&format!("warning: {why}; the hosts stay as they were"));
                }
                self.last_complaint = Some(why);
            }
        }
    }

    fn on_rendezvous(&mut self, event: ServerEvent) {
        match event {
            ServerEvent::Joined {
                worker,
                held,
                pid,
                heartbeat,
            } => {
                self.pids.insert(worker, pid);
                self.driver.expect_life_within(heartbeat);
                self.tell(Event::Joined { worker, held });
            }
            ServerEvent::Away { worker } => self.tell(Event::Away(worker)),
            ServerEvent::Held { worker, held } => self.tell(Event::Held { worker, held }),
            ServerEvent::Silent { who, by } => self.tell(Event::Silent { worker: who, by }),
            ServerEvent::Up(generation) => {
                if self.options.verbose {
                    self.say(&format!("round {} stands", generation.0));
                }
                self.tell(Event::Up);
            }
            ServerEvent::Failed(why) if self.options.verbose => {
                self.say(&format!("a round was given up: {why}"));
            }
            _ => {}
        }
    }

    fn on_message(&mut self, index: usize, message: FromAgent) {
        let name = self.links[index].link.name().to_owned();
        match message {
            FromAgent::Hello { version, .. } => {
                if let Some(why) = remote::other_version(&version) {
                    self.links[index].link.hang_up();
                    self.lose(index, why, 1);
                } else {
                    self.links[index].link.stage = Stage::Greeted;
                    self.send_job(index);
                }
            }
            FromAgent::Ready => {
                let link = &mut self.links[index].link;
                link.stage = Stage::Ready;
                link.send(&ToAgent::Start);
                self.tell(Event::HostReady(name));
            }
            FromAgent::Refused { code, why } => {
                self.links[index].link.hang_up();
                self.lose(index, why, code);
            }
            FromAgent::Note(text) => self.say(&format!("{name}: {text}")),
            FromAgent::Started { rank, pid } => {
                if self.options.verbose {
                    self.say(&format!("worker {rank} runs on {name} as process {pid}"));
                }
            }
            FromAgent::Output {
                rank,
                stream,
                bytes,
            } => {
                if self.is_of(&name, rank) {
                    self.output.push(rank, stream, &bytes);
                }
            }
            FromAgent::Exited { rank, status } => {
                if self.is_of(&name, rank) {
                    let cause = Cause::Exit(status);
                    self.on_exit(rank, &cause);
                    self.tell(Event::Exited {
                        worker: rank,
                        cause,
                    });
                    self.forget(rank);
                }
            }
            FromAgent::Looked { rank, is_stopped } => {
                let worker = rank;
                self.tell(Event::Looked { worker, is_stopped });
            }
            // Nobody asked.
            FromAgent::Found(_) => {}
            FromAgent::Done => {
                let link = &mut self.links[index];
                link.link.stage = Stage::Done;
                link.link.hang_up();
                if !link.is_closing {
                    link.is_closing = true;
                    let why = "its agent has ended".to_owned();
                    self.tell(Event::HostLost {
                        host: name,
                        why,
                        code: 1,
                    });
                }
            }
        }
    }

    fn is_of(&self, host: &str, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|(h, _)| h == host)
    }

    /// Keeps the last words of a worker that failed.
    fn on_exit(&mut self, worker: WorkerId, cause: &Cause) {
        self.output.finish(worker);
        if cause.is_failure()
            && let Some(tail) = self.output.tail(worker)
        {
            self.tails.insert(worker, tail);
            if self.tails.len() > TAILS_MAX {
                self.tails.pop_first();
            }
        }
    }

    fn forget(&mut self, worker: WorkerId) {
        if let Some(place) = self.workers.remove(&worker)
            && let Some(label) = self.output.label(worker)
        {
            self.labels.insert(place, label);
        }
        self.pids.remove(&worker);
        self.output.remove(worker);
    }

    fn on_lost(&mut self, index: usize, why: &str) {
        if self.links[index].link.is_over() {
            return;
        }
        let link = &mut self.links[index].link;
        let why = match link.stage >= Stage::Ready {
            true => link.with_words(why),
            false => link.why_not_started(),
        };
        link.kill();
        self.lose(index, why, 1);
    }

    /// A host is no use any more, and neither is what ran there.
    fn lose(&mut self, index: usize, why: String, code: u8) {
        let link = &mut self.links[index];
        let was_closing = std::mem::replace(&mut link.is_closing, true);
        link.link.stage = Stage::Lost;
        let host = link.link.name().to_owned();
        if was_closing {
            return;
        }
        let here = self.workers.iter().filter(|(_, (h, _))| *h == host);
        let here: Vec<WorkerId> = here.map(|(worker, _)| *worker).collect();
        for worker in &here {
            self.on_exit(*worker, &Cause::HostLost(why.clone()));
        }
        self.tell(Event::HostLost { host, why, code });
        for worker in here {
            self.forget(worker);
        }
    }

    pub(super) fn link(&mut self, host: &str) -> Option<&mut Link> {
        let mut links = self.links.iter_mut();
        links.find(|l| !l.is_closing && l.link.name() == host)
    }

    /// Says what happened; the exit code.
    fn conclude(&mut self) -> u8 {
        if let Some(signal) = self.interrupted_by {
            let name = platform::signal_name(signal);
            self.say(&format!("ended by signal {signal} ({name})"));
            return (128 + signal) as u8;
        }
        match self.ending.take() {
            None | Some(Ending::Success) => 0,
            Some(Ending::Failure { worker, code, why }) => {
                let mut text = format!("{why}.");
                if let Some((stream, lines)) = worker.and_then(|w| self.tails.remove(&w)) {
                    text.push_str(&format!(" Last lines of its {}:", stream.name()));
                    for line in lines {
                        text.push_str("\n    ");
                        text.push_str(&line);
                    }
                }
                self.say(&text);
                code
            }
        }
    }
}

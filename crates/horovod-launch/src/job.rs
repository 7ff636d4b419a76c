//! One job from the launcher's side: starts all hosts, carries output, hears signals, ends everything.
//!
//! One thread, one poll. Nothing is started on any host before every host has said that it can.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::agent::{INTERRUPT_GRACE, LEFTOVER_GRACE, TERMINATE_GRACE};
use crate::args::Options;
use crate::frames::{ExitStatus, FromAgent, JobSpec, RankSpec, Stop, ToAgent};
use crate::io::{Interest, earlier, wait};
use crate::link::{HostLink, Stage};
use crate::output::Output;
use crate::rendezvous::Rendezvous;
use crate::report::{CONSEQUENCES, Cause, End, culprit, describe};
use crate::signals::Signals;
use crate::{environment, platform, remote};

/// How long ranks that lost a peer may take to say so and end by themselves, before they are told to.
const FAILURE_GRACE: Duration = Duration::from_secs(3);
/// After one host could not be started, how long to collect what is wrong with the others.
const COLLECT_ERRORS: Duration = Duration::from_secs(2);
/// Between two signs of life to other hosts, and how many seconds without one end the ranks there.
pub(crate) const PING_INTERVAL: Duration = Duration::from_secs(10);
const SILENCE_MAX_S: u32 = 60;
/// What an agent may take beyond all graces to say that its ranks have ended.
const AGENT_GRACE: Duration = Duration::from_secs(5);
/// How long the last output may wait for a reader after a signal.
pub(crate) const CONSOLE_GRACE: Duration = Duration::from_secs(2);

/// A job under way.
pub(crate) struct Job<'a> {
    pub(crate) options: &'a Options,
    pub(crate) output: Output,
    pub(crate) signals: Signals,
    pub(crate) rendezvous: Rendezvous,
    pub(crate) links: Vec<HostLink>,
    pub(crate) start_timeout: Duration,
    pub(crate) cwd: PathBuf,
    pub(crate) state: State,
}

/// What has happened so far.
#[derive(Debug)]
pub(crate) struct State {
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
    /// Ranks that do not answer the others, of which the user has been told.
    told_silent: Vec<u32>,
}

impl State {
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
            told_silent: Vec::new(),
        }
    }
}

/// What the agent of a host is told of the job, but for its ranks.
pub(crate) fn spec(
    options: &Options,
    rendezvous: &Rendezvous,
    cwd: &Path,
    is_local: bool,
) -> JobSpec {
    let mut env = environment::forwarded(is_local);
    env.extend(environment::of_job(
        rendezvous.addresses(),
        &rendezvous.key(),
        &options.network_interfaces,
        &options.knobs,
    ));
    JobSpec {
        inherit_env: !is_local,
        env,
        cwd: cwd.to_owned(),
        command: options.command.clone(),
        silence_max_s: if is_local { 0 } else { SILENCE_MAX_S },
        ranks: Vec::new(),
        is_open: false,
    }
}

impl Job<'_> {
    /// Runs the job to its end; the launcher's exit code.
    pub(crate) fn run(mut self) -> io::Result<u8> {
        while !self.is_over() {
            self.step()?;
        }
        let code = self.conclude();
        let_go(&mut self.links, &mut self.signals, self.state.is_running)?;
        let patience = self.state.interrupted_by.map(|_| CONSOLE_GRACE);
        self.output.close(patience);
        Ok(code)
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

    /// During the start: whether a host may yet fail, or all may yet come.
    fn is_anyone_undecided(&self) -> bool {
        let first_to_wait_for = if self.state.has_sent_jobs {
            Stage::Greeted
        } else {
            Stage::Starting
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
        self.follow_meeting();
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

    fn follow_meeting(&mut self) {
        for words in self.rendezvous.follow() {
            if self.options.verbose {
                self.output.say(&format!("horovodrun: {words}"));
            }
        }
        // Who computes learns of it only when it asks for something again; the user shall know now.
        for (who, by) in self.rendezvous.silent() {
            if !self.state.told_silent.contains(who) {
                self.state.told_silent.push(*who);
                let host = self.links.iter().find(|link| has_rank(link, *who));
                let host = host.map_or("?", HostLink::name);
                self.output.say(&format!(
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
        let given_up = state.asked.map(|(how, at)| at + agent_limit(how));
        let ping = (self.links.iter().any(|link| !link.is_local)).then_some(state.ping_at);
        [errors, failure, given_up, ping]
            .into_iter()
            .fold(start, earlier)
    }

    /// Ranks that never met cannot notice each other's failure: no need to wait for it. Nor will those that do not
    /// answer the others end by themselves.
    fn grace(&self) -> Duration {
        let ended = |rank: u32| self.state.ends.iter().any(|end| end.rank == rank);
        let slots = self.links.iter().flat_map(|link| &link.placement.slots);
        let mut left = slots.map(|slot| slot.rank).filter(|rank| !ended(*rank));
        if left.all(|rank| self.rendezvous.silent().contains_key(&rank)) {
            return Duration::ZERO;
        }
        let noticed = self.state.ends.iter().any(|end| end.is_consequence);
        if self.rendezvous.has_met() || noticed {
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
            && now >= at + agent_limit(how)
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
            link.stage = Stage::Lost;
        }
    }

    fn slowest(&self) -> Stage {
        self.links
            .iter()
            .map(|link| link.stage)
            .min()
            .unwrap_or(Stage::Starting)
    }

    fn on_message(&mut self, index: usize, message: FromAgent) {
        let verbose = self.options.verbose;
        let name = self.links[index].name().to_owned();
        match message {
            FromAgent::Hello { version, hostname } => {
                if let Some(text) = remote::other_version(&version) {
                    self.refuse(index, 1, &text);
                    return;
                }
                if verbose {
                    self.output.say(&format!(
                        "horovodrun: {name} answers and calls itself {hostname}"
                    ));
                }
                self.links[index].stage = Stage::Greeted;
                if self.slowest() == Stage::Greeted {
                    self.send_jobs();
                }
            }
            FromAgent::Ready => {
                self.links[index].stage = Stage::Ready;
                if self.slowest() == Stage::Ready && self.state.start_errors.is_empty() {
                    self.start();
                }
            }
            FromAgent::Refused { code, why } => self.refuse(index, code, &why),
            FromAgent::Note(text) => self.output.say(&format!("horovodrun: {name}: {text}")),
            FromAgent::Started { rank, pid } => {
                if verbose {
                    self.output.say(&format!(
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
                self.links[index].stage = Stage::Done;
                self.links[index].hang_up();
            }
            // Nobody asked.
            FromAgent::Found(_) | FromAgent::Looked { .. } => {}
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
            // It ends what it has started and says so.
            self.state.start_errors.push((code, text));
            self.ask(Stop::Terminate);
        } else {
            link.hang_up();
            link.stage = Stage::Lost;
            self.start_error(code, text);
        }
    }

    /// Every host has answered: tell each what to run.
    fn send_jobs(&mut self) {
        self.state.start_deadline = Instant::now() + self.start_timeout;
        self.state.has_sent_jobs = true;
        for link in &mut self.links {
            let host = &link.placement.host;
            let ranks = link.placement.slots.iter().map(|slot| RankSpec {
                rank: slot.rank,
                env: environment::of_rank(host, *slot),
            });
            link.send(&ToAgent::Job(JobSpec {
                ranks: ranks.collect(),
                ..spec(self.options, &self.rendezvous, &self.cwd, link.is_local)
            }));
        }
    }

    /// Every host can: start the ranks.
    fn start(&mut self) {
        if let Some(directory) = &self.options.output_filename {
            raise_file_limit();
            let size = self.options.num_proc.unwrap_or(1);
            if let Err(why) = self.output.open_files(directory, size) {
                self.start_error(1, why);
                for link in &mut self.links {
                    link.hang_up();
                    link.stage = Stage::Lost;
                }
                return;
            }
        }
        self.state.is_running = true;
        for link in &mut self.links {
            link.send(&ToAgent::Start);
        }
    }

    fn on_lost(&mut self, index: usize, why: &str) {
        if self.links[index].is_over() {
            return;
        }
        self.links[index].stage = Stage::Lost;
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

    fn on_end(&mut self, index: usize, rank: u32, cause: Cause) {
        self.output.finish(rank);
        let host = self.links[index].name().to_owned();
        let stopped = matches!(
            cause,
            Cause::Exit(ExitStatus::Signal(
                libc::SIGINT | libc::SIGTERM | libc::SIGKILL
            )) | Cause::Exit(ExitStatus::Code(130 | 137 | 143))
        );
        if cause.is_failure() {
            self.rendezvous.report_death(rank, &host, &cause.text());
            self.state.failed_at.get_or_insert_with(Instant::now);
        }
        if self.options.verbose {
            self.output
                .say(&format!("horovodrun: rank {rank} {}", cause.text()));
        }
        // After Ctrl-C every rank ends as its script likes; none of that is news.
        let is_interrupted = self.state.interrupted_by.is_some();
        let mut was_asked = self.state.asked.is_some() && (stopped || is_interrupted);
        let mut cause = cause;
        if was_asked
            && !is_interrupted
            && let (Some(by), Cause::Exit(status)) = (self.rendezvous.silent().get(&rank), &cause)
        {
            // Then it is what the others failed for.
            was_asked = false;
            cause = Cause::Silent(*by, *status);
        }
        self.state.ends.push(End {
            rank,
            host,
            was_asked,
            is_consequence: CONSEQUENCES
                .iter()
                .any(|sign| self.output.tail_contains(rank, sign)),
            cause,
        });
    }

    /// Says what happened; the exit code.
    fn conclude(&mut self) -> u8 {
        for (_, text) in &self.state.start_errors {
            self.output.say(&format!("horovodrun: {text}"));
        }
        let culprit = culprit(&self.state.ends).filter(|end| !end.was_asked);
        if self.state.start_errors.is_empty()
            && let Some(culprit) = culprit
        {
            let text = describe(culprit, self.output.tail(culprit.rank), &self.state.ends);
            self.output.say(&text);
        }
        if let Some(signal) = self.state.interrupted_by {
            let name = platform::signal_name(signal);
            self.output
                .say(&format!("horovodrun: ended by signal {signal} ({name})"));
            return (128 + signal) as u8;
        }
        match (self.state.start_errors.first(), culprit) {
            (Some((code, _)), _) => *code,
            (None, Some(culprit)) => culprit.cause.code(),
            (None, None) => 0,
        }
    }
}

fn has_rank(link: &HostLink, rank: u32) -> bool {
    let mut slots = link.placement.slots.iter();
    slots.any(|slot| slot.rank == rank)
}

/// Waits for the agents' processes; what is still there then is killed, at once if nothing was started.
pub(crate) fn let_go(
    links: &mut [HostLink],
    signals: &mut Signals,
    was_running: bool,
) -> io::Result<()> {
    let deadline = Instant::now() + AGENT_GRACE;
    for link in links.iter_mut() {
        link.hang_up();
    }
    while links.iter_mut().any(|link| !link.has_ended()) {
        let now = Instant::now();
        if now >= deadline || !was_running {
            links.iter_mut().for_each(HostLink::kill);
        }
        let _ = signals.take();
        wait(
            &[Interest::read(signals.as_fd())],
            Some(now + Duration::from_millis(100)),
        )?;
    }
    // An agent that was killed leaves the descendants of its ranks to us.
    while Instant::now() < deadline + AGENT_GRACE && links.iter().all(|link| link.is_local) {
        while let Ok(Some(_)) = rustix::process::wait(rustix::process::WaitOptions::NOHANG) {}
        let left = platform::descendants();
        if left.is_empty() {
            break;
        }
        for pid in left {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        wait(&[], Some(Instant::now() + Duration::from_millis(10)))?;
    }
    Ok(())
}

/// From a request until its agent must have said that all is over.
pub(crate) fn agent_limit(how: Stop) -> Duration {
    AGENT_GRACE
        + match how {
            Stop::Interrupt => INTERRUPT_GRACE + TERMINATE_GRACE + LEFTOVER_GRACE,
            Stop::Terminate => TERMINATE_GRACE + LEFTOVER_GRACE,
            Stop::Kill => Duration::ZERO,
        }
}

/// Two files per rank may be more than the usual limit; agents were started before, so ranks keep theirs.
pub(crate) fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}

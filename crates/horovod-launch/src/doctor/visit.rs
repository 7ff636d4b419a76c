//! The launcher's side of an examination: one agent per host, as for a job; asks, waits, never beyond its time.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use horovod_transport::JobKey;
use horovod_transport::probe::Obstacle;

use super::chart::{Chart, JobPlan, Skew};
use super::talk::{Answer, Errand, Listening, Question, Scene};
use super::tournament;
use crate::args::Options;
use crate::endings::let_go;
use crate::environment;
use crate::frames::{FromAgent, ToAgent};
use crate::io::{Interest, wait};
use crate::link::{HostLink, Stage};
use crate::remote;
use crate::signals::Signals;

/// Until when, counted from the beginning, each part must be over.
const GREETED_BY: Duration = Duration::from_millis(6_000);
const LISTENING_BY: Duration = Duration::from_millis(7_000);
const REACHED_BY: Duration = Duration::from_millis(9_700);
const MEASURED_BY: Duration = Duration::from_millis(12_000);
const DONE_BY: Duration = Duration::from_millis(13_000);
/// How long a connection may take before it counts as swallowed.
const REACH_TIME: Duration = Duration::from_millis(2_000);
/// How long to send in each direction.
const WINDOW: Duration = Duration::from_millis(160);
/// Between that and the end there must be room for one more round.
const ROUND_TIME: Duration = Duration::from_millis(700);
/// How often to ask for the time: the fastest answer counts.
const CLOCK_QUESTIONS: u32 = 8;
/// In larger jobs not every pair is tried: so many partners per host.
const PARTNERS_MAX: usize = 32;
/// Names that every host is to resolve.
const NAMES_MAX: usize = 32;
/// Until agents that were told to go have gone.
const FAREWELL: Duration = Duration::from_millis(300);

/// An examination under way.
pub(crate) struct Visit<'a> {
    pub(crate) options: &'a Options,
    pub(crate) begun: Instant,
    pub(crate) signals: Signals,
    /// In the order of the chart's hosts.
    pub(crate) links: Vec<HostLink>,
    pub(crate) chart: Chart,
    pub(crate) asked: Vec<Asked>,
    pub(crate) key: JobKey,
    pub(crate) interrupted_by: Option<i32>,
}

/// What one host still owes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Asked {
    clocks: u32,
    reaches: bool,
    measures: bool,
}

impl Visit<'_> {
    /// Looks at everything; an answer also when there is little to see.
    pub(crate) fn run(mut self) -> io::Result<(Chart, Option<i32>)> {
        self.until(GREETED_BY, |visit| {
            visit.links.iter().all(|link| link.stage != Stage::Starting)
        })?;
        self.give_up_on_silent_hosts();
        self.until(LISTENING_BY, |visit| {
            visit
                .present()
                .all(|host| visit.chart.hosts[host].listens.is_some())
        })?;
        self.reach()?;
        self.measure()?;
        self.until(DONE_BY, |visit| {
            visit
                .present()
                .all(|host| visit.chart.hosts[host].facts.is_some())
        })?;
        self.chart.took = self.begun.elapsed();
        let until = Instant::now() + FAREWELL;
        self.links.iter_mut().for_each(HostLink::hang_up);
        while self.links.iter_mut().any(|link| !link.has_ended()) && Instant::now() < until {
            wait(&[Interest::read(self.signals.as_fd())], Some(until))?;
            let _ = self.signals.take();
        }
        let_go(&mut self.links, &mut self.signals, false)?;
        Ok((self.chart, self.interrupted_by))
    }

    fn present(&self) -> impl Iterator<Item = usize> {
        let links = self.links.iter().enumerate();
        links
            .filter(|(_, link)| link.stage == Stage::Greeted)
            .map(|(host, _)| host)
    }

    /// Goes on until `is_done`, or until so long after the beginning.
    fn until(&mut self, limit: Duration, is_done: impl Fn(&Self) -> bool) -> io::Result<()> {
        let deadline = self.begun + limit;
        while self.interrupted_by.is_none() && !is_done(self) && Instant::now() < deadline {
            let mut interests = vec![Interest::read(self.signals.as_fd())];
            for link in self.links.iter().filter(|link| !link.is_over()) {
                interests.extend(link.interests(true));
            }
            wait(&interests, Some(deadline))?;
            self.interrupted_by = self.signals.take().first().copied();
            for host in 0..self.links.len() {
                if self.links[host].is_over() {
                    continue;
                }
                let (messages, result) = self.links[host].exchange(true);
                for message in messages {
                    self.hear(host, message);
                }
                if let Err(why) = result {
                    self.lose(host, &why);
                }
            }
        }
        Ok(())
    }

    fn hear(&mut self, host: usize, message: FromAgent) {
        match message {
            FromAgent::Hello { version, .. } => match remote::other_version(&version) {
                None => self.greet(host),
                Some(problem) => self.dismiss(host, problem),
            },
            FromAgent::Found(answer) => self.take(host, answer),
            _ => {}
        }
    }

    fn greet(&mut self, host: usize) {
        self.links[host].stage = Stage::Greeted;
        self.ask_time(host);
        let is_local = self.links[host].is_local;
        let interfaces = match self.options.network_interfaces.as_slice() {
            [] => Vec::new(),
            wanted => wanted.to_vec(),
        };
        self.ask(
            host,
            Question::Listen(Listening {
                key: self.key.to_hex(),
                me: number(host),
                interfaces,
                is_local: self.chart.is_all_local(),
                encrypt: self.chart.plan.encrypt,
            }),
        );
        let mut env = environment::forwarded(is_local);
        let knobs = self.options.knobs.iter();
        env.extend(knobs.map(|(name, value)| (name.into(), value.into())));
        let hosts = self.chart.hosts.iter().filter(|other| other.slots > 0);
        let names = hosts.map(|other| address_of(&other.name).to_owned());
        let names = names.filter(|name| name.parse::<IpAddr>().is_err());
        let left = (self.begun + MEASURED_BY).saturating_duration_since(Instant::now());
        self.ask(
            host,
            Question::Facts(Scene {
                inherit_env: !is_local,
                env,
                cwd: self.chart.plan.cwd.clone(),
                command: self.options.command.clone(),
                names: names.take(NAMES_MAX).collect(),
                within_ms: millis(left),
            }),
        );
    }

    fn ask(&mut self, host: usize, question: Question) {
        self.links[host].send(&ToAgent::Examine(question));
    }

    fn ask_time(&mut self, host: usize) {
        self.asked[host].clocks += 1;
        let mark = self.begun.elapsed().as_nanos() as u64;
        self.ask(host, Question::Clock(mark));
    }

    fn take(&mut self, host: usize, answer: Answer) {
        let patient = &mut self.chart.hosts[host];
        match answer {
            Answer::Clock(mark, time) => {
                let round_trip = (self.begun.elapsed().as_nanos() as u64).saturating_sub(mark);
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                let here = now.unwrap_or_default().as_nanos() as i64 - (round_trip / 2) as i64;
                let skew = Skew {
                    ahead_ns: (time as i64).saturating_sub(here),
                    uncertain_ns: round_trip / 2,
                };
                let better = |known: Skew| skew.uncertain_ns < known.uncertain_ns;
                if patient.skew.is_none_or(better) {
                    patient.skew = Some(skew);
                }
                if self.asked[host].clocks < CLOCK_QUESTIONS {
                    self.ask_time(host);
                }
            }
            Answer::Facts(facts) => patient.facts = Some(*facts),
            Answer::Listening(result) => patient.listens = Some(result),
            Answer::Reached(outcomes) => {
                self.asked[host].reaches = false;
                for ((to, at), result) in outcomes {
                    let to = to as usize;
                    if to < self.chart.hosts.len() {
                        let route = self.chart.routes.entry((host, to)).or_default();
                        route.push((at, result));
                    }
                }
            }
            Answer::Measured(to, result) => {
                self.asked[host].measures = false;
                self.chart.paces.insert((host, to as usize), result);
            }
        }
    }

    /// The host takes no further part.
    fn dismiss(&mut self, host: usize, why: String) {
        let link = &mut self.links[host];
        link.kill();
        link.stage = Stage::Lost;
        self.asked[host] = Asked::default();
        self.chart.hosts[host].absent = Some(why);
    }

    fn lose(&mut self, host: usize, why: &str) {
        let link = &mut self.links[host];
        let why = match link.stage == Stage::Greeted {
            true => link.with_words(why),
            false => link.why_not_started(),
        };
        self.dismiss(host, why);
    }

    fn give_up_on_silent_hosts(&mut self) {
        for host in 0..self.links.len() {
            if self.links[host].stage == Stage::Starting {
                let seconds = self.begun.elapsed().as_secs();
                self.dismiss(host, format!("no answer within {seconds} s"));
            }
        }
    }

    fn addresses(&self, host: usize) -> Vec<SocketAddr> {
        let listens = self.chart.hosts[host].listens.iter();
        listens.flatten().flatten().map(|(_, at)| *at).collect()
    }

    /// Every host connects to its partners and to the launcher's host, all at the same time.
    fn reach(&mut self) -> io::Result<()> {
        let count = self.chart.hosts.len();
        let mut partners = vec![Vec::new(); count];
        for (a, b) in tournament::rounds(count)
            .into_iter()
            .take(PARTNERS_MAX)
            .flatten()
        {
            partners[a].push(b);
            partners[b].push(a);
        }
        let launcher = self.chart.launcher();
        for host in self.present().collect::<Vec<_>>() {
            let mut wanted = std::mem::take(&mut partners[host]);
            wanted.extend(launcher);
            // A host alone only has to reach itself.
            if count > 1 {
                wanted.retain(|to| *to != host);
            }
            wanted.sort_unstable();
            wanted.dedup();
            // Nobody connects to where only the launcher is, but to the launcher.
            let has_ranks = |host: usize| self.chart.hosts[host].slots > 0;
            wanted.retain(|to| (has_ranks(host) && has_ranks(*to)) || Some(*to) == launcher);
            let targets: Vec<(u32, SocketAddr)> = wanted
                .into_iter()
                .flat_map(|to| {
                    self.addresses(to)
                        .into_iter()
                        .map(move |at| (number(to), at))
                })
                .collect();
            if !targets.is_empty()
                && self.chart.hosts[host]
                    .listens
                    .as_ref()
                    .is_some_and(Result::is_ok)
            {
                self.asked[host].reaches = true;
                self.ask(host, Question::Reach(targets, millis(REACH_TIME)));
            }
        }
        self.until(REACHED_BY, |visit| {
            visit.asked.iter().all(|asked| !asked.reaches)
        })?;
        self.chart.sort_routes();
        Ok(())
    }

    /// Pairs measure in rounds, so that no host is in two measurements at a time.
    fn measure(&mut self) -> io::Result<()> {
        let hosts: Vec<usize> = (0..self.chart.hosts.len())
            .filter(|host| self.chart.hosts[*host].slots > 0)
            .collect();
        for round in tournament::rounds(hosts.len()) {
            if self.begun.elapsed() + ROUND_TIME > MEASURED_BY || self.interrupted_by.is_some() {
                break;
            }
            let mut asked = Vec::new();
            for (a, b) in round {
                // As in a job, the later host connects; the earlier one where that is not possible.
                let (a, b) = (hosts[a], hosts[b]);
                let routes = [(b, a), (a, b)];
                let open = routes.into_iter().find_map(|(from, to)| {
                    let (at, _) = self.chart.chosen(from, to)?;
                    (!self.links[from].is_over()).then_some((from, to, at))
                });
                let Some((from, to, at)) = open else { continue };
                let errand = Errand {
                    to: number(to),
                    at,
                    window_ms: millis(WINDOW),
                };
                self.asked[from].measures = true;
                asked.push((from, to));
                self.ask(from, Question::Measure(errand));
            }
            self.until(MEASURED_BY, |visit| {
                visit.asked.iter().all(|asked| !asked.measures)
            })?;
            for (from, to) in asked {
                // What comes later does not count: other measurements may have begun.
                if std::mem::take(&mut self.asked[from].measures) {
                    let late = Obstacle::Broken("nothing moved in time".into());
                    self.chart.paces.insert((from, to), Err(late));
                }
            }
        }
        Ok(())
    }
}

/// A name without the user.
fn address_of(name: &str) -> &str {
    let name = name.rsplit('@').next().unwrap_or(name);
    name.trim_start_matches('[').trim_end_matches(']')
}

fn number(host: usize) -> u32 {
    u32::try_from(host).unwrap_or(u32::MAX)
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// What the settings say about the job.
pub(crate) fn plan(options: &Options, size: u32, cwd: std::path::PathBuf) -> JobPlan {
    let program = options.command.first().map(std::path::Path::new);
    let name = program.and_then(|program| program.file_name());
    let runs_python = name.is_none_or(|name| name.to_string_lossy().starts_with("python"));
    let settings = environment::of_data_plane();
    JobPlan {
        size,
        staging: settings.staging,
        connections: settings.connections,
        encrypt: settings.encrypt,
        runs_python,
        cwd,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

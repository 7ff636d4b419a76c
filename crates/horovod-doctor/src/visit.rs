//! The launcher's side of an examination: asks all agents, waits, never beyond its time.

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use horovod_transport::JobKey;
use horovod_transport::probe::Obstacle;

use super::chart::{Chart, JobPlan, Patient, Skew};
use super::gather::Variables;
use super::talk::{Answer, Errand, Listening, Question, Scene};
use super::tournament;

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

/// The agents of all hosts, by their numbers in the list of hosts.
pub trait Agents {
    /// Sends a question.
    fn ask(&mut self, host: usize, question: Question);
    /// The environment that ranks there would get, as far as it is the launcher's.
    fn environment(&self, host: usize) -> Variables;
    /// Waits until something has come, or until `deadline`. `None`: the user does not want to know any more.
    fn receive(&mut self, deadline: Instant) -> io::Result<Option<Vec<(usize, News)>>>;
    /// Takes leave of an agent that has not come in time.
    fn dismiss(&mut self, host: usize);
}

/// News from a host.
#[derive(Debug)]
pub enum News {
    /// Its agent runs, and can be asked.
    Greeted,
    /// It has answered, at this time.
    Answer(Answer, Instant),
    /// It takes no further part; why.
    Absent(String),
}

/// The job for which hosts are examined.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its kind.
    pub plan: JobPlan,
    /// Interfaces to listen on; empty means all.
    pub interfaces: Vec<String>,
    /// Program and arguments of every rank; empty if none were given.
    pub command: Vec<OsString>,
}

/// Looks at everything; an answer also when there is little to see. The time counts from `begun`.
pub fn examine(
    agents: &mut dyn Agents,
    job: Job,
    hosts: Vec<Patient>,
    begun: Instant,
) -> io::Result<Chart> {
    let Job {
        plan,
        interfaces,
        command,
    } = job;
    let visit = Visit {
        agents,
        begun,
        interfaces,
        command,
        asked: vec![Asked::default(); hosts.len()],
        chart: Chart {
            plan,
            hosts,
            ..Chart::default()
        },
        key: JobKey::random()?,
        is_interrupted: false,
    };
    visit.run()
}

/// An examination under way.
struct Visit<'a> {
    agents: &'a mut dyn Agents,
    begun: Instant,
    interfaces: Vec<String>,
    command: Vec<OsString>,
    chart: Chart,
    /// In the order of the chart's hosts.
    asked: Vec<Asked>,
    key: JobKey,
    is_interrupted: bool,
}

/// How far a host is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum VisitStage {
    #[default]
    Starting,
    Present,
    Absent,
}

/// Answers that one host still owes.
#[derive(Clone, Debug, Default)]
struct Asked {
    stage: VisitStage,
    clocks: u32,
    reaches: bool,
    measures: bool,
}

impl Visit<'_> {
    fn run(mut self) -> io::Result<Chart> {
        self.until(GREETED_BY, |visit| {
            visit
                .asked
                .iter()
                .all(|asked| asked.stage != VisitStage::Starting)
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
        Ok(self.chart)
    }

    fn present(&self) -> impl Iterator<Item = usize> {
        let hosts = self.asked.iter().enumerate();
        hosts
            .filter(|(_, asked)| asked.stage == VisitStage::Present)
            .map(|(host, _)| host)
    }

    /// Goes on until `is_done`, or until so long after the beginning.
    fn until(&mut self, limit: Duration, is_done: impl Fn(&Self) -> bool) -> io::Result<()> {
        let deadline = self.begun + limit;
        while !self.is_interrupted && !is_done(self) && Instant::now() < deadline {
            let Some(all) = self.agents.receive(deadline)? else {
                self.is_interrupted = true;
                break;
            };
            for (host, news) in all {
                match news {
                    News::Greeted => self.greet(host),
                    News::Answer(answer, at) => self.take(host, answer, at),
                    News::Absent(why) => self.lose(host, why),
                }
            }
        }
        Ok(())
    }

    fn greet(&mut self, host: usize) {
        self.asked[host].stage = VisitStage::Present;
        self.ask_time(host);
        let is_local = self.chart.hosts[host].is_local;
        self.ask(
            host,
            Question::Listen(Listening {
                key: self.key.to_hex(),
                me: number(host),
                interfaces: self.interfaces.clone(),
                ports: self.chart.plan.ports,
                is_local: self.chart.is_all_local(),
                encrypt: self.chart.plan.encrypt,
            }),
        );
        let hosts = self.chart.hosts.iter().filter(|other| other.slots > 0);
        let names = hosts.map(|other| address_of(&other.name).to_owned());
        let names = names.filter(|name| name.parse::<IpAddr>().is_err());
        let left = (self.begun + MEASURED_BY).saturating_duration_since(Instant::now());
        self.ask(
            host,
            Question::Facts(Scene {
                inherit_env: !is_local,
                env: self.agents.environment(host),
                cwd: self.chart.plan.cwd.clone(),
                command: self.command.clone(),
                names: names.take(NAMES_MAX).collect(),
                within_ms: millis(left),
            }),
        );
    }

    fn ask(&mut self, host: usize, question: Question) {
        self.agents.ask(host, question);
    }

    fn ask_time(&mut self, host: usize) {
        self.asked[host].clocks += 1;
        let mark = self.begun.elapsed().as_nanos() as u64;
        self.ask(host, Question::Clock(mark));
    }

    fn take(&mut self, host: usize, answer: Answer, at: Instant) {
        let patient = &mut self.chart.hosts[host];
        match answer {
            Answer::Clock(mark, time) => {
                let arrived = at.saturating_duration_since(self.begun).as_nanos() as u64;
                let round_trip = arrived.saturating_sub(mark);
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                // The messages of other hosts were handled since then.
                let since = at.elapsed().as_nanos() as i64 + (round_trip / 2) as i64;
                let here = now.unwrap_or_default().as_nanos() as i64 - since;
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
    fn lose(&mut self, host: usize, why: String) {
        self.asked[host] = Asked {
            stage: VisitStage::Absent,
            ..Asked::default()
        };
        self.chart.hosts[host].absent = Some(why);
    }

    fn give_up_on_silent_hosts(&mut self) {
        for host in 0..self.asked.len() {
            if self.asked[host].stage == VisitStage::Starting {
                let seconds = self.begun.elapsed().as_secs();
                self.agents.dismiss(host);
                self.lose(host, format!("no answer within {seconds} s"));
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
            if self.begun.elapsed() + ROUND_TIME > MEASURED_BY || self.is_interrupted {
                break;
            }
            let mut asked = Vec::new();
            for (a, b) in round {
                // As in a job, the later host connects; the earlier one where that is not possible.
                let (a, b) = (hosts[a], hosts[b]);
                let routes = [(b, a), (a, b)];
                let open = routes.into_iter().find_map(|(from, to)| {
                    let (at, _) = self.chart.chosen(from, to)?;
                    (self.asked[from].stage != VisitStage::Absent).then_some((from, to, at))
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
                // Later measurements do not count: others may have begun.
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

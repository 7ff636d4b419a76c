//! Whole elastic jobs in virtual time: the launcher's real driver, the real rendezvous and the real negotiation of every
//! generation, with processes that crash and are started again, hosts that come, go and are cut off. Here are the world's clock, what
//! will happen, and which hosts and processes there are.
//!
//! Modelled here are the network, the agents, the data plane (results arrive when all have begun), and what the engine
//! does about a lost peer. The training loop (`script`) follows `python/horovod/common/elastic.py`.

mod checks;
mod data;
mod engine;
mod faults;
mod launcher;
mod links;
mod process;
mod script;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use horovod_launch::elastic::{Driver, Ending, Policy, WorkerId};
use horovod_transport::rendezvous::ServerEvent;
use horovod_transport::testing::SimulatedRendezvous;

use self::checks::Ledger;
use self::data::Generation;
use self::faults::Fault;
use self::launcher::Order;
use self::links::{Link, LinkId};
use self::process::Process;
use crate::checkers::Failure;
use crate::rng::Rng;

/// How large jobs get.
#[derive(Clone, Copy, Debug)]
pub struct JobLimits {
    /// Most hosts.
    pub hosts_max: u32,
    /// Most slots of a host.
    pub slots_max: u32,
    /// Steps of training.
    pub steps_max: u64,
    /// Whether there are as many hosts and slots as there may be.
    pub is_full: bool,
    /// Most faults; what happens besides them does not depend on it.
    pub faults_max: u64,
}

impl Default for JobLimits {
    fn default() -> Self {
        Self {
            hosts_max: 4,
            slots_max: 3,
            steps_max: 40,
            is_full: false,
            faults_max: 12,
        }
    }
}

/// Runs the job of `seed` to its end and checks everything at every event.
///
/// # Errors
/// The first broken promise with the seed, the fewest faults that lead to it, and what happened.
pub fn run_job_seed(seed: u64, limits: &JobLimits) -> Result<JobResult, Failure> {
    let failure = match run(seed, limits) {
        Ok(outcome) => return Ok(outcome),
        Err(failure) => failure,
    };
    // The story with the fewest faults is the easiest to read.
    let fewer = (0..limits.faults_max).find_map(|faults_max| {
        let limits = JobLimits {
            faults_max,
            ..*limits
        };
        run(seed, &limits).err()
    });
    Err(fewer.unwrap_or(failure).with_seed(seed))
}

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
/// Nothing heard for so long from a rank on another host: it is lost.
const HEARTBEAT_TIMEOUT: u64 = 10 * SECOND;
/// The system gives up a connection.
const TCP_TIMEOUT: u64 = 25 * SECOND;
/// `--elastic-timeout`.
const TIMEOUT: u64 = 120 * SECOND;
/// How long after the last fault a job may take.
const CALM_MAX: u64 = 4000 * SECOND;
/// More happens in no job.
const HAPPENINGS_MAX: u64 = 60_000_000;
/// Lines of the story that are kept.
const STORY_MAX: usize = 60;

/// A future event.
#[derive(Clone, Copy, Debug)]
enum Happening {
    Deliver(LinkId),
    /// The driver's deadline.
    LauncherTimer,
    /// The launcher looks at what the rendezvous reports.
    Reported,
    /// The rendezvous looks at what the launcher wants.
    Ordered,
    /// The rendezvous' deadline.
    RendezvousTimer,
    AgentUp(usize, u64),
    /// The agent of a host notices that it is alone, and ends all that it has started.
    AgentEnds(usize, u64),
    /// A process goes on, if it is still where it was.
    Goes(WorkerId, u64),
    NodeTimer(WorkerId, u64),
    /// The launcher has had its time to say why a peer is lost.
    Grace(WorkerId, u64),
    Carried(WorkerId, u64, u64),
    Dies(WorkerId, i32),
    Fault(Fault),
    Heal(usize, u64),
    /// A host has been cut off for so long.
    CutLasts(usize, u64, u64),
    /// By now all know that this member has died.
    MustKnow(WorkerId, u64),
}

/// One host.
#[derive(Debug, Default)]
struct Host {
    /// Slots that it has when it is on the list.
    slots: u32,
    is_listed: bool,
    cut_in: bool,
    cut_out: bool,
    /// Without power.
    is_dark: bool,
    /// Counts cuts.
    cuts: u64,
    /// Agents that run: more than one while an old one has not noticed that it is alone.
    agents: BTreeSet<u64>,
    /// The one that the launcher has or opens.
    agent: Option<u64>,
}

/// How a job went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobResult {
    /// It came to its good end.
    pub is_success: bool,
    /// Rounds that came to stand.
    pub rounds: u64,
    /// Most ranks of a round.
    pub ranks_max: usize,
    /// Processes that died, of faults or because they were ended.
    pub deaths: u64,
    /// Commits that all ranks have made.
    pub commits: u64,
    /// Messages of all kinds.
    pub messages: u64,
    /// Hash of everything that happened.
    pub hash: u64,
}

struct World {
    rng: Rng,
    /// Random numbers for faults.
    fate: Rng,
    faults_left: u64,
    /// How often of a million a process dies at one of the points where that matters.
    crashes_per_million: u64,
    now: u64,
    count: u64,
    queue: BTreeMap<(u64, u64), Happening>,
    /// Longest delay of a message.
    delay: u64,
    /// How long members of a round may take to connect (`HOROVOD_GLOO_TIMEOUT_SECONDS`).
    connect_timeout: u64,
    links: BTreeMap<LinkId, Link>,
    driver: Driver,
    policy: Policy,
    rendezvous: SimulatedRendezvous,
    reports: VecDeque<ServerEvent>,
    orders: VecDeque<Order>,
    launcher_timer_at: Option<u64>,
    rendezvous_timer_at: Option<u64>,
    next_client: u64,
    next_agent: u64,
    hosts: Vec<Host>,
    processes: BTreeMap<WorkerId, Process>,
    /// Workers that the launcher believes to run, and their places.
    known: BTreeMap<WorkerId, (usize, u32)>,
    /// Workers that the launcher has stopped or dismissed.
    stopping: BTreeSet<WorkerId>,
    /// The worker and the host at the other end of the rendezvous' connections.
    clients: BTreeMap<u64, (WorkerId, usize)>,
    generations: BTreeMap<u64, Generation>,
    /// Operations that all have begun and that wait for a way to be open.
    waiting_for_route: BTreeSet<(WorkerId, u64, u64)>,
    fan_out: u32,
    steps: u64,
    commit_every: u64,
    compute: u64,
    calm_at: u64,
    ending: Option<Ending>,
    ledger: Ledger,
    messages: u64,
    failure: Option<String>,
    story: VecDeque<String>,
    hash: u64,
}

/// Runs the job of this seed.
fn run(seed: u64, limits: &JobLimits) -> Result<JobResult, Failure> {
    let mut world = World::new(seed, limits);
    world.run();
    match world.failure.take() {
        None => Ok(world.outcome()),
        Some(what) => {
            let story: Vec<String> = world.story.into_iter().collect();
            let faults = limits.faults_max;
            Err(Failure {
                seed: None,
                what: format!("with at most {faults} faults: {what}\n{}", story.join("\n")),
            })
        }
    }
}

impl World {
    fn new(seed: u64, limits: &JobLimits) -> Self {
        let mut rng = Rng::new(seed ^ 0x6d65_6d62_6572_7300);
        let fate = Rng::new(rng.next_u64());
        let up_to = |rng: &mut Rng, most: u32| match limits.is_full {
            true => most,
            false => 1 + rng.below(u64::from(most)) as u32,
        };
        let host_count = up_to(&mut rng, limits.hosts_max);
        let mut slots = 0;
        let mut hosts = Vec::new();
        for _ in 0..host_count {
            let host = Host {
                slots: up_to(&mut rng, limits.slots_max),
                is_listed: true,
                ..Host::default()
            };
            slots += host.slots;
            hosts.push(host);
        }
        // One more that may come.
        hosts.push(Host {
            slots: 1 + rng.below(u64::from(limits.slots_max)) as u32,
            ..Host::default()
        });
        let np = match limits.is_full || rng.chance(50) {
            true => slots,
            false => 1 + rng.below(u64::from(slots)) as u32,
        };
        let policy = Policy {
            first_np: np,
            min_np: 1 + rng.below(u64::from(np)) as u32,
            max_np: match rng.chance(50) {
                true => u32::MAX,
                false => np + rng.below(3) as u32,
            },
            wait_timeout: Duration::from_nanos(TIMEOUT),
            start_grace: Duration::from_secs(30),
            reset_limit: rng.chance(10).then(|| rng.below(5) as u32),
            cooldown: rng
                .chance(60)
                .then(|| (Duration::from_secs(5), Duration::from_secs(40))),
            slot_failures_max: 3,
            has_fixed_hosts: rng.chance(25),
        };
        let steps = limits.steps_max / 2 + rng.below(limits.steps_max / 2 + 1);
        let fault_time = 20 + rng.below(180);
        let per_mille = [0, 0, 2, 10];
        let crashes = *rng.pick(&per_mille) * 1000 / (1 + u64::from(slots) / 8);
        let delay = *rng.pick(&[MS / 10, MS, 20 * MS, 300 * MS]);
        let mut world = Self {
            connect_timeout: *rng.pick(&[10, 30]) * SECOND,
            fan_out: 2 + rng.below(16) as u32,
            commit_every: 1 + rng.below(4),
            compute: fault_time * SECOND / steps.max(1),
            calm_at: fault_time * SECOND,
            rng,
            fate,
            faults_left: limits.faults_max,
            crashes_per_million: crashes,
            now: 0,
            count: 0,
            queue: BTreeMap::new(),
            delay,
            links: BTreeMap::new(),
            driver: Driver::new(policy.clone()),
            policy,
            rendezvous: SimulatedRendezvous::default(),
            reports: VecDeque::new(),
            orders: VecDeque::new(),
            launcher_timer_at: None,
            rendezvous_timer_at: None,
            stopping: BTreeSet::new(),
            next_client: 0,
            next_agent: 0,
            hosts,
            processes: BTreeMap::new(),
            known: BTreeMap::new(),
            clients: BTreeMap::new(),
            generations: BTreeMap::new(),
            waiting_for_route: BTreeSet::new(),
            steps,
            ending: None,
            ledger: Ledger::default(),
            messages: 0,
            failure: None,
            story: VecDeque::new(),
            hash: 0,
        };
        let policy = format!("{:?}", world.policy);
        world.log(format!("{np} of {slots} slots, {steps} steps, {policy}"));
        world.plan_faults();
        world
    }

    fn run(&mut self) {
        self.list_hosts();
        for _ in 0..HAPPENINGS_MAX {
            if self.failure.is_some() || self.ending.is_some() {
                break;
            }
            let Some(((at, _), happening)) = self.queue.pop_first() else {
                break;
            };
            self.now = at;
            self.happen(happening);
            if self.now > self.calm_at + CALM_MAX {
                self.fail("the job does not end".to_owned());
            }
        }
        if self.failure.is_none() {
            self.check_ending();
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Deliver(id) => self.deliver(id),
            Happening::LauncherTimer => self.launcher_timer(),
            Happening::Reported => self.take_report(),
            Happening::Ordered => self.obey_order(),
            Happening::RendezvousTimer => self.rendezvous_timer(),
            Happening::AgentUp(host, agent) => self.agent_up(host, agent),
            Happening::AgentEnds(host, agent) => self.agent_ends(host, agent),
            Happening::Goes(worker, epoch) => self.go_on(worker, epoch),
            Happening::NodeTimer(worker, generation) => self.node_timer(worker, generation),
            Happening::Grace(worker, generation) => self.grace_is_over(worker, generation),
            Happening::Carried(worker, generation, seq) => self.carried(worker, generation, seq),
            Happening::Dies(worker, status) => self.die(worker, status),
            Happening::Fault(fault) => self.strike(fault),
            Happening::Heal(host, cut) => self.heal(host, cut),
            Happening::CutLasts(host, cut, how_long) => self.cut_lasts(host, cut, how_long),
            Happening::MustKnow(worker, generation) => self.check_known(worker, generation),
        }
    }

    fn at(&mut self, at: u64, happening: Happening) {
        self.count += 1;
        self.queue.insert((at.max(self.now), self.count), happening);
    }

    fn after(&mut self, delay: u64, happening: Happening) {
        self.at(self.now + delay, happening);
    }

    fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.rng.below(to - from)
    }

    /// For the reader of a failure.
    fn log(&mut self, what: String) {
        let line = format!("{:>10.3} s  {what}", self.now as f64 / 1e9);
        for byte in line.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        if self.story.len() == STORY_MAX {
            self.story.pop_front();
        }
        self.story.push_back(line);
    }

    fn fail(&mut self, what: String) {
        if self.failure.is_none() {
            self.log(format!("BROKEN: {what}"));
            self.failure = Some(what);
        }
    }

    fn time(&self) -> Duration {
        Duration::from_nanos(self.now)
    }

    fn outcome(&self) -> JobResult {
        JobResult {
            is_success: self.ending == Some(Ending::Success),
            rounds: self.ledger.rounds,
            ranks_max: self.ledger.ranks_max,
            deaths: self.ledger.deaths,
            commits: self.ledger.commits(),
            messages: self.messages,
            hash: self.hash,
        }
    }
}

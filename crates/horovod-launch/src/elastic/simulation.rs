//! The driver in a simulated job: workers start, come, hang and die; hosts come, go and fail; hundreds of runs, each
//! from one seed. Every step checks the invariants; a failure names its seed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Range;
use std::time::Duration;

mod dice;
mod faults;

use dice::Dice;

use super::driver::Driver;
use super::events::{Action, Ending, Event, Policy, Time, WorkerId};
use crate::frames::ExitStatus;
use crate::report::Cause;

/// Where a process is, as the world knows it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ProcessPlace {
    Importing,
    WaitingSet,
    /// In the round of this number.
    Round(u64),
    /// The round is over, but it hears nothing.
    Hangs,
}

#[derive(Clone, Debug)]
struct Process {
    host: String,
    local: u32,
    place: ProcessPlace,
    training_state: u8,
    /// By a signal.
    is_stopped: bool,
    /// It will not be asked again: it is ending.
    is_ending: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// The driver's own deadline.
    Timer,
    Imported(WorkerId),
    /// The round comes to stand, if all its members are still in it.
    Stands(u64),
    Synced(u64),
    /// A commit at which a change is agreed on.
    Leaves(u64),
    /// A member of a round notices that it is over.
    Notices(WorkerId, u64),
    /// A member of a round gives another up.
    GivesUp(WorkerId, WorkerId, u64),
    /// An agent says whether a worker is stopped.
    Answers(WorkerId),
    Fault,
    Ends(WorkerId, i32),
    Reaped(WorkerId, i32),
    Opened(String),
    HostChange,
    /// The work is done, if a round stands.
    Finishes,
}

struct World {
    seed: u64,
    dice: Dice,
    driver: Driver,
    now: Time,
    queue: BinaryHeap<Reverse<(Time, u64, Happening)>>,
    count: u64,
    processes: BTreeMap<WorkerId, Process>,
    hosts: BTreeMap<String, u32>,
    opened: BTreeSet<String>,
    round: u64,
    members: Vec<WorkerId>,
    stands: bool,
    is_broken: bool,
    /// Some worker has held the state.
    had_state: bool,
    finishing: bool,
    max_np: u32,
    min_np: u32,
    limit: Option<u32>,
    ending: Option<Ending>,
    rounds: u32,
    calm_after: Time,
    log: Vec<String>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let hosts = 1 + dice.below(3);
        let mut names = BTreeMap::new();
        for host in 0..hosts {
            names.insert(format!("h{host}"), 1 + dice.below(3) as u32);
        }
        let slots: u32 = names.values().sum();
        let np = 1 + dice.below(u64::from(slots)) as u32;
        let max_np = match dice.one_in(2) {
            true => u32::MAX,
            false => np + dice.below(3) as u32,
        };
        let min_np = 1 + dice.below(u64::from(np)) as u32;
        let limit = dice.one_in(6).then(|| dice.below(4) as u32);
        let policy = Policy {
            first_np: np,
            min_np,
            max_np,
            wait_timeout: Duration::from_secs(120),
            start_grace: Duration::from_secs(30),
            reset_limit: limit,
            cooldown: dice
                .one_in(2)
                .then(|| (Duration::from_secs(5), Duration::from_secs(40))),
            slot_failures_max: 3,
            has_fixed_hosts: dice.one_in(3),
        };
        let has_fixed_hosts = policy.has_fixed_hosts;
        let mut world = Self {
            seed,
            calm_after: dice.ms(0, 400_000),
            dice,
            driver: Driver::new(policy),
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            count: 0,
            processes: BTreeMap::new(),
            hosts: names,
            opened: BTreeSet::new(),
            round: 0,
            members: Vec::new(),
            stands: false,
            is_broken: false,
            had_state: false,
            finishing: false,
            max_np,
            min_np,
            limit,
            ending: None,
            rounds: 0,
            log: Vec::new(),
        };
        world
            .driver
            .expect_life_within(Some(Duration::from_secs(30)));
        world.plan(Duration::from_secs(3), Happening::Fault);
        let end = world.calm_after + Duration::from_secs(100);
        world.plan(end, Happening::Finishes);
        if !has_fixed_hosts {
            world.plan(Duration::from_secs(20), Happening::HostChange);
        }
        world
    }

    fn plan(&mut self, after: Duration, what: Happening) {
        self.count += 1;
        self.queue
            .push(Reverse((self.now + after, self.count, what)));
    }

    #[track_caller]
    fn check(&self, holds: bool, what: &str) {
        let log = self.log[self.log.len().saturating_sub(60)..].join("\n");
        assert!(
            holds,
            "seed {}: {what}\n{log}\n{:?}",
            self.seed, self.driver
        );
    }

    fn feed(&mut self, event: Event) {
        self.log.push(format!("{:?} event {event:?}", self.now));
        self.driver.handle(self.now, event);
        self.obey();
    }

    fn obey(&mut self) {
        while let Some(action) = self.driver.poll_action() {
            self.log.push(format!("{:?} action {action:?}", self.now));
            self.check(self.ending.is_none(), "an action after the end");
            self.act(action);
        }
        if let Some(at) = self.driver.next_deadline() {
            // Due already is allowed only if time passes: else the launcher would spin.
            let after = at.saturating_sub(self.now);
            self.plan(after.max(Duration::from_millis(1)), Happening::Timer);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Open(host) => {
                self.check(!self.opened.contains(&host), "opened twice");
                let after = self.dice.ms(1, 3000);
                self.plan(after, Happening::Opened(host));
            }
            Action::Close(host) => {
                let here = self.processes.values().any(|p| p.host == host);
                self.check(!here, "closed a host in use");
                self.opened.remove(&host);
            }
            Action::Start {
                worker,
                host,
                local,
            } => self.start(worker, host, local),
            Action::Stop(worker) | Action::Dismiss(worker, _) => {
                let after = self.dice.ms(1, 5000);
                if let Some(process) = self.processes.get_mut(&worker)
                    && !std::mem::replace(&mut process.is_ending, true)
                {
                    self.plan(after, Happening::Ends(worker, 15));
                }
            }
            Action::CheckStopped(worker) => {
                let after = self.dice.ms(1, 100);
                self.plan(after, Happening::Answers(worker));
            }
            Action::Form(assignments) => {
                let mut members = Vec::new();
                for (rank, (worker, assignment)) in (0..).zip(&assignments) {
                    self.check(assignment.rank == rank, "ranks in order");
                    members.push(*worker);
                    if let Some(p) = self.processes.get(worker) {
                        self.check(
                            p.local == assignment.local_rank,
                            "the local rank is the slot",
                        );
                    }
                }
                let needs_sync = assignments[0].1.needs_sync;
                self.form(members, needs_sync);
            }
            Action::Announce(_) => {
                let (after, round) = (self.dice.ms(1, 4000), self.round);
                self.plan(after, Happening::Leaves(round));
            }
            Action::AnnounceDeath { .. } | Action::Note(_) => {}
            Action::End(ending) => self.ending = Some(ending),
        }
    }

    fn start(&mut self, worker: WorkerId, host: String, local: u32) {
        self.check(self.opened.contains(&host), "started where nothing is open");
        let mut there = self.processes.values();
        let is_free = !there.any(|p| p.host == host && p.local == local);
        self.check(is_free, "two processes in one slot");
        let process = Process {
            host,
            local,
            place: ProcessPlace::Importing,
            training_state: 0,
            is_stopped: false,
            is_ending: false,
        };
        let known = self.processes.insert(worker, process);
        self.check(known.is_none(), "a number used twice");
        let running = self.processes.values().filter(|p| !p.is_ending).count();
        let leaving = |p: &&Process| self.hosts.get(&p.host).copied().unwrap_or(0) <= p.local;
        let leaving = self.processes.values().filter(leaving).count();
        self.check(
            running as u64 <= u64::from(self.max_np) + leaving as u64,
            "more than --max-np processes",
        );
        let after = self.dice.ms(300, 9000);
        self.plan(after, Happening::Imported(worker));
    }

    fn holds(&self, worker: &WorkerId) -> bool {
        self.processes
            .get(worker)
            .is_some_and(|p| p.training_state > 0)
    }

    fn form(&mut self, members: Vec<WorkerId>, needs_sync: bool) {
        self.check(!members.is_empty(), "an empty round");
        self.check(
            // One worker hands over to another in a round of both.
            members.len() as u64 <= u64::from(self.max_np.max(2)),
            "at most --max-np",
        );
        let enough = members.len() as u32 >= self.min_np || self.finishing;
        self.check(enough, "at least --min-np");
        let unique: BTreeSet<_> = members.iter().collect();
        self.check(unique.len() == members.len(), "nobody twice");
        // A holder that is dead already, unknown to the driver, counts for it.
        let dead = members.iter().any(|m| !self.processes.contains_key(m));
        let has_holder = members.iter().any(|m| self.holds(m));
        self.check(
            has_holder || dead || !self.had_state,
            "a round without the state",
        );
        if has_holder && !dead {
            self.check(self.holds(&members[0]), "rank 0 holds the state");
        }
        let survivors = |list: &[WorkerId]| -> Vec<WorkerId> {
            let both = |w: &&WorkerId| self.members.contains(w) && members.contains(w);
            list.iter()
                .filter(both)
                .filter(|w| self.holds(w))
                .copied()
                .collect()
        };
        self.check(
            survivors(&members) == survivors(&self.members),
            "survivors keep their order",
        );
        let current = members
            .iter()
            .all(|m| self.processes.get(m).is_some_and(|p| p.training_state == 2));
        self.check(
            needs_sync || current || dead,
            "left out a sync that is needed",
        );
        self.round += 1;
        self.rounds += 1;
        self.stands = false;
        self.is_broken = false;
        let all_there = members.iter().all(|m| {
            self.processes
                .get(m)
                .is_some_and(|p| p.place == ProcessPlace::WaitingSet)
        });
        self.members = members;
        let round = self.round;
        for member in self.members.clone() {
            if let Some(p) = self.processes.get_mut(&member) {
                p.place = ProcessPlace::Round(round);
            }
        }
        if all_there {
            let after = self.dice.ms(1, 50);
            self.plan(after, Happening::Stands(round));
        } else {
            self.break_round();
        }
    }

    /// All who are in the round come out of it, each in its own time.
    fn break_round(&mut self) {
        if std::mem::replace(&mut self.is_broken, true) {
            return;
        }
        let round = self.round;
        for member in self.members.clone() {
            let hangs = self.now < self.calm_after && self.dice.one_in(40);
            let after = self.dice.ms(1, 800);
            let Some(p) = self.processes.get_mut(&member) else {
                continue;
            };
            if p.place == ProcessPlace::Round(round) {
                if hangs {
                    p.place = ProcessPlace::Hangs;
                    p.is_stopped = after < Duration::from_millis(400);
                } else {
                    self.plan(after, Happening::Notices(member, round));
                }
            }
        }
    }

    fn end(&mut self, worker: WorkerId, status: i32) {
        let Some(process) = self.processes.get_mut(&worker) else {
            return;
        };
        process.is_ending = true;
        let was = process.place;
        process.place = ProcessPlace::Hangs;
        let after = self.dice.ms(1, 100);
        self.plan(after, Happening::Reaped(worker, status));
        if was == ProcessPlace::WaitingSet {
            self.feed(Event::Away(worker));
        }
        if was == ProcessPlace::Round(self.round) && status != 0 {
            self.break_round();
        }
    }

    fn join(&mut self, worker: WorkerId, training_state: Option<u8>) {
        if let Some(p) = self.processes.get_mut(&worker) {
            p.place = ProcessPlace::WaitingSet;
            p.training_state = training_state.unwrap_or(p.training_state);
            let training_state = p.training_state;
            self.feed(Event::Joined {
                worker,
                training_state,
            });
        }
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Timer => {
                let due = self.driver.next_deadline().is_some_and(|at| at <= self.now);
                if due {
                    self.driver.handle_timeout(self.now);
                    self.obey();
                }
            }
            Happening::Imported(worker) => {
                let importing = |p: &Process| p.place == ProcessPlace::Importing && !p.is_ending;
                if self.processes.get(&worker).is_some_and(importing) {
                    self.join(worker, None);
                }
            }
            Happening::Stands(round) => {
                if round == self.round && !self.is_broken {
                    self.stands = true;
                    self.feed(Event::Up);
                    let after = self.dice.ms(1, 1500);
                    self.plan(after, Happening::Synced(round));
                }
            }
            Happening::Synced(round) => {
                if round == self.round && !self.is_broken {
                    for worker in self.members.clone() {
                        let Some(p) = self.processes.get_mut(&worker) else {
                            continue;
                        };
                        p.training_state = 2;
                        self.had_state = true;
                        self.feed(Event::StateChanged {
                            worker,
                            training_state: 2,
                        });
                    }
                }
            }
            Happening::Leaves(round) => {
                let synced = self.members.iter().all(|m| self.holds(m));
                // A worker that has finished its work makes no further commit.
                let goes_on = self.stands && !self.is_broken && !self.finishing;
                if round == self.round && goes_on {
                    self.is_broken = true;
                    for worker in self.members.clone() {
                        let after = self.dice.ms(1, 100);
                        if let Some(p) = self.processes.get_mut(&worker)
                            && !synced
                        {
                            p.training_state = p.training_state.min(1);
                        }
                        self.plan(after, Happening::Notices(worker, round));
                    }
                }
            }
            Happening::Notices(worker, round) => {
                let inside = |p: &Process| p.place == ProcessPlace::Round(round) && !p.is_ending;
                if self.processes.get(&worker).is_some_and(inside) {
                    // After a loss each goes back to its last commit.
                    let lost = self.members.iter().any(|m| !self.processes.contains_key(m));
                    let training_state = self.processes[&worker].training_state;
                    self.join(worker, lost.then_some(training_state.min(1)));
                }
            }
            Happening::GivesUp(by, worker, round) => {
                let lives = |p: &Process| p.place != ProcessPlace::Hangs && !p.is_ending;
                if round == self.round && self.processes.get(&by).is_some_and(lives) {
                    self.feed(Event::Silent { worker, by });
                }
            }
            Happening::Answers(worker) => {
                if let Some(p) = self.processes.get(&worker) {
                    let is_stopped = p.is_stopped;
                    self.feed(Event::StoppedState { worker, is_stopped });
                }
            }
            Happening::Fault => {
                if self.now < self.calm_after {
                    self.fault();
                    let after = self.dice.ms(500, 100_000);
                    self.plan(after, Happening::Fault);
                }
            }
            Happening::Ends(worker, status) => self.end(worker, status),
            Happening::Reaped(worker, status) => {
                if self.processes.remove(&worker).is_some() {
                    let status = match status {
                        0 => ExitStatus::Code(0),
                        signal => ExitStatus::Signal(signal),
                    };
                    let cause = Cause::Exit(status);
                    self.feed(Event::Exited { worker, cause });
                }
            }
            Happening::Opened(host) => {
                if self.now < self.calm_after && self.dice.one_in(12) {
                    let why = "no answer".to_owned();
                    self.feed(Event::HostLost { host, why, code: 1 });
                } else {
                    self.opened.insert(host.clone());
                    self.feed(Event::HostReady(host));
                }
            }
            Happening::HostChange => {
                let calm = self.now >= self.calm_after;
                self.change_hosts(calm);
                if !calm {
                    let after = self.dice.ms(5_000, 60_000);
                    self.plan(after, Happening::HostChange);
                }
            }
            Happening::Finishes => {
                if !self.stands || self.is_broken {
                    self.plan(Duration::from_secs(20), Happening::Finishes);
                } else {
                    self.finishing = true;
                    for worker in self.members.clone() {
                        let after = self.dice.ms(1, 2000);
                        self.plan(after, Happening::Ends(worker, 0));
                    }
                }
            }
        }
    }

    /// Runs to the end of the job.
    fn run(mut self) -> Self {
        let listed = self.hosts.iter().map(|(h, n)| (h.clone(), *n)).collect();
        self.feed(Event::Hosts(listed));
        for _ in 0..200_000 {
            let Some(Reverse((at, _, what))) = self.queue.pop() else {
                break;
            };
            self.now = at;
            if self.ending.is_some() {
                break;
            }
            self.happen(what);
            let late = self.now > self.calm_after + Duration::from_secs(4000);
            self.check(!late, "waits for ever");
        }
        self.check(self.ending.is_some(), "never ends");
        if self.ending == Some(Ending::Success) {
            self.check(self.finishing, "a success without anybody's success");
        }
        if self.limit.is_none() && self.rounds == 0 {
            let failed = matches!(self.ending, Some(Ending::Failure { .. }));
            self.check(failed, "no round, but success");
        }
        self
    }
}

/// Enough for every path to be taken often. `HOROVOD_SIM_SEEDS=20000` asks for more, `HOROVOD_SIM_PART=3/8` for the
/// third eighth of those, as `make test-all` does.
#[expect(
    clippy::disallowed_methods,
    reason = "a test's own knob, not a setting of the launcher"
)]
fn seeds() -> Range<u64> {
    let asked = std::env::var("HOROVOD_SIM_SEEDS").ok();
    let all = asked.map_or(800, |n| n.parse().expect("a number"));
    let Ok(part) = std::env::var("HOROVOD_SIM_PART") else {
        return 0..all;
    };
    let (part, parts) = part.split_once('/').expect("such as 3/8");
    let [part, parts] = [part, parts].map(|n| n.parse::<u64>().expect("such as 3/8"));
    all * (part - 1) / parts..all * part / parts
}

#[test]
fn many_jobs_keep_their_promises_and_end() {
    let seeds = seeds();
    let runs = seeds.end - seeds.start;
    let (mut successes, mut rounds) = (0, 0);
    for seed in seeds {
        let world = World::new(seed).run();
        successes += u64::from(world.ending == Some(Ending::Success));
        rounds += u64::from(world.rounds);
    }
    // A simulation in which nothing succeeds, or nothing happens, would prove nothing.
    assert!(successes > runs / 8, "{successes} successes");
    assert!(successes < runs * 7 / 8, "{successes} successes");
    assert!(rounds > runs * 2, "{rounds} rounds");
}

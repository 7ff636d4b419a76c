//! The hosts of an elastic job, as the driver sees them: listed hosts, failed hosts, resting slots.

use std::collections::VecDeque;
use std::time::Duration;

use super::driver::{Driver, WorkerProcess};
use super::events::{Action, Cause, Time, WorkerId};

/// Time after which a failure of a slot no longer counts.
pub(super) const SLOT_MEMORY: Duration = Duration::from_secs(60);
/// Rest of a slot after its first series of failures. Each further rest is twice as long, up to [`REST_MAX`].
const REST: Duration = Duration::from_secs(60);
const REST_MAX: Duration = Duration::from_secs(3600);
/// How long a lost host is not used if no cooldown was set: first time and maximum. The cause may be a cut link or a
/// reboot, and a new attempt costs the other hosts nothing.
const LOSS_COOLDOWN: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));

/// Whether workers can be started on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agent {
    None,
    Opening,
    Ready,
}

/// A host that is not used for now.
#[derive(Clone, Debug)]
struct Ban {
    why: String,
    /// End of the ban; `None`: as long as the host stays listed.
    until: Option<Time>,
}

/// One host.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) name: String,
    /// Number of slots in the present list; 0 if the host is not listed.
    pub(super) listed: u32,
    pub(super) agent: Agent,
    /// State of each slot; at least as many as listed.
    pub(super) slots: Vec<SlotHistory>,
    ban: Option<Ban>,
    /// Number of bans since the host was last usable for the maximum length of a ban.
    bans: u32,
    well_since: Option<Time>,
    was_reached: bool,
}

/// State of one slot of a host.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotHistory {
    pub(super) worker: Option<WorkerId>,
    /// Whether its worker ended because there was nothing to do.
    pub(super) is_retired: bool,
    failures: VecDeque<Time>,
    rests_until: Option<Time>,
    rests: u32,
}

/// The state of a slot after its worker has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterFailure {
    /// The slot gets another process. Counts the failures within [`SLOT_MEMORY`].
    StartsAgain { failures: usize },
    /// The slot gets no process for this long.
    Rests(Duration),
}

impl SlotHistory {
    pub(super) fn is_free(&self) -> bool {
        self.worker.is_none() && self.rests_until.is_none() && !self.is_retired
    }

    /// Records a failure and returns the slot's state after it.
    pub(super) fn fail(&mut self, now: Time, most: u32) -> AfterFailure {
        self.failures.push_back(now);
        while self
            .failures
            .front()
            .is_some_and(|at| *at + SLOT_MEMORY < now)
        {
            self.failures.pop_front();
        }
        if self.failures.len() < most as usize {
            return AfterFailure::StartsAgain {
                failures: self.failures.len(),
            };
        }
        self.failures.clear();
        let rest = REST.saturating_mul(1 << self.rests.min(16)).min(REST_MAX);
        self.rests += 1;
        self.rests_until = Some(now + rest);
        AfterFailure::Rests(rest)
    }
}

impl Host {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            listed: 0,
            agent: Agent::None,
            slots: Vec::new(),
            ban: None,
            bans: 0,
            well_since: None,
            was_reached: false,
        }
    }

    /// Records that workers can be started on this host.
    pub(super) fn reached(&mut self) {
        self.agent = Agent::Ready;
        self.was_reached = true;
    }

    /// Records that the host cannot be reached. A host that was reached before may recover, so it is banned only for
    /// some time; another is banned permanently unless there is a cooldown.
    pub(super) fn lose(&mut self, now: Time, why: &str, cooldown: Option<(Duration, Duration)>) {
        self.agent = Agent::None;
        self.ban(
            now,
            why,
            cooldown.or(self.was_reached.then_some(LOSS_COOLDOWN)),
        );
    }

    /// Bans the host. The length of the ban doubles with each ban, up to the maximum.
    pub(super) fn ban(&mut self, now: Time, why: &str, cooldown: Option<(Duration, Duration)>) {
        let until = cooldown.map(|(first, most)| {
            if self.well_since.is_some_and(|since| since + most <= now) {
                self.bans = 0;
            }
            now + first
                .saturating_mul(1 << self.bans.min(16))
                .min(most)
                .max(first)
        });
        self.bans += 1;
        self.ban = Some(Ban {
            why: why.to_owned(),
            until,
        });
    }

    /// Returns the length of the ban as text: `for 20 s` or `as long as it is listed ...`.
    pub(super) fn ban_text(&self, now: Time) -> String {
        match self.ban.as_ref().and_then(|ban| ban.until) {
            Some(until) => format!("for {} s", (until.saturating_sub(now)).as_secs()),
            None => "as long as it is listed (see --blacklist-cooldown-range)".to_owned(),
        }
    }

    pub(super) fn all_rest(&self, now: Time) -> bool {
        let listed = self.slots.iter().take(self.listed as usize);
        listed
            .into_iter()
            .all(|slot| slot.rests_until.is_some_and(|until| until > now))
    }

    pub(super) fn expire(&mut self, now: Time) {
        let has_expired = |until: Option<Time>| until.is_some_and(|until| until <= now);
        if self.ban.as_ref().is_some_and(|ban| has_expired(ban.until)) {
            self.ban = None;
            self.well_since = Some(now);
            self.forgive_slots();
        }
        for slot in &mut self.slots {
            if has_expired(slot.rests_until) {
                slot.rests_until = None;
            }
        }
    }

    fn forgive_slots(&mut self) {
        for slot in &mut self.slots {
            slot.rests_until = None;
            slot.is_retired = false;
            slot.failures.clear();
        }
    }

    pub(super) fn next_change(&self) -> Option<Time> {
        let ban = self.ban.as_ref().and_then(|ban| ban.until);
        let rests = self.slots.iter().filter_map(|slot| slot.rests_until);
        ban.into_iter().chain(rests).min()
    }

    pub(super) fn is_usable(&self) -> bool {
        self.listed > 0 && self.ban.is_none()
    }

    /// Returns the number of slots in which a worker runs or could run.
    pub(super) fn usable(&self) -> u64 {
        if !self.is_usable() {
            return 0;
        }
        let listed = self.slots.iter().take(self.listed as usize);
        listed.filter(|s| s.worker.is_some() || s.is_free()).count() as u64
    }

    /// Returns whether no worker will be started here unless the list changes.
    pub(super) fn is_unusable_for_good(&self) -> bool {
        match &self.ban {
            Some(ban) => ban.until.is_none(),
            None => {
                let listed = self.slots.iter().take(self.listed as usize);
                listed.into_iter().all(|slot| slot.is_retired)
            }
        }
    }

    /// Returns the host's state as text for an error.
    pub(super) fn describe(&self) -> String {
        let running = self.slots.iter().filter(|s| s.worker.is_some()).count();
        let resting = self.slots.iter().filter(|s| s.rests_until.is_some());
        let resting = resting.count();
        let mut text = format!("{}:{} ({running} run", self.name, self.listed);
        if resting > 0 {
            text.push_str(&format!(", {resting} rest after failures"));
        }
        if let Some(ban) = &self.ban {
            text.push_str(&format!(", left alone: {}", ban.why));
        }
        if self.agent == Agent::Opening {
            text.push_str(", not reached yet");
        }
        text.push(')');
        text
    }
}

impl Driver {
    /// Records a failure in its slot and returns the slot's new state, also as text. Returns `None` if the failure is
    /// not the slot's fault.
    pub(super) fn count_failure(
        &mut self,
        now: Time,
        w: &WorkerProcess,
        cause: &Cause,
    ) -> Option<(AfterFailure, String)> {
        if w.leave_by.is_some() || matches!(cause, Cause::HostLost(_)) {
            return None;
        }
        let (most, cooldown) = (self.policy.slot_failures_max, self.policy.cooldown);
        let host = self.hosts.iter_mut().find(|h| h.name == w.host)?;
        let slot = host.slots.get_mut(w.local as usize)?;
        let after = slot.fail(now, most);
        let (local, memory) = (w.local, SLOT_MEMORY.as_secs());
        let mut text = match after {
            AfterFailure::StartsAgain { failures: 1 } => {
                format!("slot {local} gets another process")
            }
            AfterFailure::StartsAgain { failures } => format!(
                "slot {local} gets another process (failure {failures} within {memory} s; after {most} it rests)"
            ),
            AfterFailure::Rests(rest) => format!(
                "slot {local} failed {most} times within {memory} s and rests for {} s",
                rest.as_secs()
            ),
        };
        if matches!(after, AfterFailure::Rests(_)) && host.all_rest(now) {
            let why = "all its slots failed again and again";
            host.ban(now, why, cooldown);
            let until = host.ban_text(now);
            text = format!("{text}; host {} is left alone {until}: {why}", w.host);
        }
        Some((after, text))
    }

    /// Removes a host with all its workers. A host that replaces it counts as another host.
    pub(super) fn on_host_gone(&mut self, now: Time, name: &str, why: &str) {
        let Some(host) = self.host(name) else { return };
        host.listed = 0;
        host.agent = Agent::None;
        for worker in self.workers_of(name) {
            self.on_exit(now, worker, &Cause::HostLost(why.to_owned()));
        }
    }

    /// Applies a new list of hosts. Known hosts keep their places; new ones follow in the order of the list.
    pub(super) fn on_hosts(&mut self, _now: Time, listed: Vec<(String, u32)>) {
        self.knows_hosts = true;
        for host in &mut self.hosts {
            let now_listed = listed.iter().find(|(name, _)| *name == host.name);
            let slots = now_listed.map_or(0, |(_, slots)| *slots);
            if host.listed == 0 && slots > 0 {
                // The host was removed from the list and put back, so its earlier failures no longer count.
                host.ban = None;
                host.forgive_slots();
            }
            host.list(slots);
        }
        for (name, slots) in listed {
            if self.hosts.iter().all(|h| h.name != name) {
                let mut host = Host::new(&name);
                host.list(slots);
                self.hosts.push(host);
            }
        }
        if self.rounds == 0 && self.workers.is_empty() && self.hosts.is_empty() {
            self.act(Action::Note("no hosts are listed yet".to_owned()));
        }
    }
}

impl Host {
    fn list(&mut self, slots: u32) {
        self.listed = slots;
        if self.slots.len() < slots as usize {
            self.slots.resize_with(slots as usize, SlotHistory::default);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::{Event, Policy};
    use crate::frames::ExitStatus;

    fn seconds(s: u64) -> Time {
        Duration::from_secs(s)
    }

    /// Whether the host can be used after so many seconds.
    fn is_usable(host: &mut Host, at: u64) -> bool {
        host.expire(seconds(at));
        host.is_usable()
    }

    #[test]
    fn a_lost_host_is_tried_again_and_one_that_never_was_there_is_not() {
        let mut host = Host::new("a");
        host.list(2);
        host.lose(seconds(0), "Permission denied", None);
        assert!(host.is_unusable_for_good());

        let mut host = Host::new("b");
        host.list(2);
        host.reached();
        for (begin, pause) in [(100, 10), (110, 20), (130, 40)] {
            host.lose(seconds(begin), "connection lost", None);
            assert!(!host.is_unusable_for_good());
            assert_eq!(host.ban_text(seconds(begin)), format!("for {pause} s"));
            assert!(!is_usable(&mut host, begin + pause - 1));
            assert!(is_usable(&mut host, begin + pause));
        }
        // Long since forgotten.
        host.reached();
        host.lose(seconds(1000), "connection lost", None);
        assert_eq!(host.ban_text(seconds(1000)), "for 10 s");
    }

    #[test]
    fn a_slot_says_once_that_it_gets_another_process_and_then_counts() {
        let mut driver = super::super::driver::tests::round_of_three();
        let mut notes = Vec::new();
        for worker in [1, 2, 3, 4] {
            let cause = Cause::Exit(ExitStatus::Code(1));
            driver.handle(seconds(5), Event::Exited { worker, cause });
            while let Some(action) = driver.poll_action() {
                if let Action::Note(text) = action {
                    notes.extend(text.split_once("; ").map(|(_, rest)| rest.to_owned()));
                }
            }
        }
        assert_eq!(
            notes,
            [
                "slot 1 gets another process",
                "slot 2 gets another process",
                "slot 1 gets another process (failure 2 within 60 s; after 3 it rests)",
                "slot 2 gets another process (failure 2 within 60 s; after 3 it rests)",
            ]
        );
    }

    #[test]
    fn a_cooldown_that_was_asked_for_holds_for_every_host() {
        let asked = Some((seconds(3), seconds(5)));
        let mut host = Host::new("a");
        host.list(1);
        for pause in [3, 5, 5] {
            host.lose(seconds(0), "no answer", asked);
            assert_eq!(host.ban_text(seconds(0)), format!("for {pause} s"));
        }
    }

    #[test]
    fn a_host_that_is_gone_is_forgotten_at_once_and_another_takes_its_place() {
        let mut driver = Driver::new(Policy {
            first_np: 2,
            min_np: 1,
            max_np: 2,
            wait_timeout: Duration::from_secs(600),
            start_grace: Duration::ZERO,
            reset_limit: None,
            cooldown: None,
            slot_failures_max: 3,
            has_fixed_hosts: false,
        });
        let (a, b) = ("a".to_owned(), "b".to_owned());
        driver.handle(
            seconds(0),
            Event::Hosts(vec![(a.clone(), 1), (b.clone(), 1)]),
        );
        driver.handle(seconds(0), Event::HostReady(a));
        driver.handle(seconds(0), Event::HostReady(b.clone()));
        for worker in 0..2 {
            driver.handle(
                seconds(1),
                Event::Joined {
                    worker,
                    training_state: 0,
                },
            );
        }
        driver.handle(seconds(2), Event::Up);
        while driver.poll_action().is_some() {}
        let why = "the connection to its agent ended".to_owned();
        driver.handle(
            seconds(3),
            Event::HostGone {
                host: b.clone(),
                why,
            },
        );
        assert_eq!(driver.hosts.len(), 1);
        let mut actions = Vec::new();
        actions.extend(std::iter::from_fn(|| driver.poll_action()));
        assert!(
            actions
                .iter()
                .any(|action| matches!(action, Action::AnnounceDeath { worker: 1, .. })),
            "{actions:?}"
        );
        // The very same name may come again.
        let listed = vec![("a".to_owned(), 1), (b.clone(), 1)];
        driver.handle(seconds(3), Event::Hosts(listed));
        assert_eq!(driver.poll_action(), Some(Action::Open(b.clone())));
        driver.handle(seconds(3), Event::HostReady(b));
        let started = std::iter::from_fn(|| driver.poll_action())
            .any(|action| matches!(action, Action::Start { worker: 2, .. }));
        assert!(started);
    }
}

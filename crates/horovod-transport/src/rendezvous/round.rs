//! The state of one rendezvous of fixed members, without I/O: registered ranks, ready ranks, messages to send.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use horovod_protocol::Rank;

use super::{
    config::ServerEvent,
    messages::{Common, MemberEntry, Registration, ToClient, Where, cut},
};
use crate::unreached::{Unreached, cause};

/// Time from the first report of unreachable ranks until one cause is determined from all reports. It is determined
/// earlier if every rank either waits or has reported.
const COLLECT: Duration = Duration::from_secs(2);

/// A connection of the server.
pub(crate) type ClientId = u64;

/// A rank that registered.
struct Registered {
    client: ClientId,
    member: MemberEntry,
    common: Common,
    answer_by: Instant,
}

/// A generation whose ranks have all registered and are sending their addresses.
struct Building {
    generation: u64,
    ranks: Vec<Registered>,
    places: Vec<Option<Where>>,
}

/// Actions of the server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Do {
    Send(ClientId, ToClient),
    /// Send a client the reason and close its connection.
    Dismiss(ClientId, ToClient),
    /// This generation is established: the table was sent to all its ranks.
    Up(u64),
    /// The generation could not be set up.
    Failed(String),
    /// Report an event to the launcher.
    Report(ServerEvent),
}

/// The successive rounds of a job with fixed members.
pub(crate) struct FixedRounds {
    size: u32,
    gathering: BTreeMap<u32, Registered>,
    building: Option<Building>,
    generations: u64,
    /// Ranks whose processes have exited with code 0, and their hosts. These ranks will not register again.
    ended: BTreeMap<u32, String>,
    unreached: UnreachedRanks,
    /// The members of the newest generation that has its table.
    newest: Vec<(u32, ClientId)>,
}

/// Reports of ranks that cannot connect.
#[derive(Default)]
struct UnreachedRanks {
    /// The command that checks the network.
    check: String,
    reports: Vec<Unreached>,
    /// When to determine one cause from the reports.
    settle_at: Option<Instant>,
    /// The last cause, and (`unaware`) the ranks that have not received it yet.
    cause: String,
    unaware: BTreeSet<u32>,
}

impl FixedRounds {
    pub(crate) fn new(size: u32, check: String) -> Self {
        Self {
            unreached: UnreachedRanks {
                check,
                ..UnreachedRanks::default()
            },
            newest: Vec::new(),
            size,
            gathering: BTreeMap::new(),
            building: None,
            generations: 0,
            ended: BTreeMap::new(),
        }
    }

    pub(crate) fn hello(
        &mut self,
        client: ClientId,
        rank: u32,
        size: u32,
        Registration { member, common }: Registration,
        answer_by: Instant,
    ) -> Vec<Do> {
        let refuse = |text: String| vec![Do::Dismiss(client, ToClient::Refused { text })];
        if size != self.size {
            let here = self.size;
            return refuse(format!(
                "rank {rank} wants a job of {size} ranks, this one has {here}"
            ));
        }
        if rank >= size {
            return refuse(format!("there is no rank {rank} in a job of {size} ranks"));
        }
        if let Some(other) = self.gathering.get(&rank) {
            return refuse(format!(
                "rank {rank} is registered already, by process {} on {}",
                other.member.pid, other.member.hostname
            ));
        }
        if self.unreached.unaware.remove(&rank) {
            let text = self.unreached.cause.clone();
            return vec![Do::Dismiss(client, ToClient::Aborted { text })];
        }
        self.gathering.insert(
            rank,
            Registered {
                client,
                member,
                common,
                answer_by,
            },
        );
        let mut todo = self.start_if_complete();
        todo.extend(self.dismiss_if_in_vain());
        todo
    }

    /// Records that the process of a rank has exited with code 0.
    pub(crate) fn ended(&mut self, rank: u32, host: String) -> Vec<Do> {
        self.ended.insert(rank, host);
        self.dismiss_if_in_vain()
    }

    /// Sends an error to the ranks that wait for a rank whose process has ended.
    fn dismiss_if_in_vain(&mut self) -> Vec<Do> {
        if self.gathering.is_empty() || self.ended.is_empty() {
            return Vec::new();
        }
        let again = if self.generations > 0 { " again" } else { "" };
        let absent: Vec<String> = self
            .ended
            .iter()
            .map(|(rank, host)| format!("rank {rank} on {host}"))
            .collect();
        let text = format!(
            "{} exited with code 0 without calling hvd.init(){again}",
            absent.join(", ")
        );
        let ranks = self.ended.keys().copied().map(Rank).collect();
        let mut todo = vec![
            Do::Failed(text.clone()),
            Do::Report(ServerEvent::Absent(ranks)),
        ];
        todo.extend(
            std::mem::take(&mut self.gathering)
                .into_values()
                .map(|r| Do::Dismiss(r.client, ToClient::Aborted { text: text.clone() })),
        );
        todo
    }

    fn start_if_complete(&mut self) -> Vec<Do> {
        if self.building.is_some() || self.gathering.len() < self.size as usize {
            return Vec::new();
        }
        let ranks: Vec<Registered> = std::mem::take(&mut self.gathering).into_values().collect();
        self.generations += 1;
        let members: Vec<_> = ranks.iter().map(|r| r.member.clone()).collect();
        let roster = ToClient::Roster {
            generation: self.generations,
            members,
            common: ranks.first().map(|r| r.common.clone()).unwrap_or_default(),
            assignment: None,
        };
        let replies = ranks
            .iter()
            .map(|r| Do::Send(r.client, roster.clone()))
            .collect();
        let places = ranks.iter().map(|_| None).collect();
        self.building = Some(Building {
            generation: self.generations,
            ranks,
            places,
        });
        replies
    }

    pub(crate) fn ready(&mut self, client: ClientId, place: Where) -> Vec<Do> {
        let Some(building) = &mut self.building else {
            return Vec::new();
        };
        let Some(i) = building.ranks.iter().position(|r| r.client == client) else {
            return Vec::new();
        };
        building.places[i] = Some(place);
        if building.places.iter().any(Option::is_none) {
            return Vec::new();
        }
        let Some(building) = self.building.take() else {
            return Vec::new();
        };
        let places = building.places.into_iter().flatten().collect();
        let table = ToClient::Table { places };
        let mut todo: Vec<_> = building
            .ranks
            .iter()
            .map(|r| Do::Send(r.client, table.clone()))
            .collect();
        self.newest = (0..).zip(building.ranks.iter().map(|r| r.client)).collect();
        todo.push(Do::Up(building.generation));
        todo.extend(self.start_if_complete());
        todo
    }

    /// Handles the end of a connection, or a rank's report that it failed.
    pub(crate) fn gone(&mut self, client: ClientId, why: &str) -> Vec<Do> {
        self.gathering.retain(|_, r| r.client != client);
        self.newest.retain(|(_, known)| *known != client);
        let building = self.building.as_ref();
        match building.and_then(|b| b.ranks.iter().position(|r| r.client == client)) {
            Some(rank) => self.abort(Some(rank), why),
            None => Vec::new(),
        }
    }

    /// Handles an agent's report that a rank cannot connect. If the rank is registered here, the report came from
    /// another process with a copy of its environment, and is ignored.
    pub(crate) fn unreached_by_agent(&mut self, report: Unreached, now: Instant) -> Vec<Do> {
        let rank = report.rank.0;
        if self.unreached.unaware.remove(&rank) {
            // The report is late: the other ranks have already failed with one common text.
            let known = self.unreached.cause.clone();
            return vec![Do::Report(ServerEvent::Unreachable(known))];
        }
        let is_here = self.building.is_some()
            || self.gathering.contains_key(&rank)
            || self.newest.iter().any(|(known, _)| *known == rank);
        if !is_here {
            self.collect(report, now);
        }
        Vec::new()
    }

    /// Handles the report of a rank of the newest generation that cannot establish its links. A late report is ignored,
    /// because its rank has already received an answer.
    pub(crate) fn unreached(&mut self, client: ClientId, report: Unreached, now: Instant) {
        if self.newest.contains(&(report.rank.0, client)) {
            self.collect(report, now);
        }
    }

    fn collect(&mut self, report: Unreached, now: Instant) {
        let unreached = &mut self.unreached;
        unreached.reports.retain(|known| known.rank != report.rank);
        unreached.reports.push(report);
        unreached.settle_at.get_or_insert(now + COLLECT);
        self.settle_if_all_are_accounted_for(now);
    }

    /// Makes the cause due at once if each rank waits here or has reported that it cannot connect.
    fn settle_if_all_are_accounted_for(&mut self, now: Instant) {
        let reports = self.unreached.reports.iter().map(|one| one.rank.0);
        let absent = reports.filter(|rank| !self.gathering.contains_key(rank));
        if self.gathering.len() + absent.count() == self.size as usize {
            self.unreached.settle_at = self.unreached.settle_at.map(|_| now);
        }
    }

    /// Determines one cause from the reports and sends it to all ranks: those that wait, those that establish their
    /// links, and later those that have not registered yet.
    fn settle(&mut self) -> Vec<Do> {
        self.unreached.settle_at = None;
        let reports = std::mem::take(&mut self.unreached.reports);
        // The text is cut once, so that all ranks receive the same text.
        let text = cut(&cause(&reports, &self.unreached.check)).to_owned();
        let aborted = || ToClient::Aborted { text: text.clone() };
        let mut aware: BTreeSet<u32> = reports.iter().map(|one| one.rank.0).collect();
        let mut todo = vec![
            Do::Failed(text.clone()),
            Do::Report(ServerEvent::Unreachable(text.clone())),
        ];
        let building = self.building.take().into_iter().flat_map(|b| b.ranks);
        let building = (0..).zip(building);
        for (rank, registered) in std::mem::take(&mut self.gathering)
            .into_iter()
            .chain(building)
        {
            aware.insert(rank);
            todo.push(Do::Dismiss(registered.client, aborted()));
        }
        // Ranks that have all their links already receive the loss of the first rank that could not connect.
        let lost = |one: &Unreached| {
            let who = format!("{} on {} ", one.rank, one.host);
            ToClient::PeerDied {
                rank: one.rank.0,
                host: one.host.clone(),
                cause: text.strip_prefix(&who).unwrap_or(&text).to_owned(),
            }
        };
        for (rank, client) in std::mem::take(&mut self.newest) {
            aware.insert(rank);
            todo.push(Do::Send(client, aborted()));
            todo.extend(reports.first().map(|one| Do::Send(client, lost(one))));
        }
        self.unreached.unaware = (0..self.size)
            .filter(|rank| !aware.contains(rank))
            .collect();
        self.unreached.cause = text;
        todo
    }

    /// Handles a death: ranks that are being set up together with the dead rank are aborted.
    pub(crate) fn died(&mut self, text: &str) -> Vec<Do> {
        if self.building.is_some() {
            self.abort(None, text)
        } else {
            Vec::new()
        }
    }

    fn abort(&mut self, culprit: Option<usize>, why: &str) -> Vec<Do> {
        let Some(building) = self.building.take() else {
            return Vec::new();
        };
        let text = match culprit {
            Some(rank) => format!(
                "rank {rank} on {}: {why}",
                building.ranks[rank].member.hostname
            ),
            None => why.to_owned(),
        };
        let mut todo = vec![Do::Failed(text.clone())];
        for (i, r) in building.ranks.iter().enumerate() {
            if Some(i) != culprit {
                todo.push(Do::Dismiss(
                    r.client,
                    ToClient::Aborted { text: text.clone() },
                ));
            }
        }
        todo.extend(self.start_if_complete());
        todo
    }

    /// Returns when to call [`Self::timeout`] at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let building = self.building.iter().flat_map(|b| &b.ranks);
        self.gathering
            .values()
            .chain(building)
            .map(|r| r.answer_by)
            .chain(self.unreached.settle_at)
            .min()
    }

    pub(crate) fn timeout(&mut self, now: Instant) -> Vec<Do> {
        if self.unreached.settle_at.is_some_and(|at| at <= now) {
            return self.settle();
        }
        let ranks = 0..self.size;
        let missing: Vec<u32> = ranks.filter(|r| !self.gathering.contains_key(r)).collect();
        let (late, rest): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.gathering)
            .into_iter()
            .partition(|(_, r)| r.answer_by <= now);
        self.gathering = rest;
        let send = |r: Registered| {
            Do::Dismiss(
                r.client,
                ToClient::Missing {
                    ranks: missing.clone(),
                },
            )
        };
        let mut todo: Vec<_> = late.into_values().map(send).collect();
        let overdue = |b: &Building| b.ranks.iter().any(|r| r.answer_by <= now);
        if let Some(building) = self.building.as_ref().filter(|b| overdue(b)) {
            let unready: Vec<String> = (0..building.ranks.len())
                .filter(|i| building.places[*i].is_none())
                .map(|i| format!("rank {i} on {}", building.ranks[i].member.hostname))
                .collect();
            let text = format!("not ready in time: {}", unready.join(", "));
            todo.extend(self.abort(None, &text));
        }
        todo
    }
}

#[cfg(test)]
mod tests;

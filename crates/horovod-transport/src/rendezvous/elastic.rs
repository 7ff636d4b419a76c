//! The state of an elastic job's rendezvous, without I/O: the waiting set, the round being set up, the established
//! round. The launcher decides which workers form a round; this module carries it out.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{
    config::ServerEvent,
    messages::{Common, MemberEntry, RankAssignment, Registration, ToClient, ToServer, Where},
    round::{ClientId, Do},
};
use crate::unreached::cause;

/// A worker that waits for the next round.
struct WaitingWorker {
    client: ClientId,
    member: MemberEntry,
    common: Common,
    timeout: Duration,
}

/// A round that is being set up: its workers have the roster and are sending their addresses.
struct Building {
    generation: u64,
    workers: Vec<(u32, WaitingWorker)>,
    places: Vec<Option<Where>>,
    ready_by: Instant,
}

/// A worker of the established round, with the connection over which it joined.
struct Standing {
    worker: u32,
    client: ClientId,
    hostname: String,
}

/// The successive rounds of one job.
#[derive(Default)]
pub(crate) struct Rounds {
    waiting_set: BTreeMap<u32, WaitingWorker>,
    building: Option<Building>,
    /// Workers of the last established round, in the order of their ranks.
    standing: Vec<Standing>,
    generations: u64,
    version: u64,
}

impl Rounds {
    /// Handles a message of a worker. `registered` records whether the worker has registered over this connection. An
    /// error is the reason to close the connection.
    pub(crate) fn handle(
        &mut self,
        client: ClientId,
        from: u32,
        registered: &mut bool,
        message: ToServer,
    ) -> Result<Vec<Do>, &'static str> {
        Ok(match message {
            ToServer::Join {
                worker,
                training_state,
                timeout_ms,
                member,
                common,
            } => {
                if *registered || from != worker {
                    return Err("it registered twice or for another worker");
                }
                *registered = true;
                let timeout = Duration::from_millis(timeout_ms.min(1 << 32));
                let mut todo = vec![Do::Report(ServerEvent::Joined {
                    worker,
                    training_state,
                    pid: member.pid,
                    heartbeat: common.heartbeat,
                })];
                todo.extend(self.join(client, worker, Registration { member, common }, timeout));
                todo
            }
            ToServer::StateChanged { training_state } => {
                let worker = from;
                vec![Do::Report(ServerEvent::StateChanged {
                    worker,
                    training_state,
                })]
            }
            ToServer::Silent { rank } => self.silent(client, rank),
            ToServer::Ready(place) => self.ready(client, place),
            ToServer::Failed { text } => self.failed(client, &text),
            // Workers of an elastic job join again instead of failing with one common cause.
            ToServer::Unreached(report) => self.failed(client, &cause(&[report], "")),
            ToServer::Hello { .. } => {
                let text = "this job is elastic, but HOROVOD_ELASTIC is not set in this process";
                let text = text.to_owned();
                vec![Do::Dismiss(client, ToClient::Refused { text })]
            }
        })
    }

    /// Adds a worker to the waiting set.
    pub(crate) fn join(
        &mut self,
        client: ClientId,
        worker: u32,
        Registration { member, common }: Registration,
        timeout: Duration,
    ) -> Vec<Do> {
        let mut todo = Vec::new();
        if self.is_building(|(known, _)| *known == worker) {
            todo = self.abort(Some(worker), "it came again before all were ready");
        }
        let waiting = WaitingWorker {
            client,
            member,
            common,
            timeout,
        };
        if let Some(before) = self.waiting_set.insert(worker, waiting) {
            let text = "the same process has registered again".to_owned();
            todo.push(Do::Dismiss(before.client, ToClient::Refused { text }));
        }
        todo
    }

    /// Carries out the launcher's decision: these workers form the next round with these places, in the order of their
    /// ranks. If one of them has left the waiting set, the round is not formed, and the others join again.
    pub(crate) fn form(&mut self, assignments: &[(u32, RankAssignment)], now: Instant) -> Vec<Do> {
        let mut todo = self.abort(None, "the launcher forms another round");
        let mut workers = Vec::new();
        let mut missing = Vec::new();
        for (worker, _) in assignments {
            match self.waiting_set.remove(worker) {
                Some(waiting) => workers.push((*worker, waiting)),
                None => missing.push(worker.to_string()),
            }
        }
        if !missing.is_empty() || workers.is_empty() {
            let text = format!("worker {} has left", missing.join(", "));
            todo.extend(dismiss_all(workers, &text));
            todo.push(Do::Failed(text));
            return todo;
        }
        self.generations += 1;
        let members: Vec<MemberEntry> = workers.iter().map(|(_, w)| w.member.clone()).collect();
        let common = workers[0].1.common.clone();
        for ((_, waiting), (_, assignment)) in workers.iter().zip(assignments) {
            todo.push(Do::Send(
                waiting.client,
                ToClient::Roster {
                    generation: self.generations,
                    members: members.clone(),
                    common: common.clone(),
                    assignment: Some(*assignment),
                },
            ));
        }
        let timeout = workers.iter().map(|(_, w)| w.timeout).max();
        self.building = Some(Building {
            generation: self.generations,
            places: workers.iter().map(|_| None).collect(),
            workers,
            ready_by: now + timeout.unwrap_or_default(),
        });
        todo
    }

    pub(crate) fn ready(&mut self, client: ClientId, place: Where) -> Vec<Do> {
        let Some(building) = &mut self.building else {
            return Vec::new();
        };
        let Some(i) = building
            .workers
            .iter()
            .position(|(_, w)| w.client == client)
        else {
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
        self.standing = building
            .workers
            .iter()
            .map(|(worker, w)| Standing {
                worker: *worker,
                client: w.client,
                hostname: w.member.hostname.clone(),
            })
            .collect();
        let clients = self.standing.iter().map(|s| s.client);
        let mut todo: Vec<_> = clients.map(|c| Do::Send(c, table.clone())).collect();
        todo.push(Do::Up(building.generation));
        todo
    }

    /// Handles the end of a connection, or a worker's report that it failed.
    pub(crate) fn gone(&mut self, client: ClientId, why: &str) -> Vec<Do> {
        let left = self
            .waiting_set
            .iter()
            .find(|(_, w)| w.client == client)
            .map(|(worker, _)| *worker);
        let mut todo = Vec::new();
        if let Some(worker) = left {
            self.waiting_set.remove(&worker);
            todo.push(Do::Report(ServerEvent::Away { worker }));
        }
        let building = self.building.iter().flat_map(|b| &b.workers);
        let culprit = building
            .filter(|(_, w)| w.client == client)
            .map(|(worker, _)| *worker)
            .next();
        if let Some(worker) = culprit {
            todo.extend(self.abort(Some(worker), why));
        }
        todo
    }

    /// Handles the end of a worker's process: the other members of its round are informed.
    pub(crate) fn died(&mut self, worker: u32, host: &str, cause: &str) -> Vec<Do> {
        self.waiting_set.remove(&worker);
        let mut todo = Vec::new();
        if self.is_building(|(known, _)| *known == worker) {
            todo = self.abort(Some(worker), cause);
        }
        if let Some(rank) = self.standing.iter().position(|s| s.worker == worker) {
            todo.extend(self.report_loss(rank, host, cause));
        }
        todo
    }

    /// Handles a worker's report that it could not join. If its round is already established, the other members may
    /// wait for this worker, so its loss is sent to them.
    pub(crate) fn failed(&mut self, client: ClientId, why: &str) -> Vec<Do> {
        let mut todo = self.gone(client, why);
        if let Some(rank) = self.standing.iter().position(|s| s.client == client) {
            let host = self.standing[rank].hostname.clone();
            todo.extend(self.report_loss(rank, &host, &format!("could not join: {why}")));
        }
        todo
    }

    fn report_loss(&self, rank: usize, host: &str, cause: &str) -> Vec<Do> {
        let notice = ToClient::PeerDied {
            rank: rank as u32,
            host: host.to_owned(),
            cause: cause.to_owned(),
        };
        let others = self.standing.iter().enumerate();
        others
            .filter(|(other, _)| *other != rank)
            .map(|(_, s)| Do::Send(s.client, notice.clone()))
            .collect()
    }

    /// Handles a report that another member of the established round is silent.
    fn silent(&self, client: ClientId, rank: u32) -> Vec<Do> {
        let mut members = self.standing.iter();
        let by = members.find(|s| s.client == client).map(|s| s.worker);
        let who = usize::try_from(rank)
            .ok()
            .and_then(|rank| self.standing.get(rank));
        match (who.map(|s| s.worker), by) {
            (Some(who), Some(by)) if who != by => {
                vec![Do::Report(ServerEvent::Silent { who, by })]
            }
            _ => Vec::new(),
        }
    }

    /// Informs all workers that are in a round that the members of the job change.
    pub(crate) fn announce(&mut self, kind: u8) -> Vec<Do> {
        self.version += 1;
        let message = ToClient::HostsUpdated {
            version: self.version,
            kind,
        };
        let building = self.building.iter().flat_map(|b| &b.workers);
        let building = building.map(|(_, w)| w.client);
        let standing = self.standing.iter().map(|s| s.client);
        building
            .chain(standing)
            .map(|client| Do::Send(client, message.clone()))
            .collect()
    }

    /// Dismisses a worker from the waiting set.
    pub(crate) fn dismiss(&mut self, worker: u32, text: &str) -> Vec<Do> {
        let text = text.to_owned();
        let waiting = self.waiting_set.remove(&worker);
        waiting
            .map(|w| Do::Dismiss(w.client, ToClient::Removed { text }))
            .into_iter()
            .collect()
    }

    /// Returns when to call [`Self::timeout`] at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.building.as_ref().map(|b| b.ready_by)
    }

    pub(crate) fn timeout(&mut self, now: Instant) -> Vec<Do> {
        let Some(building) = self.building.as_ref().filter(|b| b.ready_by <= now) else {
            return Vec::new();
        };
        let unready: Vec<String> = building
            .workers
            .iter()
            .zip(&building.places)
            .filter(|(_, place)| place.is_none())
            .map(|((worker, w), _)| format!("worker {worker} on {}", w.member.hostname))
            .collect();
        let text = format!("not ready in time: {}", unready.join(", "));
        self.abort(None, &text)
    }

    fn is_building(&self, which: impl Fn(&(u32, WaitingWorker)) -> bool) -> bool {
        self.building
            .as_ref()
            .is_some_and(|b| b.workers.iter().any(which))
    }

    /// Aborts the round that is being set up, if there is one. All its workers except the culprit are sent back to join
    /// again.
    fn abort(&mut self, culprit: Option<u32>, why: &str) -> Vec<Do> {
        let Some(building) = self.building.take() else {
            return Vec::new();
        };
        let of = |worker: u32| {
            let mut workers = building.workers.iter();
            let member = workers.find(|(known, _)| *known == worker);
            member.map_or_else(String::new, |(_, w)| w.member.hostname.clone())
        };
        let text = match culprit {
            Some(worker) => format!("worker {worker} on {}: {why}", of(worker)),
            None => why.to_owned(),
        };
        let mut todo = vec![Do::Failed(text.clone())];
        let others = building.workers.into_iter();
        let others = others.filter(|(worker, _)| Some(*worker) != culprit);
        todo.extend(dismiss_all(others.collect(), &text));
        todo
    }
}

fn dismiss_all(workers: Vec<(u32, WaitingWorker)>, text: &str) -> Vec<Do> {
    workers
        .into_iter()
        .map(|(_, waiting)| {
            let text = text.to_owned();
            Do::Dismiss(waiting.client, ToClient::Aborted { text })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration(pid: u32) -> Registration {
        let member = MemberEntry {
            identity: "x".into(),
            hostname: "h1".into(),
            pid,
            shm: true,
        };
        let common = Common {
            connections: pid as u8,
            fan_out: 2,
            heartbeat: None,
            checksums: pid.is_multiple_of(2),
            settings: vec![pid as u8],
        };
        Registration { member, common }
    }

    const LIMIT: Duration = Duration::from_secs(30);

    /// Worker `w` over connection `w`.
    fn rounds(workers: &[u32]) -> Rounds {
        let mut rounds = Rounds::default();
        for worker in workers {
            let client = u64::from(*worker);
            assert_eq!(
                rounds.join(client, *worker, registration(*worker), LIMIT),
                []
            );
        }
        rounds
    }

    fn assignments(workers: &[u32]) -> Vec<(u32, RankAssignment)> {
        (0..)
            .zip(workers)
            .map(|(rank, worker)| {
                let assignment = RankAssignment {
                    rank,
                    local_rank: rank,
                    local_size: 9,
                    cross_rank: 0,
                    cross_size: 1,
                    needs_sync: true,
                };
                (*worker, assignment)
            })
            .collect()
    }

    /// Of each worker told: its connection, its rank, the members by process, whose settings.
    fn rosters(todo: Vec<Do>) -> Vec<(ClientId, u32, Vec<u32>, u8)> {
        let sent = todo.into_iter().map(|item| match item {
            Do::Send(
                client,
                ToClient::Roster {
                    members,
                    common,
                    assignment: Some(assignment),
                    ..
                },
            ) => {
                let pids = members.iter().map(|m| m.pid).collect();
                (client, assignment.rank, pids, common.connections)
            }
            other => panic!("{other:?}"),
        });
        sent.collect()
    }

    fn aborted(client: ClientId, text: &str) -> Do {
        let text = text.to_owned();
        Do::Dismiss(client, ToClient::Aborted { text })
    }

    #[test]
    fn the_launcher_chooses_who_and_in_which_order() {
        let mut r = rounds(&[4, 5, 6]);
        let sent = rosters(r.form(&assignments(&[6, 4]), Instant::now()));
        assert_eq!(sent, [(6, 0, vec![6, 4], 6), (4, 1, vec![6, 4], 6)]);
        assert_eq!(r.ready(4, Where::default()), []);
        let up = r.ready(6, Where::default());
        assert_eq!(up.last(), Some(&Do::Up(1)));
        // The third still waits, and those who come again form the next round with it.
        r.join(14, 4, registration(4), LIMIT);
        r.join(16, 6, registration(6), LIMIT);
        let sent = rosters(r.form(&assignments(&[6, 4, 5]), Instant::now()));
        assert_eq!(sent.iter().map(|t| t.0).collect::<Vec<_>>(), [16, 14, 5]);
    }

    #[test]
    fn a_worker_lost_while_a_round_is_set_up_sends_the_others_back_to_the_waiting_set() {
        let mut r = rounds(&[1, 2, 3]);
        r.form(&assignments(&[1, 2, 3]), Instant::now());
        let text = "worker 2 on h1: killed";
        assert_eq!(
            r.died(2, "h1", "killed"),
            [Do::Failed(text.into()), aborted(1, text), aborted(3, text)]
        );
        assert_eq!(r.ready(1, Where::default()), []);
        r.join(11, 1, registration(1), LIMIT);
        r.join(13, 3, registration(3), LIMIT);
        assert_eq!(
            rosters(r.form(&assignments(&[1, 3]), Instant::now())).len(),
            2
        );
    }

    #[test]
    fn a_round_of_somebody_who_has_left_is_not_begun() {
        let mut r = rounds(&[1, 2]);
        let away = ServerEvent::Away { worker: 2 };
        assert_eq!(r.gone(2, "closed"), [Do::Report(away)]);
        let text = "worker 2 has left";
        let todo = r.form(&assignments(&[1, 2]), Instant::now());
        assert_eq!(todo, [aborted(1, text), Do::Failed(text.into())]);
    }

    #[test]
    fn who_is_not_ready_in_time_is_named_and_the_round_given_up() {
        let mut r = rounds(&[1, 2]);
        let now = Instant::now();
        r.form(&assignments(&[1, 2]), now);
        r.ready(1, Where::default());
        assert_eq!(r.deadline(), Some(now + LIMIT));
        assert_eq!(r.timeout(now), []);
        let text = "not ready in time: worker 2 on h1";
        assert_eq!(
            r.timeout(now + LIMIT),
            [Do::Failed(text.into()), aborted(1, text), aborted(2, text)]
        );
        assert_eq!(r.deadline(), None);
    }

    #[test]
    fn deaths_and_changes_are_told_to_those_of_the_round_over_its_connections() {
        let mut r = rounds(&[7, 8, 9]);
        r.form(&assignments(&[9, 8]), Instant::now());
        r.ready(8, Where::default());
        r.ready(9, Where::default());
        let update = |version, kind| ToClient::HostsUpdated { version, kind };
        assert_eq!(
            r.announce(2),
            [Do::Send(9, update(1, 2)), Do::Send(8, update(1, 2))]
        );
        let [Do::Send(9, ToClient::PeerDied { rank: 1, .. })] = &r.died(8, "h1", "x")[..] else {
            panic!("not told as rank 1 to the other alone");
        };
        let Do::Send(_, ToClient::HostsUpdated { version: 2, .. }) = r.announce(1)[0] else {
            panic!("the version grows");
        };
        // Reports name both ranks; reports about non-members, and about the sender itself, are ignored.
        let silent = |who, by| vec![Do::Report(ServerEvent::Silent { who, by })];
        assert_eq!(r.silent(9, 1), silent(8, 9));
        assert_eq!(r.silent(8, 0), silent(9, 8));
        for (client, rank) in [(9, 0), (9, 2), (7, 0)] {
            assert_eq!(r.silent(client, rank), []);
        }
        assert_eq!(
            r.dismiss(7, "no slot"),
            [Do::Dismiss(
                7,
                ToClient::Removed {
                    text: "no slot".into()
                }
            )]
        );
        assert_eq!(r.dismiss(7, "no slot"), []);
    }

    #[test]
    fn a_worker_that_cannot_connect_in_the_end_is_told_to_those_who_wait_for_it() {
        let mut r = rounds(&[8, 9]);
        r.form(&assignments(&[9, 8]), Instant::now());
        r.ready(8, Where::default());
        r.ready(9, Where::default());
        let notice = ToClient::PeerDied {
            rank: 1,
            host: "h1".into(),
            cause: "could not join: no way".into(),
        };
        assert_eq!(r.failed(8, "no way"), [Do::Send(9, notice)]);
        assert_eq!(r.gone(9, "closed"), [], "ends are told by others");
    }

    #[test]
    fn a_process_that_comes_twice_is_there_once() {
        let mut r = rounds(&[1, 2]);
        let text = "the same process has registered again".to_owned();
        let again = r.join(11, 1, registration(1), LIMIT);
        assert_eq!(again, [Do::Dismiss(1, ToClient::Refused { text })]);
        assert_eq!(r.gone(1, "closed"), []);
        let sent = rosters(r.form(&assignments(&[1, 2]), Instant::now()));
        assert_eq!(sent[0].0, 11);
        // And in the middle of a round: that round is over.
        let text = "worker 1 on h1: it came again before all were ready";
        let again = r.join(21, 1, registration(1), LIMIT);
        assert_eq!(again, [Do::Failed(text.into()), aborted(2, text)]);
    }
}

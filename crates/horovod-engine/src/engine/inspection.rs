//! The engine's part in the diagnosis of stalls: sends questions and answers, and reports to the users.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use horovod_diagnosis::{
    self as diagnosis, DeviceDiagnosis, DeviceStep, Diagnosis, JobView, Key, Late, Leader,
    LeaderStep, LetGo, Message, ReportFile, Requests, SoftStep, SoftWatch, Standing, ThreadStack,
    Watched,
};
use horovod_protocol::{Coordinator, Rank, StalledRequest, Time, Tree};
use horovod_transport::{Control, Topology};

use super::device_watch::DeviceMonitor;
use super::handles::WaitedFor;
use super::relay::{OutOfBandMessage, Relay};
use super::standing::{brief, search_stacks, standing};
use super::{EngineState, Handle};
use crate::config::Config;

const COORDINATOR: Rank = Rank(0);
/// How long the search for this process's stacks may take.
const STACKS_TIMEOUT: Duration = Duration::from_secs(1);
/// At most so many questions share one answer.
const QUESTIONS_MAX: usize = 4;
/// At most so many questions and answers wait to be sent; more are dropped.
const OUTBOX_MAX: usize = 256;
const NS_PER_MS: u64 = 1_000_000;

/// Stall inspection of one rank.
pub(super) struct Inspection {
    me: Rank,
    /// Only on rank 0, unless the diagnosis is switched off.
    leader: Option<Leader>,
    /// On rank 0: ranks with soft waits.
    soft: Option<SoftWatch>,
    /// Start of the soft wait that this rank has reported to rank 0, if it has reported one.
    reported_soft: Option<u64>,
    /// This rank's soft wait is due: the next poll reports it to rank 0.
    reports_soft: bool,
    gives_up: bool,
    devices: DeviceMonitor,
    file: ReportFile,
    answering: Option<Answering>,
    /// A thread that has not found the stacks yet; no second one is started meanwhile.
    searching: Option<Receiver<Vec<ThreadStack>>>,
    outbox: VecDeque<(Rank, Vec<u8>)>,
}

/// The driver's state beside its devices.
pub(super) struct Surroundings {
    /// All ranks have agreed to stop, so none answers any more.
    pub(super) stopped: bool,
    pub(super) executes: bool,
}

/// Executions that have not ended.
pub(super) struct InHand<'a> {
    /// The collective that runs, on rank 0.
    pub(super) running: Option<StalledRequest>,
    /// Returns the names of these executions, for an answer that needs them.
    pub(super) names: &'a dyn Fn() -> Vec<Key>,
}

/// Result of a poll of the devices.
pub(super) enum DeviceNews {
    None,
    /// A message waits to be sent.
    Reported,
    /// Rank 0: the diagnosis, with the state of all ranks.
    Stuck(Box<DeviceDiagnosis>),
    /// This rank ends the job, for this reason.
    GiveUp(String),
}

/// An answer that lacks only the stacks.
struct Answering {
    /// Questions of different inquiries that get this answer.
    questions: Vec<u64>,
    standing: Standing,
    deadline: Instant,
}

/// Why a job can never continue: the rank to blame, and a line that is part of every rank's errors.
pub(super) struct Deadlock {
    pub(super) by: Rank,
    pub(super) summary: String,
}

impl Inspection {
    /// `device_timeout`: how long an execution may be on a device.
    pub(super) fn new(
        config: &Config,
        device_timeout: Option<Duration>,
        topology: &Topology,
    ) -> Self {
        let leads = topology.rank == COORDINATOR && topology.size > 1;
        let after = config.stalls.diagnosis.filter(|_| leads);
        let after_ms = after.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
        Self {
            me: topology.rank,
            leader: after_ms.map(Leader::new),
            soft: leads.then(SoftWatch::default),
            reported_soft: None,
            reports_soft: false,
            gives_up: config.stalls.deadlock_error,
            devices: DeviceMonitor::new(config.stalls.check, device_timeout, topology),
            file: ReportFile::new(config.stalls.report.clone()),
            answering: None,
            searching: None,
            outbox: VecDeque::new(),
        }
    }

    /// Returns whether this is rank 0 and it searches for stalls.
    pub(super) fn leads(&self) -> bool {
        self.leader.is_some()
    }

    /// Returns whether [`Self::is_due`] needs the time.
    pub(super) fn polls(&self) -> bool {
        self.leads() || self.soft.as_ref().is_some_and(SoftWatch::is_active)
    }

    /// Notes that a message to the coordinator may have arrived.
    pub(super) fn has_news(&mut self) {
        if let Some(soft) = &mut self.soft {
            soft.has_news();
        }
    }

    /// Returns when to report a soft wait to rank 0, and when that wait began.
    fn soft_wait_due(&self, shared: &EngineState) -> Option<(u64, u64)> {
        let since = shared.callers.soft().since().filter(|_| !shared.alone)?;
        (self.reported_soft != Some(since)).then(|| (shared.callers.soft().due(since), since))
    }

    /// Returns when to report a soft wait to rank 0; if that is now, [`Self::poll`] reports it. Called before a sleep
    /// while nothing runs.
    pub(super) fn soft_deadline(&mut self, shared: &EngineState, now: Time) -> Option<Time> {
        let (due, _) = self.soft_wait_due(shared)?;
        self.reports_soft |= due <= now.0;
        Some(Time(due))
    }

    /// Returns whether [`Self::poll`] has something to do. `now` is given if [`Self::polls`].
    pub(super) fn is_due(&self, now: Option<Time>, shared: &EngineState) -> bool {
        let leader = self.leader.as_ref().zip(now);
        let soft = self.soft.as_ref().zip(now);
        !self.outbox.is_empty()
            || self.answering.is_some()
            || self.reports_soft
            || (self.reported_soft.is_some() && shared.callers.soft().since().is_none())
            || soft.is_some_and(|(s, now)| s.deadline().is_some_and(|at| at <= now.0))
            || leader.is_some_and(|(l, now)| l.is_due(now.0 / NS_PER_MS))
    }

    /// Returns when something is due that no event announces.
    pub(super) fn deadline(&self, now: impl FnOnce() -> Time) -> Option<Time> {
        let leader = self.leader.as_ref().map(|l| l.deadline() * NS_PER_MS);
        let answer = self.answering.as_ref().map(|answering| {
            let left = answering.deadline.saturating_duration_since(Instant::now());
            now().0.saturating_add(super::nanos(left))
        });
        let soft = self.soft.as_ref().and_then(SoftWatch::deadline);
        leader.into_iter().chain(answer).chain(soft).min().map(Time)
    }

    /// Returns whether this message is for the inspection.
    pub(super) fn is_meant(received: &OutOfBandMessage<'_>) -> bool {
        diagnosis::is_message(received.message)
    }

    /// Handles a question or an answer of another rank.
    pub(super) fn handle(
        &mut self,
        received: &OutOfBandMessage<'_>,
        shared: &Arc<EngineState>,
        executes: bool,
    ) {
        let from = received.from;
        match Message::decode(received.message) {
            Ok(Message::Ask { question }) if from == COORDINATOR => {
                self.begin_answer(question, shared, executes);
            }
            Ok(Message::Answer { question, standing }) => {
                self.devices.answered(question, from, &standing);
                if let Some(leader) = &mut self.leader {
                    leader.answered(question, from, standing);
                }
            }
            Ok(Message::AskBriefly { question, keys }) if from == COORDINATOR => {
                let brief = brief(shared, &keys);
                self.post(COORDINATOR, &Message::Brief { question, brief });
            }
            Ok(Message::LetGo { handle, rank, name }) if from == COORDINATOR => {
                let_go(shared, handle, Rank(rank), &name);
            }
            Ok(Message::Brief { question, brief }) => {
                if let Some(soft) = &mut self.soft {
                    soft.answered(question, from, brief);
                }
            }
            Ok(Message::Complaint(complaint)) => {
                self.devices.complain(shared.now(), from, complaint)
            }
            Ok(Message::Soft { waits }) => {
                if let Some(soft) = &mut self.soft {
                    soft.notice(shared.now().0, from, waits);
                }
            }
            Ok(Message::Ask { .. } | Message::AskBriefly { .. } | Message::LetGo { .. }) => {
                tracing::debug!("{from} asked or told, but only rank 0 does");
            }
            Err(e) => tracing::warn!("{from} sent what cannot be read about a stall: {e}"),
        }
    }

    fn begin_answer(&mut self, question: u64, shared: &Arc<EngineState>, executes: bool) {
        let mut standing = standing(shared, executes);
        if let Some(answering) = &mut self.answering {
            answering.standing = standing;
            if answering.questions.len() < QUESTIONS_MAX {
                answering.questions.push(question);
            }
            return;
        }
        if self.searching.is_none() {
            match search_stacks(shared) {
                Ok(search) => self.searching = search,
                Err(e) => standing.without_stacks = e.to_string(),
            }
        }
        self.answering = Some(Answering {
            questions: vec![question],
            standing,
            deadline: Instant::now() + STACKS_TIMEOUT,
        });
    }

    /// Sends the answer when it is complete, or when its deadline has passed.
    fn finish_answer(&mut self, names_in_hand: impl FnOnce() -> Vec<Key>) {
        let Some(answering) = &mut self.answering else {
            return;
        };
        if let Some(search) = &self.searching {
            match search.try_recv() {
                Ok(threads) => answering.standing.threads = threads,
                Err(TryRecvError::Disconnected) => {
                    answering.standing.without_stacks = "they could not be found".into();
                }
                Err(TryRecvError::Empty) if Instant::now() < answering.deadline => return,
                Err(TryRecvError::Empty) => {
                    answering.standing.without_stacks =
                        "some native code keeps the interpreter's lock".into();
                }
            }
            if answering.standing.without_stacks.is_empty() {
                self.searching = None;
            }
        } else if answering.standing.without_stacks.is_empty() {
            answering.standing.without_stacks = "this program does not tell them".into();
        }
        let Some(Answering {
            questions,
            mut standing,
            ..
        }) = self.answering.take()
        else {
            return;
        };
        standing.in_hand.names = names_in_hand();
        let standing = standing.bounded();
        for question in questions {
            let standing = standing.clone();
            if self.me != COORDINATOR {
                let answer = Message::Answer { question, standing };
                self.post(COORDINATOR, &answer);
                continue;
            }
            self.devices.answered(question, self.me, &standing);
            if let Some(leader) = &mut self.leader {
                leader.answered(question, self.me, standing);
            }
        }
    }

    /// Polls the work on this rank's devices, and on rank 0 the inquiry about all ranks. Called before each sleep, and
    /// once in several polls.
    pub(super) fn watch_devices(
        &mut self,
        now: Time,
        shared: &Arc<EngineState>,
        size: u32,
        surroundings: Surroundings,
    ) -> DeviceNews {
        let Surroundings { stopped, executes } = surroundings;
        match self.devices.check(now, shared, stopped || size == 1) {
            Some(Watched::GiveUp(why)) => return DeviceNews::GiveUp(why),
            Some(Watched::Tell(complaint)) if self.me == COORDINATOR => {
                self.devices.complain(now, self.me, complaint);
            }
            Some(Watched::Tell(complaint)) => {
                self.post(COORDINATOR, &Message::Complaint(complaint));
                return DeviceNews::Reported;
            }
            None => {}
        }
        match self.devices.poll(now, shared, size) {
            Some(DeviceStep::Report(diagnosis)) => DeviceNews::Stuck(diagnosis),
            Some(DeviceStep::Ask { question, ranks }) => {
                self.ask(question, ranks, shared, executes);
                DeviceNews::Reported
            }
            None => DeviceNews::None,
        }
    }

    fn ask(&mut self, question: u64, ranks: Vec<Rank>, shared: &Arc<EngineState>, executes: bool) {
        for rank in ranks {
            if rank == self.me {
                self.begin_answer(question, shared, executes);
            } else {
                self.post(rank, &Message::Ask { question });
            }
        }
    }

    fn post(&mut self, to: Rank, message: &Message) {
        if self.outbox.len() < OUTBOX_MAX {
            self.outbox.push_back((to, message.encode()));
        }
    }

    /// Does what is due but sends nothing. `in_hand` describes executions that have not ended. Returns a diagnosis if one
    /// is complete.
    pub(super) fn poll(
        &mut self,
        now: Time,
        coordinator: Option<&mut Coordinator>,
        shared: &Arc<EngineState>,
        in_hand: InHand<'_>,
    ) -> Option<Box<Diagnosis>> {
        let InHand { running, names } = in_hand;
        self.finish_answer(names);
        self.tell_of_soft_wait(now, shared);
        let mut found = None;
        let mut coordinator = coordinator;
        if let Some(coordinator) = &mut coordinator {
            self.watch_soft_waits(now, coordinator, shared);
        }
        if let (Some(leader), Some(coordinator)) = (&mut self.leader, coordinator) {
            let executes = running.is_some();
            let late = |before_ms: u64| {
                let before = before_ms * NS_PER_MS;
                Late {
                    requests: coordinator.late(now, Time(before)),
                    running: running.filter(|r| now.0.saturating_sub(r.waited_ns) <= before),
                }
            };
            match leader.poll(now.0 / NS_PER_MS, late) {
                Some(LeaderStep::Ask { question, ranks }) => {
                    self.ask(question, ranks, shared, executes);
                }
                Some(LeaderStep::Report(diagnosis)) => found = Some(diagnosis),
                None => {}
            }
        }
        found
    }

    /// Reports to rank 0 that this rank has waited softly for a while, or does so no more.
    fn tell_of_soft_wait(&mut self, now: Time, shared: &EngineState) {
        let began = match self.soft_wait_due(shared) {
            Some((due, since)) if self.reports_soft && due <= now.0 => Some(since),
            _ => None,
        };
        self.reports_soft = false;
        let is_over = self.reported_soft.is_some() && shared.callers.soft().since().is_none();
        if began.is_none() && !is_over {
            return;
        }
        self.reported_soft = began;
        let waits = began.is_some();
        match &mut self.soft {
            Some(soft) => soft.notice(now.0, self.me, waits),
            None => self.post(COORDINATOR, &Message::Soft { waits }),
        }
    }

    fn watch_soft_waits(&mut self, now: Time, coordinator: &mut Coordinator, shared: &EngineState) {
        let Some(soft) = &mut self.soft else { return };
        match soft.poll(now.0, &mut Pending { coordinator, now }) {
            Some(SoftStep::Ask { question, ranks }) => {
                let names: Vec<_> = ranks.iter().map(|(rank, _)| rank.to_string()).collect();
                tracing::debug!(
                    "some wait in backward(): asks {} what they wait for",
                    names.join(", ")
                );
                for (rank, keys) in ranks {
                    if rank != self.me {
                        self.post(rank, &Message::AskBriefly { question, keys });
                    } else if let Some(soft) = &mut self.soft {
                        soft.answered(question, rank, brief(shared, &keys));
                    }
                }
            }
            Some(SoftStep::LetGo(ends)) => {
                for LetGo {
                    rank,
                    handle,
                    name,
                    waits,
                } in ends
                {
                    if rank == self.me {
                        let_go(shared, handle, waits, &name);
                    } else {
                        let rank_waits = waits.0;
                        let message = Message::LetGo {
                            handle,
                            rank: rank_waits,
                            name,
                        };
                        self.post(rank, &message);
                    }
                }
            }
            None => {}
        }
    }

    /// Sends what waits, as far as the links take it. Returns whether something was sent.
    pub(super) fn send_outbox(&mut self, relay: &Relay, control: &mut Control) -> bool {
        let mut sent = false;
        for _ in 0..self.outbox.len() {
            let Some((to, bytes)) = self.outbox.pop_front() else {
                break;
            };
            match relay.send(control, to, &bytes) {
                Ok(true) => sent = true,
                Ok(false) => self.outbox.push_back((to, bytes)),
                // The driver detects a lost peer elsewhere.
                Err(e) => tracing::debug!("stall: {e}"),
            }
        }
        sent
    }

    /// Reports the diagnosis to the users. Returns the deadlock if the job has to end because of it.
    pub(super) fn tell(
        &mut self,
        found: &Diagnosis,
        topology: &Topology,
        tree: &Tree,
        heartbeat: Option<Duration>,
        has_newcomers: bool,
    ) -> Option<Deadlock> {
        let host_of = |rank: Rank| host_of(topology, rank);
        let job = JobView {
            tree,
            host_of: &host_of,
            heartbeat,
            has_newcomers,
        };
        let mut report = diagnosis::render(found, &job);
        let mut summary = diagnosis::summary(found, &job);
        self.file_report(&mut report, &mut summary);
        let by = found.to_blame();
        match by.filter(|_| self.gives_up && found.is_deadlock()) {
            Some(by) => {
                tracing::error!("{report}");
                Some(Deadlock { by, summary })
            }
            None => {
                tracing::warn!("{report}");
                None
            }
        }
    }
}

impl Inspection {
    /// Discards the report file, because the job has succeeded.
    pub(super) fn ended_well(&mut self) {
        self.file.discard();
    }

    /// Writes a report to the file, and adds the file's path to both texts.
    fn file_report(&mut self, report: &mut String, summary: &mut String) {
        summary.push_str(". Rank 0 has printed the whole report, with stacks");
        match self.file.write(report) {
            Ok(path) => {
                report.push_str(&format!("\nThis report is also in {}.", path.display()));
                summary.push_str(&format!(" (on its host in {})", path.display()));
            }
            Err(e) => tracing::warn!("the report of a stall could not be written to a file: {e}"),
        }
    }

    /// Reports an operation that does not end on devices. If that ends the job, returns the text of all errors.
    pub(super) fn report_devices(
        &mut self,
        found: &DeviceDiagnosis,
        topology: &Topology,
    ) -> Option<String> {
        let host_of = |rank: Rank| host_of(topology, rank);
        let mut report = diagnosis::render_device(found, &host_of);
        let mut summary = diagnosis::summary_device(found, &host_of);
        self.file_report(&mut report, &mut summary);
        if found.ends_job() {
            tracing::error!("{report}");
            return Some(summary);
        }
        tracing::warn!("{report}");
        None
    }
}

fn host_of(topology: &Topology, rank: Rank) -> String {
    let peer = topology.peers.get(rank.index());
    peer.map(|peer| peer.hostname.to_string())
        .unwrap_or_default()
}

/// The requests of the coordinator at one time.
struct Pending<'a> {
    coordinator: &'a mut Coordinator,
    now: Time,
}

impl Requests for Pending<'_> {
    fn lacks_any(&mut self, ranks: &BTreeSet<Rank>) -> bool {
        self.coordinator.lacks_any(ranks.iter().copied())
    }

    fn incomplete(&mut self) -> Vec<(u64, StalledRequest)> {
        self.coordinator.incomplete(self.now, self.now)
    }
}

fn let_go(shared: &EngineState, handle: u64, rank: Rank, name: &str) {
    let cause = WaitedFor {
        rank,
        name: name.into(),
    };
    shared.handles.let_go(Handle(handle), cause);
}

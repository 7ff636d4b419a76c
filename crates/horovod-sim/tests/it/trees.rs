//! Stories of ranks that speak to the coordinator through a tree.

use crate::job::*;
use horovod_protocol::*;
use std::collections::VecDeque;

/// Six hosts of two ranks, each node listening to two others at most: 0 to {1, 2, 4}, 2 to {3, 6, 8}, ...
struct TreeJob {
    tree: Tree,
    coordinator: Coordinator,
    aggregators: Vec<Option<Aggregator>>,
    workers: Vec<Worker>,
    done: Vec<Vec<WorkerAction>>,
    notes: Vec<CoordinatorAction>,
    now: u64,
    next_entry: u64,
    /// Messages that the coordinator got from others than its own worker.
    root_got: Vec<(Rank, ToCoordinator)>,
    up: VecDeque<(Rank, Rank, ToCoordinator)>,
    down: VecDeque<(Rank, Rank, ToWorker)>,
}

const SIZE: u32 = 12;
const HOLD_NS: u64 = 1000;

impl TreeJob {
    fn new() -> Self {
        let mut config = CoordinatorConfig::new(SIZE, GENERATION);
        config.stall = Some(StallConfig {
            warning_ns: 10 * HOLD_NS,
            shutdown_ns: None,
        });
        let hosts: Vec<u32> = (0..SIZE).map(|rank| rank / 2).collect();
        let tree = Tree::new(&hosts, 2);
        let ranks = || (0..SIZE).map(Rank);
        let aggregator = |rank| AggregatorConfig {
            rank,
            generation: GENERATION,
            hold_ns: HOLD_NS,
        };
        let worker = |rank| WorkerConfig {
            rank,
            size: SIZE,
            generation: GENERATION,
        };
        Self {
            coordinator: Coordinator::with_tree(config, &tree),
            aggregators: ranks()
                .map(|rank| Aggregator::new(aggregator(rank), &tree))
                .collect(),
            workers: ranks().map(|rank| Worker::new(worker(rank))).collect(),
            done: vec![Vec::new(); SIZE as usize],
            notes: Vec::new(),
            now: 0,
            next_entry: 0,
            root_got: Vec::new(),
            up: VecDeque::new(),
            down: VecDeque::new(),
            tree,
        }
    }

    fn submit(&mut self, rank: u32, request: &Request) -> EntryId {
        self.next_entry += 1;
        let id = EntryId(self.next_entry);
        self.workers[rank as usize]
            .submit(id, request)
            .expect("valid");
        id
    }

    fn submit_all(&mut self, request: &Request) -> Vec<EntryId> {
        (0..SIZE).map(|rank| self.submit(rank, request)).collect()
    }

    /// Delivers everything until nothing is on its way; no time passes.
    fn settle(&mut self) {
        let now = Time(self.now);
        loop {
            for rank in (0..SIZE).map(Rank) {
                self.drain(rank);
            }
            while let Some(action) = self.coordinator.poll_action() {
                match action {
                    CoordinatorAction::Send(to, message) => {
                        let message = recoded_down(&message);
                        let sent = to.iter().map(|to| (Rank(0), *to, message.clone()));
                        self.down.extend(sent);
                    }
                    other => self.notes.push(other),
                }
            }
            if let Some((from, to, message)) = self.up.pop_front() {
                if let Some(aggregator) = &mut self.aggregators[to.index()] {
                    aggregator.handle_up(now, from, &message);
                } else {
                    self.coordinator.handle_message(now, from, &message);
                    if from != to {
                        self.root_got.push((from, message));
                    }
                }
            } else if let Some((from, to, message)) = self.down.pop_front() {
                match &mut self.aggregators[to.index()] {
                    Some(aggregator) if from != to => aggregator.handle_down(now, &message),
                    _ => self.workers[to.index()].handle_message(&message),
                }
            } else {
                return;
            }
        }
    }

    fn drain(&mut self, rank: Rank) {
        while let Some(action) = self.workers[rank.index()].poll_action() {
            match action {
                WorkerAction::Send(message) => {
                    let to = if self.aggregators[rank.index()].is_some() {
                        rank
                    } else {
                        self.tree.parent(rank).unwrap_or(rank)
                    };
                    self.up.push_back((rank, to, recoded_up(&message)));
                }
                other => self.done[rank.index()].push(other),
            }
        }
        while let Some(aggregator) = &mut self.aggregators[rank.index()]
            && let Some(action) = aggregator.poll_action()
        {
            match action {
                AggregatorAction::Up(message) => {
                    let parent = self.tree.parent(rank).expect("not rank 0");
                    self.up.push_back((rank, parent, recoded_up(&message)));
                }
                AggregatorAction::Down(to, message) => {
                    let message = recoded_down(&message);
                    let sent = to.iter().map(|to| (rank, *to, message.clone()));
                    self.down.extend(sent);
                }
                AggregatorAction::Abort(lost) => self.notes.push(CoordinatorAction::Abort(lost)),
            }
        }
    }

    fn wait_until(&mut self, now: u64) {
        self.now = now;
        for aggregator in self.aggregators.iter_mut().flatten() {
            aggregator.handle_timeout(Time(now));
        }
        self.settle();
        self.coordinator.handle_timeout(Time(now));
        self.settle();
    }

    fn ran(&self, rank: u32) -> Vec<Vec<String>> {
        let mut ran = Vec::new();
        for action in &self.done[rank as usize] {
            if let WorkerAction::Execute(execution) = action {
                let names = execution.items.iter().map(|item| item.name.to_string());
                ran.push(names.collect());
            }
        }
        ran
    }

    fn error(&self, rank: u32, id: EntryId) -> OpError {
        let ended = self.done[rank as usize]
            .iter()
            .find_map(|action| match action {
                WorkerAction::Complete(found, Err(error)) if *found == id => Some(error.clone()),
                _ => None,
            });
        ended.expect("it failed")
    }
}

#[test]
fn known_tensors_reach_the_coordinator_once_per_child_however_many_ranks_are_below() {
    let mut job = TreeJob::new();
    let children = job.tree.children(Rank(0)).len();
    assert!(children < 5 && job.tree.aggregates(Rank(2)) && job.tree.aggregates(Rank(6)));
    for step in 0..3 {
        job.root_got.clear();
        for number in 0..100 {
            job.submit_all(&sum(&format!("x{number}"), &[4]));
        }
        job.settle();
        assert_eq!(job.ran(11).len(), step + 1);
        if step > 0 {
            assert_eq!(job.root_got.len(), children);
            let run = SlotRun {
                first: Slot(0),
                len: 100,
            };
            for (from, message) in &job.root_got {
                assert_eq!(message.items, [Submission::Hits(run)], "{from}");
            }
        }
    }
}

#[test]
fn the_missing_rank_is_named_even_if_its_aggregator_withheld_what_the_others_said() {
    let mut job = TreeJob::new();
    job.submit_all(&sum("x", &[1]));
    job.settle();
    for rank in (0..SIZE).filter(|rank| *rank != 7) {
        job.submit(rank, &sum("x", &[1]));
    }
    job.settle();
    assert_eq!(job.ran(0).len(), 1);
    job.wait_until(HOLD_NS);
    job.wait_until(2 * HOLD_NS);
    job.wait_until(20 * HOLD_NS);
    let [CoordinatorAction::Stall(report)] = &job.notes[..] else {
        panic!("{:?}", job.notes)
    };
    assert_eq!(report.stalled[0].missing, [Rank(7)]);
    assert_eq!(report.stalled[0].waiting.len(), SIZE as usize - 1);
    job.submit(7, &sum("x", &[1]));
    job.settle();
    assert_eq!(job.ran(7).len(), 2);
}

#[test]
fn a_known_name_that_one_rank_uses_otherwise_fails_everywhere_at_once() {
    let mut job = TreeJob::new();
    job.submit_all(&sum("x", &[1]));
    job.settle();
    // Rank 9 speaks through 8, 8 through 2.
    let ids: Vec<EntryId> = (0..SIZE)
        .map(|rank| job.submit(rank, &sum("x", &[if rank == 9 { 3 } else { 1 }])))
        .collect();
    job.settle();
    for (rank, id) in (0..).zip(ids) {
        let error = job.error(rank, id);
        assert!(
            error.to_string().starts_with("Mismatched ALLREDUCE"),
            "{error}"
        );
        assert!(error.to_string().contains("rank 9"), "{error}");
    }
    job.submit_all(&sum("x", &[1]));
    job.settle();
    assert_eq!(job.ran(3).len(), 2);
}

#[test]
fn what_was_asked_for_before_a_join_counts_and_nothing_waits_for_the_joined() {
    let mut job = TreeJob::new();
    job.submit_all(&sum("x", &[1]));
    job.submit_all(&sum("y", &[1]));
    job.settle();
    job.submit(9, &sum("x", &[1]));
    job.submit(9, &join());
    job.settle();
    for rank in (0..SIZE).filter(|rank| *rank != 9) {
        job.submit(rank, &sum("x", &[1]));
        job.submit(rank, &sum("y", &[1]));
    }
    job.settle();
    let contributors: Vec<u32> = job.done[9]
        .iter()
        .filter_map(|action| match action {
            WorkerAction::Execute(execution) => Some(execution.contributors),
            _ => None,
        })
        .skip(1)
        .collect();
    assert_eq!(contributors, [SIZE, SIZE - 1]);
    for rank in (0..SIZE).filter(|rank| *rank != 9) {
        job.submit(rank, &join());
    }
    job.settle();
    for done in &job.done {
        let joined = done.last();
        assert!(
            matches!(
                joined,
                Some(WorkerAction::Complete(_, Ok(Completion::Joined { .. })))
            ),
            "{joined:?}"
        );
    }
    job.root_got.clear();
    job.submit_all(&sum("x", &[1]));
    job.settle();
    assert_eq!(job.root_got.len(), job.tree.children(Rank(0)).len());
}

#[test]
fn everybody_learns_of_a_loss_that_only_an_aggregator_saw() {
    let mut job = TreeJob::new();
    let id = job.submit(11, &sum("x", &[1]));
    let lost = PeerLost {
        rank: Rank(9),
        host: "h4".into(),
        cause: LossCause::Ended("killed by signal 9".into()),
    };
    if let Some(aggregator) = &mut job.aggregators[8] {
        aggregator.handle_peer_lost(Time(0), &lost);
    }
    job.settle();
    for rank in (0..SIZE).filter(|rank| *rank != 9) {
        let last = job.done[rank as usize].last();
        assert_eq!(last, Some(&WorkerAction::Abort(lost.clone())), "{rank}");
    }
    assert!(
        job.error(11, id)
            .to_string()
            .ends_with("rank 9 on h4: killed by signal 9")
    );
}

#[test]
fn a_rank_that_cannot_go_on_tells_everybody_why() {
    let mut job = TreeJob::new();
    let lost = PeerLost {
        rank: Rank(9),
        host: "h4".into(),
        cause: LossCause::Ended("out of memory".into()),
    };
    job.workers[9].report_lost(lost.clone());
    job.settle();
    for done in &job.done {
        assert_eq!(done.last(), Some(&WorkerAction::Abort(lost.clone())));
    }
}

#[test]
fn an_aggregator_accuses_the_rank_below_it_that_breaks_the_rules() {
    let mut job = TreeJob::new();
    job.submit_all(&sum("x", &[1]));
    job.settle();
    let run = SlotRun {
        first: Slot(0),
        len: 1,
    };
    let message = rogue(vec![Submission::Hits(run), Submission::Hits(run)]);
    if let Some(aggregator) = &mut job.aggregators[8] {
        aggregator.handle_up(Time(0), Rank(9), &message);
    }
    job.settle();
    let [CoordinatorAction::Abort(lost)] = &job.notes[..] else {
        panic!("{:?}", job.notes)
    };
    assert_eq!(lost.rank, Rank(9));
    for rank in (0..SIZE).filter(|rank| *rank != 9) {
        let last = job.done[rank as usize].last();
        assert_eq!(last, Some(&WorkerAction::Abort(lost.clone())));
    }
}

#[test]
fn a_set_that_is_all_below_one_child_has_its_last_rank_counted_there() {
    let mut job = TreeJob::new();
    job.coordinator.count_lateness();
    for aggregator in job.aggregators.iter_mut().flatten() {
        aggregator.count_lateness();
    }
    let ranks = [2, 3].map(Rank).to_vec();
    let ids = job.submit_all(&plain("add", Op::AddProcessSet { ranks }));
    job.settle();
    let added = job.done[0].iter().find_map(|action| match action {
        WorkerAction::Complete(id, Ok(Completion::SetAdded(set))) if *id == ids[0] => Some(*set),
        _ => None,
    });
    let set = added.expect("a set");
    for round in 0..2 {
        job.submit(2, &on(set, sum("x", &[1])));
        job.settle();
        job.now += 50;
        job.submit(3, &on(set, sum("x", &[1])));
        job.settle();
        let sum = |late: Vec<SetLateness>| late.iter().map(|of| of.lateness.awaited_ns).sum();
        let behind: u64 = sum(job.coordinator.lateness_behind(Rank(3)));
        let below: u64 = job.aggregators[2]
            .as_ref()
            .map_or(0, |a| sum(a.lateness(Rank(3))));
        // The coordinator sees who asks for what is new; what is known reaches it when both have asked.
        assert_eq!((behind, below), (50, 50 * round));
        let compared = job.coordinator.compared_sets();
        assert!(compared.iter().all(|set| *set == SetKey(0)), "{compared:?}");
    }
}

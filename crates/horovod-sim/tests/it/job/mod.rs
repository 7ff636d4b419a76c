//! A job whose messages move when the story says so.

use horovod_protocol::*;
use std::collections::VecDeque;
use std::sync::Arc;

/// Workers, coordinator, and what is on its way between them.
pub(crate) struct Job {
    pub(crate) workers: Vec<Worker>,
    pub(crate) coordinator: Coordinator,
    pub(crate) now: u64,
    pub(crate) up: Vec<VecDeque<ToCoordinator>>,
    pub(crate) down: Vec<VecDeque<ToWorker>>,
    /// Actions of each worker except `Send`.
    pub(crate) done: Vec<Vec<WorkerAction>>,
    /// Actions of the coordinator except `Send`.
    pub(crate) notes: Vec<CoordinatorAction>,
    next_entry: u64,
}

pub(crate) const GENERATION: Generation = Generation(3);

impl Job {
    pub(crate) fn new(size: u32) -> Self {
        Self::with(CoordinatorConfig::new(size, GENERATION))
    }

    pub(crate) fn with(config: CoordinatorConfig) -> Self {
        let worker = |rank| WorkerConfig {
            rank: Rank(rank),
            size: config.size,
            generation: GENERATION,
        };
        Self {
            workers: (0..config.size)
                .map(|rank| Worker::new(worker(rank)))
                .collect(),
            now: 0,
            up: vec![VecDeque::new(); config.size as usize],
            down: vec![VecDeque::new(); config.size as usize],
            done: vec![Vec::new(); config.size as usize],
            notes: Vec::new(),
            next_entry: 0,
            coordinator: Coordinator::new(config),
        }
    }

    /// Submits on one rank; its messages wait on the link.
    pub(crate) fn try_submit(&mut self, rank: usize, request: Request) -> Result<EntryId, OpError> {
        self.next_entry += 1;
        let id = EntryId(self.next_entry);
        self.workers[rank].submit(id, &request)?;
        Ok(id)
    }

    pub(crate) fn submit(&mut self, rank: usize, request: Request) -> EntryId {
        self.try_submit(rank, request).expect("a valid request")
    }

    /// Submits on every rank.
    pub(crate) fn submit_all(&mut self, request: &Request) -> Vec<EntryId> {
        (0..self.workers.len())
            .map(|rank| self.submit(rank, request.clone()))
            .collect()
    }

    pub(crate) fn drain(&mut self) {
        for (rank, worker) in self.workers.iter_mut().enumerate() {
            while let Some(action) = worker.poll_action() {
                match action {
                    WorkerAction::Send(message) => self.up[rank].push_back(recoded_up(&message)),
                    other => self.done[rank].push(other),
                }
            }
        }
        while let Some(action) = self.coordinator.poll_action() {
            match action {
                CoordinatorAction::Send(to, message) => {
                    for rank in to.iter() {
                        self.down[rank.index()].push_back(recoded_down(&message));
                    }
                }
                other => self.notes.push(other),
            }
        }
    }

    /// Delivers what a rank has sent.
    pub(crate) fn deliver_up(&mut self, rank: usize) {
        self.drain();
        for message in std::mem::take(&mut self.up[rank]) {
            self.coordinator
                .handle_message(Time(self.now), Rank(rank as u32), &message);
        }
        self.drain();
    }

    /// Delivers what a rank was sent.
    pub(crate) fn deliver_down(&mut self, rank: usize) {
        self.drain();
        for message in std::mem::take(&mut self.down[rank]) {
            self.workers[rank].handle_message(&message);
        }
        self.drain();
    }

    /// Delivers everything until nothing is on its way.
    pub(crate) fn settle(&mut self) {
        self.drain();
        while self.up.iter().any(|l| !l.is_empty()) || self.down.iter().any(|l| !l.is_empty()) {
            for rank in 0..self.workers.len() {
                self.deliver_up(rank);
            }
            for rank in 0..self.workers.len() {
                self.deliver_down(rank);
            }
        }
    }

    pub(crate) fn wait_until(&mut self, now: u64) {
        self.now = now;
        self.coordinator.handle_timeout(Time(now));
        self.settle();
    }

    /// How an entry ended without data, if it did.
    pub(crate) fn completion(
        &self,
        rank: usize,
        id: EntryId,
    ) -> Option<Result<Completion, OpError>> {
        self.done[rank].iter().find_map(|action| match action {
            WorkerAction::Complete(found, result) if *found == id => Some(result.clone()),
            _ => None,
        })
    }

    /// The error that an entry ended with.
    #[track_caller]
    pub(crate) fn error(&self, rank: usize, id: EntryId) -> OpError {
        self.completion(rank, id)
            .expect("it ended")
            .expect_err("it failed")
    }

    pub(crate) fn executions(&self, rank: usize) -> Vec<&Execution> {
        let mut executions = Vec::new();
        for action in &self.done[rank] {
            if let WorkerAction::Execute(execution) = action {
                executions.push(execution);
            }
        }
        executions
    }

    /// Names per execution.
    pub(crate) fn ran(&self, rank: usize) -> Vec<Vec<String>> {
        let names = |e: &&Execution| e.items.iter().map(|i| i.name.to_string()).collect();
        self.executions(rank).iter().map(names).collect()
    }

    /// The execution that an entry ended in.
    #[track_caller]
    pub(crate) fn execution_of(&self, rank: usize, id: EntryId) -> &Execution {
        let has = |e: &&&Execution| e.items.iter().any(|item| item.entry == Some(id));
        self.executions(rank).iter().find(has).expect("it ran")
    }

    /// Adds a set on all ranks.
    pub(crate) fn add_set(&mut self, ranks: &[u32]) -> ProcessSetId {
        let ranks = ranks.iter().map(|r| Rank(*r)).collect();
        let ids = self.submit_all(&plain("add", Op::AddProcessSet { ranks }));
        self.settle();
        match self.completion(0, ids[0]) {
            Some(Ok(Completion::SetAdded(id))) => id,
            other => panic!("no set but {other:?}"),
        }
    }
}

pub(crate) fn recoded_up(message: &ToCoordinator) -> ToCoordinator {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    ToCoordinator::decode(&bytes).expect("our own message")
}

pub(crate) fn recoded_down(message: &ToWorker) -> ToWorker {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    ToWorker::decode(&bytes).expect("our own message")
}

pub(crate) fn plain(name: &str, op: Op) -> Request {
    Request {
        set: ProcessSetId::GLOBAL,
        name: name.into(),
        op,
        device: Device::Cpu,
        tensors: Vec::new(),
    }
}

pub(crate) fn data(name: &str, op: Op, shape: &[u64]) -> Request {
    let tensors = vec![TensorMeta::new(DType::F32, shape)];
    Request {
        tensors,
        ..plain(name, op)
    }
}

pub(crate) fn sum(name: &str, shape: &[u64]) -> Request {
    data(
        name,
        Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale::NONE,
        },
        shape,
    )
}

pub(crate) fn join() -> Request {
    plain("join.noname", Op::Join)
}

pub(crate) fn barrier() -> Request {
    plain("barrier.noname", Op::Barrier)
}

pub(crate) fn on(set: ProcessSetId, request: Request) -> Request {
    Request { set, ..request }
}

/// A message of a rank that keeps no rules.
pub(crate) fn rogue(items: Vec<Submission>) -> ToCoordinator {
    ToCoordinator {
        generation: GENERATION,
        seen: 0,
        items,
    }
}

pub(crate) fn new(set: u64, name: &str, op: Op) -> Submission {
    let signature = RequestSignature {
        op,
        device: Device::Cpu,
        tensors: [].into(),
    };
    Submission::New {
        set: SetKey(set),
        name: name.into(),
        signature: Arc::new(signature),
    }
}

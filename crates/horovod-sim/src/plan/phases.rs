//! Phases of a plan: ordinary work, joins, changes of the process sets, work that never finishes.

use super::requests::{has_own_rows, mistake, own_form, random};
use super::{Expected, RequestPhase};
use crate::rng::Rng;
use horovod_protocol::{Device, MemoryOrder, Op, OpErrorKind, ProcessSetId, Rank, Request, Shape};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Keeps track of what the ranks have agreed on so far.
pub(super) struct Maker {
    size: u32,
    items_max: usize,
    sets: BTreeMap<ProcessSetId, Vec<Rank>>,
    next_id: u32,
    free_ids: VecDeque<ProcessSetId>,
    /// Last agreed request by set and name, so that later phases repeat it and hit the cache.
    known: BTreeMap<(ProcessSetId, String), Request>,
}

/// One item while it is being made: who asks for what.
struct Draft {
    asked: Vec<(Rank, Request)>,
    expected: Expected,
}

impl Maker {
    pub(super) fn new(size: u32, items_max: usize) -> Self {
        Self {
            size,
            items_max,
            sets: BTreeMap::from([(ProcessSetId::GLOBAL, (0..size).map(Rank).collect())]),
            next_id: 1,
            free_ids: VecDeque::new(),
            known: BTreeMap::new(),
        }
    }

    pub(super) fn any_phase(&mut self, rng: &mut Rng) -> RequestPhase {
        match rng.below(10) {
            0..=5 => {
                let drafts = self.work(rng, None);
                self.phase(rng, drafts, &[])
            }
            6 | 7 => self.join_phase(rng),
            _ => self.set_phase(rng),
        }
    }

    /// A barrier of all ranks and nothing else.
    pub(super) fn common_phase(&mut self, rng: &mut Rng) -> RequestPhase {
        let barrier = self.plain("barrier.noname", Op::Barrier);
        let asked = (0..self.size)
            .map(|rank| (Rank(rank), barrier.clone()))
            .collect();
        self.phase(
            rng,
            vec![Draft {
                asked,
                expected: Expected::Done,
            }],
            &[],
        )
    }

    /// Work that lacks a member each, so that only the shutdown ends it.
    pub(super) fn unfinished_phase(&mut self, rng: &mut Rng) -> RequestPhase {
        let mut drafts = self.work(rng, None);
        drafts.retain_mut(|draft| {
            draft.expected = Expected::Fail {
                kind: OpErrorKind::Shutdown,
                text: "has been shut down".into(),
            };
            let gone = rng.index(draft.asked.len());
            draft.asked.remove(gone);
            !draft.asked.is_empty()
        });
        self.phase(rng, drafts, &[])
    }

    /// Requests that all members make, some with a mistake by one of them.
    fn work(&mut self, rng: &mut Rng, but_not: Option<ProcessSetId>) -> Vec<Draft> {
        let count = rng.index(self.items_max + 1);
        let ids: Vec<ProcessSetId> = self
            .sets
            .keys()
            .copied()
            .filter(|id| Some(*id) != but_not)
            .collect();
        let mut taken = BTreeSet::new();
        let mut drafts = Vec::new();
        for _ in 0..count {
            let set = if rng.chance(60) {
                ProcessSetId::GLOBAL
            } else {
                *rng.pick(&ids)
            };
            let unnamed = if rng.chance(5) { "noname." } else { "" };
            let name = format!("op.{unnamed}{}", rng.index(self.items_max));
            if taken.insert((set, name.clone())) {
                drafts.push(self.item(rng, set, name));
            }
        }
        drafts
    }

    fn item(&mut self, rng: &mut Rng, set: ProcessSetId, name: String) -> Draft {
        let members = self.sets[&set].clone();
        let key = (set, name);
        let request = match self.known.get(&key) {
            Some(request) if rng.chance(85) => request.clone(),
            _ => random(rng, set, &members, &key.1),
        };
        let mut asked: Vec<(Rank, Request)> = members
            .iter()
            .map(|rank| (*rank, own_form(rng, &request)))
            .collect();
        let expected = if members.len() > 1 && rng.chance(15) {
            let wrong = rng.index(members.len());
            let text = mistake(rng, &mut asked[wrong].1, &members);
            Expected::Fail {
                kind: OpErrorKind::Precondition,
                text: text.into(),
            }
        } else if has_own_rows(&request.op) && rng.chance(5) {
            // Everybody brings a tensor without rows.
            for (_, request) in &mut asked {
                request
                    .tensors
                    .iter_mut()
                    .for_each(|tensor| tensor.shape = Shape::default());
            }
            Expected::Fail {
                kind: OpErrorKind::Precondition,
                text: "a rank-zero tensor".into(),
            }
        } else if request.op == Op::Barrier {
            Expected::Done
        } else {
            self.known.insert(key, request);
            Expected::Run {
                contributors: members.len() as u32,
            }
        };
        Draft { asked, expected }
    }

    /// Every rank leaves some work out and joins.
    fn join_phase(&mut self, rng: &mut Rng) -> RequestPhase {
        let mut drafts = self.work(rng, None);
        for draft in &mut drafts {
            let members = draft.asked.len();
            let wrong = Request::clone(&draft.asked[0].1);
            draft.asked.retain(|_| rng.chance(70));
            let present = draft.asked.len();
            if present == members || present == 0 {
                continue;
            }
            let agree = draft
                .asked
                .windows(2)
                .all(|pair| alike(&pair[0].1, &pair[1].1));
            if !agree {
                continue;
            }
            let rest = draft.asked.first().map_or(&wrong, |(_, request)| request);
            draft.expected = match &rest.op {
                Op::Allreduce { .. } => Expected::Run {
                    contributors: present as u32,
                },
                Op::Barrier => Expected::Done,
                _ => Expected::Fail {
                    kind: OpErrorKind::Precondition,
                    text: "is not supported with Join at this time".into(),
                },
            };
        }
        let join = self.plain("join.noname", Op::Join);
        let asked = (0..self.size)
            .map(|rank| (Rank(rank), join.clone()))
            .collect();
        self.phase(
            rng,
            drafts,
            &[Draft {
                asked,
                expected: Expected::Joined,
            }],
        )
    }

    /// A set comes or goes while there is other work.
    fn set_phase(&mut self, rng: &mut Rng) -> RequestPhase {
        if rng.chance(60) {
            self.add_phase(rng)
        } else {
            self.remove_phase(rng)
        }
    }

    fn add_phase(&mut self, rng: &mut Rng) -> RequestPhase {
        let mut drafts = self.work(rng, None);
        let mut ranks: Vec<Rank> = (0..self.size)
            .map(Rank)
            .filter(|_| rng.chance(50))
            .collect();
        if ranks.is_empty() {
            ranks.push(Rank(rng.below(u64::from(self.size)) as u32));
        }
        let add = self.plain(
            "set",
            Op::AddProcessSet {
                ranks: ranks.clone(),
            },
        );
        let mut asked: Vec<(Rank, Request)> = (0..self.size)
            .map(|rank| (Rank(rank), add.clone()))
            .collect();
        let expected = if self.size > 1 && rng.chance(15) {
            let other = if ranks == [Rank(0)] { Rank(1) } else { Rank(0) };
            let wrong = rng.index(asked.len());
            asked[wrong].1.op = Op::AddProcessSet { ranks: vec![other] };
            let text = "Attempted to register process set with mismatching".into();
            Expected::Fail {
                kind: OpErrorKind::Precondition,
                text,
            }
        } else if self.sets.values().any(|set| *set == ranks) {
            let text = "Attempted to add a duplicate process set".into();
            Expected::Fail {
                kind: OpErrorKind::InvalidArgument,
                text,
            }
        } else {
            let id = self.free_ids.pop_front().unwrap_or_else(|| {
                self.next_id += 1;
                ProcessSetId(self.next_id - 1)
            });
            self.sets.insert(id, ranks);
            Expected::SetAdded(id)
        };
        drafts.push(Draft { asked, expected });
        self.phase(rng, drafts, &[])
    }

    fn remove_phase(&mut self, rng: &mut Rng) -> RequestPhase {
        let ids: Vec<ProcessSetId> = self.sets.keys().copied().collect();
        let set = if rng.chance(80) {
            *rng.pick(&ids)
        } else {
            ProcessSetId(77)
        };
        let removable = set != ProcessSetId::GLOBAL && self.sets.contains_key(&set);
        let mut drafts = self.work(rng, removable.then_some(set));
        if removable {
            // Somebody is still waiting for the others on this set, also for what is cached.
            for number in 0..rng.index(self.items_max) {
                let mut draft = self.item(rng, set, format!("op.{number}"));
                let gone = rng.index(draft.asked.len());
                draft.asked.remove(gone);
                let text = "Process set has been removed".into();
                draft.expected = Expected::Fail {
                    kind: OpErrorKind::Aborted,
                    text,
                };
                drafts.push(draft);
            }
            self.sets.remove(&set);
            self.free_ids.push_back(set);
            self.known.retain(|(id, _), _| *id != set);
        }
        let remove = self.plain("set", Op::RemoveProcessSet { set });
        let asked = (0..self.size)
            .map(|rank| (Rank(rank), remove.clone()))
            .collect();
        drafts.push(Draft {
            asked,
            expected: Expected::SetRemoved(removable),
        });
        self.phase(rng, drafts, &[])
    }

    fn plain(&self, name: &str, op: Op) -> Request {
        Request {
            set: ProcessSetId::GLOBAL,
            name: name.into(),
            op,
            device: Device::Cpu,
            tensors: Vec::new(),
        }
    }

    /// Puts drafts into the order in which each rank asks; `last` come after all others.
    fn phase(&self, rng: &mut Rng, drafts: Vec<Draft>, last: &[Draft]) -> RequestPhase {
        let mut steps: Vec<Vec<(usize, Request)>> = vec![Vec::new(); self.size as usize];
        let same_order = rng.chance(50);
        let mut expected = Vec::new();
        for draft in &drafts {
            for (rank, request) in &draft.asked {
                steps[rank.index()].push((expected.len(), request.clone()));
            }
            expected.push(draft.expected.clone());
        }
        if !same_order {
            steps.iter_mut().for_each(|steps| rng.shuffle(steps));
        }
        for draft in last {
            for (rank, request) in &draft.asked {
                steps[rank.index()].push((expected.len(), request.clone()));
            }
            expected.push(draft.expected.clone());
        }
        RequestPhase { steps, expected }
    }
}

/// Equal, but for rows and memory orders that are each rank's own.
fn alike(a: &Request, b: &Request) -> bool {
    let strip = |request: &Request| {
        let mut request = request.clone();
        for tensor in &mut request.tensors {
            tensor.order = MemoryOrder::ROW_MAJOR;
            if has_own_rows(&request.op)
                && let Some(rows) = tensor.shape.first_mut()
            {
                *rows = 0;
            }
        }
        request
    };
    strip(a) == strip(b)
}

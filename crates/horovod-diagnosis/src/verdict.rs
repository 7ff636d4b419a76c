//! The verdict from two looks at the ranks: who holds up whom, and whether that can ever end. Pure.

use std::collections::{BTreeMap, BTreeSet};

use horovod_protocol::{Rank, StalledRequest};

use super::{DeviceStanding, Key, Standing};

/// A rank computes if its threads were runnable for one part in this many of the time between the looks.
const BUSY_PART: u64 = 5;
/// The same of a rank with threads that nobody sees. Only idleness shows that such a rank waits. So a smaller part counts
/// as work here. One that waits is runnable for a part in 1000.
const BUSY_PART_UNSEEN: u64 = 20;

/// Observations at one time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observation {
    /// In milliseconds, of any clock.
    pub(crate) at_ms: u64,
    /// Operations that some ranks wait for.
    pub(crate) late: Late,
    /// The asked ranks, with their answers if those came in time.
    pub(crate) answers: BTreeMap<Rank, Option<Standing>>,
}

/// Operations that have taken long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Late {
    /// Requests that some members have made and others have not.
    pub requests: Vec<StalledRequest>,
    /// A collective of rank 0 that all have agreed on and that does not end; `missing` are its other members.
    pub running: Option<StalledRequest>,
}

impl Late {
    pub(crate) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.running.is_none()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &StalledRequest> {
        self.requests.iter().chain(&self.running)
    }

    /// Keep those for which this holds.
    pub(crate) fn retain(&mut self, keep: impl Fn(&StalledRequest) -> bool) {
        self.requests.retain(&keep);
        self.running = self.running.take().filter(keep);
    }
}

/// Why a rank does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AbsenceKind {
    /// It waits for another operation, which others have not asked for.
    Diverged,
    /// It neither computes nor waits for an operation of ours.
    Elsewhere,
    /// It computes, or has moved on since the first look.
    Busy,
    /// It does not answer.
    Silent,
}

/// A rank for which others wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Culprit {
    pub(crate) rank: Rank,
    pub(crate) kind: AbsenceKind,
    /// Keys that the others wait for.
    pub(crate) lacks: Vec<Key>,
    pub(crate) standing: Option<Standing>,
}

impl Culprit {
    /// Whether it says so itself, and not only its idleness.
    fn is_seen_to_wait(&self) -> bool {
        self.standing.as_ref().is_some_and(|s| s.blocked)
    }
}

/// Conclusion from two observations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    pub(crate) late: Late,
    /// Those that hold the others up, of those that were asked; by rank.
    pub(crate) culprits: Vec<Culprit>,
    /// Ranks that others wait for, but that were not asked because there are so many.
    pub(crate) unasked: usize,
    /// One of those that wait.
    pub(crate) witness: Option<(Rank, Standing)>,
    /// Operations that can never complete: every rank that such an operation lacks waits, in the end, for it.
    pub(crate) deadlocked: Vec<Key>,
    /// Those of `deadlocked` whose proof needs no rank's idleness.
    pub(crate) proven: Vec<Key>,
}

impl Diagnosis {
    /// The first of the ranks that hold the others up.
    pub fn to_blame(&self) -> Option<Rank> {
        self.culprits.first().map(|culprit| culprit.rank)
    }

    /// Whether some operations can never complete.
    pub fn is_deadlock(&self) -> bool {
        !self.deadlocked.is_empty()
    }
}

/// The key of a request.
pub(crate) fn key(request: &StalledRequest) -> Key {
    (request.set.0, request.name.clone())
}

/// Compare what was seen twice. Only what stood still in between counts.
pub(crate) fn conclude(first: &Observation, second: Observation) -> Diagnosis {
    let before: BTreeSet<Key> = first.late.all().map(key).collect();
    let mut late = second.late;
    late.retain(|request| before.contains(&key(request)));
    let missing: BTreeSet<Rank> = late.all().flat_map(|r| r.missing.clone()).collect();
    let elapsed_ms = second.at_ms.saturating_sub(first.at_ms);
    let mut culprits = Vec::new();
    let mut witness = None;
    let mut asked = 0;
    for (rank, standing) in second.answers {
        let lacks: Vec<Key> = (late.requests.iter())
            .filter(|r| r.missing.contains(&rank))
            .map(key)
            .collect();
        // In the collective that does not end, all that carry it out wait alike.
        let takes_part = standing.as_ref().is_some_and(|s| s.executes) && lacks.is_empty();
        asked += usize::from(missing.contains(&rank));
        if !missing.contains(&rank) || takes_part {
            witness = witness.or_else(|| standing.map(|standing| (rank, standing)));
            continue;
        }
        let earlier = first.answers.get(&rank).and_then(Option::as_ref);
        culprits.push(Culprit {
            rank,
            kind: kind(earlier, standing.as_ref(), elapsed_ms),
            lacks,
            standing,
        });
    }
    let seen = culprits.iter().filter(|culprit| culprit.is_seen_to_wait());
    let proven = deadlocked(&late.requests, seen);
    let deadlocked = deadlocked(&late.requests, &culprits);
    Diagnosis {
        late,
        culprits,
        unasked: missing.len() - asked,
        witness,
        deadlocked,
        proven,
    }
}

fn kind(first: Option<&Standing>, second: Option<&Standing>, elapsed_ms: u64) -> AbsenceKind {
    let Some(now) = second else {
        return AbsenceKind::Silent;
    };
    let Some(before) = first else {
        return AbsenceKind::Busy;
    };
    let runnable_ms = now.runnable_ms.saturating_sub(before.runnable_ms);
    let same_waits = now.waits_for == before.waits_for && now.untold == before.untold;
    let may_wait = waits_if_idle(before) && waits_if_idle(now);
    let part = if may_wait {
        BUSY_PART_UNSEEN
    } else {
        BUSY_PART
    };
    if now.submitted != before.submitted || now.executes || before.executes {
        AbsenceKind::Busy
    } else if now.blocked && before.blocked && same_waits {
        AbsenceKind::Diverged
    } else if runnable_ms.saturating_mul(part) >= elapsed_ms {
        AbsenceKind::Busy
    } else if may_wait && same_waits {
        // No thread tells what it waits for. If no thread computes, Horovod assumes that all wait for these operations.
        AbsenceKind::Diverged
    } else {
        AbsenceKind::Elsewhere
    }
}

/// As it says, unless its GPU has something in hand, which may go on without these operations.
fn waits_if_idle(standing: &Standing) -> bool {
    let is_idle = |device: &DeviceStanding| device.at.is_none();
    standing.waits_if_idle && standing.device.as_ref().is_none_or(is_idle)
}

/// All that a rank waits for; `None` if some of it is unknown. A long list is not told in full, but rank 0 has counted
/// for itself who asked for what is late.
fn awaited(rank: Rank, standing: &Standing, requests: &[StalledRequest]) -> Option<Vec<Key>> {
    if standing.untold == 0 {
        return Some(standing.waits_for.clone());
    }
    let asked = requests.iter().filter(|r| r.waiting.contains(&rank));
    let keys: Vec<Key> = asked.map(key).collect();
    let all = standing
        .untold
        .saturating_add(standing.waits_for.len() as u64);
    (keys.len() as u64 >= all).then_some(keys)
}

/// Returns the requests that wait in a circle: all but the least set that can complete. A request can complete if every
/// rank that it lacks can come. A rank can come if it does not wait, or if one of the requests that it waits for can
/// complete.
fn deadlocked<'a>(
    requests: &[StalledRequest],
    culprits: impl IntoIterator<Item = &'a Culprit>,
) -> Vec<Key> {
    let known: Vec<(Rank, Vec<Key>)> = (culprits.into_iter())
        .filter(|culprit| culprit.kind == AbsenceKind::Diverged)
        .filter_map(|culprit| {
            let standing = culprit.standing.as_ref()?;
            Some((culprit.rank, awaited(culprit.rank, standing, requests)?))
        })
        .collect();
    let waits_for = known.iter().map(|(rank, keys)| (*rank, &**keys)).collect();
    let missing = requests
        .iter()
        .map(|request| (key(request), request.missing.clone()))
        .collect();
    stuck(&missing, &waits_for).into_iter().collect()
}

/// Which of the requests, each with the ranks it lacks, can never complete, going by what ranks are known to wait for.
pub(super) fn stuck(
    missing: &BTreeMap<Key, Vec<Rank>>,
    waits_for: &BTreeMap<Rank, &[Key]>,
) -> BTreeSet<Key> {
    let mut stuck: BTreeSet<Key> = missing.keys().cloned().collect();
    loop {
        let can_come = |rank: &Rank| {
            waits_for.get(rank).is_none_or(|keys| {
                // A request not known to be stuck may complete any moment.
                keys.is_empty() || keys.iter().any(|key| !stuck.contains(key))
            })
        };
        let freed = missing
            .iter()
            .filter(|(key, _)| stuck.contains(*key))
            .find(|(_, missing)| missing.iter().all(can_come))
            .map(|(key, _)| key.clone());
        match freed {
            Some(freed) => stuck.remove(&freed),
            None => return stuck,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use horovod_protocol::ProcessSetId;
    use proptest::prelude::*;

    use super::*;

    fn request(name: &str, waiting: &[u32], missing: &[u32]) -> StalledRequest {
        StalledRequest {
            set: ProcessSetId(0),
            name: Arc::from(name),
            waiting: waiting.iter().copied().map(Rank).collect(),
            missing: missing.iter().copied().map(Rank).collect(),
            waited_ns: 1,
        }
    }

    fn waits_for(names: &[&str]) -> Option<Standing> {
        Some(Standing {
            blocked: true,
            waits_for: names.iter().map(|n| (0, Arc::from(*n))).collect(),
            ..Standing::default()
        })
    }

    fn computes(runnable_ms: u64) -> Option<Standing> {
        Some(Standing {
            runnable_ms,
            ..Standing::default()
        })
    }

    fn observe(
        at_ms: u64,
        requests: &[StalledRequest],
        answers: Vec<(u32, Option<Standing>)>,
    ) -> Observation {
        Observation {
            at_ms,
            late: Late {
                requests: requests.to_vec(),
                running: None,
            },
            answers: answers.into_iter().map(|(r, s)| (Rank(r), s)).collect(),
        }
    }

    fn twice(requests: &[StalledRequest], answers: Vec<(u32, Option<Standing>)>) -> Diagnosis {
        conclude(
            &observe(0, requests, answers.clone()),
            observe(5000, requests, answers),
        )
    }

    fn kinds(diagnosis: &Diagnosis) -> Vec<(u32, AbsenceKind)> {
        (diagnosis.culprits.iter())
            .map(|c| (c.rank.0, c.kind))
            .collect()
    }

    fn called_back(names: &[&str], runnable_ms: u64) -> Option<Standing> {
        Some(Standing {
            waits_if_idle: true,
            blocked: false,
            runnable_ms,
            ..waits_for(names)?
        })
    }

    #[test]
    fn operations_with_callbacks_are_waited_for_by_a_rank_that_does_not_compute() {
        let requests = [request("a", &[0], &[1]), request("b", &[1], &[0])];
        let d = twice(
            &requests,
            vec![(0, called_back(&["a"], 0)), (1, waits_for(&["b"]))],
        );
        assert_eq!(
            kinds(&d),
            [(0, AbsenceKind::Diverged), (1, AbsenceKind::Diverged)]
        );
        assert_eq!(d.deadlocked.len(), 2);
    }

    #[test]
    fn a_rank_that_computes_or_submits_is_never_taken_for_one_that_waits() {
        let requests = [request("a", &[0], &[1]), request("b", &[1], &[0])];
        let of = |zero: Option<Standing>| vec![(0, zero), (1, waits_for(&["b"]))];
        let submits = |standing: Option<Standing>| standing.map(|s| Standing { submitted: 1, ..s });
        // Two looks at a distance of five seconds; a fifth of a core is computing.
        let first = observe(0, &requests, of(called_back(&["a"], 0)));
        for later in [
            called_back(&["a"], 1000),
            submits(called_back(&["a"], 0)),
            called_back(&["c"], 0),
        ] {
            let d = conclude(&first, observe(5000, &requests, of(later)));
            assert_ne!(kinds(&d)[0], (0, AbsenceKind::Diverged));
            assert_eq!(d.deadlocked, []);
        }
    }

    #[test]
    fn two_orders_never_resolve() {
        let requests = [request("a", &[0], &[1]), request("b", &[1], &[0])];
        let d = twice(
            &requests,
            vec![(0, waits_for(&["a"])), (1, waits_for(&["b"]))],
        );
        assert_eq!(
            kinds(&d),
            [(0, AbsenceKind::Diverged), (1, AbsenceKind::Diverged)]
        );
        assert_eq!(d.deadlocked.len(), 2);
        assert_eq!(d.culprits[1].lacks, [(0, Arc::from("a"))]);
    }

    #[test]
    fn who_has_submitted_something_else_too_may_still_come() {
        // Rank 1 waits for b only after it has asked for a: a runs, then all goes on.
        let requests = [request("b", &[1], &[0])];
        let d = twice(
            &requests,
            vec![(0, waits_for(&["a"])), (1, waits_for(&["b"]))],
        );
        assert_eq!(d.deadlocked, []);
    }

    #[test]
    fn one_rank_that_moves_gives_hope_to_all_that_wait_for_it_in_turn() {
        let requests = [
            request("a", &[0], &[1]),
            request("b", &[1], &[2]),
            request("c", &[3], &[0]),
        ];
        let standing = |two| {
            vec![
                (0, waits_for(&["a"])),
                (1, waits_for(&["b"])),
                (2, two),
                (3, waits_for(&["c"])),
            ]
        };
        assert_eq!(twice(&requests, standing(computes(3))).deadlocked, []);
        assert_eq!(twice(&requests, standing(None)).deadlocked, []);
        let d = twice(&requests, standing(waits_for(&["c"])));
        assert_eq!(d.deadlocked.len(), 3);
    }

    #[test]
    fn several_threads_of_a_rank_are_stuck_only_together() {
        let requests = [request("a", &[0], &[1]), request("b", &[1], &[0])];
        let one = waits_for(&["b", "elsewhere"]);
        let d = twice(&requests, vec![(0, waits_for(&["a"])), (1, one)]);
        assert_eq!(d.deadlocked, []);
    }

    #[test]
    fn ranks_that_compute_wait_elsewhere_or_do_not_answer_are_told_apart() {
        let requests = [request("a", &[3], &[0, 1, 2, 4])];
        let first = vec![
            (0, computes(0)),
            (1, computes(10)),
            (2, computes(0)),
            (4, computes(7)),
        ];
        let second = vec![
            (0, computes(4000)),
            (1, computes(11)),
            (2, None),
            (3, waits_for(&["a"])),
            (
                4,
                Some(Standing {
                    submitted: 1,
                    ..Standing::default()
                }),
            ),
        ];
        let d = conclude(
            &observe(0, &requests, first),
            observe(5000, &requests, second),
        );
        assert_eq!(
            kinds(&d),
            [
                (0, AbsenceKind::Busy),
                (1, AbsenceKind::Elsewhere),
                (2, AbsenceKind::Silent),
                (4, AbsenceKind::Busy)
            ]
        );
        assert_eq!(d.witness.as_ref().map(|(rank, _)| *rank), Some(Rank(3)));
        assert_eq!(d.deadlocked, []);
    }

    #[test]
    fn what_came_up_between_the_looks_is_no_stall_yet() {
        let first = observe(0, &[request("a", &[0], &[1])], vec![(1, waits_for(&["b"]))]);
        let second = observe(9, &[request("b", &[1], &[0])], vec![(0, waits_for(&["a"]))]);
        let d = conclude(&first, second);
        assert_eq!((d.late.is_empty(), d.deadlocked.len()), (true, 0));
    }

    #[test]
    fn in_a_collective_that_does_not_end_only_who_does_not_carry_it_out_is_to_blame() {
        let takes_part = || {
            Some(Standing {
                executes: true,
                ..Standing::default()
            })
        };
        let answers = vec![(0, takes_part()), (1, takes_part()), (2, None)];
        let mut first = observe(0, &[], answers);
        first.late.running = Some(request("a", &[0], &[1, 2]));
        let mut second = first.clone();
        second.at_ms = 5000;
        let d = conclude(&first, second);
        assert_eq!(kinds(&d), [(2, AbsenceKind::Silent)]);
        assert_eq!((d.unasked, d.deadlocked.len()), (0, 0));
    }

    #[test]
    fn those_not_asked_are_counted_and_may_always_come() {
        let requests = [request("a", &[0], &[1, 2]), request("b", &[1], &[0])];
        let d = twice(
            &requests,
            vec![(0, waits_for(&["a"])), (1, waits_for(&["b"]))],
        );
        assert_eq!(d.unasked, 1);
        // Whatever rank 2 does: ranks 0 and 1 wait for each other.
        assert_eq!(d.deadlocked.len(), 2);
    }

    proptest! {
        /// Against a plain simulation: let whatever can complete complete, ranks that move submit everything.
        #[test]
        fn deadlocked_is_what_no_run_can_complete(
            waits in prop::collection::vec(prop::option::of(0usize..5), 2..6),
            lacks in prop::collection::vec(prop::collection::btree_set(0u32..6, 1..4), 5),
        ) {
            let ranks = waits.len() as u32;
            let names = ["a", "b", "c", "d", "e"];
            let requests: Vec<_> = names.iter().zip(&lacks).map(|(name, lacks)| {
                let missing: Vec<u32> = lacks.iter().copied().map(|r| r % ranks).collect::<BTreeSet<_>>().into_iter().collect();
                request(name, &[], &missing)
            }).collect();
            let answers = (0..ranks).map(|r| {
                (r, waits[r as usize].map_or(computes(0), |n| waits_for(&[names[n]])))
            }).collect();
            let d = twice(&requests, answers);
            let mut done = [false; 5];
            loop {
                let free = |r: &Rank| waits[r.index()].is_none_or(|n| done[n]);
                let next = (0..5).find(|i| !done[*i] && requests[*i].missing.iter().all(free));
                let Some(i) = next else { break };
                done[i] = true;
            }
            let never: Vec<Key> = (0..5).filter(|i| !done[*i]).map(|i| key(&requests[i])).collect();
            prop_assert_eq!(d.deadlocked, never);
        }
    }
}

//! The end of soft waits that could never be over otherwise: when rank 0 looks, whom it asks, what proves it. Pure.
//!
//! A rank that has waited softly for a while says so. Nothing more happens until something is pending that a rank
//! which waits softly has not asked for. Then rank 0 asks the ranks that hold up others what they wait for. If their
//! answers close a circle, it asks again, and also whether they have begun what the circle says that they lack. That
//! request may be on its way, or an aggregator may withhold it. A rank of which that is known cannot have moved since:
//! what it waits for was asked for before the second question and is the same request still when all have answered. So
//! the circle is closed for good, unless a soft wait in it ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use horovod_protocol::{Rank, StalledRequest};

use super::verdict::{key, stuck};
use super::{Brief, Key, NAMES_MAX};

const MS: u64 = 1_000_000;
/// From one look to the next at least, in nanoseconds.
const POLL_INTERVAL: u64 = MS;
/// From answers that prove nothing to the next look; then twice as long, and so on.
const PAUSE: u64 = 2 * MS;
const PAUSE_MAX: u64 = 250 * MS;
/// How long answers may take.
const ANSWERS_TIMEOUT: u64 = 500 * MS;
/// Ranks asked for each request: one that stands still is enough to hold it up.
const ASKED_PER_REQUEST_MAX: usize = 8;
/// Ranks asked at a time.
const ASKED_MAX: usize = 128;

/// The coordinator's pending requests.
pub trait Requests {
    /// Whether something may wait for any of these ranks.
    fn lacks_any(&mut self, ranks: &BTreeSet<Rank>) -> bool;
    /// Pending requests, each with a number that no other request ever has.
    fn incomplete(&mut self) -> Vec<(u64, StalledRequest)>;
}

/// Next action.
#[derive(Debug, PartialEq, Eq)]
pub enum SoftStep {
    /// Ask these ranks what they wait for, and whether they have asked for these.
    Ask {
        /// The number of the question.
        question: u64,
        /// The ranks, each with the keys in question.
        ranks: Vec<(Rank, Vec<Key>)>,
    },
    /// End these soft waits.
    LetGo(Vec<LetGo>),
}

/// The end of a soft wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LetGo {
    /// The rank that waits softly.
    pub rank: Rank,
    /// The handle that it waits for.
    pub handle: u64,
    /// The awaited operation, and one rank that waits for it.
    pub name: Arc<str>,
    /// That one.
    pub waits: Rank,
}

/// Rank 0's part.
#[derive(Debug, Default)]
pub struct SoftWatch {
    /// Ranks that have waited softly for a while.
    waiting: BTreeSet<Rank>,
    poll_at: Option<u64>,
    polled_at: u64,
    /// Something has happened since.
    news: bool,
    pause: u64,
    question: u64,
    asked: Option<Asked>,
}

#[derive(Debug)]
struct Asked {
    deadline: u64,
    /// Requests pending when the question was asked.
    before: Vec<(u64, StalledRequest)>,
    /// Keys in the question to each rank; empty in the first question.
    keys: BTreeMap<Rank, Vec<Key>>,
    is_second: bool,
    answers: BTreeMap<Rank, Option<Brief>>,
}

impl SoftWatch {
    /// A rank has waited softly for a while, or does so no more.
    pub fn notice(&mut self, now: u64, rank: Rank, waits: bool) {
        if waits {
            self.waiting.insert(rank);
            self.pause = PAUSE;
            self.poll_by(now);
        } else {
            self.waiting.remove(&rank);
        }
    }

    /// Something may have reached the coordinator.
    #[inline]
    pub fn has_news(&mut self) {
        self.news = true;
    }

    /// Whether anybody waits softly.
    #[inline]
    pub fn is_active(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// When to call [`Self::poll`] at the latest, in nanoseconds.
    pub fn deadline(&self) -> Option<u64> {
        if let Some(asked) = &self.asked {
            let is_complete = asked.answers.values().all(Option::is_some);
            return Some(if is_complete { 0 } else { asked.deadline });
        }
        if self.waiting.is_empty() {
            return None;
        }
        let news = self.news.then_some(self.polled_at + POLL_INTERVAL);
        self.poll_at.or(news)
    }

    fn poll_by(&mut self, at: u64) {
        let at = at.max(self.polled_at + POLL_INTERVAL);
        self.poll_at = Some(self.poll_at.map_or(at, |before| before.min(at)));
    }

    /// A rank has answered.
    pub fn answered(&mut self, question: u64, rank: Rank, brief: Brief) {
        if let Some(asked) = &mut self.asked
            && question == self.question
            && let Some(answer) = asked.answers.get_mut(&rank)
        {
            *answer = Some(brief);
        }
    }

    /// Time has passed.
    pub fn poll(&mut self, now: u64, requests: &mut impl Requests) -> Option<SoftStep> {
        if self.deadline().is_none_or(|at| now < at) {
            return None;
        }
        match self.asked.take() {
            Some(asked) => self.on_answers(now, asked, requests),
            None => self.begin(now, requests),
        }
    }

    fn begin(&mut self, now: u64, requests: &mut impl Requests) -> Option<SoftStep> {
        (self.poll_at, self.polled_at, self.news) = (None, now, false);
        if !requests.lacks_any(&self.waiting) {
            return None;
        }
        let before = requests.incomplete();
        let ranks = whom_to_ask(&before, self.question as usize);
        let keys = ranks.into_iter().map(|rank| (rank, Vec::new())).collect();
        self.ask(now, before, keys, false)
    }

    fn ask(
        &mut self,
        now: u64,
        before: Vec<(u64, StalledRequest)>,
        keys: BTreeMap<Rank, Vec<Key>>,
        is_second: bool,
    ) -> Option<SoftStep> {
        if keys.is_empty() {
            return None;
        }
        self.question += 1;
        let ranks = keys.iter().map(|(rank, keys)| (*rank, keys.clone()));
        let step = SoftStep::Ask {
            question: self.question,
            ranks: ranks.collect(),
        };
        self.asked = Some(Asked {
            deadline: now + ANSWERS_TIMEOUT,
            before,
            answers: keys.keys().map(|rank| (*rank, None)).collect(),
            keys,
            is_second,
        });
        Some(step)
    }

    fn on_answers(
        &mut self,
        now: u64,
        asked: Asked,
        requests: &mut impl Requests,
    ) -> Option<SoftStep> {
        let Asked {
            before,
            keys,
            is_second,
            answers,
            ..
        } = asked;
        let after = requests.incomplete();
        let briefs = answers
            .into_iter()
            .filter_map(|(rank, brief)| Some((rank, brief?)))
            .collect();
        let lacks = |rank: Rank, key: &Key, brief: &Brief| {
            let at = keys
                .get(&rank)
                .and_then(|keys| keys.iter().position(|asked| asked == key));
            !is_second || at.is_some_and(|at| brief.pending.get(at) == Some(&false))
        };
        let circle = Circle::find(&unchanged(&before, &after), &briefs, lacks);
        let Some(circle) = circle else {
            self.poll_by(now + self.pause);
            self.pause = (2 * self.pause).min(PAUSE_MAX);
            return None;
        };
        if !is_second {
            let keys = circle.questions(&after, &self.waiting);
            return self.ask(now, after, keys, true);
        }
        let let_go = circle.let_go(&after, &briefs);
        for end in &let_go {
            self.waiting.remove(&end.rank);
        }
        self.pause = PAUSE;
        self.poll_by(now);
        Some(SoftStep::LetGo(let_go))
    }
}

/// Requests that were pending before and after, as they stood: who had asked for them before, whom they lack now.
fn unchanged(
    before: &[(u64, StalledRequest)],
    after: &[(u64, StalledRequest)],
) -> BTreeMap<Key, StalledRequest> {
    let before: BTreeMap<u64, &StalledRequest> = before.iter().map(|(n, r)| (*n, r)).collect();
    let both = after.iter().filter_map(|(number, after)| {
        let waiting = before.get(number)?.waiting.clone();
        let request = StalledRequest {
            waiting,
            ..after.clone()
        };
        Some((key(after), request))
    });
    both.collect()
}

/// Of the ranks that each request lacks, some that have asked for something else: no others can stand still. With
/// another `round` others, where there are many.
fn whom_to_ask(requests: &[(u64, StalledRequest)], round: usize) -> BTreeSet<Rank> {
    let mut may_wait = BTreeSet::new();
    for (_, request) in requests {
        may_wait.extend(request.waiting.iter().copied());
    }
    let mut seen: BTreeSet<&[Rank]> = BTreeSet::new();
    let mut asked = BTreeSet::new();
    for (_, request) in requests {
        if !seen.insert(&request.missing) {
            continue;
        }
        let candidates: Vec<Rank> = (request.missing.iter().copied())
            .filter(|rank| may_wait.contains(rank))
            .collect();
        let skipped = round * ASKED_PER_REQUEST_MAX % candidates.len().max(1);
        let some = candidates.iter().cycle().skip(skipped);
        asked.extend(some.take(ASKED_PER_REQUEST_MAX.min(candidates.len())));
        if asked.len() >= ASKED_MAX {
            break;
        }
    }
    asked
}

/// Ranks that wait for each other, and how to have one of the requests go on.
struct Circle {
    /// Requests that can never complete, and the stuck ranks that each of them lacks.
    stuck: BTreeMap<Key, Vec<Rank>>,
    /// A request that can complete once these soft waits have ended, with the fewest of them.
    key: Key,
    blockers: Vec<Rank>,
}

impl Circle {
    fn find(
        requests: &BTreeMap<Key, StalledRequest>,
        briefs: &BTreeMap<Rank, Brief>,
        lacks: impl Fn(Rank, &Key, &Brief) -> bool,
    ) -> Option<Self> {
        // A rank's wait counts only if it is for the very request that the coordinator knows.
        let waits: BTreeMap<Rank, Vec<Key>> = briefs
            .iter()
            .filter(|(rank, brief)| {
                let is_known = |key: &Key| {
                    let request = requests.get(key);
                    request.is_some_and(|request| request.waiting.contains(rank))
                };
                brief.blocked && brief.waits_for.iter().all(|(key, _)| is_known(key))
            })
            .map(|(rank, brief)| (*rank, keys_of(brief).cloned().collect()))
            .collect();
        let mut missing: BTreeMap<Key, Vec<Rank>> = BTreeMap::new();
        for key in waits.values().flatten() {
            let Some(request) = requests.get(key) else {
                continue;
            };
            let known = request.missing.iter().copied().filter(|rank| {
                waits.contains_key(rank) && briefs.get(rank).is_some_and(|b| lacks(*rank, key, b))
            });
            missing.insert(key.clone(), known.collect());
        }
        let waits: BTreeMap<Rank, &[Key]> = waits.iter().map(|(r, keys)| (*r, &**keys)).collect();
        let keys = stuck(&missing, &waits);
        missing.retain(|key, _| keys.contains(key));
        let stands_still = |rank: &Rank| {
            let waits = waits.get(rank);
            waits.is_some_and(|w| !w.is_empty() && w.iter().all(|key| keys.contains(key)))
        };
        for ranks in missing.values_mut() {
            ranks.retain(stands_still);
        }
        let is_soft = |rank: &Rank| {
            let brief = briefs.get(rank);
            brief.is_some_and(|brief| brief.waits_for.iter().any(|(_, handle)| *handle != 0))
        };
        let (key, blockers) = missing
            .iter()
            .filter(|(_, ranks)| ranks.iter().all(is_soft))
            .min_by_key(|(key, ranks)| (ranks.len(), *key))
            .map(|(key, ranks)| (key.clone(), ranks.clone()))?;
        Some(Self {
            stuck: missing,
            key,
            blockers,
        })
    }

    /// Questions for certainty: to the stuck ranks, and to all that are known to wait softly and that the request to be
    /// resumed lacks.
    fn questions(
        &self,
        requests: &[(u64, StalledRequest)],
        waiting: &BTreeSet<Rank>,
    ) -> BTreeMap<Rank, Vec<Key>> {
        let mut questions: BTreeMap<Rank, Vec<Key>> = BTreeMap::new();
        let stuck = self.stuck.values().flatten().copied();
        let request = requests
            .iter()
            .find(|(_, request)| key(request) == self.key);
        let lacks = request.iter().flat_map(|(_, request)| &request.missing);
        let more = lacks.filter(|rank| waiting.contains(rank)).copied();
        for rank in stuck.chain(more) {
            if questions.len() < ASKED_MAX {
                questions.entry(rank).or_default();
            }
        }
        for (_, request) in requests {
            let key = key(request);
            if !self.stuck.contains_key(&key) {
                continue;
            }
            for rank in &request.missing {
                if let Some(keys) = questions.get_mut(rank)
                    && keys.len() < NAMES_MAX
                {
                    keys.push(key.clone());
                }
            }
        }
        questions
    }

    fn let_go(
        &self,
        requests: &[(u64, StalledRequest)],
        briefs: &BTreeMap<Rank, Brief>,
    ) -> Vec<LetGo> {
        let request = requests
            .iter()
            .find(|(_, request)| key(request) == self.key);
        let waits = request.and_then(|(_, request)| request.waiting.first());
        let Some(waits) = waits else {
            return Vec::new();
        };
        let soft = self.blockers.iter().flat_map(|rank| {
            let brief = briefs.get(rank);
            let all = brief.into_iter().flat_map(|brief| &brief.waits_for);
            let soft = all.filter(|(key, handle)| *handle != 0 && self.stuck.contains_key(key));
            soft.map(|(_, handle)| (*rank, *handle))
        });
        soft.map(|(rank, handle)| LetGo {
            rank,
            handle,
            name: self.key.1.clone(),
            waits: *waits,
        })
        .collect()
    }
}

fn keys_of(brief: &Brief) -> impl Iterator<Item = &Key> {
    brief.waits_for.iter().map(|(key, _)| key)
}

#[cfg(test)]
mod tests;

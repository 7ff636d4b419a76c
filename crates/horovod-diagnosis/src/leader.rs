//! Rank 0's part in the diagnosis: when it looks, whom it asks, and when it has something to say. Pure: the time is
//! passed in.

use std::collections::BTreeSet;

use horovod_protocol::Rank;

use super::verdict::{AbsenceKind, Diagnosis, Late, Observation, conclude};
use super::{Key, Standing};

/// Ranks asked at a time. Every rank that is asked stops nobody, but a report of hundreds helps nobody either.
const ASKED_MAX: usize = 64;
/// How long answers may take.
const ANSWERS_TIMEOUT_MS: u64 = 2000;
/// The same stall is told again after this time, then after twice as long, and so on.
const REPEAT_MS: u64 = 60_000;
/// Looks at one stall until the first report.
const POLLS: u64 = 3;

/// Next action.
#[derive(Debug, PartialEq, Eq)]
pub enum LeaderStep {
    /// Ask these ranks, and pass on what they say.
    Ask {
        /// The number of the question.
        question: u64,
        /// The ranks.
        ranks: Vec<Rank>,
    },
    /// Tell the users.
    Report(Box<Diagnosis>),
}

/// Rank 0's part of the diagnosis.
#[derive(Debug)]
pub struct Leader {
    /// A stall is told when it has lasted for about so long.
    after_ms: u64,
    poll_at: u64,
    first: Option<Observation>,
    /// Operations that the last verdict took for deadlocked, proven or not.
    suspected: Vec<Key>,
    asked: Option<Asked>,
    question: u64,
    reported: Option<Reported>,
}

#[derive(Debug)]
struct Asked {
    observation: Observation,
    deadline: u64,
}

impl Asked {
    fn is_complete(&self) -> bool {
        self.observation.answers.values().all(Option::is_some)
    }
}

#[derive(Debug)]
struct Reported {
    what: BTreeSet<(Key, Vec<(Rank, AbsenceKind)>)>,
    again_at: u64,
    pause: u64,
}

impl Leader {
    /// A stall is told when it has lasted for about so long.
    pub fn new(after_ms: u64) -> Self {
        let after_ms = after_ms.max(POLLS);
        Self {
            after_ms,
            poll_at: after_ms / POLLS,
            first: None,
            suspected: Vec::new(),
            asked: None,
            question: 0,
            reported: None,
        }
    }

    /// When to call [`Self::poll`] at the latest, in milliseconds.
    pub fn deadline(&self) -> u64 {
        self.asked.as_ref().map_or(self.poll_at, |a| a.deadline)
    }

    /// Whether [`Self::poll`] has something to do.
    pub fn is_due(&self, now: u64) -> bool {
        match &self.asked {
            Some(asked) => asked.is_complete() || now >= asked.deadline,
            None => now >= self.poll_at,
        }
    }

    /// A rank has answered.
    pub fn answered(&mut self, question: u64, rank: Rank, standing: Standing) {
        if let Some(asked) = &mut self.asked
            && question == self.question
            && let Some(answer) = asked.observation.answers.get_mut(&rank)
        {
            *answer = Some(standing);
        }
    }

    /// Time has passed. `late` lists what has waited since this time or longer.
    pub fn poll(&mut self, now: u64, late: impl FnOnce(u64) -> Late) -> Option<LeaderStep> {
        if let Some(asked) = &self.asked {
            if !asked.is_complete() && now < asked.deadline {
                return None;
            }
            let observation = self.asked.take()?.observation;
            return self
                .compare(now, observation)
                .map(|diagnosis| LeaderStep::Report(Box::new(diagnosis)));
        }
        if now < self.poll_at {
            return None;
        }
        self.poll_at = now + self.after_ms / POLLS;
        let late = late(now.saturating_sub(self.after_ms / POLLS));
        if late.is_empty() {
            self.first = None;
            self.suspected.clear();
            self.reported = None;
            return None;
        }
        let ranks = whom_to_ask(&late);
        self.question += 1;
        self.asked = Some(Asked {
            observation: Observation {
                at_ms: now,
                late,
                answers: ranks.iter().map(|rank| (*rank, None)).collect(),
            },
            deadline: now + ANSWERS_TIMEOUT_MS,
        });
        let question = self.question;
        Some(LeaderStep::Ask { question, ranks })
    }

    fn compare(&mut self, now: u64, observation: Observation) -> Option<Diagnosis> {
        let first = self.first.replace(observation.clone())?;
        let mut diagnosis = conclude(&first, observation);
        // A thread that reads a file is as idle as one that waits, but perhaps not for two verdicts in a row.
        let suspected = std::mem::replace(&mut self.suspected, diagnosis.deadlocked.clone());
        let proven = std::mem::take(&mut diagnosis.proven);
        (diagnosis.deadlocked).retain(|key| proven.contains(key) || suspected.contains(key));
        if diagnosis.deadlocked.is_empty() && !self.suspected.is_empty() && suspected.is_empty() {
            return None;
        }
        let stalled_after_ns = (self.after_ms - self.after_ms / POLLS) * 1_000_000;
        diagnosis.late.retain(|r| r.waited_ns >= stalled_after_ns);
        let is_stall = !diagnosis.late.is_empty() && !diagnosis.culprits.is_empty();
        (is_stall && self.is_news(now, &diagnosis)).then_some(diagnosis)
    }

    /// Whether users should hear of it, now or again.
    fn is_news(&mut self, now: u64, diagnosis: &Diagnosis) -> bool {
        if !diagnosis.deadlocked.is_empty() {
            return true;
        }
        let kinds: Vec<_> = (diagnosis.culprits.iter())
            .map(|c| (c.rank, c.kind))
            .collect();
        let keys = diagnosis.late.all().map(super::verdict::key);
        let what: BTreeSet<_> = keys.map(|key| (key, kinds.clone())).collect();
        let pause = match &self.reported {
            Some(reported) if reported.what == what && now < reported.again_at => return false,
            Some(reported) => reported.pause.saturating_mul(2),
            None => REPEAT_MS,
        };
        self.reported = Some(Reported {
            what,
            again_at: now.saturating_add(pause),
            pause,
        });
        true
    }
}

/// Those that are waited for, and one that waits.
fn whom_to_ask(late: &Late) -> Vec<Rank> {
    let missing: BTreeSet<Rank> = late.all().flat_map(|r| r.missing.clone()).collect();
    let waiting: BTreeSet<Rank> = late.all().flat_map(|r| r.waiting.clone()).collect();
    let witness = waiting.difference(&missing).next().copied();
    let asked: BTreeSet<Rank> = (missing.iter().copied().take(ASKED_MAX))
        .chain(witness)
        .collect();
    asked.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use horovod_protocol::{ProcessSetId, StalledRequest};

    use super::*;

    fn request(name: &str, waited_ms: u64) -> Late {
        let request = StalledRequest {
            set: ProcessSetId(0),
            name: Arc::from(name),
            waiting: vec![Rank(0)],
            missing: vec![Rank(1)],
            waited_ns: waited_ms * 1_000_000,
        };
        Late {
            requests: vec![request],
            running: None,
        }
    }

    fn standing() -> Standing {
        Standing::default()
    }

    /// Let `a` wait from the start; when reports came, in milliseconds, until `end`.
    fn reports(leader: &mut Leader, end: u64, answers: bool) -> Vec<u64> {
        let mut reports_at = Vec::new();
        let mut now = 0;
        while now < end {
            now = leader.deadline().max(now);
            match leader.poll(now, |_| request("a", now)) {
                Some(LeaderStep::Ask { question, ranks }) => {
                    assert_eq!(ranks, [Rank(0), Rank(1)]);
                    for rank in ranks.into_iter().filter(|_| answers) {
                        leader.answered(question, rank, standing());
                    }
                }
                Some(LeaderStep::Report(_)) => reports_at.push(now),
                None => {}
            }
            if answers && let Some(LeaderStep::Report(_)) = leader.poll(now, |_| Late::default()) {
                reports_at.push(now);
            }
        }
        reports_at
    }

    #[test]
    fn a_stall_is_told_in_time_and_then_less_and_less_often() {
        let reports_at = reports(&mut Leader::new(9000), 600_000, true);
        assert_eq!(
            reports_at[0], 6000,
            "two looks, 3000 apart, the first when it has waited for 3000"
        );
        assert_eq!(reports_at.len(), 4, "{reports_at:?}");
    }

    #[test]
    fn ranks_that_do_not_answer_do_not_hold_up_the_report() {
        let reports_at = reports(&mut Leader::new(9000), 60_000, false);
        assert!(reports_at[0] <= 9000 + ANSWERS_TIMEOUT_MS, "{reports_at:?}");
    }

    #[test]
    fn nothing_is_asked_while_nothing_waits_and_answers_to_old_questions_are_ignored() {
        let mut leader = Leader::new(9000);
        assert_eq!(leader.poll(3000, |_| Late::default()), None);
        assert_eq!(leader.poll(5999, |_| request("a", 5999)), None);
        let Some(LeaderStep::Ask { question, .. }) = leader.poll(6000, |_| request("a", 6000))
        else {
            panic!()
        };
        leader.answered(question - 1, Rank(0), standing());
        leader.answered(question, Rank(1), standing());
        assert_eq!(
            leader.poll(7000, |_| Late::default()),
            None,
            "one is still awaited"
        );
    }

    #[test]
    fn of_many_only_some_are_asked() {
        let mut all = request("a", 1);
        all.requests[0].missing = (1..1000).map(Rank).collect();
        let asked = whom_to_ask(&all);
        assert_eq!(asked.len(), ASKED_MAX + 1);
        assert_eq!(asked[0], Rank(0));
    }

    #[test]
    fn a_circle_that_only_idleness_shows_is_told_when_seen_twice() {
        let ends = |blocked: bool| {
            let mut leader = Leader::new(9000);
            let waits = |own: &str| Standing {
                blocked,
                waits_if_idle: true,
                waits_for: vec![(0, Arc::from(own))],
                ..Standing::default()
            };
            let mut now = 0;
            loop {
                now = leader.deadline().max(now);
                let step = leader.poll(now, |_| {
                    let mut late = request("a", now);
                    late.requests.extend(request("b", now).requests);
                    let other = &mut late.requests[1];
                    std::mem::swap(&mut other.waiting, &mut other.missing);
                    late
                });
                if let Some(LeaderStep::Ask { question, .. }) = step {
                    leader.answered(question, Rank(0), waits("a"));
                    leader.answered(question, Rank(1), waits("b"));
                }
                if let Some(LeaderStep::Report(diagnosis)) = leader.poll(now, |_| Late::default()) {
                    assert_eq!(diagnosis.deadlocked.len(), 2, "and not before");
                    return now;
                }
            }
        };
        assert_eq!([ends(true), ends(false)], [6000, 9000]);
    }
}

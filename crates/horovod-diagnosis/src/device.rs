//! The watch over operations on GPUs that do not end: each rank looks at its own, rank 0 asks the others where theirs
//! stand. Pure: the time is passed in.

use std::collections::BTreeMap;

use horovod_protocol::Rank;
use serde::{Deserialize, Serialize};

use super::{Key, Standing, messages};

/// Ranks asked at a time.
const ASKED_MAX: usize = 128;
/// How long answers may take.
const ANSWERS_TIMEOUT_MS: u64 = 2000;
/// How long a rank whose operation has to be ended leaves that to rank 0, which knows more.
const GRACE_MS: u64 = 10_000;
/// The same operation is told of again after this time, then after twice as long, and so on.
const REPEAT_MS: u64 = 60_000;
/// Questions have numbers that no others have.
pub(crate) const FIRST_QUESTION: u64 = 1 << 63;

/// How far the operation is that a GPU is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// The call by which it is launched has not returned.
    Launching,
    /// It is launched, behind work of the script's that has not ended.
    AwaitsInputs,
    /// It is launched, and nothing else keeps the GPU from it.
    Runs,
}

/// The operation that a GPU is at: the next to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnDevice {
    /// Its place in the job's order.
    pub seq: u64,
    /// Its process set and its name; of several together the first's, and how many more.
    #[serde(
        serialize_with = "messages::put_key",
        deserialize_with = "messages::get_key"
    )]
    pub key: Key,
    /// How far it is.
    pub phase: Phase,
    /// For so long the GPU has been at it.
    pub ms: u64,
}

/// Where a rank and its GPU stand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStanding {
    /// The place in the job's order of what was given to the GPU last.
    pub given: Option<u64>,
    /// `None`: all of it has ended.
    pub at: Option<OnDevice>,
}

/// A rank's word that its GPU does not end an operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Complaint {
    pub(crate) seq: u64,
    #[serde(
        serialize_with = "messages::put_key",
        deserialize_with = "messages::get_key"
    )]
    pub(crate) key: Key,
    pub(crate) ms: u64,
    /// The time that operations have is over.
    pub(crate) ends: bool,
}

/// A rank's watch over its own GPU.
#[derive(Debug)]
pub struct DeviceWatch {
    /// When others are to know of an operation that does not end, and when that ends the job; in milliseconds.
    tell_after: Option<u64>,
    end_after: Option<u64>,
    reported: Option<Reported>,
}

#[derive(Debug)]
struct Reported {
    seq: u64,
    /// How long the GPU had been at it: if that is less now, it is at another part of the operation.
    ms: u64,
    again_at: u64,
    pause: u64,
    /// When this rank ends the job by itself.
    gives_up_at: Option<u64>,
}

/// Action of a rank about its GPU.
#[derive(Debug, PartialEq, Eq)]
pub enum Watched {
    /// Tell rank 0.
    Tell(Complaint),
    /// Rank 0 has not answered; what this rank knows.
    GiveUp(String),
}

impl DeviceWatch {
    /// In milliseconds: after `tell_after` others are to know of an operation that does not end, after `end_after` it ends
    /// the job.
    pub fn new(tell_after: Option<u64>, end_after: Option<u64>) -> Self {
        Self {
            tell_after,
            end_after,
            reported: None,
        }
    }

    /// Checks the GPU's present work. `is_alone`: no other rank can add to the finding.
    pub fn check(&mut self, now: u64, at: Option<&OnDevice>, is_alone: bool) -> Option<Watched> {
        let reported = self.reported.take();
        let at = at?;
        let reported = reported.filter(|reported| reported.seq == at.seq && reported.ms <= at.ms);
        let gives_up_at = reported.as_ref().and_then(|reported| reported.gives_up_at);
        let is_over = |after: Option<u64>| after.is_some_and(|after| at.ms >= after);
        let ends = is_over(self.end_after);
        if gives_up_at.is_some_and(|deadline| now >= deadline) || (ends && is_alone) {
            return Some(Watched::GiveUp(own_words(at)));
        }
        let is_due = reported
            .as_ref()
            .is_none_or(|reported| now >= reported.again_at);
        let tells = (ends && gives_up_at.is_none()) || (is_over(self.tell_after) && is_due);
        if !tells {
            self.reported = reported;
            return None;
        }
        let pause = reported.map_or(REPEAT_MS, |reported| reported.pause.saturating_mul(2));
        self.reported = Some(Reported {
            seq: at.seq,
            ms: at.ms,
            again_at: now.saturating_add(pause),
            pause,
            gives_up_at: gives_up_at.or_else(|| ends.then(|| now.saturating_add(GRACE_MS))),
        });
        Some(Watched::Tell(Complaint {
            seq: at.seq,
            key: at.key.clone(),
            ms: at.ms,
            ends,
        }))
    }
}

fn own_words(at: &OnDevice) -> String {
    format!(
        "{} has been on the GPU for {} s without an end (HOROVOD_GPU_TIMEOUT): {}",
        super::report::name_of(&at.key),
        at.ms / 1000,
        super::device_report::own_phase(at.phase)
    )
}

/// Where a rank is with an operation that does not end on some GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Its GPU has done its part.
    Ended,
    /// So it has, and the host is at its own.
    OnHost,
    Runs,
    AwaitsInputs,
    Launching,
    /// Its GPU is still at this operation, which comes before.
    Behind(Key, Phase),
    NotLaunched,
    Silent,
}

/// Where one rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankPlace {
    pub(crate) rank: Rank,
    pub(crate) place: Place,
    pub(crate) standing: Option<Standing>,
}

/// Findings about an operation that does not end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDiagnosis {
    pub(crate) complaint: Complaint,
    /// By rank.
    pub(crate) ranks: Vec<RankPlace>,
    /// Members that were not asked because there are so many.
    pub(crate) unasked: usize,
}

impl DeviceDiagnosis {
    /// Whether the time that operations have is over, and the job ends.
    pub fn ends_job(&self) -> bool {
        self.complaint.ends
    }

    /// Those for which the others wait; none if all are at it alike.
    pub(crate) fn culprits(&self) -> impl Iterator<Item = &RankPlace> {
        self.ranks
            .iter()
            .filter(|rank| !matches!(rank.place, Place::Ended | Place::OnHost | Place::Runs))
    }
}

/// Rank 0's questions about GPUs.
#[derive(Debug)]
pub struct DeviceInquiry {
    question: u64,
    complaint: Option<(Rank, Complaint)>,
    asked: Option<Asked>,
    /// The last finding, and its time.
    known: Option<(Complaint, u64)>,
}

#[derive(Debug)]
struct Asked {
    from: Rank,
    complaint: Complaint,
    unasked: usize,
    answers: BTreeMap<Rank, Option<Standing>>,
    deadline: u64,
}

/// Action of rank 0.
#[derive(Debug, PartialEq, Eq)]
pub enum DeviceStep {
    /// Ask these ranks, and pass on what they say.
    Ask {
        /// The number of the question.
        question: u64,
        /// The ranks.
        ranks: Vec<Rank>,
    },
    /// Tell the users.
    Report(Box<DeviceDiagnosis>),
}

impl Default for DeviceInquiry {
    fn default() -> Self {
        Self {
            question: FIRST_QUESTION,
            complaint: None,
            asked: None,
            known: None,
        }
    }
}

impl DeviceInquiry {
    /// A rank's GPU does not end something.
    pub fn complain(&mut self, now: u64, from: Rank, complaint: Complaint) {
        if let Some(asked) = &mut self.asked
            && asked.complaint.seq == complaint.seq
        {
            asked.complaint.ends |= complaint.ends;
            return;
        }
        let is_known = |(known, at): &(Complaint, u64)| {
            known.seq == complaint.seq
                && (known.ends || !complaint.ends)
                && now < at.saturating_add(REPEAT_MS / 2)
        };
        if self.known.as_ref().is_some_and(is_known) {
            return;
        }
        // The first complaint in the order holds up the rest.
        let comes_before = |(_, other): &(Rank, Complaint)| {
            (!other.ends, other.seq) <= (!complaint.ends, complaint.seq)
        };
        if !self.complaint.as_ref().is_some_and(comes_before) {
            self.complaint = Some((from, complaint));
        }
    }

    /// A rank has answered.
    pub fn answered(&mut self, question: u64, rank: Rank, standing: &Standing) {
        if let Some(asked) = &mut self.asked
            && question == self.question
            && let Some(answer) = asked.answers.get_mut(&rank)
        {
            *answer = Some(standing.clone());
        }
    }

    /// Time has passed. `members` lists those of a process set, if it is known.
    pub fn poll(&mut self, now: u64, members: impl FnOnce(u32) -> Vec<Rank>) -> Option<DeviceStep> {
        if let Some(asked) = self.asked.take_if(|a| a.is_complete() || now >= a.deadline) {
            self.known = Some((asked.complaint.clone(), now));
            let diagnosis = asked.conclude()?;
            return Some(DeviceStep::Report(Box::new(diagnosis)));
        }
        if self.asked.is_some() {
            return None;
        }
        let (from, complaint) = self.complaint.take()?;
        let members = members(complaint.key.0);
        let others = members.iter().copied().filter(|rank| *rank != from);
        let mut ranks: Vec<_> = [from].into_iter().chain(others).collect();
        let unasked = ranks.len().saturating_sub(ASKED_MAX);
        ranks.truncate(ASKED_MAX);
        self.question += 1;
        self.asked = Some(Asked {
            from,
            complaint,
            unasked,
            answers: ranks.iter().map(|rank| (*rank, None)).collect(),
            deadline: now + ANSWERS_TIMEOUT_MS,
        });
        let question = self.question;
        Some(DeviceStep::Ask { question, ranks })
    }
}

impl Asked {
    fn is_complete(&self) -> bool {
        self.answers.values().all(Option::is_some)
    }

    /// `None`: it has ended meanwhile, or all GPUs are busy with what the script has put on them, which may take its time.
    fn conclude(self) -> Option<DeviceDiagnosis> {
        let seq = self.complaint.seq;
        let ranks: Vec<_> = (self.answers.into_iter())
            .map(|(rank, standing)| RankPlace {
                rank,
                place: place_of(seq, standing.as_ref()),
                standing,
            })
            .collect();
        let is_over = ranks.iter().any(|rank| {
            rank.rank == self.from && matches!(rank.place, Place::Ended | Place::OnHost)
        });
        let is_awaited = |rank: &RankPlace| {
            let is_no_news = matches!(rank.place, Place::Ended | Place::AwaitsInputs);
            !is_no_news
        };
        let is_stall = self.complaint.ends || self.unasked > 0 || ranks.iter().any(is_awaited);
        (is_stall && !is_over).then_some(DeviceDiagnosis {
            complaint: self.complaint,
            ranks,
            unasked: self.unasked,
        })
    }
}

fn place_of(seq: u64, standing: Option<&Standing>) -> Place {
    let Some(standing) = standing else {
        return Place::Silent;
    };
    let device = standing.device.as_ref();
    let given = device.and_then(|device| device.given);
    match device.and_then(|device| device.at.as_ref()) {
        Some(at) if at.seq < seq => Place::Behind(at.key.clone(), at.phase),
        Some(at) if at.seq == seq => match at.phase {
            Phase::Launching => Place::Launching,
            Phase::AwaitsInputs => Place::AwaitsInputs,
            Phase::Runs => Place::Runs,
        },
        None if given.is_some_and(|given| given >= seq) && standing.executes => Place::OnHost,
        _ if given.is_some_and(|given| given >= seq) => Place::Ended,
        _ => Place::NotLaunched,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seq: u64, phase: Phase, ms: u64) -> OnDevice {
        OnDevice {
            seq,
            key: (0, format!("op{seq}").as_str().into()),
            phase,
            ms,
        }
    }

    fn complaint(seq: u64, ends: bool) -> Complaint {
        Complaint {
            seq,
            key: (0, format!("op{seq}").as_str().into()),
            ms: 1000,
            ends,
        }
    }

    fn standing(given: u64, at: Option<OnDevice>) -> Standing {
        Standing {
            device: Some(DeviceStanding {
                given: Some(given),
                at,
            }),
            ..Standing::default()
        }
    }

    fn tells(watched: Option<Watched>) -> Option<(u64, bool)> {
        match watched {
            Some(Watched::Tell(complaint)) => Some((complaint.seq, complaint.ends)),
            None => None,
            Some(Watched::GiveUp(text)) => panic!("{text}"),
        }
    }

    #[test]
    fn a_rank_tells_in_time_again_ever_less_often_and_once_more_before_the_end() {
        let mut watch = DeviceWatch::new(Some(10_000), Some(600_000));
        let mut reported = Vec::new();
        for now in (0..599_000).step_by(1000) {
            let at = at(7, Phase::Runs, now);
            reported.extend(tells(watch.check(now, Some(&at), false)).map(|(_, ends)| (now, ends)));
        }
        assert_eq!(
            reported,
            [
                (10_000, false),
                (70_000, false),
                (190_000, false),
                (430_000, false)
            ]
        );
        let mut check = |now| watch.check(now, Some(&at(7, Phase::Runs, now)), false);
        assert_eq!(tells(check(600_000)), Some((7, true)));
        assert_eq!(tells(check(600_000 + GRACE_MS - 1)), None);
        let Some(Watched::GiveUp(text)) = check(600_000 + GRACE_MS) else {
            panic!("rank 0 did nothing")
        };
        assert!(text.contains("op7 has been on the GPU for 610 s"), "{text}");
    }

    #[test]
    fn parts_of_one_operation_have_a_time_each() {
        let mut watch = DeviceWatch::new(None, Some(1000));
        let copies_in = at(7, Phase::AwaitsInputs, 1000);
        assert_eq!(
            tells(watch.check(0, Some(&copies_in), false)),
            Some((7, true))
        );
        let copies_out = at(7, Phase::Runs, 1);
        assert_eq!(tells(watch.check(GRACE_MS, Some(&copies_out), false)), None);
        assert_eq!(
            tells(watch.check(2 * GRACE_MS, Some(&copies_out), false)),
            None
        );
    }

    #[test]
    fn what_ends_in_time_is_forgotten() {
        let mut watch = DeviceWatch::new(None, Some(1000));
        assert_eq!(
            tells(watch.check(0, Some(&at(1, Phase::Runs, 1000)), false)),
            Some((1, true))
        );
        assert_eq!(tells(watch.check(1, None, false)), None);
        assert_eq!(
            tells(watch.check(2, Some(&at(2, Phase::Runs, 1)), false)),
            None
        );
        assert_eq!(
            tells(watch.check(9000, Some(&at(2, Phase::Runs, 999)), false)),
            None
        );
        assert_eq!(
            tells(watch.check(9001, Some(&at(2, Phase::Runs, 1000)), false)),
            Some((2, true))
        );
    }

    #[test]
    fn a_time_of_zero_never_ends_anything_and_one_who_is_alone_asks_nobody() {
        let mut watch = DeviceWatch::new(Some(1000), None);
        let forever = at(1, Phase::Runs, u64::MAX);
        assert_eq!(
            tells(watch.check(u64::MAX - 1, Some(&forever), true)),
            Some((1, false))
        );
        let mut watch = DeviceWatch::new(None, Some(1000));
        let stuck = watch.check(5, Some(&at(1, Phase::AwaitsInputs, 1000)), true);
        assert!(matches!(stuck, Some(Watched::GiveUp(_))));
    }

    fn asked(inquiry: &mut DeviceInquiry, now: u64, size: u32) -> (u64, Vec<Rank>) {
        match inquiry.poll(now, |_| (0..size).map(Rank).collect()) {
            Some(DeviceStep::Ask { question, ranks }) => (question, ranks),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_rank_is_where_its_answer_says() {
        let mut inquiry = DeviceInquiry::default();
        inquiry.complain(0, Rank(1), complaint(7, false));
        // Of another rank, about the same.
        inquiry.complain(0, Rank(2), complaint(7, false));
        let (question, ranks) = asked(&mut inquiry, 0, 8);
        assert_eq!(ranks.len(), 8);
        inquiry.complain(1, Rank(2), complaint(7, true));
        let answers = [
            standing(9, Some(at(8, Phase::Runs, 1))),
            standing(9, Some(at(7, Phase::Runs, 1))),
            standing(7, Some(at(7, Phase::AwaitsInputs, 1))),
            standing(7, Some(at(7, Phase::Launching, 1))),
            standing(9, Some(at(3, Phase::Runs, 1))),
            standing(6, None),
            Standing {
                executes: true,
                ..standing(7, None)
            },
        ];
        for (rank, answer) in answers.iter().enumerate() {
            inquiry.answered(question - 1, Rank(rank as u32), &Standing::default());
            inquiry.answered(question, Rank(rank as u32), answer);
        }
        assert_eq!(
            inquiry.poll(1999, |_| Vec::new()),
            None,
            "rank 7 may still answer"
        );
        let Some(DeviceStep::Report(found)) = inquiry.poll(2000, |_| Vec::new()) else {
            panic!("it was to answer in time")
        };
        let places: Vec<_> = found.ranks.iter().map(|rank| rank.place.clone()).collect();
        assert_eq!(
            places,
            [
                Place::Ended,
                Place::Runs,
                Place::AwaitsInputs,
                Place::Launching,
                Place::Behind((0, "op3".into()), Phase::Runs),
                Place::NotLaunched,
                Place::OnHost,
                Place::Silent,
            ]
        );
        assert!(found.complaint.ends);
        assert_eq!(found.culprits().count(), 5);
    }

    #[test]
    fn what_has_ended_meanwhile_is_no_news_and_what_is_known_neither() {
        let mut inquiry = DeviceInquiry::default();
        inquiry.complain(0, Rank(0), complaint(7, false));
        let (question, _) = asked(&mut inquiry, 0, 1);
        inquiry.answered(question, Rank(0), &standing(9, Some(at(8, Phase::Runs, 1))));
        assert_eq!(inquiry.poll(1, |_| Vec::new()), None);
        inquiry.complain(2, Rank(0), complaint(8, false));
        let (question, _) = asked(&mut inquiry, 2, 1);
        inquiry.answered(question, Rank(0), &standing(9, Some(at(8, Phase::Runs, 1))));
        assert!(matches!(
            inquiry.poll(3, |_| Vec::new()),
            Some(DeviceStep::Report(_))
        ));
        inquiry.complain(4, Rank(1), complaint(8, false));
        assert_eq!(inquiry.poll(5, |_| Vec::new()), None);
        inquiry.complain(6, Rank(1), complaint(8, true));
        assert_eq!(
            asked(&mut inquiry, 7, 1).1,
            [Rank(1), Rank(0)],
            "its end is new"
        );
    }

    #[test]
    fn where_all_gpus_compute_nobody_waits_but_there_is_an_end_to_it() {
        for ends in [false, true] {
            let mut inquiry = DeviceInquiry::default();
            inquiry.complain(0, Rank(0), complaint(7, ends));
            let (question, ranks) = asked(&mut inquiry, 0, 2);
            for rank in ranks {
                let computes = standing(7, Some(at(7, Phase::AwaitsInputs, 1)));
                inquiry.answered(question, rank, &computes);
            }
            assert_eq!(inquiry.poll(1, |_| Vec::new()).is_some(), ends);
        }
    }

    #[test]
    fn what_comes_first_in_the_order_is_asked_about_and_of_many_only_some() {
        let mut inquiry = DeviceInquiry::default();
        inquiry.complain(0, Rank(500), complaint(9, false));
        inquiry.complain(0, Rank(600), complaint(8, false));
        inquiry.complain(0, Rank(700), complaint(10, false));
        let (question, ranks) = asked(&mut inquiry, 0, 1000);
        assert_eq!((ranks.len(), ranks[0]), (ASKED_MAX, Rank(600)));
        inquiry.answered(
            question,
            Rank(600),
            &standing(8, Some(at(8, Phase::Runs, 1))),
        );
        let Some(DeviceStep::Report(found)) = inquiry.poll(9000, |_| Vec::new()) else {
            panic!("no report")
        };
        assert_eq!((found.complaint.seq, found.unasked), (8, 1000 - ASKED_MAX));
    }
}

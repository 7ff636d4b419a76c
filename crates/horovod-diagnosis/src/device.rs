//! The watch over operations on GPUs that do not end: each rank looks at its own, rank 0 asks the others where theirs
//! stand. Pure: the time is passed in.

use std::collections::BTreeMap;

use horovod_protocol::Rank;

use super::Standing;
use super::device_facts::{
    Complaint, DeviceDiagnosis, DevicePhase, DeviceProgress, OnDevice, RankPlace,
};

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
            rank.rank == self.from
                && matches!(rank.place, DeviceProgress::Ended | DeviceProgress::OnHost)
        });
        let is_awaited = |rank: &RankPlace| {
            let is_no_news = matches!(
                rank.place,
                DeviceProgress::Ended | DeviceProgress::AwaitsInputs
            );
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

fn place_of(seq: u64, standing: Option<&Standing>) -> DeviceProgress {
    let Some(standing) = standing else {
        return DeviceProgress::Silent;
    };
    let device = standing.device.as_ref();
    let given = device.and_then(|device| device.given);
    match device.and_then(|device| device.at.as_ref()) {
        Some(at) if at.seq < seq => DeviceProgress::Behind(at.key.clone(), at.phase),
        Some(at) if at.seq == seq => match at.phase {
            DevicePhase::Launching => DeviceProgress::Launching,
            DevicePhase::AwaitsInputs => DeviceProgress::AwaitsInputs,
            DevicePhase::Runs => DeviceProgress::Runs,
        },
        None if given.is_some_and(|given| given >= seq) && standing.executes => {
            DeviceProgress::OnHost
        }
        _ if given.is_some_and(|given| given >= seq) => DeviceProgress::Ended,
        _ => DeviceProgress::NotLaunched,
    }
}

#[cfg(test)]
mod tests;

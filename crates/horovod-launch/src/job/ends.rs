//! The ends of ranks, and the job's result that follows from them.

use std::time::Instant;

use super::Job;
use crate::events::{End as JobEnd, Event, JobOutcome};
use crate::frames::ExitStatus;
use crate::platform;
use crate::report::{CONSEQUENCES, Cause, End, culprit, describe};

impl Job<'_> {
    pub(super) fn on_end(&mut self, index: usize, rank: u32, cause: Cause) {
        self.output.finish(rank);
        let host = self.links[index].name().to_owned();
        let stopped = matches!(
            cause,
            Cause::Exit(ExitStatus::Signal(
                libc::SIGINT | libc::SIGTERM | libc::SIGKILL
            )) | Cause::Exit(ExitStatus::Code(130 | 137 | 143))
        );
        if cause.is_failure() {
            self.rendezvous.report_death(rank, &host, &cause.text());
            self.state.failed_at.get_or_insert_with(Instant::now);
        } else {
            self.rendezvous.report_end(rank, &host);
        }
        if self.options.verbose {
            self.output
                .note(&format!("horovodrun: rank {rank} {}", cause.text()));
        }
        // After Ctrl-C each rank ends as its script decides, so no end counts as a failure of its own.
        let is_interrupted = self.state.interrupted_by.is_some();
        let mut was_asked = self.state.asked.is_some() && (stopped || is_interrupted);
        let mut cause = cause;
        if was_asked
            && !is_interrupted
            && let (Some(by), Cause::Exit(status)) = (self.rendezvous.silent().get(&rank), &cause)
        {
            // The silence of this rank is then the reason why the other ranks failed.
            was_asked = false;
            cause = Cause::Silent(*by, *status);
        }
        self.output.emit(&Event::Ended {
            worker: rank,
            host: host.clone(),
            cause: cause.clone(),
        });
        self.state.ends.push(End {
            rank,
            host,
            was_asked,
            is_consequence: CONSEQUENCES
                .iter()
                .any(|sign| self.output.tail_contains(rank, sign)),
            cause,
        });
    }

    /// Reports the result of the job to the user and returns it.
    pub(super) fn conclude(&mut self) -> JobEnd {
        let (status, outcome, paragraphs) = self.judge();
        for text in &paragraphs {
            self.output.note(&format!("horovodrun: {text}"));
        }
        JobEnd {
            status,
            outcome,
            report: paragraphs.join("\n"),
        }
    }

    fn judge(&self) -> (u8, JobOutcome, Vec<String>) {
        let errors = &self.state.start_errors;
        let mut paragraphs: Vec<String> = errors.iter().map(|(_, text)| text.clone()).collect();
        let mut ends = self.state.ends.clone();
        for end in &mut ends {
            if self.rendezvous.absent().contains(&end.rank) && !end.cause.is_failure() {
                end.cause = Cause::Absent;
            }
        }
        let culprit = culprit(&ends).filter(|end| !end.was_asked);
        if paragraphs.is_empty()
            && let Some(culprit) = culprit
        {
            paragraphs = match &self.state.unreachable {
                Some(why) => vec![why.clone()],
                None => describe(culprit, self.output.tail(culprit.rank), &ends),
            };
        }
        if let Some(signal) = self.state.interrupted_by {
            paragraphs.push(ended_by(signal));
            return ((128 + signal) as u8, JobOutcome::Interrupted, paragraphs);
        }
        match (errors.first(), culprit) {
            (Some((code, _)), _) => (*code, JobOutcome::Failure, paragraphs),
            (None, Some(culprit)) => (culprit.cause.code(), JobOutcome::Failure, paragraphs),
            (None, None) => (0, JobOutcome::Success, paragraphs),
        }
    }
}

/// Returns the text about a launcher that was ended by a signal.
pub(crate) fn ended_by(signal: i32) -> String {
    let name = platform::signal_name(signal);
    format!("ended by signal {signal} ({name})")
}

//! `horovodrun --status`: the figures of running jobs of this user on this host, whoever started them.

use crate::options::Wanted;
use std::fmt::Write;
use std::io;

use horovod_metrics::status::{Job, jobs};

/// Why no job was chosen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChoiceError {
    #[error("the system does not list local sockets: {0}")]
    NoList(io::Error),
    #[error(
        "no job of this user has its rank 0 on this host; only a measured job is found: start it with HOROVOD_METRICS=1"
    )]
    NoJob,
    #[error(
        "process {0} is no rank 0 of a measured job of this user on this host{1}; `horovodrun --status` shows all of them"
    )]
    NotThisJob(u32, String),
    #[error("there are several jobs, {0}: choose one with {1}")]
    SeveralJobs(String, &'static str),
}

/// The one job that is asked for. `by` is the option that chooses among several.
pub(crate) fn choose(wanted: Wanted, by: &'static str) -> Result<Job, ChoiceError> {
    chosen(wanted, jobs().map_err(ChoiceError::NoList)?, by)
}

fn chosen(wanted: Wanted, mut all: Vec<Job>, by: &'static str) -> Result<Job, ChoiceError> {
    all.dedup_by_key(|job| job.pid);
    let names: Vec<String> = all.iter().map(|job| job.pid.to_string()).collect();
    let names = names.join(", ");
    let count = all.len();
    match wanted {
        Wanted::All if count > 1 => Err(ChoiceError::SeveralJobs(names, by)),
        Wanted::All => all.pop().ok_or(ChoiceError::NoJob),
        Wanted::Process(pid) => {
            let others = match count {
                0 => String::new(),
                _ => format!("; there is {names}"),
            };
            let found = all.into_iter().find(|job| job.pid == pid);
            found.ok_or(ChoiceError::NotThisJob(pid, others))
        }
    }
}

/// The text about these jobs, or why there is none.
pub(crate) fn report(wanted: Wanted) -> Result<String, String> {
    let all =
        jobs().map_err(|e| format!("--status: the system does not list local sockets: {e}"))?;
    describe(wanted, &all, |job| {
        job.ask("status").map_err(|e| e.to_string())
    })
}

fn describe(
    wanted: Wanted,
    all: &[Job],
    ask: impl Fn(&Job) -> Result<String, String>,
) -> Result<String, String> {
    let is_wanted = |job: &&Job| wanted == Wanted::All || wanted == Wanted::Process(job.pid);
    let mut text = String::new();
    let mut failures = String::new();
    for job in all.iter().filter(is_wanted) {
        match ask(job) {
            Ok(status) => {
                let gap = if text.is_empty() { "" } else { "\n" };
                // A String takes everything.
                let _ = write!(text, "{gap}job {}: {status}", job.pid);
            }
            Err(e) => {
                let _ = write!(failures, "\njob {} does not answer: {e}", job.pid);
            }
        }
    }
    if text.is_empty() {
        let mut why = match wanted {
            Wanted::All => "no job of this user has its rank 0 on this host".to_owned(),
            Wanted::Process(pid) => {
                format!("process {pid} is no rank 0 of a job of this user on this host")
            }
        };
        let others: Vec<String> = all.iter().map(|job| job.pid.to_string()).collect();
        if failures.is_empty() && !others.is_empty() {
            let _ = write!(why, "; there is {}", others.join(", "));
        }
        return Err(format!("--status: {why}{failures}"));
    }
    text.push_str(failures.trim_start());
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_there_is_no_job_that_is_an_error() {
        let error = describe(Wanted::All, &[], |_| Ok(String::new())).expect_err("no job");
        assert_eq!(
            error,
            "--status: no job of this user has its rank 0 on this host"
        );
        let error = describe(Wanted::Process(7), &[], |_| Ok(String::new())).expect_err("no job");
        assert!(error.contains("process 7 is no rank 0"), "{error}");
    }

    #[test]
    fn one_job_is_chosen_by_its_number() {
        let none = |wanted| chosen(wanted, Vec::new(), "--top=JOB").expect_err("no job");
        assert!(matches!(none(Wanted::All), ChoiceError::NoJob));
        let text = none(Wanted::Process(7)).to_string();
        assert!(
            text.contains("process 7") && !text.contains("there is"),
            "{text}"
        );
    }
}

//! Events for programs: the course of a job, a line of JSON each, on the descriptor that `HOROVODRUN_EVENTS_FD` names.
//!
//! The one definition of them; docs/running.md describes it for users. Within a version events and fields are only added,
//! and readers pass over what they do not know.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::SocketAddr;

use serde_json::json;

use crate::environment;
use crate::frames::ExitStatus;
use crate::platform;
use crate::report::Cause;

/// Grows when an event or a field changes its meaning or goes.
pub(crate) const VERSION: u32 = 1;

/// An event of the job. A *worker* is one process; in a job of fixed size its number is its rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The first one.
    Begin,
    /// Agents can dial these addresses.
    Listening(Vec<SocketAddr>),
    /// A worker runs.
    Started {
        /// Which.
        worker: u32,
        /// Where.
        host: String,
        /// Its process there.
        pid: u32,
    },
    /// These have met and train together, in the order of their ranks.
    Round(Vec<u32>),
    /// A worker has ended.
    Ended {
        /// Which.
        worker: u32,
        /// Where.
        host: String,
        /// How.
        cause: Cause,
    },
    /// The last one.
    End(End),
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// The launcher's exit status.
    pub(crate) status: u8,
    pub(crate) outcome: JobOutcome,
    /// The launcher's report on the end; empty after success.
    pub(crate) report: String,
}

/// In one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobOutcome {
    Success,
    /// The call was wrong; nothing was started.
    Usage,
    Failure,
    /// By a signal to the launcher.
    Interrupted,
}

impl Event {
    /// Its line.
    pub(crate) fn to_line(&self) -> String {
        let line = match self {
            Self::Begin => json!({
                "event": "begin",
                "version": VERSION,
                "horovodrun": env!("CARGO_PKG_VERSION"),
            }),
            Self::Listening(addresses) => json!({"event": "listening", "addresses": addresses}),
            Self::Started { worker, host, pid } => {
                json!({"event": "started", "worker": worker, "host": host, "pid": pid})
            }
            Self::Round(workers) => json!({"event": "round", "workers": workers}),
            Self::Ended {
                worker,
                host,
                cause,
            } => {
                let mut line = json!({"event": "ended", "worker": worker, "host": host});
                if let Some((name, number)) = status_of(cause) {
                    line[name] = number.into();
                }
                line["cause"] = cause.text().into();
                line
            }
            Self::End(end) => json!({
                "event": "end",
                "status": end.status,
                "outcome": end.outcome.name(),
                "report": end.report,
            }),
        };
        format!("{line}\n")
    }
}

/// The exit code or the signal, where a process has ended; neither where its host was lost.
fn status_of(cause: &Cause) -> Option<(&'static str, i32)> {
    let status = match cause {
        Cause::Exit(status) | Cause::Silent(_, status) => status,
        Cause::Absent => &ExitStatus::Code(0),
        Cause::HostLost(_) => return None,
    };
    Some(match status {
        ExitStatus::Code(code) => ("code", *code),
        ExitStatus::Signal(signal) => ("signal", *signal),
        ExitStatus::OutOfMemory => ("signal", libc::SIGKILL),
    })
}

impl JobOutcome {
    fn name(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Usage => "usage",
            Self::Failure => "failure",
            Self::Interrupted => "interrupted",
        }
    }
}

/// Where events go, if anybody wants them.
#[derive(Debug, Default)]
pub(crate) struct Events(Option<File>);

impl Events {
    /// Opens what the environment names and says that it begins.
    pub(crate) fn open() -> Self {
        let Some(fd) = environment::events() else {
            return Self::default();
        };
        // A copy that no agent inherits, and neither shall they inherit the original: the reader waits for its end.
        let file = OpenOptions::new().write(true).open(format!("/dev/fd/{fd}"));
        platform::close_on_exec(fd);
        let events = Self(file.ok());
        events.emit(&Event::Begin);
        events
    }

    /// The same place, for the thread that writes.
    pub(crate) fn sink(&self) -> Option<File> {
        self.0.as_ref().and_then(|file| file.try_clone().ok())
    }

    /// Writes it here and now.
    pub(crate) fn emit(&self, event: &Event) {
        if let Some(mut file) = self.0.as_ref() {
            // A reader that has gone away wants no more.
            let _ = file.write_all(event.to_line().as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines are what programs rely on: a change here asks for another version unless it only adds.
    #[test]
    fn lines_of_version_1() {
        #[track_caller]
        fn check(event: &Event, expected: &str) {
            assert_eq!(event.to_line(), format!("{expected}\n"));
        }
        let version = env!("CARGO_PKG_VERSION");
        check(
            &Event::Begin,
            &format!(r#"{{"event":"begin","version":1,"horovodrun":"{version}"}}"#),
        );
        check(
            &Event::Listening(vec![([10, 0, 0, 1], 77).into()]),
            r#"{"event":"listening","addresses":["10.0.0.1:77"]}"#,
        );
        let host = || "h\"1".to_owned();
        check(
            &Event::Started {
                worker: 3,
                host: host(),
                pid: 77,
            },
            r#"{"event":"started","worker":3,"host":"h\"1","pid":77}"#,
        );
        check(
            &Event::Round(vec![2, 0]),
            r#"{"event":"round","workers":[2,0]}"#,
        );
        let ended = |cause| Event::Ended {
            worker: 0,
            host: host(),
            cause,
        };
        check(
            &ended(Cause::Exit(ExitStatus::Code(3))),
            r#"{"event":"ended","worker":0,"host":"h\"1","code":3,"cause":"exited with code 3"}"#,
        );
        check(
            &ended(Cause::Exit(ExitStatus::Signal(9))),
            r#"{"event":"ended","worker":0,"host":"h\"1","signal":9,"cause":"killed by signal 9 (SIGKILL)"}"#,
        );
        check(
            &ended(Cause::HostLost("no route".to_owned())),
            r#"{"event":"ended","worker":0,"host":"h\"1","cause":"lost: no route"}"#,
        );
        check(
            &Event::End(End {
                status: 137,
                outcome: JobOutcome::Failure,
                report: "rank 1\n    last".to_owned(),
            }),
            r#"{"event":"end","status":137,"outcome":"failure","report":"rank 1\n    last"}"#,
        );
    }

    #[test]
    fn outcomes_have_names_of_their_own() {
        let all = [
            JobOutcome::Success,
            JobOutcome::Usage,
            JobOutcome::Failure,
            JobOutcome::Interrupted,
        ];
        let names = all.map(JobOutcome::name);
        assert_eq!(names, ["success", "usage", "failure", "interrupted"]);
    }
}

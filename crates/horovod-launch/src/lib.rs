//! `horovodrun`, as a program and as a library: hosts, spawning, rendezvous, output.
//!
//! The launcher ([`run`]) starts one agent per host, which is the same program: by fork and exec on this host,
//! through ssh on others. Agents start the ranks, carry their output and leave nothing behind. Everything that
//! is secret travels over the agents' stdin, never on a command line.
//!
//! Programs that start the processes of a job by other means use the rest: [`executor`] gives processes their places
//! and environments, and [`Rendezvous`] connects them. [`elastic`] decides which processes take part in a job
//! whose members change, and [`hosts`] parses lists of hosts. None of these needs an agent, ssh, a terminal or a signal
//! handler.
//!
//! Deliberately absent: tensors, Python.
//!
//! Threads of a launcher beside its own, by name: `output` writes the ranks' output; `hvd-rendezvous` serves the
//! rendezvous; `discovery` asks for the hosts of an elastic job; `parent-watch` watches for the end of the process that
//! called `horovod.run`; `mpi` reads what MPI's launcher says; `lookup` asks a name server, one thread for each host until an answer arrives;
//! `trace-signals` removes the unfinished file of `--trace`. Agents have no
//! other threads, except when they examine their host for `--doctor`: each slow question has a thread of its own.

#![deny(unsafe_code)]

mod agent;
mod allocation;
/// Public for tests and fuzzing: no part of what executors use.
#[doc(hidden)]
pub mod args;
mod completion;
mod config_file;
mod console;
mod dialed;
mod dialing;
mod doctor;
pub mod elastic;
mod endings;
mod environment;
mod error_lines;
mod events;
pub mod executor;
/// Public for tests and fuzzing: no part of what executors use.
#[doc(hidden)]
pub mod frames;
pub mod hosts;
mod io;
mod job;
mod launch;
mod launch_error;
mod link;
mod log;
mod mpi;
mod options;
mod out_of_memory;
mod output;
mod parent_watch;
mod platform;
mod rank_exec;
mod ranks;
mod remote;
mod rendezvous;
mod report;
mod run_folder;
mod signals;
mod single_endings;
mod status;
mod stdin;
mod threads;
mod top;
mod trace;

use std::ffi::OsString;
use std::io::Write;

pub use self::frames::{ExitStatus, Variables};
pub use self::rendezvous::{Reach, Rendezvous, RendezvousError};

use self::events::{End, Event, Events, JobOutcome};

/// The exit status of a call that was wrong.
const WRONG_CALL: u8 = 2;

/// Runs `horovodrun` with these words after the program's name; the exit code.
pub fn run(words: &[OsString]) -> u8 {
    match words.first().and_then(|word| word.to_str()) {
        Some(agent::SUBCOMMAND) => {
            return agent::run(&words[1..]).unwrap_or_else(|failure| {
                complain(&failure.why);
                failure.status
            });
        }
        Some(rank_exec::SUBCOMMAND) => {
            let (why, code) = rank_exec::run(&words[1..]);
            complain(&why);
            return code;
        }
        _ => {}
    }
    let events = Events::open();
    let options = match args::parse(words) {
        Ok(options) => options,
        Err(error) => return refuse(&error.to_string(), &events),
    };
    if options.help {
        return show(&args::help());
    }
    if options.version {
        return show(&format!("{}\n", env!("CARGO_PKG_VERSION")));
    }
    if let Some(shell) = options.completion {
        return show(&completion::script(shell));
    }
    for note in &options.notes {
        complain(&format!("note: {note}"));
    }
    if let Some(wanted) = options.status {
        return match status::report(wanted) {
            Ok(text) => show(&text),
            Err(why) => {
                complain(&why);
                1
            }
        };
    }
    if let Some(wanted) = options.top {
        return match top::run(wanted) {
            Ok(()) => 0,
            Err(why @ top::TopError::NoTerminal) => refuse(&why.to_string(), &events),
            Err(why) => {
                complain(&why.to_string());
                1
            }
        };
    }
    if let Some((lasting, wanted)) = options.trace {
        return match trace::run(wanted, lasting) {
            Ok(text) => show(&text),
            Err(why) => {
                complain(&why.to_string());
                1
            }
        };
    }
    if options.check_build {
        return check_build(options.verbose);
    }
    if let Some(form) = options.doctor {
        return finish_launch(doctor::run(&options, form), &events);
    }
    finish_launch(launch::run(&options, &events), &events)
}

fn check_build(verbose: bool) -> u8 {
    let idle = environment::build_variables();
    let report = horovod_doctor::check_build(verbose, &environment::path(), &idle);
    for note in &report.notes {
        complain(note);
    }
    show(&report.text)
}

fn finish_launch(result: Result<u8, launch_error::LaunchError>, events: &Events) -> u8 {
    match result {
        // An invalid argument that is noticed only now ends like a wrong option.
        Err(error) if error.is_wrong_call() => refuse(&error.to_string(), events),
        Err(error) => {
            events.emit(&Event::End(End {
                status: 1,
                outcome: JobOutcome::Failure,
                report: error.to_string(),
            }));
            finish(Err(error))
        }
        Ok(code) => code,
    }
}

/// The call was wrong, and nothing was started.
fn refuse(why: &str, events: &Events) -> u8 {
    complain(&format!("error: {why}"));
    events.emit(&Event::End(End {
        status: WRONG_CALL,
        outcome: JobOutcome::Usage,
        report: why.to_owned(),
    }));
    WRONG_CALL
}

fn finish(result: Result<u8, impl std::fmt::Display>) -> u8 {
    match result {
        Ok(code) => code,
        Err(error) => {
            complain(&error.to_string());
            1
        }
    }
}

fn show(text: &str) -> u8 {
    // A reader that has gone away wants no more.
    let _ = std::io::stdout().write_all(text.as_bytes());
    0
}

fn complain(text: &str) {
    let _ = std::io::stderr().write_all(format!("horovodrun: {text}\n").as_bytes());
}

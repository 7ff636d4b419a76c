//! `horovodrun`: hosts, spawning, rendezvous, output.
//!
//! The launcher ([`run`]) starts one agent per host, which is the same program: by fork and exec on this host,
//! through ssh on others. Agents start the ranks, carry their output and leave nothing behind. Everything that
//! is secret travels over the agents' stdin, never on a command line.
//!
//! Deliberately absent: tensors, Python, any thread but the one that writes output, the rendezvous server's, and the one that
//! asks for the hosts of an elastic job.

#![deny(unsafe_code)]

mod agent;
pub mod args;
mod check_build;
mod config_file;
mod console;
mod doctor;
pub mod elastic;
mod environment;
pub mod frames;
pub mod hosts;
mod io;
mod job;
mod launch;
mod leash;
mod link;
mod log;
mod options;
mod output;
mod platform;
mod preflight;
mod rank_exec;
mod ranks;
mod remote;
mod rendezvous;
mod report;
mod signals;
mod stdin;

use std::ffi::OsString;
use std::io::Write;

/// Runs `horovodrun` with these words after the program's name; the exit code.
pub fn run(words: &[OsString]) -> u8 {
    match words.first().and_then(|word| word.to_str()) {
        Some(agent::SUBCOMMAND) => return finish(agent::run().map(|()| 0)),
        Some(rank_exec::SUBCOMMAND) => {
            let (why, code) = rank_exec::run(&words[1..]);
            complain(&why);
            return code;
        }
        _ => {}
    }
    let options = match args::parse(words) {
        Ok(options) => options,
        Err(error) => {
            complain_raw(&format!("{}\nhorovodrun: error: {error}\n", args::usage()));
            return 2;
        }
    };
    if options.help {
        return show(&args::help());
    }
    if options.version {
        return show(&format!("{}\n", env!("CARGO_PKG_VERSION")));
    }
    for note in &options.notes {
        complain(&format!("note: {note}"));
    }
    if options.check_build {
        return show(&check_build::report(options.verbose));
    }
    if let Some(form) = options.doctor {
        return finish_launch(doctor::run(&options, form));
    }
    finish_launch(launch::run(&options))
}

/// What was given wrongly and is only noticed by now ends like a wrong option.
fn finish_launch(result: Result<u8, launch::LaunchError>) -> u8 {
    match result {
        Err(error) if error.is_wrong_call() => {
            complain(&format!("error: {error}"));
            2
        }
        result => finish(result),
    }
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
    complain_raw(&format!("horovodrun: {text}\n"));
}

fn complain_raw(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

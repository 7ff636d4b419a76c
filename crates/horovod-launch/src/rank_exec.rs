//! The last step before a rank's program: leave the agent's session, be killed if the agent dies, execute.
//!
//! It is a program of its own (a hidden subcommand) so that no code has to run between fork and exec.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Name of the hidden subcommand.
pub(crate) const SUBCOMMAND: &str = "__rank";

/// `words`: the agent's process id, the program, its arguments. Returns why the program was not executed.
pub(crate) fn run(words: &[OsString]) -> (String, u8) {
    let [agent, program, arguments @ ..] = words else {
        return ("this subcommand is for horovodrun itself".to_owned(), 2);
    };
    let Some(agent) = agent.to_str().and_then(|text| text.parse().ok()) else {
        return ("this subcommand is for horovodrun itself".to_owned(), 2);
    };
    // Fails only for a process that already leads its group, which is as good.
    let _ = rustix::process::setsid();
    if let Err(error) = crate::platform::die_with_parent(agent) {
        return (format!("not started: {error}"), 1);
    }
    let error = Command::new(program).args(arguments).exec();
    let code = if error.kind() == std::io::ErrorKind::NotFound {
        127
    } else {
        126
    };
    (
        format!("cannot run {}: {error}", program.to_string_lossy()),
        code,
    )
}

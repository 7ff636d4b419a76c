//! Standard input: for rank 0 if it runs on this host; all other ranks read an empty one.
//!
//! Rank 0 gets the very file, pipe or terminal, so that nothing is read ahead of it or copied.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};

use crate::environment;

/// Lets the agent that `command` starts inherit the launcher's standard input; to be dropped once it runs.
pub(crate) fn lend(command: &mut Command) -> Option<OwnedFd> {
    let stdin = io::stdin();
    if !is_ours(&stdin) {
        return None;
    }
    // Unlike the standard library's, this copy stays open in a program that is executed.
    let copy = rustix::io::dup(stdin.as_fd()).ok()?;
    command.env(environment::STDIN, copy.as_raw_fd().to_string());
    Some(copy)
}

/// A terminal belongs to the programs in its foreground only: with `&` the shell goes on reading from it.
fn is_ours(stdin: &io::Stdin) -> bool {
    !rustix::termios::isatty(stdin)
        || rustix::termios::tcgetpgrp(stdin).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// In the agent: standard input of this rank.
pub(crate) fn of_rank(rank: u32) -> Stdio {
    let lent = (rank == 0).then(environment::lent_stdin).flatten();
    // What cannot be opened again, such as a socket, is left alone.
    lent.and_then(|fd| File::open(format!("/dev/fd/{fd}")).ok())
        .map_or_else(Stdio::null, Stdio::from)
}

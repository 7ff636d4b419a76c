//! Standard input: for rank 0 if it runs on this host; all other ranks read an empty one.
//!
//! Rank 0 gets the very file, pipe or terminal, so that nothing is read ahead of it or copied.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
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

/// Whether this is Python that reads its script from the standard input: `python -`, or without a script.
pub(crate) fn gives_script(command: &[OsString]) -> bool {
    let mut words = command.iter().map(|word| word.as_bytes());
    let program = words.next().unwrap_or_default();
    let name = program.rsplit(|b| *b == b'/').next().unwrap_or_default();
    let is_version = |rest: &[u8]| rest.iter().all(|b| b.is_ascii_digit() || *b == b'.');
    if !name.strip_prefix(b"python").is_some_and(is_version) {
        return false;
    }
    while let Some(word) = words.next() {
        match word {
            b"-" => return true,
            b"-W" | b"-X" | b"--check-hash-based-pycs" => {
                words.next();
            }
            // Of these Python prints something and ends.
            b"-V" | b"-VV" | b"-h" | b"-?" => return false,
            [b'-', b'-', ..] => return false,
            // One option or several: with these the rest is a script or names one.
            [b'-', options @ ..] => {
                if options.contains(&b'c') || options.contains(&b'm') {
                    return false;
                }
            }
            _ => return false,
        }
    }
    true
}

/// In the agent: standard input of this rank.
pub(crate) fn of_rank(rank: u32) -> Stdio {
    let lent = (rank == 0).then(environment::lent_stdin).flatten();
    // Input that cannot be opened again, such as a socket, is not passed on.
    lent.and_then(|fd| File::open(format!("/dev/fd/{fd}")).ok())
        .map_or_else(Stdio::null, Stdio::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_that_reads_its_script_from_the_standard_input_is_known() {
        let gives = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(Into::into).collect();
            gives_script(&words)
        };
        for line in [
            "python -",
            "/a/b/python3.11 -u -X dev - --epochs 3",
            "python3",
            "python -W ignore -u",
            "python -i",
        ] {
            assert!(gives(line), "{line}");
        }
        for line in [
            "python train.py -",
            "python -c 1 -",
            "python -um pytest",
            "python -V",
            "python --version",
            "python3-config",
            "cat -",
            "bash",
        ] {
            assert!(!gives(line), "{line}");
        }
    }
}

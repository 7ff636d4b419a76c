//! MPI's launcher as a process: its output, its end, and signals to its group.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::frames::ExitStatus;
use crate::io::{Got, Interest, read_some, set_nonblocking, wait};
use crate::launch_error::LaunchError;
use crate::report::Cause;

/// Bytes of the launcher's own output that are kept for errors.
const OUTPUT_TAIL_BYTES_MAX: usize = 32 << 10;
/// How long the launcher may take to end after all agents have ended, and after SIGTERM.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Time between two polls of the launcher's exit status.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// MPI's launcher as a child of this process, and the group of processes that the child leads.
pub(crate) struct MpiLauncher {
    name: String,
    child: Child,
    output: Arc<File>,
    output_tail: Arc<Mutex<Vec<u8>>>,
}

impl MpiLauncher {
    pub(super) fn start(name: String, mut command: Command) -> Result<Self, LaunchError> {
        let cannot = |error| LaunchError::Cannot {
            what: format!("{name} cannot be started"),
            error,
        };
        let (reader, writer) = io::pipe().map_err(cannot)?;
        let output = File::from(OwnedFd::from(reader));
        set_nonblocking(&output)?;
        let child = command
            // Away from the terminal's group: Ctrl-C is this launcher's to pass on.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(writer.try_clone().map_err(cannot)?)
            .stderr(writer)
            .spawn()
            .map_err(cannot)?;
        // The command holds copies of the pipe's end for writing.
        drop(command);
        Ok(Self {
            name,
            child,
            output: Arc::new(output),
            output_tail: Arc::default(),
        })
    }

    /// When to look after it again.
    pub(crate) fn interest(&self) -> Interest<'_> {
        Interest::read(self.output.as_fd())
    }

    /// Waits for the exit, and returns the output and the status; `None` after this time.
    pub(super) fn answer(mut self, within: Duration) -> io::Result<Option<(String, ExitStatus)>> {
        let deadline = Instant::now() + within;
        while !read(&self.output, &self.output_tail) {
            if Instant::now() >= deadline {
                return Ok(None);
            }
            wait(&[self.interest()], Some(deadline))?;
        }
        self.end(None);
        let status = ExitStatus::from(self.child.wait()?);
        let output_tail = self
            .output_tail
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(Some((
            String::from_utf8_lossy(&output_tail).into_owned(),
            status,
        )))
    }

    /// Why no more agents come, once it has ended.
    pub(crate) fn failure(&mut self) -> Option<String> {
        if !read(&self.output, &self.output_tail) {
            return None;
        }
        self.end(None);
        let status = self.child.try_wait().ok().flatten().map(ExitStatus::from);
        let how = status.map_or_else(|| "ended".to_owned(), |status| Cause::Exit(status).text());
        Some(format!(
            "{} {how} before all processes were there{}",
            self.name,
            self.output_text()
        ))
    }

    /// The last output of the launcher, for the end of a message.
    pub(crate) fn output_text(&self) -> String {
        let output_tail = self
            .output_tail
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&output_tail);
        let lines = text.lines().map(str::trim);
        let lines: Vec<&str> = lines
            .filter(|line| !line.chars().all(|c| "-=".contains(c)))
            .collect();
        match lines.is_empty() {
            true => String::new(),
            false => format!("; its output: {}", lines.join(" ")),
        }
    }

    /// Goes on reading in a thread of its own, so that a full pipe never stops it.
    pub(super) fn drain(&self) -> io::Result<()> {
        let (output, output_tail) = (Arc::clone(&self.output), Arc::clone(&self.output_tail));
        let thread = std::thread::Builder::new().name("mpi".to_owned());
        thread.spawn(move || {
            while !read(&output, &output_tail) {
                let _ = wait(&[Interest::read(output.as_fd())], None);
            }
        })?;
        Ok(())
    }

    /// Waits for its end after this signal, then after SIGTERM, then kills it.
    pub(super) fn end(&mut self, first: Option<Signal>) {
        for signal in [first, Some(Signal::TERM)] {
            if let Some(signal) = signal {
                self.signal(signal);
            }
            let deadline = Instant::now() + END_LIMIT;
            while Instant::now() < deadline {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                let _ = wait(&[], Some(Instant::now() + POLL_INTERVAL));
            }
        }
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }

    /// To the whole group: the program may be a script that has started the launcher itself.
    fn signal(&mut self, signal: Signal) {
        // Once it has been waited for, the number may be another's.
        if matches!(self.child.try_wait(), Ok(None)) {
            let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
            let _ = group.map(|group| kill_process_group(group, signal));
        }
    }
}

impl Drop for MpiLauncher {
    fn drop(&mut self) {
        self.end(Some(Signal::TERM));
    }
}

/// Keeps the end of what is there; whether all has been read.
fn read(output: &File, output_tail: &Mutex<Vec<u8>>) -> bool {
    let mut buffer = [0; 4096];
    let mut output = output;
    loop {
        match read_some(&mut output, &mut buffer) {
            Got::Bytes(count) => {
                let mut output_tail = output_tail.lock().unwrap_or_else(PoisonError::into_inner);
                output_tail.extend_from_slice(&buffer[..count]);
                let surplus = output_tail.len().saturating_sub(OUTPUT_TAIL_BYTES_MAX);
                output_tail.drain(..surplus);
            }
            Got::Nothing => return false,
            Got::End => return true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_that_is_a_script_ends_with_all_it_has_started() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "(sleep 60; echo late) & echo early; wait"]);
        let mut started = MpiLauncher::start("sh".to_owned(), command).expect("a shell");
        while !started
            .output_tail
            .lock()
            .expect("no panic")
            .contains(&b'\n')
        {
            wait(&[started.interest()], None).expect("a wait");
            assert!(!read(&started.output, &started.output_tail), "it goes on");
        }
        started.signal(Signal::KILL);
        // The end of the pipe that both hold.
        while !read(&started.output, &started.output_tail) {
            wait(&[started.interest()], None).expect("a wait");
        }
        assert_eq!(*started.output_tail.lock().expect("no panic"), b"early\n");
    }
}

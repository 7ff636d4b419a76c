//! The ranks of one host as processes: spawn, read, signal, reap.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, WaitOptions};

use crate::frames::{ExitStatus, JobSpec, OUTPUT_BYTES_MAX, RankSpec, Stop, Stream};
use crate::io::{Got, read_some, set_nonblocking};
use crate::platform::{SEES_DESCENDANTS, descendants, is_stopped};
use crate::rank_exec;

/// Bytes taken from a dead rank's pipe at most: more than a pipe holds unless a descendant goes on writing.
const LAST_BYTES_MAX: usize = 1 << 20;

#[derive(Debug)]
struct RankProcess {
    rank: u32,
    pid: Pid,
    status: Option<ExitStatus>,
    pipes: [Option<File>; 2],
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    all: Vec<RankProcess>,
}

impl Ranks {
    /// Starts one rank; its process id.
    pub(crate) fn spawn(&mut self, job: &JobSpec, spec: &RankSpec) -> io::Result<u32> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(rank_exec::SUBCOMMAND)
            .arg(std::process::id().to_string())
            .args(&job.command)
            .env_clear()
            .envs(job.env.iter().map(|(name, value)| (name, value)))
            .env("PWD", &job.cwd)
            .envs(spec.env.iter().map(|(name, value)| (name, value)))
            .current_dir(&job.cwd)
            .stdin(crate::stdin::of_rank(spec.rank))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let pipe = |fd: Option<OwnedFd>| -> io::Result<Option<File>> {
            let file = fd.map(File::from);
            file.as_ref().map(set_nonblocking).transpose()?;
            Ok(file)
        };
        let pipes = [
            pipe(child.stdout.take().map(OwnedFd::from))?,
            pipe(child.stderr.take().map(OwnedFd::from))?,
        ];
        // From here on it is reaped by `reap`, like everything that becomes a child of this process.
        let pid = Pid::from_child(&child);
        self.all.push(RankProcess {
            rank: spec.rank,
            pid,
            status: None,
            pipes,
        });
        Ok(child.id())
    }

    /// Open pipes.
    pub(crate) fn pipes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all
            .iter()
            .flat_map(|rank| rank.pipes.iter().flatten().map(AsFd::as_fd))
    }

    /// One piece of each stream that has some.
    pub(crate) fn read(&mut self) -> Vec<(u32, Stream, Vec<u8>)> {
        let mut buffer = vec![0; OUTPUT_BYTES_MAX];
        let mut pieces = Vec::new();
        for rank in &mut self.all {
            for stream in Stream::BOTH {
                if let Some(bytes) = rank.read(stream, &mut buffer) {
                    pieces.push((rank.rank, stream, bytes));
                }
            }
        }
        pieces
    }

    /// The output left in the pipes of a rank that ended. The pipes stay open: a descendant may still write.
    pub(crate) fn drain(&mut self, rank: u32) -> Vec<(Stream, Vec<u8>)> {
        let mut buffer = vec![0; OUTPUT_BYTES_MAX];
        let mut pieces = Vec::new();
        for process in self.all.iter_mut().filter(|process| process.rank == rank) {
            for stream in Stream::BOTH {
                let mut total = 0;
                while total < LAST_BYTES_MAX
                    && let Some(bytes) = process.read(stream, &mut buffer)
                {
                    total += bytes.len();
                    pieces.push((stream, bytes));
                }
            }
        }
        pieces
    }

    /// Whether every rank has ended.
    pub(crate) fn all_ended(&self) -> bool {
        self.all.iter().all(|rank| rank.status.is_some())
    }

    /// The ranks that have not ended.
    pub(crate) fn running(&self) -> Vec<u32> {
        let running = self.all.iter().filter(|rank| rank.status.is_none());
        running.map(|rank| rank.rank).collect()
    }

    /// Whether anything that the ranks started still runs, once they have ended.
    pub(crate) fn has_leftovers(&self) -> bool {
        if SEES_DESCENDANTS {
            return !descendants().is_empty();
        }
        self.all
            .iter()
            .any(|rank| rustix::process::test_kill_process_group(rank.pid).is_ok())
    }

    /// Takes the exit statuses that came, also those of orphans that became children of this process.
    pub(crate) fn reap(&mut self) -> Vec<(u32, ExitStatus)> {
        let mut ended = Vec::new();
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let status = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => ExitStatus::Code(code),
                (None, Some(signal)) => ExitStatus::Signal(signal),
                (None, None) => continue,
            };
            if let Some(rank) = self
                .all
                .iter_mut()
                .find(|r| r.pid == pid && r.status.is_none())
            {
                rank.status = Some(status);
                ended.push((rank.rank, status));
            }
        }
        ended
    }

    /// Drops what is known of ranks that ended and whose pipes are closed.
    pub(crate) fn forget_ended(&mut self) {
        let is_open = |rank: &RankProcess| rank.pipes.iter().any(Option::is_some);
        self.all.retain(|r| r.status.is_none() || is_open(r));
    }

    /// Signals the process group of one rank, if it runs.
    pub(crate) fn signal_rank(&self, rank: u32, how: Stop) {
        let running = self.all.iter().filter(|r| r.status.is_none());
        for process in running.filter(|r| r.rank == rank) {
            process.signal(how);
        }
    }

    /// Returns whether a signal has stopped a rank. `pid` is the process that the rank reports: a script may have started
    /// it. In a container a process does not know its number outside, so then the process that was started here counts.
    pub(crate) fn is_stopped(&self, rank: u32, pid: u32) -> bool {
        let mut running = self.all.iter().filter(|r| r.status.is_none());
        let Some(process) = running.find(|r| r.rank == rank) else {
            return false;
        };
        let is_its_own = |pid: &Pid| {
            let group = rustix::process::getpgid(Some(*pid));
            group.is_ok_and(|group| group == process.pid) && descendants().contains(pid)
        };
        let named = i32::try_from(pid).ok().and_then(Pid::from_raw);
        is_stopped(named.filter(is_its_own).unwrap_or(process.pid))
    }

    /// Ends what a rank has left in its process group; the group's number cannot have been given to others while
    /// it has members that descend from this process.
    pub(crate) fn end_group_of(&self, rank: u32) {
        let Some(process) = self.all.iter().find(|r| r.rank == rank) else {
            return;
        };
        for pid in descendants() {
            if rustix::process::getpgid(Some(pid)).is_ok_and(|group| group == process.pid) {
                // A stopped process cannot handle SIGTERM.
                let signal = match is_stopped(pid) {
                    true => Signal::KILL,
                    false => Signal::TERM,
                };
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
    }

    /// Signals the process group of every rank that runs; once none does, or to kill, all descendants.
    pub(crate) fn signal(&self, how: Stop) {
        let signal = signal_of(how);
        // An id that is not reaped, or whose group has members, cannot belong to anybody else.
        for rank in self
            .all
            .iter()
            .filter(|rank| rank.status.is_none() || !SEES_DESCENDANTS)
        {
            rank.signal(how);
        }
        if how == Stop::Kill || self.all_ended() {
            for pid in descendants() {
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
    }
}

fn signal_of(how: Stop) -> Signal {
    match how {
        Stop::Interrupt => Signal::INT,
        Stop::Terminate => Signal::TERM,
        Stop::Kill => Signal::KILL,
    }
}

impl RankProcess {
    fn signal(&self, how: Stop) {
        let is_running = self.status.is_none();
        // A stopped process cannot handle SIGTERM.
        let how = match how {
            Stop::Terminate if is_running && is_stopped(self.pid) => Stop::Kill,
            how => how,
        };
        let signal = signal_of(how);
        if rustix::process::kill_process_group(self.pid, signal).is_err() && is_running {
            // It has not made its own group yet.
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }

    fn read(&mut self, stream: Stream, buffer: &mut [u8]) -> Option<Vec<u8>> {
        let slot = &mut self.pipes[stream.index()];
        match read_some(slot.as_mut()?, buffer) {
            Got::Bytes(count) => Some(buffer[..count].to_vec()),
            Got::Nothing => None,
            Got::End => {
                *slot = None;
                None
            }
        }
    }
}
